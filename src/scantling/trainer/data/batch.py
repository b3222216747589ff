"""One micro-batch, the interface between training loop and tasks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

IGNORED = -100
"""Label of a position that is not a target."""


@dataclass
class Batch:
    """Tensors for one forward pass.

    Attributes:
        inputs: arguments of the model by name, such as `input_ids` of shape (batch, seq_len).
        labels: the targets, (batch, seq_len) for language models and (batch,) for classification; -100 is no target.
        num_targets: number of labels that count.
        num_tokens: tokens passed to the model, excluding padding.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    num_targets: int
    num_tokens: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on a device."""
        inputs = {name: value.to(device, non_blocking=non_blocking) for name, value in self.inputs.items()}
        return Batch(inputs, self.labels.to(device, non_blocking=non_blocking), self.num_targets, self.num_tokens)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory, from which copies to a GPU are asynchronous."""
        inputs = {name: value.pin_memory() for name, value in self.inputs.items()}
        return Batch(inputs, self.labels.pin_memory(), self.num_targets, self.num_tokens)
