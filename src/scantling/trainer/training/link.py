"""Measure the passes of a run, to turn a share of the time of a link into a budget of bytes (`comm.link`)."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import replace

from scantling.distributed.context import DistContext
from scantling.trainer.planning.resolve import ResolvedRun
from scantling.trainer.training.build import build_loop
from scantling.trainer.training.checkpoint import Checkpointer
from scantling.trainer.training.meters import EnergyMeter, MemoryMeter

ROUNDS = 3
"""Measured steps, after one that is not."""


def measure_budget(run: ResolvedRun, context: DistContext, checkpointer: Checkpointer) -> tuple[ResolvedRun, str]:
    """Return the run with a budget for its link, and a message on it.

    Builds the run once more, since its layout depends on the budget, and frees it. Collectives: those of building, of
    forward and backward passes, and a gather.
    """
    loop = build_loop(
        run, context, checkpointer, memory=MemoryMeter(context.device), energy=EnergyMeter(context.device)
    )
    loop.model.train()
    times = []
    for _ in range(1 + ROUNDS):
        batches = loop.batches.next_step()
        context.barrier()
        began = time.perf_counter()
        loop.stepper.run_without_exchange(batches)
        times.append(time.perf_counter() - began)
    loop.batches.close()
    loop.stepper.close()
    del loop
    gc.collect()
    # the slowest process decides how long a step takes
    seconds = max(context.all_gather_object(statistics.median(times[1:])))
    comm = run.recipe.comm
    budget = comm.budget_on_link(seconds)
    assert budget is not None, "only a run with a link is measured"
    message = (
        f"comm.link: forward and backward passes take {seconds:.3g} s per step; {comm.share:g} of {comm.link} is "
        f"{budget}"
    )
    return replace(run, recipe=run.recipe.with_budget(budget)), message
