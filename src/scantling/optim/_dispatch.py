"""Dispatch each parameter to the C, Triton or eager step; step sharded parameters stage by stage with all-reduces.

All drivers follow the stages and the equations of `_eager.py` and `stages.py`. The C step does not stop between them.

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

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from scantling.numerics.torch_private import foreach_copy_
from scantling.optim import _cpu, _eager, _triton
from scantling.optim._eager import PartialSum, param_stages, run_stages
from scantling.optim.sharding import ShardPlan
from scantling.optim.state import ParamStep

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def dispatch_steps(steps: Sequence[ParamStep]) -> list[_triton.BatchStages] | None:
    """Take the step of each parameter.

    Collectives: those of `_step_sharded` if a parameter is sharded.

    Returns:
        The stages of the kernels, if these have stepped all parameters: they can step them again.
    """
    in_c: list[ParamStep] = []
    in_triton: list[ParamStep] = []
    eager: list[ParamStep] = []
    sharded: list[ParamStep] = []
    for step in steps:
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
    stages = []
    for each in _triton.batch_stages(in_triton):
        run_stages(each)
        stages.append(each)
    for step in eager:
        _eager.step_param(step)
    stages += _step_sharded(sharded)
    return stages if sum(len(each.indices) for each in stages) == len(steps) else None


def _step_sharded(steps: Sequence[ParamStep]) -> list[_triton.BatchStages]:
    """Take the step of all sharded parameters of an optimizer; return the stages of the kernels.

    Collectives: at most three all-reduces for each process group that shards a parameter (and each of fp32 and fp64
    statistics), in the order of the parameters, which must be the same on all ranks.
    """
    can_step = [step for step in steps if step.hyper.foreach is not False and _triton.can_step(step)]
    in_triton = {step.param_idx for step in can_step}
    kernels = list(_triton.batch_stages(can_step))
    eager = [_EagerStages(step) for step in steps if step.param_idx not in in_triton]
    stages: list[_Stages] = [*kernels, *eager]
    # Equations (1) and (2), with the number of gradients in the same all-reduce.
    num_grads = {step.param_idx: step.scalar(float(step.has_grad)) for step in steps}
    partial = _partial_sums(stages, "accumulate")
    partial += [(num_grads[step.param_idx], step.plan.groups(range(step.param.ndim))) for step in steps]
    SumsOverRanks(partial).all_reduce()
    unused = _without_grad(eager, num_grads)
    stages = [each for each in stages if not any(each is other for other in unused)]
    # Equation (3), then (4) to (8), then (9) and (10).
    SumsOverRanks(_partial_sums(stages, "whiten")).all_reduce()
    SumsOverRanks(_partial_sums(stages, "update_instability")).all_reduce()
    for each in stages:
        each.apply()
    return kernels


class _Stages(Protocol):
    """Stages of several parameters, by their indices: those of `ParamStages`, with the partial sums of each."""

    @property
    def indices(self) -> Sequence[int]: ...

    def accumulate(self) -> list[list[PartialSum]]: ...

    def whiten(self) -> list[list[PartialSum]]: ...

    def update_instability(self) -> list[list[PartialSum]]: ...

    def apply(self) -> None: ...


class _EagerStages:
    """Stages of one parameter, which restore its state if no rank has a gradient.

    This rank learns only after (1) if any other rank has a gradient; without one, (1) is undone.
    """

    def __init__(self, step: ParamStep) -> None:
        self.indices, self.has_grad = [step.param_idx], step.has_grad
        self._stages = param_stages(step)
        changed = () if step.has_grad else (step.state[key] for key in ("row", "col") if key in step.state)
        self._backup = [(tensor, tensor.clone()) for tensor in changed]

    def accumulate(self) -> list[list[PartialSum]]:
        return [self._stages.accumulate()]

    def whiten(self) -> list[list[PartialSum]]:
        return [self._stages.whiten()]

    def update_instability(self) -> list[list[PartialSum]]:
        return [self._stages.update_instability()]

    def apply(self) -> None:
        self._stages.apply()

    def restore(self) -> None:
        for tensor, copy in self._backup:
            tensor.copy_(copy)


def _partial_sums(stages: Sequence[_Stages], stage: str) -> list[PartialSum]:
    """Run a stage of all parameters; return their partial sums in the order of the parameters.

    Ranks may differ in which parameters the kernels step, but must send the sums in the same order.
    """
    found = [pair for each in stages for pair in zip(each.indices, getattr(each, stage)(), strict=True)]
    return [part for _, partial in sorted(found, key=itemgetter(0)) for part in partial]


def _without_grad(eager: Sequence[_EagerStages], num_grads: dict[int, Tensor]) -> list[_EagerStages]:
    """Restore the state of parameters for which no rank has a gradient, and return their stages.

    Args:
        eager: stages of parameters, among them all those without a gradient on this rank.
        num_grads: number of ranks with a gradient, 0-D, by the indices of the parameters.
    """
    missing = [stages for stages in eager if not stages.has_grad]
    if not missing:
        return []
    # waits for the device
    counts = torch.stack([num_grads[stages.indices[0]].float() for stages in missing]).tolist()
    unused = [stages for stages, count in zip(missing, counts, strict=True) if not count]
    for stages in unused:
        stages.restore()
    return unused


class SumsOverRanks:
    """All-reduces of partial sums, one for each process group and dtype.

    Args:
        partial: tensors that are summed over ranks in place, in an order that is the same on all ranks.
    """

    def __init__(self, partial: Iterable[PartialSum]) -> None:
        buckets: dict[tuple[ProcessGroup, torch.dtype], list[Tensor]] = {}
        for tensor, groups in partial:
            for group in groups:
                buckets.setdefault((group, tensor.dtype), []).append(tensor.view(-1))
        self._buckets = [(group, tensors, [len(each) for each in tensors]) for (group, _), tensors in buckets.items()]

    def all_reduce(self) -> None:
        for group, tensors, sizes in self._buckets:
            # One flat buffer, since many small all-reduces would wait for latency.
            flat = torch.cat(tensors)
            if flat.numel():
                torch.distributed.all_reduce(flat, group=group)
                foreach_copy_(tensors, torch.split(flat, sizes))

    def repeated(self) -> Callable[[], None]:
        """Return a function that does the same again for tensors at the same addresses, by kernels."""
        buckets = [(group, _triton.FlatCopies(tensors)) for group, tensors, sizes in self._buckets if sum(sizes)]

        def all_reduce() -> None:
            for group, copies in buckets:
                copies.gather()
                torch.distributed.all_reduce(copies.flat, group=group)
                copies.scatter()

        return all_reduce


class RepeatedSharded:
    """Step of sharded parameters by the kernels, taken again; this rank has all of their gradients.

    Args:
        stages: stages of the kernels.
        plans: shard plans of the parameters, in their order.
    """

    def __init__(self, stages: Sequence[_triton.BatchStages], plans: Sequence[ShardPlan]) -> None:
        self._stages, self._plans = stages, plans
        self._all_reduce: dict[str, Callable[[], None]] = {}
        self._num_grads = torch.ones(len(plans), device=stages[0].device)

    def step(self) -> None:
        """Take the step, once all stages have begun it. Collectives: those of `_step_sharded`."""
        for stage in ("accumulate", "whiten", "update_instability"):
            if stage in self._all_reduce:
                for each in self._stages:
                    getattr(each, stage)()
            else:
                # The tensors stay the same from step to step.
                sums = SumsOverRanks([*_partial_sums(self._stages, stage), *self._counts(stage)])
                self._all_reduce[stage] = sums.repeated()
            if stage == "accumulate":
                self._num_grads.fill_(1.0)
            self._all_reduce[stage]()
        for each in self._stages:
            each.apply()

    def _counts(self, stage: str) -> list[PartialSum]:
        """Return the number of gradients of each parameter, which other ranks may not know, in the first stage."""
        if stage != "accumulate":
            return []
        groups = [plan.groups(range(len(plan.shape))) for plan in self._plans]
        return list(zip(self._num_grads.unbind(), groups, strict=True))
