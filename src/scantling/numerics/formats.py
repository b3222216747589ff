"""Low-precision number formats: integers `int2` to `int16` and floats `fp<bits>_e<exponent>m<mantissa>`.

A format is a symmetric grid of values around 0 (integers have one more negative value). `round` maps values to the
grid; callers scale them first.

Integers are two's complement, from -2^(b-1) to 2^(b-1) - 1. Floats have subnormals, and values beyond the largest
become the largest. Floats with at least 5 exponent bits reserve the highest exponent for Inf and NaN, as in IEEE 754.
`fp8_e4m3` reserves one value for NaN and ends at 448. Floats with fewer exponent bits use all codes for values, as in
the OCP Microscaling specification (`fp4_e2m1` ends at 6, `fp6_e3m2` at 28, `fp6_e2m3` at 7.5). `bf16` is `fp16_e8m7`,
and `fp16` is `fp16_e5m10`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from scantling.errors import UserError, with_hint

MIN_BITS, MAX_BITS = 2, 16
_ALIASES = {"bf16": "fp16_e8m7", "fp16": "fp16_e5m10"}
_KNOWN = (
    *(f"int{bits}" for bits in range(MIN_BITS, MAX_BITS + 1)),
    *("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1"),
    *_ALIASES,
)


@dataclass(frozen=True)
class IntFormat:
    """Two's complement integers.

    Args:
        bits: from 2 to 16.
    """

    bits: int

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def largest(self) -> float:
        """Largest value, 2^(bits - 1) - 1, to which the largest magnitude is scaled."""
        return float(2 ** (self.bits - 1) - 1)

    def round(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Round each value to the format.

        Args:
            x: fp32 or fp64.
            noise: like x, uniform in [0, 1), for stochastic rounding that preserves the mean. None rounds to nearest,
                ties to even.
        """
        clamped = (x if noise is None else x + noise).clamp(-self.largest - 1.0, self.largest)
        return clamped.round_() if noise is None else clamped.floor_()


@dataclass(frozen=True)
class FloatFormat:
    """Floats of a sign bit, exponent bits and mantissa bits.

    Args:
        exponent: number of exponent bits, from 1 to 8.
        mantissa: number of mantissa bits, from 0 to 10.
    """

    exponent: int
    mantissa: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def name(self) -> str:
        name = f"fp{self.bits}_e{self.exponent}m{self.mantissa}"
        return {full: alias for alias, full in _ALIASES.items()}.get(name, name)

    @property
    def largest(self) -> float:
        """Largest value."""
        # The code of 480 is NaN.
        if (self.exponent, self.mantissa) == (4, 3):
            return 448.0
        # From 5 exponent bits on, the highest exponent is reserved for Inf and NaN.
        highest = 2**self.exponent - 1 - self._bias - (1 if self.exponent >= 5 else 0)
        return float(2.0**highest * (2.0 - 2.0**-self.mantissa))

    @property
    def _bias(self) -> int:
        return int(2 ** (self.exponent - 1)) - 1

    def round(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Round each value to the format, see `IntFormat.round`."""
        if self.exponent == 8 and x.dtype == torch.float32:  # fp32's smallest normal number is above the steps
            return self.round(x.double(), noise).float()
        step = self._step(x)
        scaled = x / step
        rounded = scaled.round() if noise is None else (scaled + noise).floor()
        return (rounded * step).clamp(-self.largest, self.largest)

    def _step(self, x: Tensor) -> Tensor:
        """Return the spacing of the format's values around x, a power of 2 computed from the bits of x.

        Uses shift functions, since the shift operators have no effect on a DTensor (PyTorch 2.13).
        """
        integer, digits, bias = (torch.int32, 23, 127) if x.dtype == torch.float32 else (torch.int64, 52, 1023)
        # below the smallest normal value, the spacing of subnormal values stays the same
        exponent = (torch.bitwise_right_shift(x.abs().view(integer), digits) - bias).clamp(1 - self._bias, bias)
        return torch.bitwise_left_shift(exponent - self.mantissa + bias, digits).view(x.dtype)


Format: TypeAlias = IntFormat | FloatFormat


def parse_format(name: str) -> Format:
    """Return the format of a name.

    Args:
        name: such as `int4`, `fp8_e4m3`, `fp5_e3m1`, `bf16`.

    Raises:
        UserError: if the name is unknown, its bits do not add up, or it has more bits than supported.
    """
    if not isinstance(name, str):
        raise UserError(f"a number format must be a name such as 'int8' or 'fp8_e4m3'; given {name!r}")
    if found := re.fullmatch(r"int([1-9][0-9]?)", name):
        bits = int(found[1])
        if not MIN_BITS <= bits <= MAX_BITS:
            raise UserError(f"integer formats have {MIN_BITS} to {MAX_BITS} bits; given {name!r}")
        return IntFormat(bits)
    if found := re.fullmatch(r"fp([1-9][0-9]?)_e([1-9][0-9]?|0)m([1-9][0-9]?|0)", _ALIASES.get(name, name)):
        bits, exponent, mantissa = map(int, found.groups())
        if bits != 1 + exponent + mantissa:
            right = f"fp{1 + exponent + mantissa}_e{exponent}m{mantissa}"
            raise UserError(f"the bits of a float are a sign, exponent and mantissa, as in {right}; given {name!r}")
        if not (1 <= exponent <= 8 and mantissa <= 10):
            raise UserError(f"float formats have 1 to 8 exponent and up to 10 mantissa bits; given {name!r}")
        return FloatFormat(exponent, mantissa)
    text = f"a number format must be one of int2 to int16, fp<bits>_e<x>m<y>, bf16 and fp16; given {name!r}"
    raise UserError(with_hint(text, name.lower(), _KNOWN))
