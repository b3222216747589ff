"""Compare runs: a table for the terminal, rows for the report, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scantling.files import replace_nonfinite, write_atomic
from scantling.trainer.reporting.format import (
    MISSING,
    SAME,
    format_bytes,
    format_decimal,
    format_difference,
    format_last_steps,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
)
from scantling.trainer.reporting.metrics import finite_or_none
from scantling.trainer.reporting.runs import Run

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class MetricLine:
    """One line of the comparison.

    Attributes:
        label: text at the left.
        key: key of the run's result; `added_memory_bytes` is computed.
        show: formats a value.
        change: formats a value relative to that of the first run.
        lower_is_better: None if neither direction is better.
    """

    label: str
    key: str
    show: Callable[[float | None], str]
    change: Callable[[float | None, float | None], str] = format_ratio
    lower_is_better: bool | None = True


def _percent(value: float | None) -> str:
    return format_percent(value, 2)


def _percentage_points(value: float | None, reference: float | None) -> str:
    if value is None or reference is None or value == reference:
        return format_difference(value, reference)
    points = 100 * (value - reference)
    return f"{points:+.2f} points" if abs(points) < 1e12 else f"{points:+.2e} points"


METRICS = (
    MetricLine("parameters", "num_parameters", format_number),
    MetricLine("weights", "weight_bytes", format_bytes),
    MetricLine("gradients", "gradient_bytes", format_bytes),
    MetricLine("optimizer state", "optimizer_state_bytes", format_bytes),
    MetricLine("exchange residuals", "residual_bytes", format_bytes),
    MetricLine("sent per step and rank", "wire_bytes", format_bytes),
    MetricLine("tokens per second", "tokens_per_s", format_number, lower_is_better=False),
    MetricLine("step time (median)", "step_s", format_seconds),
    MetricLine("peak memory", "peak_memory_bytes", format_bytes),
    MetricLine("peak memory above base", "added_memory_bytes", format_bytes),
    MetricLine("training tokens", "tokens", format_number, lower_is_better=None),
    MetricLine("train loss", "train_loss", format_decimal, format_difference),
    MetricLine("held-out loss (nats)", "eval_loss", format_decimal, format_difference),
    MetricLine("bits per byte", "bits_per_byte", format_decimal, format_difference),
    MetricLine("accuracy", "accuracy", _percent, _percentage_points, lower_is_better=False),
    MetricLine("AUC", "auc", format_decimal, format_difference, lower_is_better=False),
    MetricLine("normalized entropy", "normalized_entropy", format_decimal, format_difference),
    MetricLine("energy, first process (J)", "energy_j", format_number),
)
"""Lines of the comparison, in order; a line without a value in any run is omitted."""


@dataclass(frozen=True)
class CompareRow:
    """One line as text: a value per run and, for each run after the first, the change from the first.

    `better` holds True if the change is an improvement, False if it is a deterioration, None if neither.
    """

    label: str
    values: tuple[str, ...]
    changes: tuple[str, ...]
    better: tuple[bool | None, ...]


def metric_value(run: Run, key: str) -> float | None:
    """Return a number of the run's result, or one derived from it."""
    if key == "added_memory_bytes":
        peak, base = run.metric("peak_memory_bytes"), run.metric("base_memory_bytes")
        return None if peak is None or base is None else finite_or_none(peak - base)
    return run.metric(key)


def compare_rows(runs: Sequence[Run]) -> list[CompareRow]:
    """Return the lines of the comparison; the first run is the reference."""
    rows = []
    for line in METRICS:
        values = [metric_value(run, line.key) for run in runs]
        if all(value is None for value in values):
            continue
        others = values[1:]
        rows.append(
            CompareRow(
                label=_label(line, runs),
                values=tuple(line.show(value) for value in values),
                changes=tuple(line.change(value, values[0]) for value in others),
                better=tuple(_is_better(value, values[0], line) for value in others),
            )
        )
    return rows


def _label(line: MetricLine, runs: Sequence[Run]) -> str:
    """Return the label of a line; for the train loss, it includes the number of averaged steps."""
    if line.key != "train_loss":
        return line.label
    counts = {int(count) for run in runs if (count := run.metric("train_loss_steps")) is not None}
    return f"{line.label} ({format_last_steps(min(counts), max(counts))})" if counts else line.label


def compare_table(runs: Sequence[Run]) -> Table:
    """Return the comparison as a table for the terminal: one column per run, with changes from the first run."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    in_last_column = len(runs) == 2
    for run in runs:
        table.add_column(Text(run.name), justify="right")
    if in_last_column:
        table.add_column("change", justify="right")
    for row in compare_rows(runs):
        cells = [Text(value) for value in row.values]
        for i, (change, better) in enumerate(zip(row.changes, row.better, strict=True), start=1):
            style = {True: "green", False: "yellow", None: "dim"}[better]
            if in_last_column:
                cells.append(Text(change, style))
            elif change not in (MISSING, SAME):
                cells[i].append(f" ({change})", style)
        table.add_row(row.label, *cells)
    return table


def write_compare(runs: Sequence[Run], out_dir: str | Path) -> Path:
    """Write `compare.json` to a folder: `{"runs": [{"name": ..., ...}]}`, with null for unknown values.

    Raises:
        RunError: the file cannot be written; an existing file is unchanged.
    """
    path = Path(out_dir) / "compare.json"
    content = {"runs": [_entry(run) for run in runs]}
    write_atomic(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return path


def _entry(run: Run) -> dict[str, Any]:
    metrics = {line.key: metric_value(run, line.key) for line in METRICS}
    whole = {key: int(value) for key, value in metrics.items() if value is not None and value.is_integer()}
    return {
        "name": run.name,
        "run_dir": str(run.path),
        **{key: replace_nonfinite(value) for key, value in run.result.items() if key != "name"},
        **metrics,
        **{key: value for key, value in whole.items() if key.endswith("_bytes") or key in ("num_parameters", "tokens")},
    }


def _is_better(value: float | None, reference: float | None, line: MetricLine) -> bool | None:
    """Return True if a change is an improvement; None without a direction, or if the ratio is within 0.5 % of 1."""
    if value is None or reference is None or line.lower_is_better is None or value == reference:
        return None
    if line.change is format_ratio and abs(value - reference) <= 0.005 * abs(reference):
        return None
    return (value < reference) == line.lower_is_better
