"""Load the model of a trained run, as of its newest complete checkpoint; evaluate and export it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from scantling.checksums import write_checksums
from scantling.distributed.context import SINGLE_PROCESS, DistContext, init_distributed
from scantling.distributed.mesh import with_mesh
from scantling.distributed.peers import report_errors_to_peers
from scantling.errors import RunError, UserError
from scantling.files import atomic_folder, check_new_folder
from scantling.precision.training import restore
from scantling.tensor.convert import densify
from scantling.tensor.report import without_warnings
from scantling.trainer.models.build import quiet, recipe_task
from scantling.trainer.models.sharding import shard_groups
from scantling.trainer.planning.resolve import ResolvedRun
from scantling.trainer.recipe import Recipe
from scantling.trainer.tasks import get_task
from scantling.trainer.tasks.base import Task, TaskData
from scantling.trainer.training.build import build_meta_model, build_run_model, build_tensor_training, shard_run_model
from scantling.trainer.training.checkpoint import Checkpointer
from scantling.trainer.training.checkpoint_state import load_model, load_tensor
from scantling.trainer.training.evaluate import evaluate_heldout
from scantling.trainer.training.resume import check_data, check_recipe_of_checkpoint
from scantling.trainer.training.run_dir import RunDir


@dataclass(frozen=True)
class TrainedRun:
    """A run with the model of its newest checkpoint.

    Attributes:
        run: recipe, task and data.
        model: on the device of `context`.
        step, tokens: training steps and tokens of the checkpoint.
        context: process that evaluates the model.
    """

    run: ResolvedRun
    model: Any
    step: int
    tokens: int
    context: DistContext

    @property
    def recipe(self) -> Recipe:
        return self.run.recipe

    @property
    def task(self) -> Task:
        return self.run.task

    @property
    def data(self) -> TaskData:
        return self.run.prepared_data

    def evaluate(self, model: Any = None) -> dict[str, float]:
        """Return the held-out metrics of the model, or of another given one. Collectives: those of `evaluate`."""
        return evaluate_heldout(self.run, self.model if model is None else model, self.context)


@contextmanager
def open_run(
    run_dir: str | Path, *, device: str | None = None, causal: str | None = None, shards: bool = False
) -> Iterator[TrainedRun]:
    """Load a trained run within the process group of torchrun, which is left at the end.

    Args:
        run_dir: the directory of a run.
        device: auto, cpu or cuda. Default: `train.device` of the run's recipe.
        causal: the feature that needs a causal language model, as text for the error; None if any task will do.
        shards: True to shard the model of a sharded run over all processes; all must then call it equally often.

    Raises:
        UserError: as of `load_run`, or a run of another task.
    """
    with report_errors_to_peers():
        folder = RunDir(Path(run_dir))
        recipe = folder.read_recipe()
        if causal is not None and (name := recipe_task(recipe)) != "causal-lm":
            raise UserError(f"{causal}; {run_dir} holds a run of the task '{name}'")
        with init_distributed(device or recipe.train.device, timeout_s=recipe.comm.timeout) as context:
            trained = _load(folder, recipe, context, shards=shards)
            # loading may take longer than a collective may wait
            context.wait_for_all()
            yield trained


def load_run(run_dir: str | Path) -> TrainedRun:
    """Load a trained run on the CPU. Each rank reads by itself.

    Raises:
        UserError: there is no such run or no complete checkpoint, or the data has changed.
    """
    folder = RunDir(Path(run_dir))
    return _load(folder, folder.read_recipe(), SINGLE_PROCESS)


def _load(folder: RunDir, recipe: Recipe, context: DistContext, *, shards: bool = False) -> TrainedRun:
    if shards and recipe.parallel.shard != 1:  # several processes share the weights
        context = with_mesh(context, 1, context.world_size, timeout_s=recipe.comm.timeout)
    if context.world_size > 1:  # each rank verifies its own files, because machines may have separate folders
        context = replace(context, writers=tuple(range(context.world_size)))
    checkpoint = Checkpointer(folder.checkpoints, context).newest(weights_only=True)
    if checkpoint is None:
        raise UserError(f"{folder.path} has no complete checkpoint; train the run first")
    task = get_task(recipe_task(recipe))
    data = task.prepare(recipe.data, seed=recipe.train.seed, progress=None)
    run = ResolvedRun(recipe, task, context.world_size, context.device.type, data)
    check_recipe_of_checkpoint(checkpoint, recipe)
    check_data(checkpoint, data.info.get("fingerprint"))
    with without_warnings():
        meta = build_meta_model(run, context)
        model = build_run_model(run) if meta is None else meta.model
    # TT ranks first: they set the shapes of the weights. Pruned ranks are removed after the weights are loaded
    tensor = build_tensor_training(recipe)
    tensor.attach(model)  # the saved ranks are in the state of the rank gates
    load_tensor(tensor, checkpoint)
    if meta is not None and context.mesh is not None:
        shard_run_model(meta, shard_groups(model, recipe.parallel), recipe, context)
    context.run_on_all(lambda: load_model(model, checkpoint))
    tensor.detach()
    if context.mesh is None:
        model = model.to(context.device)
    values = checkpoint.values
    return TrainedRun(run, model, values["step"], values["tokens"], context)


def evaluate_run(run_dir: str | Path, *, device: str | None = None) -> dict[str, float | int | str]:
    """Evaluate the newest complete checkpoint of a run on its held-out data.

    Args:
        run_dir: the directory of a run.
        device: auto, cpu or cuda. Default: `train.device` of the run's recipe.

    Returns:
        `step`, the task's metrics (`eval_loss` in nats, `perplexity`, `bits_per_byte`, `accuracy`, `auc`,
        `normalized_entropy`), and baselines for classification and clicks: `majority_accuracy` and the accuracy of a
        linear model on one sentence, or the loss of predicting the share of clicks.

    Raises:
        UserError: there is no such run, or nothing is held out.
    """
    with open_run(run_dir, device=device, shards=True) as run:
        baselines = run.task.baselines(run.data, max_samples=run.recipe.train.eval_samples)
        return {"step": run.step, **run.evaluate(), **baselines}


def export_hf(run_dir: str | Path, folder: str | Path, *, dense: bool = False) -> float:
    """Write the newest complete checkpoint of a run as a Hugging Face folder with its tokenizer or other preprocessor.

    The folder is written aside, loaded again with the task's Auto class, compared on random inputs, and then renamed.

    Args:
        run_dir: the directory of a run.
        folder: the folder to write; it must not exist or be empty.
        dense: write TT layers as dense layers with the same outputs; a model with TT layers is loaded by
            `scantling.load`.

    Returns:
        The largest absolute difference between the logits of the model and of the reloaded one.

    Raises:
        UserError: there is no such run, or `folder` is not empty.
        RunError: the reloaded model differs, or the folder could not be written.
    """
    folder = Path(folder)
    check_new_folder(folder)
    run = load_run(run_dir)
    task, model = run.task, run.model
    # plain layers with the rounded weights that the model was trained with
    restore(model, weights="rounded")
    if dense:
        densify(model)
    if run.recipe.precision.parameters == "bf16":
        # `from_pretrained` reads one dtype; TT cores were trained in fp32.
        _set_saved_dtype(model, torch.float32 if run.recipe.tensor is not None else torch.bfloat16)
    with atomic_folder(folder) as aside:
        with quiet():
            model.save_pretrained(aside)
        task.save_inputs(aside, run.data, model.config)
        with quiet():
            difference = _reload_difference(task, model, aside)
        write_checksums(aside)
    return difference


def _set_saved_dtype(model: Any, dtype: torch.dtype) -> None:
    """Convert parameters and saved buffers, as `from_pretrained` does; it keeps others, such as rotary frequencies."""
    for value in model.state_dict(keep_vars=True).values():
        if value.is_floating_point():
            value.data = value.data.to(dtype)


@torch.no_grad()
def _reload_difference(task: Task, model: Any, folder: Path) -> float:
    reloaded = task.find_auto_class(model.config).from_pretrained(folder, local_files_only=True)
    inputs = task.probe(model.config, torch.Generator().manual_seed(0))
    before = model.eval()(**inputs).logits
    after = reloaded.eval()(**inputs).logits
    difference = float((before - after).abs().max())
    # `not <=` also refuses NaN
    if not difference <= 1e-4 * max(1.0, float(before.abs().max())):
        raise RunError(
            f"the exported folder gives other logits than the run (largest difference {difference:.1e}; allowed is "
            "1e-4 of the largest logit); nothing was written"
        )
    return difference
