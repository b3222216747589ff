"""Whether everything may travel: on a fast replicas an all-reduce of all takes less time than selecting what travels.

Measured once, in the middle of a run, with the residuals that are there and without changing anything:

    selected_s   transform, selection, packing, messages, unpacking and back, as in an exchange
    whole_s      an all-reduce of as many numbers as all parameters have

All processes begin each of them together, and all take the mean of what they measured, so that they decide alike. What
is faster is done from then on. Before all numbers are sent, a few are, then eight times as many, and so on: a slow link
is detected long before they are all sent.

Cost: the time of `ROUNDS` exchanges, and of at most about as many all-reduces, or of eight exchanges on a slow network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from scantling.comm.channels import Channel
from scantling.comm.layout import Layout
from scantling.comm.payload import HEADER_BYTES, Header
from scantling.comm.rounds import exchange
from scantling.comm.transport.group import ReplicaGroup
from scantling.comm.values import DTYPES

WARM_UP = 4
"""Calls before it is measured: the first ones allocate, compile and connect."""
ROUNDS = 3
FIRST, GROWTH = 1 << 14, 8


@dataclass(frozen=True, slots=True)
class Trial:
    """What was measured, alike on all processes.

    Attributes:
        selected_s: seconds of an exchange of what is selected, with the codec.
        whole_s: seconds of an all-reduce of everything, or of `sent` numbers that took longer than that already.
        sent: numbers that were sent in it.
        numbers: of all parameters.
    """

    selected_s: float
    whole_s: float
    sent: int
    numbers: int

    @property
    def is_whole(self) -> bool:
        """Whether everything travels from now on."""
        return self.sent == self.numbers and self.whole_s <= self.selected_s

    def __str__(self) -> str:
        sent = f"{self.sent:,}" if self.sent == self.numbers else f"{self.sent:,} of {self.numbers:,}"
        return (
            f"auto_off: selecting and exchanging takes {1e3 * self.selected_s:.1f} ms, an all-reduce of {sent} numbers "
            f"{1e3 * self.whole_s:.1f} ms; from here on "
            + ("everything travels by all-reduce" if self.is_whole else "what is selected travels, as before")
        )


def measured(
    replicas: ReplicaGroup, layout: Layout, whole: Sequence[Channel], held: Callable[[int], Tensor], step: int
) -> Trial:
    """Measure both.

    Args:
        replicas: to the other processes.
        layout: how what is selected travels.
        whole: channels of everything.
        held: a tensor like each parameter, by position; it is only read.
        step: of the headers.

    Collectives: of each round one all-gather before and one after it, and its own.
    """
    device = held(whole[0].members[0].param).device
    selected_s = _seconds(replicas, partial(_exchange, replicas, layout, held, step), device)
    sizes = [channel.count for channel in whole]
    buffer = torch.zeros(max(sizes), dtype=DTYPES[whole[0].kind.section.values], device=device)
    numbers, few = sum(sizes), FIRST
    while few < numbers:
        parts = [few] if few <= len(buffer) else [len(buffer)] * (few // len(buffer))
        whole_s = _seconds(replicas, partial(_all_reduce, replicas, buffer, parts), device, rounds=1)
        if whole_s > selected_s:
            return Trial(selected_s, whole_s, sum(parts), numbers)
        few *= GROWTH
    return Trial(
        selected_s, _seconds(replicas, partial(_all_reduce, replicas, buffer, sizes), device), numbers, numbers
    )


def _exchange(replicas: ReplicaGroup, layout: Layout, held: Callable[[int], Tensor], step: int) -> None:
    """An exchange of what is selected, whose result is thrown away."""
    for number, bucket in enumerate(layout.buckets):
        selected = []
        for channel in bucket.channels:
            blocks = channel.cut({member.param: held(member.param) for member in channel.members})
            selected.append(channel.kind.section.select(blocks))
        header = Header(True, 0, step, replicas.rank, (layout.configuration + number) & 0xFFFFFFFF)
        outcomes, _ = exchange(replicas, layout.way, bucket.channels, selected, header, by_senders=False)
        for channel, outcome in zip(bucket.channels, outcomes, strict=True):
            for part in (outcome.mean, outcome.accepted, outcome.gained):
                for _ in () if part is None else channel.paste_sent(*part):
                    pass


def _all_reduce(replicas: ReplicaGroup, buffer: Tensor, sizes: Sequence[int]) -> None:
    """All-reduces of so many numbers each, after a gather of headers as every exchange has."""
    replicas.all_gather(torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=buffer.device))
    for size in sizes:
        replicas.all_reduce_mean(buffer[:size])


def _seconds(replicas: ReplicaGroup, work: Callable[[], None], device: torch.device, rounds: int = ROUNDS) -> float:
    """The median time of some work that all processes begin together, the mean over them."""
    times = []
    for _ in range(rounds):
        replicas.all_gather(torch.zeros(1, device=device))
        began = _now(device)
        work()
        times.append(_now(device) - began)
    own = torch.tensor([median(times)], dtype=torch.float64, device=device)
    return float(torch.stack(replicas.all_gather(own)).mean())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
