"""Block quantizer: integer codes, and one scale for each block of neighboring values.

    scale s = max |v| of the block, stored in any format
    code  c = round(L v / s),    v ≈ (c / L) s,    L = 2^(bits - 1) - 1

Rounding is to nearest, or stochastic, floor(L v / s + noise) with noise uniform in [0, 1), which preserves the mean.
Codes are symmetric, from -L to L.

The momentum of CAME (fp16 or one-byte scales), the residuals of an exchange (fp32 scales) and its messages (bf16
scales) are such codes. `precision` has more formats, with scales relative to their largest value, in the same blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def split_blocks(values: Tensor, size: int) -> Tensor:
    """Split the last dim into blocks: (..., n) to (..., blocks, size), with zeros after a short last block."""
    missing = -values.shape[-1] % size
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.reshape(*values.shape[:-1], padded.shape[-1] // size, size)


def join_blocks(blocks: Tensor, length: int) -> Tensor:
    """Join blocks into rows: (..., blocks, size) to (..., length), the inverse of `split_blocks`."""
    return blocks.flatten(-2)[..., :length]


@dataclass(frozen=True)
class BlockQuantizer:
    """Quantizer to symmetric integers.

    Args:
        bits: bits of a code.
        smallest_scale: replaces smaller scales in divisions, so that a block of zeros has codes of 0.
    """

    bits: int
    smallest_scale: float = torch.finfo(torch.float32).tiny

    @property
    def levels(self) -> int:
        """Largest code L."""
        return int(2 ** (self.bits - 1)) - 1

    def to_steps(self, blocks: Tensor, scale: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return L v / s, codes before rounding.

        Args:
            blocks: (..., size) values.
            scale: (...) scales of the blocks, in the dtype of the values.
            out: tensor for the result, which may be `blocks`.
        """
        return torch.div(blocks, scale.clamp(min=self.smallest_scale).unsqueeze(-1), out=out).mul_(self.levels)

    def round_(self, steps: Tensor, noise: Tensor | None = None) -> Tensor:
        """Round steps to codes, in place; to nearest without noise."""
        rounded = steps.round_() if noise is None else steps.add_(noise).floor_()
        return rounded.clamp_(-self.levels, self.levels)  # a scale that was rounded down gives steps beyond L

    def encode(self, blocks: Tensor, scale: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the codes of blocks, as floats: (..., size)."""
        return self.round_(self.to_steps(blocks, scale), noise)

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the values of codes. The largest value of a block comes back as its scale, to the bit."""
        return codes / self.levels * scale.unsqueeze(-1)
