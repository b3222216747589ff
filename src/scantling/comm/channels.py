"""Which way each parameter's momentum travels: what is cut into blocks, transformed, and how much of it is sent.

A channel is a set of blocks that are treated alike: one size, one number of coefficients, one format, one decay. All
parameters of a channel are encoded in one batch.

- A parameter of two dims and more with the role `matrix` goes by blocks of up to chunk x chunk, of whose cosine
  transform a share of topk / chunk^2 is sent, rounded, at least one: a small or narrow block sends less.
- Everything else (embeddings, vectors, what is smaller than `MIN_NUMBERS`) is dense: rows of up to `ROW` numbers, all
  of which are sent, without a transform. A row follows the last dim, or where that is short all dims: each row has a
  scale.

Where everything travels ("whole", see `rounds.py`), blocks are single numbers: matrices and the rest as they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from scantling.comm import dct, fused
from scantling.comm.blocks import Grid, even_side, grid_of
from scantling.comm.section import Section
from scantling.comm.values import Values
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
class Member:
    """A parameter in a channel.

    Attributes:
        param: its position among all parameters of the groups.
        grid: how it is cut.
    """

    param: int
    grid: Grid


@dataclass(frozen=True, slots=True)
class Kind:
    """What the members of a channel have in common.

    Attributes:
        section: what of a block is sent.
        height, width: of a block.
        is_matrix: whether it goes by blocks, and not densely.
        transformed: whether it is the cosine transform that is sent.
        decay: of the residual, each step.
        alpha: share of what was sent that is taken out of the residual.
    """

    section: Section
    height: int
    width: int
    is_matrix: bool
    transformed: bool
    decay: float
    alpha: float

    @property
    def is_exact(self) -> bool:
        """Whether everything is sent as it is, so that no residual is left."""
        return self.section.is_dense and self.section.values == "fp32" and self.alpha == 1.0


@dataclass(frozen=True, slots=True)
class Channel:
    """Members that are encoded in one batch."""

    kind: Kind
    members: tuple[Member, ...]

    @property
    def count(self) -> int:
        """Blocks of all members."""
        return sum(member.grid.count for member in self.members)

    @property
    def num_bytes(self) -> int:
        """Bytes of a message about all blocks."""
        return self.kind.section.num_bytes(self.count)

    def cut(self, values: Mapping[int, Tensor]) -> Tensor:
        """Coefficients of the members' tensors, given by position, in fp32: (count, height * width)."""
        device = values[self.members[0].param].device
        blocks = torch.empty(self.count, self.kind.height, self.kind.width, dtype=torch.float32, device=device)
        for member, part in zip(self.members, self._parts(blocks), strict=True):
            member.grid.cut(values[member.param], out=part)
        return (dct.forward(blocks) if self.kind.transformed else blocks).flatten(1)

    def paste(self, coefficients: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The members' tensors of coefficients, (count, height * width): (position of the parameter, tensor)."""
        blocks = coefficients.view(-1, self.kind.height, self.kind.width)
        yield from self._pasted(dct.inverse(blocks) if self.kind.transformed else blocks)

    def paste_sent(self, index: Tensor | None, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """As `paste`, of what a section sent, or of what several did beside each other."""
        height, width = self.kind.height, self.kind.width
        if index is None:
            yield from self.paste(values)
            return
        if values.device.type in fused.DEVICES:
            found = {member.param: values.new_empty(member.grid.shape) for member in self.members}
            if fused.can_add(self, values, list(found.values())):
                fused.add(self, index, values, 1.0, list(found.values()), begins=True)
                yield from found.items()
                return
        if not self.kind.transformed:
            found = {member.param: values.new_zeros(member.grid.shape) for member in self.members}
            self.add_sent(index, values, 1.0, to=found.__getitem__)
            yield from found.items()
        elif values.shape[1] <= width // 2:
            yield from self._pasted(dct.inverse_sparse(index, values, height, width))
        else:
            yield from self.paste(self._filled(index, values))

    def add_sent(self, index: Tensor | None, values: Tensor, alpha: float, to: Callable[[int], Tensor]) -> None:
        """Add what `paste_sent` gives, times alpha, to tensors by position."""
        if index is not None and values.device.type in fused.DEVICES:
            tensors = [to(member.param) for member in self.members]
            if fused.can_add(self, values, tensors):
                fused.add(self, index, values, alpha, tensors)
                return
        if index is None or self.kind.transformed:
            for place, value in self.paste_sent(index, values):
                to(place).add_(value, alpha=alpha)
            return
        scaled = values if alpha == 1.0 else alpha * values
        for member, places, numbers in zip(self.members, self._parts(index), self._parts(scaled), strict=True):
            tensor, grid = to(member.param), member.grid
            if not grid.lies_flat(tensor):
                tensor.add_(grid.paste(self._filled(places, numbers).view(-1, self.kind.height, self.kind.width)))
                continue
            kept = self.kind.section.kept
            for own, part in zip(
                torch.split(places, kept, 1), torch.split(numbers, kept, 1), strict=True
            ):  # one sender at a time
                grid.add(own, part, to=tensor)

    def _filled(self, index: Tensor, values: Tensor) -> Tensor:
        """All coefficients of blocks of which some were sent: (count, height * width)."""
        filled = values.new_zeros(len(values), self.kind.section.size)
        kept = self.kind.section.kept
        for own, part in zip(torch.split(index, kept, 1), torch.split(values, kept, 1), strict=True):
            self.kind.section.add(own, part, to=filled)
        return filled

    def _parts(self, blocks: Tensor) -> Sequence[Tensor]:
        """Those of each member."""
        return torch.split(blocks, [member.grid.count for member in self.members])

    def _pasted(self, blocks: Tensor) -> Iterator[tuple[int, Tensor]]:
        for member, part in zip(self.members, self._parts(blocks), strict=True):
            yield member.param, member.grid.paste(part)


def goes_by_blocks(shape: tuple[int, ...], numel: int, role: str | None) -> bool:
    """True if a parameter is a matrix of which the exchange has a momentum; others are exchanged as gradients."""
    return role in (None, "matrix") and len(shape) >= 2 and numel >= MIN_NUMBERS


def kind_and_grid(
    shape: tuple[int, ...], numel: int, group: dict[str, Any], *, whole: bool = False
) -> tuple[Kind, Grid]:
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
    is_matrix = paper or goes_by_blocks(shape, numel, group["role"])
    if whole:
        section, decay = Section(1, 1, "fp32" if dense == "fp32" else "bf16"), group["decay"] if is_matrix else 1.0
        return Kind(section, 1, 1, is_matrix, False, decay, 1.0), Grid(shape, ((), tuple(range(len(shape)))), 1, 1)
    if is_matrix:
        rows, cols = group["matrix_dims"] or (default_matrix_dims(len(shape)) if len(shape) > 1 else _row(shape))
        view: MatrixDims = tuple(rows), tuple(cols)  # lists cannot be hashed, as channels are on a GPU
        dims = [*rows, *cols]
        if len(set(dims)) < len(dims) or not set(dims) <= set(range(len(shape))) or (len(shape) > 1 and not view[1]):
            raise UserError(f"matrix_dims must be dims of shape {shape}, of rows and of columns; given {view!r}")
        grid = grid_of(shape, view, chunk, divide=paper)
        size = grid.height * grid.width
        kept = min(topk, size) if paper else max(1, min(size, round(topk * size / chunk**2)))
        section, transformed = Section(size, kept, values), group["transform"] == "dct"
        return Kind(section, grid.height, grid.width, True, transformed, group["decay"], group["alpha"]), grid
    view = _row(shape) if shape and shape[-1] >= ROW // 2 else ((), tuple(range(len(shape))))
    grid = Grid(shape, view, 1, even_side(prod(shape[dim] for dim in view[1]), ROW))
    return Kind(Section(grid.width, grid.width, dense), grid.height, grid.width, False, False, 1.0, 1.0), grid


def channels_of(
    shapes: Mapping[int, tuple[int, ...]],
    numels: Mapping[int, int],
    groups: Sequence[dict[str, Any]],
    *,
    whole: bool = False,
    most: int = MOST_NUMBERS,
) -> list[Channel]:
    """The channels of parameters, in an order that depends on shapes and options alone.

    Args:
        shapes: of the parameters, or of the parts of them that this process holds, by their positions.
        numels: of the whole parameters.
        groups: of all parameters.
        whole: whether everything travels.
        most: numbers of a channel.
    """
    open_ones: dict[Kind, list[Member]] = {}
    found: list[Channel] = []
    for position, shape in shapes.items():
        kind, grid = kind_and_grid(shape, numels[position], groups[position], whole=whole)
        if not grid.count:
            continue
        members = open_ones.setdefault(kind, [])
        size = kind.height * kind.width
        if members and size * (grid.count + sum(member.grid.count for member in members)) > most:
            found.append(Channel(kind, tuple(members)))
            members.clear()
        members.append(Member(position, grid))
    return [*found, *(Channel(kind, tuple(members)) for kind, members in open_ones.items())]


def _row(shape: tuple[int, ...]) -> MatrixDims:
    """The last dim along the row, the others below each other; one row where there is but one dim, or none."""
    dims = tuple(range(len(shape)))
    return dims[:-1], dims[-1:]
