"""Convert rows of a click log to model inputs: scaled numeric features, and ids of categories.

Everything fitted to data (means, deviations, which categories have an id) comes from the training rows only. It is
saved as JSON and safetensors, in the cache and next to an exported model, so that new rows are converted in the same
way as training rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from scantling.errors import UserError
from scantling.files import read_json_object
from scantling.trainer.data.click_files import category_keys, parse_number
from scantling.trainer.data.click_store import ClickStore
from scantling.trainer.recipe.schema import Clicks

NAME = "click_features"
CHUNK = 1 << 20
"""Rows processed at a time while fitting."""
UNKNOWN = 0
"""Id that all rare and unseen categories share."""

Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClickFeatures:
    """Feature conversion fitted to training rows.

    Attributes:
        numeric, categorical: names of the columns.
        scaling: "standard" or "log1p".
        means, deviations: of the numeric columns, each (columns,); 0 and 1 for "log1p".
        table_sizes: number of ids of each categorical column, the size of its table.
        known: for each column whose categories have their own ids, their keys in ascending order; the id of a key is
            its index + 1, and `UNKNOWN` for all others. Categories of the other columns are hashed.
    """

    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    scaling: Literal["standard", "log1p"]
    means: Floats
    deviations: Floats
    table_sizes: tuple[int, ...]
    known: Mapping[str, Keys]

    def scaled(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return scaled numeric features; 0 for missing values.

        Args:
            numbers: (rows, numeric columns), NaN for missing values.
        """
        values = _transformed(numbers, self.scaling)
        result: npt.NDArray[np.float32] = np.nan_to_num((values - self.means) / self.deviations, nan=0.0).astype(
            np.float32
        )
        return result

    def ids(self, keys: Keys) -> Ids:
        """Return the ids of categories.

        Args:
            keys: (rows, categorical columns).
        """
        ids = np.empty(keys.shape, dtype=np.int64)
        for index, (name, size) in enumerate(zip(self.categorical, self.table_sizes, strict=True)):
            column, known = keys[:, index], self.known.get(name)
            if known is None:
                ids[:, index] = column % np.uint64(size)
            else:
                # an unseen key gets a position too, so compare the key at that position
                positions = np.searchsorted(known, column)
                is_known = (
                    known[np.minimum(positions, len(known) - 1)] == column if len(known) else np.zeros(len(ids), bool)
                )
                ids[:, index] = np.where(is_known, positions + 1, UNKNOWN)
        return ids

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return the model inputs of new rows.

        Args:
            columns: the values of each column by name, all of the same length; None for a missing value.

        Returns:
            Tensors `numeric` (rows, numeric columns) and `categorical` (rows, categorical columns).

        Raises:
            UserError: a column is missing, or holds a value that is not a number or not a category.
        """
        import torch

        for name in (*self.numeric, *self.categorical):
            if name not in columns:
                raise UserError(f"no column '{name}'; the model needs {', '.join((*self.numeric, *self.categorical))}")
        rows = len(columns[self.categorical[0]])
        numbers = np.empty((rows, len(self.numeric)))
        keys = np.empty((rows, len(self.categorical)), dtype=np.uint64)
        try:
            for index, name in enumerate(self.numeric):
                numbers[:, index] = [parse_number(value) for value in columns[name]]
            for index, name in enumerate(self.categorical):
                keys[:, index] = category_keys(columns[name])
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"column '{name}' cannot be used: {error}") from None
        inputs = {"categorical": torch.from_numpy(self.ids(keys))}
        return inputs | ({"numeric": torch.from_numpy(self.scaled(numbers))} if self.numeric else {})

    def to_dict(self) -> dict[str, Any]:
        """Return the fitted values, without the keys, as JSON values."""
        return {
            "numeric": list(self.numeric),
            "categorical": list(self.categorical),
            "scaling": self.scaling,
            "means": self.means.tolist(),
            "deviations": self.deviations.tolist(),
            "table_sizes": list(self.table_sizes),
            "own_ids": list(self.known),
        }

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `click_features.json`, and `click_features.safetensors` if categories have their own ids."""
        from safetensors.numpy import save_file

        path = Path(folder) / NAME
        path.with_suffix(".json").write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")
        if self.known:
            save_file(dict(self.known), path.with_suffix(".safetensors"))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ClickFeatures:
        """Read the files that `save_pretrained` wrote.

        Raises:
            UserError: the files are missing or cannot be read.
        """
        from safetensors.numpy import load_file

        path = Path(folder) / NAME
        try:
            facts = read_json_object(path.with_suffix(".json"))
            known = load_file(path.with_suffix(".safetensors")) if facts["own_ids"] else {}
            return cls(
                tuple(facts["numeric"]),
                tuple(facts["categorical"]),
                facts["scaling"],
                np.array(facts["means"], dtype=np.float64),
                np.array(facts["deviations"], dtype=np.float64),
                tuple(facts["table_sizes"]),
                {name: known[name] for name in facts["own_ids"]},
            )
        except UserError:
            raise
        except Exception as error:  # for values of wrong types
            raise UserError(f"cannot read {path}.json and what belongs to it: {error!r}") from None


def fit_features(
    clicks: Clicks, numeric: Sequence[str], categorical: Sequence[str], store: ClickStore, rows: Sequence[int]
) -> ClickFeatures:
    """Fit means, deviations and ids to training rows.

    Args:
        clicks: the recipe's settings.
        numeric, categorical: names of the columns.
        store: the rows.
        rows: indices of the training rows, ascending.

    Raises:
        UserError: a column has the same value in all training rows.
    """
    moments = _Moments(len(numeric), clicks.scaling)
    counts = {name: _Counts() for name in categorical if clicks.num_rows(name) is None}
    first: Keys | None = None
    varies = np.zeros(len(categorical), dtype=bool)
    for part in _chunks(store, rows):
        moments.add(part.numbers)
        first = part.keys[0] if first is None else first
        varies |= (part.keys != first).any(axis=0)
        for index, name in enumerate(categorical):
            if name in counts:
                counts[name].add(part.keys[:, index])
    # Check before `result`: a column without values has a count of 0, a constant one a deviation of 0.
    for names, changing in ((numeric, moments.varies), (categorical, varies)):
        for name, several in zip(names, changing, strict=True):
            if not several:
                raise UserError(
                    f"{store.name}: column '{name}' has one value in all {len(rows)} training rows, from which nothing "
                    "can be learned; leave it out of data.clicks"
                )
    means, deviations = moments.result()
    known = {name: count.keys(clicks.min_count) for name, count in counts.items()}
    sizes = tuple(clicks.num_rows(name) or len(known[name]) + 1 for name in categorical)
    return ClickFeatures(tuple(numeric), tuple(categorical), clicks.scaling, means, deviations, sizes, known)


def _chunks(store: ClickStore, rows: Sequence[int]) -> Iterator[Any]:
    for at in range(0, len(rows), CHUNK):
        part = rows[at : at + CHUNK]
        yield store.take(slice(part.start, part.stop) if isinstance(part, range) else np.asarray(part))


def _transformed(numbers: npt.NDArray[Any], scaling: str) -> Floats:
    values: Floats = numbers.astype(np.float64)
    return np.log1p(np.maximum(np.nan_to_num(values, nan=0.0), 0.0)) if scaling == "log1p" else values


class _Moments:
    """Running means and deviations of columns, by the update of Chan, Golub and LeVeque (1979)."""

    def __init__(self, columns: int, scaling: str) -> None:
        self._scaling = scaling
        self._counts, self._means, self._squares = np.zeros((3, columns))
        self._low, self._high = np.full(columns, np.inf), np.full(columns, -np.inf)

    def add(self, numbers: npt.NDArray[np.float32]) -> None:
        values = _transformed(numbers, self._scaling)
        is_present = ~np.isnan(numbers)  # of the given numbers: "log1p" replaces missing ones by 0
        counts = is_present.sum(axis=0)
        means = np.where(is_present, values, 0.0).sum(axis=0) / np.maximum(counts, 1)
        squares = np.where(is_present, (values - means) ** 2, 0.0).sum(axis=0)
        total = np.maximum(self._counts + counts, 1)
        # pairwise update: M2 = M2_a + M2_b + delta^2 n_a n_b / (n_a + n_b)
        change = means - self._means
        self._means = self._means + change * counts / total
        self._squares = self._squares + squares + change**2 * self._counts * counts / total
        self._counts = self._counts + counts
        self._low = np.minimum(self._low, np.where(is_present, values, np.inf).min(axis=0))
        self._high = np.maximum(self._high, np.where(is_present, values, -np.inf).max(axis=0))

    @property
    def varies(self) -> npt.NDArray[np.bool_]:
        """Return True for each column with at least two different values, ignoring missing ones."""
        result: npt.NDArray[np.bool_] = self._low < self._high
        return result

    def result(self) -> tuple[Floats, Floats]:
        """Return the means and deviations for scaling."""
        if self._scaling == "log1p":
            return np.zeros_like(self._means), np.ones_like(self._means)
        return self._means, np.sqrt(self._squares / self._counts)


class _Counts:
    """Number of occurrences of each key of a column."""

    def __init__(self) -> None:
        self._keys: Keys = np.empty(0, dtype=np.uint64)
        self._counts: Ids = np.empty(0, dtype=np.int64)

    def add(self, column: Keys) -> None:
        keys, counts = np.unique(column, return_counts=True)
        both = np.concatenate([self._keys, keys])
        self._keys, inverse = np.unique(both, return_inverse=True)
        self._counts = np.bincount(inverse, np.concatenate([self._counts, counts]), len(self._keys)).astype(np.int64)

    def keys(self, min_count: int) -> Keys:
        """Return the keys that occur at least `min_count` times, ascending."""
        return self._keys[self._counts >= min_count]
