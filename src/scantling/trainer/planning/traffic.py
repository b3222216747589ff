"""Traffic of a run: bytes that a process sends in a step, and the exchange that a budget of bytes allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from scantling.errors import UserError
from scantling.trainer.recipe.schema import BUDGET_OPTIONS, CommSection, method_defaults
from scantling.trainer.reporting.format import format_bytes

if TYPE_CHECKING:
    from scantling.comm import MomentumExchange
    from scantling.trainer.models.sharding import ShardGroup
    from scantling.trainer.planning.resolve import ResolvedRun

MOST_LOCAL_STEPS = 1000
"""Most local steps that a budget chooses; with more, replicas train almost alone."""


def plan_traffic(
    run: ResolvedRun, model: Any, groups: Sequence[Mapping[str, Any]], parts: Sequence[ShardGroup]
) -> tuple[int, int]:
    """Return the bytes that a process sends per step, and the bytes of state that the exchange keeps.

    Args:
        run: the run.
        model: on the meta device.
        groups: parameter groups with the shapes on one process.
        parts: groups of the parameters that are gathered together; empty if the model is not sharded.
    """
    from scantling.comm import allreduce_wire_bytes, sharded_wire_bytes
    from scantling.comm.local_steps import anchor_dtype
    from scantling.trainer.models.sharding import gradient_ratio, whole_parameters

    recipe, world_size, comm = run.recipe, run.world_size, chosen_comm(run)
    sends_all = comm.name == "allreduce"
    replicas, shards = recipe.parallel.mesh_shape(world_size)
    sent = 0
    if shards > 1:
        sent = sharded_wire_bytes(
            [(part.num_bytes, part.gathers) for part in parts],
            sum(p.nbytes for p in whole_parameters(model) if p.requires_grad),
            gradient_ratio=gradient_ratio(recipe),
            shards=shards,
            replicas=replicas if sends_all else 1,
            whole_processes=world_size if sends_all else shards,
            passes=-(-recipe.batch_share(world_size) // recipe.pass_size(world_size)),
        )
    elif sends_all:
        sent = allreduce_wire_bytes(sum(p.nbytes for p in model.parameters() if p.requires_grad), world_size)
    if sends_all:
        return sent, 0
    local = {name: param for group in groups for name, param in group["params"]}
    exchange = _meta_exchange(comm, model, local)
    sent += round(_bytes_per_step(comm, exchange, replicas))
    # local steps keep the common weights, and the outer momentum
    copies = 0 if comm.keeps_replicas_equal else 2 if comm.outer_momentum else 1
    anchors = sum(param.numel() * anchor_dtype(param).itemsize for param in local.values())
    return sent, exchange.planned_state_bytes() + copies * anchors


def _meta_exchange(comm: CommSection, model: Any, local: Mapping[str, Any]) -> MomentumExchange:
    """Return the exchange of a section over parameters on the meta device; only shapes determine its messages."""
    from scantling.comm import MomentumExchange
    from scantling.comm.demo_exchange import exchange_groups
    from scantling.comm.local_steps import outer_exchange

    method, _, options = comm.local_options
    if comm.name == "demo":
        options = comm.demo_options
    exchanged = exchange_groups(model, options)
    for group in exchanged:
        group["params"] = [(name, local[name]) for name, _ in group["params"]]
    if comm.name == "demo":
        return MomentumExchange(exchanged, **options)
    return outer_exchange(method, exchanged, **options)


def _bytes_per_step(comm: CommSection, exchange: MomentumExchange, replicas: int) -> float:
    sent = exchange.planned_wire_bytes_per_step(replicas)
    if comm.keeps_replicas_equal:
        return sent
    assert comm.sync_every is not None, "a section that was not chosen"
    return sent / comm.sync_every


def chosen_comm(run: ResolvedRun) -> CommSection:
    """Return the section `comm` of a run, with the values that its budget chooses, or usual ones before it is known.

    Raises:
        UserError: no choice sends so few bytes.
    """
    from scantling.trainer.planning.cache import recipe_key

    if run.recipe.comm.budget is None and run.recipe.comm.link is None:
        return run.recipe.comm
    key = (
        "comm",
        recipe_key(run.recipe, "model", "data", "tensor", "comm", "parallel"),
        repr(run.sizes),
        run.world_size,
    )
    return run.cache.get(key, lambda: _fit_comm(run))


def _fit_comm(run: ResolvedRun) -> CommSection:
    """Return the section `comm` of a run with the best quality that its budget allows, see `_BudgetFit`.

    Raises:
        UserError: no choice sends so few bytes.
    """
    from scantling.groups import param_groups
    from scantling.trainer.models.sharding import shard_groups
    from scantling.trainer.planning.memory import local_groups
    from scantling.trainer.planning.planned_model import planned_model

    comm, parallel, budget = run.recipe.comm, run.recipe.parallel, run.recipe.comm.budget_bytes
    replicas, shards = parallel.mesh_shape(run.world_size)
    if replicas == 1 or budget is None:  # nothing is sent, or the link has not been measured
        topk = min(CommSection.model_fields["topk"].default, comm.chunk**2)
        defaults = {"topk": topk, **method_defaults(comm.name, comm.chunk)}
        return comm.model_copy(update={key: defaults[key] for key in _free_options(comm)})
    model = planned_model(run, [])
    parts = shard_groups(model, parallel) if shards > 1 else []
    groups = local_groups(param_groups(model), {id(param) for part in parts for param in part.params}, shards)
    local = {name: param for group in groups for name, param in group["params"]}

    def planned_bytes(section: CommSection) -> float:
        return _bytes_per_step(section, _meta_exchange(section, model, local), replicas)

    return _BudgetFit(comm, budget, planned_bytes).choose()


@dataclass(frozen=True)
class _BudgetFit:
    """Choice of the options of an exchange that a section leaves to its budget.

    Attributes:
        comm: section with options that are None.
        budget: bytes per step.
        planned_bytes: bytes per step of a section without None.
    """

    comm: CommSection
    budget: float
    planned_bytes: Callable[[CommSection], float]

    def choose(self) -> CommSection:
        """Return the section with all options.

        If only one is free, take the largest `topk` or the smallest `sync_every`. If both are, send all elements after
        as few steps as fit, and fewer elements only after MOST_LOCAL_STEPS.

        Raises:
            UserError: no choice sends so few bytes.
        """
        topk, every = self.comm.topk, self.comm.sync_every
        if every is not None:
            return self._most_elements(every)
        if topk is None:
            topk = self.comm.chunk**2
            if self._steps_between(topk) > MOST_LOCAL_STEPS:
                return self._most_elements(MOST_LOCAL_STEPS)
        every = self._steps_between(topk)
        if every > MOST_LOCAL_STEPS:
            sent = format_bytes(self.planned_bytes(self._with(topk, 1)))
            self._refuse(
                f"an exchange sends {sent}, which {every:,} local steps would have to share; at most "
                f"{MOST_LOCAL_STEPS:,} do",
                *(() if self.comm.name == "diloco" or self.comm.exchange == "dense" else ("leave comm.topk out",)),
            )
        return self._with(topk, every)

    def _with(self, topk: int, every: int) -> CommSection:
        return self.comm.model_copy(update={"topk": topk, "sync_every": every})

    def _steps_between(self, topk: int) -> int:
        """Return the fewest local steps between exchanges of `topk` elements that fit."""
        return max(1, math.ceil(self.planned_bytes(self._with(topk, 1)) / self.budget))

    def _most_elements(self, every: int) -> CommSection:
        """Return the section with the largest `topk` that fits."""

        def fits(topk: int) -> bool:
            return self.planned_bytes(self._with(topk, every)) <= self.budget

        most = self.comm.chunk**2
        least = most if fits(most) else 0
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if fits(middle) else (least, middle - 1)
        if not least:
            fewest = format_bytes(self.planned_bytes(self._with(1, every)))
            is_demo = self.comm.name == "demo"
            self._refuse(
                f"one element per block sends {fewest} per step already",
                *(
                    ["set comm.name: local_steps"]
                    if is_demo
                    else ["raise comm.sync_every"]
                    if self.comm.sync_every
                    else []
                ),
            )
        return self._with(least, every)

    def _refuse(self, problem: str, *remedies: str) -> NoReturn:
        every = ["raise the budget", *remedies, *([] if self.comm.dense == "sign" else ["set comm.dense: sign"])]
        raise UserError(f"comm.budget: {problem}; {', or '.join(every)}")


def _free_options(comm: CommSection) -> list[str]:
    """Return the options that a section leaves to its budget."""
    return [option for option in BUDGET_OPTIONS if getattr(comm, option) is None]


def note_on_budget(run: ResolvedRun, model: Any) -> list[str]:
    """Return notes on the choice that the budget or the link of a run makes.

    Args:
        run: the run.
        model: on the meta device.
    """
    from scantling.comm import allreduce_wire_bytes

    comm, steps = run.recipe.comm, run.recipe.train.steps
    if comm.link is not None:
        return ["comm.link: a run measures its passes first and then chooses; this plan does not"]
    if comm.budget_bytes is None:
        return []
    chosen, free = chosen_comm(run), _free_options(comm)
    choice = ", ".join(f"{option}: {getattr(chosen, option)}" for option in free)
    notes = [f"comm.budget: {comm.budget} allows {choice} (comm.name: {comm.name})"]
    replicas, shards = run.recipe.parallel.mesh_shape(run.world_size)
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad) // shards
    averaging = allreduce_wire_bytes(gradients, replicas)
    if replicas > 1 and averaging <= comm.budget_bytes:
        sent = format_bytes(averaging)
        notes.append(f"comm.budget: averaging all gradients sends {sent} per step, which it allows too; leave comm out")
    if "sync_every" in free and (chosen.sync_every or 1) > steps:
        notes.append(f"comm.budget: a run of {steps} steps still exchanges once, at its end, and sends more")
    return notes
