"""Evaluation on the held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np
import torch
from torch import nn

from scantling.distributed.context import DistContext
from scantling.errors import UserError
from scantling.eval_mode import eval_mode
from scantling.numerics.device import autocast
from scantling.tensor.layer import keep_merged
from scantling.trainer.data.loader import Batch, eval_batches
from scantling.trainer.models.sharding import reshard
from scantling.trainer.planning.resolve import ResolvedRun
from scantling.trainer.tasks.base import Task, TaskData


def evaluate_heldout(run: ResolvedRun, model: nn.Module, context: DistContext) -> dict[str, float]:
    """Return the held-out metrics of a model. Collectives: those of `evaluate`.

    Raises:
        UserError: the run has no held-out data.
    """
    recipe, data = run.recipe, run.prepared_data
    if data.heldout is None:
        raise UserError(
            "nothing is held out: data.heldout is 0 and data.validation is not given; set one of the two in the recipe"
        )
    dataset, most, world = data.heldout, recipe.train.eval_samples, context.world_size
    micro = recipe.micro_batch_size(world)

    def make_batches(rank: int) -> Iterator[Batch]:
        return eval_batches(dataset, data.collate, micro, rank=rank, world_size=world, max_samples=most, workers=0)

    repeated: Iterator[Batch] = iter(())
    if context.mesh is not None:
        # rank 0 has the most samples: the others repeat its last batches, so that all gather the weights as often
        samples = len(range(context.rank, min(len(dataset), most or len(dataset)), world))
        repeated = islice(make_batches(0), -(-samples // micro), None)
    compute = recipe.precision.autocast(context.device.type)
    return evaluate(model, run.task, data, make_batches(context.rank), context, compute=compute, repeated=repeated)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    data: TaskData,
    batches: Iterable[Batch],
    context: DistContext,
    *,
    compute: str = "fp32",
    repeated: Iterable[Batch] = (),
) -> dict[str, float]:
    """Return the task's metrics over `batches` of all processes; mode and global generators are restored.

    Collectives, at the end: a gather of the names, one all-reduce of their sums, and a gather of the outputs if the
    task has some. The forward passes have none, so ranks may have more or fewer batches, except of a sharded model.

    Args:
        model, task, data: of the run.
        batches: of this process.
        context: of this process.
        compute: "fp32", "bf16" or "fp16".
        repeated: batches that other processes count; a sharded model needs as many passes on each process.
    """
    sums: dict[str, torch.Tensor] = {}
    outputs: dict[str, list[torch.Tensor]] = {}

    def add(name: str, value: torch.Tensor) -> None:
        # sums over many batches need float64
        value = value.detach().to(context.device, torch.float64)
        sums[name] = sums[name] + value if name in sums else value

    with eval_mode(model), fixed_rng(context.device), keep_merged(model):
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
        for batch in repeated:
            with autocast(compute, context.device):
                task.loss(model, batch.to(context.device, non_blocking=True))
    reshard(model)
    # outputs of all batches, such as scores for a ranking metric
    own = {name: torch.cat(parts).float().cpu().numpy() for name, parts in outputs.items()}
    # a rank without batches does not know the names, so they are gathered first
    by_rank = context.all_gather_object([sorted(sums), sorted(own)])
    names = sorted(set().union(*(its_sums for its_sums, _ in by_rank)))
    # (names,): one all-reduce for all sums; a rank without batches adds zeros
    values = torch.stack(
        [sums.get(name, torch.zeros((), dtype=torch.float64, device=context.device)) for name in names]
    )
    metrics = task.metrics(dict(zip(names, context.all_reduce(values).tolist(), strict=True)), data)
    output_names = sorted(set().union(*(its_outputs for _, its_outputs in by_rank)))
    if output_names:
        joined = {}
        for name in output_names:
            # ranks without outputs take part in the gather; their empty arrays are dropped
            parts = zip(context.all_gather_arrays(own.get(name, np.zeros(0, np.float32))), by_rank, strict=True)
            joined[name] = np.concatenate([part for part, (_, its_outputs) in parts if name in its_outputs])
        metrics |= task.output_metrics(joined)
    return metrics


@contextmanager
def fixed_rng(device: torch.device) -> Iterator[None]:
    """Context with fixed seeds, so that stochastic rounding is repeatable; global generators are restored after it."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        # `torch.manual_seed` would also seed other GPUs, which `fork_rng` does not restore here
        torch.default_generator.manual_seed(0)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        yield
