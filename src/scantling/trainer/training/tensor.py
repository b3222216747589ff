"""CoMERA in a run: TT layers, merged once per step, with ranks that decrease to the recipe's size target."""

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
    """Method that merges the cores of a model once per step and adapts their ranks if there is a size target.

    Args:
        section: section of the recipe.
        steps: steps of the run.
        core_bytes: training bytes of a core, see `RankAdapter`.
        merges: True to merge cores once for all micro-batches of a step. Must be False if gradients are released,
            because gradient release counts the passes of each parameter.
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
        if self._is_resumed:  # the metrics of the previous step have the current ranks already
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
        adapter.observe()  # steps of CUDA graphs and of gradient release
        last = adapter.options.steps  # ranks do not change after this step
        due = adapter.step == last or (adapter.step < last and step % self._section.truncate_every == 0)
        if not (due or step == self._steps):
            return False
        return adapter.truncate(optimizer, exchange) > 0

    def metrics(self) -> dict[str, Any]:
        """Return size and compression, and the ranks of all layers if they have changed since the last call."""
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.adapter is not None:
            self.adapter.load_state_dict(state)
            self._is_resumed = True
