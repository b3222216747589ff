"""Real numbers in few bits: rows of them, each row with one scale where the format needs one.

    fp32, bf16    as they are, 4 or 2 bytes
    int8          round(127 v / m), m the largest magnitude of the row
    int4          round(7 v / m)
    sign          one bit, and the mean magnitude of the row

Scales are bf16, which has the range of fp32. What quantisation loses is known to whoever quantised: `dequantise` of the
codes is what the others get, so that an error-feedback method can keep the difference.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from scantling.numerics.bits import pack, packed_bytes, unpack

Values: TypeAlias = Literal["fp32", "bf16", "int8", "int4", "sign"]
VALUES: tuple[Values, ...] = get_args(Values)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Of the formats that are dtypes of torch."""
_BITS: dict[Values, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4, "sign": 1}
_SCALE_BYTES = 2


def quantized_bytes(rows: int, length: int, values: Values) -> int:
    """Bytes that `quantise` makes of (rows, length) numbers."""
    scales = 0 if values in ("fp32", "bf16") else rows * _SCALE_BYTES
    return packed_bytes(rows * length, _BITS[values]) + scales


def quantize(value: Tensor, values: Values) -> Tensor:
    """Codes and scales of rows.

    Args:
        value: (rows, length) fp32, finite.
        values: the format.

    Returns:
        `quantised_bytes(rows, length, values)` uint8: all codes, then all scales.
    """
    if values == "fp32":
        return value.float().contiguous().flatten().view(torch.uint8)
    if values == "bf16":
        return value.to(torch.bfloat16).contiguous().flatten().view(torch.uint8)
    size = value.abs()
    if values == "sign":
        scale = (size.mean(1) if value.shape[1] else size.sum(1)).to(torch.bfloat16)
        codes = pack((value > 0).flatten(), 1)
    else:
        most = 127 if values == "int8" else 7
        scale = (size.amax(1) if value.shape[1] else size.sum(1)).to(torch.bfloat16)
        divisor = scale.float().clamp(min=torch.finfo(torch.float32).tiny)
        steps = (value / divisor[:, None] * most).round().clamp(-most, most)
        codes = pack((steps.to(torch.int32) + most + 1).flatten(), _BITS[values])
    return torch.cat([codes, scale.view(torch.uint8)])


def dequantize(packed: Tensor, rows: int, length: int, values: Values) -> Tensor:
    """What `quantise` stands for: (rows, length) fp32."""
    if values == "fp32":
        return _view(packed, torch.float32).view(rows, length)
    if values == "bf16":
        return _view(packed, torch.bfloat16).float().view(rows, length)
    cut = packed_bytes(rows * length, _BITS[values])
    codes = unpack(packed[:cut], rows * length, _BITS[values]).view(rows, length)
    scale = _view(packed[cut:], torch.bfloat16).float()[:, None]
    if values == "sign":
        return (2 * codes - 1) * scale
    most = 127 if values == "int8" else 7
    return (codes - (most + 1)) * (scale / most)


def _view(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers; a copy, since bytes in a buffer are not aligned."""
    return packed.clone().view(dtype)
