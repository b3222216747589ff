"""Tests of factoring dimensions into modes."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scantling.errors import UserError
from scantling.tensor.modes import boxes, check_modes, digits, split


@given(st.integers(1, 200_000), st.integers(1, 5))
def test_split_covers_dimension_with_little_padding(size: int, num_modes: int) -> None:
    modes = split(size, num_modes)
    assert len(modes) == num_modes
    assert list(modes) == sorted(modes, reverse=True)
    most = 1.15 if size > 41 else 1.27  # 13, 19, 20 and 41 need more padding in four or five modes: to 16, 24, 24, 48
    assert size <= prod(modes) <= max(size * most, size + 2)


@pytest.mark.parametrize(
    ("size", "num_modes", "modes"),
    [
        (768, 3, (12, 8, 8)),
        (3072, 3, (16, 16, 12)),
        (1024, 3, (16, 8, 8)),
        (11008, 3, (43, 16, 16)),
        (4096, 2, (64, 64)),
        (97, 1, (97,)),
        (1, 4, (1, 1, 1, 1)),
        (30522, 4, (14, 14, 13, 12)),
    ],
)
def test_split_of_known_sizes(size: int, num_modes: int, modes: tuple[int, ...]) -> None:
    assert split(size, num_modes) == modes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_cover_each_valid_index_once(modes: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, prod(modes)))
    held = [entry for box in boxes(size, modes) for entry in product(*(range(s.start, s.stop) for s in box))]
    assert sorted(held) == [digits(index, modes) for index in range(size)]


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ((4, 4), "product is 16; it must be at least the dimension, 17"),
        ((4, 0), "positive"),
        ((2,) * 6, "1 to 5"),
        ((), "1 to 5"),
    ],
)
def test_check_modes_refuses_invalid_modes(modes: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_modes(modes, 17, "in_modes")


@pytest.mark.parametrize(("size", "num_modes"), [(0, 3), (8, 0), (8, 6), (8, True)])
def test_split_refuses_invalid_arguments(size: int, num_modes: int) -> None:
    assert split(8, 1) == (8,)  # which is kept, and must not be found for True
    with pytest.raises(UserError, match="given"):
        split(size, num_modes)
