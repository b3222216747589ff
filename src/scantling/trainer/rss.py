"""Resident memory of this process (RSS), from Linux's /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path


def rss_bytes() -> int:
    """Return the resident memory in bytes; 0 if the system does not report it."""
    return _status("VmRSS")


def peak_rss_bytes() -> int:
    """Return the peak resident memory in bytes since `reset_peak_rss` was last called or the process started."""
    return _status("VmHWM")


def reset_peak_rss() -> None:
    """Reset the peak, if the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0
