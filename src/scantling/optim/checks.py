"""Checks of CAME's arguments: hyper-parameters, parameters, gradients, saved groups and slices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.groups import Role
from scantling.optim.codecs import MOMENTA, ROUNDINGS, block_rows
from scantling.optim.sharding import check_grad_placement, check_placements, check_unsharded_rows
from scantling.optim.state import DTYPES, FACTORS, group_matrix_view, momentum_and_confidence
from scantling.optimizer_state import check_saved_keys, param_name

_ROLES = (None, *get_args(Role))


def check_hyperparams(group: dict[str, Any]) -> None:
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
    # Switches, then choices, then the one combination that divides by 0.
    for key in ("debias", "confidence", "maximize", "capturable", "foreach"):
        if not isinstance(group[key], bool) and not (key == "foreach" and group[key] is None):
            raise UserError(f"{key} must be True or False; given {group[key]!r}")
    for key, allowed in (("momentum", MOMENTA), ("rounding", ROUNDINGS), ("factor", FACTORS), ("role", _ROLES)):
        if group[key] not in allowed:
            raise UserError(f"{key} must be one of {', '.join(map(str, allowed))}; given {group[key]!r}")
    if group["eps"][1] == 0 and momentum_and_confidence(group)[1]:
        raise UserError(
            "eps[1] must be above 0 with confidence=True, which divides by it if a row or column has no gradient; "
            f"given {group['eps'][1]!r}. Use 1e-16, or confidence=False"
        )


def to_python_numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return NumPy hyper-parameters as Python numbers, which `torch.load(weights_only=True)` accepts."""
    converted: dict[str, Any] = {}
    for key in ("lr", "clip_threshold", "weight_decay"):
        if isinstance(group[key], np.floating):
            converted[key] = float(group[key])
    for key in ("betas", "eps"):
        if any(isinstance(value, np.floating) for value in group[key]):
            converted[key] = tuple(map(float, group[key]))
    return converted


def check_initial_lr(group: dict[str, Any]) -> None:
    """Raise a UserError for a negative or non-finite learning rate in a CPU tensor; one on a GPU is not read."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        _check_number("lr", lr.item(), at_least=0.0)


def check_param(name: str, param: Tensor, group: dict[str, Any]) -> None:
    """Raise a UserError for a parameter that CAME cannot train with the options of its group."""
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
    momentum, _ = momentum_and_confidence(group)
    if param.dtype == torch.float64 and momentum not in (None, "fp32"):
        raise UserError(
            f"momentum='{group['momentum']}' has a lower precision than {name}, which is float64; use momentum='fp32'"
        )
    check_placements(name, param)
    # Blocks of codes must not be split over ranks.
    view = group_matrix_view(group, param.shape)
    if view is not None and momentum in ("int8", "int4"):
        rows = block_rows(tuple(param.shape), view, momentum)
        check_unsharded_rows(name, param, len(rows.lead), momentum)


def check_saved_groups(state_dict: Any, groups: Sequence[dict[str, Any]], keys: Iterable[str]) -> None:
    """Raise a UserError for a state dict of another optimizer, or of CAME with other groups or other codecs."""
    hint = "It is a state of came-pytorch: convert it with sc.optim.from_came_pytorch"
    check_saved_keys("CAME", state_dict, groups, keys, {"clip_threshold": hint})
    for index, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=True)):
        check_hyperparams(saved)
        # These decide shapes and dtypes of the state; all other options may differ.
        for key in ("momentum", "rounding", "factor", "confidence"):
            if saved[key] != group[key]:
                raise UserError(
                    f"group {index} was saved with {key}={saved[key]!r}, this optimizer has {key}={group[key]!r}; "
                    "build the optimizer with the same"
                )
        if (saved["betas"][0] == 0) != (group["betas"][0] == 0):
            raise UserError(
                f"group {index} was saved with betas {tuple(saved['betas'])}, this optimizer has "
                f"{tuple(group['betas'])}: with betas[0] = 0 no momentum is kept; build the optimizer with the same"
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
                    f"the gradient of {param_name(group, index)} has the shape {tuple(grad.shape)}, the parameter "
                    f"{tuple(param.shape)}; set the gradient to None after changing the shape of a parameter"
                )
            if grad.layout == torch.strided and not grad.is_complex():
                check_grad_placement(param_name(group, index), param, grad)
                continue
            kind = "complex" if grad.is_complex() else f"sparse ({grad.layout})"
            raise UserError(
                f"CAME needs dense real gradients; the gradient of {param_name(group, index)} is {kind}. "
                "Build the embedding with sparse=False, or give this parameter to another optimizer"
            )


def check_slice(shape: tuple[int, ...], dim: int, index: Tensor) -> tuple[int, Tensor]:
    """Return the dim counted from the start and the indices to keep as int64; raise a UserError if they do not fit."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not -len(shape) <= dim < len(shape):
        raise UserError(f"slice_state: dim must be from {-len(shape)} to {len(shape) - 1}; given {dim!r}")
    size = shape[dim]
    if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype not in (torch.int64, torch.bool):
        given = f"{index.dtype} of shape {tuple(index.shape)}" if isinstance(index, Tensor) else repr(index)
        raise UserError(f"slice_state: index must be a 1-D tensor of int64 indices or a bool mask; given {given}")
    if index.dtype == torch.bool:
        if len(index) != size:
            raise UserError(f"slice_state: the mask has {len(index)} entries, dim {dim} has {size}")
        index = index.nonzero().flatten()
    elif len(index) and not (int(index.min()) >= 0 and int(index.max()) < size):
        raise UserError(f"slice_state: indices must be from 0 to {size - 1}; given {index.tolist()}")
    elif len(index) != len(set(index.tolist())):
        raise UserError(f"slice_state: each index must be unique; given {index.tolist()}")
    return dim % len(shape), index


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
