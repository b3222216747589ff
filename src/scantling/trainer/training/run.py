"""A whole run in one order, from the recipe to the report; `training.build` builds each part from its section.

recipe → validate → lock → plan → data → model → optimizer and exchange → loop → checkpoints → evaluation → report
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from scantling.distributed.context import DistContext, device_type, init_distributed, launch_id
from scantling.distributed.folders import describe_run_folders
from scantling.distributed.mesh import with_mesh
from scantling.distributed.peers import report_errors_to_peers
from scantling.errors import UserError
from scantling.files import write_json
from scantling.trainer.data.progress import Progress
from scantling.trainer.planning.fit import Fit, check_fit, silent_plan
from scantling.trainer.planning.plan import Plan
from scantling.trainer.planning.resolve import ResolvedRun, resolve_run
from scantling.trainer.recipe import Recipe, load_recipe
from scantling.trainer.recipe.loading import RecipeLike
from scantling.trainer.reporting.html import write_report
from scantling.trainer.reporting.metrics import read_metrics
from scantling.trainer.reporting.runs import read_run
from scantling.trainer.rss import rss_bytes
from scantling.trainer.training.build import build_loop
from scantling.trainer.training.checkpoint import Checkpointer
from scantling.trainer.training.checkpoint_background import BackgroundCheckpointer
from scantling.trainer.training.cuda_graphs import check_graph
from scantling.trainer.training.elastic import check_elastic
from scantling.trainer.training.link import measure_budget
from scantling.trainer.training.loop import Loop, Outcome, explain_out_of_memory
from scantling.trainer.training.meters import EnergyMeter, MemoryMeter
from scantling.trainer.training.resume import (
    StartingPoint,
    check_data,
    check_same_data,
    check_same_recipe,
    describe_changes,
    find_start,
)
from scantling.trainer.training.run_dir import RunDir
from scantling.trainer.training.run_lock import check_folder, lock_run_dir
from scantling.trainer.training.sinks import JsonlSink, Sink, Sinks, TensorBoardSink, summary_writer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        run_dir: the folder with all files of the run.
        status: "done", or "stopped" if a signal ended it after a checkpoint.
        step: the last step taken.
        metrics: content of `result.json`.
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
    """Train a model from a recipe.

    Args:
        recipe: path of a YAML file, a mapping, or a `Recipe`; with `resume` also a run directory.
        run_dir: directory of the run. Default: `runs/<name>`, with a number if that is taken.
        resume: continue from the newest complete checkpoint in the run directory. A run that torchrun restarts after a
            process died (`--max-restarts`) resumes by itself.
        force: replace an existing run in `run_dir`.
        settings: overrides as text, `train.steps=100`.
        sinks: further receivers of the records.
        progress: shows long preparation of data.
        **overrides: sections with keys to change, such as `train={"steps": 100}`.

    Returns:
        The result; everything else is in its `run_dir`.

    Raises:
        RecipeError: the recipe is invalid; all faults are listed.
        UserError: data, model folder or run directory cannot be used.
        RunError: the run failed, for example on a full disk or a NaN; saved checkpoints are intact.

    Example:
        >>> import scantling as sc
        >>> result = sc.train("recipes/demo-lean.yaml", train={"steps": 20})  # doctest: +SKIP
        >>> result.metrics["eval_loss"]  # doctest: +SKIP
    """
    with report_errors_to_peers():
        checked, folder = load_run_recipe(recipe, run_dir, resume=resume, settings=settings, overrides=overrides)
        with init_distributed(checked.train.device, timeout_s=checked.comm.timeout) as context:
            # first, because ranks with different recipes would call different collectives
            check_same_recipe(checked, context)
            mesh_shape = checked.parallel.mesh_shape(context.world_size)
            context = with_mesh(context, *mesh_shape, timeout_s=checked.comm.timeout)
            locked, context, resume = lock_run_dir(folder, checked, context, resume=resume, force=force)
            try:
                return _train(checked, locked, context, resume=resume, sinks=sinks, progress=progress)
            except (RuntimeError, MemoryError) as error:
                clear = explain_out_of_memory(error)
                if clear is None:
                    raise
                raise clear from None
            finally:
                locked.unlock()


def load_run_recipe(
    recipe: RecipeLike,
    run_dir: str | Path | None,
    *,
    resume: bool,
    settings: Sequence[str],
    overrides: Mapping[str, Mapping[str, Any]],
) -> tuple[Recipe, Path | None]:
    """Return the checked recipe with its overrides, and the run directory if known; `recipe` may be a run directory."""
    run_dir = None if run_dir is None else Path(run_dir)
    if isinstance(recipe, str | Path) and Path(recipe).is_dir():
        folder = Path(recipe)
        if not resume:
            raise UserError(f"{folder} is a folder, not a recipe; to resume the run in it, add --resume")
        if run_dir is not None and run_dir.resolve() != folder.resolve():
            raise UserError(f"give the run directory once: {folder} and --run-dir {run_dir} differ")
        run_dir, recipe = folder, RunDir(folder).read_recipe()
    elif resume and run_dir is None:
        raise UserError("to resume, give the run directory: scantling train RUN_DIR --resume")
    return load_recipe(recipe, settings, sections=overrides), run_dir


def check_run(run: ResolvedRun, run_dir: Path | None, planned: Plan, *, resume: bool, force: bool) -> Fit:
    """Raise the error with which `train` would refuse a run before its first step; nothing is written.

    Returns:
        The plan compared with the memory of this machine.

    Raises:
        UserError: device, run directory or data cannot be used, or the memory is certainly too small.
    """
    device_type(run.recipe.train.device)  # raises if this machine lacks the device
    if run_dir is not None:
        check_folder(RunDir(run_dir), run.recipe, resume=resume, force=force)
    _check_extras(run)
    run.task.check_data(run.recipe.data)
    fit = check_fit(run, planned)
    if fit.is_impossible:
        raise UserError(f"the run {fit}")
    return fit


def _check_extras(run: ResolvedRun) -> None:
    """Raise a UserError if this machine lacks something that a recipe asks for."""
    check_graph(run.recipe, run.world_size, run.device)
    if run.recipe.comm.elastic:
        check_elastic()
        if run.world_size > 1:
            raise UserError("comm.elastic: each replica is started by itself; leave torchrun out")
    if run.recipe.train.tensorboard:
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
    """Take a run from its locked directory to its report, one stage after the other."""
    # 1. checks, 2. starting point, 3. plan and data
    report = Sinks(sinks) if context.is_rank0 else Sink()
    if resume and folder.recipe.exists():
        given, recipe = recipe, recipe.with_measured_budget(folder.read_recipe())
        if given.comm.link != recipe.comm.link:
            report.message(
                f"comm.link: the run keeps its budget, {recipe.comm.budget}; only a new run measures its passes"
            )
    run = resolve_run(recipe, world_size=context.world_size, device=context.device.type)
    _check_extras(run)
    make_checkpointer = BackgroundCheckpointer if recipe.parallel.async_checkpoint else Checkpointer
    checkpointer = make_checkpointer(folder.checkpoints, context, keep=recipe.train.keep_checkpoints)
    start = find_start(folder, checkpointer, recipe, context, resume=resume)
    run, planned = _plan_and_prepare(run, context, report, progress if context.is_rank0 else None)
    if start.checkpoint is not None:
        check_data(start.checkpoint, run.prepared_data.info.get("fingerprint"))
    if recipe.train.deterministic and context.device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=False)
    message = None
    if recipe.comm.link is not None and context.num_replicas > 1:
        report.phase("measuring a step")
        run, message = measure_budget(run, context, checkpointer)
        planned = _plan_again(run, context)
    # 4. model, optimizer and exchange; the meters start before the model is built
    report.phase("building the model")
    memory, energy = MemoryMeter(context.device), EnergyMeter(context.device)
    loop = build_loop(run, context, checkpointer, memory=memory, energy=energy)
    context.wait_for_all()  # a process that failed to build its model would keep some backends waiting
    # 5. state of the checkpoint
    if start.checkpoint is not None:
        report.phase(f"reading {start.checkpoint.path}")
        loop.resume(start.checkpoint)
    # 6. files of the run, written only now: everything that can be wrong with it was tried
    loop.sink = _open_sinks(run, planned, folder, context, start, sinks)
    name = recipe.name or folder.path.name
    loop.sink.start(
        name=name, run_dir=folder.path, plan=planned, first_step=loop.step + 1, last_step=loop.schedule.steps
    )
    if message is not None:
        loop.sink.message(message)
    _announce(loop, folder, start)
    del start  # the manifest of many processes is large
    # 7. steps, 8. result and report
    try:
        outcome = loop.run()
    finally:
        loop.batches.close()
        loop.stepper.close()
        if loop.elastic is not None:
            loop.elastic.close()
        loop.sink.close()
    return _finish(folder, name, outcome, context)


def _plan_and_prepare(
    run: ResolvedRun, context: DistContext, report: Sink, progress: Progress | None
) -> tuple[ResolvedRun, Plan]:
    """Plan the run, prepare its data, and compare the plan with the memory before and after.

    A second plan is made only if the data changes the sizes of the model. Collectives: those of `_plan_on_main`,
    `check_same_data` and `_check_memory`, a broadcast, and `wait_for_all` after the data is read.
    """
    recipe = run.recipe
    report.phase("planning")
    # before the data is read, which may take hours
    early, is_warned = _plan_on_main(run, context, may_fail=True), False
    if early is not None:
        is_warned = _check_memory(run, early, context)
    report.phase("reading the data")
    data = run.task.prepare(recipe.data, seed=recipe.train.seed, progress=progress)
    context.wait_for_all()
    check_same_data(data.info.get("fingerprint"), context)
    # the data may change the vocabulary or the number of classes
    with_data = replace(run, data=data)
    # rank 0 decides: `_plan_on_main` is collective, so all ranks must call it or none
    keeps_sizes = context.broadcast_object(early is not None and context.is_rank0 and run.sizes == with_data.sizes)
    planned = early.rebase(rss_bytes()) if early is not None and keeps_sizes else _plan_on_main(with_data, context)
    assert planned is not None
    _check_memory(with_data, planned, context, is_warned=is_warned)
    return with_data, planned


def _plan_again(run: ResolvedRun, context: DistContext) -> Plan:
    planned = _plan_on_main(run, context)
    assert planned is not None
    return planned


def _plan_on_main(run: ResolvedRun, context: DistContext, *, may_fail: bool = False) -> Plan | None:
    """Return the plan of rank 0, on all ranks. Collectives: `wait_for_all`, gathers and a broadcast.

    Args:
        may_fail: return None if the run cannot be planned, such as before the data is read, instead of raising.

    Raises:
        UserError: the run cannot be planned.
    """
    planned, error = None, None
    if context.is_rank0:
        try:
            planned = silent_plan(run)
        except UserError as raised:
            error = raised

    def check() -> None:
        if error is not None and not may_fail:
            raise error

    context.wait_for_all()  # a plan of a large model takes longer than a collective may take
    context.run_on_all(check)
    values = context.broadcast_object(None if planned is None else planned.to_dict())
    return planned if context.is_rank0 or values is None else Plan.from_dict(values)


def _check_memory(run: ResolvedRun, planned: Plan, context: DistContext, *, is_warned: bool = False) -> bool:
    """Compare a plan with the memory here, and warn if it is too small.

    Collectives: `wait_for_all`, a broadcast and `run_on_all`.

    Returns:
        True if this call or one before has warned.

    Raises:
        UserError: weights, gradients and optimizer state alone exceed the memory of a rank.
    """
    # only rank 0 searches for changes that fit, and only for the first warning
    fit = check_fit(run, planned, search=context.is_rank0 and not is_warned)
    context.wait_for_all()  # the search takes rank 0 some seconds
    # rank 0 has the suggestions, so the others raise only if it does not
    is_refused_by_rank0 = context.broadcast_object(fit.is_impossible)

    def refuse() -> None:
        if fit.is_impossible and (context.is_rank0 or not is_refused_by_rank0):
            raise UserError(f"the run {fit}")

    context.run_on_all(refuse)
    if fit.fits is not False or is_warned:
        return is_warned
    if context.is_rank0:
        logger.warning("the run %s", fit)
    return True


def _open_sinks(
    run: ResolvedRun, planned: Plan, folder: RunDir, context: DistContext, start: StartingPoint, sinks: Sequence[Sink]
) -> Sink:
    """Write the files that describe the run, and open the receivers of its records. Collectives: `run_on_all`."""
    receivers: list[Sink] = []
    recipe = run.recipe

    def write() -> None:
        if start.checkpoint is None:
            folder.clear()  # late, so that a new run with a fault replaces nothing
            # the launch id comes before all other files: `check_replaceable` takes a folder without it for foreign
            folder.write_launch(launch_id())
            folder.write_recipe(recipe)
        else:
            if folder.metrics.exists():
                read_metrics(folder.metrics)  # report a broken line before the first step, not after the last
            if start.changes_schedule or not folder.recipe.exists() or folder.read_recipe().comm != recipe.comm:
                folder.write_recipe(recipe)
        folder.write_environment(world_size=context.world_size, device=str(context.device), data=run.prepared_data.info)
        write_json(folder.plan, planned.to_dict())
        receivers.append(JsonlSink(folder.metrics))
        if context.is_rank0:
            receivers.extend(sinks)
            if recipe.train.tensorboard:
                receivers.append(TensorBoardSink(folder.path / "tensorboard"))

    context.run_on_all(write, taking_part=context.is_writer)
    return Sinks(receivers)


def _announce(loop: Loop, folder: RunDir, start: StartingPoint) -> None:
    """Send messages on the folders, the exchange and the checkpoint of the run. Collective: a gather."""
    context = loop.context
    if (folders := describe_run_folders(folder.path, context)) is not None:
        loop.sink.message(folders)
    if (exchange := loop.stepper.exchange.describe()) is not None:
        loop.sink.message(exchange)
    if start.checkpoint is not None:
        changes = describe_changes(start.checkpoint, context)
        loop.sink.message(f"resumed from {start.checkpoint.path}{changes}")
    if start.never_saved:
        loop.sink.message(f"{folder.path} has no checkpoint yet: the run starts from step 0")


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
    # rank 0 is always a writer, so its metrics are complete
    metrics = context.broadcast_object(metrics)
    return RunResult(folder.path, str(metrics["status"]), outcome.step, metrics)
