"""Measure comparable times on a shared machine: in turns, in random order, as ratios to a control.

A disturbance hits all contenders equally. A result is the median over the rounds of (own time / control's time in the
same round).
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
    """Return the seconds of each piece of work by name, one value per round.

    Args:
        work: callables to time, by name.
        rounds: number of timed rounds.
        warmup: number of untimed rounds before them.
        least_s: repeat short work until it takes this long, and divide its time.
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
    """Return why times are refused, or None: the `ratio` of the control to itself must be close to 1.

    A shared machine is slow from time to time, which affects short pieces of work more than long ones.
    """
    found, (low, high) = again["ratio"], again["ratio_95"]
    if abs(found - 1.0) <= 0.05 and low >= 0.9 and high <= 1.1:
        return None
    return f"refused: the control against itself is {found:.2f} [{low:.2f}, {high:.2f}]"


def ratio(own: Sequence[float], control: Sequence[float]) -> dict[str, Any]:
    """Return the median ratio with its 95 % bootstrap interval."""
    ratios = np.array(own) / np.array(control)
    generator = np.random.default_rng(0)
    draws = np.median(ratios[generator.integers(0, len(ratios), (2000, len(ratios)))], axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"ratio": float(np.median(ratios)), "ratio_95": [float(low), float(high)], "raw_s": list(own)}
