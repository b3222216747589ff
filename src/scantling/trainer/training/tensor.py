"""CoMERA in a run: layers as cores, merged once a step, with ranks that come down to the recipe's target."""

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
from scantling.trainer.training.methods import Method


class TensorMethod(Method):
    """Merges the cores of a model once a step and, where there is a size target, adapts their ranks.

    Args:
        section: of the recipe.
        steps: of the run.
        core_bytes: bytes that training keeps for a core, see `RankAdapter`.
        merges: whether cores are merged once for all micro-batches of a step; not where gradients are released, which
            counts the passes of each parameter.
    """

    name = "tensor"

    def __init__(
        self, section: TensorSection, *, steps: int, core_bytes: CoreBytes | None = None, merges: bool = True
    ) -> None:
        self._section, self._steps, self._core_bytes, self._merges = section, steps, core_bytes, merges
        self.adapter: RankAdapter | None = None
        self._recorded: dict[str, tuple[int, ...]] | None = None
        self._is_resumed = False

    def attach(self, model: nn.Module) -> None:
        if self._section.size_target is not None:
            options = self._section.rank_options(self._steps)
            self.adapter = RankAdapter(model, core_bytes=self._core_bytes, **options)

    def detach(self, model: nn.Module) -> None:
        if self.adapter is not None:
            self.adapter.truncate()
            self.adapter.detach()
            self.adapter = None

    def before_step(self, step: int) -> None:
        if self.adapter is None:
            return
        if self._is_resumed:  # the record of the step before holds the ranks, which the controls say by now
            self._is_resumed, self._recorded = False, self.adapter.ranks()
        self.adapter.begin_step()

    def passes(self, model: nn.Module, number: int) -> AbstractContextManager[None]:
        return merge_once(model, number) if self._merges and number > 1 else nullcontext()

    def extra_loss(self, loss: torch.Tensor, share: float) -> torch.Tensor:
        return loss if self.adapter is None else self.adapter.objective(loss, share)

    def see_gradient(self, parameter: torch.Tensor) -> None:
        if self.adapter is not None:
            self.adapter.see_gradient(parameter)

    def after_step(self, step: int, optimizer: torch.optim.Optimizer, exchange: GradientExchange) -> bool:
        adapter = self.adapter
        if adapter is None:
            return False
        adapter.observe()  # a step that was replayed, or released
        last = adapter.options.steps  # after which the ranks stay
        due = adapter.step == last or (adapter.step < last and step % self._section.truncate_every == 0)
        if not (due or step == self._steps):
            return False
        return adapter.truncate(optimizer, exchange) > 0

    def metrics(self) -> dict[str, Any]:
        """Size and compression; the ranks of every layer where they have changed since the last record."""
        if self.adapter is None:
            return {}
        figures: dict[str, Any] = dict(self.adapter.metrics())
        ranks = self.adapter.ranks()
        if ranks != self._recorded:
            self._recorded = ranks
            figures["ranks"] = {name: list(layer) for name, layer in ranks.items()}
        return figures

    def state_dict(self) -> dict[str, Any]:
        return {} if self.adapter is None else self.adapter.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.adapter is not None:
            self.adapter.load_state_dict(state)
            self._is_resumed = True
