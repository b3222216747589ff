"""One step of CAME for sharded parameters: all of them stage by stage, with one exchange between two stages.

What a stage leaves partial is added up for all parameters at once: one all-reduce a stage, process group and dtype. On
a 1-D mesh a step takes at most three, whatever the number of parameters:

    (1)  row and column sums of the second moment, and which parameters have a gradient
    (2)  sums of squares for the clip
    (3)  row and column sums of the instability

(1) and (3) also carry the grand mean of a matrix whose rows and columns are both sharded. A sum that is partial along
two mesh dims passes through the exchanges of both.

Ranks need not have the same gradients. Every sharded parameter that requires a gradient takes part in (1), with zeros
where this rank has none; it is stepped if any rank of its shards has one, and keeps its value and state if none has.
A rank that has all gradients knows the outcome; one that lacks some reads it from (1), and so waits for its device.
Replicas of a mesh dim that replicates are not asked: they hold the same gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scantling.numerics.torch_private import foreach_copy_
from scantling.optim._eager import Job, Partial, Stages, stages_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter on its way through the stages.

    Attributes:
        job: the parameter.
        stages: of the job.
        flag: 1-D, the number of ranks with a gradient once it has been summed.
        before: where this rank has no gradient, what the first stage changes: (tensor, copy) pairs.
    """

    job: Job
    stages: Stages
    flag: Tensor
    before: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, job: Job) -> _Entry:
        changed = () if job.has_grad else (job.state[key] for key in ("row", "col") if key in job.state)
        before = [(tensor, tensor.clone()) for tensor in changed]
        return cls(job, stages_of(job), job.scalar(float(job.has_grad)), before)


def step_sharded(jobs: Sequence[Job]) -> None:
    """One step of all sharded parameters of an optimizer.

    Collectives: at most three all-reduces for each process group that shards a parameter (and each of fp32 and fp64
    statistics), in the order of the parameters, which must be the same on all ranks.
    """
    entries = [_Entry.of(job) for job in jobs]
    partial = [part for entry in entries for part in entry.stages.accumulate()]
    partial += [(entry.flag, entry.job.plan.groups(range(entry.job.param.ndim))) for entry in entries]
    _sum_over_ranks(partial)
    stages = [entry.stages for entry in _stepped(entries)]
    _sum_over_ranks(part for one in stages for part in one.whiten())
    _sum_over_ranks(part for one in stages for part in one.residual())
    for one in stages:
        one.apply()


def _stepped(entries: list[_Entry]) -> list[_Entry]:
    """Those of which some rank has a gradient; the others get back what the first stage changed."""
    absent = [entry.flag.reshape(1) for entry in entries if not entry.job.has_grad]
    if not absent:
        return entries
    counts = iter(torch.cat([flag.float() for flag in absent]).tolist())
    stepped = []
    for entry in entries:
        if entry.job.has_grad or next(counts) > 0:
            stepped.append(entry)
            continue
        for tensor, copy in entry.before:
            tensor.copy_(copy)
    return stepped


def _sum_over_ranks(partial: Iterable[Partial]) -> None:
    """Add up partial tensors in place. Collectives: one all-reduce for each process group and dtype among them."""
    buckets: dict[tuple[ProcessGroup, torch.dtype], list[Tensor]] = {}
    for tensor, groups in partial:
        for group in groups:
            buckets.setdefault((group, tensor.dtype), []).append(tensor)
    for (group, _), tensors in buckets.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if not flat.numel():
            continue
        torch.distributed.all_reduce(flat, group=group)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        foreach_copy_(tensors, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])
