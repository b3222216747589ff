"""Devices: fast matrix products, autocast, and Triton kernels with their tables."""

from __future__ import annotations

import logging
import os
import platform
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scantling.errors import first_line
from scantling.numerics.torch_private import cpu_has_matmul

logger = logging.getLogger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that kernels read."""
_captured: list[Any] = []
"""Buffers that CUDA graphs read on replay, kept alive forever."""


def autocast(compute: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass: none for "fp32", autocast for "bf16" and "fp16"."""
    return nullcontext() if compute == "fp32" else torch.autocast(device.type, dtype=_DTYPES[compute])


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that turns autocast off; a null context on the meta device, which has no autocast."""
    off = device.type == "meta" or not torch.is_autocast_enabled(device.type)
    return nullcontext() if off else torch.autocast(device.type, enabled=False)


def has_fast_matmul(compute: str, device: torch.device) -> bool:
    """True if a device has instructions for matrix products in a format; a CPU without them is slower than in fp32.

    Args:
        compute: "fp32", "bf16", "fp16", "int8" or "fp8".
    """
    if compute == "fp8":
        return device.type != "cpu"
    if compute == "fp32" or device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return True
    if compute == "int8":
        # PyTorch reports int8 instructions of x86 only; other CPUs are assumed to have them.
        is_known = platform.machine() in ("x86_64", "AMD64")
        return not is_known or cpu_has_matmul("int8")
    return cpu_has_matmul(compute)


def warn_if_slow_matmul(compute: str, device: torch.device, advice: str) -> None:
    """Log a warning with advice if a device has no instructions for matrix products in a format."""
    if not has_fast_matmul(compute, device):
        logger.warning(
            "this CPU has no instructions for %s matrix products, which are slower than fp32: %s", compute, advice
        )


def is_capturing(device: torch.device) -> bool:
    """True while a CUDA graph captures the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep_for_replays(buffer: Any) -> None:
    """Keep a buffer that a CUDA graph is capturing alive forever."""
    if all(buffer is not kept for kept in _captured):
        _captured.append(buffer)


class DeviceTable:
    """Table that kernels read on their device, copied there again only if it has changed."""

    def __init__(self) -> None:
        self._last: np.ndarray[Any, Any] | None = None
        self._table = torch.empty(0)
        self._spare: Tensor | None = None

    def upload(self, table: np.ndarray[Any, Any], device: torch.device) -> Tensor:
        """Return the table on the device, without waiting for the copy.

        A CUDA graph may capture a call after one call outside of a capture; source and target of a captured copy are
        kept alive forever.

        Args:
            table: int64 or float64.
            device: device of the kernels.
        """
        is_captured = is_capturing(device)
        if self._last is None or not np.array_equal(self._last, table):
            # A capture must not allocate pinned memory: it takes the buffer that an earlier call left.
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
                # For a later capture.
                self._spare = self._pinned(table, device)
        if is_captured:
            _captured.append(self._table)
        return self._table

    @staticmethod
    def _pinned(table: np.ndarray[Any, Any], device: torch.device) -> Tensor:
        dtype = torch.float64 if table.dtype == np.float64 else torch.int64
        return torch.empty(table.shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def has_kernels(device: torch.device) -> bool:
    """True if Triton kernels run on the device; false without Triton or a C compiler, or if SCANTLING_NATIVE=0."""
    return os.environ.get("SCANTLING_NATIVE", "1") != "0" and _run_kernels(device)


@lru_cache(maxsize=64)
def _run_kernels(device: torch.device) -> bool:
    """Run a test kernel and return if it worked, before any work starts, so that no kernel fails halfway through."""
    try:
        from scantling.numerics.kernels import add_one

        value = torch.zeros(1, device=device)
        with device_context(value):
            add_one[(1,)](value)
        # Reading the value waits for the kernel, so that its errors are raised here.
        return bool(value == 1.0)
    except Exception as error:  # from Triton, its compilers or the driver
        logger.warning(
            "cannot compile Triton kernels for %s; falling back to PyTorch operations: %s",
            *(device, first_line(error)),
        )
        return False


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return the Triton dtype of one of `FLOATS`."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def device_context(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context that makes the tensor's device current, for Triton launches; no effect on a CPU."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def program_owners(counts: Any, device: torch.device) -> Tensor:
    """Return the table entry of each program, if entry i has `counts[i]` programs: (sum of counts) int32."""
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return torch.from_numpy(owners).to(device)
