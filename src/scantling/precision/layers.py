"""Layers that multiply in few bits, and keep their weights as they were.

A layer changes its class in place, so that its name, parameters, hooks and ties stay:

    nn.Linear       QuantizedLinear        y = qa(x) qw(W)^T + b
    Conv1D          QuantizedConv1D        y = qa(x) qw(W) + b, see `conv1d.py`
    nn.Embedding    QuantizedEmbedding     rows of qw(W), and their sums or means: QuantizedEmbeddingBag

The backward pass multiplies by what the forward pass did, the gradient of the result times qw(W) and times qa(x)
(straight-through); with a format of gradients, by the rounded gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

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


class QuantizedLinear(nn.Linear):
    """`nn.Linear` in few bits, made by `quantize_training`."""

    plain: ClassVar[type] = nn.Linear
    formats: LayerFormats

    def forward(self, input: Tensor) -> Tensor:
        return self.formats.product(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.formats}"


class QuantizedEmbedding(nn.Embedding):
    """`nn.Embedding` in few bits, made by `quantize_training`; with one scale for all rows gradients are dense."""

    plain: ClassVar[type] = nn.Embedding
    formats: LayerFormats

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        return self.formats.rows(self.weight, input, found, self.padding_idx, self.scale_grad_by_freq)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.formats}"


class QuantizedEmbeddingBag(nn.EmbeddingBag):
    """`nn.EmbeddingBag` in few bits, made by `quantize_training`; each pass rounds the whole table."""

    plain: ClassVar[type] = nn.EmbeddingBag
    formats: LayerFormats

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if self.max_norm is not None:
            torch.embedding_renorm_(self.weight.detach(), input.contiguous(), self.max_norm, self.norm_type)
        return nn.functional.embedding_bag(
            input,
            self.formats.matrix(self.weight),
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

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.formats}"


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
