"""Momentum exchange in a training loop: `MomentumExchange` behind the interface `GradientExchange`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from scantling.comm.ddp import average_buffers, averaged_buffers
from scantling.comm.exchange import MomentumExchange
from scantling.comm.gradient_exchange import GradientExchange
from scantling.comm.local_steps import mean_correction
from scantling.comm.transport.group import ReplicaGroup
from scantling.comm.transport.shards import clip_gradients, total_norm
from scantling.errors import UserError
from scantling.groups import param_groups

_PENDING = "pending/"
"""Prefix of the names of results that `delay` holds back; no parameter has a slash in its name."""


def exchange_groups(model: nn.Module, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups of a model for an exchange with these options.

    Rank gates of TT layers, which are few, are never sent as signs: all gradients of a row would have one magnitude,
    which would hide from a `RankAdapter` how much each rank matters.
    """
    groups = param_groups(model, control_lr=0.0)  # a rate, so that they have their own groups
    for group in groups:
        if group.pop("lr", None) is not None and options.get("dense") == "sign":
            group["dense"] = "int8"
    return groups


class DemoExchange(GradientExchange):
    """Exchange of momentum: local gradients go into residuals, and each `.grad` becomes the decoded momentum.

    Saved buffers become their mean over the processes.

    Gradients are clipped by the norm of this process's own gradient before they are accumulated: the scale of a
    momentum says nothing about a threshold for gradients.

    Args:
        clip: largest norm of a replica's own gradient, or None.
        batch_shares: relative shares of the replicas in a batch, in proportion to which their gradients are scaled;
            equal by default.
        process_group: of the replicas, also a `TorchFTGroup`; default all processes.
        options: of `MomentumExchange`.
    """

    def __init__(
        self,
        *,
        clip: float | None = None,
        batch_shares: Sequence[float] | None = None,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        if clip is not None and options.get("overlap"):
            raise UserError("overlap sends gradients before their global norm is known, by which they would be clipped")
        self.clip, self.process_group, self.options = clip, process_group, options
        self.is_elastic = isinstance(process_group, ReplicaGroup) and not process_group.is_static
        self._shares = batch_shares
        self._inner: MomentumExchange | None = None

    def describe(self) -> str:
        """Return the layout and the strategy of the messages."""
        inner = self.inner
        if self.is_elastic:
            return f"{inner}\n  exchange among the replicas of each step"
        return f"{inner}\n  exchange by {inner.strategy} among {inner.replicas.world_size} processes"

    def prepare(self, model: nn.Module) -> nn.Module:
        if self.is_elastic and (buffers := averaged_buffers(model)):
            raise UserError(
                f"replicas that leave and join do not average buffers, such as {next(iter(buffers))} of this model; "
                "take a model without running statistics, or fixed replicas"
            )
        groups = exchange_groups(model, self.options)
        inner = MomentumExchange(groups, process_group=self.process_group, **self.options)
        inner.announces = False  # the loop prints `describe`
        if self._inner is not None:  # parameters have new shapes, or some are gone
            inner.transfer_state(self._inner)
        self._inner, self._model = inner, model
        return model

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        return self.inner.overlapped() if last else nullcontext()

    def exchange(self) -> None:
        inner = self.inner
        params = [param for group in inner.param_groups for param in group["params"]]
        # Clip before the exchange: a norm of the decoded momentum has no meaning for the gradients.
        self.norm = total_norm([param.grad for param in params if param.grad is not None])
        # If the norm is not finite, the exchange leaves out the gradients.
        if self.clip is not None and bool(torch.isfinite(self.norm)):
            clip_gradients(params, self.clip, self.norm)
        if self.share != 1.0:
            _scale_gradients(params, self.share)
        has_result = inner.exchange()
        self.is_applied = has_result or not self.is_elastic
        # over all processes: those that share a replica see different data, too
        self.wire_bytes = inner.wire_bytes + (0 if self.is_elastic else average_buffers(self._model))
        self.nonfinite_ranks, self.local_nonfinite = tuple(inner.nonfinite_ranks), inner.local_nonfinite
        if self._shares is not None and self.nonfinite_ranks:
            _scale_gradients(params, mean_correction(self._shares, self.nonfinite_ranks))

    @property
    def inner(self) -> MomentumExchange:
        """The exchange itself."""
        if self._inner is None:
            raise AssertionError("prepare() comes first")
        return self._inner

    def metrics(self) -> dict[str, Any]:
        """Return the bytes of the residuals, the replicas if they change, and their divergence once it was measured."""
        divergence = self.inner.replica_divergence
        num_bytes = sum(
            value.nbytes
            for state in self.inner.residuals.state.values()
            for key, value in state.items()
            if key.startswith("residual")
        )
        return {
            "residual_bytes": num_bytes,
            **({"replicas": self.inner.replicas.world_size} if self.is_elastic else {}),
            **({} if divergence is None else {"replica_divergence": divergence}),
        }

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        self.inner.slice_state(param, dim, index)

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals and pending results of this process, and the number of steps."""
        pending = self.inner.shared_state_dict()["pending"]
        return {
            **self.inner.local_state_dict()["residuals"],
            **{_PENDING + name: value for name, value in pending.items()},
            "step": self.inner.step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this process, or the mean over all processes."""
        tensors = {name: value for name, value in state.items() if name != "step"}
        pending = {name for name in tensors if name.startswith(_PENDING)}
        residuals = {name: value for name, value in tensors.items() if name not in pending}
        self.inner.load_local_state_dict({"world_size": None, "rank": None, "residuals": residuals})
        self.inner.load_shared_state_dict(
            {"step": state["step"], "pending": {name.removeprefix(_PENDING): tensors[name] for name in pending}}
        )


def _scale_gradients(params: Iterable[Tensor], factor: float) -> None:
    for param in params:
        if param.grad is not None:
            param.grad *= factor
