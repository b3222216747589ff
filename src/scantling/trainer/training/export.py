"""Export: a folder that transformers' `from_pretrained` loads, checked by loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from scantling.checksums import write_checksums
from scantling.errors import RunError
from scantling.files import atomic_folder, check_new_folder
from scantling.precision.training import restore
from scantling.tensor.convert import densify
from scantling.trainer.models.build import quiet
from scantling.trainer.tasks.base import Task
from scantling.trainer.training.trained import load_trained


def export_hf(run_dir: str | Path, folder: str | Path, *, dense: bool = False) -> float:
    """Write the newest whole checkpoint of a run as a Hugging Face model folder with what makes its inputs.

    The folder is written aside, loaded again with the task's Auto class, compared on random inputs, and only then
    given its name.

    Args:
        run_dir: the directory of a run.
        folder: the folder to write; it must not exist or be empty.
        dense: whether layers of cores are written as the dense layers that compute the same; a model of cores itself is
            loaded by `scantling.load`.

    Returns:
        The largest absolute difference between the logits of the model and of the reloaded one.

    Raises:
        UserError: there is no such run, or `folder` holds something.
        RunError: the reloaded model differs, or the folder could not be written.
    """
    folder = Path(folder)
    check_new_folder(folder)
    run = load_trained(run_dir)
    task, model = run.task, run.model
    restore(model, weights="rounded")
    if dense:
        densify(model)
    with atomic_folder(folder) as aside:
        with quiet():
            model.save_pretrained(aside)
        task.save_inputs(aside, run.data, model.config)
        with quiet():
            difference = _reload_difference(task, model, aside)
        write_checksums(aside)
    return difference


@torch.no_grad()
def _reload_difference(task: Task, model: Any, folder: Path) -> float:
    reloaded = task.find_auto_class(model.config).from_pretrained(folder, local_files_only=True)
    inputs = task.probe(model.config, torch.Generator().manual_seed(0))
    before = model.eval()(**inputs).logits
    after = reloaded.eval()(**inputs).logits
    difference = float((before - after).abs().max())
    if not difference <= 1e-4 * max(1.0, float(before.abs().max())):
        raise RunError(
            f"the exported folder gives other logits than the run (difference {difference:.1e}); nothing was written"
        )
    return difference
