"""Build the parts of a run, each from its section of the recipe."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scantling.comm import AllReduce, DemoExchange, GradientExchange, NoExchange, ShardedExchange
from scantling.comm.transport.shards import to_local
from scantling.distributed.context import DistContext
from scantling.distributed.mesh import REPLICATE, SHARD
from scantling.errors import UserError
from scantling.groups import param_groups
from scantling.numerics.device import warn_if_slow_matmul
from scantling.optim.registry import build_optimizer
from scantling.precision.matmul import check_device
from scantling.tensor.report import without_warnings
from scantling.trainer.data.loader import BatchSource
from scantling.trainer.data.sampler import Sampler
from scantling.trainer.models.block_parts import checkpoint_in_parts
from scantling.trainer.models.build import build_model, convert_model, mixes_documents
from scantling.trainer.models.checkpointing import checkpoint_activations
from scantling.trainer.models.sharding import (
    MetaModel,
    ShardGroup,
    gradient_ratio,
    shard_groups,
    shard_model,
    whole_parameters,
)
from scantling.trainer.planning.memory import core_bytes, held_gradient_bytes
from scantling.trainer.planning.momentum import optimizer_groups
from scantling.trainer.planning.plan import planned_model
from scantling.trainer.planning.resolve import ResolvedRun
from scantling.trainer.recipe import Recipe
from scantling.trainer.training.checkpoint import Checkpointer
from scantling.trainer.training.evaluate import evaluate_heldout
from scantling.trainer.training.loop import Loop
from scantling.trainer.training.meters import EnergyMeter, MemoryMeter
from scantling.trainer.training.schedule import Schedule
from scantling.trainer.training.sinks import Sink
from scantling.trainer.training.step import GradientRelease, Stepper
from scantling.trainer.training.tensor_training import TensorTraining


def build_loop(
    run: ResolvedRun, context: DistContext, checkpointer: Checkpointer, *, memory: MemoryMeter, energy: EnergyMeter
) -> Loop:
    """Build model, optimizer, exchange, batches and schedule, as one loop at step 0."""
    recipe, data, settings = run.recipe, run.prepared_data, run.recipe.train
    check_device(recipe.precision.compute, context.device)
    compute = recipe.precision.autocast(context.device.type)
    if context.rank == 0:
        key = "compute" if recipe.precision.parameters == "fp32" else "parameters"
        warn_if_slow_matmul(compute, context.device, f"set precision.{key}: fp32")
    meta = None if context.mesh is None else build_meta_model(run, context)
    model = build_run_model(run).to(context.device) if meta is None else meta.model
    # rank gates are parameters, so they come before the optimizer
    tensor = build_tensor_training(recipe)
    tensor.attach(model)
    if settings.activation_checkpointing:
        checkpoint_activations(model, settings.activation_checkpointing)
        if recipe.accumulates_in_blocks(context.world_size):
            checkpoint_in_parts(model, recipe.micro_batch_size(context.world_size))
    groups = [] if meta is None else shard_groups(model, recipe.parallel)
    exchange = build_exchange(recipe, groups, context)
    if meta is not None:
        shard_run_model(meta, groups, recipe, context)
    if settings.compile:
        # compile in place: `torch.compile(model)` would prefix the names of the parameters
        model.compile()
    optimizer = build_run_optimizer(recipe, model, context.device)
    _seed_generators(settings.seed + 1 + context.rank)  # dropout differs between ranks, weights do not
    stepper = Stepper(
        model,
        run.task,
        optimizer,
        exchange,
        context,
        tensor=tensor,
        # DeMo clips each process's gradient itself, before it is accumulated
        clip=settings.clip if recipe.comm.name == "allreduce" else None,
        compute=compute,
        release=GradientRelease(model, optimizer, tensor.see_gradient) if recipe.optim.release_gradients else None,
        graph=settings.graph,
    )

    # called for each record, because removed TT ranks change the sizes
    def model_stats() -> dict[str, Any]:
        weights = list(model.parameters())
        return {
            "num_parameters": sum(p.numel() for p in weights),
            "weight_bytes": sum(to_local(p).nbytes for p in weights),
            "gradient_bytes": held_gradient_bytes(
                recipe, [to_local(p).nbytes for p in weights if p.requires_grad], world_size=context.world_size
            ),
        }

    return Loop(
        stepper,
        _build_batches(run, context),
        Schedule.from_recipe(settings),
        evaluate=None if data.heldout is None else partial(evaluate_heldout, run, model, context),
        checkpointer=checkpointer,
        sink=Sink(),
        memory=memory,
        energy=energy,
        model_stats=model_stats,
        fingerprint=data.info.get("fingerprint"),
        recipe=recipe.model_dump(mode="json"),
        first_phase=describe_first_step(recipe),
    )


def describe_first_step(recipe: Recipe) -> str:
    """Return why the first step of a run takes longer than later ones."""
    if recipe.train.compile:
        return "compiling the model in the first step"
    return "capturing CUDA graphs in the first steps" if recipe.train.graph else "first step"


def build_run_optimizer(recipe: Recipe, model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Build the optimizer of a run; `initial_lr` of each group is its peak rate, which the schedule scales."""
    rates = recipe.optim.rates | ({} if recipe.tensor is None else recipe.tensor.rates(recipe.optim.lr))
    groups = optimizer_groups(recipe, param_groups(model, weight_decay=recipe.optim.weight_decay, **rates))
    options = recipe.optimizer_options
    for group in groups:
        group["initial_lr"] = group.get("lr", recipe.optim.lr)
        if recipe.train.graph:  # a captured graph reads the rate from a tensor
            group["lr"] = torch.tensor(group["initial_lr"], device=device)
    if recipe.train.graph:
        options = {**options, "capturable": True}
    return build_optimizer(
        recipe.optim.name, groups, lr=recipe.optim.lr, weight_decay=recipe.optim.weight_decay, **options
    )


def _build_batches(run: ResolvedRun, context: DistContext) -> BatchSource:
    recipe, data = run.recipe, run.prepared_data
    return BatchSource(
        data.train,
        data.collate,
        # the seed is the same on all ranks: each takes its share of one global order
        Sampler(len(data.train), batch_size=recipe.batch_size, seed=recipe.train.seed, lengths=data.lengths),
        micro_batch_size=recipe.pass_size(context.world_size),
        rank=context.rank,
        world_size=context.world_size,
        workers=recipe.data.workers,
        pin_memory=context.device.type == "cuda",
    )


def build_tensor_training(recipe: Recipe) -> TensorTraining:
    """Build the merges and rank adaptation of a run's TT layers; without a section `tensor` they do nothing."""
    return TensorTraining(
        recipe.tensor,
        steps=recipe.train.steps,
        core_bytes=None if recipe.tensor is None else core_bytes(recipe),
        merges=not recipe.optim.release_gradients,
    )


_CONVERSION_SEED = 1 << 32
"""Added to the seed for conversions, so that random cores are not drawn like the weights."""


def build_run_model(run: ResolvedRun) -> Any:
    """Build the model of a run on the CPU, with its initial weights.

    Raises:
        UserError: the model does not fit the data or the recipe.
    """
    recipe, task, data = run.recipe, run.task, run.prepared_data
    model = build_model(
        recipe.model,
        task,
        vocab_size=run.sizes.vocab_size,
        seq_len=recipe.data.longest,
        config_overrides=run.sizes.config_overrides,
        seed=recipe.train.seed,
    )
    task.check_model(model, data)
    if recipe.data.document_mask and mixes_documents(model):
        raise UserError(
            f"data.document_mask: {type(model).__name__} does not keep documents apart by their position_ids; leave it "
            "out"
        )
    # own seed: the cores must not depend on how many numbers the weights drew
    with torch.random.fork_rng([]):
        torch.manual_seed(recipe.train.seed + _CONVERSION_SEED)
        return convert_model(model, recipe)


def build_exchange(recipe: Recipe, groups: Sequence[ShardGroup], context: DistContext) -> GradientExchange:
    """Build the gradient exchange between processes; without communication for a single process with allreduce.

    Args:
        recipe: of the run. An exchange of momentum clips by `train.clip`, others leave it to the step.
        groups: of a sharded model, see `shard_groups`.
        context: of this process.
    """
    section, mesh = recipe.comm, context.mesh
    demo = None
    if section.name == "demo":
        replicas = None if mesh is None else mesh[REPLICATE]
        demo = DemoExchange(clip=recipe.train.clip, process_group=replicas, **section.demo_options)
    if mesh is not None:
        return ShardedExchange(
            mesh,
            demo,
            gathers=[(group.num_bytes, group.gathers) for group in groups],
            gradient_ratio=gradient_ratio(recipe),
        )
    if demo is not None:
        return demo
    if context.world_size == 1:
        return NoExchange()
    return AllReduce(bucket_mb=section.bucket_mb, find_unused_parameters=section.find_unused_parameters)


def build_meta_model(run: ResolvedRun, context: DistContext) -> MetaModel:
    """Return the model of a run on the meta device, whose values the first process of each replica has on its CPU.

    Whole parameters and buffers have their values already. The values are those of an unsharded run. Collectives:
    `wait_for_all`, `run_on_all`, and a broadcast within the replica for each tensor.

    Raises:
        UserError: as of `build_run_model`.
    """
    assert context.mesh is not None
    group, first = context.mesh.get_group(SHARD), context.replica * context.num_shards
    values: dict[str, torch.Tensor] = {}

    def build() -> None:
        model = build_run_model(run)
        values.update({name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())})

    context.wait_for_all()  # a large model takes longer than a collective may
    context.run_on_all(build, taking_part=context.rank == first)

    def read(name: str, tensor: torch.Tensor) -> torch.Tensor:
        value = values.pop(name) if context.rank == first else torch.empty_like(tensor, device="cpu")
        if value.numel():
            # as bytes, because backends do not support every dtype
            dist.broadcast(value.contiguous().reshape(-1).view(torch.uint8), first, group=group)
        return value

    with without_warnings():
        meta = MetaModel(planned_model(run, []), read)
    meta.fill([*meta.model.buffers(), *whole_parameters(meta.model)], context.device)
    return meta


def shard_run_model(meta: MetaModel, groups: Sequence[ShardGroup], recipe: Recipe, context: DistContext) -> None:
    """Shard the groups of a model in place over the mesh of the context. Collectives: as of `build_meta_model`."""
    assert context.mesh is not None
    # an exchange of momentum averages between replicas itself
    mesh = context.mesh[SHARD] if recipe.comm.name == "demo" or context.num_replicas == 1 else context.mesh
    shard_model(meta, groups, mesh, recipe.parallel, context.device)


def _seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    # numpy accepts seeds of 32 bits only
    np.random.seed(seed % 2**32)
    random.seed(seed)
