"""Read click logs from files (CSV, Parquet and Criteo's format) as blocks of labels, numbers and hashed categories.

Criteo's files (Display Advertising Challenge, and the terabyte log) have no header. Each line has a label, 13
integers and 26 categories of 8 hex digits, separated by tabs; missing values are empty.

A category is stored as 64 bits of BLAKE2b of its text, the same on every machine. A missing category counts as one
more category. A missing number is NaN: an empty value, null, or "NA" and "NaN" in any case.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scantling.errors import UserError
from scantling.trainer.data.files import ENDINGS, expand, file_stamp
from scantling.trainer.data.hashing import key64
from scantling.trainer.data.tables import check_columns, csv_rows, describe_type, source_name
from scantling.trainer.recipe.schema import Clicks, DataSection

logger = logging.getLogger(__name__)

CRITEO_LABEL = "label"
CRITEO_NUMERIC = tuple(f"I{number}" for number in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{number}" for number in range(1, 27))
ROWS = 1 << 14
"""Rows read at a time."""
REMEMBERED = 1 << 20
"""Number of distinct categories whose hashes are cached while reading."""
_NO_NUMBER = ("", "na", "nan", "null", "none")


class Columns(NamedTuple):
    """Names of the columns to read; for Criteo's files, the names that the literature uses."""

    label: str
    numeric: tuple[str, ...]
    categorical: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """Label and features."""
        return (self.label, *self.numeric, *self.categorical)


class Block(NamedTuple):
    """Labeled rows.

    Attributes:
        labels: 0 or 1, uint8, (rows,).
        numbers: fp32, NaN for missing values, (rows, numeric columns).
        keys: hashes of the categories, uint64, (rows, categorical columns).
        unlabeled: number of rows that were skipped because they have no label.
    """

    labels: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.float32]
    keys: npt.NDArray[np.uint64]
    unlabeled: int


def click_columns(section: DataSection) -> Columns:
    """Return the columns of a recipe's click log.

    Raises:
        UserError: required columns are not named.
    """
    clicks = section.clicks or Clicks()
    if section.criteo is not None:
        numeric, categorical = clicks.numeric, clicks.categorical
        return Columns(
            CRITEO_LABEL,
            CRITEO_NUMERIC if numeric is None else tuple(numeric),
            CRITEO_CATEGORICAL if categorical is None else tuple(categorical),
        )
    if clicks.label is None or not clicks.categorical:
        raise UserError("data.clicks: name the columns in label and categorical (and numeric columns in numeric)")
    return Columns(clicks.label, tuple(clicks.numeric or ()), tuple(clicks.categorical))


@dataclass(frozen=True)
class ClickFiles:
    """A click log in files.

    Args:
        kind: "criteo", "csv" or "parquet".
        paths: the files in order.
        columns: the columns to read.
        above: threshold of the label column: larger values are clicks; None for a column of 0 and 1.
    """

    kind: str
    paths: tuple[Path, ...]
    columns: Columns
    above: float | None = None

    @property
    def name(self) -> str:
        """Name of the log for messages."""
        return source_name(self.paths)

    def stamp(self) -> Any:
        """Return a JSON value that changes when the rows may have changed."""
        return [self.kind, self.columns, self.above, [file_stamp(path) for path in self.paths]]

    def blocks(self) -> Iterator[Block]:
        """Yield the rows of all files.

        Raises:
            UserError: a file, a line or a value cannot be used; names its location.
        """
        encoder = _Encoder(self.columns, self.above)
        for path in self.paths:
            if self.kind == "parquet":
                parts = _parquet_parts(path, self.columns)
            else:
                parts = _text_parts(path, self.columns, criteo=self.kind == "criteo")
            yield from map(encoder, parts)


def click_files(section: DataSection, *, validation: bool = False) -> ClickFiles:
    """Return the click log that a recipe names, or its held-out files.

    Raises:
        UserError: the recipe names no click log, or a file is missing.
    """
    kinds = {"criteo": section.criteo, "csv": section.csv, "parquet": section.parquet}
    kind, given = next(((kind, paths) for kind, paths in kinds.items() if paths is not None), ("", None))
    if given is None:
        raise UserError(f"data: a click log is one of {', '.join(kinds)}")
    if validation:
        if section.validation is None:
            raise AssertionError("called only where validation is given")
        given = section.validation
    paths = expand(given, "data.validation" if validation else f"data.{kind}", ENDINGS.get(kind))
    above = section.clicks.label_above if section.clicks is not None else None
    return ClickFiles(kind, tuple(paths), click_columns(section), above)


@dataclass(frozen=True)
class _Part:
    """Unconverted rows of a file.

    Attributes:
        values: of each column of `Columns.all`.
        path: their file.
        lines: their line numbers; None for a file without lines, whose rows are numbered from `first`.
    """

    values: list[Sequence[Any]]
    path: Path
    lines: list[int] | None = None
    first: int = 1

    def where(self, row: int) -> str:
        """Return the location of a row, for messages."""
        return f"{self.path}, row {self.first + row}" if self.lines is None else f"{self.path}:{self.lines[row]}"


def _text_parts(path: Path, columns: Columns, *, criteo: bool) -> Iterator[_Part]:
    if criteo:
        layout = (CRITEO_LABEL, *CRITEO_NUMERIC, *CRITEO_CATEGORICAL)
        rows = csv_rows(path, header=layout, delimiter="\t", quoted=False)
    else:
        rows = csv_rows(path)
    _, header = next(rows)
    check_columns(columns.all, list(header), str(path))
    indices = [header.index(name) for name in columns.all]
    while part := list(islice(rows, ROWS)):
        by_column = list(zip(*(values for _, values in part), strict=True))
        yield _Part([by_column[index] for index in indices], path, [line for line, _ in part])


def _parquet_parts(path: Path, columns: Columns) -> Iterator[_Part]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            check_columns(columns.all, file.schema_arrow.names, str(path))
            first = 1
            for batch in file.iter_batches(batch_size=ROWS, columns=list(columns.all)):
                yield _Part([batch.column(name).to_pylist() for name in columns.all], path, first=first)
                first += batch.num_rows
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {error}") from None


class _Encoder:
    """Converter from unconverted rows to blocks."""

    def __init__(self, columns: Columns, above: float | None) -> None:
        self._columns, self._above = columns, above
        self._keys = _Keys()

    def __call__(self, part: _Part) -> Block:
        names = self._columns
        label, *features = part.values
        given = _parse_numbers(label, names.label, part.where)
        labeled = ~np.isnan(given)
        if self._above is None:
            bad = np.flatnonzero(labeled & (given != 0) & (given != 1))
            if len(bad):
                row = int(bad[0])
                raise UserError(
                    f"{part.where(row)}: the label in column '{names.label}' must be 0 or 1; given "
                    f"{describe_type(label[row])}; for a number to compare with, set data.clicks.label_above"
                )
            labels = given == 1
        else:
            labels = given > self._above
        rows, split = len(label), len(names.numeric)
        numbers = np.empty((rows, split), dtype=np.float32)
        for index, name in enumerate(names.numeric):
            # Overflow to infinity is an error below, with its location.
            with np.errstate(over="ignore"):
                numbers[:, index] = _parse_numbers(features[index], name, part.where)
            bad = np.flatnonzero(np.isinf(numbers[:, index]))
            if len(bad):
                row = int(bad[0])
                raise UserError(
                    f"{part.where(row)}: column '{name}' must hold values within the range of fp32; given "
                    f"{describe_type(features[index][row])}"
                )
        keys = np.empty((rows, len(names.categorical)), dtype=np.uint64)
        for index, name in enumerate(names.categorical):
            keys[:, index] = self._hashed(features[split + index], name, part.where)
        return Block(labels[labeled].astype(np.uint8), numbers[labeled], keys[labeled], int(rows - labeled.sum()))

    def _hashed(self, values: Sequence[Any], name: str, where: Callable[[int], str]) -> list[int]:
        keys = self._keys
        try:
            return [keys[value] for value in values]
        except TypeError:
            row = next(row for row, value in enumerate(values) if not _is_category(value))
            raise UserError(
                f"{where(row)}: column '{name}' must hold one category a row; given {describe_type(values[row])}"
            ) from None


def category_keys(values: Sequence[Any]) -> list[int]:
    """Return the hashes of categories (texts or numbers); None, NaN and "" all count as the missing category."""
    return [_key(value) for value in values]


class _Keys(dict[Any, int]):
    """Cache of category hashes; keeps the first ones met."""

    def __missing__(self, value: Any) -> int:
        key = _key(value)
        if len(self) < REMEMBERED:
            self[value] = key
        return key


def _key(value: Any) -> int:
    """Return the hash of a category. Equal numbers hash the same in all types: a 7 in CSV may be 7.0 in Parquet."""
    if isinstance(value, str):
        return key64(value)
    if value is None or value != value:
        return key64("")
    if isinstance(value, Decimal) and value.is_finite():  # equal to an int or a float, so it shares its cache entry
        value = int(value) if value == value.to_integral_value() else float(value) if float(value) == value else value
    if isinstance(value, np.floating):  # Parquet's fp32 and fp16 are read as Python floats
        value = float(value)
    if isinstance(value, bool | np.bool_) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    if not _is_category(value):
        raise TypeError(value)
    return key64(str(value))


def _is_category(value: Any) -> bool:
    return value is None or not isinstance(value, list | dict | set | tuple | np.ndarray)


def _parse_numbers(values: Sequence[Any], name: str, where: Callable[[int], str]) -> npt.NDArray[np.float64]:
    """Return the values of a numeric column, NaN for missing values."""
    try:
        return np.array([parse_number(value) for value in values], dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        pass
    for row, value in enumerate(values):
        try:
            parse_number(value)
        except (TypeError, ValueError, OverflowError):
            problem = f"column '{name}' must hold numbers; given {describe_type(value)}"
            raise UserError(f"{where(row)}: {problem}") from None
    raise AssertionError("one of the values is no number")


def parse_number(value: Any) -> float:
    """Return a number from its text in a file; NaN for a missing value.

    Raises:
        ValueError, TypeError, OverflowError: it is not a number.
    """
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            if value.strip().lower() in _NO_NUMBER:
                return math.nan
            raise
    return math.nan if value is None else float(value)
