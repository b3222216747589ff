"""Tests of the compact encoding of sorted indices."""

from __future__ import annotations

from math import comb, log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.numerics.bits import packed_bytes, width_for
from scantling.numerics.elias_fano import indices_bytes, pack_indices, unpack_indices


@given(st.integers(1, 300), st.integers(0, 4), st.data())
@settings(deadline=None)
def test_unpack_indices_inverts_pack_indices(size: int, count: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, size))
    index = torch.rand(count, size).argsort(1)[:, :k].sort(1).values
    packed = pack_indices(index, size)
    assert packed.dtype == torch.uint8
    assert packed.shape == (indices_bytes(count, k, size),)
    assert torch.equal(unpack_indices(packed, count, k, size), index)


@pytest.mark.parametrize("first", [True, False])
def test_pack_indices_keeps_lowest_and_highest(first: bool) -> None:
    index = torch.arange(64)[None] + (0 if first else 4096 - 64)
    assert torch.equal(unpack_indices(pack_indices(index, 4096), 1, 64, 4096), index)


@given(st.integers(1, 5000), st.data())
@settings(deadline=None)
def test_indices_bytes_is_at_most_plain_and_close_to_entropy(size: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, size))
    found = indices_bytes(8, k, size)  # eight rows fill whole bytes
    assert found <= packed_bytes(8 * k, width_for(size))
    assert log2(comb(size, k)) <= found < log2(comb(size, k)) + 2 * k + 3


@pytest.mark.parametrize(("k", "bits"), [(1, 12), (2, 12), (8, 11), (32, 9), (64, 8), (128, 7)])
def test_indices_bytes_per_index_of_4096(k: int, bits: float) -> None:
    assert indices_bytes(80, k, 4096) == pytest.approx(80 * k * bits / 8, rel=0.03)


@given(st.integers(1, 300), st.integers(0, 4), st.data())
@settings(deadline=None)
def test_unpack_indices_of_any_bytes_are_in_range(size: int, count: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, size))
    packed = torch.randint(0, 256, (indices_bytes(count, k, size),), dtype=torch.uint8)
    index = unpack_indices(packed, count, k, size)
    assert index.shape == (count, k)
    assert ((index >= 0) & (index < size)).all()
