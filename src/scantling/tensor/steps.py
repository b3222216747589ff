"""Detection of changed parameters: by version counters, and by optimizer steps.

A fused optimizer, and one that writes through `.data`, changes parameters without raising their version counters, so
steps of every `torch.optim.Optimizer` are observed as well. A captured graph that replays a step raises the counters
itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from scantling.numerics.torch_private import version_counter

Owner = TypeVar("Owner")


def tensor_version(tensor: Tensor) -> int:
    """Return the version counter of a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else version_counter(tensor)


def call_after_steps(
    owner: Owner, method: Callable[[Owner, Optimizer], None], parameters: Callable[[Owner], Iterable[Tensor]]
) -> None:
    """Call a method after every step of an optimizer that holds one of the owner's parameters, until the owner dies.

    Steps captured in a CUDA graph are ignored, since nothing has been computed yet.

    Args:
        owner: object that the method belongs to; it is not kept alive.
        method: method of its class; receives the optimizer.
        parameters: function that returns the owner's parameters.
    """
    alive = weakref.ref(owner)
    known: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def seen(optimizer: Optimizer, *_: Any) -> None:
        one = alive()
        if one is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        if not known.get(optimizer, False):  # parameters may be added later
            own = {id(parameter) for parameter in parameters(one)}
            known[optimizer] = any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        if known[optimizer]:
            method(one, optimizer)

    hook = register_optimizer_step_post_hook(seen)
    weakref.finalize(owner, hook.remove)
