"""Environment variables that torchrun sets for its processes; without them, there is one process."""

from __future__ import annotations

import os

from scantling.errors import UserError


def world_size_from_env() -> int:
    """Return the number of processes in the job."""
    return _number("WORLD_SIZE", 1)


def rank_from_env() -> int:
    """Return the rank of this process."""
    return _number("RANK", 0)


def local_rank_from_env() -> int:
    """Return the rank of this process on its machine."""
    return _number("LOCAL_RANK", 0)


def local_world_size_from_env() -> int:
    """Return the number of processes on this machine."""
    return _number("LOCAL_WORLD_SIZE", world_size_from_env())


def require_single_process(command: str, why: str = "is the work of one process") -> None:
    """Raise a UserError in one of several processes."""
    if (count := world_size_from_env()) > 1:
        raise UserError(f"{command} {why}; given {count} processes by torchrun")


def _number(name: str, alone: int) -> int:
    given = os.environ.get(name) or str(alone)
    if not given.isdecimal():
        raise UserError(f"{name} is set by torchrun to a number; the environment has '{given}'")
    return int(given)
