"""A GradScaler's factor, which it leaves to optimizers that see gradients of several replicas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from scantling.comm.transport.shards import to_local
from scantling.numerics.torch_private import foreach_div_


def scale_of(optimizer: Any) -> Tensor | None:
    """The factor in the gradients of an optimizer within `GradScaler.step`, which has `_step_supports_amp_scaling`."""
    found: Tensor | None = getattr(optimizer, "grad_scale", None)
    return found


def unscale(params: Iterable[Tensor], scale: Tensor) -> None:
    """Take the factor out of gradients, in place. What overflowed stays Inf or NaN."""
    gradients = [to_local(param.grad) for param in params if param.grad is not None]
    if gradients:
        foreach_div_(gradients, scale)
