"""Optimizers by name: `came`, `sign`, `muon` and every class of torch.optim that steps on gradients alone.

Options are checked before anything is built; recipes are validated with `check_options`. torch is imported by the
functions, not with the module.
"""

from __future__ import annotations

import inspect
import logging
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from scantling.errors import UserError, with_hint

if TYPE_CHECKING:
    import torch

    OptimizerClass = Callable[..., torch.optim.Optimizer]

logger = logging.getLogger(__name__)

REFUSED = {
    "lbfgs": "it evaluates the loss several times per step, and needs a closure",
    "sparseadam": "it takes sparse gradients only; adam and adamw take dense ones",
}
"""Classes of torch.optim that cannot be used by name, with the reason."""

FOR_MATRICES: dict[str, dict[str, Any]] = {"muon": {"adjust_lr_fn": "match_rms_adamw"}, "sign": {}}
"""Optimizers of matrices only, and their defaults that differ from those of their class."""
ADAMW_DEFAULTS = {"betas": (0.9, 0.95), "eps": 1e-8}
"""Options of the AdamW that steps the other parameters."""


def optimizer_names() -> list[str]:
    """Return all names that `build_optimizer` accepts, sorted."""
    return sorted({"came", *FOR_MATRICES, *_torch_classes()} - REFUSED.keys())


def optimizer_options(name: str) -> dict[str, Any]:
    """Return the options of an optimizer and their defaults, without `lr` and `weight_decay`.

    Options of `muon`: `momentum`, `nesterov`, `ns_coefficients`, `ns_steps` and `adjust_lr_fn` are those of
    `torch.optim.Muon`, which steps the 2-D matrices; `betas` and `eps` are those of `torch.optim.AdamW`, which steps
    the rest. The learning rate is shared: `adjust_lr_fn` is by default "match_rms_adamw", so that one tuned for AdamW
    fits. `sign` has `momentum`, and the same two of AdamW; its `lr` is the distance that an element moves.

    Raises:
        UserError: an unknown optimizer.
    """
    return {option: default for option, (default, _) in _specification(name).items()}


def check_options(name: str, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all problems of an optimizer's name and options.

    Args:
        name: name of the optimizer, in upper or lower case.
        options: options as read from a recipe, with lists for tuples and numbers as text.

    Returns:
        (key, problem) pairs; the key is "name" or an option. Empty without problems.
    """
    try:
        specification = _specification(name)
    except UserError as error:
        return [("name", str(error))]
    problems = []
    converted = {}
    for key, value in options.items():
        if key not in specification:
            allowed = f"not an option of {name.lower()}; allowed: {', '.join(specification)}"
            problems.append((key, with_hint(allowed, key, specification)))
            continue
        try:
            converted[key] = convert(value, specification[key][1])
        except ValueError as error:
            problems.append((key, f"{error}; given {value!r}"))
    return problems or _check_values(name, converted)


def build_optimizer(
    name: str,
    groups: Iterable[Any],
    *,
    lr: float | torch.Tensor,
    weight_decay: float = 0.0,
    **options: Any,
) -> torch.optim.Optimizer:
    """Build an optimizer by its name.

    Args:
        name: `came`, `muon` (Muon for 2-D matrices, AdamW for the rest, as one optimizer), `sign` (signSGD or Signum
            for matrices, AdamW for the rest) or a class of torch.optim, in upper or lower case.
        groups: groups of `scantling.param_groups`, or anything that torch.optim accepts; `muon` and `sign` need the
            former. The dicts are copied with all their keys, including `role` and `matrix_dims`.
        lr: learning rate of all groups without one.
        weight_decay: weight decay of all groups without one; decoupled or not, as in the optimizer of this name.
        options: arguments of the optimizer, see `optimizer_options`.

    Returns:
        The optimizer.

    Raises:
        UserError: an unknown optimizer or option, or a value that the optimizer does not accept.
    """
    groups = list(groups)
    optimizer = build_unwarned(name, groups, lr=lr, weight_decay=weight_decay, **options)
    # Settings without effect are one warning each.
    decayed = weight_decay or any(isinstance(group, dict) and group.get("weight_decay") for group in groups)
    if decayed and "weight_decay" not in optimizer.defaults and name.lower() not in FOR_MATRICES:
        logger.warning("%s has no weight decay: weight_decay has no effect", type(optimizer).__name__)
    rounding = optimizer.defaults.get("rounding", "nearest")
    if rounding != "nearest" and not _has_bf16(optimizer):
        logger.warning("rounding: %s has no effect: it applies to bf16 parameters, and there are none", rounding)
    return optimizer


def _has_bf16(optimizer: torch.optim.Optimizer) -> bool:
    import torch

    return any(param.dtype == torch.bfloat16 for group in optimizer.param_groups for param in group["params"])


def build_unwarned(
    name: str, groups: Iterable[Any], *, lr: float | torch.Tensor, weight_decay: float = 0.0, **options: Any
) -> torch.optim.Optimizer:
    """Build an optimizer like `build_optimizer`, without its warnings."""
    problems = check_options(name, options)
    if problems:
        raise UserError(f"optimizer '{name}': " + "; ".join(f"{key}: {problem}" for key, problem in problems))
    specification = _specification(name)
    converted = {key: convert(value, specification[key][1]) for key, value in options.items()}
    copied = [dict(group) if isinstance(group, dict) else group for group in groups]
    try:
        return _construct(name, copied, lr, weight_decay, converted)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"optimizer '{name}': {error}") from error


def _construct(
    name: str, groups: list[Any], lr: float | torch.Tensor, weight_decay: float, options: dict[str, Any]
) -> torch.optim.Optimizer:
    name = name.lower()
    if name in FOR_MATRICES:
        return _build_for_matrices(name, groups, lr, weight_decay, options)
    # `check_options` has refused unknown names, so the only other one is "came".
    cls = _torch_classes().get(name) or _came()
    if "weight_decay" in inspect.signature(cls).parameters:
        options = {**options, "weight_decay": weight_decay}
    return cls(groups, lr=lr, **options)


def _build_for_matrices(
    name: str, groups: list[Any], lr: float | torch.Tensor, weight_decay: float, options: dict[str, Any]
) -> torch.optim.Optimizer:
    from scantling.optim.combined import CombinedOptimizer

    if not groups or not all(isinstance(group, dict) and group.get("role") for group in groups):
        raise UserError(f"{name} needs groups with roles; build them with scantling.param_groups(model)")
    # One optimizer over the matrices, AdamW over the rest; `order` keeps the groups in the given order.
    options = {**FOR_MATRICES[name], **ADAMW_DEFAULTS, **options}
    adamw_options = {key: options.pop(key) for key in ADAMW_DEFAULTS}
    order = [0 if _is_matrix(group, two_dims=name == "muon") else 1 for group in groups]
    matrices, rest = ([group for group, index in zip(groups, order, strict=True) if index == side] for side in (0, 1))
    if not matrices:
        cores = " (cores of TT layers have more than two dims)" if name == "muon" else ""
        raise UserError(f"{name}: there is no trainable matrix among the parameters{cores}; use adamw")
    members = [_class_for_matrices(name)(matrices, lr=lr, weight_decay=weight_decay, **options)]
    if rest:
        members.append(_torch_classes()["adamw"](rest, lr=lr, weight_decay=weight_decay, **adamw_options))
    return CombinedOptimizer(members, order=order)


def _is_matrix(group: dict[str, Any], *, two_dims: bool) -> bool:
    params = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
    return group["role"] == "matrix" and not (two_dims and any(param.ndim != 2 for param in params))


def _class_for_matrices(name: str) -> OptimizerClass:
    from scantling.optim.sign import Sign

    return Sign if name == "sign" else _torch_classes()[name]


def _specification(name: str) -> dict[str, tuple[Any, Any]]:
    """Return (default, type) of each option of the optimizer of this name."""
    key = name.lower()
    if key in REFUSED:
        raise UserError(f"the optimizer '{name}' cannot be used here: {REFUSED[key]}")
    if key in FOR_MATRICES:
        own, adamw = (signature_options(each) for each in (_class_for_matrices(key), _torch_classes()["adamw"]))
        own |= {option: (default, own[option][1]) for option, default in FOR_MATRICES[key].items()}
        return own | {option: (default, adamw[option][1]) for option, default in ADAMW_DEFAULTS.items()}
    if key == "came":
        return signature_options(_came())
    if key in _torch_classes():
        return signature_options(_torch_classes()[key])
    names = optimizer_names()
    raise UserError(with_hint(f"unknown optimizer '{name}'; allowed: {', '.join(names)}", key, names))


def _check_values(name: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (key, error) for each value that the optimizer rejects."""
    problems = []
    # Find the option behind each error: the one that alone gives the same error.
    remaining = dict(options)
    while (problem := _build_error(name, remaining)) is not None:
        culprit = next((key for key, value in remaining.items() if _build_error(name, {key: value}) == problem), None)
        problems.append((culprit or "name", problem))
        if culprit is None:
            break
        del remaining[culprit]
    return problems


def _build_error(name: str, options: dict[str, Any]) -> str | None:
    """Return the error of building the optimizer with these options over two small parameters; None without one."""
    import torch

    matrix = {"params": [torch.nn.Parameter(torch.zeros(2, 2))], "role": "matrix", "matrix_dims": ((0,), (1,))}
    vector = {"params": [torch.nn.Parameter(torch.zeros(2))], "role": "vector", "matrix_dims": None}
    try:
        _construct(name, [matrix, vector], 1e-3, 0.0, options)
    except (UserError, ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return None


def _came() -> OptimizerClass:
    from scantling.optim.came import CAME

    return CAME


def _torch_classes() -> dict[str, OptimizerClass]:
    """Return the optimizer classes of torch.optim by lower-case name."""
    import torch

    found = {name.lower(): getattr(torch.optim, name) for name in torch.optim.__all__}
    base = torch.optim.Optimizer
    return {key: cls for key, cls in found.items() if isinstance(cls, type) and issubclass(cls, base) and cls != base}


# --- options as a recipe gives them

NOT_OPTIONS = ("self", "params", "lr", "weight_decay")
"""Arguments of an optimizer that are not options."""


def signature_options(cls: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return (default, type) of every option in the signature of an optimizer class."""
    hints = typing.get_type_hints(getattr(cls, "__init__"))  # noqa: B009
    parameters = inspect.signature(cls).parameters
    return {name: (p.default, hints.get(name, Any)) for name, p in parameters.items() if name not in NOT_OPTIONS}


def convert(value: Any, hint: Any) -> Any:
    """Convert a value to a type: lists to tuples, integers to floats, "1e-8" (a string in YAML 1.1) to 1e-8.

    Args:
        value: a value from YAML or Python.
        hint: the annotated type: a plain type, a union, a tuple of fixed length, a literal.

    Raises:
        ValueError: the value does not have the type; the message names the allowed values.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (isinstance(hint, type) and origin is None and type(value) is hint):
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, hint)
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
        return tuple(convert(item, arg) for item, arg in zip(value, args, strict=True))
    if origin is typing.Literal and value in args:
        return value
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(hint, type) and hint not in (int, float) and isinstance(value, hint):
        return value
    raise ValueError(f"must be {describe(hint)}")


def describe(hint: Any) -> str:
    """Return a type in words: "a list of 2: each a number", "true or false", "a number or null"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(arg) for arg in args if getattr(arg, "__name__", "") != "Tensor"))
    if origin is tuple:
        words = [describe(arg) for arg in args]
        return f"a list of {len(args)}: " + (f"each {words[0]}" if len(set(words)) == 1 else ", ".join(words))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, args))
    plain = {float: "a number", int: "a whole number", bool: "true or false", str: "text", type(None): "null"}
    return plain.get(hint, getattr(hint, "__name__", str(hint)))


def _convert_union(value: Any, hint: Any) -> Any:
    members = typing.get_args(hint)
    # Prefer the member with the type of the value: 1 stays an int in "int or float".
    exact = [member for member in members if typing.get_origin(member) is None and type(value) is member]
    for member in exact or members:
        try:
            return convert(value, member)
        except ValueError:
            continue
    raise ValueError(f"must be {describe(hint)}")
