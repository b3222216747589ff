"""Tests of progress output for long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from scantling.trainer.data import progress as module
from scantling.trainer.data.progress import NoProgress, Progress, RichProgress


def run(progress: Progress, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    progress.start("reading [a]", 4_000_000)
    for _ in range(4):
        clock[0] += seconds / 4
        progress.advance(1_000_000)
    progress.finish()


def test_plain_lines_for_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    run(RichProgress(Console(file=out)), 8.0, monkeypatch)
    assert out.getvalue() == "reading [a] of 4.0 MB ...\nreading [a]: 4.0 MB in 8.0 s\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_for_short_work(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    run(RichProgress(Console(file=out, force_terminal=terminal)), 0.9, monkeypatch)
    run(NoProgress(), 9.0, monkeypatch)
    assert out.getvalue() == ""


def test_bar_on_a_terminal() -> None:
    out = io.StringIO()
    progress = RichProgress(Console(file=out, force_terminal=True, width=80))
    progress.start("tokenizing", None)
    progress._began -= 2 * module.PATIENCE_S
    progress.advance(1_000_000)
    progress.finish()
    progress.start("next", 10)
    progress.finish()
    assert "tokenizing" in out.getvalue()
    assert "next" not in out.getvalue()
