"""Tests of CAME with a first beta of 0, for gradients that are momenta: it has no momentum and no confidence."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scantling.errors import UserError
from scantling.optim import CAME, came_state_bytes, release_gradients, state_bytes, to_came_pytorch
from tests.processes import run

BETAS = (0.0, 0.95, 0.995)
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": BETAS, "debias": True, "weight_decay": 0.1}
SHAPES = ((40, 33), (3, 20, 18), (8, 4, 3, 3), (50, 4), (70,), ())


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def stepped(params: list[nn.Parameter], optimizer: CAME, steps: range) -> None:
    for step in steps:
        for number, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + number)
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_momentum_keeps_no_state(dtype: torch.dtype) -> None:
    params = make_params(dtype)
    optimizer = CAME(params, rounding="compensated", **OPTIONS)
    stepped(params, optimizer, range(2))
    low = dtype == torch.bfloat16
    for param in params:
        kept = set(optimizer.state[param]) - {"step", "low"}
        assert kept in ({"row", "col"}, {"exp_avg_sq"})
    wanted = sum(came_state_bytes(shape, dtype=dtype, rounding="compensated", betas=BETAS) for shape in SHAPES)
    assert state_bytes(optimizer) == optimizer.state_bytes() == wanted
    dense = sum(prod(shape) for shape in SHAPES)
    assert wanted == came_total(dtype) - 4 * dense - confidence_bytes()
    assert low == ("low" in optimizer.state[params[0]])


def came_total(dtype: torch.dtype) -> int:
    return sum(came_state_bytes(shape, dtype=dtype, rounding="compensated") for shape in SHAPES)


def confidence_bytes() -> int:
    return sum(came_state_bytes(shape) - came_state_bytes(shape, confidence=False) for shape in SHAPES)


@pytest.mark.parametrize("foreach", [None, False])
def test_state_without_momentum_resumes(foreach: bool | None) -> None:
    params = make_params()
    optimizer = CAME(params, foreach=foreach, **OPTIONS)
    stepped(params, optimizer, range(3))
    others = copy.deepcopy(params)
    again = CAME(others, foreach=foreach, **OPTIONS)
    again.load_state_dict(optimizer.state_dict())
    for each, one in ((params, optimizer), (others, again)):
        stepped(each, one, range(3, 6))
    assert all(map(torch.equal, params, others))
    for saved, given in (
        (optimizer, (0.9, *BETAS[1:])),
        (CAME(make_params(), **{**OPTIONS, "betas": (0.9, 0.9, 0.9)}), BETAS),
    ):
        other = CAME(make_params(), **{**OPTIONS, "betas": given})
        with pytest.raises(
            UserError, match=r"with betas\[0\] = 0 no momentum is kept; build the optimizer with the same"
        ):
            other.load_state_dict(saved.state_dict())
    with pytest.raises(UserError, match=r"given confidence=False or betas\[0\]=0"):
        to_came_pytorch(optimizer)


@pytest.mark.parametrize(("place", "dim"), [(0, 0), (0, 1), (1, 2), (2, 0), (3, 0), (4, 0)])
def test_slice_without_momentum(place: int, dim: int) -> None:
    params = make_params()
    optimizer = CAME(params, **OPTIONS)
    stepped(params, optimizer, range(3))
    param = params[place]
    index = torch.arange(0, param.shape[dim], 2)
    optimizer.slice_state(param, dim, index)
    param.grad = None
    param.data = param.data.index_select(dim, index)
    stepped(params, optimizer, range(3, 5))
    assert torch.isfinite(param).all()
    assert "exp_avg" not in optimizer.state[param]


def test_released_gradients_match_steps() -> None:
    nets = []
    for released in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 20))
        optimizer = CAME(net.parameters(), **OPTIONS)
        if released:
            release_gradients(net, optimizer)
        for step in range(4):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
            (net(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        nets.append(net)
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_groups_with_and_without_momentum() -> None:
    """Parameters with an exchanged momentum need none; embeddings, whose gradients are averaged, keep it in int8."""
    params = make_params()
    groups = [{"params": params[:1], "betas": BETAS}, {"params": params[1:]}]
    optimizer = CAME(groups, momentum="int8", lr=1e-2, betas=(0.9, 0.95, 0.995), debias=True)
    stepped(params, optimizer, range(2))
    assert set(optimizer.state[params[0]]) == {"step", "row", "col"}
    assert "exp_avg_codes" in optimizer.state[params[1]]
    alone = make_params()[:1]
    stepped(alone, single := CAME(alone, lr=1e-2, betas=BETAS, debias=True), range(2))
    assert torch.equal(alone[0], params[0])
    single.param_groups[0]["betas"] = (0.9, 0.95, 0.995)
    with pytest.raises(UserError, match=r"no longer fits it.*whether betas\[0\] is 0"):
        stepped(alone, single, range(1))


def test_codec_without_momentum_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"momentum='int8' is the codec of a momentum, and with betas\[0\] = 0 there is none"
    ):
        CAME(make_params(), lr=1e-3, betas=BETAS, momentum="int8")


def as_on_one_device() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for dim in (0, 1):
        whole = make_params()
        parts = [
            nn.Parameter(distribute_tensor(param.detach().clone(), mesh, [Shard(dim)]))
            for param in whole
            if param.ndim > dim
        ]
        whole = [param for param in whole if param.ndim > dim]
        one, many = CAME(whole, **OPTIONS), CAME(parts, **OPTIONS)
        for step in range(5):
            for number, (param, part) in enumerate(zip(whole, parts, strict=True)):
                generator = torch.Generator().manual_seed(100 * step + number)
                param.grad = torch.randn(param.shape, generator=generator)
                part.grad = distribute_tensor(param.grad, mesh, [Shard(dim)])
            one.step()
            many.step()
        assert state_bytes(many) == many.state_bytes() < state_bytes(one)
        for param, part in zip(whole, parts, strict=True):
            assert isinstance(part, DTensor)
            torch.testing.assert_close(part.full_tensor(), param.detach(), rtol=1e-5, atol=1e-6)
    dist.barrier()


@pytest.mark.dist
def test_sharded_steps_match_one_device() -> None:
    run(2, as_on_one_device)
