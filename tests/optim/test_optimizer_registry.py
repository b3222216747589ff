"""Tests of optimizers by name, and of their options in a recipe."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from scantling.errors import UserError
from scantling.groups import param_groups
from scantling.optim import build_optimizer, check_options, optimizer_names, optimizer_options


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 24), nn.Linear(24, 32), nn.LayerNorm(32), nn.Conv1d(32, 20, 3))


def test_names_include_ours_and_torch() -> None:
    names = optimizer_names()
    assert {"came", "muon", "adamw", "adafactor", "sgd", "nadam", "radam", "adamax", "rmsprop"} <= set(names)
    assert names == sorted(names)
    assert not {"lbfgs", "sparseadam", "optimizer"} & set(names)


@pytest.mark.parametrize("name", optimizer_names())
def test_every_optimizer_trains_and_keeps_group_keys(name: str) -> None:
    net = model()
    groups = param_groups(net, weight_decay=0.1)
    before = [param.detach().clone() for param in net.parameters()]
    optimizer = build_optimizer(name.upper(), groups, lr=1e-2, weight_decay=0.3)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    expected = [(group["role"], group["matrix_dims"], group["weight_decay"]) for group in groups]
    assert [(g["role"], g["matrix_dims"], g["weight_decay"]) for g in optimizer.param_groups] == expected
    optimizer.load_state_dict(optimizer.state_dict())
    assert [(g["role"], g["matrix_dims"], g["weight_decay"]) for g in optimizer.param_groups] == expected
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert names == [name for group in groups for name, _ in group["params"]]
    assert all(group["lr"] == 1e-2 for group in optimizer.param_groups)


@pytest.mark.parametrize("name", optimizer_names())
def test_default_options_are_accepted(name: str) -> None:
    options = optimizer_options(name)
    assert "lr" not in options
    assert "weight_decay" not in options
    assert "params" not in options
    assert check_options(name, options) == []


def test_built_optimizer_matches_class() -> None:
    a, b = model(), model()
    ours = build_optimizer("adamw", a.parameters(), lr=1e-2, weight_decay=0.2, betas=[0.8, 0.9], eps="1e-6")
    theirs = torch.optim.AdamW(b.parameters(), lr=1e-2, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)
    assert type(ours) is torch.optim.AdamW
    assert ours.defaults == theirs.defaults


def test_build_does_not_change_groups() -> None:
    groups = param_groups(model(), weight_decay=0.1)
    kept = [dict(group) for group in groups]
    for _ in range(2):
        build_optimizer("adamw", groups, lr=1e-2)
    assert [group.keys() for group in groups] == [group.keys() for group in kept]
    assert all(group["params"] is before["params"] for group, before in zip(groups, kept, strict=True))


@pytest.mark.parametrize(
    ("name", "options", "path", "words"),
    [
        ("adamww", {}, "name", ["unknown optimizer 'adamww'", "adafactor", "did you mean 'adamw'?"]),
        ("LBFGS", {}, "name", ["'LBFGS'", "closure"]),
        ("SparseAdam", {}, "name", ["sparse gradients only"]),
        ("adamw", {"beta": [0.9, 0.95]}, "beta", ["not an option of adamw", "eps", "did you mean 'betas'?"]),
        ("adamw", {"betas": 0.9}, "betas", ["must be a list of 2", "given 0.9"]),
        ("adamw", {"betas": [0.9, 0.95, 0.99]}, "betas", ["must be a list of 2"]),
        ("adamw", {"betas": [0.9, "x"]}, "betas", ["number", "'x'"]),
        ("adamw", {"betas": [0.9, 1.5]}, "betas", ["1.5"]),
        ("adamw", {"eps": True}, "eps", ["must be a number; given True"]),
        ("adamw", {"amsgrad": "yes"}, "amsgrad", ["must be true or false; given 'yes'"]),
        ("adamw", {"foreach": 1}, "foreach", ["must be true or false or null; given 1"]),
        ("muon", {"ns_steps": 2.5}, "ns_steps", ["must be a whole number; given 2.5"]),
        ("muon", {"adjust_lr_fn": "best"}, "adjust_lr_fn", ["best"]),
        ("muon", {"amsgrad": True}, "amsgrad", ["not an option of muon", "nesterov", "betas"]),
        ("came", {"factor": "all"}, "factor", ["must be one of 'auto', 'last2'; given 'all'"]),
        ("came", {"betas": [0.9, 0.99]}, "betas", ["must be a list of 3: each a number"]),
        ("came", {"betas": [0.9, 0.99, 1.0]}, "betas", ["betas[2]", "given 1.0"]),
        ("came", {"clip_threshold": -1}, "clip_threshold", ["given -1.0"]),
        ("sgd", {"nesterov": True}, "nesterov", ["requires a momentum"]),
    ],
    ids=str,
)
def test_bad_options_are_explained(name: str, options: dict[str, Any], path: str, words: list[str]) -> None:
    problems = check_options(name, options)
    assert [key for key, _ in problems] == [path]
    for word in words:
        assert word in problems[0][1]
    with pytest.raises(UserError) as error:
        build_optimizer(name, param_groups(model()), lr=1e-3, **options)
    assert problems[0][1] in str(error.value)


def test_all_bad_options_are_reported() -> None:
    assert [key for key, _ in check_options("adamw", {"momentum": 0.9, "eps": "small", "amsgrad": True})] == [
        "momentum",
        "eps",
    ]
    assert [key for key, _ in check_options("adamw", {"betas": [0.9, 2.0], "eps": -1, "amsgrad": True})] == [
        "eps",
        "betas",
    ]


def test_dependent_options_are_accepted_together() -> None:
    assert check_options("sgd", {"momentum": 0.9, "nesterov": True}) == []


def test_class_errors_become_user_errors() -> None:
    with pytest.raises(UserError, match=r"Invalid learning rate: -1"):
        build_optimizer("adamw", param_groups(model()), lr=-1.0)
    with pytest.raises(UserError, match="lr must be a number at least 0; given -1"):
        build_optimizer("came", param_groups(model()), lr=-1.0)


def test_muon_needs_roles_and_a_matrix() -> None:
    with pytest.raises(UserError, match="param_groups"):
        build_optimizer("muon", model().parameters(), lr=1e-3)
    with pytest.raises(UserError, match="no trainable matrix"):
        build_optimizer("muon", param_groups(nn.Embedding(4, 4)), lr=1e-3)


def test_weight_decay_without_effect_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build_optimizer("rprop", param_groups(model(), weight_decay=0.1), lr=1e-3, weight_decay=0.1)
        build_optimizer("rprop", param_groups(model()), lr=1e-3)
    assert [record.message for record in caplog.records] == ["Rprop has no weight decay: weight_decay has no effect"]


def test_rounding_without_effect_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build_optimizer("came", param_groups(model()), lr=1e-3, rounding="stochastic")
        build_optimizer("came", param_groups(model()), lr=1e-3)
        build_optimizer("came", param_groups(model().bfloat16()), lr=1e-3, rounding="stochastic")
    assert [record.message for record in caplog.records] == [
        "rounding: stochastic has no effect: it applies to bf16 parameters, and there are none"
    ]
