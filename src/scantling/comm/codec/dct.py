"""Discrete cosine transform of blocks, and its inverse, also of a few coefficients.

    Q = C_h B C_w^T,    B = C_h^T Q C_w,    C[0, j] = sqrt(1/n),  C[u, j] = sqrt(2/n) cos(pi (j + 1/2) u / n)

C is orthonormal: the largest coefficients carry the most energy of a block, and the error is the energy of the rest
(Ahmed, Natarajan and Rao, 1974; as DeMo uses it: arXiv 2411.19870, section 3).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from scantling.comm.codec.blocks import split_for_cache
from scantling.numerics.device import without_autocast


@lru_cache(maxsize=256)
def basis(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return C, (length, length) with one frequency per row, computed in fp64 and rounded once."""
    i = torch.arange(length, dtype=torch.float64)
    # angle[u, j] = pi (j + 1/2) u / n
    angle = torch.pi * (i + 0.5) * i[:, None] / max(1, length)
    rows = angle.cos() * (2.0 / max(1, length)) ** 0.5
    rows[:1] = (1.0 / max(1, length)) ** 0.5
    made: Tensor = rows.to(device=device, dtype=dtype)
    return made


def forward(blocks: Tensor) -> Tensor:
    """Return the coefficients of blocks; both are (count, height, width)."""
    down, across = _bases(blocks)
    return _multiply(down, blocks, across.t())


def inverse(coefficients: Tensor) -> Tensor:
    """Return the blocks of coefficients; both are (count, height, width)."""
    down, across = _bases(coefficients)
    return _multiply(down.t(), coefficients, across)


def inverse_sparse(index: Tensor, values: Tensor, height: int, width: int) -> Tensor:
    """Return blocks from a few coefficients each, as sums of outer products of two rows of the bases.

    Args:
        index: (count, k) int64 positions in a flattened block.
        values: (count, k).
        height, width: of a block.

    Returns:
        (count, height, width). Cheaper than `inverse` while k is under about the width.
    """
    down, across = basis(height, values.device, values.dtype), basis(width, values.device, values.dtype)
    # sum over k of v_k C_h[u_k]^T C_w[w_k], as one batched product
    columns = down[index // width] * values.unsqueeze(-1)
    with without_autocast(values.device):
        # (count, height, k) @ (count, k, width) -> (count, height, width)
        return columns.transpose(1, 2) @ across[index % width]


def _bases(blocks: Tensor) -> tuple[Tensor, Tensor]:
    height, width = blocks.shape[-2:]
    return basis(height, blocks.device, blocks.dtype), basis(width, blocks.device, blocks.dtype)


def _multiply(left: Tensor, blocks: Tensor, right: Tensor) -> Tensor:
    """Return left B right for each block B."""
    out = torch.empty_like(blocks)
    # Autocast would round the products to 16 bits.
    with without_autocast(blocks.device):
        # Blocks that fit into the cache, so that the first product is still there for the second.
        for part, room in zip(split_for_cache(blocks), split_for_cache(out), strict=True):
            torch.matmul(left, part @ right, out=room)
    return out
