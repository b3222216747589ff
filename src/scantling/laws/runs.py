"""Tables of runs: read, with any names of columns, and checked before anything is fitted to them."""

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
from typing import Any

import numpy as np

from scantling.errors import UserError, did_you_mean
from scantling.laws.efficiency import UNQUANTISED
from scantling.laws.law import UNNAMED, Array, Law, bits_of, text_of

logger = logging.getLogger(__name__)

WHOLE = 16
"""Bits from which on nothing is quantised."""
_PARTS = ("weights", "activations", "kv_cache")
_SECTION = "precision."
"""Before their names in the tables that `scantling sweep` writes."""
_MOST_NATS, _MOST_APART = 15.0, 4.0
"""Nats a token, of chance with a million tokens; and how many times as large one loss is as another. As trained."""
_LEAST_NATS = 1e-6
"""Nats a token that a mean of log-probabilities near 1 in fp32 can still tell from 0."""
_BITS = (0.1, 128.0)
_FEWEST = {"N": 1e3, "D": 1e4}
_GAP, _WIDE_GAP = 1e4, 500.0
_RATIOS = (0.01, 1e7)


@dataclass(frozen=True)
class Runs(Mapping[str, Any]):
    """Columns of equal length: N, D, loss and the variables of a law.

    Attributes:
        columns: by name.
        few: whether each run has few bits of a part of which the law has no variable.
    """

    columns: Mapping[str, Array]
    few: Array

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def count(self) -> int:
        """How many runs."""
        return len(self.columns["N"])

    def take(self, chosen: Array) -> Runs:
        """Some of the runs, by place or by mask."""
        return Runs({name: column[chosen] for name, column in self.columns.items()}, self.few[chosen])

    def whole(self) -> Runs:
        """The runs in which nothing has few bits."""
        chosen = ~self.few
        for column in self.variables().values():
            chosen &= column >= WHOLE if column.dtype.kind == "f" else np.isin(column, UNQUANTISED)
        return self.take(chosen)

    def with_few_bits_alone(self) -> Runs:
        """The same, with infinite bits in place of those from 16 on."""
        bits = {name: column for name, column in self.variables().items() if column.dtype.kind == "f"}
        infinite = {name: np.where(column < WHOLE, column, np.inf) for name, column in bits.items()}
        return replace(self, columns={**self.columns, **infinite})

    def variables(self) -> dict[str, Array]:
        """All columns but N, D and the loss."""
        return {name: column for name, column in self.columns.items() if name not in ("N", "D", "loss")}

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The smallest and largest finite value of every column of numbers but the loss."""
        found = {}
        for name, column in self.columns.items():
            finite = column[np.isfinite(column)] if column.dtype.kind == "f" else column[:0]
            if name != "loss" and len(finite):
                found[name] = (float(finite.min()), float(finite.max()))
        return found


def read_runs(
    runs: Any, law: type[Law], columns: Mapping[str, str] | None = None, where: Mapping[str, Any] | None = None
) -> Runs:
    """The runs of a table, as a law needs them.

    Args:
        runs: a CSV, JSON or JSON-lines file, .gz or not; a mapping of columns; a data frame; or one mapping a run.
        law: whose variables are looked for.
        columns: what the table calls N, D, loss and the variables, where it is another name; or the other way round,
            as data frames are renamed. C, the FLOPs of training, may stand in for D, which is then C / 6N. Post may be
            a pattern of columns such as `post.*`, which hold losses after training by format: each run is then a row
            as it was trained, and one for each of them. The columns precision.weights, precision.activations and
            precision.kv_cache of a sweep need not be named.
        where: only the runs whose columns have these values, an empty one for nulls.

    Raises:
        UserError: for a table, a column or values that cannot be used.
    """
    table = _table(runs)
    wanted = ["N", "D", "loss", *law.VARIABLES]
    renamed = _by_name(columns or {}, {*wanted, "C"})
    if "C" in renamed and "D" in renamed:
        raise UserError("columns names both D and C, from which D is worked out; give one of the two")
    for name in renamed:
        if name not in (*wanted, "C"):
            raise UserError(f"columns names '{name}', which the {law.name} law has not; it has {', '.join(wanted)}")
    numbers: Sequence[int] = range(1, len(next(iter(table.values()), [])) + 1)
    if "post" in wanted and "*" in renamed.get("post", ""):
        table, numbers = _in_rows(table, renamed.pop("post"), renamed.get("loss", "loss"))
    chosen = np.ones(len(numbers), bool)
    for column, value in (where or {}).items():
        chosen &= np.array([_are_same(each, value) for each in _column(table, column, column)], bool)
    if not chosen.any():
        raise UserError(f"the table has no run{' with ' + _listed(where) if where else ''}")
    table = {name: list(compress(column, chosen)) for name, column in table.items()}
    numbers = list(compress(numbers, chosen))
    if "C" in renamed:
        table["D"] = _tokens(table, renamed, numbers)
        del renamed["C"]
    found: dict[str, Array] = {}
    for name in _PARTS:
        if name in wanted and name not in {*renamed, *table} and f"{_SECTION}{name}" in table:
            renamed[name] = f"{_SECTION}{name}"
    for name in wanted:
        column = renamed.get(name, name)
        is_its_own = name in table and name not in renamed.values()  # and stands for nothing else
        if name in ("N", "D", "loss", "scheme") or name in renamed or is_its_own:
            cells = _column(table, column, name)
            if name == "scheme":
                texts = map(text_of, cells)
                found[name] = np.array([UNQUANTISED[0] if text.lower() in UNNAMED else text for text in texts])
            else:
                found[name] = _numbers(cells, column, numbers, bits=name in law.VARIABLES)
        else:
            found[name] = np.full(len(numbers), float(law.VARIABLES[name]))
    _check(found, law, numbers)
    others = {name: column for name, column in table.items() if name not in renamed.values()}
    return Runs(found, _few_bits(others, law, found.get("scheme", np.zeros(len(numbers)))))


def _few_bits(table: Mapping[str, Sequence[Any]], law: type[Law], schemes: Array) -> Array:
    """Which runs have few bits of a part of which the law has no variable; said where it takes others for the same."""
    found = np.zeros(len(schemes), bool)
    for name in (f"{section}{part}" for section in ("", _SECTION) for part in _PARTS if part not in law.VARIABLES):
        if name not in table:
            continue
        try:
            bits = np.array([bits_of(cell) for cell in table[name]])
        except ValueError:
            continue  # a column of something else, such as activation functions
        found |= bits < WHOLE
        alike = [bits[schemes == scheme] for scheme in np.unique(schemes)]
        if any(each.min() < WHOLE and each.min() < each.max() for each in alike):
            logger.warning(
                "the %s law takes runs alike whatever their %s; choose some with where= or --where, or take law kumar",
                law.name,
                name,
            )
    return found


def _by_name(columns: Mapping[str, str], wanted: set[str]) -> dict[str, str]:
    """The table's columns by our names, whichever way round they are given."""
    if columns and not wanted & set(columns) and set(columns.values()) <= wanted:
        return {name: column for column, name in columns.items()}
    return dict(columns)


def _in_rows(
    table: Mapping[str, Sequence[Any]], pattern: str, loss: str
) -> tuple[Mapping[str, Sequence[Any]], list[int]]:
    """The table with a column `post` in place of columns of losses, whose names say the formats, and each row's run."""
    before, _, after = pattern.partition("*")
    expression = re.compile(rf"{re.escape(before)}([^.]+){re.escape(after)}")
    formats = {name: found[1] for name in table if name != loss and (found := expression.fullmatch(name))}
    if not formats:
        raise UserError(f"the table has no columns {pattern}; it has {', '.join(table) or 'none'}")
    cells = [
        (place, cell, format)
        for name, format in {loss: "", **formats}.items()
        for place, cell in enumerate(_column(table, name, "loss"))
        if name == loss or str(cell).strip().lower() not in ("", "none", "nan")
    ]
    repeated = {name: [column[place] for place, *_ in cells] for name, column in table.items()}
    rows = {**repeated, loss: [cell for _, cell, _ in cells], "post": [format for *_, format in cells]}
    return rows, [place + 1 for place, *_ in cells]


def _tokens(table: Mapping[str, Sequence[Any]], renamed: Mapping[str, str], numbers: Sequence[int]) -> list[float]:
    """Tokens of runs whose FLOPs are known, 6 a parameter and token."""
    compute = _numbers(_column(table, renamed["C"], "C"), renamed["C"], numbers, bits=False)
    column = renamed.get("N", "N")
    found: list[float] = (compute / (6 * _numbers(_column(table, column, "N"), column, numbers, bits=False))).tolist()
    return found


def _table(runs: Any) -> Mapping[str, Sequence[Any]]:
    if isinstance(runs, str | Path):
        runs = _read(Path(runs))
    elif hasattr(runs, "to_dict") and hasattr(runs, "columns"):
        _check_unlike(list(runs.columns))
        runs = {name: runs[name] for name in runs.columns}
    if not isinstance(runs, Mapping):
        rows = list(runs) if isinstance(runs, Iterable) else [runs]
        wrong = [row for row in rows if not isinstance(row, Mapping)]
        if wrong:
            raise UserError(f"a table is columns by their names, or rows of them; one is {wrong[0]!r}")
        names = dict.fromkeys(name for row in rows for name in row)
        runs = {name: [row.get(name, "") for row in rows] for name in names}
    table = {str(name): _cells(column) for name, column in runs.items()}
    lengths = {name: len(column) for name, column in table.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"the columns differ in length: {', '.join(f'{n} {length}' for n, length in lengths.items())}")
    return table


def _read(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
        kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
        if kind == ".json":
            return json.loads(text)
        if kind == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        reader = csv.DictReader(io.StringIO(text, newline=""))
        _check_unlike(reader.fieldnames or [])
        rows = []
        for row in reader:
            if None in row:
                raise UserError(
                    f"{path}, line {reader.line_num}, has more cells than the first, which names the columns"
                )
            rows.append(row)
        return rows
    except RecursionError:
        raise UserError(f"{path} cannot be read as a table of runs: it is nested too deeply") from None
    except (OSError, EOFError, zlib.error, ValueError, csv.Error) as error:  # ValueError: 5,000 digits, too
        raise UserError(f"{path} cannot be read as a table of runs: {error}") from error


def _check_unlike(names: Sequence[Any]) -> None:
    """Raise a UserError for two columns of one name."""
    for place, name in enumerate(names):
        if name and name in names[:place]:
            raise UserError(f"the table has two columns '{name}'; rename one")


def _cells(column: Any) -> list[Any]:
    """Those of a column of a list, an array or a series; of one cell alone, that one."""
    if hasattr(column, "tolist"):
        column = column.tolist()
    return list(column) if isinstance(column, Iterable) and not isinstance(column, str | bytes) else [column]


def _are_same(cell: Any, value: Any) -> bool:
    """Whether a cell is what is asked for: the same text, the same number, or empty as it."""
    texts = ["" if isinstance(each, float) and math.isnan(each) else text_of(each) for each in (cell, value)]
    if any(isinstance(each, bool | np.bool_) for each in (cell, value)):
        texts = [text.lower() for text in texts]
    if texts[0] == texts[1]:
        return True
    try:
        return float(cell) == float(value)
    except (TypeError, ValueError):
        return False


def _column(table: Mapping[str, Sequence[Any]], column: str, name: str) -> Sequence[Any]:
    if column in table:
        return table[column]
    hint = did_you_mean(column, table)
    raise UserError(
        f"the table has no column '{column}'{f' for {name}' if name != column else ''}; it has "
        f"{', '.join(table) or 'none'}{f' ({hint})' if hint else ''}. Say which column is {name}: "
        f"columns={{'{name}': …}}, or --column {name}=… on the command line"
    )


def _numbers(cells: Sequence[Any], column: str, numbers: Sequence[int], *, bits: bool) -> Array:
    """Numbers; in columns of bits an empty cell is unquantised, and the name of a format stands for its bits."""
    found = np.empty(len(cells))
    for place, cell in enumerate(cells):
        text = text_of(cell)
        try:
            found[place] = bits_of(cell) if bits else float(text or "nan")
        except ValueError:
            raise UserError(f"column {column}, run {numbers[place]}: '{text}' is no number") from None
    return found


def _check(runs: Mapping[str, Array], law: type[Law], numbers: Sequence[int]) -> None:
    for name in ("N", "D", "loss"):
        bad = np.flatnonzero(~(np.isfinite(runs[name]) & (runs[name] > 0))).tolist()
        if bad:
            places = list(dict.fromkeys(str(numbers[place]) for place in bad))
            listed = ", ".join(places[:5]) + (", …" if len(places) > 5 else "")
            raise UserError(
                f"{name} of run {listed} is {runs[name][bad[0]]}; every {name} is a positive and finite number. "
                f"Leave out runs that diverged or did not end"
            )
    for name in law.VARIABLES:
        if name == "scheme":
            continue
        low, high = _BITS
        bits = runs[name][~np.isinf(runs[name]) | (runs[name] < 0)]
        if len(outside := bits[~((bits >= low) & (bits <= high))]):
            raise UserError(
                f"{name} is in bits, from {low:g} to {high:g}, or empty where unquantised; given {outside[0]:g}"
            )
    trained = runs["loss"][np.isinf(runs["post"])] if "post" in runs else runs["loss"]
    smallest, largest = trained.min(initial=np.inf), trained.max(initial=0.0)
    if largest > _MOST_NATS:
        raise UserError(
            f"a loss of {largest:g} is no loss in nats a token (is it a perplexity? then give its logarithm)"
        )
    if (least := runs["loss"].min()) < _LEAST_NATS:
        raise UserError(
            f"a loss of {least:g} is no loss in nats a token: a mean in fp32 is not known to less than "
            f"{_LEAST_NATS:g}. Leave out runs that diverged or did not end"
        )
    if largest > _MOST_APART * smallest:
        logger.warning(
            "losses go from %.4g to %.4g: look whether some are perplexities; a law takes nats a token",
            *(smallest, largest),
        )
    for name, fewest in _FEWEST.items():
        values = np.sort(runs[name])
        with np.errstate(over="ignore"):
            jumps = values[1:] / values[:-1]
        if values[0] < fewest or jumps.max(initial=1.0) >= _GAP:
            raise UserError(
                f"{name} goes from {values[0]:.4g} to {values[-1]:.4g}: are the units mixed, or millions or billions? "
                f"{name} is a plain count, such as 1.25e8"
            )
        if jumps.max(initial=1.0) >= _WIDE_GAP:
            logger.warning(
                "no %s lies between %.4g and %.4g: look whether the units are mixed",
                *(name, values[jumps.argmax()], values[jumps.argmax() + 1]),
            )
    ratio = runs["D"] / runs["N"]
    if ratio.min() < _RATIOS[0] or ratio.max() > _RATIOS[1]:
        raise UserError(
            f"tokens a parameter go from {ratio.min():.3g} to {ratio.max():.3g}: N and D are in different units, or "
            f"swapped; both are plain counts"
        )


def _listed(where: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (where or {}).items())
