"""What a run would find here: versions, hardware, interfaces, and what passes between each pair of processes.

Latency is half a round trip of 8 bytes; bandwidth that of one message from one process to the other, made larger until
it takes long enough to be measured, less a round trip. All pairs are measured one after the other, in both directions.
"""

from __future__ import annotations

import fcntl
import os
import socket
import statistics
import struct
import time
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scantling.distributed.context import DistContext
from scantling.errors import RunError, first_line

_ROUNDS = 10
_SIZES = tuple(1 << power for power in range(16, 27, 2))
_ENOUGH_S = 0.2
_ALLREDUCE_BYTES = 4 << 20
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Pair:
    """What passes from one process to another.

    Attributes:
        source, target: ranks.
        latency_s: of a small message, one way.
        bytes_a_s: of a large one.
    """

    source: int
    target: int
    latency_s: float
    bytes_a_s: float


def interfaces() -> list[dict[str, Any]]:
    """Network interfaces of this machine: name, whether it is up, Mbit/s where it says so, IPv4 address."""
    found = []
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        speed = _read(folder / "speed")
        found.append(
            {
                "name": name,
                "state": _read(folder / "operstate") or "unknown",
                "mbit": int(speed) if speed.isdigit() else None,
                "address": _address(name),
            }
        )
    return found


def settings() -> dict[str, str]:
    """Environment variables that say how processes find each other, where they are set."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names if name in os.environ}


def measure_pairs(context: DistContext) -> list[Pair]:
    """Latency and bandwidth of all pairs, on every rank. Collectives: a barrier a pair, sends, and a gather.

    Raises:
        RunError: a process does not answer.
    """
    own: list[Pair] = []
    told = "before any pair was measured a process did not answer"
    for source, target in permutations(range(context.world_size), 2):
        try:
            dist.barrier()  # all wait for the pair before
            told = f"between rank {source} and rank {target} nothing came through"
            found = _pair(context, source, target)
        except RuntimeError as error:
            raise RunError(
                f"{told}: {first_line(error)}. Look at firewalls, at MASTER_ADDR, and at GLOO_SOCKET_IFNAME, "
                "which names the interface to use"
            ) from error
        if found is not None:
            own.append(found)
    return [Pair(**pair) for pairs in context.all_gather_object([vars(pair) for pair in own]) for pair in pairs]


def measure_allreduce(context: DistContext) -> float:
    """Seconds of an all-reduce of 4 MiB over all processes, the median of some."""
    values = torch.zeros(_ALLREDUCE_BYTES // 4, device=context.device)
    times = []
    for _ in range(5):
        context.barrier()
        began = time.perf_counter()
        context.all_reduce(values)
        float(values[0])
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _pair(context: DistContext, source: int, target: int) -> Pair | None:
    """What the source measures; the target answers.

    On a GPU sends and receives return once they are queued: the source reads what it received before it stops a clock,
    and waits for its device before it starts one.
    """
    if context.rank not in (source, target):
        return None
    small = torch.zeros(1, dtype=torch.int64, device=context.device)
    if context.rank == target:
        for _ in range(_ROUNDS):
            dist.recv(small, source)
            dist.send(small, source)
        while True:
            dist.recv(small, source)
            if not int(small):
                return None
            dist.recv(torch.empty(int(small), dtype=torch.uint8, device=context.device), source)
            dist.send(small, source)
    trips = []
    int(small)
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        dist.send(small, target)
        dist.recv(small, target)
        int(small)
        trips.append(time.perf_counter() - began)
    trip = statistics.median(trips)
    rate = 0.0
    for size in _SIZES:
        message = torch.zeros(size, dtype=torch.uint8, device=context.device)
        int(message[-1])
        began = time.perf_counter()
        dist.send(small.fill_(size), target)
        dist.send(message, target)
        dist.recv(small, target)
        int(small)
        took = time.perf_counter() - began
        rate = size / max(took - trip, 1e-9)
        if took > _ENOUGH_S:
            break
    dist.send(small.fill_(0), target)
    return Pair(source, target, trip / 2, rate)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        try:
            answer = fcntl.ioctl(opened.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
