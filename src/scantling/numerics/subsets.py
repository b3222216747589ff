"""Which `kept` of `size` places: sorted indices in about 2 + log2(size / kept) bits each, by Elias and Fano.

Each index is cut in two (P. Elias, "Efficient storage and retrieval by content and address of static files", J. ACM
1974; R. Fano, 1971). The low bits stand as they are. The high parts, which only grow, stand in a row of bits: bit
`high + rank` is 1 for the index of that rank. The row has `kept` ones and a zero for every step upwards, so that its
length does not depend on the indices. Where that takes more bits than the indices as they are, these are written.

64 of 4,096 places take 8 bits each in place of 12; the entropy of such a choice is 7.4.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from scantling.numerics.bits import pack, packed_bytes, unpack, width_for


def subsets_bytes(count: int, kept: int, size: int) -> int:
    """Bytes of so many subsets."""
    low, row = _layout(kept, size)
    return packed_bytes(count * kept, low) + packed_bytes(count * row, 1)


def pack_subsets(index: Tensor, size: int) -> Tensor:
    """Bytes of subsets.

    Args:
        index: (count, kept) int64 in ascending order, no two of a row equal, from 0 to size - 1.
        size: places that there are.

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
    """The subsets that `pack_subsets` packed: (count, kept) int64.

    Any bytes of the right number give indices from 0 to size - 1.
    """
    low, row = _layout(kept, size)
    cut = packed_bytes(count * kept, low)
    index = unpack(packed[:cut], count * kept, low).view(count, kept).long()
    if row:
        rank = torch.arange(kept, device=packed.device)
        ones = unpack(packed[cut:], count * row, 1).view(count, row).cumsum(1, dtype=torch.int32)
        place = torch.searchsorted(ones, (rank + 1).to(torch.int32).expand(count, -1).contiguous())
        index += (place - rank) << low
    return index.clamp(0, size - 1)


@cache
def _layout(kept: int, size: int) -> tuple[int, int]:
    """How many bits of an index stand as they are, and the bits of the row of one subset: the shortest of all.

    No row where the whole index stands.
    """
    width = width_for(size)
    layouts = [(width, 0), *((low, kept + ((size - 1) >> low)) for low in range(width))]
    return min(layouts, key=lambda layout: kept * layout[0] + layout[1])
