"""Who takes the step of which parameter: C on a CPU, compiled kernels on a GPU, tiles of PyTorch operations else.

All follow the order and the mathematics of `_eager.py` and `_update.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from scantling.optim import _compiled, _eager, _native
from scantling.optim._eager import Job


def step_all(jobs: Sequence[Job], total_bytes: int) -> None:
    """Take the step of each parameter; they do not depend on each other.

    Args:
        jobs: the parameters.
        total_bytes: of all parameters of the optimizer on this rank, which say how much scratch there may be.
    """
    native: list[Job] = []
    compiled: list[Job] = []
    rest: list[Job] = []
    for job in jobs:
        if job.hyper.foreach is False:
            rest.append(job)
        elif _native.can_step(job):
            native.append(job)
        elif _compiled.can_step(job, total_bytes):
            compiled.append(job)
        else:
            rest.append(job)
    _native.step(native)
    rest += _compiled.step(compiled)
    for job in rest:
        _eager.step(job)
