"""Traffic of a run: bytes that a process sends in a step, and the exchange that a budget of bytes allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scantling.errors import UserError
from scantling.trainer.recipe.schema import CommSection
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
    return sent if comm.keeps_replicas_equal else sent / comm.sync_every


def chosen_comm(run: ResolvedRun) -> CommSection:
    """Return the section `comm` of a run, with the values that its budget of bytes chooses.

    Raises:
        UserError: no choice sends so few bytes.
    """
    from scantling.trainer.planning.cache import recipe_key

    if run.recipe.comm.budget is None:
        return run.recipe.comm
    key = (
        "comm",
        recipe_key(run.recipe, "model", "data", "tensor", "comm", "parallel"),
        repr(run.sizes),
        run.world_size,
    )
    return run.cache.get(key, lambda: _fit_comm(run))


def _fit_comm(run: ResolvedRun) -> CommSection:
    """Return the section `comm` of a run with the best quality that its budget allows.

    With `demo` this is the largest `topk`, with local steps the smallest `sync_every`.

    Raises:
        UserError: no choice sends so few bytes.
    """
    from scantling.groups import param_groups
    from scantling.trainer.models.sharding import shard_groups
    from scantling.trainer.planning.memory import local_groups
    from scantling.trainer.planning.planned_model import planned_model
    from scantling.trainer.recipe.schema import LOCAL_DEFAULTS

    comm, recipe = run.recipe.comm, run.recipe
    assert comm.budget_bytes is not None
    replicas, shards = recipe.parallel.mesh_shape(run.world_size)
    if replicas == 1:  # nothing is sent
        usual = {} if comm.keeps_replicas_equal else {"sync_every": LOCAL_DEFAULTS[comm.name]["sync_every"]}
        return comm.model_copy(update=usual)
    model = planned_model(run, [])
    parts = shard_groups(model, recipe.parallel) if shards > 1 else []
    groups = local_groups(param_groups(model), {id(param) for part in parts for param in part.params}, shards)
    local = {name: param for group in groups for name, param in group["params"]}

    def planned_bytes(given: CommSection) -> float:
        return _bytes_per_step(given, _meta_exchange(given, model, local), replicas)

    if not comm.keeps_replicas_equal:
        each = planned_bytes(comm.model_copy(update={"sync_every": 1}))
        every = max(1, math.ceil(each / comm.budget_bytes))
        if every > MOST_LOCAL_STEPS:
            raise UserError(
                f"comm.budget: an exchange sends {format_bytes(each)}, which {every:,} local steps would have to "
                f"share; at most {MOST_LOCAL_STEPS:,} do. Raise the budget, "
                f"{'' if comm.name == 'diloco' else 'lower comm.topk, '}or set comm.dense: sign"
            )
        return comm.model_copy(update={"sync_every": every})
    least, most = 0, comm.chunk**2
    while least < most:
        middle = (least + most + 1) // 2
        if planned_bytes(comm.model_copy(update={"topk": middle})) <= comm.budget_bytes:
            least = middle
        else:
            most = middle - 1
    if not least:
        fewest = planned_bytes(comm.model_copy(update={"topk": 1}))
        raise UserError(
            f"comm.budget: one coefficient per block sends {format_bytes(fewest)} per step already; raise the budget, "
            "set comm.dense: sign, or comm.name: local_steps"
        )
    return comm.model_copy(update={"topk": least})


def note_on_budget(run: ResolvedRun) -> list[str]:
    """Return a note on the choice that the budget or the link of a run makes."""
    if run.recipe.comm.link is not None:
        return ["comm.link: a run measures its passes first and then chooses; this plan does not"]
    if run.recipe.comm.budget is None:
        return []
    key = "topk" if run.recipe.comm.name == "demo" else "sync_every"
    chosen, steps = getattr(chosen_comm(run), key), run.recipe.train.steps
    notes = [f"comm.budget: {run.recipe.comm.budget} allows {key}: {chosen}"]
    if key == "sync_every" and chosen > steps:
        notes.append(f"comm.budget: a run of {steps} steps still exchanges once, at its end, and sends more")
    return notes
