"""Hooks through which a method takes part in a run without the loop knowing which method it is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from scantling.comm import GradientExchange


class Method:
    """Base of the methods; every hook does nothing until a method needs it.

    `prepare` comes once the model is built, `attach` when it is on its device, before the optimizer is built.

    Order in one step: `before_step`, then for each micro-batch the loss passes through `extra_loss`, then backward, all
    of them within `passes`; exchange, optimizer, `after_step`. `metrics` is added to the record of the step.
    """

    name = "method"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Change or replace the model, on the CPU or the meta device."""
        return model

    def attach(self, model: nn.Module) -> None:
        """Add what only training needs; the model is where it will be trained."""

    def detach(self, model: nn.Module) -> None:
        """Take out what only training needs; the model computes what it did."""

    def before_step(self, step: int) -> None:
        """Called before the first forward pass of step `step` (counted from 1)."""

    def passes(self, model: nn.Module, number: int) -> AbstractContextManager[None]:
        """Around the forward and backward passes of a step's micro-batches; gradients are complete when it ends."""
        return nullcontext()

    def extra_loss(self, loss: torch.Tensor, share: float) -> torch.Tensor:
        """Return the loss of one micro-batch with the method's own term.

        Args:
            loss: the micro-batch's share of the step's mean.
            share: one over the number of micro-batches: the share of the method's own term.
        """
        return loss

    def see_gradient(self, parameter: torch.Tensor) -> None:
        """Called with each parameter whose gradient is complete, where it is stepped and freed in the backward pass."""

    def after_step(self, step: int, optimizer: torch.optim.Optimizer, exchange: GradientExchange) -> bool:
        """Called after the optimizer's update; whether parameters have other shapes than before.

        Whoever changes a shape has the optimizer and the exchange cut what they keep of the parameter.
        """
        return False

    def metrics(self) -> dict[str, Any]:
        """Figures of this step, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: tensors and JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state back, before the model takes back its own: parameters get the shapes they had."""
