"""Dion with momentum that differs between replicas, so that they exchange low-rank factors alone.

Source: Ahn et al., arXiv 2504.05295, algorithm 1, with the compressed synchronization between data-parallel replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scantling.comm import allreduce_wire_bytes


class Dion(torch.optim.Optimizer):
    """Step matrices by an orthonormal matrix of low rank, from factors that are averaged over the replicas.

    For each matrix (m, n) with momentum M on this replica and a basis Q (n, r), the same on all replicas:

        B = M + gradient;  P = orthonormal(mean(B Q));  R = mean(B^T P)
        M = B - (1 - decay) P (B^T P)^T;  Q = R with columns of norm 1;  weight -= lr sqrt(m / n) P Q^T

    Args:
        matrices: two-dimensional parameters, or groups of them.
        lr: learning rate.
        rank: r.
        decay: of the momentum.
        weight_decay: decoupled.
    """

    def __init__(
        self, matrices: Iterable[Any], lr: float, *, rank: int, decay: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(matrices, {"lr": lr, "rank": rank, "decay": decay, "weight_decay": weight_decay})
        generator = torch.Generator().manual_seed(0)  # the same basis on all replicas
        for group in self.param_groups:
            for param in group["params"]:
                width = min(rank, *param.shape)
                basis = torch.randn(param.shape[1], width, generator=generator)
                self.state[param] = {"momentum": torch.zeros_like(param), "basis": torch.linalg.qr(basis).Q}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                assert param.grad is not None
                state = self.state[param]
                momentum, basis = state["momentum"].add_(param.grad), state["basis"]
                left = torch.linalg.qr(average_over_replicas(momentum @ basis)).Q
                own = momentum.t() @ left
                momentum.sub_(left @ own.t(), alpha=1.0 - group["decay"])
                right = average_over_replicas(own.clone())
                state["basis"] = right / right.norm(dim=0).clamp(min=1e-12)
                rows, cols = param.shape
                param.mul_(1.0 - group["lr"] * group["weight_decay"])
                param.sub_(left @ state["basis"].t(), alpha=group["lr"] * (rows / cols) ** 0.5)

    def wire_bytes(self) -> int:
        """Return the bytes that each replica sends per step."""
        numel = sum(sum(param.shape) * self.state[param]["basis"].shape[1] for param in self.state)
        return allreduce_wire_bytes(4 * numel, dist.get_world_size())


def average_over_replicas(values: Tensor) -> Tensor:
    """Average a tensor over all replicas, in place."""
    dist.all_reduce(values)
    return values.div_(dist.get_world_size())
