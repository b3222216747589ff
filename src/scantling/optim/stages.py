"""Equations of CAME as pure stage functions on plain tensors, in place.

Paper: Luo et al., arXiv 2307.02047, Algorithm 2; the equations are numbered as at the top of `came.py`. Each function
works on one tile of a parameter and changes its arguments; `_eager.py` calls them in order, and the C and Triton steps
compute the same. In shape comments (R, C) are the dims of the parameter, (R, 1) the same dims with size 1 along column
dims, (1, C) with size 1 along row dims.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scantling.groups import MatrixDims


def bias_correction(step: Tensor, beta: float, dtype: torch.dtype) -> Tensor:
    """Return 1 - beta^t: 0-D, without the cancellation in fp32 for beta near 1."""
    if beta == 0.0:
        return torch.ones_like(step, dtype=dtype)
    return -torch.expm1(step.to(dtype) * math.log(beta))


def squared(grad: Tensor, dtype: torch.dtype, longest: int = 1) -> Tensor:
    """Return g^2: (R, C), bounded so that a sum of `longest` of them does not overflow; NaN stays NaN.

    2^126 is far above any gradient of a training run. Beyond it a row, a column or a second moment would be Inf, and a
    quotient by its root NaN.
    """
    bound = 2.0 ** (1022 if dtype == torch.float64 else 126)
    return grad.to(dtype).square().clamp_(max=bound / longest)


def begin_mean(average: Tensor, beta: float, eps: float) -> None:
    """Compute avg <- beta avg + (1 - beta) eps: (1), (2), (7), (8) without their sums, which `add_means` adds."""
    average.mul_(beta).add_((1.0 - beta) * eps)


def add_means(squares: Tensor, row: Tensor, col: Tensor, dims: MatrixDims, weights: tuple[float, float]) -> None:
    """Compute row += w_r * sum over columns, col += w_c * sum over rows: (1) and (2), or (7) and (8).

    Args:
        squares: (R, C), one tile.
        row: (R, 1), the tile's part of the row average.
        col: (1, C), the tile's part of the column average.
        dims: (row dims, column dims).
        weights: w_r = (1 - beta) / C and w_c = (1 - beta) / R with the sizes of the whole matrix, times any factor that
            `squares` lacks.
    """
    rows, cols = dims
    row.add_(squares.sum(dim=cols, keepdim=True), alpha=weights[0])
    col.add_(squares.sum(dim=rows, keepdim=True), alpha=weights[1])


def inverse_root(row: Tensor, col: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return a: (R, 1), b: (1, C) with a b = (row col / mean)^(-1/2) for (3) and (9); `mean` is overwritten.

    sqrt(mean) * rsqrt(row) instead of rsqrt(row / mean): the quotient underflows for a row without gradients next to
    rows with large ones, and 0 * inf is NaN.

    Args:
        row: (R, 1), row averages.
        col: (1, C), column averages.
        mean: mean of `row`, with size 1 along row dims too.
    """
    return row.rsqrt().mul_(mean.sqrt_()), col.rsqrt()


def whiten(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return u = g a b of (3): (R, C), in the dtype of a and b, which may be wider than that of g."""
    return (grad * a).mul_(b)


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares: 0-D."""
    # A dot product needs no temporary for the squares.
    flat = x.reshape(-1)
    return torch.dot(flat, flat)


def clip_factor(total: Tensor, numel: int, threshold: float) -> Tensor:
    """Return 1 / max(1, RMS(u) / d) of (4) from the sum of squares of u: 0-D."""
    return (total / (numel * threshold**2)).sqrt_().clamp_(min=1.0).reciprocal_()


def update_momentum(momentum: Tensor, clipped: Tensor, beta1: float) -> Tensor:
    """Compute m <- beta1 m + (1 - beta1) u of (5); return (u - m) / beta1 with the new m, in the memory of `clipped`.

    u - m_t = beta1 (u - m_(t-1)): one difference serves the momentum (5) and the instability (6).
    """
    difference = clipped.sub_(momentum)
    momentum.add_(difference, alpha=1.0 - beta1)
    return difference


def apply_update(value: Tensor, update: Tensor, scale: Tensor, decay: Tensor | None) -> None:
    """Compute p <- p + p decay + update scale of (10).

    The decay is added instead of multiplying by 1 - lr w: that factor is off by up to 6e-8 in fp32, at every step in
    the same direction.

    Args:
        value: (R, C), one tile of the parameter in the dtype of the statistics.
        update: (R, C).
        scale: (1, C) or 0-D.
        decay: -lr * w, 0-D, or None for no decay.
    """
    if decay is not None:
        value.addcmul_(value, decay)
    value.addcmul_(update, scale)
