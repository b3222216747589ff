"""SHA-256 checksums of the files in an exported folder, in the format of `sha256sum`.

Without this package, `sha256sum -c scantling.sha256` in the folder checks them.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path, PurePosixPath

from scantling.errors import UserError

CHECKSUMS = "scantling.sha256"


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder into it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    lines = [f"{_digest(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def check_checksums(folder: Path) -> None:
    """Check the files of a folder against its checksums, if it has any.

    Raises:
        UserError: a file is missing or differs, or the checksums cannot be read.
    """
    hint = f"write or copy the folder again; if the change is yours, delete {CHECKSUMS} in it"
    try:
        if (folder / CHECKSUMS).is_fifo():
            raise OSError("it is not a file")
        text = (folder / CHECKSUMS).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {folder / CHECKSUMS}: {error}; {hint}") from None
    for line in text.removesuffix("\n").split("\n"):
        match = re.fullmatch(r"([0-9a-f]{64})  ([^\0]+)", line)
        # the checksums may come from elsewhere: never read a file outside of the folder
        if match is None or PurePosixPath(match[2]).is_absolute() or ".." in PurePosixPath(match[2]).parts:
            raise UserError(f"{folder / CHECKSUMS} is damaged: {line[:80]!r} is not a line of sha256sum; {hint}")
        path = folder / match[2]
        try:
            digest = _digest(path)
        except OSError as error:
            problem = error.strerror or error
            raise UserError(f"cannot read {path}, which {CHECKSUMS} lists ({problem}); {hint}") from None
        if digest != match[1]:
            raise UserError(f"{path} is damaged or was changed: it differs from its checksum in {CHECKSUMS}; {hint}")


def _digest(path: Path) -> str:
    if path.exists() and not path.is_file():  # reading a pipe would block forever
        raise OSError("it is not a file")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
