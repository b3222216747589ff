"""Minimal pairs in the format of BLiMP's files: two sentences that differ in one point; only one is acceptable.

Source: Warstadt et al., "BLiMP: The Benchmark of Linguistic Minimal Pairs for English" (arXiv 1912.00582).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scantling.errors import UserError
from scantling.files import expand_path
from scantling.trainer.data.files import PACKED, expand
from scantling.trainer.data.tables import CsvSource, JsonlSource, TableFiles, check_columns, describe_type
from scantling.trainer.recipe.schema import Fields

GOOD, BAD = "sentence_good", "sentence_bad"
_KINDS: dict[str, type[TableFiles]] = {".jsonl": JsonlSource, ".csv": CsvSource}


@dataclass(frozen=True, slots=True)
class MinimalPair:
    """One minimal pair of sentences.

    Attributes:
        good: the acceptable sentence.
        bad: the unacceptable sentence.
        phenomenon: the grammatical point that differs: column `linguistics_term`, or the name of the file.
        paradigm: the column `UID`, or the name of the file.
    """

    good: str
    bad: str
    phenomenon: str
    paradigm: str


def read_pairs(given: Sequence[str]) -> list[MinimalPair]:
    """Read pairs from (compressed) JSON Lines and CSV files with columns `sentence_good` and `sentence_bad`.

    Args:
        given: files, globs, or folders, whose JSON Lines and CSV files are all read.

    Raises:
        UserError: a file is missing, cannot be read, has other columns, or holds no pair.
    """
    pairs = []
    for path in _files(given):
        found = list(_pairs(path))
        if not found:
            raise UserError(f"{path} holds no minimal pair: there is no row in it")
        pairs += found
    return pairs


def _files(given: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for each in given:
        folder = expand_path(each)
        if not folder.is_dir():
            found += expand(each, "minimal pairs")
            continue
        inside = sorted(path for path in folder.iterdir() if path.is_file() and _kind(path) in _KINDS)
        if not inside:
            raise UserError(f"minimal pairs: there is no {' and no '.join(_KINDS)} file in the folder {folder}")
        found += inside
    return list(dict.fromkeys(found))


def _kind(path: Path) -> str:
    """Return the extension that determines the format, without that of compression."""
    return (path.with_suffix("") if path.suffix.lower() in PACKED else path).suffix.lower()


def _pairs(path: Path) -> Iterator[MinimalPair]:
    if _kind(path) not in _KINDS:
        raise UserError(f"minimal pairs: {path} is neither {' nor '.join(_KINDS)} (or these with {', '.join(PACKED)})")
    name = path.name.partition(".")[0]
    for where, row in _KINDS[_kind(path)]([path], Fields()).rows(path):
        check_columns((GOOD, BAD), list(row), where)
        for column in (GOOD, BAD):
            if not isinstance(row[column], str) or not row[column].strip():
                raise UserError(f"{where}: column '{column}' must hold a sentence; given {describe_type(row[column])}")
        yield MinimalPair(row[GOOD], row[BAD], str(row.get("linguistics_term") or name), str(row.get("UID") or name))
