"""One step of CAME for one parameter, stage by stage over tiles, so that scratch memory does not grow with it.

No stage leaves its scratch in a variable: it would live on through the next, and one tile of scratch would be two. In
bf16 and fp16 there are two anyway, for the gradient or the parameter in the dtype of the statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from torch import Tensor

from scantling.groups import MatrixDims
from scantling.optim._update import (
    add_means,
    apply_update,
    begin_mean,
    bias_correction,
    clip_factor,
    inverse_root,
    square_sum,
    update_momentum,
    whiten,
)

CPU_TILE = 1 << 18
"""Elements of a tile on a CPU: its parts of gradient, momentum, parameter and scratch stay in the caches."""
DEVICE_TILE = 1 << 23
"""Elements of a tile on an accelerator, where launches count: two of fp32 are 64 MiB."""

Tile = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Hyper:
    """The hyper-parameters of a group."""

    lr: float | Tensor
    beta1: float
    beta2: float
    beta3: float
    eps1: float
    eps2: float
    clip_threshold: float
    weight_decay: float
    debias: bool
    maximize: bool

    @classmethod
    def of(cls, group: dict[str, Any]) -> Hyper:
        (beta1, beta2, beta3), (eps1, eps2) = group["betas"], group["eps"]
        return cls(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            beta3=beta3,
            eps1=eps1,
            eps2=eps2,
            clip_threshold=group["clip_threshold"],
            weight_decay=group["weight_decay"],
            debias=group["debias"],
            maximize=group["maximize"],
        )

    def decay(self, like: Tensor) -> Tensor | None:
        """-lr * weight_decay: 0-D, or None where there is none."""
        return like.new_full((), -self.weight_decay).mul_(self.lr) if self.weight_decay else None


def update_factored(param: Tensor, grad: Tensor, state: dict[str, Tensor], hyper: Hyper, view: MatrixDims) -> None:
    """One step of a parameter with factored statistics, equations (1) to (10) in `came.py`.

    Args:
        param: (R, C), any float dtype.
        grad: of the same shape.
        state: `step` (counted up already), `exp_avg` (R, C), `row`, `res_row` (R, 1), `col`, `res_col` (1, C).
        hyper: of the parameter's group.
        view: (row dims, column dims).
    """
    momentum, row, col = state["exp_avg"], state["row"], state["col"]
    res_row, res_col = state["res_row"], state["res_col"]
    dtype, rows = momentum.dtype, view[0]
    num_rows, num_cols = (prod(param.shape[dim] for dim in dims) for dims in view)
    tiles = tiles_of(param)

    for statistic in (row, col):
        begin_mean(statistic, hyper.beta2, hyper.eps1)
    weights = ((1.0 - hyper.beta2) / num_cols, (1.0 - hyper.beta2) / num_rows)
    for tile in tiles:
        add_means(cut(grad, tile).to(dtype).square(), cut(row, tile), cut(col, tile), view, weights)

    a, b = inverse_root(row, col, rows)
    if hyper.debias:
        b.mul_(bias_correction(state["step"], hyper.beta2, dtype).sqrt_())
    total = momentum.new_zeros(())
    for tile in tiles:
        total.add_(square_sum(whiten(cut(grad, tile), cut(a, tile), cut(b, tile))))
    a.mul_(clip_factor(total, param.numel(), hyper.clip_threshold))
    if hyper.maximize:
        a.neg_()

    for statistic in (res_row, res_col):
        begin_mean(statistic, hyper.beta3, hyper.eps2)
    lacking = hyper.beta1**2 * (1.0 - hyper.beta3)
    weights = (lacking / num_cols, lacking / num_rows)
    for tile in tiles:
        add_means(
            update_momentum(cut(momentum, tile), whiten(cut(grad, tile), cut(a, tile), cut(b, tile)), hyper.beta1),
            cut(res_row, tile),
            cut(res_col, tile),
            view,
            weights,
        )

    a, b = inverse_root(res_row, res_col, rows)
    scale = momentum.new_full((), -1.0).mul_(hyper.lr)
    if hyper.debias:
        scale.mul_(bias_correction(state["step"], hyper.beta3, dtype).sqrt_())
        scale.div_(bias_correction(state["step"], hyper.beta1, dtype))
    a.mul_(scale)
    decay = hyper.decay(momentum)
    for tile in tiles:
        apply_update(cut(param, tile), cut(momentum, tile) * cut(a, tile), cut(b, tile), decay)


def update_full(param: Tensor, grad: Tensor, state: dict[str, Tensor], hyper: Hyper) -> None:
    """One step of a parameter with a full second moment and no confidence: vectors and thin matrices.

    Args:
        param: any shape and float dtype.
        grad: of the same shape.
        state: `step` (counted up already), `exp_avg` and `exp_avg_sq` of the parameter's shape.
        hyper: of the parameter's group.
    """
    momentum, moment = state["exp_avg"], state["exp_avg_sq"]
    dtype = momentum.dtype
    tiles = tiles_of(param)

    begin_mean(moment, hyper.beta2, hyper.eps1)
    total = momentum.new_zeros(())
    for tile in tiles:
        v = cut(moment, tile)
        v.add_(cut(grad, tile).to(dtype).square(), alpha=1.0 - hyper.beta2)
        total.add_(square_sum(v.rsqrt().mul_(cut(grad, tile))))
    correction = bias_correction(state["step"], hyper.beta2, dtype) if hyper.debias else None
    if correction is not None:
        total.mul_(correction)
    factor = clip_factor(total, param.numel(), hyper.clip_threshold)
    if correction is not None:
        factor.mul_(correction.sqrt())
    if hyper.maximize:
        factor.neg_()

    scale = momentum.new_full((), -1.0).mul_(hyper.lr)
    if hyper.debias:
        scale.div_(bias_correction(state["step"], hyper.beta1, dtype))
    decay = hyper.decay(momentum)
    for tile in tiles:
        m = cut(momentum, tile)
        update_momentum(m, cut(moment, tile).rsqrt().mul_(cut(grad, tile)).mul_(factor), hyper.beta1)
        apply_update(cut(param, tile), m, scale, decay)


def tiles_of(param: Tensor) -> tuple[Tile, ...]:
    """The tiles in which a parameter is worked off, in memory order; one empty tile for a parameter that fits whole."""
    return _tiles(tuple(param.shape), CPU_TILE if param.device.type == "cpu" else DEVICE_TILE)


@lru_cache(maxsize=4096)
def _tiles(shape: tuple[int, ...], limit: int) -> tuple[Tile, ...]:
    if prod(shape) <= limit:
        return ((),)
    cuts: list[list[slice]] = []
    for dim, size in enumerate(shape):
        length = max(1, limit // prod(shape[dim + 1 :]))
        cuts.append([slice(start, min(start + length, size)) for start in range(0, size, length)])
        if length > 1:
            break
    return tuple(product(*cuts))


def cut(tensor: Tensor, tile: Tile) -> Tensor:
    """The tile's part of a parameter or, along the dims where these have more than 1, of its statistics."""
    if not tile:
        return tensor
    return tensor[tuple(slice(None) if size == 1 else part for size, part in zip(tensor.shape, tile, strict=False))]
