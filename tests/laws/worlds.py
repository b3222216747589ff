"""Runs made from a known law: the grid of Kumar et al., and smaller ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from scantling.laws import ChinchillaLaw, Law, PrecisionLaw

SIZES = (30e6, 60e6, 110e6, 220e6)
TOKENS = (1.5e9, 3e9, 6e9, 13e9, 26e9)
BITS = (3, 4, 5, 6, 7, 8, 12)
PARTS = ("weights", "activations", "kv_cache")


def paper_grid() -> dict[str, Any]:
    """450 runs as in arXiv 2411.04330: each part alone, where it does not diverge, and all at once.

    The paper does not list its 465; 26B tokens only at two sizes, and 3 bits only for weights, are its.
    """
    cells = [(n, d) for n in SIZES for d in TOKENS if not (d == 26e9 and n < 100e6)]
    points = [(16, 16, 16)]
    points += [tuple(bits if part == place else 16 for part in range(3)) for place in range(3) for bits in BITS]
    points = [each for each in points if each[1] > 3 and each[2] > 3]
    points += [(bits, bits, bits) for bits in BITS if 3 < bits < 9]
    rows = np.array([(n, d, *point) for n, d in cells for point in points], float)
    return dict(zip(("N", "D", *PARTS), rows.T, strict=True))


def small_grid() -> dict[str, Any]:
    """20 sizes and token counts off one line."""
    rows = np.array([(n, n * ratio) for n in (2e7, 6e7, 2e8, 6e8) for ratio in (5, 10, 20, 60, 200)])
    return {"N": rows[:, 0], "D": rows[:, 1]}


def measured(law: Law, grid: dict[str, Any], noise: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """The grid with the losses of a law, and Gaussian noise on their logarithms."""
    given = law._variables({name: column for name, column in grid.items() if name not in ("N", "D")})
    draw = np.random.default_rng(seed).standard_normal(len(grid["N"]))
    return {**grid, "loss": law.evaluate(grid["N"], grid["D"], given) * np.exp(noise * draw)}


def base_of(law: Law) -> ChinchillaLaw:
    """The law without precision."""
    return ChinchillaLaw(A=law.A, B=law.B, E=law.E, alpha=law.alpha, beta=law.beta, power=law.power)


KUMAR = PrecisionLaw.published()
