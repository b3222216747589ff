"""The report: one HTML file about one or several runs, without scripts and external resources."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml
from markupsafe import Markup

import scantling
from scantling.errors import UserError
from scantling.files import write_atomic
from scantling.trainer.recipe.parsing import flatten, get_section
from scantling.trainer.reporting import charts, svg
from scantling.trainer.reporting.compare import compare_rows
from scantling.trainer.reporting.format import (
    MISSING,
    SAME,
    format_bytes,
    format_number,
    format_percent,
    format_seconds,
)
from scantling.trainer.reporting.metrics import finite_or_none
from scantling.trainer.reporting.runs import Run

_PLANNED = (
    ("parameters", "num_parameters", format_number),
    ("weights", "weight_bytes", format_bytes),
    ("gradients", "gradient_bytes", format_bytes),
    ("optimizer state", "optimizer_state_bytes", format_bytes),
    ("exchange residuals", "residual_bytes", format_bytes),
    ("sent per step and rank", "wire_bytes", format_bytes),
    ("tokens per step", "tokens_per_step", format_number),
    ("peak memory", "peak_memory_bytes", format_bytes),
)
"""Values that a plan predicts and a run measures."""

EXACT = "exact"

_MEMORY_SOURCES = {"rss": "resident set of the process", "cuda": "memory allocated on the GPU"}


@dataclass(frozen=True)
class Chart:
    """One chart of the page."""

    title: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class PlanCell:
    """Predicted and measured value, as text."""

    planned: str
    measured: str
    difference: str


def write_report(runs: Sequence[Run], path: str | Path) -> Path:
    """Write the report.

    Args:
        runs: one run or several; the first is the reference of comparisons.
        path: the HTML file; written atomically.

    Raises:
        UserError: no run is given.
        RunError: the file cannot be written.
    """
    if not runs:
        raise UserError("a report needs at least one run")
    target = Path(path)
    write_atomic(target, render(runs))
    return target


@cache
def _load_template() -> jinja2.Template:
    """Compile the template of the page, once per process."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("scantling.trainer.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")


def render(runs: Sequence[Run]) -> str:
    """Return the page as text. Everything from a run is escaped; only this module's charts are inserted unescaped."""
    return _load_template().render(
        title=_title(runs),
        runs=runs,
        states=[_state(run) for run in runs],
        dark={f"--c{color[1:]}": dark for color, dark in svg.DARK.items()},
        styles=[_line_css(i) for i in range(len(runs))],
        summary=_run_summary(runs[0]) if len(runs) == 1 else [],
        rows=compare_rows(runs),
        charts=_charts(runs),
        plans=_plan_lines(runs),
        notes=list(dict.fromkeys(note for run in runs for note in _texts(run.plan.get("notes")))),
        differences=[
            row for row in _merge_columns([run.recipe for run in runs]) if row[0] != "name" and len(row[1]) > 1
        ],
        recipes=[(run.name, yaml.safe_dump(dict(run.recipe), sort_keys=False, allow_unicode=True)) for run in runs],
        environment_rows=_merge_columns([run.environment for run in runs]),
        missing=MISSING,
        quiet=(MISSING, SAME),
        exact=EXACT,
        version=scantling.__version__,
    )


def _title(runs: Sequence[Run]) -> str:
    names = [run.name for run in runs]
    return " vs ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more runs"


def _state(run: Run) -> tuple[str, str]:
    """Return the run's status, and its progress and time, as text."""
    last, planned = int(run.steps[-1]), run.planned_steps
    steps = f"{last:,} of {planned:,} steps" if planned else f"{last:,} steps"
    parts = [steps]
    seconds = run.column("step_s")
    if np.isfinite(seconds).any():
        with np.errstate(over="ignore"):
            parts.append(f"{format_seconds(float(np.nansum(seconds)))} in steps")
    ended = run.column("time")[-1]
    with contextlib.suppress(ValueError, OverflowError, OSError):  # NaN, or beyond the year 9999
        parts.append(datetime.datetime.fromtimestamp(float(ended), datetime.UTC).strftime("%d %b %Y, %H:%M UTC"))
    return run.status, " · ".join(parts)


def _line_css(i: int) -> tuple[str, str]:
    color, dashes = svg.line_style(i)
    return svg.css_color(color), {"-": "solid", "--": "dashed", ":": "dotted", "-.": "double"}[dashes]


def _run_summary(run: Run) -> list[tuple[str, str]]:
    """Return a short description of the run, from the recipe and the environment."""
    recipe: Mapping[str, Any] = run.recipe
    model, data, optim, train = (get_section(recipe, name) for name in ("model", "data", "optim", "train"))
    source = next((f"{key}: {_text(data[key])}" for key in _sources() if data.get(key)), MISSING)
    batch = f"{train['batch_tokens']:,} tokens" if isinstance(train.get("batch_tokens"), int) else None
    images = data.get("images") or data.get("image_size")
    unit = "rows" if data.get("clicks") or data.get("criteo") else "images" if images else "sequences"
    batch = batch or (f"{train['batch_size']:,} {unit}" if isinstance(train.get("batch_size"), int) else MISSING)
    hardware, versions = get_section(run.environment, "hardware"), get_section(run.environment, "versions")
    summary = [
        ("model", _text(model.get("preset") or model.get("hf"))),
        ("task", _text(model.get("task"))),
        ("data", source),
        ("tokenizer", _text(data.get("tokenizer")) if unit == "sequences" else MISSING),
        ("sequence length", _text(data.get("seq_len")) if unit == "sequences" else MISSING),
        ("optimizer", f"{_text(optim.get('name'))}, lr {_text(optim.get('lr'))}"),
        ("batch per step", batch),
        ("number format", _formats(get_section(recipe, "precision"))),
        ("processes", _text(run.environment.get("world_size"))),
        ("device", _text(", ".join(_texts(hardware.get("gpus"))) or hardware.get("cpu"))),
        ("torch", _text(versions.get("torch"))),
    ]
    return [(label, value) for label, value in summary if value != MISSING]


def _formats(precision: Mapping[str, Any]) -> str:
    """Return the formats of matrix products, such as `bf16, weights int8, activations int4 (token)`."""
    parts = [_text(precision.get("compute"))]
    for name in ("weights", "activations", "kv_cache", "queries", "gradients"):
        given = precision.get(name)
        if isinstance(given, Mapping):
            shared = given.get("group_size") or given.get("granularity")
            given = f"{given.get('format')}{f' ({shared})' if shared else ''}"
        if given is not None:
            parts.append(f"{name.replace('_', ' ')} {given}")
    return ", ".join(part for part in parts if part != MISSING) or MISSING


def _sources() -> tuple[str, ...]:
    from scantling.trainer.recipe.schema import SOURCES

    return SOURCES


def _charts(runs: Sequence[Run]) -> list[Chart]:
    smoothed = "Faint: every step. Line: smoothed."
    dots = " Dots: held-out loss." if any(np.isfinite(run.column("eval_loss")).any() for run in runs) else ""
    sources = {str(run.result.get("memory_source")) for run in runs}
    measured = ", ".join(text for key, text in _MEMORY_SOURCES.items() if key in sources)
    drawn = [
        ("Loss over steps", smoothed + dots + " The first steps may exceed the axis.", charts.loss_chart(runs)),
        ("Loss over tokens", smoothed + dots, charts.loss_by_tokens_chart(runs)),
        ("Step time by phase", "Medians after the first tenth of the steps.", charts.phase_chart(runs)),
        ("Tokens per second", smoothed, charts.curve_chart(runs, "tokens_per_s", "tokens per second")),
        (
            "Peak memory",
            f"Planned and measured ({measured})." if measured else "Planned and measured.",
            charts.memory_chart(runs),
        ),
        ("TT parameters", "Share of the initial number.", charts.curve_chart(runs, "tensor_size", "share")),
        *(
            (
                f"Ranks of {run.name}" if len(runs) > 1 else "Ranks",
                "Mean rank of each layer: the darker, the larger its share of the initial rank. Right: final rank.",
                charts.rank_chart(run),
            )
            for run in runs
        ),
        ("Gradient norm", f"{smoothed} Before clipping.", charts.curve_chart(runs, "grad_norm", "gradient norm")),
    ]
    return [
        Chart(title, caption, Markup(svg.apply_theme(chart))) for title, caption, chart in drawn if chart is not None
    ]


def _plan_lines(runs: Sequence[Run]) -> list[tuple[str, list[PlanCell]]]:
    """Return each value that a plan predicts, with a cell per run."""
    if not any(run.plan for run in runs):
        return []
    lines = [(label, [_plan_cell(run, key, show) for run in runs]) for label, key, show in _PLANNED]
    return [(label, cells) for label, cells in lines if any(cell.planned != MISSING for cell in cells)]


def _plan_cell(run: Run, key: str, show: Callable[[float | None], str]) -> PlanCell:
    planned = finite_or_none(run.plan.get(key))
    if key == "residual_bytes" and not planned:
        planned = None  # the exchange has no residuals
    measured = _tokens_per_step(run) if key == "tokens_per_step" else run.metric(key)
    difference = MISSING
    if planned is not None and measured is not None:
        if planned == measured:
            difference = EXACT
        elif planned:
            difference = format_percent(measured / planned - 1, sign=True)
    return PlanCell(show(planned), show(measured), difference)


def _tokens_per_step(run: Run) -> float | None:
    tokens = run.column("tokens")
    with np.errstate(over="ignore", invalid="ignore"):
        # tokens are cumulative: if the first record is not step 1, the tokens before it are unknown
        steps = np.diff(tokens, prepend=0.0) if run.steps[0] == 1 else np.diff(tokens)
        return finite_or_none(float(np.median(steps))) if len(steps) else None


def _merge_columns(mappings: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return every dotted key with its values, or with one value if all are equal."""
    flat = [dict(flatten(mapping)) for mapping in mappings]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [(key, [_text(one.get(key)) for one in flat]) for key in keys]
    return [(key, values[:1] if len(set(values)) == 1 else values) for key, values in rows]


def _texts(value: object) -> list[str]:
    """Return the strings in a list; a damaged file may hold anything else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _text(value: object) -> str:
    if value is None or value == []:
        return MISSING
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else json.dumps(value, default=str)
