"""Random bits that are a function of a counter alone, for stochastic rounding.

A bit of noise belongs to (seed, step, parameter, element), not to a generator that is drawn from in turn: a step gives
the same result in tiles of any size, on any device, on shards, and after a resume, and there is no state to save. The
bits come from two rounds of multiply and xor-shift on 32-bit integers, which pass for noise where only the top 16 bits
are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))
_STREAM = 0x9E3779B1


def seed_of(step: Tensor, ordinal: int, stream: int) -> Tensor:
    """The seed of one parameter's noise in one step: 0-D int32 on the device of `step`, without waiting for it.

    Args:
        step: 0-D, the number of the step.
        ordinal: which parameter of the optimizer.
        stream: which of a parameter's uses of noise.
    """
    key = (ordinal * 4 + stream) * _STREAM & 0x7FFFFFFF
    return _mix(step.to(torch.int32) * _MULTIPLIERS[0] + key)


def random_16(seed: Tensor, start: int, shape: Sequence[int]) -> Tensor:
    """Uniform integers from 0 to 65535, int32, for the elements `start`, `start + 1`, ... of a parameter.

    Args:
        seed: from `seed_of`.
        start: place of the first element in the whole parameter, in row-major order.
        shape: of the result, which is contiguous in that order.
    """
    first = start & 0xFFFFFFFF
    first -= (first >> 31) << 32  # as a signed 32-bit integer, which wraps around in parameters of more elements
    counter = torch.arange(prod(shape), dtype=torch.int32, device=seed.device).add_(first).mul_(_MULTIPLIERS[1])
    return _mix(counter.add_(seed)).bitwise_right_shift_(16).bitwise_and_(0xFFFF).view(tuple(shape))


def _mix(x: Tensor) -> Tensor:
    """Every bit of the result depends on all bits of `x`: int32, in place."""
    for multiplier in _MULTIPLIERS:
        x.bitwise_xor_(x.bitwise_right_shift(16).bitwise_and_(0xFFFF)).mul_(multiplier)
    return x
