"""Learning rate, evaluations and checkpoints as pure functions of the step, so that there is no state to resume."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from scantling.trainer.recipe.schema import TrainSection


@dataclass(frozen=True)
class Schedule:
    """Steps of a run and the events in them.

    Attributes:
        steps: length of the run.
        lr_factor: the learning rate of a step (from 1) as a share of each group's peak.
        eval_every: steps between evaluations; None for only after the last.
        checkpoint_every: steps between checkpoints; None for only after the last.
    """

    steps: int
    lr_factor: Callable[[int], float]
    eval_every: int | None = None
    checkpoint_every: int | None = None

    @classmethod
    def from_recipe(cls, train: TrainSection) -> Schedule:
        """Return the schedule of a recipe's section `train`."""
        factor = partial(
            lr_factor,
            steps=train.steps,
            schedule=train.schedule,
            warmup=train.warmup,
            decay=train.decay,
            min_ratio=train.min_lr_ratio,
        )
        return cls(train.steps, factor, train.eval_every, train.checkpoint_every)

    def evaluates_after(self, step: int) -> bool:
        """True if the model is evaluated after a step."""
        return step == self.steps or (self.eval_every is not None and step % self.eval_every == 0)

    def saves_after(self, step: int) -> bool:
        """True if a checkpoint is saved after a step."""
        return step == self.steps or (self.checkpoint_every is not None and step % self.checkpoint_every == 0)


def warmup_steps(warmup: float, steps: int) -> int:
    """Return the number of warm-up steps; `warmup` is that number, or a share of `steps` if below 1."""
    return round(warmup * steps) if warmup < 1 else int(warmup)


def wsd_decay_start(decay: float, steps: int) -> int:
    """Return the last step before the decay of the schedule "wsd"."""
    return steps - max(1, round(decay * steps))


def lr_factor(
    step: int, *, steps: int, schedule: str, warmup: float = 0.0, decay: float = 0.2, min_ratio: float = 0.1
) -> float:
    """Return the learning rate of one step as a share of the peak.

    Args:
        step: the step, from 1 to `steps`.
        steps: length of the run.
        schedule: "cosine", "linear", "wsd" (warm-up, stable, linear decay) or "constant".
        warmup: linear warm-up: a number of steps, or a share of `steps` if below 1.
        decay: share of `steps` in which "wsd" decays.
        min_ratio: factor at the last step of a decay.

    Returns:
        A factor in (0, 1]; during the warm-up it is step / (warm-up + 1), so that no step has a rate of zero.
    """
    warmup = warmup_steps(warmup, steps)
    # linear warm-up
    if step <= warmup:
        return step / (warmup + 1)
    # constant until the decay begins
    start = wsd_decay_start(decay, steps) if schedule == "wsd" else warmup
    if schedule == "constant" or step <= start:
        return 1.0
    # decay from 1 to min_ratio
    progress = (step - start) / max(1, steps - start)
    # cosine: (1 + cos(pi p)) / 2. Linear and wsd: 1 - p
    share = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return min_ratio + (1 - min_ratio) * share
