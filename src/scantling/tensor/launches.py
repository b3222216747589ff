"""Parts of all launches of the kernels of low-rank layers: tiles, and sums that several programs share."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from scantling.numerics.device import has_kernels
from scantling.numerics.torch_private import is_in_functorch

DEVICES = ("cuda",)
MAX_RANK = 64
"""Largest rank whose tiles fit into the registers and the shared memory of all GPUs."""
PROGRAMS = 128
"""Programs that keep a GPU busy; with fewer tiles of tokens, several programs share the work of a tile."""
LEAST_PARTS = 8
"""Parts of a sum below which one program adds them all."""
TOKEN_TILE = 64


def launch_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype, that of autocast if it is on, in which kernels take tokens x; None if they cannot."""
    kind = x.device.type
    if kind not in DEVICES or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    # Products of fp32 values without TF32 take too many registers on a GPU.
    is_slow = dtype == torch.float32 and precision() == "ieee" and x.is_cuda
    is_known = dtype in (torch.float32, torch.bfloat16) and x.numel() > 0 and not is_slow
    return dtype if is_known and not is_in_functorch() and has_kernels(x.device) else None


def with_dense_rows(matrix: Tensor) -> Tensor:
    """Return a matrix whose elements of a row are neighbors; rows may have any distance."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def tile_side(size: int) -> int:
    """Return the next power of 2, at least the smallest side of a product in Triton."""
    return max(16, 1 << (size - 1).bit_length())


def chunk_side(*rank_tiles: int) -> int:
    """Return the side of a chunk of a wide dim, whose products with these tiles of ranks fit into registers."""
    return 64 if max(rank_tiles) <= 64 else 32


def num_splits(num_parts: int, num_others: int) -> int:
    """Return how many programs share the parts of a sum, so that with the others they keep a GPU busy."""
    if num_parts < LEAST_PARTS:  # adding their sums would take another launch
        return 1
    wanted = min(num_parts, max(1, PROGRAMS // num_others))
    return -(-num_parts // -(-num_parts // wanted))  # no program without a part


class PartialSums:
    """Memory for the partial sums of several results, which are added by one operation.

    Args:
        like: tensor with the dtype and on the device of the results.
        splits: number of programs that share a sum.
        shapes: shapes of the results.

    Attributes:
        parts: memory of each result in the first split.
        stride: elements from one split to the next.
    """

    def __init__(self, like: Tensor, splits: int, shapes: Sequence[tuple[int, ...]]) -> None:
        self._dtype, self._shapes = like.dtype, shapes
        self._sizes = [-(-prod(shape) // 16) * 16 for shape in shapes]  # every result is aligned
        self.stride, self._buffer = sum(self._sizes), None
        if splits == 1:
            self.parts = [like.new_empty(shape) for shape in shapes]
        else:
            self._buffer = like.new_empty(splits, self.stride, dtype=torch.float32)
            self.parts = list(torch.split(self._buffer[0], self._sizes))

    def add(self) -> list[Tensor]:
        """Return the results."""
        if self._buffer is None:
            return self.parts
        total = torch.split(self._buffer.sum(0).to(self._dtype), self._sizes)
        found = [piece[: prod(shape)].view(shape) for piece, shape in zip(total, self._shapes, strict=True)]
        # The gradient of a bias, a parameter, must not keep the others in memory.
        return [piece.clone() if piece.ndim == 1 else piece for piece in found]


def precision() -> str:
    """Return how kernels multiply fp32 values."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
