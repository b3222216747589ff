"""Several optimizers behind the interface of one: each steps its groups; callers see one list of groups and one state.

For algorithms that cannot train every parameter, such as Muon, which takes matrices only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.numerics.bf16_products import bf16_products
from scantling.numerics.torch_private import load_state_dict_hooks


class CombinedOptimizer(torch.optim.Optimizer):
    """Optimizers over different parameters behind the interface of one.

    `param_groups` holds the dicts of the members themselves, so that a learning-rate schedule or a `GradScaler` that
    writes into them reaches the members; `state` is one mapping that all members use.

    Args:
        members: optimizers that share no parameter. They keep their `param_groups` and `state`.
        order: for each group of the combined list, the index of the member whose next group it is; by default all
            groups of the first member, then of the second, and so on.

    Raises:
        UserError: no member, a parameter that two members hold, or an order that does not name each group once.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer], *, order: Sequence[int] | None = None) -> None:
        if not members:
            raise UserError("CombinedOptimizer needs at least one optimizer; given none")
        self.members = list(members)
        # Index of the member that owns each group, in the default order.
        by_member = [index for index, member in enumerate(self.members) for _ in member.param_groups]
        self._order = by_member if order is None else list(order)
        if sorted(self._order) != by_member:
            raise UserError(
                f"order must name each member once per group, {by_member} in any order; given {self._order}"
            )
        self._built = False  # until then `add_param_group` is called by `torch.optim.Optimizer`
        try:
            super().__init__(self._groups(), {})
        except ValueError as error:
            raise UserError(f"the optimizers cannot be combined: {error}") from error
        self._share()
        self._built = True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "members": self.members, "_order": self._order, "_built": True}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise a UserError: it is unknown which member should step the group.

        Raises:
            UserError: always, after construction.
        """
        if self._built:
            raise UserError("a CombinedOptimizer cannot add groups; build it again with all parameters")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every member. The closure, if any, is called once, before the first.

        Returns:
            The result of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            # Muon orthogonalizes in bf16 on every device.
            device = member.param_groups[0]["params"][0].device
            with bf16_products(device) if isinstance(member, torch.optim.Muon) else nullcontext():
                member.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`: each member loads its groups by its own rules.

        Raises:
            UserError: another number of groups, or of parameters in a group, than this optimizer has.
        """
        state_dict = dict(state_dict)
        # An override of `load_state_dict` must call the hooks itself.
        pre_hooks, post_hooks = load_state_dict_hooks(self)
        for pre_hook in pre_hooks:
            state_dict = pre_hook(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        given, here = ([len(group["params"]) for group in side] for side in (groups, self.param_groups))
        if given != here:
            raise UserError(
                f"the loaded groups hold {given} parameters, those of this optimizer {here}; build it over the same"
            )
        # Each member loads the groups that `order` gives it, and the state of their parameters.
        for index, member in enumerate(self.members):
            own = [group for group, owner in zip(groups, self._order, strict=True) if owner == index]
            keys = {key for group in own for key in group["params"]}
            state = {key: value for key, value in state_dict["state"].items() if key in keys}
            member.load_state_dict({"state": state, "param_groups": own})
        # Each member has made new groups and a new state.
        self._share()
        for post_hook in post_hooks:
            post_hook(self)

    def _groups(self) -> list[dict[str, Any]]:
        remaining = [iter(member.param_groups) for member in self.members]
        return [next(remaining[index]) for index in self._order]

    def _share(self) -> None:
        """Let the members and this optimizer use one state and one list of groups."""
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for member in self.members:
            state.update(member.state)
        for member in self.members:
            member.state = state
        self.state = state
        self.param_groups = self._groups()
