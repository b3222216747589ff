"""Counts and bits as users and tables spell them, and the optional import of SciPy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scantling.errors import UserError

Array = NDArray[Any]
Values = Mapping[str, Any]
"""Variables or constants by name."""

FULL_PRECISION = 16
"""Bits at and above which a run counts as unquantized."""
UNQUANTIZED_SCHEMES = ("bf16", "fp16", "fp32")
"""Training schemes with efficiency 1."""
EMPTY_CELLS = ("", "none", "inf", "nan", "<na>")
"""Table cells that mean unquantized, in lower case."""
_FORMAT = re.compile(r"(?:mx|nv)?(?:int|fp|bf)(\d+)(?:_e\d+m\d+)?")
"""A number format as recipes spell it, such as `int4` or `fp8_e4m3`; group 1 is its bits."""


def scipy_optimize() -> Any:
    """Import scipy.optimize, which fits and optima need and predictions do not.

    Raises:
        UserError: SciPy is not installed.
    """
    try:
        import scipy.optimize
    except ImportError:
        raise UserError('fits and optima need SciPy; install it with: pip install "scantling[laws]"') from None
    return scipy.optimize


def float_or_array(value: Any) -> Any:
    """Return a float for an array without dimensions, other arrays unchanged."""
    return float(value) if np.ndim(value) == 0 else value


def cell_text(cell: Any) -> str:
    """Return a table cell as text; None becomes empty."""
    return "" if cell is None else str(cell).strip()


def parse_bits(cell: Any) -> float:
    """Return the bits of a table cell or recipe value.

    Args:
        cell: a number, a format name such as `int4`, a mapping with a `format`, or an empty cell for unquantized.

    Raises:
        ValueError: for anything else.
    """
    text = cell_text(cell)
    if isinstance(cell, Mapping) or text.startswith("{"):
        mapping = cell if isinstance(cell, Mapping) else json.loads(text)
        if "format" not in mapping:
            raise ValueError("a mapping without a format")
        text = cell_text(mapping["format"])
    if text.lower() in EMPTY_CELLS:
        return math.inf
    match = _FORMAT.fullmatch(text)
    return float(match[1] if match else text)


def check_bits(name: str, value: Any) -> Array:
    """Return bits as an array of floats; None means unquantized.

    Raises:
        UserError: a value is neither a positive number nor a format name.
    """
    array = np.asarray(math.inf if value is None else value)
    try:
        if array.dtype.kind not in "iuf":
            array = np.array([parse_bits(each) for each in array.ravel()]).reshape(array.shape)
        if (array > 0).all():
            return array.astype(float)
    except ValueError:
        pass
    raise UserError(f"{name} is in bits, above 0, or a format such as int4 (math.inf is unquantized); given {value}")


def check_counts(name: str, value: ArrayLike) -> Array:
    """Return counts of parameters or tokens as an array of floats.

    Raises:
        UserError: a count is not positive and finite.
    """
    try:
        array = np.asarray(value, float)
    except (TypeError, ValueError):
        raise UserError(f"{name} counts are positive and finite numbers; given {value!r}") from None
    if not (np.isfinite(array) & (array > 0)).all():
        raise UserError(f"{name} counts are positive and finite numbers; given {array}")
    return array
