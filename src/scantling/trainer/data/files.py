"""Text files: paths and globs, streamed decompression, UTF-8. Every fault is a `UserError` with its location."""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from scantling.errors import UserError, with_hint
from scantling.files import expand_path

CHUNK = 1 << 20
"""Bytes read at a time."""
MAX_LINE = 1 << 28
"""Longest line in characters; a longer one means that the file is not a text file with lines."""
ENDINGS = {
    "text": ("",),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv",),
    "parquet": (".parquet",),
    "bin": (".bin",),
}
"""Extensions of the files to take from a folder, by the kind of source."""
PACKED: dict[str, Callable[[Path, Literal["rb"]], object]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def expand(paths: str | Sequence[str], key: str, endings: Sequence[str] | None = None) -> list[Path]:
    """Return the files that paths, folders and globs name, sorted within each folder and glob, each file once.

    Args:
        paths: a path, folder or glob, or several.
        key: the recipe key they come from, for messages.
        endings: extensions of the files to take from a folder and its subfolders, before `.gz` and similar. Hidden
            files are skipped. None rejects folders.

    Raises:
        UserError: a file is missing, or a folder or glob has none.
    """
    expanded: list[Path] = []
    for given in [paths] if isinstance(paths, str) else paths:
        path = expand_path(given)
        if path.is_file():
            expanded.append(path)
        elif path.is_dir() and endings is not None:
            files = sorted(_files_in(path, (*endings,)))
            if not files:
                which = "" if "" in endings else f" that ends in {' or '.join(endings)}"
                raise UserError(f"{key}: there is no file in the folder {given}{which}; give files or a glob")
            expanded += files
        elif path.is_dir():
            raise UserError(f"{key}: {given} is a folder; give files or a glob, such as {path / '*'}")
        elif glob.has_magic(given):
            matches = sorted(glob.glob(str(path), recursive=True))
            files = [Path(match) for match in matches if Path(match).is_file()]
            if not files:
                raise UserError(f"{key}: no file matches {given}")
            expanded += files
        else:
            siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
            raise UserError(with_hint(f"{key}: file not found: {given}", path.name, siblings))
    # A file that several globs match counts once, at its first position.
    return list(dict.fromkeys(expanded))


def _files_in(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        # Changing the list stops `os.walk` from entering hidden folders.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            # a.txt.gz counts as a.txt
            plain = path.stem if path.suffix.lower() in PACKED else name
            if plain.lower().endswith(endings) and not name.startswith(".") and path.is_file():
                yield path


def file_stamp(path: Path) -> list[str | int]:
    """Return a value that changes when a file changes: path, size in bytes, modification time in nanoseconds."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]


def refuse_changed(name: str, before: Any, now: Any) -> None:
    """Raise if a source changed while it was read.

    Raises:
        UserError: the stamps differ.
    """
    if now != before:
        raise UserError(f"{name} changed while it was read; run again")


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed if its name ends in .gz, .xz or .bz2, about a megabyte at a time."""
    opener = PACKED.get(path.suffix.lower())
    try:
        with cast(BinaryIO, opener(path, "rb") if opener else path.open("rb")) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: corrupt {path.suffix[1:]} file: {error}") from None
    except OSError as error:
        # bz2 raises OSError without errno for corrupt data; errors of the system have one.
        packed = opener is not None and error.errno is None
        what = f"{path}: corrupt {path.suffix[1:]} file: {error}" if packed else f"cannot read {path}: {error.strerror}"
        raise UserError(what) from None


def read_text(path: Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file in parts of about a megabyte, without a byte-order mark.

    Raises:
        UserError: the file cannot be read or is not UTF-8; names the first invalid byte and its offset.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    # The incremental decoder keeps the bytes of a character that two chunks share.
    # The empty last chunk reports a character that the file does not complete.
    for chunk in chain(read_chunks(path), [b""]):
        # Offsets in the error start at the kept bytes, which came before this chunk.
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            offset = position - pending + error.start
            of = " of the decompressed text" if path.suffix.lower() in PACKED else ""
            raise UserError(
                f"{path}: not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset}{of}; "
                "convert the file to UTF-8, such as with iconv"
            ) from None
        if position == 0:
            text = text.removeprefix("\ufeff")
        position += len(chunk)
        if text:
            yield text


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, each with its newline."""
    parts: list[str] = []
    for text in read_text(path):
        head, newline, tail = text.partition("\n")
        # Join a line that spans several chunks only once, at its end.
        parts.append(head + newline)
        if sum(map(len, parts)) > MAX_LINE:
            raise UserError(f"{path}: a line is longer than {MAX_LINE} characters; is this the right kind of file?")
        if not newline:
            continue
        yield "".join(parts)
        lines = tail.split("\n")
        # The last part has no newline yet; it continues in the next chunk.
        parts = [lines.pop()]
        for line in lines:
            yield line + "\n"
    if last := "".join(parts):
        yield last
