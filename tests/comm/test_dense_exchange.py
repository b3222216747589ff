"""Tests of `exchange="dense"`: everything is exchanged by all-reduce, and the momentum is the same on all replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from scantling.comm.exchange import MomentumExchange
from scantling.comm.transport.group import ReplicaGroup
from scantling.errors import NonFiniteError, UserError
from tests.comm.replicas import ThreadGroup, together


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((70, 130), (300,), (3, 40, 50))]


def make_exchange(replicas: ReplicaGroup, params: list[nn.Parameter], **options: Any) -> MomentumExchange:
    made = MomentumExchange(params, **{"topk": 8, "chunk": 16, "decay": 0.9, **options})
    made.replicas = replicas
    return made


def give(params: list[nn.Parameter], rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"residual": "int8"}, {"overlap": True}])
def test_dense_exchange_applies_the_mean_momentum(options: dict[str, Any]) -> None:
    """M <- decay M + mean g, and (1 - decay) M goes into the update; vectors get the mean."""
    size, steps = 3, 6

    def work(replicas: ThreadGroup) -> list[list[Tensor]]:
        params = make_params()
        made = make_exchange(replicas, params, exchange="dense", dense="fp32", **options)
        found = []
        for step in range(steps):
            give(params, replicas.rank, step)
            if made.exchange():
                found.append([param.grad.clone() for param in params])
                assert made.wire_bytes == made.planned_wire_bytes()
        assert sum(value.nbytes for state in made.state.values() for value in state.values()) >= (
            made.planned_state_bytes()
        )
        return found

    all_of_them = together(size, work)
    given = make_params()
    expected = [torch.zeros_like(param) for param in given]
    for step, found in enumerate(all_of_them[0]):
        grads = []
        for rank in range(size):
            give(given, rank, step)
            grads.append([param.grad.clone() for param in given])
        for place, param in enumerate(given):
            mean = torch.stack([each[place] for each in grads]).mean(0)
            decay = 0.0 if param.ndim == 1 else 0.9
            expected[place].mul_(decay).add_(mean, alpha=1.0 - decay)
            # int8 steps are a row's largest element / 127
            tolerance = 0.05 if options.get("residual") == "int8" else 1e-5
            torch.testing.assert_close(found[place], expected[place], rtol=0.0, atol=tolerance)
            assert all(torch.equal(found[place], other[step][place]) for other in all_of_them[1:])
    assert len(all_of_them[0]) == steps - options.get("delay", 0)


def test_dense_exchange_skips_nonfinite_rank() -> None:
    def work(replicas: ThreadGroup) -> Tensor:
        params = make_params()
        made = make_exchange(replicas, params, exchange="dense", dense="fp32", decay=0.0)
        give(params, replicas.rank, 0)
        if replicas.rank == 1:
            params[0].grad[3, 4] = torch.nan
        made.exchange()
        assert made.nonfinite_ranks == [1]
        found = params[0].grad
        params[2].grad = torch.full_like(params[2], torch.inf)
        with pytest.raises(NonFiniteError, match="all 3 processes"):
            made.exchange()
        return found

    found, params = together(3, work), make_params()
    grads = []
    for rank in (0, 2):
        give(params, rank, 0)
        grads.append(params[0].grad.clone())
    torch.testing.assert_close(found[1], torch.stack(grads).mean(0))
    assert torch.equal(found[0], found[1])


def test_dense_exchange_refuses_sync_every_and_paper() -> None:
    with pytest.raises(UserError, match=r"set sync_every=1; given 4"):
        MomentumExchange(make_params(), sync_every=4, exchange="dense")
    with pytest.raises(UserError, match="compat='paper'"):
        sc.DeMo(make_params(), lr=1e-3, compat="paper", exchange="dense")
