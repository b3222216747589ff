"""Evaluation on the held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from scantling.distributed.context import DistContext
from scantling.eval_mode import eval_mode
from scantling.numerics.device import autocast
from scantling.tensor.layer import keep_merged
from scantling.trainer.data.loader import Batch
from scantling.trainer.tasks.base import Task, TaskData


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
    model: nn.Module,
    task: Task,
    data: TaskData,
    batches: Iterable[Batch],
    context: DistContext,
    *,
    compute: str = "fp32",
) -> dict[str, float]:
    """The task's metrics over `batches`, summed over all processes; mode and global generators are put back.

    Collectives, at the end: a gather of the names, one all-reduce of their sums, and a gather of the outputs where the
    task has some. The forward passes have none, so ranks may hold different numbers of batches.
    """
    sums: dict[str, torch.Tensor] = {}
    outputs: dict[str, list[torch.Tensor]] = {}

    def add(name: str, value: torch.Tensor) -> None:
        value = value.detach().to(context.device, torch.float64)
        sums[name] = sums[name] + value if name in sums else value

    with eval_mode(model), same_draws(context.device), keep_merged(model):
        for batch in batches:
            batch = batch.to(context.device, non_blocking=True)
            with autocast(compute, context.device):
                result = task.loss(model, batch)
            add("loss", result.loss)
            add("targets", torch.tensor(batch.num_targets))
            for name, value in result.counts.items():
                add(name, value)
            for name, value in result.outputs.items():
                outputs.setdefault(name, []).append(value)
    own = {name: torch.cat(parts).float().cpu().numpy() for name, parts in outputs.items()}
    known = context.all_gather_object([sorted(sums), sorted(own)])
    names = sorted(set().union(*(summed for summed, _ in known)))
    values = torch.stack(
        [sums.get(name, torch.zeros((), dtype=torch.float64, device=context.device)) for name in names]
    )
    totals = dict(zip(names, context.all_reduce(values).tolist(), strict=True))
    figures = task.metrics(totals, data)
    if any(collected for _, collected in known):
        joined = {}
        for name in sorted(set().union(*(collected for _, collected in known))):
            parts = context.all_gather_arrays(own.get(name, np.zeros(0, np.float32)))
            held = zip(parts, known, strict=True)
            joined[name] = np.concatenate([part for part, (_, collected) in held if name in collected])
        figures |= task.output_metrics(joined)
    return figures
