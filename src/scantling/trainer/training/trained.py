"""A trained run opened again: its model as of the newest whole checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scantling.distributed.context import SINGLE_PROCESS, DistContext, init_distributed
from scantling.distributed.peers import report_errors_to_peers
from scantling.errors import UserError
from scantling.tensor.report import without_warnings
from scantling.trainer.models.build import recipe_task
from scantling.trainer.recipe import Recipe
from scantling.trainer.tasks import get_task
from scantling.trainer.tasks.base import Task, TaskData
from scantling.trainer.training.build import build_methods, build_run_model, run_evaluation
from scantling.trainer.training.checkpoint import Checkpointer, check_data
from scantling.trainer.training.continuing import check_continues
from scantling.trainer.training.loop import load_methods
from scantling.trainer.training.manifest import read_manifest
from scantling.trainer.training.rundir import RunDir
from scantling.trainer.training.states import load_model


@dataclass(frozen=True)
class Trained:
    """What a run has come to.

    Attributes:
        recipe: of the run.
        task, data: of the recipe.
        model: on the device of `context`.
        step, tokens: how far the model was trained.
        context: where it is evaluated.
    """

    recipe: Recipe
    task: Task
    data: TaskData
    model: Any
    step: int
    tokens: int
    context: DistContext

    def evaluate(self, model: Any = None) -> dict[str, float]:
        """The held-out metrics of the model, or of another one in its context. Collectives: those of `evaluate`."""
        return run_evaluation(self.recipe, self.model if model is None else model, self.task, self.data, self.context)


@contextmanager
def opened(run_dir: str | Path, *, device: str | None = None, causal: str | None = None) -> Iterator[Trained]:
    """A trained run in the process group of torchrun, which is left at the end.

    Args:
        run_dir: the directory of a run.
        device: auto, cpu or cuda. Default: what the run's recipe names.
        causal: what wants a causal language model, in words, where one is needed.

    Raises:
        UserError: as of `load_trained`, and a run of another task than is needed.
    """
    with report_errors_to_peers():
        folder = RunDir(Path(run_dir))
        recipe = folder.stored_recipe()
        if causal is not None and (name := recipe_task(recipe)) != "causal-lm":
            raise UserError(f"{causal}; {run_dir} holds a run of the task '{name}'")
        with init_distributed(device or recipe.train.device, timeout_s=recipe.comm.timeout) as context:
            trained = _load(folder, recipe, context)
            context.wait_for_all()
            yield trained


def load_trained(run_dir: str | Path) -> Trained:
    """A run as of its newest whole checkpoint, on the CPU. Each rank reads by itself.

    Raises:
        UserError: there is no such run or no whole checkpoint, or the data has changed.
    """
    folder = RunDir(Path(run_dir))
    return _load(folder, folder.stored_recipe(), SINGLE_PROCESS)


def _load(folder: RunDir, recipe: Recipe, context: DistContext) -> Trained:
    if context.world_size > 1:  # each looks for itself: machines may have folders of their own
        context = replace(context, writers=tuple(range(context.world_size)))
    checkpoint = Checkpointer(folder.checkpoints, context).newest(weights_only=True)
    if checkpoint is None:
        raise UserError(f"{folder.path} has no whole checkpoint; train it first")
    task = get_task(recipe_task(recipe))
    data = task.prepare(recipe.data, seed=recipe.train.seed, progress=None)
    manifest = read_manifest(checkpoint)
    values = manifest["values"]
    check_continues(checkpoint, manifest, recipe)
    check_data(checkpoint, values, data.info.get("fingerprint"))
    methods = build_methods(recipe)
    with without_warnings():
        model = build_run_model(recipe, task, data, methods)
    for method in methods:
        method.attach(model)
    load_methods(methods, checkpoint, values)
    load_model(model, checkpoint)
    for method in methods:
        method.detach(model)
    return Trained(recipe, task, data, model.to(context.device), values["step"], values["tokens"], context)


def evaluate_run(run_dir: str | Path, *, device: str | None = None) -> dict[str, float | int | str]:
    """Evaluate the newest whole checkpoint of a run on its held-out data.

    Args:
        run_dir: the directory of a run.
        device: auto, cpu or cuda. Default: what its recipe names.

    Returns:
        `step`, the task's metrics (`eval_loss` in nats, `perplexity`, `bits_per_byte`, `accuracy`, `auc`,
        `normalized_entropy`), and for classification and clicks what trivial answers reach: `majority_accuracy` and
        that of a linear model on one sentence, or the loss of knowing the share of clicks.

    Raises:
        UserError: there is no such run, or it holds nothing out.
    """
    with opened(run_dir, device=device) as run:
        baselines = run.task.baselines(run.data, max_samples=run.recipe.train.eval_samples)
        return {"step": run.step, **run.evaluate(), **baselines}
