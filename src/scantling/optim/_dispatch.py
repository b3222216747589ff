"""Dispatch each parameter to the C, Triton or eager step; step sharded parameters stage by stage with all-reduces.

All drivers follow the stages and the equations of `_eager.py` and `stages.py`.

The stages of sharded parameters leave partial sums, which are added for all parameters at once: one all-reduce for each
stage, process group and dtype. On a 1-D mesh a step takes at most three, whatever the number of parameters:

    (1)  row and column sums of the second moment, and which parameters have a gradient
    (2)  sums of squares for the clip
    (3)  row and column sums of the instability

(1) and (3) also carry the grand mean of a matrix whose rows and columns are both sharded. A sum that is partial along
two mesh dims passes through the all-reduces of both.

Ranks may have gradients of different parameters. Every sharded parameter that requires a gradient takes part in (1),
with zeros if this rank has none; it is stepped if any rank of its shards has a gradient, and otherwise keeps its value
and state. A rank with all gradients knows the outcome; a rank that lacks one reads it from (1), and so waits for its
device. Ranks along a mesh dim that replicates are not asked: they hold the same gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scantling.numerics.torch_private import foreach_copy_
from scantling.optim import _cpu, _eager, _triton
from scantling.optim._eager import ParamStages, PartialSum, param_stages
from scantling.optim.state import ParamStep

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def dispatch_steps(steps: Sequence[ParamStep]) -> None:
    """Take the step of each parameter.

    Collectives: those of `_step_sharded` if a parameter is sharded.
    """
    in_c: list[ParamStep] = []
    in_triton: list[ParamStep] = []
    eager: list[ParamStep] = []
    sharded: list[ParamStep] = []
    for step in steps:
        # Only the eager stages can stop for all-reduces.
        if step.plan.sharded_dims:
            sharded.append(step)
        elif step.hyper.foreach is False:
            eager.append(step)
        elif _cpu.can_step(step):
            in_c.append(step)
        elif _triton.can_step(step):
            in_triton.append(step)
        else:
            eager.append(step)
    _cpu.step_params(in_c)
    _triton.step_params(in_triton)
    for step in eager:
        _eager.step_param(step)
    _step_sharded(sharded)


@dataclass(frozen=True, slots=True)
class _ShardedStep:
    """One sharded parameter in one step.

    Attributes:
        step: the step of the part on this rank.
        stages: stages of the step.
        num_grads: 0-D, 1 if this rank has a gradient; once summed, the number of ranks with one.
        backup: (tensor, copy) of the tensors that the first stage changes, if this rank has no gradient.
    """

    step: ParamStep
    stages: ParamStages
    num_grads: Tensor
    backup: list[tuple[Tensor, Tensor]]

    @classmethod
    def from_step(cls, step: ParamStep) -> _ShardedStep:
        # This rank learns only after (1) if any rank has a gradient; without one, (1) is undone.
        changed = () if step.has_grad else (step.state[key] for key in ("row", "col") if key in step.state)
        backup = [(tensor, tensor.clone()) for tensor in changed]
        return cls(step, param_stages(step), step.scalar(float(step.has_grad)), backup)


def _step_sharded(steps: Sequence[ParamStep]) -> None:
    """Take the step of all sharded parameters of an optimizer.

    Collectives: at most three all-reduces for each process group that shards a parameter (and each of fp32 and fp64
    statistics), in the order of the parameters, which must be the same on all ranks.
    """
    entries = [_ShardedStep.from_step(step) for step in steps]
    # Equations (1) and (2), with the number of gradients in the same all-reduce.
    partial = [part for entry in entries for part in entry.stages.accumulate()]
    partial += [(entry.num_grads, entry.step.plan.groups(range(entry.step.param.ndim))) for entry in entries]
    _all_reduce(partial)
    stages = [entry.stages for entry in _select_with_grad(entries)]
    # Equation (3), then (4) to (8), then (9) and (10).
    _all_reduce(part for each in stages for part in each.whiten())
    _all_reduce(part for each in stages for part in each.update_instability())
    for each in stages:
        each.apply()


def _select_with_grad(entries: list[_ShardedStep]) -> list[_ShardedStep]:
    """Return the entries for which some rank has a gradient; restore the state of the others."""
    missing = [entry.num_grads.reshape(1) for entry in entries if not entry.step.has_grad]
    if not missing:
        return entries
    counts = iter(torch.cat([count.float() for count in missing]).tolist())  # waits for the device
    selected = []
    for entry in entries:
        if entry.step.has_grad or next(counts) > 0:
            selected.append(entry)
            continue
        for tensor, copy in entry.backup:
            tensor.copy_(copy)
    return selected


def _all_reduce(partial: Iterable[PartialSum]) -> None:
    """Sum partial tensors over ranks, in place. Collectives: one all-reduce for each process group and dtype."""
    buckets: dict[tuple[ProcessGroup, torch.dtype], list[Tensor]] = {}
    for tensor, groups in partial:
        for group in groups:
            buckets.setdefault((group, tensor.dtype), []).append(tensor)
    for (group, _), tensors in buckets.items():
        # One flat buffer, since many small all-reduces would wait for latency.
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if not flat.numel():
            continue
        torch.distributed.all_reduce(flat, group=group)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        foreach_copy_(tensors, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])
