"""Splitting of a dimension into modes, and the valid indices of a padded split.

A dimension of size n becomes d modes m_1 ... m_d with m_1 * ... * m_d >= n. An index i becomes its digits in that
mixed radix; the first mode is the most significant. If the product exceeds n, indices from n on are padding: they
exist only in the cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from operator import index
from typing import Any

from scantling.errors import UserError

MAX_MODES = 5
_PADDING_PRICE = 2.0
"""Weight of padding, relative to parameters: 1 % of padding must save 2 % of them, as it also costs in every product.
"""
_COPY_PRICE = 0.15
"""Fixed cost of any padding, as a share of the parameters, for the copies that pad and slice."""


@lru_cache(maxsize=4096)
def split(size: int, num_modes: int) -> tuple[int, ...]:
    """Return modes for a dimension, largest first, of similar size and with little padding.

    The parameters of a tensor train grow with the sum of its modes, its products with the padded size. The split
    minimizes the sum of both excesses, with padding counted twice, and pads only if that saves enough.

    Args:
        size: size of the dimension, at least 1.
        num_modes: number of modes, from 1 to 5.

    Returns:
        `num_modes` integers whose product is at least `size`.

    Raises:
        UserError: if the size or the number of modes is out of range.

    Example:
        >>> split(768, 3), split(3072, 3), split(30522, 4)
        ((12, 8, 8), (16, 16, 12), (14, 14, 13, 12))
    """
    if size < 1:
        raise UserError(f"a dimension to split into modes must be at least 1; given {size}")
    check_num_modes(num_modes)
    ideal = num_modes * size ** (1.0 / num_modes)

    def score(modes: tuple[int, ...]) -> tuple[float, int]:
        padded = prod(modes)
        return sum(modes) / ideal + _PADDING_PRICE * padded / size + _COPY_PRICE * (padded > size), padded

    return min(_candidates(size, num_modes, size), key=score)


def check_num_modes(num_modes: Any) -> None:
    """Raise a UserError if this is not a valid number of modes."""
    found = positive_ints([num_modes])
    if found is None or found[0] > MAX_MODES:
        raise UserError(f"num_modes must be from 1 to {MAX_MODES}; given {num_modes!r}")


def _candidates(size: int, num_modes: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Yield non-increasing modes, none above `largest`, whose product is at least `size` and as small as necessary."""
    if num_modes == 1:
        if size <= largest:
            yield (size,)
        return
    root = size ** (1.0 / num_modes)
    for mode in range(max(1, int(root)), min(largest, int(2 * root) + 1) + 1):
        for rest in _candidates(-(-size // mode), num_modes - 1, mode):
            yield (mode, *rest)


def positive_ints(values: Any) -> tuple[int, ...] | None:
    """Return positive integers, NumPy's included, as a tuple; None for anything else, such as True."""
    try:
        found = tuple(values)
        numbers = tuple(index(value) for value in found)
    except TypeError:
        return None
    return None if any(isinstance(value, bool) or value < 1 for value in found) else numbers


def check_size(value: Any, what: str) -> int:
    """Return a size given by the user as an int.

    Raises:
        UserError: unless it is a positive integer.
    """
    found = positive_ints([value])
    if found is None:
        raise UserError(f"{what} must be a positive integer; given {value!r}")
    return found[0]


def check_modes(modes: Sequence[int], size: int, what: str) -> tuple[int, ...]:
    """Return modes given by the user as a tuple.

    Args:
        modes: as given.
        size: size of the dimension that they split.
        what: name of the argument, for the message.

    Raises:
        UserError: unless they are 1 to 5 positive integers whose product is at least `size`.
    """
    given = positive_ints(modes)
    if given is None or not 1 <= len(given) <= MAX_MODES:
        raise UserError(f"{what} must be 1 to {MAX_MODES} positive integers; given {modes!r}")
    if prod(given) < size:
        raise UserError(f"{what}={given} hold {prod(given)} indices, fewer than the {size} of the dimension")
    return given


def boxes(size: int, modes: Sequence[int]) -> list[tuple[slice, ...]]:
    """Return the digits of all indices below `size` as disjoint boxes: one slice per mode.

    Indices whose first k digits are those of `size` and whose next digit is smaller have free remaining digits. So at
    most one box per mode is needed.
    """
    if size >= prod(modes):
        return [tuple(slice(0, mode) for mode in modes)]
    own = digits(size, modes)
    found = []
    for place, digit in enumerate(own):
        if digit:
            fixed = tuple(slice(before, before + 1) for before in own[:place])
            free = tuple(slice(0, mode) for mode in modes[place + 1 :])
            found.append((*fixed, slice(0, digit), *free))
    return found


def digits(index: int, modes: Sequence[int]) -> tuple[int, ...]:
    """Return the digits of an index; the first mode is the most significant."""
    digits = []
    for mode in reversed(modes):
        index, digit = divmod(index, mode)
        digits.append(digit)
    return tuple(reversed(digits))
