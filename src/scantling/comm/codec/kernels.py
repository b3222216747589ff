"""Triton kernels of the codec, with one program per block of a block group.

A program looks up the parameter of its block in a table. It reads the block from the parameter once, transforms it or
searches for its largest coefficients on chip, and writes the result.

Launched by triton.py; the PyTorch versions are in blocks.py, dct.py and topk.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from scantling.numerics.kernels import pointer

FIELDS = ("tensor", "gradient", "first", "rows", "cols", "down", "across")
"""Columns of the parameter table: addresses of the tensor and of its gradient, index of its first block, and the sides
of its matrices in elements and in blocks."""

_WIDTH: tl.constexpr = tl.constexpr(len(FIELDS))
_TENSOR: tl.constexpr = tl.constexpr(FIELDS.index("tensor"))
_GRADIENT: tl.constexpr = tl.constexpr(FIELDS.index("gradient"))
_FIRST: tl.constexpr = tl.constexpr(FIELDS.index("first"))
_ROWS: tl.constexpr = tl.constexpr(FIELDS.index("rows"))
_COLS: tl.constexpr = tl.constexpr(FIELDS.index("cols"))
_DOWN: tl.constexpr = tl.constexpr(FIELDS.index("down"))
_ACROSS: tl.constexpr = tl.constexpr(FIELDS.index("across"))


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
def _load_basis(basis, side: tl.constexpr):
    i = tl.arange(0, side)
    return tl.load(basis + i[:, None] * side + i[None, :])


@triton.jit
def select(
    table, owners, down_basis, across_basis, index, values, k, decay, gradient: tl.constexpr, height: tl.constexpr,
    width: tl.constexpr, down: tl.constexpr, across: tl.constexpr, transformed: tl.constexpr,
    precision: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """Update r <- g + decay r, and select the k largest elements of each block or of its transform, by ascending index.

    Args:
        down_basis, across_basis: (down, down) and (across, across), padded with zeros.
        index, values: (blocks, k), written.
        gradient: dtype of the gradients.
        height, width: of a block; `down` and `across` are powers of 2 of at least that size.
        precision: of products, as of `tl.dot`.
    """
    fields, offset, inside, i, j = _elements(table, owners, height, width, down, across, aligned)
    # (1) of exchange.py in fp32: M <- g + decay M, which reads zeros in the padding.
    target = pointer(table, fields + _TENSOR, tl.float32, aligned) + offset
    g = tl.load(pointer(table, fields + _GRADIENT, gradient, aligned) + offset, inside, other=0.0).to(tl.float32)
    x = g + decay * tl.load(target, inside, other=0.0)
    tl.store(target, x, inside)
    # Q = C_h B C_w^T
    if transformed:
        x = tl.dot(_load_basis(down_basis, down), x, input_precision=precision)
        x = tl.dot(x, tl.trans(_load_basis(across_basis, across)), input_precision=precision)
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
    # Prefix sums keep the order of indices. int64, since blocks * k can exceed 2^31.
    position = tl.program_id(0).to(tl.int64) * k + tl.cumsum(chosen.to(tl.int32), 0) - 1
    # Indices count in a block of height x width, not in the padded tile.
    within = tl.reshape(i[:, None] * width + j[None, :], (down * across,))
    tl.store(index + position, within.to(tl.int64), chosen)
    tl.store(values + position, tl.reshape(x, (down * across,)), chosen)


@triton.jit
def add_transformed(
    table, owners, down_basis, across_basis, index, values, count, scale, height: tl.constexpr, width: tl.constexpr,
    down: tl.constexpr, across: tl.constexpr, overwrite: tl.constexpr, precision: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """Add scale times the inverse transform of a few coefficients of each block; `overwrite` writes instead.

    Args:
        index, values: (blocks, count); equal indices of a block are added in order.
    """
    fields, offset, inside, i, j = _elements(table, owners, height, width, down, across, aligned)
    # Scatter the coefficients into a block on chip, then B = C_h^T Q C_w.
    coefficients = tl.zeros((down, across), tl.float32)
    first = tl.program_id(0).to(tl.int64) * count
    # In order: equal indices of several senders add up to the same bits on all replicas.
    for n in range(count):
        at = tl.load(index + first + n).to(tl.int32)
        here = (i == at // width)[:, None] & (j == at % width)[None, :]
        coefficients += tl.where(here, tl.load(values + first + n), 0.0)
    x = tl.dot(tl.trans(_load_basis(down_basis, down)), coefficients, input_precision=precision)
    x = tl.dot(x, _load_basis(across_basis, across), input_precision=precision) * scale
    target = pointer(table, fields + _TENSOR, tl.float32, aligned) + offset
    if not overwrite:
        x += tl.load(target, inside, other=0.0)
    tl.store(target, x, inside)


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
    target = pointer(table, fields + _TENSOR, tl.float32, False) + (matrix * rows + row) * cols + col
    # No atomics: one program owns a block, and the indices of one sender differ.
    tl.store(target, tl.load(target, there) + scale * tl.load(values + source, there), there)
