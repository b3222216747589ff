"""Name the ranks that did not answer a failed collective.

The error of a collective says that something took too long, but not which rank. Every process with such an error
records it in the store of the process group. Ranks without a record after some seconds are silent: stopped, killed, cut
off, or still in a collective. In a ring of four or more processes only the neighbors of a dead one notice it at once;
the others wait until those leave, or for the timeout. Nothing wakes them earlier: gloo keeps its connections as long
as the process (PyTorch 2.13, even after `abort` and `shutdown`).
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
"""Seconds to wait for the records of other ranks."""
_SIGNS = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe", re.IGNORECASE)


@contextmanager
def name_silent_ranks(group: Any = None) -> Iterator[None]:
    """Convert network errors of collectives into errors that name the silent ranks.

    Args:
        group: process group of the collectives. Default: all processes.

    Raises:
        SilentPeerError: a timeout or a broken connection.
    """
    try:
        yield
    except SilentPeerError:
        raise
    except RuntimeError as error:
        if not dist.is_initialized() or not _SIGNS.search(str(error)):
            raise
        raise SilentPeerError(_explain(error, group)) from error


def _explain(error: RuntimeError, group: Any) -> str:
    first = first_line(error)
    advice = "Restart all processes together from the last checkpoint"
    silent = find_silent_ranks(WAIT_S, group)
    if silent is None:
        return f"the process with the store of the group, usually rank 0, does not answer ({first}). {advice}"
    if not silent:
        return f"a connection between the processes broke, although all of them are running ({first}). {advice}"
    world = dist.get_world_size()
    if len(silent) == 1:
        return f"no answer from rank {silent[0]} of {world} ({first}). {advice}"
    ranks = ", ".join(map(str, silent))
    return f"no answer from ranks {ranks} of {world}; at least one of them is gone ({first}). {advice}"


def find_silent_ranks(wait_s: float, group: Any = None) -> list[int] | None:
    """Return the global ranks that did not report an error; None if the store is unreachable.

    If the store disappears while waiting, the last known ranks are returned.

    Args:
        wait_s: seconds to wait for reports.
        group: process group of the failed collective. Default: all processes.
    """
    latest: list[list[int]] = []
    thread = threading.Thread(target=_wait_for_reports, args=(wait_s, group, latest), daemon=True)
    thread.start()
    thread.join(1.5 * wait_s)  # a request to a stopped store blocks forever, whatever its timeout
    return latest[0] if latest else None


def record_failure() -> None:
    """Record in the store that this process has failed or seen a failure."""
    default_store().set(f"scantling/failed/{dist.get_rank()}", "1")


def _wait_for_reports(wait_s: float, group: Any, latest: list[list[int]]) -> None:
    """Keep the silent ranks in a list; it stays empty if the store is unreachable from the start."""
    store = default_store()
    silent = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    until = time.monotonic() + wait_s
    with suppress(RuntimeError):
        record_failure()
        while silent and time.monotonic() < until:
            silent = [rank for rank in silent if not store.check([f"scantling/failed/{rank}"])]
            latest[:] = [silent]
            time.sleep(0.1)
