"""Replicas that take several optimizer steps of their own between exchanges: DiLoCo, and SparseLoCo.

Every replica steps its own optimizer H times. Then, with p0 the parameters that all had and p what a replica has now:

    d   =  p0 - p                        pseudo-gradient, different on each replica
    D   =  exchange(d)                   the mean over replicas, in full or of few components with error feedback
    p0  <-  outer step with D            SGD, for DiLoCo with Nesterov momentum
    p   <-  p0

DiLoCo (Douillard et al., arXiv 2311.08105) exchanges everything; SparseLoCo (Sarfi et al., arXiv 2508.15706) the
largest components of each block, without a transform and without outer momentum, which the decaying residual is in its
place.

Cost: 4 bytes for each parameter for p0, and those of exchange and outer momentum; `wire_bytes` every H steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch

from scantling.comm.config import ExchangeOptions, is_integer, is_number
from scantling.comm.demo import grad_scale, unscale_gradients
from scantling.comm.exchange import MomentumExchange
from scantling.comm.momentum_watch import MomentumWatch
from scantling.comm.param_groups import make_groups
from scantling.comm.residuals import check_state_keys
from scantling.comm.transport.shards import all_agree, all_finite, as_gradient, to_local
from scantling.errors import UserError

logger = logging.getLogger(__name__)

_OF_A_SELECTION = frozenset({"decay", "topk", "chunk", "values", "residual"})
"""Options of the exchange of matrices by blocks."""


class LocalSteps:
    """An optimizer that steps by itself, and the exchange that brings replicas together every so many steps.

    A step whose gradients are NaN or Inf is left out on its replica. What is frozen between two exchanges goes back to
    what all replicas had after the first.

    It goes where an optimizer goes in a loop: `step()`, `zero_grad()`, `state_dict()`, and `torch.amp.GradScaler.step`.
    Schedules of the learning rate belong to the inner optimizer.

    Args:
        inner: steps the parameters of this replica; any optimizer, with gradients that were not averaged.
        exchange: over the same parameters, with `sync_every=1`.
        sync_every: H.
        outer_lr, outer_momentum: of the outer SGD; its momentum is Nesterov's.

    Attributes:
        wire_bytes: what this process sent in the last step, 0 but for every H-th.

    Raises:
        UserError: a value out of range, an exchange over other parameters or at other times, or a `TorchFTGroup`;
            in a step, a parameter that a `RankAdapter` has cut: it chooses ranks by gradients, which are not shared.
    """

    _step_supports_amp_scaling = True  # so that a scaler leaves out no step, which are counted

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        exchange: MomentumExchange,
        *,
        sync_every: int,
        outer_lr: float,
        outer_momentum: float = 0.0,
    ) -> None:
        if not is_integer(sync_every, least=1):
            raise UserError(f"sync_every must be an integer of at least 1; given {sync_every!r}")
        if not is_number(outer_lr) or not 0.0 < outer_lr < math.inf:
            raise UserError(f"outer_lr must be above 0 and finite; given {outer_lr!r}")
        if not is_number(outer_momentum) or not 0.0 <= outer_momentum < 1.0:
            raise UserError(f"outer_momentum must be from 0 to below 1; given {outer_momentum!r}")
        self.inner, self.exchange, self.sync_every = inner, exchange, sync_every
        self._params = [param for group in exchange.param_groups for param in group["params"]]
        if {id(p) for group in inner.param_groups for p in group["params"]} != {id(p) for p in self._params}:
            raise UserError("the inner optimizer and the exchange must hold the same parameters")
        for name, usual in (("delay", 0), ("overlap", False), ("sync_every", 1)):
            given = getattr(exchange.config, name)
            if given != usual:
                raise UserError(f"{name}={given} is for an exchange at every step, not for local steps; leave it out")
        if not exchange.replicas.is_static:
            raise UserError(
                "local steps are for replicas that stay: one that comes, or was away, would lack what the others "
                "started from. With a TorchFTGroup use sc.DeMo"
            )
        nesterov = outer_momentum > 0.0
        self.outer = torch.optim.SGD(self._params, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
        self._anchors = [to_local(param).clone() for param in self._params]
        self.steps, self.wire_bytes = 0, 0
        exchange.momentum_watch = MomentumWatch(
            ()
        )  # watches nothing: pseudo-gradients are no momentum, and the outer one is wanted
        exchange.compared_values = {"local steps": sync_every, "outer_lr": outer_lr, "outer_momentum": outer_momentum}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the inner optimizer."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """A step of the inner optimizer; every H-th time replicas come together after it.

        Collectives: those of `MomentumExchange.exchange`, every H-th time; one all-gather the first time; of sharded
        parameters one all-reduce of 4 bytes for each dim of their mesh.

        Raises:
            UserError, NonFiniteError, PayloadError: as of `MomentumExchange.exchange`.
        """
        if any(
            to_local(param).shape != anchor.shape for param, anchor in zip(self._params, self._anchors, strict=True)
        ):
            raise UserError(
                "a parameter has another shape than when local steps began: ranks that a RankAdapter brings down would "
                "be chosen by each replica from gradients of its own. Use sc.DeMo or sc.MomentumExchange with it"
            )
        self.exchange.check_gradients()
        if (scale := grad_scale(self)) is not None:
            unscale_gradients(self._params, scale)
        finite = all_finite(to_local(param.grad) for param in self._params if param.grad is not None)
        if all_agree(self._params, finite):
            self.inner.step()
        else:
            logger.warning("local step %d is left out: a gradient of this replica is NaN or Inf", self.steps + 1)
        self.steps += 1
        self.wire_bytes = 0
        if self.steps % self.sync_every:
            return
        for param, anchor in zip(self._params, self._anchors, strict=True):
            part = to_local(param)
            moved = anchor - part
            part.copy_(anchor)  # what replicas compare, and where the outer step begins
            param.grad = None
            if param.requires_grad:  # what is frozen is not exchanged, and may not move on one replica alone
                param.grad = as_gradient(moved, param)
        self.exchange.exchange()
        self.wire_bytes = self.exchange.wire_bytes
        self.outer.step()
        self.outer.zero_grad()
        for param, anchor in zip(self._params, self._anchors, strict=True):
            anchor.copy_(to_local(param))

    def state_dict(self) -> dict[str, Any]:
        """All that this replica needs to go on."""
        return {
            "inner": self.inner.state_dict(),
            "outer": self.outer.state_dict(),
            "exchange": self.exchange.state_dict(),
            "anchors": [anchor.clone() for anchor in self._anchors],
            "steps": self.steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this replica.

        Raises:
            UserError: another kind of state.
        """
        check_state_keys(state_dict, "state_dict of local steps", ("inner", "outer", "exchange", "anchors", "steps"))
        self.inner.load_state_dict(state_dict["inner"])
        self.outer.load_state_dict(state_dict["outer"])
        self.exchange.load_state_dict(state_dict["exchange"])
        for anchor, saved in zip(self._anchors, state_dict["anchors"], strict=True):
            anchor.copy_(saved)
        self.steps = int(state_dict["steps"])


def diloco(
    inner: torch.optim.Optimizer,
    groups: Iterable[Any],
    *,
    sync_every: int = 100,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    **options: Any,
) -> LocalSteps:
    """DiLoCo (arXiv 2311.08105): everything is exchanged every `sync_every` steps.

    Args:
        inner: the optimizer of this replica, AdamW in the paper.
        groups: the same parameters, or groups of them.
        sync_every: 500 in the paper.
        outer_lr, outer_momentum: of the outer optimizer, the paper's.
        options: of `MomentumExchange`; `dense` is the format, fp32 unless given.

    Returns:
        The optimizer of this replica, in place of `inner`.

    Raises:
        UserError: an option of what is selected, which here is everything; and as of `LocalSteps`.
    """
    if unused := sorted(_OF_A_SELECTION & set(options)):
        raise UserError(
            f"diloco exchanges everything, so that {', '.join(unused)} would have no effect: leave them out, or take "
            "sparseloco; the format is dense="
        )
    kept = ("params", "param_names")
    dense_groups = [
        {key: group[key] for key in kept if key in group} | {"role": "vector"} for group in make_groups(groups, {})
    ]
    exchange = MomentumExchange(dense_groups, **{"dense": "fp32", **options})
    return LocalSteps(inner, exchange, sync_every=sync_every, outer_lr=outer_lr, outer_momentum=outer_momentum)


def sparseloco(
    inner: torch.optim.Optimizer,
    groups: Iterable[Any],
    *,
    sync_every: int = 30,
    outer_lr: float = 1.0,
    **options: Any,
) -> LocalSteps:
    """SparseLoCo (arXiv 2508.15706): the 64 largest of 4096 numbers every `sync_every` steps, with error feedback.

    Args:
        inner: the optimizer of this replica.
        groups: the same parameters, or groups of them from `scantling.param_groups`.
        sync_every: 15 to 250 in the paper.
        outer_lr: of the outer step.
        options: of `MomentumExchange`; default topk=64, chunk=64, decay=0.95, values="int4".

    Returns:
        The optimizer of this replica, in place of `inner`.

    Raises:
        UserError: as of `LocalSteps` and `MomentumExchange`.
    """
    defaults: ExchangeOptions = {"topk": 64, "chunk": 64, "decay": 0.95, "values": "int4"}
    untransformed = [{**group, "transform": "none"} for group in make_groups(groups, {})]
    exchange = MomentumExchange(untransformed, **{**defaults, **options})
    return LocalSteps(inner, exchange, sync_every=sync_every, outer_lr=outer_lr)
