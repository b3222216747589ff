"""Report the error of one process to the others, so that none waits for it, with or without a process group.

A process that fails records its error in the store that torchrun's processes share. The others check these records
while they wait for each other.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from scantling.errors import RunError, ScantlingError, SilentPeerError, UserError, first_line
from scantling.numerics.torch_private import default_store
from scantling.torchrun_env import local_rank_from_env, rank_from_env, world_size_from_env

_FAILED, _ANY_FAILED = "scantling/failed-rank/", "scantling/failed-rank"
"""Store keys: the error record of each rank, and a flag that there is one."""
_LEFT = "scantling/left/"
"""Store keys of ranks that no longer need the store after an error."""
ARRIVED = "scantling/arrived/"
"""Store keys that count the arrivals of each rank in `wait_for_ranks`."""
STORE_TIMEOUT_S = 30.0
"""Seconds that a failed process tries to reach the others, or waits for those that still need its store."""
_FIRST_REPORT_S = 10.0
"""Seconds that a process waits for the first one of its machine to report an input error that both may have."""

# ids of recorded errors, the open store, nesting depth and number of `report_errors_to_peers`
_recorded: set[int] = set()
_opened: dict[tuple[str, ...], Any] = {}
_depth = _session = 0


def open_store(timeout_s: float) -> Any:
    """Return the store of this launch, hosted by torchrun or by rank 0.

    torchrun keeps one store for all restarts, and one process may run several commands: each restart and each command
    uses its own key prefix.

    Raises:
        ValueError: MASTER_ADDR or MASTER_PORT is not set.
        dist.DistError: the store does not answer in time.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(f"{' and '.join(missing)} are not set")
    address, port, rank = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank_from_env()
    # the process id is part of the key: a forked process must not share its parent's connection
    key = (str(os.getpid()), address, port, str(rank))
    if key not in _opened:
        _opened.clear()
        # rank 0 hosts the store unless torchrun does; no wait for workers, so that an early error reaches the store;
        # multi-tenant, so that two stores of one process at the same port share a server
        _opened[key] = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            int(port),
            world_size_from_env(),
            rank == 0 and not _is_store_of_torchrun(),
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"restart-{restart}/{_session}", _opened[key])  # type: ignore[attr-defined]


def group_store() -> Any:
    """Return the store of the process group."""
    if _opened:
        return open_store(STORE_TIMEOUT_S)
    return dist.PrefixStore(  # type: ignore[attr-defined]
        f"scantling-{_session}", default_store()
    )


def _is_store_of_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def wait_for_ranks(
    store: Any, rank: int, world_size: int, timeout_s: float, *, arrival: Any = None, pause_s: float = 1.0
) -> None:
    """Wait until all processes have arrived.

    Args:
        store: store of all processes.
        rank: rank of this process.
        world_size: number of processes.
        timeout_s: seconds to wait.
        arrival: an asynchronous barrier, which fails once a process died.
        pause_s: longest pause between two checks.

    Raises:
        SilentPeerError: some ranks did not arrive; the message names them.
        UserError, RunError: a process failed; the message contains its error.
    """
    until, pause = time.monotonic() + timeout_s, 0.01
    # the n-th call of each rank counts under key n, so that successive waits do not mix
    arrivals = store.add(f"{ARRIVED}{rank}", 1)
    store.add(f"{ARRIVED}all/{arrivals}", 1)
    while store.add(f"{ARRIVED}all/{arrivals}", 0) < world_size:
        if store.check([_ANY_FAILED]):
            raise relayed_error(store, find_failed_ranks(store, [*range(world_size)]))
        if arrival is not None and arrival.is_completed():
            arrival.wait()  # raises if a process died
        if time.monotonic() > until:
            # missing ranks have made fewer calls than this one
            missing = [str(each) for each in range(world_size) if store.add(f"{ARRIVED}{each}", 0) < arrivals]
            raise SilentPeerError(f"rank {', '.join(missing)} of {world_size} did not arrive within {timeout_s:g} s")
        # poll less and less often, because all ranks share one store
        time.sleep(pause)
        pause = min(pause_s, 1.5 * pause)


def record_error(store: Any, error: BaseException) -> None:
    """Record in the store that this process ends with an error."""
    record = {
        "input": _is_input(error),
        "is_relayed": isinstance(error, SilentPeerError) or (isinstance(error, ScantlingError) and error.relayed),
        "text": str(error) if isinstance(error, ScantlingError) else f"{type(error).__name__}: {first_line(error)}",
        "host": platform.node(),
    }
    _recorded.add(id(error))
    with suppress(RuntimeError):
        store.set(f"{_FAILED}{rank_from_env()}", json.dumps(record))
        # set the flag last: a rank that sees it finds the record
        store.set(_ANY_FAILED, "1")


def _is_input(error: BaseException) -> bool:
    """Return True for an input error with exit code 2: ours, of the command line, or of a file."""
    return getattr(error, "exit_code", None) == 2 or (isinstance(error, OSError) and error.filename is not None)


def find_failed_ranks(store: Any, ranks: list[int]) -> list[int]:
    """Return the given ranks that ended with an error."""
    return [rank for rank in ranks if store.check([f"{_FAILED}{rank}"])]


def find_original_failures(store: Any, ranks: list[int]) -> list[int]:
    """Return the given ranks that failed first, not because another rank failed."""
    return [
        rank for rank in find_failed_ranks(store, ranks) if not json.loads(store.get(f"{_FAILED}{rank}"))["is_relayed"]
    ]


def relayed_error(store: Any, ranks: list[int]) -> ScantlingError:
    """Return the errors of failed ranks as one error; an input error if one of them is."""
    records = {rank: json.loads(store.get(f"{_FAILED}{rank}")) for rank in ranks}
    # drop errors that only repeat another rank's error, unless no original is known
    first = {rank: record for rank, record in records.items() if not record["is_relayed"]} or records
    by_text: dict[str, list[str]] = {}
    for rank, record in first.items():
        by_text.setdefault(record["text"], []).append(f"rank {rank} on {record['host']}")
    # a relayed text already names its rank
    text = "; ".join(
        text if first is records else f"{', '.join(names)} ended: {text}" for text, names in by_text.items()
    )
    error = (UserError if any(record["input"] for record in first.values()) else RunError)(text)
    error.relayed = True
    return error


@contextmanager
def report_errors_to_peers(report: Callable[[BaseException], None] | None = None) -> Iterator[None]:
    """Report an error of a command to the other processes; in nested contexts only the outermost one does.

    Args:
        report: called with the error on the first process of each machine, and on others unless that one reports it.
    """
    global _depth, _session
    _depth += 1
    if _depth == 1:
        # a new key prefix: errors of an earlier command of this process no longer count
        _session += 1
        _recorded.clear()
    try:
        yield
    except BaseException as error:
        if _depth == 1:
            _report_error(error, report or (lambda _: None))
        raise
    finally:
        _depth -= 1


def _report_error(error: BaseException, report: Callable[[BaseException], None]) -> None:
    local, rank, world_size = local_rank_from_env(), rank_from_env(), world_size_from_env()
    if not local:
        report(error)
    has_no_group = id(error) not in _recorded  # with a group, `init_distributed` has recorded the error
    # without a connection there is no store to report to
    if world_size == 1 or (has_no_group and isinstance(error, SilentPeerError)):
        return
    # all ranks raise a relayed error, so the first process of the machine prints it
    is_reported = not local or (isinstance(error, ScantlingError) and error.relayed)
    try:
        store = (
            group_store() if dist.is_initialized() else open_store(STORE_TIMEOUT_S if has_no_group else _FIRST_REPORT_S)
        )
        if has_no_group:
            record_error(store, error)
        # all processes of a machine usually hit the same input error: let the first one print it
        if not is_reported and _is_input(error):
            is_reported = _wait_for(lambda: bool(find_failed_ranks(store, [rank - local])), _FIRST_REPORT_S)
        store.set(f"{_LEFT}{rank}", "1")
        if rank == 0 and not _is_store_of_torchrun():
            # this process hosts the store, in which the others look for this error and for those of their machine
            names = [f"{_LEFT}{other}" for other in range(world_size)]
            _wait_for(lambda: store.check(names), _patience_s(error, has_no_group))
    except (ValueError, RuntimeError, OSError):
        is_reported = is_reported or (rank == local and _is_input(error))  # rank 0 hosted the store and has ended
    if not is_reported:
        report(error)


def _patience_s(error: BaseException, has_no_group: bool) -> float:
    """Return the seconds that rank 0 waits at the end for processes that may still need its store."""
    # others may be in a collective that only ends when this process does
    if isinstance(error, SilentPeerError) or isinstance(error.__cause__, SilentPeerError):
        return 0.0
    is_relayed = isinstance(error, ScantlingError) and error.relayed
    # an input error is rare in training steps, where others would be in a collective
    return STORE_TIMEOUT_S if has_no_group or is_relayed or _is_input(error) else _FIRST_REPORT_S


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while not (is_met := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return is_met
