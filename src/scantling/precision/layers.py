"""Layers that multiply in few bits, and keep their weights as they were.

A layer changes its class in place, so that its name, parameters, hooks and ties stay:

    nn.Linear       QuantizedLinear        y = qa(x) qw(W)^T + b
    Conv1D          QuantizedConv1D        y = qa(x) qw(W) + b, see `conv1d.py`
    nn.Embedding    QuantizedEmbedding     rows of qw(W), and their sums or means: QuantizedEmbeddingBag
    a subclass      RoundedSubclass        its own forward pass, of qa(x) and qw(W)

The backward pass multiplies by what the forward pass did, the gradient of the result times qw(W) and times qa(x)
(straight-through); with a format of gradients, by the rounded gradient.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scantling.kinds import made_from_conv1d
from scantling.precision.matrices import as_matrix, from_matrix
from scantling.precision.products import Multiply
from scantling.precision.quantizer import Quantizer


@dataclass(frozen=True)
class LayerFormats:
    """What is quantised in a layer; None for nothing.

    Attributes:
        weights: with a scale for each output where the granularity is `channel`.
        activations: what comes in, whose features are the channels.
        gradients: of what goes out, before they are multiplied; its features are the channels.
        multiply: products of integers or fp8 in place of simulated ones.
    """

    weights: Quantizer | None = None
    activations: Quantizer | None = None
    gradients: Quantizer | None = None
    multiply: Multiply | None = None

    def __str__(self) -> str:
        """The formats in words, as they are printed with the model."""
        given = {name: getattr(self, name) for name in ("weights", "activations", "gradients")}
        given |= {"compute": None if self.multiply is None else self.multiply.name}
        return ", ".join(f"{name}={each}" for name, each in given.items() if each is not None)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y = x W^T + bias in these formats: (..., in) by (out, in) to (..., out)."""
        if self.multiply is not None and self.activations is not None and self.weights is not None:
            y = self.multiply(
                x, weight.t(), activations=self.activations, weights=self.weights, gradients=self.gradients
            )
            return y if bias is None else y + bias.to(y.dtype)
        x, weight = self.input(x), self.matrix(weight)
        if self.gradients is None:
            return nn.functional.linear(x, weight, bias)
        y = self.output(nn.functional.linear(x, weight))
        return y if bias is None else y + bias.to(y.dtype)

    @property
    def matmul(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The product of the hardware, of (..., k) and a merged block (k, n) of cores; None where it is simulated.

        Cores, what comes in and the gradient of what goes out are rounded to their formats before: a block of several
        cores, and what one product hands to the next, would lose more by these, and takes the widest numbers there are.
        """
        if self.multiply is None:
            return None
        by_row = self.multiply.by_row
        gradients = None if self.gradients is None else by_row
        return partial(self.multiply, activations=by_row, weights=self.multiply.by_column, gradients=gradients)

    def input(self, x: Tensor) -> Tensor:
        """What a layer computes with in place of its input."""
        return x if self.activations is None else self.activations(x, axis=-1)

    def matrix(self, weight: Tensor) -> Tensor:
        """What a layer computes with in place of its weight, (out, in)."""
        return weight if self.weights is None else self.weights(weight, axis=0)

    def core(self, core: Tensor) -> Tensor:
        """What a layer of cores computes with in place of a core (r, modes..., r'), as the matrix (r modes..., r')."""
        if self.weights is None:
            return core
        return from_matrix(self.matrix(as_matrix(core, channels_last=True)), core.shape, channels_last=True)

    def output(self, y: Tensor) -> Tensor:
        """A product, with a gradient that is rounded on its way back."""
        if self.gradients is None or not y.requires_grad:
            return y
        return _RoundedGradient.apply(y, self.gradients)  # type: ignore[no-any-return,no-untyped-call]

    def rows(
        self, table: Tensor, indices: Tensor, found: Tensor, padding_idx: int | None, scale_grad_by_freq: bool
    ) -> Tensor:
        """Rows of a table that were looked up, quantised as the whole table would be.

        Args:
            table: (num_embeddings, embedding_dim).
            indices: of the rows.
            found: the rows, (..., embedding_dim).
            padding_idx: the row that does not learn.
            scale_grad_by_freq: whether the gradient of a row is divided by how often it was looked up.
        """
        if self.weights is None:
            return found
        if self.weights.granularity == "tensor" or self.weights.scales == "fp8":  # a scale of all rows
            whole = self.matrix(table)
            return nn.functional.embedding(indices, whole, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
        by_row = self.weights if self.weights.granularity == "group" else self.weights.by("token")
        return by_row(found)


class RoundedWeight:
    """Mixin of quantized layers: a weight that is rounded wherever a model reads it.

    Some models compute with the weight of a layer that they never call: Mamba's `dt_proj`, `out_proj` of
    `nn.MultiheadAttention`, fused kernels. In a forward pass of any module around the layer, or of its own class,
    `layer.weight` is the rounded weight. Elsewhere it is the parameter, which optimizers and checkpoints hold.
    """

    formats: LayerFormats
    plain: ClassVar[type]

    @property
    def weight(self) -> Tensor:
        return self.rounded_weight() if _in_forward() else self.master_weight()

    @weight.setter
    def weight(self, value: Tensor) -> None:  # of what is no parameter, such as the copy on a device of DataParallel
        vars(self)["weight"] = value

    def master_weight(self) -> Tensor:
        """Return the weight as it is trained."""
        parameters: dict[str, Tensor] = self._parameters  # type: ignore[attr-defined]
        found = parameters.get("weight")
        return vars(self)["weight"] if found is None else found

    def rounded_weight(self) -> Tensor:
        """Return what a layer computes with instead of its weight."""
        return self.formats.matrix(self.master_weight())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.formats}"  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _made_again, (self.plain,), vars(self)  # no module holds the class of a subclass by its name


class QuantizedLinear(RoundedWeight, nn.Linear):
    """`nn.Linear` in few bits, made by `quantize_training`."""

    plain: ClassVar[type] = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        return self.formats.product(input, self.master_weight(), self.bias)


class QuantizedEmbedding(RoundedWeight, nn.Embedding):
    """`nn.Embedding` in few bits, made by `quantize_training`; with one scale for all rows gradients are dense."""

    plain: ClassVar[type] = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        table = self.master_weight()
        found = nn.functional.embedding(
            input, table, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )
        return self.formats.rows(table, input, found, self.padding_idx, self.scale_grad_by_freq)


class QuantizedEmbeddingBag(RoundedWeight, nn.EmbeddingBag):
    """`nn.EmbeddingBag` in few bits, made by `quantize_training`; each pass rounds the whole table."""

    plain: ClassVar[type] = nn.EmbeddingBag

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if self.max_norm is not None:
            table = self.master_weight().detach()
            torch.embedding_renorm_(table, input.contiguous(), self.max_norm, self.norm_type)
        return nn.functional.embedding_bag(
            input,
            self.rounded_weight(),
            offsets,
            None,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )


class RoundedSubclass(RoundedWeight):
    """A subclass of a layer, with a forward pass of its own, in few bits: its input and its weight are rounded.

    Products are simulated, since only the class knows what it multiplies.
    """

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = self.formats.input(input) if input.is_floating_point() else input
        with in_forward(self):
            y = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return self.formats.output(y) if isinstance(y, Tensor) else y


_CLASSES: dict[type, type] = {each.plain: each for each in (QuantizedLinear, QuantizedEmbedding, QuantizedEmbeddingBag)}


@cache
def quantized_class(plain: type) -> type:
    """Return the class that a layer of a class changes to.

    Args:
        plain: `nn.Linear`, `nn.Embedding`, `nn.EmbeddingBag`, the Conv1D of transformers, or a subclass.
    """
    if made_from_conv1d(plain):
        from scantling.precision.conv1d import QuantizedConv1D, RoundedConv1DSubclass

        if plain is QuantizedConv1D.plain:
            return QuantizedConv1D
        return type(f"Quantized{plain.__name__}", (RoundedConv1DSubclass, plain), {"plain": plain})
    base = next(each for each in _CLASSES if issubclass(plain, each))
    if plain.forward is base.forward:  # type: ignore[attr-defined]
        known = _CLASSES[base]
        return known if plain is base else type(f"Quantized{plain.__name__}", (known, plain), {"plain": plain})
    return type(f"Quantized{plain.__name__}", (RoundedSubclass, plain), {"plain": plain})


def _made_again(plain: type) -> Any:
    """Return an empty layer, for copies and pickles."""
    kind: Any = quantized_class(plain)
    return kind.__new__(kind)


_forward = threading.local()


def _active() -> weakref.WeakSet[Any]:
    """Return the modules whose forward passes this thread is in."""
    if not hasattr(_forward, "modules"):
        _forward.modules = weakref.WeakSet()
    return _forward.modules  # type: ignore[no-any-return]


def _in_forward() -> bool:
    """True in a forward pass of a module around a quantized layer, and wherever a model is compiled."""
    return torch.compiler.is_compiling() or bool(_active())


@contextmanager
def in_forward(module: Any) -> Iterator[None]:
    """Count as a forward pass of a module."""
    enter_forward(module)
    try:
        yield
    finally:
        leave_forward(module)


def enter_forward(module: Any, *_: Any) -> None:
    """Note, as a hook before a forward pass, that it begins."""
    if not torch.compiler.is_compiling():
        _active().add(module)


def leave_forward(module: Any, *_: Any) -> None:
    """Note, as a hook after a forward pass, that it is over."""
    if not torch.compiler.is_compiling():
        _active().discard(module)


class _RoundedGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, quantizer: Quantizer) -> Tensor:
        return y.clone()  # and no view, which nothing could be added to in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.quantizer = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.quantizer(grads[0], axis=-1), None
