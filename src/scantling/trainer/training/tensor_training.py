"""CoMERA in a run: TT layers, merged once per step, whose ranks shrink to the recipe's size target."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from scantling.comm import GradientExchange
from scantling.tensor.layer import merge_once
from scantling.tensor.rank_adapter import RankAdapter
from scantling.tensor.rank_budget import CoreBytes
from scantling.trainer.recipe.schema import TensorSection


class TensorTraining:
    """Merges the cores of TT layers once per step and, with a size target, adapts their ranks.

    Without a section every method does nothing. Order in one step: `begin_step`, the passes of all micro-batches within
    `merge_cores` with `add_penalty` on each loss, exchange, optimizer, `end_step`.

    Args:
        section: `tensor` of the recipe, or None.
        steps: length of the run.
        core_bytes: bytes that training keeps for a core, see `RankAdapter`.
        merges: False if gradients are released, because release counts the passes of each parameter.
        waits_for_replicas: True for replicas that take local steps: ranks change after their exchanges.
    """

    def __init__(
        self,
        section: TensorSection | None,
        *,
        steps: int,
        core_bytes: CoreBytes | None = None,
        merges: bool = True,
        waits_for_replicas: bool = False,
    ) -> None:
        self._section, self._steps, self._core_bytes, self._merges = section, steps, core_bytes, merges
        self._waits_for_replicas, self._is_removal_due = waits_for_replicas, False
        self.adapter: RankAdapter | None = None
        self._recorded: dict[str, tuple[int, ...]] | None = None
        self._is_resumed = False

    def attach(self, model: nn.Module) -> None:
        """Add the rank gates; the model is on its device, and the optimizer is not built yet."""
        if self._section is not None and self._section.size_target is not None:
            options = self._section.rank_options(self._steps)
            self.adapter = RankAdapter(model, core_bytes=self._core_bytes, **options)
            self.adapter.waits_for_replicas = self._waits_for_replicas

    def detach(self) -> None:
        """Remove pruned ranks and the rank gates; the outputs of the model stay the same."""
        if self.adapter is not None:
            self.adapter.truncate()
            self.adapter.detach()
            self.adapter = None

    def begin_step(self) -> None:
        """Prepare the rank gates for a step."""
        if self.adapter is None:
            return
        if self._is_resumed:  # the loaded gates show these ranks, and the record before the resume has them
            self._is_resumed, self._recorded = False, self.adapter.ranks()
        self.adapter.begin_step()

    def merge_cores(self, model: nn.Module, num_passes: int) -> AbstractContextManager[None]:
        """Return the context of some passes that merge the cores once; gradients are complete at its end."""
        merges = self._section is not None and self._merges and num_passes > 1
        return merge_once(model, num_passes) if merges else nullcontext()

    def add_penalty(self, loss: torch.Tensor, share: float) -> torch.Tensor:
        """Return the loss of one micro-batch plus its share (one over their number) of the penalty on ranks."""
        return loss if self.adapter is None else self.adapter.objective(loss, share)

    def see_gradient(self, parameter: torch.Tensor) -> None:
        """Read a complete gradient that is about to be released in the backward pass."""
        if self.adapter is not None:
            self.adapter.see_gradient(parameter)

    def end_step(self, step: int, optimizer: torch.optim.Optimizer, exchange: GradientExchange) -> bool:
        """Remove pruned ranks if due; True if parameters have other shapes than before."""
        adapter = self.adapter
        if adapter is None or self._section is None:
            return False
        adapter.observe()  # for steps that were replayed or released
        last = adapter.options.steps  # ranks are fixed after it
        # removal is due at the last adaptive step, every `truncate_every` steps before it, and at the end
        due = adapter.step == last or (adapter.step < last and step % self._section.truncate_every == 0)
        self._is_removal_due |= due or step == self._steps
        if not exchange.is_synchronized:
            return False
        if adapter.waits_for_replicas:
            adapter.change_ranks_together()
            exchange.adopt_weights()
        if not self._is_removal_due:
            return False
        self._is_removal_due = False
        return adapter.truncate(optimizer, exchange) > 0

    def metrics(self) -> dict[str, Any]:
        """Return size and compression, and the ranks of every layer if they changed since the last record."""
        if self.adapter is None:
            return {}
        metrics: dict[str, Any] = dict(self.adapter.metrics())
        ranks = self.adapter.ranks()
        if ranks != self._recorded:
            self._recorded = ranks
            metrics["ranks"] = {name: list(layer) for name, layer in ranks.items()}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {} if self.adapter is None else self.adapter.state_dict()

    def replica_values(self) -> dict[str, Any]:
        """Return the part of the state that differs between replicas in local steps, as JSON values."""
        if self.adapter is None or not self._waits_for_replicas:
            return {}
        return {"importance": self.adapter.importance_values(), "is_removal_due": self._is_removal_due}

    def load_replica_values(self, values: dict[str, Any]) -> None:
        if self.adapter is not None and values:
            self.adapter.load_importance_values(values["importance"])
            self._is_removal_due = values["is_removal_due"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.adapter is not None:
            self.adapter.load_state_dict(state)
            self._is_resumed = True
