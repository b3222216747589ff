"""Flat files of token ids from another tokenization pipeline, memory-mapped without conversion."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scantling.errors import UserError
from scantling.trainer.data.cache import FORMAT, Cache
from scantling.trainer.data.files import ENDINGS, expand, file_stamp, refuse_changed
from scantling.trainer.data.hashing import fingerprint
from scantling.trainer.data.progress import NoProgress, Progress
from scantling.trainer.data.store import MappedArray
from scantling.trainer.recipe.schema import DataSection

CHUNK = 1 << 24
"""Tokens read at a time."""


def open_bins(section: DataSection, *, seq_len: int) -> tuple[list[MappedArray], list[MappedArray], str | None]:
    """Return the training and the held-out streams, and how they were separated ("files", "window" or None).

    A file that is named twice counts once.

    Document boundaries are unknown, so without `validation` files the end of the last file is held out, starting at a
    window boundary.

    Raises:
        UserError: a file is missing, empty or not a whole number of ids, or nothing would be left to train on.
    """
    if section.bin is None:
        raise AssertionError("called for bin sources only")
    train = _map(expand(section.bin, "data.bin", ENDINGS["bin"]), section.bin_dtype)
    if section.validation is not None:
        return train, _map(expand(section.validation, "data.validation", ENDINGS["bin"]), section.bin_dtype), "files"
    if section.heldout == 0:
        return train, [], None
    windows = sum(len(stream) // seq_len for stream in train)
    last = train[-1]
    held = max(1, round(section.heldout * windows)) * seq_len
    begin = (len(last) - held) // seq_len * seq_len
    # A single file must keep tokens to train on; of several files, all of the last one may be held out.
    if begin <= 0 and (len(train) == 1 or held > len(last)):
        raise UserError(
            f"data.bin: cannot hold {held} tokens out of the last file, which has {len(last)}; name held-out files in "
            "data.validation, or set data.heldout to 0"
        )
    begin = max(0, begin)
    heldout = MappedArray(last.path, section.bin_dtype, begin)
    kept = [MappedArray(last.path, section.bin_dtype, 0, begin)] if begin else []
    return train[:-1] + kept, [heldout], "window"


def _map(paths: Sequence[Path], dtype: str) -> list[MappedArray]:
    width = 2 if dtype == "uint16" else 4
    paths = list({path.resolve(): path for path in paths}.values())
    for path in paths:
        size = path.stat().st_size
        if size == 0 or size % width:
            problem = "is empty" if size == 0 else f"has {size} bytes, no whole number of {dtype} ids"
            raise UserError(f"data.bin: {path} {problem}; see data.bin_dtype")
    return [MappedArray(path, dtype) for path in paths]


def read_through(
    streams: Sequence[MappedArray], cache: Cache | None = None, progress: Progress | None = None
) -> tuple[int, str]:
    """Return the largest id in the files, and a fingerprint of the streams; cached until a file changes."""
    cache, progress = cache or Cache(), progress or NoProgress()
    largest, contents = 0, dict[Path, str]()
    for path in dict.fromkeys(stream.path for stream in streams):
        dtype = next(stream.dtype for stream in streams if stream.path == path)
        stamp = file_stamp(path)
        key = fingerprint(["bin with content", FORMAT, stamp, dtype.name])
        meta = cache.get("scans", key, partial(_content_stats, path, dtype, stamp, progress)).meta
        largest, contents[path] = max(largest, meta["largest"]), meta["content"]
    parts = [[contents[stream.path], stream.start, len(stream)] for stream in streams]
    return largest, fingerprint(["bin", parts])


def _content_stats(path: Path, dtype: Any, stamp: Any, progress: Progress, _: Path) -> dict[str, Any]:
    """Return the cached facts of one file."""
    ids, largest, digest = MappedArray(path, dtype.name), 0, hashlib.blake2b(digest_size=16)
    progress.start(f"reading {path}", path.stat().st_size)
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        largest = max(largest, int(part.max()))
        digest.update(part)
        progress.advance(part.nbytes)
    progress.finish()
    refuse_changed(str(path), stamp, file_stamp(path))
    return {"largest": largest, "content": digest.hexdigest()}
