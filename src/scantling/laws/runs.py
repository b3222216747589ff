"""Tables of runs: read, with any names of columns, and checked before anything is fitted to them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
_FEWEST = {"N": 1e3, "D": 1e4}
_GAP, _WIDE_GAP = 1e4, 500.0
_RATIOS = (0.01, 1e7)


@dataclass(frozen=True)
class Runs(Mapping[str, Any]):
    """Columns of equal length: N, D, loss and the variables of a law."""

    columns: Mapping[str, Array]

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
        return Runs({name: column[chosen] for name, column in self.columns.items()})

    def whole(self) -> Runs:
        """The runs in which nothing has few bits."""
        chosen = np.ones(self.count, bool)
        for column in self.variables().values():
            chosen &= column >= WHOLE if column.dtype.kind == "f" else np.isin(column, UNQUANTISED)
        return self.take(chosen)

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
        where: only the runs whose columns have these values.

    Raises:
        UserError: for a table, a column or values that cannot be used.
    """
    table = _table(runs)
    wanted = ["N", "D", "loss", *law.VARIABLES]
    renamed = _by_name(columns or {}, {*wanted, "C"})
    if "post" in wanted and "*" in renamed.get("post", ""):
        table = _in_rows(table, renamed.pop("post"), renamed.get("loss", "loss"))
    if "C" in renamed and "D" not in renamed:
        table = {**table, "D": _tokens(table, renamed)}
        del renamed["C"]
    for name in renamed:
        if name not in wanted:
            raise UserError(f"columns names '{name}', which the {law.name} law has not; it has {', '.join(wanted)}")
    chosen = np.ones(len(next(iter(table.values()), [])), bool)
    for column, value in (where or {}).items():
        chosen &= np.array([_are_same(each, value) for each in _column(table, column, column)], bool)
    if not chosen.any():
        raise UserError(f"the table has no run{' with ' + _listed(where) if where else ''}")
    found: dict[str, Array] = {}
    for name in _PARTS:
        if name in wanted and name not in {*renamed, *table} and f"{_SECTION}{name}" in table:
            renamed[name] = f"{_SECTION}{name}"
    for name in wanted:
        column = renamed.get(name, name)
        is_its_own = name in table and name not in renamed.values()  # and stands for nothing else
        if name in ("N", "D", "loss", "scheme") or name in renamed or is_its_own:
            cells = [cell for cell, kept in zip(_column(table, column, name), chosen, strict=True) if kept]
            if name == "scheme":
                texts = map(text_of, cells)
                found[name] = np.array([UNQUANTISED[0] if text.lower() in UNNAMED else text for text in texts])
            else:
                found[name] = _numbers(cells, column, bits=name in law.VARIABLES)
        else:
            found[name] = np.full(int(chosen.sum()), float(law.VARIABLES[name]))
    checked = Runs(found)
    _check(checked, law)
    if not law.VARIABLES:
        _warn_of_few_bits(table, chosen, law)
    return checked


def _warn_of_few_bits(table: Mapping[str, Sequence[Any]], chosen: Array, law: type[Law]) -> None:
    """Say that a law without variables takes runs of different bits for alike."""
    for name in (f"{section}{part}" for section in ("", _SECTION) for part in _PARTS):
        if name not in table:
            continue
        cells = [cell for cell, kept in zip(table[name], chosen, strict=True) if kept]
        bits = np.unique(_numbers(cells, name, bits=True))
        if len(bits) > 1 and bits[0] < WHOLE:
            logger.warning(
                "the %s law takes runs alike whatever their %s; choose some with where= or --where, or take law kumar",
                law.name,
                name,
            )


def _by_name(columns: Mapping[str, str], wanted: set[str]) -> dict[str, str]:
    """The table's columns by our names, whichever way round they are given."""
    if columns and not wanted & set(columns) and set(columns.values()) <= wanted:
        return {name: column for column, name in columns.items()}
    return dict(columns)


def _in_rows(table: Mapping[str, Sequence[Any]], pattern: str, loss: str) -> Mapping[str, Sequence[Any]]:
    """The table with a column `post` in place of columns of losses, whose names say the formats."""
    before, _, after = pattern.partition("*")
    expression = re.compile(rf"{re.escape(before)}([^.]+){re.escape(after)}")
    formats = {name: found[1] for name in table if (found := expression.fullmatch(name))}
    if not formats:
        raise UserError(f"the table has no columns {pattern}; it has {', '.join(table) or 'none'}")
    cells = [
        (place, cell, format)
        for name, format in {loss: "", **formats}.items()
        for place, cell in enumerate(_column(table, name, "loss"))
        if name == loss or str(cell).strip().lower() not in ("", "none", "nan")
    ]
    repeated = {name: [column[place] for place, *_ in cells] for name, column in table.items()}
    return {**repeated, loss: [cell for _, cell, _ in cells], "post": [format for *_, format in cells]}


def _tokens(table: Mapping[str, Sequence[Any]], renamed: Mapping[str, str]) -> list[float]:
    """Tokens of runs whose FLOPs are known, 6 a parameter and token."""
    compute = _numbers(_column(table, renamed["C"], "C"), renamed["C"], bits=False)
    column = renamed.get("N", "N")
    found: list[float] = (compute / (6 * _numbers(_column(table, column, "N"), column, bits=False))).tolist()
    return found


def _table(runs: Any) -> Mapping[str, Sequence[Any]]:
    if isinstance(runs, str | Path):
        runs = _read(Path(runs))
    elif hasattr(runs, "to_dict"):
        runs = runs.to_dict("list")
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
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        reader = csv.DictReader(io.StringIO(text))
        rows = []
        for row in reader:
            if None in row:
                raise UserError(
                    f"{path}, line {reader.line_num}, has more cells than the first, which names the columns"
                )
            rows.append(row)
        return rows
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a table of runs: {error}") from error


def _cells(column: Any) -> list[Any]:
    """Those of a column of a list, an array or a series; of one cell alone, that one."""
    if hasattr(column, "tolist"):
        column = column.tolist()
    return list(column) if isinstance(column, Iterable) and not isinstance(column, str | bytes) else [column]


def _are_same(cell: Any, value: Any) -> bool:
    """Whether a cell is what is asked for: the same text, or the same number."""
    if str(cell).strip() == str(value).strip():
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


def _numbers(cells: Sequence[Any], column: str, *, bits: bool) -> Array:
    """Numbers; in columns of bits an empty cell is unquantised, and the name of a format stands for its bits."""
    found = np.empty(len(cells))
    for place, cell in enumerate(cells):
        text = text_of(cell)
        try:
            found[place] = bits_of(text) if bits else float(text or "nan")
        except ValueError:
            raise UserError(f"column {column}, run {place + 1}: '{text}' is no number") from None
    return found


def _check(runs: Runs, law: type[Law]) -> None:
    for name in ("N", "D", "loss"):
        bad = np.flatnonzero(~(np.isfinite(runs[name]) & (runs[name] > 0)))
        if len(bad):
            listed = ", ".join(str(place + 1) for place in bad[:5]) + (", …" if len(bad) > 5 else "")
            raise UserError(
                f"{name} of run {listed} is {runs[name][bad[0]]}; every {name} is a positive and finite number. "
                f"Leave out runs that diverged or did not end"
            )
    for name in law.VARIABLES:
        if name != "scheme" and not (runs[name] > 0).all():
            raise UserError(f"{name} is in bits, above 0, or empty where unquantised; given {runs[name].min():g}")
    trained = runs["loss"][np.isinf(runs["post"])] if "post" in runs else runs["loss"]
    smallest, largest = trained.min(initial=np.inf), trained.max(initial=0.0)
    if largest > _MOST_NATS:
        raise UserError(
            f"a loss of {largest:g} is no loss in nats a token (is it a perplexity? then give its logarithm)"
        )
    if largest > _MOST_APART * smallest:
        logger.warning(
            "losses go from %.4g to %.4g: look whether some are perplexities; a law takes nats a token",
            *(smallest, largest),
        )
    for name, fewest in _FEWEST.items():
        values = np.sort(runs[name])
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
