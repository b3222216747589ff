"""Simulate runs from a law, for the tests and benchmarks of the fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scantling.laws import Fit, Law

_SIZES = (30e6, 60e6, 110e6, 220e6)
_TOKENS = (1.5e9, 3e9, 6e9, 13e9, 26e9)
_BITS = (3, 4, 5, 6, 7, 8, 12)


def simulate(law: Law | Fit, grid: Mapping[str, Any], *, noise: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """Return the grid with a column of losses.

    Args:
        law: a law of bits, or a fit of one.
        grid: numeric columns N, D and variables of the law.
        noise: standard deviation of the log loss.
        seed: seed of the noise.
    """
    columns = {name: np.asarray(column, float) for name, column in grid.items()}
    losses = law.loss(**columns)
    draw = np.random.default_rng(seed).standard_normal(len(losses))
    return {**columns, "loss": losses * np.exp(noise * draw)}


def kumar_grid() -> dict[str, Any]:
    """Return 450 runs like those of arXiv 2411.04330: each part alone at low precision, and all of them at once.

    The paper does not list its 465 runs. It gives the sizes and tokens (26B at two sizes only) and the range of bits,
    and leaves out activations and KV cache at 3 bits.
    """
    cells = [(size, tokens) for size in _SIZES for tokens in _TOKENS if not (tokens == 26e9 and size < 100e6)]
    points = [(16, 16, 16)]
    points += [(bits, 16, 16) for bits in _BITS]
    points += [(16, bits, 16) for bits in _BITS if bits > 3]
    points += [(16, 16, bits) for bits in _BITS if bits > 3]
    points += [(bits, bits, bits) for bits in _BITS if 3 < bits < 9]
    rows = np.array([(size, tokens, *point) for size, tokens in cells for point in points], float)
    return dict(zip(("N", "D", "weights", "activations", "kv_cache"), rows.T, strict=True))


def small_grid() -> dict[str, Any]:
    """Return 20 pairs of size and tokens that are not collinear."""
    rows = np.array([(n, n * ratio) for n in (2e7, 6e7, 2e8, 6e8) for ratio in (5, 10, 20, 60, 200)])
    return {"N": rows[:, 0], "D": rows[:, 1]}
