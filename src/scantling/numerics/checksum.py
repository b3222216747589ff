"""64-bit checksum of a tensor, computed on its device."""

from __future__ import annotations

import torch
from torch import Tensor

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 over the golden ratio, as int64."""
_OTHER_ODD = 0xBF58476D1CE4E5B9 - (1 << 64)
_PART = 1 << 22
"""Words per pass, so that a large tensor needs no copy of its own size."""


def checksum(value: Tensor) -> Tensor:
    """Return the sum of all 8-byte words, each mixed with its position, modulo 2^64: (1,) int64.

    The mixing (multiply by an odd number, xor with a shifted copy, multiply again) is invertible, so any single
    changed word changes the checksum. Its upper bits reach the lower ones, so changes of several words cancel only by
    chance, once in 2^64. Integer sums do not depend on the order, so every device computes the same value. It protects
    against accidents, not against attackers.
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
