"""Tests of the rival methods of communication: Dion, and one bit per gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.processes import run

SHAPE = (24, 16)


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * rank + step))


def compare_with_one_process() -> None:
    """Factors are linear in the momentum: replicas do what one process does with the mean of their gradients."""
    from dion import Dion

    world, rank = dist.get_world_size(), dist.get_rank()
    weight = nn.Parameter(torch.zeros(SHAPE))
    optimizer = Dion([weight], lr=0.1, rank=4)
    q = optimizer.state[weight]["basis"]
    for step in range(5):
        weight.grad = gradient(rank, step)
        optimizer.step()
    momentum = optimizer.state[weight]["momentum"].clone()
    dist.all_reduce(momentum)
    # again by formula, from the mean gradient
    expected, mean = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for step in range(5):
        total = mean + sum(gradient(other, step) for other in range(world)) / world
        left = torch.linalg.qr(total @ q).Q
        right = total.t() @ left
        mean = total - 0.05 * left @ right.t()
        q = right / right.norm(dim=0)
        expected -= 0.1 * (24 / 16) ** 0.5 * left @ q.t()
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(momentum / world, mean, rtol=1e-4, atol=1e-5)
    assert optimizer.wire_bytes() == round(2 * (world - 1) / world * 4 * 4 * (24 + 16))


def keep_equal() -> None:
    from comm_methods import METHODS

    for name in ("dion r4", "one bit, adamw"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.LayerNorm(64))
        before = [param.detach().clone() for param in model.parameters()]
        replica = METHODS[name](model, 1e-2)
        for step in range(3):
            torch.manual_seed(10 * dist.get_rank() + step)
            replica.step(lambda called: called(torch.randint(64, (4, 8))).square().mean())
        assert replica.computed_bytes() > 0
        for param, old in zip(model.parameters(), before, strict=True):
            found: list[Any] = [torch.empty_like(param) for _ in range(dist.get_world_size())]
            dist.all_gather(found, param.detach())
            assert all(torch.equal(found[0], other) for other in found)
            assert not torch.equal(param, old)


def test_dion_on_replicas_is_dion_on_the_mean_gradient() -> None:
    run(2, compare_with_one_process)


def test_rivals_keep_replicas_equal() -> None:
    run(2, keep_equal)
