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


def seed_of(step: Tensor, ordinal: int | Tensor, stream: int) -> Tensor:
    """The seed of one parameter's noise in one step: 0-D int32 on the device of `step`, without waiting for it.

    Args:
        step: 0-D, the number of the step.
        ordinal: which parameter of the optimizer; a tensor is 0-D int64.
        stream: which of a parameter's uses of noise.
    """
    key = (ordinal * 4 + stream) * _STREAM & 0x7FFFFFFF
    if isinstance(key, Tensor):
        key = key.to(torch.int32)
    return _mix(step.to(torch.int32) * _MULTIPLIERS[0] + key)


def random_16(seed: Tensor, start: int, shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
    """Uniform integers from 0 to 65535, int32, for some elements of a parameter.

    Args:
        seed: from `seed_of`.
        start: place of the first element in the whole parameter, in row-major order.
        shape: of the result, which is contiguous.
        strides: of the whole parameter in row-major order, for a part of it. Default: the elements follow each other.
    """
    places = _runs(shape, strides) if strides else [(prod(shape), 1)]
    counter = _arange(seed, *places[-1]).add_(_signed(start))
    for length, stride in reversed(places[:-1]):
        counter = (_arange(seed, length, stride).unsqueeze(-1) + counter).view(-1)
    counter.mul_(_MULTIPLIERS[1])
    return _mix(counter.add_(seed)).bitwise_right_shift_(16).bitwise_and_(0xFFFF).view(tuple(shape))


def _runs(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(length, stride) of dims, those that run on without a gap made one."""
    runs = [(1, 1)]
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        inner, step = runs[-1]
        if length == 1:
            continue
        if inner == 1:
            runs[-1] = (length, stride)
        elif stride == inner * step:
            runs[-1] = (length * inner, step)
        else:
            runs.append((length, stride))
    return runs[::-1]


def _arange(seed: Tensor, length: int, stride: int) -> Tensor:
    count = torch.arange(length, dtype=torch.int32, device=seed.device)
    return count if stride == 1 else count.mul_(_signed(stride))


def _signed(value: int) -> int:
    """As a signed 32-bit integer, which wraps around in parameters of more elements."""
    low = value & 0xFFFFFFFF
    return low - ((low >> 31) << 32)


def _mix(x: Tensor) -> Tensor:
    """Every bit of the result depends on all bits of `x`: int32, in place."""
    for multiplier in _MULTIPLIERS:
        x.bitwise_xor_(x.bitwise_right_shift(16).bitwise_and_(0xFFFF)).mul_(multiplier)
    return x
