"""Availability of GPU kernels, and tables for them that stay on the device between calls."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scantling.errors import first_line

logger = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that kernels read."""
_captured: list[Any] = []
"""Buffers that CUDA graphs read on replay, kept alive forever."""


class Table:
    """Table on the device, copied again only if it has changed."""

    def __init__(self) -> None:
        self._last: np.ndarray[Any, Any] | None = None
        self._table = torch.empty(0)
        self._spare: Tensor | None = None

    def send(self, table: np.ndarray[Any, Any], device: torch.device) -> Tensor:
        """Return the table on the device, without waiting for the copy.

        A CUDA graph may capture a call after one call outside of a capture; source and target of a captured copy are
        kept alive forever.

        Args:
            table: int64 or float64.
            device: device of the kernels.
        """
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._last is None or not np.array_equal(self._last, table):
            source = self._spare if is_captured else None
            if source is None or source.shape != table.shape:
                source = self._pinned(table, device)
            source.copy_(torch.from_numpy(table))
            self._table = source.to(device, non_blocking=True) if device.type == "cuda" else source
            self._last = table
            if is_captured:
                _captured.append(source)
                # Every replay copies from this buffer again: later calls must not reuse it, and must copy the table
                # again.
                self._spare = self._last = None
            elif self._spare is None or self._spare.shape != table.shape:
                self._spare = self._pinned(table, device)
        if is_captured:
            _captured.append(self._table)
        return self._table

    @staticmethod
    def _pinned(table: np.ndarray[Any, Any], device: torch.device) -> Tensor:
        dtype = torch.float64 if table.dtype == np.float64 else torch.int64
        return torch.empty(table.shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def has_kernels(device: torch.device) -> bool:
    """True if Triton kernels run on the device: needs Triton and a C compiler, and SCANTLING_NATIVE must not be 0."""
    return os.environ.get("SCANTLING_NATIVE", "1") != "0" and _run_kernels(device)


@lru_cache(maxsize=64)
def _run_kernels(device: torch.device) -> bool:
    """True if a test kernel runs. Called before any work starts, so that no kernel fails halfway through it."""
    try:
        from scantling.numerics.kernels import probe_gpu

        value = torch.zeros(1, device=device)
        with device_of(value):
            probe_gpu.add_one[(1,)](value)
        return bool(value == 1.0)
    except Exception as error:  # from Triton, its compilers or the driver
        logger.warning(
            "no kernels can be made for %s, so that many operations do what they would: %s",
            *(device, first_line(error)),
        )
        return False


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return the Triton dtype of one of `FLOATS`."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context that makes the tensor's device current, for Triton launches; no effect on a CPU."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def owners_of(counts: Any, device: torch.device) -> Tensor:
    """Return the entry that each program works on, where entry i has `counts[i]` programs: int32."""
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return torch.from_numpy(owners).to(device)
