"""DiLoCo and SparseLoCo: several local optimizer steps between exchanges.

Every replica takes H steps with its own optimizer. Then, with the common old parameters p0 and the local parameters p:

    d   =  p0 - p                        (1) pseudo-gradient, different on each replica
    D   =  exchange(d)                   (2) mean over replicas: dense, or top-k with error feedback
    p0  <-  outer step with D            (3) SGD, for DiLoCo with Nesterov momentum
    p   <-  p0                           (4)

DiLoCo (Douillard et al., arXiv 2311.08105) exchanges d dense; SparseLoCo (Sarfi et al., arXiv 2508.15706) the largest
components of each block, without a transform. Its decaying residual replaces the outer momentum.

Cost: 4 bytes per parameter for p0, the state of the exchange and of the outer momentum; `wire_bytes` every H steps.
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

_TOPK_OPTIONS = frozenset({"decay", "topk", "chunk", "values", "residual"})
"""Options without effect in a dense exchange."""


class LocalSteps:
    """Optimizer with local steps and an exchange between replicas every H steps.

    A local step with NaN or Inf gradients is skipped on its replica. Parameters frozen between two exchanges return to
    their values of the last exchange.

    Use it like an optimizer: `step()`, `zero_grad()`, `state_dict()`, and `torch.amp.GradScaler.step`. Learning-rate
    schedules belong to the inner optimizer.

    Args:
        inner: optimizer of this replica, with gradients that were not averaged.
        exchange: exchange of the same parameters, with `sync_every=1`.
        sync_every: number of local steps between exchanges, H.
        outer_lr, outer_momentum: options of the outer SGD; its momentum is Nesterov's.

    Attributes:
        wire_bytes: bytes sent by this process in the last step; 0 except in every H-th.

    Raises:
        UserError: a value out of range, an exchange over other parameters or at other times, or a `TorchFTGroup`;
            in a step, a parameter resized by a `RankAdapter`, which selects ranks by gradients of one replica.
    """

    _step_supports_amp_scaling = True  # the scaler then calls every step, which this class counts

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
        for name, default in (("delay", 0), ("overlap", False), ("sync_every", 1)):
            given = getattr(exchange.config, name)
            if given != default:
                raise UserError(
                    f"{name}={given} works only with an exchange at every step, not with local steps; leave it out"
                )
        if not exchange.replicas.is_static:
            raise UserError(
                "local steps need a fixed set of replicas, and a TorchFTGroup changes: a replica that joins lacks the "
                "parameters of the last exchange. Use sc.DeMo with a TorchFTGroup"
            )
        nesterov = outer_momentum > 0.0
        self.outer = torch.optim.SGD(self._params, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
        self._anchors = [to_local(param).clone() for param in self._params]
        self.steps, self.wire_bytes = 0, 0
        exchange.momentum_watch = MomentumWatch(())  # pseudo-gradients are no momentum; do not warn of a second one
        exchange.compared_values = {"local steps": sync_every, "outer_lr": outer_lr, "outer_momentum": outer_momentum}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the inner optimizer."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """Take a local step; every H-th time, exchange and take an outer step.

        Collectives: those of `MomentumExchange.exchange`, every H-th time; one all-gather the first time; for sharded
        parameters one all-reduce of 4 bytes per dim of their mesh.

        Raises:
            UserError, NonFiniteError, PayloadError: as `MomentumExchange.exchange`.
        """
        if any(
            to_local(param).shape != anchor.shape for param, anchor in zip(self._params, self._anchors, strict=True)
        ):
            raise UserError(
                "a parameter has changed its shape since the local steps began: with a RankAdapter, each replica would "
                "select ranks by its own gradients. Use sc.DeMo or sc.MomentumExchange with a RankAdapter"
            )
        self.exchange.check_gradients()
        if (scale := grad_scale(self)) is not None:
            unscale_gradients(self._params, scale)
        finite = all_finite(to_local(param.grad) for param in self._params if param.grad is not None)
        if all_agree(self._params, finite):
            self.inner.step()
        else:
            logger.warning("local step %d is skipped: a gradient of this replica is NaN or Inf", self.steps + 1)
        self.steps += 1
        self.wire_bytes = 0
        if self.steps % self.sync_every:
            return
        for param, anchor in zip(self._params, self._anchors, strict=True):
            part = to_local(param)
            pseudo_gradient = anchor - part  # (1)
            part.copy_(anchor)  # the exchange compares replicas at p0, and the outer step starts there
            param.grad = None
            if param.requires_grad:  # frozen parameters are not exchanged and return to p0
                param.grad = as_gradient(pseudo_gradient, param)
        self.exchange.exchange()  # (2)
        self.wire_bytes = self.exchange.wire_bytes
        self.outer.step()  # (3), (4)
        self.outer.zero_grad()
        for param, anchor in zip(self._params, self._anchors, strict=True):
            anchor.copy_(to_local(param))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this replica needs to resume."""
        return {
            "inner": self.inner.state_dict(),
            "outer": self.outer.state_dict(),
            "exchange": self.exchange.state_dict(),
            "anchors": [anchor.clone() for anchor in self._anchors],
            "steps": self.steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that `state_dict` returned on this replica.

        Raises:
            UserError: a state of another class.
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
    """Return DiLoCo (arXiv 2311.08105): local steps with a dense exchange.

    Args:
        inner: the optimizer of this replica, AdamW in the paper.
        groups: the same parameters, or groups of them.
        sync_every: number of local steps between exchanges; 500 in the paper.
        outer_lr, outer_momentum: options of the outer optimizer; the defaults are the paper's.
        options: options of `MomentumExchange`; `dense` is the format, by default fp32.

    Returns:
        The optimizer to use instead of `inner`.

    Raises:
        UserError: an option without effect in a dense exchange, or as `LocalSteps`.
    """
    if unused := sorted(_TOPK_OPTIONS & set(options)):
        raise UserError(
            f"diloco sends everything dense, so that {', '.join(unused)} would have no effect; leave them out, set the "
            "format with dense=, or use sparseloco"
        )
    keys = ("params", "param_names")
    dense_groups = [
        {key: group[key] for key in keys if key in group} | {"role": "vector"} for group in make_groups(groups, {})
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
    """Return SparseLoCo (arXiv 2508.15706): local steps that exchange the top 64 of 4096 values, with error feedback.

    Args:
        inner: the optimizer of this replica.
        groups: the same parameters, or groups of them from `scantling.param_groups`.
        sync_every: number of local steps between exchanges; 15 to 250 in the paper.
        outer_lr: learning rate of the outer step.
        options: options of `MomentumExchange`; by default topk=64, chunk=64, decay=0.95, values="int4".

    Returns:
        The optimizer to use instead of `inner`.

    Raises:
        UserError: as `LocalSteps` and `MomentumExchange`.
    """
    defaults: ExchangeOptions = {"topk": 64, "chunk": 64, "decay": 0.95, "values": "int4"}
    untransformed = [{**group, "transform": "none"} for group in make_groups(groups, {})]
    exchange = MomentumExchange(untransformed, **{**defaults, **options})
    return LocalSteps(inner, exchange, sync_every=sync_every, outer_lr=outer_lr)
