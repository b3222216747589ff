"""Tests of emulated bf16 products against PyTorch's own."""

from __future__ import annotations

import torch

from scantling.numerics.bf16_products import Widened


def _loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.nn.functional.linear(x, weight).unflatten(-1, (4, 8)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).float().square().mean()


def test_gradients_are_those_of_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((3, 16, 24), (32, 24)))
    own = torch.autograd.grad(_loss(x, weight), (x, weight))
    with Widened():
        found = torch.autograd.grad(_loss(x, weight), (x, weight))
    for each, expected in zip(found, own, strict=True):
        torch.testing.assert_close(each, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_results_are_products_in_fp32_rounded_once() -> None:
    x, y = (torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    expected = (x.float() @ y.float()).bfloat16()
    with Widened():
        assert torch.equal(x @ y, expected)
        assert torch.equal(torch.bmm(x[None], y[None])[0], expected)
        assert torch.equal(x.float() @ y.float(), x.float() @ y.float())
