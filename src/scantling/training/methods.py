"""Hooks through which a method takes part in a run without the loop knowing which method it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Method:
    """Base of the methods; every hook does nothing until a method needs it.

    Order in one step: `before_step`, then for each micro-batch the loss passes through `extra_loss`, then backward,
    exchange, optimizer, `after_step`. `metrics` is added to the record of the step.
    """

    name = "method"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Change or replace the model before the optimizer is built."""
        return model

    def before_step(self, step: int) -> None:
        """Called before the first forward pass of step `step` (counted from 1)."""

    def extra_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of one micro-batch with the method's own term; `loss` is its share of the step's mean."""
        return loss

    def after_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Called after the optimizer's update."""

    def metrics(self) -> dict[str, float]:
        """Figures of this step, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: tensors and JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state back."""
