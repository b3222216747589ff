"""Helpers of the language-model tasks: windows over token streams, pre-tokenized files and shared checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scantling.errors import UserError
from scantling.saved_models import MAX_TOKEN_ID
from scantling.trainer.data.bins import open_bins, read_through
from scantling.trainer.data.hashing import fingerprint
from scantling.trainer.data.loader import Collate
from scantling.trainer.data.packing import WindowDataset, training_windows
from scantling.trainer.data.prepare import Prepared, document_marks
from scantling.trainer.data.progress import Progress
from scantling.trainer.data.store import NO_MARKS, Marks
from scantling.trainer.data.tokenizers import Tokenizer, load_tokenizer
from scantling.trainer.recipe.schema import BpeTokenizer, DataSection
from scantling.trainer.tasks.base import TaskData


def refuse_pairs(data: DataSection, task: str) -> None:
    """Raise a UserError if the recipe names a second text, which a stream cannot hold."""
    if data.fields.pair is not None:
        raise UserError(f"data.fields.pair: has no meaning for the task '{task}'; given '{data.fields.pair}'")


def bin_tokenizer(data: DataSection) -> Tokenizer | None:
    """Return the tokenizer of `bin` files, or None: they hold ids, so the default `bytes` means no tokenizer."""
    if isinstance(data.tokenizer, BpeTokenizer):
        raise UserError("data.tokenizer: bin files hold ids already; name the tokenizer that made them")
    return None if data.tokenizer == "bytes" else load_tokenizer(data.tokenizer)


def build_windows(
    data: DataSection, train: Sequence[Any], heldout: Sequence[Any], *, length: int, stride: int
) -> tuple[WindowDataset, WindowDataset | None]:
    """Return windows over the training streams and over the held-out streams, which keep shorter last windows.

    Args:
        data: the recipe's section.
        train: the training streams.
        heldout: the held-out streams, or none.
        length: tokens in a window.
        stride: distance between windows.

    Raises:
        UserError: the training streams are shorter than one window.
    """
    held = WindowDataset(heldout, length=length, stride=stride, partial=True) if heldout else None
    return training_windows(train, length=length, stride=stride, seq_len=data.seq_len), held


def prepared_windows(
    data: DataSection, prepared: Prepared, *, length: int, stride: int
) -> tuple[WindowDataset, WindowDataset | None]:
    """Return `build_windows` the streams of prepared documents."""
    heldout = [] if prepared.heldout is None else [prepared.heldout.tokens]
    return build_windows(data, [prepared.train.tokens], heldout, length=length, stride=stride)


def bin_data(
    data: DataSection,
    *,
    length: int,
    stride: int,
    collate: Callable[[Marks], Collate],
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> TaskData:
    """Return the windows over `bin` files.

    Args:
        data: the recipe's section.
        length: tokens in a window.
        stride: distance between windows.
        collate: returns the collate function for the ids around documents; they are empty if the tokenizer is unknown.
        tokenizer: the tokenizer of the ids, if already loaded.
        progress: receives the progress of long work.

    Raises:
        UserError: the files cannot be used, or hold ids that the tokenizer does not have.
    """
    tokenizer = tokenizer or bin_tokenizer(data)
    marks = NO_MARKS if tokenizer is None else document_marks(tokenizer)
    if data.document_mask and not marks.first:
        raise UserError(
            "data.document_mask: where documents begin in bin files is known only by the special tokens around them; "
            "name the tokenizer that made them in data.tokenizer"
        )
    streams, held_streams, held_by = open_bins(data, seq_len=data.seq_len)
    largest, content = read_through([*streams, *held_streams], progress=progress)
    if tokenizer is None and largest >= MAX_TOKEN_ID:
        raise UserError(
            f"data.bin: the files hold the id {largest}, for which the model would need as many embeddings. Is "
            "data.bin_dtype right? If it is, name the tokenizer that made the files in data.tokenizer"
        )
    if tokenizer is not None and largest >= tokenizer.vocab_size:
        raise UserError(
            f"data.bin: the files hold the id {largest}; {tokenizer.name} has {tokenizer.vocab_size} ids. "
            "Is data.bin_dtype right, and the tokenizer the one that made them?"
        )
    info = {
        "source": "bin",
        "fingerprint": fingerprint([content, len(streams), None if tokenizer is None else tokenizer.fingerprint]),
        "train": {"tokens": sum(map(len, streams))},
        "heldout": {"tokens": sum(map(len, held_streams))} if held_streams else None,
        "heldout_by": held_by,
    }
    return TaskData(
        *build_windows(data, streams, held_streams, length=length, stride=stride),
        collate(marks),
        tokenizer,
        tokenizer.vocab_size if tokenizer else largest + 1,
        info=info,
    )
