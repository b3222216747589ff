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
    low = _low_bits(kept, size)
    if low is None:
        return packed_bytes(count * kept, width_for(size))
    return packed_bytes(count * kept, low) + packed_bytes(count * _row(kept, size, low), 1)


def pack_subsets(index: Tensor, size: int) -> Tensor:
    """Bytes of subsets.

    Args:
        index: (count, kept) int64 in ascending order, no two of a row equal, from 0 to size - 1.
        size: places that there are.

    Returns:
        (`subsets_bytes(count, kept, size)`,) uint8.
    """
    count, kept = index.shape
    low = _low_bits(kept, size)
    if low is None:
        return pack(index.flatten(), width_for(size))
    bits = torch.zeros(count, _row(kept, size, low), dtype=torch.uint8, device=index.device)
    bits.scatter_(1, (index >> low) + torch.arange(kept, device=index.device), 1)
    return torch.cat([pack(index.flatten(), low), pack(bits.flatten(), 1)])


def unpack_subsets(packed: Tensor, count: int, kept: int, size: int) -> Tensor:
    """The subsets that `pack_subsets` packed: (count, kept) int64.

    Any bytes of the right number give indices from 0 to size - 1.
    """
    low = _low_bits(kept, size)
    if low is None:
        index = unpack(packed, count * kept, width_for(size)).view(count, kept).long()
    else:
        cut = packed_bytes(count * kept, low)
        rank = torch.arange(kept, device=packed.device)
        length = _row(kept, size, low)
        ones = unpack(packed[cut:], count * length, 1).view(count, length).cumsum(1, dtype=torch.int32)
        place = torch.searchsorted(ones, (rank + 1).to(torch.int32).expand(count, -1).contiguous())
        index = ((place - rank) << low) + unpack(packed[:cut], count * kept, low).view(count, kept)
    return index.clamp(0, size - 1)


def _row(kept: int, size: int, low: int) -> int:
    """Bits of the high parts of one subset."""
    return kept + ((size - 1) >> low)


@cache
def _low_bits(kept: int, size: int) -> int | None:
    """How many bits of an index stand as they are; None where the whole index does."""
    width = width_for(size)
    length = {low: kept * low + _row(kept, size, low) for low in range(width)}
    low = min(length, key=lambda each: (length[each], each), default=0)
    return low if length and length[low] < kept * width else None
