"""Read tables of runs, with any column names, and check them before a fit."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.errors import UserError, did_you_mean, first_names
from scantling.laws.inputs import EMPTY_CELLS, FULL_PRECISION, UNQUANTIZED_SCHEMES, Array, cell_text, parse_bits

if TYPE_CHECKING:
    from scantling.laws.law import Law

logger = logging.getLogger(__name__)

_PARTS = ("weights", "activations", "kv_cache")
_SWEEP_PREFIX = "precision."
"""Prefix of the parts in the tables of `scantling sweep`."""
_MAX_LOSS, _MAX_LOSS_RATIO = 15.0, 4.0
"""Largest loss in nats per token (chance among a million tokens), and ratio of losses that gets a warning."""
_MIN_LOSS = 1e-6
"""Smallest loss in nats per token that a mean in fp32 can distinguish from 0."""
_BITS = (0.1, 128.0)
_MIN_COUNTS = {"N": 1e3, "D": 1e4}
_MAX_GAP, _WIDE_GAP = 1e4, 500.0
"""Ratio of neighboring counts that is refused, and that gets a warning."""
_TOKENS_PER_PARAMETER = (0.01, 1e7)


@dataclass(frozen=True)
class Runs(Mapping[str, Any]):
    """Columns of equal length: N, D, loss and the variables of a law.

    Attributes:
        columns: columns by name.
        unmodeled: mask of runs with low precision of a part for which the law has no variable.
    """

    columns: Mapping[str, Array]
    unmodeled: Array

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def count(self) -> int:
        """Number of runs."""
        return len(self.columns["N"])

    def select(self, rows: Array) -> Runs:
        """Return some of the runs, by index or by mask."""
        return Runs({name: column[rows] for name, column in self.columns.items()}, self.unmodeled[rows])

    def full_precision(self) -> Runs:
        """Return the runs without low precision."""
        rows = ~self.unmodeled
        for column in self.variables().values():
            is_bits = column.dtype.kind == "f"
            # Numeric columns are bits; a text column is the scheme.
            rows &= column >= FULL_PRECISION if is_bits else np.isin(column, UNQUANTIZED_SCHEMES)
        return self.select(rows)

    def without_full_precision_bits(self) -> Runs:
        """Return the same runs with bits from 16 on replaced by infinity."""
        bits = {name: column for name, column in self.variables().items() if column.dtype.kind == "f"}
        infinite = {name: np.where(column < FULL_PRECISION, column, np.inf) for name, column in bits.items()}
        return replace(self, columns={**self.columns, **infinite})

    def variables(self) -> dict[str, Array]:
        """Return all columns but N, D and the loss."""
        return {name: column for name, column in self.columns.items() if name not in ("N", "D", "loss")}

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the smallest and largest finite value of each numeric column but the loss."""
        ranges = {}
        for name, column in self.columns.items():
            finite = column[np.isfinite(column)] if column.dtype.kind == "f" else column[:0]
            if name != "loss" and len(finite):
                ranges[name] = (float(finite.min()), float(finite.max()))
        return ranges


def read_runs(
    runs: Any, law: type[Law], columns: Mapping[str, str] | None = None, where: Mapping[str, Any] | None = None
) -> Runs:
    """Return the runs of a table with the columns that a law needs.

    Args:
        runs: a CSV, JSON or JSON-lines file, .gz or not; a mapping of columns; a data frame; or one mapping per run.
        law: the law, which defines the variables.
        columns: column names of N, D, loss and the variables, if they differ; or the inverse mapping, as data frames
            are renamed. C, training FLOPs, may replace D, which is then C / 6N. `post` may be a pattern such as
            `post.*`: columns with losses after quantization, one per format; each run is then one row as trained, and
            one row for each of them. The columns precision.weights, precision.activations and precision.kv_cache of a
            sweep are found without being named.
        where: select runs by column values; an empty value selects nulls.

    Raises:
        UserError: for an unusable table, column or value.
    """
    table = _load_table(runs)
    wanted = ["N", "D", "loss", *law.VARIABLES]
    renamed = _by_variable(columns or {}, {*wanted, "C"})
    if "C" in renamed and "D" in renamed:
        raise UserError("columns names both D and C, from which D follows; give one of the two")
    for name in renamed:
        if name not in (*wanted, "C"):
            raise UserError(f"columns names '{name}', but the {law.name} law has only {', '.join(wanted)}")
    # for error messages: the row of each run in the original table
    row_numbers: Sequence[int] = range(1, len(next(iter(table.values()), [])) + 1)
    if "post" in wanted and "*" in renamed.get("post", ""):
        table, row_numbers = _melt_post_columns(table, renamed.pop("post"), renamed.get("loss", "loss"))
    selected = np.ones(len(row_numbers), bool)
    for column, value in (where or {}).items():
        selected &= np.array([_is_equal(each, value) for each in _get_column(table, column, column)], bool)
    if not selected.any():
        conditions = ", ".join(f"{name} {value}" for name, value in (where or {}).items())
        raise UserError(f"the table has no run{' with ' + conditions if conditions else ''}")
    table = {name: list(compress(column, selected)) for name, column in table.items()}
    row_numbers = list(compress(row_numbers, selected))
    if "C" in renamed:
        table["D"] = _tokens_from_flops(table, renamed.pop("C"), renamed.get("N", "N"), row_numbers)
    for name in _PARTS:
        if name in wanted and name not in {*renamed, *table} and f"{_SWEEP_PREFIX}{name}" in table:
            renamed[name] = f"{_SWEEP_PREFIX}{name}"

    parsed: dict[str, Array] = {}
    for name in wanted:
        column = renamed.get(name, name)
        is_present = name in table and name not in renamed.values()  # and does not hold another variable
        if name not in ("N", "D", "loss", "scheme") and name not in renamed and not is_present:
            parsed[name] = np.full(len(row_numbers), float(law.VARIABLES[name]))
        elif name == "scheme":
            texts = map(cell_text, _get_column(table, column, name))
            parsed[name] = np.array([UNQUANTIZED_SCHEMES[0] if t.lower() in EMPTY_CELLS else t for t in texts])
        else:
            cells = _get_column(table, column, name)
            parsed[name] = _parse_numbers(cells, column, row_numbers, is_bits=name in law.VARIABLES)
    _check_values(parsed, law, row_numbers)
    _check_losses(parsed)
    _check_units(parsed)
    others = {name: column for name, column in table.items() if name not in renamed.values()}
    return Runs(parsed, _unmodeled_low_precision(others, law, parsed.get("scheme", np.zeros(len(row_numbers)))))


def _unmodeled_low_precision(table: Mapping[str, Sequence[Any]], law: type[Law], schemes: Array) -> Array:
    """Return the mask of runs with low precision of a part that the law does not model; warn if it mixes them."""
    low = np.zeros(len(schemes), bool)
    unmodeled = [part for part in _PARTS if part not in law.VARIABLES]
    for name in (f"{prefix}{part}" for prefix in ("", _SWEEP_PREFIX) for part in unmodeled):
        if name not in table:
            continue
        try:
            bits = np.array([parse_bits(cell) for cell in table[name]])
        except ValueError:
            continue  # a column of something else, such as activation functions
        low |= bits < FULL_PRECISION
        groups = [bits[schemes == scheme] for scheme in np.unique(schemes)]
        if any(each.min() < FULL_PRECISION and each.min() < each.max() for each in groups):
            logger.warning(
                "the %s law ignores %s; select runs with where= or --where, or take law kumar", law.name, name
            )
    return low


def _by_variable(columns: Mapping[str, str], wanted: set[str]) -> dict[str, str]:
    """Return column names by variable, for either direction of the mapping."""
    if columns and not wanted & set(columns) and set(columns.values()) <= wanted:
        return {name: column for column, name in columns.items()}
    return dict(columns)


def _melt_post_columns(
    table: Mapping[str, Sequence[Any]], pattern: str, loss: str
) -> tuple[Mapping[str, Sequence[Any]], list[int]]:
    """Turn columns of losses, named by format, into rows with a column `post`; return the run number of each row."""
    before, _, after = pattern.partition("*")
    expression = re.compile(rf"{re.escape(before)}([^.]+){re.escape(after)}")
    formats = {name: match[1] for name in table if name != loss and (match := expression.fullmatch(name))}
    if not formats:
        raise UserError(f"the table has no columns {pattern}; it has {', '.join(table) or 'none'}")
    rows = [
        (row, cell, format)
        for name, format in {loss: "", **formats}.items()
        for row, cell in enumerate(_get_column(table, name, "loss"))
        if name == loss or str(cell).strip().lower() not in ("", "none", "nan")
    ]
    repeated = {name: [column[row] for row, *_ in rows] for name, column in table.items()}
    melted = {**repeated, loss: [cell for _, cell, _ in rows], "post": [format for *_, format in rows]}
    return melted, [row + 1 for row, *_ in rows]


def _tokens_from_flops(
    table: Mapping[str, Sequence[Any]], compute_column: str, size_column: str, row_numbers: Sequence[int]
) -> list[float]:
    """Return D = C / 6N."""
    compute, size = (
        _parse_numbers(_get_column(table, column, name), column, row_numbers, is_bits=False)
        for column, name in ((compute_column, "C"), (size_column, "N"))
    )
    tokens: list[float] = (compute / (6 * size)).tolist()
    return tokens


def _load_table(runs: Any) -> Mapping[str, Sequence[Any]]:
    """Return columns by name from any accepted kind of table."""
    if isinstance(runs, str | Path):
        runs = _read_file(Path(runs))
    elif hasattr(runs, "to_dict") and hasattr(runs, "columns"):
        _check_unique(list(runs.columns))
        runs = {name: runs[name] for name in runs.columns}
    if not isinstance(runs, Mapping):
        rows = list(runs) if isinstance(runs, Iterable) else [runs]
        wrong = [row for row in rows if not isinstance(row, Mapping)]
        if wrong:
            raise UserError(f"a table is a mapping of columns or a list of rows by column name; given {wrong[0]!r}")
        names = dict.fromkeys(name for row in rows for name in row)
        runs = {name: [row.get(name, "") for row in rows] for name in names}
    table = {str(name): _column_cells(column) for name, column in runs.items()}
    lengths = {name: len(column) for name, column in table.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"the columns differ in length: {', '.join(f'{n} {length}' for n, length in lengths.items())}")
    return table


def _read_file(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        # utf-8-sig drops the byte-order mark of some spreadsheets.
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
        suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
        if suffix == ".json":
            return json.loads(text)
        if suffix == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        reader = csv.DictReader(io.StringIO(text, newline=""))
        _check_unique(reader.fieldnames or [])
        rows = []
        for row in reader:
            if None in row:
                raise UserError(f"{path}, line {reader.line_num}, has more cells than the header line; remove them")
            rows.append(row)
        return rows
    except RecursionError:
        raise UserError(f"{path} cannot be read as a table of runs: it is nested too deeply") from None
    except (OSError, EOFError, zlib.error, ValueError, csv.Error) as error:  # ValueError covers 5,000 digits
        raise UserError(f"{path} cannot be read as a table of runs: {error}") from error


def _check_unique(names: Sequence[Any]) -> None:
    for i, name in enumerate(names):
        if name and name in names[:i]:
            raise UserError(f"the table has two columns '{name}'; rename one")


def _column_cells(column: Any) -> list[Any]:
    """Return the cells of a list, an array or a series; a single cell becomes a list."""
    if hasattr(column, "tolist"):
        column = column.tolist()
    return list(column) if isinstance(column, Iterable) and not isinstance(column, str | bytes) else [column]


def _is_equal(cell: Any, value: Any) -> bool:
    """Return True if a cell has a value: as text, as a number, or both empty."""
    texts = ["" if isinstance(each, float) and math.isnan(each) else cell_text(each) for each in (cell, value)]
    # True in Python and "true" in a CSV file are the same value.
    if any(isinstance(each, bool | np.bool_) for each in (cell, value)):
        texts = [text.lower() for text in texts]
    if texts[0] == texts[1]:
        return True
    try:
        return float(cell) == float(value)
    except (TypeError, ValueError):
        return False


def _get_column(table: Mapping[str, Sequence[Any]], column: str, name: str) -> Sequence[Any]:
    if column in table:
        return table[column]
    hint = did_you_mean(column, table)
    raise UserError(
        f"the table has no column '{column}'{f' for {name}' if name != column else ''}; it has "
        f"{', '.join(table) or 'none'}{f' ({hint})' if hint else ''}. Name the column of {name}: "
        f"columns={{'{name}': …}}, or --column {name}=… on the command line"
    )


def _parse_numbers(cells: Sequence[Any], column: str, row_numbers: Sequence[int], *, is_bits: bool) -> Array:
    """Return cells as floats; in columns of bits an empty cell is unquantized, and a format name means its bits."""
    values = np.empty(len(cells))
    for i, cell in enumerate(cells):
        text = cell_text(cell)
        try:
            values[i] = parse_bits(cell) if is_bits else float(text or "nan")
        except ValueError:
            raise UserError(f"column {column}, run {row_numbers[i]}: '{text}' is not a number") from None
    return values


def _check_values(runs: Mapping[str, Array], law: type[Law], row_numbers: Sequence[int]) -> None:
    """Refuse counts and losses that are not positive, and bits out of range."""
    for name in ("N", "D", "loss"):
        bad = np.flatnonzero(~(np.isfinite(runs[name]) & (runs[name] > 0))).tolist()
        if bad:
            bad_numbers = list(dict.fromkeys(str(row_numbers[i]) for i in bad))
            raise UserError(
                f"{name} of run {first_names(bad_numbers, 5)} is {runs[name][bad[0]]}; every {name} is a positive "
                "and finite number. Leave out runs that diverged or did not end"
            )
    low, high = _BITS
    for name in law.VARIABLES:
        if name == "scheme":
            continue
        # +inf is unquantized; -inf is an error.
        bits = runs[name][~np.isinf(runs[name]) | (runs[name] < 0)]
        if len(outside := bits[~((bits >= low) & (bits <= high))]):
            raise UserError(f"{name} is in bits, {low:g} to {high:g}, or empty if unquantized; given {outside[0]:g}")


def _check_losses(runs: Mapping[str, Array]) -> None:
    """Refuse losses that are not in nats per token; warn if some may be perplexities."""
    as_trained = runs["loss"][np.isinf(runs["post"])] if "post" in runs else runs["loss"]
    smallest, largest = as_trained.min(initial=np.inf), as_trained.max(initial=0.0)
    if largest > _MAX_LOSS:
        raise UserError(f"{largest:g} is not a loss in nats per token (if it is a perplexity, give its logarithm)")
    if (least := runs["loss"].min()) < _MIN_LOSS:
        raise UserError(
            f"{least:g} is not a loss in nats per token: a mean in fp32 cannot resolve less than {_MIN_LOSS:g}. "
            f"Leave out runs that diverged or did not end"
        )
    if largest > _MAX_LOSS_RATIO * smallest:
        logger.warning(
            "losses range from %.4g to %.4g; a law takes nats per token, check for perplexities", smallest, largest
        )


def _check_units(runs: Mapping[str, Array]) -> None:
    """Refuse counts in mixed units; warn of wide gaps."""
    for name, smallest in _MIN_COUNTS.items():
        values = np.sort(runs[name])
        with np.errstate(over="ignore"):
            gaps = values[1:] / values[:-1]
        if values[0] < smallest or gaps.max(initial=1.0) >= _MAX_GAP:
            raise UserError(
                f"{name} ranges from {values[0]:.4g} to {values[-1]:.4g}: the units may be mixed, or millions or "
                f"billions; {name} is a plain count, such as 1.25e8"
            )
        if gaps.max(initial=1.0) >= _WIDE_GAP:
            i = gaps.argmax()
            logger.warning("no %s lies between %.4g and %.4g; check for mixed units", name, values[i], values[i + 1])
    ratio = runs["D"] / runs["N"]
    if ratio.min() < _TOKENS_PER_PARAMETER[0] or ratio.max() > _TOKENS_PER_PARAMETER[1]:
        raise UserError(
            f"tokens per parameter range from {ratio.min():.3g} to {ratio.max():.3g}: N and D have different units, or "
            f"are swapped; both are plain counts"
        )
