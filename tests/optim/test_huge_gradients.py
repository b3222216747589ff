"""Tests of finite gradients whose squares, or sums of squares, overflow fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from scantling.errors import NonFiniteError
from scantling.optim import _cpu, _triton
from scantling.optim.registry import build_optimizer

SHAPES = [(64, 48), (3, 20, 130), (40, 8), (50,)]
FINITE = [3e18, 1e19, 1e25, 1e36, 3.3e38]
PATTERNS = ["all", "one", "row", "once", "spread"]
DRIVERS = ["native", "eager", "kernels"]
KINDS: list[dict[str, Any]] = [
    {"momentum": "fp32"},
    {"momentum": "int8", "debias": True, "maximize": True, "weight_decay": 0.1},
    {"momentum": "int4"},
    {"momentum": "bf16", "confidence": False},
    {"betas": (0.0, 0.999, 0.9999)},
    {"factor": "last2"},
]


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and _cpu._library() is None:
        pytest.skip("no C compiler here")
    if request.param == "kernels":
        pytest.importorskip("triton", reason="the kernels for GPUs are in Triton, which is not installed")
        if torch.cuda.is_available():
            pytest.skip("the kernels are interpreted only without a GPU")
        monkeypatch.setattr(_triton, "DEVICES", ("cpu",))
        monkeypatch.setattr(_cpu, "can_step", lambda step: False)
        _triton._cached_tables.cache_clear()
    return str(request.param)


def gradient(shape: tuple[int, ...], pattern: str, magnitude: float, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    noise = torch.randn(shape, generator=generator)
    if pattern == "all" or (pattern == "once" and step == 1):
        return noise.sign() * magnitude
    if pattern == "spread":
        exponents = torch.rand(shape, generator=generator) * torch.tensor(magnitude).log10()
        return noise.sign() * (10.0**exponents).clamp(max=magnitude)
    if pattern == "one":
        noise.view(-1)[noise.numel() // 2] = magnitude
    elif pattern == "row":
        noise[0] = magnitude
    return noise


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in SHAPES]


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {
            "params": [param],
            "role": "vector" if param.ndim < 2 else "matrix",
            "matrix_dims": None if param.ndim < 2 else ((param.ndim - 2,), (param.ndim - 1,)),
        }
        for param in params
    ]


def train(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], pattern: str, magnitude: float, steps: int = 3
) -> None:
    for step in range(steps):
        for param in params:
            param.grad = gradient(tuple(param.shape), pattern, magnitude, step)
            assert param.grad.isfinite().all()
        optimizer.step()


def came(driver: str, **kind: Any) -> tuple[list[nn.Parameter], sc.CAME]:
    params = parameters()
    return params, sc.CAME(groups(params), lr=1e-3, foreach=False if driver == "eager" else None, **kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_came_stays_finite(driver: str, kind: dict[str, Any]) -> None:
    cases = [(pattern, magnitude) for pattern in PATTERNS for magnitude in FINITE]
    if driver == "kernels":
        cases = [("once", 1e19), ("all", 3.3e38)]  # the interpreter is slow
    for pattern, magnitude in cases:
        params, optimizer = came(driver, **kind)
        train(optimizer, params, pattern, magnitude)
        for param in params:
            assert param.isfinite().all(), (pattern, magnitude)
            for key, value in optimizer.state[param].items():
                assert value.isfinite().all(), (pattern, magnitude, key)


@pytest.mark.parametrize("driver", ["native", "kernels"], indirect=True)
@pytest.mark.parametrize(("pattern", "magnitude"), [("all", 3e18), ("all", 1e25), ("row", 1e19), ("spread", 1e25)])
def test_came_drivers_take_same_step(driver: str, magnitude: float, pattern: str) -> None:
    (params, optimizer), (others, reference) = came(driver, debias=True), came("eager", debias=True)
    train(optimizer, params, pattern, magnitude, steps=2)
    train(reference, others, pattern, magnitude, steps=2)
    assert all((param != 1.0).any() for param in params)
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)
        for key, value in optimizer.state[param].items():
            torch.testing.assert_close(value, reference.state[other][key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kind", [{}, {"confidence": False}], ids=str)
def test_came_passes_on_nonfinite_gradients(driver: str, kind: dict[str, Any], bad: float) -> None:
    params, optimizer = came(driver, **kind)
    for param in params:
        param.grad = gradient(tuple(param.shape), "all", 1.0, 0)
        param.grad.view(-1)[3] = bad
    optimizer.step()
    assert all(not param.isfinite().all() for param in params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_came_stays_finite_in_other_dtypes(dtype: torch.dtype) -> None:
    for foreach in (None, False):
        params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
        optimizer = sc.CAME(params, lr=1e-3, foreach=foreach)
        for _ in range(3):
            for param in params:
                param.grad = torch.full_like(param, torch.finfo(dtype).max)
            optimizer.step()
        for param in params:
            assert param.isfinite().all()
            assert all(value.isfinite().all() for value in optimizer.state[param].values())


def test_released_gradients_stay_finite() -> None:
    model = nn.Linear(32, 32)
    optimizer = sc.CAME(sc.param_groups(model), lr=1e-3)
    with sc.optim.release_gradients(model, optimizer):
        (model(torch.ones(1, 32)).sum() * 1e19).backward()
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("name", ["adamw", "muon", "sign", "signum"])
@pytest.mark.parametrize("magnitude", FINITE[:-1])  # the largest magnitude overflows AdamW's difference, too
def test_other_optimizers_stay_finite(name: str, magnitude: float) -> None:
    for pattern in PATTERNS:
        params = parameters()
        options = {"momentum": 0.9} if name == "signum" else {}
        optimizer = build_optimizer(name.replace("signum", "sign"), groups(params), lr=1e-3, **options)
        train(optimizer, params, pattern, magnitude)
        assert all(param.isfinite().all() for param in params), pattern


@pytest.mark.parametrize("magnitude", FINITE)
@pytest.mark.parametrize("options", [{}, {"update": "muon"}, {"values": "fp32", "update": "identity"}], ids=str)
def test_demo_stays_finite_or_refuses_the_step(magnitude: float, options: dict[str, Any]) -> None:
    for pattern in ("all", "row"):
        params = parameters()
        optimizer = sc.DeMo(groups(params), lr=1e-3, **options)
        try:
            train(optimizer, params, pattern, magnitude)
        except NonFiniteError:
            assert magnitude > 1e30
        assert all(param.isfinite().all() for param in params)
