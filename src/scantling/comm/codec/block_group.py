"""Which way each parameter's momentum travels: what is cut into blocks, transformed, and how much of it is sent.

A channel is a set of blocks that are treated alike: one size, one number of coefficients, one format, one decay. All
parameters of a channel are encoded in one batch.

- A parameter of two dims and more with the role `matrix` goes by blocks of up to chunk x chunk, of whose cosine
  transform a share of topk / chunk^2 is sent, rounded, at least one: a small or narrow block sends less.
- Everything else (embeddings, vectors, what is smaller than `MIN_NUMBERS`) is dense: rows of up to `ROW` numbers, all
  of which are sent, without a transform. A row follows the last dim, or where that is short all dims: each row has a
  scale.

Where everything travels ("dense", see `rounds.py`), blocks are single numbers: matrices and the rest as they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from scantling.comm.codec import dct, triton
from scantling.comm.codec.blocks import BlockGrid, even_side, make_grid
from scantling.comm.codec.quantize import Values
from scantling.comm.codec.topk import TopKCodec
from scantling.errors import UserError
from scantling.groups import MatrixDims, default_matrix_dims

MIN_NUMBERS = 4096
ROW = 128
"""Longest row of a dense channel that has a scale of its own."""
MOST_NUMBERS = 1 << 24
"""Of one channel, so that what is held beside the residuals stays small; a larger parameter has one to itself."""
MOST_ON_DEVICE = 1 << 26
"""The same where launches cost more than memory does."""


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """A parameter in a channel.

    Attributes:
        param: its position among all parameters of the groups.
        grid: how it is cut.
    """

    param: int
    grid: BlockGrid


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """What the members of a channel have in common.

    Attributes:
        section: what of a block is sent.
        height, width: of a block.
        is_matrix: whether it goes by blocks, and not densely.
        transformed: whether it is the cosine transform that is sent.
        decay: of the residual, each step.
        alpha: share of what was sent that is taken out of the residual.
    """

    codec: TopKCodec
    height: int
    width: int
    is_matrix: bool
    transformed: bool
    decay: float
    alpha: float

    @property
    def is_exact(self) -> bool:
        """Whether everything is sent as it is, so that no residual is left."""
        return self.codec.is_dense and self.codec.values == "fp32" and self.alpha == 1.0


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Members that are encoded in one batch."""

    spec: BlockSpec
    slots: tuple[ParamSlot, ...]

    @property
    def count(self) -> int:
        """Blocks of all members."""
        return sum(slot.grid.count for slot in self.slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of a message about all blocks."""
        return self.spec.codec.num_bytes(self.count)

    def to_blocks(self, values: Mapping[int, Tensor]) -> Tensor:
        """Coefficients of the members' tensors, given by position, in fp32: (count, height * width)."""
        device = values[self.slots[0].param].device
        blocks = torch.empty(self.count, self.spec.height, self.spec.width, dtype=torch.float32, device=device)
        for slot, part in zip(self.slots, self._parts(blocks), strict=True):
            slot.grid.to_blocks(values[slot.param], out=part)
        return (dct.forward(blocks) if self.spec.transformed else blocks).flatten(1)

    def from_blocks(self, coefficients: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The members' tensors of coefficients, (count, height * width): (position of the parameter, tensor)."""
        blocks = coefficients.view(-1, self.spec.height, self.spec.width)
        yield from self._pasted(dct.inverse(blocks) if self.spec.transformed else blocks)

    def decode_sparse(self, index: Tensor | None, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """As `paste`, of what a section sent, or of what several did beside each other."""
        height, width = self.spec.height, self.spec.width
        if index is None:
            yield from self.from_blocks(values)
            return
        if values.device.type in triton.DEVICES:
            found = {slot.param: values.new_empty(slot.grid.shape) for slot in self.slots}
            if triton.can_add(self, values, list(found.values())):
                triton.add(self, index, values, 1.0, list(found.values()), begins=True)
                yield from found.items()
                return
        if not self.spec.transformed:
            found = {slot.param: values.new_zeros(slot.grid.shape) for slot in self.slots}
            self.add_sparse(index, values, 1.0, to=found.__getitem__)
            yield from found.items()
        elif values.shape[1] <= width // 2:
            yield from self._pasted(dct.inverse_sparse(index, values, height, width))
        else:
            yield from self.from_blocks(self._filled(index, values))

    def add_sparse(self, index: Tensor | None, values: Tensor, alpha: float, to: Callable[[int], Tensor]) -> None:
        """Add what `paste_sent` gives, times alpha, to tensors by position."""
        if index is not None and values.device.type in triton.DEVICES:
            tensors = [to(slot.param) for slot in self.slots]
            if triton.can_add(self, values, tensors):
                triton.add(self, index, values, alpha, tensors)
                return
        if index is None or self.spec.transformed:
            for place, value in self.decode_sparse(index, values):
                to(place).add_(value, alpha=alpha)
            return
        scaled = values if alpha == 1.0 else alpha * values
        for slot, places, numbers in zip(self.slots, self._parts(index), self._parts(scaled), strict=True):
            tensor, grid = to(slot.param), slot.grid
            if not grid.lies_flat(tensor):
                tensor.add_(grid.from_blocks(self._filled(places, numbers).view(-1, self.spec.height, self.spec.width)))
                continue
            kept = self.spec.codec.kept
            for own, part in zip(
                torch.split(places, kept, 1), torch.split(numbers, kept, 1), strict=True
            ):  # one sender at a time
                grid.add(own, part, to=tensor)

    def _filled(self, index: Tensor, values: Tensor) -> Tensor:
        """All coefficients of blocks of which some were sent: (count, height * width)."""
        filled = values.new_zeros(len(values), self.spec.codec.size)
        kept = self.spec.codec.kept
        for own, part in zip(torch.split(index, kept, 1), torch.split(values, kept, 1), strict=True):
            self.spec.codec.add(own, part, to=filled)
        return filled

    def _parts(self, blocks: Tensor) -> Sequence[Tensor]:
        """Those of each member."""
        return torch.split(blocks, [slot.grid.count for slot in self.slots])

    def _pasted(self, blocks: Tensor) -> Iterator[tuple[int, Tensor]]:
        for slot, part in zip(self.slots, self._parts(blocks), strict=True):
            yield slot.param, slot.grid.from_blocks(part)


def is_block_matrix(shape: tuple[int, ...], numel: int, role: str | None) -> bool:
    """True if a parameter is a matrix of which the exchange has a momentum; others are exchanged as gradients."""
    return role in (None, "matrix") and len(shape) >= 2 and numel >= MIN_NUMBERS


def make_spec(
    shape: tuple[int, ...], numel: int, group: dict[str, Any], *, whole: bool = False
) -> tuple[BlockSpec, BlockGrid]:
    """How a parameter travels.

    Args:
        shape: of it, or of the part of it that this process holds.
        numel: of the whole parameter, which decides whether it is small.
        group: its group, with the options of `MomentumExchange`, and `role` and `matrix_dims`.
        whole: whether all of it travels.
    """
    chunk, topk, values = group["chunk"], group["topk"], group["values"]
    dense: Values = group["dense"]
    paper = group["compat"] == "paper"
    is_matrix = paper or is_block_matrix(shape, numel, group["role"])
    if whole:
        codec, decay = TopKCodec(1, 1, "fp32" if dense == "fp32" else "bf16"), group["decay"] if is_matrix else 1.0
        return BlockSpec(codec, 1, 1, is_matrix, False, decay, 1.0), BlockGrid(
            shape, ((), tuple(range(len(shape)))), 1, 1
        )
    if is_matrix:
        rows, cols = group["matrix_dims"] or (default_matrix_dims(len(shape)) if len(shape) > 1 else _row(shape))
        view: MatrixDims = tuple(rows), tuple(cols)  # lists cannot be hashed, as channels are on a GPU
        dims = [*rows, *cols]
        if len(set(dims)) < len(dims) or not set(dims) <= set(range(len(shape))) or (len(shape) > 1 and not view[1]):
            raise UserError(f"matrix_dims must be dims of shape {shape}, of rows and of columns; given {view!r}")
        grid = make_grid(shape, view, chunk, divide=paper)
        size = grid.height * grid.width
        kept = min(topk, size) if paper else max(1, min(size, round(topk * size / chunk**2)))
        codec, transformed = TopKCodec(size, kept, values), group["transform"] == "dct"
        return BlockSpec(codec, grid.height, grid.width, True, transformed, group["decay"], group["alpha"]), grid
    view = _row(shape) if shape and shape[-1] >= ROW // 2 else ((), tuple(range(len(shape))))
    grid = BlockGrid(shape, view, 1, even_side(prod(shape[dim] for dim in view[1]), ROW))
    return BlockSpec(TopKCodec(grid.width, grid.width, dense), grid.height, grid.width, False, False, 1.0, 1.0), grid


def group_blocks(
    shapes: Mapping[int, tuple[int, ...]],
    numels: Mapping[int, int],
    groups: Sequence[dict[str, Any]],
    *,
    whole: bool = False,
    most: int = MOST_NUMBERS,
) -> list[BlockGroup]:
    """The channels of parameters, in an order that depends on shapes and options alone.

    Args:
        shapes: of the parameters, or of the parts of them that this process holds, by their positions.
        numels: of the whole parameters.
        groups: of all parameters.
        whole: whether everything travels.
        most: numbers of a channel.
    """
    open_ones: dict[BlockSpec, list[ParamSlot]] = {}
    found: list[BlockGroup] = []
    for position, shape in shapes.items():
        spec, grid = make_spec(shape, numels[position], groups[position], whole=whole)
        if not grid.count:
            continue
        slots = open_ones.setdefault(spec, [])
        size = spec.height * spec.width
        if slots and size * (grid.count + sum(slot.grid.count for slot in slots)) > most:
            found.append(BlockGroup(spec, tuple(slots)))
            slots.clear()
        slots.append(ParamSlot(position, grid))
    return [*found, *(BlockGroup(spec, tuple(slots)) for spec, slots in open_ones.items())]


def _row(shape: tuple[int, ...]) -> MatrixDims:
    """The last dim along the row, the others below each other; one row where there is but one dim, or none."""
    dims = tuple(range(len(shape)))
    return dims[:-1], dims[-1:]
