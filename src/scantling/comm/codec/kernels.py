"""The codec's work on blocks on a GPU, a program for each block of a channel, in Triton.

A program finds in a table which parameter its block is of. It reads the block once, where it lies; the transform, and
the search for the largest coefficients, are between that and what it writes.

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
    """Of this program's block: its fields, and the matrix, row and column where it begins."""
    block = tl.program_id(0)
    fields = table + tl.load(owners + block) * _WIDTH
    down, across = tl.load(fields + _DOWN), tl.load(fields + _ACROSS)
    place = block - tl.load(fields + _FIRST)
    matrix, place = place // (down * across), place % (down * across)
    return fields, matrix, place // across * height, place % across * width


@triton.jit
def _elements(
    table, owners, height: tl.constexpr, width: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
    aligned: tl.constexpr,
):  # fmt: skip
    """Fields, places of the block's numbers in the tensor, which there are, and rows and columns within the block."""
    fields, matrix, first_row, first_col = _corner(table, owners, height, width)
    rows, cols = tl.load(fields + _ROWS), tl.load(fields + _COLS)
    if aligned:
        cols = tl.multiple_of(cols, 4)
        first_col = tl.multiple_of(first_col, 4)
    i, j = tl.arange(0, down), tl.max_contiguous(tl.arange(0, across), across)
    row, col = first_row + i, first_col + j
    inside = ((i < height) & (row < rows))[:, None] & ((j < width) & (col < cols))[None, :]
    return fields, (matrix * rows + row)[:, None] * cols + col[None, :], inside, i, j


@triton.jit
def _square(basis, side: tl.constexpr):
    place = tl.arange(0, side)
    return tl.load(basis + place[:, None] * side + place[None, :])


@triton.jit
def select(
    table, owners, down_basis, across_basis, index, values, kept, decay, gradient: tl.constexpr, height: tl.constexpr,
    width: tl.constexpr, down: tl.constexpr, across: tl.constexpr, transformed: tl.constexpr,
    precision: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """r <- g + decay r, and the `kept` largest numbers of each block of it, or of its transform, in ascending places.

    Args:
        down_basis, across_basis: (down, down) and (across, across), rows and columns of zeros where a block is smaller.
        index, values: (blocks, kept), what is selected.
        gradient: dtype of the gradients.
        height, width: of a block; `down` and `across` are powers of 2 that are at least as large.
        precision: of products, as of `tl.dot`.
    """
    fields, place, inside, i, j = _elements(table, owners, height, width, down, across, aligned)
    target = pointer(table, fields + _TENSOR, tl.float32, aligned) + place
    g = tl.load(pointer(table, fields + _GRADIENT, gradient, aligned) + place, inside, other=0.0).to(tl.float32)
    x = g + decay * tl.load(target, inside, other=0.0)
    tl.store(target, x, inside)
    if transformed:
        x = tl.dot(_square(down_basis, down), x, input_precision=precision)
        x = tl.dot(x, tl.trans(_square(across_basis, across)), input_precision=precision)
    known = (i < height)[:, None] & (j < width)[None, :]
    key = tl.where(known, tl.abs(x).to(tl.int32, bitcast=True), -1)
    least = 0  # what `kept` keys reach, bit by bit from the highest: they are ordered as the magnitudes are
    for step in range(31):
        trial = least | (1 << (30 - step))
        reached = tl.sum(tl.sum((key >= trial).to(tl.int32), 1), 0)
        least = tl.where(reached >= kept, trial, least)
    flat = tl.reshape(key, (down * across,))
    above, equal = (flat > least).to(tl.int32), (flat == least).to(tl.int32)
    chosen = (above == 1) | ((equal == 1) & (tl.cumsum(equal, 0) <= kept - tl.sum(above, 0)))
    position = tl.program_id(0).to(tl.int64) * kept + tl.cumsum(chosen.to(tl.int32), 0) - 1
    within = tl.reshape(i[:, None] * width + j[None, :], (down * across,))
    tl.store(index + position, within.to(tl.int64), chosen)
    tl.store(values + position, tl.reshape(x, (down * across,)), chosen)


@triton.jit
def add_transformed(
    table, owners, down_basis, across_basis, index, values, count, alpha, height: tl.constexpr, width: tl.constexpr,
    down: tl.constexpr, across: tl.constexpr, begins: tl.constexpr, precision: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """Add alpha times the inverse transform of a few coefficients of each block; `begins` writes it in their place.

    Args:
        index, values: (blocks, count); those of one place are added in their order.
    """
    fields, place, inside, i, j = _elements(table, owners, height, width, down, across, aligned)
    coefficients = tl.zeros((down, across), tl.float32)
    first = tl.program_id(0).to(tl.int64) * count
    for n in range(count):
        at = tl.load(index + first + n).to(tl.int32)
        here = (i == at // width)[:, None] & (j == at % width)[None, :]
        coefficients += tl.where(here, tl.load(values + first + n), 0.0)
    x = tl.dot(tl.trans(_square(down_basis, down)), coefficients, input_precision=precision)
    x = tl.dot(x, _square(across_basis, across), input_precision=precision) * alpha
    target = pointer(table, fields + _TENSOR, tl.float32, aligned) + place
    if not begins:
        x += tl.load(target, inside, other=0.0)
    tl.store(target, x, inside)


@triton.jit
def add_numbers(
    table, owners, index, values, count, first, kept, alpha, height: tl.constexpr, width: tl.constexpr,
    size: tl.constexpr,
):  # fmt: skip
    """Add alpha times some numbers of each block, those from `first` on, of which no two have one place.

    Args:
        index, values: (blocks, count).
        kept: how many are added; `size` is a power of 2 that is at least as large.
    """
    fields, matrix, first_row, first_col = _corner(table, owners, height, width)
    rows, cols = tl.load(fields + _ROWS), tl.load(fields + _COLS)
    n = tl.arange(0, size)
    source = tl.program_id(0).to(tl.int64) * count + first + n
    at = tl.load(index + source, n < kept, other=0)
    row, col = first_row + at // width, first_col + at % width
    there = (n < kept) & (row < rows) & (col < cols)
    target = pointer(table, fields + _TENSOR, tl.float32, False) + (matrix * rows + row) * cols + col
    tl.store(target, tl.load(target, there) + alpha * tl.load(values + source, there), there)
