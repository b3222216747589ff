"""CAME's step on a GPU with the Triton kernels of `kernels/came_gpu.py`: all parameters of a kind in each launch.

A kind is everything that kernels are compiled for: dtypes, codec, rounding, confidence. Shapes, addresses and
hyper-parameters are in tables on the device, which are copied only if something in them has changed: a step takes some
thirty launches for each kind, whatever the number of parameters, and a new shape compiles nothing. Nothing waits for
the device. A CUDA graph can capture a step after one step outside of the capture; the buffers of a captured step are
kept forever.

Without Triton, or with SCANTLING_NATIVE=0, `_eager.py` takes the same step with many launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scantling.numerics.device import FLOATS, DeviceTable, device_context, has_kernels, program_owners, triton_dtype
from scantling.optim._eager import PartialSum
from scantling.optim.codecs import noise_seed
from scantling.optim.state import HyperParams, ParamLayout, ParamStep, is_plain_memory

DEVICES = ("cuda",)
ROWS = 32
COLS = 128
"""Rows and columns of a tile. The row of a tile is one block of int8, or two blocks of int4."""
MAX_SCRATCH = 48 << 20
"""Bytes of partial sums of all parameters in one launch; a single parameter may exceed it."""
_VECTOR = 4096
"""Elements of a tile of a parameter with a full second moment."""
_LINE = 128
"""Row averages, or column averages, that one program finishes."""
_MATRIX = 1024
"""Elements that a program which sums over a whole matrix reads at a time."""
_MAX_GRAD = 2.0**63
"""Largest magnitude of a gradient in a second moment, whose square is then at most that of `stages.squared`."""


def can_step(step: ParamStep) -> bool:
    """True if the kernels support a parameter: fp32, bf16 or fp16, rows before columns, contiguous."""
    layout = step.layout
    return (
        layout.pointers is not None
        and layout.param.device.type in DEVICES
        and step.grad.device == layout.param.device
        and layout.param.dtype in FLOATS
        and step.grad.dtype in FLOATS
        and layout.is_row_major
        and layout.place is not None
        and layout.param.numel() > 0
        and is_plain_memory(step.grad)
        and has_kernels(layout.param.device)
    )


def scratch_bytes(steps: Sequence[ParamStep]) -> int:
    """Return the bytes that a step of these parameters allocates for its largest launch."""
    factored = [step for step in steps if step.view is not None]
    return max((sum(map(_partial_bytes, batch)) for batch in _split_batches(factored)), default=0)


def batch_stages(steps: Sequence[ParamStep]) -> Iterator[BatchStages]:
    """Yield the stages of parameters that `can_step` accepted, in batches that share their launches."""
    # Group by everything that a kernel is compiled for.
    launches: dict[_LaunchKey, list[ParamStep]] = {}
    for step in steps:
        launches.setdefault(_launch_key(step), []).append(step)
    for key, members in launches.items():
        for batch in _split_batches(members):
            yield _FactoredStages(key, batch) if key.is_factored else _FullStages(key, batch)


class _LaunchKey(NamedTuple):
    """Properties that all parameters of one launch share."""

    device: torch.device
    is_factored: bool
    param: torch.dtype
    grad: torch.dtype
    momentum: str
    scale_bytes: int
    rounding: str
    confidence: bool
    debias: bool
    maximize: bool
    decays: bool
    is_aligned: bool
    is_sharded: bool
    lr: int | None
    """Id of a learning rate in a tensor."""


def _launch_key(step: ParamStep) -> _LaunchKey:
    hyper, param, state = step.hyper, step.param, step.state
    is_factored = step.view is not None
    momentum = "none" if hyper.momentum is None else hyper.momentum if is_factored else "fp32"
    # Tensors in the shape of the parameter, which kernels read in vectors of 16 bytes.
    large = [state[key] for key in ("exp_avg", "exp_avg_codes", "exp_avg_sq", "low") if key in state]
    return _LaunchKey(
        device=param.device,
        is_factored=is_factored,
        param=param.dtype,
        grad=step.grad.dtype,
        momentum=momentum,
        scale_bytes=state["exp_avg_scale"].itemsize if "exp_avg_scale" in state else 0,
        rounding=hyper.rounding if param.dtype == torch.bfloat16 else "nearest",
        confidence=is_factored and hyper.confidence,
        debias=hyper.debias,
        maximize=hyper.maximize,
        decays=hyper.weight_decay != 0,
        is_aligned=step.layout.sizes[2] % 16 == 0
        and all(each.data_ptr() % 16 == 0 for each in (param, step.grad, *large)),
        is_sharded=bool(step.plan.sharded_dims),
        lr=id(hyper.lr) if isinstance(hyper.lr, Tensor) else None,
    )


def _partial_bytes(step: ParamStep) -> int:
    """Return the bytes of the partial sums of a factored parameter: one for each row, or column, of each tile."""
    matrices, rows, cols = step.layout.sizes
    return 4 * matrices * (rows * -(-cols // COLS) + cols * -(-rows // ROWS))


def _split_batches(steps: Sequence[ParamStep]) -> Iterator[list[ParamStep]]:
    """Yield batches of parameters whose scratch together fits into `MAX_SCRATCH`."""
    batch: list[ParamStep] = []
    total = 0
    for step in steps:
        size = 0 if step.view is None else _partial_bytes(step)
        if batch and total + size > MAX_SCRATCH:
            yield batch
            batch, total = [], 0
        batch.append(step)
        total += size
    if batch:
        yield batch


# --- tables -------------------------------------------------------------------------------------------------------


class _TileGrid:
    """Tiles and partial sums of parameters of given sizes, and the parameter that each program works on.

    Args:
        sizes: (matrices, rows, columns) of each parameter.
        tile: rows and columns of a tile.
        device: device of the tables.

    Attributes:
        fields: columns of the table of parameters that depend on sizes alone, by name.
        tiles, rows, cols, matrices: index of the parameter that each program works on, in launches with one program for
            each tile, `_LINE` row averages, `_LINE` column averages or matrix.
        first_rows, first_cols: first program of each parameter in launches over row or column averages.
        num_row_parts, num_col_parts: number of partial sums.
    """

    def __init__(self, sizes: tuple[tuple[int, int, int], ...], tile: tuple[int, int], device: torch.device) -> None:
        matrices, rows, cols = np.array(sizes, dtype=np.int64).T  # (parameters,) each
        # tiles of one matrix along its rows and its columns, (parameters,) each
        down, across = -(-rows // tile[0]), -(-cols // tile[1])
        tiles, row_parts, col_parts = matrices * down * across, matrices * rows * across, matrices * down * cols
        self.fields = {
            "rows": rows,
            "cols": cols,
            "matrices": matrices,
            "down": down,
            "across": across,
            "first": _exclusive_cumsum(tiles),
            "first_matrix": _exclusive_cumsum(matrices),
            "row_part": _exclusive_cumsum(row_parts),
            "col_part": _exclusive_cumsum(col_parts),
        }
        # programs that finish the row averages, and the column averages, of each parameter
        lines = [-(-(matrices * each) // _LINE) for each in (rows, cols)]
        owners = [program_owners(counts, device) for counts in (tiles, *lines, matrices)]
        self.tiles, self.rows, self.cols, self.matrices = owners
        firsts = [torch.from_numpy(_exclusive_cumsum(counts).astype(np.int32)).to(device) for counts in lines]
        self.first_rows, self.first_cols = firsts
        self.num_row_parts, self.num_col_parts = int(row_parts.sum()), int(col_parts.sum())


def _exclusive_cumsum(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the exclusive prefix sum."""
    return np.cumsum(counts) - counts  # type: ignore[no-any-return]


class _CachedTables(NamedTuple):
    grid: _TileGrid
    fields: DeviceTable
    values: DeviceTable


@lru_cache(maxsize=512)
def _cached_tables(key: _LaunchKey, sizes: tuple[tuple[int, int, int], ...], tile: tuple[int, int]) -> _CachedTables:
    return _CachedTables(_TileGrid(sizes, tile, key.device), DeviceTable(), DeviceTable())


_NUM_LOGS = 3
"""Columns after those of the kernels: logarithms of the three betas."""


class BatchStages:
    """The four stages of several parameters of a kind, called in this order, see `_eager.ParamStages`.

    Each of the first three returns for every parameter what must be summed over ranks before the next is called. After
    `begin`, the stages can be called again for the next step: they hold no gradients.

    Args:
        key: kind of the parameters.
        steps: steps of the parameters.
        tile: rows and columns of a tile.

    Attributes:
        indices: indices of the parameters in the optimizer.
        device: device of the parameters.
        is_aligned: True if every gradient must be at a multiple of 16 bytes.
        is_sharded: True if the partial sums must be summed over ranks.
    """

    def __init__(self, key: _LaunchKey, steps: Sequence[ParamStep], tile: tuple[int, int]) -> None:
        from scantling.optim.kernels import came_gpu

        self._key, self._kernels, self._layouts = key, came_gpu, [step.layout for step in steps]
        self.indices = [step.param_idx for step in steps]
        self.device, self.is_aligned, self.is_sharded = key.device, key.is_aligned, key.is_sharded
        self._partial: dict[str, list[list[PartialSum]]] = {}  # partial sums, the same tensors in every step
        sizes = tuple(layout.sizes for layout in self._layouts)
        self._grid, self._field_table, self._value_table = _cached_tables(key, sizes, tile)
        # Parameters of one group, shape and place share a row of numbers: the row of each, and the first of each row.
        kinds = [(id(step.hyper), *_value_kind(step.layout)) for step in steps]
        rows: dict[Any, int] = {}
        self._rows = np.array([rows.setdefault(kind, len(rows)) for kind in kinds])
        self._firsts = [kinds.index(kind) for kind in rows]
        self._params = [layout.param for layout in self._layouts]
        self._fields = self._build_fields()
        # totals: a sum of squares per tile; sums and clips: one and a factor per parameter
        self._totals, self._sums, self._clips = map(self._new, (len(self._grid.tiles), len(steps), len(steps)))
        self.begin([step.grad.data_ptr() for step in steps], [step.hyper for step in steps])

    def begin(self, grads: Sequence[int] | np.ndarray[Any, Any], hypers: Sequence[HyperParams]) -> None:
        """Begin a step of the same parameters.

        Args:
            grads: addresses of their gradients.
            hypers: their hyper-parameters, which may differ from those of earlier steps in numbers only.
        """
        self._fields[:, self._kernels.FIELDS.index("grad")] = grads
        self._table = self._field_table.upload(self._fields.copy(), self._key.device)
        values = np.array([_value_row(self._layouts[i], hypers[i]) for i in self._firsts])[self._rows]
        self._host_values = self._value_table.upload(values, self._key.device)
        self._numbers = self._host_values[:, : len(self._kernels.VALUES)].float()  # (parameters, VALUES)
        self._lr = hypers[0].lr

    def accumulate(self) -> list[list[PartialSum]]:
        raise NotImplementedError

    def whiten(self) -> list[list[PartialSum]]:
        raise NotImplementedError

    def update_instability(self) -> list[list[PartialSum]]:
        raise NotImplementedError

    def apply(self) -> None:
        raise NotImplementedError

    def _new(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=self._key.device)

    def _device(self) -> AbstractContextManager[object]:
        return device_context(self._clips)

    def _build_fields(self) -> np.ndarray[Any, Any]:
        """Return the int64 table of the kernels, one row per parameter, without the gradients."""
        names = self._kernels.FIELDS
        fields = np.zeros((len(self._layouts), len(names)), dtype=np.int64)
        for name, column in self._grid.fields.items():
            fields[:, names.index(name)] = column
        for index, layout, row in zip(self.indices, self._layouts, fields, strict=True):
            # `FIELDS` begins with the addresses of the layout, and the gradient.
            first = *(layout.pointers or ()), 0, *_mean_sources(layout), index, _mean_length(layout)
            row[: len(first) + 3] = *first, *(layout.place or ())
        return fields

    def _count_step(self) -> None:
        """Count the step; add what depends on it to the numbers: corrections, seeds, learning rates in tensors."""
        key, names, numbers = self._key, self._kernels.VALUES, self._numbers
        # Computed on the device from the step counters, so that a CUDA graph replays them.
        stacked = self._new(len(self._layouts))
        self._kernels.count_steps[(-(-len(stacked) // _LINE),)](self._table, stacked, len(stacked), _LINE)
        scale = numbers[:, names.index("scale")]
        if key.debias:
            correction = -torch.expm1(stacked.double()[:, None] * self._host_values[:, len(names) :])  # (parameters, 3)
            numbers[:, names.index("second")] = correction[:, 1].sqrt()
            factor = correction[:, 2].sqrt() / correction[:, 0] if key.confidence else 1.0 / correction[:, 0]
            scale.copy_(self._host_values[:, names.index("scale")] * factor)
        if key.lr is not None:
            scale.mul_(self._lr)
            numbers[:, names.index("decay")].mul_(self._lr)
        if key.momentum == "int4" or key.rounding == "stochastic":
            # Seeds are int32 bits in columns of the fp32 table.
            seeds, param_idx = numbers.view(torch.int32), self._table[:, self._kernels.FIELDS.index("param_idx")]
            for stream in range(2):
                seeds[:, names.index(f"seed{stream}")] = noise_seed(stacked, param_idx, stream)

    def _sum_totals(self) -> list[list[PartialSum]]:
        """Return the sum of squares of each parameter, if this rank has shards of them."""
        if not self.is_sharded:
            return self._nothing()
        self._kernels.add_totals[(len(self._sums),)](self._table, self._totals, self._sums, _MATRIX)
        if "totals" not in self._partial:
            groups = [layout.plan.groups(range(layout.param.ndim)) for layout in self._layouts]
            self._partial["totals"] = [[pair] for pair in zip(self._sums.unbind(), groups, strict=True)]
        return self._partial["totals"]

    def _nothing(self) -> list[list[PartialSum]]:
        return self._partial.setdefault("nothing", [[] for _ in self._layouts])

    def _clip(self) -> None:
        """Compute (4) from the sums of squares, once they are summed over ranks."""
        totals = self._sums if self.is_sharded else self._totals
        self._kernels.clip_factors[(len(self._clips),)](
            *(self._table, self._numbers, totals, self._clips, self._key.maximize, self.is_sharded, _MATRIX)
        )

    def _finish(self) -> None:
        # Autograd does not see writes from kernels: a backward pass that still needs the old weights must raise.
        torch.autograd.graph.increment_version(self._params)


class _FactoredStages(BatchStages):
    """Stages of parameters with a factored second moment."""

    def __init__(self, key: _LaunchKey, steps: Sequence[ParamStep]) -> None:
        super().__init__(key, steps, (ROWS, COLS))
        # a root per matrix
        self._means, self._res_means = (self._new(len(self._grid.matrices)) for _ in range(2))
        self._grad = triton_dtype(key.grad)
        self._shape = {"aligned": key.is_aligned, "rows": ROWS, "cols": COLS}
        self._codec = {"momentum": key.momentum, "bytes": key.scale_bytes}

    def accumulate(self) -> list[list[PartialSum]]:
        with self._device():
            parts = self._new_parts()
            self._kernels.square_parts[(len(self._grid.tiles),)](
                *(self._table, self._numbers, self._grid.tiles, *parts), grad=self._grad, **self._shape
            )
            return self._average(parts, "row", "col", "2")

    def whiten(self) -> list[list[PartialSum]]:
        with self._device():
            self._count_step()
            self._root_means("mean", self._means)
            self._kernels.whitened_squares[(len(self._grid.tiles),)](
                *(self._table, self._numbers, self._grid.tiles, self._means, self._totals),
                grad=self._grad,
                **self._shape,
            )
            return self._sum_totals()

    def update_instability(self) -> list[list[PartialSum]]:
        with self._device():
            self._clip()
            if not self._key.confidence:
                return self._nothing()
            parts = self._new_parts()
            self._kernels.instability_parts[(len(self._grid.tiles),)](
                *(self._table, self._numbers, self._grid.tiles, self._means, self._clips, *parts),
                grad=self._grad,
                **self._codec,
                **self._shape,
            )
            return self._average(parts, "res_row", "res_col", "3")

    def apply(self) -> None:
        key = self._key
        with self._device():
            if key.confidence:
                self._root_means("res_mean", self._res_means)
            self._kernels.apply[(len(self._grid.tiles),)](
                *(self._table, self._numbers, self._grid.tiles, self._means, self._res_means, self._clips),
                *(triton_dtype(key.param), self._grad),
                **self._codec,
                rounding=key.rounding,
                confidence=key.confidence,
                decays=key.decays,
                **self._shape,
            )
        self._finish()

    def _new_parts(self) -> tuple[Tensor, Tensor]:
        """Return memory for the sums of the tiles over rows and over columns, which one stage needs at a time."""
        return self._new(self._grid.num_row_parts), self._new(self._grid.num_col_parts)

    def _average(self, parts: tuple[Tensor, Tensor], row: str, col: str, beta: str) -> list[list[PartialSum]]:
        """Finish row and column averages from the sums of the tiles."""
        grid, fields, values = self._grid, self._kernels.FIELDS, self._kernels.VALUES
        for owners, firsts, part, first_value, *names in (
            (grid.rows, grid.first_rows, parts[0], f"row_beta{beta}", row, "row_part", "across", "rows"),
            (grid.cols, grid.first_cols, parts[1], f"col_beta{beta}", col, "col_part", "down", "cols"),
        ):
            self._kernels.add_sums[(len(owners),)](
                *(self._table, self._numbers, owners, firsts, part, *map(fields.index, names)),
                *(values.index(first_value), _LINE),
            )
        if not self.is_sharded:
            return self._nothing()
        if row not in self._partial:
            self._partial[row] = [
                [(each.state[row], each.plan.groups(each.view[1])), (each.state[col], each.plan.groups(each.view[0]))]
                for each in self._layouts
                if each.view is not None
            ]
        return self._partial[row]

    def _root_means(self, field: str, means: Tensor) -> None:
        place = self._kernels.FIELDS.index(field)
        self._kernels.root_means[(len(means),)](self._table, self._grid.matrices, means, place, _MATRIX)


class _FullStages(BatchStages):
    """Stages of parameters with a full second moment, each one row."""

    def __init__(self, key: _LaunchKey, steps: Sequence[ParamStep]) -> None:
        super().__init__(key, steps, (1, _VECTOR))
        self._grad = triton_dtype(key.grad)
        self._shape = {"aligned": key.is_aligned, "size": _VECTOR}

    def accumulate(self) -> list[list[PartialSum]]:
        return self._nothing()

    def whiten(self) -> list[list[PartialSum]]:
        with self._device():
            self._count_step()
            self._kernels.moment_squares[(len(self._grid.tiles),)](
                *(self._table, self._numbers, self._grid.tiles, self._totals), grad=self._grad, **self._shape
            )
            return self._sum_totals()

    def update_instability(self) -> list[list[PartialSum]]:
        return self._nothing()

    def apply(self) -> None:
        key = self._key
        with self._device():
            self._clip()
            self._kernels.apply_moment[(len(self._grid.tiles),)](
                *(self._table, self._numbers, self._grid.tiles, self._clips, triton_dtype(key.param), self._grad),
                *(key.momentum, key.rounding, key.decays),
                **self._shape,
            )
        self._finish()


class FlatCopies:
    """Tensors that are copied into one flat tensor and back, each in one launch.

    Args:
        tensors: contiguous tensors of one dtype, which stay at their addresses.

    Attributes:
        flat: the flat tensor.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        first = tensors[0]
        self._tensors = list(tensors)  # kept alive: the kernels know only their addresses
        self._kind = triton_dtype(first.dtype)
        lengths = np.array([tensor.numel() for tensor in tensors], dtype=np.int64)
        programs = -(-lengths // _MATRIX)
        addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        table = np.stack([addresses, lengths, _exclusive_cumsum(lengths), _exclusive_cumsum(programs)], axis=1)
        self._table = torch.from_numpy(table).to(first.device)
        self._owners = program_owners(programs, first.device)
        self.flat = torch.empty(int(lengths.sum()), dtype=first.dtype, device=first.device)

    def gather(self) -> None:
        """Copy the tensors into the flat one."""
        self._copy(to_flat=True)

    def scatter(self) -> None:
        """Copy the flat tensor into the others."""
        self._copy(to_flat=False)

    def _copy(self, *, to_flat: bool) -> None:
        from scantling.optim.kernels import came_gpu

        with device_context(self.flat):
            came_gpu.copy_flat[(len(self._owners),)](
                self._table, self._owners, self.flat, kind=self._kind, to_flat=to_flat, size=_MATRIX
            )


def _mean_sources(layout: ParamLayout) -> tuple[int, int]:
    """Return the addresses of the averages whose mean is that of the matrix: those that this rank has in full."""
    row, col, res_row, res_col = (layout.address(key) for key in ("row", "col", "res_row", "res_col"))
    return (col, res_col) if layout.has_sharded_rows else (row, res_row)


def _mean_length(layout: ParamLayout) -> int:
    _, rows, cols = layout.sizes
    return cols if layout.has_sharded_rows else rows


def _value_kind(layout: ParamLayout) -> tuple[Any, ...]:
    """Return what `_value_row` depends on, besides the hyper-parameters."""
    return layout.first_ranks, layout.plan.shape, layout.view


def _value_row(layout: ParamLayout, hyper: HyperParams) -> tuple[float, ...]:
    """Return the row of a parameter in the fp64 table: `VALUES`, without what depends on the step, and log(beta)."""
    view, plan = layout.view, layout.plan
    # A learning rate in a tensor is multiplied on the device, so that the host never reads it.
    lr = 1.0 if isinstance(hyper.lr, Tensor) else hyper.lr
    # sizes of the whole matrix
    rows, cols = (1, 1) if view is None else (prod(plan.shape[dim] for dim in dims) for dims in view)

    def averages(beta: float, eps: float, weight: float) -> Iterator[float]:
        """Yield beta, (1 - beta) eps and the weight of the sum, of row and of column averages."""
        for is_first, count in zip(layout.first_ranks, (cols, rows), strict=True):
            # The old value counts once in the sum over ranks.
            yield from (beta, (1.0 - beta) * eps) if is_first else (0.0, 0.0)
            yield weight / count

    return (
        *averages(hyper.beta2, hyper.eps1, 1.0 - hyper.beta2),
        # (7), (8) for residuals that lack a factor beta1
        *averages(hyper.beta3, hyper.eps2, hyper.beta1**2 * (1.0 - hyper.beta3)),
        *(1.0 - hyper.beta1, -lr * hyper.weight_decay, -lr, 1.0),
        *(plan.numel * hyper.clip_threshold**2, _MAX_GRAD / math.sqrt(max(rows, cols)), 0.0, 0.0),
        *(math.log(beta) if beta else -math.inf for beta in (hyper.beta1, hyper.beta2, hyper.beta3)),
    )
