"""Find the processes that see the same run directory. Machines without a shared file system have one each."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import replace
from pathlib import Path

from scantling.distributed.context import Place
from scantling.errors import UserError
from scantling.torchrun_env import launched_local_rank


def machine_path(path: Path | None, place: Place) -> Path | None:
    """Return the path that the first process of this machine was given; its other processes use it too.

    Without a path on this machine it is the first that any process was given; None if there is none. Collective: a
    gather.
    """
    given = place.gather([None if path is None else str(path), None if path is None else os.path.abspath(path)])
    local = launched_local_rank()
    first = place.rank - local
    if local and first >= 0 and place.hosts and place.hosts[first] == place.hosts[place.rank]:
        name, absolute = given[first]
    else:
        name, absolute = given[place.rank]
    if name is None:
        name = next((other for other, _ in given if other is not None), None)
        return None if name is None else Path(name)
    return Path(name) if os.path.abspath(name) == absolute else Path(absolute)


def see_folders(path: Path, place: Place) -> Place:
    """Find out which ranks see the same folder, and return the place with it.

    Each rank makes a file of its own in the folder, or in the nearest parent that exists, and looks for those of the
    others. It looks for names and lists nothing, because lists of a network file system can be old.

    Args:
        path: the folder on this rank; it need not exist, and no rank may make it meanwhile.
        place: of this process.

    Raises:
        UserError: a rank cannot write there.
    """
    if place.world_size == 1:
        return place
    rests, writers = before = _find_writers(path, place)
    while len(set(writers)) > 1:  # another run may have made a parent between the looks of two ranks
        rests, writers = _find_writers(path, place)
        if (rests, writers) == before:
            break
        before = rests, writers
    return replace(place, writers=writers)


def _find_writers(path: Path, place: Place) -> tuple[list[str], tuple[int, ...]]:
    """Return by rank what is missing of the path there, and the lowest rank that sees the same folder."""
    parent = Path(os.path.realpath(path))
    while not parent.is_dir():
        parent = parent.parent
    rest = os.path.relpath(os.path.realpath(path), parent)
    token = place.share(secrets.token_hex(8))
    own = _mark(parent, token, place.rank)

    def write() -> None:
        try:
            os.close(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        except OSError as error:
            raise UserError(f"cannot write into the run directory {path}: {error.strerror or error}") from None

    try:
        place.attempt(write)
        rests = place.gather(rest)
        first = next(rank for rank, other in enumerate(rests) if other == rest and _mark(parent, token, rank).exists())
        firsts = place.gather(first)
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    while firsts[first] != first:
        first = firsts[first]
    return rests, tuple(place.gather(first))


def _mark(folder: Path, token: str, rank: int) -> Path:
    return folder / f".scantling-{token}-{rank}"


def describe_folders(path: Path, place: Place) -> str | None:
    """Return in words which ranks write where, or None if all see the same folder. Collective: a gather."""
    paths = place.gather(os.path.abspath(path))
    if not place.is_split:
        return None
    parts = [
        f"{', '.join(map(place.name, place.ranks_of(writer)))}: {paths[writer]}"
        for writer in sorted(set(place.writers))
    ]
    return f"the processes share no run directory; each machine keeps its own ({'; '.join(parts)})"
