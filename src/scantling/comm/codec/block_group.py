"""Groups of blocks that are encoded together: one block size, one number of coefficients, one format, one decay.

Encoding is batched: the blocks of all parameters of a group are transformed, selected and packed in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scantling.comm.codec import dct, triton
from scantling.comm.codec.blocks import BlockGrid
from scantling.comm.codec.topk import TopKCodec


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """A parameter in a block group.

    Attributes:
        param: index among all parameters of the exchange.
        grid: its division into blocks.
    """

    param: int
    grid: BlockGrid


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Common properties of the blocks of a group.

    Attributes:
        codec: selects and packs coefficients.
        height, width: of a block.
        is_matrix: True if the momentum of the parameters is sent, False if their gradients are.
        transformed: True if the cosine transform of a block is sent.
        decay: of the residual in each step.
    """

    codec: TopKCodec
    height: int
    width: int
    is_matrix: bool
    transformed: bool
    decay: float

    @property
    def is_sparse(self) -> bool:
        """True for blocks of matrices and embeddings, which send a part of their elements."""
        return self.is_matrix or self.height > 1 or not self.codec.is_dense

    @property
    def is_exact(self) -> bool:
        """True if everything is sent without loss, which leaves no residual."""
        return self.codec.is_dense and self.codec.values == "fp32"


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Parameters that are encoded in one batch."""

    spec: BlockSpec
    slots: tuple[ParamSlot, ...]

    @property
    def count(self) -> int:
        """Number of blocks of all parameters."""
        return sum(slot.grid.count for slot in self.slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of a message with all blocks."""
        return self.spec.codec.num_bytes(self.count)

    def to_blocks(self, tensors: Mapping[int, Tensor]) -> Tensor:
        """Return the coefficients of tensors, given by parameter index: (count, height * width) fp32."""
        device = tensors[self.slots[0].param].device
        # One buffer for the blocks of all parameters, in fp32 whatever their dtype: (count, height, width)
        blocks = torch.empty(self.count, self.spec.height, self.spec.width, dtype=torch.float32, device=device)
        for slot, part in zip(self.slots, self._split(blocks), strict=True):
            slot.grid.to_blocks(tensors[slot.param], out=part)
        return (dct.forward(blocks) if self.spec.transformed else blocks).flatten(1)

    def from_blocks(self, coefficients: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (parameter index, tensor) of coefficients (count, height * width)."""
        blocks = coefficients.view(-1, self.spec.height, self.spec.width)
        yield from self._assemble(dct.inverse(blocks) if self.spec.transformed else blocks)

    def decode_sparse(
        self, index: Tensor | None, values: Tensor, dtypes: Mapping[int, torch.dtype] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (parameter index, tensor) of selected coefficients, from one sender or several side by side.

        Args:
            index: (count, senders * k) positions within a flattened block; None if all coefficients were sent.
            values: (count, senders * k).
            dtypes: by parameter index, in which a GPU writes the tensors of matrices; the others are in fp32.
        """
        height, width = self.spec.height, self.spec.width
        # On a GPU, one kernel transforms and writes the tensors.
        if values.device.type in triton.DEVICES:
            wanted = dtypes if dtypes is not None and self.spec.is_matrix else {}
            tensors = {
                slot.param: values.new_empty(slot.grid.shape, dtype=wanted.get(slot.param, torch.float32))
                for slot in self.slots
            }
            if triton.can_add(self, index, list(tensors.values())):
                triton.add(self, index, values, 1.0, list(tensors.values()), overwrite=True)
                yield from tensors.items()
                return
        if index is None:
            yield from self.from_blocks(values)
            return
        # Without a transform, scatter into zeros; no block is built.
        if not self.spec.transformed:
            tensors = {slot.param: values.new_zeros(slot.grid.shape) for slot in self.slots}
            self.add_sparse(index, values, 1.0, to=tensors.__getitem__)
            yield from tensors.items()
        elif values.shape[1] <= width // 2:  # cheaper than filling whole blocks
            yield from self._assemble(dct.inverse_sparse(index, values, height, width))
        else:
            yield from self.from_blocks(self._fill(index, values))

    def add_sparse(self, index: Tensor | None, values: Tensor, scale: float, to: Callable[[int], Tensor]) -> None:
        """Decode as `decode_sparse`, and add the result times `scale` to the tensors `to(parameter index)`."""
        if values.device.type in triton.DEVICES:
            tensors = [to(slot.param) for slot in self.slots]
            if triton.can_add(self, index, tensors):
                triton.add(self, index, values, scale, tensors)
                return
        if index is None or self.spec.transformed:
            for idx, value in self.decode_sparse(index, values):
                to(idx).add_(value, alpha=scale)
            return
        # Without a transform, scatter the values straight into the tensor.
        scaled = values if scale == 1.0 else scale * values
        k = self.spec.codec.k
        for slot, positions, part in zip(self.slots, self._split(index), self._split(scaled), strict=True):
            tensor, grid = to(slot.param), slot.grid
            # Flat positions need row-major memory; otherwise add full blocks.
            if not grid.is_row_major(tensor):
                blocks = self._fill(positions, part).view(-1, self.spec.height, self.spec.width)
                tensor.add_(grid.from_blocks(blocks))
                continue
            # One sender at a time: no two indices of a scatter are then the same, and the order of sums is fixed.
            for own, sent in zip(torch.split(positions, k, 1), torch.split(part, k, 1), strict=True):
                grid.scatter_add(own, sent, to=tensor)

    def zeros(self, device: torch.device) -> Tensor:
        """Return coefficients of zero: (count, height * width) fp32."""
        return torch.zeros(self.count, self.spec.codec.size, dtype=torch.float32, device=device)

    def _fill(self, index: Tensor, values: Tensor) -> Tensor:
        """Return all coefficients of blocks, with zeros for unsent ones: (count, height * width)."""
        blocks = values.new_zeros(len(values), self.spec.codec.size)
        k = self.spec.codec.k
        # One sender at a time: `TopKCodec.add` needs distinct indices in a row.
        for own, sent in zip(torch.split(index, k, 1), torch.split(values, k, 1), strict=True):
            self.spec.codec.add(own, sent, to=blocks)
        return blocks

    def _split(self, blocks: Tensor) -> Sequence[Tensor]:
        """Split blocks, counted along dim 0, by parameter."""
        return torch.split(blocks, [slot.grid.count for slot in self.slots])

    def _assemble(self, blocks: Tensor) -> Iterator[tuple[int, Tensor]]:
        for slot, part in zip(self.slots, self._split(blocks), strict=True):
            yield slot.param, slot.grid.from_blocks(part)
