"""Activation checkpointing: recompute activations in the backward pass instead of storing them."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scantling.conv1d import is_conv1d_subclass
from scantling.errors import UserError, first_line
from scantling.tensor.experts import TTExperts, is_fused_experts
from scantling.tensor.feed_forward import fused_feed_forward
from scantling.tensor.linear import TTLinear

_ACTIVATIONS = ("act_fn", "act", "activation_fn", "activation")
"""Names that models of transformers give to the activation function of a feed-forward layer."""


def checkpoint_activations(model: Any, which: bool | Literal["feed_forward"] = True) -> None:
    """Recompute activations in the backward pass instead of storing them.

    Args:
        model: model of transformers; changed in place.
        which: True for whole blocks. "feed_forward" for the feed-forward layers, whose hidden states are the largest
            activations of a block, and the RMS norms of transformers, which store their input three times.

    Raises:
        UserError: if the model does not support it, or no feed-forward layer is found.
    """
    if which == "feed_forward":
        parts = [module for module in model.modules() if _is_feed_forward(module)]
        if not parts:
            raise UserError(
                "train.activation_checkpointing: feed_forward: found no feed-forward layers in "
                f"{type(model).__name__}; set it to true to recompute whole blocks"
            )
        # PyTorch's own norms are one operation, which stores little.
        norms = (module for module in model.modules() if type(module).__name__.endswith("RMSNorm"))
        parts += [norm for norm in norms if not isinstance(norm, nn.RMSNorm)]
        for part in parts:
            if hasattr(part, "feed_forward_chunk"):  # BERT has a method instead of a module
                part.feed_forward_chunk = MethodType(_recompute_chunk, part)
            else:
                part.forward = MethodType(_recompute, part)
        return
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        # the reentrant version would cut the graph if no input of a layer needs a gradient
        enable({"use_reentrant": False})
    except ValueError as error:
        raise UserError(f"train.activation_checkpointing: {first_line(error)}") from None


# Methods, which copies of a model bind to the copy.
def _recompute(module: nn.Module, *args: Any, **options: Any) -> Any:
    return _fuse_or_checkpoint(type(module).forward, module, *args, **options)


def _recompute_chunk(module: Any, hidden: Tensor) -> Any:
    return _fuse_or_checkpoint(type(module).feed_forward_chunk, module, hidden)


def _fuse_or_checkpoint(function: Callable[..., Any], module: nn.Module, *args: Any, **options: Any) -> Any:
    fused = fused_feed_forward(module, args[0]) if len(args) == 1 and not options else None
    return checkpoint(function, module, *args, use_reentrant=False, **options) if fused is None else fused


def _is_feed_forward(module: nn.Module) -> bool:
    """Return True for a module with an activation function between linear layers, or fused experts."""
    if hasattr(module, "feed_forward_chunk") or isinstance(module, TTExperts) or is_fused_experts(module):
        return True
    has_activation = any(callable(getattr(module, name, None)) for name in _ACTIVATIONS)
    return has_activation and sum(_is_linear(child) for child in module.children()) > 1


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | TTLinear) or is_conv1d_subclass(type(module))
