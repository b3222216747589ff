"""`scantling sweep`: a grid of recipes, its progress and its table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from scantling.cli.console import BAR_WIDTH, PLAIN_INTERVAL_S, busy, make_console, parse_assignments
from scantling.errors import EXIT_STOPPED, UserError
from scantling.torchrun_env import require_single_process
from scantling.trainer.models.build import recipe_task
from scantling.trainer.planning.fit import Fit, check_fit, silent_plan
from scantling.trainer.planning.plan import planned_device
from scantling.trainer.planning.resolve import resolve_run
from scantling.trainer.reporting.format import format_number, format_seconds
from scantling.trainer.sweeping.grid import Case, axis_labels, expand_sweep, format_cell, select_cases
from scantling.trainer.sweeping.runner import SweepCallback, SweepRunner
from scantling.trainer.sweeping.schema import Sweep, load_sweep
from scantling.trainer.sweeping.table import Row
from scantling.trainer.tasks import get_task

MOST_PROBLEMS = 5
"""Number of data problems that a dry run lists."""


def sweep(path: str, settings: Sequence[str], *, jobs: int, only: Sequence[str], retry: bool, dry_run: bool) -> int:
    require_single_process("sweep", "starts its own processes; run it without torchrun")
    console = make_console()
    read, base = load_sweep(path, settings)
    with busy("checking the recipes"):
        grid = expand_sweep(read, base, path)
    chosen = select_cases(grid, parse_assignments("--only", only))
    runner = SweepRunner(read, grid, jobs=jobs, retry=retry, callback=SweepProgress(console))
    if dry_run:
        missing_files = runner.missing_files()
        console.print(_grid_table(read, chosen, runner.read_rows()))
        total = format_number(sum(case.num_tokens for case in chosen))
        console.print(f"{len(chosen)} runs, {total} tokens; every recipe is valid; nothing was trained", markup=False)
        with busy("planning"):
            label, fit = _largest_run(chosen)
        problems = [f"{label}: the run {fit}"] if fit.is_impossible else []
        if not problems:
            console.print(f"the largest run, {label}: {fit}", markup=False)
        problems += [*_data_problems(chosen), *(f"after the runs: {error}" for error in missing_files)]
        if len(problems) > MOST_PROBLEMS:
            problems[MOST_PROBLEMS:] = [f"and {len(problems) - MOST_PROBLEMS} more"]
        if problems:
            raise UserError("\n".join(problems))
        return 0
    outcome = runner.run(chosen)
    states = Counter(outcome.rows[case.key]["state"] if case.key in outcome.rows else "waiting" for case in chosen)
    listed = ", ".join(f"{count} {state}" for state, count in states.items())
    console.print(f"{len(chosen)} runs: {listed}", markup=False)
    for case in chosen:
        row = outcome.rows.get(case.key, {})
        if row.get("error"):
            console.print(f"{case.label}: {row['error']}", markup=False)
    console.print(f"table       {read.table_path}", markup=False)
    if states.get("failed") and not outcome.stopped:
        console.print("to run failed runs again: --retry", markup=False)
    if outcome.stopped or states.get("stopped") or outcome.busy:
        console.print("continue with the same command", markup=False)
        return EXIT_STOPPED
    return 1 if any(outcome.rows.get(case.key, {}).get("error") for case in chosen) else 0


def _largest_run(chosen: Sequence[Case]) -> tuple[str, Fit]:
    """Return the run with the higher peak memory: the one with the most parameters or the one with the most tokens."""

    def tokens(case: Case) -> int:
        return case.recipe.micro_batch_size() * case.recipe.data.longest

    heavy = {id(case): case for case in (max(chosen, key=lambda each: each.num_parameters), max(chosen, key=tokens))}
    plans = []
    for case in heavy.values():
        run = resolve_run(case.recipe, world_size=1, device=planned_device(case.recipe))
        plans.append((silent_plan(run), run, case.label))
    planned, run, label = max(plans, key=lambda each: each[0].peak_memory_bytes or 0)
    return label, check_fit(run, planned)


def _data_problems(chosen: Sequence[Case]) -> list[str]:
    """Return the reasons why runs cannot read their data, without duplicates."""
    sections = {(recipe_task(case.recipe), case.recipe.data.model_dump_json()): case.recipe.data for case in chosen}
    problems = []
    for (task, _), section in sections.items():
        try:
            get_task(task).check_data(section)
        except UserError as error:
            problems += str(error).splitlines()
    return list(dict.fromkeys(problems))


def _grid_table(read: Sweep, chosen: Sequence[Case], rows: Mapping[str, Row]) -> Table:
    table = Table(title=Text(f"{read.name} → {read.folder}"), title_justify="left")
    names = axis_labels(read)
    for name in names.values():
        table.add_column(Text(name))
    for header in ("N", "D"):
        table.add_column(header, justify="right")
    table.add_column("state")
    for case in chosen:
        values = [Text(format_cell(case.values[key])) for key in names]
        sizes = (format_number(case.num_parameters), format_number(case.num_tokens))
        table.add_row(*values, *sizes, rows[case.key]["state"] if case.key in rows else "waiting")
    return table


class SweepProgress(SweepCallback):
    """Progress display of a sweep: on a terminal, a total bar by N D and one bar per run; plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Progress | None = None
        self._total_bar: TaskID | None = None
        self._run_bars: dict[str, TaskID] = {}
        self._done: dict[str, float] = {}
        self._ended = self._count = 0
        self._work = self._last_line = 0.0

    @property
    def share(self) -> float:
        """Completed share of the work to do, by N D."""
        return sum(self._done.values()) / self._work

    def start(self, settled: Sequence[Case], waiting: Sequence[Case]) -> None:
        self._ended, self._count = len(settled), len(settled) + len(waiting)
        self._work = sum(case.work for case in waiting)
        if settled:
            self._console.print(f"{len(settled)} of {self._count} runs are finished", markup=False)
        if not self._console.is_terminal or not waiting:
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=BAR_WIDTH))
        metrics = TextColumn("{task.fields[metrics]}", markup=False)
        self._bars = Progress(*columns, metrics, TimeRemainingColumn(compact=True), console=self._console)
        self._total_bar = self._bars.add_task("all runs", total=1.0, metrics="")
        self._bars.start()
        self._update()

    def begin(self, case: Case, action: str) -> None:
        if self._bars is None:
            self._console.print(f"{case.label}: {action}", markup=False)
        elif case.key not in self._run_bars:
            self._run_bars[case.key] = self._bars.add_task(case.label, total=case.recipe.train.steps, metrics=action)
        else:
            self._bars.update(self._run_bars[case.key], metrics=action)

    def progress(self, case: Case, record: Mapping[str, Any]) -> None:
        steps, before = case.recipe.train.steps, self._done.get(case.key, 0.0)
        self._done[case.key] = case.work * record["step"] / steps
        if self._done[case.key] == before:
            return
        metrics = f"{record['step']}/{steps}  loss {record['loss']:.3f}"
        if self._bars is not None:
            self._bars.update(self._run_bars[case.key], completed=record["step"], metrics=metrics)
            self._update()
        elif (now := time.monotonic()) - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = now
            self._console.print(f"{case.label}: {metrics}", markup=False)

    def end(self, case: Case, row: Row) -> None:
        self._ended += row["state"] != "stopped"
        self._done[case.key] = case.work
        loss = f", loss {float(row['loss']):.4f}" if row.get("loss") else ""
        seconds = f", {format_seconds(float(row['seconds']))}" if row.get("seconds") else ""
        problem = f": {row['error']}" if row["error"] else ""
        line = f"{self._ended}/{self._count}  {case.label}: {row['state']}{problem}{loss}{seconds}"
        self._console.print(line, markup=False)
        if self._bars is not None:
            if case.key in self._run_bars:
                self._bars.remove_task(self._run_bars.pop(case.key))
            self._update()

    def message(self, text: str) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _update(self) -> None:
        if self._bars is not None and self._total_bar is not None:
            metrics = f"{self._ended}/{self._count}"
            self._bars.update(self._total_bar, completed=self.share, metrics=metrics)
