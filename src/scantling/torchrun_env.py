"""Ranks and sizes that torchrun sets in the environment of its processes; without torchrun, one process."""

from __future__ import annotations

import os

from scantling.errors import UserError


def world_size_from_env() -> int:
    """Return the number of processes of the run."""
    return _read_number("WORLD_SIZE", 1)


def rank_from_env() -> int:
    """Return the rank of this process."""
    return _read_number("RANK", 0)


def local_rank_from_env() -> int:
    """Return the rank of this process on its machine."""
    return _read_number("LOCAL_RANK", 0)


def local_world_size_from_env() -> int:
    """Return the number of processes on this machine."""
    return _read_number("LOCAL_WORLD_SIZE", world_size_from_env())


def require_single_process(command: str, reason: str = "runs in one process") -> None:
    """Raise a UserError if torchrun started several processes."""
    if (count := world_size_from_env()) > 1:
        raise UserError(f"{command} {reason}; torchrun started {count}")


def _read_number(name: str, default: int) -> int:
    given = os.environ.get(name) or str(default)
    if not given.isdecimal():
        raise UserError(f"the environment variable {name} must be a number, as torchrun sets it; given '{given}'")
    return int(given)
