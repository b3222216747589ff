"""Lock the run directory: the first rank that sees it locks it, on each machine that has its own."""

from __future__ import annotations

from pathlib import Path

from scantling.distributed.context import SINGLE_PROCESS, DistContext, is_restart, launch_id
from scantling.distributed.folders import detect_shared_folders, resolve_machine_path
from scantling.errors import UserError
from scantling.trainer.recipe import Recipe
from scantling.trainer.training.checkpoint import Checkpointer
from scantling.trainer.training.resume import check_stored_recipe
from scantling.trainer.training.run_dir import InUseError, RunDir


def lock_run_dir(
    run_dir: Path | None, recipe: Recipe, context: DistContext, *, resume: bool, force: bool
) -> tuple[RunDir, DistContext, bool]:
    """Lock the run directory on each machine and check that it can take the run.

    Collectives: gathers; all ranks raise the same error.

    Args:
        run_dir: as given to this process; None takes the first free name, which is the same on all machines.
        recipe: of the run.
        context: of this process.
        resume, force: as of `train`.

    Returns:
        The run directory, locked on the ranks that write; the context with the ranks that see the same folder; and True
        if the run resumes.

    Raises:
        UserError: a folder is in use, holds another run, or cannot be written.
    """
    path = resolve_machine_path(run_dir, context)
    resuming = [rank for rank, resumes in enumerate(context.all_gather_object(resume)) if resumes]
    if 0 < len(resuming) < context.world_size:
        raise UserError(
            f"only {', '.join(map(context.describe_rank, resuming))} of {context.world_size} processes resume a run; "
            "start all of them with --resume, or none"
        )
    if path is None:
        if is_restart():
            raise UserError(
                "torchrun restarted this run, but no run directory was given to resume from; pass --run-dir"
            )
        return *_lock_free_name(Path("runs") / (recipe.name or "run"), context), resume
    # which ranks share the folder decides who locks and writes it
    context = detect_shared_folders(path, context)
    folder = RunDir(path)
    _check_checkpoints_link(folder, context)
    if is_restart():
        resume, force = _decide_after_restart(folder, context, resume=resume, force=force)
    # gathered on all ranks before the lock of any of them creates the folder
    exists = folder.holds_run() or folder.was_locked()
    exists_anywhere = any(context.all_gather_object(exists))

    def lock() -> None:
        if resume and not exists_anywhere:
            check_folder(folder, recipe, resume=True, force=force)  # before the lock creates the folder
        folder.lock()
        check_folder(folder, recipe, resume=resume, force=force)  # a locked folder can be resumed

    try:
        context.run_on_all(lock, taking_part=context.is_writer)
    except UserError:
        # another rank may have failed: do not keep the lock
        folder.unlock()
        raise
    return folder, context, resume


def _check_checkpoints_link(folder: RunDir, context: DistContext) -> None:
    """Raise a UserError if `checkpoints` is a link to a folder that other ranks share than the run directory.

    Collectives: a gather, and those of `detect_shared_folders` if there is a link.
    """
    links = context.all_gather_object(folder.checkpoints.is_symlink())
    if any(links) and detect_shared_folders(folder.checkpoints, context).writers != context.writers:
        linking = ", ".join(context.describe_rank(rank) for rank, is_link in enumerate(links) if is_link)
        raise UserError(
            f"{folder.checkpoints} is a link ({linking}), and its target is not seen by the same processes as "
            f"{folder.path}. Remove the link, or let the same machines share both"
        )


def check_folder(folder: RunDir, recipe: Recipe, *, resume: bool, force: bool) -> None:
    """Raise a UserError if a folder cannot take a run."""
    if resume and folder.holds_run():
        check_stored_recipe(folder, recipe)
    elif resume and not folder.was_locked():
        raise UserError(f"{folder.path} holds no run to resume; start it without --resume")
    elif not resume and folder.holds_run() and not force:
        raise UserError(
            f"{folder.path} already holds a run; add --resume to resume it, --force to replace it, "
            "or give another --run-dir"
        )
    elif force:
        folder.check_replaceable()


def _decide_after_restart(folder: RunDir, context: DistContext, *, resume: bool, force: bool) -> tuple[bool, bool]:
    """Return `resume` and `force` for a run that torchrun restarts. Collective: a gather.

    A run that this launch started resumes from its newest checkpoint, or starts again if it has none. If this launch_id
    started no run (because it was refused, for example), both stay as given, so that no other run is touched.
    """
    started = folder.was_started_by(launch_id())
    has_saved = started and bool(Checkpointer(folder.checkpoints, SINGLE_PROCESS).steps())
    writers = set(context.writers) or {0}
    by_writer = [each for rank, each in enumerate(context.all_gather_object([started, has_saved])) if rank in writers]
    if not any(any_started for any_started, _ in by_writer):
        return resume, force
    # a folder without any checkpoint means that no save is complete in all folders
    resumes = all(any_saved for _, any_saved in by_writer)
    # starting from step 0 replaces the files that this launch wrote, which needs `force`
    return resumes, (started and not resumes) or force


def _lock_free_name(base: Path, context: DistContext) -> tuple[RunDir, DistContext]:
    """Lock the first of `base`, `base-2`, `base-3`, ... that holds no run on any machine and is not locked."""
    context = detect_shared_folders(base.parent, context)
    number = 1
    while True:
        folder = RunDir(base if number == 1 else base.with_name(f"{base.name}-{number}"))
        number += 1
        if any(context.all_gather_object(folder.holds_run())):
            continue
        is_taken = False

        def lock(folder: RunDir = folder) -> None:
            nonlocal is_taken
            try:
                folder.lock()
            except InUseError:
                is_taken = True
            else:
                # check again under the lock: a run may have started and ended since the gather
                is_taken = folder.holds_run()

        context.run_on_all(lock, taking_part=context.is_writer)
        # all machines must get the same name, so one taken folder rejects it everywhere
        if not any(context.all_gather_object(is_taken)):
            return folder, context
        folder.unlock()
