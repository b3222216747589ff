"""Atomic writes of files and folders, and strict JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scantling.errors import RunError, UserError


def expand_path(path: str | Path) -> Path:
    """Expand `$VAR` and `~` as a shell does; unknown names, such as `~nobody`, stay unchanged."""
    return Path(os.path.expanduser(os.path.expandvars(path)))


def cache_root() -> Path:
    """Return `$SCANTLING_CACHE`, or `~/.cache/scantling`."""
    return expand_path(os.environ.get("SCANTLING_CACHE") or "~/.cache/scantling")


def fsync(path: Path) -> None:
    """Wait until the contents of a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def no_follow(path: str, flags: int) -> int:
    """Open a file but never through a link; for `open(..., opener=no_follow)`."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its contents, if it exists; of a link, only the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def write_atomic(path: Path, text: str) -> None:
    """Write a text file under a temporary name, fsync it, and rename it.

    Raises:
        RunError: it cannot be written; an existing file is unchanged.
    """
    aside = path.with_name(f"{path.name[:48]}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # never through an existing file or link
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:  # paths need not be UTF-8
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror or error}") from None


def replace_nonfinite(value: Any) -> Any:
    """Return the value with None instead of NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_nonfinite(inner) for key, inner in value.items()}
    return [replace_nonfinite(inner) for inner in value] if isinstance(value, list | tuple) else value


def read_json(path: Path) -> Any:
    """Read a JSON file from any source, including editors that write a byte-order mark.

    Raises:
        UserError: the file is missing or no regular file, or its JSON is invalid or cannot be read: nested too deeply,
            a number with thousands of digits, half of a surrogate pair. The message names the file.
    """
    try:
        if not path.is_file():
            path.stat()  # raises the reason, unless it is a folder, a pipe or a device
            raise UserError(f"cannot read {path}: it is not a file")
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        # a lone surrogate passes json.loads but cannot be written again: encoding finds it
        json.dumps(content, ensure_ascii=False).encode()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeEncodeError as error:
        raise UserError(f"{path} holds half of a surrogate pair, which is not a character: {error.reason}") from None
    except RecursionError:
        raise UserError(f"{path} is JSON that is nested too deeply to be read") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    return content


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        UserError: see `read_json`; or the file holds another type.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object; given {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write strict JSON, which has no NaN and no Inf."""
    write_atomic(path, json.dumps(content, indent=2, allow_nan=False, default=str) + "\n")


def check_new_folder(folder: Path) -> None:
    """Raise a UserError if a folder to write exists and is not empty, or is a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; give a folder that does not exist")


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it when its contents are on disk; an error removes it.

    Files get the permissions of the umask, also those of safetensors, which asks for fewer.

    Args:
        folder: final name; it must not exist or be empty.

    Raises:
        RunError: the folder cannot be written.
    """
    final = folder.resolve()
    aside = final.with_name(f".{final.name}.scantling")
    try:
        remove_folder(aside)  # left by a killed process
        aside.mkdir(parents=True)
        yield aside
        # The mode of the new folder follows the umask; without its x bits it is the mode of a new file.
        mode = aside.stat().st_mode & 0o666
        for path in aside.rglob("*"):
            if path.is_file():
                path.chmod(mode)
            fsync(path)
        # contents first, then the rename, then its entry in the parent: a crash leaves a whole folder or none
        fsync(aside)
        os.replace(aside, final)
        fsync(final.parent)
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror or error}") from None
    except Exception as error:
        number = re.search(r"\(os error ([0-9]+)\)", str(error))  # libraries in Rust: safetensors, tokenizers
        if number is None:
            raise
        raise RunError(f"cannot write {folder}: {os.strerror(int(number[1]))}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
