"""`scantling fit`: fit a scaling law to a table of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scantling.cli.console import make_console, parse_assignments, print_json
from scantling.errors import UserError
from scantling.files import replace_nonfinite, write_atomic, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from scantling.laws import Fit

Intervals = dict[str, tuple[float, float]]
_SUFFIXES = (".csv", ".json", ".jsonl", ".gz")
"""Suffixes of tables, removed from the names of output files."""


def fit(
    runs: str,
    law: str,
    *,
    columns: Sequence[str],
    where: Sequence[str],
    base: str | None,
    fixed: Sequence[str],
    tie: Sequence[str],
    free: Sequence[str],
    delta: float,
    samples: int,
    out: Path,
    as_json: bool,
) -> int:
    from scantling import laws
    from scantling.trainer.reporting.charts import fit_chart

    console = make_console()
    fitted = laws.fit(
        runs,
        law,
        base=laws.ChinchillaLaw.published(base) if base not in (None, "fit") else base,  # type: ignore[arg-type]
        columns=parse_assignments("--column", columns),
        where=parse_assignments("--where", where),
        fixed={name: _parse_number(name, value) for name, value in parse_assignments("--fix", fixed).items()},
        tie=parse_assignments("--tie", tie),
        free=list(free),
        delta=delta,
    )
    results = summary(fitted, samples)
    table = Path(runs)
    while table.suffix in _SUFFIXES:
        table = table.with_suffix("")
    constants, plot = (out / f"{table.name}-{law}{suffix}" for suffix in (".json", ".svg"))
    write_json(constants, results)
    write_atomic(plot, fit_chart(fitted) + "\n")
    if as_json:
        print_json(results)
        return 0
    console.print(_table(fitted, results))
    for line in _lines(fitted, results):
        console.print(line, markup=False)
    console.print(f"constants   {constants}", markup=False)
    console.print(f"plot        {plot}", markup=False)
    return 0


def summary(fitted: Fit, samples: int) -> dict[str, Any]:
    """Return the results of a fit as JSON values.

    An unidentifiable constant has a reason instead of a value. Infinite values, such as an interval end, are None.

    Args:
        fitted: the fitted law.
        samples: number of refits for intervals, also of the base; 0 for none.
    """
    stages = [fitted] if fitted.base is None else [fitted, fitted.base]
    constants = [_constants(stage, stage.bootstrap(samples) if samples else {}) for stage in stages]
    unknown = {name for rows in constants for name, row in rows.items() if row["not_identified"]}
    held = {
        name: None if name in unknown else value
        for name, value in fitted.law.constants().items()
        if name not in fitted.fitted_constants
    }
    results: dict[str, Any] = {
        "law": fitted.law.name,
        "source": fitted.law.source,
        "runs": fitted.runs.count,
        "range": fitted.runs.ranges(),
        "constants": constants[0],
        "held": held,
        "base": None if fitted.base is None else {"runs": fitted.base.runs.count, "constants": constants[1]},
        "mean_error": fitted.mean_error,
        "condition_number": fitted.condition_number,
    }
    held_out = fitted.hold_out()
    results["hold_out"] = {
        "by_size": {f"{size:.12g}": float(abs(errors).mean()) for size, errors in held_out.errors.items()},
        "mean": held_out.mean if held_out.errors else None,
        "worst": held_out.worst if held_out.errors else None,
        "skipped": {f"{size:.12g}": reason for size, reason in held_out.skipped.items()},
    }
    strictly: dict[str, Any] = replace_nonfinite(results)
    return strictly


def _constants(fitted: Fit, intervals: Intervals) -> dict[str, Any]:
    values, unidentified = fitted.law.constants(), fitted.unidentified
    return {
        name: {
            "value": None if name in unidentified else values[name],
            "interval": None if name in unidentified else intervals.get(name),
            "unit": fitted.law.UNITS[name.partition("[")[0]],
            "not_identified": unidentified.get(name),
        }
        for name in fitted.fitted_constants
    }


def _table(fitted: Fit, results: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{fitted.law.name} law, {fitted.law.source}"), title_justify="left")
    for header in ("constant", "value", "95 % interval", "unit"):
        table.add_column(header)
    base = {} if results["base"] is None else results["base"]["constants"]
    for i, (name, row) in enumerate([*results["constants"].items(), *base.items()]):
        label = Text(name if i < len(results["constants"]) else f"{name} (base)")
        if row["not_identified"]:
            table.add_row(label, "not identified", "–", row["unit"])
            continue
        interval = "–" if row["interval"] is None else " to ".join(map(_format_value, row["interval"]))
        table.add_row(label, _format_value(row["value"]), interval, row["unit"])
    return table


def _lines(fitted: Fit, results: dict[str, Any]) -> list[str]:
    from scantling.trainer.reporting.format import format_percent

    held_out = results["hold_out"]
    reasons = {name: row["not_identified"] for name, row in results["constants"].items() if row["not_identified"]}
    lines = [f"not identified: {name}, {reason}" for name, reason in reasons.items()]
    lines += [f"error       {format_percent(results['mean_error'], 2)} mean error on the fitted runs"]
    if held_out["mean"] is not None:
        mean, worst = (format_percent(held_out[key], 2) for key in ("mean", "worst"))
        lines.append(f"hold-out    {mean} mean, {worst} worst error, each size predicted from the others")
    lines += [f"hold-out    not for {size} parameters: {reason}" for size, reason in held_out["skipped"].items()]
    condition = "infinite" if results["condition_number"] is None else f"{results['condition_number']:.1e}"
    lines.append(f"condition   {condition} (condition number of the fit)")
    return lines


def _format_value(value: float | None) -> str:
    return "infinity" if value is None else f"{value:.5g}"


def _parse_number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UserError(f"--fix {name} takes a number; given '{value}'") from None
