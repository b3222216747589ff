"""The loss scale of fp16 runs, which all ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist

from scantling.numerics.torch_private import found_inf


class SharedGradScaler(torch.amp.GradScaler):
    """A GradScaler whose verdict is the same on all ranks: an overflow on one skips the update on all.

    Collective: one all-reduce of one number in `unscale_` when there are several processes and scaling is on.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled() and dist.is_available() and dist.is_initialized():
            for flag in found_inf(self, optimizer):
                dist.all_reduce(flag, op=dist.ReduceOp.MAX)
