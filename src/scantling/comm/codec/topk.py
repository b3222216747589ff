"""Blocks of one kind as bytes: which of their numbers are sent, and these numbers in few bits.

A section is the indices of all blocks (numerics/elias_fano.py), then their values. Sparse blocks send `kept` of their
`size` numbers, dense ones all, and then no indices. Sections have a length that is known beforehand, so that no sizes
need be exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scantling.comm.codec.blocks import slices
from scantling.comm.codec.quantize import Values, dequantize, quantize, quantized_bytes
from scantling.errors import PayloadError
from scantling.numerics.elias_fano import indices_bytes, pack_indices, unpack_indices

GROUP = 4
"""Numbers of a block of which the largest stands for all, where a CPU selects."""


@dataclass(frozen=True, slots=True)
class TopKCodec:
    """How blocks of one kind are sent.

    Attributes:
        size: numbers in a block.
        kept: how many of them are sent, the largest ones.
        values: format of these.
    """

    size: int
    kept: int
    values: Values

    @property
    def is_dense(self) -> bool:
        return self.kept == self.size

    def num_bytes(self, count: int) -> int:
        """Bytes of so many blocks."""
        return self._index_bytes(count) + quantized_bytes(count, self.kept, self.values)

    def _index_bytes(self, count: int) -> int:
        return 0 if self.is_dense else indices_bytes(count, self.kept, self.size)

    def select(self, blocks: Tensor) -> tuple[Tensor | None, Tensor]:
        """The largest numbers of blocks, and where they are.

        Args:
            blocks: (count, size).

        Returns:
            Index (count, kept) int64 in ascending order, None where all are kept; values (count, kept).
        """
        if self.is_dense:
            return None, blocks
        index = largest(blocks, self.kept).sort(dim=1).values
        return index, blocks.gather(1, index)

    def pack(self, index: Tensor | None, values: Tensor) -> Tensor:
        """Bytes of blocks: (`num_bytes(count)`,) uint8."""
        coded = quantize(values, self.values)
        return coded if index is None else torch.cat([pack_indices(index, self.size), coded])

    def as_received(self, index: Tensor | None, values: Tensor) -> tuple[Tensor | None, Tensor]:
        """What `unpack` makes of what `pack` makes of it: places as they are, values after their way in few bits."""
        count, length = values.shape
        return index, dequantize(quantize(values, self.values), count, length, self.values)

    def unpack(self, packed: Tensor, count: int) -> tuple[Tensor | None, Tensor]:
        """What the sender of blocks meant: index and values, as `select` gives them.

        Raises:
            PayloadError: bytes of another number of blocks.
        """
        if packed.numel() != self.num_bytes(count):
            raise PayloadError(f"{count} blocks take {self.num_bytes(count)} bytes; {packed.numel()} came")
        cut = self._index_bytes(count)
        values = dequantize(packed[cut:], count, self.kept, self.values)
        if self.is_dense:
            return None, values
        return unpack_indices(packed[:cut], count, self.kept, self.size), values

    def add(self, index: Tensor | None, values: Tensor, to: Tensor) -> None:
        """Add what blocks sent to what is there: (count, size). No two places of a block are the same."""
        if index is None:
            to += values
        else:
            to.scatter_add_(1, index, values)


def largest(blocks: Tensor, kept: int) -> Tensor:
    """Where the numbers of the largest magnitude are: (count, kept) int64, in any order.

    On a CPU, where the time of a selection is that of what it selects from, only among the groups of `GROUP` numbers
    that have the largest maxima: `kept` groups hold them all.

    Args:
        blocks: (count, size).
        kept: how many of each block, at most its size.
    """
    return torch.cat([_largest(part.abs(), kept) for part in slices(blocks)])


def _largest(magnitudes: Tensor, kept: int) -> Tensor:
    groups, left = divmod(magnitudes.shape[1], GROUP)
    if magnitudes.device.type != "cpu" or left or 4 * kept > 3 * groups:
        return _top(magnitudes, kept)
    group = _top(magnitudes.view(-1, GROUP, groups).amax(1), kept)
    places = (group[:, None] + groups * torch.arange(GROUP)[:, None]).flatten(1)
    return places.gather(1, _top(magnitudes.gather(1, places), kept))


def _top(values: Tensor, kept: int) -> Tensor:
    return values.topk(kept, dim=1, sorted=False).indices
