"""What a run shows on a terminal while it goes on."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from scantling.cli.console import ConsoleSink, make_console

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
def test_every_figure_has_room(width: int) -> None:
    """The optimizer's memory beside what was planned, too, after an evaluation as before it."""
    shown = io.StringIO()
    sink = ConsoleSink(Console(file=shown, force_terminal=True, width=width, color_system=None))
    plan: Any = SimpleNamespace(optimizer_state_bytes=44 << 20, short=lambda: "plan")
    sink.start(name="llama-10m", run_dir=Path("runs/x"), plan=plan, first_step=1, last_step=500)
    sink.record(RECORD)
    sink.close()
    latest = shown.getvalue().split("4/500")[-1]
    figures = (
        "loss 3.100",
        "held-out 3.000",
        "tok/s",
        "peak 1.00 GiB",
        "sent 97.7 KiB/step",
        "mean rank 12.3",
        "lr 1.0e-03",
    )
    for figure in (*figures, "optimizer 45.0 MiB (plan 44.0 MiB)"):
        assert figure in " ".join(latest.split()), figure
    assert len(latest.splitlines()) <= (5 if width >= 80 else 10)


@pytest.mark.parametrize("colours", [True, False])
def test_no_color_leaves_the_line_and_takes_its_colours(colours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    if not colours:
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
    assert ("\x1b[3" in shown.getvalue()) == colours


def test_a_run_goes_on_where_nobody_reads_what_it_prints() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    sink = ConsoleSink(Console(file=Closed()))
    plan: Any = SimpleNamespace(optimizer_state_bytes=44 << 20, short=lambda: "plan")
    sink.start(name="llama-10m", run_dir=Path("runs/x"), plan=plan, first_step=1, last_step=500)
    sink.record(RECORD)
    sink.message("checkpoint step-4")
    sink.close()


def test_a_run_ends_in_order_where_its_terminal_was_closed() -> None:
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
