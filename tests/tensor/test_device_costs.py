"""Tests of the costs of products on a device, and of the orders that follow from them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import scantling as sc
from scantling.errors import RunError
from scantling.numerics.torch_private import FakeTensorMode, is_in_dispatch_mode
from scantling.tensor import costs, launches
from scantling.tensor.contraction import MAX_OVERHEAD, Chain, best_plan, can_keep, make_plan, make_steps
from scantling.tensor.costs import CPU, TYPICAL_GPU, DeviceCosts, device_costs

CHAIN = Chain((12, 8, 8, 8, 8, 12), (1, 12, 32, 32, 32, 12, 1), 3)
GPU = torch.device("cuda", 0)
KEY = f"a GPU, torch {torch.__version__}, products"


def test_few_launches_win_on_a_gpu() -> None:
    """One token goes through core after core on a CPU, and through two merged blocks on a GPU."""
    assert len(best_plan(CHAIN, 1).steps) > 2
    for tokens in (1, 128, 4096):
        assert best_plan(CHAIN, tokens, costs=TYPICAL_GPU).steps == make_steps(CHAIN, [3])


def test_orders_of_a_gpu_save_multiplications_or_can_be_kept() -> None:
    for chain in (CHAIN, Chain((2, 2, 2, 2), (1, 2, 4, 2, 1), 2), Chain((64, 64), (1, 64, 1), 1)):
        for tokens in (1, 100, 10_000):
            plan = best_plan(chain, tokens, costs=TYPICAL_GPU)
            known = [make_plan(chain, tokens, make_steps(chain, [cut])) for cut in range(1, len(chain.modes))]
            is_kept = can_keep(chain, [step.tree for step in plan.steps])
            assert is_kept or plan.macs <= MAX_OVERHEAD * min(one.macs for one in known)


def test_ranks_are_padded_to_a_multiple() -> None:
    assert [TYPICAL_GPU.pad_rank(rank) for rank in (0, 1, 2, 16, 30, 33)] == [0, 1, 16, 16, 32, 48]
    assert [CPU.pad_rank(rank) for rank in (0, 1, 2, 30)] == [0, 1, 2, 30]
    assert sc.TTLinear(64, 64, 5).padded_ranks == sc.TTLinear(64, 64, 5).ranks


def test_layers_of_a_gpu_plan_with_its_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = sc.TTLinear(768, 768, 30)
    on_cpu = layer.plan(1)
    monkeypatch.setattr(costs, "CPU", TYPICAL_GPU)
    on_gpu = layer.plan(1)
    assert len(on_gpu.steps) == 2 < len(on_cpu.steps)
    assert on_gpu.steps[0].width == 32
    assert layer._best_steps(1) == on_gpu.steps


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[torch.device]:
    """Pretend that there is a GPU; return the devices measured so far."""
    calls: list[torch.device] = []

    def measure(device: torch.device) -> DeviceCosts:
        calls.append(device)
        return DeviceCosts(128.0, 2.0**20, 16)

    monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(costs, "_measure", measure)
    monkeypatch.setattr(costs, "is_capturing", lambda device: False)
    monkeypatch.setattr(costs, "_measured", {})
    return calls


def test_a_gpu_is_measured_once(measured: list[torch.device], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = device_costs(GPU)
    assert first == DeviceCosts(128.0, 2.0**20, 16) == device_costs(GPU)
    monkeypatch.setattr(costs, "_measured", {})  # another process
    assert device_costs(GPU) == first
    assert measured == [GPU]
    (entry,) = json.loads((tmp_path / "device-costs.json").read_text())
    assert entry == KEY


@pytest.mark.parametrize("content", ["{", "[]", '{"KEY": {"launch": 1, "other": 2}}', '{"KEY": 3}'])
def test_damaged_costs_are_measured_again(content: str, measured: list[torch.device], tmp_path: Path) -> None:
    (tmp_path / "device-costs.json").write_text(content.replace("KEY", KEY))
    assert device_costs(GPU).element == 128.0
    assert measured == [GPU]
    assert json.loads((tmp_path / "device-costs.json").read_text())[KEY]["element"] == 128.0


@pytest.mark.parametrize("error", [None, RunError("the disk is full")])
def test_costs_that_cannot_be_written(
    error: RunError | None,
    measured: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    if error is None:
        monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path / "file"))
    else:
        monkeypatch.setattr(costs, "write_json", Mock(side_effect=error))
    assert device_costs(GPU).element == 128.0
    assert "cannot write" in caplog.text


def test_a_capture_does_not_wait_for_a_measurement(
    measured: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "is_capturing", lambda device: True)
    assert device_costs(GPU) == TYPICAL_GPU
    monkeypatch.setattr(costs, "is_capturing", lambda device: False)
    device_costs(GPU)
    monkeypatch.setattr(costs, "is_capturing", lambda device: True)
    assert device_costs(GPU).element == 128.0
    assert measured == [GPU]


def test_the_faster_one_is_kept(measured: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    times: dict[Any, float] = {"fast": 1.0, "slow": 2.0}
    timed: list[Any] = []

    def seconds(work: Any, _: Any) -> float:
        timed.append(work)
        return times[work]

    def is_faster(kernel: Any, name: str) -> bool:
        other: Any = "slow" if kernel == "fast" else "fast"
        return costs.is_faster(GPU, name, lambda: kernel, lambda: other)

    monkeypatch.setattr(costs, "_captured_seconds", seconds)
    assert is_faster("fast", "first")
    assert not is_faster("slow", "second")
    monkeypatch.setattr(costs, "_measured", {})  # another process
    assert is_faster("fast", "first")
    assert not is_faster("slow", "second")
    assert timed == ["fast", "slow", "slow", "fast"]
    device_costs(GPU)
    monkeypatch.setattr(costs, "_measured", {})
    assert is_faster("fast", "first")
    assert len(timed) == 4
    monkeypatch.setattr(costs, "is_capturing", lambda device: True)
    assert not is_faster("fast", "third")


def test_a_failed_measurement_does_not_stop_training(
    measured: list[torch.device], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> float:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(costs, "_captured_seconds", fail)
    for _ in range(2):
        assert not costs.is_faster(GPU, "large", lambda: lambda: None, lambda: lambda: None)
    assert caplog.text.count("cannot time large") == 1
    assert not (tmp_path / "device-costs.json").exists()


def test_a_dispatch_mode_sees_no_measurement(measured: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of a measurement must not be counted, and must not run on fake tensors."""
    seen: list[bool] = []
    monkeypatch.setattr(costs, "_measure", lambda _: seen.append(is_in_dispatch_mode()) or DeviceCosts(128.0))
    with FakeTensorMode(), FlopCounterMode(display=False):
        assert device_costs(GPU).element == 128.0
    assert seen == [False]


def test_threads_measure_once(measured: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass does not wait: the measurement may need the thread that runs it."""
    started, go_on = threading.Event(), threading.Event()

    def measure(device: torch.device) -> DeviceCosts:
        measured.append(device)
        started.set()
        assert go_on.wait(20.0)
        return DeviceCosts(64.0)

    monkeypatch.setattr(costs, "_measure", measure)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(device_costs, GPU)
        assert started.wait(20.0)
        second = pool.submit(device_costs, GPU)
        found: list[DeviceCosts] = []
        x = torch.ones(1, requires_grad=True)
        y = x * 2.0
        y.register_hook(lambda _: found.append(device_costs(GPU)))
        y.backward()
        go_on.set()
        assert first.result() == second.result() == DeviceCosts(64.0)
    assert found == [TYPICAL_GPU]
    assert measured == [GPU]


def test_measurements_use_their_own_gpu_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with several GPUs, the current one may be another."""
    current: list[torch.device] = []

    @contextmanager
    def use(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def seconds(work: Any, times: int) -> float:
        assert current == [GPU]
        assert not torch.is_autocast_enabled("cuda")
        return 1e-6 * times

    monkeypatch.setattr(torch.cuda, "device", use)
    monkeypatch.setattr(costs, "_seconds", seconds)
    monkeypatch.setattr(torch, "zeros", lambda *size, **_: Mock(numel=lambda: 1 << 26))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert costs._measure(GPU).rank_multiple == 16
    assert current == []


@pytest.mark.gpu
def test_costs_of_this_gpu() -> None:
    found = costs._measure(torch.device("cuda"))
    assert 2.0**3 <= found.element <= 2.0**12
    assert 2.0**20 <= found.launch <= 2.0**40


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_measure_this_gpu(compiled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The values are those of a CPU, eager, compiled and in a CUDA graph, and a second process measures nothing."""
    monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "_measured", {})
    monkeypatch.setattr(launches, "_known", {})
    monkeypatch.setattr(launches, "precision", lambda: "tf32")
    torch.manual_seed(0)
    model = sc.tensorize(nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))), rank=20, filter_fn=lambda *_: True)
    x = torch.randn(500, 256)
    expected = model(x)
    expected.square().sum().backward()
    wanted = [None if param.grad is None else param.grad.cuda() for param in model.parameters()]
    model.cuda()
    run = torch.compile(model, fullgraph=True) if compiled else model
    for _ in range(2):
        model.zero_grad()
        found = run(x.cuda())
        found.square().sum().backward()
        torch.testing.assert_close(found, expected.cuda(), rtol=5e-3, atol=5e-3)
        for param, other in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(param.grad, other, rtol=1e-2, atol=1e-3 * float(wanted[0].abs().max()))
    names = json.loads((tmp_path / "device-costs.json").read_text())
    assert any("products" in name for name in names)
    if not compiled:
        assert any("product of 512 x 256" in name for name in names)
        static, graph = x.cuda(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(static)
        graph.replay()
        torch.testing.assert_close(captured, found)
        monkeypatch.setattr(costs, "_measured", {})
        monkeypatch.setattr(launches, "_known", {})
        monkeypatch.setattr(costs, "_measure", None)
        monkeypatch.setattr(costs, "_captured_seconds", None)
        torch.testing.assert_close(model(static), found)
