"""Tests of `scantling sweep` as a user types it; whole sweeps are tested in tests/sweeping."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scantling.cli import run
from scantling.cli.sweeping import SweepProgress
from scantling.trainer.planning.machine import MachineMemory
from scantling.trainer.sweeping.grid import Case, expand_sweep
from scantling.trainer.sweeping.runner import SweepResult, SweepRunner
from scantling.trainer.sweeping.schema import load_sweep
from tests.runs import tiny_recipe, write_recipe


@pytest.fixture
def path(tmp_path: Path) -> str:
    axes = {"train.steps": [4, 8], "optim.lr": [0.001, 0.01]}
    content = {"base": tiny_recipe(tmp_path), "axes": axes, "out": str(tmp_path / "out")}
    return str(write_recipe(tmp_path / "sweep.yaml", content))


def test_dry_run_prints_the_grid(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", path, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for word in ("steps", "lr", "0.001", "20.6k", "512", "1,024", "waiting", "4 runs, 3,072 tokens"):
        assert word in shown
    assert run(["sweep", path, "--dry-run", "--only", "train.steps=8", "--set", "train.batch_size=8"]) == 0
    assert "2 runs, 4,096 tokens" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "train.step=8"], "did you mean 'train.steps'"),
        (["--only", "train.steps"], "--only takes NAME=VALUE"),
        (["--set", "train.stepz=8"], "train.stepz: unknown key"),
    ],
)
def test_sweep_refuses_bad_arguments(
    path: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", path, "--dry-run", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_sweep_refuses_torchrun(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["sweep", path]) == 2


@pytest.mark.parametrize(("error", "code"), [("", 0), ("after the run: no memory", 1)])
def test_failed_evaluation_fails_the_sweep(
    path: str, error: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_all(self: SweepRunner, chosen: list[Case]) -> SweepResult:
        return SweepResult({case.key: {"state": "done", "error": error} for case in chosen}, stopped=False, busy=[])

    monkeypatch.setattr(SweepRunner, "run", run_all)
    assert run(["sweep", path]) == code
    shown = capsys.readouterr().out
    assert "4 runs: 4 done" in shown
    assert shown.count("after the run: no memory") == 4 * code


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_of_all_runs(path: str, terminal: bool) -> None:
    """Four runs: one exists, one ends, one fails, and one is in progress."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=120, color_system=None)
    there, ends, fails, middle = expand_sweep(*load_sweep(path))
    progress = SweepProgress(console)
    progress.start([there], [ends, fails, middle])
    for case in (ends, fails):
        progress.begin(case, "starts")
    progress.progress(ends, {"step": 2, "loss": 2.5})
    progress.progress(ends, {"step": 4, "loss": 2.25})
    progress.begin(ends, "evaluating")
    progress.end(ends, {"state": "done", "loss": "2.125", "seconds": "62.0", "error": ""})
    progress.end(fails, {"state": "failed", "error": "no such file"})
    progress.begin(middle, "resumes")
    progress.progress(middle, {"step": 4, "loss": 3.5})
    progress.close()
    text = shown.getvalue()
    assert "1 of 4 runs are finished" in text
    assert f"2/4  {ends.label}: done, loss 2.1250, 62.0 s" in text
    assert f"3/4  {fails.label}: failed: no such file" in text
    if terminal:
        assert re.search(r"all runs .*3/4", text)
        assert "4/8  loss 3.500" in text
        assert progress.share == pytest.approx(1 - 0.5 * middle.work / (ends.work + fails.work + middle.work))


def test_dry_run_checks_memory_of_the_largest_run(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", path, "--dry-run"]) == 0
    assert "the largest run" in capsys.readouterr().out
    memory = MachineMemory("this machine", 1000, 1000)
    monkeypatch.setattr("scantling.trainer.planning.fit.machine_memory", lambda device: memory)
    assert run(["sweep", path, "--dry-run"]) == 2
    assert "this machine has 1000 B" in " ".join(capsys.readouterr().err.split())


def test_dry_run_fails_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("corpus.txt", "corpsu.txt", "other.txt")]
    content = {"base": tiny_recipe(tmp_path), "axes": {"data.text": paths, "train.steps": [4, 5]}}
    assert run(["sweep", str(write_recipe(tmp_path / "data.yaml", content)), "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert "6 runs" in shown.out
    assert shown.err.count("data.text: file not found") == 2
    assert "did you mean 'corpus.txt'" in shown.err


@pytest.mark.parametrize(
    ("after", "code", "words"),
    [
        ({"quantize": {"formats": ["INT4"]}}, 2, "did you mean 'int4'"),
        ({"quantize": {"formats": ["int4.awq"]}}, 2, "method must be rtn or gptq"),
        ({"quantize": {"formats": ["int4", "int4"]}}, 2, "a format is listed twice"),
        ({"minimal_pairs": "nowhere.jsonl"}, 2, "after the runs: "),
    ],
)
def test_dry_run_checks_evaluations_after_training(
    after: dict[str, Any], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"base": tiny_recipe(tmp_path), "axes": {"train.steps": [4]}, "after": after}
    assert run(["sweep", str(write_recipe(tmp_path / "after.yaml", content)), "--dry-run"]) == code
    assert words in "".join(capsys.readouterr())
