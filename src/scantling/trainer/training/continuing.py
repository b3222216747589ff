"""Checks that a resumed run ends as if its recipe had always been the given one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from scantling.distributed.context import DistContext
from scantling.errors import UserError
from scantling.trainer.recipe import Recipe, differences
from scantling.trainer.recipe.schema import adapt_steps
from scantling.trainer.training.build import lr_schedule
from scantling.trainer.training.rundir import MAY_DIFFER, SCHEDULED

_SOURCES = ("bin", "criteo", "csv", "hf", "images", "jsonl", "parquet", "text", "tokenizer", "validation")
_PATHS = {"model.hf", *(f"data.{name}" for name in _SOURCES)}
"""Keys that may name other paths after a move; `check_data` compares what is there."""


def stored_values(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as a checkpoint keeps it."""
    return recipe.model_dump(mode="json")


def check_same_recipe(recipe: Recipe, context: DistContext) -> None:
    """Raise a UserError on each rank if a rank was given another recipe than rank 0. Collective: gathers.

    Data may lie under other paths on other machines.
    """
    first = context.broadcast_object(stored_values(recipe))

    def check() -> None:
        lines = differences(Recipe.model_validate(first), Recipe.model_validate(stored_values(recipe)))
        if listed := [line for line in lines if line.split(":")[0] not in _PATHS | {"data.workers"}]:
            raise UserError(
                "the recipe differs from that of rank 0; these keys differ (rank 0 -> here):\n"
                + "\n".join(f"  - {line}" for line in listed)
            )

    context.run_on_all(check)


def check_same_data(fingerprint: str | None, context: DistContext) -> None:
    """Raise a UserError on each rank if a rank prepared other data than rank 0. Collective: gathers."""
    first = context.broadcast_object(fingerprint)

    def check() -> None:
        if fingerprint != first:
            raise UserError("the data differs from that of rank 0; copy the same files to every machine")

    context.run_on_all(check)


def check_continues(path: Path, manifest: dict[str, Any], recipe: Recipe) -> bool:
    """Check that a checkpoint is one of a run of this recipe, up to its step.

    Args:
        path: the checkpoint, for messages.
        manifest: of the checkpoint.
        recipe: that the run goes on with.

    Returns:
        True if the rest of the run is scheduled differently than when the checkpoint was saved.

    Raises:
        UserError: the recipe would have computed something else.
    """
    stored = manifest["values"].get("recipe")
    if stored is None:
        return False
    try:
        old, new = Recipe.model_validate(stored), Recipe.model_validate(stored_values(recipe))
    except ValidationError as error:
        raise UserError(f"the recipe in {path} is not one of this version: {error.errors()[0]['msg']}") from None
    lines = {line.split(":")[0]: line for line in differences(old, new)}
    keys = lines.keys() - MAY_DIFFER - _PATHS
    if keys - SCHEDULED:
        listed = "\n".join(f"  - {lines[key]}" for key in sorted(keys))
        raise UserError(
            f"{path} was saved with another recipe; these keys differ (saved -> now):\n{listed}\n"
            "put the recipe back (recipe.yaml in the run directory), or start a new run"
        )
    if keys:
        _check_schedule(path, old, new, manifest["step"])
    return bool(keys)


def _check_schedule(path: Path, old: Recipe, new: Recipe, step: int) -> None:
    """Raise a UserError if a run of the new recipe would have taken other steps up to this one."""
    if new.train.steps < step:
        raise UserError(f"the run in {path.parent} is at step {step} already; given train.steps: {new.train.steps}")
    same, fixes = new, []
    if _factors(old, step) != _factors(new, step):
        warmup = _warmup_steps(old)
        same = _with(same, "train", warmup=float(warmup))
        fixes.append(f"--set train.warmup={warmup}")
    if old.tensor is not None and new.tensor is not None and old.tensor.size_target is not None:
        adapt = adapt_steps(old.tensor.adapt, old.train.steps)
        if adapt != adapt_steps(new.tensor.adapt, new.train.steps):
            same = _with(same, "tensor", adapt=float(adapt))
            fixes.append(f"--set tensor.adapt={adapt}")
    steps = f"train.steps: {old.train.steps} -> {new.train.steps}"
    if _factors(old, step) != _factors(same, step):
        raise UserError(f"{steps}: {_reason(old, new, step)}. {_WAY}")
    if fixes:
        raise UserError(
            f"{steps}: the recipe has shares of all steps, with which the steps so far would have been others; "
            f"to keep them as they were, add {' '.join(fixes)}"
        )


def _with(recipe: Recipe, section: str, **keys: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=keys)})


_WAY = (
    "To train longer from here, export the weights (scantling export RUN --to hf FOLDER) and start a new run from them "
    "(model: {hf: FOLDER}). Runs with train.schedule: constant, or wsd before its decay, can be made longer at any time"
)


def _reason(old: Recipe, new: Recipe, step: int) -> str:
    for train in (old.train, new.train):
        if train.schedule in ("cosine", "linear"):
            return f"with the schedule '{train.schedule}' the learning rate of each step depends on train.steps"
        if train.schedule == "wsd" and step > (start := train.steps - max(1, round(train.decay * train.steps))):
            whose = "its" if train is old.train else "a"
            return f"the run is at step {step}, and {whose} decay begins after step {start}"
    return "the learning rates of the steps so far would have been others"


def _warmup_steps(recipe: Recipe) -> int:
    train = recipe.train
    return round(train.warmup * train.steps) if train.warmup < 1 else int(train.warmup)


def _factors(recipe: Recipe, step: int) -> list[float]:
    factor = lr_schedule(recipe.train).lr_factor
    return [factor(each) for each in range(1, step + 1)]
