"""Where the records of a run go: always to `metrics.jsonl`, and to any number of other sinks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from scantling.errors import RunError, UserError
from scantling.files import no_follow

if TYPE_CHECKING:
    from scantling.trainer.planning.plan import Plan

Record = Mapping[str, Any]


class Sink:
    """Receives what happens in a run, on rank 0; every method does nothing unless a sink needs it."""

    def start(self, *, name: str, run_dir: Path, plan: Plan, first_step: int, last_step: int) -> None:
        """The run is about to take step `first_step`."""

    def phase(self, what: str | None) -> None:
        """The run works at something that may take long, before its first step too; None when it is done."""

    def record(self, record: Record) -> None:
        """One step is done; keys as in `metrics.jsonl`."""

    def sync(self) -> None:
        """A checkpoint is about to be written: what was recorded so far must survive with it."""

    def message(self, text: str) -> None:
        """Something worth a line happened, such as a checkpoint."""

    def close(self) -> None:
        """The run is over, however it ended."""


class JsonlSink(Sink):
    """`metrics.jsonl`: one object a line, every step, flushed.

    When a run goes on, the lines that are there stay; only a last line without its end, torn by a crash, is cut off.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            _cut_torn_line(path)
            self._file: IO[str] = open(path, "a", encoding="utf-8", opener=no_follow)  # noqa: SIM115 (held until close)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror or error}") from None

    def record(self, record: Record) -> None:
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error.strerror or error}") from None

    def sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error.strerror or error}") from None

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error.strerror or error}") from None


EVENTS_SUFFIX = ".scantling"
"""End of the names of our TensorBoard events; other files in their folder belong to somebody else."""


class TensorBoardSink(Sink):
    """TensorBoard events in the run directory; needs the extra `tb`."""

    def __init__(self, folder: Path) -> None:
        self._writer = summary_writer()(str(folder), filename_suffix=EVENTS_SUFFIX)

    def record(self, record: Record) -> None:
        for key, value in record.items():
            if isinstance(value, int | float) and key not in ("step", "time"):
                self._writer.add_scalar(key, value, record["step"])

    def close(self) -> None:
        self._writer.close()


def summary_writer() -> Any:
    """The class that writes TensorBoard's events.

    Raises:
        UserError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("train.tensorboard needs TensorBoard: pip install 'scantling[tb]'") from None
    return SummaryWriter


class Sinks(Sink):
    """Several sinks as one."""

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
        with ExitStack() as stack:  # all of them, also after an error
            for sink in reversed(self._sinks):
                stack.callback(sink.close)


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "r+b", opener=no_follow) as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                position = start + found + 1
                break
            position = start
        if position != end:
            file.truncate(position)
