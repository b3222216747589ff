"""Document sources: select the one that a recipe names, and read plain text."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scantling.errors import UserError
from scantling.trainer.data.documents import PIECE, Piece, Source, empty_corpus_error
from scantling.trainer.data.files import ENDINGS, PACKED, expand, file_stamp, read_lines, read_text
from scantling.trainer.data.tables import (
    CsvSource,
    HubSource,
    JsonlSource,
    ParquetSource,
    TableFiles,
    check_hub,
    columns,
    source_name,
)
from scantling.trainer.recipe.schema import DataSection


def training_source(section: DataSection) -> Source:
    """Return the training documents of a recipe; some of them are held out if `validation` is not given."""
    if section.hf is not None:
        return HubSource(section.hf, section.hf_config, section.hf_split, section.fields)
    if section.corpus is not None:
        return StandardLibrary()
    return _from_files(section, validation=False)


def validation_source(section: DataSection) -> Source | None:
    """Return the held-out documents of `validation`, or None if it is not given."""
    if section.validation is None:
        return None
    if section.hf is not None:
        if not isinstance(section.validation, str):
            raise UserError(f"data.validation: name one split of {section.hf}; given {len(section.validation)} names")
        return HubSource(section.hf, section.hf_config, section.validation, section.fields)
    if section.corpus is not None:
        raise UserError("data.validation: a built-in corpus is split by document; use data.heldout")
    return _from_files(section, validation=True)


def check_documents(section: DataSection, *, validation: bool = False) -> None:
    """Look for the documents of a recipe; of files, read up to the first text.

    Raises:
        UserError: they cannot be used; the message is the same as in a run.
    """
    if section.hf is not None and isinstance(split := section.validation if validation else section.hf_split, str):
        check_hub(section.hf, section.hf_config, split, columns(section.fields))
        return
    source = validation_source(section) if validation else training_source(section)
    if source is None:
        return
    count = 0
    for piece in source.pieces():
        if piece.text.strip() or (piece.pair or "").strip():
            return
        count += piece.last
    raise empty_corpus_error(source, count)


def _from_files(section: DataSection, *, validation: bool) -> Source:
    kinds = {"text": section.text, "jsonl": section.jsonl, "csv": section.csv, "parquet": section.parquet}
    kind, given = next(((kind, paths) for kind, paths in kinds.items() if paths is not None), (None, None))
    if kind is None or given is None:
        raise UserError(f"data: give one source of corpus, {', '.join(kinds)}, hf, bin")
    key = "data.validation" if validation else f"data.{kind}"
    paths = expand(section.validation if validation and section.validation is not None else given, key, ENDINGS[kind])
    if kind == "text":
        return TextFiles(paths, section.document_separator)
    tables: dict[str, type[TableFiles]] = {"jsonl": JsonlSource, "csv": CsvSource, "parquet": ParquetSource}
    return tables[kind](paths, section.fields)


class TextFiles(Source):
    """Plain text: each file is a document or, with `separator`, each line that begins with it starts a document."""

    def __init__(self, paths: Sequence[Path], separator: str | None = None) -> None:
        self.paths, self.separator = list(paths), separator
        self.name = source_name(self.paths)
        packed = any(path.suffix.lower() in PACKED for path in self.paths)
        self.size = None if packed else sum(path.stat().st_size for path in self.paths)

    def stamp(self) -> Any:
        return ["text", self.separator, [file_stamp(path) for path in self.paths]]

    def pieces(self) -> Iterator[Piece]:
        for path in self.paths:
            yield from _whole_file(path) if self.separator is None else _split_at(path, self.separator)


def _whole_file(path: Path) -> Iterator[Piece]:
    """Yield the file as one document; a long one is split after newlines."""
    rest, where = "", str(path)
    for text in read_text(path):
        rest += text
        if len(rest) >= PIECE:
            cut = rest.rfind("\n") + 1 or len(rest)
            yield Piece(rest[:cut], last=False, where=where)
            rest = rest[cut:]
    yield Piece(rest, where=where)


def _split_at(path: Path, separator: str) -> Iterator[Piece]:
    lines: list[str] = []
    length, begin = 0, 1
    for number, line in enumerate(read_lines(path), 1):
        if line.startswith(separator):
            yield Piece("".join(lines), where=f"{path}:{begin}")
            lines, length, begin = [], 0, number + 1
            continue
        lines.append(line)
        length += len(line)
        if length >= PIECE:
            yield Piece("".join(lines), last=False, where=f"{path}:{begin}")
            lines, length = [], 0
    yield Piece("".join(lines), where=f"{path}:{begin}")


class StandardLibrary(Source):
    """The `.py` files of this Python's standard library, in the order of their relative paths.

    Installed packages are skipped, and so are the few files that are not UTF-8 (test fixtures).
    """

    name = "python-stdlib"

    def __init__(self, root: Path | None = None) -> None:
        self.root = Path(sysconfig.get_path("stdlib")) if root is None else root
        self.paths = sorted(_python_files(self.root), key=lambda path: path.relative_to(self.root).as_posix())
        if not self.paths:
            raise UserError(
                f"data.corpus: this Python has no standard library sources under {self.root}; "
                "use another Python, or give files in data.text"
            )
        self.size = sum(path.stat().st_size for path in self.paths)

    def stamp(self) -> Any:
        return ["python-stdlib", [file_stamp(path) for path in self.paths]]

    def pieces(self) -> Iterator[Piece]:
        for path in self.paths:
            try:
                yield Piece(path.read_bytes().decode("utf-8"), where=str(path))
            except UnicodeDecodeError:
                continue
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror}") from None


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages", "__pycache__")]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        yield from (path for path in paths if path.is_file())  # skip dangling links
