"""Quantised matrices in the bits that they take, and back without a change.

A number is the bit pattern of its format, from 0 to 2^bits - 1: an integer with 2^(bits - 1) added, a float as its
sign, exponent and mantissa. Patterns lie side by side (`numerics.bits`); what decodes them is a table of all values of
the format and the scales, which are kept as they were computed.
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
    """The value of each bit pattern, (2^bits) fp32; NaN for those that no number has."""
    if isinstance(format, IntFormat):
        half = 2 ** (format.bits - 1)
        return torch.arange(-half, half).float()
    magnitudes = _magnitudes(format)
    return torch.cat((magnitudes, -magnitudes))


def to_patterns(values: Tensor, format: Format) -> Tensor:
    """The bit pattern of each value: any shape of values of the format, to int32."""
    if isinstance(format, IntFormat):
        whole: Tensor = values.to(torch.int32) + 2 ** (format.bits - 1)
        return whole
    magnitudes = _magnitudes(format).nan_to_num(torch.inf).to(values)
    places: Tensor = torch.searchsorted(magnitudes, values.abs().contiguous(), out_int32=True)
    return places + (values < 0) * len(magnitudes)


def _magnitudes(format: Format) -> Tensor:
    """The values from 0 on of a float, by the bits of exponent and mantissa."""
    assert not isinstance(format, IntFormat)
    whole, bias = 2**format.mantissa, 2 ** (format.exponent - 1) - 1
    pattern = torch.arange(2 ** (format.bits - 1), dtype=torch.float64)
    exponent, fraction = pattern // whole, pattern % whole
    digits = torch.where(exponent > 0, whole + fraction, fraction)
    found: Tensor = torch.ldexp(digits, exponent.clamp(1) - bias - format.mantissa)
    return found.where(found <= format.largest, torch.nan).float()


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix in few bits, on the CPU.

    Attributes:
        format: its name.
        shape: (rows, columns).
        group_size: columns that share a scale; None where all of a row or of the matrix do.
        patterns: (bytes) uint8.
        scale: what the values are multiplied by, in the shape of `Encoded`.
    """

    format: str
    shape: tuple[int, int]
    group_size: int | None
    patterns: Tensor
    scale: Tensor

    @classmethod
    def of(cls, encoded: Encoded, quantizer: Quantizer) -> PackedMatrix:
        """Pack what a quantizer made of a matrix."""
        rows, columns = encoded.shape
        codes = encoded.codes if encoded.codes.ndim == 2 else encoded.codes.flatten(-2)[:, :columns]
        patterns = pack(to_patterns(codes, quantizer.format).flatten(), quantizer.format.bits)
        group_size = quantizer.group_size if quantizer.granularity == "group" else None
        return cls(quantizer.format.name, (rows, columns), group_size, patterns.cpu(), encoded.scale.cpu())

    def decode(self) -> Tensor:
        """The numbers, (rows, columns) in the dtype of the scales.

        Raises:
            UserError: parts that do not fit each other, as of a damaged file.
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
            width = min(self.group_size, columns)  # a damaged file may say billions
            codes = torch.nn.functional.pad(codes, (0, -columns % width)).view(rows, -1, width)
        return Encoded(codes, self.scale, torch.Size(self.shape)).decode()

    @property
    def nbytes(self) -> int:
        """Bytes of patterns and scales."""
        return self.patterns.nbytes + self.scale.nbytes
