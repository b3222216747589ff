"""Tests of the compact encoding of sorted indices."""

from __future__ import annotations

from math import comb, log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.numerics.bits import packed_bytes, width_for
from scantling.numerics.subsets import pack_subsets, subsets_bytes, unpack_subsets


@given(st.integers(1, 300), st.integers(0, 4), st.data())
@settings(deadline=None)
def test_subsets_come_back(size: int, count: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, size))
    index = torch.rand(count, size).argsort(1)[:, :kept].sort(1).values
    packed = pack_subsets(index, size)
    assert packed.dtype == torch.uint8
    assert packed.shape == (subsets_bytes(count, kept, size),)
    assert torch.equal(unpack_subsets(packed, count, kept, size), index)


@pytest.mark.parametrize("first", [True, False])
def test_the_lowest_and_the_highest_places_come_back(first: bool) -> None:
    index = torch.arange(64)[None] + (0 if first else 4096 - 64)
    assert torch.equal(unpack_subsets(pack_subsets(index, 4096), 1, 64, 4096), index)


@given(st.integers(1, 5000), st.data())
@settings(deadline=None)
def test_no_more_bits_than_whole_indices_and_hardly_more_than_the_entropy(size: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, size))
    found = subsets_bytes(8, kept, size)  # eight subsets fill whole bytes
    assert found <= packed_bytes(8 * kept, width_for(size))
    assert log2(comb(size, kept)) <= found < log2(comb(size, kept)) + 2 * kept + 3


@pytest.mark.parametrize(("kept", "bits"), [(1, 12), (2, 12), (8, 11), (32, 9), (64, 8), (128, 7)])
def test_bits_of_an_index_of_4096_places(kept: int, bits: float) -> None:
    assert subsets_bytes(80, kept, 4096) == pytest.approx(80 * kept * bits / 8, rel=0.03)


@given(st.integers(1, 300), st.integers(0, 4), st.data())
@settings(deadline=None)
def test_any_bytes_stay_within_a_block(size: int, count: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, size))
    packed = torch.randint(0, 256, (subsets_bytes(count, kept, size),), dtype=torch.uint8)
    index = unpack_subsets(packed, count, kept, size)
    assert index.shape == (count, kept)
    assert ((index >= 0) & (index < size)).all()
