"""Runs that were never trained: what a law says of a grid, with noise.

A fit to them tells, before the real runs are paid for, which constants a grid of runs would tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scantling.errors import UserError
from scantling.laws.law import Law
from scantling.laws.result import Fit

_SIZES = (30e6, 60e6, 110e6, 220e6)
_TOKENS = (1.5e9, 3e9, 6e9, 13e9, 26e9)
_BITS = (3, 4, 5, 6, 7, 8, 12)


def simulate(law: Law | Fit, grid: Mapping[str, Any], *, noise: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """The grid with a column of losses.

    Args:
        law: that the losses follow, or a fit of it.
        grid: columns N, D and variables of the law in numbers.
        noise: standard deviation of the logarithm of the loss.
        seed: of the noise.

    Returns:
        The columns of the grid, and `loss` in nats a token.

    Raises:
        UserError: the law has a name in place of bits, or columns are missing, of several lengths or not of numbers.
    """
    if "scheme" in law.VARIABLES:
        raise UserError("simulate takes laws of bits, not of schemes")
    if missing := [name for name in ("N", "D") if name not in grid]:
        raise UserError(f"a grid has columns N and D, and bits; {missing[0]} is missing")
    try:
        columns = {name: np.atleast_1d(np.asarray(column, float)) for name, column in grid.items()}
    except (TypeError, ValueError):
        raise UserError("a grid has columns of numbers; given something else") from None
    if len({column.shape for column in columns.values()}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
        raise UserError(f"the columns of a grid have one length; given {lengths}")
    losses = (law.law if isinstance(law, Fit) else law)._loss(**columns)
    draw = np.random.default_rng(seed).standard_normal(len(losses))
    return {**columns, "loss": losses * np.exp(noise * draw)}


def kumar_grid() -> dict[str, Any]:
    """450 runs like those of arXiv 2411.04330: each part alone at few bits, and all of them at once.

    The paper does not list its 465. Its are the sizes and tokens (26B at two sizes only), the range of bits, and that
    activations and KV cache at 3 bits are left out.
    """
    cells = [(size, tokens) for size in _SIZES for tokens in _TOKENS if not (tokens == 26e9 and size < 100e6)]
    points = [(16, 16, 16)]
    points += [(bits, 16, 16) for bits in _BITS]
    points += [(16, bits, 16) for bits in _BITS if bits > 3]
    points += [(16, 16, bits) for bits in _BITS if bits > 3]
    points += [(bits, bits, bits) for bits in _BITS if 3 < bits < 9]
    rows = np.array([(size, tokens, *point) for size, tokens in cells for point in points], float)
    return dict(zip(("N", "D", "weights", "activations", "kv_cache"), rows.T, strict=True))
