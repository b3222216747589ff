"""Tests of sweeps from file to table: runs that are run, skipped, failed or stopped."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scantling.cli import run
from scantling.errors import UserError
from scantling.laws import ChinchillaLaw
from scantling.laws.runs import read_runs
from scantling.trainer.sweeping.grid import Case, expand_sweep
from scantling.trainer.sweeping.runner import SweepCallback, SweepResult, SweepRunner
from scantling.trainer.sweeping.schema import load_sweep
from scantling.trainer.sweeping.table import make_row, read_table, write_table
from scantling.trainer.training.run_dir import RunDir
from tests.runs import command, popen, start, tiny_recipe, wait_for_step, write_corpus, write_recipe

ROOT = Path(__file__).parents[3]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the runs of a sweep in this process, with all imports done."""
    own = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr("scantling.trainer.sweeping.runner.subprocess", own)


class Recorder(SweepCallback):
    def __init__(self) -> None:
        self.actions: list[str] = []
        self.messages: list[str] = []

    def begin(self, case: Case, action: str) -> None:
        self.actions.append(f"{case.label} {action}")

    def message(self, text: str) -> None:
        self.messages.append(text)


class Impatient(Recorder):
    """Callback that stops the sweep as soon as a run starts."""

    def begin(self, case: Case, action: str) -> None:
        super().begin(case, action)
        os.kill(os.getpid(), signal.SIGTERM)


class Insistent(Impatient):
    """Callback that stops the sweep again at the message that it stops."""

    def message(self, text: str) -> None:
        super().message(text)
        os.kill(os.getpid(), signal.SIGTERM)


def sweep(
    folder: Path, content: dict[str, Any], *, retry: bool = False, callback: Recorder | None = None
) -> tuple[SweepResult, list[str]]:
    """Run a sweep in `folder`; return its result and the processes that it started."""
    content = {"base": tiny_recipe(folder, train={"steps": 2}), "out": str(folder / "out"), **content}
    path = write_recipe(folder / "sweep.yaml", content)
    read, base = load_sweep(path)
    grid = expand_sweep(read, base)
    recorder = callback or Recorder()
    return SweepRunner(read, grid, jobs=2, retry=retry, callback=recorder).run(grid), recorder.actions


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "out" / "runs.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.dist
@pytest.mark.usefixtures("forked")
def test_shipped_sweep_table_can_be_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["sweep", str(ROOT / "recipes" / "sweep-tiny.yaml"), "--jobs", "2"]
    assert run(command) == 0
    assert "4 runs: 4 done" in capsys.readouterr().out
    path = tmp_path / "runs" / "sweep-tiny" / "runs.csv"
    rows = list(read_table(path).values())
    assert [(row["train.steps"], row["model.overrides.hidden_size"]) for row in rows] == [
        ("10", "32"),
        ("10", "64"),
        ("20", "32"),
        ("20", "64"),
    ]
    for row in rows:
        result = json.loads((tmp_path / row["run"] / "result.json").read_text())
        plan = json.loads((tmp_path / row["run"] / "plan.json").read_text())
        assert float(row["loss"]) == result["eval_loss"]
        assert int(row["D"]) == result["tokens"] == int(row["train.steps"]) * 8 * 64
        assert int(row["N"]) == plan["num_non_embedding"]
        assert float(row["seconds"]) > 0
    found = read_runs(path, ChinchillaLaw, columns={"loss": "loss"}, where={"train.steps": "20"})
    assert found["N"].tolist() == [int(row["N"]) for row in rows[2:]]
    assert run(command) == 0
    assert "4 of 4 runs are finished" in capsys.readouterr().out
    path.write_text("\ufeff" + path.read_text())  # as spreadsheets save it
    assert list(read_table(path).values()) == rows


@pytest.mark.dist
@pytest.mark.usefixtures("forked")
def test_run_records_failures_and_skips_finished_runs(tmp_path: Path) -> None:
    corpus, late = tmp_path / "corpus.txt", tmp_path / "late.txt"
    content: dict[str, Any] = {"axes": {"data.text": [str(corpus), str(late)]}}
    outcome, actions = sweep(tmp_path, content)
    assert actions == [f"text={corpus} starts", f"text={late} starts"]
    good, bad = table(tmp_path)
    assert (good["state"], good["error"], bad["state"], bad["loss"]) == ("done", "", "failed", "")
    assert "file not found" in bad["error"]
    assert "file not found" in (Path(bad["run"]) / "log.txt").read_text()
    assert sorted(row["state"] for row in outcome.rows.values()) == ["done", "failed"]

    # only the new value is run, the new evaluation is made for old runs, and the failed run is skipped
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"sentence_good": "the fox", "sentence_bad": "zzzzzzz"}')
    content |= {
        "after": {
            "minimal_pairs": {"files": str(pairs), "limit": 100},
            "quantize": {"formats": ["int2", "int16", "int2.gptq"]},
        }
    }
    content["axes"]["train.steps"] = [2, 3]
    content["leave_out"] = [{"train.steps": 3, "data.text": str(late)}]
    _, actions = sweep(tmp_path, content)
    old, new = (f"text={corpus} steps={steps}" for steps in (2, 3))
    assert sorted(actions) == [f"{old} evaluating", f"{new} evaluating", f"{new} starts"]
    rows = table(tmp_path)
    assert [row["state"] for row in rows] == ["done", "done", "failed"]
    assert rows[0]["loss"] == good["loss"]
    assert rows[0]["run"] == good["run"]
    assert all(float(row["minimal_pairs"]) in (0.0, 1.0) for row in rows[:2])
    for row in rows[:2]:
        assert float(row["post.int16"]) == pytest.approx(float(row["loss"]), abs=1e-3)
        assert float(row["post.int2"]) != pytest.approx(float(row["loss"]), abs=1e-3)
        assert float(row["post.int2.gptq"]) != pytest.approx(float(row["post.int2"]), abs=1e-3)

    # after the fix, a retry succeeds; finished rows stay even if their value is removed
    write_corpus(late, seed=1)
    content["axes"]["train.steps"] = [2]
    del content["leave_out"]
    _, actions = sweep(tmp_path, content)
    assert actions == []
    _, actions = sweep(tmp_path, content, retry=True)
    assert actions == [f"text={late} steps=2 starts", f"text={late} steps=2 evaluating"]
    assert [(row["train.steps"], row["state"]) for row in table(tmp_path)] == [(s, "done") for s in ("2", "2", "3")]
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 3

    # finished rows count even without their run folder
    before = table(tmp_path)
    shutil.rmtree(tmp_path / "out" / "runs")
    _, actions = sweep(tmp_path, content)
    assert actions == []
    assert table(tmp_path) == before


def test_run_keeps_rows_without_folders(tmp_path: Path) -> None:
    """Rows from another machine stay before and after changes of the base and the evaluations."""
    content = {"axes": {"train.steps": [2, 3]}, "after": {"quantize": {"formats": ["int4"]}}}

    def runner(**changes: Any) -> SweepRunner:
        base = tiny_recipe(tmp_path, train={"seed": changes.pop("seed", 0)})
        recipe = {"base": base, "out": str(tmp_path / "out"), **content, **changes}
        read, base = load_sweep(write_recipe(tmp_path / "sweep.yaml", recipe))
        return SweepRunner(read, expand_sweep(read, base), callback=Recorder())

    first = runner()
    figures = {"loss": "2.5", "post.int4": "2.75", "seconds": "1.000"}
    written = [{**make_row(case, first._folder(case), "done"), **figures} for case in first.grid]
    write_table(first.sweep.table_path, first.sweep.keys, ["post.int4"], written)
    before = table(tmp_path)
    assert runner().run([]).rows.keys() == {case.key for case in first.grid}
    assert table(tmp_path) == before

    # losses of another method have their own column; the earlier ones keep their name
    runner(after={"quantize": {"formats": ["int4"], "method": "gptq"}}).run([])
    assert table(tmp_path) == [{**row, "post.int4.gptq": ""} for row in before]

    # with another base and other axes, the earlier rows stay, with or without their folders
    other = runner(seed=1, axes={"optim.lr": [0.001]})
    other.run([])
    assert table(tmp_path) == [{**row, "optim.lr": ""} for row in before]
    assert isinstance(other.callback, Recorder)
    assert other.callback.messages == ["the table keeps 2 rows of other grids"]
    there = first._folder(first.grid[0])
    there.mkdir(parents=True)
    (there / "metrics.jsonl").touch()
    other.run([])
    assert table(tmp_path) == [{**row, "optim.lr": ""} for row in before]

    # rows without a result are removed if their folders are here
    failed = [{**row, "state": "failed", "loss": ""} for row in before]
    write_table(first.sweep.table_path, first.sweep.keys, ["post.int4"], failed)
    other.run([])
    assert [row["train.steps"] for row in table(tmp_path)] == ["3"]


@pytest.mark.dist
@pytest.mark.usefixtures("forked")
def test_run_stops_at_ctrl_c_and_resumes(tmp_path: Path) -> None:
    content = {"base": tiny_recipe(tmp_path), "axes": {"train.steps": [3000]}, "out": str(tmp_path / "out")}
    path = write_recipe(tmp_path / "sweep.yaml", content)
    (case,) = expand_sweep(*load_sweep(path))
    folder = tmp_path / "out" / "runs" / case.key
    process = start(command(["sweep", path]))
    wait_for_step(folder / "metrics.jsonl", 3, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert "stopping: each run saves" in output
    assert "continue with the same command" in output
    (row,) = table(tmp_path)
    assert (row["state"], row["loss"]) == ("stopped", "")
    stopped_at = json.loads((folder / "result.json").read_text())["step"]
    assert (folder / "checkpoints" / f"step-{stopped_at}").is_dir()

    outcome, actions = sweep(tmp_path, content, callback=Impatient())
    assert actions == ["steps=3000 resumes"]
    assert outcome.stopped
    assert table(tmp_path) == [row]

    steps = sorted((folder / "checkpoints").iterdir())
    for step in steps:
        (step / "manifest.json").write_text("damaged")
    outcome, actions = sweep(tmp_path, content)
    assert actions == ["steps=3000 resumes"]
    (row,) = table(tmp_path)
    assert row["state"] == "failed"
    assert "has no complete checkpoint to resume from" in row["error"]
    assert sorted((folder / "checkpoints").iterdir()) == steps


@pytest.mark.dist
def test_run_second_sigterm_ends_and_awaits_runs(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            sweep(tmp_path, {"axes": {"train.steps": [100_000]}}, callback=Insistent())
    finally:
        signal.signal(signal.SIGTERM, before)
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    RunDir(folder).lock()


def test_read_rows_drops_metrics_of_other_settings(tmp_path: Path) -> None:
    pairs = {"files": str(tmp_path / "pairs.jsonl"), "limit": 100}

    def runner(limit: int) -> SweepRunner:
        recipe = {"base": tiny_recipe(tmp_path), "out": str(tmp_path / "out"), "axes": {"train.steps": [2]}}
        after = {"minimal_pairs": {**pairs, "limit": limit}}
        read, base = load_sweep(write_recipe(tmp_path / "sweep.yaml", {**recipe, "after": after}))
        return SweepRunner(read, expand_sweep(read, base))

    first = runner(100)
    (case,) = first.grid
    folder = RunDir(first._folder(case))
    folder.path.mkdir(parents=True)
    folder.metrics.touch()
    folder.after.write_text(json.dumps({"minimal_pairs": {"given": pairs, "metrics": {"minimal_pairs": 0.5}}}))
    row = {**make_row(case, folder.path, "done"), "loss": "2.5", "minimal_pairs": "0.5"}
    write_table(first.sweep.table_path, first.sweep.keys, ["minimal_pairs"], [row])
    assert runner(100).read_rows()[case.key]["minimal_pairs"] == "0.5"
    assert not runner(5).read_rows()[case.key].get("minimal_pairs")
    folder.clear()
    assert not folder.after.exists()


def test_run_skips_runs_of_other_processes(tmp_path: Path) -> None:
    content = {"axes": {"train.steps": [2]}}
    base = tiny_recipe(tmp_path, train={"steps": 2})
    path = write_recipe(tmp_path / "sweep.yaml", {"base": base, "out": str(tmp_path / "out"), **content})
    (case,) = expand_sweep(*load_sweep(path))
    holder = RunDir(tmp_path / "out" / "runs" / case.key)
    holder.lock()
    outcome, actions = sweep(tmp_path, content)
    assert actions == []
    assert [each.key for each in outcome.busy] == [case.key]
    assert table(tmp_path) == []
    whole = RunDir(tmp_path / "out")
    whole.lock()
    with pytest.raises(UserError, match="another sweep is running in"):
        sweep(tmp_path, content)
    whole.unlock()
    holder.unlock()


def test_run_checks_evaluations_first(tmp_path: Path) -> None:
    after: Mapping[str, str] = {"minimal_pairs": str(tmp_path / "nothing.jsonl")}
    with pytest.raises(UserError, match="minimal pairs: file not found"):
        sweep(tmp_path, {"axes": {"train.steps": [2]}, "after": after})
    assert not (tmp_path / "out").exists()


def test_read_table_refuses_cut_rows(tmp_path: Path) -> None:
    content = {"axes": {"train.steps": [2]}}
    sweep(tmp_path, content)
    path = tmp_path / "out" / "runs.csv"
    whole = path.read_text()
    for damaged in (whole.rstrip().rsplit(",", 3)[0], whole.rstrip() + ",more"):
        path.write_text(damaged)
        with pytest.raises(UserError, match=r"row 1 of .* has a different number of cells than the header"):
            sweep(tmp_path, content)
        assert path.read_text() == damaged
    path.write_text(whole.rstrip() + '"cut within quotes\n')
    with pytest.raises(UserError, match="cannot read the table"):
        sweep(tmp_path, content)
    path.write_text(whole.splitlines()[0])
    _, actions = sweep(tmp_path, content)
    assert actions == []
    assert path.read_text() == whole


def test_run_does_not_overwrite_another_table(tmp_path: Path) -> None:
    other = tmp_path / "own.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="is not the table of a sweep"):
        sweep(tmp_path, {"axes": {"train.steps": [2]}, "table": str(other)})
    assert other.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("visible", "counted", "wanted"),
    [("4,7", 0, {"4", "7"}), (None, 2, {"0", "1"}), ("4", 0, {"4"}), ("", 0, {""}), (None, 1, {None})],
)
def test_run_spreads_jobs_over_gpus(
    visible: str | None, counted: int, wanted: set[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def popen(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        seen.append(env.get("CUDA_VISIBLE_DEVICES"))
        return subprocess.Popen(["sleep", "0.3"], env=env, **options)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.device_count", lambda: counted)
    parts = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr("scantling.trainer.sweeping.runner.subprocess", parts)
    sweep(tmp_path, {"axes": {"train.steps": [2, 3, 4]}})  # two at once
    assert len(seen) == 3
    assert set(seen) == wanted
