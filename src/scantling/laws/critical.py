"""How many tokens are too many for a model that is quantised after training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from scantling.errors import UserError
from scantling.laws.law import Law, Values

_MOST = 1e40


def critical_tokens(law: Law, N: float, **variables: Any) -> float:
    """The tokens at which the loss turns from falling to rising with more of them; infinite if it never does.

    Warns where they lie outside the runs that the law was fitted on.

    Args:
        law: with a degradation after training.
        N: parameters.
        variables: of the law, with `post`.

    Raises:
        UserError: if N or bits are no positive number.
    """
    if not (isinstance(N, int | float | np.number) and np.isfinite(N) and N > 0):
        raise UserError(f"N is one number, positive and finite; given {N!r}")
    given = law._variables(variables)
    if lists := [name for name, value in given.items() if np.ndim(value)]:
        raise UserError(f"critical_tokens takes one number of bits for each part; given several as {lists[0]}")
    if not law.trains(given):
        raise UserError(
            f"there are no critical tokens at these bits: by the {law.name} law ({law.source}) training diverges there"
        )
    tokens = turning_tokens(law, N, given)
    if 1.0 < tokens < math.inf:
        law.warn_outside(N=N, D=tokens, **given)
    return tokens


def turning_tokens(law: Law, N: float, variables: Values, most: float = _MOST) -> float:
    """The tokens at which the loss turns from falling to rising, infinite if it falls up to `most`.

    The fall slows down and the rise does not in every law here, so that there is one such point.
    """

    def slope(log_tokens: float) -> float:
        tokens = math.exp(log_tokens)
        return float(np.imag(law.evaluate(N, tokens + 1e-30j, variables)) / 1e-30) * tokens

    low, high = 0.0, math.log(most)
    if slope(high) <= 0:
        return math.inf
    if slope(low) >= 0:
        return 1.0
    from scipy.optimize import brentq

    return math.exp(brentq(slope, low, high, xtol=1e-12))
