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
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scantling.numerics.device import FLOATS, DeviceTable, device_context, has_kernels, program_owners, triton_dtype
from scantling.numerics.torch_private import foreach_add_
from scantling.optim.codecs import noise_seed
from scantling.optim.state import HyperParams, ParamStep, is_plain_memory

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
        and is_plain_memory(step.grad)
        and has_kernels(layout.param.device)
    )


def scratch_bytes(steps: Sequence[ParamStep]) -> int:
    """Return the bytes that a step of these parameters allocates for its largest launch."""
    factored = [step for step in steps if step.view is not None]
    return max((sum(map(_partial_bytes, batch)) for batch in _split_batches(factored)), default=0)


def step_params(steps: Sequence[ParamStep]) -> None:
    """Take the step of parameters that `can_step` accepted."""
    # Group by everything that a kernel is compiled for.
    launches: dict[_LaunchKey, list[ParamStep]] = {}
    for step in steps:
        launches.setdefault(_launch_key(step), []).append(step)
    for key, members in launches.items():
        # Count before the launches: bias corrections and seeds read the new count.
        foreach_add_([step.state["step"] for step in members], 1.0)
        with device_context(members[0].param):
            for batch in _split_batches(members):
                if key.is_factored:
                    _launch_factored(key, batch)
                else:
                    _launch_full(key, batch)
        # Autograd does not see writes from kernels: a backward pass that still needs the old weights must raise.
        torch.autograd.graph.increment_version([step.param for step in members])


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


def _build_tables(
    key: _LaunchKey, steps: Sequence[ParamStep], tile: tuple[int, int]
) -> tuple[_TileGrid, Tensor, Tensor]:
    """Return the tiles of these parameters, the int64 table and the fp32 table of the kernels."""
    from scantling.optim.kernels.came_gpu import FIELDS, VALUES

    grid, field_table, value_table = _cached_tables(key, tuple(step.layout.sizes for step in steps), tile)
    fields = np.zeros((len(steps), len(FIELDS)), dtype=np.int64)  # one row per parameter
    for name, column in grid.fields.items():
        fields[:, FIELDS.index(name)] = column
    values = np.zeros((len(steps), len(VALUES) + _NUM_LOGS))
    numbers: dict[Any, tuple[float, ...]] = {}  # parameters of one group and shape share a row
    for step, field_row, value_row in zip(steps, fields, values, strict=True):
        pointers = step.layout.pointers or ()
        # `FIELDS` begins with the pointers, the gradient and the index.
        field_row[: len(pointers) + 2] = (*pointers, step.grad.data_ptr(), step.param_idx)
        shared = id(step.hyper), step.layout.sizes
        if shared not in numbers:
            numbers[shared] = _value_row(step.hyper, step.layout.sizes, is_factored=key.is_factored)
        value_row[:] = numbers[shared]
    table = field_table.upload(fields, key.device)
    return grid, table, _add_step_values(key, steps, table, value_table.upload(values, key.device))


def _value_row(hyper: HyperParams, sizes: tuple[int, int, int], *, is_factored: bool) -> tuple[float, ...]:
    """Return a row of the fp64 table on the host: `VALUES`, without what depends on the step, and log(beta)."""
    matrices, rows, cols = sizes
    beta1, beta2, beta3 = hyper.beta1, hyper.beta2, hyper.beta3
    # A learning rate in a tensor is multiplied on the device, so that the host never reads it.
    lr = 1.0 if isinstance(hyper.lr, Tensor) else hyper.lr
    # Weights of the sums in (1), (2), and in (7), (8) for residuals that lack a factor beta1.
    second = [beta2, (1.0 - beta2) * hyper.eps1]
    second += [(1.0 - beta2) / cols, (1.0 - beta2) / rows] if is_factored else [1.0 - beta2, 0.0]
    third = beta1**2 * (1.0 - beta3)
    return (
        *second,
        *(beta3, (1.0 - beta3) * hyper.eps2, third / cols, third / rows),
        *(1.0 - beta1, -lr * hyper.weight_decay, -lr, 1.0),
        *(matrices * rows * cols * hyper.clip_threshold**2, 0.0, 0.0),
        *(math.log(beta) if beta else -math.inf for beta in (beta1, beta2, beta3)),
    )


def _add_step_values(key: _LaunchKey, steps: Sequence[ParamStep], fields: Tensor, host_values: Tensor) -> Tensor:
    """Return the fp32 table with what depends on the step: bias corrections, seeds, learning rates in tensors."""
    from scantling.optim.kernels.came_gpu import FIELDS, VALUES

    values = host_values[:, : len(VALUES)].float()  # (parameters, VALUES)
    counters = torch.stack([step.state["step"] for step in steps])
    # Computed on the device from the step counters, so that a CUDA graph replays them.
    scale = values[:, VALUES.index("scale")]
    if key.debias:
        correction = -torch.expm1(counters.double()[:, None] * host_values[:, len(VALUES) :])  # (parameters, 3)
        values[:, VALUES.index("second")] = correction[:, 1].sqrt()
        factor = correction[:, 2].sqrt() / correction[:, 0] if key.confidence else 1.0 / correction[:, 0]
        scale.copy_(host_values[:, VALUES.index("scale")] * factor)
    if key.lr is not None:
        scale.mul_(steps[0].hyper.lr)
        values[:, VALUES.index("decay")].mul_(steps[0].hyper.lr)
    if key.momentum == "int4" or key.rounding == "stochastic":
        # Seeds are int32 bits in columns of the fp32 table.
        seeds, param_idx = values.view(torch.int32), fields[:, FIELDS.index("param_idx")]
        for stream in range(2):
            seeds[:, VALUES.index(f"seed{stream}")] = noise_seed(counters, param_idx, stream)
    return values


# --- launches -----------------------------------------------------------------------------------------------------


def _launch_factored(key: _LaunchKey, steps: Sequence[ParamStep]) -> None:
    from scantling.optim.kernels import came_gpu as kernels

    fields, values = kernels.FIELDS, kernels.VALUES
    tile = ROWS, COLS
    grid, table, numbers = _build_tables(key, steps, tile)
    num_tiles, num_matrices = len(grid.tiles), len(grid.matrices)
    new = table.new_empty
    row_parts, col_parts = new(grid.num_row_parts, dtype=torch.float32), new(grid.num_col_parts, dtype=torch.float32)
    # totals: a sum of squares per tile; clips: a factor per parameter; means: a root per matrix
    totals, clips = new(num_tiles, dtype=torch.float32), new(len(steps), dtype=torch.float32)
    means, res_means = (new(num_matrices, dtype=torch.float32) for _ in range(2))
    param, grad = map(triton_dtype, (key.param, key.grad))
    shape = {"aligned": key.is_aligned, "rows": tile[0], "cols": tile[1]}
    codec = {"momentum": key.momentum, "bytes": key.scale_bytes}

    # Finish row and column averages from the partial sums, then the root of their mean.
    def average(row: str, col: str, first: str, means: Tensor) -> None:
        for weight, (owners, firsts, parts, *names) in enumerate(
            (
                (grid.rows, grid.first_rows, row_parts, row, "row_part", "across", "rows"),
                (grid.cols, grid.first_cols, col_parts, col, "col_part", "down", "cols"),
            ),
            start=2,
        ):
            columns = map(fields.index, names)
            kernels.add_sums[(len(owners),)](
                *(table, numbers, owners, firsts, parts, *columns, values.index(first), weight, _LINE)
            )
        kernels.root_means[(num_matrices,)](table, grid.matrices, means, fields.index(row), _MATRIX)

    tiles, per_tile = grid.tiles, (num_tiles,)
    # (1), (2)
    kernels.square_parts[per_tile](table, tiles, row_parts, col_parts, grad=grad, **shape)
    average("row", "col", "beta2", means)
    # (3), (4)
    kernels.whitened_squares[per_tile](table, numbers, tiles, means, totals, grad=grad, **shape)
    kernels.clip_factors[(len(steps),)](table, numbers, totals, clips, key.maximize, _MATRIX)
    if key.confidence:
        # (5) to (8)
        kernels.instability_parts[per_tile](
            *(table, numbers, tiles, means, clips, row_parts, col_parts), grad=grad, **codec, **shape
        )
        average("res_row", "res_col", "beta3", res_means)
    # (9), (10), and (5) if the momentum has not been written yet
    kernels.apply[per_tile](
        *(table, numbers, tiles, means, res_means, clips, param, grad),
        **codec,
        rounding=key.rounding,
        confidence=key.confidence,
        decays=key.decays,
        **shape,
    )


def _launch_full(key: _LaunchKey, steps: Sequence[ParamStep]) -> None:
    from scantling.optim.kernels import came_gpu as kernels

    grid, table, numbers = _build_tables(key, steps, (1, _VECTOR))
    totals, clips = (table.new_empty(size, dtype=torch.float32) for size in (len(grid.tiles), len(steps)))
    param, grad = map(triton_dtype, (key.param, key.grad))
    shape = {"aligned": key.is_aligned, "size": _VECTOR}
    per_tile = (len(grid.tiles),)
    # second moment and sums of squares, then (4), then (5) and (10)
    kernels.moment_squares[per_tile](table, numbers, grid.tiles, totals, grad=grad, **shape)
    kernels.clip_factors[(len(steps),)](table, numbers, totals, clips, key.maximize, _MATRIX)
    kernels.apply_moment[per_tile](
        *(table, numbers, grid.tiles, clips, param, grad, key.momentum, key.rounding, key.decays), **shape
    )
