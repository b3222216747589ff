"""Prepare documents: tokenize them, store them on disk, and split them into training and held-out documents."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scantling.errors import UserError, with_hint
from scantling.trainer.data.bpe import train_bpe
from scantling.trainer.data.cache import FORMAT, Cache
from scantling.trainer.data.documents import Piece, Scan, Source, scan
from scantling.trainer.data.files import refuse_changed
from scantling.trainer.data.hashing import fingerprint, fingerprint_array
from scantling.trainer.data.progress import NoProgress, Progress
from scantling.trainer.data.sources import training_source, validation_source
from scantling.trainer.data.split import HELDOUT, TRAIN, UNUSED, Sides, assign_all, split, split_document
from scantling.trainer.data.store import NO_MARKS, Marks, StoreWriter, TokenStore, open_store
from scantling.trainer.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from scantling.trainer.recipe.schema import BpeTokenizer, DataSection

logger = logging.getLogger(__name__)

ENCODE_CHARS = 1 << 20
ENCODE_PIECES = 4096
"""Most characters and most pieces that are tokenized at a time."""
NAMES = {TRAIN: "train", HELDOUT: "heldout"}


@dataclass(frozen=True)
class Prepared:
    """Tokenized data.

    Attributes:
        tokenizer: the tokenizer of the ids.
        train: the training documents.
        heldout: the held-out documents, or None.
        labels: the label set in the order of the ids, for labeled documents.
        info: facts for the run's records.
    """

    tokenizer: Tokenizer
    train: TokenStore
    heldout: TokenStore | None
    labels: list[str] | None
    info: dict[str, Any]


def prepare(
    section: DataSection,
    *,
    seed: int,
    pairs: bool = False,
    labeled: bool = True,
    needs: tuple[str, tuple[str, ...]] = ("", ()),
    wrap: bool = False,
    cache: Cache | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Read, split and tokenize; reuse cached results.

    Several processes may call this concurrently: one does the work, the others wait for it.

    Args:
        section: the recipe's data section.
        seed: determines which documents are held out.
        pairs: keep documents separate, each with its second text if it has one; otherwise they form a stream.
        labeled: True if documents that are kept separate have labels.
        needs: a task's name and the special tokens it needs.
        wrap: special tokens are put around windows of the stream or around each text, not around each document of the
            stream; for built-in tokenizers see `finish_backend`.
        cache: stores results. Default: the user's cache.
        progress: receives the progress of long work.

    Raises:
        UserError: the documents, the tokenizer or the cache cannot be used.
    """
    cache, progress = cache or Cache(), progress or NoProgress()
    source, held_source = training_source(section), validation_source(section)
    scan_result = scan(source, cache, progress)
    share, max_bytes, held_by = 0.0 if held_source is not None else section.heldout, section.max_bytes, "files"
    # A stream of one document cannot be split by document: hold out its end instead.
    if share and not pairs:
        used = split(scan_result, heldout=0.0, max_bytes=max_bytes, seed=seed, name=source.name)
        if (parts := split_document(source, scan_result, used, share)) is not None:
            (source, held_source), share, max_bytes, held_by = parts, 0.0, None, "end of the document"
            # Scan again: sizes and digests are now those of the document without its end.
            scan_result = scan(source, cache, progress)
    sides = split(scan_result, heldout=share, max_bytes=max_bytes, seed=seed, name=source.name)
    # Check the labels before the tokenizer is trained and applied, which takes much longer.
    labels = label_set(section, scan_result, sides, source.name) if pairs and labeled else [] if pairs else None
    tokenizer = _tokenizer(section, source, scan_result, sides, cache, progress, wrap=wrap)
    tokenizer.require(needs[0], *needs[1])
    marks = NO_MARKS if pairs else window_marks(tokenizer) if wrap else document_marks(tokenizer)
    # Without marks, documents would run into each other in the stream.
    if not pairs and marks == NO_MARKS:
        tokenizer.require("packing documents", "eos")
    maker = _Maker(tokenizer, labels, marks, cache, progress)
    entry, meta = maker.entry(source, scan_result, sides)
    train = open_store(entry, "train", meta)
    heldout = open_store(entry, "heldout", meta) if (sides == HELDOUT).any() else None
    content, num_seen = entry.name, 0
    if held_source is not None:
        held_scan = scan(held_source, cache, progress)
        check_labels(labels, held_scan, held_source.name)
        held_entry, held_meta = maker.entry(held_source, held_scan, assign_all(held_scan, HELDOUT))
        heldout = open_store(held_entry, "heldout", held_meta)
        content = fingerprint([entry.name, held_entry.name])
        # Equal digests mean equal documents, so texts need not be compared.
        num_seen = int(np.isin(held_scan.digests[held_scan.sizes > 0], scan_result.digests[sides == TRAIN]).sum())
        if num_seen:
            logger.warning(
                "%d of %d held-out documents are also among the training documents", num_seen, heldout.num_documents
            )
    info = {
        "source": source.name,
        "train": train.counts(),
        "heldout": None if heldout is None else heldout.counts(),
        "heldout_by": None if heldout is None else held_by if held_source is not None else "document",
        "heldout_seen": num_seen,
        "tokenizer": {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint},
        "cache": str(entry),
        "fingerprint": content,
    }
    return Prepared(tokenizer, train, heldout, labels or None, info)


def _tokenizer(
    section: DataSection,
    source: Source,
    scan_result: Scan,
    sides: Sides,
    cache: Cache,
    progress: Progress,
    *,
    wrap: bool,
) -> Tokenizer:
    if isinstance(section.tokenizer, BpeTokenizer):
        return train_bpe(section.tokenizer.bpe, source, scan_result, sides, cache, progress, wrap=wrap)
    return ByteTokenizer(wrap=wrap) if section.tokenizer == "bytes" else load_tokenizer(section.tokenizer)


def label_set(section: DataSection, scan_result: Scan, sides: Sides, name: str) -> list[str]:
    """Return the labels in the order of their ids: as given, or the sorted labels of the training documents.

    Raises:
        UserError: a document in use has a label outside the set, or there are fewer than two labels.
    """
    if section.labels is not None:
        labels = section.labels
        for number, label in enumerate(labels):
            if label in labels[:number]:
                raise UserError(f"data.labels: '{label}' is given twice")
        check_labels(labels, scan_result, name)
    else:
        used = np.unique(scan_result.labels[sides == TRAIN])
        labels = [scan_result.label_names[index] for index in used if index >= 0]
        # Labels that are all integers sort by value: 10 follows 9.
        numbers = all(label.removeprefix("-").isascii() and label.removeprefix("-").isdigit() for label in labels)
        labels.sort(key=int if numbers else None)
        held = np.unique(scan_result.labels[sides == HELDOUT])
        check_labels(labels, scan_result, name, held, "occurs only in held-out documents")
    if len(labels) < 2:
        raise UserError(f"{name}: classification needs two or more labels; given {', '.join(labels) or 'none'}")
    return labels


def check_labels(
    labels: list[str] | None, scan_result: Scan, name: str, which: Any = None, problem: str = "is not in the label set"
) -> None:
    """Raise if a label is outside the set, with the location of the first one."""
    if labels is None:
        return
    for index in range(len(scan_result.label_names)) if which is None else which:
        label = scan_result.label_names[index]
        if label not in labels:
            allowed = ", ".join(labels[:20]) + (", ..." if len(labels) > 20 else "")
            text = f"{scan_result.label_places[index] or name}: the label '{label}' {problem}; allowed: {allowed}"
            hint = with_hint(text, label, labels)
            raise UserError(f"{text}; list all labels in data.labels" if hint == text and which is not None else hint)


@dataclass(frozen=True)
class _Maker:
    """Maker of tokenized entries: a stream if `labels` is None, unlabeled pairs if empty, else labeled documents."""

    tokenizer: Tokenizer
    labels: list[str] | None
    marks: Marks
    cache: Cache
    progress: Progress

    def entry(self, source: Source, scan_result: Scan, sides: Sides) -> tuple[Path, dict[str, Any]]:
        # The key covers content, split, tokenizer, labels and marks, but not paths: moved files reuse the entry.
        sources = [scan_result.content, fingerprint_array(sides), self.tokenizer.fingerprint]
        facts = ["tokens", FORMAT, *sources, self.labels, astuple(self.marks)]
        entry = self.cache.get(
            "tokens", fingerprint(facts), lambda folder: self._write(source, scan_result, sides, folder)
        )
        return entry.path, entry.meta

    def _write(self, source: Source, scan_result: Scan, sides: Sides, folder: Path) -> dict[str, Any]:
        # Ids below 2^16 fit into two bytes, which halves the disk space.
        dtype = "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"
        pairs = self.labels is not None
        label_ids = {label: number for number, label in enumerate(self.labels or [])}
        present = [side for side in (TRAIN, HELDOUT) if (sides == side).any()]
        self.progress.start(f"tokenizing {source.name}", int(scan_result.sizes[sides != UNUSED].sum()))
        with ExitStack() as stack:
            writers = {
                side: stack.enter_context(StoreWriter(folder, NAMES[side], dtype, pairs=pairs, marks=self.marks))
                for side in present
            }
            stack.callback(self.progress.finish)
            for batch in _batches(source, sides):
                self._encode(batch, writers, sides, label_ids)
                self.progress.advance(sum(len((piece.text + (piece.pair or "")).encode()) for _, piece in batch))
        # The files may have changed while they were read: check before the entry is published.
        refuse_changed(source.name, scan_result.stamp, source.stamp())
        sizes = {NAMES[side]: int(scan_result.sizes[sides == side].sum()) for side in (TRAIN, HELDOUT)}
        return {"dtype": dtype, "pairs": pairs, "bytes": sizes}

    def _encode(
        self,
        batch: list[tuple[int, Piece]],
        writers: dict[int, StoreWriter],
        sides: Sides,
        label_ids: dict[str, int],
    ) -> None:
        # One call for first and second texts, so that the library can encode all of them in parallel.
        texts = [piece.text for _, piece in batch]
        seconds = [piece.pair for _, piece in batch if piece.pair is not None]
        ids = self.tokenizer.encode_batch([*texts, *seconds])
        pair_ids = iter(ids[len(texts) :])
        # `ids` continues with the second texts: stop at the end of the batch.
        for (document, piece), text_ids in zip(batch, ids, strict=False):
            writer = writers[int(sides[document])]
            if self.labels is None:
                writer.add_text(text_ids, last=piece.last)
            else:
                second = None if piece.pair is None else next(pair_ids)
                writer.add_pair(text_ids, second, -1 if piece.label is None else label_ids[piece.label])


def document_marks(tokenizer: Tokenizer) -> Marks:
    """Return the ids around documents in a stream read from its beginning: those the tokenizer adds to a text.

    If the tokenizer adds none, end-of-text (or its separator) follows each document. If documents have no beginning
    token, the stream starts with an end token, so that every token of text has a predecessor.
    """
    begin, end = tokenizer.document.parts
    end = end if begin or end else _separator(tokenizer)
    given = {*begin} - {*end, tokenizer.eos_id}  # a beginning that is end-of-text also ends the previous document
    return Marks(begin or end[-1:], begin, end, tuple(sorted(given)))


def window_marks(tokenizer: Tokenizer) -> Marks:
    """Return the ids between documents in a stream of windows; the tokenizer adds its tokens to each window.

    They are the ids that the tokenizer adds after a text, or else end-of-text or the separator.
    """
    begin, end = tokenizer.document.parts
    return Marks(begin=end or _separator(tokenizer) or begin)


def _separator(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the id between documents: end-of-text, or the separator of tokenizers without one, or nothing."""
    id_ = tokenizer.sep_id if tokenizer.eos_id is None else tokenizer.eos_id
    return () if id_ is None else (id_,)


def _batches(source: Source, sides: Sides) -> Iterator[list[tuple[int, Piece]]]:
    """Yield batches of pieces of used documents, each with its document's index."""
    batch: list[tuple[int, Piece]] = []
    chars = document = 0
    for piece in source.pieces():
        # More documents than the scan has seen: make the numbers differ, for the error below.
        if document == len(sides):
            document += 1
            break
        if sides[document] != UNUSED:
            batch.append((document, piece))
            chars += len(piece.text) + len(piece.pair or "")
        # Only the last piece of a document moves on to the next document.
        document += piece.last
        if chars >= ENCODE_CHARS or len(batch) >= ENCODE_PIECES:
            yield batch
            batch, chars = [], 0
    if document != len(sides):
        raise UserError(f"{source.name} changed while it was read; run again")
    if batch:
        yield batch
