"""The seam between a training loop and whatever its processes exchange.

A loop calls `prepare` once, wraps every micro-batch in `accumulate`, and calls `exchange` after the last backward pass.
After that each `.grad` holds the mean over the processes of what they computed (or what the method puts in its place).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn


class GradientExchange:
    """How gradients of several processes become one update. As it is: one process, and nothing is sent.

    Attributes:
        wire_bytes: that this process sent for the last step.
        exposed_s: seconds of the backward pass in which only the exchange went on.
        left_out: ranks whose gradients were NaN or Inf and were left out of the last exchange, which with a delay is
            that of the step before.
        withheld: whether this process's own gradient of this step is NaN or Inf, and goes into no exchange.
        norm: of this process's own gradient before the exchange, where a norm after it would mean nothing; else None.
        learns_from_a_pass: whether a backward pass changes how later ones are summed.
    """

    wire_bytes: int = 0
    exposed_s: float = 0.0
    left_out: tuple[int, ...] = ()
    withheld: bool = False
    norm: Tensor | None = None
    learns_from_a_pass: ClassVar[bool] = False

    def describe(self) -> str | None:
        """What travels how, for the reader of a run; None where there is nothing to say."""
        return None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return what the loop calls in place of `model`; the parameters stay those of `model`."""
        return model

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of one forward and backward pass; nothing is sent before the last micro-batch."""
        return nullcontext()

    def exchange(self) -> None:
        """Finish the exchange of this step. Collectives: those of the method, on every rank, in the same order."""

    def bad_parameters(self) -> list[str]:
        """Names among which this process's own gradient was NaN or Inf before the exchange; empty where none was."""
        return []

    def metrics(self) -> dict[str, Any]:
        """Further figures of this step, by name."""
        return {}

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Cut what is kept of a parameter that keeps only some positions, 1-D int64, of a dim."""

    def state_dict(self) -> dict[str, Any]:
        """What this process keeps for itself: tensors by the names of their parameters, and JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave on this process, or the mean of what it gave on another number of them."""


class NoExchange(GradientExchange):
    """One process: nothing is sent."""
