"""Replicas that die, and come, while the others train on: the exchange under a manager of torchft.

The manager (`torchft.Manager`) finds out before every step who takes part. Where an exchange breaks, because somebody
died or was stopped in it, nothing of it is applied, and the gradients of that step stay in the residuals of those that
are left, where there are residuals. Who comes, or was away, takes weights and optimizer state from one that is there,
and begins with residuals of zero.

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
    """What replicas exchange over whose number a `torchft.Manager` decides at every step.

    It goes into `process_group` of `DeMo` and of `MomentumExchange`, whose `exchange()` is False, and whose `step()`
    changes nothing, where the exchange broke. `delay` and `overlap` need a fixed set of replicas, and are
    refused. Of what is sent in fp32 in full no residual is kept, and its gradients in a step that broke are lost; with
    `exchange="dense"`, those of everything.

    Args:
        manager: with `use_async_quorum=False`: replicas are whole before their forward pass, or not there. Call its
            `start_quorum()` before every forward pass; `should_commit()` is called by the exchange.
        group: the process group that the manager was given, such as `torchft.ProcessGroupGloo`.

    Raises:
        UserError: a manager that heals replicas while the others train.

    Example:
        >>> replicas = sc.comm.TorchFTGroup(manager, group)  # doctest: +SKIP
        >>> optimizer = sc.DeMo(sc.param_groups(model), lr=3e-4, process_group=replicas)  # doctest: +SKIP
        >>> replicas.join(model, optimizer)  # doctest: +SKIP
    """

    def __init__(self, manager: Any, group: Any) -> None:
        super().__init__()
        self.is_static = False
        if getattr(manager, "_use_async_quorum", False):
            raise UserError("a replica must be whole before its forward pass: torchft.Manager(use_async_quorum=False)")
        self.manager, self._managed = manager, group
        self._last: Any = None
        self._generation = 0

    def join(self, model: nn.Module, *parts: Any) -> None:
        """Let the manager give a replica that comes, or was away, what the others have. Call it once, at the start.

        Args:
            model: its weights and buffers are given.
            parts: optimizers and exchanges, schedulers and whatever has `state_dict` and `load_state_dict`, in the same
                order on all replicas. Of `DeMo` and `MomentumExchange` all but the residuals, which begin anew.
        """

        def given() -> dict[str, Any]:
            return {"model": model.state_dict(), "parts": [_shared(part) for part in parts]}

        def taken(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            for part, saved in zip(parts, state["parts"], strict=True):
                _take(part, saved)

        self.manager.register_state_dict_fn("scantling", taken, given)

    @property
    def step(self) -> int:
        """Steps that were applied."""
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
        """Leave out the step, and let the manager find out who is left."""
        logger.warning("step %d is left out, its gradients stay where there are residuals: %s", self.step + 1, error)
        self.manager.report_error(error)

    def should_commit(self) -> bool:
        found: bool = self.manager.should_commit()
        return found

    def _group(self) -> Any:
        """The group of those that take part now, which another replaces when others do; None before the first."""
        wrapped = hasattr(self._managed, "configure")  # a group of torchft around one of PyTorch
        return getattr(self._managed, "_pg", None) if wrapped else self._managed

    def _all_gather(self, whole: Tensor, message: Tensor) -> None:
        with _named():
            all_gather_into(self._group(), whole, message).wait()

    def _all_to_all(self, found: Tensor, whole: Tensor) -> None:
        with _named():
            self._group().alltoall_base(found, whole, [], []).wait()

    def _all_reduce(self, values: Tensor) -> None:
        with _named():
            self._group().allreduce([values]).wait()

    def _broadcast(self, values: Tensor, source: int) -> None:
        with _named():
            self._group().broadcast(values, source).wait()


@contextmanager
def _named() -> Iterator[None]:
    """Context of collectives, whose errors do not say more than that somebody does not answer."""
    try:
        yield
    except RuntimeError as error:
        first = first_line(error)
        raise SilentPeerError(f"another replica does not answer ({first})") from error


def _shared(part: Any) -> dict[str, Any]:
    whole = part.shared_state_dict() if hasattr(part, "shared_state_dict") else part.state_dict()
    found: dict[str, Any] = whole
    return found


def _take(part: Any, state: dict[str, Any]) -> None:
    if not hasattr(part, "load_shared_state_dict"):
        part.load_state_dict(state)
        return
    part.load_shared_state_dict(state)
    part.load_local_state_dict({"world_size": None, "rank": None, "residuals": {}})
