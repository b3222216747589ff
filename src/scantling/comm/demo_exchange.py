"""DeMo's exchange behind the seam of a training loop: `MomentumExchange` over a model that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from scantling.comm.ddp import average_buffers
from scantling.comm.exchange import MomentumExchange
from scantling.comm.gradient_exchange import GradientExchange
from scantling.errors import UserError
from scantling.groups import param_groups

_PENDING = "pending/"
"""Before the names of what a delay holds back; no parameter has a slash in its name."""


def exchange_groups(model: nn.Module, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a model for an exchange with these options of `MomentumExchange`.

    Rank controls of layers of cores, which are few, never travel as signs: these have one size in all gradients of a
    row, and would not tell a `RankAdapter` how much each rank matters.
    """
    groups = param_groups(model, control_lr=0.0)  # a rate, so that they have groups of their own
    for group in groups:
        if group.pop("lr", None) is not None and options.get("dense") == "sign":
            group["dense"] = "int8"
    return groups


class DemoExchange(GradientExchange):
    """Local gradients go into residuals, and each `.grad` becomes the momentum that all processes decode alike.

    Buffers that are saved become their mean over the processes.

    Clipping by the global norm is that of each process's own gradient, before it is accumulated; a momentum has no
    scale that a threshold could be chosen for.

    Args:
        clip: largest norm of a process's own gradient, or None.
        options: of `MomentumExchange`.
    """

    def __init__(self, *, clip: float | None = None, **options: Any) -> None:
        if clip is not None and options.get("overlap"):
            raise UserError("overlap sends gradients before the norm of all is known, by which they would be clipped")
        self.clip, self.options = clip, options
        self._inner: MomentumExchange | None = None

    def describe(self) -> str:
        """The groups, and how their messages travel."""
        inner = self.inner
        return f"{inner}\n  exchange by {inner.strategy} among {inner.replicas.world_size} processes"

    def prepare(self, model: nn.Module) -> nn.Module:
        inner = MomentumExchange(exchange_groups(model, self.options), **self.options)
        inner.announces = False  # `describe` says it
        if self._inner is not None:  # parameters have other shapes than before, or some are gone
            inner.transfer_state(self._inner)
        self._inner, self._model = inner, model
        return model

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        return self.inner.overlapped() if last else nullcontext()

    def exchange(self) -> None:
        inner = self.inner
        params = [param for group in inner.param_groups for param in group["params"]]
        self.norm = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        if self.clip is not None and bool(torch.isfinite(self.norm)):
            torch.nn.utils.clip_grads_with_norm_(params, self.clip, self.norm)
        inner.exchange()
        sent = average_buffers(self._model, inner.replicas)
        self.wire_bytes, self.left_out = inner.wire_bytes + sent, tuple(inner.left_out)
        self.withheld = inner.withheld

    @property
    def inner(self) -> MomentumExchange:
        """The exchange itself."""
        if self._inner is None:
            raise AssertionError("prepare() comes first")
        return self._inner

    def metrics(self) -> dict[str, Any]:
        """Bytes of the residuals, and how far those of the processes were apart when they were last compared."""
        found = self.inner.replica_divergence
        held = sum(
            value.nbytes
            for state in self.inner.state.values()
            for key, value in state.items()
            if key.startswith("residual")
        )
        return {"residual_bytes": held, **({} if found is None else {"replica_divergence": found})}

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Cut the residual of a parameter that keeps only some positions of a dim."""
        self.inner.slice_state(param, dim, index)

    def state_dict(self) -> dict[str, Any]:
        """Tensors of this process, and how many steps there were."""
        pending = self.inner.shared_state_dict()["pending"]
        return {
            **self.inner.local_state_dict()["residuals"],
            **{_PENDING + name: value for name, value in pending.items()},
            "step": self.inner.step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave on this process, or the mean of what it gave on all."""
        held = {name for name in state if name.startswith(_PENDING)}
        residuals = {name: value for name, value in state.items() if name not in {"step"} | held}
        pending = {name.removeprefix(_PENDING): state[name] for name in held}
        self.inner.load_local_state_dict({"world_size": None, "rank": None, "residuals": residuals})
        self.inner.load_shared_state_dict({"pending": pending, "step": state["step"]})
