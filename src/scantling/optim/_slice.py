"""Cutting the state of a parameter along one of its dims, for parameters that shrink during training.

The estimate of the second moment of what is left stays what it was, element by element: with the rows I kept,

    row' = row[I],  col' = col mean(row[I]) / mean(row),  so that row'_i col'_j / mean(row') = row_i col_j / mean(row)

and likewise for columns and for the instability. The two factors keep equal means. Codes of whole rows are kept as they
are; where the blocks of a row change, the momentum is decoded, cut and coded anew, to the nearest: an error of at most
half a step of its block, 1/506 to 1/128 of the block's scale in int8 and 1/14 in int4. A matrix that becomes
too thin to be factored (see `_factor.py`) gets its full second moment, and its momentum in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scantling.groups import MatrixDims
from scantling.optim._codec import Momentum, decode, encode, layout_of
from scantling.optim._state import Shapes


def shape_of(state: dict[str, Tensor]) -> tuple[int, ...]:
    """The shape of the parameter that a state belongs to."""
    for key in ("exp_avg", "exp_avg_sq"):
        if key in state:
            return tuple(state[key].shape)
    return tuple(map(max, state["row"].shape, state["col"].shape))


def cut_state(
    state: dict[str, Tensor],
    dim: int,
    index: Tensor,
    *,
    views: tuple[MatrixDims | None, MatrixDims | None],
    momentum: Momentum,
    needed: Shapes,
) -> dict[str, Tensor]:
    """The state of a parameter of which only the positions `index` of `dim` are left.

    Args:
        state: as it is; not changed.
        dim: of the parameter.
        index: positions that stay, 1-D int64.
        views: (row dims, column dims) before and after, None for a full second moment.
        momentum: how the group keeps its momentum.
        needed: shapes and dtypes of the result.
    """
    before, after = views
    result = {"step": state["step"].clone()}
    if "low" in needed:
        result["low"] = state["low"].index_select(dim, index)
    if before is None or after is None:
        result["exp_avg_sq"] = second_moment(state, before).index_select(dim, index)
    else:
        for names in (("row", "col"), ("res_row", "res_col")):
            if names[0] not in needed:
                continue
            pair = _cut_factors([state[name] for name in names], dim, index, before)
            result |= dict(zip(names, pair, strict=True))
    if "exp_avg" in needed:
        full = whole_momentum(state, before, momentum).index_select(dim, index)
        result["exp_avg"] = full.to(needed["exp_avg"][1])
    elif "exp_avg_codes" in needed and before is not None:
        result |= _cut_codes(state, dim, index, before, momentum, needed)
    return {key: result[key] for key in needed}


def second_moment(state: dict[str, Tensor], view: MatrixDims | None) -> Tensor:
    """The estimate v of the second moment of the gradient, of the parameter's shape."""
    if view is None:
        return state["exp_avg_sq"]
    row, col = state["row"], state["col"]
    mean = row.mean(dim=view[0], keepdim=True)
    return row * (col / mean)


def whole_momentum(state: dict[str, Tensor], view: MatrixDims | None, momentum: Momentum) -> Tensor:
    """The momentum of a parameter in its shape, decoded where it is kept as codes."""
    if "exp_avg" in state or view is None:
        return state["exp_avg"]
    shape = shape_of(state)
    layout = layout_of(shape, view, momentum)
    return decode(state["exp_avg_codes"], state["exp_avg_scale"], layout, torch.float32).reshape(shape)


def coded_momentum(value: Tensor, view: MatrixDims, momentum: Momentum, needed: Shapes) -> dict[str, Tensor]:
    """Momentum of a parameter's shape as codes, rounded to the nearest; `value` is overwritten."""
    names = ("exp_avg_codes", "exp_avg_scale")
    codes, scale = (torch.zeros(needed[key][0], dtype=needed[key][1], device=value.device) for key in names)
    encode(value, codes, scale, layout_of(tuple(value.shape), view, momentum))
    return dict(zip(names, (codes, scale), strict=True))


def _cut_factors(pair: list[Tensor], dim: int, index: Tensor, view: MatrixDims) -> list[Tensor]:
    cut = [factor.index_select(dim, index) if factor.shape[dim] > 1 else factor.clone() for factor in pair]
    for side, dims in enumerate(view):
        if dim in dims:
            before, after = (each[side].mean(dim=dims, keepdim=True) for each in (pair, cut))
            cut[1 - side].mul_(torch.where(before > 0.0, after / before, 1.0))
    return cut


def _cut_codes(
    state: dict[str, Tensor], dim: int, index: Tensor, view: MatrixDims, momentum: Momentum, needed: Shapes
) -> dict[str, Tensor]:
    if dim < len(layout_of(shape_of(state), view, momentum).lead):
        return {key: state[key].index_select(dim, index) for key in ("exp_avg_codes", "exp_avg_scale")}
    value = whole_momentum(state, view, momentum).index_select(dim, index)
    return coded_momentum(value, view, momentum, needed)
