"""What CAME accepts: hyper-parameters, parameters and gradients, each refused with its value and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.groups import Role
from scantling.optim._codec import MOMENTA, layout_of
from scantling.optim._factor import FACTORS
from scantling.optim._rounding import ROUNDINGS
from scantling.optim._shardplan import check_grad_placement, check_placements, check_rows_whole
from scantling.optim._state import DTYPES, kept_averages, view_of
from scantling.optimizer_state import check_saved_keys, name_of

_ROLES = (None, *get_args(Role))


def check_hyper(group: dict[str, Any]) -> None:
    """Raise a UserError for the first hyper-parameter of a group that is out of range."""
    lr = group["lr"]
    if lr is None:
        raise UserError("CAME needs a learning rate, such as lr=1e-3; that of AdamW is a good start with debias=True")
    if isinstance(lr, Tensor):
        if lr.ndim != 0 or not lr.is_floating_point():
            raise UserError(f"lr as a tensor must be 0-D and float; given {lr.dtype} of shape {tuple(lr.shape)}")
    else:
        _check_number("lr", lr, at_least=0.0)
    _check_numbers("betas", group["betas"], 3, at_least=0.0, below=1.0)
    _check_numbers("eps", group["eps"], 2, at_least=0.0)
    _check_number("clip_threshold", group["clip_threshold"], above=0.0)
    _check_number("weight_decay", group["weight_decay"], at_least=0.0)
    for key in ("debias", "confidence", "maximize", "capturable", "foreach"):
        if not isinstance(group[key], bool) and not (key == "foreach" and group[key] is None):
            raise UserError(f"{key} must be True or False; given {group[key]!r}")
    for key, allowed in (("momentum", MOMENTA), ("rounding", ROUNDINGS), ("factor", FACTORS), ("role", _ROLES)):
        if group[key] not in allowed:
            raise UserError(f"{key} must be one of {', '.join(map(str, allowed))}; given {group[key]!r}")
    if group["eps"][1] == 0 and kept_averages(group)[1]:
        raise UserError(
            "eps[1] must be above 0 where there is a confidence, which divides by it where a row or column has no "
            f"gradient; given {group['eps'][1]!r}. Give 1e-16, or confidence=False"
        )


def plain_numbers(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that are numbers of numpy, as Python's, which `torch.load(weights_only=True)` takes."""
    found: dict[str, Any] = {}
    for key in ("lr", "clip_threshold", "weight_decay"):
        if isinstance(group[key], np.floating):
            found[key] = float(group[key])
    for key in ("betas", "eps"):
        if any(isinstance(value, np.floating) for value in group[key]):
            found[key] = tuple(map(float, group[key]))
    return found


def check_start(group: dict[str, Any]) -> None:
    """Raise a UserError for a learning rate in a tensor that no step can start with; on a GPU it is not looked at."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        _check_number("lr", lr.item(), at_least=0.0)


def check_param(name: str, param: Tensor, group: dict[str, Any]) -> None:
    """Raise a UserError for a parameter that CAME cannot train as its group asks."""
    if param.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UserError(f"CAME trains {allowed} parameters; {name} is {str(param.dtype).removeprefix('torch.')}")
    if param.layout != torch.strided:
        raise UserError(f"CAME trains dense parameters; {name} is {param.layout}")
    if param.dtype == torch.float16 and group["rounding"] != "nearest":
        raise UserError(
            f"rounding='{group['rounding']}' is for bfloat16 parameters; {name} is float16. "
            "Convert the model to bfloat16"
        )
    momentum, _ = kept_averages(group)
    if param.dtype == torch.float64 and momentum not in (None, "fp32"):
        raise UserError(f"momentum='{group['momentum']}' is less than {name} is made of, float64; use momentum='fp32'")
    check_placements(name, param)
    view = view_of(group, param.shape)
    if view is not None and momentum in ("int8", "int4"):
        layout = layout_of(tuple(param.shape), view, momentum)
        check_rows_whole(name, param, len(layout.lead), momentum)


def check_saved_groups(state_dict: Any, groups: Sequence[dict[str, Any]], keys: Iterable[str]) -> None:
    """Raise a UserError where a state dict is none of CAME (`keys`) for such groups, kept in the same form."""
    hint = "It is one of came-pytorch: sc.optim.from_came_pytorch makes one of CAME of it"
    check_saved_keys("CAME", state_dict, groups, keys, {"clip_threshold": hint})
    for index, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=True)):
        check_hyper(saved)
        for key in ("momentum", "rounding", "factor", "confidence"):
            if saved[key] != group[key]:
                raise UserError(
                    f"group {index} was saved with {key}={saved[key]!r}, this optimizer has {key}={group[key]!r}; "
                    "build it with the same"
                )
        if (saved["betas"][0] == 0) != (group["betas"][0] == 0):
            raise UserError(
                f"group {index} was saved with betas {tuple(saved['betas'])}, this optimizer has "
                f"{tuple(group['betas'])}: with betas[0] = 0 no momentum is kept; build it with the same"
            )


def check_grads(groups: Iterable[dict[str, Any]]) -> None:
    """Raise a UserError for the first gradient that CAME cannot use."""
    for group in groups:
        for index, param in enumerate(group["params"]):
            grad = param.grad
            if grad is None:
                continue
            if grad.shape != param.shape:
                raise UserError(
                    f"the gradient of {name_of(group, index)} has the shape {tuple(grad.shape)}, the parameter "
                    f"{tuple(param.shape)}; set the gradient to None where a parameter changes its shape"
                )
            if grad.layout == torch.strided and not grad.is_complex():
                check_grad_placement(name_of(group, index), param, grad)
                continue
            kind = "complex" if grad.is_complex() else f"sparse ({grad.layout})"
            raise UserError(
                f"CAME needs dense real gradients; that of {name_of(group, index)} is {kind}. "
                "Build the embedding with sparse=False, or give this parameter to another optimizer"
            )


def _check_numbers(name: str, values: Any, count: int, **limits: float) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
        raise UserError(f"{name} must be {count} numbers; given {values!r}")
    for index, value in enumerate(values):
        _check_number(f"{name}[{index}]", value, **limits)


def _check_number(
    name: str, value: Any, *, at_least: float | None = None, above: float | None = None, below: float | None = None
) -> None:
    limits = {"at least": at_least, "above": above, "below": below}
    allowed = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if limit is not None)
    number = isinstance(value, int | float | np.floating) and not isinstance(value, bool) and math.isfinite(value)
    if (
        not number
        or (at_least is not None and value < at_least)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    ):
        raise UserError(f"{name} must be a number {allowed}; given {value!r}")
