"""A recipe with everything that follows from it: made once per command, and passed to the plan and the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from scantling.errors import UserError
from scantling.trainer.data.tokenizers import ByteTokenizer, load_tokenizer
from scantling.trainer.models.build import recipe_task
from scantling.trainer.planning.cache import PlanCache
from scantling.trainer.recipe import Recipe
from scantling.trainer.recipe.schema import BpeTokenizer
from scantling.trainer.tasks import get_task
from scantling.trainer.tasks.base import Task, TaskData


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that depend on the data.

    Attributes:
        vocab_size: number of token ids.
        config_overrides: keys of the model's config that the task sets, such as the number of classes.
        notes: assumptions, if the data was not read.
    """

    vocab_size: int
    config_overrides: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResolvedRun:
    """A checked recipe, its task, the number of processes and their device, and the data once it is prepared.

    Attributes:
        recipe: checked.
        task: of the recipe.
        world_size: number of processes.
        device: "cpu" or "cuda".
        data: prepared data; None before it is read.
        cache: results that the plans of this run and of similar ones share.
    """

    recipe: Recipe
    task: Task
    world_size: int
    device: str
    data: TaskData | None = None
    cache: PlanCache = field(default_factory=PlanCache, compare=False, repr=False)

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes of the model: from the data, or else from the recipe and its tokenizer setting.

        Raises:
            UserError: only the data determines them.
        """
        if self.data is not None:
            return ModelSizes(self.data.vocab_size, self.task.config_overrides(self.data))
        notes: list[str] = []
        vocab_size = _vocab_size(self.recipe, self.task)
        overrides = self.task.planned_overrides(self.recipe.data, notes)
        if self.recipe.data.bin is not None and self.recipe.data.tokenizer == "bytes":
            notes.append(
                f"planned with {vocab_size} ids, since no data is read: the run takes one more than the largest in its "
                "files. Name what made them in data.tokenizer"
            )
        return ModelSizes(vocab_size, overrides, tuple(notes))

    @property
    def prepared_data(self) -> TaskData:
        """The data, which must have been read."""
        assert self.data is not None, "the data of this run was not prepared"
        return self.data

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all processes."""
        return self.recipe.batch_size * self.task.examples_to_tokens(self.recipe.data)


def resolve_run(
    recipe: Recipe,
    *,
    world_size: int,
    device: str,
    task_data: TaskData | None = None,
    cache: PlanCache | None = None,
) -> ResolvedRun:
    """Resolve a checked recipe for a number of processes.

    Args:
        recipe: checked.
        world_size: number of processes.
        device: "cpu" or "cuda".
        task_data: prepared data, if it was read.
        cache: of a similar run. Default: an empty one.

    Raises:
        UserError: the recipe cannot run on this number of processes.
    """
    check_world_size(recipe, world_size)
    task = get_task(recipe_task(recipe))
    return ResolvedRun(recipe, task, world_size, device, task_data, cache or PlanCache())


def check_world_size(recipe: Recipe, world_size: int) -> None:
    """Raise a UserError if a recipe cannot run on this number of processes."""
    shares = recipe.parallel.batch_shares
    replicate, shard = recipe.parallel.mesh_shape(world_size)
    if shares is not None and len(shares) != replicate:
        raise UserError(
            f"parallel.batch_shares: {shares} must have one number for each replica; the run has {replicate}"
        )
    weights = recipe.batch_weights(world_size)
    if any(recipe.batch_size * weight % sum(weights) for weight in weights):
        how = "evenly" if shares is None else f"as parallel.batch_shares: {shares} says"
        raise UserError(
            f"the batch of {recipe.batch_size} sequences cannot be shared {how} by {world_size} processes; "
            "change train.batch_size, train.batch_tokens or the number of processes"
        )
    if recipe.optim.release_gradients and world_size > 1 and shard == 1:
        raise UserError(
            "optim.release_gradients steps each parameter before the processes could average its gradient; given "
            f"{world_size} processes. Run one, set parallel.shard, which averages it at once, or leave the key out"
        )


def _vocab_size(recipe: Recipe, task: Task) -> int:
    """Return the vocabulary size that the model needs; reads a tokenizer only if it is in a folder."""
    setting = recipe.data.tokenizer
    if isinstance(setting, BpeTokenizer):
        # the tokenizer may not be trained yet, but its setting states the size
        return setting.bpe + task.extra_ids(recipe.data, None)
    tokenizer = ByteTokenizer() if setting == "bytes" else load_tokenizer(setting)
    return tokenizer.vocab_size + task.extra_ids(recipe.data, tokenizer)
