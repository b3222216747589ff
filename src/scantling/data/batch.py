"""One micro-batch, as the loop and the tasks see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

IGNORED = -100
"""The label of a position that is no target."""


@dataclass
class Batch:
    """Tensors for one forward pass.

    Attributes:
        inputs: arguments of the model by name, such as `input_ids` of shape (batch, seq_len).
        labels: the targets, (batch, seq_len) for language models and (batch,) for classification; -100 is no target.
        num_targets: how many labels count.
        num_tokens: tokens put through the model, padding left out.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    num_targets: int
    num_tokens: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on a device."""
        inputs = {name: value.to(device, non_blocking=non_blocking) for name, value in self.inputs.items()}
        return Batch(inputs, self.labels.to(device, non_blocking=non_blocking), self.num_targets, self.num_tokens)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, from where copies to a GPU do not wait."""
        inputs = {name: value.pin_memory() for name, value in self.inputs.items()}
        return Batch(inputs, self.labels.pin_memory(), self.num_targets, self.num_tokens)
