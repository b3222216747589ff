"""Codecs of CAME's momentum and weights: fp32, bf16, int8 and int4 momentum, rounding of bf16 weights, and their noise.

**Momentum.** A row of a parameter's matrix view is split into blocks, the last one may be shorter; a block never
reaches into the next row, so slicing, tiling or sharding rows never splits a block. Each block has one scale, its
largest magnitude in fp16. With x = value / scale in [-1, 1]:

    int8   code = round(127 y),  y = 2 x / (1 + |x|),  x = y / (2 - |y|)      softsign: steps near 0 are half as wide
    int4   code = floor(7 x + noise),  noise uniform in [0, 1)                unbiased; two codes per byte

If fp16 scales would take more than 1/20 byte per element (rows under 40, int4 also 65 to 79), a scale has one byte:
k (1 + f/8), k a power of two, f from 0 to 7, from 2^-15.8 to 57344, rounded up so that no code overflows; 0 is the
scale of a state that was never written, 255 is NaN, for larger magnitudes and NaN. Its steps are coarser. The RMS
error of random rows, in hundredths of their RMS (nearest in int8, stochastic in int4):

    columns              16       24       32       39       a full block (fp16)
    int8, fp16 scale     0.46     0.49     0.50     0.51     0.57
    int8, byte           0.53     0.54     0.55     0.55
    int4, fp16 scale     12.1     13.0     13.7     14.1     15.2
    int4, byte           13.1     14.0     14.6     15.0

So a short row still has a smaller error than a long one. Without the step counter, codes and scales take at most 0.07
bytes per element more than 1 or 1/2 in rows of 16 and more, except for int4 rows of 17, 19 and 21: an odd row ends with
an unused half byte, which makes it 0.088, 0.079 and 0.071.

Softsign companding of optimizer state is FlashOptim's (arXiv 2602.23349); momentum of whitened, clipped updates has no
outliers that would need more. The shape of the whole parameter decides the codes, which are plain tensors.

**Weights.** A bf16 number is the upper half of an fp32 number. `stochastic` adds 16 random bits below that half and
truncates, so that a step of a hundredth of the spacing moves one weight in a hundred. `compensated` rounds to the
nearest and keeps the next 8 bits as an int8 (state key `low`): the weight is then a float of 24 bits, 1 + 8 + 15. Both
work on the bits of a float as an integer, which grows with its magnitude across all exponents. Adding to the bits of a
NaN could make it a number, so every NaN is first replaced by the canonical one.

**Noise.** A random bit is a function of (seed, step, parameter, element), not a draw of a generator: a step gives the
same result in tiles of any size, on any device, on shards and after a resume, and there is no state to save. The
bits come from two rounds of multiply and xor-shift on 32-bit integers, whose top 16 bits pass for noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from scantling.groups import MatrixDims
from scantling.numerics.bits import pack_nibbles, unpack_nibbles
from scantling.numerics.block_quantizer import BlockQuantizer, join_blocks, split_blocks

Momentum: TypeAlias = Literal["fp32", "bf16", "int8", "int4"]
MOMENTA: tuple[Momentum, ...] = ("fp32", "bf16", "int8", "int4")
Rounding: TypeAlias = Literal["nearest", "stochastic", "compensated"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic", "compensated")

_BLOCKS = {"int8": 128, "int4": 64}
_TINY = 2.0**-24
"""Smallest positive fp16 number: the scale of a block of zeros, to avoid 0 / 0."""
_INT4 = BlockQuantizer(4, smallest_scale=_TINY)
_SHORT_BIAS = 8 * (127 - 16)
"""A scale of one byte is the upper 12 bits of an fp32 number minus this."""
_MIN_ROW = 16
"""Shortest row of blocks, if the parameter has enough dims."""
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))
_STREAM = 0x9E3779B1


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of blocks in which the momentum of one parameter is encoded.

    Attributes:
        lead: sizes of the dims of the parameter that count rows.
        length: elements in a row.
        block: elements in a block, 0 for fp32 and bf16.
    """

    lead: tuple[int, ...]
    length: int
    block: int

    @property
    def num_blocks(self) -> int:
        return -(-self.length // self.block)

    @property
    def scale_dtype(self) -> torch.dtype:
        """One byte if fp16 scales would take more than a twentieth of a byte per element."""
        return torch.uint8 if 40 * self.num_blocks > self.length else torch.float16


def block_rows(shape: tuple[int, ...], view: MatrixDims, momentum: Momentum) -> BlockRows:
    """Return the rows of blocks of a parameter.

    Rows run along the column dims if these come last, as in a convolution. Otherwise they run along the last dim, and
    along dims before it except dim 0, until they have 16 elements.
    """
    cols = sorted(view[1])
    first = cols[0]  # first dim that a row runs along
    if cols != list(range(first, len(shape))):
        first = len(shape) - 1
        while first > 1 and prod(shape[first:]) < _MIN_ROW:
            first -= 1
    return BlockRows(shape[:first], prod(shape[first:]), _BLOCKS.get(momentum, 0))


def momentum_shapes(
    shape: tuple[int, ...], view: MatrixDims | None, momentum: Momentum | None, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return (shape, dtype) of the tensors of the momentum by their keys in the state dict.

    Args:
        shape: shape of the parameter.
        view: (row dims, column dims); without one the momentum is in `dtype` whatever the codec.
        momentum: the codec; None without momentum.
        dtype: dtype of the statistics.
    """
    if momentum is None:
        return {}
    if view is None or momentum == "fp32":
        return {"exp_avg": (shape, dtype)}
    if momentum == "bf16":
        return {"exp_avg": (shape, torch.bfloat16)}
    layout = block_rows(shape, view, momentum)
    # scales (*lead, num_blocks); codes (*lead, length) in int8, (*lead, ceil(length / 2)) in int4
    scales = (*layout.lead, layout.num_blocks), layout.scale_dtype
    if momentum == "int8":
        return {"exp_avg_codes": ((*layout.lead, layout.length), torch.int8), "exp_avg_scale": scales}
    return {"exp_avg_codes": ((*layout.lead, -(-layout.length // 2)), torch.uint8), "exp_avg_scale": scales}


def encode(
    value: Tensor,
    codes: Tensor,
    scale: Tensor,
    layout: BlockRows,
    *,
    seed: Tensor | None = None,
    start: int = 0,
    strides: Sequence[int] | None = None,
) -> None:
    """Encode rows of momentum.

    Args:
        value: whole rows, fp32, of any shape with `layout.length` elements per row; it is overwritten.
        codes, scale: state tensors of these rows, written in place.
        layout: rows of the whole parameter; a tile or shard has fewer.
        seed, start, strides: noise of int4, see `random_uint16`; without a seed codes are rounded to the nearest.
    """
    rows = value.reshape(-1, layout.length)  # (rows, length)
    blocks = _blocks(rows, layout)  # (rows, num_blocks, block)
    largest = blocks.abs().amax(dim=-1)
    scale.copy_((encode_byte_scales(largest) if scale.dtype == torch.uint8 else largest).view(scale.shape))
    # Codes are relative to the stored scale; if that was rounded down, the largest value is clamped to the end.
    stored = decode_scales(scale, value.dtype).view(blocks.shape[:-1])
    if layout.block == _BLOCKS["int8"]:
        x = blocks.div_(stored.clamp_(min=_TINY).unsqueeze(-1)).clamp_(-1.0, 1.0)
        # 127 y with y = 2 x / (1 + |x|)
        y = x.div_(x.abs().add_(1.0)).mul_(254.0).round_()
        codes.copy_(join_blocks(y, layout.length).view(codes.shape))
        return
    # 7 x, to be rounded up with a probability equal to its fraction
    steps = join_blocks(_INT4.to_steps(blocks, stored, out=blocks), layout.length)
    noise = None
    if seed is not None:
        # Noise depends on the position in the whole parameter, so tiles and shards do not change it.
        noise = random_uint16(seed, start, value.shape, strides).view(steps.shape).to(value.dtype).mul_(2.0**-16)
    # Codes from 1 to 15, two per byte; a row of odd length gets one more.
    nibbles = _INT4.round_(steps, noise).add_(8.0).to(torch.uint8)
    if layout.length % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1), value=8)
    codes.copy_(pack_nibbles(nibbles).view(codes.shape))


def decode(codes: Tensor, scale: Tensor, layout: BlockRows, dtype: torch.dtype) -> Tensor:
    """Decode rows of momentum: (rows, layout.length)."""
    if layout.block == _BLOCKS["int8"]:
        # (rows, length), then the inverse of the softsign
        y = codes.reshape(-1, layout.length).to(dtype).mul_(1.0 / 127.0)
        x = y.div_(y.abs().neg_().add_(2.0))  # y / (2 - |y|)
    else:
        # (rows, ceil(length / 2)) -> (rows, length)
        nibbles = unpack_nibbles(codes.reshape(-1, codes.shape[-1]), layout.length)
        x = nibbles.to(dtype).sub_(8.0).mul_(1.0 / 7.0)
    blocks = _blocks(x, layout)
    blocks.mul_(decode_scales(scale, dtype).view(*blocks.shape[:-1], 1))
    return join_blocks(blocks, layout.length)


def encode_byte_scales(magnitude: Tensor) -> Tensor:
    """Return the smallest one-byte scales not below fp32 magnitudes, as int32; 255 for magnitudes out of range."""
    # Truncating (bits - 1) to 12 bits and adding 1 rounds up, since float bits sort like magnitudes.
    return magnitude.view(torch.int32).sub(1).bitwise_right_shift_(20).sub_(_SHORT_BIAS - 1).clamp_(1, 255)


def decode_scales(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of the scales of blocks, decoded if they have one byte."""
    if scale.dtype != torch.uint8:
        return scale.to(dtype)
    # A code is the exponent and the first 3 mantissa bits of an fp32 number, minus a bias.
    bits = scale.to(torch.int32)
    numbers = (bits + _SHORT_BIAS).bitwise_left_shift_(20).view(torch.float32)
    return numbers.masked_fill_(bits == 0, 0.0).masked_fill_(bits == 255, torch.nan).to(dtype)


def _blocks(rows: Tensor, layout: BlockRows) -> Tensor:
    """Split (rows, length) into (rows, blocks, block), with zeros after a short last block of several."""
    return split_blocks(rows, min(layout.block, layout.length) or 1)


# --- rounding of weights


def read_weight(param: Tensor, low: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight in the dtype of the statistics: `param` itself if it has that dtype, else a new tensor."""
    if low is None:
        return param.to(dtype)
    # `low` is signed: the upper half was rounded to the nearest, so the rest may be negative.
    bits = param.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(low.to(torch.int32).bitwise_left_shift_(8)).view(torch.float32)


def write_weight(
    value: Tensor,
    param: Tensor,
    low: Tensor | None,
    *,
    seed: Tensor | None = None,
    start: int = 0,
    strides: Sequence[int] | None = None,
) -> None:
    """Round a weight into the parameter.

    Args:
        value: fp32 (or the parameter's own dtype); overwritten by stochastic and compensated rounding.
        param: any dtype; bf16 with `low` or `seed`.
        low: the bits below bf16, int8, for `compensated`.
        seed, start, strides: noise of `stochastic`, see `random_uint16`.
    """
    if low is not None:
        bits = _canonical_bits(value)
        # Round to the nearest bf16; the remainder, from -2^15 to 2^15, fits 8 bits after rounding.
        high = (bits + 0x8000).bitwise_right_shift_(16)
        low.copy_((bits - (high << 16)).add_(0x80).bitwise_right_shift_(8).clamp_(max=127))
        param.view(torch.int16).copy_(high)
    elif seed is not None:
        # Adding 16 random bits carries into the upper half with the probability of the remainder.
        bits = _canonical_bits(value).add_(random_uint16(seed, start, value.shape, strides)).bitwise_and_(-0x10000)
        param.copy_(bits.view(torch.float32))
    elif value is not param:
        param.copy_(value)


def _canonical_bits(value: Tensor) -> Tensor:
    return value.masked_fill_(value.isnan(), torch.nan).view(torch.int32)


# --- noise


def noise_seed(step: Tensor, param_idx: int | Tensor, stream: int) -> Tensor:
    """Return the seed of one parameter's noise in one step: int32 on the device of `step`, without a device sync.

    Args:
        step: 0-D, the step counter.
        param_idx: index of the parameter in the optimizer; a tensor is 0-D int64.
        stream: 0 for the noise of the momentum, 1 for that of the weight.
    """
    # Masked to 31 bits, so that the key fits int32.
    key = (param_idx * 4 + stream) * _STREAM & 0x7FFFFFFF
    if isinstance(key, Tensor):
        key = key.to(torch.int32)
    return _mix(step.to(torch.int32) * _MULTIPLIERS[0] + key)


def random_uint16(seed: Tensor, start: int, shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
    """Return uniform integers from 0 to 65535, int32, for some elements of a parameter.

    Args:
        seed: result of `noise_seed`.
        start: row-major index of the first element in the whole parameter.
        shape: shape of the result, which is contiguous.
        strides: row-major strides of the whole parameter, for a part of it. Default: consecutive elements.
    """
    runs = _merge_dims(shape, strides) if strides else [(prod(shape), 1)]
    # The counter is the row-major index of an element in the whole parameter, modulo 2^32.
    counter = _arange(seed, *runs[-1]).add_(_signed(start))
    for length, stride in reversed(runs[:-1]):
        # An outer dim: (n,) -> (length, n) -> (length * n,)
        counter = (_arange(seed, length, stride).unsqueeze(-1) + counter).view(-1)
    # int32 products wrap, with the same bits as uint32 in C and Triton.
    counter.mul_(_MULTIPLIERS[1])
    return _mix(counter.add_(seed)).bitwise_right_shift_(16).bitwise_and_(0xFFFF).view(tuple(shape))


def _merge_dims(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return (length, stride) of dims, with contiguous dims merged."""
    runs = [(1, 1)]
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        # Dims come innermost first.
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
    """Return the low 32 bits as a signed integer."""
    low = value & 0xFFFFFFFF
    return low - ((low >> 31) << 32)


def _mix(x: Tensor) -> Tensor:
    """Hash int32 in place, so that every bit of the result depends on all bits of `x`."""
    # & 0xFFFF makes the arithmetic shift of int32 a logical one.
    for multiplier in _MULTIPLIERS:
        x.bitwise_xor_(x.bitwise_right_shift(16).bitwise_and_(0xFFFF)).mul_(multiplier)
    return x
