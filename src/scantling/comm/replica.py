"""What one replica holds for an exchange of momentum, and how it is saved, loaded and cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scantling.comm.config import ExchangeConfig, Group
from scantling.comm.layout import all_parameters, group_by_param, parameter_names, residual_format
from scantling.comm.residuals import Residuals
from scantling.comm.transport.group import ReplicaGroup
from scantling.comm.transport.shards import to_local
from scantling.errors import UserError


class Replica:
    """Groups of parameters and a state by parameter: `residual` of this replica alone, `pending` alike on all.

    Attributes:
        param_groups: the groups, with all options.
        state: by parameter.
        replicas: to the other replicas.
        step: calls so far.
        rounds: when what is exchanged, as set.
    """

    param_groups: list[Group]
    state: dict[Tensor, dict[str, Any]]
    replicas: ReplicaGroup
    step: int
    config: ExchangeConfig

    def flush(self) -> None:
        """Wait for what is on its way, and keep it in the state."""

    def drop(self) -> None:
        """Wait for what is on its way, and forget it."""

    def local_state_dict(self) -> dict[str, Any]:
        """What this replica has for itself: its residuals, by the names of their parameters."""
        self.flush()
        names = parameter_names(self.param_groups)
        residuals = {names[place]: value.clone() for place, value in self._residuals()}
        return {"world_size": self.replicas.world_size, "rank": self.replicas.rank, "residuals": residuals}

    def load_local_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `local_state_dict` gave on this replica.

        Args:
            state_dict: of the same rank and world size, or of `merge_local_states`, which fits every replica. Over a
                `TorchFTGroup`, whose ranks change, of any.

        Raises:
            UserError: another kind of state, world size or rank, other parameters or shapes; nothing has been loaded.
        """
        check_kind(state_dict, "local_state_dict", ("world_size", "rank", "residuals"))
        for key, own in (("world_size", self.replicas.world_size), ("rank", self.replicas.rank)):
            if self.replicas.is_static and state_dict[key] not in (None, own):
                raise UserError(
                    f"the residuals are those of {key} {state_dict[key]}, this is {key} {own}. Every replica has its "
                    "own; for another number of replicas give each what scantling.comm.merge_local_states makes of all"
                )
        self._check_tensors("residual", state_dict["residuals"])
        self.drop()
        kept = self.residuals
        groups = group_by_param(self.param_groups)
        for name, param, group in zip(parameter_names(self.param_groups), self._parameters(), groups, strict=True):
            if name in state_dict["residuals"]:
                residual = state_dict["residuals"][name]
                self._keep(param, group, residual.to(device=to_local(param).device, dtype=torch.float32, copy=True))
            else:
                kept.drop(param)

    def _check_tensors(self, what: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise UserError(f"each {what} is given by the name of its parameter; given {values!r}")
        known = dict(zip(parameter_names(self.param_groups), self._parameters(), strict=True))
        for name, value in values.items():
            if not isinstance(value, Tensor):
                raise UserError(f"the {what} of {name} must be a tensor; given {value!r}")
            if name not in known or tuple(value.shape) != tuple(to_local(known[name]).shape):
                shape = tuple(to_local(known[name]).shape) if name in known else None
                raise UserError(
                    f"the {what} of {name} has the shape {tuple(value.shape)}, "
                    + ("there is no such parameter here" if shape is None else f"its parameter here {shape}")
                )

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Cut the residual of a parameter that keeps only some positions of one dim.

        Args:
            param: of this exchange; cut before or after.
            dim: of the parameter.
            index: positions that stay, 1-D int64.
        """
        self.flush()
        if param in self.residuals:
            place = next(place for place, each in enumerate(self._parameters()) if each is param)
            residual = self.residuals.read(param, to_local(param))
            self._keep(param, group_by_param(self.param_groups)[place], residual.index_select(dim, index))
        if "pending" in self.state.get(param, {}):
            self.state[param]["pending"] = self.state[param]["pending"].index_select(dim, index)

    def shared_state_dict(self) -> dict[str, Any]:
        """What all replicas have alike: the number of steps, and with `delay` the result of the next call."""
        self.flush()
        pairs = zip(parameter_names(self.param_groups), self._parameters(), strict=True)
        pending = {name: self.state.get(param, {}).get("pending") for name, param in pairs}
        held = {name: value for name, value in pending.items() if value is not None}
        return {"step": self.step, "pending": held}

    def load_shared_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `shared_state_dict` gave on any replica.

        A result that a delay held back, where there is none any more, is added to that of the next call.

        Raises:
            UserError: another kind of state, other parameters or shapes; nothing has been loaded.
        """
        check_kind(state_dict, "shared_state_dict", ("step",))
        pending = state_dict.get("pending", {})
        self._check_tensors("momentum", pending)
        self.drop()
        self.step = int(state_dict["step"])
        for name, param in zip(parameter_names(self.param_groups), self._parameters(), strict=True):
            self.state.get(param, {}).pop("pending", None)
            if name in pending:
                self.state.setdefault(param, {})["pending"] = pending[name].to(to_local(param).device, copy=True)

    def state_dict(self) -> dict[str, Any]:
        """Both, for a replica that keeps a file of its own."""
        return {"local": self.local_state_dict(), "shared": self.shared_state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this replica."""
        check_kind(state_dict, "state_dict", ("local", "shared"))
        self.load_local_state_dict(state_dict["local"])
        self.load_shared_state_dict(state_dict["shared"])

    @property
    def residuals(self) -> Residuals:
        """Those of this replica."""
        return Residuals(self.state)

    def _keep(self, param: Tensor, group: Group, value: Tensor, seed: int | None = None) -> None:
        self.residuals.write(param, value, residual_format(param, group), seed)

    def _residuals(self) -> Iterator[tuple[int, Tensor]]:
        """The residuals that there are, in fp32, with the positions of their parameters."""
        kept = self.residuals
        for place, param in enumerate(self._parameters()):
            if param in kept:
                yield place, kept.read(param, to_local(param))

    def _parameters(self) -> list[Tensor]:
        return all_parameters(self.param_groups)


def check_kind(state: Any, method: str, keys: Sequence[str]) -> None:
    """Raise a UserError for a state that another method gave."""
    missing = [key for key in keys if not isinstance(state, Mapping) or key not in state]
    if missing:
        given = f"the keys {', '.join(map(str, state))}" if isinstance(state, Mapping) else repr(state)
        raise UserError(f"what is loaded here is what {method} of an exchange gave, with {missing[0]!r}; given {given}")


def merge_local_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The local state that every replica of another number of them begins with: the mean of all residuals.

    The mean over the replicas, which is what the next exchanges apply, stays what it was. A replica without a residual,
    such as one whose gradients were never finite, counts as one with zeros.

    Args:
        states: of `local_state_dict`, one of every replica.

    Returns:
        A state that `load_local_state_dict` takes on any rank of any number of replicas.

    Raises:
        UserError: not one of every replica, or residuals of other shapes.
    """
    for state in states:
        check_kind(state, "local_state_dict", ("world_size", "rank", "residuals"))
    ranks = sorted(state["rank"] for state in states)
    if not states or ranks != list(range(states[0]["world_size"])):
        raise UserError(f"merge_local_states needs one state of every replica; given those of ranks {ranks}")
    residuals = mean_of_tensors([state["residuals"] for state in states])
    return {"world_size": None, "rank": None, "residuals": residuals}


def mean_of_tensors(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean by name; where one lacks a name it counts as zeros.

    Raises:
        UserError: tensors of one name differ in shape.
    """
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for state in states for name in state):
        held = [state[name] for state in states if name in state]
        if len({each.shape for each in held}) > 1:
            raise UserError(f"the states of the replicas differ in the shape of {name}: they are of different models")
        found[name] = torch.stack(held).sum(0) / len(states)
    return found
