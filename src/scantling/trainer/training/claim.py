"""Claim the run directory: the first rank that sees it locks it, on each machine that has its own."""

from __future__ import annotations

from pathlib import Path

from scantling.distributed.context import SINGLE_PROCESS, DistContext, is_restart, launch_id
from scantling.distributed.folders import detect_shared_folders, resolve_machine_path
from scantling.errors import UserError
from scantling.trainer.recipe import Recipe
from scantling.trainer.training.checkpoint import Checkpointer
from scantling.trainer.training.rundir import InUseError, RunDir


def claim(
    run_dir: Path | None, recipe: Recipe, context: DistContext, *, resume: bool, force: bool
) -> tuple[RunDir, DistContext, bool]:
    """Lock the run directory on each machine and check that it fits.

    Collectives: gathers; all ranks raise the same error.

    Args:
        run_dir: as given to this process; None takes the first free name, which is the same on all machines.
        recipe: of the run.
        context: of this process.
        resume, force: as of `train`.

    Returns:
        The run directory, locked on the ranks that write; the context that says which ranks see which folder; and
        True if the run goes on.

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
                "torchrun has started this run again, which does not know where it was: give it a --run-dir"
            )
        return *_claim_free(Path("runs") / (recipe.name or "run"), context), resume
    context = detect_shared_folders(path, context)
    folder = RunDir(path)
    _check_checkpoints(folder, context)
    if is_restart():
        resume, force = _resume_after_restart(folder, context, resume=resume, force=force)
    exists = folder.holds_run() or folder.was_claimed()
    is_known = any(context.all_gather_object(exists))

    def lock() -> None:
        if resume and not is_known:
            check_folder(folder, recipe, resume=True, force=force)  # before the lock makes the folder
        folder.lock()
        check_folder(folder, recipe, resume=resume, force=force)  # a locked folder can be resumed

    try:
        context.run_on_all(lock, taking_part=context.is_writer)
    except UserError:
        folder.unlock()
        raise
    return folder, context, resume


def _check_checkpoints(folder: RunDir, context: DistContext) -> None:
    """Raise a UserError if checkpoints are behind a link, in a folder that is shared otherwise than the run directory.

    Collectives: a gather, and those of `detect_shared_folders` where there is a link.
    """
    links = context.all_gather_object(folder.checkpoints.is_symlink())
    if any(links) and detect_shared_folders(folder.checkpoints, context).writers != context.writers:
        linking = ", ".join(context.describe_rank(rank) for rank, is_link in enumerate(links) if is_link)
        raise UserError(
            f"{folder.checkpoints} is a link ({linking}), and the folder it leads to is not seen by the same processes "
            f"as {folder.path}. Remove the link, or let the same machines share both"
        )


def check_folder(folder: RunDir, recipe: Recipe, *, resume: bool, force: bool) -> None:
    """Raise a UserError if a folder cannot take a run."""
    if resume and folder.holds_run():
        folder.check_same(recipe)
    elif resume and not folder.was_claimed():
        raise UserError(f"{folder.path} holds no run to resume")
    elif not resume and folder.holds_run() and not force:
        raise UserError(
            f"{folder.path} already holds a run; add --resume to go on with it, --force to replace it, "
            "or give another --run-dir"
        )
    elif force:
        folder.check_replaceable()


def _resume_after_restart(folder: RunDir, context: DistContext, *, resume: bool, force: bool) -> tuple[bool, bool]:
    """Return whether a run that torchrun starts again goes on, and whether it replaces what is in its folder.

    A run that this launch began continues from its newest checkpoint, or from the start if it has none. If this launch
    began no run (it was refused, for example), `resume` and `force` hold as given, so that no other run is touched.
    Collective: a gather.
    """
    begun = folder.was_begun_by(launch_id())
    has_saved = begun and bool(Checkpointer(folder.checkpoints, SINGLE_PROCESS).steps())
    everywhere = [
        each for rank, each in enumerate(context.all_gather_object([begun, has_saved])) if rank in _writers(context)
    ]
    if not any(any_begun for any_begun, _ in everywhere):
        return resume, force
    goes_on = all(any_saved for _, any_saved in everywhere)
    return goes_on, (begun and not goes_on) or force


def _writers(context: DistContext) -> set[int]:
    return set(context.writers) or {0}


def _claim_free(base: Path, context: DistContext) -> tuple[RunDir, DistContext]:
    """Lock the first of `base`, `base-2`, `base-3`, ... that holds no run on any machine and that no run has taken."""
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
                is_taken = folder.holds_run()

        context.run_on_all(lock, taking_part=context.is_writer)
        if not any(context.all_gather_object(is_taken)):
            return folder, context
        folder.unlock()
