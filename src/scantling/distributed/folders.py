"""Find the processes that see the same run directory. Machines without a shared file system have one each."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import replace
from pathlib import Path

from scantling.distributed.context import DistContext
from scantling.errors import UserError
from scantling.torchrun_env import local_rank_from_env


def resolve_machine_path(path: Path | None, context: DistContext) -> Path | None:
    """Return the path that the first process of this machine was given; its other processes use it too.

    Without a path on this machine it is the first that any process was given; None if there is none. Collective: a
    gather.
    """
    given = context.all_gather_object(
        [None if path is None else str(path), None if path is None else os.path.abspath(path)]
    )
    local = local_rank_from_env()
    first = context.rank - local
    if local and first >= 0 and context.hosts and context.hosts[first] == context.hosts[context.rank]:
        name, absolute = given[first]
    else:
        name, absolute = given[context.rank]
    if name is None:
        name = next((other for other, _ in given if other is not None), None)
        return None if name is None else Path(name)
    return Path(name) if os.path.abspath(name) == absolute else Path(absolute)


def detect_shared_folders(path: Path, context: DistContext) -> DistContext:
    """Find out which ranks see the same folder, and return the context with it.

    Each rank makes a file of its own in the folder, or in the nearest parent that exists, and looks for those of the
    others. It looks for names and lists nothing, because lists of a network file system can be old.

    Args:
        path: the folder on this rank; it need not exist, and no rank may make it meanwhile.
        context: of this process.

    Raises:
        UserError: a rank cannot write there.
    """
    if context.world_size == 1:
        return context
    rests, writers = before = _find_writers(path, context)
    while len(set(writers)) > 1:  # another run may have made a parent between the looks of two ranks
        rests, writers = _find_writers(path, context)
        if (rests, writers) == before:
            break
        before = rests, writers
    return replace(context, writers=writers)


def _find_writers(path: Path, context: DistContext) -> tuple[list[str], tuple[int, ...]]:
    """Return by rank what is missing of the path there, and the lowest rank that sees the same folder."""
    parent = Path(os.path.realpath(path))
    while not parent.is_dir():
        parent = parent.parent
    rest = os.path.relpath(os.path.realpath(path), parent)
    token = context.broadcast_object(secrets.token_hex(8))
    own = _mark(parent, token, context.rank)

    def write() -> None:
        try:
            os.close(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        except OSError as error:
            raise UserError(f"cannot write into the run directory {path}: {error.strerror or error}") from None

    try:
        context.run_on_all(write)
        rests = context.all_gather_object(rest)
        first = next(rank for rank, other in enumerate(rests) if other == rest and _mark(parent, token, rank).exists())
        firsts = context.all_gather_object(first)
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    while firsts[first] != first:
        first = firsts[first]
    return rests, tuple(context.all_gather_object(first))


def _mark(folder: Path, token: str, rank: int) -> Path:
    return folder / f".scantling-{token}-{rank}"


def describe_run_folders(path: Path, context: DistContext) -> str | None:
    """Return in words which ranks write where, or None if all see the same folder. Collective: a gather."""
    paths = context.all_gather_object(os.path.abspath(path))
    if not context.has_separate_folders:
        return None
    parts = [
        f"{', '.join(map(context.describe_rank, context.ranks_sharing(writer)))}: {paths[writer]}"
        for writer in sorted(set(context.writers))
    ]
    return f"the processes share no run directory; each machine keeps its own ({'; '.join(parts)})"
