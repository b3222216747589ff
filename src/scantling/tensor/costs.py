"""Costs of matrix products on a device, by which contraction orders are compared, and kernels with torch's operations.

A CPU computes while it reads, so its costs are multiplications and memory traffic. On a GPU, launching a product takes
as long as millions of multiplications, and tensor cores multiply 16 rows in the time of one. These costs are measured
once per kind of GPU, in less than a second, and kept in the cache folder.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import log2
from pathlib import Path
from typing import Any

import torch

from scantling.errors import RunError, UserError, first_line
from scantling.files import cache_root, read_json_object, write_json
from scantling.numerics.device import is_capturing, without_autocast
from scantling.numerics.torch_private import current_backward_id, without_dispatch_modes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Costs of matrix products relative to one multiplication.

    Attributes:
        element: multiplications that take as long as reading or writing one element.
        launch: multiplications that take as long as launching one product; 0 if a launch costs little.
        rank_multiple: ranks inside products are padded with zeros to a multiple of this.
    """

    element: float
    launch: float = 0.0
    rank_multiple: int = 1

    def pad_rank(self, rank: int) -> int:
        """Return the padded rank; outer bonds (1) and removed layers (0) have nothing to pad."""
        return rank if rank <= 1 else -(-rank // self.rank_multiple) * self.rank_multiple


CPU = DeviceCosts(element=8.0)
"""Costs of a CPU, measured by benchmarks/tensor_layers.py."""
TYPICAL_GPU = DeviceCosts(element=256.0, launch=2.0**31, rank_multiple=16)
"""Costs of a GPU that cannot be measured now: 400 T bf16 multiplications and 3 TB a second, 5 us a launch."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def device_costs(device: torch.device) -> DeviceCosts:
    """Return the costs of a device; those of a GPU are measured the first time it is used."""
    if device.type != "cuda":
        return CPU
    if not torch.cuda.is_available():
        return TYPICAL_GPU
    found = _measured_once(device, "products", lambda: asdict(_measure(device)), DeviceCosts)
    return TYPICAL_GPU if found is None else found


def is_faster(
    device: torch.device,
    name: str,
    kernel: Callable[[], Callable[[], object]],
    other: Callable[[], Callable[[], object]],
) -> bool | None:
    """True if a kernel takes less time on this kind of GPU than torch's operations; None if it cannot be timed now.

    Args:
        device: a GPU.
        name: the operation with all its sizes.
        kernel, other: functions that allocate inputs and return the work to be timed.
    """

    def measure() -> dict[str, float]:
        times = {"kernel_s": _captured_seconds(kernel(), device), "torch_s": _captured_seconds(other(), device)}
        return {**times, "ratio": times["kernel_s"] / times["torch_s"]}

    try:
        found: bool | None = _measured_once(device, name, measure, lambda **times: times["ratio"] < 1.0)
        return found
    except Exception as error:  # too little memory for the inputs, or from Triton and its compilers
        logger.warning("cannot time %s, torch's operations are taken: %s", name, first_line(error))
        # Another thread may have measured it since: all must take the same.
        known: bool = _measured.setdefault(_key(device, name), False)
        return known


def _measured_once(
    device: torch.device, name: str, measure: Callable[[], dict[str, float]], read: Callable[..., Any]
) -> Any:
    """Return a measurement on this kind of GPU, taken by this process, an earlier one, or now.

    Args:
        device: the GPU.
        name: name of the measurement.
        measure: function that takes it.
        read: function that maps the measured values to the result.

    Returns:
        None if it is not known and cannot be measured now.
    """
    key = _key(device, name)
    if key in _measured:
        return _measured[key]
    # A capture cannot wait for a measurement. A backward pass cannot wait for the one of another thread, which may need
    # the thread that runs all backward passes of the device.
    if is_capturing(device) or not _lock.acquire(blocking=current_backward_id() == -1):
        return None
    try:
        if key not in _measured:
            path = cache_root() / "device-costs.json"
            try:
                _measured[key] = read(**read_json_object(path)[key])
            except (UserError, KeyError, TypeError):  # no such file, or no such entry
                with without_dispatch_modes():
                    values = measure()
                logger.info("measured on %s: %s", key, values)
                _measured[key] = read(**values)
                _write(path, key, values)
        return _measured[key]
    finally:
        _lock.release()


def _key(device: torch.device, name: str) -> str:
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {name}"


def _write(path: Path, key: str, values: dict[str, float]) -> None:
    """Add an entry to the file, which other processes may have changed."""
    try:
        known = read_json_object(path)
    except UserError:  # missing or damaged
        known = {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**known, key: values})
    except (OSError, RunError) as error:
        logger.warning("cannot write %s (%s): the next process measures the costs of products again", path, error)


@torch.no_grad()
def _measure(device: torch.device) -> DeviceCosts:
    """Measure the costs of a GPU with bf16 products.

    They are rounded to powers of 2, so that two measurements of one kind of GPU hardly ever differ.
    """
    with torch.cuda.device(device), without_autocast(device):
        size = 4096
        large, small = (torch.zeros(n, n, dtype=torch.bfloat16, device=device) for n in (size, 32))
        wide = torch.zeros(1 << 26, dtype=torch.bfloat16, device=device)
        per_mac = _seconds(lambda: torch.mm(large, large), 10) / size**3
        per_element = _seconds(lambda: wide.add_(1.0), 10) / (2 * wide.numel())
        per_launch = _seconds(lambda: torch.mm(small, small), 200)
    return DeviceCosts(_power_of_two(per_element / per_mac), _power_of_two(per_launch / per_mac), rank_multiple=16)


def _seconds(work: Callable[[], object], times: int) -> float:
    """Return the time of some work on the current CUDA stream, after one call that warms up."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    work()
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / times


def _power_of_two(value: float) -> float:
    return 2.0 ** round(log2(max(value, 1.0)))


def _captured_seconds(work: Callable[[], object], device: torch.device, times: int = 10) -> float:
    """Return the time of some work in a CUDA graph, so that the time to launch it from Python does not count."""
    with torch.cuda.device(device):
        for _ in range(2):  # compiles kernels
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that pins memory, may go on.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(times):
                work()
        return _seconds(graph.replay, 3) / times


_lock = threading.Lock()
_measured: dict[str, Any] = {}
"""Costs, and which kernels are faster, by GPU and name."""
