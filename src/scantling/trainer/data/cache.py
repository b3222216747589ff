"""Cache on disk: entries are either complete or absent, and created once even if several processes need them.

An entry is a folder. It is written to a temporary folder, fsynced and renamed; `meta.json` stores the sizes of its
files. An entry whose files have other sizes is created again. A lock file per entry (`flock`) lets one process create
it while others wait. Processes on several machines either share the folder (on a file system with locks) or each have
their own.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from scantling.errors import UserError
from scantling.files import cache_root, fsync, remove_folder

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of everything in the cache; increase it when the content of entries changes."""


@dataclass(frozen=True)
class Entry:
    """A complete entry: its folder and the metadata that its maker returned."""

    path: Path
    meta: dict[str, Any]


class Cache:
    """Folder of entries by kind and key."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = cache_root() if root is None else root

    def get(self, kind: str, key: str, make: Callable[[Path], dict[str, Any]]) -> Entry:
        """Return the entry; create it if it is missing or incomplete.

        Args:
            kind: folder of the entry, such as "tokens".
            key: name of the entry; must cover everything that its content depends on.
            make: fills an empty folder and returns metadata as JSON values.

        Raises:
            UserError: the cache cannot be written, or whatever `make` raises.
        """
        path = self.root / kind / key
        # Complete entries never change, so readers need no lock.
        if (entry := _complete_entry(path)) is not None:
            return entry
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.parent / f"{key}.lock"):
                # Another process may have created the entry while this one waited: look again under the lock.
                return _complete_entry(path) or _make(path, make)
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> UserError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; free some space, or name"
        else:
            reason = f"{error.strerror or error}; name"
        return UserError(f"cannot write the data cache {self.root}: {reason} another folder in SCANTLING_CACHE")


def _complete_entry(path: Path) -> Entry | None:
    """Return the entry if it exists and each file has its recorded size."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if all((path / name).stat().st_size == size for name, size in meta["files"].items()):
            return Entry(path, meta)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    if path.exists():
        logger.warning("the cache entry %s is not whole and is made again", path)
    return None


def _make(path: Path, make: Callable[[Path], dict[str, Any]]) -> Entry:
    """Create and publish the entry. The caller holds its lock, so an existing entry is incomplete and is removed."""
    aside = path.with_name(f"{path.name}.tmp")
    # A killed process leaves the temporary folder behind; the lock proves that nobody uses it.
    for old in (aside, path):
        remove_folder(old)
    aside.mkdir()
    try:
        meta = make(aside)
        # List the files before `meta.json` exists, which would need to contain its own size.
        meta["files"] = {file.name: file.stat().st_size for file in sorted(aside.iterdir())}
        (aside / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        # Data reaches the disk before the name: a crash cannot leave a named entry with missing data.
        for file in [*aside.iterdir(), aside]:
            fsync(file)
        # Renaming is atomic; the fsync of the parent makes the new name durable.
        os.rename(aside, path)
        fsync(path.parent)
    except BaseException:
        # Also for KeyboardInterrupt: half an entry must not remain.
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Entry(path, meta)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel releases a `flock` of a killed process; a soft lock would remain.
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    # Try without waiting first, only to tell the user why nothing happens.
    try:
        acquired = lock.acquire(blocking=False)
    except Timeout:
        logger.info("waiting for another process that prepares %s", path.stem)
        acquired = lock.acquire()
    with acquired:
        yield
