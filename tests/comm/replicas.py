"""Replicas as threads of this process, for tests without sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from scantling.comm.transport.group import ReplicaGroup

Result = TypeVar("Result")


class Room:
    """A rendezvous of threads: each contributes an object, and all receive all objects."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.things: list[Any] = [None] * size
        self.next_doors: list[Room] = []
        self._lock = threading.Lock()

    def another(self, number: int) -> Room:
        """Return another room for the same replicas; equal numbers give the same room."""
        with self._lock:
            while len(self.next_doors) <= number:
                self.next_doors.append(Room(self.size))
            return self.next_doors[number]

    def close(self) -> None:
        self.barrier.abort()
        for room in self.next_doors:
            room.close()

    def meet(self, rank: int, thing: Any) -> list[Any]:
        self.things[rank] = thing
        self.barrier.wait()
        found = list(self.things)
        self.barrier.wait()
        return found


class ThreadGroup(ReplicaGroup):
    """Replicas that are threads of one process; tests can modify messages in transit."""

    def __init__(self, room: Room, rank: int) -> None:
        super().__init__()
        self.room, self._rank = room, rank
        self.total = 0
        self._parted = 0
        self.on_its_way: Callable[[Tensor], Tensor] = lambda message: message

    def clone(self) -> ThreadGroup:
        """Return a separate group, like a new process group: the n-th call of each replica gives the same room."""
        made = ThreadGroup(self.room.another(self._parted), self._rank)
        self._parted += 1
        made.on_its_way = lambda message: self.on_its_way(message)
        return made

    @property
    def world_size(self) -> int:
        return self.room.size

    @property
    def rank(self) -> int:
        return self._rank

    def counted(self) -> int:
        """Return the bytes of all messages since the last call."""
        found, self.total = self.total, 0
        return found

    def all_gather(self, message: Tensor) -> list[Tensor]:
        self.total += (self.world_size - 1) * message.nbytes
        self.wire_bytes += (self.world_size - 1) * message.nbytes
        return [each.clone() for each in self.room.meet(self._rank, self.on_its_way(message))]

    def all_to_all(self, messages: Sequence[Tensor]) -> list[Tensor]:
        self.total += (self.world_size - 1) * messages[0].nbytes
        self.wire_bytes += (self.world_size - 1) * messages[0].nbytes
        found = self.room.meet(self._rank, [self.on_its_way(each) for each in messages])
        return [each[self._rank].clone() for each in found]

    def broadcast(self, values: Tensor, source: int) -> None:
        values.copy_(self.room.meet(self._rank, values.clone())[source])
        self.wire_bytes += (self.world_size - 1) * values.nbytes // self.world_size

    def all_reduce_mean(self, values: Tensor) -> Tensor:
        values.copy_(torch.stack(self.room.meet(self._rank, values.clone())).mean(0))
        self.total += 2 * (self.world_size - 1) * values.nbytes // self.world_size
        self.wire_bytes += 2 * (self.world_size - 1) * values.nbytes // self.world_size
        return values


def together(size: int, work: Callable[[ThreadGroup], Result]) -> list[Result]:
    """Run `work` on several replicas in parallel and return their results; raise the first error of any replica."""
    room = Room(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(room, rank))
        except BaseException as error:
            errors.append(error)
            room.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results
