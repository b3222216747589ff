"""What torchrun tells the processes that it starts, by their environment; without it, one process alone."""

from __future__ import annotations

import os

from scantling.errors import UserError


def world_size_from_env() -> int:
    """How many processes were started together."""
    return _number("WORLD_SIZE", 1)


def rank_from_env() -> int:
    """The number of this process among all."""
    return _number("RANK", 0)


def local_rank_from_env() -> int:
    """The number of this process among those on its machine."""
    return _number("LOCAL_RANK", 0)


def local_world_size_from_env() -> int:
    """Return how many processes were started on this machine."""
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
