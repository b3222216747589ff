"""Learning-rate schedules as a pure function of the step, so that there is nothing to save and nothing to resume."""

from __future__ import annotations

import math


def lr_factor(
    step: int, *, steps: int, schedule: str, warmup: float = 0.0, decay: float = 0.2, min_ratio: float = 0.1
) -> float:
    """The learning rate of one step as a share of the peak.

    Args:
        step: the step, from 1 to `steps`.
        steps: length of the run.
        schedule: "cosine", "linear", "wsd" (warm-up, stable, linear decay) or "constant".
        warmup: linear warm-up, a number of steps, or a share of `steps` when below 1.
        decay: share of `steps` in which "wsd" decays.
        min_ratio: factor at the last step of a decay.

    Returns:
        A factor in (0, 1]; during the warm-up it is step / (warm-up + 1), so that no step has a rate of zero.
    """
    warmup_steps = round(warmup * steps) if warmup < 1 else int(warmup)
    if step <= warmup_steps:
        return step / (warmup_steps + 1)
    start = steps - max(1, round(decay * steps)) if schedule == "wsd" else warmup_steps
    if schedule == "constant" or step <= start:
        return 1.0
    progress = (step - start) / max(1, steps - start)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return min_ratio + (1 - min_ratio) * share
