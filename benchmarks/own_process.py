"""Measure the peak memory of a few training steps on a CPU, in a process that does nothing else.

The result is the peak resident size minus the memory that the interpreter and the libraries held before the model was
built. A small model takes a step before that, because libraries load and allocate at their first use. glibc keeps freed
blocks, which count as resident. With `gives_back`, it returns all blocks from 64 KiB on to the system, so that the
result is the memory held by tensors. The environment variable MALLOC_MMAP_THRESHOLD_ has the same effect.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h


def give_blocks_back() -> None:
    """Make glibc map blocks from 64 KiB on separately and unmap them when freed; call it before allocating.

    Raises:
        SystemExit: the C library has no such setting.
    """
    _set_malloc(_M_MMAP_THRESHOLD, 65536)


def keep_blocks() -> None:
    """Make glibc keep every freed block; by default it unmaps blocks of more than 32 MiB.

    Raises:
        SystemExit: the C library has no such setting.
    """
    _set_malloc(_M_MMAP_MAX, 0)
    _set_malloc(_M_TRIM_THRESHOLD, -1)


def _set_malloc(parameter: int, value: int) -> None:
    if ctypes.CDLL(None).mallopt(parameter, value) != 1:
        raise SystemExit("this C library has no setting for when to map blocks")


def peak_bytes(
    build: Callable[[], Callable[[], object]],
    *,
    warm: Callable[[], object],
    steps: int,
    gives_back: bool = False,
    then: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Return the peak memory of building something and calling it a few times.

    Args:
        build: returns the callable to measure; its memory counts.
        warm: a step of something small of the same kind, taken first.
        steps: number of calls.
        gives_back: True if glibc returns freed blocks.
        then: called once after the steps, such as an evaluation; its memory counts.
    """
    if gives_back:
        give_blocks_back()
    import torch

    from scantling.trainer.training.meters import MemoryMeter

    warm()
    gc.collect()
    meter = MemoryMeter(torch.device("cpu"))
    step = build()
    built = meter.peak_bytes()
    for _ in range(steps):
        step()
    if then is not None:
        then()
    peak = meter.peak_bytes()
    return {
        "base_bytes": meter.base_bytes,
        "built_above_base_bytes": built - meter.base_bytes,
        "peak_above_base_bytes": peak - meter.base_bytes,
    }
