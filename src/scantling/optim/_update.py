"""The mathematics of CAME: stages on plain tensors, in place.

Each stage works on one tile of a parameter and changes what it is handed; `_eager.py` says in which order, and what
`_sharded.py` sums between them. In shape comments (R, C) stands for the parameter's own dims, (R,
1) for those with 1 in place of the column dims, (1, C) for those with 1 in place of the row dims.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scantling.groups import MatrixDims


def bias_correction(step: Tensor, beta: float, dtype: torch.dtype) -> Tensor:
    """1 - beta^t, without the cancellation that makes it useless in fp32 for beta near 1."""
    if beta == 0.0:
        return torch.ones_like(step, dtype=dtype)
    return -torch.expm1(step.to(dtype) * math.log(beta))


def squared(grad: Tensor, dtype: torch.dtype, longest: int = 1) -> Tensor:
    """g^2, at most what does not overflow when `longest` of them are added up; NaN stays NaN.

    2^126 is far above any gradient that a model trains with. Beyond it a row, a column or a second moment would be Inf
    and everything that is divided by its root NaN.
    """
    most = 2.0 ** (1022 if dtype == torch.float64 else 126)
    return grad.to(dtype).square().clamp_(max=most / longest)


def begin_mean(average: Tensor, beta: float, eps: float) -> None:
    """avg <- beta * avg + (1 - beta) * eps: what the moving average of (x + eps) keeps and what eps adds to it."""
    average.mul_(beta).add_((1.0 - beta) * eps)


def add_means(squares: Tensor, row: Tensor, col: Tensor, dims: MatrixDims, weights: tuple[float, float]) -> None:
    """row += w_r * sum over columns, col += w_c * sum over rows.

    Args:
        squares: (R, C), one tile.
        row: (R, 1), the tile's part of the row average.
        col: (1, C), the tile's part of the column average.
        dims: (row dims, column dims).
        weights: (1 - beta) / C and (1 - beta) / R with the sizes of the whole matrix, times what `squares` still lacks.
    """
    rows, cols = dims
    row.add_(squares.sum(dim=cols, keepdim=True), alpha=weights[0])
    col.add_(squares.sum(dim=rows, keepdim=True), alpha=weights[1])


def inverse_root(row: Tensor, col: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Factors a: (R, 1), b: (1, C) of a * b = (row * col / mean)^(-1/2), with the mean of `row`; it is overwritten.

    As sqrt(mean(row)) * rsqrt(row), not rsqrt(row / mean(row)): that quotient underflows where a row was never touched
    beside others with large gradients, and 0 * inf is NaN.
    """
    return row.rsqrt().mul_(mean.sqrt_()), col.rsqrt()


def whiten(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """u = g * a * b: (R, C), in the dtype of a and b, which may be wider than that of g."""
    return (grad * a).mul_(b)


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares: 0-D."""
    flat = x.reshape(-1)
    return torch.dot(flat, flat)


def clip_factor(total: Tensor, numel: int, threshold: float) -> Tensor:
    """1 / max(1, RMS(u) / d) from the sum of squares of u: 0-D."""
    return (total / (numel * threshold**2)).sqrt_().clamp_(min=1.0).reciprocal_()


def update_momentum(momentum: Tensor, clipped: Tensor, beta1: float) -> Tensor:
    """m <- beta1 * m + (1 - beta1) * u.  Returns (u - m) / beta1 with the new m, in the memory of `clipped`.

    u - m_t = beta1 * (u - m_(t-1)), so that one difference serves the momentum and the instability.
    """
    difference = clipped.sub_(momentum)
    momentum.add_(difference, alpha=1.0 - beta1)
    return difference


def apply_update(value: Tensor, update: Tensor, scale: Tensor, decay: Tensor | None) -> None:
    """p <- p + p * decay + update * scale.

    The decay is added, not multiplied as 1 - lr * w: that factor is off by up to 6e-8 in fp32, at every step in the
    same direction.

    Args:
        value: (R, C), one tile of the parameter in the dtype of the statistics.
        update: (R, C).
        scale: (1, C) or 0-D.
        decay: -lr * w, 0-D, or None for no decay.
    """
    if decay is not None:
        value.addcmul_(value, decay)
    value.addcmul_(update, scale)
