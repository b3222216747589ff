"""Network check: interfaces, and latency and bandwidth between each pair of processes.

Latency is half a round trip of 8 bytes. Bandwidth is that of one message, enlarged until it takes long enough to be
measured, minus a round trip. All pairs are measured one after the other, in both directions.
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
# 64 KiB to 64 MiB, times 4 each
_SIZES = tuple(1 << power for power in range(16, 27, 2))
_ENOUGH_S = 0.2
_ALLREDUCE_BYTES = 4 << 20
# Linux ioctl that returns the IPv4 address of an interface
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Pair:
    """Connection from one process to another.

    Attributes:
        source, target: ranks.
        latency_s: one-way latency of a small message.
        bytes_a_s: bandwidth for a large message.
    """

    source: int
    target: int
    latency_s: float
    bytes_a_s: float


def interfaces() -> list[dict[str, Any]]:
    """Return the network interfaces of this machine: name, state, Mbit/s if known, IPv4 address."""
    rows = []
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        # -1 or unreadable for virtual interfaces and links that are down
        speed = _read(folder / "speed")
        rows.append(
            {
                "name": name,
                "state": _read(folder / "operstate") or "unknown",
                "mbit": int(speed) if speed.isdigit() else None,
                "address": _address(name),
            }
        )
    return rows


def settings() -> dict[str, str]:
    """Return the environment variables that processes use to find each other, if set."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names if name in os.environ}


def measure_pairs(context: DistContext) -> list[Pair]:
    """Return latency and bandwidth of all pairs, on every rank. Collectives: a barrier per pair, sends, a gather.

    Raises:
        RunError: a process does not respond.
    """
    own: list[Pair] = []
    symptom = "a process did not respond before the first pair was measured"
    for source, target in permutations(range(context.world_size), 2):
        try:
            dist.barrier()  # all wait for the pair before
            symptom = f"no message arrived between rank {source} and rank {target}"
            pair = _measure_pair(context, source, target)
        except RuntimeError as error:
            raise RunError(
                f"{symptom}: {first_line(error)}. Check firewalls, MASTER_ADDR, and GLOO_SOCKET_IFNAME, which names "
                "the interface to use"
            ) from error
        if pair is not None:
            own.append(pair)
    return [Pair(**pair) for pairs in context.all_gather_object([vars(pair) for pair in own]) for pair in pairs]


def measure_allreduce(context: DistContext) -> float:
    """Return the median seconds of an all-reduce of 4 MiB over all processes."""
    values = torch.zeros(_ALLREDUCE_BYTES // 4, device=context.device)
    times = []
    for _ in range(5):
        # start together: the time must not include the wait for a late rank
        context.barrier()
        began = time.perf_counter()
        context.all_reduce(values)
        # reading a value waits for the GPU
        float(values[0])
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _measure_pair(context: DistContext, source: int, target: int) -> Pair | None:
    """Measure on the source, answer on the target; None on all other ranks and on the target.

    On a GPU sends and receives return once they are queued, so the source reads a received value before it stops the
    clock, and waits for its device before it starts it.
    """
    if context.rank not in (source, target):
        return None
    small = torch.zeros(1, dtype=torch.int64, device=context.device)
    # the target: echo small messages, then receive large ones until size 0
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
    # the source: round trips of 8 bytes
    trips = []
    int(small)
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        dist.send(small, target)
        dist.recv(small, target)
        int(small)
        trips.append(time.perf_counter() - began)
    trip = statistics.median(trips)
    # larger and larger messages, each acknowledged, until one takes long enough
    rate = 0.0
    for size in _SIZES:
        message = torch.zeros(size, dtype=torch.uint8, device=context.device)
        # wait for the allocation and the fill before the clock starts
        int(message[-1])
        began = time.perf_counter()
        dist.send(small.fill_(size), target)
        dist.send(message, target)
        dist.recv(small, target)
        int(small)
        took = time.perf_counter() - began
        # took = trip + size / rate
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
            # struct ifreq: a name of at most 15 bytes, later the address in bytes 20 to 24
            answer = fcntl.ioctl(opened.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
