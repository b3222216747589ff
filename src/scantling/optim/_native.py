"""CAME's step on a CPU in C, for all parameters in one call: `kernels/came.c`, compiled when it is first needed.

`_compile.py` compiles the file with the machine's own C compiler, once per machine. Without a compiler, or with
SCANTLING_NATIVE=0, the tiles of `_eager.py` do the same in PyTorch operations, at less than half the speed.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scantling.optim._compile import CompileError, load_library
from scantling.optim._eager import Job, is_plain

logger = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_MOMENTA = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3, None: 4}
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "compensated": 2}
MOST_SCRATCH = 64 << 20
"""Bytes that a step may take beside parameters, gradients and state; a wider matrix is stepped in tiles."""


class _Job(ctypes.Structure):
    """`Job` of came.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("param", "grad", "momentum", "scale", "low")),
        *((name, ctypes.c_void_p) for name in ("row", "col", "res_row", "res_col", "moment", "step")),
        *((name, ctypes.c_int64) for name in ("batch", "rows", "cols")),
        *((name, ctypes.c_int32) for name in ("param_kind", "grad_kind", "momentum_kind", "rounding")),
        *((name, ctypes.c_int32) for name in ("debias", "maximize", "scale_bytes")),
        ("ordinal", ctypes.c_uint32),
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "beta3", "eps1", "eps2")),
        *((name, ctypes.c_double) for name in ("clip", "weight_decay")),
    )


def can_step(job: Job) -> bool:
    """Whether the C code knows this parameter: fp32 or bf16 on a CPU, rows before columns, all of it contiguous."""
    if job.param.dtype not in _KINDS or job.grad.dtype not in _KINDS:
        return False
    if isinstance(job.hyper.lr, Tensor) and job.hyper.lr.device.type != "cpu":
        return False
    if not job.is_stacked or (job.view is not None and _scratch_bytes(*_sides(job)) > MOST_SCRATCH):
        return False
    return (
        all(is_plain(each, ("cpu",)) for each in (job.param, job.grad, *job.state.values())) and _library() is not None
    )


def scratch_bytes(jobs: Sequence[Job]) -> int:
    """Most bytes that the C code takes beside parameters, gradients and state for parameters like these."""
    known = [sides for sides in map(_sides, jobs) if _scratch_bytes(*sides) <= MOST_SCRATCH]
    return min(_scratch_bytes(*map(max, zip(*known, strict=True))), MOST_SCRATCH) if known else 0


def _scratch_bytes(rows: int, cols: int) -> int:
    """Partial sums of 32 chunks of rows in fp64, four rows in fp32 for each thread, and the factors."""
    return cols * (32 * 8 + 16 * torch.get_num_threads() + 8) + 8 * rows


def step(jobs: Sequence[Job]) -> None:
    """One step of each of these parameters, which `can_step`.

    Raises:
        MemoryError: there is no room for some rows of scratch; no parameter has changed, or, where wide and tall
            matrices would take too much together and go in several calls, those of the earlier calls alone.
    """
    batch: list[Job] = []
    tallest = widest = 0
    for job in jobs:
        rows, cols = _sides(job)
        tallest, widest = max(tallest, rows), max(widest, cols)
        if _scratch_bytes(tallest, widest) > MOST_SCRATCH:
            _step_together(batch)
            batch, tallest, widest = [], rows, cols
        batch.append(job)
    _step_together(batch)


def _step_together(jobs: Sequence[Job]) -> None:
    library = _library()
    if library is None or not jobs:
        return
    for job in jobs:
        job.state["step"].add_(1.0)
    described = (_Job * len(jobs))(*map(_described, jobs))
    if library.came_step(described, ctypes.c_int64(len(jobs)), ctypes.c_int(torch.get_num_threads())):
        for job in jobs:
            job.state["step"].sub_(1.0)
        raise MemoryError("no memory for the scratch of an optimizer step")
    # autograd does not see what C writes: a backward pass that still needs the old weights must be told
    torch.autograd.graph.increment_version([job.param for job in jobs])


def _described(job: Job) -> _Job:
    state, hyper = job.state, job.hyper
    return _Job(
        job.param.data_ptr(),
        job.grad.data_ptr(),
        _pointer(state, "exp_avg_codes" if "exp_avg_codes" in state else "exp_avg"),
        *(_pointer(state, key) for key in ("exp_avg_scale", "low", "row", "col", "res_row", "res_col", "exp_avg_sq")),
        state["step"].data_ptr(),
        *job.sizes,
        _KINDS[job.param.dtype],
        _KINDS[job.grad.dtype],
        _MOMENTA["fp32" if job.view is None and hyper.momentum is not None else hyper.momentum],
        _ROUNDINGS[hyper.rounding],
        hyper.debias,
        hyper.maximize,
        state["exp_avg_scale"].itemsize if "exp_avg_scale" in state else 0,
        job.ordinal,
        float(hyper.lr),
        *(hyper.beta1, hyper.beta2, hyper.beta3, hyper.eps1, hyper.eps2),
        *(hyper.clip_threshold, hyper.weight_decay),
    )


def _sides(job: Job) -> tuple[int, int]:
    """Rows and columns that scratch is made for; a vector goes in pieces of 1024."""
    _, rows, cols = job.sizes if job.view is not None else (1, 1, 1)
    return rows, max(cols, 1024)


def _pointer(state: dict[str, Tensor], key: str) -> int | None:
    return state[key].data_ptr() if key in state else None


@lru_cache(maxsize=1)
def _library() -> Any:
    """The compiled library, or None where it cannot be had."""
    if os.environ.get("SCANTLING_NATIVE", "1") == "0":
        return None
    try:
        return load_library(Path(__file__).parent / "kernels" / "came.c", _FLAGS)
    except CompileError as error:
        logger.warning("CAME steps at less than half the speed that it could have: %s", error)
        return None
