"""Products with two factors on a GPU, y = (x A) B + b, by one kernel forward and three backward.

Torch takes two launches forward and five backward, and writes and reads x A between them. Whether the kernels are
faster depends on the shape and on the GPU, so both are timed once for each shape, see `scantling.tensor.costs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scantling.numerics.device import device_context, without_autocast
from scantling.tensor.contraction import Step
from scantling.tensor.costs import is_faster
from scantling.tensor.launches import (
    MAX_RANK,
    TOKEN_TILE,
    PartialSums,
    chunk_side,
    launch_dtype,
    num_splits,
    precision,
    tile_side,
    with_dense_rows,
)
from scantling.tensor.layer import without_saving_hooks


def fused_product(x: Tensor, blocks: Sequence[Tensor], steps: Sequence[Step], bias: Tensor | None) -> Tensor | None:
    """Return x contracted with merged blocks, as `contract`, if the order is y = (x A) B + b: (tokens, outputs).

    Args:
        x: (tokens, inputs).
        blocks: merged blocks of the steps.
        steps: steps of the order.
        bias: (outputs,), or None.

    Returns:
        None for other orders, if the kernels cannot run here, or if they are slower than torch's operations.
    """
    dtype = launch_dtype(x)
    if (
        dtype is None
        or len(steps) != 2
        or any(step.leading * step.trailing > 1 for step in steps)
        or steps[1].inner > MAX_RANK
    ):
        return None
    a, b = (block.reshape(step.inner, step.width) for block, step in zip(blocks, steps, strict=True))
    if not _is_faster(x, a, b, bias, dtype):
        return None
    operands = [None if value is None else value.to(dtype) for value in (x, a, b, bias)]
    with without_autocast(x.device):
        y: Tensor = _LowRankProduct.apply(*operands)  # type: ignore[no-untyped-call]
    return y


def _is_faster(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """True if the kernels take less time than torch's operations for this shape, with tokens up to a power of 2."""
    tokens = 1 << (x.shape[0] - 1).bit_length()
    shapes = (tokens, x.shape[1]), a.shape, b.shape

    def work(function: Callable[..., Tensor]) -> Callable[[], object]:
        drawn: list[Tensor | None] = [torch.zeros(shape, dtype=dtype, device=x.device) for shape in shapes]
        drawn.append(None if bias is None else torch.zeros(b.shape[1], dtype=dtype, device=x.device))
        trained = [value.requires_grad_() for value in drawn if value is not None]
        upstream = torch.zeros(tokens, b.shape[1], dtype=dtype, device=x.device)
        return lambda: torch.autograd.grad(function(*drawn), trained, upstream)

    name = f"product {tokens} x {x.shape[1]} x {a.shape[1]} x {b.shape[1]}, {dtype}, bias {bias is not None}"
    with without_saving_hooks():  # a checkpoint would count the tensors that the work saves
        return is_faster(x.device, name, lambda: work(_LowRankProduct.apply), lambda: work(_in_torch))


def _in_torch(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return x @ a @ b if bias is None else torch.addmm(bias, x @ a, b)


class _LowRankProduct(torch.autograd.Function):
    """y = (x A) B + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        x, a, b = map(with_dense_rows, (x, a, b))
        (tokens, inputs), (rank, outputs) = x.shape, b.shape
        h, y = x.new_empty(tokens, rank), x.new_empty(tokens, outputs)
        given = x, a, b, x if bias is None else bias
        _launch_tiles("low_rank_product", given, h, y, (tokens, inputs, rank, outputs), has_bias=bias is not None)
        ctx.save_for_backward(x, a, b, h)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, h = ctx.saved_tensors
        grad = with_dense_rows(grad)
        (tokens, inputs), (rank, outputs) = x.shape, b.shape
        h_grad, x_grad = torch.empty_like(h), x.new_empty(tokens, inputs)
        _launch_tiles("low_rank_input_gradient", (grad, a, b), h_grad, x_grad, (tokens, inputs, rank, outputs))
        needs_a, needs_b, needs_bias = ctx.needs_input_grad[1:]
        a_grad = _outer_sums(h_grad, x, has_sums=False)[0].t() if needs_a else None
        b_grad, bias_grad = _outer_sums(h, grad, has_sums=ctx.has_bias) if needs_b or needs_bias else (None, None)
        return x_grad, a_grad, b_grad, bias_grad


def _launch_tiles(
    name: str, given: tuple[Tensor, ...], state: Tensor, out: Tensor, sizes: tuple[int, ...], **options: bool
) -> None:
    """Launch a kernel whose programs have a tile of tokens and some chunks of the output."""
    # Import late: the kernels need Triton, which is optional.
    from scantling.tensor import kernels

    rank_tile = tile_side(state.shape[1])
    chunk_tile = chunk_side(rank_tile)
    num_tiles, num_chunks = -(-out.shape[0] // TOKEN_TILE), -(-out.shape[1] // chunk_tile)
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
            precision=precision(),
            token_tile=TOKEN_TILE,
            chunk_tile=chunk_tile,
            rank_tile=rank_tile,
        )


def _outer_sums(left: Tensor, right: Tensor, *, has_sums: bool) -> tuple[Tensor, Tensor | None]:
    """Return left^T right, (rank, width), and the column sums of `right`."""
    from scantling.tensor import kernels

    (tokens, rank), width = left.shape, right.shape[1]
    rank_tile = tile_side(rank)
    chunk_tile = chunk_side(rank_tile)
    num_tiles, num_chunks = -(-tokens // TOKEN_TILE), -(-width // chunk_tile)
    splits = num_splits(num_tiles, num_chunks)
    found = PartialSums(left, splits, [(rank, width), (width,)])
    with device_context(left):
        kernels.outer_sums[(num_chunks, splits)](
            *(left, right, *found.parts, tokens, rank, width, left.stride(0), right.stride(0), found.stride),
            -(-num_tiles // splits),
            has_sums=has_sums,
            precision=precision(),
            token_tile=TOKEN_TILE,
            chunk_tile=chunk_tile,
            rank_tile=rank_tile,
        )
    out, sums = found.add()
    return out, sums if has_sums else None
