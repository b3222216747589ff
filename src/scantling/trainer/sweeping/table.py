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
from scantling.files import write_whole
from scantling.trainer.reporting.runs import read_run
from scantling.trainer.sweeping.grid import Case, shown

Row = dict[str, str]

FIGURES = ("N", "D", "loss", "state", "seconds")
_LAST = ("run", "error")


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
    if not {*FIGURES, *_LAST} <= set(header):
        raise UserError(f"{path} is no table of a sweep; name another file in the sweep's key table")
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise UserError(
                f"row {number} of {path} has not as many cells as the first line, which names the columns: it was cut "
                "or edited. Mend or remove it; a run whose folder is here is not trained again"
            )
    return {Path(row["run"]).name or f"row {number}": row for number, row in enumerate(rows)}


def write_table(path: Path, keys: Sequence[str], further: Sequence[str], rows: Iterable[Row]) -> None:
    """Replace the table atomically.

    Args:
        path: the file.
        keys: the keys that the sweep sets.
        further: columns of the evaluations after the runs.
        rows: in order; a missing cell is empty, and additional cells get their own columns.

    Raises:
        RunError: it cannot be written.
    """
    text = io.StringIO()
    rows, known = list(rows), {*keys, *FIGURES, *further, *_LAST}
    others = dict.fromkeys(name for row in rows for name, cell in row.items() if name not in known and cell)
    columns = [*keys, *FIGURES, *further, *others, *_LAST]
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def done_row(case: Case, run_dir: Path) -> Row | None:
    """Return the row of a finished run, from its folder; None if it is not finished."""
    if not (run_dir / "result.json").is_file():
        return None
    run = read_run(run_dir)
    if run.status != "done" or run.steps[-1] != case.recipe.train.steps:
        return None
    seconds = float(np.nansum(run.column("step_s")))
    figures = {"D": run.figure("tokens"), "loss": run.figure("eval_loss")}
    cells = {name: shown(int(value) if name == "D" else value) for name, value in figures.items() if value is not None}
    return {**row_of(case, run_dir, "done"), **cells, "seconds": f"{seconds:.3f}"}


def row_of(case: Case, run_dir: Path, state: str, error: str = "") -> Row:
    """Return a row without a result."""
    values = {key: shown(value) for key, value in case.values.items()}
    return {**values, "N": str(case.num_parameters), "state": state, "run": str(run_dir), "error": error}


def with_figures(row: Row, figures: Mapping[str, float]) -> Row:
    """Return the row with the metrics of an evaluation added."""
    return {**row, **{name: shown(value) for name, value in figures.items()}}
