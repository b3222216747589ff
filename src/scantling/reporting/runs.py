"""Reads the folder of a run back: its recipe, environment, plan and result, and its records as columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from scantling.errors import UserError

Column = NDArray[np.float64]

HELD_OUT = ("eval_loss", "perplexity", "bits_per_byte", "accuracy", "auc", "normalized_entropy")
"""Figures that only steps with an evaluation have."""

_CONSTANT = (
    "tokens",
    "num_parameters",
    "weight_bytes",
    "gradient_bytes",
    "optimizer_state_bytes",
    "residual_bytes",
    "wire_bytes",
    "base_memory_bytes",
    "memory_source",
    "energy_j",
    "energy_source",
)
"""Figures of a run that are those of its last step."""


@dataclass(frozen=True)
class Run:
    """One run, as its folder tells it.

    Attributes:
        path: the folder.
        name: name of the run.
        recipe: the resolved recipe.
        environment: versions, hardware, command; empty where the file is missing.
        plan: what `scantling plan` said before the run; empty where the file is missing.
        result: the figures of `result.json`; worked out from the records where the run has not written it.
        columns: each numeric key of `metrics.jsonl` as an array over the steps, NaN where a step has no value.
        ranks: (step, ranks of every layer of cores) where they changed; empty where they do not.
    """

    path: Path
    name: str
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]
    plan: Mapping[str, Any]
    result: Mapping[str, Any]
    columns: Mapping[str, Column] = field(repr=False)
    ranks: Sequence[tuple[int, Mapping[str, Sequence[int]]]] = field(repr=False, default=())

    @property
    def steps(self) -> Column:
        """The steps taken, ascending."""
        return self.columns["step"]

    @property
    def status(self) -> str:
        """ "done", "stopped" (by a signal, after saving) or "unfinished" (still going on, or crashed)."""
        return str(self.result["status"])

    @property
    def planned_steps(self) -> int | None:
        """How many steps the recipe asks for."""
        steps = _mapping(self.recipe.get("train")).get("steps")
        return steps if isinstance(steps, int) else None

    def column(self, key: str) -> Column:
        """One column over the steps; all NaN where no step has the key."""
        return self.columns.get(key, np.full(len(self.steps), np.nan))

    def figure(self, key: str) -> float | None:
        """A finite number of the result, or None."""
        return number(self.result.get(key))


def number(value: object) -> float | None:
    """The value as a finite float; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def read_run(run_dir: str | Path) -> Run:
    """Read a run directory, of a finished run or of one that is still going on.

    A last line torn by a crash is left out. A resumed run goes back to a step it has been at before: what was recorded
    of that step and of later ones until then was given up, so the later lines count.

    Raises:
        UserError: the folder holds no run, or a file in it cannot be read; the message names the file.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise UserError(f"run directory not found: {path}")
    missing = [name for name in ("recipe.yaml", "metrics.jsonl") if not (path / name).is_file()]
    if missing:
        raise UserError(f"{path} holds no run: there is no {' and no '.join(missing)} in it; give the folder of a run")
    records = read_records(path / "metrics.jsonl")
    if not records:
        raise UserError(
            f"{path} has no step yet: metrics.jsonl has no whole line; try again once the run has taken a step"
        )
    recipe = _read_recipe(path / "recipe.yaml")
    result = _read_object(path / "result.json")
    if result.get("step") != records[-1]["step"]:  # not written yet, or from before the run was resumed
        result = {"name": None, "status": "unfinished", **summarise(records)}
    name = result.get("name") or recipe.get("name") or path.resolve().name
    return Run(
        path=path,
        name=str(name),
        recipe=recipe,
        environment=_read_object(path / "environment.json"),
        plan=_read_object(path / "plan.json"),
        result={"status": "done", **result, "name": str(name)},
        columns=_columns(records),
        ranks=[(record["step"], record["ranks"]) for record in records if isinstance(record.get("ranks"), dict)],
    )


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a run from its records: medians after the first tenth of the steps, the mean loss of the last ten.

    Args:
        records: one a step, ascending, at least one.

    Returns:
        The keys of `result.json` without `name` and `status`; None where no record has a value.
    """
    last, settled = records[-1], records[len(records) // 10 :]
    evaluated: dict[str, Any] = next((r for r in reversed(records) if "eval_loss" in r), {})
    return {
        "step": last["step"],
        **{key: last.get(key) for key in _CONSTANT},
        "step_s": _reduce(np.median, settled, "step_s"),
        "tokens_per_s": _reduce(np.median, settled, "tokens_per_s"),
        "peak_memory_bytes": _reduce(np.max, records, "peak_memory_bytes"),
        "loss": _reduce(np.mean, records[-10:], "loss"),
        **{key: evaluated[key] for key in HELD_OUT if key in evaluated},
    }


def _reduce(function: Any, records: list[dict[str, Any]], key: str) -> float | None:
    values = [value for record in records if (value := number(record.get(key))) is not None]
    return float(function(values)) if values else None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, one a step, ascending, as they count after resumes."""
    by_step: dict[int, dict[str, Any]] = {}
    last = 0
    for record in _lines(path):
        step = record["step"]
        if step <= last:
            by_step = {s: r for s, r in by_step.items() if s < step}
        by_step[step] = record
        last = step
    return [by_step[step] for step in sorted(by_step)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for count, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # torn by a crash, or still being written
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            step = record.get("step") if isinstance(record, dict) else None
            if isinstance(step, bool) or not isinstance(step, int):
                raise UserError(
                    f"{path}, line {count}: not a record of a step (a JSON object with a whole number `step`)"
                )
            yield record


def _columns(records: list[dict[str, Any]]) -> dict[str, Column]:
    keys = {key for record in records for key, value in record.items() if number(value) is not None} | {"step"}
    return {key: np.array([_or_nan(record.get(key)) for record in records]) for key in sorted(keys)}


def _or_nan(value: object) -> float:
    found = number(value)
    return float("nan") if found is None else found


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a recipe: it holds no YAML mapping")
    return content


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
