"""Compare a plan with the memory of the machine and, if it does not fit, search for changes that do."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from scantling.torchrun_env import local_world_size_from_env, world_size_from_env
from scantling.trainer.models.costs import silent_logger
from scantling.trainer.planning.changes import Search, Suggestion, find_changes
from scantling.trainer.planning.machine import MachineMemory, machine_memory
from scantling.trainer.planning.plan import Plan, plan_run
from scantling.trainer.planning.resolve import ResolvedRun
from scantling.trainer.reporting.format import format_bytes
from scantling.trainer.rss import rss_bytes


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
        search: changes of the recipe, compared with `available`; None if the plan fits, or without a search.
    """

    needed: int | None
    held: int
    processes: int
    device: str
    machine: MachineMemory | None
    available: int | None
    search: Search | None = None

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

    @property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """Changes of the recipe that fit by their own plans, cheapest first."""
        return () if self.search is None else self.search.suggestions

    @property
    def largest_micro_batch_size(self) -> int | None:
        """The largest micro-batch that fits without another change; None if the plan fits, or if no size does."""
        return None if self.search is None else self.search.largest_micro_batch_size

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "memory_bytes": None if self.machine is None else self.machine.total,
            "available_bytes": self.available,
            "needed_bytes": self.needed,
            "fits": self.fits,
            "largest_micro_batch_size": self.largest_micro_batch_size,
            "suggestions": [each.to_dict() for each in self.suggestions],
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
            needs = f"needs {held}, whatever the micro-batch"
        return f"{needs}; {has}. {self._advice()}"

    def _advice(self) -> str:
        """Return the changes that fit, one per line with its peak; without any, the least memory that was planned."""
        if self.suggestions:
            lines = [
                f"  {format_bytes(self.processes * each.peak_memory_bytes):>8}  {each}" for each in self.suggestions
            ]
            return "\n".join(["Each of these changes of the recipe fits, by its plan:", *lines])
        other = "a smaller model or batch, TT layers (the section tensor), or a machine with more memory"
        if self.search is None:
            return f"Take {other}"
        least = self.search.least
        if least is None:
            return f"No change of the recipe was found that fits; take {other}"
        peak = format_bytes(self.processes * least.peak_memory_bytes)
        return f"No planned change of the recipe fits; the least is {peak}, with {least}. Take {other}"


def check_fit(run: ResolvedRun, planned: Plan, *, search: bool = True) -> Fit:
    """Compare a plan with the memory of this machine.

    Processes that torchrun did not start are assumed to share this machine, or to have one GPU each like the one
    here.

    Args:
        run: the run.
        planned: its plan.
        search: if the plan does not fit, search for changes of the recipe that do, by further plans.

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
    peak = planned.peak_memory_bytes
    needed = None if peak is None else processes * peak
    fit = Fit(needed, processes * held, processes, planned.device, machine, available)
    if not search or fit.fits is not False or peak is None or available is None:
        return fit
    return replace(fit, search=find_changes(run, planned, available // processes))


def silent_plan(run: ResolvedRun) -> Plan:
    """Return `plan_run(run)` without its warnings, which the first plan or the run itself emits."""
    with silent_logger("scantling", logging.ERROR):
        return plan_run(run)
