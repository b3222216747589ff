"""Replicas that can fail and join while the others continue, managed by torchft.

`torchft.Manager` decides before every step which replicas take part. If an exchange fails because a replica died or was
stopped, its result is discarded, and the gradients of that step stay in the residuals of the remaining replicas. A
replica that joins or returns gets weights and optimizer state from an active one and starts with zero residuals.

    manager = torchft.Manager(pg=group, load_state_dict=None, state_dict=None, min_replica_size=1,
                              use_async_quorum=False, timeout=timedelta(seconds=10))
    replicas = scantling.comm.TorchFTGroup(manager, group)
    optimizer = scantling.DeMo(scantling.param_groups(model), lr=3e-4, process_group=replicas)
    replicas.join(model, optimizer)
    while manager.current_step() < steps:
        manager.start_quorum()
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from scantling.comm.transport.group import ReplicaGroup
from scantling.errors import SilentPeerError, UserError, first_line
from scantling.numerics.torch_private import all_gather_into

logger = logging.getLogger(__name__)


class TorchFTGroup(ReplicaGroup):
    """Group of replicas whose members a `torchft.Manager` decides at every step.

    Pass it as `process_group` to `DeMo` or `MomentumExchange`. After a failed exchange, `exchange()` returns False and
    `step()` changes nothing. `delay` and `overlap` need a fixed set of replicas and are refused. Parameters sent dense
    in fp32 have no residual, so their gradients of a failed step are lost; with `exchange="dense"` all of them.

    Args:
        manager: with `use_async_quorum=False`, so that a replica is complete before its forward pass. Call its
            `start_quorum()` before every forward pass; the exchange calls `should_commit()`.
        group: process group of the manager, such as `torchft.ProcessGroupGloo`.

    Raises:
        UserError: a manager with an asynchronous quorum.

    Example:
        >>> replicas = sc.comm.TorchFTGroup(manager, group)  # doctest: +SKIP
        >>> optimizer = sc.DeMo(sc.param_groups(model), lr=3e-4, process_group=replicas)  # doctest: +SKIP
        >>> replicas.join(model, optimizer)  # doctest: +SKIP
    """

    def __init__(self, manager: Any, group: Any) -> None:
        super().__init__()
        self.is_static = False
        if getattr(manager, "_use_async_quorum", False):
            raise UserError(
                "the manager has use_async_quorum=True, but a replica must be complete before its forward pass; use "
                "torchft.Manager(use_async_quorum=False)"
            )
        self.manager, self._managed = manager, group
        self._last: Any = None
        self._generation = 0

    def join(self, model: nn.Module, *parts: Any) -> None:
        """Let the manager copy the state of active replicas to joining ones. Call it once, at the start.

        Args:
            model: the model; its weights and buffers are copied.
            parts: optimizers, exchanges, schedulers and other objects with `state_dict` and `load_state_dict`, in the
                same order on all replicas. Residuals of `DeMo` and `MomentumExchange` are not copied; they start at
                zero.
        """

        def save() -> dict[str, Any]:
            return {"model": model.state_dict(), "parts": [_save_shared(part) for part in parts]}

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            for part, saved in zip(parts, state["parts"], strict=True):
                _load_shared(part, saved)

        self.manager.register_state_dict_fn("scantling", load, save)

    @property
    def step(self) -> int:
        """Number of applied steps."""
        count: int = self.manager.current_step()
        return count

    @property
    def generation(self) -> int:
        group = self._group()
        if group is not self._last:
            self._last = group
            self._generation += 1
        return self._generation

    @property
    def quorum_id(self) -> int:
        return int(getattr(self.manager, "_quorum_id", 0)) & 0xFFFFFFFF  # which the manager has no public name for

    @property
    def world_size(self) -> int:
        group = self._group()
        return 1 if group is None else int(group.size())

    @property
    def rank(self) -> int:
        group = self._group()
        return 0 if group is None else int(group.rank())

    def handle_error(self, error: SilentPeerError) -> None:
        """Skip the step and report the error to the manager, which finds the remaining replicas."""
        logger.warning("step %d is skipped; its gradients stay in the residuals: %s", self.step + 1, error)
        self.manager.report_error(error)

    def should_commit(self) -> bool:
        commit: bool = self.manager.should_commit()
        return commit

    def _group(self) -> Any:
        """Return the process group of the current members, which a new one replaces when they change; None at first."""
        is_wrapper = hasattr(self._managed, "configure")  # torchft wraps a process group of PyTorch
        return getattr(self._managed, "_pg", None) if is_wrapper else self._managed

    def _all_gather(self, output: Tensor, message: Tensor) -> None:
        with _convert_errors():
            all_gather_into(self._group(), output, message).wait()

    def _all_to_all(self, output: Tensor, messages: Tensor) -> None:
        with _convert_errors():
            self._group().alltoall_base(output, messages, [], []).wait()

    def _all_reduce(self, values: Tensor) -> None:
        with _convert_errors():
            self._group().allreduce([values]).wait()

    def _broadcast(self, values: Tensor, source: int) -> None:
        with _convert_errors():
            self._group().broadcast(values, source).wait()


@contextmanager
def _convert_errors() -> Iterator[None]:
    """Convert errors of collectives into SilentPeerError; torchft does not say which replica failed."""
    try:
        yield
    except RuntimeError as error:
        first = first_line(error)
        raise SilentPeerError(f"another replica does not answer ({first})") from error


def _save_shared(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = part.shared_state_dict() if hasattr(part, "shared_state_dict") else part.state_dict()
    return state


def _load_shared(part: Any, state: dict[str, Any]) -> None:
    if not hasattr(part, "load_shared_state_dict"):
        part.load_state_dict(state)
        return
    part.load_shared_state_dict(state)
    part.load_local_state_dict({"world_size": None, "rank": None, "residuals": {}})
