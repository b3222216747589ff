"""A failed process tells the others, so that none waits for it: before, while and after there is a process group.

Each process that ends with an error leaves a note in the store that torchrun's processes share. Others look for such
notes while they wait for each other.
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

_ENDED, _ANY_ENDED = "scantling/ended/", "scantling/ended"
"""Names of notes: of each rank, and that there is one."""
_LEFT = "scantling/left/"
"""Names that say which ranks need the store no longer, after an error."""
MET = "scantling/met/"
"""Names that count how often a rank has met the others."""
TELL_S = 30.0
"""How long a failed process looks for the others before there is a process group."""
_FIRST_S = 3.0
"""How long a process waits for the first one of its machine to report an error of input that both may have found."""

_noted: set[int] = set()
_opened: dict[tuple[str, ...], Any] = {}
_depth = _session = 0


def open_store(timeout_s: float) -> Any:
    """Return the store of this launch; rank 0 holds it unless torchrun does.

    torchrun keeps one store for all attempts, and one process may train several times: each attempt and each command
    has names of its own there.

    Raises:
        ValueError: the environment does not say where the store is.
        dist.DistError: it does not answer in time.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not set in the environment, which torchrun does")
    address, port, rank = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank_from_env()
    key = (str(os.getpid()), address, port, str(rank))
    if key not in _opened:
        _opened.clear()
        _opened[key] = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            int(port),
            world_size_from_env(),
            rank == 0 and not _torchrun_holds(),
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"restart-{restart}/{_session}", _opened[key])  # type: ignore[attr-defined]


def group_store() -> Any:
    """Return the store of the processes of the process group."""
    if _opened:
        return open_store(TELL_S)
    return dist.PrefixStore(  # type: ignore[attr-defined]
        f"scantling-{_session}", default_store()
    )


def _torchrun_holds() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def wait_for_ranks(
    store: Any, rank: int, world_size: int, within_s: float, *, arrival: Any = None, pause_s: float = 1.0
) -> None:
    """Wait until all processes are here.

    Args:
        store: of all processes.
        rank: of this process.
        world_size: number of processes.
        within_s: seconds to wait.
        arrival: an asynchronous barrier, which fails once a process died.
        pause_s: the longest pause between two looks.

    Raises:
        SilentPeerError: with the ranks that did not come.
        UserError, RunError: a process ended with an error, which is told.
    """
    until, pause = time.monotonic() + within_s, 0.01
    number = store.add(f"{MET}{rank}", 1)
    store.add(f"{MET}all/{number}", 1)
    while store.add(f"{MET}all/{number}", 0) < world_size:
        if store.check([_ANY_ENDED]):
            raise relayed_error(store, find_failed_ranks(store, [*range(world_size)]))
        if arrival is not None and arrival.is_completed():
            arrival.wait()  # raises if a process died
        if time.monotonic() > until:
            missing = [str(each) for each in range(world_size) if store.add(f"{MET}{each}", 0) < number]
            raise SilentPeerError(f"rank {', '.join(missing)} of {world_size} did not come in {within_s:g} s")
        time.sleep(pause)
        pause = min(pause_s, 1.5 * pause)


def record_error(store: Any, error: BaseException) -> None:
    """Leave a note that this process ends with an error."""
    note = {
        "input": _is_input(error),
        "heard": isinstance(error, SilentPeerError) or (isinstance(error, ScantlingError) and error.relayed),
        "text": str(error) if isinstance(error, ScantlingError) else f"{type(error).__name__}: {first_line(error)}",
        "host": platform.node(),
    }
    _noted.add(id(error))
    with suppress(RuntimeError):
        store.set(f"{_ENDED}{rank_from_env()}", json.dumps(note))
        store.set(_ANY_ENDED, "1")


def _is_input(error: BaseException) -> bool:
    """True for an error of what the user gave, with exit code 2: ours, of the command line, or of a file."""
    return getattr(error, "exit_code", None) == 2 or (isinstance(error, OSError) and error.filename is not None)


def find_failed_ranks(store: Any, ranks: list[int]) -> list[int]:
    """List those of the ranks that ended with an error."""
    return [rank for rank in ranks if store.check([f"{_ENDED}{rank}"])]


def find_original_failures(store: Any, ranks: list[int]) -> list[int]:
    """List those of the ranks that ended with an error of their own, not because they heard of one."""
    return [rank for rank in find_failed_ranks(store, ranks) if not json.loads(store.get(f"{_ENDED}{rank}"))["heard"]]


def relayed_error(store: Any, ranks: list[int]) -> ScantlingError:
    """Return the error of ranks that ended as one to raise here, an error of input if it is one there."""
    notes = {rank: json.loads(store.get(f"{_ENDED}{rank}")) for rank in ranks}
    first = {rank: note for rank, note in notes.items() if not note["heard"]} or notes
    by_text: dict[str, list[str]] = {}
    for rank, note in first.items():
        by_text.setdefault(note["text"], []).append(f"rank {rank} on {note['host']}")
    text = "; ".join(text if first is notes else f"{', '.join(names)} ended: {text}" for text, names in by_text.items())
    error = (UserError if any(note["input"] for note in first.values()) else RunError)(text)
    error.relayed = True
    return error


@contextmanager
def report_errors_to_peers(report: Callable[[BaseException], None] | None = None) -> Iterator[None]:
    """Context of a command: an error in it is told to the other processes; of nested contexts the outermost tells.

    Args:
        report: called with the error on the first process of each machine, and on others unless that one reports it.
    """
    global _depth, _session
    _depth += 1
    if _depth == 1:
        _session += 1
        _noted.clear()
    try:
        yield
    except BaseException as error:
        if _depth == 1:
            _tell(error, report or (lambda _: None))
        raise
    finally:
        _depth -= 1


def _tell(error: BaseException, report: Callable[[BaseException], None]) -> None:
    local, rank, world_size = local_rank_from_env(), rank_from_env(), world_size_from_env()
    if not local:
        report(error)
    is_alone = id(error) not in _noted  # there is no process group, in which others wait for the end of this process
    if world_size == 1 or (is_alone and isinstance(error, SilentPeerError)):
        return
    is_reported = not local or (isinstance(error, ScantlingError) and error.relayed)
    try:
        store = group_store() if dist.is_initialized() else open_store(TELL_S if is_alone else _FIRST_S)
        if is_alone:
            record_error(store, error)
        if not is_reported and _is_input(error):
            is_reported = _wait_for(lambda: bool(find_failed_ranks(store, [rank - local])), _FIRST_S)
        if is_alone:
            store.set(f"{_LEFT}{rank}", "1")
            if rank == 0 and not _torchrun_holds():
                names = [f"{_LEFT}{other}" for other in range(world_size)]
                _wait_for(lambda: store.check(names), TELL_S)  # the store ends with this process
    except (ValueError, RuntimeError, OSError):
        is_reported = is_reported or (rank == local and _is_input(error))  # rank 0 held the store, and has ended
    if not is_reported:
        report(error)


def _wait_for(condition: Callable[[], bool], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return found
