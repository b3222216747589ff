"""Table of a sweep: a CSV file with one row per run, complete at any time. `scantling fit` reads it directly.

Columns: the keys that the sweep sets; `N`, parameters outside of embeddings and the output layer, before ranks are
pruned; `D`, training tokens; `loss`, held-out loss in nats; `state`: done, stopped or failed; `seconds` of all steps;
the columns of the evaluations after the run; `run`, its folder; `error`, the cause of a failure.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from scantling.errors import UserError
from scantling.files import write_atomic
from scantling.trainer.reporting.runs import read_run
from scantling.trainer.sweeping.grid import Case, format_cell

Row = dict[str, str]

RESULT_COLUMNS = ("N", "D", "loss", "state", "seconds")
_TRAILING_COLUMNS = ("run", "error")


def read_table(path: Path) -> dict[str, Row]:
    """Return the rows of a table by the keys of their runs; empty if the table does not exist yet.

    Raises:
        UserError: the file cannot be read, or is a different table.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            rows = list(reader)
            header = reader.fieldnames or []
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read the table {path}: {error}") from None
    if not {*RESULT_COLUMNS, *_TRAILING_COLUMNS} <= set(header):
        raise UserError(f"{path} is not the table of a sweep; set the sweep's key table to another file")
    for number, row in enumerate(rows, start=1):
        # DictReader puts extra cells under the key None, and None into missing ones
        if None in row or None in row.values():
            raise UserError(
                f"row {number} of {path} has a different number of cells than the header: it was cut or edited. Fix or "
                "remove it; runs whose folders exist are not trained again"
            )
    return {Path(row["run"]).name or f"row {number}": row for number, row in enumerate(rows)}


def write_table(path: Path, keys: Sequence[str], metric_columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Replace the table atomically.

    Args:
        path: the file.
        keys: the keys that the sweep sets.
        metric_columns: columns of the evaluations after the runs.
        rows: in order; a missing cell is empty, and additional cells get their own columns.

    Raises:
        RunError: it cannot be written.
    """
    text = io.StringIO()
    rows, known = list(rows), {*keys, *RESULT_COLUMNS, *metric_columns, *_TRAILING_COLUMNS}
    others = dict.fromkeys(name for row in rows for name, cell in row.items() if name not in known and cell)
    columns = [*keys, *RESULT_COLUMNS, *metric_columns, *others, *_TRAILING_COLUMNS]
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())


def done_row(case: Case, run_dir: Path) -> Row | None:
    """Return the row of a finished run, from its folder; None if it is not finished."""
    if not (run_dir / "result.json").is_file():
        return None
    run = read_run(run_dir)
    if run.status != "done" or run.steps[-1] != case.recipe.train.steps:
        return None
    seconds = float(np.nansum(run.column("step_s")))
    metrics = {"D": run.metric("tokens"), "loss": run.metric("eval_loss")}
    cells = {
        name: format_cell(int(value) if name == "D" else value) for name, value in metrics.items() if value is not None
    }
    return {**make_row(case, run_dir, "done"), **cells, "seconds": f"{seconds:.3f}"}


def make_row(case: Case, run_dir: Path, state: str, error: str = "") -> Row:
    """Return a row without a result."""
    values = {key: format_cell(value) for key, value in case.values.items()}
    return {**values, "N": str(case.num_parameters), "state": state, "run": str(run_dir), "error": error}


def add_metrics(row: Row, metrics: Mapping[str, float]) -> Row:
    """Return the row with the metrics of an evaluation added."""
    return {**row, **{name: format_cell(value) for name, value in metrics.items()}}
