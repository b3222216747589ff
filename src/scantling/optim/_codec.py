"""How the momentum is kept between steps: in fp32, in bf16, or as codes of 8 or 4 bits with a scale a block.

A row of a parameter's matrix view is cut into blocks, the last of which may be shorter; a block never reaches into the
next row, so that cutting, tiling or sharding rows never cuts a block. Each block has one fp16 scale, its largest
magnitude. With x = value / scale in [-1, 1]:

    int8   code = round(127 y),  y = 2 x / (1 + |x|),  x = y / (2 - |y|)      softsign: steps near 0 are half as wide
    int4   code = floor(7 x + noise),  noise uniform in [0, 1)                unbiased; two codes a byte

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
from scantling.optim._random import random_16

Momentum: TypeAlias = Literal["fp32", "bf16", "int8", "int4"]
MOMENTA: tuple[Momentum, ...] = ("fp32", "bf16", "int8", "int4")

_BLOCKS = {"int8": 128, "int4": 64}
_TINY = 2.0**-24
"""Smallest scale that fp16 holds; a block of zeros gets it, so that 0 / 0 never happens."""


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


def layout_of(shape: tuple[int, ...], view: MatrixDims, momentum: Momentum) -> Layout:
    """Rows run along the column dims where these come last, as in a convolution, else along the last dim."""
    cols = sorted(view[1])
    first = cols[0] if cols == list(range(cols[0], len(shape))) else len(shape) - 1
    return Layout(shape[:first], prod(shape[first:]), _BLOCKS.get(momentum, 0))


def momentum_shapes(
    shape: tuple[int, ...], view: MatrixDims | None, momentum: Momentum, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of the tensors that hold the momentum, by their keys in the state dict.

    Args:
        shape: of the parameter.
        view: (row dims, column dims); without one the momentum is in `dtype`, whatever `momentum` says.
        momentum: the codec.
        dtype: of the statistics.
    """
    if view is None or momentum == "fp32":
        return {"exp_avg": (shape, dtype)}
    if momentum == "bf16":
        return {"exp_avg": (shape, torch.bfloat16)}
    layout = layout_of(shape, view, momentum)
    scales = (*layout.lead, layout.num_blocks), torch.float16
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
    scale.copy_(largest.view(scale.shape))
    # the scale that is kept is what codes are relative to; one that was rounded down puts the largest value at the end
    blocks.div_(scale.to(value.dtype).clamp_(min=_TINY).view(*blocks.shape[:-1], 1)).clamp_(-1.0, 1.0)
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
    blocks.mul_(scale.to(dtype).view(*blocks.shape[:-1], 1))
    return blocks.view(len(x), -1)[:, : layout.length]


def _blocks(rows: Tensor, layout: Layout) -> Tensor:
    """(rows, length) as (rows, blocks, block), padded with zeros where the last block is short."""
    missing = layout.num_blocks * layout.block - layout.length
    if missing:
        if layout.num_blocks == 1:
            return rows.view(len(rows), 1, layout.length)
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.view(len(rows), layout.num_blocks, layout.block)
