"""Structured sources with named columns: JSON Lines, CSV, Parquet and Hugging Face datasets.

JSON Lines and CSV are parsed line by line, so that faults are reported with their file and line.
"""

from __future__ import annotations

import csv
import json
import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scantling.errors import UserError, first_line, with_hint
from scantling.files import expand_path, read_json_object
from scantling.trainer.data.documents import Piece, Source
from scantling.trainer.data.files import PACKED, file_stamp, read_lines
from scantling.trainer.recipe.schema import Fields

logger = logging.getLogger(__name__)

ROWS = 1000
"""Rows of Parquet and Arrow read at a time."""
UNLABELED = -1
"""Label of a row without one, by the convention of `datasets`."""


def source_name(paths: Sequence[Path]) -> str:
    """Return the path of a file, or the first path and the number of others."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more files"


class TableFiles(Source):
    """Rows of files; subclasses read one file."""

    kind: str

    def __init__(self, paths: Sequence[Path], fields: Fields) -> None:
        self.paths, self.fields = list(paths), fields
        self.name = source_name(paths)
        packed = self.kind == "parquet" or any(path.suffix.lower() in PACKED for path in paths)
        self.size = None if packed else sum(path.stat().st_size for path in paths)

    def stamp(self) -> Any:
        return [self.kind, self.fields.model_dump(), [file_stamp(path) for path in self.paths]]

    def pieces(self) -> Iterator[Piece]:
        for path in self.paths:
            for where, row in self.rows(path):
                yield to_piece(row, self.fields, where)

    @abstractmethod
    def rows(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the rows of one file, each with its location."""


class JsonlSource(TableFiles):
    """JSON Lines: one object per line; empty lines are skipped."""

    kind = "jsonl"

    def rows(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, line in enumerate(read_lines(path), 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: integers with thousands of digits
                problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                if isinstance(error, json.JSONDecodeError):
                    problem = f"{error.msg}, column {error.colno}"
                raise UserError(f"{where}: not valid JSON: {problem}") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: a line must be a JSON object; given {describe_type(row)}")
            yield where, row


class CsvSource(TableFiles):
    """CSV with commas, double quotes and a header line."""

    kind = "csv"

    def rows(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        lines = csv_rows(path)
        _, header = next(lines)
        for line, values in lines:
            yield f"{path}:{line}", dict(zip(header, values, strict=True))


def csv_rows(
    path: Path, *, header: Sequence[str] | None = None, delimiter: str = ",", quoted: bool = True
) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the rows of a file with their line numbers; the first row is the header. Empty lines are skipped.

    Args:
        path: the file.
        header: the names of the columns, for a file without a header line.
        delimiter: separates values.
        quoted: True if a value in double quotes may contain delimiters and newlines.

    Raises:
        UserError: the file cannot be read, has no header, or has a line with a different number of values.
    """
    csv.field_size_limit(1 << 28)  # the default of 128 KiB is too small for documents; the limit is global
    dialect: dict[str, Any] = {"delimiter": delimiter, "quoting": csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE}
    reader = csv.reader(read_lines(path), strict=True, **dialect)
    begin = 1
    try:
        if header is None:
            header = next(reader, [])
            begin = reader.line_num + 1
        if not header:
            raise UserError(f"{path}: no header line with the names of the columns")
        yield 1, header
        for values in reader:
            # A value in quotes can contain newlines: a row begins on the line after the last row's end.
            line, begin = begin, reader.line_num + 1
            if not values:
                continue
            if len(values) != len(header):
                raise UserError(f"{path}:{line}: {len(values)} values for {len(header)} columns ({', '.join(header)})")
            yield line, values
    except csv.Error as error:
        raise UserError(f"{path}:{begin}: not valid CSV: {error}") from None


class ParquetSource(TableFiles):
    """Parquet files, read a thousand rows at a time."""

    kind = "parquet"

    def rows(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        try:
            with parquet.ParquetFile(path) as file:
                names = columns(self.fields)
                check_columns(names, file.schema_arrow.names, str(path))
                number = 0
                for batch in file.iter_batches(batch_size=ROWS, columns=names):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{path}, row {number}", row
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not a readable Parquet file: {error}") from None


class HubSource(Source):
    """A split of a Hugging Face dataset: a name, a folder with data files, or a folder written by `save_to_disk`."""

    def __init__(self, path: str, config: str | None, split: str, fields: Fields) -> None:
        self.fields = fields
        self.name = f"{path} [{split}]"
        self._data = load_hub(path, config, split)
        check_columns(columns(fields), self._data.column_names, self.name)

    def stamp(self) -> Any:
        return ["hf", self._data._fingerprint, self.fields.model_dump()]

    def pieces(self) -> Iterator[Piece]:
        names = columns(self.fields)
        label = self.fields.label
        classes = class_names(self._data, label)
        number = unlabeled = 0
        for batch in self._data.select_columns(names).iter(batch_size=ROWS):
            for values in zip(*(batch[name] for name in names), strict=True):
                number += 1
                row = dict(zip(names, values, strict=True))
                if classes is not None and label is not None and isinstance(row[label], int):
                    if row[label] == UNLABELED:
                        unlabeled += 1
                        continue
                    row[label] = classes[row[label]]
                yield to_piece(row, self.fields, f"{self.name}, row {number}")
        warn_about_unlabeled(self.name, unlabeled)


def class_names(data: Any, label: str | int | None) -> list[str] | None:
    """Return the class names behind the integers in a column of a Hugging Face dataset; None without class names."""
    names: list[str] | None = getattr(data.features[label], "names", None) if label else None
    return names


def warn_about_unlabeled(name: str, count: int) -> None:
    """Warn of the number of rows that were skipped because they have no label, if any."""
    if count:
        logger.warning("%s: left out %d rows without a label", name, count)


def load_hub(path: str, config: str | None, split: str, *, prepare: bool = True) -> Any:
    """Return a map-style dataset; every fault becomes a `UserError`.

    Args:
        path: name, folder with data files, or folder written by `save_to_disk`.
        config: name of its configuration, or None.
        split: name of the split.
        prepare: False looks for the dataset and neither downloads nor converts it; the result is then None unless
            `save_to_disk` wrote the folder.
    """
    import datasets

    folder = expand_path(path)
    try:
        if folder.is_dir() and ((folder / "state.json").exists() or (folder / "dataset_dict.json").exists()):
            data = _saved(folder)
            if isinstance(data, datasets.DatasetDict):
                if split not in data:
                    raise UserError(f"{path} has no split '{split}'; it has {', '.join(data)}")
                return _plain(data[split])
            held = data.split or "train"
            if split != str(held):
                raise UserError(f"{path} holds one data set, its split '{held}', and no split '{split}'")
            return _plain(data)
        name = str(folder) if folder.exists() else path
        if not prepare:
            datasets.load_dataset_builder(name, config)
            return None
        return datasets.load_dataset(name, config, split=split)
    except UserError:
        raise
    except Exception as error:  # `datasets` does not document its errors; offline it raises several kinds
        cause = error.__cause__ or error
        offline = isinstance(error, ConnectionError) or "offline" in str(error).lower() or "hub" in str(error).lower()
        hint = (
            "; without a network give a local folder, or fetch it into the Hugging Face cache first" if offline else ""
        )
        raise UserError(f"data.hf: cannot load '{path}' (split '{split}'): {first_line(cause)}{hint}") from None


def _saved(folder: Path) -> Any:
    """Load a dataset written by `save_to_disk`, even if its format needs a missing library (JAX, TensorFlow)."""
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except ValueError:
        if (splits := folder / "dataset_dict.json").exists():
            return datasets.DatasetDict({name: _saved(folder / name) for name in read_json_object(splits)["splits"]})
        state = read_json_object(folder / "state.json")
        if state["_format_type"] is None:
            raise
        files = [str(folder / file["filename"]) for file in state["_data_files"]]
        split = state["_split"]
        return datasets.concatenate_datasets([datasets.Dataset.from_file(file, split=split) for file in files])


def _plain(data: Any) -> Any:
    """Return the dataset with all columns as Python values, whatever format (torch, numpy) it was saved with."""
    is_plain = data.format["type"] is None and set(data.format["columns"]) == set(data.column_names)
    return data if is_plain else data.with_format(None)


def check_hub(path: str, config: str | None, split: str, names: Iterable[str]) -> None:
    """Look for a dataset, and for its columns if they are known without a download or a conversion.

    Raises:
        UserError: it cannot be used; the message is the same as in a run.
    """
    data = load_hub(path, config, split, prepare=False)
    if data is not None:
        check_columns(names, data.column_names, f"{path} [{split}]")


def columns(fields: Fields) -> list[str]:
    """Return the columns to read, without duplicates."""
    return list(dict.fromkeys(name for name in (fields.text, fields.pair, fields.label) if name is not None))


def check_columns(names: Iterable[str], available: Sequence[str], where: str) -> None:
    """Raise if a column is missing, with the existing columns."""
    for name in names:
        if name not in available:
            listed = ", ".join(available) or "none"
            raise UserError(with_hint(f"{where}: no column '{name}'; columns: {listed}", name, available))


def to_piece(row: Mapping[str, Any], fields: Fields, where: str) -> Piece:
    """Return the document in a row."""
    check_columns(columns(fields), list(row), where)
    pair = None if fields.pair is None else _text(row, fields.pair, where)
    label = None if fields.label is None else label_text(row[fields.label], fields.label, where)
    return Piece(_text(row, fields.text, where), pair, label, where=where)


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise UserError(f"{where}: column '{name}' must hold text; given {describe_type(value)}")
    return value


def label_text(value: Any, name: str, where: str) -> str:
    """Return a label as text; raise if it is neither text nor an integer."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int) and value != "":
        return str(value)
    raise UserError(
        f"{where}: column '{name}' must hold a label (text or a whole number); given {describe_type(value)}"
    )


def describe_type(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}
    shown = repr(value)
    return f"{kinds.get(type(value), type(value).__name__)}, {shown if len(shown) <= 40 else shown[:37] + '...'}"
