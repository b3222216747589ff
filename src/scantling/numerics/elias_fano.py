"""Elias-Fano coding of sorted indices: `k` of `size` in about 2 + log2(size / k) bits each.

Each index is split into low and high bits (P. Elias, "Efficient storage and retrieval by content and address of static
files", J. ACM 1974; R. Fano, 1971). The low bits are stored unchanged. The high parts are sorted, and are stored as a
row of bits: for the index number i, bit `high + i` is 1. The row has `k` ones and a zero for every step upwards, so
that its length does not depend on the indices. If plain indices take fewer bits, they are stored instead.

64 of 4,096 indices take 8 bits each instead of 12; the entropy of such a choice is 7.4 bits.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from scantling.numerics.bits import pack, packed_bytes, unpack, width_for


def indices_bytes(count: int, k: int, size: int) -> int:
    """Return the number of bytes of `count` packed rows of indices."""
    low, row = index_layout(k, size)
    return packed_bytes(count * k, low) + packed_bytes(count * row, 1)


def pack_indices(index: Tensor, size: int) -> Tensor:
    """Pack rows of sorted indices into bytes.

    Args:
        index: (count, k) int64 from 0 to size - 1; each row strictly ascends.
        size: number of possible indices.

    Returns:
        (`indices_bytes(count, k, size)`,) uint8.
    """
    count, k = index.shape
    low, row = index_layout(k, size)
    packed = pack(index.flatten(), low)
    if not row:
        return packed
    # set bit high + i of each row, for its index number i
    bits = torch.zeros(count, row, dtype=torch.uint8, device=index.device)
    bits.scatter_(1, (index >> low) + torch.arange(k, device=index.device), 1)
    return torch.cat([packed, pack(bits.flatten(), 1)])


def unpack_indices(packed: Tensor, count: int, k: int, size: int) -> Tensor:
    """Return the indices that `pack_indices` packed: (count, k) int64.

    Any bytes of the right length give indices from 0 to size - 1.
    """
    low, row = index_layout(k, size)
    start = packed_bytes(count * k, low)  # of the high parts, after the low bits
    index = unpack(packed[:start], count * k, low).view(count, k).long()
    if row:
        # index number i has its 1 bit at position high + i, where the running count of ones reaches i + 1
        i = torch.arange(k, device=packed.device)
        ones = unpack(packed[start:], count * row, 1).view(count, row).cumsum(1, dtype=torch.int32)  # (count, row)
        position = torch.searchsorted(ones, (i + 1).to(torch.int32).expand(count, -1).contiguous())  # (count, k)
        index += (position - i) << low
    return index.clamp(0, size - 1)


@cache
def index_layout(k: int, size: int) -> tuple[int, int]:
    """Return the shortest layout: the low bits per index, and the bits of a row of high parts (0: plain indices)."""
    width = width_for(size)
    # Plain indices win a tie; otherwise a row has k ones and a zero per step up to the largest high part.
    layouts = [(width, 0), *((low, k + ((size - 1) >> low)) for low in range(width))]
    return min(layouts, key=lambda layout: k * layout[0] + layout[1])
