"""Tests of the terminal output of a running training."""

from __future__ import annotations

import errno
import io
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import scantling as sc
from scantling.cli import run
from scantling.cli.console import LOADING, ConsoleSink, make_console
from scantling.trainer.data.progress import RichProgress
from scantling.trainer.recipe import load_recipe
from scantling.trainer.training.build import describe_first_step
from scantling.trainer.training.sinks import Sink
from tests.runs import tiny_recipe, write_recipe

RECORD: dict[str, Any] = {
    "step": 4,
    "loss": 3.1,
    "eval_loss": 3.0,
    "tokens_per_s": 12_300.0,
    "peak_memory_bytes": 1 << 30,
    "wire_bytes": 99_999,
    "optimizer_state_bytes": 45 << 20,
    "tensor_size": 0.2,
    "tensor_parameters": 1.2e6,
    "tensor_compression": 43.0,
    "mean_rank": 12.3,
    "lr": 1e-3,
}


@pytest.mark.parametrize("width", [40, 80, 120, 300])
def test_all_metrics_are_visible(width: int) -> None:
    """The optimizer memory next to its planned value fits too, before and after an evaluation."""
    shown = io.StringIO()
    sink = ConsoleSink(Console(file=shown, force_terminal=True, width=width, color_system=None))
    plan: Any = SimpleNamespace(optimizer_state_bytes=44 << 20, short=lambda: "plan")
    sink.start(name="llama-10m", run_dir=Path("runs/x"), plan=plan, first_step=1, last_step=500)
    sink.record(RECORD)
    sink.close()
    latest = shown.getvalue().split("4/500")[-1]
    metrics = (
        "loss 3.100",
        "held-out 3.000",
        "tok/s",
        "peak 1.00 GiB",
        "sent 97.7 KiB/step",
        "mean rank 12.3",
        "lr 1.0e-03",
    )
    for metric in (*metrics, "optimizer 45.0 MiB (plan 44.0 MiB)"):
        assert metric in " ".join(latest.split()), metric
    assert len(latest.splitlines()) <= (5 if width >= 80 else 10)


@pytest.mark.parametrize("shards", [1, 2])
def test_traffic_is_a_mean_over_recent_steps(shards: int) -> None:
    """Local steps send in some steps only; the line shows the mean against the budget, and the speed of a message."""
    shown = io.StringIO()
    sink = ConsoleSink(Console(file=shown, force_terminal=True, width=200, color_system=None))
    plan: Any = SimpleNamespace(optimizer_state_bytes=44 << 20, short=lambda: "plan")
    sink.start(name="x", run_dir=Path("runs/x"), plan=plan, first_step=1, last_step=500)
    for step in range(1, 201):
        sent = 300 * 1024 if step % 3 == 0 and step > 100 else 0
        own = {"wire_bytes": sent, "wire_budget_bytes": 110 * 1024, "exchange_s": 0.1, "step_s": 0.4}
        if shards > 1:
            own["replica_wire_bytes"] = sent // 3
        sink.record({**RECORD, **own, "step": step})
    sink.close()
    latest = " ".join(shown.getvalue().split("200/500")[-1].split())
    sent_text = "99.0 KiB/step" if shards == 1 else "99.0 KiB/step, to other replicas 33.0 KiB"
    assert f"sent {sent_text} of 110 KiB exchange 25 % of the time (24.6 Mbit/s)" in latest


@pytest.mark.parametrize("colors", [True, False])
def test_no_color_removes_only_the_colors(colors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    if not colors:
        monkeypatch.setenv("NO_COLOR", "1")
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    sink = ConsoleSink(make_console())
    plan: Any = SimpleNamespace(optimizer_state_bytes=44 << 20, short=lambda: "plan")
    sink.start(name="llama-10m", run_dir=Path("runs/x"), plan=plan, first_step=1, last_step=4)
    sink.record(RECORD)
    sink.close()
    assert "\x1b[?25l" in shown.getvalue(), "no live display"
    assert "4/4" in shown.getvalue()
    assert ("\x1b[3" in shown.getvalue()) == colors


def test_run_continues_without_a_reader() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    sink = ConsoleSink(Console(file=Closed()))
    plan: Any = SimpleNamespace(optimizer_state_bytes=44 << 20, short=lambda: "plan")
    sink.start(name="llama-10m", run_dir=Path("runs/x"), plan=plan, first_step=1, last_step=500)
    sink.record(RECORD)
    sink.message("checkpoint step-4")
    sink.close()


def test_run_ends_cleanly_after_its_terminal_closes() -> None:
    class Terminal(io.StringIO):
        is_open = True

        def write(self, text: str) -> int:
            if not self.is_open:
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    terminal = Terminal()
    sink = ConsoleSink(Console(file=terminal, force_terminal=True))
    plan: Any = SimpleNamespace(optimizer_state_bytes=44 << 20, short=lambda: "plan")
    sink.start(name="llama-10m", run_dir=Path("runs/x"), plan=plan, first_step=1, last_step=500)
    terminal.is_open = False
    sink.record(RECORD)
    sink.close()
    sink.message("stopped")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(shown: str) -> list[str]:
    """Return the text of a terminal as lines, without colors and cursor movements."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))


LINE = "plan for cpu: 1.09M parameters, peak 546 MiB (weights 4.15 MiB), sends 4.15 MiB/step, 2,010 tok/s in 20 s"
PATH = "/a/long/path/" + 12 * "of-a-folder/" + "report.html"


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_lines_wrap_between_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    console = make_console()
    console.print(LINE, markup=False)
    console.print(f"report      {PATH}", markup=False)
    lines = [line.strip() for line in plain(shown.getvalue())]
    assert " ".join(lines).split() == [*LINE.split(), "report", PATH]
    assert all(len(line) <= width or line.endswith(PATH) for line in lines)
    for value in ("546 MiB", "4.15 MiB", "4.15 MiB/step", "2,010 tok/s", "20 s"):
        assert any(value in line for line in lines)


def test_lines_in_a_file_are_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = io.StringIO()
    monkeypatch.setattr("sys.stdout", shown)
    make_console().print(LINE, markup=False)
    assert shown.getvalue() == LINE + "\n"


def test_errors_wrap_between_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown = Terminal()
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("sys.stderr", shown)
    recipe = tiny_recipe(tmp_path, train={"stepz": 1, "schedule": "cosinus"})
    assert run(["train", str(write_recipe(tmp_path / "r.yaml", recipe)), "--dry-run"]) == 2
    lines = plain(shown.getvalue())
    assert any(line.startswith("  - train.stepz") for line in lines)
    assert any(line.startswith("    ") for line in lines)
    assert all(len(line) <= 50 for line in lines if str(tmp_path) not in line)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_run_shows_phases_before_the_first_step(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout", shown)
    phases: list[str | None] = []
    show = ConsoleSink.phase

    def phase(sink: ConsoleSink, what: str | None) -> None:
        phases.append(what)
        show(sink, what)

    monkeypatch.setattr(ConsoleSink, "phase", phase)
    path = str(write_recipe(tmp_path / "r.yaml", tiny_recipe(tmp_path, train={"steps": 2})))
    assert run(["train", path, "--run-dir", str(tmp_path / "run")]) == 0
    text = "\n".join(plain(shown.getvalue()))
    assert phases[:3] == [LOADING, "planning", "reading the data"]
    at = [text.find(what) for what in ("plan for cpu", "0/2", "2/2", "done at step 2")]
    assert -1 not in at
    assert at == sorted(at)
    stored = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert sc.Plan.from_dict(stored).short() in " ".join(text.split())


def test_run_reports_its_phases(tmp_path: Path) -> None:
    class Phases(Sink):
        def __init__(self) -> None:
            self.seen: list[str | None] = []

        def phase(self, what: str | None) -> None:
            self.seen.append(what)

        def record(self, record: Mapping[str, Any]) -> None:
            self.seen.append(f"step {record['step']}")

    phases = Phases()
    sc.train(tiny_recipe(tmp_path, train={"steps": 2}), run_dir=tmp_path / "run", sinks=[phases])
    assert phases.seen == [
        "planning",
        "reading the data",
        "building the model",
        "first batch",
        "first step",
        "step 1",
        "evaluating",
        "step 2",
        "writing a checkpoint",
        None,
    ]
    phases.seen.clear()
    longer = {"train": {"steps": 2, "eval_every": 1, "checkpoint_every": 1}}
    sc.train(tmp_path / "run", resume=True, sinks=[phases], **longer)
    assert f"reading {tmp_path / 'run' / 'checkpoints' / 'step-2'}" in phases.seen
    compiled = load_recipe(tiny_recipe(tmp_path, train={"compile": True}))
    assert "compiling" in describe_first_step(compiled)


def test_phases_are_shown_next_to_the_bar() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80, color_system=None)
    sink = ConsoleSink(console)
    plan: Any = SimpleNamespace(optimizer_state_bytes=44 << 20, short=lambda: "plan")
    sink.phase("reading the data")
    deadline = time.monotonic() + 10
    while "reading" not in shown.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    bar = RichProgress(console, sink.hide_phase)
    bar.start("tokenizing", 100)
    bar._began -= 10  # pretend that it has taken a while
    bar.advance(50)
    bar.finish()
    sink.phase("building the model")
    sink.start(name="llama", run_dir=Path("runs/x"), plan=plan, first_step=1, last_step=500)
    assert sink._live is not None
    sink.phase("compiling")
    sink._live.since -= 25
    sink._live.refresh()
    compiling = shown.getvalue()
    sink.record(RECORD)
    sink._live.refresh()
    sink.close()
    positions = [compiling.find(what) for what in ("reading", "tokenizing", "0/500", "compiling, 25 s")]
    assert -1 not in positions
    assert positions == sorted(positions)
    assert "compiling" not in shown.getvalue()[shown.getvalue().rfind("4/500") :]


def test_long_phase_prints_a_line_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scantling.cli.console.PLAIN_INTERVAL_S", 0.05)
    shown = io.StringIO()
    sink = ConsoleSink(Console(file=shown, width=80))
    sink.phase("short")
    sink.phase("compiling")
    deadline = time.monotonic() + 10
    while "compiling ..." not in shown.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    sink.close()
    assert shown.getvalue() == "compiling ...\n"
