"""Quantized matrices packed into the bits of their format, losslessly.

Each value is stored as the bit pattern of its format, from 0 to 2^bits - 1: an integer plus 2^(bits - 1), or a float
as sign, exponent and mantissa. Patterns are packed without gaps (`numerics.bits`). Decoding uses a table of all values
of the format, and the scales, which are stored unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.numerics.bits import pack, unpack
from scantling.numerics.block_quantizer import join_blocks, split_blocks
from scantling.numerics.formats import Format, IntFormat, parse_format
from scantling.precision.quantizer import Encoded, Quantizer


def format_values(format: Format) -> Tensor:
    """Return the value of each bit pattern of a format, (2^bits) fp32; NaN for unused patterns."""
    if isinstance(format, IntFormat):
        half = 2 ** (format.bits - 1)
        return torch.arange(-half, half).float()
    magnitudes = _magnitudes(format)
    return torch.cat((magnitudes, -magnitudes))


def to_patterns(values: Tensor, format: Format) -> Tensor:
    """Return the bit pattern of each value: any shape of values of the format, to int32."""
    if isinstance(format, IntFormat):
        patterns: Tensor = values.to(torch.int32) + 2 ** (format.bits - 1)
        return patterns
    # Sorted magnitudes; NaN patterns become inf, which no value reaches, so that searchsorted finds exact matches.
    magnitudes = _magnitudes(format).nan_to_num(torch.inf).to(values)
    indices: Tensor = torch.searchsorted(magnitudes, values.abs().contiguous(), out_int32=True)
    return indices + (values < 0) * len(magnitudes)  # the sign bit is the highest


def _magnitudes(format: Format) -> Tensor:
    """Return the nonnegative values of a float format, ordered by exponent and mantissa bits."""
    assert not isinstance(format, IntFormat)
    steps, bias = 2**format.mantissa, 2 ** (format.exponent - 1) - 1  # steps between two powers of 2
    pattern = torch.arange(2 ** (format.bits - 1), dtype=torch.float64)
    exponent, fraction = pattern // steps, pattern % steps
    digits = torch.where(exponent > 0, steps + fraction, fraction)  # exponent 0: subnormal values
    # exponent field e > 0: (1 + f / steps) 2^(e - bias); e = 0: (f / steps) 2^(1 - bias)
    values: Tensor = torch.ldexp(digits, exponent.clamp(1) - bias - format.mantissa)
    # patterns above the largest value are reserved: Inf and NaN of the IEEE formats, NaN of fp8_e4m3
    return values.where(values <= format.largest, torch.nan).float()


@dataclass(frozen=True)
class PackedMatrix:
    """Packed low-precision matrix, on the CPU.

    Attributes:
        format: name of the format.
        shape: (rows, columns).
        group_size: columns that share a scale; None if a row or the matrix has one scale.
        patterns: (bytes) uint8.
        scale: factors of the values, in the shape of `Encoded.scale`.
    """

    format: str
    shape: tuple[int, int]
    group_size: int | None
    patterns: Tensor
    scale: Tensor

    @classmethod
    def from_encoded(cls, encoded: Encoded, quantizer: Quantizer) -> PackedMatrix:
        """Pack the output of a quantizer for a matrix."""
        rows, columns = encoded.shape
        # drop the zeros that fill up the last group: (rows, groups, group) -> (rows, columns)
        codes = encoded.codes if encoded.codes.ndim == 2 else join_blocks(encoded.codes, columns)
        patterns = pack(to_patterns(codes, quantizer.format).flatten(), quantizer.format.bits)
        group_size = quantizer.group_size if quantizer.granularity == "group" else None
        return cls(quantizer.format.name, (rows, columns), group_size, patterns.cpu(), encoded.scale.cpu())

    def decode(self) -> Tensor:
        """Return the dequantized matrix, (rows, columns) in the dtype of the scales.

        Raises:
            UserError: if the parts do not fit each other, as in a damaged file.
        """
        format = parse_format(self.format)
        rows, columns = self.shape
        # the parts may come from a damaged file: check shapes before allocating
        groups = None if self.group_size is None else -(-columns // self.group_size)
        allowed = [(1, 1), (rows, 1)] if groups is None else [(rows, groups, 1)]
        if tuple(self.scale.shape) not in allowed or not self.scale.is_floating_point():
            raise UserError(f"scales of shape {tuple(self.scale.shape)} do not fit a {rows} x {columns} matrix")
        # (bytes) -> (rows, columns) indices into the table of values
        patterns = unpack(self.patterns, rows * columns, format.bits).view(rows, columns)
        codes = format_values(format).to(self.scale.dtype)[patterns]
        if self.group_size is not None:
            codes = split_blocks(codes, min(self.group_size, columns))  # a damaged file may hold a huge group size
        return Encoded(codes, self.scale, torch.Size(self.shape)).decode()

    @property
    def nbytes(self) -> int:
        """Size of patterns and scales in bytes."""
        return self.patterns.nbytes + self.scale.nbytes
