"""The discrete cosine transform of blocks, and of few coefficients back.

    Q = C_h B C_w^T,    B = C_h^T Q C_w,    C[0, j] = sqrt(1/n),  C[u, j] = sqrt(2/n) cos(pi (j + 1/2) u / n)

C is orthonormal, so that the largest coefficients carry the most of the block's energy, and what is left out is the
error (Ahmed, Natarajan and Rao, 1974; as DeMo uses it: arXiv 2411.19870, section 3).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from scantling.comm.codec.blocks import slices
from scantling.numerics.device import without_autocast


@lru_cache(maxsize=256)
def basis(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """C: (length, length), a frequency each row. Made in fp64 and rounded once."""
    place = torch.arange(length, dtype=torch.float64)
    angle = torch.pi * (place + 0.5) * place[:, None] / max(1, length)
    rows = angle.cos() * (2.0 / max(1, length)) ** 0.5
    rows[:1] = (1.0 / max(1, length)) ** 0.5
    made: Tensor = rows.to(device=device, dtype=dtype)
    return made


def forward(blocks: Tensor) -> Tensor:
    """The coefficients of blocks, (count, height, width) both."""
    down, across = _bases(blocks)
    return _between(down, blocks, across.t())


def inverse(coefficients: Tensor) -> Tensor:
    """The blocks of coefficients, (count, height, width) both."""
    down, across = _bases(coefficients)
    return _between(down.t(), coefficients, across)


def inverse_sparse(index: Tensor, values: Tensor, height: int, width: int) -> Tensor:
    """The blocks of a few coefficients each, as sums of products of two rows of the bases.

    Args:
        index: (count, k) places in a flattened block, int64.
        values: (count, k).
        height, width: of a block.

    Returns:
        (count, height, width). Cheaper than `inverse` while k is under about the width.
    """
    down, across = basis(height, values.device, values.dtype), basis(width, values.device, values.dtype)
    columns = down[index // width] * values.unsqueeze(-1)
    with without_autocast(values.device):
        return columns.transpose(1, 2) @ across[index % width]


def _bases(blocks: Tensor) -> tuple[Tensor, Tensor]:
    height, width = blocks.shape[-2:]
    return basis(height, blocks.device, blocks.dtype), basis(width, blocks.device, blocks.dtype)


def _between(left: Tensor, blocks: Tensor, right: Tensor) -> Tensor:
    """left B right of each block B."""
    out = torch.empty_like(blocks)
    with without_autocast(blocks.device):
        for part, room in zip(slices(blocks), slices(out), strict=True):
            torch.matmul(left, part @ right, out=room)
    return out
