"""Quantization of rows of values for messages, with one scale per row if the format needs one.

    fp32, bf16    unchanged or rounded, 4 or 2 bytes
    int8          round(127 v / m), m the largest magnitude of the row
    int4          round(7 v / m)
    sign          one bit, and the mean magnitude of the row

Scales are bf16, which has the range of fp32. The sender knows the error: it decodes its codes as
the receivers do, so that error feedback can keep the difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scantling.comm.config import Values
from scantling.numerics.bits import pack, packed_bytes, unpack
from scantling.numerics.block_quantizer import BlockQuantizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Formats that are dtypes of torch."""
BITS: dict[Values, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4, "sign": 1}
"""Bits of a value."""
_SCALE_BYTES = 2


def quantized_bytes(rows: int, length: int, values: Values) -> int:
    """Return the bytes of `quantize` for (rows, length) values."""
    scales = 0 if values in ("fp32", "bf16") else rows * _SCALE_BYTES
    return packed_bytes(rows * length, BITS[values]) + scales


def quantize(value: Tensor, values: Values) -> Tensor:
    """Quantize rows.

    Args:
        value: (rows, length) fp32, finite.
        values: the format.

    Returns:
        `quantized_bytes(rows, length, values)` uint8: all codes, then all scales.
    """
    if values == "fp32":
        return value.float().contiguous().flatten().view(torch.uint8)
    if values == "bf16":
        return value.to(torch.bfloat16).contiguous().flatten().view(torch.uint8)
    size = value.abs()
    if values == "sign":
        # Rows of length 0 have no mean or maximum: take their sum, 0.
        scale = (size.mean(1) if value.shape[1] else size.sum(1)).to(torch.bfloat16)
        codes = pack((value > 0).flatten(), 1)  # zeros become -scale
    else:
        quantizer = BlockQuantizer(BITS[values])
        # Round the scale before the values: codes must fit the scale that receivers use.
        scale = (size.amax(1) if value.shape[1] else size.sum(1)).to(torch.bfloat16)
        signed = quantizer.encode(value, scale.float()).to(torch.int32)
        # Packed integers are unsigned: shift codes from [-levels, levels] to [1, 2 levels + 1].
        codes = pack((signed + quantizer.levels + 1).flatten(), BITS[values])
    return torch.cat([codes, scale.view(torch.uint8)])


def dequantize(packed: Tensor, rows: int, length: int, values: Values) -> Tensor:
    """Return the values that `quantize` encoded: (rows, length) fp32."""
    if values == "fp32":
        return _view(packed, torch.float32).view(rows, length)
    if values == "bf16":
        return _view(packed, torch.bfloat16).float().view(rows, length)
    start = packed_bytes(rows * length, BITS[values])
    codes = unpack(packed[:start], rows * length, BITS[values]).view(rows, length)
    scale = _view(packed[start:], torch.bfloat16).float()
    if values == "sign":
        return (2 * codes - 1) * scale[:, None]
    quantizer = BlockQuantizer(BITS[values])
    return quantizer.decode((codes - (quantizer.levels + 1)).float(), scale)


def _view(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as values; copied, since bytes in a message are not aligned."""
    return packed.clone().view(dtype)
