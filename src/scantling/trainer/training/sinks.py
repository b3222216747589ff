"""Receivers of the records of a run: `metrics.jsonl`, TensorBoard, and any number of others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from scantling.errors import RunError, UserError
from scantling.files import no_follow

if TYPE_CHECKING:
    from scantling.trainer.planning.plan import Plan

Record = Mapping[str, Any]


class Sink:
    """Receiver of the events of a run, on rank 0; by default every method does nothing."""

    def start(self, *, name: str, run_dir: Path, plan: Plan, first_step: int, last_step: int) -> None:
        """Called before step `first_step`."""

    def phase(self, what: str | None) -> None:
        """Called when something begins that may take long, also before `start`; with None when it is done."""

    def record(self, record: Record) -> None:
        """Called after each step; keys as in `metrics.jsonl`."""

    def sync(self) -> None:
        """Called before a checkpoint is written: earlier records must survive a crash."""

    def message(self, text: str) -> None:
        """Called with a line for the user, such as a saved checkpoint."""

    def close(self) -> None:
        """Called at the end of the run, after errors too."""


class JsonlSink(Sink):
    """Writes `metrics.jsonl`: one JSON object per line and step, flushed.

    A resumed run keeps existing lines, except an incomplete last line after a crash.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._run_errors():
            _remove_incomplete_line(path)
            self._file: IO[str] = open(path, "a", encoding="utf-8", opener=no_follow)  # noqa: SIM115 (held until close)

    @contextmanager
    def _run_errors(self) -> Iterator[None]:
        """Raise a RunError for an OSError."""
        try:
            yield
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error.strerror or error}") from None

    def record(self, record: Record) -> None:
        with self._run_errors():
            # NaN is not JSON: fail here instead of in each reader
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()

    def sync(self) -> None:
        with self._run_errors():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with self._run_errors():
            self._file.close()


EVENTS_SUFFIX = ".scantling"
"""Suffix of our TensorBoard event files; other files in their folder belong to other programs."""


class TensorBoardSink(Sink):
    """Writes TensorBoard events into the run directory; needs the extra `tb`."""

    def __init__(self, folder: Path) -> None:
        self._writer = summary_writer()(str(folder), filename_suffix=EVENTS_SUFFIX)

    def record(self, record: Record) -> None:
        for key, value in record.items():
            if isinstance(value, int | float) and key not in ("step", "time"):
                self._writer.add_scalar(key, value, record["step"])

    def close(self) -> None:
        self._writer.close()


def summary_writer() -> Any:
    """Return the class that writes TensorBoard events.

    Raises:
        UserError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("train.tensorboard needs TensorBoard: pip install 'scantling[tb]'") from None
    return SummaryWriter


class Sinks(Sink):
    """Several sinks that act as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def start(self, *, name: str, run_dir: Path, plan: Plan, first_step: int, last_step: int) -> None:
        for sink in self._sinks:
            sink.start(name=name, run_dir=run_dir, plan=plan, first_step=first_step, last_step=last_step)

    def phase(self, what: str | None) -> None:
        for sink in self._sinks:
            sink.phase(what)

    def record(self, record: Record) -> None:
        for sink in self._sinks:
            sink.record(record)

    def sync(self) -> None:
        for sink in self._sinks:
            sink.sync()

    def message(self, text: str) -> None:
        for sink in self._sinks:
            sink.message(text)

    def close(self) -> None:
        with ExitStack() as stack:  # close all, also after an error
            # the stack calls the last callback first, so this closes in the given order
            for sink in reversed(self._sinks):
                stack.callback(sink.close)


def _remove_incomplete_line(path: Path) -> None:
    """Truncate a file after its last newline; read backwards in blocks, because it may be large."""
    if not path.exists():
        return
    with open(path, "r+b", opener=no_follow) as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        # find the last newline, 64 KiB at a time
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position != end:
            file.truncate(position)
