"""Products with two factors on a GPU, y = (x A) B + b, by one kernel forward and three backward.

Torch takes two launches forward and five backward, and writes and reads x A between them. Whether the kernels are
faster depends on the shape and on the GPU, so both are timed once for each shape, see `scantling.tensor.costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scantling.numerics.device import device_context, without_autocast
from scantling.tensor.contraction import Step
from scantling.tensor.launches import (
    CHUNK_TILE,
    MAX_RANK,
    PartialSums,
    are_kernels_faster,
    can_multiply,
    launch_dtype,
    needs_torch,
    num_splits,
    precision,
    tile_side,
    timed_tokens,
    torch_gradients,
    with_dense_rows,
)

TOKEN_TILE = 64
"""Tokens that a program computes at once."""


def fused_product(
    layer: nn.Module, x: Tensor, blocks: Sequence[Tensor], steps: Sequence[Step], bias: Tensor | None
) -> Tensor | None:
    """Return x contracted with merged blocks, as `contract`, if the order is y = (x A) B + b: (tokens, outputs).

    Args:
        layer: layer that is called.
        x: (tokens, inputs).
        blocks: merged blocks of the steps.
        steps: steps of the order.
        bias: (outputs,), or None.

    Returns:
        None for other orders, if the kernels cannot run here, or if they are slower than torch's operations.
    """
    dtype = launch_dtype(layer, x)
    if (
        dtype is None
        or len(steps) != 2
        or any(step.leading * step.trailing > 1 for step in steps)
        or steps[1].inner > MAX_RANK
        or not can_multiply(x, [*blocks, bias])
    ):
        return None
    a, b = (block.reshape(step.inner, step.width) for block, step in zip(blocks, steps, strict=True))
    shapes = (timed_tokens(x.shape[0]), x.shape[1]), a.shape, b.shape, None if bias is None else bias.shape
    if not are_kernels_faster("product", _LowRankProduct.apply, _in_torch, shapes, x.new_empty(0, dtype=dtype)):
        return None
    operands = [None if value is None else value.to(dtype) for value in (x, a, b, bias)]
    with without_autocast(x.device):
        y: Tensor = _LowRankProduct.apply(*operands)  # type: ignore[no-untyped-call]
    return y


def _in_torch(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return x @ a @ b if bias is None else torch.addmm(bias, x @ a, b)


class _LowRankProduct(torch.autograd.Function):
    """y = (x A) B + b."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> Tensor:
        x, a, b = map(with_dense_rows, operands[:3])
        bias = operands[3]
        (tokens, inputs), (rank, outputs) = x.shape, b.shape
        h, y = x.new_empty(tokens, rank), x.new_empty(tokens, outputs)
        given = x, a, b, x if bias is None else bias
        _launch_tiles("low_rank_product", given, h, y, (tokens, inputs, rank, outputs), has_bias=bias is not None)
        ctx.save_for_backward(*operands, h)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *operands, h = ctx.saved_tensors
        if needs_torch(grad):
            return (*torch_gradients(_in_torch, operands, ctx.needs_input_grad, grad),)
        x, a, b, grad = map(with_dense_rows, (*operands[:3], grad))
        (tokens, inputs), (rank, outputs) = x.shape, b.shape
        h_grad, x_grad = torch.empty_like(h), x.new_empty(tokens, inputs)
        _launch_tiles("low_rank_input_gradient", (grad, a, b), h_grad, x_grad, (tokens, inputs, rank, outputs))
        needs_a, needs_b, needs_bias = ctx.needs_input_grad[1:]
        a_grad = _outer_sums(h_grad, x, has_sums=False)[0].t() if needs_a else None
        b_grad, bias_grad = _outer_sums(h, grad, has_sums=needs_bias) if needs_b or needs_bias else (None, None)
        return x_grad, a_grad, b_grad, bias_grad


def constants(rank: int) -> dict[str, Any]:
    """Return the constants of a launch at some rank: sides of tiles, and how fp32 values are multiplied."""
    return {
        "precision": precision(),
        "token_tile": TOKEN_TILE,
        "chunk_tile": CHUNK_TILE,
        "rank_tile": tile_side(rank),
    }


def _launch_tiles(
    name: str, given: tuple[Tensor, ...], state: Tensor, out: Tensor, sizes: tuple[int, ...], **options: bool
) -> None:
    """Launch a kernel whose programs have a tile of tokens and some chunks of the output."""
    # Import late: the kernels need Triton, which is optional.
    from scantling.tensor import kernels

    num_tiles, num_chunks = -(-out.shape[0] // TOKEN_TILE), -(-out.shape[1] // CHUNK_TILE)
    splits = num_splits(num_chunks, num_tiles)
    with device_context(out):
        getattr(kernels, name)[(num_tiles, splits)](
            *given,
            state,
            out,
            *sizes,
            *(value.stride(0) for value in given[:3]),
            -(-num_chunks // splits),
            **options,
            **constants(state.shape[1]),
        )


def _outer_sums(left: Tensor, right: Tensor, *, has_sums: bool) -> tuple[Tensor, Tensor | None]:
    """Return left^T right, (rank, width), and the column sums of `right`."""
    from scantling.tensor import kernels

    (tokens, rank), width = left.shape, right.shape[1]
    num_tiles, num_chunks = -(-tokens // TOKEN_TILE), -(-width // CHUNK_TILE)
    splits = num_splits(num_tiles, num_chunks)
    found = PartialSums(left, splits, [(rank, width), (width,)])
    with device_context(left):
        kernels.outer_sums[(num_chunks, splits)](
            *(left, right, *found.parts, tokens, rank, width, left.stride(0), right.stride(0), found.stride),
            -(-num_tiles // splits),
            has_sums=has_sums,
            **constants(rank),
        )
    out, sums = found.add()
    return out, sums if has_sums else None
