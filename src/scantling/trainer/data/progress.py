"""Progress display of long data preparation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

PATIENCE_S = 1.0
"""Preparation that takes at most this long shows nothing."""


class Progress(Protocol):
    """Interface that receives the progress of one task after another."""

    def start(self, what: str, total: int | None) -> None:
        """Start a task: `what` names it, `total` is its size in bytes, if known."""

    def advance(self, amount: int) -> None:
        """Report that `amount` more bytes are done."""

    def finish(self) -> None:
        """Report that the task is done, or was aborted."""


class NoProgress:
    """Progress interface that shows nothing."""

    def start(self, what: str, total: int | None) -> None: ...

    def advance(self, amount: int) -> None: ...

    def finish(self) -> None: ...


class RichProgress:
    """Progress bar on a terminal, plain lines elsewhere; both only after a second of work.

    Args:
        console: shows it.
        before: called before anything is shown, for example to remove another bar.
    """

    def __init__(self, console: Console, before: Callable[[], None] = lambda: None) -> None:
        self._console, self._before = console, before
        self._what, self._done = "", 0
        self._total: int | None = None
        self._began = 0.0
        self._shown = False
        self._bar: Bar | None = None

    def start(self, what: str, total: int | None) -> None:
        self._what, self._total, self._done = what, total, 0
        self._began, self._shown = time.monotonic(), False

    def advance(self, amount: int) -> None:
        self._done += amount
        if not self._shown and time.monotonic() - self._began > PATIENCE_S:
            self._shown = True
            self._show()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._shown:
            seconds = time.monotonic() - self._began
            self._console.print(f"{self._what}: {self._done / 1e6:.1f} MB in {seconds:.1f} s", markup=False)

    def _show(self) -> None:
        self._before()
        if not self._console.is_terminal:
            of = "" if self._total is None else f" of {self._total / 1e6:.1f} MB"
            self._console.print(f"{self._what}{of} ...", markup=False)
            return
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=self._console, transient=True)
        self._bar.add_task(self._what, total=self._total, completed=self._done)
        self._bar.start()
