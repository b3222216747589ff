"""Tests of a plan against the memory of a machine."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.cli import run
from scantling.errors import UserError
from scantling.trainer.planning import changes, fit
from scantling.trainer.planning.fit import Fit, check_fit
from scantling.trainer.planning.machine import MachineMemory, host_memory
from scantling.trainer.planning.plan import Plan, plan_run
from scantling.trainer.planning.resolve import resolve_run
from scantling.trainer.recipe import load_recipe
from scantling.trainer.recipe.loading import RecipeLike
from tests.runs import tiny_recipe, write_recipe

MIB = 2**20


def set_memory(monkeypatch: pytest.MonkeyPatch, total: int, available: int | None = None) -> None:
    memory = MachineMemory("this machine", total, total if available is None else available)
    monkeypatch.setattr(fit, "machine_memory", lambda device: memory if device == "cpu" else None)
    monkeypatch.setattr(fit, "rss_bytes", lambda: 0)


def fit_of(recipe: RecipeLike, planned: Plan | None = None, *, world_size: int = 1) -> Fit:
    """Return the fit of a recipe on a CPU."""
    run = resolve_run(load_recipe(recipe), world_size=world_size, device="cpu")
    return check_fit(run, planned or plan_run(run))


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search to the end, also on a busy machine; a test of the limit sets its own."""
    monkeypatch.setattr(changes, "LIMIT_S", 1000.0)
    monkeypatch.setattr(changes, "ENOUGH_S", 1000.0)


def batch_recipe(folder: Path, **train: Any) -> dict[str, Any]:
    return tiny_recipe(folder, train={"batch_size": 300, **train}, data={"seq_len": 256})


@pytest.mark.parametrize(("world_size", "checkpointing"), [(1, False), (1, True), (3, False)])
def test_largest_micro_batch_fits_and_the_next_does_not(
    world_size: int, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(batch_recipe(tmp_path, activation_checkpointing=checkpointing))
    planned = sc.plan(recipe, world_size=world_size)
    small = sc.plan(recipe, settings=["train.micro_batch_size=1"], world_size=world_size)
    assert planned.peak_memory_bytes is not None
    assert small.peak_memory_bytes is not None
    limit = (planned.peak_memory_bytes + small.peak_memory_bytes) // 2
    set_memory(monkeypatch, world_size * limit)
    found = fit_of(recipe, planned, world_size=world_size)
    assert found.fits is False
    assert found.processes == world_size
    largest = found.largest_micro_batch_size
    assert largest is not None
    assert 1 < largest < 300 // world_size
    assert f"  train.micro_batch_size: {largest}\n" in f"{found}\n"
    first = found.suggestions[0]
    assert (first.settings, first.removed, first.world_size) == (
        {"train.micro_batch_size": largest},
        (),
        world_size,
    )

    def peak(size: int) -> int:
        smaller = sc.plan(recipe, settings=[f"train.micro_batch_size={size}"], world_size=world_size)
        assert smaller.peak_memory_bytes is not None
        return smaller.peak_memory_bytes - smaller.base_bytes + planned.base_bytes

    assert peak(largest) <= limit < peak(largest + 1)


def test_micro_batch_of_one_exceeding_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(batch_recipe(tmp_path))
    planned = sc.plan(recipe)
    small = sc.plan(recipe, settings=["train.micro_batch_size=1"])
    assert small.peak_memory_bytes is not None
    set_memory(monkeypatch, small.peak_memory_bytes - 8 * MIB)
    found = fit_of(recipe, planned)
    assert (found.fits, found.is_impossible, found.largest_micro_batch_size) == (False, False, None)
    assert all("train.micro_batch_size" not in each.settings or len(each.settings) > 1 for each in found.suggestions)


def test_memory_used_by_others_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(tiny_recipe(tmp_path))
    planned = sc.plan(recipe)
    assert planned.peak_memory_bytes is not None
    set_memory(monkeypatch, 2 * planned.peak_memory_bytes)
    assert fit_of(recipe, planned).fits
    set_memory(monkeypatch, 2 * planned.peak_memory_bytes, planned.peak_memory_bytes - 1)
    found = fit_of(recipe, planned)
    assert found.fits is False
    assert not found.is_impossible
    assert "of it free" in str(found)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plan_names_its_device(device: str, tmp_path: Path) -> None:
    """A recipe for a GPU that this machine lacks names it too."""
    planned = sc.plan(tiny_recipe(tmp_path, train={"device": device}))
    assert planned.device == device
    assert {"cpu": "on the CPU", "cuda": "on a GPU"}[device] in str(planned)
    assert f"plan for {device}" in planned.short()
    assert (planned.base_bytes == 0) == (device == "cuda")
    other = {"cpu": "cuda", "cuda": "cpu"}[device]
    assert sc.plan(tiny_recipe(tmp_path, train={"device": device}), device=other).device == other
    with pytest.raises(UserError, match="one of auto, cpu, cuda; given 'tpu'"):
        sc.plan(tiny_recipe(tmp_path), device="tpu")


@pytest.mark.parametrize("compute", ["bf16", "fp16", "int8", "fp8"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="a plan without a GPU")
def test_plan_for_a_gpu_without_one(compute: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    format_ = {"int8": "int8", "fp8": "fp8_e4m3"}.get(compute)
    formats = {} if format_ is None else {"weights": format_, "activations": format_}
    recipe = tiny_recipe(tmp_path, precision={"compute": compute, **formats}, train={"device": "auto"})
    path = str(write_recipe(tmp_path / "recipe.yaml", recipe))
    assert run(["plan", path, "--device", "cuda", "--world-size", "4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 processes on a GPU each" in shown
    assert "this machine has no GPU" in shown
    assert run(["plan", path, "--device", "cuda", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["device"] == "cuda"
    assert planned["machine"]["fits"] is None


def test_train_refuses_impossible_memory_before_reading_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(tmp_path)
    path = str(write_recipe(tmp_path / "recipe.yaml", recipe))
    planned = sc.plan(recipe)
    held = planned.weight_bytes + planned.gradient_bytes + (planned.optimizer_state_bytes or 0)
    set_memory(monkeypatch, held - 1)
    assert run(["train", path, "--dry-run"]) == 2
    told = capsys.readouterr()
    assert "optimizer state alone" in told.err
    assert "valid" not in told.out
    (tmp_path / "corpus.txt").unlink()
    assert run(["train", path, "--run-dir", str(tmp_path / "run")]) == 2
    # the size of this process is part of the advice, and grows
    assert capsys.readouterr().err.split(". ")[0] == told.err.split(". ")[0]
    assert run(["plan", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["fits"] is False


def test_train_warns_about_tight_memory_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tiny_recipe(tmp_path, train={"steps": 1, "batch_size": 64}, data={"seq_len": 128})
    planned, small = (sc.plan(recipe, settings=each) for each in ([], ["train.micro_batch_size=1"]))
    assert planned.peak_memory_bytes is not None
    assert small.peak_memory_bytes is not None
    set_memory(monkeypatch, (planned.peak_memory_bytes + small.peak_memory_bytes) // 2)
    with caplog.at_level(logging.WARNING, "scantling"):
        assert sc.train(recipe, run_dir=tmp_path / "run").status == "done"
    told = [each.getMessage() for each in caplog.records if "the run needs" in each.getMessage()]
    assert len(told) == 1
    assert "fits, by its plan:" in told[0]
    assert "train.micro_batch_size: " in told[0]


def test_warnings_of_a_recipe_are_given_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither further plans of a run nor the search for a micro-batch repeat the warnings."""
    recipe = tiny_recipe(tmp_path, tensor={"rank": {"nothing": 4, "*": 8}}, train={"steps": 1, "batch_size": 64})
    planned, small = (sc.plan(recipe, settings=each) for each in ([], ["train.micro_batch_size=1"]))
    assert planned.peak_memory_bytes is not None
    assert small.peak_memory_bytes is not None
    set_memory(monkeypatch, (planned.peak_memory_bytes + small.peak_memory_bytes) // 2)
    for work in (
        lambda: fit_of(recipe),
        lambda: sc.train(recipe, run_dir=tmp_path / "run"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "scantling"):
            work()
        assert caplog.text.count("selects no layer") == 1


def machine_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal: 8192 kB\nMemFree: 100 kB\nMemAvailable: 6144 kB\nSwapTotal: 512 kB\n"
GROUPS: dict[str, tuple[dict[str, str], tuple[int, int]]] = {
    "none": ({}, (8192, 6144)),
    "v2": (
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.max": f"{4096 << 10}\n",
            "sys/fs/cgroup/job/memory.current": f"{2048 << 10}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {1024 << 10}\n",
        },
        (4096, 3072),
    ),
    "v2, inside a container": (
        {
            "proc/self/cgroup": "0::/path/on/the/host\n",
            "sys/fs/cgroup/memory.max": f"{2048 << 10}\n",
            "sys/fs/cgroup/memory.current": "0\n",
            "sys/fs/cgroup/memory.stat": "anon 5\n",
        },
        (2048, 2048),
    ),
    "v1": (
        {
            "proc/self/cgroup": "4:cpu,memory:/job\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4096 << 10}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{1024 << 10}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {512 << 10}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
        },
        (4096, 3584),
    ),
}


@pytest.mark.parametrize("case", GROUPS)
def test_memory_of_a_container_is_its_limit(case: str, tmp_path: Path) -> None:
    files, (total, available) = GROUPS[case]
    found = host_memory(machine_files(tmp_path, {"proc/meminfo": MEMINFO, **files}))
    assert found == MachineMemory("this machine", total << 10, available << 10, 512 << 10)


def test_unknown_system_memory(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None
    assert host_memory(machine_files(tmp_path, {"proc/meminfo": "nothing\n"})) is None
