"""Find the processes that see the same run directory; without a shared file system, each machine has its own."""

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
    """Return the path given to the first process of this machine, which all processes of the machine use.

    Without a path on this machine, use the first path given to any process; None without any. Collectives: two
    all-gathers.
    """
    paths = context.all_gather_object(
        [None if path is None else str(path), None if path is None else os.path.abspath(path)]
    )
    local = local_rank_from_env()
    first = context.rank - local
    # torchrun numbers the ranks of a machine consecutively; the host name confirms it
    if local and first >= 0 and context.hosts and context.hosts[first] == context.hosts[context.rank]:
        name, absolute = paths[first]
    else:
        name, absolute = paths[context.rank]
    if name is None:
        name = next((other for other, _ in paths if other is not None), None)
        return None if name is None else Path(name)
    # keep a relative path if it means the same folder from this process's working folder
    return Path(name) if os.path.abspath(name) == absolute else Path(absolute)


def detect_shared_folders(path: Path, context: DistContext) -> DistContext:
    """Find the ranks that see the same folder and return the context with `writers`.

    Each rank creates a file in the folder, or in the nearest existing parent, and looks for the files of the others. It
    checks names without listing the folder, because listings of a network file system can be outdated.

    Args:
        path: the folder on this rank; it may be missing, and no rank may create it meanwhile.
        context: context of this process.

    Raises:
        UserError: a rank cannot write there.
    """
    if context.world_size == 1:
        return context
    missing_parts, writers = before = _find_writers(path, context)
    while len(set(writers)) > 1:  # another run may have created a parent between the checks of two ranks
        missing_parts, writers = _find_writers(path, context)
        if (missing_parts, writers) == before:
            break
        before = missing_parts, writers
    return replace(context, writers=writers)


def _find_writers(path: Path, context: DistContext) -> tuple[list[str], tuple[int, ...]]:
    """Return by rank the missing part of the path, and the lowest rank that sees the same folder."""
    # the folder may be missing: compare the nearest existing parent and the part below it
    parent = Path(os.path.realpath(path))
    while not parent.is_dir():
        parent = parent.parent
    missing = os.path.relpath(os.path.realpath(path), parent)
    # a new token per check, so that files left by a killed run cannot match
    token = context.broadcast_object(secrets.token_hex(8))
    marker = _marker_path(parent, token, context.rank)

    def write() -> None:
        try:
            # O_EXCL and O_NOFOLLOW: never open an existing file, never follow a link
            os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        except OSError as error:
            raise UserError(f"cannot write into the run directory {path}: {error.strerror or error}") from None

    try:
        context.run_on_all(write)
        # `run_on_all` is also a barrier: all markers exist before any rank looks for them
        missing_parts = context.all_gather_object(missing)
        first = next(
            rank
            for rank, other in enumerate(missing_parts)
            if other == missing and _marker_path(parent, token, rank).exists()
        )
        # after this gather all ranks have looked, so the markers can be removed
        firsts = context.all_gather_object(first)
    finally:
        with contextlib.suppress(OSError):
            marker.unlink()
    # the lowest visible rank may itself see a lower one. The chain ends, because each rank sees itself
    while firsts[first] != first:
        first = firsts[first]
    return missing_parts, tuple(context.all_gather_object(first))


def _marker_path(folder: Path, token: str, rank: int) -> Path:
    return folder / f".scantling-{token}-{rank}"


def describe_run_folders(path: Path, context: DistContext) -> str | None:
    """Describe which ranks write where; None if all see the same folder. Collectives: two all-gathers."""
    paths = context.all_gather_object(os.path.abspath(path))
    if not context.has_separate_folders:
        return None
    parts = [
        f"{', '.join(map(context.describe_rank, context.ranks_sharing(writer)))}: {paths[writer]}"
        for writer in sorted(set(context.writers))
    ]
    return f"the machines share no run directory; each keeps its own ({'; '.join(parts)})"
