"""What a process on a CPU holds beside its tensors: the libraries, and what the allocator keeps."""

from __future__ import annotations

import os

MIB = 2**20
_TUNED = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")


def resident_bytes() -> int:
    """The resident set of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def allocator_bytes(working_bytes: int) -> int:
    """Freed blocks that glibc keeps in its heap, which count as resident, for tensors that come and go in a step.

    A fit to the runs of `benchmarks/peak_memory.py`, not a law: the first 100 MiB once more, and a tenth of all. It is
    0 where the environment makes the allocator give blocks back (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_) or
    puts another in its place (LD_PRELOAD).
    """
    if any(name in os.environ for name in _TUNED):
        return 0
    return min(working_bytes, 100 * MIB) + working_bytes // 10
