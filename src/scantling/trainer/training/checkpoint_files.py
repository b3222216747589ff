"""Publish and remove checkpoint folders. Files of other programs stay; links are unlinked, never followed."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from scantling.trainer.training.checkpoint_index import INDEX, METADATA
from scantling.trainer.training.checkpoint_manifest import MANIFEST

# no leading zeros, so that each step has one name
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
_TORN = re.compile(_STEP.pattern + r"\.tmp")
# DCP leaves `.metadata.tmp` if it is killed while it writes its index
_DATA = re.compile(rf"{re.escape(METADATA)}(\.tmp)?|__[0-9]+_[0-9]+\.distcp")
_SUBFOLDER = re.compile(r"(rank|part)-[0-9]+")


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of our checkpoints in a folder, newest first, damaged ones included."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return sorted((int(match[1]) for match, path in found if _is_checkpoint(path)), reverse=True)


def _is_checkpoint(path: Path) -> bool:
    """True for a folder with a manifest or an index, damaged or not; other programs write `step-N` folders too."""
    return path.is_dir() and any((path / name).is_file() for name in (MANIFEST, INDEX))


def remove_checkpoint(path: Path) -> None:
    """Remove our files of one checkpoint, and its folder unless it holds other files. A link is only unlinked.

    Raises:
        OSError: a file cannot be removed.
    """
    if path.is_symlink():
        path.unlink()
        return
    for file in _own_files(path):
        if file.is_dir() and not file.is_symlink():
            remove_checkpoint(file)
        else:
            file.unlink()
    with contextlib.suppress(OSError):  # it holds other files
        path.rmdir()


def remove_torn(folder: Path) -> None:
    """Remove unfinished checkpoints from a folder."""
    for path in folder.iterdir():
        if _TORN.fullmatch(path.name) and path.is_dir():
            remove_checkpoint(path)


def remove_all(folder: Path) -> None:
    """Remove all checkpoints in a folder, unfinished ones included, and the folder unless it holds other files."""
    remove_torn(folder)
    for step in checkpoint_steps(folder):
        remove_checkpoint(folder / f"step-{step}")
    with contextlib.suppress(OSError):
        folder.rmdir()


def publish(aside: Path, target: Path) -> None:
    """Rename a finished checkpoint to `target`, which it replaces; files of other programs in the folder stay.

    Raises:
        RuntimeError: a file or folder of another program has the name.
        OSError: a file cannot be removed or renamed.
    """
    # a folder cannot be renamed onto a non-empty one: remove the old checkpoint of this step first
    if target.is_symlink() or _is_checkpoint(target):
        remove_checkpoint(target)
    if target.exists():
        if not target.is_dir() or any(_own_files(target)):
            raise RuntimeError(f"{target} was not written by this program; move it elsewhere")
        # keep files of other programs in the folder
        for path in target.iterdir():
            os.rename(path, aside / path.name)
        target.rmdir()
    # the rename is atomic: `target` appears complete or not at all
    os.rename(aside, target)


def _own_files(path: Path) -> list[Path]:
    """List our files in a checkpoint folder, the manifest first and the index last.

    In this order an interrupted removal leaves a checkpoint that is visibly damaged, but still known as ours.
    """
    names = sorted(file.name for file in path.iterdir())
    data = [name for name in names if _DATA.fullmatch(name) or (_SUBFOLDER.fullmatch(name) and (path / name).is_dir())]
    return [path / name for name in (MANIFEST, *data, INDEX) if name in names]
