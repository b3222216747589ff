"""Groups of parameters with the options of an exchange: construction, checks and lookups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import Module

from scantling.comm.config import GROUP_OPTIONS, ExchangeConfig, check_option
from scantling.errors import UserError

Group: TypeAlias = dict[str, Any]

ROLES = (None, "matrix", "embedding", "vector")
COMPARED_OPTIONS = (*GROUP_OPTIONS, "transform", "role", "matrix_dims", "compat")
"""Keys of a group that determine how its parameters are sent."""
INTERNAL_DEFAULTS = {"transform": "dct", "role": None, "matrix_dims": None, "compat": None}
"""Keys without an argument: `transform` is "none" for SparseLoCo, `compat` is "paper" for DeMo's published code."""


def all_parameters(groups: Sequence[Group]) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    return [param for group in groups for param in group["params"]]


def group_by_param(groups: Sequence[Group]) -> list[Group]:
    """Return the group of each parameter."""
    return [group for group in groups for _ in group["params"]]


def parameter_names(groups: Sequence[Group]) -> list[str]:
    """Return a unique name of each parameter; with its group if a name occurs twice, or its index if it has none."""
    pairs: list[tuple[int, str]] = []
    for number, group in enumerate(groups):
        given = group.get("param_names") or [f"group {number}, parameter {k}" for k in range(len(group["params"]))]
        pairs += [(number, name) for name in given]
    times = Counter(name for _, name in pairs)
    return [name if times[name] == 1 else f"group {number}, {name}" for number, name in pairs]


def split_by_numel(numels: Sequence[int], most: int) -> list[list[int]]:
    """Return buckets of consecutive indices of at most `most` elements together, or of one that has more."""
    buckets: list[list[int]] = []
    size = 0
    for idx, numel in enumerate(numels):
        if not buckets or size + numel > most:
            buckets.append([])
            size = 0
        buckets[-1].append(idx)
        size += numel
    return buckets


def make_groups(given: Iterable[Any], defaults: Group) -> list[Group]:
    """Return groups with all options; parameters alone, or (name, parameter) pairs, are one group."""
    check_given(given)
    items = list(_iterable(given))
    if not items:
        raise UserError("MomentumExchange needs at least one parameter; given none")
    if not isinstance(items[0], dict):
        items = [{"params": items}]
    groups = []
    for item in items:
        check_group(item)
        params = [item["params"]] if isinstance(item["params"], Tensor) else item["params"]
        pairs = [pair if isinstance(pair, tuple) else (None, pair) for pair in _iterable(params)]
        for pair in pairs:
            if len(pair) != 2 or not isinstance(pair[1], Tensor):
                raise UserError(f"parameters are tensors, or pairs of a name and a tensor; given {pair[-1]!r}")
        group = {**defaults, **item, "params": [param for _, param in pairs]}
        if all(name is not None for name, _ in pairs):
            group["param_names"] = [name for name, _ in pairs]
        groups.append(group)
    # By identity: `==` compares the elements of tensors.
    seen: set[int] = set()
    for param in all_parameters(groups):
        if id(param) in seen:
            raise UserError(f"a parameter of shape {tuple(param.shape)} is given twice; each must be in one group once")
        seen.add(id(param))
    return groups


def check_given(given: Any) -> None:
    """Raise a UserError for a model or a single tensor instead of a list of parameters or groups."""
    if isinstance(given, Tensor):
        raise UserError("parameters are given as a list or as groups; given a single tensor")
    if isinstance(given, Module):
        name = type(given).__name__
        raise UserError(f"parameters are given as a list or as groups, sc.param_groups(model); given the model, {name}")


def check_group(item: Any) -> None:
    """Raise a UserError if this is not a group of parameters."""
    if not isinstance(item, dict) or "params" not in item:
        given = f"the keys {', '.join(map(str, item))}" if isinstance(item, dict) else repr(item)
        raise UserError(f"a group is a mapping with 'params', the parameters it holds; given {given}")


def check_real(params: Iterable[Tensor]) -> None:
    """Raise a UserError for a complex parameter."""
    for param in params:
        if param.is_complex():
            raise UserError(f"a parameter of shape {tuple(param.shape)} is complex; exchange its real view instead")


def check_group_options(group: Group) -> None:
    """Raise a UserError for the first option of a group that is out of range."""
    for name in GROUP_OPTIONS:
        check_option(name, group[name])
    if group["topk"] > group["chunk"] ** 2:
        raise UserError(
            f"topk must be at most chunk^2 = {group['chunk'] ** 2}, the size of a block; given {group['topk']}"
        )
    if group["role"] not in ROLES:
        raise UserError(f"role must be one of {', '.join(map(repr, ROLES))}; given {group['role']!r}")
    if group["transform"] not in ("dct", "none"):
        raise UserError(f"transform must be 'dct' or 'none'; given {group['transform']!r}")
    dims = group["matrix_dims"]
    if dims is not None and not (_is_list(dims) and len(dims) == 2 and all(map(_is_list, dims))):
        raise UserError(f"matrix_dims must be (row dims, column dims), such as ((0,), (1,)); given {dims!r}")
    if group["compat"] not in (None, "paper"):
        raise UserError(f"compat must be None or 'paper'; given {group['compat']!r}")


def check_groups(groups: Sequence[Group], config: ExchangeConfig) -> None:
    """Raise a UserError for the first option out of range, or that does not fit those of other groups."""
    for group in groups:
        check_group_options(group)
        check_real(group["params"])
    if not any(group["params"] for group in groups):
        raise UserError("the groups hold no parameter; at least one is needed")
    if len({group["compat"] for group in groups}) > 1:
        raise UserError("compat must be the same in all groups: it says how the mean over replicas is taken")
    if any(group["compat"] == "paper" and "lr" not in group for group in groups):
        raise UserError("compat='paper' scales gradients by 'lr', which a group lacks; use sc.DeMo, or set it")
    if groups[0]["compat"] == "paper" and config.exchange in ("owner", "dense"):
        raise UserError("compat='paper' takes the mean over those that sent a coefficient: exchange='all_gather'")


def _iterable(params: Any) -> Iterable[Any]:
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise UserError(f"parameters are given as a list or as groups; given {params!r}")
    return params


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list)
