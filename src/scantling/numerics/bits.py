"""Unsigned integers of any width up to 24 bits, packed into bytes without gaps, little-endian.

Integer i of a row starts at bit `i * width`; bits of a byte count from the lowest. Unused bits of the last byte of a
row are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import torch
from torch import Tensor

from scantling.errors import UserError

MOST_BITS = 24


def width_for(count: int) -> int:
    """Return the number of bits that distinguish `count` values."""
    return max(0, (count - 1).bit_length())


def packed_bytes(count: int, width: int) -> int:
    """Return the number of bytes that `count` integers of `width` bits take."""
    return -(-count * width // 8)


def pack(values: Tensor, width: int) -> Tensor:
    """Pack integers along the last dim.

    Args:
        values: (..., n) integers from 0 to 2^width - 1; higher bits are dropped.
        width: bits per integer, from 0 to 24.

    Returns:
        (..., `packed_bytes(n, width)`) uint8.

    Raises:
        UserError: if the width is out of range.
    """
    _check(width)
    count = values.shape[-1]
    size = packed_bytes(count, width)
    if width == 8:
        return values.to(torch.uint8)
    if values.device.type != "cpu":
        return _pack_bits(values, width, size)
    group, group_bytes = _group(width)
    groups = -(-count // group)
    padded = torch.nn.functional.pad(values.to(torch.int32), (0, groups * group - count))
    padded = (padded & ((1 << width) - 1)).view(*values.shape[:-1], groups, group)
    out = torch.zeros(*values.shape[:-1], groups, group_bytes, dtype=torch.int32, device=values.device)
    for place, byte, shift in _overlaps(width):
        value = padded[..., place]
        out[..., byte] |= (value << shift if shift >= 0 else value >> -shift) & 255
    return out.to(torch.uint8).flatten(-2)[..., :size]


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """Return the integers that `pack` packed.

    Args:
        packed: (..., `packed_bytes(count, width)`) uint8.
        count: integers per row.
        width: bits per integer.

    Returns:
        (..., count) int32.

    Raises:
        UserError: if the width is out of range or the rows have another length.
    """
    _check(width)
    size = packed_bytes(count, width)
    if packed.shape[-1] != size:
        raise UserError(f"{count} numbers of {width} bits take {size} bytes; given {packed.shape[-1]}")
    if width == 8:
        return packed.to(torch.int32)
    if packed.device.type != "cpu":
        return _unpack_bits(packed, count, width)
    group, group_bytes = _group(width)
    groups = -(-count // group)
    padded = torch.nn.functional.pad(packed, (0, groups * group_bytes - size)).to(torch.int32)
    padded = padded.view(*packed.shape[:-1], groups, group_bytes)
    out = torch.zeros(*packed.shape[:-1], groups, group, dtype=torch.int32, device=packed.device)
    for place, byte, shift in _overlaps(width):
        value = padded[..., byte]
        out[..., place] |= value >> shift if shift >= 0 else value << -shift
    return (out & ((1 << width) - 1)).flatten(-2)[..., :count]


def _pack_bits(values: Tensor, width: int, size: int) -> Tensor:
    """Pack like `pack`, bit by bit."""
    bits = (values.to(torch.int32)[..., None] >> _places(width, values)).bitwise_and_(1).to(torch.uint8).flatten(-2)
    padded = torch.nn.functional.pad(bits, (0, 8 * size - bits.shape[-1])).view(*values.shape[:-1], size, 8)
    return (padded << _places(8, padded)).sum(-1, dtype=torch.uint8)


def _unpack_bits(packed: Tensor, count: int, width: int) -> Tensor:
    """Unpack like `unpack`, bit by bit."""
    bits = (packed[..., None] >> _places(8, packed)).bitwise_and_(1).flatten(-2)[..., : count * width]
    numbers = bits.to(torch.int32).reshape(*packed.shape[:-1], count, width)
    return (numbers << _places(width, numbers)).sum(-1, dtype=torch.int32)


def _places(count: int, like: Tensor) -> Tensor:
    dtype = torch.uint8 if like.dtype == torch.uint8 else torch.int32
    return torch.arange(count, dtype=dtype, device=like.device)


def _group(width: int) -> tuple[int, int]:
    """Return the smallest number of integers that fill whole bytes, and the number of bytes."""
    count = 8 // gcd(width, 8)
    return count, count * width // 8


def _overlaps(width: int) -> Iterator[tuple[int, int, int]]:
    """Yield (integer, byte, bit offset of the integer from the byte's start) for all overlapping pairs in a group."""
    count, _ = _group(width)
    for place in range(count):
        for byte in range(place * width // 8, ((place + 1) * width - 1) // 8 + 1) if width else ():
            yield place, byte, place * width - 8 * byte


def _check(width: int) -> None:
    if not 0 <= width <= MOST_BITS:
        raise UserError(f"numbers of 0 to {MOST_BITS} bits can be packed; given {width}")
