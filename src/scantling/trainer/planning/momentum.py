"""Momentum of an optimizer that runs after a momentum exchange, as a recipe requests it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scantling.comm.layout import is_block_matrix
from scantling.comm.momentum_watch import describe_momentum, own_momentum
from scantling.optim.registry import FOR_MATRICES, optimizer_options
from scantling.trainer.recipe import Recipe


def optimizer_groups(recipe: Recipe, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the recipe's parameter groups; after a momentum exchange, matrices have no momentum unless it was set.

    Groups with large and small matrices are split: small matrices are exchanged as gradients and keep their momentum.

    Args:
        recipe: of the run.
        groups: from `scantling.param_groups`.

    Returns:
        The groups, with `betas` and `momentum` as additional keys where they turn the optimizer's momentum off.
    """
    off = _turned_off(recipe)
    if not off:
        return list(groups)
    split_groups = []
    for group in groups:
        by_blocks: dict[bool, list[Any]] = {True: [], False: []}
        for entry in group["params"]:
            # entries of named groups are (name, parameter)
            param = entry[1] if isinstance(entry, tuple) else entry
            by_blocks[is_block_matrix(tuple(param.shape), param.numel(), group["role"])].append(entry)
        split_groups += [
            {**group, "params": params, **(off if large else {})} for large, params in by_blocks.items() if params
        ]
    return split_groups


def note_on_momentum(recipe: Recipe) -> str | None:
    """Return a note for the plan of a recipe if its optimizer adds a second momentum, or has lost its own."""
    name, given = recipe.optim.name, recipe.optim.options
    if off := _turned_off(recipe):
        what = ", ".join(f"{key} {value}" for key, value in off.items())
        keys = " or ".join(f"optim.{key}" for key in off)
        return f"matrices have the momentum of the exchange and none of {name} ({what}); to change that give {keys}"
    # `betas` of an optimizer for matrices belong to AdamW, which steps the vectors
    beside = ("betas",) if name.lower() in FOR_MATRICES else ()
    momentum = own_momentum({key: value for key, value in given.items() if key not in beside})
    return describe_momentum(name, *momentum) if momentum is not None and _exchanges_momentum(recipe) else None


def _exchanges_momentum(recipe: Recipe) -> bool:
    return recipe.comm.name == "demo" and recipe.comm.decay > 0.0


def _turned_off(recipe: Recipe) -> dict[str, Any]:
    """Return the options that turn off the momentum that the recipe's optimizer has by default."""
    defaults, given = optimizer_options(recipe.optim.name), recipe.optim.options
    off: dict[str, Any] = {}
    if not _exchanges_momentum(recipe):
        return off
    # beta1 = 0: no momentum; the betas of sign belong to the AdamW of vectors, which are exchanged as gradients
    if "betas" in defaults and "betas" not in given and recipe.optim.name.lower() != "sign":
        off["betas"] = (0.0, *defaults["betas"][1:])
    momentum = defaults.get("momentum")
    if isinstance(momentum, float) and momentum > 0.0 and "momentum" not in given:  # CAME's is a format
        off["momentum"] = 0.0
    return off
