"""Tests of the warning for optimizers with momentum on top of a momentum exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scantling as sc
from scantling.comm import diloco
from scantling.comm.momentum_watch import MomentumWatch
from scantling.optim import build_optimizer
from scantling.trainer.planning.plan import plan
from scantling.trainer.recipe import load_recipe
from scantling.trainer.training.build import build_run_optimizer
from tests.runs import WIDE, tiny_recipe

WARNING = "has its own momentum"
MOMENTA = [
    ("adamw", {}, "betas[0]"),
    ("adam", {}, "betas[0]"),
    ("nadam", {}, "betas[0]"),
    ("radam", {}, "betas[0]"),
    ("adamax", {}, "betas[0]"),
    ("came", {}, "betas[0]"),
    ("came", {"momentum": "int8"}, "betas[0]"),
    ("muon", {}, "momentum"),
    ("sgd", {"momentum": 0.9}, "momentum"),
    ("rmsprop", {"momentum": 0.9}, "momentum"),
    ("sign", {"momentum": 0.9}, "momentum"),
]
NONE = [
    ("adamw", {"betas": (0.0, 0.95)}),
    ("came", {"betas": (0.0, 0.95, 0.995)}),
    ("muon", {"momentum": 0.0}),
    ("sgd", {}),
    ("rmsprop", {}),
    ("adagrad", {}),
    ("sign", {}),
    ("sign", {"betas": (0.9, 0.95)}),  # these betas are for vectors only
    ("adafactor", {}),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 16), nn.Linear(16, 64))


def steps(model: nn.Module, optimizer: Any, exchange: sc.MomentumExchange | None) -> None:
    for _ in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
        if exchange is not None:
            exchange.exchange()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("name", "options", "option"), MOMENTA)
def test_second_momentum_warns_once(
    name: str, options: dict[str, Any], option: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    groups = sc.param_groups(model)
    exchange = sc.MomentumExchange(groups, topk=8)
    steps(model, build_optimizer(name, groups, lr=1e-3, **options), exchange)
    assert caplog.text.count(WARNING) == 1
    assert f"({option} = " in caplog.text
    assert "0.17 to 0.43 nats" in caplog.text


@pytest.mark.parametrize(("name", "options"), NONE)
def test_one_momentum_does_not_warn(name: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    groups = sc.param_groups(model)
    steps(model, build_optimizer(name, groups, lr=1e-3, **options), sc.MomentumExchange(groups, topk=8))
    assert WARNING not in caplog.text


def test_momentum_of_dense_parameters_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    large, small = (
        [p for p in model.parameters() if (p.ndim == 2 and p.numel() >= 4096) == is_large] for is_large in (True, False)
    )
    groups = [{"params": large, "betas": (0.0, 0.95)}, {"params": small, "betas": (0.9, 0.95)}]
    steps(model, torch.optim.AdamW(groups, lr=1e-3), sc.MomentumExchange(model.parameters(), topk=8))
    model = network()
    exchange = sc.MomentumExchange(model.parameters(), decay=0.0)  # without momentum
    steps(model, torch.optim.AdamW(model.parameters(), lr=1e-3), exchange)
    model = network()
    steps(model, torch.optim.AdamW(model.parameters(), lr=1e-3), None)  # a different model with plain gradients
    local = diloco(torch.optim.AdamW(model.parameters(), lr=1e-3), sc.param_groups(model), sync_every=2)
    steps(model, local, None)
    model = network()
    steps(model, sc.DeMo(sc.param_groups(model), lr=1e-3), None)
    assert WARNING not in caplog.text


def test_the_optimizer_of_matrices_is_found_among_several(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    exchange = sc.MomentumExchange(model.parameters(), topk=8)
    first, second = (
        torch.optim.AdamW(each.parameters(), lr=1e-3, betas=betas)
        for each, betas in ((model[:1], (0.0, 0.9)), (model[1:], (0.9, 0.9)))
    )
    for _ in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        exchange.exchange()
        first.step()
        second.step()
    assert WARNING not in caplog.text  # the second model has small matrices only
    model[2] = nn.Linear(16, 512)
    exchange = sc.MomentumExchange(model.parameters(), topk=8)
    second = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
    model(torch.randn(4, 64)).square().mean().backward()
    exchange.exchange()
    first.step()
    second.step()
    assert caplog.text.count(WARNING) == 1


def group_by_param(folder: Path, optim: dict[str, Any], **sections: Any) -> tuple[list[dict[str, Any]], Any]:
    model = {"overrides": {**tiny_recipe(folder)["model"]["overrides"], **WIDE}}
    given = tiny_recipe(folder, model=model, **sections)
    given["optim"] = {"lr": 1e-3, **optim}
    recipe = load_recipe(given)
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Embedding(64, 64), nn.Linear(64, 128), nn.Linear(128, 16)])
    return build_run_optimizer(recipe, net, torch.device("cpu")).param_groups, plan(given)


DEMO = {"comm": {"name": "demo", "topk": 8}}


@pytest.mark.parametrize(
    ("optim", "key", "matrices", "others"),
    [
        ({"name": "adamw"}, "betas", (0.0, 0.999), (0.9, 0.999)),
        ({"name": "came"}, "betas", (0.0, 0.999, 0.9999), (0.9, 0.999, 0.9999)),
        ({"name": "came", "momentum": "int8"}, "betas", (0.0, 0.999, 0.9999), (0.9, 0.999, 0.9999)),
        ({"name": "muon"}, "momentum", 0.0, 0.95),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_recipe_with_demo_has_one_momentum_by_default(
    tmp_path: Path, optim: dict[str, Any], key: str, matrices: Any, others: Any
) -> None:
    groups, planned = group_by_param(tmp_path, optim, **DEMO)
    found = {
        param.numel(): group.get(key) for group in groups for param in group["params"] if group["role"] == "matrix"
    }
    assert found[64 * 128] == matrices
    assert found[128 * 16] == others  # too small for blocks, so exchanged as a gradient
    rest = [group for group in groups if group["role"] != "matrix"]
    assert rest
    if key == "betas":
        assert {group["betas"] for group in rest} == {others}
    assert any("matrices have the momentum of the exchange and none of" in note for note in planned.notes)


@pytest.mark.parametrize("betas", [[0.9, 0.95], [0.0, 0.95]])
def test_recipe_keeps_the_momentum_that_is_given(tmp_path: Path, betas: list[float]) -> None:
    groups, planned = group_by_param(tmp_path, {"name": "adamw", "betas": betas}, **DEMO)
    assert {tuple(group["betas"]) for group in groups} == {tuple(betas)}
    assert any(WARNING in note for note in planned.notes) == (betas[0] > 0)


@pytest.mark.parametrize("sections", [{}, {"comm": {"name": "demo", "decay": 0.0}}])
def test_recipe_without_momentum_in_the_exchange_keeps_that_of_the_optimizer(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    groups, planned = group_by_param(tmp_path, {"name": "adamw"}, **sections)
    assert {group["betas"] for group in groups} == {(0.9, 0.999)}
    assert not any("momentum" in note for note in planned.notes)


@pytest.mark.parametrize("betas", [None, [0.9, 0.999, 0.9999]])
def test_run_with_demo_says_so_and_keeps_the_planned_state(
    tmp_path: Path, betas: list[float] | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = {"overrides": {**tiny_recipe(tmp_path)["model"]["overrides"], **WIDE}}
    given = tiny_recipe(tmp_path, model=model, train={"steps": 2}, **DEMO)
    given["optim"] = {"name": "came", "lr": 1e-3, **({} if betas is None else {"betas": betas})}
    result = sc.train(given, run_dir=tmp_path / "run")
    assert result.metrics["optimizer_state_bytes"] == plan(given).optimizer_state_bytes
    assert caplog.text.count(WARNING) == (betas is not None)


def test_watch_of_deleted_exchange_ignores_new_parameters(caplog: pytest.LogCaptureFixture) -> None:
    dropped = MomentumWatch([nn.Parameter(torch.zeros(64, 64)) for _ in range(50)])
    fresh = [nn.Parameter(torch.ones(64, 64)) for _ in range(50)]  # their ids may be those of freed parameters
    for param in fresh:
        param.grad = torch.ones(64, 64)
    build_optimizer("sgd", fresh, lr=0.1, momentum=0.9).step()
    assert WARNING not in caplog.text
    assert dropped.is_done
