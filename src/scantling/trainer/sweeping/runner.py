"""Run a sweep: each run in its own process, one after another or several at once.

A run's folder is named by the hash of its recipe, so a sweep can be stopped at any time and started again. Finished
runs are kept, interrupted ones resume from their checkpoint, and new ones are run. The table is rewritten after each
run. A row that says `done` also counts if the folder is missing, for example if the table came from another machine.
Rows of other grids are kept if they say `done`, or if their folders are missing, since the table is then the only
record.

    OUT/recipes/KEY.yaml   the recipe
    OUT/runs/KEY/          the run, with log.txt: its output
    OUT/runs.csv           the table
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from scantling.distributed.context import SINGLE_PROCESS
from scantling.errors import EXIT_STOPPED, UserError
from scantling.files import no_follow, write_atomic
from scantling.trainer.recipe import dump_recipe
from scantling.trainer.sweeping import evaluations
from scantling.trainer.sweeping.grid import Case
from scantling.trainer.sweeping.schema import Sweep
from scantling.trainer.sweeping.table import (
    RESULT_COLUMNS,
    Row,
    add_metrics,
    done_row,
    make_row,
    read_table,
    write_table,
)
from scantling.trainer.training.checkpoint import Checkpointer
from scantling.trainer.training.run_dir import InUseError, RunDir
from scantling.trainer.training.signals import StopSignal, interrupt

POLL_S = 0.2
_MAX_ERROR_CHARS = 500
_TAIL_BYTES = 1 << 16
"""Bytes to read at the end of a metrics file to get its last line."""


class SweepCallback:
    """Callback interface for the progress of a sweep; every method does nothing by default."""

    def start(self, settled: Sequence[Case], waiting: Sequence[Case]) -> None:
        """Report how many runs are settled already and how many are to be run."""

    def begin(self, case: Case, action: str) -> None:
        """Report that a run starts, resumes, or is evaluated."""

    def progress(self, case: Case, record: Mapping[str, Any]) -> None:
        """Report that a run has completed a step; `record` as in `metrics.jsonl`."""

    def end(self, case: Case, row: Row) -> None:
        """Report that a run has ended."""

    def message(self, text: str) -> None:
        """Report a message."""

    def close(self) -> None:
        """Report that the sweep has ended, normally or not."""


@dataclass(frozen=True)
class SweepResult:
    """Result of a sweep.

    Attributes:
        rows: the available rows of the grid's runs, by key.
        stopped: True if a signal ended the sweep.
        busy: runs that were skipped because another process is running them.
    """

    rows: Mapping[str, Row]
    stopped: bool
    busy: Sequence[Case]


@dataclass
class _Job:
    case: Case
    process: subprocess.Popen[bytes]
    log: Path
    log_offset: int
    slot: int
    """Index of the job among concurrent ones; with several GPUs, also selects its GPU."""
    row: Row | None
    """Row of the finished run that this job evaluates; None for a training job."""


@dataclass
class SweepRunner:
    """Run the runs of a sweep that are not settled yet, each in its own process.

    Args:
        sweep: as read.
        grid: all of its runs.
        jobs: number of concurrent runs, which share the cores.
        retry: True to run failed runs again.
        callback: callback interface.
    """

    sweep: Sweep
    grid: Sequence[Case]
    jobs: int = 1
    retry: bool = False
    callback: SweepCallback = field(default_factory=SweepCallback)

    def __post_init__(self) -> None:
        self._settings = evaluations.evaluation_settings(self.sweep.after)
        self._columns = evaluations.metric_columns(self._settings)
        self._rows: dict[str, Row] = {}
        self._busy: list[Case] = []

    def read_rows(self) -> dict[str, Row]:
        """Return the existing rows of the runs, from the table and the folders, by key; changes nothing."""
        table = read_table(self.sweep.table_path)
        rows = {}
        for case in self.grid:
            folder, row = self._folder(case), table.get(case.key)
            # a table row that says done counts even without its folder; otherwise the folder decides
            old = row if row is not None and row["state"] == "done" else done_row(case, folder) or row
            if old is not None:
                fresh = make_row(case, folder, old["state"])
                # if the folder exists, the metrics of evaluations come from it and not from the table
                known = RESULT_COLUMNS if self._has_run(case) else old.keys()
                kept = {k: cell for k, cell in old.items() if k == "error" or (k in known and k not in fresh)}
                rows[case.key] = add_metrics({**fresh, **kept}, evaluations.stored_metrics(folder, self._settings))
        return rows

    def missing_files(self) -> list[UserError]:
        """Return the errors of evaluations whose files do not exist yet.

        Raises:
            UserError: an evaluation is impossible regardless of files.
        """
        errors = []
        for name, given in self._settings.items():
            evaluation = evaluations.EVALUATIONS[name]
            try:
                evaluation.check(given)
            except UserError as error:
                if not evaluation.reads_files:
                    raise
                errors.append(error)
        return errors

    def run(self, chosen: Sequence[Case]) -> SweepResult:
        """Run the selected runs that are not settled, until all end or a signal arrives.

        Raises:
            UserError: another sweep uses this folder, or an evaluation is impossible.
            RunError: the table cannot be written.
        """
        if errors := self.missing_files():
            raise errors[0]
        lock = RunDir(self.sweep.folder)
        try:
            lock.lock()
        except InUseError:
            raise UserError(f"another sweep is running in {self.sweep.folder}; wait until it ends") from None
        try:
            self._rows = self.read_rows()
            waiting = [case for case in chosen if not self._is_settled(case)]
            self.callback.start([case for case in chosen if case not in waiting], waiting)
            if others := self._other_rows():
                self.callback.message(f"the table keeps {len(others)} rows of other grids")
            self._write()
            stopped = self._work(waiting)
        finally:
            self.callback.close()
            lock.unlock()
        return SweepResult(self._rows, stopped, self._busy)

    def _is_settled(self, case: Case) -> bool:
        row = self._rows.get(case.key)
        if row is None or row["state"] == "stopped":
            return False
        if row["state"] == "failed":
            return not self.retry
        return not self._missing(case)

    def _missing(self, case: Case) -> dict[str, Any]:
        """Return the missing evaluations of a finished run; none if its folder is missing."""
        return evaluations.missing_evaluations(self._folder(case), self._settings) if self._has_run(case) else {}

    def _work(self, waiting: Sequence[Case]) -> bool:
        """Run the waiting runs; return True if a signal stopped them."""
        queue, running = list(waiting), list[_Job]()
        is_stopping = False
        with StopSignal(again=interrupt) as stop:  # a second signal raises; running jobs get it, too
            try:
                while queue or running:
                    if stop.received and not is_stopping:
                        is_stopping = True
                        queue.clear()
                        self.callback.message("stopping: each run saves after its current step")
                        _signal(running)
                    while queue and len(running) < self.jobs:
                        # the lowest free slot: with a GPU per job, no two running jobs share one
                        slot = min({*range(self.jobs)} - {job.slot for job in running})
                        running += self._start(queue.pop(0), slot)
                    for job in [job for job in running if job.process.poll() is not None]:
                        running.remove(job)
                        running += self._finish(job, stopping=is_stopping)
                    for job in running:
                        if job.row is None and (record := _last_record(self._folder(job.case) / "metrics.jsonl")):
                            self.callback.progress(job.case, record)
                    time.sleep(POLL_S)
            finally:
                _signal(running)  # a second signal ends a run at once
                for job in running:
                    job.process.wait()
        return is_stopping

    def _start(self, case: Case, slot: int) -> list[_Job]:
        """Start or resume a run; return nothing if another process is running it."""
        row = self._rows.get(case.key)
        folder = self._folder(case)
        run_dir = RunDir(folder)
        try:
            run_dir.lock()
        except InUseError as error:
            self._busy.append(case)
            self.callback.message(f"{case.label}: skipped, {error}")
            return []
        # Only a check: the child locks the folder itself, which it cannot while we hold the lock.
        run_dir.unlock()
        if row is not None and row["state"] == "done":
            return self._evaluate(case, row, slot)
        recipe = self.sweep.folder / "recipes" / f"{case.key}.yaml"
        write_atomic(recipe, dump_recipe(case.recipe))
        # if all checkpoints are damaged, the run refuses to start and changes nothing: the user has to decide
        resumes = bool(Checkpointer(run_dir.checkpoints, SINGLE_PROCESS).steps())
        mode = "--resume" if resumes else "--force"
        self.callback.begin(case, "resumes" if resumes else "starts")
        arguments = ["-m", "scantling", "train", str(recipe), "--run-dir", str(folder), mode]
        return [self._process(case, arguments, slot, None)]

    def _evaluate(self, case: Case, row: Row, slot: int) -> list[_Job]:
        settings = self._missing(case)
        if not settings:
            return []
        self.callback.begin(case, "evaluating")
        arguments = ["-m", "scantling.trainer.sweeping.evaluations", str(self._folder(case)), json.dumps(settings)]
        return [self._process(case, arguments, slot, row)]

    def _process(self, case: Case, arguments: Sequence[str], slot: int, row: Row | None) -> _Job:
        environment = dict(os.environ)
        if self.jobs > 1:
            environment.setdefault("OMP_NUM_THREADS", str(threads_per_job(self.jobs)))
        if self.jobs > 1 and len(self._gpus) > 1:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
        log = self._folder(case) / "log.txt"
        with open(log, "ab", opener=no_follow) as file:
            log_offset = file.tell()
            # a new session: Ctrl-C then reaches only the sweep, which forwards one signal, not two
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return _Job(case, process, log, log_offset, slot, row)

    @cached_property
    def _gpus(self) -> list[str]:
        return visible_gpus()

    def _finish(self, job: _Job, *, stopping: bool) -> list[_Job]:
        """Record how a process ended; return the evaluations that follow a finished training."""
        case, folder, code = job.case, self._folder(job.case), job.process.returncode
        if job.row is not None:
            problem = "" if code == 0 or stopping else f"after the run: {_failure_cause(job, code)}"
            row = add_metrics({**job.row, "error": problem}, evaluations.stored_metrics(folder, self._settings))
        elif code == 0:
            row = done_row(case, folder) or make_row(case, folder, "failed", f"ended early, see {job.log}")
        elif code == EXIT_STOPPED or (stopping and code < 0):
            row = make_row(case, folder, "stopped")
        else:
            row = make_row(case, folder, "failed", _failure_cause(job, code))
        self._rows[case.key] = row
        self._write()
        is_trained = job.row is None and row["state"] == "done"
        following = self._evaluate(case, row, job.slot) if is_trained and not stopping else []
        if not following:
            self.callback.end(case, row)
        return following

    def _write(self) -> None:
        rows = [self._rows[case.key] for case in self.grid if case.key in self._rows]
        write_table(self.sweep.table_path, self.sweep.keys, self._columns, [*rows, *self._other_rows()])

    def _other_rows(self) -> list[Row]:
        """Return the rows of other grids that are done, or whose folders are not in this sweep's folder."""
        own = {case.key for case in self.grid}
        table = read_table(self.sweep.table_path)
        folder = self.sweep.folder / "runs"
        others = [(key, row) for key, row in table.items() if key not in own]
        return [row for key, row in others if row["state"] == "done" or not (folder / key).exists()]

    def _has_run(self, case: Case) -> bool:
        return RunDir(self._folder(case)).holds_run()

    def _folder(self, case: Case) -> Path:
        return self.sweep.folder / "runs" / case.key


def threads_per_job(jobs: int) -> int:
    """Return the number of threads of each of several concurrent runs."""
    return max(1, len(os.sched_getaffinity(0)) // jobs)


def visible_gpus() -> list[str]:
    """Return the GPUs visible to a child process, named as in CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _signal(running: Sequence[_Job]) -> None:
    for job in running:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)


def _failure_cause(job: _Job, code: int) -> str:
    """Return the cause of a failure in one line: the process's error message, or the last line it printed."""
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}, see {job.log}"
    with open(job.log, "rb") as file:
        # the log may hold output of earlier attempts: read only that of this process
        file.seek(job.log_offset)
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("scantling: error")), len(lines) - 1)
    text = " ".join(line.strip() for line in lines[max(0, first) :]).removeprefix("scantling: error: ")
    return text[:_MAX_ERROR_CHARS] or f"exit code {code}, see {job.log}"


def _last_record(metrics: Path) -> dict[str, Any] | None:
    """Return the last complete line of a metrics file that is being written."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            # the part after the last newline is still being written
            lines = file.read().split(b"\n")[:-1]
        return dict(json.loads(lines[-1])) if lines else None
    except (OSError, ValueError):
        return None
