"""Read the folder of a run: its recipe, environment, plan and result, and its records as columns."""

from __future__ import annotations

import json
import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from scantling.errors import UserError, first_line
from scantling.trainer.recipe.loading import read_yaml

Column = NDArray[np.float64]

HELD_OUT = ("eval_loss", "perplexity", "bits_per_byte", "accuracy", "auc", "normalized_entropy")
"""Metrics that only steps with an evaluation have."""

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
"""Metrics of a run that are those of its last step."""

_COLUMNS = (
    "tokens",
    "loss",
    *HELD_OUT,
    "step_s",
    *(f"{phase}_s" for phase in ("data", "forward", "backward", "exchange", "optimizer")),
    "tokens_per_s",
    "peak_memory_bytes",
    "grad_norm",
    "lr",
    "tensor_size",
    "time",
)
"""Keys that are kept for every step, 8 bytes each. Of other keys only the last value is read."""

_MAX_LINE = 8 << 20
"""Longest line of `metrics.jsonl` in bytes; the ranks of 1,000 layers take less than 0.1 MiB."""
_MAX_FILE = 64 << 20
"""Largest size of `plan.json`, `result.json`, `environment.json` and `recipe.yaml` in bytes."""
_MAX_STEP = 2**53
_MAX_DEPTH, _MAX_VALUES = 50, 1_000_000
_MAX_RANK_CHANGES = 2048
_BLOCK = 512

MEAN_STEPS = 10
"""Number of steps that `train_loss` averages."""
_UNPRINTABLE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f\\ud800-\\udfff]")


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

    def figure(self, key: str) -> float | None:
        """Return a finite number of the result, or None."""
        return number(self.result.get(key))


def number(value: object) -> float | None:
    """Return the value as a finite float; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


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
        raise UserError(f"{path} holds no run: there is no {' and no '.join(missing)} in it; give the folder of a run")
    metrics = metrics or read_metrics(path / "metrics.jsonl")
    if not metrics:
        raise UserError(
            f"{path} has no step yet: metrics.jsonl has no whole line; try again once the run has taken a step"
        )
    recipe = _read_recipe(path / "recipe.yaml")
    result = _read_object(path / "result.json")
    if result.get("step") != metrics.last["step"]:  # not written yet, or from before the run was resumed
        result = {"name": None, "status": "unfinished", **metrics.summarize()}
    name = result.get("name") or recipe.get("name") or path.resolve().name
    name = _UNPRINTABLE.sub("\ufffd", str(name))
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
    found = list(names)
    for length in range(1, max(map(len, parts), default=0) + 1):
        paths_of: dict[str, set[tuple[str, ...]]] = {}
        for name, part in zip(found, parts, strict=True):
            paths_of.setdefault(name, set()).add(part)
        found = [
            "/".join(part[-length:]) if len(paths_of[name]) > 1 else name
            for name, part in zip(found, parts, strict=True)
        ]
    taken: set[str] = set()
    for i, name in enumerate(found):
        count = 1
        while found[i] in taken or (count > 1 and found[i] in found[i + 1 :]):
            count += 1
            found[i] = f"{name}-{count}"
        taken.add(found[i])
    return found


def rename_duplicates(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with distinct names: runs of one recipe are named after their folders."""
    names = distinct_names([run.name for run in runs], [run.path for run in runs])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


class Metrics:
    """The records of a `metrics.jsonl` as columns: 8 bytes for each key of `_COLUMNS` and step.

    A resumed run returns to an earlier step: a record replaces all earlier records of its step and of later steps.
    """

    def __init__(self) -> None:
        self.last: Mapping[str, Any] = {}
        self.ranks: list[tuple[int, Mapping[str, Sequence[int]]]] = []
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._pending: list[Mapping[str, Any]] = []
        self._evaluated = array("q")  # steps with an evaluation

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the record of one step."""
        step = record["step"]
        if self._steps and step <= self._steps[-1]:
            self._drop_from(step)
        self._steps.append(step)
        self._pending.append(record)
        if len(self._pending) == _BLOCK:
            self._store()
        if "eval_loss" in record:
            self._evaluated.append(step)
        if "ranks" in record:
            self._add_ranks(step, record["ranks"])
        self.last = record

    def _store(self) -> None:
        """Move pending records into the columns; blocks take half the time of single records."""
        before = len(self._steps) - len(self._pending)
        for key in _COLUMNS:
            values = [record.get(key) for record in self._pending]
            if key not in self._columns:
                if not any(value is not None for value in values):
                    continue
                self._columns[key] = array("d", np.full(before, np.nan).tobytes())
            self._columns[key].frombytes(_to_floats(values).tobytes())
        self._pending = []

    def _add_ranks(self, step: int, given: object) -> None:
        ranks = _ranks(given)
        if not ranks or (self.ranks and self.ranks[-1][1] == ranks):
            return
        self.ranks.append((step, ranks))
        if len(self.ranks) > _MAX_RANK_CHANGES:  # more than a chart can show: keep every second change and the newest
            self.ranks = [*self.ranks[:-1:2], self.ranks[-1]]

    def _drop_from(self, step: int) -> None:
        """Drop this step and later steps."""
        while self._pending and self._pending[-1]["step"] >= step:
            self._pending.pop()
        count = bisect_left(self._steps, step)
        del self._steps[count:]
        if not self._pending:
            for column in self._columns.values():
                del column[count:]
        while self._evaluated and self._evaluated[-1] >= step:
            self._evaluated.pop()
        while self.ranks and self.ranks[-1][0] >= step:
            self.ranks.pop()

    def columns(self) -> dict[str, Column]:
        """Return "step" and every key of `_COLUMNS` that has a finite value, as arrays over the steps."""
        self._store()
        columns = {key: self.column(key) for key in self._columns}
        return {
            "step": np.array(self._steps, dtype=np.float64),
            **{key: column for key, column in columns.items() if np.isfinite(column).any()},
        }

    def column(self, key: str) -> Column:
        """Return one column over the steps; NaN if a step has no finite value."""
        self._store()
        if key not in self._columns:
            return np.full(len(self._steps), np.nan)
        return np.array(self._columns[key], dtype=np.float64)

    def summarize(self) -> dict[str, Any]:
        """Return the keys of `result.json` without `name` and `status`; None if no record has a value.

        Times are medians after the first tenth of the steps. `train_loss` is the mean over the last
        `train_loss_steps` steps: ten, or all of a shorter run. `last_step_loss` is the loss of the last step only.
        """
        settled = slice(len(self) // 10, None)
        constant = {key: self.last.get(key) for key in _CONSTANT}
        evaluated = bisect_left(self._steps, self._evaluated[-1]) if self._evaluated else None
        held_out = {} if evaluated is None else {key: self.column(key)[evaluated] for key in HELD_OUT}
        return {
            "step": self.last["step"],
            **{
                key: value if isinstance(value, str) or number(value) is not None else None
                for key, value in constant.items()
            },
            "step_s": _reduce(np.median, self.column("step_s")[settled]),
            "tokens_per_s": _reduce(np.median, self.column("tokens_per_s")[settled]),
            "peak_memory_bytes": _reduce(np.max, self.column("peak_memory_bytes")),
            "train_loss": _reduce(np.mean, self.column("loss")[-MEAN_STEPS:]),
            "train_loss_steps": min(MEAN_STEPS, len(self)),
            "last_step_loss": number(self.last.get("loss")),
            **{
                key: number(float(value)) for key, value in held_out.items() if key == "eval_loss" or np.isfinite(value)
            },
        }


def _to_floats(values: list[Any]) -> Column:
    """Return the values as floats; NaN for everything that is not a finite number."""
    if not {type(value) for value in values} <= {float, int, type(None)} or any(
        type(value) is int and abs(value) >= _MAX_STEP for value in values
    ):
        values = [number(value) for value in values]
    found = np.array(values, dtype=np.float64)
    found[~np.isfinite(found)] = np.nan
    return found


def _reduce(function: Any, values: Column) -> float | None:
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        return number(float(function(values))) if len(values) else None


def _ranks(given: object) -> dict[str, list[int]]:
    """Return the layers that have a list of integers; drops anything else in a damaged record."""
    if not isinstance(given, dict):
        return {}
    return {
        _UNPRINTABLE.sub("\ufffd", name): ranks
        for name, ranks in given.items()
        if isinstance(ranks, list) and ranks and all(type(rank) is int and 0 <= rank < _MAX_STEP for rank in ranks)
    }


def read_metrics(path: Path, last_step: int | None = None) -> Metrics:
    """Read a `metrics.jsonl` line by line. An incomplete last line, left by a crash, is ignored.

    Args:
        path: the file.
        last_step: skip records of later steps.

    Raises:
        UserError: the file cannot be read, or a line is not the record of a step; the message names the line.
    """
    metrics = Metrics()
    try:
        for record in _lines(path):
            if last_step is None or record["step"] <= last_step:
                metrics.add(record)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    return metrics


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        count = 0
        while line := file.readline(_MAX_LINE):
            count += 1
            if not line.endswith(b"\n"):
                if len(line) == _MAX_LINE:
                    raise UserError(
                        f"{path}, line {count}: longer than {_MAX_LINE >> 20} MiB, the limit for the record of a "
                        "step; remove the line"
                    )
                return  # cut off by a crash, or still being written
            if not line.strip():
                continue
            record = _parse_line(line)
            step = record.get("step") if isinstance(record, dict) else None
            if type(step) is not int or not 0 <= step < _MAX_STEP:
                raise UserError(
                    f"{path}, line {count}: not a record of a step (a JSON object with a whole number `step` from 0 to "
                    "2^53)"
                )
            yield record


def _parse_line(line: bytes) -> Any:
    """Return the JSON value of a line, or None. The fast parser rejects lone surrogates, the other one reads them."""
    try:
        return from_json(line)
    except ValueError:
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        if not path.exists():
            return {}
        content = _clean(json.loads(_read_text(path)))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from None
    except RecursionError:
        raise UserError(f"cannot read {path}: it is nested deeper than {_MAX_DEPTH} levels") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        _read_text(path)
        content: dict[str, Any] = _clean(read_yaml(path))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from None
    except RecursionError:
        raise UserError(f"cannot read {path}: it is nested deeper than {_MAX_DEPTH} levels") from None
    return content


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

    def copied(value: Any, depth: int) -> Any:
        nonlocal count
        count += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
        if count > _MAX_VALUES:
            raise ValueError(f"it holds more than {_MAX_VALUES:,} values")
        if isinstance(value, str):
            return _UNPRINTABLE.sub("\ufffd", value)
        if isinstance(value, int) and value.bit_length() > 10_000:
            raise ValueError("it holds a number of over 3,000 digits")
        if isinstance(value, Mapping):
            return {copied(key, depth + 1): copied(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, list | tuple | set):
            return [copied(inner, depth + 1) for inner in value]
        return value

    return copied(value, 0)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
