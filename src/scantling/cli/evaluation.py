"""`scantling eval`: evaluate a run's model on its held-out data, on minimal pairs, or on tasks of a harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from scantling.cli.console import LOADING, busy, make_console, print_json
from scantling.errors import UserError
from scantling.torchrun_env import rank_from_env
from scantling.trainer.reporting.format import format_number, format_percent

EVALUATING = "evaluating"


def evaluate(
    run: Path,
    *,
    minimal_pairs: Sequence[str],
    limit: int | None,
    lm_eval: str | None,
    device: str | None,
    as_json: bool,
) -> int:
    if limit is not None and not minimal_pairs:
        raise UserError(f"--limit {limit} is of minimal pairs; give their files with --minimal-pairs")
    if minimal_pairs and lm_eval is not None:
        raise UserError("give one of --minimal-pairs and --lm-eval")
    if minimal_pairs:
        with busy(LOADING):
            from scantling.trainer.training.minimal_pairs import evaluate_pairs
        with busy(EVALUATING):
            figures = evaluate_pairs(run, minimal_pairs, limit=limit, device=device)
        table = _pairs_table(run, figures)
    elif lm_eval is not None:
        from scantling.trainer.training.lm_harness import evaluate_tasks

        names = [name.strip() for name in lm_eval.split(",") if name.strip()]
        figures = evaluate_tasks(run, names, device=device)
        table = _tasks_table(run, figures)
    else:
        with busy(LOADING):
            from scantling.trainer.training.trained_run import evaluate_run
        with busy(EVALUATING):
            figures = evaluate_run(run, device=device)
        table = Table(title=Text(f"{run}, held-out data"), show_header=False)
        for name, value in figures.items():
            table.add_row(name.replace("_", " "), _shown(value))
    if rank_from_env():
        return 0
    if as_json:
        print_json(figures)
    else:
        make_console().print(table)
    return 0


def _pairs_table(run: Path, figures: Mapping[str, Any]) -> Table:
    table = Table(title=Text(f"{run}, minimal pairs at step {figures['step']}"), title_justify="left")
    table.add_column("phenomenon")
    for header in ("accuracy", "95 % interval", "pairs"):
        table.add_column(header, justify="right")
    phenomena = figures["phenomena"]
    for name, row in phenomena.items():
        table.add_row(Text(name), *_cells(row), end_section=name == list(phenomena)[-1])
    table.add_row("all", *_cells(figures))
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, high = (format_percent(end) for end in row["interval"])
    return [format_percent(row["accuracy"]), f"{low} to {high}", format_number(row["count"])]


def _tasks_table(run: Path, figures: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title=Text(f"{run}, lm-evaluation-harness"), title_justify="left")
    for header in ("task", "metric", "value"):
        table.add_column(header)
    for task, metrics in figures.items():
        for name, value in metrics.items():
            if name != "alias" and isinstance(value, int | float):
                table.add_row(Text(task), Text(name), _shown(value))
    return table


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
