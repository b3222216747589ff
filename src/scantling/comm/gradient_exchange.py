"""Interface between a training loop and the communication of its processes.

A loop calls `prepare` once. In each step it calls `begin_step`, runs every micro-batch in the context `accumulate`, and
calls `exchange` after the last backward pass. Each `.grad` then holds the mean over the processes, or the method's
replacement for it. `finish_step` comes after the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn

from scantling.comm.residuals import mean_of_tensors


class GradientExchange:
    """Combine the gradients of several processes into one update. This base class is for one process.

    Attributes:
        wire_bytes: bytes that this process sent in the last step.
        exposed_s: seconds of the last step that only communication took.
        nonfinite_ranks: ranks whose gradients were NaN or Inf and were left out of the last exchange; with a delay, of
            the exchange of the previous step; if replicas differ, the ranks that left their own out.
        local_nonfinite: True if this process's own gradient of the step is NaN or Inf, and was left out.
        norm: of this process's own gradient before the exchange, if a norm after it has no meaning; else None.
        keeps_replicas_equal: False if weights and optimizer states differ between replicas.
        needs_warm_up_pass: True if the first backward pass changes the order in which later ones are summed.
        is_elastic: True if replicas leave and join; a replica is then a run of one process.
        is_applied: False if the last exchange broke, because a replica left; every `.grad` is then None.
        share: of an elastic replica, its part of the batch relative to the mean of all replicas.
    """

    wire_bytes: int = 0
    exposed_s: float = 0.0
    nonfinite_ranks: tuple[int, ...] = ()
    local_nonfinite: bool = False
    norm: Tensor | None = None
    keeps_replicas_equal: bool = True
    needs_warm_up_pass: ClassVar[bool] = False
    is_elastic: bool = False
    is_applied: bool = True
    share: float = 1.0

    def describe(self) -> str | None:
        """Return a description of the messages for the log of a run; None if there is nothing to report."""
        return None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the module that the loop calls instead of `model`; the parameters stay those of `model`."""
        return model

    def begin_step(self) -> None:
        """Prepare the weights for the passes of a step."""

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one forward and backward pass; only the last micro-batch may send."""
        return nullcontext()

    def exchange(self) -> None:
        """Finish the exchange of this step. Collectives: those of the method, on every rank in the same order."""

    def finish_step(self, *, last: bool) -> int:
        """Do the part of the exchange that comes after the update; return the bytes that this process sent for it.

        Collectives: those of the method.

        Args:
            last: True in the last step of a run, after which all replicas must have the same weights.
        """
        return 0

    @property
    def is_synchronized(self) -> bool:
        """True if all replicas have the same weights now."""
        return True

    def adopt_weights(self) -> None:
        """Take the weights of this replica, which are equal on all of them, as the common ones."""

    def common_weights(self) -> AbstractContextManager[None]:
        """Return a context in which all replicas have the same weights, those of the last exchange."""
        return nullcontext()

    def bad_parameters(self) -> list[str]:
        """Return names of parameters, some of whose own gradients were NaN or Inf before the exchange."""
        return []

    def metrics(self) -> dict[str, Any]:
        """Return further metrics of this step, by name."""
        return {}

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Keep some indices, 1-D int64, of one dim in the state of a parameter."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process: tensors by the names of their parameters, and JSON values."""
        return {}

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state with which each of another number of replicas continues: the mean of the saved ones.

        Args:
            states: of `state_dict`, of all replicas; values other than tensors are taken from the first.

        Raises:
            UserError: tensors of one name differ in shape.
        """
        tensors = [{key: value for key, value in state.items() if isinstance(value, Tensor)} for state in states]
        return {**states[0], **mean_of_tensors(tensors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this replica, or what `merge_states` made of several."""


class NoExchange(GradientExchange):
    """Exchange of one process: nothing is sent."""
