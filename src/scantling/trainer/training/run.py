"""A whole run, from the recipe to the report, in one order; `training.build` builds each part from its section.

recipe → validate → data → plan → model → optimizer and exchange → loop → checkpoints → evaluation → report
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scantling.distributed.context import DistContext, device_type, init_distributed, launch_id
from scantling.distributed.folders import describe_run_folders
from scantling.distributed.peers import report_errors_to_peers
from scantling.errors import UserError
from scantling.files import write_json
from scantling.trainer.data.progress import Progress
from scantling.trainer.models.build import recipe_task
from scantling.trainer.planning.fit import Fit, check_fit, silent_plan
from scantling.trainer.planning.plan import Plan, check_world_size
from scantling.trainer.recipe import Recipe, load_recipe
from scantling.trainer.recipe.loading import RecipeLike
from scantling.trainer.reporting.html import write_report
from scantling.trainer.reporting.metrics import read_metrics
from scantling.trainer.reporting.runs import read_run
from scantling.trainer.tasks import get_task
from scantling.trainer.tasks.base import TaskData
from scantling.trainer.training.build import build_loop
from scantling.trainer.training.checkpoint import Checkpointer
from scantling.trainer.training.claim import check_folder, claim
from scantling.trainer.training.continuing import check_continues, check_same_data, check_same_recipe, stored_values
from scantling.trainer.training.graph import check_graph
from scantling.trainer.training.loop import Outcome, out_of_memory
from scantling.trainer.training.manifest import read_manifest
from scantling.trainer.training.meters import EnergyMeter, MemoryMeter
from scantling.trainer.training.rundir import RunDir
from scantling.trainer.training.sinks import JsonlSink, Sink, Sinks, TensorBoardSink, summary_writer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """What a run left.

    Attributes:
        run_dir: the folder with everything.
        status: "done", or "stopped" when a signal ended it after saving.
        step: the last step taken.
        metrics: the figures of `result.json`.
    """

    run_dir: Path
    status: str
    step: int
    metrics: Mapping[str, Any]


def train(
    recipe: RecipeLike,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    settings: Sequence[str] = (),
    sinks: Sequence[Sink] = (),
    progress: Progress | None = None,
    **overrides: Mapping[str, Any],
) -> RunResult:
    """Train a model as a recipe says.

    Args:
        recipe: path of a YAML file, a mapping, or a `Recipe`; with `resume` also a run directory.
        run_dir: where the run goes. Default: `runs/<name>`, with a number where that is taken.
        resume: go on from the newest whole checkpoint in the run directory. A run that torchrun starts again after a
            process died (`--max-restarts`) does so by itself.
        force: replace a run that is in `run_dir`.
        settings: overrides as text, `train.steps=100`.
        sinks: further receivers of the records.
        progress: shows long preparation of data.
        **overrides: sections with keys to change, such as `train={"steps": 100}`.

    Returns:
        The result; everything else is in its `run_dir`.

    Raises:
        RecipeError: the recipe is wrong; all faults are listed.
        UserError: data, model folder or run directory cannot be used.
        RunError: the run could not go on, such as on a full disk or a NaN; what was saved is intact.

    Example:
        >>> import scantling as sc
        >>> result = sc.train("recipes/demo-lean.yaml", train={"steps": 20})  # doctest: +SKIP
        >>> result.metrics["eval_loss"]  # doctest: +SKIP
    """
    with report_errors_to_peers():
        recipe, run_dir = resolve(recipe, run_dir, resume=resume, settings=settings, overrides=overrides)
        return _train_together(recipe, run_dir, resume=resume, force=force, sinks=sinks, progress=progress)


def _train_together(
    recipe: Recipe,
    run_dir: Path | None,
    *,
    resume: bool,
    force: bool,
    sinks: Sequence[Sink],
    progress: Progress | None,
) -> RunResult:
    with init_distributed(recipe.train.device, timeout_s=recipe.comm.timeout) as context:
        check_same_recipe(recipe, context)
        folder, context, resume = claim(run_dir, recipe, context, resume=resume, force=force)
        try:
            return _train(recipe, folder, context, resume=resume, sinks=sinks, progress=progress)
        except (RuntimeError, MemoryError) as error:
            clear = out_of_memory(error)
            if clear is None:
                raise
            raise clear from None
        finally:
            folder.unlock()


def resolve(
    recipe: RecipeLike,
    run_dir: str | Path | None,
    *,
    resume: bool,
    settings: Sequence[str],
    overrides: Mapping[str, Mapping[str, Any]],
) -> tuple[Recipe, Path | None]:
    """The checked recipe with its overrides, and the run directory where known; `recipe` may be a run directory."""
    run_dir = None if run_dir is None else Path(run_dir)
    if isinstance(recipe, str | Path) and Path(recipe).is_dir():
        folder = Path(recipe)
        if not resume:
            raise UserError(f"{folder} is a folder, not a recipe; to go on with the run in it, add --resume")
        if run_dir is not None and run_dir.resolve() != folder.resolve():
            raise UserError(f"give the run directory once: {folder} and --run-dir {run_dir} differ")
        run_dir, recipe = folder, RunDir(folder).stored_recipe()
    elif resume and run_dir is None:
        raise UserError("to resume, give the run directory: scantling train RUN_DIR --resume")
    return load_recipe(recipe, settings, sections=overrides), run_dir


def check_run(
    recipe: Recipe, run_dir: Path | None, planned: Plan, *, resume: bool, force: bool, world_size: int
) -> Fit:
    """Raise the error with which `train` would refuse a run before its first step; nothing is written.

    Returns:
        The plan against the memory of this machine.

    Raises:
        UserError: device, run directory or data cannot be used, or the memory is certainly too small.
    """
    device = device_type(recipe.train.device)
    if run_dir is not None:
        check_folder(RunDir(run_dir), recipe, resume=resume, force=force)
    _check_extras(recipe, world_size, device)
    get_task(recipe_task(recipe)).check_data(recipe.data)
    fit = check_fit(recipe, planned)
    if fit.is_impossible:
        raise UserError(f"the run {fit}")
    return fit


def _check_extras(recipe: Recipe, world_size: int, device: str) -> None:
    """Raise a UserError if this machine lacks something that a recipe asks for."""
    check_world_size(recipe, world_size)
    check_graph(recipe, world_size, device)
    if recipe.train.tensorboard:
        summary_writer()


def _train(
    recipe: Recipe,
    folder: RunDir,
    context: DistContext,
    *,
    resume: bool,
    sinks: Sequence[Sink],
    progress: Progress | None,
) -> RunResult:
    _check_extras(recipe, context.world_size, context.device.type)
    checkpointer = Checkpointer(folder.checkpoints, context, keep=recipe.train.keep_checkpoints)
    checkpoint = checkpointer.newest() if resume else None
    starts_over = resume and checkpoint is None
    if starts_over:
        _check_never_saved(folder, checkpointer, context)
        resume = False
    changes_schedule = False
    if checkpoint is not None:
        changes_schedule = check_continues(checkpoint, read_manifest(checkpoint), recipe)
    task = get_task(recipe_task(recipe))
    report = Sinks(sinks) if context.is_rank0 else Sink()
    report.phase("planning")
    is_warned = _check_memory(recipe, _plan_without_data(recipe, context), context)
    report.phase("reading the data")
    data = task.prepare(recipe.data, seed=recipe.train.seed, progress=progress if context.is_rank0 else None)
    context.wait_for_all()
    check_same_data(data.info.get("fingerprint"), context)
    planned = silent_plan(recipe, world_size=context.world_size, device=context.device.type, task_data=data)
    _check_memory(recipe, planned, context, task_data=data, is_warned=is_warned)
    _set_determinism(recipe, context)
    report.phase("building the model")
    memory, energy = MemoryMeter(context.device), EnergyMeter(context.device)
    loop = build_loop(recipe, task, data, context, checkpointer, memory=memory, energy=energy)
    loop.fingerprint, loop.recipe = data.info.get("fingerprint"), stored_values(recipe)
    context.wait_for_all()  # detects a process that failed to build its model before the timeout
    loop.first_phase = first_phase(recipe)
    if checkpoint is not None:
        report.phase(f"reading {checkpoint}")
    exact = checkpoint is None or loop.resume(checkpoint)
    receivers: list[Sink] = []

    def begin() -> None:
        if not resume:
            folder.clear()  # not before everything that can be wrong with the new run has been tried
            folder.note_launch(launch_id())
            folder.write_recipe(recipe)
        else:
            if folder.metrics.exists():
                read_metrics(folder.metrics)  # a broken line is better known now than after the last step
            if changes_schedule or not folder.recipe.exists():
                folder.write_recipe(recipe)
        folder.write_environment(world_size=context.world_size, device=str(context.device), data=data.info)
        write_json(folder.plan, planned.to_dict())
        receivers.append(JsonlSink(folder.metrics))
        if context.is_rank0:
            receivers.extend(sinks)
            if recipe.train.tensorboard:
                receivers.append(TensorBoardSink(folder.path / "tensorboard"))

    context.run_on_all(begin, taking_part=context.is_writer)
    loop.sink = Sinks(receivers)
    name = recipe.name or folder.path.name
    loop.sink.start(
        name=name, run_dir=folder.path, plan=planned, first_step=loop.step + 1, last_step=loop.schedule.steps
    )
    if (folders := describe_run_folders(folder.path, context)) is not None:
        loop.sink.message(folders)
    told = loop.stepper.exchange.describe()
    if told is not None:
        loop.sink.message(told)
    if checkpoint is not None:
        loop.sink.message(f"resumed from {checkpoint}" + ("" if exact else _changes_by_world_size(checkpoint, context)))
    if starts_over:
        loop.sink.message(f"{folder.path} has no checkpoint yet: the run starts from step 0")
    try:
        outcome = loop.run()
    finally:
        loop.batches.close()
        loop.stepper.close()
        loop.sink.close()
    return _finish(folder, name, outcome, context)


def _changes_by_world_size(checkpoint: Path, context: DistContext) -> str:
    """Return what a resume on another number of processes does not restore as it was."""
    manifest = read_manifest(checkpoint)
    residuals = " and each exchange starts from the mean of the saved residuals"
    return (
        f", saved by {manifest['world_size']} processes, now {context.world_size}: the random generators start again"
        + (residuals if any(manifest["values"].get("exchange", {}).values()) else "")
    )


def first_phase(recipe: Recipe) -> str:
    """Return what the first step of a run does that later steps do not."""
    if recipe.train.compile:
        return "compiling the model in the first step"
    return "capturing CUDA graphs in the first steps" if recipe.train.graph else "first step"


def _plan_without_data(recipe: Recipe, context: DistContext) -> Plan | None:
    """Return the plan as far as it is known before the data is read; None if only the data describes the model."""
    try:
        return silent_plan(recipe, world_size=context.world_size, device=context.device.type)
    except UserError:
        return None


def _check_memory(
    recipe: Recipe,
    planned: Plan | None,
    context: DistContext,
    *,
    task_data: TaskData | None = None,
    is_warned: bool = False,
) -> bool:
    """Compare a plan with the memory here, and warn if it is short. Collectives: `wait_for_all`, `run_on_all`.

    Returns:
        True if this call or one before has warned.

    Raises:
        UserError: weights, gradients and optimizer state alone exceed the memory of a rank.
    """
    fit = None
    if planned is not None:
        fit = check_fit(recipe, planned, search=context.is_rank0 and not is_warned, task_data=task_data)

    def refuse() -> None:
        if fit is not None and fit.is_impossible:
            raise UserError(f"the run {fit}")

    context.wait_for_all()  # the search takes rank 0 longer than a collective may take
    context.run_on_all(refuse)
    if fit is None or fit.fits is not False or is_warned:
        return is_warned
    if context.is_rank0:
        logger.warning("the run %s", fit)
    return True


def _check_never_saved(folder: RunDir, checkpointer: Checkpointer, context: DistContext) -> None:
    """Raise a UserError if a run without a usable checkpoint cannot start from step 0. Collective: a gather."""

    def check() -> None:
        if (problem := _lost_checkpoint(folder, checkpointer)) is not None:
            raise UserError(problem)

    context.run_on_all(check, taking_part=context.is_writer)


def _lost_checkpoint(folder: RunDir, checkpointer: Checkpointer) -> str | None:
    """Return which checkpoint a run had and has no more, or None if it never saved one."""
    if checkpointer.steps():
        reasons = "".join(f"\n  - {reason}" for reason in checkpointer.refused)
        return f"{folder.path} has no whole checkpoint to resume from; start again with --force{reasons}"
    if not folder.holds_run():
        return None
    folder.check_replaceable()
    last = read_metrics(folder.metrics).last if folder.metrics.exists() else {}
    step = last.get("step", 0)
    every = folder.stored_recipe().train.checkpoint_every
    if folder.result.exists() or (every is not None and step > every):  # the record of a step precedes its checkpoint
        return (
            f"{folder.path} has records up to step {step} and no checkpoint, although one was saved; "
            f"bring {folder.checkpoints} back, or start again with --force"
        )
    return None


def _set_determinism(recipe: Recipe, context: DistContext) -> None:
    if recipe.train.deterministic and context.device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=False)


def _finish(folder: RunDir, name: str, outcome: Outcome, context: DistContext) -> RunResult:
    """Write `result.json` and the report into each run directory; every rank returns the same result."""
    metrics: dict[str, Any] = {}

    def write() -> None:
        records = read_metrics(folder.metrics, last_step=outcome.step)
        metrics.update(name=name, status="stopped" if outcome.stopped else "done", step=outcome.step)
        if records:
            metrics.update(records.summarize())
        write_json(folder.result, metrics)
        if records:
            write_report([read_run(folder.path, records)], folder.report)

    context.run_on_all(write, taking_part=context.is_writer)
    metrics = context.broadcast_object(metrics)
    return RunResult(folder.path, str(metrics["status"]), outcome.step, metrics)
