"""Split documents into used, unused and held-out ones, by hash, so that the split depends on their content only.

If there is only one document, its end is held out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scantling.errors import UserError
from scantling.trainer.data.documents import Piece, Scan, Source
from scantling.trainer.data.hashing import key64, mix64

Sides = npt.NDArray[np.int8]
"""Side of each document: `UNUSED`, `TRAIN` or `HELDOUT`."""
UNUSED, TRAIN, HELDOUT = -1, 0, 1


def assign_all(scan: Scan, side: int) -> Sides:
    """Put every document that is not blank on one side."""
    return np.where(scan.sizes > 0, side, UNUSED).astype(np.int8)


def split(scan: Scan, *, heldout: float, max_bytes: int | None, seed: int, name: str, unit: str = "document") -> Sides:
    """Select the documents and hold some out.

    Identical documents are on the same side. They are held out together, in the order of a hash, if they still fit into
    the share. So with many identical documents the held-out set can be smaller than the share; it is larger only if
    each distinct document alone exceeds the share, and then it is the one with the fewest copies.

    Args:
        scan: the scan of the documents.
        heldout: share of the documents to hold out, rounded up; 0 holds none out.
        max_bytes: most bytes of text, in complete documents in the order of a hash without seed; at least one document.
        seed: determines which documents are held out.
        name: name of the source, for messages.
        unit: noun for one document, for messages.

    Raises:
        UserError: documents have to be held out and none would be left to train on.
    """
    sides = assign_all(scan, TRAIN)
    if max_bytes is not None:
        used = np.flatnonzero(sides == TRAIN)
        # The order does not depend on the seed: another split keeps the same documents.
        # A larger budget only adds documents to those of a smaller one.
        used = used[np.argsort(mix64(scan.digests[used], key64("max_bytes")), kind="stable")]
        # Number of documents whose cumulative size is at most `max_bytes`.
        fits = int(np.searchsorted(np.cumsum(scan.sizes[used]), max_bytes, side="right"))
        sides[used[max(1, fits) :]] = UNUSED
    if heldout > 0:
        used = np.flatnonzero(sides == TRAIN)
        sides[used[_held_out(scan.digests[used], heldout, seed)]] = HELDOUT
        if not (sides == HELDOUT).any():
            number = f"one {unit}" if len(used) == 1 else f"{len(used)} {unit}s, all of them equal"
            files = (
                " (a text file is one document, unless document_separator is set and in it)"
                if unit == "document"
                else ""
            )
            budget = "" if max_bytes is None else f" within max_bytes = {max_bytes}"
            raise UserError(
                f"{name}: nothing can be held out of {number}{budget}; set data.heldout to 0, name held-out files in "
                f"data.validation, or give more {unit}s{files}"
            )
    return sides


def _held_out(digests: npt.NDArray[np.uint64], share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return the documents to hold out: groups of identical ones, in hash order, each if it still fits."""
    # Hash each distinct content once: copies of a document share its position in the order.
    groups, members, counts = np.unique(digests, return_inverse=True, return_counts=True)
    target = math.ceil(share * len(digests))
    order = np.argsort(mix64(groups, key64("heldout", seed)), kind="stable")
    if len(groups) == 1:
        return np.zeros(len(digests), dtype=bool)
    chosen = np.zeros(len(groups), dtype=bool)
    # Leave at least the smallest group for training.
    remaining = min(target, len(digests) - int(counts.min()))
    # greedy: a group of identical documents that is too large for the remaining share is skipped
    for group in order:
        if counts[group] <= remaining:
            chosen[group] = True
            remaining -= int(counts[group])
            if remaining == 0:
                break
    # every group exceeds the share: hold out the smallest one
    if not chosen.any():
        chosen[order[np.argmin(counts[order])]] = True
    # (groups,) -> (documents,)
    return chosen[members]


def split_document(source: Source, scan: Scan, sides: Sides, share: float) -> tuple[Source, Source] | None:
    """Return the beginning and the end of the only document in use; None if there are more, or it is too short.

    Args:
        source: plain text.
        scan: the scan of its documents.
        sides: which documents are used.
        share: share of the document's bytes to put into the end, rounded up.
    """
    used = np.flatnonzero(sides == TRAIN)
    if len(used) != 1:
        return None
    document, size = int(used[0]), int(scan.sizes[used[0]])
    # `sizes` counts bytes of UTF-8, so `cut` is a byte position.
    cut = size - math.ceil(share * size)
    if not 0 < cut < size:
        return None
    return _Part(source, document, size, cut, is_end=False), _Part(source, document, size, cut, is_end=True)


class _Part(Source):
    """One side of a document that is split in two, at the end of a line or a word if one is near."""

    remedy = "; give more text, another share in data.heldout, or held-out files in data.validation"

    def __init__(self, source: Source, document: int, size: int, cut: int, *, is_end: bool) -> None:
        self.name = f"{source.name} ({'the end' if is_end else 'without its end'})"
        self.size = size - cut if is_end else cut
        self._source, self._document, self._cut, self._is_end = source, document, cut, is_end
        # Look for the end of a line or word within a tenth of the held-out part.
        self._near = (size - cut) // 10

    def stamp(self) -> Any:
        return ["part", self._source.stamp(), self._document, self._cut, self._is_end]

    def pieces(self) -> Iterator[Piece]:
        document = position = 0
        for piece in self._source.pieces():
            if document == self._document:
                # Both parts compute the same index in each piece, so the text has no gap or overlap between them.
                index = self._cut_index(piece.text, self._cut - position)
                position += len(piece.text.encode())
                text = piece.text[index:] if self._is_end else piece.text[:index]
                yield replace(piece, text=text, last=piece.last)
            document += piece.last

    def _cut_index(self, text: str, remaining: int) -> int:
        """Return the index in a piece at which the document is split, `remaining` bytes after the piece begins."""
        # errors="ignore" drops a character that the byte position splits.
        index = len(text.encode()[: max(0, remaining)].decode(errors="ignore"))
        # The cut is before or after this piece.
        if not 0 < index < len(text):
            return index
        # Prefer a newline to a space, even a more distant one.
        for mark in "\n ":
            before = text.rfind(mark, max(0, index - self._near), index) + 1
            after = text.find(mark, index, index + self._near) + 1
            if candidates := [each for each in (before, after) if 0 < each < len(text)]:
                return min(candidates, key=lambda each: abs(each - index))
        return index
