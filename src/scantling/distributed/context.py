"""Context of one process in a run: rank, world size and device.

One process needs no process group. torchrun starts several and sets RANK, WORLD_SIZE and LOCAL_RANK.
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
from torch.distributed.device_mesh import DeviceMesh

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
"""Allowed device names; `auto` is the GPU if there is one."""
TIMEOUT_S = 300.0
"""Timeout of a collective in seconds."""
PREPARATION_S = 6 * 3600.0
"""Seconds that processes wait for one that prepares data or computes checksums of a checkpoint."""


@dataclass(frozen=True)
class DistContext:
    """Rank, number of processes and device of this process.

    Attributes:
        writers: by rank, the lowest rank that sees the same run directory; that rank writes the shared files there.
            Empty if all ranks see the same directory.
        hosts: by rank, the name of its machine, for messages; may be empty.
        wait_group: gloo group with a timeout of hours; its connections fail at once if a process dies.
        mesh: of dims `replicate` and `shard`, if each replica of the model is sharded over several processes.
        group: gloo group of the collectives of this context, with a timeout of hours; None for the default group.
    """

    rank: int
    world_size: int
    device: torch.device
    writers: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    wait_group: Any = None
    mesh: DeviceMesh | None = None
    group: Any = None

    @property
    def num_shards(self) -> int:
        """Processes that share one replica of the model."""
        return 1 if self.mesh is None else self.mesh.size(1)

    @property
    def num_replicas(self) -> int:
        """Replicas of the model."""
        return self.world_size // self.num_shards

    @property
    def replica(self) -> int:
        """Index of the replica that this process belongs to."""
        return self.rank // self.num_shards

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def is_writer(self) -> bool:
        """True if this rank writes the shared files of its run directory."""
        return self.rank == (self.writers[self.rank] if self.writers else 0)

    @property
    def has_separate_folders(self) -> bool:
        """True if ranks see different run directories."""
        return len(set(self.writers)) > 1

    def ranks_sharing(self, writer: int) -> list[int]:
        """Return the ranks that see the run directory of a writer."""
        return [rank for rank in range(self.world_size) if not self.writers or self.writers[rank] == writer]

    def describe_rank(self, rank: int) -> str:
        """Return a description of a rank with its machine."""
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts else f"rank {rank}"

    def collect_errors(self, error: str | None) -> str | None:
        """Return the error texts of all ranks as one text, or None without an error. Collective: an all-gather."""
        by_text: dict[str, list[int]] = {}
        for rank, text in enumerate(self.all_gather_object(error)):
            if text is not None:
                by_text.setdefault(text, []).append(rank)
        # only rank 0 failed and there is one folder: naming the rank would tell the user nothing
        if [*by_text.values()] == [[0]] and not self.has_separate_folders:
            return next(iter(by_text))
        return (
            "; ".join(f"{', '.join(map(self.describe_rank, ranks))}: {text}" for text, ranks in by_text.items()) or None
        )

    def run_on_all(self, action: Callable[[], None], *, taking_part: bool = True) -> None:
        """Run an action and raise on all ranks if it fails on one. Collectives: two all-gathers.

        Args:
            action: a function without collectives.
            taking_part: False on ranks that only wait for the others.

        Raises:
            UserError, RunError: the action raised it on a rank; the message names that rank.
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
        # failed ranks come here too; a rank that raised earlier would leave the others waiting in this gather
        text = self.collect_errors(None if error is None else str(error))
        if text is None:
            return
        # an input error on one rank makes it one on all, so that all processes end with the same exit code
        is_input = any(self.all_gather_object(isinstance(error, UserError)))
        common = (UserError if is_input else RunError)(text)
        # all ranks raise this text; the mark lets each machine print it once
        common.relayed = True
        raise common from error

    def with_own_group(self) -> DistContext:
        """Return the context for a thread, whose collectives run next to those of this one. Collective: a new group."""
        if self.world_size == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=PREPARATION_S)))

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over all processes in place. Collective: one all-reduce."""
        if self.world_size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Return the JSON value of rank 0 on every rank. Collectives: two broadcasts."""
        # one process gets the same round trip through JSON as several: tuples become lists
        return to_json_types(value) if self.world_size == 1 else broadcast_json(value, self.group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks on every rank. Collectives: two all-gathers."""
        return [to_json_types(value)] if self.world_size == 1 else all_gather_json(value, self.group)

    def all_gather_arrays(self, array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Return the arrays of all ranks on every rank. Collectives: four all-gathers."""
        return [array] if self.world_size == 1 else all_gather_arrays(array)

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(self.group)

    def wait_for_all(self, timeout_s: float = PREPARATION_S) -> None:
        """Wait for all processes, by default for hours, while a collective waits for minutes.

        Every process must call it the same number of times.

        Raises:
            SilentPeerError: some ranks did not arrive, or ended; the message names them.
        """
        if self.world_size == 1:
            return
        if self.group is not None:
            dist.barrier(self.group)  # which waits for hours; the counts in the store are those of the main thread
            return
        try:
            # the barrier fails at once if a process dies; the store knows who is missing and why a rank failed
            arrival = None if self.wait_group is None else dist.barrier(self.wait_group, async_op=True)
            wait_for_ranks(group_store(), self.rank, self.world_size, timeout_s, arrival=arrival)
            if arrival is not None:
                arrival.wait()
        except ScantlingError:
            raise
        except RuntimeError as error:
            if "gloo" in str(error):
                if ended := _failed_ranks(self):  # they record the reason before their connections close
                    raise relayed_error(group_store(), ended) from error
                raise  # `name_silent_ranks` finds the dead rank
            raise SilentPeerError(
                "the process with the store of the group, usually rank 0, ended while others waited "
                f"({first_line(error)}); see its message for the reason"
            ) from error


SINGLE_PROCESS = DistContext(0, 1, torch.device("cpu"))
"""Context of a single process on the CPU."""


def is_restart() -> bool:
    """Return True if torchrun restarted the processes after one of them died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def launch_id() -> str:
    """Return an identifier of this torchrun launch, the same after a restart: its run id, or host and process id."""
    # without an id torchrun calls every launch "none"; the torchrun process is the parent of all workers of a machine
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return name if name != "none" else f"{platform.node()} {os.getppid()}"


def _init_process_group(backend: str, timeout: timedelta) -> None:
    """Create the process group once all processes have arrived, so that an early failure blocks no other process."""
    get, seconds = os.environ.get, timeout.total_seconds()
    try:
        store = open_store(seconds)
        store.set_timeout(timeout)
        rank, world_size = rank_from_env(), world_size_from_env()
        # this wait sees errors that other ranks record; `init_process_group` would run into its timeout
        wait_for_ranks(store, rank, world_size, seconds, pause_s=0.1)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except ValueError as error:
        raise UserError(f"WORLD_SIZE is {get('WORLD_SIZE')}, but {error}; start the processes with torchrun") from None
    except (dist.DistError, SilentPeerError) as error:
        address = f"{get('MASTER_ADDR', '?')}:{get('MASTER_PORT', '?')}"
        raise SilentPeerError(
            f"the processes did not connect to {address} within {seconds:g} s: {first_line(error)}. Check that all "
            f"{get('WORLD_SIZE')} were started and that rank 0 runs there, the firewalls, and GLOO_SOCKET_IFNAME, the "
            "network interface to use"
        ) from error


def device_type(device: str) -> str:
    """Return "cuda" or "cpu" for a device that a user named, "auto" included.

    Raises:
        UserError: an unknown device, or "cuda" without a CUDA device.
    """
    if device not in DEVICES:
        raise UserError(f"device must be one of {', '.join(DEVICES)}; given '{device}'")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but PyTorch sees no CUDA device; use 'cpu' or 'auto'")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def init_distributed(device: str = "auto", *, timeout_s: float = TIMEOUT_S) -> Iterator[DistContext]:
    """Yield the context of this process; create the process group of torchrun's processes and destroy it at the end.

    Args:
        device: "auto" (the GPU if there is one), "cpu" or "cuda".
        timeout_s: timeout of a collective in seconds.

    Raises:
        UserError: an unknown device, or "cuda" without a CUDA device.
        SilentPeerError: a process does not answer in time.
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
            # set before the group is created, because NCCL uses the current device
            torch.cuda.set_device(context.device)
        owns_group = world_size > 1 and not dist.is_initialized()
        if owns_group:
            # gloo carries CPU tensors, such as JSON values; NCCL carries gradients on the GPU
            _init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo", timedelta(seconds=timeout_s))
        elif world_size > 1:
            # the caller owns the group: only wait until all ranks are here
            wait_for_ranks(group_store(), rank, world_size, timeout_s, pause_s=0.1)
        try:
            with name_silent_ranks():
                if world_size > 1:
                    hosts = tuple(context.all_gather_object(platform.node() or "an unnamed machine"))
                    # a separate group, because the default group gives up after minutes
                    wait_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PREPARATION_S))
                    context = replace(context, hosts=hosts, wait_group=wait_group)
                yield context
        except BaseException as error:
            if world_size == 1:
                raise
            reason = _find_reason(error, context)
            # record the cause while the store is reachable; otherwise other ranks report a silent rank
            record_error(group_store(), reason)
            with contextlib.suppress(RuntimeError):
                record_failure()  # others do not report this rank as silent
            if reason is error:
                raise
            raise reason from error
        finally:
            if owns_group and dist.is_initialized():
                dist.destroy_process_group()


def _find_reason(error: BaseException, context: DistContext) -> BaseException:
    """Return the error of another process if it caused this one, else the error itself."""
    if isinstance(error, SilentPeerError) and (ended := _failed_ranks(context)):
        return relayed_error(group_store(), ended)
    return error


def _failed_ranks(context: DistContext) -> list[int]:
    """Return the other ranks that failed first; empty if the store is gone."""
    with contextlib.suppress(RuntimeError):
        return find_original_failures(
            group_store(), [rank for rank in range(context.world_size) if rank != context.rank]
        )
    return []
