"""Exchanges that have started and whose results have not been received."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from scantling.comm.collectives import Result
from scantling.comm.layout import Bucket
from scantling.comm.transport.background import Background
from scantling.comm.transport.group import ReplicaGroup

Exchange: TypeAlias = Callable[[ReplicaGroup], Result]


@dataclass(frozen=True, slots=True)
class Message:
    """An exchange in flight.

    Attributes:
        bucket: the bucket that was sent.
        step: the step in which it was sent.
        wait: waits for the result and returns it.
    """

    bucket: Bucket
    step: int
    wait: Callable[[], Result]


class InFlight:
    """Queue of exchanges in flight. With a thread they run while training goes on, in their own process group."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._replicas: ReplicaGroup | None = None
        self._background: Background | None = None

    def __bool__(self) -> bool:
        return bool(self._messages)

    def start(self, replicas: ReplicaGroup, *, in_thread: bool) -> None:
        """Start a step, in which bytes are counted from zero.

        Collective in the first step with a thread: a new process group.
        """
        # A thread needs its own process group: collectives of two threads in one group could be reordered.
        if self._replicas is None:
            in_thread = in_thread and replicas.world_size > 1
            self._replicas = replicas.clone() if in_thread else replicas
            self._background = Background() if in_thread else None
        self._replicas.reset_wire_bytes()

    @property
    def wire_bytes(self) -> int:
        """Bytes sent in this step."""
        return 0 if self._replicas is None else self._replicas.wire_bytes

    def send(self, bucket: Bucket, step: int, exchange: Exchange, device: torch.device) -> None:
        """Exchange a bucket: at once, or in the thread after all buckets before.

        Args:
            bucket: the bucket.
            step: the current step.
            exchange: the collectives, called with the replicas.
            device: of the tensors.

        Raises:
            NonFiniteError, PayloadError, SilentPeerError: without a thread, those of `exchange_coefficients`.
        """
        assert self._replicas is not None, "start() comes first"
        if not bucket.block_groups:  # all its parameters are frozen or empty
            self._messages.append(Message(bucket, step, lambda: ([], [])))
        elif self._background is None:
            result = exchange(self._replicas)
            self._messages.append(Message(bucket, step, lambda: result))
        else:
            task = self._background.submit(partial(exchange, self._replicas), device)
            self._messages.append(Message(bucket, step, partial(task.result, _tensors)))

    def receive(self) -> list[tuple[Message, Result]]:
        """Wait for all exchanges in flight, and return them with their results.

        Raises:
            Exception: the first error of an exchange, after all have ended.
        """
        # Empty the queue first: after an error, no message of this step may be received again.
        messages, self._messages = self._messages, []
        received, errors = [], []
        for message in messages:
            try:
                received.append((message, message.wait()))
            # Wait for the others too: no exchange may still run when the caller handles the error.
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return received

    def clear(self) -> None:
        """Forget the exchanges in flight without waiting for them."""
        self._messages = []

    def wait_and_discard(self) -> None:
        """Wait for all exchanges in flight, and discard their results and errors."""
        messages, self._messages = self._messages, []
        for message in messages:
            with suppress(Exception):
                message.wait()


def _tensors(result: Result) -> Iterator[Tensor]:
    for outcome in result[0]:
        for part in (outcome.mean, outcome.applied, outcome.owner_error):
            yield from (tensor for tensor in part or () if tensor is not None)
