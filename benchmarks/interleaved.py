"""Times that can be compared on a machine that others use: taken in turns, in random order, as ratios to a control.

A disturbance falls on all alike; a figure is the median over the rounds of (own time / the control's of that round).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def take_turns(
    work: Mapping[str, Callable[[], object]], rounds: int, *, warmup: int = 3, least_s: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of each piece of work, by name, one number a round.

    Args:
        work: what is timed.
        rounds: how often each is timed.
        warmup: rounds before, which do not count.
        least_s: short work is repeated until it takes this long, and its time divided.
    """
    repeats = {name: _repeats(one, least_s) for name, one in work.items()}
    times: dict[str, list[float]] = {name: [] for name in work}
    order = random.Random(0)
    for number in range(rounds + warmup):
        for name in order.sample(list(work), len(work)):
            began = time.perf_counter()
            for _ in range(repeats[name]):
                work[name]()
            if number >= warmup:
                times[name].append((time.perf_counter() - began) / repeats[name])
    return times


def _repeats(one: Callable[[], object], least_s: float) -> int:
    if least_s <= 0.0:
        return 1
    one()
    began = time.perf_counter()
    one()
    return max(1, int(least_s / max(1e-9, time.perf_counter() - began)))


def disturbed(again: Mapping[str, Any]) -> str | None:
    """Why times are refused, or None: what `ratio` found for the control against itself is not 1, or not surely.

    A machine that others use takes turns to be slow, which moves short pieces of work more than long ones.
    """
    found, (low, high) = again["ratio"], again["ratio_95"]
    if abs(found - 1.0) <= 0.05 and low >= 0.9 and high <= 1.1:
        return None
    return f"refused: the control against itself is {found:.2f} [{low:.2f}, {high:.2f}]"


def ratio(own: Sequence[float], control: Sequence[float]) -> dict[str, Any]:
    """The median ratio with its 95 % bootstrap interval."""
    ratios = np.array(own) / np.array(control)
    generator = np.random.default_rng(0)
    draws = np.median(ratios[generator.integers(0, len(ratios), (2000, len(ratios)))], axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"ratio": float(np.median(ratios)), "ratio_95": [float(low), float(high)], "raw_s": list(own)}
