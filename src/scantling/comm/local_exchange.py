"""Local steps in a training loop: `OuterOptimizer` behind the interface `GradientExchange`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scantling.comm.consistency import find_mismatch
from scantling.comm.ddp import average_buffers, averaged_buffers
from scantling.comm.demo_exchange import exchange_groups
from scantling.comm.exchange import MomentumExchange
from scantling.comm.gradient_exchange import GradientExchange
from scantling.comm.local_steps import OuterOptimizer, outer_exchange, outer_options
from scantling.comm.param_groups import parameter_names
from scantling.comm.transport.shards import to_local, total_norm

logger = logging.getLogger(__name__)

_OWN, _OUTER, _ANCHOR = "own/", "outer/", "anchor/"
"""Prefixes of names: this replica's weights and buffers between exchanges, the outer momentum, and common weights."""


class LocalStepsExchange(GradientExchange):
    """Local steps of each replica's own optimizer, and an exchange of pseudo-gradients every `sync_every` steps.

    Gradients stay those of the replica. One that is NaN or Inf is left out of the replica's step. Saved buffers become
    their mean over the processes in each exchange.

    Args:
        method: "sparseloco" or "diloco", see `outer_exchange`.
        changes_ranks: True if replicas choose ranks of TT layers, by matrix products that need the same processors.
        process_group: of the replicas; default all processes.
        outer: options of `OuterOptimizer`.
        options: of `MomentumExchange`.
    """

    keeps_replicas_equal = False

    def __init__(
        self,
        method: str,
        *,
        process_group: Any = None,
        outer: Mapping[str, Any],
        options: Mapping[str, Any],
        changes_ranks: bool = False,
    ) -> None:
        self._changes_ranks = changes_ranks
        self.method, self.process_group, self._outer_options, self.options = method, process_group, outer, options
        self._outer: OuterOptimizer | None = None
        self._common_buffers: dict[str, Tensor] = {}
        self._bad: list[str] = []

    @property
    def is_synchronized(self) -> bool:
        return self.outer.is_synchronized

    @property
    def outer(self) -> OuterOptimizer:
        """The optimizer of the common parameters."""
        if self._outer is None:
            raise AssertionError("prepare() comes first")
        return self._outer

    def describe(self) -> str:
        exchange = self.outer.exchange
        every = f"after every {self.outer.sync_every} local steps" if self.outer.sync_every > 1 else "after every step"
        with self.common_weights():  # the strategy comes from a comparison of the replicas
            by = exchange.strategy
        return f"{exchange}\n  exchange by {by} among {exchange.replicas.world_size} processes {every}"

    def prepare(self, model: nn.Module) -> nn.Module:
        options = outer_options(self.method, self.options)
        exchange = outer_exchange(
            self.method, exchange_groups(model, options), process_group=self.process_group, **options
        )
        exchange.announces = False  # the loop prints `describe`
        if self._outer is None:
            _broadcast_first_weights(exchange)
        outer = OuterOptimizer(exchange, **self._outer_options)
        exchange.is_elementwise = not self._changes_ranks
        if self._outer is not None:  # parameters have new shapes
            outer.transfer_state(self._outer)
        self._outer, self._model = outer, model
        self._keep_buffers()
        return model

    def begin_step(self) -> None:
        self.outer.begin_round()

    def exchange(self) -> None:
        """Take the norm of this replica's own gradient, and leave the gradient out if it is not finite."""
        named = self._named_parameters()
        grads = [param.grad for param in named.values() if param.grad is not None]
        self.norm = total_norm(grads)
        self.local_nonfinite, self.nonfinite_ranks = not bool(torch.isfinite(self.norm)), ()
        self.wire_bytes, self.exposed_s = 0, 0.0
        if not self.local_nonfinite:
            return
        self._bad = [
            name
            for name, param in named.items()
            if param.grad is not None and not torch.isfinite(to_local(param.grad)).all()
        ]
        logger.warning(
            "local step %d is skipped: the gradient of %s of this replica is NaN or Inf",
            self.outer.steps + 1,
            self._bad[0] if self._bad else "another shard",
        )
        for param in named.values():
            param.grad = None

    def finish_step(self, *, last: bool) -> int:
        """Synchronize the replicas if it is due, or after the last step. Collectives: of `OuterOptimizer.advance`."""
        if self.outer.advance(at_once=last):
            self.wire_bytes = self.outer.wire_bytes + average_buffers(self._model)
            self._keep_buffers()
        return self.wire_bytes

    def adopt_weights(self) -> None:
        self.outer.adopt_parameters()

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        self.outer.slice_state(param, dim, index)

    def _keep_buffers(self) -> None:
        self._common_buffers = {name: value.clone() for name, value in averaged_buffers(self._model).items()}

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Context in which weights and buffers are those of the last exchange, equal on all replicas."""
        if self.outer.is_synchronized:
            yield
            return
        own = {name: value.clone() for name, value in averaged_buffers(self._model).items()}
        self._fill(self._common_buffers)
        try:
            with self.outer.common_parameters():
                yield
        finally:
            self._fill(own)

    def _values(self) -> dict[str, Tensor]:
        """Return the weights and buffers of this replica by name, on this process."""
        params = {name: to_local(param) for name, param in self._named_parameters().items()}
        return params | averaged_buffers(self._model)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        """Write parameters and buffers by name."""
        own = self._values()
        for name, value in values.items():
            own[name].copy_(value)

    def _named_parameters(self) -> dict[str, Tensor]:
        exchange = self.outer.exchange
        return dict(zip(parameter_names(exchange.param_groups), exchange.residuals.params, strict=True))

    def bad_parameters(self) -> list[str]:
        return self._bad

    def metrics(self) -> dict[str, Any]:
        """Return the bytes of residuals, common weights and outer momentum, and the divergence once it was measured."""
        exchange = self.outer.exchange
        kept = [
            value
            for state in exchange.residuals.state.values()
            for key, value in state.items()
            if key.startswith("residual")
        ]
        kept += [*self.outer.anchors, *self.outer.momenta.values()]
        divergence = exchange.replica_divergence
        return {
            "residual_bytes": sum(value.nbytes for value in kept),
            **({} if divergence is None else {"replica_divergence": divergence}),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals, the outer momentum and, between exchanges, the weights of this replica.

        The common weights are with it if they have more bits than the parameters.
        """
        own = {} if self.outer.is_synchronized else self._values()
        names = [*self._named_parameters()]
        return {
            **self.outer.exchange.local_state_dict()["residuals"],
            **{_OWN + name: value.clone() for name, value in own.items()},
            **{_OUTER + names[idx]: value for idx, value in self.outer.momenta.items()},
            **{_ANCHOR + names[idx]: value for idx, value in self.outer.wide_anchors().items()},
            "step": self.outer.exchange.step,
            "steps": self.outer.steps,
            "weight": self.outer.weight,
            "num_replicas": self.outer.exchange.replicas.world_size,
        }

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the mean of the states of several replicas, and of their weights by their shares of the batch."""
        mean = sum(float(state["weight"]) for state in states) / len(states)

        def moved(state: Mapping[str, Any], key: str) -> Tensor:
            """Return a weight without the residual in it, by the share of its replica."""
            value: Tensor = state[key].float()
            residual = state.get(key.removeprefix(_OWN))
            if residual is not None:
                value = value + self.outer.unsent_step(residual, num_replicas=state["num_replicas"])
            return value * (float(state["weight"]) / mean)

        scaled = [{key: moved(state, key) if key.startswith(_OWN) else state[key] for key in state} for state in states]
        merged = super().merge_states(scaled)
        for key in (key for key in merged if key.startswith(_OWN)):
            if (residual := merged.get(key.removeprefix(_OWN))) is not None:
                merged[key] -= self.outer.unsent_step(residual)
        return merged

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` or `merge_states` returned, after the common weights."""
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        exchange = self.outer.exchange
        residuals = {name: value for name, value in tensors.items() if not name.startswith((_OWN, _OUTER, _ANCHOR))}
        exchange.load_local_state_dict({"world_size": None, "rank": None, "residuals": residuals})
        exchange.load_shared_state_dict({"step": state["step"], "pending": {}})
        self.outer.steps = int(state["steps"])
        self._keep_buffers()
        own = {name.removeprefix(_OWN): value for name, value in tensors.items() if name.startswith(_OWN)}
        self.outer.is_synchronized = not own
        names = [*self._named_parameters()]
        anchors = {idx: tensors[_ANCHOR + name] for idx, name in enumerate(names) if _ANCHOR + name in tensors}
        self.outer.load_wide_anchors(anchors)
        self.outer.momenta = {
            idx: tensors[_OUTER + name].to(self.outer.anchors[idx])
            for idx, name in enumerate(names)
            if _OUTER + name in tensors
        }
        if own:
            self._fill(own)


@torch.no_grad()
def _broadcast_first_weights(exchange: MomentumExchange) -> None:
    """Give all replicas the weights of the first one if they differ: processors may draw other values by one seed."""
    replicas, params = exchange.replicas, exchange.residuals.params
    if replicas.world_size == 1 or find_mismatch(replicas, params) is None:
        return
    if replicas.rank == 0:
        logger.warning("the first weights differ between replicas; all of them start from those of rank 0")
    for param in params:
        replicas.broadcast(to_local(param), 0)
