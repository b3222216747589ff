"""Formats of linear layers: the `format` argument of `tensorize` as arguments of `TTLinear`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from scantling.errors import UserError, with_hint

Format: TypeAlias = Literal["tt", "tt-silu", "low-rank", "cola"]

FORMATS: dict[str, dict[str, Any]] = {
    "tt": {"num_modes": 3},
    "tt-silu": {"num_modes": 3, "activation": "silu"},
    "low-rank": {"num_modes": 1},
    "cola": {"num_modes": 1, "activation": "silu"},
}
"""Arguments of the linear layers of each format."""


def linear_options(format: str, num_modes: int | None) -> dict[str, Any]:
    """Return the default arguments of linear layers of a format.

    Raises:
        UserError: if the format does not exist, or takes one mode and several are given.
    """
    if format not in FORMATS:
        names = get_args(Format)
        raise UserError(with_hint(f"format must be one of {', '.join(names)}; given {format!r}", str(format), names))
    options = FORMATS[format]
    if num_modes is None:
        return options
    if options["num_modes"] == 1 and num_modes != 1:
        raise UserError(f"format {format!r} is of matrices, num_modes=1; given num_modes={num_modes}")
    return {**options, "num_modes": num_modes}
