"""Compare a plan with the memory of the machine: whether it fits and, if not, which micro-batch would."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scantling.torchrun_env import local_world_size_from_env, world_size_from_env
from scantling.trainer.planning.machine import MachineMemory, machine_memory
from scantling.trainer.planning.plan import Plan, plan_run
from scantling.trainer.planning.resolve import ResolvedRun, resolve_run
from scantling.trainer.recipe import Recipe
from scantling.trainer.reporting.format import format_bytes
from scantling.trainer.rss import rss_bytes

if TYPE_CHECKING:
    from scantling.trainer.tasks.base import TaskData


@dataclass(frozen=True)
class Fit:
    """Memory that a run needs and memory that is available, in bytes.

    Attributes:
        needed: peak of all processes that share the memory; None if unknown.
        held: the part that does not depend on the micro-batch: weights, gradients, optimizer state, residuals.
        processes: number of processes that share the memory: all on this machine on CPUs, one on a GPU.
        device: "cpu" or "cuda".
        machine: the machine's memory; None if it has no such device.
        available: the part that these processes can use now.
        micro_batch_size: as planned.
        largest_micro_batch_size: the largest that fits into `available`; None if the plan fits, or if no size does.
    """

    needed: int | None
    held: int
    processes: int
    device: str
    machine: MachineMemory | None
    available: int | None
    micro_batch_size: int
    largest_micro_batch_size: int | None = None

    @property
    def fits(self) -> bool | None:
        """True if the peak fits into the available memory; None if either is unknown."""
        if self.is_impossible:
            return False
        return None if self.needed is None or self.available is None else self.needed <= self.available

    @property
    def is_impossible(self) -> bool:
        """True if weights, gradients and optimizer state alone exceed the memory, including swap."""
        return self.machine is not None and self.held > self.machine.total + self.machine.swap

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "memory_bytes": None if self.machine is None else self.machine.total,
            "available_bytes": self.available,
            "needed_bytes": self.needed,
            "fits": self.fits,
            "largest_micro_batch_size": self.largest_micro_batch_size,
        }

    def __str__(self) -> str:
        each = "" if self.processes == 1 else f" for {self.processes} processes on one machine"
        each = " on the GPU" if self.device == "cuda" else each
        held = f"{format_bytes(self.held)}{each} for weights, gradients and optimizer state alone"
        needs = f"needs {held}" if self.needed is None else f"needs {format_bytes(self.needed)}{each}"
        if self.machine is None:
            return f"{needs}; this machine has no GPU" if self.device == "cuda" else needs
        has = f"{self.machine.name} has {format_bytes(self.machine.total)}"
        if self.available is not None and self.available < self.machine.total:
            has += f", {format_bytes(self.available)} of it free"
        if self.fits is not False:
            return f"{needs}; {has}"
        if self.is_impossible or (self.available is not None and self.held > self.available):
            return (
                f"needs {held}, whatever the micro-batch; {has}. Take a smaller model, TT layers (the section tensor), "
                "an optimizer with less state such as optim.name: came, or a machine with more memory"
            )
        if self.largest_micro_batch_size is not None:
            size = self.largest_micro_batch_size
            return f"{needs}; {has}. The largest train.micro_batch_size that fits: {size} ({self.micro_batch_size} now)"
        return (
            f"{needs}; {has}. No train.micro_batch_size fits: set train.activation_checkpointing: true or a shorter "
            "data.seq_len, or take a smaller model"
        )


def check_fit(recipe: Recipe, planned: Plan, *, search: bool = True, task_data: TaskData | None = None) -> Fit:
    """Compare a plan with the memory of this machine.

    Processes that torchrun did not start are assumed to share this machine, or to have one GPU each like the one
    here.

    Args:
        recipe: the recipe of the plan.
        planned: the result of `plan`.
        search: if the plan does not fit, search for the largest micro-batch that does, by further plans.
        task_data: as in `plan`.

    Returns:
        The comparison.
    """
    machine = machine_memory(planned.device)
    on_cpu = planned.device == "cpu"
    # under torchrun, only the processes on this machine share its memory
    launched = world_size_from_env() > 1
    processes = (local_world_size_from_env() if launched else planned.world_size) if on_cpu else 1
    available = None
    if machine is not None:
        # memory that this process already holds is part of its plan, so it counts as available
        mine = rss_bytes() * (processes if launched else 1) if on_cpu else 0
        available = min(machine.total, machine.available + mine)
    held = planned.weight_bytes + planned.gradient_bytes + (planned.optimizer_state_bytes or 0)
    held += planned.residual_bytes
    peak, micro = planned.peak_memory_bytes, recipe.micro_batch_size(planned.world_size)
    fit = Fit(
        None if peak is None else processes * peak,
        processes * held,
        processes,
        planned.device,
        machine,
        available,
        micro,
    )
    if not search or fit.fits is not False or fit.is_impossible or available is None:
        return fit
    return replace(
        fit, largest_micro_batch_size=_largest_micro_batch(recipe, planned, available // processes, task_data)
    )


def silent_plan(run: ResolvedRun) -> Plan:
    """Return `plan_run(run)` without its warnings, which the first plan or the run itself emits."""
    logger = logging.getLogger("scantling")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return plan_run(run)
    finally:
        logger.setLevel(level)


def _largest_micro_batch(recipe: Recipe, planned: Plan, limit: int, task_data: TaskData | None) -> int | None:
    """Return the largest micro-batch whose plan stays within a limit; None if none does.

    Peaks are nearly linear in the micro-batch size, so interpolation needs only a few plans. Every third step bisects
    the interval instead, which bounds the number of plans.
    """

    def peak(size: int) -> int:
        content: Mapping[str, Any] = recipe.model_dump(exclude_unset=True)
        train = {**content["train"], "micro_batch_size": size}
        changed = Recipe.model_validate({**content, "train": train})
        # without warnings: this plan is not the one that the user asked for
        smaller = silent_plan(
            resolve_run(changed, world_size=planned.world_size, device=planned.device, task_data=task_data)
        )
        assert smaller.peak_memory_bytes is not None
        # this process grows from plan to plan, so replace its size by that of the first plan
        return smaller.peak_memory_bytes - smaller.base_bytes + planned.base_bytes

    assert planned.peak_memory_bytes is not None
    high, most = recipe.micro_batch_size(planned.world_size), planned.peak_memory_bytes
    # no smaller micro-batch is left to try
    if high == 1:
        return None
    low, least = 1, peak(1)
    if least > limit:
        return None
    count = 0
    # invariant: peak(low) <= limit < peak(high)
    while high - low > 1:
        count += 1
        middle = (low + high) // 2
        # interpolate linearly; every third step keeps the midpoint
        if count % 3 and most > least:
            middle = low + int((limit - least) * (high - low) / (most - least))
        # stay strictly inside the interval, so that each step shrinks it
        middle = max(low + 1, min(high - 1, middle))
        size = peak(middle)
        if size <= limit:
            low, least = middle, size
        else:
            high, most = middle, size
    return low
