"""Tests of several optimizers combined into one: shared groups and state, schedules, loss scaling, saving, copying."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scantling.errors import UserError
from scantling.groups import param_groups
from scantling.numerics import bf16_products as products
from scantling.numerics.bf16_products import bf16_products
from scantling.optim import CombinedOptimizer, build_optimizer


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 10))


def muon(net: nn.Module, **options: Any) -> CombinedOptimizer:
    optimizer = build_optimizer("muon", param_groups(net, weight_decay=0.1), lr=1e-2, **options)
    assert isinstance(optimizer, CombinedOptimizer)
    return optimizer


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in net.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_muon_and_adamw_match_separate_steps() -> None:
    together, apart = model(), model()
    train(together, muon(together), range(3))
    matrices = [apart[1].weight, apart[3].weight]
    vectors = [param for name, param in apart.named_parameters() if param.ndim == 1]
    alone: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([apart[0].weight], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95)),
        torch.optim.AdamW(vectors, lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for param in apart.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        for one in alone:
            with bf16_products(torch.device("cpu")):
                one.step()
    assert same(together, apart)


class Products(TorchDispatchMode):
    """Records the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.add(args[0].dtype)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("is_fast", [True, False])
def test_muon_multiplies_in_fp32_on_a_cpu_without_bf16(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_fast_matmul", lambda compute, device: is_fast)
    net = model()
    with Products() as seen:
        train(net, muon(net), range(1))
    assert seen.dtypes == {torch.bfloat16 if is_fast else torch.float32}


def test_adamw_steps_embeddings_and_other_dims() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Embedding(5, 4), nn.Linear(4, 4, bias=False))
    first, second = muon(net).members
    assert [p.ndim for g in first.param_groups for p in g["params"]] == [2]
    assert sorted(g["role"] for g in second.param_groups) == ["embedding", "matrix", "vector"]


def test_groups_are_dicts_of_members_in_order() -> None:
    net = model()
    optimizer = muon(net)
    assert [group["role"] for group in optimizer.param_groups] == ["embedding", "matrix", "vector"]
    theirs = [id(group) for member in optimizer.members for group in member.param_groups]
    assert sorted(theirs) == sorted(id(group) for group in optimizer.param_groups)
    optimizer.load_state_dict(optimizer.state_dict())
    theirs = [id(group) for member in optimizer.members for group in member.param_groups]
    assert sorted(theirs) == sorted(id(group) for group in optimizer.param_groups)


def test_schedules_reach_members() -> None:
    net = model()
    optimizer = muon(net)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    train(net, optimizer, range(1))
    schedule.step()
    before = copy.deepcopy(net)
    train(net, optimizer, range(1, 2))
    assert all(member.param_groups[0]["lr"] == 0.0 for member in optimizer.members)
    assert same(before, net)


def test_state_is_shared_with_members() -> None:
    net = model()
    optimizer = muon(net)
    train(net, optimizer, range(2))
    assert set(optimizer.state) == set(net.parameters())
    assert "momentum_buffer" in optimizer.state[net[1].weight]
    assert "exp_avg_sq" in optimizer.state[net[1].bias]
    optimizer.state[net[1].weight] = {"momentum_buffer": torch.zeros(8, 6)}
    assert not optimizer.members[0].state[net[1].weight]["momentum_buffer"].any()


def test_zero_grad_and_closure() -> None:
    net = model()
    optimizer = muon(net)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        assert all(param.grad is None for param in net.parameters())
        calls.append(1)
        loss = net(torch.arange(10)).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).requires_grad
    assert calls == [1]


def test_saved_state_resumes_bitwise() -> None:
    straight, stopped, resumed = model(), model(), model()
    train(straight, muon(straight), range(5))
    optimizer = muon(stopped)
    train(stopped, optimizer, range(3))
    file = io.BytesIO()
    torch.save([stopped.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed.load_state_dict(weights)
    fresh = muon(resumed, momentum=0.5)
    fresh.load_state_dict(state)
    assert fresh.param_groups[1]["momentum"] == 0.95
    train(resumed, fresh, range(3, 5))
    assert same(straight, resumed)


def test_load_refuses_other_groups_and_runs_hooks() -> None:
    net = model()
    optimizer = muon(net)
    train(net, optimizer, range(1))
    state = optimizer.state_dict()
    with pytest.raises(UserError, match="hold"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"][:-1]})
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("after"))
    optimizer.load_state_dict(state)
    assert seen == ["before", "after"]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])  # noqa: S301
def test_copies_resume_like_original(how: Any) -> None:
    net = model()
    optimizer = muon(net)
    train(net, optimizer, range(2))
    net_copy, copied = how((net, optimizer))
    copied.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] = 0.5
    train(net, optimizer, range(2, 4))
    train(net_copy, copied, range(2, 4))
    assert same(net, net_copy)


def test_grad_scaler_scales_and_skips() -> None:
    plain, scaled = model(), model()
    a, b = muon(plain), muon(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        loss = plain(torch.arange(10)).square().sum()
        loss.backward()
        scaler.scale(scaled(torch.arange(10)).square().sum()).backward()
        if step == 1:
            scaled[1].bias.grad[0] = torch.inf
        else:
            a.step()
        scaler.step(b)
        scaler.update()
        a.zero_grad()
        b.zero_grad()
    assert scaler.get_scale() == 4.0
    assert same(plain, scaled)


def test_bad_combinations_are_refused() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with pytest.raises(UserError, match="at least one"):
        CombinedOptimizer([])
    with pytest.raises(UserError, match="more than one parameter group"):
        CombinedOptimizer([torch.optim.SGD([p]), torch.optim.SGD([p])])
    with pytest.raises(UserError, match="order must name"):
        CombinedOptimizer([torch.optim.SGD([p]), torch.optim.SGD([q])], order=[0, 0])
    combined = CombinedOptimizer([torch.optim.SGD([p]), torch.optim.SGD([q])])
    with pytest.raises(UserError, match="cannot add groups"):
        combined.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
