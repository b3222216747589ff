"""Division of matrices into blocks of one size, with zero padding at the edges.

A side of length L is divided into ceil(L / chunk) parts of equal length. The last part is padded, by fewer elements
than there are parts, so that every length works, prime lengths too. `divisor_side` is the rule of the published code:
the largest divisor up to the chunk, which is 1 for a prime length (arXiv 2411.19870).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from scantling.groups import MatrixDims

CACHED = 1 << 18
"""Elements that fit into a CPU's cache together with the result of an operation on them."""


@dataclass(frozen=True)
class BlockGrid:
    """Division of a parameter, seen as a stack of matrices, into blocks.

    Attributes:
        shape: of the parameter, or of this process's shard.
        view: (row dims, column dims); the other dims index the matrices of the stack.
        height, width: of a block.
    """

    shape: tuple[int, ...]
    view: MatrixDims
    height: int
    width: int

    @cached_property
    def stack(self) -> int:
        return prod(size for dim, size in enumerate(self.shape) if dim not in (*self.view[0], *self.view[1]))

    @cached_property
    def rows(self) -> int:
        return prod(self.shape[dim] for dim in self.view[0])

    @cached_property
    def cols(self) -> int:
        return prod(self.shape[dim] for dim in self.view[1])

    @cached_property
    def down(self) -> int:
        """Blocks along the rows' dim."""
        return -(-self.rows // self.height) if self.rows else 0

    @cached_property
    def across(self) -> int:
        """Blocks along the columns' dim."""
        return -(-self.cols // self.width) if self.cols else 0

    @cached_property
    def count(self) -> int:
        """Number of blocks."""
        return self.stack * self.down * self.across

    @cached_property
    def _order(self) -> list[int]:
        named = (*self.view[0], *self.view[1])
        # Stack dims first, then the dims of rows and of columns
        return [*(dim for dim in range(len(self.shape)) if dim not in named), *named]

    @cached_property
    def _inverse(self) -> list[int]:
        return [self._order.index(dim) for dim in range(len(self._order))]

    @cached_property
    def is_padded(self) -> bool:
        return self.down * self.height > self.rows or self.across * self.width > self.cols

    def to_blocks(self, value: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the blocks of a tensor of `shape`: (count, height, width); written to `out` if given, in its dtype."""
        if out is None:
            out = value.new_empty(self.count, self.height, self.width)
        # Single elements (dense exchange): only reorder the dims.
        if self.height == self.width == 1:
            out.view([self.shape[dim] for dim in self._order]).copy_(value.permute(self._order))
            return out
        # shape -> (stack, rows, cols)
        matrices = value.permute(self._order).reshape(self.stack, self.rows, self.cols)
        if self.is_padded:
            # `pad` counts from the last dim: left, right, top, bottom.
            padding = (0, self.across * self.width - self.cols, 0, self.down * self.height - self.rows)
            matrices = torch.nn.functional.pad(matrices, padding)
        # (stack, rows, cols) -> (stack, down, across, height, width)
        blocks = matrices.view(self.stack, self.down, self.height, self.across, self.width).transpose(2, 3)
        out.view(blocks.shape).copy_(blocks)
        return out

    def from_blocks(self, blocks: Tensor) -> Tensor:
        """Return the tensor of `shape` that has these blocks; padding is dropped."""
        # Single elements: a view with reordered dims, no copy.
        if self.height == self.width == 1:
            return blocks.view([self.shape[dim] for dim in self._order]).permute(self._inverse)
        # (stack, down, across, height, width) -> (stack, rows, cols), without the padding
        parts = blocks.view(self.stack, self.down, self.across, self.height, self.width).transpose(2, 3)
        padded = parts.reshape(self.stack, self.down * self.height, self.across * self.width)
        matrices = padded[:, : self.rows, : self.cols].reshape([self.shape[dim] for dim in self._order])
        return matrices.permute(self._inverse)

    def is_row_major(self, value: Tensor) -> bool:
        """Return True if the rows of all matrices of a tensor of `shape` follow each other in memory."""
        return value.is_contiguous() and self._order == sorted(self._order)

    def scatter_add(self, index: Tensor, values: Tensor, to: Tensor) -> None:
        """Add elements of each block to a tensor of `shape` in place; padding is dropped.

        Args:
            index: (count, k) int64 positions in a flattened block, distinct within a block.
            values: (count, k).
            to: a tensor for which `is_row_major` holds.
        """
        # Position of each element: block -> (matrix, block row, block column) -> row and column of the matrix.
        block = torch.arange(self.count, device=index.device)[:, None]
        within, across = block // self.across, block % self.across
        row = (within % self.down) * self.height + index // self.width
        column = across * self.width + index % self.width
        # Elements in the padding become zeros at the last row or column.
        if self.is_padded:
            values = values * ((row < self.rows) & (column < self.cols))
            row, column = row.clamp(max=self.rows - 1), column.clamp(max=self.cols - 1)
        flat = ((within // self.down) * self.rows + row) * self.cols + column
        # Only padding shares a position with another element, and adds 0: the order of sums does not matter.
        to.view(-1).scatter_add_(0, flat.flatten(), values.flatten())


def make_grid(shape: tuple[int, ...], view: MatrixDims, chunk: int, *, divide: bool = False) -> BlockGrid:
    """Return the grid of a parameter.

    Args:
        shape: of the parameter.
        view: (row dims, column dims).
        chunk: longest side of a block.
        divide: use divisors as sides, without padding, as in the published code.
    """
    rows, cols = (prod(shape[dim] for dim in dims) for dims in view)
    side = divisor_side if divide else even_side
    return BlockGrid(shape, view, side(rows, chunk), side(cols, chunk))


def even_side(length: int, chunk: int) -> int:
    """Return the side of blocks that divide a length into as few equal parts as a chunk allows."""
    return -(-length // max(1, -(-length // chunk)))


def divisor_side(length: int, chunk: int) -> int:
    """Return the largest divisor of a length that is at most the chunk."""
    return next(side for side in range(min(length, chunk), 0, -1) if length % side == 0) if length else 0


def split_for_cache(blocks: Tensor) -> Sequence[Tensor]:
    """Split blocks (count, ...) into parts that fit into a CPU's cache; on other devices there is one part."""
    size = max(1, blocks.shape[1:].numel())
    return torch.split(blocks, max(1, CACHED // size)) if blocks.device.type == "cpu" else [blocks]
