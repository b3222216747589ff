"""Who takes the step of which parameter: compiled C where it can, tiles of PyTorch operations for the rest."""

from __future__ import annotations

from collections.abc import Sequence

from scantling.optim import _eager, _native
from scantling.optim._eager import Job


def step_all(jobs: Sequence[Job]) -> None:
    """Take the step of each parameter; they do not depend on each other."""
    native: list[Job] = []
    rest: list[Job] = []
    for job in jobs:
        (native if job.hyper.foreach is not False and _native.can_step(job) else rest).append(job)
    _native.step(native)
    for job in rest:
        _eager.step(job)
