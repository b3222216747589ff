"""CAME's step on a GPU by the kernels of `kernels/came_gpu.py`: all parameters of a kind in each launch.

A kind is what kernels are compiled for: dtypes, momentum, rounding, confidence. Shapes, addresses and hyper-parameters
are in tables on the device, which are sent again only where something in them has changed, so that a step is some
thirty launches a kind, whatever the number of parameters, and no shape compiles anything. Nothing waits for the device.
A CUDA graph can capture a step once one has been taken without; what it replays is then kept for good.

Where there is no Triton, or where SCANTLING_NATIVE=0 says so, the tiles of `_eager.py` do the same with many launches.
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
from scantling.optim._eager import Job, is_plain
from scantling.optim._random import seed_of

DEVICES = ("cuda",)
ROWS = 32
COLS = 128
"""Of a tile. A block of int8 is the row of one tile, and two blocks of int4 are."""
FIELDS = (
    *("param", "grad", "momentum", "scale", "low", "row", "col", "res_row", "res_col", "moment"),
    *("rows", "cols", "matrices", "first", "down", "across", "row_part", "col_part", "first_matrix", "ordinal"),
)
"""Of a parameter in the table of int64: addresses; sizes; its first tile, tiles down and across a matrix, where its
parts of sums over rows and columns begin, its first matrix among all, and its number in the optimizer."""
VALUES = (
    *("beta2", "kept2", "row2", "col2", "beta3", "kept3", "row3", "col3"),
    *("gain1", "decay", "scale", "second", "size", "seed0", "seed1"),
)
"""Of a parameter in the table of floats: beta, (1 - beta) eps and the weights of both sums, of the second moment and of
the instability; 1 - beta1; -lr w; what the update is multiplied with; the root of the second moment's correction; what
the sum of squares is divided by; seeds of noise, whose bits they spell."""
MOST_SCRATCH = 48 << 20
"""Bytes of parts of sums that parameters take together in one launch; one alone takes what it needs."""
_VECTOR = 4096
"""Elements of a tile of a parameter with a full second moment."""
_LINE = 128
"""Rows, or columns, whose averages one program finishes."""
_MATRIX = 1024
"""Numbers that a program which sums over many reads at a time."""


def can_step(job: Job) -> bool:
    """Whether the kernels know this parameter: fp32, bf16 or fp16, rows before columns, all of it contiguous."""
    if job.param.device.type not in DEVICES or job.plan.cuts or not has_kernels(job.param.device):
        return False
    if not {job.param.dtype, job.grad.dtype} <= set(FLOATS) or not job.is_stacked:
        return False
    return all(is_plain(each, DEVICES) for each in (job.param, job.grad)) and all(
        each.device == job.param.device and each.is_contiguous() for each in job.state.values()
    )


def scratch_bytes(jobs: Sequence[Job]) -> int:
    """What a step of so many parameters takes beside parameters, gradients and state: the largest launch."""
    factored = [job for job in jobs if job.view is not None]
    return max((sum(map(_parts_bytes, batch)) for batch in _batches(factored)), default=0)


def step(jobs: Sequence[Job]) -> None:
    """One step of each of these parameters, which `can_step`."""
    kinds: dict[_Kind, list[Job]] = {}
    for job in jobs:
        kinds.setdefault(_kind_of(job), []).append(job)
    for kind, own in kinds.items():
        foreach_add_([job.state["step"] for job in own], 1.0)
        with device_context(own[0].param):
            for batch in _batches(own):
                if kind.is_factored:
                    _step_factored(kind, batch)
                else:
                    _step_moments(kind, batch)
        # autograd does not see what kernels write: a backward pass that still needs the old weights must be told
        torch.autograd.graph.increment_version([job.param for job in own])


class _Kind(NamedTuple):
    """What parameters of one launch have in common."""

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
    """Of a learning rate in a tensor, which one."""


def _kind_of(job: Job) -> _Kind:
    hyper, param, state = job.hyper, job.param, job.state
    is_factored = job.view is not None
    momentum = "none" if hyper.momentum is None else hyper.momentum if is_factored else "fp32"
    return _Kind(
        device=param.device,
        is_factored=is_factored,
        param=param.dtype,
        grad=job.grad.dtype,
        momentum=momentum,
        scale_bytes=state["exp_avg_scale"].itemsize if "exp_avg_scale" in state else 0,
        rounding=hyper.rounding if param.dtype == torch.bfloat16 else "nearest",
        confidence=is_factored and hyper.confidence,
        debias=hyper.debias,
        maximize=hyper.maximize,
        decays=hyper.weight_decay != 0,
        is_aligned=job.sizes[2] % 16 == 0
        and all(each.data_ptr() % 16 == 0 for each in (param, job.grad, *_moved(state))),
        lr=id(hyper.lr) if isinstance(hyper.lr, Tensor) else None,
    )


def _moved(state: dict[str, Tensor]) -> Iterator[Tensor]:
    """The tensors of a state that are as large as the parameter."""
    for key in ("exp_avg", "exp_avg_codes", "exp_avg_sq", "low"):
        if key in state:
            yield state[key]


def _parts_bytes(job: Job) -> int:
    matrices, rows, cols = job.sizes
    return 4 * matrices * (rows * -(-cols // COLS) + cols * -(-rows // ROWS))


def _batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Parameters whose scratch fits into `MOST_SCRATCH` together."""
    batch: list[Job] = []
    size = 0
    for job in jobs:
        own = 0 if job.view is None else _parts_bytes(job)
        if batch and size + own > MOST_SCRATCH:
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += own
    if batch:
        yield batch


# --- tables -------------------------------------------------------------------------------------------------------


class _Layout:
    """Where the parts of parameters of these sizes lie, and which program works on what.

    Args:
        sizes: (matrices, rows, columns) of each parameter.
        tile: rows and columns of a tile.
        device: of the tables.

    Attributes:
        fields: what the table of parameters has of it, by its names there.
        tiles, rows, cols, matrices: of each program the parameter it works on.
        first_rows, first_cols: of each parameter its first program among those.
        row_parts, col_parts: how many parts of sums there are.
    """

    def __init__(self, sizes: tuple[tuple[int, int, int], ...], tile: tuple[int, int], device: torch.device) -> None:
        matrices, rows, cols = np.array(sizes, dtype=np.int64).T
        down, across = -(-rows // tile[0]), -(-cols // tile[1])
        tiles, row_parts, col_parts = matrices * down * across, matrices * rows * across, matrices * down * cols
        self.fields = {
            "rows": rows,
            "cols": cols,
            "matrices": matrices,
            "down": down,
            "across": across,
            "first": _before(tiles),
            "first_matrix": _before(matrices),
            "row_part": _before(row_parts),
            "col_part": _before(col_parts),
        }
        lines = [-(-(matrices * each) // _LINE) for each in (rows, cols)]
        owners = [program_owners(counts, device) for counts in (tiles, *lines, matrices)]
        self.tiles, self.rows, self.cols, self.matrices = owners
        firsts = [torch.from_numpy(_before(counts).astype(np.int32)).to(device) for counts in lines]
        self.first_rows, self.first_cols = firsts
        self.row_parts, self.col_parts = int(row_parts.sum()), int(col_parts.sum())


def _before(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of each the sum of those before it."""
    return np.cumsum(counts) - counts  # type: ignore[no-any-return]


class _Tables(NamedTuple):
    layout: _Layout
    fields: DeviceTable
    values: DeviceTable


@lru_cache(maxsize=512)
def _tables_of(kind: _Kind, sizes: tuple[tuple[int, int, int], ...], tile: tuple[int, int]) -> _Tables:
    return _Tables(_Layout(sizes, tile, kind.device), DeviceTable(), DeviceTable())


_ADDRESSES = {
    "scale": "exp_avg_scale",
    "low": "low",
    "row": "row",
    "col": "col",
    "res_row": "res_row",
    "res_col": "res_col",
    "moment": "exp_avg_sq",
}
_LOGS = 3
"""Columns after those of the kernels: the logarithms of the three betas."""


def _tables(kind: _Kind, jobs: Sequence[Job], tile: tuple[int, int]) -> tuple[_Layout, Tensor, Tensor]:
    """Of these parameters the layout, the table of int64 and that of floats."""
    layout, sent_fields, sent_values = _tables_of(kind, tuple(job.sizes for job in jobs), tile)
    fields = np.zeros((len(jobs), len(FIELDS)), dtype=np.int64)
    for name, column in layout.fields.items():
        fields[:, FIELDS.index(name)] = column
    values = np.zeros((len(jobs), len(VALUES) + _LOGS))
    numbers_of: dict[Any, tuple[float, ...]] = {}
    for job, addresses, numbers in zip(jobs, fields, values, strict=True):
        state = job.state
        momentum = state.get("exp_avg_codes", state.get("exp_avg"))
        addresses[: 3 + len(_ADDRESSES)] = (
            job.param.data_ptr(),
            job.grad.data_ptr(),
            0 if momentum is None else momentum.data_ptr(),
            *(state[key].data_ptr() if key in state else 0 for key in _ADDRESSES.values()),
        )
        addresses[FIELDS.index("ordinal")] = job.ordinal
        key = id(job.hyper), job.sizes
        if key not in numbers_of:
            numbers_of[key] = _numbers(job)
        numbers[:] = numbers_of[key]
    table = sent_fields.upload(fields, kind.device)
    return layout, table, _finished(kind, jobs, table, sent_values.upload(values, kind.device))


def _numbers(job: Job) -> tuple[float, ...]:
    """A row of the table of floats as it is sent, with what `_finished` needs."""
    hyper, (_, rows, cols) = job.hyper, job.sizes
    beta1, beta2, beta3 = hyper.beta1, hyper.beta2, hyper.beta3
    lr = 1.0 if isinstance(hyper.lr, Tensor) else hyper.lr
    second = [beta2, (1.0 - beta2) * hyper.eps1]
    second += [(1.0 - beta2) / cols, (1.0 - beta2) / rows] if job.view is not None else [1.0 - beta2, 0.0]
    third = beta1**2 * (1.0 - beta3)
    return (
        *second,
        *(beta3, (1.0 - beta3) * hyper.eps2, third / cols, third / rows),
        *(1.0 - beta1, -lr * hyper.weight_decay, -lr, 1.0),
        *(job.param.numel() * hyper.clip_threshold**2, 0.0, 0.0),
        *(math.log(beta) if beta else -math.inf for beta in (beta1, beta2, beta3)),
    )


def _finished(kind: _Kind, jobs: Sequence[Job], fields: Tensor, sent: Tensor) -> Tensor:
    """The table of floats with what depends on the step, on the device: corrections of bias, seeds, learning rates."""
    values = sent[:, : len(VALUES)].float()
    steps = torch.stack([job.state["step"] for job in jobs])
    scale = values[:, VALUES.index("scale")]
    if kind.debias:
        correction = -torch.expm1(steps.double()[:, None] * sent[:, len(VALUES) :])
        values[:, VALUES.index("second")] = correction[:, 1].sqrt()
        factor = correction[:, 2].sqrt() / correction[:, 0] if kind.confidence else 1.0 / correction[:, 0]
        scale.copy_(sent[:, VALUES.index("scale")] * factor)
    if kind.lr is not None:
        scale.mul_(jobs[0].hyper.lr)
        values[:, VALUES.index("decay")].mul_(jobs[0].hyper.lr)
    if kind.momentum == "int4" or kind.rounding == "stochastic":
        seeds, ordinals = values.view(torch.int32), fields[:, FIELDS.index("ordinal")]
        for stream in range(2):
            seeds[:, VALUES.index(f"seed{stream}")] = seed_of(steps, ordinals, stream)
    return values


# --- launches -----------------------------------------------------------------------------------------------------


def _step_factored(kind: _Kind, jobs: Sequence[Job]) -> None:
    from scantling.optim.kernels import came_gpu as kernels

    tile = ROWS, COLS
    layout, table, values = _tables(kind, jobs, tile)
    num_tiles, num_matrices = len(layout.tiles), len(layout.matrices)
    new = table.new_empty
    row_parts, col_parts = new(layout.row_parts, dtype=torch.float32), new(layout.col_parts, dtype=torch.float32)
    totals, clips = new(num_tiles, dtype=torch.float32), new(len(jobs), dtype=torch.float32)
    means, res_means = (new(num_matrices, dtype=torch.float32) for _ in range(2))
    param, grad = map(triton_dtype, (kind.param, kind.grad))
    shape = {"aligned": kind.is_aligned, "rows": tile[0], "cols": tile[1]}
    kept = {"momentum": kind.momentum, "bytes": kind.scale_bytes}

    def average(row: str, col: str, first: str, means: Tensor) -> None:
        for weight, (owners, firsts, parts, *fields) in enumerate(
            (
                (layout.rows, layout.first_rows, row_parts, row, "row_part", "across", "rows"),
                (layout.cols, layout.first_cols, col_parts, col, "col_part", "down", "cols"),
            ),
            start=2,
        ):
            places = map(FIELDS.index, fields)
            kernels.add_sums[(len(owners),)](
                *(table, values, owners, firsts, parts, *places, VALUES.index(first), weight, _LINE)
            )
        kernels.root_means[(num_matrices,)](table, layout.matrices, means, FIELDS.index(row), _MATRIX)

    tiles, own = layout.tiles, (num_tiles,)
    kernels.square_parts[own](table, tiles, row_parts, col_parts, grad=grad, **shape)
    average("row", "col", "beta2", means)
    kernels.whitened_squares[own](table, values, tiles, means, totals, grad=grad, **shape)
    kernels.clip_factors[(len(jobs),)](table, values, totals, clips, kind.maximize, _MATRIX)
    if kind.confidence:
        kernels.instability_parts[own](
            *(table, values, tiles, means, clips, row_parts, col_parts), grad=grad, **kept, **shape
        )
        average("res_row", "res_col", "beta3", res_means)
    kernels.apply[own](
        *(table, values, tiles, means, res_means, clips, param, grad),
        **kept,
        rounding=kind.rounding,
        confidence=kind.confidence,
        decays=kind.decays,
        **shape,
    )


def _step_moments(kind: _Kind, jobs: Sequence[Job]) -> None:
    from scantling.optim.kernels import came_gpu as kernels

    layout, table, values = _tables(kind, jobs, (1, _VECTOR))
    totals, clips = (table.new_empty(size, dtype=torch.float32) for size in (len(layout.tiles), len(jobs)))
    param, grad = map(triton_dtype, (kind.param, kind.grad))
    shape = {"aligned": kind.is_aligned, "size": _VECTOR}
    own = (len(layout.tiles),)
    kernels.moment_squares[own](table, values, layout.tiles, totals, grad=grad, **shape)
    kernels.clip_factors[(len(jobs),)](table, values, totals, clips, kind.maximize, _MATRIX)
    kernels.apply_moment[own](
        *(table, values, layout.tiles, clips, param, grad, kind.momentum, kind.rounding, kind.decays), **shape
    )
