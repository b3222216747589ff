"""One step of CAME for one parameter, stage by stage over tiles, so that scratch memory does not grow with it.

Where each rank has a part of a parameter, sums over it are partial between two stages; `_sharded.py` adds them up.

A momentum in bf16 or in codes is read twice: the residual (6) and the update (9) both take the new momentum before it
is rounded, and only the last stage writes it back. No stage leaves its scratch in a variable: it would live on through
the next, and one tile of scratch would be two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from scantling.groups import MatrixDims
from scantling.numerics.torch_private import is_zero_tensor
from scantling.optim import _rounding as rounding
from scantling.optim._codec import Momentum, decode, encode, layout_of
from scantling.optim._factor import statistics_dtype
from scantling.optim._random import seed_of
from scantling.optim._rounding import Rounding
from scantling.optim._shardplan import ShardPlan
from scantling.optim._state import kept_averages
from scantling.optim._update import (
    add_means,
    apply_update,
    begin_mean,
    bias_correction,
    clip_factor,
    inverse_root,
    square_sum,
    squared,
    update_momentum,
    whiten,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
    momentum: Momentum | None
    rounding: Rounding
    confidence: bool
    foreach: bool | None

    @classmethod
    def of(cls, group: dict[str, Any]) -> Hyper:
        (beta1, beta2, beta3), (eps1, eps2) = group["betas"], group["eps"]
        momentum, confidence = kept_averages(group)
        return cls(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            beta3=beta3,
            eps1=eps1,
            eps2=eps2,
            clip_threshold=min(float(group["clip_threshold"]), 1e150),  # it is squared
            weight_decay=group["weight_decay"],
            debias=group["debias"],
            maximize=group["maximize"],
            momentum=momentum,
            rounding=group["rounding"],
            confidence=confidence,
            foreach=group["foreach"],
        )

    def decay(self, like: Tensor) -> Tensor | None:
        """-lr * weight_decay: 0-D, or None where there is none."""
        return like.new_full((), -self.weight_decay).mul_(self.lr) if self.weight_decay else None


@dataclass(frozen=True, slots=True)
class Job:
    """One parameter in one step.

    Attributes:
        param: any float dtype; of a sharded parameter the part on this rank, as in `grad` and `state`.
        grad: of the same shape; zeros where this rank has none.
        state: its tensors; see `_state.py`.
        hyper: of its group.
        view: (row dims, column dims), or None for a full second moment.
        ordinal: which parameter of the optimizer it is.
        plan: which part of the whole parameter `param` is.
        has_grad: whether this rank has a gradient of it.
    """

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    hyper: Hyper
    view: MatrixDims | None
    ordinal: int
    plan: ShardPlan
    has_grad: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return statistics_dtype(self.param.dtype)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of matrices, rows and columns of each; a vector is one row."""
        return _sizes_of(self.param.shape, self.view)

    @property
    def is_stacked(self) -> bool:
        """Whether the parameter is a stack of row-major matrices: row dims, after them column dims, and then none."""
        dims = [] if self.view is None else [*self.view[0], *self.view[1]]
        return dims == list(range(self.param.ndim - len(dims), self.param.ndim))

    def scalar(self, value: float) -> Tensor:
        return torch.full((), value, dtype=self.dtype, device=self.param.device)

    def correction(self, beta: float) -> Tensor:
        return bias_correction(self.state["step"], beta, self.dtype)

    def place_of(self, tile: Tile) -> tuple[int, tuple[int, ...]]:
        """Place of a tile's first element in the whole parameter, in row-major order, and the strides from there."""
        offset = [part.start for part in tile] + [0] * (self.param.ndim - len(tile))
        return self.plan.index_of(offset), self.plan.strides


@lru_cache(maxsize=4096)
def _sizes_of(shape: torch.Size, view: MatrixDims | None) -> tuple[int, int, int]:
    if view is None:
        return 1, 1, prod(shape)
    rows, cols = (prod(shape[dim] for dim in dims) for dims in view)
    return prod(shape) // (rows * cols), rows, cols


def is_plain(tensor: Tensor, devices: Sequence[str]) -> bool:
    """Whether what is in memory on such a device, from `data_ptr` on, is the tensor as it reads."""
    return (
        type(tensor) in (Tensor, nn.Parameter)  # others may wrap tensors, or have no data at all
        and tensor.device.type in devices
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not is_zero_tensor(tensor)
    )


Partial: TypeAlias = tuple[Tensor, "tuple[ProcessGroup, ...]"]
"""A tensor that is to be summed in place over some groups of ranks, and these; on one device there are none."""


class Stages(Protocol):
    """The four stages of one parameter's step, to be called in this order.

    Each of the first three returns what must be summed over ranks before the next is called. None communicates.
    """

    def accumulate(self) -> list[Partial]:
        """Equations (1) and (2): row and column means of the squared gradient."""

    def whiten(self) -> list[Partial]:
        """(3): the sum of squares of the whitened gradient. The step is counted here: from here on it is taken."""

    def residual(self) -> list[Partial]:
        """(4) to (8): momentum, row and column means of the instability."""

    def apply(self) -> None:
        """(9) and (10): the parameter."""


def stages_of(job: Job, *, tile: int | None = None) -> Stages:
    """The stages of a parameter: equations (1) to (10) in `came.py`, or those of a full second moment.

    Args:
        job: the parameter; it, its momentum and its statistics change in place.
        tile: elements of a tile. Default: what suits its device.
    """
    tile = tile or (CPU_TILE if job.param.device.type == "cpu" else DEVICE_TILE)
    return _Full(job, tile) if job.view is None else _Factored(job, job.view, tile)


def step(job: Job, *, tile: int | None = None) -> None:
    """One step of a parameter of which this rank has all, see `stages_of`."""
    stages = stages_of(job, tile=tile)
    stages.accumulate()
    stages.whiten()
    stages.residual()
    stages.apply()


class _Factored:
    """A factored second moment and, where it is wanted, the confidence."""

    def __init__(self, job: Job, view: MatrixDims, tile_limit: int) -> None:
        self._job, self._view = job, view
        self._momentum = _Momentum(job, view)
        self._tiles = tiles_of(tuple(job.param.shape), tile_limit, self._momentum.depth)
        num_rows, num_cols = (prod(job.plan.shape[dim] for dim in dims) for dims in view)
        self._num_rows, self._num_cols = num_rows, num_cols
        self._grand: Tensor | None = None

    def accumulate(self) -> list[Partial]:
        job, (row, col) = self._job, self._statistics("row", "col")
        self._begin(row, col, job.hyper.beta2, job.hyper.eps1)
        weights = self._weights(1.0 - job.hyper.beta2)
        for tile in self._tiles:
            squares = squared(cut(job.grad, tile), job.dtype, max(self._num_rows, self._num_cols))
            add_means(squares, cut(row, tile), cut(col, tile), self._view, weights)
            del squares
        return self._partial(row, col)

    def whiten(self) -> list[Partial]:
        job, hyper = self._job, self._job.hyper
        job.state["step"].add_(1.0)
        self._a, self._b = self._inverse_root("row", "col")
        if hyper.debias:
            self._b.mul_(job.correction(hyper.beta2).sqrt_())
        self._total = job.scalar(0.0)
        for tile in self._tiles:
            self._total.add_(square_sum(self._whitened(tile)))
        return [(self._total, job.plan.groups(range(job.param.ndim)))]

    def residual(self) -> list[Partial]:
        hyper = self._job.hyper
        self._a.mul_(clip_factor(self._total, self._job.plan.numel, hyper.clip_threshold))
        if hyper.maximize:
            self._a.neg_()
        if not hyper.confidence:
            return []
        row, col = self._statistics("res_row", "res_col")
        self._begin(row, col, hyper.beta3, hyper.eps2)
        weights = self._weights(hyper.beta1**2 * (1.0 - hyper.beta3))
        for tile in self._tiles:
            clipped = self._whitened(tile)
            add_means(
                update_momentum(self._momentum.read(tile), clipped, hyper.beta1).square_(),
                cut(row, tile),
                cut(col, tile),
                self._view,
                weights,
            )
            del clipped
        return self._partial(row, col)

    def apply(self) -> None:
        job, hyper = self._job, self._job.hyper
        scale = job.scalar(-1.0).mul_(hyper.lr)
        if hyper.debias:
            scale.div_(job.correction(hyper.beta1))
        if hyper.confidence:
            a, b = self._inverse_root("res_row", "res_col")
            if hyper.debias:
                scale.mul_(job.correction(hyper.beta3).sqrt_())
            a.mul_(scale)
        decay = hyper.decay(scale)
        momentum, weight = self._momentum, _Weight(job)
        for tile in self._tiles:
            if hyper.momentum is None:
                m = self._whitened(tile)
            else:
                m = momentum.read(tile)
                if momentum.is_rounded or not hyper.confidence:
                    update_momentum(m, self._whitened(tile), hyper.beta1)
            value = weight.read(tile)
            if hyper.confidence:
                apply_update(value, m * cut(a, tile), cut(b, tile), decay)
            else:
                apply_update(value, m, scale, decay)
            weight.write(value, tile)
            del value
            momentum.write(m, tile)
            del m

    def _statistics(self, row: str, col: str) -> tuple[Tensor, Tensor]:
        return self._job.state[row], self._job.state[col]

    def _weights(self, weight: float) -> tuple[float, float]:
        return weight / self._num_cols, weight / self._num_rows

    def _whitened(self, tile: Tile) -> Tensor:
        return whiten(cut(self._job.grad, tile), cut(self._a, tile), cut(self._b, tile))

    def _begin(self, row: Tensor, col: Tensor, beta: float, eps: float) -> None:
        """Of the ranks that hold an average alike, one carries it into their sum and the others begin at 0."""
        rows, cols = self._view
        for average, summed in ((row, cols), (col, rows)):
            if self._job.plan.is_first(summed):
                begin_mean(average, beta, eps)
            else:
                average.zero_()

    def _partial(self, row: Tensor, col: Tensor) -> list[Partial]:
        plan, (rows, cols) = self._job.plan, self._view
        partial = [(row, plan.groups(cols)), (col, plan.groups(rows))]
        if plan.groups(rows) and plan.groups(cols):
            self._grand = row.sum(dim=rows, keepdim=True).div_(self._num_rows)
            partial.append((self._grand, plan.groups(rows + cols)))
        return partial

    def _inverse_root(self, row: str, col: str) -> tuple[Tensor, Tensor]:
        """Rows and columns have the same mean, so that it is taken of the side of which this rank has all."""
        r, c = self._statistics(row, col)
        rows, cols = self._view
        if self._grand is not None:
            mean = self._grand
        elif self._job.plan.groups(rows):
            mean = c.mean(dim=cols, keepdim=True)
        else:
            mean = r.mean(dim=rows, keepdim=True)
        return inverse_root(r, c, mean)


class _Full:
    """A full second moment and no confidence: vectors and thin matrices."""

    def __init__(self, job: Job, tile_limit: int) -> None:
        self._job = job
        self._moment = job.state["exp_avg_sq"]
        self._tiles = tiles_of(tuple(job.param.shape), tile_limit, job.param.ndim)

    def accumulate(self) -> list[Partial]:
        return []

    def whiten(self) -> list[Partial]:
        job, hyper = self._job, self._job.hyper
        job.state["step"].add_(1.0)
        begin_mean(self._moment, hyper.beta2, hyper.eps1)
        self._total = job.scalar(0.0)
        for tile in self._tiles:
            v = cut(self._moment, tile)
            v.add_(squared(cut(job.grad, tile), job.dtype), alpha=1.0 - hyper.beta2)
            self._total.add_(square_sum(v.rsqrt().mul_(cut(job.grad, tile))))
        return [(self._total, job.plan.groups(range(job.param.ndim)))]

    def residual(self) -> list[Partial]:
        return []

    def apply(self) -> None:
        job, hyper = self._job, self._job.hyper
        factor = self._factor()
        scale = job.scalar(-1.0).mul_(hyper.lr)
        if hyper.debias:
            scale.div_(job.correction(hyper.beta1))
        decay = hyper.decay(self._moment)
        weight = _Weight(job)
        for tile in self._tiles:
            if hyper.momentum is None:
                m = self._whitened(tile, factor)
            else:
                m = cut(job.state["exp_avg"], tile)
                update_momentum(m, self._whitened(tile, factor), hyper.beta1)
            value = weight.read(tile)
            apply_update(value, m, scale, decay)
            weight.write(value, tile)
            del value, m

    def _whitened(self, tile: Tile, factor: Tensor) -> Tensor:
        return cut(self._moment, tile).rsqrt().mul_(cut(self._job.grad, tile)).mul_(factor)

    def _factor(self) -> Tensor:
        """What the quotient of gradient and root of the second moment is multiplied with: 0-D."""
        job, hyper = self._job, self._job.hyper
        correction = job.correction(hyper.beta2) if hyper.debias else None
        if correction is not None:
            self._total.mul_(correction)
        factor = clip_factor(self._total, job.plan.numel, hyper.clip_threshold)
        if correction is not None:
            factor.mul_(correction.sqrt())
        if hyper.maximize:
            factor.neg_()
        return factor


class _Momentum:
    """The momentum of one parameter, tile by tile, however it is kept.

    Attributes:
        is_rounded: whether what is kept is less than fp32, so that `read` gives a copy, to be written back.
        depth: the dims of the parameter that tiles may cut; a row of blocks is never cut.
    """

    def __init__(self, job: Job, view: MatrixDims) -> None:
        self._job, self._kind = job, job.hyper.momentum
        self._layout = None
        self.is_rounded = self._kind not in (None, "fp32")
        self.depth = job.param.ndim
        if self._kind in ("int8", "int4"):
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
        start, strides = self._job.place_of(tile)
        codes, scale = cut(state["exp_avg_codes"], tile), cut(state["exp_avg_scale"], tile)
        encode(value, codes, scale, self._layout, seed=seed, start=start, strides=strides)


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
        start, strides = self._job.place_of(tile)
        param, low = cut(self._job.param, tile), self._cut_low(tile)
        rounding.write(value, param, low, seed=self._seed, start=start, strides=strides)

    def _cut_low(self, tile: Tile) -> Tensor | None:
        return None if self._low is None else cut(self._low, tile)


@lru_cache(maxsize=4096)
def tiles_of(shape: tuple[int, ...], limit: int, depth: int) -> tuple[Tile, ...]:
    """The tiles in which a parameter is worked off, in memory order; one empty tile for a parameter that fits whole.

    An empty part of a sharded parameter has none.

    Args:
        shape: of the parameter.
        limit: most elements in a tile.
        depth: only the first so many dims are cut, so that a tile can be larger where what is left is.
    """
    if not prod(shape):
        return ()
    if prod(shape) <= limit:
        return ((),)
    cuts: list[list[slice]] = []
    for dim, size in enumerate(shape[:depth]):
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
