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
from scantling.numerics.formats import Format, IntFormat, parse_format
from scantling.precision.quantizer import Encoded, Quantizer


def values_of(format: Format) -> Tensor:
    """Return the value of each bit pattern, (2^bits) fp32; NaN for unused patterns."""
    if isinstance(format, IntFormat):
        half = 2 ** (format.bits - 1)
        return torch.arange(-half, half).float()
    magnitudes = _magnitudes(format)
    return torch.cat((magnitudes, -magnitudes))


def to_patterns(values: Tensor, format: Format) -> Tensor:
    """Return the bit pattern of each value: any shape of values of the format, to int32."""
    if isinstance(format, IntFormat):
        whole: Tensor = values.to(torch.int32) + 2 ** (format.bits - 1)
        return whole
    magnitudes = _magnitudes(format).nan_to_num(torch.inf).to(values)
    places: Tensor = torch.searchsorted(magnitudes, values.abs().contiguous(), out_int32=True)
    return places + (values < 0) * len(magnitudes)


def _magnitudes(format: Format) -> Tensor:
    """Return the nonnegative values of a float format, ordered by exponent and mantissa bits."""
    assert not isinstance(format, IntFormat)
    whole, bias = 2**format.mantissa, 2 ** (format.exponent - 1) - 1
    pattern = torch.arange(2 ** (format.bits - 1), dtype=torch.float64)
    exponent, fraction = pattern // whole, pattern % whole
    digits = torch.where(exponent > 0, whole + fraction, fraction)
    found: Tensor = torch.ldexp(digits, exponent.clamp(1) - bias - format.mantissa)
    return found.where(found <= format.largest, torch.nan).float()


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
    def of(cls, encoded: Encoded, quantizer: Quantizer) -> PackedMatrix:
        """Pack the output of a quantizer for a matrix."""
        rows, columns = encoded.shape
        codes = encoded.codes if encoded.codes.ndim == 2 else encoded.codes.flatten(-2)[:, :columns]
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
        groups = None if self.group_size is None else -(-columns // self.group_size)
        allowed = [(1, 1), (rows, 1)] if groups is None else [(rows, groups, 1)]
        if tuple(self.scale.shape) not in allowed or not self.scale.is_floating_point():
            raise UserError(f"{rows} x {columns} numbers have scales of shape {tuple(self.scale.shape)}: damaged")
        patterns = unpack(self.patterns, rows * columns, format.bits).view(rows, columns)
        codes = values_of(format).to(self.scale.dtype)[patterns]
        if self.group_size is not None:
            width = min(self.group_size, columns)  # a damaged file may hold a huge group size
            codes = torch.nn.functional.pad(codes, (0, -columns % width)).view(rows, -1, width)
        return Encoded(codes, self.scale, torch.Size(self.shape)).decode()

    @property
    def nbytes(self) -> int:
        """Size of patterns and scales in bytes."""
        return self.patterns.nbytes + self.scale.nbytes
