"""Tests that predicted bytes of optimizer state equal those of its storages."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scantling.errors import UserError
from scantling.groups import param_groups
from scantling.numerics import bf16_products
from scantling.optim import (
    CAME,
    ParameterSpec,
    _eager,
    build_optimizer,
    came_state_bytes,
    optimizer_names,
    predicted_state_bytes,
    predicted_temporary_bytes,
    state_bytes,
)
from scantling.optim._cpu import scratch_bytes
from scantling.optim._eager import CPU_TILE, DEVICE_TILE
from scantling.optim.memory import ScratchMeter


def model(dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Embedding(40, 24), nn.Linear(24, 32), nn.LayerNorm(32), nn.Conv2d(32, 20, 3), nn.Conv2d(3, 4, 1)
    )
    layers.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    layers.register_parameter("experts", nn.Parameter(torch.ones(3, 20, 18)))
    layers[1].bias.requires_grad_(False)
    return layers.to(dtype=dtype, device=device)


def stepped(name: str, net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = build_optimizer(name, param_groups(net, weight_decay=0.1), lr=1e-3, **options)
    for param in net.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    return optimizer


NOT_ALWAYS_KNOWN = ("asgd", "rprop")
"""Optimizers whose step reads parameter values, which a meta tensor does not have."""

CASES: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in optimizer_names()],
    ("sgd", {"momentum": 0.9}),
    ("adamw", {"amsgrad": True}),
    ("adamw", {"fused": True}),
    ("adamw", {"foreach": True}),
    ("rmsprop", {"momentum": 0.9, "centered": True}),
    ("came", {"factor": "last2"}),
    ("came", {"debias": True, "betas": [0.9, 0.95, 0.995]}),
    ("came", {"confidence": False}),
    ("came", {"betas": [0.0, 0.95, 0.995]}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_predicted_state_bytes_match_storages(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    net = model(dtype)
    groups = param_groups(net)
    expected = predicted_state_bytes(name, groups, **options)
    assert expected == state_bytes(stepped(name, net, **options)) or (expected is None and name in NOT_ALWAYS_KNOWN)
    assert predicted_state_bytes(name, param_groups(model(dtype, "meta")), **options) == expected
    specs = [
        ParameterSpec(tuple(param.shape), param.dtype, group["role"], group["matrix_dims"])
        for group in groups
        for _, param in group["params"]
        if param.requires_grad or name == "adagrad"  # adagrad creates state for frozen parameters, too
    ]
    assert predicted_state_bytes(name, specs, **options) == expected
    assert predicted_state_bytes(name, [tuple(spec) for spec in specs], **options) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", sorted({*optimizer_names()} - {"asgd"}))
def test_predicted_temporary_bytes_match_step(
    name: str, foreach: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if foreach:  # as on a GPU, which multiplies bf16 itself
        monkeypatch.setattr(bf16_products, "has_fast_matmul", lambda compute, device: True)
    net = model(dtype)
    optimizer = stepped(name, net)
    for group in optimizer.param_groups:
        if "foreach" in group and name != "adafactor":
            group["foreach"] = foreach and name != "came"
    with ScratchMeter(optimizer) as meter:
        optimizer.step()
    predicted = predicted_temporary_bytes(name, param_groups(net, weight_decay=0.1), foreach=foreach)
    in_c = 0  # memory that tensor meters do not see
    if name == "came" and not foreach:
        in_c = scratch_bytes(
            [optimizer.param_step(group, p, 0) for group in optimizer.param_groups for p in group["params"]]
        )
    scalars = 64  # clip factors and the like
    if name != "rprop":  # estimated for rprop, because 0-D parameters prevent a step on the meta device
        assert predicted == pytest.approx(max(in_c, meter.peak), abs=scalars)


def test_scratch_of_came_is_bounded() -> None:
    tall, wide = ParameterSpec((50_000, 128)), ParameterSpec((100_000, 128))
    on_cpu, on_gpu = (predicted_temporary_bytes("came", [tall], foreach=gpu) for gpu in (False, True))
    small = 2048  # columns and scalars
    assert on_gpu - on_cpu == pytest.approx(4 * (DEVICE_TILE - CPU_TILE), abs=small)
    assert predicted_temporary_bytes("came", [tall, wide]) == pytest.approx(on_cpu + 4 * 2 * 50_000, abs=small)
    half = [tall._replace(dtype=torch.bfloat16)]
    assert predicted_temporary_bytes("came", half) <= on_cpu + 4 * CPU_TILE


@pytest.mark.parametrize("momentum", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_scratch_of_one_tile_per_shape_is_that_of_all_tiles(
    momentum: str, rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(3001, 777), (5000, 128), (9, 700, 300), (4096,)]  # some with a shorter last tile
    specs = [ParameterSpec(shape, torch.bfloat16) for shape in shapes]
    options = {"momentum": momentum, "rounding": rounding, "debias": True}
    few = predicted_temporary_bytes("came", specs, **options)
    monkeypatch.setattr(_eager, "distinct_tiles", lambda tiles: tiles)
    assert predicted_temporary_bytes("came", specs, **options) == few


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "compensated"])
@pytest.mark.parametrize("momentum", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("gpu", [False, True])
def test_scratch_of_came_is_under_64_mib_at_llama_3_8b(momentum: str, rounding: str, gpu: bool) -> None:
    shapes = [(2500, 4096), (400, 14336), (4096,)]  # many tiles each, so that more rows would only add their own sums
    specs = [ParameterSpec(shape, torch.bfloat16) for shape in shapes]
    options = {"momentum": momentum, "rounding": rounding, "debias": True}
    assert predicted_temporary_bytes("came", specs, foreach=gpu, **options) <= 64 * 2**20


def test_gpu_scratch_counts_partial_sums() -> None:
    """Partial sums of as many parameters per launch as fit into 48 MiB."""
    each = 4 * (4096 * 40 + 5000 * 128)  # tiles of 32 x 128
    at_once = 48 * 2**20 // each
    for count in (5, 100):
        many = [ParameterSpec((4096, 5000), torch.bfloat16)] * count
        tiles = predicted_temporary_bytes("came", many[:1], foreach=True, momentum="int8")
        wanted = max(tiles, each * min(count, at_once))
        assert predicted_temporary_bytes("came", many, foreach=True, momentum="int8") == wanted
    assert predicted_temporary_bytes("came", [ParameterSpec((200_000, 4096))], foreach=True) > 48 * 2**20


def test_prediction_does_not_change_parameters() -> None:
    net = model()
    before = [param.detach().clone() for param in net.parameters()]
    predicted_state_bytes("adamw", param_groups(net))
    assert all(param.grad is None for param in net.parameters())
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_prediction_refuses_unknown_options() -> None:
    with pytest.raises(UserError, match="unknown optimizer"):
        predicted_state_bytes("adamww", param_groups(model()))
    with pytest.raises(UserError, match="not an option"):
        predicted_state_bytes("came", param_groups(model()), beta=1)


def test_shared_storages_count_once() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], momentum=0.9)
    buffer = torch.zeros(100)
    optimizer.state[param] = {"a": buffer[:10], "b": buffer[10:], "c": torch.zeros(2, dtype=torch.float64), "d": 3}
    assert state_bytes(optimizer) == 400 + 16


@st.composite
def shapes_and_dims(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = tuple(draw(st.lists(st.integers(0, 24), max_size=4)))
    if len(shape) < 2 or draw(st.booleans()):
        return shape, None
    order = draw(st.permutations(range(len(shape))))
    rows = draw(st.integers(1, len(shape) - 1))
    cols = draw(st.integers(1, len(shape) - rows))
    return shape, (tuple(order[:rows]), tuple(order[rows : rows + cols]))


@settings(deadline=None)  # the first step compiles
@given(
    shapes_and_dims(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from(["auto", "last2"]),
    st.sampled_from([None, "matrix", "vector"]),
)
def test_came_state_bytes_is_exact_and_below_adam(
    case: tuple[tuple[int, ...], Any], dtype: torch.dtype, factor: Any, role: str | None
) -> None:
    shape, dims = case
    param = nn.Parameter(torch.ones(shape, dtype=dtype))
    param.grad = torch.ones_like(param)
    optimizer = CAME([{"params": [param], "matrix_dims": dims, "role": role}], lr=2e-4, factor=factor)
    optimizer.step()
    found = came_state_bytes(shape, dtype=dtype, factor=factor, matrix_dims=dims, role=role)
    assert found == state_bytes(optimizer)
    if factor == "auto":
        width = 8 if dtype == torch.float64 else 4
        assert found <= 4 + 2 * width * prod(shape)


@pytest.mark.parametrize(
    ("shape", "factor", "bytes_per_parameter"),
    [
        ((256, 256, 3, 3), "last2", 9.33),  # the published package on a convolution: more than Adam's 8
        ((256, 256, 1, 1), "last2", 20.0),
        ((256, 256, 3, 3), "auto", 4.035),
        ((256, 256, 1, 1), "auto", 4.0625),
        ((4096, 4096), "auto", 4.004),
    ],
)
def test_convolutions_need_less_state_than_adam(
    shape: tuple[int, ...], factor: Any, bytes_per_parameter: float
) -> None:
    assert came_state_bytes(shape, factor=factor) / prod(shape) == pytest.approx(bytes_per_parameter, rel=2e-3)
