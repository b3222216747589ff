"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scantling.errors import RunError


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Write a text file aside, fsync it, and give it its name.

    Raises:
        RunError: it cannot be written; what was there before is left.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror or error}") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write strict JSON, in which NaN and Inf have no place."""
    write_whole(path, json.dumps(content, indent=2, allow_nan=False, default=str) + "\n")
