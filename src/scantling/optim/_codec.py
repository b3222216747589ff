"""How the momentum is kept between steps: in fp32, in bf16, or as codes of 8 or 4 bits with a scale a block.

A row of a parameter's matrix view is cut into blocks, the last of which may be shorter; a block never reaches into the
next row, so that cutting, tiling or sharding rows never cuts a block. Each block has one scale, its largest magnitude
in fp16. With x = value / scale in [-1, 1]:

    int8   code = round(127 y),  y = 2 x / (1 + |x|),  x = y / (2 - |y|)      softsign: steps near 0 are half as wide
    int4   code = floor(7 x + noise),  noise uniform in [0, 1)                unbiased; two codes a byte

Where fp16 scales would take more than 1/20 byte an element (rows under 40, int4 also of 65 to 79), a scale has one
byte: k (1 + f/8), k a power of two, f from 0 to 7, from 2^-15.8 to 57344, rounded up so that no code overflows; 0 is
the scale of a state that was never written, 255 is NaN, for what is larger or not a number. Its steps are coarser: the
RMS error of random rows is, in hundredths of their RMS (nearest in int8, stochastic in int4),

    columns              16       24       32       39       a full block (fp16)
    int8, fp16 scale     0.46     0.49     0.50     0.51     0.57
    int8, byte           0.53     0.54     0.55     0.55
    int4, fp16 scale     12.1     13.0     13.7     14.1     15.2
    int4, byte           13.1     14.0     14.6     15.0

so that a short row is still kept better than a long one. With the step counter apart, codes and scales take at most
0.07 bytes an element more than 1 or 1/2 in rows of 16 and more, but for int4 rows of 17, 19 and 21: half a byte is
unused at the end of an odd row, which makes it 0.088, 0.079 and 0.071.

Softsign companding of optimizer state is FlashOptim's (arXiv 2602.23349); momentum of whitened, clipped updates has
no outliers that would need more. Codes are decided from the shape of the whole parameter, and are plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from scantling.groups import MatrixDims
from scantling.optim._factor import MIN_SIDE
from scantling.optim._random import random_16

Momentum: TypeAlias = Literal["fp32", "bf16", "int8", "int4"]
MOMENTA: tuple[Momentum, ...] = ("fp32", "bf16", "int8", "int4")

_BLOCKS = {"int8": 128, "int4": 64}
_TINY = 2.0**-24
"""Smallest scale that fp16 holds; a block of zeros gets it, so that 0 / 0 never happens."""
_SHORT_BIAS = 8 * (127 - 16)
"""A scale of one byte is the upper 12 bits of an fp32, less this."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The momentum of one parameter as rows of blocks.

    Attributes:
        lead: the dims of the parameter that count rows.
        length: elements in a row.
        block: elements in a block, 0 where there are none.
    """

    lead: tuple[int, ...]
    length: int
    block: int

    @property
    def num_blocks(self) -> int:
        return -(-self.length // self.block)

    @property
    def scale_dtype(self) -> torch.dtype:
        """One byte where fp16 scales would take more than a twentieth of a byte an element."""
        return torch.uint8 if 40 * self.num_blocks > self.length else torch.float16


def layout_of(shape: tuple[int, ...], view: MatrixDims, momentum: Momentum) -> Layout:
    """Rows run along the column dims where these come last, as in a convolution.

    Elsewhere they run along the last dim, and along those before it, dim 0 left out, until they are 16 long.
    """
    cols = sorted(view[1])
    first = cols[0]
    if cols != list(range(first, len(shape))):
        first = len(shape) - 1
        while first > 1 and prod(shape[first:]) < MIN_SIDE:
            first -= 1
    return Layout(shape[:first], prod(shape[first:]), _BLOCKS.get(momentum, 0))


def momentum_shapes(
    shape: tuple[int, ...], view: MatrixDims | None, momentum: Momentum | None, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of the tensors that hold the momentum, by their keys in the state dict.

    Args:
        shape: of the parameter.
        view: (row dims, column dims); without one the momentum is in `dtype`, whatever `momentum` says.
        momentum: the codec; None where none is kept.
        dtype: of the statistics.
    """
    if momentum is None:
        return {}
    if view is None or momentum == "fp32":
        return {"exp_avg": (shape, dtype)}
    if momentum == "bf16":
        return {"exp_avg": (shape, torch.bfloat16)}
    layout = layout_of(shape, view, momentum)
    scales = (*layout.lead, layout.num_blocks), layout.scale_dtype
    if momentum == "int8":
        return {"exp_avg_codes": ((*layout.lead, layout.length), torch.int8), "exp_avg_scale": scales}
    return {"exp_avg_codes": ((*layout.lead, -(-layout.length // 2)), torch.uint8), "exp_avg_scale": scales}


def encode(
    value: Tensor,
    codes: Tensor,
    scale: Tensor,
    layout: Layout,
    *,
    seed: Tensor | None = None,
    start: int = 0,
    strides: Sequence[int] | None = None,
) -> None:
    """Write rows of momentum as codes.

    Args:
        value: whole rows, fp32, of any shape with `layout.length` elements a row; it is overwritten.
        codes, scale: the parts of the state that belong to these rows.
        layout: of the whole parameter; a part of it has fewer rows.
        seed, start, strides: the noise of int4, see `random_16`; without a seed codes are rounded to the nearest.
    """
    rows = value.reshape(-1, layout.length)
    blocks = _blocks(rows, layout)
    largest = blocks.abs().amax(dim=-1)
    scale.copy_((short_codes(largest) if scale.dtype == torch.uint8 else largest).view(scale.shape))
    # the scale that is kept is what codes are relative to; one that was rounded down puts the largest value at the end
    blocks.div_(scales_of(scale, value.dtype).clamp_(min=_TINY).view(*blocks.shape[:-1], 1)).clamp_(-1.0, 1.0)
    if layout.block == _BLOCKS["int8"]:
        y = blocks.div_(blocks.abs().add_(1.0)).mul_(254.0).round_()
        codes.copy_(y.view(len(rows), -1)[:, : layout.length].view(codes.shape))
        return
    blocks.mul_(7.0)
    flat = blocks.view(len(rows), -1)[:, : layout.length]
    if seed is None:
        levels = flat.round()
    else:
        noise = random_16(seed, start, value.shape, strides).view(flat.shape)
        levels = noise.to(value.dtype).mul_(2.0**-16).add_(flat).floor_()
        del noise
    nibbles = levels.add_(8.0).clamp_(1.0, 15.0).to(torch.uint8)
    if layout.length % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1), value=8)
    codes.copy_((nibbles[:, ::2] | nibbles[:, 1::2].bitwise_left_shift(4)).view(codes.shape))


def decode(codes: Tensor, scale: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Rows of momentum from their codes: (rows, layout.length)."""
    if layout.block == _BLOCKS["int8"]:
        y = codes.reshape(-1, layout.length).to(dtype).mul_(1.0 / 127.0)
        x = y.div_(y.abs().neg_().add_(2.0))
    else:
        packed = codes.reshape(-1, codes.shape[-1])
        pairs = torch.stack((packed & 15, packed >> 4), dim=-1)
        x = pairs.view(len(packed), -1)[:, : layout.length].to(dtype).sub_(8.0).mul_(1.0 / 7.0)
    blocks = _blocks(x, layout)
    blocks.mul_(scales_of(scale, dtype).view(*blocks.shape[:-1], 1))
    return blocks.view(len(x), -1)[:, : layout.length]


def short_codes(magnitude: Tensor) -> Tensor:
    """The least scales of one byte that are not below these magnitudes, fp32, as int32; 255 where there is none."""
    return magnitude.view(torch.int32).sub(1).bitwise_right_shift_(20).sub_(_SHORT_BIAS - 1).clamp_(1, 255)


def scales_of(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales of blocks from what is kept of them: a copy."""
    if scale.dtype != torch.uint8:
        return scale.to(dtype)
    bits = scale.to(torch.int32)
    numbers = (bits + _SHORT_BIAS).bitwise_left_shift_(20).view(torch.float32)
    return numbers.masked_fill_(bits == 0, 0.0).masked_fill_(bits == 255, torch.nan).to(dtype)


def _blocks(rows: Tensor, layout: Layout) -> Tensor:
    """(rows, length) as (rows, blocks, block), padded with zeros where the last block is short."""
    missing = layout.num_blocks * layout.block - layout.length
    if missing:
        if layout.num_blocks == 1:
            return rows.view(len(rows), 1, layout.length)
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.view(len(rows), layout.num_blocks, layout.block)
