"""Read `metrics.jsonl`, the records of a run's steps, as columns."""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from scantling.errors import UserError
from scantling.trainer.reporting.format import replace_unprintable

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
    "base_memory_bytes",
    "memory_source",
    "energy_j",
    "energy_source",
)
"""Metrics of a run whose value is that of its last step."""

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
    "wire_bytes",
    "time",
)
"""Keys that are kept for every step, 8 bytes each. Of other keys only the last value is read."""

_MAX_LINE = 8 << 20
"""Longest line of `metrics.jsonl` in bytes; the ranks of 1,000 layers take less than 0.1 MiB."""
_MAX_STEP = 2**53
_MAX_RANK_CHANGES = 2048
_BLOCK = 512

MEAN_STEPS = 10
"""Number of steps that `train_loss` averages."""


def finite_or_none(value: object) -> float | None:
    """Return the value as a finite float; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


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
                # steps before the first value of this key have NaN
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
        # records that are still pending are earlier than this step, and so is everything in the columns
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

        Times are medians after the first tenth of the steps. `wire_bytes` is the mean over all steps, because some
        exchanges happen only every few steps, rounded to a byte. `train_loss` is the mean over the last
        `train_loss_steps` steps: ten, or all of a shorter run. `last_step_loss` is the loss of the last step only.
        """
        # skip the first tenth: warmup, compilation and caches make early steps slow
        settled = slice(len(self) // 10, None)
        constant = {key: self.last.get(key) for key in _CONSTANT}
        sent = _reduce(np.mean, self.column("wire_bytes"))
        evaluated = bisect_left(self._steps, self._evaluated[-1]) if self._evaluated else None
        held_out = {} if evaluated is None else {key: self.column(key)[evaluated] for key in HELD_OUT}
        return {
            "step": self.last["step"],
            **{
                key: value if isinstance(value, str) or finite_or_none(value) is not None else None
                for key, value in constant.items()
            },
            "wire_bytes": None if sent is None else round(sent),
            "step_s": _reduce(np.median, self.column("step_s")[settled]),
            "tokens_per_s": _reduce(np.median, self.column("tokens_per_s")[settled]),
            "peak_memory_bytes": _reduce(np.max, self.column("peak_memory_bytes")),
            "train_loss": _reduce(np.mean, self.column("loss")[-MEAN_STEPS:]),
            "train_loss_steps": min(MEAN_STEPS, len(self)),
            "last_step_loss": finite_or_none(self.last.get("loss")),
            **{
                key: finite_or_none(float(value))
                for key, value in held_out.items()
                if key == "eval_loss" or np.isfinite(value)
            },
        }


def _to_floats(values: list[Any]) -> Column:
    """Return the values as floats; NaN for everything that is not a finite number."""
    # the fast check covers ordinary records; huge integers and other types go one by one
    if not {type(value) for value in values} <= {float, int, type(None)} or any(
        type(value) is int and abs(value) >= _MAX_STEP for value in values
    ):
        values = [finite_or_none(value) for value in values]
    floats = np.array(values, dtype=np.float64)
    floats[~np.isfinite(floats)] = np.nan
    return floats


def _reduce(function: Any, values: Column) -> float | None:
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        return finite_or_none(float(function(values))) if len(values) else None


def _ranks(given: object) -> dict[str, list[int]]:
    """Return the layers that have a list of integers; drops anything else in a damaged record."""
    if not isinstance(given, dict):
        return {}
    return {
        replace_unprintable(name): ranks
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
