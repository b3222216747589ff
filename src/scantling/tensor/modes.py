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


@lru_cache(maxsize=4096, typed=True)  # True must not find the modes of 1
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
        raise UserError(f"given a dimension of {size}; it must be at least 1 to be split into modes")
    check_num_modes(num_modes)
    ideal = num_modes * size ** (1.0 / num_modes)

    def score(modes: tuple[int, ...]) -> tuple[float, int]:
        padded = prod(modes)
        # Parameters, then padding, then the fixed cost of any padding; ties go to the least padding.
        return sum(modes) / ideal + _PADDING_PRICE * padded / size + _COPY_PRICE * (padded > size), padded

    return min(_candidates(size, num_modes, size), key=score)


def check_num_modes(num_modes: Any) -> None:
    """Raise a UserError if this is not a valid number of modes."""
    checked = positive_ints([num_modes])
    if checked is None or checked[0] > MAX_MODES:
        raise UserError(f"given num_modes={num_modes!r}; it must be from 1 to {MAX_MODES}")


def _candidates(size: int, num_modes: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Yield non-increasing modes, none above `largest`, whose product is at least `size` and as small as necessary."""
    if num_modes == 1:
        if size <= largest:
            yield (size,)
        return
    root = size ** (1.0 / num_modes)
    # The largest mode is at least the root; more than twice the root is never the best.
    for mode in range(max(1, int(root)), min(largest, int(2 * root) + 1) + 1):
        # Round up, so that the product reaches `size`; no later mode is larger, so that no split comes twice.
        for rest in _candidates(-(-size // mode), num_modes - 1, mode):
            yield (mode, *rest)


def positive_ints(values: Any) -> tuple[int, ...] | None:
    """Return positive integers, NumPy's included, as a tuple; None for anything else, such as True."""
    try:
        given = tuple(values)
        integers = tuple(index(value) for value in given)
    except TypeError:
        return None
    # `index` accepts bools, since they are integers.
    return None if any(isinstance(value, bool) or value < 1 for value in given) else integers


def check_size(value: Any, name: str) -> int:
    """Return a size given by the user as an int.

    Raises:
        UserError: unless it is a positive integer.
    """
    checked = positive_ints([value])
    if checked is None:
        raise UserError(f"given {name}={value!r}; it must be a positive integer")
    return checked[0]


def check_modes(modes: Sequence[int], size: int, name: str) -> tuple[int, ...]:
    """Return modes given by the user as a tuple.

    Args:
        modes: as given.
        size: size of the dimension that they split.
        name: name of the argument, for the message.

    Raises:
        UserError: unless they are 1 to 5 positive integers whose product is at least `size`.
    """
    given = positive_ints(modes)
    if given is None or not 1 <= len(given) <= MAX_MODES:
        raise UserError(f"given {name}={modes!r}; they must be 1 to {MAX_MODES} positive integers")
    if prod(given) < size:
        raise UserError(
            f"given {name}={given}, whose product is {prod(given)}; it must be at least the dimension, {size}"
        )
    return given


def boxes(size: int, modes: Sequence[int]) -> list[tuple[slice, ...]]:
    """Return the digits of all indices below `size` as disjoint boxes: one slice per mode.

    Indices whose first k digits are those of `size` and whose next digit is smaller have free remaining digits. So at
    most one box per mode is needed.
    """
    if size >= prod(modes):
        return [tuple(slice(0, mode) for mode in modes)]
    size_digits = digits(size, modes)
    disjoint = []
    for i, digit in enumerate(size_digits):
        # No digit is below 0, so that box would be empty.
        if digit:
            fixed = tuple(slice(before, before + 1) for before in size_digits[:i])
            free = tuple(slice(0, mode) for mode in modes[i + 1 :])
            disjoint.append((*fixed, slice(0, digit), *free))
    return disjoint


def digits(index: int, modes: Sequence[int]) -> tuple[int, ...]:
    """Return the digits of an index; the first mode is the most significant."""
    reverse = []
    for mode in reversed(modes):
        index, digit = divmod(index, mode)
        reverse.append(digit)
    return tuple(reversed(reverse))
