"""Evaluation on the held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from scantling.data.batch import Batch
from scantling.numerics.compute import autocast
from scantling.tasks.base import Task, TaskData
from scantling.tensor.layer import keep_merged
from scantling.training.checkpoint import read_manifest
from scantling.training.distributed import Place, joined
from scantling.training.rundir import RunDir


@contextmanager
def same_draws(device: torch.device) -> Iterator[None]:
    """The context in which what is rounded by chance is the same each time; global generators are put back after it."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(0)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        yield


@torch.no_grad()
def evaluate(
    model: nn.Module, task: Task, data: TaskData, batches: Iterable[Batch], place: Place, *, compute: str = "fp32"
) -> dict[str, float]:
    """The task's metrics over `batches`, summed over all processes; mode and global generators are put back.

    Collectives, at the end: a gather of the names, one all-reduce of their sums, and a gather of the outputs where the
    task has some. The forward passes have none, so ranks may hold different numbers of batches.
    """
    was_training = model.training
    model.eval()
    sums: dict[str, torch.Tensor] = {}
    outputs: dict[str, list[torch.Tensor]] = {}

    def add(name: str, value: torch.Tensor) -> None:
        value = value.detach().to(place.device, torch.float64)
        sums[name] = sums[name] + value if name in sums else value

    with same_draws(place.device), keep_merged(model):
        for batch in batches:
            batch = batch.to(place.device, non_blocking=True)
            with autocast(compute, place.device):
                result = task.loss(model, batch)
            add("loss", result.loss)
            add("targets", torch.tensor(batch.num_targets))
            for name, value in result.counts.items():
                add(name, value)
            for name, value in result.outputs.items():
                outputs.setdefault(name, []).append(value)
    model.train(was_training)
    own = {name: torch.cat(parts).float().cpu().numpy() for name, parts in outputs.items()}
    known = place.gather((set(sums), set(own)))
    names = sorted(set().union(*(summed for summed, _ in known)))
    values = torch.stack([sums.get(name, torch.zeros((), dtype=torch.float64, device=place.device)) for name in names])
    totals = dict(zip(names, place.sum(values).tolist(), strict=True))
    figures = task.metrics(totals, data)
    if any(collected for _, collected in known):
        everywhere = place.gather(own)
        present = set().union(*(collected for _, collected in known))
        joined = {name: np.concatenate([part[name] for part in everywhere if name in part]) for name in present}
        figures |= task.output_metrics(joined)
    return figures


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
    from scantling.training.run import load_trained, run_evaluation

    with joined(device or RunDir(Path(run_dir)).stored_recipe().train.device) as place:
        recipe, task, data, model, checkpoint = load_trained(run_dir, device=str(place.device))
        figures: dict[str, float | int | str] = {"step": read_manifest(checkpoint)["step"]}
        figures |= run_evaluation(recipe, model, task, data, place)
    return figures | task.baselines(data)
