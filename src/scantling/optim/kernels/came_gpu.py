"""Triton kernels of CAME, many parameters in each launch: equations (1) to (10) of came.py, tile by tile.

Each parameter is a stack of row-major matrices, split into tiles; a program works on one tile and finds its parameter
in a table. Each tile writes its partial sum over a row or a column to a separate element, and the partial sums are
added in order: the same inputs give the same bits, on every rank and in every run. Each stage reads memory once: the
gradient three times (four with a rounded momentum and a confidence), the momentum two or three times, the parameter
once.

Launched by _triton.py; every function has its PyTorch counterpart in stages.py and codecs.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from scantling.numerics.kernels import pointer
from scantling.optim import codecs
from scantling.optim.state import POINTERS

FIELDS = (
    *(*POINTERS, "grad", "mean", "res_mean", "param_idx", "mean_length", "start", "whole_rows", "whole_cols"),
    *("rows", "cols", "matrices", "first", "down", "across", "row_part", "col_part", "first_matrix"),
)
"""Columns of the int64 table, one row for each parameter: addresses, with `mean` and `res_mean` for the averages whose
mean is that of the matrix; index in the optimizer; number of these averages in a matrix; index of the first element in
the whole parameter, which may be sharded; sizes of the whole matrix and of this one; first tile; tiles down and across
a matrix; first partial sum over rows and over columns; first of its matrices among all."""
VALUES = (
    *("row_beta2", "row_eps2", "row2", "col_beta2", "col_eps2", "col2"),
    *("row_beta3", "row_eps3", "row3", "col_beta3", "col_eps3", "col3"),
    *("gain1", "decay", "scale", "second", "size", "bound", "seed0", "seed1"),
)
"""Columns of the fp32 table: beta, (1 - beta) eps and the weight of the sum, of row averages and of column averages, of
the second moment and of the instability; 1 - beta1; -lr w; factor of the update; root of the second moment's bias
correction; divisor of the sum of squares; largest magnitude of a gradient in the second moment; seeds of noise, as
bits."""


def _column(columns: tuple[str, ...], name: str) -> tl.constexpr:
    return tl.constexpr(columns.index(name))


_NUM_FIELDS = tl.constexpr(len(FIELDS))
_NUM_VALUES = tl.constexpr(len(VALUES))
_PARAM, _GRAD, _MOMENTUM, _SCALE, _LOW = (
    _column(FIELDS, name) for name in ("param", "grad", "momentum", "exp_avg_scale", "low")
)
_ROW, _COL, _RES_ROW, _RES_COL, _MOMENT = (
    _column(FIELDS, name) for name in ("row", "col", "res_row", "res_col", "exp_avg_sq")
)
_NUM_ROWS, _NUM_COLS, _MATRICES, _FIRST, _DOWN, _ACROSS = (
    _column(FIELDS, name) for name in ("rows", "cols", "matrices", "first", "down", "across")
)
_ROW_PART, _COL_PART, _FIRST_MATRIX = (_column(FIELDS, name) for name in ("row_part", "col_part", "first_matrix"))
_MEAN_LENGTH, _STEP, _START, _WHOLE_ROWS, _WHOLE_COLS = (
    _column(FIELDS, name) for name in ("mean_length", "step", "start", "whole_rows", "whole_cols")
)
_BETA2, _GAIN1, _DECAY, _SCALED, _SECOND, _SIZE, _BOUND, _SEED0, _SEED1 = (
    _column(VALUES, name)
    for name in ("row_beta2", "gain1", "decay", "scale", "second", "size", "bound", "seed0", "seed1")
)

_SHORT_BIAS = tl.constexpr(codecs._SHORT_BIAS)
_TINY = tl.constexpr(codecs._TINY)
_MIX_1 = tl.constexpr(codecs._MULTIPLIERS[0])
_MIX_2 = tl.constexpr(codecs._MULTIPLIERS[1] & 0xFFFFFFFF)
_INF = tl.constexpr(float("inf"))
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest even integer


# --- indices -------------------------------------------------------------------------------------------------------


@triton.jit
def _pointer(table, param_idx, field: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr):
    return pointer(table, table + param_idx * _NUM_FIELDS + field, kind, aligned)


@triton.jit
def _tile(table, owners, aligned: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr):
    """Return this program's parameter, matrix, tile down and across, rows, columns, sizes of the matrix and mask."""
    program = tl.program_id(0)
    param_idx = tl.load(owners + program)
    fields = table + param_idx * _NUM_FIELDS
    num_rows, num_cols = tl.load(fields + _NUM_ROWS), tl.load(fields + _NUM_COLS)
    down, across = tl.load(fields + _DOWN), tl.load(fields + _ACROSS)
    if aligned:
        # A hint that lets the compiler load vectors.
        num_cols = tl.multiple_of(num_cols, 16)
    # Number of the tile in its parameter, then in its matrix.
    index = program - tl.load(fields + _FIRST)
    matrix, index = index // (down * across), index % (down * across)
    i, j = index // across, index % across
    row = i * rows + tl.arange(0, rows)
    col = j * cols + tl.max_contiguous(tl.arange(0, cols), cols)
    mask = (row < num_rows)[:, None] & (col < num_cols)[None, :]
    return param_idx, matrix, i, j, row, col, num_rows, num_cols, mask


@triton.jit
def _elements(matrix, row, col, num_rows, num_cols):
    return (matrix * num_rows + row)[:, None] * num_cols + col[None, :]


@triton.jit
def _whole_elements(table, param_idx, matrix, row, col):
    """Return the indices of a tile's elements in the whole parameter, which noise depends on."""
    fields = table + param_idx * _NUM_FIELDS
    lines = (matrix * tl.load(fields + _WHOLE_ROWS) + row) * tl.load(fields + _WHOLE_COLS) + tl.load(fields + _START)
    return lines[:, None] + col[None, :]


# --- numbers -------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= _MIX_1
    x ^= x >> 16
    x *= _MIX_2
    return x


@triton.jit
def _random_16(values, param_idx, field: tl.constexpr, index):
    seed = tl.load(values + param_idx * _NUM_VALUES + field).to(tl.uint32, bitcast=True)
    return _mix(index.to(tl.uint32) * _MIX_2 + seed) >> 16


@triton.jit
def _read_scale(scales, index, mask, bytes: tl.constexpr):
    if bytes == 2:
        return tl.load(scales.to(tl.pointer_type(tl.float16)) + index, mask, other=0.0).to(tl.float32)
    code = tl.load(scales.to(tl.pointer_type(tl.uint8)) + index, mask, other=0).to(tl.int32)
    number = ((code + _SHORT_BIAS) << 20).to(tl.float32, bitcast=True)
    number = tl.where(code == 0, 0.0, number)
    return tl.where(code == 255, float("nan"), number)


@triton.jit
def _write_scale(scales, index, mask, largest, bytes: tl.constexpr):
    """Store the scale of a block with this largest magnitude; return the stored scale, which divides the values."""
    if bytes == 2:
        half = largest.to(tl.float16)
        tl.store(scales.to(tl.pointer_type(tl.float16)) + index, half, mask)
        number = half.to(tl.float32)
    else:
        code = ((largest.to(tl.int32, bitcast=True) - 1) >> 20) - (_SHORT_BIAS - 1)
        code = tl.minimum(tl.maximum(code, 1), 255)
        tl.store(scales.to(tl.pointer_type(tl.uint8)) + index, code.to(tl.uint8), mask)
        number = ((code + _SHORT_BIAS) << 20).to(tl.float32, bitcast=True)
        number = tl.where(code == 255, float("nan"), number)
    return tl.where(number < _TINY, _TINY, number)


# --- the momentum --------------------------------------------------------------------------------------------------


@triton.jit
def _read_momentum(
    table, param_idx, matrix, j, row, col, num_rows, num_cols, mask, momentum: tl.constexpr, bytes: tl.constexpr,
    aligned: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
):  # fmt: skip
    # index of each row among all rows of the parameter, (rows,)
    line = matrix * num_rows + row
    index = _elements(matrix, row, col, num_rows, num_cols)
    if momentum == "fp32" or momentum == "bf16":
        kind: tl.constexpr = tl.float32 if momentum == "fp32" else tl.bfloat16
        return tl.load(_pointer(table, param_idx, _MOMENTUM, kind, aligned) + index, mask, other=0.0).to(tl.float32)
    scales = _pointer(table, param_idx, _SCALE, tl.uint8, False)
    if momentum == "int8":
        code = tl.load(_pointer(table, param_idx, _MOMENTUM, tl.int8, aligned) + index, mask, other=0)
        y = code.to(tl.float32) * (1.0 / 127.0)
        # The row of a tile is one block of int8: tile j has block j.
        blocks = (num_cols + cols - 1) // cols
        scale = _read_scale(scales, line * blocks + j, row < num_rows, bytes)
        return y / (2.0 - tl.abs(y)) * scale[:, None]
    half: tl.constexpr = cols // 2
    pair_index, pair_mask = _pairs(line, j, row, num_rows, num_cols, aligned, half)
    codes = _pointer(table, param_idx, _MOMENTUM, tl.uint8, aligned)
    # 136 is two codes of 8, which decode to 0.
    pair = tl.load(codes + pair_index, pair_mask, other=136).to(tl.int32)
    # bytes (rows, half) -> codes (rows, half, 2) -> blocks (rows, 2, half)
    x = (tl.reshape(tl.join(pair & 15, pair >> 4), (rows, 2, half)) - 8).to(tl.float32) * (1.0 / 7.0)
    scale_index, scale_mask = _two_blocks(line, j, row, num_rows, num_cols, half)
    scale = _read_scale(scales, scale_index, scale_mask, bytes)
    return tl.reshape(x * scale[:, :, None], (rows, cols))


@triton.jit
def _pairs(line, j, row, num_rows, num_cols, aligned: tl.constexpr, half: tl.constexpr):
    """Return the indices of this tile's bytes, which hold two codes each, and their mask."""
    row_bytes = (num_cols + 1) // 2
    if aligned:
        row_bytes = tl.multiple_of(row_bytes, 8)
    pair = j * half + tl.max_contiguous(tl.arange(0, half), half)
    return line[:, None] * row_bytes + pair[None, :], (row < num_rows)[:, None] & (pair < row_bytes)[None, :]


@triton.jit
def _two_blocks(line, j, row, num_rows, num_cols, half: tl.constexpr):
    """Return the indices of the scales of this tile's rows, two each, and their mask."""
    blocks = (num_cols + half - 1) // half
    block = j * 2 + tl.arange(0, 2)
    return line[:, None] * blocks + block[None, :], (row < num_rows)[:, None] & (block < blocks)[None, :]


@triton.jit
def _write_momentum(
    m, table, values, param_idx, matrix, j, row, col, num_rows, num_cols, mask, momentum: tl.constexpr,
    bytes: tl.constexpr, aligned: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
):  # fmt: skip
    line = matrix * num_rows + row
    index = _elements(matrix, row, col, num_rows, num_cols)
    if momentum == "fp32" or momentum == "bf16":
        kind: tl.constexpr = tl.float32 if momentum == "fp32" else tl.bfloat16
        tl.store(_pointer(table, param_idx, _MOMENTUM, kind, aligned) + index, m.to(kind), mask)
        return
    scales = _pointer(table, param_idx, _SCALE, tl.uint8, False)
    # Elements outside of the matrix must not raise the scale of a block.
    m = tl.where(mask, m, 0.0)
    if momentum == "int8":
        blocks = (num_cols + cols - 1) // cols
        scale = _write_scale(scales, line * blocks + j, row < num_rows, tl.max(tl.abs(m), 1), bytes)
        x = tl.minimum(tl.maximum(m / scale[:, None], -1.0), 1.0)
        y = x / (1.0 + tl.abs(x)) * 254.0
        code = (y + _ROUND) - _ROUND  # to the nearest even integer
        tl.store(_pointer(table, param_idx, _MOMENTUM, tl.int8, aligned) + index, code.to(tl.int8), mask)
        return
    # Two blocks of int4 in the row of a tile, two codes per byte.
    half: tl.constexpr = cols // 2
    blocks = tl.reshape(m, (rows, 2, half))
    scale_index, scale_mask = _two_blocks(line, j, row, num_rows, num_cols, half)
    scale = _write_scale(scales, scale_index, scale_mask, tl.max(tl.abs(blocks), 2), bytes)
    x = tl.minimum(tl.maximum(tl.reshape(blocks / scale[:, :, None], (rows, cols)), -1.0), 1.0)
    whole = _whole_elements(table, param_idx, matrix, row, col)
    noise = _random_16(values, param_idx, _SEED0, whole).to(tl.float32) * (2.0**-16)
    level = tl.minimum(tl.maximum(tl.floor(noise + x * 7.0) + 8.0, 1.0), 15.0)
    # levels (rows, cols) -> (rows, half, 2) -> low and high nibbles, (rows, half) each
    low, high = tl.split(tl.reshape(tl.where(mask, level, 8.0).to(tl.int32), (rows, half, 2)))
    pair_index, pair_mask = _pairs(line, j, row, num_rows, num_cols, aligned, half)
    codes = _pointer(table, param_idx, _MOMENTUM, tl.uint8, aligned)
    tl.store(codes + pair_index, (low | (high << 4)).to(tl.uint8), pair_mask)


# --- the weight ----------------------------------------------------------------------------------------------------


@triton.jit
def _read_weight(table, param_idx, index, mask, kind: tl.constexpr, rounding: tl.constexpr, aligned: tl.constexpr):
    if rounding == "compensated":
        high = tl.load(_pointer(table, param_idx, _PARAM, tl.int16, aligned) + index, mask, other=0).to(tl.int32)
        low = tl.load(_pointer(table, param_idx, _LOW, tl.int8, aligned) + index, mask, other=0).to(tl.int32)
        return ((high << 16) + (low << 8)).to(tl.float32, bitcast=True)
    return tl.load(_pointer(table, param_idx, _PARAM, kind, aligned) + index, mask, other=0.0).to(tl.float32)


@triton.jit
def _bits(p):
    """Return the bits of a float; every NaN becomes one that stays NaN when less than 2^16 is added."""
    return tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def _write_weight(
    p, table, values, param_idx, index, whole, mask, kind: tl.constexpr, rounding: tl.constexpr, aligned: tl.constexpr
):
    """Store a weight; `whole` are the indices in the whole parameter."""
    if rounding == "compensated":
        bits = _bits(p)
        # The nearest bf16, and the signed remainder in 8 bits.
        high = (bits + 0x8000) >> 16
        low = tl.minimum((bits - (high << 16) + 0x80) >> 8, 127)
        tl.store(_pointer(table, param_idx, _PARAM, tl.int16, aligned) + index, high.to(tl.int16), mask)
        tl.store(_pointer(table, param_idx, _LOW, tl.int8, aligned) + index, low.to(tl.int8), mask)
    elif rounding == "stochastic":
        # The carry of 16 random bits rounds up with the probability of the remainder.
        bits = _bits(p).to(tl.uint32, bitcast=True) + _random_16(values, param_idx, _SEED1, whole)
        tl.store(_pointer(table, param_idx, _PARAM, tl.uint16, aligned) + index, (bits >> 16).to(tl.uint16), mask)
    else:
        tl.store(_pointer(table, param_idx, _PARAM, kind, aligned) + index, p.to(kind), mask)


# --- stages of factored parameters ---------------------------------------------------------------------------------


@triton.jit
def _add_parts(squares, table, row_parts, col_parts, param_idx, matrix, i, j, row, col, num_rows, num_cols):
    """Store this tile's sums over its rows and over its columns, each in a separate element."""
    fields = table + param_idx * _NUM_FIELDS
    down, across = tl.load(fields + _DOWN), tl.load(fields + _ACROSS)
    row_index = tl.load(fields + _ROW_PART) + (matrix * across + j) * num_rows + row
    col_index = tl.load(fields + _COL_PART) + (matrix * down + i) * num_cols + col
    # row parts: (matrices, across, rows), column parts: (matrices, down, columns)
    tl.store(row_parts + row_index, tl.sum(squares, 1), row < num_rows)
    tl.store(col_parts + col_index, tl.sum(squares, 0), col < num_cols)


@triton.jit
def _whitened(
    table, values, means, param_idx, matrix, row, col, num_rows, num_cols, mask, grad: tl.constexpr,
    aligned: tl.constexpr,
):  # fmt: skip
    """Return u = g a b of (3) with the corrected second moment, not clipped."""
    lines = _pointer(table, param_idx, _ROW, tl.float32, False) + matrix * num_rows + row
    columns = _pointer(table, param_idx, _COL, tl.float32, False) + matrix * num_cols + col
    mean = tl.load(means + tl.load(table + param_idx * _NUM_FIELDS + _FIRST_MATRIX) + matrix)
    # `means` holds sqrt(mean(r)), which does not underflow as r / mean(r) could.
    a = tl.rsqrt(tl.load(lines, row < num_rows, other=1.0)) * mean
    b = tl.rsqrt(tl.load(columns, col < num_cols, other=1.0)) * tl.load(values + param_idx * _NUM_VALUES + _SECOND)
    index = _elements(matrix, row, col, num_rows, num_cols)
    g = tl.load(_pointer(table, param_idx, _GRAD, grad, aligned) + index, mask, other=0.0).to(tl.float32)
    return g * a[:, None] * b[None, :]


@triton.jit
def _bounded(g, bound):
    """Return the gradient bounded in magnitude, for its square only; NaN and Inf stay."""
    magnitude = tl.abs(g)
    return tl.where((magnitude > bound) & (magnitude < _INF), bound, g)


@triton.jit
def _clipped(u, clip):
    """Return u, or 0 if the factor of the clip is 0: 0 times an overflow of u would be NaN."""
    return tl.where(clip == 0.0, 0.0, u)


@triton.jit
def count_steps(table, steps, params, size: tl.constexpr):
    """Add 1 to the step counters of some parameters, and write them to `steps`."""
    param_idx = tl.program_id(0) * size + tl.arange(0, size)
    mask = param_idx < params
    entries = table + param_idx * _NUM_FIELDS + _STEP
    # Beyond the last parameter, the first counter is addressed but neither read nor written.
    counter = pointer(table, tl.where(mask, entries, table + _STEP), tl.float32, False)
    count = tl.load(counter, mask=mask, other=0.0) + 1.0
    tl.store(counter, count, mask=mask)
    tl.store(steps + param_idx, count, mask=mask)


@triton.jit
def copy_flat(table, owners, flat, kind: tl.constexpr, to_flat: tl.constexpr, size: tl.constexpr):
    """Copy tensors of dtype `kind` into one flat tensor, or back, `size` elements in each program.

    The table has a row for each tensor: its address, length, first element in `flat` and first program.
    """
    program = tl.program_id(0)
    fields = table + tl.load(owners + program) * 4
    index = (program - tl.load(fields + 3)) * size + tl.arange(0, size)
    mask = index < tl.load(fields + 1)
    place, source = flat + tl.load(fields + 2) + index, pointer(table, fields, kind, False) + index
    if to_flat:
        tl.store(place, tl.load(source, mask=mask), mask=mask)
    else:
        tl.store(source, tl.load(place, mask=mask), mask=mask)


@triton.jit
def square_parts(
    table, values, owners, row_parts, col_parts, grad: tl.constexpr, aligned: tl.constexpr, rows: tl.constexpr,
    cols: tl.constexpr,
):  # fmt: skip
    """Store partial sums of the squared gradient over rows and columns: (1), (2)."""
    param_idx, matrix, i, j, row, col, num_rows, num_cols, mask = _tile(table, owners, aligned, rows, cols)
    index = _elements(matrix, row, col, num_rows, num_cols)
    g = tl.load(_pointer(table, param_idx, _GRAD, grad, aligned) + index, mask, other=0.0).to(tl.float32)
    # No sum of squares along the longer side may overflow fp32.
    g = _bounded(g, tl.load(values + param_idx * _NUM_VALUES + _BOUND))
    _add_parts(g * g, table, row_parts, col_parts, param_idx, matrix, i, j, row, col, num_rows, num_cols)


@triton.jit
def add_sums(
    table, values, owners, firsts, parts, field: tl.constexpr, first_part: tl.constexpr, count: tl.constexpr,
    length: tl.constexpr, first_value: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Finish row averages, or column averages, from their parts: avg <- beta avg + (1 - beta) eps + w sum.

    The partial sums of a matrix are a row-major (parts, averages) array, followed by that of the next matrix.

    Args:
        field, first_part, count, length: columns of the int64 table: the averages, their first part, the number of
            parts of an average and of averages in a matrix.
        first_value: column of beta in the fp32 table, followed by (1 - beta) eps and the weight.
    """
    program = tl.program_id(0)
    param_idx = tl.load(owners + program)
    fields, numbers = table + param_idx * _NUM_FIELDS, values + param_idx * _NUM_VALUES + first_value
    num_parts, num_averages = tl.load(fields + count), tl.load(fields + length)
    total = tl.load(fields + _MATRICES) * num_averages
    index = (program - tl.load(firsts + param_idx)) * size + tl.arange(0, size)
    part = tl.arange(0, 16)
    # Part 0 of each average of this program; the next part is `num_averages` elements on.
    start = parts + tl.load(fields + first_part) + index // num_averages * num_parts * num_averages
    start += index % num_averages
    # (16 parts, averages) at a time, in a fixed order: atomics would change the bits from run to run.
    sums = tl.zeros((16, size), tl.float32)
    for i in range(0, num_parts, 16):
        mask = (i + part < num_parts)[:, None] & (index < total)[None, :]
        sums += tl.load(start[None, :] + (i + part)[:, None] * num_averages, mask, other=0.0)
    target = _pointer(table, param_idx, field, tl.float32, False) + index
    # beta avg + (1 - beta) eps
    kept = tl.load(target, index < total, other=0.0) * tl.load(numbers) + tl.load(numbers + 1)
    tl.store(target, kept + tl.sum(sums, 0) * tl.load(numbers + 2), index < total)


@triton.jit
def root_means(table, owners, means, field: tl.constexpr, size: tl.constexpr):
    """Store the root of the mean of each matrix's row averages, or of its column averages: both have the same mean."""
    program = tl.program_id(0)
    param_idx = tl.load(owners + program)
    fields = table + param_idx * _NUM_FIELDS
    count = tl.load(fields + _MEAN_LENGTH)
    matrix = program - tl.load(fields + _FIRST_MATRIX)
    source = _pointer(table, param_idx, field, tl.float32, False) + matrix * count
    line = tl.arange(0, size)
    sums = tl.zeros((size,), tl.float32)
    for i in range(0, count, size):
        sums += tl.load(source + i + line, i + line < count, other=0.0)
    tl.store(means + program, tl.sqrt_rn(tl.sum(sums, 0) / count.to(tl.float32)))


@triton.jit
def whitened_squares(
    table, values, owners, means, totals, grad: tl.constexpr, aligned: tl.constexpr, rows: tl.constexpr,
    cols: tl.constexpr,
):  # fmt: skip
    """Store each tile's sum of squares of the whitened gradient: (3)."""
    param_idx, matrix, i, j, row, col, num_rows, num_cols, mask = _tile(table, owners, aligned, rows, cols)
    u = _whitened(table, values, means, param_idx, matrix, row, col, num_rows, num_cols, mask, grad, aligned)
    tl.store(totals + tl.program_id(0), tl.sum(tl.sum(u * u, 1), 0))


@triton.jit
def _add_totals(table, param_idx, totals, size: tl.constexpr):
    """Return the sum of the totals of a parameter's tiles, in a fixed order."""
    fields = table + param_idx * _NUM_FIELDS
    first = tl.load(fields + _FIRST)
    count = tl.load(fields + _MATRICES) * tl.load(fields + _DOWN) * tl.load(fields + _ACROSS)
    index = tl.arange(0, size)
    sums = tl.zeros((size,), tl.float32)
    for i in range(0, count, size):
        sums += tl.load(totals + first + i + index, i + index < count, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def add_totals(table, totals, sums, size: tl.constexpr):
    """Store the sum of squares of each sharded parameter on this rank."""
    param_idx = tl.program_id(0)
    tl.store(sums + param_idx, _add_totals(table, param_idx, totals, size))


@triton.jit
def clip_factors(table, values, totals, clips, maximize: tl.constexpr, added: tl.constexpr, size: tl.constexpr):
    """Store 1 / max(1, RMS(u) / d) of each parameter, negative to ascend: (4).

    Args:
        totals: sums of squares of the tiles, or of the parameters if they are `added` already.
    """
    param_idx = tl.program_id(0)
    if added:
        total = tl.load(totals + param_idx)
    else:
        total = _add_totals(table, param_idx, totals, size)
    # size = numel d^2, so the ratio is RMS(u) / d
    ratio = tl.sqrt_rn(total / tl.load(values + param_idx * _NUM_VALUES + _SIZE))
    factor = 1.0 / tl.where(ratio < 1.0, 1.0, ratio)  # NaN stays NaN
    tl.store(clips + param_idx, -factor if maximize else factor)


@triton.jit
def instability_parts(
    table, values, owners, means, clips, row_parts, col_parts, grad: tl.constexpr, momentum: tl.constexpr,
    bytes: tl.constexpr, aligned: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
):  # fmt: skip
    """Store partial sums of (u - m)^2 / beta1^2, and a momentum in fp32: (5) to (8)."""
    param_idx, matrix, i, j, row, col, num_rows, num_cols, mask = _tile(table, owners, aligned, rows, cols)
    u = _whitened(table, values, means, param_idx, matrix, row, col, num_rows, num_cols, mask, grad, aligned)
    m = _read_momentum(
        table, param_idx, matrix, j, row, col, num_rows, num_cols, mask, momentum, bytes, aligned, rows, cols
    )
    clip = tl.load(clips + param_idx)
    # u - m_old = (u - m) / beta1 with the new m
    difference = _clipped(u, clip) * clip - m
    if momentum == "fp32":
        m += difference * tl.load(values + param_idx * _NUM_VALUES + _GAIN1)
        index = _elements(matrix, row, col, num_rows, num_cols)
        tl.store(_pointer(table, param_idx, _MOMENTUM, tl.float32, aligned) + index, m, mask)
    # Elements outside of the matrix must not enter the sums.
    difference = tl.where(mask, difference, 0.0)
    squares = difference * difference
    _add_parts(squares, table, row_parts, col_parts, param_idx, matrix, i, j, row, col, num_rows, num_cols)


@triton.jit
def apply(
    table, values, owners, means, res_means, clips, param: tl.constexpr, grad: tl.constexpr, momentum: tl.constexpr,
    bytes: tl.constexpr, rounding: tl.constexpr, confidence: tl.constexpr, decays: tl.constexpr, aligned: tl.constexpr,
    rows: tl.constexpr, cols: tl.constexpr,
):  # fmt: skip
    """Update the parameter, and the momentum unless it is already updated: (9), (10), and (5) if needed."""
    param_idx, matrix, i, j, row, col, num_rows, num_cols, mask = _tile(table, owners, aligned, rows, cols)
    index = _elements(matrix, row, col, num_rows, num_cols)
    numbers = values + param_idx * _NUM_VALUES
    # `instability_parts` has updated an fp32 momentum already; a rounded one is read again and written here.
    written: tl.constexpr = momentum == "fp32" and confidence
    if momentum != "none":
        m = _read_momentum(
            table, param_idx, matrix, j, row, col, num_rows, num_cols, mask, momentum, bytes, aligned, rows, cols
        )
    if not written:
        u = _whitened(table, values, means, param_idx, matrix, row, col, num_rows, num_cols, mask, grad, aligned)
        clip = tl.load(clips + param_idx)
        u = _clipped(u, clip) * clip
        if momentum == "none":
            m = u
        else:
            m += (u - m) * tl.load(numbers + _GAIN1)
    scale = tl.load(numbers + _SCALED)
    p = _read_weight(table, param_idx, index, mask, param, rounding, aligned)
    # Not p (1 - lr w): in fp32 that factor is off in the same direction at every step.
    if decays:
        p += p * tl.load(numbers + _DECAY)
    if confidence:
        # (9): D = m a b, with -lr and the bias corrections in a
        lines = _pointer(table, param_idx, _RES_ROW, tl.float32, False) + matrix * num_rows + row
        columns = _pointer(table, param_idx, _RES_COL, tl.float32, False) + matrix * num_cols + col
        mean = tl.load(res_means + tl.load(table + param_idx * _NUM_FIELDS + _FIRST_MATRIX) + matrix)
        a = tl.rsqrt(tl.load(lines, row < num_rows, other=1.0)) * mean * scale
        b = tl.rsqrt(tl.load(columns, col < num_cols, other=1.0))
        p += m * a[:, None] * b[None, :]
    else:
        p += m * scale
    whole = index
    if rounding == "stochastic":
        whole = _whole_elements(table, param_idx, matrix, row, col)
    _write_weight(p, table, values, param_idx, index, whole, mask, param, rounding, aligned)
    if momentum != "none" and not written:
        _write_momentum(
            m, table, values, param_idx, matrix, j, row, col, num_rows, num_cols, mask, momentum, bytes, aligned, rows,
            cols,
        )  # fmt: skip


# --- parameters with a full second moment: one row ----------------------------------------------------------------


@triton.jit
def _flat_tile(table, owners, aligned: tl.constexpr, size: tl.constexpr):
    """Return this program's parameter, element indices and mask."""
    program = tl.program_id(0)
    param_idx = tl.load(owners + program)
    fields = table + param_idx * _NUM_FIELDS
    count = tl.load(fields + _NUM_COLS)
    if aligned:
        count = tl.multiple_of(count, 16)
    index = (program - tl.load(fields + _FIRST)) * size + tl.arange(0, size)
    return param_idx, index, index < count


@triton.jit
def moment_squares(table, values, owners, totals, grad: tl.constexpr, aligned: tl.constexpr, size: tl.constexpr):
    """Update the full second moment; store each tile's sum of squares of the whitened gradient."""
    param_idx, index, mask = _flat_tile(table, owners, aligned, size)
    numbers = values + param_idx * _NUM_VALUES
    g = tl.load(_pointer(table, param_idx, _GRAD, grad, aligned) + index, mask, other=0.0).to(tl.float32)
    source = _pointer(table, param_idx, _MOMENT, tl.float32, aligned) + index
    v = tl.load(source, mask, other=1.0) * tl.load(numbers + _BETA2) + tl.load(numbers + _BETA2 + 1)
    # v <- beta2 v + (1 - beta2)(g^2 + e1)
    x = _bounded(g, tl.load(numbers + _BOUND))
    v += x * x * tl.load(numbers + _BETA2 + 2)
    tl.store(source, v, mask)
    u = tl.rsqrt(v) * g * tl.load(numbers + _SECOND)
    tl.store(totals + tl.program_id(0), tl.sum(u * u, 0))


@triton.jit
def apply_moment(
    table, values, owners, clips, param: tl.constexpr, grad: tl.constexpr, momentum: tl.constexpr,
    rounding: tl.constexpr, decays: tl.constexpr, aligned: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Update the parameter and its momentum, without confidence."""
    param_idx, index, mask = _flat_tile(table, owners, aligned, size)
    numbers = values + param_idx * _NUM_VALUES
    g = tl.load(_pointer(table, param_idx, _GRAD, grad, aligned) + index, mask, other=0.0).to(tl.float32)
    v = tl.load(_pointer(table, param_idx, _MOMENT, tl.float32, aligned) + index, mask, other=1.0)
    # u, clipped and with the sign; the update itself if beta1 = 0
    m = tl.rsqrt(v) * g * (tl.load(numbers + _SECOND) * tl.load(clips + param_idx))
    if momentum != "none":
        kept = _pointer(table, param_idx, _MOMENTUM, tl.float32, aligned) + index
        old = tl.load(kept, mask, other=0.0)
        m = old + (m - old) * tl.load(numbers + _GAIN1)
        tl.store(kept, m, mask)
    p = _read_weight(table, param_idx, index, mask, param, rounding, aligned)
    if decays:
        p += p * tl.load(numbers + _DECAY)
    p += m * tl.load(numbers + _SCALED)
    whole = index + tl.load(table + param_idx * _NUM_FIELDS + _START)
    _write_weight(p, table, values, param_idx, index, whole, mask, param, rounding, aligned)
