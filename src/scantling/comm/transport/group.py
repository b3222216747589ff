"""Collectives of replicas over a process group, with a count of the bytes sent.

    all_gather(m)       every rank gets all messages; each sends (N - 1) |m| over a ring
    all_to_all(m_1..N)  rank j gets message j of every rank; each sends (N - 1) of them
    broadcast(m)        (N - 1) |m| in total, counted as an equal share per rank

With one process or without a process group, nothing is sent and everything works.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scantling.comm.transport.failures import name_silent_ranks
from scantling.errors import SilentPeerError, UserError
from scantling.numerics.torch_private import group_timeout
from scantling.torchrun_env import world_size_from_env

logger = logging.getLogger(__name__)

_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""PyTorch 2.13 renamed it."""


class ReplicaGroup:
    """Replicas that exchange messages, and a count of the bytes that this process sent.

    Collectives raise a SilentPeerError that names the ranks that do not answer within the timeout of the group. A
    process group that was destroyed raises a UserError, because its replica would continue alone.

    Args:
        group: a process group, a one-dimensional device mesh, or None for the default group or a single process.

    Attributes:
        wire_bytes: bytes sent by this process since `reset_wire_bytes`.
        step: step of all replicas if something other than the exchange counts it, else None.
        generation: number that changes whenever other processes take part.
        is_static: True if the processes never change.

    Raises:
        UserError: a mesh of several dims, or another type.
    """

    def __init__(self, group: Any = None) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise UserError(
                    f"process_group must be one dim of a mesh, such as mesh['replicate']; given {group.ndim} dims, "
                    f"{group.mesh_dim_names}"
                )
            group = group.get_group()
            _warn_of_timeout(_timeout(group), _timeout(None))
        elif group is not None and not isinstance(group, dist.ProcessGroup):
            raise UserError(f"process_group must be a process group or a mesh of one dim; given {group!r}")
        self.group = group
        self.wire_bytes, self.is_static = 0, True
        self._had_group = group is not None or dist.is_initialized()

    def clone(self) -> ReplicaGroup:
        """Return a separate group of the same processes with the same timeout. Collective: a new process group."""
        if self.world_size == 1:
            return ReplicaGroup(self.group)
        ranks = dist.get_process_group_ranks(self.group)
        return ReplicaGroup(dist.new_group(ranks, timeout=_timeout(self.group), use_local_synchronization=True))

    @property
    def step(self) -> int | None:
        return None

    @property
    def generation(self) -> int:
        return 0

    @property
    def quorum_id(self) -> int:
        """Number of the current membership, the same on all members; 0 for a static group."""
        return 0

    @property
    def world_size(self) -> int:
        """Number of processes in the group."""
        return dist.get_world_size(self.group) if self._has_group() else 1

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return dist.get_rank(self.group) if self._has_group() else 0

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the processes in the group."""
        return dist.get_process_group_ranks(self.group) if self._has_group() else []

    def reset_wire_bytes(self) -> None:
        """Set the count of sent bytes to zero."""
        self.wire_bytes = 0

    def all_gather(self, message: Tensor) -> list[Tensor]:
        """Return the messages of all ranks, in order. Collective: one all-gather.

        Args:
            message: (n,), of the same length and dtype on all ranks.
        """
        if self.world_size == 1:
            return [message]
        gathered = message.new_empty(self.world_size, message.numel())
        self._all_gather(gathered.view(-1), message.contiguous())
        self.wire_bytes += (self.world_size - 1) * message.nbytes
        return list(gathered)

    def all_to_all(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """Return the message of every rank to this one, in order. Collective: one all-to-all.

        Args:
            messages: to rank 0, 1, ...; all of one shape (n,).
        """
        if self.world_size == 1:
            return list(messages)
        sent = torch.stack(list(messages))  # (world size, n)
        received = torch.empty_like(sent)
        self._all_to_all(received.view(-1), sent.view(-1))
        self.wire_bytes += (self.world_size - 1) * sent[0].nbytes
        return list(received)

    def all_reduce_mean(self, values: Tensor) -> Tensor:
        """Replace values by their mean over all ranks. Collective: one all-reduce."""
        if self.world_size > 1:
            self._all_reduce(values)
            self.wire_bytes += 2 * (self.world_size - 1) * values.nbytes // self.world_size
            values /= self.world_size
        return values

    def broadcast(self, values: Tensor, source: int) -> None:
        """Replace values by those of one rank. Collective: one broadcast.

        Args:
            source: rank in the group whose values are sent.
        """
        if self.world_size > 1:
            self._broadcast(values, source)
            self.wire_bytes += (self.world_size - 1) * values.nbytes // self.world_size

    def all_gather_strings(self, texts: Sequence[str], device: torch.device) -> list[list[str]]:
        """Return the strings of all ranks, in order. Collectives: two all-gathers, of lengths and of JSON.

        Args:
            device: device of the sent tensors; a group may support one type of device only.
        """
        if self.world_size == 1:
            return [list(texts)]
        own = json.dumps(list(texts)).encode()
        lengths = [int(each) for each in self.all_gather(torch.tensor([len(own)], device=device))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        gathered = self.all_gather(padded.to(device))
        return [json.loads(bytes(each[:length].tolist())) for each, length in zip(gathered, lengths, strict=True)]

    def handle_error(self, error: SilentPeerError) -> None:
        """Raise the error, unless the failed step can be skipped."""
        raise error

    def should_commit(self) -> bool:
        """Return True if the exchanged momentum is to be applied; called once per step, after the exchange."""
        return True

    def _has_group(self) -> bool:
        if dist.is_initialized():
            self._had_group = True
        elif self._had_group:
            raise UserError(
                "the process group of this exchange was destroyed; step, save and load before calling "
                "destroy_process_group()"
            )
        elif (count := world_size_from_env()) > 1:
            _warn_without_group(count)
        return self._had_group

    def _all_gather(self, output: Tensor, message: Tensor) -> None:
        with name_silent_ranks(self.group):
            getattr(dist, _ALL_GATHER)(output, message, group=self.group)

    def _all_to_all(self, output: Tensor, messages: Tensor) -> None:
        with name_silent_ranks(self.group):
            dist.all_to_all_single(output, messages, group=self.group)

    def _all_reduce(self, values: Tensor) -> None:
        with name_silent_ranks(self.group):
            dist.all_reduce(values, group=self.group)

    def _broadcast(self, values: Tensor, source: int) -> None:
        with name_silent_ranks(self.group):
            dist.broadcast(values, group=self.group, group_src=source)


def as_replica_group(group: Any) -> ReplicaGroup:
    """Return a ReplicaGroup as it is; wrap a process group, a mesh or None."""
    return group if isinstance(group, ReplicaGroup) else ReplicaGroup(group)


@functools.cache
def _warn_without_group(world_size: int) -> None:
    """Warn once per process that there is no process group."""
    logger.warning(
        "WORLD_SIZE is %s, but there is no process group: this process trains alone. Call "
        "torch.distributed.init_process_group() before the first step",
        world_size,
    )


@functools.cache
def _warn_of_timeout(own: timedelta | None, default: timedelta | None) -> None:
    """Warn once: a mesh gives its groups the default timeout of the backend, not that of the first group."""
    if own is not None and default is not None and own > default and dist.get_rank() == 0:
        logger.warning(
            "the timeout of this mesh dim is %s, longer than the %s given to init_process_group; set it with "
            "init_device_mesh(backend_override=...)",
            *(own, default),
        )


def _timeout(group: Any) -> timedelta | None:
    """Return the timeout of a group; None if it is unknown, which stands for the default of the backend."""
    group = dist.group.WORLD if group is None else group
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            return group_timeout(group, torch.device(device))
    return None
