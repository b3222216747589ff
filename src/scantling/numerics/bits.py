"""Unsigned integers of up to 24 bits, packed into bytes without gaps, little-endian; and checksums of tensors.

Integer i of a row starts at bit `i * width`; bits of a byte count from the lowest. Unused bits of the last byte of a
row are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import torch
from torch import Tensor

from scantling.errors import UserError

MAX_BITS = 24

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 over the golden ratio, as int64."""
_OTHER_ODD = 0xBF58476D1CE4E5B9 - (1 << 64)
_WORDS_PER_PASS = 1 << 22
"""Limit on temporary memory, so that a large tensor needs no copy of the same size."""


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
    if width == 4:
        return pack_nibbles(values)
    # On a GPU the number of launches counts, and not the memory for single bits.
    if values.device.type != "cpu":
        return _pack_bits(values, width, size)
    # `group` integers fill `group_bytes` bytes: each (integer, byte) pair that overlaps is one operation on all groups
    group, group_bytes = _group(width)
    groups = -(-count // group)
    # (..., n) -> (..., groups, group)
    padded = torch.nn.functional.pad(values.to(torch.int32), (0, groups * group - count))
    padded = (padded & ((1 << width) - 1)).view(*values.shape[:-1], groups, group)
    out = torch.zeros(*values.shape[:-1], groups, group_bytes, dtype=torch.int32, device=values.device)
    for i, byte, shift in _overlaps(width):
        value = padded[..., i]
        # A negative shift: the integer starts in an earlier byte.
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
        raise UserError(f"{count} integers of {width} bits take {size} bytes; given {packed.shape[-1]} bytes")
    if width == 8:
        return packed.to(torch.int32)
    if width == 4:
        return unpack_nibbles(packed, count).to(torch.int32)
    if packed.device.type != "cpu":
        return _unpack_bits(packed, count, width)
    group, group_bytes = _group(width)
    groups = -(-count // group)
    padded = torch.nn.functional.pad(packed, (0, groups * group_bytes - size)).to(torch.int32)
    # (..., size) -> (..., groups, group_bytes)
    padded = padded.view(*packed.shape[:-1], groups, group_bytes)
    out = torch.zeros(*packed.shape[:-1], groups, group, dtype=torch.int32, device=packed.device)
    for i, byte, shift in _overlaps(width):
        value = padded[..., byte]
        out[..., i] |= value >> shift if shift >= 0 else value << -shift
    return (out & ((1 << width) - 1)).flatten(-2)[..., :count]


def pack_nibbles(values: Tensor) -> Tensor:
    """Pack integers into 4 bits, two to a byte, as `pack` does: (..., n) to (..., ceil(n / 2)) uint8."""
    nibbles = values.to(torch.uint8) & 15
    if nibbles.shape[-1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    return nibbles[..., ::2] | nibbles[..., 1::2].bitwise_left_shift(4)


def unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    """Return the integers that `pack_nibbles` packed: (..., count) uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :count]


def _pack_bits(values: Tensor, width: int, size: int) -> Tensor:
    """Pack like `pack`, bit by bit."""
    # (..., n) -> (..., n, width) -> (..., n * width), lowest bit first
    bits = (
        (values.to(torch.int32)[..., None] >> _bit_positions(width, values)).bitwise_and_(1).to(torch.uint8).flatten(-2)
    )
    padded = torch.nn.functional.pad(bits, (0, 8 * size - bits.shape[-1])).view(*values.shape[:-1], size, 8)
    return (padded << _bit_positions(8, padded)).sum(-1, dtype=torch.uint8)


def _unpack_bits(packed: Tensor, count: int, width: int) -> Tensor:
    """Unpack like `unpack`, bit by bit."""
    # (..., size) -> (..., size * 8) -> (..., count, width)
    bits = (packed[..., None] >> _bit_positions(8, packed)).bitwise_and_(1).flatten(-2)[..., : count * width]
    integers = bits.to(torch.int32).reshape(*packed.shape[:-1], count, width)
    return (integers << _bit_positions(width, integers)).sum(-1, dtype=torch.int32)


def _bit_positions(count: int, like: Tensor) -> Tensor:
    dtype = torch.uint8 if like.dtype == torch.uint8 else torch.int32
    return torch.arange(count, dtype=dtype, device=like.device)


def _group(width: int) -> tuple[int, int]:
    """Return the smallest number of integers that fill whole bytes, and the number of bytes."""
    count = 8 // gcd(width, 8)
    return count, count * width // 8


def _overlaps(width: int) -> Iterator[tuple[int, int, int]]:
    """Yield (integer, byte, bit offset of the integer from the byte's start) for all overlapping pairs in a group."""
    count, _ = _group(width)
    for i in range(count if width else 0):
        for byte in range(i * width // 8, ((i + 1) * width - 1) // 8 + 1):
            yield i, byte, i * width - 8 * byte


def _check(width: int) -> None:
    if not 0 <= width <= MAX_BITS:
        raise UserError(f"integers to pack have 0 to {MAX_BITS} bits; given {width} bits")


def checksum(value: Tensor) -> Tensor:
    """Return the sum of all 8-byte words, each mixed with its position, modulo 2^64: (1,) int64.

    The mixing (multiply by an odd number, xor with a shifted copy, multiply again) is invertible, so any single
    changed word changes the checksum. Its upper bits reach the lower ones, so changes of several words cancel only by
    chance, once in 2^64. Integer sums do not depend on the order, so every device computes the same value. It protects
    against accidents, not against attackers.
    """
    flat = value.detach().contiguous().flatten().view(torch.uint8)
    total = torch.zeros(1, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), 8 * _WORDS_PER_PASS):
        part = flat[start : start + 8 * _WORDS_PER_PASS]
        words = torch.nn.functional.pad(part, (0, -part.numel() % 8)).view(torch.int64)
        position = torch.arange(1, words.numel() + 1, device=flat.device, dtype=torch.int64) + start // 8
        mixed = (words ^ (position * _OTHER_ODD)) * _ODD
        mixed ^= (mixed >> 32) & 0xFFFFFFFF  # a logical shift: int64 shifts copy the sign
        mixed *= _OTHER_ODD
        mixed ^= (mixed >> 29) & 0x7FFFFFFFF
        total += mixed.sum()
    return total
