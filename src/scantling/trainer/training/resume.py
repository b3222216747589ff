"""Find the checkpoint that a run resumes from, and check that the run continues as if it had never stopped."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from scantling.distributed.context import DistContext
from scantling.errors import UserError
from scantling.trainer.recipe import Recipe, differences
from scantling.trainer.recipe.schema import TrainSection, adapt_steps
from scantling.trainer.reporting.metrics import read_metrics
from scantling.trainer.training.checkpoint import Checkpoint, Checkpointer
from scantling.trainer.training.run_dir import RunDir
from scantling.trainer.training.schedule import Schedule, warmup_steps, wsd_decay_start

FREE_KEYS = {
    "name",
    "data.workers",
    "parallel.async_checkpoint",
    "parallel.batch_shares",
    "parallel.offload",
    "parallel.replicate",
    "parallel.reshard",
    "parallel.shard",
    "train.checkpoint_every",
    "train.eval_every",
    "train.eval_samples",
    "train.keep_checkpoints",
    "train.tensorboard",
}
"""Keys that a resumed run may change, because they do not change the results, up to rounding."""
SCHEDULE_KEYS = {
    "tensor.adapt",
    "train.decay",
    "train.min_lr_ratio",
    "train.schedule",
    "train.steps",
    "train.warmup",
}
"""Keys that a resumed run may change if the steps so far would have been the same."""
_SOURCES = ("bin", "criteo", "csv", "hf", "images", "jsonl", "parquet", "text", "tokenizer", "validation")
PATH_KEYS = {"model.hf", *(f"data.{name}" for name in _SOURCES)}
"""Keys that may name other paths after a move; `check_data` compares the content."""


@dataclass(frozen=True)
class StartingPoint:
    """Start of a run: step 0 or a checkpoint.

    Attributes:
        checkpoint: the checkpoint to resume from; None to start from step 0.
        changes_schedule: True if the rest of the run is scheduled differently than when the checkpoint was saved.
        never_saved: True if the run was to be resumed, but had never saved a checkpoint.
    """

    checkpoint: Checkpoint | None = None
    changes_schedule: bool = False
    never_saved: bool = False


def find_start(
    folder: RunDir, checkpointer: Checkpointer, recipe: Recipe, context: DistContext, *, resume: bool
) -> StartingPoint:
    """Find where a run starts. Collectives: those of `Checkpointer.newest`, and a gather.

    Raises:
        UserError: the run saved checkpoints, but none is complete, or the newest is one of another recipe.
    """
    if not resume:
        return StartingPoint()
    checkpoint = checkpointer.newest()
    if checkpoint is not None:
        return StartingPoint(checkpoint, changes_schedule=check_recipe_of_checkpoint(checkpoint, recipe))
    check_never_saved(folder, checkpointer, context)
    return StartingPoint(never_saved=True)


def check_never_saved(folder: RunDir, checkpointer: Checkpointer, context: DistContext) -> None:
    """Raise a UserError if a run without a complete checkpoint cannot start from step 0. Collective: a gather."""

    def check() -> None:
        if (problem := _find_lost_checkpoint(folder, checkpointer)) is not None:
            raise UserError(problem)

    context.run_on_all(check, taking_part=context.is_writer)


def _find_lost_checkpoint(folder: RunDir, checkpointer: Checkpointer) -> str | None:
    """Return why a run without a complete checkpoint cannot start from step 0; None if it never saved one."""
    # checkpoints exist, but all are damaged
    if checkpointer.steps():
        reasons = "".join(f"\n  - {reason}" for reason in checkpointer.refused)
        return f"{folder.path} has no complete checkpoint to resume from; start again with --force{reasons}"
    if not folder.holds_run():
        return None
    # no checkpoint exists: the records tell whether one was saved
    folder.check_replaceable()
    last = read_metrics(folder.metrics).last if folder.metrics.exists() else {}
    step = last.get("step", 0)
    recipe = folder.read_recipe()
    every = recipe.train.checkpoint_every
    # the record of a step precedes its checkpoint, and in the background the next save waits for the first one
    if every is not None and recipe.parallel.async_checkpoint:
        every *= 2
    if folder.result.exists() or (every is not None and step > every):
        return (
            f"{folder.path} has records up to step {step} and no checkpoint, although one was saved; "
            f"bring {folder.checkpoints} back, or start again with --force"
        )
    return None


def check_same_recipe(recipe: Recipe, context: DistContext) -> None:
    """Raise a UserError on each rank if a rank was given another recipe than rank 0. Collectives: gathers.

    Data may lie under other paths on other machines.
    """
    first = context.broadcast_object(recipe.model_dump(mode="json"))
    context.run_on_all(lambda: compare_recipes(first, recipe, "rank 0"))


def compare_recipes(
    other: dict[str, Any], recipe: Recipe, where: str, *, free: Set[str] = frozenset({"data.workers"})
) -> None:
    """Raise a UserError if a recipe differs from that of another process, given as JSON values.

    Machines may differ in paths, because `compare_data` compares the content, and in the keys `free`.
    """
    lines = _differing_keys(Recipe.model_validate(other), recipe)
    if listed := _list_lines(lines, lines.keys() - PATH_KEYS - free):
        raise UserError(
            f"the recipe differs from that of {where}; these keys differ ({where} -> here):\n{listed}\n"
            "start all processes with the same recipe"
        )


def check_same_data(fingerprint: str | None, context: DistContext) -> None:
    """Raise a UserError on each rank if a rank prepared other data than rank 0. Collectives: gathers."""
    first = context.broadcast_object(fingerprint)
    context.run_on_all(lambda: compare_data(first, fingerprint, "rank 0"))


def compare_data(other: str | None, fingerprint: str | None, where: str) -> None:
    """Raise a UserError if the fingerprint of the data differs from that of another process."""
    if fingerprint != other:
        raise UserError(f"the data differs from that of {where}; copy the same files to every machine")


def check_data(checkpoint: Checkpoint, fingerprint: str | None) -> None:
    """Raise a UserError if a checkpoint was trained on other data than that with this fingerprint."""
    trained_on = checkpoint.values.get("fingerprint")
    if trained_on is not None and trained_on != fingerprint:
        raise UserError(
            f"the data is not what {checkpoint.path} was trained on: a file, a tokenizer or the split has changed; "
            "put it back, or start a new run"
        )


def check_stored_recipe(folder: RunDir, recipe: Recipe) -> None:
    """Raise a UserError with the keys that differ if a run directory's recipe would give other results.

    Schedules are compared by `check_recipe_of_checkpoint`, which knows the step.
    """
    stored = folder.read_recipe()
    lines = {line.split(":")[0]: line for line in differences(stored, recipe.with_measured_budget(stored))}
    if lines.keys() - FREE_KEYS - SCHEDULE_KEYS:
        raise UserError(
            f"cannot resume {folder.path} with another recipe; these keys differ (stored -> given):\n"
            f"{_list_lines(lines, lines.keys() - FREE_KEYS)}\n"
            "start a new run in another --run-dir, or give the same recipe"
        )


def check_recipe_of_checkpoint(checkpoint: Checkpoint, recipe: Recipe) -> bool:
    """Check that a run with this recipe would have reached the same checkpoint.

    Returns:
        True if the rest of the run is scheduled differently than when the checkpoint was saved.

    Raises:
        UserError: the recipe would have given other results.
    """
    path, stored = checkpoint.path, checkpoint.values.get("recipe")
    # a loop built without a recipe saves none, so there is nothing to compare
    if stored is None:
        return False
    try:
        old = Recipe.model_validate(stored)
    except ValidationError as error:
        raise UserError(
            f"the recipe in {path} does not fit this version: {error.errors()[0]['msg']}; start a new run"
        ) from None
    lines = _differing_keys(old, recipe)
    keys = lines.keys() - FREE_KEYS - PATH_KEYS
    if keys - SCHEDULE_KEYS:
        raise UserError(
            f"{path} was saved with another recipe; these keys differ (saved -> now):\n{_list_lines(lines, keys)}\n"
            "put the recipe back (recipe.yaml in the run directory), or start a new run"
        )
    if keys:
        _check_schedule(checkpoint, old, recipe)
    return bool(keys)


def _differing_keys(old: Recipe, new: Recipe) -> dict[str, str]:
    """Return the lines that describe how two recipes differ, by key; both as they are after a round trip to JSON."""
    new = Recipe.model_validate(new.model_dump(mode="json"))
    return {line.split(":")[0]: line for line in differences(old, new)}


def _list_lines(lines: dict[str, str], keys: set[str]) -> str:
    return "\n".join(f"  - {lines[key]}" for key in lines if key in keys)


def _check_schedule(checkpoint: Checkpoint, old: Recipe, new: Recipe) -> None:
    """Raise a UserError if a run of the new recipe would have taken other steps up to the checkpoint."""
    step = checkpoint.manifest["step"]
    if new.train.steps < step:
        raise UserError(
            f"the run in {checkpoint.path.parent} is at step {step} already; given train.steps: {new.train.steps}; "
            "give more steps"
        )
    # a share of all steps is longer in a longer run: find settings that keep the steps so far
    same, fixes = new, []
    if _lr_factors(old, step) != _lr_factors(new, step):
        warmup = warmup_steps(old.train.warmup, old.train.steps)
        same = _with(same, "train", warmup=float(warmup))
        fixes.append(f"--set train.warmup={warmup}")
    if old.tensor is not None and new.tensor is not None and old.tensor.size_target is not None:
        adapt = adapt_steps(old.tensor.adapt, old.train.steps)
        if adapt != adapt_steps(new.tensor.adapt, new.train.steps):
            same = _with(same, "tensor", adapt=float(adapt))
            fixes.append(f"--set tensor.adapt={adapt}")
    steps = f"train.steps: {old.train.steps} -> {new.train.steps}"
    if _lr_factors(old, step) != _lr_factors(same, step):
        raise UserError(f"{steps}: {_explain_schedule(old.train, new.train, step)}. {_HINT}")
    if fixes:
        raise UserError(
            f"{steps}: the recipe has shares of all steps, with which the steps so far would have been others; "
            f"to keep them as they were, add {' '.join(fixes)}"
        )


def _with(recipe: Recipe, section: str, **keys: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=keys)})


_HINT = (
    "To train longer from here, export the weights (scantling export RUN --to hf FOLDER) and start a new run from them "
    "(model: {hf: FOLDER}). Runs with train.schedule: constant, or wsd before its decay, can be made longer at any time"
)


def _explain_schedule(old: TrainSection, new: TrainSection, step: int) -> str:
    for train in (old, new):
        if train.schedule in ("cosine", "linear"):
            return f"with the schedule '{train.schedule}' the learning rate of each step depends on train.steps"
        if train.schedule == "wsd" and step > (start := wsd_decay_start(train.decay, train.steps)):
            whose = "its" if train is old else "a"
            return f"the run is at step {step}, and {whose} decay begins after step {start}"
    return "the learning rates of the steps so far would have been others"


def _lr_factors(recipe: Recipe, step: int) -> list[float]:
    factor = Schedule.from_recipe(recipe.train).lr_factor
    return [factor(each) for each in range(1, step + 1)]


def describe_changes(checkpoint: Checkpoint, context: DistContext) -> str:
    """Return the states that a resume on other processes does not restore, as text."""
    changes, before = "", checkpoint.manifest["world_size"]
    if before != context.world_size:
        changes = f", saved by {before} processes, now {context.world_size}: the random generators start again"
    exchange = checkpoint.values.get("exchange", {})
    if any(exchange.values()) and len(exchange) != context.num_replicas:
        changes += f", and the exchange starts from the mean of the residuals of {len(exchange)} replicas"
        if "inner" in checkpoint.values:
            changes += ", between two exchanges also of their weights; replica i has the optimizer state of i modulo "
            changes += f"{len(exchange)}"
    return changes
