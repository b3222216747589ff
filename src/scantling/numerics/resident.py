"""Memory of this process that is in RAM, as Linux counts it."""

from __future__ import annotations

import contextlib
from pathlib import Path


def resident_bytes() -> int:
    """What is in RAM now; 0 where the system does not say."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most there was since `forget_peak` was called last, or the process began."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Begin the peak anew, where the system lets one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0
