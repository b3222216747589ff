"""Who takes the step of which parameter: C on a CPU, Triton's kernels on a GPU, tiles of PyTorch operations else.

All follow the order and the mathematics of `_eager.py` and `_update.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from scantling.optim import _eager, _grouped, _native
from scantling.optim._eager import Job


def step_all(jobs: Sequence[Job]) -> None:
    """Take the step of each parameter; they do not depend on each other."""
    native: list[Job] = []
    grouped: list[Job] = []
    rest: list[Job] = []
    for job in jobs:
        if job.hyper.foreach is False:
            rest.append(job)
        elif _native.can_step(job):
            native.append(job)
        elif _grouped.can_step(job):
            grouped.append(job)
        else:
            rest.append(job)
    _native.step(native)
    _grouped.step(grouped)
    for job in rest:
        _eager.step(job)
