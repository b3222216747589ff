"""One step of CAME for one parameter, stage by stage over tiles, so that scratch memory does not grow with it.

A momentum in bf16 or in codes is read twice: the residual (6) and the update (9) both take the new momentum before it
is rounded, and only the last stage writes it back. No stage leaves its scratch in a variable: it would live on through
the next, and one tile of scratch would be two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from scantling.groups import MatrixDims
from scantling.optim import _rounding as rounding
from scantling.optim._codec import Momentum, decode, encode, layout_of
from scantling.optim._factor import statistics_dtype
from scantling.optim._random import seed_of
from scantling.optim._rounding import Rounding
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
DEVICE_TILE = 1 << 21
"""Elements of a tile on an accelerator, where launches count. The most scratch, five fp32 tiles (int4 momentum with
compensated weights), stays under 64 MiB."""

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
    momentum: Momentum
    rounding: Rounding
    foreach: bool | None

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
            momentum=group["momentum"],
            rounding=group["rounding"],
            foreach=group["foreach"],
        )

    def decay(self, like: Tensor) -> Tensor | None:
        """-lr * weight_decay: 0-D, or None where there is none."""
        return like.new_full((), -self.weight_decay).mul_(self.lr) if self.weight_decay else None


@dataclass(frozen=True, slots=True)
class Job:
    """One parameter in one step.

    Attributes:
        param: any float dtype.
        grad: of the same shape.
        state: its tensors, `step` counted up already; see `_state.py`.
        hyper: of its group.
        view: (row dims, column dims), or None for a full second moment.
        ordinal: which parameter of the optimizer it is.
    """

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    hyper: Hyper
    view: MatrixDims | None
    ordinal: int

    @property
    def dtype(self) -> torch.dtype:
        return statistics_dtype(self.param.dtype)

    def scalar(self, value: float) -> Tensor:
        return torch.full((), value, dtype=self.dtype, device=self.param.device)

    def correction(self, beta: float) -> Tensor:
        return bias_correction(self.state["step"], beta, self.dtype)


def step(job: Job, *, tile: int | None = None) -> None:
    """One step of a parameter: equations (1) to (10) in `came.py`, or those of a full second moment.

    Args:
        job: the parameter; it, its momentum and its statistics change in place.
        tile: elements of a tile. Default: what suits its device.
    """
    tile = tile or (CPU_TILE if job.param.device.type == "cpu" else DEVICE_TILE)
    if job.view is None:
        _update_full(job, tile)
    else:
        _update_factored(job, job.view, tile)


def _update_factored(job: Job, view: MatrixDims, tile_limit: int) -> None:
    param, grad, state, hyper, dtype = job.param, job.grad, job.state, job.hyper, job.dtype
    row, col, res_row, res_col = state["row"], state["col"], state["res_row"], state["res_col"]
    num_rows, num_cols = (prod(param.shape[dim] for dim in dims) for dims in view)
    momentum = _Momentum(job, view)
    tiles = tiles_of(tuple(param.shape), tile_limit, momentum.depth)

    for statistic in (row, col):
        begin_mean(statistic, hyper.beta2, hyper.eps1)
    weights = ((1.0 - hyper.beta2) / num_cols, (1.0 - hyper.beta2) / num_rows)
    for tile in tiles:
        add_means(cut(grad, tile).to(dtype).square(), cut(row, tile), cut(col, tile), view, weights)

    a, b = inverse_root(row, col, view[0])
    if hyper.debias:
        b.mul_(job.correction(hyper.beta2).sqrt_())
    total = job.scalar(0.0)
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
        clipped = whiten(cut(grad, tile), cut(a, tile), cut(b, tile))
        add_means(
            update_momentum(momentum.read(tile), clipped, hyper.beta1).square_(),
            cut(res_row, tile),
            cut(res_col, tile),
            view,
            weights,
        )
        del clipped

    res_a, res_b = inverse_root(res_row, res_col, view[0])
    scale = job.scalar(-1.0).mul_(hyper.lr)
    if hyper.debias:
        scale.mul_(job.correction(hyper.beta3).sqrt_()).div_(job.correction(hyper.beta1))
    res_a.mul_(scale)
    decay = hyper.decay(row)
    weight = _Weight(job)
    for tile in tiles:
        m = momentum.read(tile)
        if momentum.is_rounded:
            update_momentum(m, whiten(cut(grad, tile), cut(a, tile), cut(b, tile)), hyper.beta1)
        value = weight.read(tile)
        apply_update(value, m * cut(res_a, tile), cut(res_b, tile), decay)
        weight.write(value, tile)
        del value
        momentum.write(m, tile)
        del m


def _update_full(job: Job, tile_limit: int) -> None:
    """A full second moment and no confidence: vectors and thin matrices."""
    param, grad, hyper = job.param, job.grad, job.hyper
    momentum, moment = job.state["exp_avg"], job.state["exp_avg_sq"]
    tiles = tiles_of(tuple(param.shape), tile_limit, param.ndim)

    begin_mean(moment, hyper.beta2, hyper.eps1)
    total = job.scalar(0.0)
    for tile in tiles:
        v = cut(moment, tile)
        v.add_(cut(grad, tile).to(job.dtype).square(), alpha=1.0 - hyper.beta2)
        total.add_(square_sum(v.rsqrt().mul_(cut(grad, tile))))
    correction = job.correction(hyper.beta2) if hyper.debias else None
    if correction is not None:
        total.mul_(correction)
    factor = clip_factor(total, param.numel(), hyper.clip_threshold)
    if correction is not None:
        factor.mul_(correction.sqrt())
    if hyper.maximize:
        factor.neg_()

    scale = job.scalar(-1.0).mul_(hyper.lr)
    if hyper.debias:
        scale.div_(job.correction(hyper.beta1))
    decay = hyper.decay(moment)
    weight = _Weight(job)
    for tile in tiles:
        m = cut(momentum, tile)
        update_momentum(m, cut(moment, tile).rsqrt().mul_(cut(grad, tile)).mul_(factor), hyper.beta1)
        value = weight.read(tile)
        apply_update(value, m, scale, decay)
        weight.write(value, tile)
        del value


class _Momentum:
    """The momentum of one parameter, tile by tile, however it is kept.

    Attributes:
        is_rounded: whether what is kept is less than fp32, so that `read` gives a copy, to be written back.
        depth: the dims of the parameter that tiles may cut; a row of blocks is never cut.
    """

    def __init__(self, job: Job, view: MatrixDims) -> None:
        self._job, self._kind = job, job.hyper.momentum
        self._layout = None
        self.is_rounded = self._kind != "fp32"
        self.depth = job.param.ndim
        if "exp_avg" not in job.state:
            self._layout = layout_of(tuple(job.param.shape), view, self._kind)
            self.depth = len(self._layout.lead)

    def read(self, tile: Tile) -> Tensor:
        state, dtype = self._job.state, self._job.dtype
        if self._layout is None:
            return cut(state["exp_avg"], tile).to(dtype)
        rows = decode(cut(state["exp_avg_codes"], tile), cut(state["exp_avg_scale"], tile), self._layout, dtype)
        return rows.reshape(cut(self._job.param, tile).shape)

    def write(self, value: Tensor, tile: Tile) -> None:
        """Keep the new momentum; `value` is overwritten."""
        state = self._job.state
        if not self.is_rounded:
            return
        if self._layout is None:
            cut(state["exp_avg"], tile).copy_(value)
            return
        seed = seed_of(state["step"], self._job.ordinal, 0) if self._kind == "int4" else None
        start = start_of(tile, self._job.param.shape)
        codes, scale = cut(state["exp_avg_codes"], tile), cut(state["exp_avg_scale"], tile)
        encode(value, codes, scale, self._layout, seed=seed, start=start)


class _Weight:
    """A parameter, tile by tile, read in the dtype of the statistics and written back as its group rounds."""

    def __init__(self, job: Job) -> None:
        self._job = job
        rounded = job.param.dtype == torch.bfloat16 and job.hyper.rounding == "stochastic"
        self._seed = seed_of(job.state["step"], job.ordinal, 1) if rounded else None
        self._low = job.state.get("low")

    def read(self, tile: Tile) -> Tensor:
        return rounding.read(cut(self._job.param, tile), self._cut_low(tile), self._job.dtype)

    def write(self, value: Tensor, tile: Tile) -> None:
        start = start_of(tile, self._job.param.shape)
        rounding.write(value, cut(self._job.param, tile), self._cut_low(tile), seed=self._seed, start=start)

    def _cut_low(self, tile: Tile) -> Tensor | None:
        return None if self._low is None else cut(self._low, tile)


@lru_cache(maxsize=4096)
def tiles_of(shape: tuple[int, ...], limit: int, depth: int) -> tuple[Tile, ...]:
    """The tiles in which a parameter is worked off, in memory order; one empty tile for a parameter that fits whole.

    Args:
        shape: of the parameter.
        limit: most elements in a tile.
        depth: only the first so many dims are cut, so that a tile can be larger where what is left is.
    """
    if prod(shape) <= limit:
        return ((),)
    cuts: list[list[slice]] = []
    for dim, size in enumerate(shape[:depth]):
        length = max(1, limit // prod(shape[dim + 1 :]))
        cuts.append([slice(start, min(start + length, size)) for start in range(0, size, length)])
        if length > 1:
            break
    return tuple(product(*cuts))


def start_of(tile: Tile, shape: torch.Size) -> int:
    """Place of a tile's first element in the parameter, in row-major order."""
    return sum(part.start * prod(shape[dim + 1 :]) for dim, part in enumerate(tile))


def cut(tensor: Tensor, tile: Tile) -> Tensor:
    """The tile's part of a parameter or, along the dims where these have more than 1, of its statistics."""
    if not tile:
        return tensor
    return tensor[tuple(slice(None) if size == 1 else part for size, part in zip(tensor.shape, tile, strict=False))]
