"""Slicing of a parameter along a dim, together with its gradient and optimizer state."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


class StateHolder(Protocol):
    """Object that keeps state of the shape of a parameter, such as a residual."""

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Keep only some positions of one dim, 1-D int64."""


@torch.no_grad()
def slice_parameter(
    param: nn.Parameter,
    dim: int,
    index: Tensor,
    optimizer: torch.optim.Optimizer | None,
    *holders: StateHolder | torch.optim.Optimizer,
) -> None:
    """Keep only some positions of one dim of a parameter, in place: optimizer and module keep the same parameter
    object.

    A parameter that becomes empty is frozen.

    Args:
        param: parameter to slice.
        dim: dim of the parameter.
        index: positions to keep, 1-D int64.
        optimizer: optimizer whose state of the parameter is sliced as well, or None.
        holders: objects with more state of the parameter.
    """
    # State first, while the parameter still has its old shape.
    for holder in holders:
        if isinstance(holder, torch.optim.Optimizer):
            _slice_state(holder, param, dim, index)
        else:
            holder.slice_state(param, dim, index)
    if optimizer is not None:
        _slice_state(optimizer, param, dim, index)
    grad = param.grad
    param.grad = None
    kept = param.data.index_select(dim, index)
    # While an old graph is alive, autograd remembers the shape of a leaf; assigning another dtype makes it forget.
    param.data = kept.to(torch.float32 if kept.dtype == torch.float64 else torch.float64)
    param.data = kept
    if grad is not None:
        param.grad = grad.index_select(dim, index)
    freeze_if_empty(param)


def freeze_if_empty(param: nn.Parameter) -> None:
    """Freeze a parameter without elements: some optimizers divide by the number of elements."""
    if not param.numel():
        param.requires_grad_(False)
        param.grad = None


def _slice_state(optimizer: torch.optim.Optimizer, param: nn.Parameter, dim: int, index: Tensor) -> None:
    owner = _find_owner(optimizer, param)
    if owner is None:
        return
    # CAME and others know the layout of their state; other optimizers keep tensors of the parameter's shape.
    if callable(getattr(owner, "slice_state", None)):
        owner.slice_state(param, dim, index)  # type: ignore[attr-defined]
        return
    state = owner.state.get(param)
    if not state:
        return
    sliced = {key: _slice_entry(value, param, dim, index) for key, value in state.items()}
    if any(value is None and state[key] is not None for key, value in sliced.items()):
        logger.warning(
            "%s keeps state that cannot be sliced along a dim of its parameter of shape %s; this state is dropped",
            type(owner).__name__,
            tuple(param.shape),
        )
        owner.state.pop(param)
        return
    state.update(sliced)


def _slice_entry(value: Any, param: Tensor, dim: int, index: Tensor) -> Any:
    """Return the slice of one state entry; None if it is not clear which values belong to which position."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, int | float | bool | str) else None
    # State of the parameter's shape is sliced with it.
    if type(value) is Tensor and value.ndim == param.ndim > 0 and value.shape[dim] == param.shape[dim]:
        return value.index_select(dim, index)
    # State that all positions share, such as a step count, stays.
    is_shared = value.ndim == 0 or value.numel() == 1 or (value.ndim == param.ndim and value.shape[dim] == 1)
    return value if type(value) is Tensor and is_shared else None


def _find_owner(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> torch.optim.Optimizer | None:
    """Return the optimizer that steps a parameter: a member of a combined optimizer, or the given one; None if
    neither.
    """
    for member in getattr(optimizer, "members", ()):
        owner = _find_owner(member, param)
        if owner is not None:
            return owner
    # A combined optimizer itself steps nothing.
    if hasattr(optimizer, "members"):
        return None
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):  # wrapped, such as accelerate's
        return _find_owner(inner, param)
    has_param = any(other is param for group in optimizer.param_groups for other in group["params"])
    return optimizer if has_param else None
