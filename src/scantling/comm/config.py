"""What can be set of an exchange of momentum: for each group of parameters, and for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor
from torch.nn import Module

from scantling.comm.codec.quantize import VALUES
from scantling.comm.residuals import FORMATS
from scantling.errors import UserError

Exchange: TypeAlias = Literal["auto", "all_gather", "owner", "dense"]
Transform: TypeAlias = Literal["dct", "none"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)
Group: TypeAlias = dict[str, Any]
ROLES = (None, "matrix", "embedding", "vector")
OPTIONS = (
    *("decay", "topk", "chunk", "alpha", "values", "dense", "transform", "residual"),
    *("role", "matrix_dims", "compat"),
)
"""Keys of a group that say how its parameters travel."""


@dataclass(frozen=True, slots=True)
class ExchangeConfig:
    """When replicas exchange what; the arguments of `MomentumExchange`."""

    exchange: Exchange
    sync_every: int
    state_sync_every: int | None
    check_every: int | None
    delay: int = 0
    overlap: bool = False
    bucket_mb: float = 25.0

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise UserError(f"exchange must be one of {', '.join(EXCHANGES)}; given {self.exchange!r}")
        for key in ("sync_every", "state_sync_every", "check_every"):
            value = getattr(self, key)
            if not is_whole(value, least=1) and not (value is None and key != "sync_every"):
                raise UserError(f"{key} must be a whole number from 1 on; given {value!r}")
        if self.sync_every > 1 and self.exchange == "dense":
            raise UserError(
                f"exchange='dense' sends everything at every call: set sync_every=1; given {self.sync_every}"
            )
        if not is_whole(self.delay, least=0) or self.delay > 1:
            raise UserError(f"delay must be 0 or 1 calls; given {self.delay!r}")
        if not isinstance(self.overlap, bool):
            raise UserError(f"overlap must be True or False; given {self.overlap!r}")
        if not is_number(self.bucket_mb) or not self.bucket_mb > 0.0:
            raise UserError(f"bucket_mb must be above 0 MiB; given {self.bucket_mb!r}")

    def is_due(self, step: int) -> bool:
        """Whether there is an exchange at this call, counted from 1."""
        return step % self.sync_every == 0

    def comes_round(self, step: int, every: int | None) -> bool:
        """Whether what is done once in so many exchanges is done before that of this call, which is never the first."""
        number = step // self.sync_every
        return every is not None and self.is_due(step) and number > 1 and (number - 1) % every == 0


def is_whole(value: Any, *, least: int) -> bool:
    """Whether it is a whole number from `least` on, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Whether it is a real number: of Python, or a scalar of NumPy, as some schedules make them."""
    return isinstance(value, Real)


def check_options(group: Group) -> None:
    """Raise a UserError for the first option of a group that is out of range."""
    for key, least in (("chunk", 1), ("topk", 1)):
        if not is_whole(group[key], least=least):
            raise UserError(f"{key} must be a whole number from {least} on; given {group[key]!r}")
    if group["topk"] > group["chunk"] ** 2:
        raise UserError(
            f"topk must be at most chunk^2 = {group['chunk'] ** 2}, all there is in a block; given {group['topk']}"
        )
    if group["chunk"] > 4096:
        raise UserError(f"chunk must be at most 4096; given {group['chunk']}")
    for key in ("decay", "alpha"):
        if not is_number(group[key]) or not 0.0 <= group[key] <= 1.0:
            raise UserError(f"{key} must be from 0 to 1; given {group[key]!r}")
    for key in ("values", "dense"):
        if not isinstance(group[key], str) or group[key] not in VALUES:
            raise UserError(f"{key} must be one of {', '.join(VALUES)}; given {group[key]!r}")
    if group["role"] not in ROLES:
        raise UserError(f"role must be one of {', '.join(map(repr, ROLES))}; given {group['role']!r}")
    if group["residual"] not in FORMATS:
        raise UserError(f"residual must be one of {', '.join(FORMATS)}; given {group['residual']!r}")
    if group["transform"] not in ("dct", "none"):
        raise UserError(f"transform must be 'dct' or 'none'; given {group['transform']!r}")
    dims = group["matrix_dims"]
    if dims is not None and not (_is_list(dims) and len(dims) == 2 and all(map(_is_list, dims))):
        raise UserError(f"matrix_dims must be (row dims, column dims), such as ((0,), (1,)); given {dims!r}")
    if group["compat"] not in (None, "paper"):
        raise UserError(f"compat must be None or 'paper'; given {group['compat']!r}")


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list)


def check_given(given: Any) -> None:
    """Raise a UserError for what is no list of parameters or groups: a model, or one tensor."""
    if isinstance(given, Tensor):
        raise UserError("parameters are given as a list or as groups; given a single tensor")
    if isinstance(given, Module):
        name = type(given).__name__
        raise UserError(f"parameters are given as a list or as groups, sc.param_groups(model); given the model, {name}")


def check_group(item: Any) -> None:
    """Raise a UserError for what is no group of parameters."""
    if not isinstance(item, dict) or "params" not in item:
        told = f"the keys {', '.join(map(str, item))}" if isinstance(item, dict) else repr(item)
        raise UserError(f"a group is a mapping with 'params', the parameters it holds; given {told}")


def as_groups(given: Iterable[Any], defaults: Group) -> list[Group]:
    """Groups with all options; parameters alone, or (name, parameter) pairs, are one group."""
    check_given(given)
    items = list(_listed(given))
    if not items:
        raise UserError("MomentumExchange needs at least one parameter; given none")
    if not isinstance(items[0], dict):
        items = [{"params": items}]
    groups = []
    for item in items:
        check_group(item)
        params = [item["params"]] if isinstance(item["params"], Tensor) else item["params"]
        pairs = [pair if isinstance(pair, tuple) else (None, pair) for pair in _listed(params)]
        for pair in pairs:
            if len(pair) != 2 or not isinstance(pair[1], Tensor):
                raise UserError(f"parameters are tensors, or pairs of a name and a tensor; given {pair[-1]!r}")
        group = {**defaults, **item, "params": [param for _, param in pairs]}
        if all(name is not None for name, _ in pairs):
            group["param_names"] = [name for name, _ in pairs]
        groups.append(group)
    seen: set[int] = set()
    for group in groups:
        for param in group["params"]:
            if id(param) in seen:
                raise UserError(
                    f"a parameter of shape {tuple(param.shape)} is given twice; each must be in one group once"
                )
            seen.add(id(param))
    return groups


def _listed(params: Any) -> Iterable[Any]:
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise UserError(f"parameters are given as a list or as groups; given {params!r}")
    return params


def check_real(params: Iterable[Tensor]) -> None:
    """Raise a UserError for a complex parameter."""
    for param in params:
        if param.is_complex():
            raise UserError(f"a parameter of shape {tuple(param.shape)} is complex; exchange its real view instead")


def check_groups(groups: Sequence[Group], config: ExchangeConfig) -> None:
    """Raise a UserError for the first option out of range, or that does not go with those of other groups."""
    for group in groups:
        check_options(group)
        check_real(group["params"])
    if not any(group["params"] for group in groups):
        raise UserError("the groups hold no parameter; at least one is needed")
    if len({group["compat"] for group in groups}) > 1:
        raise UserError("compat must be the same in all groups: it says how the mean over replicas is taken")
    if any(group["compat"] == "paper" and "lr" not in group for group in groups):
        raise UserError("compat='paper' scales gradients by 'lr', which a group lacks; use sc.DeMo, or set it")
    if groups[0]["compat"] == "paper" and config.exchange in ("owner", "dense"):
        raise UserError("compat='paper' takes the mean over those that sent a coefficient: exchange='all_gather'")
