"""One step of CAME on a GPU, many parameters in each launch: the equations of came.py, (1) to (10), tile by tile.

Each parameter is a stack of row-major matrices, cut into tiles; a program works on one tile and finds in a table which
parameter it is of. A tile's part of a sum over a row or a column goes into a place of its own, and the parts are added
in their order: the same numbers give the same bits, on every rank and in every run. Memory is passed through once a
stage: the gradient three times, four where there are a rounded momentum and a confidence, the momentum twice or three
times, the parameter once.

Launched by _grouped.py; every function has its plain counterpart in _update.py, _codec.py, _rounding.py and _random.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from scantling.numerics.kernels import pointer
from scantling.optim import _codec, _random
from scantling.optim._grouped import FIELDS, VALUES

_WIDTH: tl.constexpr = tl.constexpr(len(FIELDS))
_COUNT: tl.constexpr = tl.constexpr(len(VALUES))
_PARAM: tl.constexpr = tl.constexpr(FIELDS.index("param"))
_GRAD: tl.constexpr = tl.constexpr(FIELDS.index("grad"))
_MOMENTUM: tl.constexpr = tl.constexpr(FIELDS.index("momentum"))
_SCALE: tl.constexpr = tl.constexpr(FIELDS.index("scale"))
_LOW: tl.constexpr = tl.constexpr(FIELDS.index("low"))
_ROW: tl.constexpr = tl.constexpr(FIELDS.index("row"))
_COL: tl.constexpr = tl.constexpr(FIELDS.index("col"))
_RES_ROW: tl.constexpr = tl.constexpr(FIELDS.index("res_row"))
_RES_COL: tl.constexpr = tl.constexpr(FIELDS.index("res_col"))
_MOMENT: tl.constexpr = tl.constexpr(FIELDS.index("moment"))
_NUM_ROWS: tl.constexpr = tl.constexpr(FIELDS.index("rows"))
_NUM_COLS: tl.constexpr = tl.constexpr(FIELDS.index("cols"))
_MATRICES: tl.constexpr = tl.constexpr(FIELDS.index("matrices"))
_FIRST: tl.constexpr = tl.constexpr(FIELDS.index("first"))
_DOWN: tl.constexpr = tl.constexpr(FIELDS.index("down"))
_ACROSS: tl.constexpr = tl.constexpr(FIELDS.index("across"))
_ROW_PART: tl.constexpr = tl.constexpr(FIELDS.index("row_part"))
_COL_PART: tl.constexpr = tl.constexpr(FIELDS.index("col_part"))
_FIRST_MATRIX: tl.constexpr = tl.constexpr(FIELDS.index("first_matrix"))
_GAIN1: tl.constexpr = tl.constexpr(VALUES.index("gain1"))
_DECAY: tl.constexpr = tl.constexpr(VALUES.index("decay"))
_SCALED: tl.constexpr = tl.constexpr(VALUES.index("scale"))
_SECOND: tl.constexpr = tl.constexpr(VALUES.index("second"))
_SIZE: tl.constexpr = tl.constexpr(VALUES.index("size"))
_SEED0: tl.constexpr = tl.constexpr(VALUES.index("seed0"))
_SEED1: tl.constexpr = tl.constexpr(VALUES.index("seed1"))
_BETA2: tl.constexpr = tl.constexpr(VALUES.index("beta2"))

_SHORT_BIAS: tl.constexpr = tl.constexpr(_codec._SHORT_BIAS)
_TINY: tl.constexpr = tl.constexpr(_codec._TINY)
_MIX_1: tl.constexpr = tl.constexpr(_random._MULTIPLIERS[0])
_MIX_2: tl.constexpr = tl.constexpr(_random._MULTIPLIERS[1] & 0xFFFFFFFF)
_BOUND: tl.constexpr = tl.constexpr(2.0**63)  # of a gradient, whose square is then at most that of `_update.squared`
_INF: tl.constexpr = tl.constexpr(float("inf"))
_ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away again, it rounds to the nearest even


# --- places --------------------------------------------------------------------------------------------------------


@triton.jit
def _pointer(table, job, field: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr):
    return pointer(table, table + job * _WIDTH + field, kind, aligned)


@triton.jit
def _tile(table, owners, aligned: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr):
    """Of this program: its job, which matrix, tile down and across, rows and columns, elements and which there are."""
    program = tl.program_id(0)
    job = tl.load(owners + program)
    fields = table + job * _WIDTH
    num_rows, num_cols = tl.load(fields + _NUM_ROWS), tl.load(fields + _NUM_COLS)
    down, across = tl.load(fields + _DOWN), tl.load(fields + _ACROSS)
    if aligned:
        num_cols = tl.multiple_of(num_cols, 16)
    place = program - tl.load(fields + _FIRST)
    matrix, place = place // (down * across), place % (down * across)
    i, j = place // across, place % across
    row = i * rows + tl.arange(0, rows)
    col = j * cols + tl.max_contiguous(tl.arange(0, cols), cols)
    inside = (row < num_rows)[:, None] & (col < num_cols)[None, :]
    return job, matrix, i, j, row, col, num_rows, num_cols, inside


@triton.jit
def _elements(matrix, row, col, num_rows, num_cols):
    return (matrix * num_rows + row)[:, None] * num_cols + col[None, :]


# --- numbers -------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= _MIX_1
    x ^= x >> 16
    x *= _MIX_2
    return x


@triton.jit
def _random_16(values, job, field: tl.constexpr, place):
    seed = tl.load(values + job * _COUNT + field).to(tl.uint32, bitcast=True)
    return _mix(place.to(tl.uint32) * _MIX_2 + seed) >> 16


@triton.jit
def _read_scale(scales, place, inside, bytes: tl.constexpr):
    if bytes == 2:
        return tl.load(scales.to(tl.pointer_type(tl.float16)) + place, inside, other=0.0).to(tl.float32)
    code = tl.load(scales.to(tl.pointer_type(tl.uint8)) + place, inside, other=0).to(tl.int32)
    number = ((code + _SHORT_BIAS) << 20).to(tl.float32, bitcast=True)
    number = tl.where(code == 0, 0.0, number)
    return tl.where(code == 255, float("nan"), number)


@triton.jit
def _write_scale(scales, place, inside, largest, bytes: tl.constexpr):
    """Keep the scale of a block with this largest magnitude; returns what codes are relative to."""
    if bytes == 2:
        half = largest.to(tl.float16)
        tl.store(scales.to(tl.pointer_type(tl.float16)) + place, half, inside)
        number = half.to(tl.float32)
    else:
        code = ((largest.to(tl.int32, bitcast=True) - 1) >> 20) - (_SHORT_BIAS - 1)
        code = tl.minimum(tl.maximum(code, 1), 255)
        tl.store(scales.to(tl.pointer_type(tl.uint8)) + place, code.to(tl.uint8), inside)
        number = ((code + _SHORT_BIAS) << 20).to(tl.float32, bitcast=True)
        number = tl.where(code == 255, float("nan"), number)
    return tl.where(number < _TINY, _TINY, number)


# --- the momentum --------------------------------------------------------------------------------------------------


@triton.jit
def _read_momentum(
    table, job, matrix, j, row, col, num_rows, num_cols, inside, momentum: tl.constexpr, bytes: tl.constexpr,
    aligned: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
):  # fmt: skip
    line = matrix * num_rows + row
    place = _elements(matrix, row, col, num_rows, num_cols)
    if momentum == "fp32" or momentum == "bf16":
        kind: tl.constexpr = tl.float32 if momentum == "fp32" else tl.bfloat16
        return tl.load(_pointer(table, job, _MOMENTUM, kind, aligned) + place, inside, other=0.0).to(tl.float32)
    scales = _pointer(table, job, _SCALE, tl.uint8, False)
    if momentum == "int8":
        code = tl.load(_pointer(table, job, _MOMENTUM, tl.int8, aligned) + place, inside, other=0)
        y = code.to(tl.float32) * (1.0 / 127.0)
        blocks = (num_cols + cols - 1) // cols
        scale = _read_scale(scales, line * blocks + j, row < num_rows, bytes)
        return y / (2.0 - tl.abs(y)) * scale[:, None]
    half: tl.constexpr = cols // 2
    place, there = _pairs(line, j, row, num_rows, num_cols, aligned, half)
    pair = tl.load(_pointer(table, job, _MOMENTUM, tl.uint8, aligned) + place, there, other=136).to(tl.int32)
    x = (tl.reshape(tl.join(pair & 15, pair >> 4), (rows, 2, half)) - 8).to(tl.float32) * (1.0 / 7.0)
    place, there = _two_blocks(line, j, row, num_rows, num_cols, half)
    scale = _read_scale(scales, place, there, bytes)
    return tl.reshape(x * scale[:, :, None], (rows, cols))


@triton.jit
def _pairs(line, j, row, num_rows, num_cols, aligned: tl.constexpr, half: tl.constexpr):
    """Bytes of two codes each in this tile, and which there are."""
    row_bytes = (num_cols + 1) // 2
    if aligned:
        row_bytes = tl.multiple_of(row_bytes, 8)
    pair = j * half + tl.max_contiguous(tl.arange(0, half), half)
    return line[:, None] * row_bytes + pair[None, :], (row < num_rows)[:, None] & (pair < row_bytes)[None, :]


@triton.jit
def _two_blocks(line, j, row, num_rows, num_cols, half: tl.constexpr):
    """Scales of this tile's rows, two each, and which there are."""
    blocks = (num_cols + half - 1) // half
    block = j * 2 + tl.arange(0, 2)
    return line[:, None] * blocks + block[None, :], (row < num_rows)[:, None] & (block < blocks)[None, :]


@triton.jit
def _write_momentum(
    m, table, values, job, matrix, j, row, col, num_rows, num_cols, inside, momentum: tl.constexpr,
    bytes: tl.constexpr, aligned: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
):  # fmt: skip
    line = matrix * num_rows + row
    place = _elements(matrix, row, col, num_rows, num_cols)
    if momentum == "fp32" or momentum == "bf16":
        kind: tl.constexpr = tl.float32 if momentum == "fp32" else tl.bfloat16
        tl.store(_pointer(table, job, _MOMENTUM, kind, aligned) + place, m.to(kind), inside)
        return
    scales = _pointer(table, job, _SCALE, tl.uint8, False)
    m = tl.where(inside, m, 0.0)
    if momentum == "int8":
        blocks = (num_cols + cols - 1) // cols
        scale = _write_scale(scales, line * blocks + j, row < num_rows, tl.max(tl.abs(m), 1), bytes)
        x = tl.minimum(tl.maximum(m / scale[:, None], -1.0), 1.0)
        y = x / (1.0 + tl.abs(x)) * 254.0
        code = (y + _ROUND) - _ROUND
        tl.store(_pointer(table, job, _MOMENTUM, tl.int8, aligned) + place, code.to(tl.int8), inside)
        return
    half: tl.constexpr = cols // 2
    blocks = tl.reshape(m, (rows, 2, half))
    scale_place, there = _two_blocks(line, j, row, num_rows, num_cols, half)
    scale = _write_scale(scales, scale_place, there, tl.max(tl.abs(blocks), 2), bytes)
    x = tl.minimum(tl.maximum(tl.reshape(blocks / scale[:, :, None], (rows, cols)), -1.0), 1.0)
    noise = _random_16(values, job, _SEED0, place).to(tl.float32) * (2.0**-16)
    level = tl.minimum(tl.maximum(tl.floor(noise + x * 7.0) + 8.0, 1.0), 15.0)
    low, high = tl.split(tl.reshape(tl.where(inside, level, 8.0).to(tl.int32), (rows, half, 2)))
    place, there = _pairs(line, j, row, num_rows, num_cols, aligned, half)
    tl.store(_pointer(table, job, _MOMENTUM, tl.uint8, aligned) + place, (low | (high << 4)).to(tl.uint8), there)


# --- the weight ----------------------------------------------------------------------------------------------------


@triton.jit
def _read_weight(table, job, place, inside, kind: tl.constexpr, rounding: tl.constexpr, aligned: tl.constexpr):
    if rounding == "compensated":
        high = tl.load(_pointer(table, job, _PARAM, tl.int16, aligned) + place, inside, other=0).to(tl.int32)
        low = tl.load(_pointer(table, job, _LOW, tl.int8, aligned) + place, inside, other=0).to(tl.int32)
        return ((high << 16) + (low << 8)).to(tl.float32, bitcast=True)
    return tl.load(_pointer(table, job, _PARAM, kind, aligned) + place, inside, other=0.0).to(tl.float32)


@triton.jit
def _bits(p):
    """Those of a float, and of every NaN the same, which stays NaN with less than 2^16 added."""
    return tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def _write_weight(
    p, table, values, job, place, inside, kind: tl.constexpr, rounding: tl.constexpr, aligned: tl.constexpr
):
    if rounding == "compensated":
        bits = _bits(p)
        high = (bits + 0x8000) >> 16
        low = tl.minimum((bits - (high << 16) + 0x80) >> 8, 127)
        tl.store(_pointer(table, job, _PARAM, tl.int16, aligned) + place, high.to(tl.int16), inside)
        tl.store(_pointer(table, job, _LOW, tl.int8, aligned) + place, low.to(tl.int8), inside)
    elif rounding == "stochastic":
        bits = _bits(p).to(tl.uint32, bitcast=True) + _random_16(values, job, _SEED1, place)
        tl.store(_pointer(table, job, _PARAM, tl.uint16, aligned) + place, (bits >> 16).to(tl.uint16), inside)
    else:
        tl.store(_pointer(table, job, _PARAM, kind, aligned) + place, p.to(kind), inside)


# --- stages of factored parameters ---------------------------------------------------------------------------------


@triton.jit
def _add_parts(squares, table, row_parts, col_parts, job, matrix, i, j, row, col, num_rows, num_cols):
    """This tile's sums over its rows and columns, each into its own place."""
    fields = table + job * _WIDTH
    down, across = tl.load(fields + _DOWN), tl.load(fields + _ACROSS)
    row_place = tl.load(fields + _ROW_PART) + (matrix * across + j) * num_rows + row
    col_place = tl.load(fields + _COL_PART) + (matrix * down + i) * num_cols + col
    tl.store(row_parts + row_place, tl.sum(squares, 1), row < num_rows)
    tl.store(col_parts + col_place, tl.sum(squares, 0), col < num_cols)


@triton.jit
def _whitened(
    table, values, means, job, matrix, row, col, num_rows, num_cols, inside, grad: tl.constexpr, aligned: tl.constexpr
):
    """u = g a b with the corrected second moment, not clipped."""
    lines = _pointer(table, job, _ROW, tl.float32, False) + matrix * num_rows + row
    columns = _pointer(table, job, _COL, tl.float32, False) + matrix * num_cols + col
    mean = tl.load(means + tl.load(table + job * _WIDTH + _FIRST_MATRIX) + matrix)
    a = tl.rsqrt(tl.load(lines, row < num_rows, other=1.0)) * mean
    b = tl.rsqrt(tl.load(columns, col < num_cols, other=1.0)) * tl.load(values + job * _COUNT + _SECOND)
    place = _elements(matrix, row, col, num_rows, num_cols)
    g = tl.load(_pointer(table, job, _GRAD, grad, aligned) + place, inside, other=0.0).to(tl.float32)
    return g * a[:, None] * b[None, :]


@triton.jit
def _bounded(g, bound):
    """The gradient, with `bound` where it is larger in magnitude; NaN and Inf stay. Only for its square."""
    magnitude = tl.abs(g)
    return tl.where((magnitude > bound) & (magnitude < _INF), bound, g)


@triton.jit
def _clipped(u, clip):
    """u to be multiplied with the factor of its clip: 0 where that is 0, whose product with an overflow is NaN."""
    return tl.where(clip == 0.0, 0.0, u)


@triton.jit
def square_parts(
    table, owners, row_parts, col_parts, grad: tl.constexpr, aligned: tl.constexpr, rows: tl.constexpr,
    cols: tl.constexpr,
):  # fmt: skip
    """(1) and (2): parts of the sums of the squared gradient over rows and columns."""
    job, matrix, i, j, row, col, num_rows, num_cols, inside = _tile(table, owners, aligned, rows, cols)
    place = _elements(matrix, row, col, num_rows, num_cols)
    g = tl.load(_pointer(table, job, _GRAD, grad, aligned) + place, inside, other=0.0).to(tl.float32)
    longest = tl.maximum(num_rows, num_cols).to(tl.float32)
    g = _bounded(g, 1.0 / tl.sqrt_rn(longest) * _BOUND)
    _add_parts(g * g, table, row_parts, col_parts, job, matrix, i, j, row, col, num_rows, num_cols)


@triton.jit
def add_sums(
    table, values, owners, firsts, parts, field: tl.constexpr, first_part: tl.constexpr, count: tl.constexpr,
    length: tl.constexpr, first_value: tl.constexpr, weight: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Averages of rows, or of columns, from their parts: avg <- beta avg + (1 - beta) eps + w sum.

    The parts of all averages of a matrix follow each other, `count` times, and then come those of the next matrix.

    Args:
        field, first_part, count, length: in the table of int64, of the averages, their first part, how many each has
            and how many a matrix has.
        first_value, weight: in the table of floats, of beta, and from there of the weight.
    """
    program = tl.program_id(0)
    job = tl.load(owners + program)
    fields, numbers = table + job * _WIDTH, values + job * _COUNT + first_value
    num_parts, num_averages = tl.load(fields + count), tl.load(fields + length)
    total = tl.load(fields + _MATRICES) * num_averages
    place = (program - tl.load(firsts + job)) * size + tl.arange(0, size)
    part = tl.arange(0, 16)
    start = parts + tl.load(fields + first_part) + place // num_averages * num_parts * num_averages
    start += place % num_averages
    sums = tl.zeros((16, size), tl.float32)
    for i in range(0, num_parts, 16):
        there = (i + part < num_parts)[:, None] & (place < total)[None, :]
        sums += tl.load(start[None, :] + (i + part)[:, None] * num_averages, there, other=0.0)
    target = _pointer(table, job, field, tl.float32, False) + place
    kept = tl.load(target, place < total, other=0.0) * tl.load(numbers) + tl.load(numbers + 1)
    tl.store(target, kept + tl.sum(sums, 0) * tl.load(numbers + weight), place < total)


@triton.jit
def root_means(table, owners, means, field: tl.constexpr, size: tl.constexpr):
    """The root of the mean of each matrix's row averages."""
    program = tl.program_id(0)
    job = tl.load(owners + program)
    fields = table + job * _WIDTH
    num_rows = tl.load(fields + _NUM_ROWS)
    matrix = program - tl.load(fields + _FIRST_MATRIX)
    source = _pointer(table, job, field, tl.float32, False) + matrix * num_rows
    line = tl.arange(0, size)
    sums = tl.zeros((size,), tl.float32)
    for i in range(0, num_rows, size):
        sums += tl.load(source + i + line, i + line < num_rows, other=0.0)
    tl.store(means + program, tl.sqrt_rn(tl.sum(sums, 0) / num_rows.to(tl.float32)))


@triton.jit
def whitened_squares(
    table, values, owners, means, totals, grad: tl.constexpr, aligned: tl.constexpr, rows: tl.constexpr,
    cols: tl.constexpr,
):  # fmt: skip
    """(3): each tile's sum of squares of the whitened gradient."""
    job, matrix, i, j, row, col, num_rows, num_cols, inside = _tile(table, owners, aligned, rows, cols)
    u = _whitened(table, values, means, job, matrix, row, col, num_rows, num_cols, inside, grad, aligned)
    tl.store(totals + tl.program_id(0), tl.sum(tl.sum(u * u, 1), 0))


@triton.jit
def clip_factors(table, values, totals, clips, maximize: tl.constexpr, size: tl.constexpr):
    """(4): 1 / max(1, RMS(u) / d) of each parameter."""
    job = tl.program_id(0)
    fields = table + job * _WIDTH
    first = tl.load(fields + _FIRST)
    count = tl.load(fields + _MATRICES) * tl.load(fields + _DOWN) * tl.load(fields + _ACROSS)
    place = tl.arange(0, size)
    sums = tl.zeros((size,), tl.float32)
    for i in range(0, count, size):
        sums += tl.load(totals + first + i + place, i + place < count, other=0.0)
    ratio = tl.sqrt_rn(tl.sum(sums, 0) / tl.load(values + job * _COUNT + _SIZE))
    factor = 1.0 / tl.where(ratio < 1.0, 1.0, ratio)  # NaN stays NaN
    tl.store(clips + job, -factor if maximize else factor)


@triton.jit
def instability_parts(
    table, values, owners, means, clips, row_parts, col_parts, grad: tl.constexpr, momentum: tl.constexpr,
    bytes: tl.constexpr, aligned: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
):  # fmt: skip
    """(5) to (8): parts of the sums of (u - m)^2 / beta1^2; a momentum in fp32 is written back."""
    job, matrix, i, j, row, col, num_rows, num_cols, inside = _tile(table, owners, aligned, rows, cols)
    u = _whitened(table, values, means, job, matrix, row, col, num_rows, num_cols, inside, grad, aligned)
    m = _read_momentum(
        table, job, matrix, j, row, col, num_rows, num_cols, inside, momentum, bytes, aligned, rows, cols
    )
    clip = tl.load(clips + job)
    difference = _clipped(u, clip) * clip - m
    if momentum == "fp32":
        m += difference * tl.load(values + job * _COUNT + _GAIN1)
        place = _elements(matrix, row, col, num_rows, num_cols)
        tl.store(_pointer(table, job, _MOMENTUM, tl.float32, aligned) + place, m, inside)
    difference = tl.where(inside, difference, 0.0)
    _add_parts(difference * difference, table, row_parts, col_parts, job, matrix, i, j, row, col, num_rows, num_cols)


@triton.jit
def apply(
    table, values, owners, means, res_means, clips, param: tl.constexpr, grad: tl.constexpr, momentum: tl.constexpr,
    bytes: tl.constexpr, rounding: tl.constexpr, confidence: tl.constexpr, decays: tl.constexpr, aligned: tl.constexpr,
    rows: tl.constexpr, cols: tl.constexpr,
):  # fmt: skip
    """(9) and (10): the parameter, and the momentum where it was not yet written."""
    job, matrix, i, j, row, col, num_rows, num_cols, inside = _tile(table, owners, aligned, rows, cols)
    place = _elements(matrix, row, col, num_rows, num_cols)
    numbers = values + job * _COUNT
    written: tl.constexpr = momentum == "fp32" and confidence
    if momentum != "none":
        m = _read_momentum(
            table, job, matrix, j, row, col, num_rows, num_cols, inside, momentum, bytes, aligned, rows, cols
        )
    if not written:
        u = _whitened(table, values, means, job, matrix, row, col, num_rows, num_cols, inside, grad, aligned)
        clip = tl.load(clips + job)
        u = _clipped(u, clip) * clip
        if momentum == "none":
            m = u
        else:
            m += (u - m) * tl.load(numbers + _GAIN1)
    scale = tl.load(numbers + _SCALED)
    p = _read_weight(table, job, place, inside, param, rounding, aligned)
    if decays:
        p += p * tl.load(numbers + _DECAY)
    if confidence:
        lines = _pointer(table, job, _RES_ROW, tl.float32, False) + matrix * num_rows + row
        columns = _pointer(table, job, _RES_COL, tl.float32, False) + matrix * num_cols + col
        mean = tl.load(res_means + tl.load(table + job * _WIDTH + _FIRST_MATRIX) + matrix)
        a = tl.rsqrt(tl.load(lines, row < num_rows, other=1.0)) * mean * scale
        b = tl.rsqrt(tl.load(columns, col < num_cols, other=1.0))
        p += m * a[:, None] * b[None, :]
    else:
        p += m * scale
    _write_weight(p, table, values, job, place, inside, param, rounding, aligned)
    if momentum != "none" and not written:
        _write_momentum(
            m, table, values, job, matrix, j, row, col, num_rows, num_cols, inside, momentum, bytes, aligned, rows, cols
        )


# --- parameters with a full second moment: one row ----------------------------------------------------------------


@triton.jit
def _flat_tile(table, owners, aligned: tl.constexpr, size: tl.constexpr):
    """Of this program: its job, elements and which there are."""
    program = tl.program_id(0)
    job = tl.load(owners + program)
    fields = table + job * _WIDTH
    count = tl.load(fields + _NUM_COLS)
    if aligned:
        count = tl.multiple_of(count, 16)
    place = (program - tl.load(fields + _FIRST)) * size + tl.arange(0, size)
    return job, place, place < count


@triton.jit
def moment_squares(table, values, owners, totals, grad: tl.constexpr, aligned: tl.constexpr, size: tl.constexpr):
    """(1) without factors, and each tile's sum of squares of the whitened gradient."""
    job, place, inside = _flat_tile(table, owners, aligned, size)
    numbers = values + job * _COUNT
    g = tl.load(_pointer(table, job, _GRAD, grad, aligned) + place, inside, other=0.0).to(tl.float32)
    source = _pointer(table, job, _MOMENT, tl.float32, aligned) + place
    v = tl.load(source, inside, other=1.0) * tl.load(numbers + _BETA2) + tl.load(numbers + _BETA2 + 1)
    x = _bounded(g, _BOUND)
    v += x * x * tl.load(numbers + _BETA2 + 2)
    tl.store(source, v, inside)
    u = tl.rsqrt(v) * g * tl.load(numbers + _SECOND)
    tl.store(totals + tl.program_id(0), tl.sum(u * u, 0))


@triton.jit
def apply_moment(
    table, values, owners, clips, param: tl.constexpr, grad: tl.constexpr, momentum: tl.constexpr,
    rounding: tl.constexpr, decays: tl.constexpr, aligned: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """The parameter and its momentum, without confidence."""
    job, place, inside = _flat_tile(table, owners, aligned, size)
    numbers = values + job * _COUNT
    g = tl.load(_pointer(table, job, _GRAD, grad, aligned) + place, inside, other=0.0).to(tl.float32)
    v = tl.load(_pointer(table, job, _MOMENT, tl.float32, aligned) + place, inside, other=1.0)
    m = tl.rsqrt(v) * g * (tl.load(numbers + _SECOND) * tl.load(clips + job))
    if momentum != "none":
        kept = _pointer(table, job, _MOMENTUM, tl.float32, aligned) + place
        old = tl.load(kept, inside, other=0.0)
        m = old + (m - old) * tl.load(numbers + _GAIN1)
        tl.store(kept, m, inside)
    p = _read_weight(table, job, place, inside, param, rounding, aligned)
    if decays:
        p += p * tl.load(numbers + _DECAY)
    p += m * tl.load(numbers + _SCALED)
    _write_weight(p, table, values, job, place, inside, param, rounding, aligned)
