"""CAME's step on a CPU in C, for all parameters in one call: `kernels/came.c`, compiled on first use.

`_compile.py` compiles the file with the machine's own C compiler, once per machine. Without a compiler, or with
SCANTLING_NATIVE=0, `_eager.py` takes the same step in PyTorch operations at less than half the speed.

A `torch.compile`d step over `stages.py` would save the C file, but takes 5.3 to 6.6 times fused AdamW's time instead of
1.5 to 2.6 (`benchmarks/optim_compiled.py`).
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

from scantling.numerics.torch_private import foreach_add_
from scantling.optim._compile import CompileError, load_library
from scantling.optim.state import POINTERS, HyperParams, ParamStep, is_plain_memory

logger = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_CODECS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3, None: 4}
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "compensated": 2}
MAX_SCRATCH = 64 << 20
"""Bytes that a step may take in addition to parameters, gradients and state; a wider matrix is stepped in tiles."""


class _CStep(ctypes.Structure):
    """`ParamStep` of came.c."""

    # The order and the types of the struct in came.c.
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*POINTERS, "grad")),
        *((name, ctypes.c_int64) for name in ("num_matrices", "rows", "cols")),
        *((name, ctypes.c_int32) for name in ("param_dtype", "grad_dtype", "codec", "rounding")),
        *((name, ctypes.c_int32) for name in ("debias", "maximize", "scale_bytes")),
        ("param_idx", ctypes.c_uint32),
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "beta3", "eps1", "eps2")),
        *((name, ctypes.c_double) for name in ("clip", "weight_decay")),
    )


def can_step(step: ParamStep) -> bool:
    """True if the C code supports a parameter: fp32 or bf16 on a CPU, rows before columns, contiguous."""
    layout, lr = step.layout, step.hyper.lr
    return (
        layout.pointers is not None
        and layout.param.device.type == step.grad.device.type == "cpu"
        and layout.param.dtype in _DTYPES
        and step.grad.dtype in _DTYPES
        and (not isinstance(lr, Tensor) or lr.device.type == "cpu")
        and layout.is_row_major
        and (layout.view is None or _scratch_bytes(*_scratch_sides(step)) <= MAX_SCRATCH)
        and is_plain_memory(step.grad)
        and _library() is not None
    )


def scratch_bytes(steps: Sequence[ParamStep]) -> int:
    """Return the most bytes that the C code allocates for a step of parameters like these."""
    sides = [each for each in map(_scratch_sides, steps) if _scratch_bytes(*each) <= MAX_SCRATCH]
    return min(_scratch_bytes(*map(max, zip(*sides, strict=True))), MAX_SCRATCH) if sides else 0


def _scratch_bytes(rows: int, cols: int) -> int:
    """Return the bytes of partial sums of 32 chunks of rows in fp64, four fp32 rows per thread, and the factors."""
    return cols * (32 * 8 + 16 * torch.get_num_threads() + 8) + 8 * rows


def _scratch_sides(step: ParamStep) -> tuple[int, int]:
    """Return the rows and columns of a parameter that scratch is allocated for; a vector is stepped in 1024s."""
    _, rows, cols = step.layout.sizes if step.view is not None else (1, 1, 1)
    return rows, max(cols, 1024)


def step_params(steps: Sequence[ParamStep]) -> None:
    """Take the step of parameters that `can_step` accepted.

    Raises:
        MemoryError: no memory for some rows of scratch; no parameter has changed, except those of earlier calls if wide
            and tall matrices are split over several calls to bound the scratch.
    """
    # The scratch of a call has the rows of its tallest and the columns of its widest matrix.
    batch: list[ParamStep] = []
    tallest = widest = 0
    for step in steps:
        rows, cols = _scratch_sides(step)
        tallest, widest = max(tallest, rows), max(widest, cols)
        if _scratch_bytes(tallest, widest) > MAX_SCRATCH:
            _call(batch)
            batch, tallest, widest = [], rows, cols
        batch.append(step)
    _call(batch)


def _call(steps: Sequence[ParamStep]) -> None:
    library = _library()
    if library is None or not steps:
        return
    # The C code reads the counters, for bias corrections and seeds.
    counters = [step.state["step"] for step in steps]
    foreach_add_(counters, 1.0)
    array = (_CStep * len(steps))(*map(_to_c, steps))
    if library.came_step(array, ctypes.c_int64(len(steps)), ctypes.c_int(torch.get_num_threads())):
        # No parameter has changed: take the count back.
        foreach_add_(counters, -1.0)
        raise MemoryError("no memory for the scratch of an optimizer step")
    # Autograd does not see writes from C: a backward pass that still needs the old weights must raise.
    torch.autograd.graph.increment_version([step.param for step in steps])


def _to_c(step: ParamStep) -> _CStep:
    layout, hyper = step.layout, step.hyper
    # Parameters with a full second moment always keep an fp32 momentum.
    scale = layout.state.get("exp_avg_scale")
    codec = "fp32" if layout.view is None and hyper.momentum is not None else hyper.momentum
    return _CStep(
        *(layout.pointers or ()),
        step.grad.data_ptr(),
        *layout.sizes,
        _DTYPES[layout.param.dtype],
        _DTYPES[step.grad.dtype],
        _CODECS[codec],
        _ROUNDINGS[hyper.rounding],
        hyper.debias,
        hyper.maximize,
        0 if scale is None else scale.itemsize,
        step.param_idx,
        *_to_doubles(hyper),
    )


def _to_doubles(hyper: HyperParams) -> tuple[float, ...]:
    moments = (hyper.beta1, hyper.beta2, hyper.beta3, hyper.eps1, hyper.eps2)
    return (float(hyper.lr), *moments, hyper.clip_threshold, hyper.weight_decay)


@lru_cache(maxsize=1)
def _library() -> Any:
    """Return the compiled library, or None if it is turned off or cannot be compiled."""
    if os.environ.get("SCANTLING_NATIVE", "1") == "0":
        return None
    try:
        return load_library(Path(__file__).parent / "kernels" / "came.c", _FLAGS)
    except CompileError as error:
        logger.warning("CAME runs its PyTorch step, at less than half the speed of its C step: %s", error)
        return None
