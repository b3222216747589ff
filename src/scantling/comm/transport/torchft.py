"""Fault-tolerant replica group: replicas may fail and join while the others train, under a manager of torchft.

The manager (`torchft.Manager`) determines the members before every step. If an exchange breaks, because a replica died
or was stopped, nothing of it is applied, and the gradients of the step stay in the residuals of the remaining replicas.
A joining replica copies weights and optimizer state from a running one, and starts with residuals of zero.

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
    """Group of replicas whose members a `torchft.Manager` determines in every step.

    Pass it as `process_group` to `DeMo` or `MomentumExchange`. After a broken exchange, `exchange()` returns False and
    `step()` changes nothing. `delay`, `overlap` and `exchange="dense"` need a fixed set of replicas and are refused.
    Parameters that are sent exactly have no residual, and their gradients in a broken step are lost.

    Args:
        manager: with `use_async_quorum=False`, so that a joining replica is complete before its forward pass. Call its
            `start_quorum()` before every forward pass; the exchange calls `should_commit()`. None to set the attribute
            before the first step.
        group: the process group of the manager, such as `torchft.ProcessGroupGloo`.

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
                "a replica must be complete before its forward pass: use torchft.Manager(use_async_quorum=False)"
            )
        self.manager, self._managed = manager, group
        self._last: Any = None
        self._generation = 0

    def join(self, model: nn.Module, *parts: Any) -> None:
        """Register state that the manager copies to joining replicas. Call it once, at the start.

        Args:
            model: its weights and buffers are copied.
            parts: optimizers, exchanges, schedulers and other objects with `state_dict` and `load_state_dict`, in the
                same order on all replicas. Residuals of `DeMo` and `MomentumExchange` are not copied; they start at
                zero.
        """

        def save() -> dict[str, Any]:
            return {"model": model.state_dict(), "parts": [_shared_state(part) for part in parts]}

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            for part, saved in zip(parts, state["parts"], strict=True):
                _load_shared_state(part, saved)

        self.manager.register_state_dict_fn("scantling", load, save)

    @property
    def step(self) -> int:
        """Number of applied steps."""
        count: int = self.manager.current_step()
        return count

    @property
    def generation(self) -> int:
        # torchft makes another group object for other members.
        group = self._group()
        if group is not self._last:
            self._last = group
            self._generation += 1
        return self._generation

    @property
    def quorum_id(self) -> int:
        return int(getattr(self.manager, "_quorum_id", 0)) & 0xFFFFFFFF  # torchft has no public name for it

    @property
    def world_size(self) -> int:
        group = self._group()
        return 1 if group is None else int(group.size())

    @property
    def rank(self) -> int:
        group = self._group()
        return 0 if group is None else int(group.rank())

    def handle_error(self, error: SilentPeerError) -> None:
        """Skip the step, and let the manager determine the remaining members."""
        logger.warning("step %d is skipped, and its gradients stay in the residuals: %s", self.step + 1, error)
        self.manager.report_error(error)

    def should_commit(self) -> bool:
        found: bool = self.manager.should_commit()
        return found

    def _group(self) -> Any:
        """Return the group of the current members, which changes with them; None before the first quorum."""
        wrapped = hasattr(self._managed, "configure")  # a group of torchft around one of PyTorch
        return getattr(self._managed, "_pg", None) if wrapped else self._managed

    def _all_gather(self, whole: Tensor, message: Tensor) -> None:
        with _silent_peer_errors():
            all_gather_into(self._group(), whole, message).wait()

    def _all_to_all(self, found: Tensor, whole: Tensor) -> None:
        with _silent_peer_errors():
            self._group().alltoall_base(found, whole, [], []).wait()

    def _all_reduce(self, values: Tensor) -> None:
        with _silent_peer_errors():
            self._group().allreduce([values]).wait()

    def _broadcast(self, values: Tensor, source: int) -> None:
        with _silent_peer_errors():
            self._group().broadcast(values, source).wait()


@contextmanager
def _silent_peer_errors() -> Iterator[None]:
    """Context that turns errors of collectives into a SilentPeerError."""
    try:
        yield
    except RuntimeError as error:
        first = first_line(error)
        raise SilentPeerError(f"another replica does not answer ({first})") from error


def _shared_state(part: Any) -> dict[str, Any]:
    whole = part.shared_state_dict() if hasattr(part, "shared_state_dict") else part.state_dict()
    found: dict[str, Any] = whole
    return found


def _load_shared_state(part: Any, state: dict[str, Any]) -> None:
    if not hasattr(part, "load_shared_state_dict"):
        part.load_state_dict(state)
        return
    part.load_shared_state_dict(state)
    # Residuals of another replica would be applied twice.
    part.load_local_state_dict({"world_size": None, "rank": None, "residuals": {}})
