"""Tests of CAME's mathematics: against an independent oracle, the authors' package, and known properties."""

from __future__ import annotations

import itertools
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from came_oracle import Oracle
from came_pytorch import CAME as PublishedCAME
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scantling.optim import CAME
from scantling.optim import _eager as eager

SHAPES = [(), (1,), (7,), (5, 9), (1, 6), (24, 33), (3, 20, 17), (2, 1, 18, 16), (4, 3, 3, 3)]
CONFIDENT = (0.9, 0.95, 0.995)


def parameter(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))


def gradients(shape: tuple[int, ...], steps: int, seed: int = 1) -> list[Tensor]:
    """Return gradients whose rows differ in scale, with occasional zero rows, as in an embedding."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(shape[:1], generator=generator, dtype=torch.float64).exp().reshape(-1, *[1] * (len(shape) - 1))
    result = []
    for step in range(steps):
        grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        grad = grad * scale if shape else grad
        if len(shape) > 1 and step % 3:
            grad[step % shape[0]] = 0.0
        result.append(grad * (1.0 + step % 4))
    return result


def lr_at(step: int) -> float:
    return 2e-3 * (1 + step % 5) / 5


def run(optimizer: torch.optim.Optimizer, param: nn.Parameter, grads: list[Tensor]) -> Tensor:
    for step, grad in enumerate(grads):
        optimizer.param_groups[0]["lr"] = lr_at(step)
        param.grad = grad.to(param.dtype)
        optimizer.step()
    return param.detach()


def run_oracle(param: Tensor, view: Any, grads: list[Tensor], **options: Any) -> Tensor:
    oracle = Oracle(param.detach().double().numpy().copy(), view, **options)
    for step, grad in enumerate(grads):
        oracle.step(grad.numpy(), lr_at(step))
    return torch.from_numpy(np.ascontiguousarray(oracle.value())).reshape(param.shape)


def last_two(shape: tuple[int, ...]) -> Any:
    return ((len(shape) - 2,), (len(shape) - 1,)) if len(shape) > 1 else None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.3},
        {"debias": True, "betas": CONFIDENT, "weight_decay": 0.1},
        {"debias": True, "betas": (0.0, 0.9, 0.0)},
        {"maximize": True, "clip_threshold": 0.2, "eps": (1e-12, 1e-6)},
        {"confidence": False, "debias": True, "betas": CONFIDENT, "weight_decay": 0.1},
        {"debias": True, "betas": (0.0, 0.95, 0.995), "weight_decay": 0.1},
        {"clip_threshold": 1e200},
    ],
    ids=["default", "decay", "debias", "zero betas", "maximize", "no confidence", "no momentum", "no clip"],
)
def test_came_matches_oracle(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    param, grads = parameter(shape), gradients(shape, 60)
    expected = run_oracle(param, last_two(shape), grads, **options)
    found = run(CAME([param], factor="last2", **{"lr": 2e-4, **options}), param, grads)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_came_matches_published_package(
    shape: tuple[int, ...], weight_decay: float, dtype: torch.dtype, tolerance: float
) -> None:
    ours, theirs, grads = parameter(shape, dtype=dtype), parameter(shape, dtype=dtype), gradients(shape, 60)
    expected = run(PublishedCAME([theirs], lr=1e-3, weight_decay=weight_decay), theirs, grads)
    found = run(CAME([ours], lr=2e-4, factor="last2", weight_decay=weight_decay), ours, grads)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "matrix_dims", "view"),
    [
        ((20, 2, 3, 3), None, ((0,), (1, 2, 3))),  # a convolution
        ((20, 2, 3, 3, 1), None, ((0,), (1, 2, 3, 4))),
        ((3, 20, 17), None, ((1,), (2,))),  # a stack of matrices
        ((20, 6, 3), ((0,), (1, 2)), ((0,), (1, 2))),  # a 1-D convolution
        ((5, 4, 16), ((0, 1), (2,)), ((0, 1), (2,))),  # a tensor-train core
        ((4, 18, 5), ((1,), (0, 2)), ((1,), (0, 2))),
        ((17, 2, 16), ((2,), (0,)), ((2,), (0,))),  # batch dim between the others
        ((16, 16), None, ((0,), (1,))),
        ((15, 100), None, None),  # a short side
        ((100, 15), None, None),
        ((4, 3, 3, 3), None, None),
        ((64, 1, 3, 3), None, None),  # depthwise
        ((40,), None, None),
    ],
    ids=str,
)
def test_auto_factor_selects_matrix_dims(shape: tuple[int, ...], matrix_dims: Any, view: Any) -> None:
    param, grads = parameter(shape), gradients(shape, 20)
    expected = run_oracle(param, view, grads, debias=True, betas=CONFIDENT)
    optimizer = CAME([{"params": [param], "matrix_dims": matrix_dims}], lr=2e-4, debias=True, betas=CONFIDENT)
    torch.testing.assert_close(run(optimizer, param, grads), expected, rtol=1e-12, atol=1e-12)


def test_auto_factor_skips_vectors() -> None:
    param, grads = parameter((20, 30)), gradients((20, 30), 10)
    expected = run_oracle(param, None, grads)
    found = run(CAME([{"params": [param], "role": "vector"}], lr=2e-4), param, grads)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("limit", [1, 7, 40, 300])
@pytest.mark.parametrize("shape", [(500,), (24, 33), (3, 20, 17), (20, 2, 3, 3)], ids=str)
def test_tile_size_does_not_change_result(shape: tuple[int, ...], limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, tiled, grads = parameter(shape), parameter(shape), gradients(shape, 5)
    expected = run(CAME([whole], lr=2e-4, weight_decay=0.1, debias=True), whole, grads)
    monkeypatch.setattr(eager, "CPU_TILE", limit)
    assert len(eager.split_tiles(tuple(tiled.shape), limit, tiled.ndim)) > 1
    found = run(CAME([tiled], lr=2e-4, weight_decay=0.1, debias=True), tiled, grads)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (5,), (24, 33), (1, 1, 40), (3, 20, 17), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("limit", [1, 7, 50, 10**6])
def test_split_tiles_covers_every_element_once(shape: tuple[int, ...], limit: int) -> None:
    seen = torch.zeros(shape)
    for tile in eager.split_tiles(shape, limit, len(shape)):
        eager.tile_view(seen, tile).add_(1.0)
        assert eager.tile_view(seen, tile).numel() <= limit
    assert bool((seen == 1.0).all())


class ScratchMeter(TorchDispatchMode):
    """Dispatch mode that records the elements of the largest allocated tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(200, 50), (4, 60, 50), (9000,), (30, 10, 3, 3)], ids=str)
def test_scratch_does_not_grow_with_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "CPU_TILE", 1000)
    param = parameter(shape, dtype=dtype)
    optimizer = CAME([param], lr=2e-4, weight_decay=0.1, debias=True, foreach=False)
    run(optimizer, param, gradients(shape, 1))
    with ScratchMeter() as meter:
        optimizer.step()
    assert 0 < meter.largest <= 1000


def test_first_step_without_debias_is_11_lr() -> None:
    """If all gradients have one magnitude: lr (1 - b1) / (b1 sqrt(1 - b3)) for a matrix, 0.1 lr for a vector."""
    for betas in ((0.9, 0.999, 0.9999), CONFIDENT):
        matrix, vector = nn.Parameter(torch.zeros(32, 48)), nn.Parameter(torch.zeros(40))
        for param in (matrix, vector):
            param.grad = torch.sign(torch.randn_like(param)) * 3.0
        CAME([matrix, vector], lr=1e-3, betas=betas).step()
        b1, _, b3 = betas
        expected = -1e-3 * (1 - b1) / (b1 * sqrt(1 - b3))
        torch.testing.assert_close(matrix.detach(), expected * matrix.grad.sign(), rtol=1e-5, atol=0.0)
        torch.testing.assert_close(vector.detach(), -1e-3 * (1 - b1) * vector.grad.sign(), rtol=1e-5, atol=0.0)
    assert expected == pytest.approx(-1.571e-3, rel=1e-3)


@pytest.mark.parametrize("betas", [(0.9, 0.999, 0.9999), CONFIDENT])
def test_first_debiased_step_equals_adam(betas: tuple[float, float, float]) -> None:
    """lr / b1 for a matrix, from the residual u - (1 - b1) u, and lr for a vector; in fp32, where 1 - b^t cancels."""
    matrix, vector = nn.Parameter(torch.zeros(32, 48)), nn.Parameter(torch.zeros(40))
    for param in (matrix, vector):
        param.grad = torch.sign(torch.randn_like(param)) * 3.0
    CAME([matrix, vector], lr=1e-3, betas=betas, debias=True).step()
    torch.testing.assert_close(matrix.detach(), -1e-3 / betas[0] * matrix.grad.sign(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(vector.detach(), -1e-3 * vector.grad.sign(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {1: 11.11, 30: 46.48, 200: 48.91}),
        ({"debias": True, "betas": CONFIDENT}, {1: 1.11, 30: 2.73, 200: 8.88}),
        ({"debias": True, "betas": CONFIDENT, "confidence": False}, {1: 1.0, 30: 1.0, 200: 1.0}),
    ],
    ids=str,
)
def test_step_sizes_with_constant_gradients(options: dict[str, Any], expected: dict[int, float]) -> None:
    """Check the step lengths in the documentation, in multiples of lr."""
    param = nn.Parameter(torch.zeros(32, 32))
    param.grad = torch.ones(32, 32)
    optimizer, found = CAME([param], lr=1.0, **options), {}
    for step in range(1, 201):
        before = param.detach().clone()
        optimizer.step()
        found[step] = float((before - param.detach()).mean())
    assert {step: found[step] for step in expected} == pytest.approx(expected, rel=0.01)


def test_debias_vanishes_after_many_steps() -> None:
    grads = gradients((20, 30), 400)
    betas = (0.5, 0.6, 0.7)
    a, b = parameter((20, 30)), parameter((20, 30))
    plain, debiased = CAME([a], lr=2e-4, betas=betas), CAME([b], lr=2e-4, betas=betas, debias=True)
    run(plain, a, grads)
    run(debiased, b, grads)
    before_a, before_b = a.detach().clone(), b.detach().clone()
    run(plain, a, grads[:1])
    run(debiased, b, grads[:1])
    torch.testing.assert_close(a.detach() - before_a, b.detach() - before_b, rtol=1e-9, atol=1e-12)


def test_transposed_parameter_takes_transposed_steps() -> None:
    grads = gradients((24, 33), 30)
    a = parameter((24, 33))
    b = nn.Parameter(a.detach().T.contiguous())
    found = run(CAME([a], lr=2e-4, weight_decay=0.1), a, grads)
    transposed = run(CAME([b], lr=2e-4, weight_decay=0.1), b, [grad.T.contiguous() for grad in grads])
    torch.testing.assert_close(found, transposed.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_gradient_scale_does_not_matter(scale: float, debias: bool) -> None:
    grads = [torch.randn(24, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(30)]
    a, b = parameter((24, 33)), parameter((24, 33))
    found = run(CAME([a], lr=2e-4, debias=debias, eps=(0.0, 1e-16)), a, grads)
    scaled = run(CAME([b], lr=2e-4, debias=debias, eps=(0.0, 1e-16)), b, [grad * scale for grad in grads])
    torch.testing.assert_close(found, scaled, rtol=1e-11, atol=1e-11)


def test_stacked_experts_share_only_the_clip() -> None:
    grads = gradients((3, 20, 17), 20)
    options: dict[str, Any] = {"debias": True, "betas": CONFIDENT}

    def step_separately(threshold: float) -> tuple[Tensor, Tensor]:
        stack = parameter((3, 20, 17))
        singles = [nn.Parameter(expert.clone()) for expert in stack.detach()]
        for i, single in enumerate(singles):
            run(CAME([single], lr=2e-4, clip_threshold=threshold, **options), single, [grad[i] for grad in grads])
        return run(CAME([stack], lr=2e-4, clip_threshold=threshold, **options), stack, grads), torch.stack(
            singles
        ).detach()

    torch.testing.assert_close(*step_separately(1e6), rtol=1e-12, atol=1e-12)
    stacked, single = step_separately(0.5)
    assert (stacked - single).abs().max() > 1e-4


def test_rows_without_gradients_stay_finite() -> None:
    """Here row / mean(row) would underflow to 0, and 0 * inf is NaN, as in the published package."""

    def step(cls: type[torch.optim.Optimizer]) -> Tensor:
        param = nn.Parameter(torch.ones(32, 32))
        param.grad = torch.zeros(32, 32)
        param.grad[0] = 1e12
        cls([param], lr=1e-3).step()
        return param.detach()

    assert not step(PublishedCAME).isfinite().all()
    found = step(CAME)
    assert found.isfinite().all()
    assert torch.equal(found[1:], torch.ones(31, 32))


@pytest.mark.parametrize("debias", [False, True])
def test_zero_gradient_changes_nothing(debias: bool) -> None:
    params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer = CAME(params, lr=1e-2, debias=debias)
    for _ in range(3):
        optimizer.step()
    assert all(torch.equal(param.detach(), torch.ones_like(param)) for param in params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_round_fp32_step_once(dtype: torch.dtype) -> None:
    shapes = [(24, 33), (7,), (20, 2, 3, 3)]
    low = [parameter(shape, dtype=dtype) for shape in shapes]
    high = [nn.Parameter(param.detach().float()) for param in low]
    foreach = False if dtype == torch.float16 else None  # use the same implementation for both
    a, b = (CAME(params, lr=1e-2, weight_decay=0.1, debias=True, foreach=foreach) for params in (low, high))
    for step in range(10):
        for p, q in zip(low, high, strict=True):
            p.grad = gradients(tuple(p.shape), 10)[step].to(dtype)
            q.grad = p.grad.float()
            q.data.copy_(p.detach())
        a.step()
        b.step()
        for p, q in zip(low, high, strict=True):
            assert torch.equal(p.detach(), q.detach().to(dtype))
            for key, value in a.state[p].items():
                assert value.dtype == torch.float32
                assert torch.equal(value, b.state[q][key])


def test_memory_format_does_not_matter() -> None:
    grads = gradients((20, 8, 3, 3), 10)
    plain = parameter((20, 8, 3, 3))
    channels_last = nn.Parameter(plain.detach().clone(memory_format=torch.channels_last))
    expected = run(CAME([plain], lr=2e-4), plain, grads)
    optimizer = CAME([channels_last], lr=2e-4)
    found = run(optimizer, channels_last, [grad.to(memory_format=torch.channels_last) for grad in grads])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert optimizer.state[channels_last]["exp_avg"].stride() == channels_last.stride()


def test_steps_are_deterministic() -> None:
    def once() -> list[Tensor]:
        params = [parameter(shape, dtype=torch.float32) for shape in SHAPES]
        optimizer = CAME(params, lr=1e-2, debias=True)
        for step in range(5):
            for param in params:
                param.grad = gradients(tuple(param.shape), 5)[step].float()
            optimizer.step()
        return [param.detach() for param in params]

    assert all(itertools.starmap(torch.equal, zip(once(), once(), strict=True)))


class NoHostSync(TorchDispatchMode):
    """Dispatch mode that fails on operations that synchronize with the device: reading a value, finding nonzeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)], ids=["float", "tensor"])
@pytest.mark.parametrize("debias", [False, True])
def test_step_has_no_device_sync(debias: bool, lr: float | Tensor) -> None:
    params = [parameter(shape, dtype=torch.float32) for shape in SHAPES]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = CAME(params, lr=lr, weight_decay=0.1, debias=debias, foreach=False)
    with NoHostSync():
        optimizer.step()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"debias": True, "weight_decay": 0.1}, {"maximize": True}], ids=str)
def test_updates_are_in_place(options: dict[str, Any]) -> None:
    params = [parameter(shape, dtype=torch.float32) for shape in SHAPES]
    optimizer = CAME(params, lr=1e-3, **options)

    def addresses() -> list[int]:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        states = [value for param in params for value in optimizer.state[param].values()]
        return [tensor.data_ptr() for tensor in [*params, *states]]

    grads = [torch.ones(shape) for shape in SHAPES]
    assert addresses() == addresses()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True) if p.grad is not None)
