"""Find the ranks that do not answer: an error of a collective says that it timed out, but not which rank is missing.

Every process that sees such an error writes a note to the store of the process group. After `WAIT_S`, processes without
a note are silent: stopped, killed, disconnected, or still in a collective. With four or more processes in a ring, only
the neighbors of a dead process see an error at once. The others wait until those leave, or for the timeout, and nothing
wakes them: gloo keeps its connections as long as the process lives (PyTorch 2.13, even with `abort` and `shutdown`).
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
"""Seconds to wait for the notes of the other processes."""
_SIGNS = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe", re.IGNORECASE)


@contextmanager
def name_silent_ranks(group: Any = None) -> Iterator[None]:
    """Context of collectives that turns a network error into one that names the silent ranks.

    Args:
        group: process group of the collectives; default all processes.

    Raises:
        SilentPeerError: a timeout or a broken connection.
    """
    try:
        yield
    except SilentPeerError:
        raise
    except RuntimeError as error:
        # Other errors, such as wrong shapes, pass unchanged.
        if not dist.is_initialized() or not _SIGNS.search(str(error)):
            raise
        raise SilentPeerError(_describe(error, group)) from error


def _describe(error: RuntimeError, group: Any) -> str:
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
    """Return the global ranks that have not reported this failure; None if the store does not answer.

    If the store stops answering later, the last known ranks are returned.

    Args:
        wait_s: seconds to wait for the others.
        group: process group whose members should report.
    """
    silent: list[list[int]] = []
    asking = threading.Thread(target=_poll_store, args=(wait_s, group, silent), daemon=True)
    asking.start()
    asking.join(1.5 * wait_s)  # a request to a stopped store blocks forever, whatever its timeout
    return silent[0] if silent else None


def record_failure() -> None:
    """Write the note of this process, which saw an error or had one itself."""
    default_store().set(f"scantling/failed/{dist.get_rank()}", "1")


def _poll_store(wait_s: float, group: Any, result: list[list[int]]) -> None:
    """Put the silent ranks known so far into `result`, which stays empty if the store never answers."""
    store = default_store()
    silent = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    until = time.monotonic() + wait_s
    with suppress(RuntimeError):
        record_failure()
        while silent and time.monotonic() < until:
            silent = [rank for rank in silent if not store.check([f"scantling/failed/{rank}"])]
            # Publish every round: the store may stop answering in the next one.
            result[:] = [silent]
            time.sleep(0.1)
