"""How a new weight is written into a bf16 parameter: to the nearest, stochastically, or with the rest kept beside it.

A bf16 number is the upper half of an fp32 number. `stochastic` adds 16 random bits below that half and drops what is
left of them, so that a step of a hundredth of the spacing moves one weight in a hundred. `compensated` rounds to the
nearest and keeps the next 8 bits as an int8 (state key `low`): the weight is then a float of 24 bits, 1 + 8 + 15.
Both work on the integers that the bits of a float spell, which grow with its magnitude across all exponents. What is
added could make a number of a NaN, which therefore is first made the one that stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from scantling.optim._random import random_16

Rounding: TypeAlias = Literal["nearest", "stochastic", "compensated"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic", "compensated")


def read(param: Tensor, low: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight in the dtype of the statistics: `param` itself where it has that dtype, else a new tensor."""
    if low is None:
        return param.to(dtype)
    bits = param.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(low.to(torch.int32).bitwise_left_shift_(8)).view(torch.float32)


def write(
    value: Tensor,
    param: Tensor,
    low: Tensor | None,
    *,
    seed: Tensor | None = None,
    start: int = 0,
    strides: Sequence[int] | None = None,
) -> None:
    """Write the weight back.

    Args:
        value: fp32 (or the parameter's own dtype); overwritten where it is rounded.
        param: any dtype; bf16 with `low` or `seed`.
        low: the bits below bf16, int8, for `compensated`.
        seed, start, strides: the noise of `stochastic`, see `random_16`.
    """
    if low is not None:
        bits = _bits(value)
        high = (bits + 0x8000).bitwise_right_shift_(16)
        low.copy_((bits - (high << 16)).add_(0x80).bitwise_right_shift_(8).clamp_(max=127))
        param.view(torch.int16).copy_(high)
    elif seed is not None:
        bits = _bits(value).add_(random_16(seed, start, value.shape, strides)).bitwise_and_(-0x10000)
        param.copy_(bits.view(torch.float32))
    elif value is not param:
        param.copy_(value)


def _bits(value: Tensor) -> Tensor:
    return value.masked_fill_(value.isnan(), torch.nan).view(torch.int32)
