"""Output that commands share: progress (a bar on a terminal, plain lines elsewhere), warnings, labeled lines, JSON."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.text import Text

from scantling.cli import report_lost_output
from scantling.errors import UserError
from scantling.torchrun_env import local_rank_from_env, rank_from_env
from scantling.trainer.reporting.format import fold_lines, format_bytes, format_number, format_percent
from scantling.trainer.training.sinks import Sink

if TYPE_CHECKING:
    from scantling.trainer.planning.plan import Plan

PLAIN_INTERVAL_S = 10.0
"""Seconds between plain lines without a terminal."""
BAR_WIDTH = 16
LOADING = "loading PyTorch and transformers"
PATIENCE_S = 2.0
"""Seconds before a phase also shows its duration."""
SPINNER = "line"
"""Spinner of ASCII characters, which every terminal has."""
LABEL_WIDTH = 12
RECENT_STEPS = 100
"""Steps over which the traffic is averaged; with local steps only some of them send."""


class WordConsole(Console):
    """Console that wraps lines of text between words on a terminal, and not at all in a file.

    Lost output does not stop the work: `scantling.cli.run` reports it at the end.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        if self.is_terminal and all(isinstance(each, str) for each in objects):
            objects = tuple(fold_lines(each, self.width) for each in objects)
        super().print(*objects, **options)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:  # a full disk, a closed terminal
            self._give_up(error)

    def on_broken_pipe(self) -> None:
        self._give_up(BrokenPipeError())

    def _give_up(self, error: OSError) -> None:
        self.quiet = True
        if not self.stderr:
            report_lost_output(error)


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that honors NO_COLOR and whether the stream is a terminal.

    Results are printed by rank 0; errors and warnings by the first rank of every machine.
    """
    quiet = (local_rank_from_env() if stderr else rank_from_env()) > 0
    return WordConsole(stderr=stderr, quiet=quiet, highlight=False, soft_wrap=not stderr)


def print_json(content: Any) -> None:
    """Print a value as JSON, on rank 0 only."""
    make_console().out(json.dumps(content, indent=2, default=str), highlight=False)


def parse_assignments(option: str, given: Sequence[str]) -> dict[str, str]:
    """Parse the `NAME=VALUE` arguments of an option into a mapping.

    Raises:
        UserError: an argument has no `=`, or two have the same name.
    """
    values: dict[str, str] = {}
    for each in given:
        name, sign, value = (part.strip() for part in each.partition("="))
        if not sign:
            raise UserError(f"{option} takes NAME=VALUE; given '{each}'")
        if name in values:
            raise UserError(f"{option} sets {name} twice, to '{values[name]}' and '{value}'; give it once")
        values[name] = value
    return values


@contextmanager
def busy(activity: str) -> Iterator[None]:
    """Show a spinner with the current activity on a terminal."""
    console = make_console(stderr=True)
    if not console.is_terminal or console.quiet:
        yield
        return
    with console.status(Text(activity), spinner=SPINNER):
        yield


def show_warnings(console: Console) -> None:
    """Send the library's warnings to the terminal, one line each."""
    handler = RichHandler(console=console, show_time=False, show_path=False, level=logging.WARNING)
    logger = logging.getLogger("scantling")
    logger.handlers = [handler]
    logger.propagate = False


def print_labeled(console: Console, label: str, text: str) -> None:
    """Print a label and a text; on a terminal the text is wrapped between words and stays next to the label."""
    line = f"{label:<{LABEL_WIDTH}}{text}"
    if console.is_terminal:
        line = fold_lines(line, console.width, indent=" " * LABEL_WIDTH)
    console.print(line, markup=False)


class _Live(Progress):
    """Progress bar with metrics and the phase below it, on as many lines as they need."""

    metrics: Sequence[str] = ()
    phase: str | None = None
    since = 0.0

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.phase is not None:
            seconds = time.monotonic() - self.since
            yield Text(f"  {self.phase}" + (f", {seconds:.0f} s" if seconds > PATIENCE_S else ""))
        line = ""
        for metric in self.metrics:
            if line and cell_len(f"{line}  {metric}") > self.console.width:
                yield Text(line)
                line = ""
            line += f"  {metric}"
        if line or self.phase is None:
            yield Text(line)


def _describe_traffic(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the mean bytes that a process sends per step, their budget, and the exchange's share of the time.

    With shards, the budget is of the bytes that go to other replicas.

    The speed in brackets is that of the steps that send: their bytes by the time of the exchange, computing included.
    """
    sent = sum(record["wire_bytes"] for record in records) / len(records)
    if not sent:
        return []
    text = f"sent {format_bytes(sent)}/step"
    if (budget := records[-1].get("wire_budget_bytes")) is not None:
        if "replica_wire_bytes" in records[-1]:
            between = sum(record["replica_wire_bytes"] for record in records) / len(records)
            text += f", to other replicas {format_bytes(between)}"
        text += f" of {format_bytes(budget)}"
    waited, total = (sum(record.get(key, 0.0) for record in records) for key in ("exchange_s", "step_s"))
    if not total:
        return [text]
    speed = ""
    if sending := sum(record.get("exchange_s", 0.0) for record in records if record["wire_bytes"]):
        speed = f" ({format_number(8e-6 * sent * len(records) / sending)} Mbit/s)"
    return [text, f"exchange {format_percent(waited / total, 0)} of the time{speed}"]


class ConsoleSink(Sink):
    """Sink that shows a short plan, then the run's progress with its main metrics."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: _Live | None = None
        self._task: TaskID | None = None
        self._name, self._steps, self._first = "", 0, 1
        self._planned = ""
        self._held_out: str | None = None
        self._has_output = True
        self._status: Status | None = None
        self._timer: Timer | None = None
        self._began = self._last_line = 0.0
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=RECENT_STEPS)

    def start(self, *, name: str, run_dir: Path, plan: Plan, first_step: int, last_step: int) -> None:
        self._name, self._steps, self._first = name, last_step, first_step
        self.phase(None)
        self._planned = format_bytes(plan.optimizer_state_bytes)
        self._began = self._last_line = time.monotonic()
        self._print(Text.assemble((name, "bold"), f" → {run_dir}"))
        self._print(plan.short())
        if self._console.is_terminal:
            self._live = _Live(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=BAR_WIDTH),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                console=self._console,
            )
            self._task = self._live.add_task(name, total=last_step, completed=first_step - 1)
            self._live.start()

    def phase(self, what: str | None) -> None:
        """Show the phase: next to the bar, or on its own line before there is a bar.

        Without a terminal, a line is printed for a phase that takes long.
        """
        self._stop_timer()
        if self._console.quiet:
            return
        if not self._console.is_terminal:
            if what is not None:
                self._timer = Timer(PLAIN_INTERVAL_S, self._print, [f"{what} ..."])
                self._timer.daemon = True
                self._timer.start()
        elif self._live is not None:
            self._live.phase, self._live.since = what, time.monotonic()
        elif what is None:
            self.hide_phase()
        elif self._status is not None:
            self._status.update(Text(what))
        else:
            self._status = self._console.status(Text(what), spinner=SPINNER)
            with suppress(OSError, SystemExit):
                self._status.start()

    def hide_phase(self) -> None:
        """Remove the line of a phase, because another bar replaces it."""
        status, self._status = self._status, None
        if status is not None:
            with suppress(OSError, SystemExit):  # the terminal may be closed
                status.stop()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def record(self, record: Mapping[str, Any]) -> None:
        self._stop_timer()
        if "eval_loss" in record:
            auc = f" auc {record['auc']:.4f}" if "auc" in record else ""
            self._held_out = f"held-out {record['eval_loss']:.3f}{auc}"
        metrics = [f"loss {record['loss']:.3f}"]
        if self._held_out is not None:
            metrics.append(self._held_out)
        metrics.append(f"{format_number(record['tokens_per_s'])} tok/s")
        metrics.append(f"peak {format_bytes(record['peak_memory_bytes'])}")
        self._recent.append(record)
        metrics += _describe_traffic(self._recent)
        if "tensor_size" in record:
            parameters = format_number(record["tensor_parameters"])
            share, factor = format_percent(record["tensor_size"], 0), format_number(record["tensor_compression"])
            rank = f"mean rank {record['mean_rank']:.1f}"
            metrics.append(f"TT parameters {parameters} ({share}, {factor}x fewer than dense, {rank})")
        metrics.append(f"optimizer {format_bytes(record['optimizer_state_bytes'])} (plan {self._planned})")
        metrics.append(f"lr {record['lr']:.1e}")
        if self._live is not None and self._task is not None:
            self._live.metrics, self._live.phase = metrics, None
            self._live.update(self._task, completed=record["step"])
            return
        now, step = time.monotonic(), record["step"]
        if "eval_loss" in record or step in (self._first, self._steps) or now - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = now
            left = (now - self._began) / (step - self._first + 1) * (self._steps - step)
            eta = f"  {left:.0f} s left" if step < self._steps else ""
            self._print(f"{self._name}  step {step}/{self._steps}  {'  '.join(metrics)}{eta}")

    def message(self, text: str) -> None:
        if "checkpoint" in text and self._live is not None and not text.startswith("resumed"):
            return  # each message would push the live display down
        self._print(text)

    def _print(self, text: str | Text) -> None:
        """Print a line; if the pipe is closed or the disk is full, the run continues without output."""
        if not self._has_output:
            return
        try:
            self._console.print(text, markup=False)
        except (OSError, SystemExit):  # rich ends the process on a broken pipe
            self._has_output = False

    def close(self) -> None:
        self._stop_timer()
        self.hide_phase()
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError, SystemExit):  # the terminal may be closed
                live.stop()
