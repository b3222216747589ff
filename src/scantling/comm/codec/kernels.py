"""Triton kernels of the codec.

Those of blocks have one program per block of a block group. A program looks up the parameter of its block in a table.
It reads the block from the parameter once, transforms it or searches for its largest coefficients on chip, and writes
the result. Those of messages write and read the bits of packed blocks, and their checksums.

Launched by triton.py; the PyTorch versions are in blocks.py, dct.py, topk.py, quantize.py and numerics/elias_fano.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from scantling.numerics import bits
from scantling.numerics.kernels import pointer

FIELDS = ("tensor", "gradient", "first", "rows", "cols", "down", "across", "kind", "gradient_kind", "scales")
"""Columns of the parameter table: addresses of the tensor and of its gradient, index of its first block, the sides of
its matrices in elements and in blocks, both dtypes as indices of `FLOATS`, -1 for no gradient, and the address of the
scales of int8 residuals."""

_WIDTH: tl.constexpr = tl.constexpr(len(FIELDS))
_TENSOR: tl.constexpr = tl.constexpr(FIELDS.index("tensor"))
_GRADIENT: tl.constexpr = tl.constexpr(FIELDS.index("gradient"))
_FIRST: tl.constexpr = tl.constexpr(FIELDS.index("first"))
_ROWS: tl.constexpr = tl.constexpr(FIELDS.index("rows"))
_COLS: tl.constexpr = tl.constexpr(FIELDS.index("cols"))
_DOWN: tl.constexpr = tl.constexpr(FIELDS.index("down"))
_ACROSS: tl.constexpr = tl.constexpr(FIELDS.index("across"))
_KIND: tl.constexpr = tl.constexpr(FIELDS.index("kind"))
_GRADIENT_KIND: tl.constexpr = tl.constexpr(FIELDS.index("gradient_kind"))
_SCALES: tl.constexpr = tl.constexpr(FIELDS.index("scales"))
_ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer
_SMALLEST: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # smallest normal fp32 number
_ODD: tl.constexpr = tl.constexpr(bits._ODD)
_OTHER_ODD: tl.constexpr = tl.constexpr(bits._OTHER_ODD)


@triton.jit
def _corner(table, owners, height: tl.constexpr, width: tl.constexpr):
    """Return the table row of this program's block, and the matrix, row and column of its first element."""
    block = tl.program_id(0)
    fields = table + tl.load(owners + block) * _WIDTH
    down, across = tl.load(fields + _DOWN), tl.load(fields + _ACROSS)
    # Block of the parameter -> matrix of the stack, block row, block column
    index = block - tl.load(fields + _FIRST)
    matrix, index = index // (down * across), index % (down * across)
    return fields, matrix, index // across * height, index % across * width


@triton.jit
def _elements(
    table, owners, height: tl.constexpr, width: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
    aligned: tl.constexpr,
):  # fmt: skip
    """Return the table row, offsets and mask of the block's elements in the tensor, rows and columns."""
    fields, matrix, first_row, first_col = _corner(table, owners, height, width)
    rows, cols = tl.load(fields + _ROWS), tl.load(fields + _COLS)
    # Let the compiler load four elements at a time.
    if aligned:
        cols = tl.multiple_of(cols, 4)
        first_col = tl.multiple_of(first_col, 4)
    i, j = tl.arange(0, down), tl.max_contiguous(tl.arange(0, across), across)
    row, col = first_row + i, first_col + j
    # The tile has sides of powers of 2: mask its surplus and the padding at the edges of the matrix.
    inside = ((i < height) & (row < rows))[:, None] & ((j < width) & (col < cols))[None, :]
    return fields, (matrix * rows + row)[:, None] * cols + col[None, :], inside, i, j


@triton.jit
def _row_scales(table, fields, offset, mask, width: tl.constexpr):
    """Return pointers to the scales of a block's rows, which share one each, and a mask of the rows inside."""
    at = pointer(table, fields + _SCALES, tl.float32, False) + tl.min(offset, 1) // width
    return at, tl.max(mask.to(tl.int32), 1) > 0


@triton.jit
def _load_residual(table, fields, offset, mask, width: tl.constexpr, coded: tl.constexpr, aligned: tl.constexpr):
    """Return residuals in fp32; `coded` ones are stored in int8 with a scale for each row of a block."""
    if coded:
        code = tl.load(pointer(table, fields + _TENSOR, tl.int8, False) + offset, mask, other=0).to(tl.float32)
        scales, there = _row_scales(table, fields, offset, mask, width)
        scale = tl.load(scales, there, other=0.0)
        r = code / 127.0 * scale[:, None]
    else:
        r = tl.load(pointer(table, fields + _TENSOR, tl.float32, aligned) + offset, mask, other=0.0)
    return r


@triton.jit
def _store_residual(
    table, fields, offset, mask, x, seed, i, j, width: tl.constexpr, coded: tl.constexpr, aligned: tl.constexpr
):
    """Store residuals; `coded` ones by stochastic rounding, floor(127 x / scale + noise)."""
    if not coded:
        tl.store(pointer(table, fields + _TENSOR, tl.float32, aligned) + offset, x, mask)
    else:
        largest = tl.max(tl.where(mask, tl.abs(x), 0.0), 1)
        noise = tl.rand(seed + tl.program_id(0), i[:, None] * width + j[None, :])
        steps = tl.floor(x / tl.maximum(largest, _SMALLEST)[:, None] * 127.0 + noise)
        code = tl.minimum(tl.maximum(steps, -127.0), 127.0).to(tl.int8)
        tl.store(pointer(table, fields + _TENSOR, tl.int8, False) + offset, code, mask)
        scales, there = _row_scales(table, fields, offset, mask, width)
        tl.store(scales, largest, there)


@triton.jit
def _load(table, entry, kind, offset, mask, aligned: tl.constexpr):
    """Return elements, in fp32, of the tensor whose address is in a table entry; zeros if it has no kind."""
    if kind == 0:
        x = tl.load(pointer(table, entry, tl.float32, aligned) + offset, mask, other=0.0)
    elif kind == 1:
        x = tl.load(pointer(table, entry, tl.bfloat16, aligned) + offset, mask, other=0.0).to(tl.float32)
    elif kind == 2:
        x = tl.load(pointer(table, entry, tl.float16, aligned) + offset, mask, other=0.0).to(tl.float32)
    else:
        x = tl.zeros(offset.shape, tl.float32)
    return x


@triton.jit
def _add_as(table, entry, kind: tl.constexpr, offset, mask, x, overwrite: tl.constexpr, aligned: tl.constexpr):
    target = pointer(table, entry, kind, aligned) + offset
    if not overwrite:
        x += tl.load(target, mask, other=0.0).to(tl.float32)
    tl.store(target, x.to(kind), mask)


@triton.jit
def _add(table, entry, kind, offset, mask, x, overwrite: tl.constexpr, aligned: tl.constexpr):
    """Add fp32 values to elements of the tensor whose address is in a table entry; `overwrite` replaces them."""
    if kind == 0:
        _add_as(table, entry, tl.float32, offset, mask, x, overwrite, aligned)
    elif kind == 1:
        _add_as(table, entry, tl.bfloat16, offset, mask, x, overwrite, aligned)
    else:
        _add_as(table, entry, tl.float16, offset, mask, x, overwrite, aligned)


@triton.jit
def _load_basis(basis, side: tl.constexpr):
    i = tl.arange(0, side)
    return tl.load(basis + i[:, None] * side + i[None, :])


@triton.jit
def _sum_products(
    left, right, index, values, count, width: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
    size: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Return the sum over coefficients of v left[u]^T right[w], (down, across): of bases, the inverse transform.

    Args:
        left, right: (down, down) and (across, across).
        index, values: of this program's coefficients; (u, w) is the position `index` in a block of this width.
        count: number of coefficients.
        size: coefficients in one product, a power of 2 of at least 16.
    """
    i, j, n = tl.arange(0, down), tl.arange(0, across), tl.arange(0, size)
    x = tl.zeros((down, across), tl.float32)
    # In order: equal coefficients of several senders add up to the same bits on all replicas.
    for first in range(0, count, size):
        known = first + n < count
        at = tl.load(index + first + n, known, other=0).to(tl.int32)
        v = tl.load(values + first + n, known, other=0.0)
        rows = tl.load(left + (at // width)[:, None] * down + i[None, :]) * v[:, None]
        columns = tl.load(right + (at % width)[:, None] * across + j[None, :])
        x += tl.dot(tl.trans(rows), columns, input_precision=precision)
    return x


@triton.jit
def _write_largest(
    x, i, j, index, values, k, height: tl.constexpr, width: tl.constexpr, down: tl.constexpr, across: tl.constexpr
):
    """Write the k largest elements of a block (height, width), padded to (down, across), by ascending index.

    Args:
        index, values: of this program's block, each of k elements.
    """
    # Magnitudes as integers; padding is smaller than all of them.
    known = (i < height)[:, None] & (j < width)[None, :]
    key = tl.where(known, tl.abs(x).to(tl.int32, bitcast=True), -1)
    least = 0  # k-th largest key, found bit by bit: as integers, magnitudes keep their order
    for step in range(31):
        trial = least | (1 << (30 - step))
        reached = tl.sum(tl.sum((key >= trial).to(tl.int32), 1), 0)
        least = tl.where(reached >= k, trial, least)
    # All keys above the k-th largest, and the first equal ones until there are k.
    flat = tl.reshape(key, (down * across,))
    above, equal = (flat > least).to(tl.int32), (flat == least).to(tl.int32)
    chosen = (above == 1) | ((equal == 1) & (tl.cumsum(equal, 0) <= k - tl.sum(above, 0)))
    position = tl.cumsum(chosen.to(tl.int32), 0) - 1  # prefix sums keep the order of indices
    # Indices count in a block of height x width, not in the padded tile.
    within = tl.reshape(i[:, None] * width + j[None, :], (down * across,))
    tl.store(index + position, within.to(tl.int64), chosen)
    tl.store(values + position, tl.reshape(x, (down * across,)), chosen)


@triton.jit(do_not_specialize=("seed",))
def select(
    table, owners, down_basis, across_basis, sent_index, sent_values, sent, index, values, k, decay, seed,
    height: tl.constexpr, width: tl.constexpr, down: tl.constexpr, across: tl.constexpr, size: tl.constexpr,
    transformed: tl.constexpr, precision: tl.constexpr, coded: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """Update r <- g + decay (r - s), and select the k largest elements of each block or of its transform.

    The elements are those before the rounding of `coded` residuals.

    Args:
        down_basis, across_basis: (down, down) and (across, across), padded with zeros.
        sent_index, sent_values: (blocks, sent), coefficients of s; `sent` is 0 without a transform or with `coded`.
        index, values: (blocks, k), written, by ascending index.
        seed: of the rounding; program n takes seed + n.
        height, width: of a block; `down` and `across` are powers of 2 of at least that size.
        size: coefficients of s in one product.
        precision: of products, as of `tl.dot`.
    """
    fields, offset, inside, i, j = _elements(table, owners, height, width, down, across, aligned)
    block = tl.program_id(0).to(tl.int64)  # blocks * k can exceed 2^31
    r = _load_residual(table, fields, offset, inside, width, coded, aligned)
    # (4) of exchange.py for the previous exchange, then (1) in fp32: M <- g + decay (M - s). Padding is zero.
    if transformed and not coded:  # noqa: SIM102  (known when the kernel compiles)
        if sent > 0:
            s = _sum_products(
                down_basis, across_basis, sent_index + block * sent, sent_values + block * sent, sent, width, down,
                across, size, precision,
            )  # fmt: skip
            r = tl.where(inside, r - s, 0.0)
    x = _load(table, fields + _GRADIENT, tl.load(fields + _GRADIENT_KIND), offset, inside, aligned) + decay * r
    _store_residual(table, fields, offset, inside, x, seed, i, j, width, coded, aligned)
    # Q = C_h B C_w^T
    if transformed:
        x = tl.dot(_load_basis(down_basis, down), x, input_precision=precision)
        x = tl.dot(x, tl.trans(_load_basis(across_basis, across)), input_precision=precision)
    _write_largest(x, i, j, index + block * k, values + block * k, k, height, width, down, across)


@triton.jit
def select_again(
    down_units, across_units, sent_index, sent_values, sent, senders, index, values, k, height: tl.constexpr,
    width: tl.constexpr, down: tl.constexpr, across: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Select the k largest elements of the mean of the coefficients that several replicas sent of each block.

    Args:
        down_units, across_units: unit matrices (down, down) and (across, across).
        sent_index, sent_values: (blocks, sent), of all senders.
        senders: number of them.
        index, values: (blocks, k), written, by ascending index.
    """
    block = tl.program_id(0).to(tl.int64)
    x = _sum_products(
        down_units, across_units, sent_index + block * sent, sent_values + block * sent, sent, width, down, across,
        size, "ieee",
    )  # fmt: skip
    i, j = tl.arange(0, down), tl.arange(0, across)
    _write_largest(x / senders, i, j, index + block * k, values + block * k, k, height, width, down, across)


@triton.jit
def accumulate_rows(
    table, owners, values, decay, height: tl.constexpr, width: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
    keeps: tl.constexpr,
):  # fmt: skip
    """Update r <- g + decay r, and write all elements of each block to `values` (blocks, height * width).

    Without `keeps`, there is no r: the elements of g are written.
    """
    fields, offset, inside, i, j = _elements(table, owners, height, width, down, across, False)
    x = _load(table, fields + _GRADIENT, tl.load(fields + _GRADIENT_KIND), offset, inside, False)
    if keeps:
        target = pointer(table, fields + _TENSOR, tl.float32, False) + offset
        x += decay * tl.load(target, inside, other=0.0)
        tl.store(target, x, inside)
    known = (i < height)[:, None] & (j < width)[None, :]
    to = values + tl.program_id(0).to(tl.int64) * (height * width)
    tl.store(to + i[:, None] * width + j[None, :], tl.where(inside, x, 0.0), known)


@triton.jit
def add_rows(
    table, owners, values, scale, height: tl.constexpr, width: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
    overwrite: tl.constexpr,
):  # fmt: skip
    """Add scale times all elements of each block, `values` (blocks, height * width); `overwrite` writes instead."""
    fields, offset, inside, i, j = _elements(table, owners, height, width, down, across, False)
    source = values + tl.program_id(0).to(tl.int64) * (height * width)
    x = tl.load(source + i[:, None] * width + j[None, :], inside, other=0.0) * scale
    _add(table, fields + _TENSOR, tl.load(fields + _KIND), offset, inside, x, overwrite, False)


@triton.jit
def add_transformed(
    table, owners, down_basis, across_basis, index, values, count, scale, height: tl.constexpr, width: tl.constexpr,
    down: tl.constexpr, across: tl.constexpr, size: tl.constexpr, overwrite: tl.constexpr, precision: tl.constexpr,
    aligned: tl.constexpr,
):  # fmt: skip
    """Add scale times the inverse transform of some coefficients of each block; `overwrite` writes instead.

    Args:
        index, values: (blocks, count); equal indices of a block are added in order.
        size: coefficients in one product.
    """
    fields, offset, inside, i, j = _elements(table, owners, height, width, down, across, aligned)
    first = tl.program_id(0).to(tl.int64) * count
    x = _sum_products(
        down_basis, across_basis, index + first, values + first, count, width, down, across, size, precision
    )  # fmt: skip
    _add(table, fields + _TENSOR, tl.load(fields + _KIND), offset, inside, x * scale, overwrite, aligned)


@triton.jit(do_not_specialize=("seed",))
def add_to_coded(
    table, owners, down_basis, across_basis, index, values, count, scale, seed, height: tl.constexpr,
    width: tl.constexpr, down: tl.constexpr, across: tl.constexpr, size: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Add as `add_transformed` to int8 residuals, by stochastic rounding; program n takes seed + n.

    With unit matrices as bases, coefficients are elements.
    """
    fields, offset, inside, i, j = _elements(table, owners, height, width, down, across, False)
    first = tl.program_id(0).to(tl.int64) * count
    x = _sum_products(
        down_basis, across_basis, index + first, values + first, count, width, down, across, size, precision
    )  # fmt: skip
    x = _load_residual(table, fields, offset, inside, width, True, False) + x * scale
    _store_residual(table, fields, offset, inside, x, seed, i, j, width, True, False)


@triton.jit
def add_numbers(
    table, owners, index, values, count, first, k, scale, height: tl.constexpr, width: tl.constexpr,
    size: tl.constexpr,
):  # fmt: skip
    """Add scale times the elements from `first` on of each block; their indices must differ.

    Args:
        index, values: (blocks, count).
        k: number of elements to add; `size` is a power of 2 of at least k.
    """
    fields, matrix, first_row, first_col = _corner(table, owners, height, width)
    rows, cols = tl.load(fields + _ROWS), tl.load(fields + _COLS)
    n = tl.arange(0, size)
    source = tl.program_id(0).to(tl.int64) * count + first + n
    at = tl.load(index + source, n < k, other=0)
    row, col = first_row + at // width, first_col + at % width
    # Coefficients in the padding have no element in the matrix.
    there = (n < k) & (row < rows) & (col < cols)
    # No atomics: one program owns a block, and the indices of one sender differ.
    x = scale * tl.load(values + source, there, other=0.0)
    offset = (matrix * rows + row) * cols + col
    _add(table, fields + _TENSOR, tl.load(fields + _KIND), offset, there, x, False, False)


@triton.jit
def mask_unselected(index, values, selected, count, k, size: tl.constexpr):
    """Set to zero the values of each block whose index is not among those selected.

    Args:
        index, values: (blocks, count); `size` is a power of 2 of at least `count`.
        selected: (blocks, k).
    """
    block, n = tl.program_id(0).to(tl.int64), tl.arange(0, size)
    at = tl.load(index + block * count + n, n < count, other=-1)
    found = tl.zeros((size,), tl.int32)
    for number in range(k):
        found |= (at == tl.load(selected + block * k + number)).to(tl.int32)
    tl.store(values + block * count + n, 0.0, (n < count) & (found == 0))


@triton.jit
def _write_bits(words, bit, value, mask):
    """Set the bits of integers of up to 32 bits, from bit positions on, in 32-bit words of zeros."""
    word, shifted = bit // 32, (value.to(tl.int64) & 0xFFFFFFFF) << (bit % 32)
    # Or is exact in any order: no two integers share a bit.
    tl.atomic_or(words + word, shifted.to(tl.int32), mask)
    above = (shifted >> 32).to(tl.int32)
    tl.atomic_or(words + word + 1, above, mask & (above != 0))


@triton.jit
def _to_bf16(v):
    """Return the bits of fp32 values rounded to the nearest bf16 value, as int32."""
    bits = v.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _read_bits(bytes, bit, bits: tl.constexpr, length, mask):
    """Return integers of up to 24 bits, or of 32 from whole bytes, that begin at bit positions, as int32.

    Args:
        bytes: the bytes, `length` in number.
        bit: positions of the lowest bits.
        bits: of an integer.
    """
    at = bit // 8
    found = tl.zeros(bit.shape, tl.int32)
    for number in tl.static_range((bits + 7 + 7) // 8 if bits < 32 else 4):
        byte = tl.load(bytes + at + number, mask & (at + number < length), other=0).to(tl.int32)
        found |= byte << (8 * number)
    if bits < 32:
        found = (found >> (bit % 8).to(tl.int32)) & ((1 << bits) - 1)
    return found


@triton.jit(do_not_specialize=("rows_at", "codes_at", "scales_at"))
def pack(
    index, values, words, k, rows_at, codes_at, scales_at, low: tl.constexpr, row: tl.constexpr, bits: tl.constexpr,
    levels: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Pack the indices and values of blocks, as `TopKCodec.pack` does; one program for each block.

    Args:
        index, values: (blocks, k).
        words: zeros, written.
        rows_at, codes_at, scales_at: byte at which the high parts, the codes and the scales begin.
        low: low bits of an index, 0 for none; without indices, -1.
        row: bits of the high parts of a block.
        bits: of a code.
        levels: largest code of an integer format, 0 for another.
        size: a power of 2 of at least k.
    """
    block, n = tl.program_id(0).to(tl.int64), tl.arange(0, size)
    rows_at, codes_at, scales_at = rows_at.to(tl.int64), codes_at.to(tl.int64), scales_at.to(tl.int64)  # as bits
    known = n < k
    number = block * k + n
    v = tl.load(values + number, known, other=0.0)
    if low >= 0:
        at = tl.load(index + number, known, other=0)
        if low > 0:
            _write_bits(words, number * low, at & ((1 << low) - 1), known)
        if row > 0:
            _write_bits(words, rows_at * 8 + block * row + (at >> low) + n, known.to(tl.int64), known)
    if bits == 32:
        code = v.to(tl.int32, bitcast=True)
    elif bits == 16:
        code = _to_bf16(v)
    else:
        if bits == 1:
            scale = _to_bf16(tl.sum(tl.abs(v), 0) / k)
            code = (v > 0.0).to(tl.int32)
        else:
            scale = _to_bf16(tl.max(tl.abs(v), 0))
            steps = v / tl.maximum((scale << 16).to(tl.float32, bitcast=True), _SMALLEST) * levels
            rounded = (steps + _ROUND) - _ROUND
            code = tl.minimum(tl.maximum(rounded, -levels), levels).to(tl.int32) + (levels + 1)
        # One lane writes the scale.
        _write_bits(words, scales_at * 8 + block * 16 + n * 0, scale + n * 0, n == 0)
    _write_bits(words, codes_at * 8 + number * bits, code, known)


@triton.jit(do_not_specialize=("rows_at", "codes_at", "scales_at"))
def unpack(
    bytes, index, values, length, k, last, rows_at, codes_at, scales_at, low: tl.constexpr,
    row: tl.constexpr, bits: tl.constexpr, levels: tl.constexpr, size: tl.constexpr, row_size: tl.constexpr,
):  # fmt: skip
    """Unpack what `pack` packed: write index and values, (blocks, k).

    Args:
        bytes: the packed blocks, `length` bytes.
        last: largest index.
        row_size: a power of 2 of at least `row`.
    """
    block, n = tl.program_id(0).to(tl.int64), tl.arange(0, size)
    rows_at, codes_at, scales_at = rows_at.to(tl.int64), codes_at.to(tl.int64), scales_at.to(tl.int64)  # as bits
    known = n < k
    number, to = block * k + n, block * k
    if low >= 0:
        if row > 0:
            # Index number i has its 1 bit at position high + i.
            m = tl.arange(0, row_size)
            bit = _read_bits(bytes, rows_at * 8 + block * row + m, 1, length, m < row)
            i = tl.cumsum(bit, 0) - 1
            there = (bit == 1) & (m < row) & (i < k)
            at = ((m - i) << low).to(tl.int64)
            if low > 0:
                at += _read_bits(bytes, (block * k + i) * low, low, length, there).to(tl.int64)
            tl.store(index + to + i, tl.minimum(at, last), there)
        else:
            at = _read_bits(bytes, number * low, low, length, known).to(tl.int64)
            tl.store(index + to + n, tl.minimum(at, last), known)
    code = _read_bits(bytes, codes_at * 8 + number * bits, bits, length, known)
    if bits == 32:
        v = code.to(tl.float32, bitcast=True)
    elif bits == 16:
        v = (code << 16).to(tl.float32, bitcast=True)
    else:
        short = _read_bits(bytes, scales_at * 8 + block * 16 + n * 0, 16, length, known)
        scale = (short << 16).to(tl.float32, bitcast=True)
        if bits == 1:
            v = (2 * code - 1).to(tl.float32) * scale
        else:
            v = (code - (levels + 1)).to(tl.float32) / levels * scale
    tl.store(values + to + n, v, known)


@triton.jit
def add_checksum(message, length, total, front: tl.constexpr, size: tl.constexpr):
    """Add the checksum of a message, without the checksum that it holds, to `total`; see numerics/bits.py.

    Args:
        message: `length` bytes.
        front: bytes before the 8 bytes of the checksum.
        size: 8-byte words of a program.
    """
    word = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    start = tl.where(word < front // 8, word * 8, word * 8 + 8)  # after the front come 8 bytes to be left out
    value = tl.zeros((size,), tl.int64)
    for number in tl.static_range(8):
        byte = tl.load(message + start + number, start + number < length, other=0).to(tl.int64)
        value |= byte << (8 * number)
    mixed = (value ^ ((word + 1) * _OTHER_ODD)) * _ODD
    mixed ^= (mixed >> 32) & 0xFFFFFFFF  # a logical shift: int64 shifts copy the sign
    mixed *= _OTHER_ODD
    mixed ^= (mixed >> 29) & 0x7FFFFFFFF
    tl.atomic_add(total, tl.sum(tl.where(start < length, mixed, 0), 0))
