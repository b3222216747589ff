"""Collectives between replicas, with a count of the bytes that this process sends.

    all_gather(m)       every process gets the messages of all; each sends (N - 1) |m| over a ring
    all_to_all(m_1..N)  process j gets message j of all; each sends N - 1 messages
    broadcast(m)        (N - 1) |m| in total, counted as an equal share of each process

With one process, or without a process group, nothing is sent.
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
    """Process group of the replicas, with a count of sent bytes.

    Collectives raise a SilentPeerError that names the processes that do not answer within the timeout of the group.
    A destroyed group raises a UserError, since the replica would otherwise train alone.

    Args:
        group: a process group, a one-dimensional device mesh, or None for the default group if there is one.

    Attributes:
        wire_bytes: bytes that this process sent since `reset_wire_bytes`.
        step: steps of all replicas, if the group counts them; else None.
        generation: changes with the members of the group.
        is_static: True if the members never change.

    Raises:
        UserError: a mesh of several dims, or another type.
    """

    def __init__(self, group: Any = None) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise UserError(
                    f"process_group: the exchange goes along one dim of a mesh, such as mesh['replicate']; given "
                    f"{group.ndim} dims, {group.mesh_dim_names}"
                )
            group = group.get_group()
            _warn_of_timeout(_timeout(group), _timeout(None))
        elif group is not None and not isinstance(group, dist.ProcessGroup):
            raise UserError(f"process_group must be a process group or a mesh of one dim; given {group!r}")
        self.group = group
        self.wire_bytes, self.is_static = 0, True
        self._had_group = group is not None or dist.is_initialized()

    def clone(self) -> ReplicaGroup:
        """Return a new group of the same processes, with the same timeout. Collective: a new process group."""
        if self.world_size == 1:
            return ReplicaGroup(self.group)
        ranks = dist.get_process_group_ranks(self.group)
        # Local synchronization: processes outside of this group do not take part.
        return ReplicaGroup(dist.new_group(ranks, timeout=_timeout(self.group), use_local_synchronization=True))

    @property
    def step(self) -> int | None:
        return None

    @property
    def generation(self) -> int:
        return 0

    @property
    def quorum_id(self) -> int:
        """Id of the membership, the same on all members; 0 if the members never change."""
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
        """Reset the count of sent bytes."""
        self.wire_bytes = 0

    def all_gather(self, message: Tensor) -> list[Tensor]:
        """Return the messages of all ranks, in order. Collective: one all-gather.

        Args:
            message: (n,), of the same length and dtype on all ranks.
        """
        if self.world_size == 1:
            return [message]
        # (world_size, n)
        whole = message.new_empty(self.world_size, message.numel())
        self._all_gather(whole.view(-1), message.contiguous())
        self.wire_bytes += (self.world_size - 1) * message.nbytes
        return list(whole)

    def all_to_all(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """Return the messages of all ranks for this one, in order. Collective: one all-to-all.

        Args:
            messages: for ranks 0, 1, ..., each (n,) of the same length.
        """
        if self.world_size == 1:
            return list(messages)
        # (world_size, n): row j goes to rank j.
        whole = torch.stack(list(messages))
        found = torch.empty_like(whole)
        self._all_to_all(found.view(-1), whole.view(-1))
        self.wire_bytes += (self.world_size - 1) * whole[0].nbytes
        return list(found)

    def all_reduce_mean(self, values: Tensor) -> Tensor:
        """Replace values by their mean over all ranks, and return them. Collective: one all-reduce."""
        if self.world_size > 1:
            self._all_reduce(values)
            self.wire_bytes += 2 * (self.world_size - 1) * values.nbytes // self.world_size
            values /= self.world_size
        return values

    def broadcast(self, values: Tensor, source: int) -> None:
        """Overwrite the values on all ranks by those of one. Collective: one broadcast.

        Args:
            source: rank in the group.
        """
        if self.world_size > 1:
            self._broadcast(values, source)
            self.wire_bytes += (self.world_size - 1) * values.nbytes // self.world_size

    def all_gather_strings(self, texts: Sequence[str], device: torch.device) -> list[list[str]]:
        """Return the strings of all ranks, in order. Collectives: two all-gathers, of a length and of JSON.

        Args:
            device: of the tensors to send, since a group may support one device type only.
        """
        if self.world_size == 1:
            return [list(texts)]
        own = json.dumps(list(texts)).encode()
        # Lengths first: an all-gather needs messages of equal length.
        lengths = [int(each) for each in self.all_gather(torch.tensor([len(own)], device=device))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        found = self.all_gather(padded.to(device))
        return [json.loads(bytes(each[:length].tolist())) for each, length in zip(found, lengths, strict=True)]

    def handle_error(self, error: SilentPeerError) -> None:
        """Raise the error of a broken step; a subclass may skip the step instead."""
        raise error

    def should_commit(self) -> bool:
        """Return True if the result of a step is to be applied; called once after the exchange of each step."""
        return True

    def _has_group(self) -> bool:
        # A default group may appear later. One that disappears is an error.
        if dist.is_initialized():
            self._had_group = True
        elif self._had_group:
            raise UserError(
                "the process group of this exchange is gone: destroy_process_group() was called. Step, save and load "
                "before that"
            )
        elif (count := world_size_from_env()) > 1:
            _warn_without_group(count)
        return self._had_group

    def _all_gather(self, whole: Tensor, message: Tensor) -> None:
        with name_silent_ranks(self.group):
            getattr(dist, _ALL_GATHER)(whole, message, group=self.group)

    def _all_to_all(self, found: Tensor, whole: Tensor) -> None:
        with name_silent_ranks(self.group):
            dist.all_to_all_single(found, whole, group=self.group)

    def _all_reduce(self, values: Tensor) -> None:
        with name_silent_ranks(self.group):
            dist.all_reduce(values, group=self.group)

    def _broadcast(self, values: Tensor, source: int) -> None:
        with name_silent_ranks(self.group):
            dist.broadcast(values, group=self.group, group_src=source)


def as_replica_group(group: Any) -> ReplicaGroup:
    """Return a `ReplicaGroup` over a process group, a mesh or None; a `ReplicaGroup` is returned itself."""
    return group if isinstance(group, ReplicaGroup) else ReplicaGroup(group)


@functools.cache
def _warn_without_group(world_size: int) -> None:
    """Warn once per process that WORLD_SIZE is set but there is no process group."""
    logger.warning(
        "WORLD_SIZE is %s, but there is no process group: this process trains alone. Call "
        "torch.distributed.init_process_group() before the first step",
        world_size,
    )


@functools.cache
def _warn_of_timeout(own: timedelta | None, usual: timedelta | None) -> None:
    """Warn once if a mesh's group waits longer than the default group: a mesh ignores the timeout given to that."""
    if own is not None and usual is not None and own > usual and dist.get_rank() == 0:
        logger.warning(
            "the group of this mesh waits %s for a process that does not answer, where init_process_group was given "
            "%s; init_device_mesh(backend_override=...) sets it for each dim",
            *(own, usual),
        )


def _timeout(group: Any) -> timedelta | None:
    """Return the timeout of a group; None if it is unknown."""
    group = dist.group.WORLD if group is None else group
    # Timeouts are set for each backend, and a group may lack one.
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            return group_timeout(group, torch.device(device))
    return None
