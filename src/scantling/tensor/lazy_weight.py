"""Weight that is built only when an operation needs its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.numerics.torch_private import DisableTorchFunctionSubclass, make_subclass, tree_map_only

_METADATA = {
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "shape", "ndim", "requires_grad", "is_leaf", "layout", "is_meta", "is_cuda")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.element_size, Tensor.__len__}

_IN_PLACE = {f"{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


class LazyWeight(Tensor):
    """Placeholder of a matrix: shape, dtype and device are known, and every operation builds the matrix.

    Models read `layer.weight.dtype` in their forward passes. A TT layer has no such matrix, and building one for its
    dtype would cost more than the layer.

    Writing into it raises an error, since the cores would not change.

    Args:
        build: function that returns the matrix.
        shape: shape of the matrix.
        like: tensor with the dtype, device and `requires_grad` of the matrix.
    """

    _build: Callable[[], Tensor]
    _is_hf_initialized = True
    """Tells transformers not to initialize it: the values would go into a temporary matrix."""

    @staticmethod
    def __new__(cls, build: Callable[[], Tensor], shape: tuple[int, ...], like: Tensor) -> LazyWeight:
        # One expanded element has the shape without the memory.
        made: LazyWeight = make_subclass(cls, like.detach().new_empty(()).expand(shape), like.requires_grad)
        made._build = build
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # `.data` stays lazy: writes into a built matrix would be lost silently.
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            (weight,) = args
            return cls(weight._build, tuple(weight.shape), weight._empty())
        if _is_write(func, kwargs):
            raise UserError(
                "the weight of a TT layer is computed from its cores and cannot be written; change its `cores`, use "
                "`from_dense` to approximate a matrix, or `to_dense` to get a dense layer"
            )
        with DisableTorchFunctionSubclass():
            if func not in _METADATA:
                args, kwargs = tree_map_only(cls, lambda weight: weight._build(), (args, kwargs))
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # A copy cannot follow the cores, so it becomes a plain tensor.
        return self._build().detach().clone().requires_grad_(self.requires_grad)

    def _empty(self) -> Tensor:
        """Return an empty tensor of the same dtype and device, not trained."""
        return torch.empty((), dtype=self.dtype, device=self.device)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyWeight(shape={tuple(self.shape)}, dtype={self.dtype})"


def _is_write(func: Any, kwargs: dict[str, Any]) -> bool:
    """True if a function changes its first argument: `normal_`, `__setitem__`, `__iadd__`, a setter, or `out=`."""
    name = getattr(func, "__name__", "")
    if name in ("__set__", "__setitem__") or kwargs.get("out") is not None:
        return True
    # `__iadd__` writes, but `__invert__` does not.
    if name.startswith("__"):
        return name.startswith("__i") and name.removeprefix("__i") in _IN_PLACE
    return name.endswith("_")
