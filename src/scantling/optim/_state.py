"""What CAME keeps of a parameter from step to step: tensors under plain keys, and how many bytes they take.

step                       0-D fp32
exp_avg                    momentum, where beta1 is not 0: in fp32 or bf16, of the parameter's shape
exp_avg_codes, _scale      momentum as codes, see `_codec.py`
row, col                   factored second moment, in fp32
res_row, res_col           factored instability, in fp32; not without confidence or momentum
exp_avg_sq                 full second moment, where a parameter is not factored
low                        the bits of a bf16 weight below bf16, see `_rounding.py`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import torch

from scantling.errors import UserError
from scantling.groups import MatrixDims, check_matrix_dims
from scantling.optim._codec import MOMENTA, Momentum, momentum_shapes
from scantling.optim._factor import FACTORS, Factor, matrix_view, statistics_dtype
from scantling.optim._rounding import ROUNDINGS, Rounding

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Shapes: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]


def needed_state(group: dict[str, Any], shape: Sequence[int], dtype: torch.dtype) -> Shapes:
    """(shape, dtype) of the state tensors of a parameter of this shape and dtype in this group."""
    momentum, confidence = kept_averages(group)
    return state_tensors(
        tuple(shape),
        dtype,
        view_of(group, shape),
        momentum=momentum,
        rounding=group["rounding"],
        confidence=confidence,
    )


def kept_averages(group: Mapping[str, Any]) -> tuple[Momentum | None, bool]:
    """How the momentum of a group is kept, None where beta1 = 0, and whether there is a confidence.

    With beta1 = 0 the momentum is the update: nothing is to be remembered of it, and the residual (u - m)^2 is 0.
    """
    return (None, False) if group["betas"][0] == 0 else (group["momentum"], group["confidence"])


def view_of(group: dict[str, Any], shape: Sequence[int]) -> MatrixDims | None:
    """(row dims, column dims) of a parameter of this shape in this group, or None for a full second moment."""
    dims = group["matrix_dims"]
    pair = None if dims is None else (tuple(dims[0]), tuple(dims[1]))  # a group read from JSON holds lists
    return matrix_view(tuple(shape), group["factor"], pair, group["role"])


@lru_cache(maxsize=4096)
def state_tensors(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    view: MatrixDims | None,
    *,
    momentum: Momentum | None,
    rounding: Rounding,
    confidence: bool,
) -> Shapes:
    """(shape, dtype) of the state tensors of one parameter, by their keys in the state dict; no momentum with None.

    The same for all that ask: not to be changed.
    """
    statistics = statistics_dtype(dtype)
    tensors: Shapes = {"step": ((), torch.float32), **momentum_shapes(shape, view, momentum, statistics)}
    if view is None:
        tensors["exp_avg_sq"] = (shape, statistics)
    else:
        rows, cols = view
        row = tuple(1 if dim in cols else size for dim, size in enumerate(shape))
        col = tuple(1 if dim in rows else size for dim, size in enumerate(shape))
        kept = zip(_FACTORS[: 4 if confidence else 2], (row, col, row, col), strict=False)
        tensors |= {key: (size, statistics) for key, size in kept}
    if rounding == "compensated" and dtype == torch.bfloat16:
        tensors["low"] = (shape, torch.int8)
    return tensors


def averaged_dims(key: str, view: MatrixDims | None) -> tuple[int, ...] | None:
    """The dims of a parameter that a state tensor was averaged over; None for the step, which has no such dims."""
    if key == "step":
        return None
    if view is None or key not in _FACTORS:
        return ()
    rows, cols = view
    return cols if key in ("row", "res_row") else rows


_FACTORS = ("row", "col", "res_row", "res_col")


def came_state_bytes(
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    momentum: Momentum = "fp32",
    rounding: Rounding = "nearest",
    factor: Factor = "auto",
    matrix_dims: MatrixDims | None = None,
    role: str | None = None,
    confidence: bool = True,
    betas: Sequence[float] = (0.9, 0.999, 0.9999),
) -> int:
    """Bytes of the state that `CAME` keeps of one parameter, the step counter included.

    Args:
        shape: of the parameter.
        dtype: of the parameter.
        momentum, rounding, factor, matrix_dims, role, confidence, betas: as in the parameter's group.

    Returns:
        Exactly what the storages hold after the first step; 0 for an empty parameter.

    Raises:
        UserError: a momentum, rounding or factor that there is not, or a dtype that is not trained.
    """
    sizes = tuple(shape)
    for name, value, allowed in (
        ("momentum", momentum, MOMENTA),
        ("rounding", rounding, ROUNDINGS),
        ("factor", factor, FACTORS),
        ("dtype", dtype, DTYPES),
    ):
        if value not in allowed:
            raise UserError(f"{name} must be one of {', '.join(map(str, allowed))}; given {value!r}")
    if matrix_dims is not None:
        matrix_dims = check_matrix_dims(matrix_dims, len(sizes))
    if not prod(sizes):
        return 0
    view = matrix_view(sizes, factor, matrix_dims, role)
    kept, confident = kept_averages({"betas": betas, "momentum": momentum, "confidence": confidence})
    tensors = state_tensors(sizes, dtype, view, momentum=kept, rounding=rounding, confidence=confident)
    return sum(prod(size) * kind.itemsize for size, kind in tensors.values())
