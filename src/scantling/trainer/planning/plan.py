"""Plan of a run: parameters, memory, traffic and FLOPs, summed from the cost functions of each part.

An unknown value is None, with a note that says why; nothing is guessed. All bytes are per rank.

    peak = max(base + building, base + held + working + allocator)
    held = weights + optimizer state + residuals of the exchange + copy for checkpoints
    working = max(forward and backward pass, gradients + optimizer temporaries)

The passes are traced with one micro-batch that uses no memory. Gradients are allocated while activations are freed,
so the peak of the passes is less than the sum of both. If gradients exist before the pass, from an earlier
micro-batch or because the buckets of the exchange hold them, they are added. If the optimizer steps each
parameter within the pass and frees its gradient, so does the trace, and the temporaries of the update count as part
of the pass.

`building` is the memory of a model in fp32 whose weights are rounded to bf16 when all of them are there, on a CPU.

`base` is the memory of a CPU process with the libraries loaded, measured in this process. On a GPU it is 0, because
only allocated memory counts.

`allocator` is the memory of freed blocks that glibc keeps on a CPU. It is the only value that is fitted to
measurements instead of counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scantling.distributed.context import DEVICES
from scantling.errors import UserError
from scantling.trainer.recipe import Recipe, load_recipe
from scantling.trainer.recipe.loading import RecipeLike
from scantling.trainer.reporting.format import format_bytes, format_number

if TYPE_CHECKING:
    from rich.table import Table

    from scantling.trainer.planning.passes import Passes
    from scantling.trainer.planning.resolve import ResolvedRun
    from scantling.trainer.tasks.base import TaskData


@dataclass(frozen=True)
class Plan:
    """Predicted cost of a run, for each rank.

    Attributes:
        num_parameters: all parameters; `num_trainable` those that get a gradient; `num_non_embedding` those outside of
            embeddings and the output layer, the N of scaling laws.
        parameters_by_role: number of trainable parameters that are matrices, embeddings and vectors.
        weight_bytes, gradient_bytes, optimizer_state_bytes: held through a step; if gradients are released, only the
            largest one counts.
        activation_bytes: held between the forward and the backward pass of one micro-batch.
        temporary_bytes: memory of the passes or the update in addition to the larger of activations and gradients.
        base_bytes: memory of the process before it builds a model.
        allocator_bytes: freed blocks that the allocator keeps, on a CPU.
        peak_memory_bytes: peak memory of the run: of a step, or of building the model.
        wire_bytes: bytes that one rank sends per step.
        residual_bytes: state of the momentum exchange.
        staged_bytes: copy in CPU memory from which checkpoints are written in the background; no part of the peak on a
            GPU.
        building_bytes: weights in fp32 before they are rounded to bf16, if all are held at a time; 0 on a GPU.
        device: "cpu" or "cuda", the device that is planned for.
        flops_per_step: forward and backward over all ranks, including activation recomputation; `flops_per_token` is
            the same per token.
        tokens_per_step: over all ranks; `total_tokens` over the run.
        notes: which values are unknown, and why.
    """

    name: str
    world_size: int
    num_parameters: int
    num_trainable: int
    num_non_embedding: int
    parameters_by_role: Mapping[str, int]
    weight_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int | None
    activation_bytes: int | None
    temporary_bytes: int | None
    base_bytes: int
    allocator_bytes: int | None
    peak_memory_bytes: int | None
    wire_bytes: int
    flops_per_step: int | None
    flops_per_token: float | None
    tokens_per_step: int
    total_tokens: int
    residual_bytes: int = 0
    staged_bytes: int | None = 0
    building_bytes: int = 0
    device: str = "cpu"
    notes: Sequence[str] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {**dataclasses.asdict(self), "notes": list(self.notes)}

    def rebase(self, base_bytes: int) -> Plan:
        """Return the plan for a process that holds this much memory before it builds the model; as is for a GPU."""
        if self.device == "cuda":
            return self
        peak = self.peak_memory_bytes
        # `base` is a summand of both peaks
        peak = None if peak is None else peak - self.base_bytes + base_bytes
        return dataclasses.replace(self, base_bytes=base_bytes, peak_memory_bytes=peak)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Rebuild the plan that `to_dict` returned, as read from `plan.json`."""
        return cls(**{**values, "notes": tuple(values["notes"])})

    def rows(self) -> list[tuple[str, str, str]]:
        """Return rows (group, name, value) for display."""
        roles = ", ".join(f"{format_number(n)} {role}" for role, n in self.parameters_by_role.items())
        return [
            ("parameters", "all", format_number(self.num_parameters)),
            ("", "trainable", f"{format_number(self.num_trainable)} ({roles})"),
            ("memory per rank", "weights", format_bytes(self.weight_bytes)),
            ("", "gradients", format_bytes(self.gradient_bytes)),
            ("", "optimizer state", format_bytes(self.optimizer_state_bytes)),
            *([("", "residuals of the exchange", format_bytes(self.residual_bytes))] if self.residual_bytes else []),
            *([("", "copy for checkpoints (CPU)", format_bytes(self.staged_bytes))] if self.staged_bytes != 0 else []),
            ("", "activations", format_bytes(self.activation_bytes)),
            ("", "temporary", format_bytes(self.temporary_bytes)),
            ("", "kept by the allocator", format_bytes(self.allocator_bytes)),
            ("", "process before the model", format_bytes(self.base_bytes)),
            *([("", "or weights before rounding", format_bytes(self.building_bytes))] if self.building_bytes else []),
            ("", "peak", format_bytes(self.peak_memory_bytes)),
            ("network", "sent per step and rank", format_bytes(self.wire_bytes)),
            ("compute", "FLOPs per step", format_number(self.flops_per_step)),
            ("", "FLOPs per token", format_number(self.flops_per_token)),
            ("", "tokens per step", format_number(self.tokens_per_step)),
            ("", "tokens in the run", format_number(self.total_tokens)),
        ]

    def _title(self) -> str:
        processes = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        where = {"cpu": "on the CPU", "cuda": "on a GPU" if self.world_size == 1 else "on a GPU each"}[self.device]
        return f"plan of {self.name}, {processes} {where}"

    def table(self) -> Table:
        """Return the plan as a table for a terminal."""
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(self._title()),
            caption=Text("\n".join(self.notes)) if self.notes else None,
            title_justify="left",
        )
        for header in ("", "what", "planned"):
            table.add_column(header, justify="right" if header == "planned" else "left")
        for index, (group, what, value) in enumerate(self.rows()):
            if group and index:
                table.add_section()
            table.add_row(group, what, value)
        return table

    def short(self) -> str:
        """Return the plan in one line, printed before each run."""
        sent = f", sends {format_bytes(self.wire_bytes)}/step" if self.wire_bytes else ""
        return (
            f"plan for {self.device}: {format_number(self.num_parameters)} parameters, "
            f"peak {format_bytes(self.peak_memory_bytes)} "
            f"(weights {format_bytes(self.weight_bytes)}, gradients {format_bytes(self.gradient_bytes)}, "
            f"optimizer {format_bytes(self.optimizer_state_bytes)}, activations {format_bytes(self.activation_bytes)})"
            f"{sent}, {format_number(self.flops_per_step)}FLOP/step, {format_number(self.total_tokens)} tokens"
        )

    def __str__(self) -> str:
        lines = [self._title()]
        lines += [f"{group:16} {what:26} {value}" for group, what, value in self.rows()]
        return "\n".join([*lines, *self.notes])


def plan(
    recipe: RecipeLike,
    *,
    world_size: int = 1,
    device: str = "auto",
    settings: Sequence[str] = (),
    task_data: TaskData | None = None,
) -> Plan:
    """Predict the cost of a run.

    Args:
        recipe: path of a YAML file, a mapping, or a `Recipe`.
        world_size: number of processes.
        device: "cpu", "cuda" (this machine needs no GPU), or "auto" for `train.device` of the recipe; if that is "auto"
            too, the GPU if this machine has one.
        settings: overrides as text, `train.steps=100`.
        task_data: the run's prepared data, if available; without it the vocabulary size comes from the tokenizer
            setting, and no data is read.

    Returns:
        The plan: bytes of one process, FLOPs of all.

    Raises:
        RecipeError: the recipe is invalid.
        UserError: the model cannot be built, or the number of processes does not fit the recipe.
    """
    from scantling.trainer.planning.resolve import resolve_run

    recipe = load_recipe(recipe, settings)
    device = planned_device(recipe, device)
    return plan_run(resolve_run(recipe, world_size=world_size, device=device, task_data=task_data))


def plan_run(run: ResolvedRun, *, may_trace: bool = True) -> Plan:
    """Predict the cost of a resolved run.

    Args:
        run: the run. Its cache provides what an earlier plan computed.
        may_trace: False to leave activations and peak unknown if that needs a new trace, which takes seconds.

    Raises:
        UserError: the model cannot be built.
    """
    from scantling.groups import num_non_embedding, param_groups
    from scantling.optim.memory import predicted_state_bytes, predicted_temporary_bytes
    from scantling.trainer.models.block_parts import checkpoint_in_parts
    from scantling.trainer.models.build import quiet
    from scantling.trainer.models.checkpointing import checkpoint_activations
    from scantling.trainer.models.sharding import gradient_ratio, shard_groups
    from scantling.trainer.planning.cache import recipe_key
    from scantling.trainer.planning.memory import (
        building_bytes,
        frees_gradients,
        gathered_bytes,
        held_gradient_bytes,
        local_groups,
    )
    from scantling.trainer.planning.momentum import optimizer_groups
    from scantling.trainer.planning.passes import plan_passes
    from scantling.trainer.planning.planned_model import planned_model
    from scantling.trainer.planning.traffic import note_on_budget, plan_traffic
    from scantling.trainer.rss import rss_bytes

    recipe, world_size = run.recipe, run.world_size
    # the order matters: the trace in plan_passes makes the model unusable
    notes = list(run.sizes.notes)
    model = planned_model(run, notes)
    notes += [*_ranks_that_come_down(recipe, model), *_exchange_notes(run), *note_on_budget(run, model)]
    groups = param_groups(model, weight_decay=recipe.optim.weight_decay)
    roles = _by_role(groups)
    _, shards = recipe.parallel.mesh_shape(world_size)
    parts = shard_groups(model, recipe.parallel) if shards > 1 else []
    all_bytes = sum(param.nbytes for group in groups for _, param in group["params"])
    groups = local_groups(groups, {id(param) for part in parts for param in part.params}, shards)
    local = [param for group in groups for _, param in group["params"]]
    elsewhere = all_bytes - sum(param.nbytes for param in local)  # on the other processes of a replica
    wire, residuals = plan_traffic(run, model, groups, parts)
    # before the trace, which must see the recomputation
    if recipe.train.activation_checkpointing:
        checkpoint_activations(model, recipe.train.activation_checkpointing)
        if recipe.accumulates_in_blocks(world_size):
            checkpoint_in_parts(model, recipe.micro_batch_size(world_size))
    on_gpu = run.device == "cuda"
    # measured before the trace, whose fake tensors and caches grow this process
    base = 0 if on_gpu else rss_bytes()
    # tied weights appear once
    parameters = list(model.parameters())
    weight_bytes = sum(p.nbytes for p in parameters) - elsewhere
    trained = [p.nbytes for p in local if p.requires_grad]
    gradient_bytes = held_gradient_bytes(recipe, trained, world_size=world_size)
    released = frees_gradients(recipe, world_size=world_size)
    # after a momentum exchange, some groups have no momentum, and less state
    groups = optimizer_groups(recipe, groups)
    name, options = recipe.optim.name, recipe.optimizer_options
    state = predicted_state_bytes(name, groups, **options)
    held = None if state is None else weight_bytes + state + residuals
    # the first process of a folder writes all of it
    staged = held if recipe.parallel.async_checkpoint else 0
    optimizer_key = (
        recipe_key(recipe, "model", "data", "tensor", "optim", "comm"),
        recipe.precision.parameters,
        shards,
    )

    def temporaries() -> int:
        # torch's optimizers step all parameters at once (foreach) on a GPU, which needs more temporary memory
        return run.cache.get(
            ("temporary", on_gpu, repr(run.sizes), options.get("rounding"), *optimizer_key),
            lambda: predicted_temporary_bytes(name, groups, **{"foreach": on_gpu, **options}),
        )

    of_step = temporaries() if released else 0
    with quiet():
        passes = plan_passes(
            run,
            model,
            step_bytes=of_step if released and shards == 1 else None,
            gathered=gathered_bytes(parts, gradient_ratio(recipe)) + (of_step if shards > 1 else 0),
            held=gradient_bytes if shards > 1 else None,
            may_trace=may_trace,
        )
    notes += _memory_notes(run, passes, released=released, state=state)
    building = 0 if on_gpu else building_bytes(recipe, parameters, world_size)
    tokens = run.tokens_per_step
    flops = _step_flops(passes)
    return Plan(
        name=recipe.name or "recipe",
        world_size=world_size,
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        num_non_embedding=num_non_embedding(model),
        parameters_by_role=roles,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_state_bytes=state,
        activation_bytes=passes.activation_bytes,
        base_bytes=base,
        **_working_memory(
            passes,
            base=base,
            held=None if held is None or staged is None else held + (0 if on_gpu else staged),
            building=building,
            gradient_bytes=gradient_bytes,
            # slow, and not needed without a trace
            of_optimizer=0 if passes.peak_bytes is None else temporaries(),
            on_gpu=on_gpu,
        ),
        wire_bytes=wire,
        flops_per_step=flops,
        flops_per_token=None if flops is None else flops / tokens,
        tokens_per_step=tokens,
        total_tokens=tokens * recipe.train.steps,
        residual_bytes=residuals,
        staged_bytes=staged,
        building_bytes=building,
        device=run.device,
        notes=tuple(notes),
    )


def _exchange_notes(run: ResolvedRun) -> list[str]:
    """Return notes on a second momentum, and on links on which a dense exchange is faster."""
    from scantling.comm.layout import dense_crossover_mbit
    from scantling.trainer.planning.momentum import note_on_momentum

    note, comm = note_on_momentum(run.recipe), run.recipe.comm
    notes = [] if note is None else [note]
    # the crossover was measured on CPUs only
    if comm.name == "demo" and comm.exchange != "dense" and run.world_size > 1 and run.device == "cpu":
        crossover = dense_crossover_mbit(run.world_size)
        notes.append(f"comm.exchange: dense is faster on links above about {crossover:,.0f} Mbit/s")
    return notes


def _memory_notes(run: ResolvedRun, passes: Passes, *, released: bool, state: int | None) -> list[str]:
    """Return notes on memory that the plan does not know, or knows for other kernels only."""
    from scantling.trainer.planning.memory import allocator_bytes

    notes = []
    if run.recipe.optim.release_gradients:
        notes.append("gradients are not clipped by their global norm; came limits the RMS of each update")
    if run.recipe.optim.release_gradients and not released:
        notes.append("train.micro_batch_size keeps all gradients until the last micro-batch, which releases them")
    if state is None:
        notes.append(f"the state of {run.recipe.optim.name} is not known before it has taken a step")
    notes += passes.notes
    if run.device == "cuda" and passes.peak_bytes is not None:
        notes.append("the memory of the passes is that of a CPU's kernels; a GPU's may keep less")
    _, shards = run.recipe.parallel.mesh_shape(run.world_size)
    if run.device == "cpu" and shards > 1 and allocator_bytes(1):
        notes.append(
            "glibc keeps the freed blocks of gathered weights, up to as much again as the peak without the process; "
            "MALLOC_MMAP_THRESHOLD_=131072 in the environment returns them, and is slower"
        )
    if run.recipe.train.compile:
        notes.append("compiled kernels keep less for the backward pass than is planned here")
    return notes


def planned_device(recipe: Recipe, device: str = "auto") -> str:
    """Return "cpu" or "cuda": the named device, or else the recipe's, or else the GPU if there is one.

    Raises:
        UserError: another name.
    """
    import torch

    if device not in DEVICES:
        raise UserError(f"the device is one of {', '.join(DEVICES)}; given '{device}'")
    device = recipe.train.device if device == "auto" else device
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def _ranks_that_come_down(recipe: Recipe, model: Any) -> list[str]:
    """Return a note on TT layers whose ranks are pruned to a target size."""
    if recipe.tensor is None or recipe.tensor.size_target is None:
        return []
    from scantling.tensor.rank_adapter import RankAdapter
    from scantling.trainer.planning.memory import core_bytes

    options = recipe.tensor.rank_options(recipe.train.steps)
    adapter = RankAdapter(model, core_bytes=core_bytes(recipe), **options)
    target = f"{format_number(adapter.target)} {adapter.options.unit}"
    return [f"planned at the first ranks; the cores come down to {target} by step {adapter.options.steps}"]


def _by_role(groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of parameters by the role of their group."""
    roles: dict[str, int] = {}
    for group in groups:
        roles[group["role"]] = roles.get(group["role"], 0) + sum(p.numel() for _, p in group["params"])
    return roles


def _working_memory(
    passes: Passes,
    *,
    base: int,
    held: int | None,
    building: int,
    gradient_bytes: int,
    of_optimizer: int,
    on_gpu: bool,
) -> dict[str, int | None]:
    """Return temporary memory of a step, memory the allocator keeps, and the peak; None for unknown values."""
    from scantling.trainer.planning.memory import allocator_bytes

    if passes.peak_bytes is None:
        return {"temporary_bytes": None, "allocator_bytes": 0 if on_gpu else None, "peak_memory_bytes": None}
    # activations are freed before the optimizer steps, so the two peaks do not add up
    working = max(passes.peak_bytes, gradient_bytes + of_optimizer)
    kept = 0 if on_gpu else allocator_bytes(working)
    return {
        "temporary_bytes": working - max(passes.activation_bytes or 0, gradient_bytes),
        "allocator_bytes": kept,
        "peak_memory_bytes": None if held is None else base + max(building, held + working + kept),
    }


def _step_flops(passes: Passes) -> int | None:
    """Return the FLOPs of the forward and backward passes plus those of activation recomputation."""
    from scantling.trainer.models.costs import BACKWARD

    if passes.forward_flops is None or passes.recomputed_flops is None:
        return None
    return (1 + BACKWARD) * passes.forward_flops + passes.recomputed_flops


def planned_size(recipe: Recipe) -> tuple[int, int]:
    """Return `Plan.num_non_embedding` and the tokens of one step, without reading data.

    Raises:
        UserError: the model cannot be built.
    """
    from scantling.groups import num_non_embedding
    from scantling.trainer.planning.planned_model import planned_model
    from scantling.trainer.planning.resolve import resolve_run

    run = resolve_run(recipe, world_size=1, device="cpu")
    return num_non_embedding(planned_model(run, [])), run.tokens_per_step
