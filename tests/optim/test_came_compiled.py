"""The compiled step for GPUs against the same step in PyTorch operations; on a CPU, traced as on a GPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from scantling.optim import CAME, _compiled, _native, release_gradients
from scantling.optim._rounding import read

SHAPES: list[tuple[int, ...]] = [(40, 33), (40, 33), (3, 20, 130), (20, 4, 3, 3), (5,), (40, 8), ()]
DEBIASED = {"debias": True, "weight_decay": 0.1, "betas": (0.9, 0.95, 0.995)}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything on a CPU takes the compiled step; kernels are not generated, what was traced is run."""
    monkeypatch.setattr(_compiled, "DEVICES", ("cpu",))
    monkeypatch.setattr(_compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(_compiled, "_functions", {})
    monkeypatch.setattr(_compiled, "_failed", False)
    monkeypatch.setattr(_native, "can_step", lambda job: False)


def trained(
    dtype: torch.dtype,
    *,
    shapes: list[tuple[int, ...]] = SHAPES,
    device: str = "cpu",
    steps: int = 4,
    **options: Any,
) -> tuple[list[nn.Parameter], CAME]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]
    optimizer = CAME(params, lr=1e-2, **options)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
            group["betas"] = (group["betas"][0] * (1.0 - 0.01 * step), *group["betas"][1:])
            group["weight_decay"] *= 0.9
        for param in params:
            grad = torch.randn(param.shape, generator=generator) * (1 + torch.rand(param.shape, generator=generator))
            param.grad = grad.to(device, dtype)
        optimizer.step()
    return params, optimizer


def assert_alike(both: list[tuple[list[nn.Parameter], CAME]], *, exact: bool) -> None:
    for param, other in zip(both[0][0], both[1][0], strict=True):
        state, wanted = both[0][1].state[param], both[1][1].state[other]
        values = [read(p.detach(), s.get("low"), torch.float32) for p, s in ((param, state), (other, wanted))]
        near = (values[0] - values[1]).abs() <= (1e-6 if exact else 2e-5) * (1 + values[1].abs())
        assert near.float().mean() >= (1.0 if exact else 0.97)
        assert torch.equal(state["step"], wanted["step"])
        for key in ("row", "col", "res_row", "res_col", "exp_avg_sq"):
            if key in wanted:
                torch.testing.assert_close(state[key], wanted[key], rtol=1e-5 if exact else 1e-2, atol=0)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("momentum", "rounding", "dtype", "options"),
    [
        ("fp32", "nearest", torch.float32, {}),
        ("fp32", "nearest", torch.float32, DEBIASED),
        ("fp32", "nearest", torch.float64, {**DEBIASED, "maximize": True, "factor": "last2"}),
        ("bf16", "stochastic", torch.bfloat16, DEBIASED),
        ("int8", "compensated", torch.bfloat16, {}),
        ("int4", "stochastic", torch.bfloat16, DEBIASED),
        ("fp32", "nearest", torch.float32, {**DEBIASED, "confidence": False}),
        ("int8", "stochastic", torch.bfloat16, {**DEBIASED, "confidence": False}),
        ("fp32", "nearest", torch.float32, {**DEBIASED, "betas": (0.0, 0.95, 0.995)}),
        ("fp32", "compensated", torch.bfloat16, {**DEBIASED, "betas": (0.0, 0.95, 0.995)}),
    ],
    ids=str,
)
def test_it_computes_what_the_operations_do(momentum: Any, rounding: Any, dtype: torch.dtype, options: Any) -> None:
    both = [
        trained(dtype, momentum=momentum, rounding=rounding, foreach=foreach, **options) for foreach in (None, False)
    ]
    assert _compiled._functions
    assert_alike(both, exact=dtype != torch.bfloat16)


@pytest.mark.usefixtures("traced")
def test_schedules_and_parameters_alike_do_not_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    original = _compiled._compile
    monkeypatch.setattr(_compiled, "_compile", lambda *given: compiled.append(given) or original(*given))
    trained(torch.float32, steps=5, weight_decay=0.1)
    assert len(compiled) == len(set(SHAPES))


@pytest.mark.usefixtures("traced")
def test_what_does_not_compile_is_stepped_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise torch._dynamo.exc.TorchDynamoException("no kernel for you")

    monkeypatch.setattr(_compiled, "_compile", refuse)
    with caplog.at_level(logging.WARNING):
        failed = trained(torch.float32)
    assert "no kernel for you" in caplog.text
    assert len(caplog.records) == 1
    assert_alike([failed, trained(torch.float32, foreach=False)], exact=True)


@pytest.mark.usefixtures("traced")
def test_parameters_too_large_for_their_scratch_are_stepped_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiled, "_SCRATCH", 4 * 40 * 33 - 1)
    monkeypatch.setattr(_compiled, "_SCRATCH_SHARE", 0.0)
    trained(torch.float32, momentum="int8")
    shapes = {key[0][0][0] for key in _compiled._functions}
    assert torch.Size((40, 33)) not in shapes
    assert torch.Size((5,)) in shapes


@pytest.mark.usefixtures("traced")
def test_gradient_release_takes_the_compiled_step_where_a_whole_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that is stepped alone may have the scratch that all parameters allow, not its own share of it."""
    monkeypatch.setattr(_compiled, "_SCRATCH", 0)
    net = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(60)])
    assert _compiled._SCRATCH_SHARE * sum(param.nbytes for param in net.parameters()) >= 4 * 40 * 40
    handle = release_gradients(net, CAME(net.parameters(), lr=1e-3, momentum="int8"))
    net(torch.randn(2, 40)).square().mean().backward()
    handle.remove()
    assert _compiled._functions


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_inductor_makes_the_same_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks only: for CPUs, Inductor of torch 2.13 leaves the short block at the end of a row unwritten."""
    monkeypatch.setattr(_compiled, "BACKEND", "inductor")
    monkeypatch.setattr(_compiled, "_available", lambda: True)
    shapes = [(40, 33), (3, 20, 256), (20, 4, 3, 3), (5,)]
    options = {"shapes": shapes, "momentum": "int8", "rounding": "stochastic", **DEBIASED}
    both = [trained(torch.bfloat16, foreach=foreach, **options) for foreach in (None, False)]
    assert not _compiled._failed
    assert_alike(both, exact=False)


@pytest.mark.gpu
@pytest.mark.parametrize("momentum", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_kernels_compute_what_the_operations_do(momentum: Any, rounding: Any) -> None:
    options = {"device": "cuda", "momentum": momentum, "rounding": rounding, **DEBIASED}
    both = [trained(torch.bfloat16, foreach=foreach, **options) for foreach in (None, False)]
    assert not _compiled._failed
    assert_alike(both, exact=False)


@pytest.mark.gpu
@pytest.mark.parametrize("momentum", ["fp32", "int8"])
def test_a_cuda_graph_steps_as_calls_do(momentum: Any) -> None:
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
@pytest.mark.parametrize(("momentum", "limit"), [("fp32", 16), ("int8", 64), ("int4", 64)])
def test_scratch_on_a_gpu_stays_small(momentum: Any, limit: int) -> None:
    param = nn.Parameter(torch.zeros(4096, 14336, device="cuda", dtype=torch.bfloat16))
    optimizer = CAME([param], lr=1e-3, momentum=momentum, **DEBIASED)
    for _ in range(2):
        param.grad = torch.randn_like(param)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= limit << 20
