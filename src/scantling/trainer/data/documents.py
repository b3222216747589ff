"""Documents, and the facts that one scan collects about each: digest, size and label."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scantling.errors import UserError
from scantling.trainer.data.cache import FORMAT, Cache
from scantling.trainer.data.files import refuse_changed
from scantling.trainer.data.hashing import fingerprint
from scantling.trainer.data.progress import Progress
from scantling.trainer.data.store import write_array

MAX_LABELS = 1 << 16
PIECE = 1 << 20
"""Characters after which a long document continues in another piece, so that no document has to fit into memory."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A document or a part of one; the last piece of a document has `last` set. Only plain text is split into pieces.

    Attributes:
        text: the text, or the first sentence of a pair.
        pair: the second sentence.
        label: the label as written in the source.
        last: True if the document ends with this piece.
        where: the location in the source, `file:line`, for messages.
    """

    text: str
    pair: str | None = None
    label: str | None = None
    last: bool = True
    where: str = ""


class Source(ABC):
    """Documents in a fixed order that can be read repeatedly."""

    name: str
    """Name of the source for messages."""
    size: int | None = None
    """Bytes of text, if known before reading."""
    remedy = ""
    """What to do if it holds no text, for messages."""

    @abstractmethod
    def stamp(self) -> Any:
        """Return a JSON value that changes when the documents may have changed."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Yield the documents. Raises `UserError` with the location of any fault."""


@dataclass(frozen=True)
class Scan:
    """Result of scanning a source, with one entry per document.

    Attributes:
        digests: 64-bit hashes of text and pair; equal for equal documents.
        sizes: bytes of UTF-8 in text and pair; 0 for a blank document, which is never used.
        labels: index into `label_names`, or -1.
        label_names: the labels in order of first use.
        label_places: location of the first use of each label.
        content: hash of all documents in order.
        stamp: the source's stamp before it was read.
    """

    digests: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int32]
    label_names: list[str]
    label_places: list[str]
    content: str
    stamp: Any = None

    def __len__(self) -> int:
        return len(self.sizes)


def scan(source: Source, cache: Cache, progress: Progress) -> Scan:
    """Read a source once and record facts about each document; cached until the source's stamp changes.

    Raises:
        UserError: the source cannot be read, or holds no text.
    """
    stamp = source.stamp()
    key = fingerprint(["scan", FORMAT, stamp])
    entry = cache.get("scans", key, lambda folder: _write_scan(source, stamp, folder, progress))
    names, label_places = json.loads((entry.path / "labels.json").read_text(encoding="utf-8"))
    return Scan(
        np.fromfile(entry.path / "digests", dtype=np.uint64),
        np.fromfile(entry.path / "sizes", dtype=np.int64),
        np.fromfile(entry.path / "labels", dtype=np.int32),
        label_names=names,
        label_places=label_places,
        content=entry.meta["content"],
        stamp=stamp,
    )


def _write_scan(source: Source, stamp: Any, folder: Path, progress: Progress) -> dict[str, Any]:
    digests, sizes, labels = array("Q"), array("q"), array("i")
    label_ids: dict[str, int] = {}
    label_places: list[str] = []
    content = hashlib.sha256()
    digest = hashlib.blake2b(digest_size=16)
    size, blank = 0, True
    progress.start(f"reading {source.name}", source.size)
    try:
        for piece in source.pieces():
            data = _encode(piece.text, piece.where)
            size += len(data)
            digest.update(data)
            blank = blank and not piece.text.strip()
            if piece.pair is not None:
                data = _encode(piece.pair, piece.where)
                size += len(data)
                # UTF-8 never has the byte 0xFF, so text and pair cannot run into each other.
                digest.update(b"\xff" + data)
                blank = blank and not piece.pair.strip()
            if not piece.last:
                continue
            if piece.label is not None and piece.label not in label_ids:
                label_ids[piece.label] = len(label_ids)
                label_places.append(piece.where)
                if len(label_ids) > MAX_LABELS:
                    raise UserError(f"{piece.where}: more than {MAX_LABELS} labels; is it the label column?")
            bits = digest.digest()
            # repr keeps a missing label (None) apart from the label "None".
            content.update(bits + repr(piece.label).encode(errors="backslashreplace"))
            digests.append(int.from_bytes(bits[:8], "little"))
            sizes.append(0 if blank else size)
            labels.append(-1 if piece.label is None else label_ids[piece.label])
            progress.advance(size)
            digest = hashlib.blake2b(digest_size=16)
            size, blank = 0, True
    finally:
        progress.finish()
    refuse_changed(source.name, stamp, source.stamp())
    if not any(sizes):
        raise empty_corpus_error(source, len(sizes))
    write_array(folder / "digests", np.array(digests, dtype=np.uint64))
    write_array(folder / "sizes", np.array(sizes, dtype=np.int64))
    write_array(folder / "labels", np.array(labels, dtype=np.int32))
    (folder / "labels.json").write_text(json.dumps([list(label_ids), label_places]), encoding="utf-8")
    return {"content": content.hexdigest()}


def empty_corpus_error(source: Source, count: int) -> UserError:
    """Return the error for a source with this many documents, all without text."""
    return UserError(f"{source.name}: the corpus is empty: {count} documents, none with any text{source.remedy}")


def _encode(text: str, where: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = f"U+{ord(text[error.start]):04X}"
        raise UserError(f"{where}: the text holds half of a surrogate pair ({bad}), which is no character") from None
