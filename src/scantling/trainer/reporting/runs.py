"""Read the folder of a run: its recipe, environment, plan, result and metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scantling.errors import UserError, first_line
from scantling.trainer.recipe.loading import read_yaml
from scantling.trainer.reporting.format import replace_unprintable
from scantling.trainer.reporting.metrics import Column, Metrics, finite_or_none, read_metrics

_MAX_FILE = 64 << 20
"""Largest size of `plan.json`, `result.json`, `environment.json` and `recipe.yaml` in bytes."""
_MAX_DEPTH, _MAX_VALUES = 50, 1_000_000


@dataclass(frozen=True)
class Run:
    """One run, as read from its folder.

    Attributes:
        path: the folder.
        name: name of the run.
        recipe: the resolved recipe.
        environment: versions, hardware, command; empty if the file is missing.
        plan: result of `scantling plan` before the run; empty if the file is missing.
        result: contents of `result.json`; computed from the records if the run has not written it.
        columns: "step" and keys of `metrics.jsonl` that charts need, as arrays over the steps; NaN if a step has no
            value.
        ranks: (step, ranks of each TT layer) for the steps at which ranks changed.
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
        """The completed steps, ascending."""
        return self.columns["step"]

    @property
    def status(self) -> str:
        """Status: "done", "stopped" (by a signal, after saving) or "unfinished" (still running, or crashed)."""
        return str(self.result["status"])

    @property
    def planned_steps(self) -> int | None:
        """Number of steps in the recipe."""
        steps = _mapping(self.recipe.get("train")).get("steps")
        return steps if isinstance(steps, int) else None

    def column(self, key: str) -> Column:
        """Return one column over the steps; all NaN if no step has the key."""
        return self.columns.get(key, np.full(len(self.steps), np.nan))

    def metric(self, key: str) -> float | None:
        """Return a finite number of the result, or None."""
        return finite_or_none(self.result.get(key))


def read_run(run_dir: str | Path, metrics: Metrics | None = None) -> Run:
    """Read a run directory, of a finished or a running run.

    Args:
        run_dir: the folder.
        metrics: its `metrics.jsonl`, if the caller has read it already.

    Raises:
        UserError: the folder holds no run, or a file in it cannot be read; the message names the file.
    """
    path = Path(run_dir)
    try:
        if not path.is_dir():
            raise UserError(f"run directory not found: {path}")
        missing = [name for name in ("recipe.yaml", "metrics.jsonl") if not (path / name).is_file()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    if missing:
        raise UserError(f"{path} holds no run: {' and '.join(missing)} not found; give the folder of a run")
    metrics = metrics or read_metrics(path / "metrics.jsonl")
    if not metrics:
        raise UserError(f"{path} has no step yet: metrics.jsonl has no complete line; try again after the first step")
    recipe = _read_recipe(path / "recipe.yaml")
    result = _read_object(path / "result.json")
    if result.get("step") != metrics.last["step"]:  # not written yet, or from before the run was resumed
        result = {"name": None, "status": "unfinished", **metrics.summarize()}
    name = result.get("name") or recipe.get("name") or path.resolve().name
    name = replace_unprintable(str(name))
    return Run(
        path=path,
        name=name,
        recipe=recipe,
        environment=_read_object(path / "environment.json"),
        plan=_read_object(path / "plan.json"),
        result={"status": "done", **result, "name": name},
        columns=metrics.columns(),
        ranks=metrics.ranks,
    )


def distinct_names(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Return the names; for duplicates, return the shortest end of the path that distinguishes them.

    A path that is given twice gets a number.
    """
    parts = [path.resolve().parts for path in paths]
    distinct = list(names)
    # lengthen the end of the path by one folder at a time, until it tells the runs apart
    for length in range(1, max(map(len, parts), default=0) + 1):
        paths_by_name: dict[str, set[tuple[str, ...]]] = {}
        for name, part in zip(distinct, parts, strict=True):
            paths_by_name.setdefault(name, set()).add(part)
        distinct = [
            "/".join(part[-length:]) if len(paths_by_name[name]) > 1 else name
            for name, part in zip(distinct, parts, strict=True)
        ]
    taken: set[str] = set()
    for i, name in enumerate(distinct):
        count = 1
        while distinct[i] in taken or (count > 1 and distinct[i] in distinct[i + 1 :]):
            count += 1
            distinct[i] = f"{name}-{count}"
        taken.add(distinct[i])
    return distinct


def rename_duplicates(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with distinct names: runs of one recipe are named after their folders."""
    names = distinct_names([run.name for run in runs], [run.path for run in runs])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file does not exist."""
    content = _read(path, lambda: json.loads(_read_text(path)) if path.exists() else {})
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content


def _read_recipe(path: Path) -> dict[str, Any]:
    def load() -> Any:
        _read_text(path)  # checks the size
        return read_yaml(path)

    recipe: dict[str, Any] = _read(path, load)
    return recipe


def _read(path: Path, load: Callable[[], Any]) -> Any:
    try:
        return _clean(load())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from None
    except RecursionError:
        raise UserError(f"cannot read {path}: it is nested deeper than {_MAX_DEPTH} levels") from None


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise ValueError("it is not a file")
    if path.stat().st_size > _MAX_FILE:
        raise ValueError(f"it is larger than {_MAX_FILE >> 20} MiB")
    return path.read_text(encoding="utf-8-sig")


def _clean(value: Any) -> Any:
    """Return a copy that can be displayed: bounded in depth, size and digits, with text that can be encoded.

    Raises:
        ValueError: the value is too deep, too large, or has too many digits.
    """
    count = 0

    def copy(value: Any, depth: int) -> Any:
        nonlocal count
        count += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
        if count > _MAX_VALUES:
            raise ValueError(f"it holds more than {_MAX_VALUES:,} values")
        if isinstance(value, str):
            return replace_unprintable(value)
        if isinstance(value, int) and value.bit_length() > 10_000:
            raise ValueError("it holds a number of over 3,000 digits")
        if isinstance(value, Mapping):
            return {copy(key, depth + 1): copy(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, list | tuple | set):
            return [copy(inner, depth + 1) for inner in value]
        return value

    return copy(value, 0)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
