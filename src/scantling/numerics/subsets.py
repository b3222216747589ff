"""Elias-Fano coding of sorted indices: `kept` of `size` in about 2 + log2(size / kept) bits each.

Each index is split in two (P. Elias, "Efficient storage and retrieval by content and address of static files", J. ACM
1974; R. Fano, 1971). The low bits are stored as they are. The high parts are sorted, and are stored as a row of bits:
bit `high + rank` is 1 for the index of that rank. The row has `kept` ones and a zero for every step upwards, so that
its length does not depend on the indices. If plain indices take fewer bits, they are stored instead.

64 of 4,096 indices take 8 bits each instead of 12; the entropy of such a choice is 7.4 bits.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from scantling.numerics.bits import pack, packed_bytes, unpack, width_for


def subsets_bytes(count: int, kept: int, size: int) -> int:
    """Return the number of bytes of `count` packed subsets."""
    low, row = _layout(kept, size)
    return packed_bytes(count * kept, low) + packed_bytes(count * row, 1)


def pack_subsets(index: Tensor, size: int) -> Tensor:
    """Pack subsets into bytes.

    Args:
        index: (count, kept) int64 from 0 to size - 1, each row in strictly ascending order.
        size: number of possible indices.

    Returns:
        (`subsets_bytes(count, kept, size)`,) uint8.
    """
    count, kept = index.shape
    low, row = _layout(kept, size)
    packed = pack(index.flatten(), low)
    if not row:
        return packed
    bits = torch.zeros(count, row, dtype=torch.uint8, device=index.device)
    bits.scatter_(1, (index >> low) + torch.arange(kept, device=index.device), 1)
    return torch.cat([packed, pack(bits.flatten(), 1)])


def unpack_subsets(packed: Tensor, count: int, kept: int, size: int) -> Tensor:
    """Return the subsets that `pack_subsets` packed: (count, kept) int64.

    Any bytes of the right length give indices from 0 to size - 1.
    """
    low, row = _layout(kept, size)
    cut = packed_bytes(count * kept, low)
    index = unpack(packed[:cut], count * kept, low).view(count, kept).long()
    if row:
        # The 1 bit number `rank`, counted from 0, is at position high + rank of the row.
        rank = torch.arange(kept, device=packed.device)
        ones = unpack(packed[cut:], count * row, 1).view(count, row).cumsum(1, dtype=torch.int32)
        place = torch.searchsorted(ones, (rank + 1).to(torch.int32).expand(count, -1).contiguous())
        index += (place - rank) << low
    return index.clamp(0, size - 1)


@cache
def _layout(kept: int, size: int) -> tuple[int, int]:
    """Return the shortest layout: the low bits per index and the bits of the row of one subset.

    The row has 0 bits if plain indices are stored.
    """
    width = width_for(size)
    layouts = [(width, 0), *((low, kept + ((size - 1) >> low)) for low in range(width))]
    return min(layouts, key=lambda layout: kept * layout[0] + layout[1])
