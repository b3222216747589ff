"""Load the state of an optimizer without changing the dtype of any tensor.

`torch.optim.Optimizer.load_state_dict` casts every floating-point tensor of a parameter's state, except `step`, to the
dtype of the parameter, in a static method that it calls by its class name, so that a subclass cannot override it; a
hook that casts back afterwards cannot restore the lost bits. This module removes the state before the cast and restores
it after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scantling.errors import UserError

StateDict = dict[str, Any]


def param_name(group: dict[str, Any], index: int) -> str:
    """Return the name of a parameter, or its index and shape if the group has no names."""
    names = group.get("param_names")
    return str(names[index]) if names else f"parameter {index} of shape {tuple(group['params'][index].shape)}"


def check_saved_keys(
    owner: str,
    state_dict: Any,
    groups: Sequence[dict[str, Any]],
    keys: Iterable[str],
    hints: Mapping[str, str] | None = None,
) -> None:
    """Raise a UserError if a state dict does not belong to an optimizer with these groups.

    Args:
        owner: name of the optimizer, for the message.
        state_dict: the state dict to load.
        groups: groups of the optimizer.
        keys: keys that every saved group must have, except `differentiable`, which torch adds to the defaults of an
            optimizer that was loaded or copied.
        hints: advice for a saved group that lacks some of `keys`, by another key that it has.
    """
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        given = ", ".join(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise UserError(f"a state of an optimizer has the keys state and param_groups; given {given or 'no keys'}")
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise UserError(f"this is a state of {len(saved_groups)} groups, the optimizer has {len(groups)}")
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        counts = len(saved.get("params", ())), len(group["params"])
        if counts[0] != counts[1]:
            raise UserError(
                f"this is a state of {counts[0]} parameters in group {index}, where the optimizer has {counts[1]}: "
                "build it over the same parameters in the same groups"
            )
        if missing := [key for key in keys if key not in saved and key != "differentiable"]:
            text = f"this is no state of {owner}: group {index} has no {', '.join(missing)}; given {', '.join(saved)}"
            raise UserError(text + "".join(f". {hint}" for key, hint in (hints or {}).items() if key in saved))


def load_keeping_dtypes(
    optimizer: torch.optim.Optimizer,
    load: Callable[[StateDict], None],
    state_dict: StateDict,
    check: Callable[[dict[str, Any], Tensor, dict[str, Any], str], None],
    copy: Callable[[dict[str, Any], Tensor, str, Tensor], Tensor],
) -> None:
    """Run `load` on the groups only, then copy the saved tensors to the state of their parameters, bit for bit.

    Args:
        optimizer: the optimizer to load into; hooks registered on it see the whole state, before and after.
        load: `super().load_state_dict`.
        state_dict: a result of `optimizer.state_dict()`. Tensors are copied: the two never share memory.
        check: called with (group, parameter, its saved state, its name); raises if they do not fit. The optimizer is
            then unchanged.
        copy: called with (group, parameter, key, saved tensor); returns a copy on the parameter's device, sharded like
            the parameter.
    """
    before = optimizer.state, optimizer.param_groups
    saved: StateDict = {}

    # Hooks run inside `load`: around the cast, and before hooks of other users see the state.
    def remove_state(_: torch.optim.Optimizer, given: StateDict) -> StateDict:
        saved.update(given)
        return {**given, "state": {}}

    def restore_state(_: torch.optim.Optimizer) -> None:
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for key, group, index in _match_params(saved["param_groups"], optimizer.param_groups):
            entries = saved["state"].get(key)
            if entries:
                param = group["params"][index]
                check(group, param, entries, param_name(group, index))
                state[param] = {name: copy(group, param, name, value) for name, value in entries.items()}
        optimizer.state = state

    handles = (
        optimizer.register_load_state_dict_pre_hook(remove_state),
        optimizer.register_load_state_dict_post_hook(restore_state, prepend=True),
    )
    try:
        load(state_dict)
    except Exception:  # nothing is loaded unless everything fits
        optimizer.state, optimizer.param_groups = before
        raise
    finally:
        for handle in handles:
            handle.remove()


def _match_params(
    saved: list[dict[str, Any]], groups: list[dict[str, Any]]
) -> Iterator[tuple[Any, dict[str, Any], int]]:
    """Yield (key in the saved state, group, index in the group) of every parameter, matched by order as in torch."""
    for saved_group, group in zip(saved, groups, strict=True):
        for index, key in enumerate(saved_group["params"]):
            yield key, group, index
