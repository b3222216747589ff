"""DeMo's exchange of one matrix, block by block and replica by replica: the reference of the batched form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scantling.comm.codec.blocks import divisor_side, even_side
from scantling.comm.codec.dct import basis


def plain_exchange(
    residuals: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    decay: float,
    topk: int,
    chunk: int,
    paper: bool = False,
) -> Tensor:
    """Exchange one matrix between replicas, with coefficients in full precision.

    Args:
        residuals: (rows, cols) of each replica; they are changed in place.
        gradients: of each replica, as they are added, in the published code times the learning rate.
        decay, topk, chunk: as of `MomentumExchange`.
        paper: sides that divide those of the matrix, topk in every block whatever its size, and the mean of a
            coefficient over the replicas that sent it (arXiv 2411.19870, algorithm 1, and its published code).

    Returns:
        The decoded mean, (rows, cols).
    """
    rows, cols = residuals[0].shape
    side = divisor_side if paper else even_side
    height, width = side(rows, chunk), side(cols, chunk)
    size = height * width
    kept = min(topk, size) if paper else max(1, min(size, round(topk * size / chunk**2)))
    like = residuals[0]
    down, across = basis(height, like.device, like.dtype), basis(width, like.device, like.dtype)
    result = torch.zeros_like(like)
    for residual, gradient in zip(residuals, gradients, strict=True):
        residual.mul_(decay).add_(gradient)
    for top in range(0, rows, height):
        for left in range(0, cols, width):
            total, senders = like.new_zeros(size), like.new_zeros(size)
            for residual in residuals:
                part = residual[top : top + height, left : left + width]  # may end before the block does
                block = like.new_zeros(height, width)
                block[: part.shape[0], : part.shape[1]] = part
                coefficients = (down @ block @ across.t()).flatten()
                index = coefficients.abs().topk(kept).indices
                sent = torch.zeros_like(coefficients)
                sent[index] = coefficients[index]
                total += sent
                senders[index] += 1
                back = down.t() @ sent.view(height, width) @ across
                part -= back[: part.shape[0], : part.shape[1]]
            mean = total / (senders.clamp(min=1) if paper else len(residuals))
            back = down.t() @ mean.view(height, width) @ across
            place = result[top : top + height, left : left + width]
            place.copy_(back[: place.shape[0], : place.shape[1]])
    return result
