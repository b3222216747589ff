"""Tests of parameters that are frozen when groups are built: untouched while frozen, trained once unfrozen."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import scantling as sc
from scantling.comm import MomentumExchange
from scantling.comm.local_steps import diloco
from scantling.comm.residuals import zeros_like_local
from scantling.groups import param_groups
from scantling.hf import CAMEFactory, MuonFactory, SignFactory
from scantling.optim import predicted_state_bytes, predicted_temporary_bytes, state_bytes
from scantling.optim.registry import build_optimizer, optimizer_names
from scantling.trainer.training import build
from tests.hf.test_hf_trainer import model as llama
from tests.hf.test_hf_trainer import trainer
from tests.runs import tiny_recipe

Made = Callable[[nn.Module], Any]


def half_frozen() -> nn.Sequential:
    """Return two layers with the first one frozen: a matrix large enough for blocks of an exchange, and a bias."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    net[0].requires_grad_(False)
    return net


def named(name: str) -> Made:
    return lambda net: build_optimizer(name, param_groups(net), lr=1e-3)


def from_hf(factory: Any, pair: tuple[Any, dict[str, Any]]) -> Made:
    return lambda net: factory()(net, **pair[1])


MAKERS: dict[str, Made] = {
    **{name: named(name) for name in optimizer_names()},
    "hf.came": from_hf(CAMEFactory, sc.hf.came(lr=1e-3)),
    "hf.sign": from_hf(SignFactory, sc.hf.sign(lr=1e-3)),
    "hf.muon": from_hf(MuonFactory, sc.hf.muon(lr=1e-3)),
    "demo": lambda net: sc.DeMo(param_groups(net), lr=1e-3),
    "diloco": lambda net: diloco(torch.optim.AdamW(param_groups(net), lr=1e-3), param_groups(net), sync_every=1),
}


def take_step(net: nn.Module, optimizer: Any, exchange: MomentumExchange | None = None) -> None:
    net(torch.ones(2, 64)).square().sum().backward()
    if exchange is not None:
        exchange.exchange()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("maker", MAKERS)
def test_optimizers_train_unfrozen_parameters(maker: str) -> None:
    net = half_frozen()
    optimizer = MAKERS[maker](net)
    before = copy.deepcopy(net.state_dict())
    for _ in range(2):
        take_step(net, optimizer)
    after = copy.deepcopy(net.state_dict())
    assert [name for name in before if torch.equal(before[name], after[name])] == ["0.weight", "0.bias"]
    if maker not in ("diloco", "adagrad"):  # diloco has no state, adagrad creates all state at once
        assert not any(param in optimizer.state for param in net[0].parameters())
    net[0].requires_grad_(True)
    for _ in range(2):
        take_step(net, optimizer)
    assert not any(torch.equal(after[name], value) for name, value in net.state_dict().items())


def test_demo_exchanges_unfrozen_parameters() -> None:
    net = half_frozen()
    optimizer, exchange = torch.optim.SGD(param_groups(net), lr=1e-3), MomentumExchange(param_groups(net))
    take_step(net, optimizer, exchange)
    before, planned = copy.deepcopy(net[0].state_dict()), exchange.planned_wire_bytes(2)
    trained = MomentumExchange(param_groups(net[2])).planned_wire_bytes(2)
    assert planned == trained
    net[0].requires_grad_(True)
    take_step(net, optimizer, exchange)
    assert not any(torch.equal(before[name], value) for name, value in net[0].state_dict().items())
    assert exchange.planned_wire_bytes(2) > planned


def test_frozen_parameters_have_no_residuals() -> None:
    frozen, trained = nn.Parameter(torch.ones(64, 64), requires_grad=False), nn.Parameter(torch.ones(64, 64))
    assert [zeros_like_local(param).untyped_storage().nbytes() for param in (frozen, trained)] == [4, 4 * 64 * 64]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_release_gradients_of_unfrozen_parameters(accumulation: int) -> None:
    nets = []
    for released in (False, True):
        net = half_frozen()
        optimizer = sc.CAME(param_groups(net), lr=1e-3)
        handle = sc.optim.release_gradients(net, optimizer, accumulation=accumulation) if released else None
        for step in range(4):
            net[0].requires_grad_(step > 1)
            for _ in range(accumulation):
                net(torch.ones(2, 64)).square().sum().backward()
            if handle is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                assert all(param.grad is None for param in net.parameters())
        nets.append(net)
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(nets[1][0].weight, half_frozen()[0].weight)


@pytest.mark.parametrize("name", ["came", "adamw", "muon", "sign", "adafactor", "adagrad"])
def test_predicted_state_bytes_of_a_half_frozen_model(name: str) -> None:
    net = half_frozen()
    optimizer = named(name)(net)
    take_step(net, optimizer)
    assert predicted_state_bytes(name, param_groups(net)) == state_bytes(optimizer)
    trained = param_groups(net[2])
    assert predicted_temporary_bytes(name, param_groups(net)) == predicted_temporary_bytes(name, trained)


def test_state_loads_before_and_after_unfreezing() -> None:
    net = half_frozen()
    optimizer = named("came")(net)
    take_step(net, optimizer)
    again = named("came")(net)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    net[0].requires_grad_(True)
    take_step(net, again)
    net[0].requires_grad_(False)
    named("came")(net).load_state_dict(again.state_dict())


def test_param_groups_leave_out_unsupported_frozen_parameters() -> None:
    net = half_frozen()
    codes, empty = torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(0, 4)
    net[0].codes, net[0].empty = nn.Parameter(codes, requires_grad=False), nn.Parameter(empty, requires_grad=False)
    net[0].scales = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    names = {name for group in param_groups(net) for name, _ in group["params"]}
    assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}
    net[0].half()  # stochastic rounding does not support fp16
    net[2].bfloat16()
    optimizer = sc.CAME(param_groups(net), lr=1e-3, rounding="stochastic")
    net[0].weight.requires_grad_(True).grad = torch.ones_like(net[0].weight)
    with pytest.raises(sc.errors.UserError, match="rounding='stochastic' is for bfloat16"):
        optimizer.step()


class Unfreeze(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.model.layers[0].requires_grad_(state.global_step >= 3)


@pytest.mark.parametrize("pair", [sc.hf.came(lr=1e-2), sc.hf.sign(lr=1e-2)], ids=["came", "sign"])
def test_hf_trainer_trains_unfrozen_layers(tmp_path: Path, pair: Any) -> None:
    net = llama()
    net.model.layers[0].requires_grad_(False)
    made = trainer(tmp_path, pair, net=net)
    made.add_callback(Unfreeze())
    made.train()
    start = llama().state_dict()
    assert not any(torch.equal(start[name], value) for name, value in net.state_dict().items())


def test_run_with_frozen_parameter_resumes_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def freeze(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
        model.get_parameter("model.norm.weight").requires_grad_(False)
        return param_groups(model, **options)

    monkeypatch.setattr(build, "param_groups", freeze)
    train = {"steps": 4, "checkpoint_every": 2, "keep_checkpoints": 2, "eval_samples": 2}
    straight = sc.train(tiny_recipe(tmp_path, train=train), run_dir=tmp_path / "straight").run_dir
    broken = tmp_path / "broken"
    shutil.copytree(straight, broken)
    shutil.rmtree(broken / "checkpoints" / "step-4")
    sc.train(broken, resume=True)
    wanted, found = (build_state(run) for run in (straight, broken))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    assert torch.equal(wanted["model/model.norm.weight"], torch.ones(32))
    assert not any(name.startswith("optimizer/model.norm.weight") for name in wanted)


def build_state(run: Path) -> dict[str, torch.Tensor]:
    from scantling.trainer.training.checkpoint import load_tensors

    return load_tensors(run / "checkpoints" / "step-4")
