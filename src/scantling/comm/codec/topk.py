"""Codec of blocks: select the k largest coefficients of each block, and pack their indices and quantized values.

A packed message has the indices of all blocks first (see numerics/elias_fano.py), then the values. A dense block
needs no indices. The length is known beforehand, so that sizes are never exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scantling.comm.codec import triton
from scantling.comm.codec.blocks import split_for_cache
from scantling.comm.codec.quantize import BITS, dequantize, quantize, quantized_bytes
from scantling.comm.config import Values
from scantling.errors import PayloadError
from scantling.numerics.bits import packed_bytes
from scantling.numerics.block_quantizer import BlockQuantizer
from scantling.numerics.elias_fano import index_layout, indices_bytes, pack_indices, unpack_indices

GROUP = 4
"""Elements of a block that share one maximum in the first pass of a selection on a CPU."""


@dataclass(frozen=True, slots=True)
class TopKCodec:
    """Selection, packing and unpacking of blocks of one size.

    Attributes:
        size: elements of a block.
        k: largest elements of a block to send.
        values: format of these.
    """

    size: int
    k: int
    values: Values

    @property
    def is_dense(self) -> bool:
        return self.k == self.size

    def num_bytes(self, count: int) -> int:
        """Return the bytes of `count` packed blocks."""
        return self._index_bytes(count) + quantized_bytes(count, self.k, self.values)

    def _index_bytes(self, count: int) -> int:
        return 0 if self.is_dense else indices_bytes(count, self.k, self.size)

    @property
    def index_layout(self) -> tuple[int, int]:
        """Low bits of an index, and bits of the high parts of a block; see numerics/elias_fano.py."""
        return index_layout(self.k, self.size)

    @property
    def value_bits(self) -> int:
        """Bits of a value in a message."""
        return BITS[self.values]

    @property
    def levels(self) -> int:
        """Largest code of an integer format; 0 for other formats."""
        return BlockQuantizer(self.value_bits).levels if self.values in ("int8", "int4") else 0

    def offsets(self, count: int) -> tuple[int, int, int]:
        """Return the bytes at which the high parts of the indices, the codes and the scales of packed blocks begin."""
        rows = 0 if self.is_dense else packed_bytes(count * self.k, self.index_layout[0])
        codes = self._index_bytes(count)
        return rows, codes, codes + packed_bytes(count * self.k, self.value_bits)

    def select(self, blocks: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the k elements of largest magnitude of each block.

        Args:
            blocks: (count, size).

        Returns:
            Index (count, k) int64 in ascending order, or None if the codec is dense; values (count, k).
        """
        if self.is_dense:
            return None, blocks
        # Elias-Fano coding needs ascending indices.
        index = topk_indices(blocks, self.k).sort(dim=1).values
        return index, blocks.gather(1, index)

    def pack(self, index: Tensor | None, values: Tensor) -> Tensor:
        """Return selected elements as bytes: (`num_bytes(count)`,) uint8."""
        if triton.can_pack(self, values):
            return triton.pack(self, index, values)
        coded = quantize(values, self.values)
        return coded if index is None else torch.cat([pack_indices(index, self.size), coded])

    def unpack(self, packed: Tensor, count: int) -> tuple[Tensor | None, Tensor]:
        """Return index and values, as `select` does, of packed blocks.

        Raises:
            PayloadError: the bytes are those of another number of blocks.
        """
        if packed.numel() != self.num_bytes(count):
            raise PayloadError(f"{count} blocks take {self.num_bytes(count)} bytes; received {packed.numel()}")
        if triton.can_pack(self, packed):
            return triton.unpack(self, packed, count)
        start = self._index_bytes(count)
        values = dequantize(packed[start:], count, self.k, self.values)
        if self.is_dense:
            return None, values
        return unpack_indices(packed[:start], count, self.k, self.size), values

    def round_trip(self, index: Tensor | None, values: Tensor) -> tuple[Tensor | None, Tensor]:
        """Pack and unpack: return the same indices, and the values as they are after quantization."""
        count, length = values.shape
        if triton.can_pack(self, values):
            return index, triton.unpack(self, triton.pack(self, index, values), count)[1]
        return index, dequantize(quantize(values, self.values), count, length, self.values)

    def add(self, index: Tensor | None, values: Tensor, to: Tensor) -> None:
        """Add elements to blocks (count, size) in place; the indices of a block must differ."""
        if index is None:
            to += values
        else:
            to.scatter_add_(1, index, values)


def topk_indices(blocks: Tensor, k: int) -> Tensor:
    """Return the indices of the k elements of largest magnitude: (count, k) int64, unordered.

    On a CPU, the time of `topk` grows with its input. Only the k groups of `GROUP` elements with the
    largest maxima are searched: these contain the k largest elements.

    Args:
        blocks: (count, size).
        k: at most size.
    """
    return torch.cat([_topk_by_group(part.abs(), k) for part in split_for_cache(blocks)])


def _topk_by_group(magnitudes: Tensor, k: int) -> Tensor:
    groups, rest = divmod(magnitudes.shape[1], GROUP)
    # Search all elements if the groups do not divide a block, or if few groups could be left out.
    if magnitudes.device.type != "cpu" or rest or 4 * k > 3 * groups:
        return _topk(magnitudes, k)
    # Group j has the elements j, j + groups, j + 2 groups, ...: maxima over contiguous rows.
    group = _topk(magnitudes.view(-1, GROUP, groups).amax(1), k)  # (count, k)
    candidates = (group[:, None] + groups * torch.arange(GROUP)[:, None]).flatten(1)  # (count, GROUP * k)
    # Positions among the candidates -> indices in the block: (count, k)
    return candidates.gather(1, _topk(magnitudes.gather(1, candidates), k))


def _topk(values: Tensor, k: int) -> Tensor:
    return values.topk(k, dim=1, sorted=False).indices
