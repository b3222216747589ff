"""Tests of packing integers of any width into bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.errors import UserError
from scantling.numerics.bits import _pack_bits, _unpack_bits, pack, packed_bytes, unpack, width_for


@given(st.integers(0, 24), st.integers(0, 40), st.integers(1, 3), st.integers(0, 2**31))
@settings(deadline=None)
def test_unpack_inverts_pack(width: int, count: int, rows: int, seed: int) -> None:
    values = torch.randint(0, 1 << width, (rows, count), generator=torch.Generator().manual_seed(seed))
    packed = pack(values, width)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, packed_bytes(count, width))
    assert torch.equal(unpack(packed, count, width).long(), values)


@given(st.integers(0, 24), st.integers(0, 40), st.integers(1, 3), st.integers(0, 2**31))
@settings(deadline=None)
def test_pack_bits_matches_pack(width: int, count: int, rows: int, seed: int) -> None:
    """Devices other than CPUs pack bit by bit."""
    values = torch.randint(0, 1 << 24, (rows, count), generator=torch.Generator().manual_seed(seed))
    packed = pack(values, width)
    assert torch.equal(_pack_bits(values, width, packed.shape[-1]), packed)
    assert torch.equal(_unpack_bits(packed, count, width), unpack(packed, count, width))


def test_pack_is_little_endian_without_gaps() -> None:
    packed = pack(torch.tensor([0xABC, 0x123, 0xFFF]), 12)
    assert packed.tolist() == [0xBC, 0x3A, 0x12, 0xFF, 0x0F]


def test_pack_drops_higher_bits() -> None:
    assert pack(torch.tensor([7, 8]), 3).tolist() == [7]


@pytest.mark.parametrize(("count", "width"), [(1, 0), (2, 1), (256, 8), (257, 9), (4096, 12), (1 << 24, 24)])
def test_width_for_distinguishes_values(count: int, width: int) -> None:
    assert width_for(count) == width


def test_pack_refuses_wrong_lengths_and_widths() -> None:
    with pytest.raises(UserError, match="5 integers of 12 bits take 8 bytes; given 7"):
        unpack(torch.zeros(7, dtype=torch.uint8), 5, 12)
    with pytest.raises(UserError, match="given 25"):
        pack(torch.zeros(1, dtype=torch.int64), 25)
