"""Laws and grids from which several tests generate runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from scantling.laws import ChinchillaLaw, Law, PrecisionLaw

KUMAR = PrecisionLaw.published()


def small_grid() -> dict[str, Any]:
    """Return 20 pairs of size and tokens that are not collinear."""
    rows = np.array([(n, n * ratio) for n in (2e7, 6e7, 2e8, 6e8) for ratio in (5, 10, 20, 60, 200)])
    return {"N": rows[:, 0], "D": rows[:, 1]}


def without_precision(law: Law) -> ChinchillaLaw:
    """Return the law without precision."""
    return ChinchillaLaw(A=law.A, B=law.B, E=law.E, alpha=law.alpha, beta=law.beta, power=law.power)
