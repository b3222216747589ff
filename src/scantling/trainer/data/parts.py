"""Beginning and end of a document, for data with only one document, whose end is held out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from scantling.trainer.data.documents import Piece, Scan, Source
from scantling.trainer.data.split import TRAIN, Sides


def halves(source: Source, found: Scan, sides: Sides, share: float) -> tuple[Source, Source] | None:
    """Return the beginning and the end of the only document in use; None if there are more, or it is too short.

    Args:
        source: plain text.
        found: the scan of its documents.
        sides: which documents are used.
        share: share of the document's bytes to put into the end, rounded up.
    """
    used = np.flatnonzero(sides == TRAIN)
    if len(used) != 1:
        return None
    document, size = int(used[0]), int(found.sizes[used[0]])
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
        self._near = (size - cut) // 10

    def stamp(self) -> Any:
        return ["part", self._source.stamp(), self._document, self._cut, self._is_end]

    def pieces(self) -> Iterator[Piece]:
        document = position = 0
        for piece in self._source.pieces():
            if document == self._document:
                place = self._cut_index(piece.text, self._cut - position)
                position += len(piece.text.encode())
                text = piece.text[place:] if self._is_end else piece.text[:place]
                yield replace(piece, text=text, last=piece.last)
            document += piece.last

    def _cut_index(self, text: str, left: int) -> int:
        """Return the index in a piece at which the document is split, `left` bytes after the piece begins."""
        place = len(text.encode()[: max(0, left)].decode(errors="ignore"))
        if not 0 < place < len(text):
            return place
        for mark in "\n ":
            before = text.rfind(mark, max(0, place - self._near), place) + 1
            after = text.find(mark, place, place + self._near) + 1
            if places := [each for each in (before, after) if 0 < each < len(text)]:
                return min(places, key=lambda each: abs(each - place))
        return place
