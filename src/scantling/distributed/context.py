"""The process's context in the run: rank, world size and device.

One process needs no process group. Several are started by torchrun, which sets RANK, WORLD_SIZE and LOCAL_RANK.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scantling.comm.transport.failures import name_silent_ranks, record_failure
from scantling.distributed.objects import all_gather_arrays, all_gather_json, broadcast_json, to_json_types
from scantling.distributed.peers import (
    find_original_failures,
    group_store,
    open_store,
    record_error,
    relayed_error,
    report_errors_to_peers,
    wait_for_ranks,
)
from scantling.errors import RunError, ScantlingError, SilentPeerError, UserError, first_line
from scantling.torchrun_env import local_rank_from_env, rank_from_env, world_size_from_env

DEVICES = ("auto", "cpu", "cuda")
"""Device names that a user can give; `auto` is the GPU if there is one."""
TIMEOUT_S = 300.0
"""How long a collective may take."""
PREPARATION_S = 6 * 3600.0
"""How long processes wait for one that still prepares its data, or sums up a checkpoint."""


@dataclass(frozen=True)
class DistContext:
    """Rank, number of processes and device of this process.

    Attributes:
        writers: by rank, the lowest rank that sees the same run directory, which writes what the ranks there share.
            Empty if all ranks see the same.
        hosts: by rank, the name of its machine, for messages; may be empty.
        wait_group: a gloo group with a timeout of hours, whose connections show at once that a process died.
    """

    rank: int
    world_size: int
    device: torch.device
    writers: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    wait_group: Any = None

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def is_writer(self) -> bool:
        """True for the rank that writes into the run directory that it sees."""
        return self.rank == (self.writers[self.rank] if self.writers else 0)

    @property
    def has_separate_folders(self) -> bool:
        """True if some ranks see another run directory than others."""
        return len(set(self.writers)) > 1

    def ranks_sharing(self, writer: int) -> list[int]:
        """List the ranks that see the run directory of a writer."""
        return [rank for rank in range(self.world_size) if not self.writers or self.writers[rank] == writer]

    def describe_rank(self, rank: int) -> str:
        """Return a rank and its machine in words."""
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts else f"rank {rank}"

    def collect_errors(self, own: str | None) -> str | None:
        """Return the problems of all ranks as one text, or None if none has one. Collective: a gather."""
        by_text: dict[str, list[int]] = {}
        for rank, text in enumerate(self.all_gather_object(own)):
            if text is not None:
                by_text.setdefault(text, []).append(rank)
        if [*by_text.values()] == [[0]] and not self.has_separate_folders:
            return next(iter(by_text))
        return (
            "; ".join(f"{', '.join(map(self.describe_rank, ranks))}: {text}" for text, ranks in by_text.items()) or None
        )

    def run_on_all(self, action: Callable[[], None], *, taking_part: bool = True) -> None:
        """Run an action, and go on only if it succeeds on all ranks. Collective: two gathers.

        Args:
            action: without collectives.
            taking_part: False on ranks that only wait for the others.

        Raises:
            UserError: the action raised it on a rank; on each rank with the text and the name of that rank.
            RunError: the same.
        """
        if self.world_size == 1:
            action()
            return
        error: ScantlingError | None = None
        if taking_part:
            try:
                action()
            except (UserError, RunError) as raised:
                error = raised
        problem = self.collect_errors(None if error is None else str(error))
        if problem is None:
            return
        is_input = any(self.all_gather_object(isinstance(error, UserError)))
        agreed = (UserError if is_input else RunError)(problem)
        agreed.relayed = True
        raise agreed from error

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over all processes, in place. Collective: one all-reduce when there are several."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Give rank 0's JSON value to all. Collective: broadcasts when there are several."""
        return to_json_types(value) if self.world_size == 1 else broadcast_json(value)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, on every rank. Collective: all-gathers when there are several."""
        return [to_json_types(value)] if self.world_size == 1 else all_gather_json(value)

    def all_gather_arrays(self, array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Return every rank's array, on every rank. Collective: all-gathers when there are several."""
        return [array] if self.world_size == 1 else all_gather_arrays(array)

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def wait_for_all(self, within_s: float = PREPARATION_S) -> None:
        """Wait until all processes are here, for hours where a collective waits for minutes.

        Each process has to call it as often as the others.

        Raises:
            SilentPeerError: with the ranks that did not come, or that ended before.
        """
        if self.world_size == 1:
            return
        try:
            arrival = None if self.wait_group is None else dist.barrier(self.wait_group, async_op=True)
            wait_for_ranks(group_store(), self.rank, self.world_size, within_s, arrival=arrival)
            if arrival is not None:
                arrival.wait()
        except ScantlingError:
            raise
        except RuntimeError as error:
            if "gloo" in str(error):
                if ended := _ended(self):  # their connections close after they have said why
                    raise relayed_error(group_store(), ended) from error
                raise  # `name_silent_ranks` looks for who died
            raise SilentPeerError(
                "the process that holds the store of the group, in general rank 0, ended while others waited "
                f"for each other ({first_line(error)}); what it says is the reason"
            ) from error


SINGLE_PROCESS = DistContext(0, 1, torch.device("cpu"))
"""One process that speaks to no other."""


def is_restart() -> bool:
    """Return True if torchrun has restarted the processes after one of them died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def launch_id() -> str:
    """Return the name of this torchrun start, the same after a restart: its id, or else its host and process."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return name if name != "none" else f"{platform.node()} {os.getppid()}"


def _join(backend: str, timeout: timedelta) -> None:
    """Join the group once all processes are there, so that one that failed before keeps none waiting."""
    known, seconds = os.environ.get, timeout.total_seconds()
    try:
        store = open_store(seconds)
        store.set_timeout(timeout)
        rank, world_size = rank_from_env(), world_size_from_env()
        wait_for_ranks(store, rank, world_size, seconds, pause_s=0.1)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except ValueError as error:
        raise UserError(f"WORLD_SIZE is {known('WORLD_SIZE')}, but {error}; start the processes by torchrun") from None
    except (dist.DistError, SilentPeerError) as error:
        address = f"{known('MASTER_ADDR', '?')}:{known('MASTER_PORT', '?')}"
        raise SilentPeerError(
            f"the processes did not find each other within {seconds:g} s by way of {address}: "
            f"{first_line(error)}. Look whether all {known('WORLD_SIZE')} were started, rank 0 there, "
            "at firewalls, and at GLOO_SOCKET_IFNAME, which names the interface to use"
        ) from error


def device_type(device: str) -> str:
    """Return "cuda" or "cpu" for a device that a user named, "auto" included.

    Raises:
        UserError: another device, or CUDA was asked for and there is none.
    """
    if device not in DEVICES:
        raise UserError(f"the device is one of {', '.join(DEVICES)}; given '{device}'")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("the device is to be 'cuda', but PyTorch sees no CUDA device; use 'cpu' or 'auto'")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def init_distributed(device: str = "auto", *, timeout_s: float = TIMEOUT_S) -> Iterator[DistContext]:
    """Join the process group of torchrun, or stand alone, and leave it at the end.

    Args:
        device: "auto" (the GPU where there is one), "cpu" or "cuda".
        timeout_s: how long a collective may take before it is an error.

    Raises:
        UserError: another device, or CUDA was asked for and there is none.
        SilentPeerError: a process that does not answer in time.
    """
    with report_errors_to_peers():
        use_cuda = device_type(device) == "cuda"
        world_size, rank = world_size_from_env(), rank_from_env()
        context = DistContext(
            rank,
            world_size,
            torch.device("cuda", local_rank_from_env()) if use_cuda else torch.device("cpu"),
        )
        if use_cuda:
            torch.cuda.set_device(context.device)
        ours = world_size > 1 and not dist.is_initialized()
        if ours:
            _join("cpu:gloo,cuda:nccl" if use_cuda else "gloo", timedelta(seconds=timeout_s))
        elif world_size > 1:
            wait_for_ranks(group_store(), rank, world_size, timeout_s, pause_s=0.1)
        try:
            with name_silent_ranks():
                if world_size > 1:
                    hosts = tuple(context.all_gather_object(platform.node() or "an unnamed machine"))
                    wait_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PREPARATION_S))
                    context = replace(context, hosts=hosts, wait_group=wait_group)
                yield context
        except BaseException as error:
            if world_size == 1:
                raise
            reason = _reason(error, context)
            record_error(group_store(), reason)
            with contextlib.suppress(RuntimeError):
                record_failure()  # others need not look who is silent
            if reason is error:
                raise
            raise reason from error
        finally:
            if ours and dist.is_initialized():
                dist.destroy_process_group()


def _reason(error: BaseException, context: DistContext) -> BaseException:
    """Return why another process ended if that is why this one cannot go on, else the error itself."""
    if isinstance(error, SilentPeerError) and (ended := _ended(context)):
        return relayed_error(group_store(), ended)
    return error


def _ended(context: DistContext) -> list[int]:
    """List the other ranks that ended with an error of their own; none if the store is gone."""
    with contextlib.suppress(RuntimeError):
        return find_original_failures(
            group_store(), [rank for rank in range(context.world_size) if rank != context.rank]
        )
    return []
