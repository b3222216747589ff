"""The compute format of a run: autocast, and for fp16 a loss scale that all ranks share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(compute: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass: none for fp32, autocast for bf16 and fp16."""
    return nullcontext() if compute == "fp32" else torch.autocast(device.type, dtype=_DTYPES[compute])


class SharedGradScaler(torch.amp.GradScaler):
    """A GradScaler whose verdict is the same on all ranks: an overflow on one skips the update on all.

    Collective: one all-reduce of one number in `unscale_` when there are several processes and scaling is on.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled() and dist.is_available() and dist.is_initialized():
            for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                dist.all_reduce(found, op=dist.ReduceOp.MAX)

    def found_inf(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """The verdict of the last `unscale_`: a tensor that is not 0 where a gradient overflowed."""
        found = self._per_optimizer_states[id(optimizer)].get("found_inf_per_device", {})
        return next(iter(found.values()), None)
