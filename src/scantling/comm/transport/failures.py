"""Who did not answer: an error of a collective says that something took too long, and not whom it waited for.

Every process that such an error reaches leaves a note in the store of the process group. After a while, whoever has
left none is silent: stopped, killed, or cut off; or still in a collective. Of four and more processes around a ring
only the neighbours of one that dies hear of it at once. The others wait until those leave, or for the whole timeout,
and nothing wakes them: gloo keeps its connections as long as the process (PyTorch 2.13, `abort` and `shutdown` too).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from scantling.errors import SilentPeerError, first_line
from scantling.numerics.torch_private import default_store

WAIT_S = 10.0
"""How long notes of the others are waited for."""
_SIGNS = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe", re.IGNORECASE)


@contextmanager
def name_silent_ranks(group: Any = None) -> Iterator[None]:
    """Context of collectives: an error of the network becomes one that names the silent processes.

    Args:
        group: whose collectives they are; default all processes.

    Raises:
        SilentPeerError: a time-out or a connection that broke.
    """
    try:
        yield
    except SilentPeerError:
        raise
    except RuntimeError as error:
        if not dist.is_initialized() or not _SIGNS.search(str(error)):
            raise
        raise SilentPeerError(_explained(error, group)) from error


def _explained(error: RuntimeError, group: Any) -> str:
    first = first_line(error)
    advice = "Start the run again from its last checkpoint; all processes must be started together"
    silent = find_silent_ranks(WAIT_S, group)
    if silent is None:
        return f"the process that holds the store of the group, in general rank 0, does not answer ({first}). {advice}"
    if not silent:
        return f"the connection between the processes broke, and all are still there ({first}). {advice}"
    world = dist.get_world_size()
    if len(silent) == 1:
        return f"no answer from rank {silent[0]} of {world} ({first}). {advice}"
    ranks = ", ".join(map(str, silent))
    return f"no sign from ranks {ranks} of {world}, of whom at least one is gone ({first}). {advice}"


def find_silent_ranks(wait_s: float, group: Any = None) -> list[int] | None:
    """The processes that have not come here too, by their ranks among all; None where the store does not answer either.

    Where it has answered, and is gone later, what was known last.

    Args:
        wait_s: how long they are waited for.
        group: of those that should come; others have heard of no error.
    """
    found: list[list[int]] = []
    asking = threading.Thread(target=_not_there, args=(wait_s, group, found), daemon=True)
    asking.start()
    asking.join(1.5 * wait_s)  # what asks a store that is stopped waits for ever, whatever its timeout
    return found[0] if found else None


def record_failure() -> None:
    """Leave the note of a process that heard of an error, or had one itself."""
    default_store().set(f"scantling/failed/{dist.get_rank()}", "1")


def _not_there(wait_s: float, group: Any, found: list[list[int]]) -> None:
    """Keep in a list what is known, which is nothing where the store is gone from the start."""
    store = default_store()
    silent = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    until = time.monotonic() + wait_s
    with suppress(RuntimeError):
        record_failure()
        while silent and time.monotonic() < until:
            silent = [rank for rank in silent if not store.check([f"scantling/failed/{rank}"])]
            found[:] = [silent]
            time.sleep(0.1)
