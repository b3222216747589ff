"""Tokenized documents on disk, as flat memory-mapped arrays.

For each side, `train` and `heldout`, an entry holds `SIDE.tokens` (uint16 or uint32) and `SIDE.ends` (int64, the end
of each document). Pairs also have `SIDE.middles` (int64, the start of the second text) and `SIDE.labels` (int32).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer[Any]]


class MappedArray:
    """Flat array in a file, mapped on first use; pickling transfers only its path.

    Args:
        path: the file.
        dtype: format of the elements, such as "uint16".
        start: first element.
        count: number of elements; None for all that follow.
    """

    def __init__(self, path: Path, dtype: str, start: int = 0, count: int | None = None) -> None:
        # Little-endian on every machine, so that a file of ids means the same everywhere.
        self.path, self.dtype, self.start = path, np.dtype(dtype).newbyteorder("<"), start
        self.count = path.stat().st_size // self.dtype.itemsize - start if count is None else count
        self._map: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        if self._map is None:
            shape = (self.count,)
            # an empty file cannot be mapped
            self._map = (
                np.memmap(self.path, self.dtype, "r", self.start * self.dtype.itemsize, shape).view(np.ndarray)
                if self.count
                else np.empty(0, self.dtype)
            )
        return self._map[index]

    def __getstate__(self) -> dict[str, Any]:
        # Workers map the file themselves; pickling an open map would copy its content.
        return self.__dict__ | {"_map": None}


@dataclass(frozen=True)
class TokenStore:
    """One side of an entry.

    Attributes:
        tokens: the ids of all documents, concatenated.
        ends: end of each document in `tokens`.
        middles: start of the second text of each document; None for a stream.
        labels: the label ids; None for a stream.
        num_bytes: bytes of UTF-8 in the documents.
    """

    tokens: MappedArray
    ends: MappedArray
    middles: MappedArray | None
    labels: MappedArray | None
    num_bytes: int

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.ends)

    def counts(self) -> dict[str, int]:
        """Return the count of documents, tokens and bytes."""
        return {"documents": self.num_documents, "tokens": len(self.tokens), "bytes": self.num_bytes}


@dataclass(frozen=True)
class Marks:
    """Ids around the documents of a stream.

    Attributes:
        first: before the first document.
        begin: before every other document.
        end: after each document.
        given: ids that the model does not predict, because they only begin documents.
    """

    first: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    given: tuple[int, ...] = ()


NO_MARKS = Marks()
"""Marks that add nothing: for separate documents, or a stream tokenized elsewhere."""


def open_store(folder: Path, side: str, meta: dict[str, Any]) -> TokenStore:
    """Return the arrays of one side of a complete cache entry."""
    pairs = meta["pairs"]
    return TokenStore(
        MappedArray(folder / f"{side}.tokens", meta["dtype"]),
        MappedArray(folder / f"{side}.ends", "int64"),
        MappedArray(folder / f"{side}.middles", "int64") if pairs else None,
        MappedArray(folder / f"{side}.labels", "int32") if pairs else None,
        meta["bytes"][side],
    )


class StoreWriter:
    """Writer that appends documents to the arrays of one side.

    Args:
        folder: folder of the files.
        side: "train" or "heldout".
        dtype: format of the tokens.
        pairs: True if documents have a second text and a label.
        marks: ids around the documents of a stream.
    """

    def __init__(self, folder: Path, side: str, dtype: str, *, pairs: bool, marks: Marks) -> None:
        names = ("tokens", "ends", "middles", "labels") if pairs else ("tokens", "ends")
        self._files: dict[str, BinaryIO] = {name: (folder / f"{side}.{name}").open("wb") for name in names}
        self._dtype, self._position = np.dtype(dtype).newbyteorder("<"), 0
        self._marks, self._is_open = marks, False

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for file in self._files.values():
            file.close()

    def add_text(self, ids: Tokens, *, last: bool) -> None:
        """Append a piece of a document of a stream."""
        # A document may arrive in several pieces; only the first piece is preceded by marks.
        if not self._is_open:
            self._append(self._marks.begin if self._position else self._marks.first)
        self._append(ids)
        self._is_open = not last
        if last:
            self._append(self._marks.end)
            self._write("ends", [self._position], "<i8")

    def add_pair(self, ids: Tokens, pair_ids: Tokens | None, label: int) -> None:
        """Append a labeled document; without a second text, `middles` equals the end of the document."""
        self._append(ids)
        self._write("middles", [self._position], "<i8")
        if pair_ids is not None:
            self._append(pair_ids)
        self._write("ends", [self._position], "<i8")
        self._write("labels", [label], "<i4")

    def _append(self, ids: Tokens | tuple[int, ...]) -> None:
        self._files["tokens"].write(np.ascontiguousarray(ids, dtype=self._dtype).data)
        self._position += len(ids)

    def _write(self, name: str, values: Iterable[int], dtype: str) -> None:
        self._files[name].write(np.array(values, dtype=dtype).data)


def write_array(path: Path, values: npt.NDArray[Any]) -> None:
    """Write a flat array; unlike NumPy's own writers, this reports a full disk as such."""
    with path.open("wb") as file:
        file.write(np.ascontiguousarray(values).data)
