"""Tests of the GPU kernels against the same step in PyTorch operations; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from scantling.numerics import device as numerics_device
from scantling.optim import CAME, _cpu, _triton, release_gradients
from scantling.optim.codecs import read_weight
from tests.kernels import compile_for_gpus

pytest.importorskip("triton", reason="the kernels for GPUs are in Triton, which is not installed")
from scantling.numerics import kernels as numerics_kernels

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

SHAPES: list[tuple[int, ...]] = [(40, 33), (40, 33), (3, 20, 130), (20, 4, 3, 3), (5,), (40, 8), (), (64, 256)]
FEW: list[tuple[int, ...]] = [(40, 33), (40, 33), (3, 20, 130), (5,)]
LAST2: list[tuple[int, ...]] = [(40, 33), (3, 20, 130), (4, 2, 3, 3), (5,), (40, 8), ()]
"""Matrix dims that give a 3 x 3 matrix for each pair of the first two dims of a convolution."""
DEBIASED = {"debias": True, "weight_decay": 0.1, "betas": (0.9, 0.95, 0.995)}
CASES: list[tuple[str, str, torch.dtype, dict[str, Any]]] = [
    ("fp32", "nearest", torch.float32, {"shapes": FEW}),
    ("fp32", "nearest", torch.float32, DEBIASED),
    ("fp32", "nearest", torch.float32, {**DEBIASED, "maximize": True, "factor": "last2", "shapes": LAST2}),
    ("fp32", "nearest", torch.float16, {**DEBIASED, "shapes": FEW}),
    ("bf16", "stochastic", torch.bfloat16, {**DEBIASED, "shapes": FEW}),
    ("int8", "compensated", torch.bfloat16, {}),
    ("int4", "stochastic", torch.bfloat16, DEBIASED),
    ("int4", "compensated", torch.bfloat16, {**DEBIASED, "shapes": FEW}),
    ("fp32", "nearest", torch.float32, {**DEBIASED, "confidence": False, "shapes": FEW}),
    ("int8", "stochastic", torch.bfloat16, {**DEBIASED, "confidence": False, "shapes": FEW}),
    ("fp32", "nearest", torch.float32, {**DEBIASED, "betas": (0.0, 0.95, 0.995), "shapes": FEW}),
    ("fp32", "compensated", torch.bfloat16, {**DEBIASED, "betas": (0.0, 0.95, 0.995), "shapes": FEW}),
    ("fp32", "nearest", torch.float32, {"clip_threshold": 1e200, "shapes": FEW}),
]


@pytest.fixture(autouse=True)
def everything_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "DEVICES", (DEVICE,))
    monkeypatch.setattr(_cpu, "can_step", lambda step: False)
    _triton._cached_tables.cache_clear()


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shapes of parameters that the kernels have stepped."""
    shapes: list[tuple[int, ...]] = []
    begin = _triton.BatchStages.begin

    def recorded(self: _triton.BatchStages, *args: Any) -> None:
        shapes.extend(tuple(layout.param.shape) for layout in self._layouts)
        begin(self, *args)

    monkeypatch.setattr(_triton.BatchStages, "begin", recorded)
    return shapes


def trained(
    dtype: torch.dtype, *, shapes: list[tuple[int, ...]] = SHAPES, steps: int = 2, **options: Any
) -> tuple[list[nn.Parameter], CAME]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]
    optimizer = CAME(params, lr=1e-2, **options)
    for step in range(steps):
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = 1e-2 / (step + 1)
            group["betas"] = (group["betas"][0] * (1.0 - 0.01 * step), *group["betas"][1:])
            group["weight_decay"] *= 0.9
        for param in params:
            grad = torch.randn(param.shape, generator=generator) * (1 + torch.rand(param.shape, generator=generator))
            param.grad = grad.to(DEVICE, dtype)
        optimizer.step()
    return params, optimizer


def assert_close_steps(both: list[tuple[list[nn.Parameter], CAME]], *, exact: bool) -> None:
    for param, other in zip(both[0][0], both[1][0], strict=True):
        state, wanted = both[0][1].state[param], both[1][1].state[other]
        values = [read_weight(p.detach(), s.get("low"), torch.float32) for p, s in ((param, state), (other, wanted))]
        near = (values[0] - values[1]).abs() <= (1e-6 if exact else 2e-5) * (1 + values[1].abs())
        assert near.float().mean() >= (1.0 if exact else 0.97)
        assert torch.equal(state["step"], wanted["step"])
        for key in ("row", "col", "res_row", "res_col", "exp_avg_sq"):
            if key in wanted:
                torch.testing.assert_close(state[key], wanted[key], rtol=1e-5 if exact else 1e-2, atol=0)


@pytest.mark.parametrize(("momentum", "rounding", "dtype", "options"), CASES, ids=str)
def test_kernels_match_eager_step(
    momentum: str, rounding: str, dtype: torch.dtype, options: Any, stepped: list[tuple[int, ...]]
) -> None:
    both = [
        trained(dtype, momentum=momentum, rounding=rounding, foreach=foreach, **options) for foreach in (None, False)
    ]
    assert sorted(stepped) == sorted(2 * options.get("shapes", SHAPES))
    assert_close_steps(both, exact=dtype == torch.float32)


def test_kernel_noise_matches_eager_noise() -> None:
    """Nearly equal values round to the same neighbors; different noise would send half of them elsewhere."""
    options = {"momentum": "int4", "rounding": "stochastic", "shapes": [(64, 256), (33, 129)], "steps": 1}
    both = [trained(torch.bfloat16, foreach=foreach, **options) for foreach in (None, False)]
    for param, other in zip(both[0][0], both[1][0], strict=True):
        assert (param == other).float().mean() > 0.99
        codes = [optimizer.state[p]["exp_avg_codes"] for (_, optimizer), p in zip(both, (param, other), strict=True)]
        assert (codes[0] == codes[1]).float().mean() > 0.99


def test_batches_do_not_change_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch per parameter gives the same bits as one launch for all."""
    together = trained(torch.float32, shapes=FEW, momentum="fp32", **DEBIASED)
    monkeypatch.setattr(_triton, "MAX_SCRATCH", 1)
    alone = trained(torch.float32, shapes=FEW, momentum="fp32", **DEBIASED)
    for param, other in zip(together[0], alone[0], strict=True):
        assert torch.equal(param, other)


def test_lr_tensor_matches_float() -> None:
    options = {**DEBIASED, "capturable": True, "shapes": FEW}
    both = [trained(torch.float32, foreach=foreach, **options) for foreach in (None, False)]
    assert_close_steps(both, exact=True)


def swap_data(params: list[nn.Parameter], optimizer: CAME) -> None:
    params[0].data = params[0].data * 0.5


def reshape_data(params: list[nn.Parameter], optimizer: CAME) -> None:
    optimizer.slice_state(params[0], 0, torch.arange(20))
    params[0].data = params[0].data[:20]
    params[0].grad = None


def replace_state(params: list[nn.Parameter], optimizer: CAME) -> None:
    optimizer.state[params[0]]["row"] = optimizer.state[params[0]]["row"] * 2.0


def swap_state(params: list[nn.Parameter], optimizer: CAME) -> None:
    optimizer.state[params[0]]["row"].data = optimizer.state[params[0]]["row"].data * 2.0


def load_state(params: list[nn.Parameter], optimizer: CAME) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def drop_gradient(params: list[nn.Parameter], optimizer: CAME) -> None:
    params[1].grad = None


def negate_gradient(params: list[nn.Parameter], optimizer: CAME) -> None:
    params[0].grad = torch.randn(params[0].shape, dtype=torch.complex64, device=DEVICE).conj().imag


def transpose_gradient(params: list[nn.Parameter], optimizer: CAME) -> None:
    params[0].grad = torch.randn(params[0].shape[::-1], device=DEVICE).t()


def add_group(params: list[nn.Parameter], optimizer: CAME) -> None:
    params.append(nn.Parameter(torch.ones(20, 30, device=DEVICE)))
    optimizer.add_param_group({"params": [params[-1]], "lr": 0.1})


def change_numbers(params: list[nn.Parameter], optimizer: CAME) -> None:
    optimizer.param_groups[0] |= {"lr": 0.5, "betas": (0.5, 0.6, 0.7), "eps": (1e-10, 1e-10), "clip_threshold": 0.1}


def change_options(params: list[nn.Parameter], optimizer: CAME) -> None:
    optimizer.param_groups[0] |= {"maximize": True, "debias": False, "weight_decay": 0.0}


@pytest.mark.parametrize(
    "change",
    [
        *(swap_data, reshape_data, replace_state, swap_state, load_state, drop_gradient, negate_gradient),
        *(transpose_gradient, add_group, change_numbers, change_options),
    ],
)
def test_repeated_steps_see_changes(change: Callable[[list[nn.Parameter], CAME], None]) -> None:
    both = []
    for foreach in (None, False):
        params, optimizer = trained(torch.float32, shapes=FEW, foreach=foreach, **DEBIASED)
        assert (optimizer._repeated is None) is (foreach is False)
        for number in range(2):
            for index, param in enumerate(params):
                generator = torch.Generator().manual_seed(10 * number + index)
                param.grad = torch.randn(param.shape, generator=generator).to(DEVICE)
            if number == 0:
                torch.manual_seed(0)
                change(params, optimizer)
            optimizer.step()
        both.append((params, optimizer))
    assert_close_steps(both, exact=True)


def test_repeated_steps_hold_no_gradients() -> None:
    params, optimizer = trained(torch.float32, shapes=FEW, steps=3)
    gradients = [weakref.ref(param.grad) for param in params]
    optimizer.zero_grad()
    assert all(gradient() is None for gradient in gradients)
    assert copy.deepcopy(optimizer)._repeated is None


def test_unsupported_parameters_take_eager_step(stepped: list[tuple[int, ...]]) -> None:
    param = nn.Parameter(torch.randn(20, 40, device=DEVICE).t())
    double = nn.Parameter(torch.randn(20, 40, device=DEVICE, dtype=torch.float64))
    before = param.detach().clone(), double.detach().clone()
    optimizer = CAME([param, double], lr=1e-2)
    for each in (param, double):
        each.grad = torch.ones_like(each)
    optimizer.step()
    assert not stepped
    assert all(not torch.equal(now, then) for now, then in zip((param, double), before, strict=True))


def test_kernels_skip_state_on_other_device() -> None:
    (param,), optimizer = trained(torch.float32, shapes=[(40, 33)])
    assert _triton.can_step(optimizer.param_step(optimizer.param_groups[0], param, 0))
    state = optimizer.state[param]
    state["row"] = state["row"].to("meta")
    assert not _triton.can_step(optimizer.param_step(optimizer.param_groups[0], param, 0))


def test_missing_compiler_falls_back_to_eager_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stepped: list[tuple[int, ...]]
) -> None:
    class NoCompiler:
        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("Failed to find C compiler.\nPlease specify it")

    monkeypatch.setattr(numerics_kernels, "add_one", NoCompiler())
    numerics_device._run_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            found = trained(torch.float32)
    finally:
        numerics_device._run_kernels.cache_clear()
    assert not stepped
    assert "Failed to find C compiler" in caplog.text
    assert len(caplog.records) == 1
    assert_close_steps([found, trained(torch.float32, foreach=False)], exact=True)


def test_kernels_pass_on_nan_gradients() -> None:
    params = [nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in ((32, 32), (5,))]
    optimizer = CAME(params, lr=1e-2)
    for param in params:
        param.grad = torch.full_like(param, torch.nan)
    optimizer.step()
    assert all(param.isnan().all() for param in params)


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_nan_of_any_bits_stays_nan(rounding: str) -> None:
    params, optimizer = trained(torch.bfloat16, shapes=[(40, 33), (5,)], rounding=rounding)
    for param in params:
        optimizer.state[param]["exp_avg"].view(torch.int32).fill_(0x7FFFFFFF)
    optimizer.step()
    assert all(param.isnan().all() for param in params)


def test_gradient_release_uses_kernels(stepped: list[tuple[int, ...]]) -> None:
    net = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(3)]).to(DEVICE)
    handle = release_gradients(net, CAME(net.parameters(), lr=1e-3, momentum="int8"))
    net(torch.randn(2, 40, device=DEVICE)).square().mean().backward()
    handle.remove()
    assert stepped == 3 * [(40, 40)]


@pytest.mark.skipif(ON_GPU, reason="there the kernels run")
def test_kernels_compile_for_gpus() -> None:
    """For an A100 and an H100, using the compiler only."""
    compile_for_gpus(COMPILE)


COMPILE = """
from scantling.optim import _triton
from scantling.optim.kernels import came_gpu as kernels

types = {"table": "*i64", "owners": "*i32", "firsts": "*i32"}
tile = {"aligned": True, "rows": _triton.ROWS, "cols": _triton.COLS}
bf16 = {"param": tl.bfloat16, "grad": tl.bfloat16}
for momentum, bytes, rounding in (("int8", 2, "stochastic"), ("int4", 1, "compensated")):
    kept = {"momentum": momentum, "bytes": bytes}
    ptx = build(kernels.instability_parts, capability, types, grad=tl.bfloat16, **kept, **tile)
    assert "ld.global.v4.b32" in ptx, "gradients are read one at a time"
    build(kernels.apply, capability, types, **bf16, **kept, **tile, rounding=rounding, confidence=True, decays=True)
build(kernels.square_parts, capability, types, grad=tl.bfloat16, **tile)
build(kernels.whitened_squares, capability, types, grad=tl.float32, **tile)
fields = map(kernels.FIELDS.index, ("row", "row_part", "across", "rows"))
places = dict(zip(("field", "first_part", "count", "length"), fields, strict=True))
build(kernels.add_sums, capability, types, **places, first_value=0, size=128)
build(kernels.root_means, capability, types, field=kernels.FIELDS.index("mean"), size=1024)
build(kernels.clip_factors, capability, types, maximize=False, added=False, size=1024)
build(kernels.add_totals, capability, types, size=1024)
build(kernels.moment_squares, capability, types, grad=tl.bfloat16, aligned=True, size=4096)
flat = {"momentum": "fp32", "rounding": "nearest", "decays": True, "aligned": True, "size": 4096}
build(kernels.apply_moment, capability, types, **bf16, **flat)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("momentum", ["fp32", "int8"])
def test_cuda_graph_matches_calls(momentum: Any) -> None:
    """The learning rate changes after the capture; the graph reads it from its tensor."""

    def run(captured: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator).cuda()) for shape in SHAPES]
        grads = [[torch.randn(shape, generator=generator).cuda() for shape in SHAPES] for _ in range(6)]
        optimizer = CAME(params, lr=1e-2, momentum=momentum, capturable=True, **DEBIASED)
        graph = torch.cuda.CUDAGraph()
        for param in params:
            param.grad = torch.zeros_like(param)
        for number, given in enumerate(grads):
            for param, grad in zip(params, given, strict=True):
                param.grad.copy_(grad)
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (number + 1))
            if captured and number == 3:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    optimizer.step()
            if captured and number >= 3:
                graph.replay()
            else:
                optimizer.step()
        return [param.detach() for param in params]

    for graphed, called in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(graphed, called, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
def test_captured_training_step_matches_step() -> None:
    """Gradients are created inside the graph, at different addresses than before."""

    def run(captured: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).cuda()
        optimizer = CAME(net.parameters(), lr=1e-2, capturable=True, **DEBIASED)
        inputs = torch.randn(8, 64, device="cuda")
        graph = torch.cuda.CUDAGraph()

        def train() -> None:
            net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            train()
        if captured:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                train()
        for _ in range(4):
            (graph.replay if captured else train)()
        train()
        return [param.detach() for param in net.parameters()]

    for graphed, called in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(graphed, called, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_kernel_steps_are_deterministic() -> None:
    """No sum depends on the order of execution, so replicas stay in sync."""
    both = [trained(torch.bfloat16, momentum="int8", rounding="stochastic", **DEBIASED)[0] for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("momentum", ["fp32", "int8", "int4"])
def test_scratch_on_gpu_is_bounded(momentum: Any) -> None:
    param = nn.Parameter(torch.zeros(4096, 14336, device="cuda", dtype=torch.bfloat16))
    optimizer = CAME([param], lr=1e-3, momentum=momentum, **DEBIASED)
    for step in range(2):
        param.grad = torch.randn_like(param)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        if step:  # the first step creates the state
            assert torch.cuda.max_memory_allocated() - before <= 16 << 20
