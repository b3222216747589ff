"""Slice the state of a parameter along one of its dims, for parameters that shrink during training.

The estimate of the second moment of the kept elements does not change: with the kept rows I,

    row' = row[I],  col' = col mean(row[I]) / mean(row),  so that row'_i col'_j / mean(row') = row_i col_j / mean(row)

and likewise for columns and for the instability. The two factors keep equal means. Codes of whole rows do not change.
If the blocks of a row change, the momentum is decoded, sliced and encoded again, rounded to the nearest: an error of at
most half a step of its block, 1/506 to 1/128 of the block's scale in int8 and 1/14 in int4. A matrix that becomes too
thin to be factored (see `state.py`) gets its full second moment, and its momentum in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scantling.groups import MatrixDims
from scantling.optim.codecs import Momentum, block_rows, decode, encode
from scantling.optim.state import Shapes


def param_shape(state: dict[str, Tensor]) -> tuple[int, ...]:
    """Return the shape of the parameter that a state belongs to."""
    for key in ("exp_avg", "exp_avg_sq"):
        if key in state:
            return tuple(state[key].shape)
    return tuple(map(max, state["row"].shape, state["col"].shape))


def slice_tensors(
    state: dict[str, Tensor],
    dim: int,
    index: Tensor,
    *,
    views: tuple[MatrixDims | None, MatrixDims | None],
    momentum: Momentum,
    shapes: Shapes,
) -> dict[str, Tensor]:
    """Return the state of a parameter sliced to the indices `index` of `dim`.

    Args:
        state: state tensors; not changed.
        dim: dim of the parameter.
        index: indices to keep, 1-D int64.
        views: (row dims, column dims) before and after, None for a full second moment.
        momentum: codec of the group's momentum.
        shapes: shapes and dtypes of the result.
    """
    before, after = views
    result = {"step": state["step"].clone()}
    if "low" in shapes:
        result["low"] = state["low"].index_select(dim, index)
    if before is None or after is None:
        # Unfactored before or after: expand the estimate and slice it.
        result["exp_avg_sq"] = second_moment(state, before).index_select(dim, index)
    else:
        # Still factored: slice the factors of the second moment and of the instability.
        for names in (("row", "col"), ("res_row", "res_col")):
            if names[0] not in shapes:
                continue
            pair = _slice_factors([state[name] for name in names], dim, index, before)
            result |= dict(zip(names, pair, strict=True))
    if "exp_avg" in shapes:
        # Decode codes as well: a matrix that is now too thin keeps its momentum in fp32.
        full = full_momentum(state, before, momentum).index_select(dim, index)
        result["exp_avg"] = full.to(shapes["exp_avg"][1])
    elif "exp_avg_codes" in shapes and before is not None:
        result |= _slice_codes(state, dim, index, before, momentum, shapes)
    return {key: result[key] for key in shapes}


def second_moment(state: dict[str, Tensor], view: MatrixDims | None) -> Tensor:
    """Return the estimate v of the second moment of the gradient in the shape of the parameter."""
    if view is None:
        return state["exp_avg_sq"]
    row, col = state["row"], state["col"]
    mean = row.mean(dim=view[0], keepdim=True)
    return row * (col / mean)  # (R, 1) x (1, C); row * col first could overflow


def full_momentum(state: dict[str, Tensor], view: MatrixDims | None, momentum: Momentum) -> Tensor:
    """Return the momentum in the shape of the parameter, decoded if necessary."""
    if "exp_avg" in state or view is None:
        return state["exp_avg"]
    shape = param_shape(state)
    layout = block_rows(shape, view, momentum)
    return decode(state["exp_avg_codes"], state["exp_avg_scale"], layout, torch.float32).reshape(shape)


def encode_momentum(value: Tensor, view: MatrixDims, momentum: Momentum, shapes: Shapes) -> dict[str, Tensor]:
    """Encode a momentum in the shape of the parameter, rounded to the nearest; `value` is overwritten."""
    names = ("exp_avg_codes", "exp_avg_scale")
    codes, scale = (torch.zeros(shapes[key][0], dtype=shapes[key][1], device=value.device) for key in names)
    encode(value, codes, scale, block_rows(tuple(value.shape), view, momentum))
    return dict(zip(names, (codes, scale), strict=True))


def _slice_factors(pair: list[Tensor], dim: int, index: Tensor, view: MatrixDims) -> list[Tensor]:
    sliced = [factor.index_select(dim, index) if factor.shape[dim] > 1 else factor.clone() for factor in pair]
    # Rescale the other factor, so that both keep equal means and their product does not change.
    for side, dims in enumerate(view):
        if dim in dims:
            before, after = (each[side].mean(dim=dims, keepdim=True) for each in (pair, sliced))
            sliced[1 - side].mul_(torch.where(before > 0.0, after / before, 1.0))
    return sliced


def _slice_codes(
    state: dict[str, Tensor], dim: int, index: Tensor, view: MatrixDims, momentum: Momentum, shapes: Shapes
) -> dict[str, Tensor]:
    if dim < len(block_rows(param_shape(state), view, momentum).lead):
        # Whole rows of blocks are kept: their codes do not change.
        return {key: state[key].index_select(dim, index) for key in ("exp_avg_codes", "exp_avg_scale")}
    value = full_momentum(state, view, momentum).index_select(dim, index)
    return encode_momentum(value, view, momentum, shapes)
