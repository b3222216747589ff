"""What torchrun tells the processes that it starts, by their environment; without it, one process alone."""

from __future__ import annotations

import os

from scantling.errors import UserError


def launched_world_size() -> int:
    """How many processes were started together."""
    return _number("WORLD_SIZE", 1)


def launched_rank() -> int:
    """The number of this process among all."""
    return _number("RANK", 0)


def launched_local_rank() -> int:
    """The number of this process among those on its machine."""
    return _number("LOCAL_RANK", 0)


def launched_local_world_size() -> int:
    """Return how many processes were started on this machine."""
    return _number("LOCAL_WORLD_SIZE", launched_world_size())


def refuse_processes(command: str, why: str = "is the work of one process") -> None:
    """Raise a UserError in one of several processes."""
    if (count := launched_world_size()) > 1:
        raise UserError(f"{command} {why}; given {count} processes by torchrun")


def _number(name: str, alone: int) -> int:
    given = os.environ.get(name) or str(alone)
    if not given.isdecimal():
        raise UserError(f"{name} is set by torchrun to a number; the environment has '{given}'")
    return int(given)
