"""The seam between a training loop and whatever its processes exchange.

A loop calls `prepare` once, wraps every micro-batch in `accumulate`, and calls `exchange` after the last backward pass.
After that each `.grad` holds the mean over the processes of what they computed (or what the method puts in its place).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import nn


class GradientExchange(Protocol):
    """How gradients of several processes become one update."""

    wire_bytes: int
    """Bytes that this process sent for the last step."""
    exposed_s: float
    """Seconds of the last exchange that no computation hid."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return what the loop calls in place of `model`; the parameters stay those of `model`."""
        ...

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of one forward and backward pass; nothing is sent before the last micro-batch."""
        ...

    def exchange(self) -> None:
        """Finish the exchange of this step. Collectives: those of the method, on every rank, in the same order."""
        ...

    def bad_parameters(self) -> list[str]:
        """Names among which this process's own gradient was NaN or Inf before the exchange; empty where none was."""
        ...


class NoExchange:
    """One process: nothing is sent."""

    wire_bytes = 0
    exposed_s = 0.0

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def exchange(self) -> None:
        return None

    def bad_parameters(self) -> list[str]:
        return []
