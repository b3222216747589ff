"""Tests of fused products with two factors; without a GPU, their kernels run in Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import scantling as sc
from scantling.numerics.torch_private import FakeTensorMode
from scantling.tensor import launches
from scantling.tensor.contraction import Step
from scantling.tensor.low_rank_product import _in_torch, _LowRankProduct, fused_product
from tests.kernels import compile_for_gpus
from tests.tensor.test_feed_forward import DEVICE, ON_GPU, assert_close, tf32_on_a_gpu

CASES = [
    {},
    {"bias": False},
    {"tokens": 1, "inputs": 5, "rank": 1, "outputs": 3},
    {"tokens": 600, "inputs": 40, "rank": 33, "outputs": 30},
    {"tokens": 64, "inputs": 64, "rank": 128, "outputs": 32},
    {"strided": True},
]


def set_devices(monkeypatch: pytest.MonkeyPatch, *devices: str) -> None:
    monkeypatch.setattr(launches, "DEVICES", devices)


@pytest.fixture(autouse=True)
def fast_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the kernels on this device without timing them."""
    set_devices(monkeypatch, DEVICE)
    monkeypatch.setattr(launches, "is_faster", lambda *_: True)
    monkeypatch.setattr(launches, "_known", {})
    with tf32_on_a_gpu():
        yield


def make_operands(
    tokens: int = 100, inputs: int = 70, rank: int = 20, outputs: int = 90, bias: bool = True, strided: bool = False
) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, cols: int) -> Tensor:
        drawn = torch.randn(rows, cols + 3, generator=generator, dtype=torch.float64).to(DEVICE)
        return drawn[:, :cols] if strided else drawn[:, :cols].contiguous()

    found = [draw(tokens, inputs), draw(inputs, rank) / inputs**0.5, draw(rank, outputs) / rank**0.5]
    return [*found, draw(1, outputs)[0] if bias else None]


def apply_both(dtype: torch.dtype, **sizes: Any) -> list[list[Tensor | None]]:
    """Return y and all gradients from the kernels, and from torch's operations in fp64."""
    results = []
    for function, kind in ((_LowRankProduct.apply, dtype), (_in_torch, torch.float64)):
        operands = [None if one is None else one.to(kind).requires_grad_() for one in make_operands(**sizes)]
        y = function(*operands)
        y.backward(torch.linspace(-1.0, 1.0, y.numel(), dtype=kind, device=DEVICE).view_as(y))
        results.append([value.double() for value in (y, *(one.grad for one in operands if one is not None))])
    return results


@pytest.mark.parametrize("sizes", CASES)
def test_kernels_match_torch(sizes: dict[str, Any]) -> None:
    assert_close(*apply_both(torch.float32, **sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", CASES)
def test_kernels_match_torch_in_bf16(sizes: dict[str, Any]) -> None:
    assert_close(*apply_both(torch.bfloat16, **sizes), 0.02)


MODULE = nn.Module()


def product(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor | None:
    steps = Step(0, 1, *a.shape[:1], 1, a.shape[1]), Step(1, 1, *b.shape[:1], 1, b.shape[1])
    return fused_product(MODULE, x, [a, b], steps, bias)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return sc.tensorize(nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)), rank=4).to(DEVICE)


def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y, *(param.grad for param in model.parameters() if param.grad is not None)]


def test_layers_take_the_kernels_and_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    apply = _LowRankProduct.apply
    monkeypatch.setattr(_LowRankProduct, "apply", lambda *operands: launched.append(operands) or apply(*operands))
    model, x = make_model(), torch.randn(200, 64, device=DEVICE)
    runs = [run(model, x) for _ in range(2)]
    assert len(launched) == 4
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
    set_devices(monkeypatch)
    expected = run(copy.deepcopy(model), x)
    assert len(launched) == 4
    assert_close(runs[0], expected)
    # y = x A B with frozen cores: only x needs a gradient
    set_devices(monkeypatch, DEVICE)
    model.requires_grad_(False)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    set_devices(monkeypatch)
    assert_close([grad], list(torch.autograd.grad(model(x).sum(), x)))


def test_slower_kernels_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each power of 2 of tokens is timed once; the timing of a checkpointed pass does not count as a part of it."""
    names: list[str] = []

    def time_both(device: Any, name: str, kernel: Any, other: Any) -> bool:
        if name not in names:
            names.append(name)
            for work in (kernel, other):
                work()()
        return False

    monkeypatch.setattr(launches, "is_faster", time_both)
    x, a, b, bias = (one if one is None else one.float() for one in make_operands())
    assert product(x, a, b, bias) is None
    model = make_model()
    for tokens in (128, 100, 129):
        x = torch.randn(tokens, 64, device=DEVICE, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert len(names) == 1 + 2 * 2
    assert len({name for name in names if "product of 128 x 64" in name}) == 1


def test_ranks_beyond_the_tiles_and_other_dtypes_are_refused() -> None:
    x, a, b, bias = (one if one is None else one.float() for one in make_operands())
    assert product(x, a, b, bias) is not None
    assert product(x, a.repeat(1, 7), b.repeat(7, 1), bias) is None
    assert product(x.double(), a.double(), b.double(), bias.double()) is None
    assert product(x[:0], a, b, bias) is None
    with torch.no_grad():
        assert product(x, a, b, bias) is None
    assert product(x.as_subclass(Subclass), a, b, bias) is None
    assert product(x, a.as_subclass(Subclass), b, bias) is None
    with FlopCounterMode(display=False):  # it would not see the kernels
        assert product(x, a, b, bias) is None
    with forward_ad.dual_level():
        assert product(x, a, b, bias) is None


class Subclass(Tensor):
    """Tensor whose values may lie elsewhere."""


def test_second_derivatives_and_batched_gradients() -> None:
    results = []
    for function in (_LowRankProduct.apply, _in_torch):
        x, a, b, bias = operands = [one.detach().requires_grad_() for one in make_operands(tokens=9) if one is not None]
        y = function(x, a * x.mean(), b, bias)  # one operand depends on another one
        first = torch.autograd.grad(y.square().sum(), operands, create_graph=True)
        second = torch.autograd.grad(sum(one.square().sum() for one in first), operands)
        y = function(*operands)
        upstream = torch.linspace(-1.0, 1.0, 3 * y.numel(), dtype=y.dtype, device=DEVICE).view(3, *y.shape)
        results.append([*first, *second, *torch.autograd.grad(y, operands, upstream, is_grads_batched=True)])
    assert_close(*results)


def test_fp32_without_tf32_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both settings of TF32 are read, the old one and the new one."""
    with FakeTensorMode():
        x = torch.empty(2, 2, device="cuda")
    monkeypatch.setattr(launches, "DEVICES", ("cuda",))
    monkeypatch.setattr(launches, "has_kernels", lambda _: True)
    monkeypatch.setattr(launches, "can_multiply", lambda *_: True)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert launches.launch_dtype(MODULE, x) is None
        assert launches.launch_dtype(MODULE, x.bfloat16()) == torch.bfloat16
        torch.set_float32_matmul_precision("high")
        assert launches.launch_dtype(MODULE, x) == torch.float32
    finally:
        torch.set_float32_matmul_precision(before)
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    try:
        settings.fp32_precision = "tf32"
        assert launches.launch_dtype(MODULE, x) == torch.float32
        settings.fp32_precision = "ieee"
        assert launches.launch_dtype(MODULE, x) is None
    finally:
        settings.fp32_precision = before


def test_timings_are_those_of_one_version_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is timed outside of autocast."""
    names: list[str] = []

    def time_kernel(device: Any, name: str, kernel: Any, other: Any) -> bool:
        names.append(name)
        assert not torch.is_autocast_enabled(DEVICE)
        kernel()()
        return True

    monkeypatch.setattr(launches, "is_faster", time_kernel)
    x, a, b, bias = (one if one is None else one.float() for one in make_operands())
    with torch.autocast(DEVICE, torch.bfloat16):
        product(x, a, b, bias)
    monkeypatch.setattr(launches, "precision", lambda: "another")
    product(x, a, b, bias)
    monkeypatch.setattr(launches, "_kernels_version", lambda: "another")
    monkeypatch.setattr(launches, "_known", {})
    product(x, a, b, bias)
    product(x, a, b, None)
    assert len(set(names)) == 4
    assert names[0].startswith("product of 128 x 70, 70 x 20, 20 x 90, 90, torch.bfloat16, ")


def test_a_repeated_pass_takes_the_operations_of_the_first() -> None:
    """Whichever of the two passes of a checkpoint runs in a dispatch mode."""
    x = torch.randn(200, 64, device=DEVICE, requires_grad=True)
    results = []
    for modes in (
        (nullcontext(), nullcontext()),
        (FlopCounterMode(display=False), nullcontext()),
        (nullcontext(), FlopCounterMode(display=False)),
    ):
        model = make_model()
        with modes[0]:
            y = checkpoint(model, x, use_reentrant=False)
        with modes[1]:
            y.sum().backward()
        results.append([param.grad for param in model.parameters()])
    for found in results[1:]:
        assert_close(found, results[0])


def test_dtypes_that_torch_would_not_multiply_are_refused() -> None:
    x, a, b, bias = (one if one is None else one.float() for one in make_operands())
    assert product(x.bfloat16(), a, b, bias) is None
    assert product(x, a.double(), b, bias) is None
    with torch.autocast(DEVICE, torch.bfloat16):
        assert product(x.double(), a.double(), b.double(), bias.double()) is None
        assert product(x.half(), a, b, bias) is not None


def test_tangents_of_gradients_stay() -> None:
    x, a, b, bias = (one if one is None else one.float().requires_grad_() for one in make_operands(tokens=9))
    tangents = []
    for function in (_LowRankProduct.apply, _in_torch):
        y = function(x, a, b, bias)
        upstream = torch.ones_like(y)
        with forward_ad.dual_level():
            (grad,) = torch.autograd.grad(y, x, forward_ad.make_dual(upstream, 2.0 * upstream), retain_graph=True)
            tangents.append(forward_ad.unpack_dual(grad).tangent)
        _, tangent = torch.func.jvp(lambda v, y=y: torch.autograd.grad(y, x, v)[0], (upstream,), (upstream,))
        tangents.append(2.0 * tangent)
    for found in tangents[1:]:
        assert_close([found], tangents[:1])


def test_gradients_of_biases_keep_no_other_memory() -> None:
    operands = [one if one is None else one.float().requires_grad_() for one in make_operands(tokens=2000)]
    _LowRankProduct.apply(*operands).sum().backward()
    grad = operands[3].grad
    assert grad.untyped_storage().nbytes() == grad.nbytes


def test_autocast_stays() -> None:
    x, a, b, bias = (one if one is None else one.float() for one in make_operands())
    with torch.autocast(DEVICE, torch.bfloat16):
        y = product(x, a, b, bias)
    assert y is not None
    assert y.dtype == torch.bfloat16


@pytest.mark.skipif(ON_GPU, reason="there the kernels run")
def test_kernels_compile_for_gpus() -> None:
    compile_for_gpus(COMPILE, max_spills=32)


COMPILE = """
from scantling.tensor import kernels
from scantling.tensor.launches import MAX_RANK
from scantling.tensor.low_rank_product import constants

sizes = "tokens inputs rank outputs width chunks tiles".split()
for kind in ("*bf16", "*fp32"):
    for rank in (30, MAX_RANK):
        for kernel, options in (
            (kernels.low_rank_product, {"has_bias": True}),
            (kernels.low_rank_input_gradient, {}),
            (kernels.outer_sums, {"has_sums": True}),
        ):
            types = {name: "i32" if name in sizes or "stride" in name else kind for name in kernel.arg_names}
            ptx = build(kernel, capability, types, **{**constants(rank), "precision": "tf32"}, **options)
            assert "mma" in ptx, "no tensor cores"
"""
