"""Layers that multiply in low precision and keep full-precision master weights.

A layer changes its class in place, which preserves its name, parameters, hooks and tied weights:

    nn.Linear       QuantizedLinear        y = qa(x) qw(W)^T + b
    Conv1D          QuantizedConv1D        y = qa(x) qw(W) + b, the weight of GPT-2's linear layers is (in, out)
    nn.Embedding    QuantizedEmbedding     rows of qw(W); QuantizedEmbeddingBag: their sums or means
    a subclass      RoundedSubclass        its own forward pass on qa(x) and qw(W)

The backward pass multiplies the output gradient by the rounded factors of the forward pass, qw(W) and qa(x)
(straight-through). If a gradient format is set, the output gradient is rounded first.
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

from scantling.conv1d import is_conv1d, is_conv1d_subclass
from scantling.numerics.torch_private import own_parameters
from scantling.precision.matmul import Matmul
from scantling.precision.matrices import as_matrix, from_matrix
from scantling.precision.quantizer import Quantizer


@dataclass(frozen=True)
class LayerFormats:
    """Formats of one layer; None leaves a part unquantized.

    Attributes:
        weights: format of the weight; granularity `channel` gives one scale per output.
        activations: format of the input; its features are the channels.
        gradients: format of the output gradient in the backward products; its features are the channels.
        hardware: int8 or fp8 products of the hardware; None simulates products.
    """

    weights: Quantizer | None = None
    activations: Quantizer | None = None
    gradients: Quantizer | None = None
    hardware: Matmul | None = None

    def __str__(self) -> str:
        """Return the formats as they are printed with the model."""
        given = {name: getattr(self, name) for name in ("weights", "activations", "gradients")}
        given |= {"compute": None if self.hardware is None else self.hardware.name}
        return ", ".join(f"{name}={each}" for name, each in given.items() if each is not None)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return y = x W^T + bias in these formats: (..., in) by (out, in) to (..., out)."""
        if self.hardware is not None and self.activations is not None and self.weights is not None:
            y = self.hardware(
                x, weight.t(), activations=self.activations, weights=self.weights, gradients=self.gradients
            )
            return y if bias is None else y + bias.to(y.dtype)
        x, weight = self.input(x), self.matrix(weight)
        if self.gradients is None:
            return nn.functional.linear(x, weight, bias)
        # The bias is added after the gradient rounding, so that its own gradient is not rounded.
        y = self.output(nn.functional.linear(x, weight))
        return y if bias is None else y + bias.to(y.dtype)

    @property
    def matmul(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Hardware product of (..., k) and a merged block (k, n) of TT cores; None if products are simulated.

        The cores, the layer's input and its output gradient have been rounded to the layer's formats before. Merged
        blocks of several cores and intermediate results use the widest format of the hardware product, since the
        layer's formats would lose more there.
        """
        if self.hardware is None:
            return None
        by_row = self.hardware.by_row
        gradients = None if self.gradients is None else by_row
        return partial(self.hardware, activations=by_row, weights=self.hardware.by_column, gradients=gradients)

    def input(self, x: Tensor) -> Tensor:
        """Quantize the input of a layer."""
        return x if self.activations is None else self.activations(x, axis=-1)

    def matrix(self, weight: Tensor) -> Tensor:
        """Quantize the weight of a layer, (out, in)."""
        return weight if self.weights is None else self.weights(weight, axis=0)

    def core(self, core: Tensor) -> Tensor:
        """Quantize a core (r, modes..., r') of a TT layer, as the matrix (r modes..., r')."""
        if self.weights is None:
            return core
        return from_matrix(self.matrix(as_matrix(core, channels_last=True)), core.shape, channels_last=True)

    def output(self, y: Tensor) -> Tensor:
        """Quantize the gradient of a layer's output in the backward pass; the output itself does not change."""
        if self.gradients is None or not y.requires_grad:
            return y
        return _RoundedGradient.apply(y, self.gradients)  # type: ignore[no-any-return,no-untyped-call]

    def rows(
        self, table: Tensor, indices: Tensor, looked_up: Tensor, padding_idx: int | None, scale_grad_by_freq: bool
    ) -> Tensor:
        """Quantize the looked-up rows of a table, to the values that they have when the whole table is quantized.

        Args:
            table: (num_embeddings, embedding_dim).
            indices: indices of the rows.
            looked_up: the rows before rounding, (..., embedding_dim).
            padding_idx: index of the row that receives no gradient.
            scale_grad_by_freq: True to divide the gradient of a row by the number of its lookups.
        """
        if self.weights is None:
            return looked_up
        if self.weights.granularity == "tensor" or self.weights.scales == "fp8":  # one scale spans all rows
            rounded = self.matrix(table)
            return nn.functional.embedding(indices, rounded, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
        # Each row has its own scale or its own groups: rounding only the looked-up rows gives the same values.
        by_row = self.weights if self.weights.granularity == "group" else self.weights.with_granularity("token")
        return by_row(looked_up)


class RoundedWeight:
    """Mixin of quantized layers: `layer.weight` is rounded wherever a model reads it.

    Some models use the weight of a layer that they never call: Mamba's `dt_proj`, `out_proj` of
    `nn.MultiheadAttention`, fused kernels. During a forward pass of the layer's own class or of any module that
    contains it, `layer.weight` is the rounded weight. Outside of forward passes it is the parameter, which optimizers
    and checkpoints hold.
    """

    formats: LayerFormats
    plain: ClassVar[type]

    @property
    def weight(self) -> Tensor:
        return self.rounded_weight() if _in_forward() else self.master_weight()

    @weight.setter
    def weight(self, value: Tensor) -> None:  # for non-parameters, such as DataParallel's replicas
        vars(self)["weight"] = value

    def master_weight(self) -> Tensor:
        """Return the weight that is trained, not rounded."""
        parameter = own_parameters(self).get("weight")  # type: ignore[arg-type]
        return vars(self)["weight"] if parameter is None else parameter

    def rounded_weight(self) -> Tensor:
        """Return the rounded weight that the layer computes with."""
        return self.formats.matrix(self.master_weight())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.formats}"  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.plain,), vars(self)  # dynamically created classes cannot be pickled by name


class QuantizedLinear(RoundedWeight, nn.Linear):
    """Low-precision `nn.Linear`, made by `quantize_training`."""

    plain: ClassVar[type] = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        # `product` rounds both factors itself, so it gets the unrounded weight
        return self.formats.product(input, self.master_weight(), self.bias)


class QuantizedEmbedding(RoundedWeight, nn.Embedding):
    """Low-precision `nn.Embedding`, made by `quantize_training`; if one scale spans all rows, gradients are dense."""

    plain: ClassVar[type] = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        table = self.master_weight()
        looked_up = nn.functional.embedding(
            input, table, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )
        return self.formats.rows(table, input, looked_up, self.padding_idx, self.scale_grad_by_freq)


class QuantizedEmbeddingBag(RoundedWeight, nn.EmbeddingBag):
    """Low-precision `nn.EmbeddingBag`, made by `quantize_training`; each forward pass rounds the whole table."""

    plain: ClassVar[type] = nn.EmbeddingBag

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        # max_norm rescales the master rows in place, as nn.EmbeddingBag does, before the table is rounded.
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
    """Low-precision layer of a subclass with a custom forward pass: input and weight are rounded.

    Products are simulated, since the forward pass of the subclass is not ours to change.
    """

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        # integer inputs are indices of an embedding
        x = self.formats.input(input) if input.is_floating_point() else input
        with in_forward(self):
            y = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return self.formats.output(y) if isinstance(y, Tensor) else y


class _RoundedConv1D(RoundedWeight):
    """Mixin of layers whose weight is (in, out), for the Conv1D of transformers."""

    def rounded_weight(self) -> Tensor:
        # (in, out) -> (out, in), so that one scale per row is one per output, and back
        return self.formats.matrix(self.master_weight().t()).t()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.formats})"


class QuantizedConv1D(_RoundedConv1D):
    """Low-precision `Conv1D`; `quantized_class` combines it with the class of transformers, which is not imported."""

    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.formats.product(x, self.master_weight().t(), self.bias)


class RoundedConv1DSubclass(_RoundedConv1D, RoundedSubclass):
    """Low-precision subclass of `Conv1D` with a custom forward pass."""


_CLASSES: dict[type, type] = {each.plain: each for each in (QuantizedLinear, QuantizedEmbedding, QuantizedEmbeddingBag)}


@cache
def quantized_class(plain: type) -> type:
    """Return the quantized class that a layer of class `plain` changes to.

    Args:
        plain: `nn.Linear`, `nn.Embedding`, `nn.EmbeddingBag`, the Conv1D of transformers, or a subclass.
    """
    if plain in _CLASSES:
        return _CLASSES[plain]
    if is_conv1d_subclass(plain):
        mixin: type = QuantizedConv1D if is_conv1d(plain) else RoundedConv1DSubclass
    else:
        base = next(each for each in _CLASSES if issubclass(plain, each))
        # a subclass that inherits its forward pass computes the same as the base class
        mixin = _CLASSES[base] if plain.forward is base.forward else RoundedSubclass  # type: ignore[attr-defined]
    return type(f"Quantized{plain.__name__}", (mixin, plain), {"plain": plain})


def _rebuild(plain: type) -> Any:
    """Return an empty layer, for copies and pickles."""
    kind: Any = quantized_class(plain)
    return kind.__new__(kind)


_thread = threading.local()


def _active_modules() -> weakref.WeakSet[Any]:
    """Return the modules whose forward passes are running in this thread."""
    if not hasattr(_thread, "modules"):
        _thread.modules = weakref.WeakSet()
    return _thread.modules  # type: ignore[no-any-return]


def _in_forward() -> bool:
    """True during a forward pass of a module that contains a quantized layer, and while compiling."""
    return torch.compiler.is_compiling() or bool(_active_modules())


@contextmanager
def in_forward(module: Any) -> Iterator[None]:
    """Treat the body of the `with` statement as a forward pass of a module."""
    enter_forward(module)
    try:
        yield
    finally:
        leave_forward(module)


def enter_forward(module: Any, *_: Any) -> None:
    """Mark the start of a forward pass (a forward pre-hook)."""
    if not torch.compiler.is_compiling():
        _active_modules().add(module)


def leave_forward(module: Any, *_: Any) -> None:
    """Mark the end of a forward pass (a forward hook)."""
    if not torch.compiler.is_compiling():
        _active_modules().discard(module)


class _RoundedGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, quantizer: Quantizer) -> Tensor:
        return y.clone()  # a view would forbid in-place additions to the output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.quantizer = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.quantizer(grads[0], axis=-1), None
