"""A checksum of any tensor, on its device: 64 bits that change with any word of it."""

from __future__ import annotations

import torch
from torch import Tensor

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 over the golden ratio, as int64."""
_OTHER_ODD = 0xBF58476D1CE4E5B9 - (1 << 64)
_PART = 1 << 22
"""Words at a time, so that a large tensor needs no copy of its own size."""


def checksum(value: Tensor) -> Tensor:
    """The sum of all words of 8 bytes, each mixed with its place, modulo 2^64: (1,) int64.

    Mixing, a product with an odd number, a shifted exclusive or, and another product, has an inverse, so that no single
    changed word goes unseen; its upper bits reach the lower ones, so that changes of several words cancel by chance
    alone, once in 2^64. Sums of integers do not depend on their order, so that every device computes the same. Against
    accidents, not attackers.
    """
    flat = value.detach().contiguous().flatten().view(torch.uint8)
    total = torch.zeros(1, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), 8 * _PART):
        part = flat[start : start + 8 * _PART]
        words = torch.nn.functional.pad(part, (0, -part.numel() % 8)).view(torch.int64)
        place = torch.arange(1, words.numel() + 1, device=flat.device, dtype=torch.int64) + start // 8
        mixed = (words ^ (place * _OTHER_ODD)) * _ODD
        mixed ^= (mixed >> 32) & 0xFFFFFFFF
        mixed *= _OTHER_ODD
        mixed ^= (mixed >> 29) & 0x7FFFFFFFF
        total += mixed.sum()
    return total
