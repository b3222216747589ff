"""Meters of a run: memory, energy, time per phase. A missing meter gives None, never an estimate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from scantling.trainer.rss import peak_rss_bytes, reset_peak_rss, rss_bytes


class MemoryMeter:
    """Peak memory of this process: allocated device memory on a GPU, the resident set on a CPU.

    `base_bytes` is the memory of the process before the model was built (interpreter and libraries).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.source = "cuda" if device.type == "cuda" else "rss"
        if self.source == "cuda":
            # forget the peak of an earlier run in this process
            torch.cuda.reset_peak_memory_stats(device)
            self.base_bytes = torch.cuda.memory_allocated(device)
        else:
            reset_peak_rss()
            self.base_bytes = rss_bytes()

    def peak_bytes(self) -> int:
        """Return the peak since this meter was made, in bytes."""
        if self.source == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return peak_rss_bytes()


class EnergyMeter:
    """Energy since the meter was made, from NVML (GPU) or RAPL (CPU package); None if neither can be read.

    It covers one GPU or one machine, without other GPUs and machines of the run.
    """

    def __init__(self, device: torch.device) -> None:
        self.source: str | None = None
        self._read: Callable[[], float] | None = None
        self._start = 0.0
        reader = _nvml_reader(device) if device.type == "cuda" else _rapl_reader()
        if reader is not None:
            self.source = "nvml" if device.type == "cuda" else "rapl"
            self._read = reader
            self._start = reader()

    def joules(self) -> float | None:
        """Return the joules that the device used since the start, by all its processes; None without a meter."""
        return None if self._read is None else self._read() - self._start


def _nvml_reader(device: torch.device) -> Callable[[], float] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        # by UUID: NVML ignores CUDA_VISIBLE_DEVICES, so its indices can differ from PyTorch's
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        # a first reading, because older GPUs do not support it
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # without a working driver and package there is no meter
        return None
    # NVML counts millijoules
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000


def _rapl_reader() -> Callable[[], float] | None:
    # packages only: their subzones, such as `intel-rapl:0:0`, are parts of them
    packages = sorted(Path("/sys/class/powercap").glob("intel-rapl:[0-9]"))
    try:
        limits = [int((package / "max_energy_range_uj").read_text()) for package in packages]
        last = [int((package / "energy_uj").read_text()) for package in packages]
    except (OSError, ValueError):
        return None
    if not packages:
        return None
    total = 0

    def read() -> float:
        nonlocal total
        for i, package in enumerate(packages):
            now = int((package / "energy_uj").read_text())
            total += (now - last[i]) % limits[i]  # the counter wraps
            last[i] = now
        # RAPL counts microjoules
        return total / 1e6

    return read


class Stopwatch:
    """Timer of the phases of one step. On a GPU it records events, and `read` waits for the last one."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._paused = False

    def start(self) -> None:
        self._marks = [("", self._now())]

    def lap(self, phase: str) -> None:
        """Assign the time since the last mark to `phase`."""
        if self._paused:
            return
        self._marks.append((phase, self._now()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend lap recording; elapsed time counts toward the next lap."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def read(self) -> dict[str, float]:
        """Return seconds by phase; laps with the same name are added."""
        seconds: dict[str, float] = {}
        if self._cuda:
            torch.cuda.synchronize()
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(before, float) and isinstance(after, float):
                elapsed = after - before
            elif isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
                # `elapsed_time` returns milliseconds
                elapsed = before.elapsed_time(after) / 1000
            else:
                raise AssertionError("marks of two kinds")
            seconds[phase] = seconds.get(phase, 0.0) + elapsed
        return seconds
