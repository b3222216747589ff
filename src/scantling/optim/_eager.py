"""CAME in PyTorch operations: one parameter at a time, stage by stage over tiles, so that scratch memory is bounded.

If ranks hold shards of a parameter, sums over it are partial between two stages; `_dispatch.py` adds them up.

A momentum in bf16 or in codes is read twice: the residual (6) and the update (9) both take the new momentum before it
is rounded, and only the last stage writes it back. No stage keeps its scratch in a variable: the scratch would live on
through the next tile, and one tile of scratch would be two.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from scantling.groups import MatrixDims
from scantling.optim.codecs import block_rows, decode, encode, noise_seed, read_weight, write_weight
from scantling.optim.stages import (
    add_means,
    apply_update,
    begin_mean,
    clip_factor,
    inverse_root,
    square_sum,
    squared,
    update_momentum,
    whiten,
)
from scantling.optim.state import ParamStep

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CPU_TILE = 1 << 18
"""Elements of a tile on a CPU: its parts of gradient, momentum, parameter and scratch stay in the caches."""
DEVICE_TILE = 1 << 21
"""Elements of a tile on an accelerator, where launches count. The most scratch, five fp32 tiles (int4 momentum with
compensated weights), stays under 64 MiB."""

Tile = tuple[slice, ...]


PartialSum: TypeAlias = tuple[Tensor, "tuple[ProcessGroup, ...]"]
"""A tensor and the process groups over which it must be summed in place; none on one device."""


class ParamStages(Protocol):
    """The four stages of one parameter's step, called in this order.

    The first three return what must be summed over ranks before the next is called. None communicates.
    """

    def accumulate(self) -> list[PartialSum]:
        """Equations (1) and (2): row and column means of the squared gradient."""

    def whiten(self) -> list[PartialSum]:
        """Equation (3): sum of squares of the whitened gradient. Counts the step, which must then be completed."""

    def update_instability(self) -> list[PartialSum]:
        """Equations (4) to (8): momentum, row and column means of the instability."""

    def apply(self) -> None:
        """Equations (9) and (10): the parameter."""


def param_stages(step: ParamStep, *, tile: int | None = None) -> ParamStages:
    """Return the stages of a parameter: equations (1) to (10) in `came.py`, factored or not.

    Args:
        step: the parameter; its value, momentum and statistics change in place.
        tile: elements of a tile. Default: one that suits the device.
    """
    return _stages(step, tile)


def step_param(step: ParamStep) -> None:
    """Take the step of a parameter that is not sharded, see `param_stages`."""
    run_stages(_stages(step, None))


def step_distinct_tiles(step: ParamStep, *, tile: int) -> None:
    """Take the step of a parameter on the meta device over one tile of each shape, which need the most scratch."""
    stages = _stages(step, tile)
    stages.tiles = distinct_tiles(stages.tiles)
    run_stages(stages)


def _stages(step: ParamStep, tile: int | None) -> _FactoredStages | _FullStages:
    tile = tile or (CPU_TILE if step.param.device.type == "cpu" else DEVICE_TILE)
    return _FullStages(step, tile) if step.view is None else _FactoredStages(step, step.view, tile)


def run_stages(stages: Any) -> None:
    """Run the four stages of parameters that are not sharded, so that they leave no partial sums."""
    stages.accumulate()
    stages.whiten()
    stages.update_instability()
    stages.apply()


class _FactoredStages:
    """Stages of a parameter with a factored second moment, with or without confidence."""

    def __init__(self, step: ParamStep, view: MatrixDims, tile_limit: int) -> None:
        self._step, self._view = step, view
        self._momentum = _Momentum(step, view)
        self.tiles = split_tiles(tuple(step.param.shape), tile_limit, self._momentum.depth)
        num_rows, num_cols = (prod(step.plan.shape[dim] for dim in dims) for dims in view)
        self._num_rows, self._num_cols = num_rows, num_cols
        self._grand_mean: Tensor | None = None

    def accumulate(self) -> list[PartialSum]:
        # (1), (2): r (R, 1) and c (1, C) from the squared gradient
        step, (row, col) = self._step, self._statistics("row", "col")
        self._begin_means(row, col, step.hyper.beta2, step.hyper.eps1)
        # Divided by the sides of the whole matrix: partial sums of tiles and ranks add up to means.
        weights = self._weights(1.0 - step.hyper.beta2)
        for tile in self.tiles:
            # Sums run along both sides, so bound the squares for the longer one.
            squares = squared(tile_view(step.grad, tile), step.dtype, max(self._num_rows, self._num_cols))
            add_means(squares, tile_view(row, tile), tile_view(col, tile), self._view, weights)
            del squares
        return self._partial_sums(row, col)

    def whiten(self) -> list[PartialSum]:
        step, hyper = self._step, self._step.hyper
        # Counted here: a sharded parameter without a gradient on any rank stops before this stage.
        step.state["step"].add_(1.0)
        # (3): u = g a b with a (R, 1) and b (1, C)
        self._a, self._b = self._inverse_root("row", "col")
        if hyper.debias:
            self._b.mul_(step.correction(hyper.beta2).sqrt_())
        # Summed over all tiles and matrices: (4) clips by the RMS of the whole tensor.
        self._total = step.scalar(0.0)
        for tile in self.tiles:
            self._total.add_(square_sum(self._whitened(tile)))
        return [(self._total, step.plan.groups(range(step.param.ndim)))]

    def update_instability(self) -> list[PartialSum]:
        hyper = self._step.hyper
        # (4): from here on a contains the clip and the sign of the gradient
        self._a.mul_(clip_factor(self._total, self._step.plan.numel, hyper.clip_threshold))
        if hyper.maximize:
            self._a.neg_()
        if not hyper.confidence:
            return []
        # (5) to (8): s (R, 1) and k (1, C) from (u - m)^2 = beta1^2 (u - m_old)^2, with m_old from before this step
        row, col = self._statistics("res_row", "res_col")
        self._begin_means(row, col, hyper.beta3, hyper.eps2)
        # `update_momentum` returns (u - m) / beta1: its square lacks the factor beta1^2.
        weights = self._weights(hyper.beta1**2 * (1.0 - hyper.beta3))
        for tile in self.tiles:
            # (R, C), with the clip and the sign, which are in a
            clipped = self._whitened(tile)
            add_means(
                update_momentum(self._momentum.read(tile), clipped, hyper.beta1).square_(),
                tile_view(row, tile),
                tile_view(col, tile),
                self._view,
                weights,
            )
            del clipped
        return self._partial_sums(row, col)

    def apply(self) -> None:
        step, hyper = self._step, self._step.hyper
        # (9): D = m a b with a (R, 1) and b (1, C); -lr and the bias corrections are in a, or in the 0-D scale
        scale = step.scalar(-1.0).mul_(hyper.lr)
        if hyper.debias:
            scale.div_(step.correction(hyper.beta1))
        if hyper.confidence:
            a, b = self._inverse_root("res_row", "res_col")
            if hyper.debias:
                scale.mul_(step.correction(hyper.beta3).sqrt_())
            a.mul_(scale)
        # `scale` gives only device and dtype: the decay has no bias correction.
        decay = hyper.decay(scale)
        momentum, weight = self._momentum, _Weight(step)
        for tile in self.tiles:
            if hyper.momentum is None:
                m = self._whitened(tile)
            else:
                m = momentum.read(tile)
                # `update_instability` has already updated an fp32 momentum with confidence.
                if momentum.is_rounded or not hyper.confidence:
                    update_momentum(m, self._whitened(tile), hyper.beta1)
            # (10)
            value = weight.read(tile)
            if hyper.confidence:
                apply_update(value, m * tile_view(a, tile), tile_view(b, tile), decay)
            else:
                apply_update(value, m, scale, decay)
            weight.write(value, tile)
            del value
            momentum.write(m, tile)
            del m

    def _statistics(self, row: str, col: str) -> tuple[Tensor, Tensor]:
        return self._step.state[row], self._step.state[col]

    def _weights(self, weight: float) -> tuple[float, float]:
        return weight / self._num_cols, weight / self._num_rows

    def _whitened(self, tile: Tile) -> Tensor:
        return whiten(tile_view(self._step.grad, tile), tile_view(self._a, tile), tile_view(self._b, tile))

    def _begin_means(self, row: Tensor, col: Tensor, beta: float, eps: float) -> None:
        """Start an average with its old value on one rank of the group that sums it, and with 0 on the others."""
        rows, cols = self._view
        for average, summed in ((row, cols), (col, rows)):
            # The all-reduce must count the old value once.
            if self._step.plan.is_first_rank(summed):
                begin_mean(average, beta, eps)
            else:
                average.zero_()

    def _partial_sums(self, row: Tensor, col: Tensor) -> list[PartialSum]:
        plan, (rows, cols) = self._step.plan, self._view
        partial = [(row, plan.groups(cols)), (col, plan.groups(rows))]
        # If both sides are sharded, no rank holds a whole factor: reduce the mean as well.
        if plan.groups(rows) and plan.groups(cols):
            self._grand_mean = row.sum(dim=rows, keepdim=True).div_(self._num_rows)
            partial.append((self._grand_mean, plan.groups(rows + cols)))
        return partial

    def _inverse_root(self, row: str, col: str) -> tuple[Tensor, Tensor]:
        """Return a: (R, 1), b: (1, C). Rows and columns have the same mean; use the side that is not sharded."""
        r, c = self._statistics(row, col)
        rows, cols = self._view
        if self._grand_mean is not None:
            mean = self._grand_mean
        elif self._step.plan.groups(rows):
            mean = c.mean(dim=cols, keepdim=True)
        else:
            mean = r.mean(dim=rows, keepdim=True)
        return inverse_root(r, c, mean)


class _FullStages:
    """Stages of a vector or a thin matrix: full second moment, no confidence."""

    def __init__(self, step: ParamStep, tile_limit: int) -> None:
        self._step = step
        self._moment = step.state["exp_avg_sq"]
        self.tiles = split_tiles(tuple(step.param.shape), tile_limit, step.param.ndim)

    def accumulate(self) -> list[PartialSum]:
        return []

    def whiten(self) -> list[PartialSum]:
        step, hyper = self._step, self._step.hyper
        step.state["step"].add_(1.0)
        # v <- beta2 v + (1 - beta2)(g^2 + e1), u = g / sqrt(v)
        begin_mean(self._moment, hyper.beta2, hyper.eps1)
        self._total = step.scalar(0.0)
        for tile in self.tiles:
            v = tile_view(self._moment, tile)
            v.add_(squared(tile_view(step.grad, tile), step.dtype), alpha=1.0 - hyper.beta2)
            self._total.add_(square_sum(v.rsqrt().mul_(tile_view(step.grad, tile))))
        return [(self._total, step.plan.groups(range(step.param.ndim)))]

    def update_instability(self) -> list[PartialSum]:
        return []

    def apply(self) -> None:
        step, hyper = self._step, self._step.hyper
        factor = self._clip_and_correction()
        scale = step.scalar(-1.0).mul_(hyper.lr)
        if hyper.debias:
            scale.div_(step.correction(hyper.beta1))
        decay = hyper.decay(self._moment)
        weight = _Weight(step)
        for tile in self.tiles:
            if hyper.momentum is None:
                m = self._whitened(tile, factor)
            else:
                # A view, updated in place: unfactored parameters never round their momentum.
                m = tile_view(step.state["exp_avg"], tile)
                update_momentum(m, self._whitened(tile, factor), hyper.beta1)
            value = weight.read(tile)
            apply_update(value, m, scale, decay)
            weight.write(value, tile)
            del value, m

    def _whitened(self, tile: Tile, factor: Tensor) -> Tensor:
        return tile_view(self._moment, tile).rsqrt().mul_(tile_view(self._step.grad, tile)).mul_(factor)

    def _clip_and_correction(self) -> Tensor:
        """Return the factor of g / sqrt(v), 0-D: bias correction, clip (4) and the sign of the gradient."""
        step, hyper = self._step, self._step.hyper
        correction = step.correction(hyper.beta2) if hyper.debias else None
        # The sum is of g^2 / v with the uncorrected v; the corrected one is v / (1 - b2^t).
        if correction is not None:
            self._total.mul_(correction)
        factor = clip_factor(self._total, step.plan.numel, hyper.clip_threshold)
        if correction is not None:
            factor.mul_(correction.sqrt())
        if hyper.maximize:
            factor.neg_()
        return factor


class _Momentum:
    """Momentum of one parameter, read and written tile by tile in any codec.

    Attributes:
        is_rounded: True if the codec stores less than fp32: `read` returns a copy, which `write` stores.
        depth: number of leading dims that tiles may cut; a row of blocks is never cut.
    """

    def __init__(self, step: ParamStep, view: MatrixDims) -> None:
        self._step, self._codec = step, step.hyper.momentum
        self._layout = None
        self.is_rounded = self._codec not in (None, "fp32")
        self.depth = step.param.ndim
        if self._codec in ("int8", "int4"):
            # Tiles cut only the dims that count rows, so that no block is split.
            self._layout = block_rows(tuple(step.param.shape), view, self._codec)
            self.depth = len(self._layout.lead)

    def read(self, tile: Tile) -> Tensor:
        state, dtype = self._step.state, self._step.dtype
        if self._layout is None:
            return tile_view(state["exp_avg"], tile).to(dtype)
        codes, scale = tile_view(state["exp_avg_codes"], tile), tile_view(state["exp_avg_scale"], tile)
        rows = decode(codes, scale, self._layout, dtype)
        return rows.reshape(tile_view(self._step.param, tile).shape)

    def write(self, value: Tensor, tile: Tile) -> None:
        """Store the new momentum; `value` is overwritten."""
        state = self._step.state
        if not self.is_rounded:
            return
        if self._layout is None:
            tile_view(state["exp_avg"], tile).copy_(value)
            return
        # Only int4 has noise; int8 rounds to the nearest.
        seed = noise_seed(state["step"], self._step.param_idx, 0) if self._codec == "int4" else None
        start, strides = _tile_position(self._step, tile)
        codes, scale = tile_view(state["exp_avg_codes"], tile), tile_view(state["exp_avg_scale"], tile)
        encode(value, codes, scale, self._layout, seed=seed, start=start, strides=strides)


class _Weight:
    """One parameter, read tile by tile in the dtype of the statistics and written with the rounding of its group."""

    def __init__(self, step: ParamStep) -> None:
        self._step = step
        rounded = step.param.dtype == torch.bfloat16 and step.hyper.rounding == "stochastic"
        self._seed = noise_seed(step.state["step"], step.param_idx, 1) if rounded else None
        self._low = step.state.get("low")

    def read(self, tile: Tile) -> Tensor:
        return read_weight(tile_view(self._step.param, tile), self._low_view(tile), self._step.dtype)

    def write(self, value: Tensor, tile: Tile) -> None:
        start, strides = _tile_position(self._step, tile)
        param, low = tile_view(self._step.param, tile), self._low_view(tile)
        write_weight(value, param, low, seed=self._seed, start=start, strides=strides)

    def _low_view(self, tile: Tile) -> Tensor | None:
        return None if self._low is None else tile_view(self._low, tile)


def _tile_position(step: ParamStep, tile: Tile) -> tuple[int, tuple[int, ...]]:
    """Return the row-major index of a tile's first element in the whole parameter, and the strides of the latter."""
    # A tile has slices of its leading dims only, and is whole along the others.
    offset = [part.start for part in tile] + [0] * (step.param.ndim - len(tile))
    return step.plan.global_index(offset), step.plan.strides


@lru_cache(maxsize=4096)
def split_tiles(shape: tuple[int, ...], limit: int, depth: int) -> tuple[Tile, ...]:
    """Return the tiles of a parameter in memory order: none for an empty shard, one empty tile if it fits whole.

    Args:
        shape: shape of the parameter.
        limit: largest number of elements in a tile, unless the dims after `depth` are larger.
        depth: number of leading dims that may be cut.
    """
    if not prod(shape):
        return ()
    if prod(shape) <= limit:
        return ((),)
    slices: list[list[slice]] = []
    # Cut leading dims into single indices until the rest fits the limit, then cut that dim into runs.
    for dim, size in enumerate(shape[:depth]):
        length = max(1, limit // prod(shape[dim + 1 :]))
        slices.append([slice(start, min(start + length, size)) for start in range(0, size, length)])
        if length > 1:
            break
    return tuple(product(*slices))


def distinct_tiles(tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """Return the first tile of each shape."""
    return tuple({tuple(part.stop - part.start for part in tile): tile for tile in reversed(tiles)}.values())


def tile_view(tensor: Tensor, tile: Tile) -> Tensor:
    """Return the view of a parameter, or of its statistics, that belongs to a tile; dims of size 1 are kept whole."""
    if not tile:
        return tensor
    return tensor[tuple(slice(None) if size == 1 else part for size, part in zip(tensor.shape, tile, strict=False))]
