"""Importance of each rank: the first-order change of the loss if the rank's gate becomes 0.

    I_j = mean over recent steps of (d_j dL/dd_j)^2

where d_j is the gate of rank j (the first-order Taylor criterion of Molchanov et al., arXiv 1906.10771). Unlike the
norm of a weight, it distinguishes layers that the loss needs from layers that it does not. It costs one scalar per
rank of a bond and reads the gradients that the optimizer steps with. Replicas that average gradients therefore make
the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Importance:
    """Running mean squares of the gradients of rank gates.

    Functions that slice parameters slice it as well, since it is a `StateHolder`.

    Args:
        memory: decay of the mean per step.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._gates: list[Tensor] = []
        self._index: dict[int, int] = {}
        self._squares: Tensor | None = None  # (ranks of all bonds)
        self._pending: dict[int, Tensor | None] = {}  # gradients of the step that is not counted yet

    def set_gates(self, rank_gates: Sequence[Tensor]) -> None:
        """Set the rank gates of all bonds, in order; call `slice_state` whenever a gate is sliced."""
        self._gates = list(rank_gates)
        self._index = {id(gate): i for i, gate in enumerate(rank_gates)}

    def __getstate__(self) -> dict[str, Any]:
        # The ids of parameters are not valid in a copy.
        return {**self.__dict__, "_index": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.set_gates(self._gates)  # a copy has other gate parameters

    @torch.no_grad()
    def record_gradient(self, gate: Tensor) -> None:
        """Record the gradient of a rank gate until the step is counted; other parameters are ignored."""
        index = self._index.get(id(gate))
        if index is not None and index not in self._pending and gate.grad is not None:
            self._pending[index] = gate.grad.detach().clone()

    def exclude(self, gate: Tensor) -> None:
        """Exclude the gradient of a rank gate that was not stepped, unless it was recorded before."""
        self._pending.setdefault(self._index[id(gate)], None)

    def discard_pending(self) -> None:
        """Drop the recorded gradients, if no step was taken."""
        self._pending.clear()

    @torch.no_grad()
    def update(self) -> None:
        """Add the gradients of a step: the recorded ones, and the current ones of all other rank gates.

        A gate without a gradient had no effect on the loss if other gates have gradients. If no gate has one, or all
        are 0, the gradients were freed, and the importance does not change. Non-finite gradients are left out, as no
        optimizer steps with them.
        """
        gradients = [self._pending.get(i, gate.grad) for i, gate in enumerate(self._gates)]
        self.discard_pending()
        if all(gradient is None for gradient in gradients):
            return
        squares = torch.cat(  # (ranks of all bonds)
            [
                torch.zeros_like(gate) if gradient is None else gradient.to(gate.dtype)
                for gate, gradient in zip(self._gates, gradients, strict=True)
            ]
        ).square()
        previous = torch.zeros_like(squares) if self._squares is None else self._squares.to(squares)
        squares = torch.where(torch.isfinite(squares), squares, previous)
        # I_j without the factor d_j^2, which `scores` multiplies. If all gradients are 0, they were freed: no change.
        self._squares = torch.where(squares.any(), previous.lerp(squares, 1.0 - self._memory), previous)

    def average(self) -> None:
        """Replace the mean squares by their mean over all processes. Collective: one all-reduce."""
        squares = torch.zeros_like(torch.cat(self._gates)) if self._squares is None else self._squares
        # A copy, since the all-reduce writes in place.
        squares = squares.clone()
        dist.all_reduce(squares)
        self._squares = squares / dist.get_world_size()

    def scores(self, gate_values: Tensor) -> Tensor | None:
        """Return the importance of all ranks at these values of the gates, (ranks of all bonds); None before any step.

        All are too small by one factor, since the mean starts at 0; only their order matters.
        """
        return None if self._squares is None else self._squares.to(gate_values) * gate_values.square()

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Keep only some ranks of a bond, 1-D int64, before its gate is sliced; no effect for other parameters."""
        i = self._index.get(id(param))
        if i is None:
            return
        pending = self._pending.get(i)
        if pending is not None:
            self._pending[i] = pending[index]
        if self._squares is not None:
            # The gate is not sliced yet, so its length is still that of its part.
            parts = list(torch.split(self._squares, [len(gate) for gate in self._gates]))
            parts[i] = parts[i][index]
            self._squares = torch.cat(parts)

    def values(self) -> list[float] | None:
        """Return the state that a resumed run needs."""
        return None if self._squares is None else self._squares.tolist()

    def load_values(self, values: Sequence[float] | None) -> None:
        """Load the state, one value per current rank."""
        self.discard_pending()
        self._squares = None if values is None else self._gates[0].new_tensor(values)

    def pending_values(self) -> dict[str, list[float]]:
        """Return the recorded gradients by the indices of their gates, as plain values."""
        return {str(i): gradient.tolist() for i, gradient in self._pending.items() if gradient is not None}

    def load_pending_values(self, values: dict[str, list[float]]) -> None:
        """Load the gradients of a saved step that was not counted yet."""
        self._pending = {int(i): self._gates[int(i)].new_tensor(gradient) for i, gradient in values.items()}
