"""Emulate bf16 matrix products on a CPU without bf16 instructions, at the speed of fp32 products.

On such a CPU, PyTorch computes bf16 products element by element, ten times slower than fp32. Here the factors are
widened to fp32, which is exact, and the result is rounded once to bf16, as by hardware that accumulates in fp32. Two
things differ from such hardware: the order of the sums, and attention does not round its weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from scantling.numerics.device import has_fast_matmul
from scantling.numerics.torch_private import (
    TorchDispatchMode,
    cpu_flash_attention,
    cpu_flash_attention_backward,
    tree_map_only,
)

_ATEN = torch.ops.aten
_ATTENTION = cpu_flash_attention().default
_PRODUCTS = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATTENTION,
    cpu_flash_attention_backward().default,
}


def bf16_products(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which to compute on a device: a null context if the device multiplies bf16 itself."""
    return nullcontext() if has_fast_matmul("bf16", device) else Widened()  # type: ignore[no-untyped-call]


class Widened(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that computes products of bf16 tensors in fp32, forward and backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        found = func(*tree_map_only(torch.Tensor, _widen, args), **tree_map_only(torch.Tensor, _widen, kwargs))
        if func is _ATTENTION:
            out, log_sum = found
            return out.bfloat16(), log_sum  # the log-sum-exp is in fp32 for bf16 inputs too
        return tree_map_only(torch.Tensor, torch.Tensor.bfloat16, found)


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x
