"""Tests of the block quantizer that the optimizer, the exchange and precision share."""

from __future__ import annotations

import pytest
import torch

from scantling.numerics.bits import pack_nibbles, packed_bytes, unpack_nibbles
from scantling.numerics.block_quantizer import BlockQuantizer, join_blocks, split_blocks


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 96])
def test_join_blocks_inverts_split_blocks(length: int) -> None:
    values = torch.randn(3, length)
    blocks = split_blocks(values, 32)
    assert blocks.shape == (3, -(-length // 32), 32)
    assert torch.equal(join_blocks(blocks, length), values)
    assert not blocks.flatten(-2)[..., length:].any()


@pytest.mark.parametrize("bits", [4, 8])
def test_encode_rounds_to_nearest_step(bits: int) -> None:
    quantizer = BlockQuantizer(bits)
    blocks = torch.randn(5, 64)
    scale = blocks.abs().amax(-1)
    codes = quantizer.encode(blocks, scale)
    assert torch.equal(codes, codes.round())
    assert codes.abs().max() == quantizer.levels == 2 ** (bits - 1) - 1
    error = (quantizer.decode(codes, scale) - blocks).abs()
    assert (error <= scale[:, None] / quantizer.levels / 2 * (1 + 1e-5)).all()


def test_decoded_values_encode_to_the_same_codes_and_scale() -> None:
    quantizer = BlockQuantizer(8)
    blocks = torch.randn(50, 128) * torch.logspace(-30, 30, 50)[:, None]
    scale = blocks.abs().amax(-1)
    codes = quantizer.encode(blocks, scale)
    decoded = quantizer.decode(codes, scale)
    assert torch.equal(decoded.abs().amax(-1), scale)
    assert torch.equal(quantizer.encode(decoded, scale), codes)


def test_stochastic_rounding_preserves_the_mean() -> None:
    quantizer = BlockQuantizer(4)
    block, scale = torch.linspace(-1, 1, 21), torch.tensor(1.0)
    noise = torch.rand(20_000, 21, generator=torch.Generator().manual_seed(0))
    codes = quantizer.encode(block.expand(20_000, 21), scale.expand(20_000), noise)
    # standard error of a mean of 20,000 draws with a deviation of at most half a step
    torch.testing.assert_close(codes.mean(0), 7 * block, atol=4 * 0.5 / 20_000**0.5, rtol=0)


def test_zero_blocks_and_rounded_down_scales_stay_in_range() -> None:
    quantizer = BlockQuantizer(8)
    assert not quantizer.encode(torch.zeros(2, 4), torch.zeros(2)).any()
    blocks = torch.tensor([[1.0, -1.0]])
    assert quantizer.encode(blocks, torch.tensor([0.99])).tolist() == [[127.0, -127.0]]


def test_to_steps_writes_in_place() -> None:
    blocks = torch.ones(2, 4)
    steps = BlockQuantizer(4, smallest_scale=0.5).to_steps(blocks, torch.tensor([2.0, 0.0]), out=blocks)
    assert steps is blocks
    assert blocks[:, 0].tolist() == [3.5, 14.0]


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_unpack_nibbles_inverts_pack_nibbles(count: int) -> None:
    values = torch.randint(0, 16, (3, count))
    packed = pack_nibbles(values)
    assert packed.shape == (3, packed_bytes(count, 4))
    assert torch.equal(unpack_nibbles(packed, count).long(), values)
