"""Optimizers with a momentum of their own behind an exchange of momentum.

The exchange puts decoded momentum into the `.grad` of matrices. An optimizer with its own momentum then averages a
momentum once more: AdamW ended 0.17 nats above averaged gradients that way on digits and 0.43 on novels, and with a
first beta of 0 at them, and 0.22 above (docs/network-measured.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from scantling.comm.channels import goes_by_blocks
from scantling.optim.registry import FOR_MATRICES, optimizer_options

if TYPE_CHECKING:
    from scantling.recipe import Recipe

logger = logging.getLogger(__name__)


def optimizer_groups(recipe: Recipe, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups for the optimizer of a recipe: behind an exchange of momentum, matrices have none unless it was given.

    Groups with large and small matrices are split: small ones are exchanged as gradients and keep their momentum.

    Args:
        recipe: of the run.
        groups: of `scantling.param_groups`.

    Returns:
        The groups, with `betas` and `momentum` as further keys where the optimizer would have a momentum.
    """
    off = _turned_off(recipe)
    if not off:
        return list(groups)
    found = []
    for group in groups:
        by_blocks: dict[bool, list[Any]] = {True: [], False: []}
        for entry in group["params"]:
            param = entry[1] if isinstance(entry, tuple) else entry
            by_blocks[goes_by_blocks(tuple(param.shape), param.numel(), group["role"])].append(entry)
        found += [
            {**group, "params": params, **(off if large else {})} for large, params in by_blocks.items() if params
        ]
    return found


def note_on_momentum(recipe: Recipe) -> str | None:
    """Return a note for the plan of a recipe if its optimizer has a second momentum, or has lost one."""
    name, given = recipe.optim.name, recipe.optim.options
    if off := _turned_off(recipe):
        what = ", ".join(f"{key} {value}" for key, value in off.items())
        keys = " or ".join(f"optim.{key}" for key in off)
        return f"matrices have the momentum of the exchange and none of {name} ({what}); to change that give {keys}"
    beside = ("betas",) if name.lower() in FOR_MATRICES else ()  # betas are those of vectors there
    found = own_momentum({key: value for key, value in given.items() if key not in beside})
    return described(name, *found) if found is not None and _exchanges_momentum(recipe) else None


def _exchanges_momentum(recipe: Recipe) -> bool:
    return recipe.comm.name == "demo" and recipe.comm.decay > 0.0


def _turned_off(recipe: Recipe) -> dict[str, Any]:
    """Options that turn off the momentum that the optimizer of a recipe has by default."""
    defaults, given = optimizer_options(recipe.optim.name), recipe.optim.options
    off: dict[str, Any] = {}
    if not _exchanges_momentum(recipe):
        return off
    if "betas" in defaults and "betas" not in given and recipe.optim.name.lower() != "sign":
        off["betas"] = (0.0, *defaults["betas"][1:])
    momentum = defaults.get("momentum")
    if isinstance(momentum, float) and momentum > 0.0 and "momentum" not in given:  # CAME's is a format
        off["momentum"] = 0.0
    return off


def own_momentum(group: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the option of an optimizer's group that gives it a momentum, and its value; None without one."""
    betas = group.get("betas")
    beta1 = betas[0] if isinstance(betas, Sequence) and betas else group.get("beta1")
    for name, value in (("betas[0]", beta1), ("momentum", group.get("momentum"))):
        if isinstance(value, int | float | Tensor) and float(value) > 0.0:
            return name, float(value)
    return None


class MomentumWatch:
    """Watch that warns once of an optimizer that steps decoded momentum with a momentum of its own.

    Args:
        params: whose `.grad` is a momentum.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._unseen = {id(param) for param in params}
        self._has_warned = False
        self._handle: RemovableHandle | None = register_optimizer_step_pre_hook(self._look) if self._unseen else None

    def stop(self) -> None:
        """Look no further; not within a step, whose hooks are being gone through."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def is_done(self) -> bool:
        """True if all parameters were stepped."""
        return not self._unseen

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups if self._unseen else ():
            stepped = self._unseen & {id(param) for param in group["params"]}
            self._unseen -= stepped
            found = own_momentum(group) if stepped else None
            if found is not None and not self._has_warned:
                self._has_warned = True
                logger.warning("%s", described(type(optimizer).__name__, *found))


def described(optimizer: str, option: str, value: float) -> str:
    """Say what a second momentum costs, and how to turn it off."""
    return (
        f"{optimizer} has a momentum of its own ({option} = {value:g}) and steps matrices whose gradient is the "
        "momentum of the exchange. Two momenta cost 0.17 to 0.43 nats where they were measured "
        f"(docs/network-measured.md). Set {option} to 0 for matrices"
    )
