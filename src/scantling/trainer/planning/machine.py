"""Memory that a process may use: of the machine, of its container, or of its GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KIB = 1024
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files with a control group's limit and usage, and the key of the page cache in its `memory.stat`."""


@dataclass(frozen=True)
class MachineMemory:
    """Memory of a machine or of a GPU, in bytes.

    Attributes:
        name: "this machine", or the name of the GPU.
        total: total memory, or the limit of the container.
        available: memory that other processes leave free.
        swap: additional swap space.
    """

    name: str
    total: int
    available: int
    swap: int = 0


def machine_memory(device: str) -> MachineMemory | None:
    """Return the memory of "cpu" or "cuda" on this machine; None without such a device, or if the system hides it."""
    return _gpu_memory() if device == "cuda" else host_memory()


def host_memory(root: Path = Path("/")) -> MachineMemory | None:
    """Return the main memory of this machine, or of the container that the process runs in.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    try:
        lines = (line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        kib = {name: int(value.split()[0]) for name, value in lines}
        total, available = kib["MemTotal"] * KIB, kib["MemAvailable"] * KIB
    except (OSError, ValueError, KeyError, IndexError):
        return None
    # groups are nested, and the tightest limit applies
    for limit, used in _group_limits(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return MachineMemory("this machine", total, available, kib.get("SwapTotal", 0) * KIB)


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group of this process, and its usage without the page cache."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for group in groups:
        # cgroup v2 has one line with an empty controller list; v1 has one line per controller
        if len(group) != 3 or (group[1] and "memory" not in group[1].split(",")):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if group[1] else "")
        folder = mount / group[2].strip("/")
        # in a container, the path can be the host's; then only the mount itself exists
        for each in dict.fromkeys((folder, *folder.parents)):
            if each.is_relative_to(mount):
                yield from _group_limit(each, *(_V1 if group[1] else _V2))


def _group_limit(folder: Path, limit: str, used: str, cached: str) -> Iterator[tuple[int, int]]:
    try:
        # "max" means no limit; int() raises a ValueError for it
        most, now = int((folder / limit).read_text()), int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # the kernel drops inactive page cache before it refuses memory
        yield most, max(0, now - int(stat.get(cached, 0)))
    except (OSError, ValueError):
        return


def _gpu_memory() -> MachineMemory | None:
    import torch

    from scantling.torchrun_env import local_rank_from_env

    if not torch.cuda.is_available():
        return None
    # modulo, because processes may outnumber the GPUs of this machine
    device = local_rank_from_env() % torch.cuda.device_count()
    free, total = torch.cuda.mem_get_info(device)
    return MachineMemory(torch.cuda.get_device_name(device), total, free)
