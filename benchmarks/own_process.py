"""Peak memory of a few training steps on a CPU, in the process that this is called in and that does nothing else.

The figure is the most that was resident less what the interpreter and the libraries held before the model was built,
after a small model has taken a step, since libraries load and allocate at their first use.
glibc keeps freed blocks, which count as resident; with `gives_back` it returns all from 64 KiB on to the system, so
that the figure is what tensors hold (the environment variable MALLOC_MMAP_THRESHOLD_ does the same).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h


def give_blocks_back() -> None:
    """Let glibc map blocks from 64 KiB on by themselves and unmap them when they are freed; before anything is held.

    Raises:
        SystemExit: the C library has no such setting.
    """
    _set_malloc(_M_MMAP_THRESHOLD, 65536)


def keep_blocks() -> None:
    """Let glibc keep every block that is freed; otherwise it unmaps those of more than 32 MiB.

    Raises:
        SystemExit: the C library has no such setting.
    """
    _set_malloc(_M_MMAP_MAX, 0)
    _set_malloc(_M_TRIM_THRESHOLD, -1)


def _set_malloc(parameter: int, value: int) -> None:
    if ctypes.CDLL(None).mallopt(parameter, value) != 1:
        raise SystemExit("this C library cannot be told when to map blocks")


def peak_of(
    build: Callable[[], Callable[[], object]],
    *,
    warm: Callable[[], object],
    steps: int,
    gives_back: bool = False,
    then: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Build something and call it a few times.

    Args:
        build: makes what is called; what it makes counts.
        warm: a step of something small of the same kind, taken before.
        steps: how often.
        gives_back: whether glibc gives blocks back.
        then: called once after the steps, such as an evaluation; what it takes counts.
    """
    if gives_back:
        give_blocks_back()
    import torch

    from scantling.training.meters import MemoryMeter

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
