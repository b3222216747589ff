"""Conversion between the states of `CAME` and of the authors' package, came-pytorch, so that a run can switch.

came-pytorch keeps the momentum in fp32 (`exp_avg`) and factors the last two dims of every parameter that has two or
more. If `CAME` factors the same dims and keeps its momentum in fp32, the conversion is exact in both directions. For
other factors (convolutions, thin matrices) the second moment is expanded and averaged over the other dims.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.groups import MatrixDims
from scantling.optim.came import CAME
from scantling.optim.slicing import encode_momentum, full_momentum, second_moment
from scantling.optim.stages import bias_correction
from scantling.optim.state import (
    group_matrix_view,
    matrix_view,
    momentum_and_confidence,
    state_shapes,
    statistics_dtype,
)

_THEIR_FACTORS = {
    "row": "exp_avg_sq_row",
    "col": "exp_avg_sq_col",
    "res_row": "exp_avg_res_row",
    "res_col": "exp_avg_res_col",
}
_SHARED_KEYS = ("lr", "betas", "eps", "clip_threshold", "weight_decay")


def from_came_pytorch(
    state_dict: dict[str, Any], optimizer: CAME, parameters: Iterable[Tensor] | None = None
) -> dict[str, Any]:
    """Return a state dict for `optimizer.load_state_dict` from a state dict of came-pytorch.

    Args:
        state_dict: state of `came_pytorch.CAME` over the same parameters in the same groups and order, unless
            `parameters` is given.
        optimizer: decides momentum, rounding and factoring; it is not changed. Learning rate, betas, eps, clip
            threshold and weight decay come from the state dict.
        parameters: parameters of the saved optimizer in its order, such as `model.parameters()`, for an optimizer with
            other groups, such as those of `scantling.param_groups`; it then keeps all options of its groups.

    Raises:
        UserError: the groups, or `parameters`, do not fit.
    """
    result = optimizer.state_dict()
    theirs, ours = state_dict.get("param_groups", []), result["param_groups"]
    if not theirs or any(key not in group for group in theirs for key in _SHARED_KEYS):
        keys = sorted(theirs[0]) if theirs else sorted(state_dict)
        raise UserError(
            f"this is not a state of came-pytorch, whose groups have {', '.join(_SHARED_KEYS)}; given {', '.join(keys)}"
        )
    saved_keys = [key for group in theirs for key in group["params"]]
    if parameters is None:
        if [len(group["params"]) for group in theirs] != [len(group["params"]) for group in ours]:
            sizes = [[len(group["params"]) for group in groups] for groups in (theirs, ours)]
            raise UserError(
                f"the saved groups hold {sizes[0]} parameters, those of this optimizer {sizes[1]}: build it over the "
                "same groups in the same order, such as CAME(model.parameters(), lr), or pass those of the "
                "saved optimizer in its order as parameters="
            )
        parameters = optimizer.parameters()
        for saved_group, new_group in zip(theirs, ours, strict=True):
            # In the same groups, the saved options replace ours.
            new_group |= {key: saved_group[key] for key in _SHARED_KEYS}
    # Match our parameters to the saved keys by identity, each tied parameter once.
    ordered = list({id(param): param for param in parameters}.values())
    if len(ordered) != len(saved_keys):
        raise UserError(f"the saved groups hold {len(saved_keys)} parameters; given {len(ordered)}")
    key_of = {id(param): key for param, key in zip(ordered, saved_keys, strict=True)}
    result["state"] = {}
    for new_group, group in zip(ours, optimizer.param_groups, strict=True):
        for key, param in zip(new_group["params"], group["params"], strict=True):
            if id(param) not in key_of:
                raise UserError(f"parameter {key} of this optimizer, {tuple(param.shape)}, is not one of parameters=")
            saved = state_dict["state"].get(key_of[id(param)])
            # A parameter that was never stepped has no state.
            if saved:
                _check(saved, param, f"parameter {key}")
                result["state"][key] = _to_ours(saved, group, param)
    return result


def to_came_pytorch(optimizer: CAME) -> dict[str, Any]:
    """Return a state dict for `came_pytorch.CAME(params, lr).load_state_dict` over the same parameters and groups.

    Weights in 24 bits (`rounding="compensated"`) lose their lowest 8 bits, which the published package does not keep.
    It has no `debias` either: averages are returned corrected, so that its next step has the same size. Converting back
    to `debias` within the first 1 / (1 - b3) steps would correct them twice.

    Args:
        optimizer: optimizer over the same parameters and groups.

    Returns:
        The state dict, which shares no memory with the optimizer.

    Raises:
        UserError: a group without confidence or momentum, which the published package always has, or with `maximize`.
    """
    if not all(momentum_and_confidence(group)[1] for group in optimizer.param_groups):
        raise UserError(
            "came-pytorch always has a confidence, which this state does not hold; given confidence=False or betas[0]=0"
        )
    if any(group["maximize"] for group in optimizer.param_groups):
        raise UserError("came-pytorch cannot maximize; given maximize=True")
    saved_groups = optimizer.state_dict()["param_groups"]
    state: dict[int, Any] = {}
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        for param, key in zip(group["params"], saved["params"], strict=True):
            if optimizer.state.get(param):
                state[key] = _to_theirs(optimizer.state[param], group, param)
    groups = [{key: group[key] for key in (*_SHARED_KEYS, "params")} for group in saved_groups]
    return {"state": state, "param_groups": groups}


def _to_ours(saved: dict[str, Any], group: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
    shape = tuple(param.shape)
    view, last_two = group_matrix_view(group, shape), matrix_view(shape, "last2")
    shapes = state_shapes(group, shape, param.dtype)
    state: dict[str, Tensor] = {"step": torch.tensor(float(saved["step"]))}
    if last_two is None:
        state["exp_avg_sq"] = saved["exp_avg_sq"]
    else:
        factors = {name: _factor_to_ours(saved[key], name) for name, key in _THEIR_FACTORS.items()}
        state |= factors if view == last_two else _refactor(factors, last_two, view)
    if "exp_avg" in shapes:
        state["exp_avg"] = saved["exp_avg"]
    elif "exp_avg_codes" in shapes and view is not None:
        state |= encode_momentum(saved["exp_avg"].to(torch.float32, copy=True), view, group["momentum"], shapes)
    # came-pytorch keeps no bits below bf16.
    if "low" in shapes:
        state["low"] = torch.zeros(shape)
    return {key: state[key].to(param.device, dtype) for key, (_, dtype) in shapes.items()}


def _debias(state: dict[str, Tensor], group: dict[str, Any]) -> dict[str, Tensor]:
    """Return a state with its averages bias-corrected, as the step reads them; unchanged without `debias`."""
    if not group["debias"]:
        return state
    beta1, beta2, beta3 = group["betas"]
    # Each average has its beta, and is divided by 1 - beta^t.
    beta_by_key = {"exp_avg": beta1, **dict.fromkeys(("row", "col", "exp_avg_sq"), beta2)}
    beta_by_key |= dict.fromkeys(("res_row", "res_col"), beta3)
    return {
        key: value / bias_correction(state["step"], beta_by_key[key], value.dtype) if key in beta_by_key else value
        for key, value in state.items()
    }


def _to_theirs(state: dict[str, Tensor], group: dict[str, Any], param: Tensor) -> dict[str, Any]:
    shape = tuple(param.shape)
    view, last_two = group_matrix_view(group, shape), matrix_view(shape, "last2")
    momentum = full_momentum(state, view, group["momentum"]).to(statistics_dtype(param.dtype), copy=True)
    state = _debias({**state, "exp_avg": momentum}, group)
    theirs: dict[str, Any] = {"step": int(state["step"]), "RMS": 0, "exp_avg": state["exp_avg"]}
    if last_two is None:
        return {**theirs, "exp_avg_sq": state["exp_avg_sq"].clone()}
    factors = state if view == last_two else _refactor(state, view, last_two)
    return theirs | {key: _factor_to_theirs(factors[name], name) for name, key in _THEIR_FACTORS.items()}


def _refactor(state: dict[str, Tensor], view: MatrixDims | None, target: MatrixDims | None) -> dict[str, Tensor]:
    """Convert statistics from one factoring to another; None is a full second moment, which has no instability."""
    moment = second_moment(state, view)
    if target is None:
        return {"exp_avg_sq": moment}
    # Without factors there is no instability: ones leave the momentum unscaled.
    instability = torch.ones_like(moment)
    if view is not None:
        instability = second_moment({"row": state["res_row"], "col": state["res_col"]}, view)
    rows, cols = target
    means = {"row": moment.mean(cols, keepdim=True), "col": moment.mean(rows, keepdim=True)}
    return means | {"res_row": instability.mean(cols, keepdim=True), "res_col": instability.mean(rows, keepdim=True)}


def _factor_to_ours(factor: Tensor, name: str) -> Tensor:
    # came-pytorch drops the averaged dim, we keep it with size 1
    return factor.unsqueeze(-1 if name.endswith("row") else -2)


def _factor_to_theirs(factor: Tensor, name: str) -> Tensor:
    return factor.squeeze(-1 if name.endswith("row") else -2).clone()


def _check(saved: dict[str, Any], param: Tensor, name: str) -> None:
    factors = ("exp_avg_sq",) if matrix_view(tuple(param.shape), "last2") is None else tuple(_THEIR_FACTORS.values())
    if missing := [key for key in ("step", "exp_avg", *factors) if key not in saved]:
        raise UserError(
            f"the saved state of {name} is not one of came-pytorch: it has no {', '.join(missing)}; given "
            f"{', '.join(saved)}. Pass a state of CAME to `load_state_dict` directly"
        )
    if tuple(saved["exp_avg"].shape) != tuple(param.shape):
        raise UserError(
            f"the saved momentum of {name} has the shape {tuple(saved['exp_avg'].shape)}, the parameter "
            f"{tuple(param.shape)}"
        )
