"""Build the parts of a run, each from its section of the recipe."""

from __future__ import annotations

import logging
import platform
import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scantling.comm import (
    AllReduce,
    DemoExchange,
    GradientExchange,
    LocalStepsExchange,
    NoExchange,
    ShardedExchange,
)
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
from scantling.trainer.models.build import (
    build_model,
    convert_model,
    mixes_documents,
    probe_model,
    read_values,
    reads_weights,
)
from scantling.trainer.models.checkpointing import checkpoint_activations
from scantling.trainer.models.sharding import (
    ShardGroup,
    gradient_ratio,
    reshard,
    shard_groups,
    shard_model,
    whole_parameters,
)
from scantling.trainer.models.values import MetaModel, Read, drawn_values
from scantling.trainer.planning.machine import host_memory
from scantling.trainer.planning.memory import core_bytes, held_gradient_bytes, reads_one_by_one, replicas_here
from scantling.trainer.planning.momentum import optimizer_groups
from scantling.trainer.planning.planned_model import planned_model
from scantling.trainer.planning.resolve import ResolvedRun
from scantling.trainer.planning.traffic import chosen_comm
from scantling.trainer.recipe import Recipe
from scantling.trainer.reporting.format import format_bytes
from scantling.trainer.tasks.chunked_loss import check_same_loss
from scantling.trainer.training.checkpoint import Checkpointer
from scantling.trainer.training.elastic import ElasticReplicas
from scantling.trainer.training.evaluate import evaluate_heldout
from scantling.trainer.training.loop import Loop
from scantling.trainer.training.meters import EnergyMeter, MemoryMeter
from scantling.trainer.training.schedule import Schedule
from scantling.trainer.training.sinks import Sink
from scantling.trainer.training.step import GradientRelease, Stepper
from scantling.trainer.training.tensor_training import TensorTraining

logger = logging.getLogger(__name__)


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
    meta = build_meta_model(run, context)
    model = build_run_model(run).to(context.device) if meta is None else meta.model
    # rank gates are parameters, so they come before the optimizer
    tensor = build_tensor_training(recipe)
    tensor.attach(model)
    if settings.activation_checkpointing:
        checkpoint_activations(model, settings.activation_checkpointing)
        if recipe.accumulates_in_blocks(context.world_size):
            checkpoint_in_parts(model, recipe.micro_batch_size(context.world_size))
    groups = [] if context.mesh is None else shard_groups(model, recipe.parallel)
    elastic = ElasticReplicas(recipe.comm.timeout) if recipe.comm.elastic else None
    exchange = build_exchange(run, groups, context, elastic)
    if meta is not None and context.mesh is not None:
        shard_run_model(meta, groups, recipe, context)
    if meta is not None and not meta.is_probed:
        _probe_run_model(run, model)
    if settings.compile:
        # compile in place: `torch.compile(model)` would prefix the names of the parameters
        model.compile()
    optimizer = build_run_optimizer(recipe, model, context.device)
    # dropout differs between processes, weights do not
    own = context.rank if elastic is None else zlib.crc32(f"{platform.node()} {checkpointer.folder}".encode())
    _seed_generators(settings.seed + 1 + own)
    stepper = Stepper(
        model,
        run.task,
        optimizer,
        exchange,
        context,
        tensor=tensor,
        # DeMo clips each process's gradient itself, before it is accumulated
        clip=settings.clip if recipe.comm.name != "demo" else None,
        compute=compute,
        batch_weights=recipe.batch_weights(context.world_size),
        release=GradientRelease(model, optimizer, tensor.see_gradient) if recipe.optim.release_gradients else None,
        graph=settings.graph,
    )

    # called for each record, because removed TT ranks change the sizes
    def model_stats() -> dict[str, Any]:
        budget = recipe.comm.budget_bytes
        weights = list(model.parameters())
        return {
            "num_parameters": sum(p.numel() for p in weights),
            "weight_bytes": sum(to_local(p).nbytes for p in weights),
            "gradient_bytes": held_gradient_bytes(
                recipe, [to_local(p).nbytes for p in weights if p.requires_grad], world_size=context.world_size
            ),
            **({} if budget is None else {"wire_budget_bytes": budget}),
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
        elastic=elastic,
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
        weights=recipe.batch_weights(context.world_size),
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
        waits_for_replicas=not recipe.comm.keeps_replicas_equal,
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
    _check_documents(recipe, model)
    # own seed: the cores must not depend on how many numbers the weights drew
    with torch.random.fork_rng([]):
        torch.manual_seed(recipe.train.seed + _CONVERSION_SEED)
        return convert_model(model, recipe)


def build_exchange(
    run: ResolvedRun, groups: Sequence[ShardGroup], context: DistContext, elastic: ElasticReplicas | None = None
) -> GradientExchange:
    """Build the gradient exchange between processes; without communication for a single process with allreduce.

    Args:
        run: the run. An exchange of momentum clips by `train.clip`, in proportion to the process's share of the batch;
            others leave it to the step.
        groups: of a sharded model, see `shard_groups`.
        context: of this process.
        elastic: replicas that leave and join; None if they stay.
    """
    recipe, section, mesh = run.recipe, chosen_comm(run), context.mesh
    replicas = elastic.group if elastic is not None else None if mesh is None else mesh[REPLICATE]
    between: GradientExchange | None = None
    if section.name == "demo":
        weights = recipe.batch_weights(context.world_size)
        # times the average share of a replica in the gradient
        share = context.world_size * weights[context.rank] / sum(weights)
        clip = None if recipe.train.clip is None else share * recipe.train.clip
        shares = recipe.parallel.batch_shares
        between = DemoExchange(clip=clip, batch_shares=shares, process_group=replicas, **section.demo_options)
    elif section.name != "allreduce":
        method, outer, options = section.local_options
        outer = {**outer, "batch_shares": recipe.parallel.batch_shares}
        changes_ranks = recipe.tensor is not None and recipe.tensor.size_target is not None
        between = LocalStepsExchange(
            method, process_group=replicas, outer=outer, options=options, changes_ranks=changes_ranks
        )
    if mesh is not None:
        return ShardedExchange(
            mesh,
            between,
            gathers=[(group.num_bytes, group.gathers) for group in groups],
            gradient_ratio=gradient_ratio(recipe),
        )
    if between is not None:
        return between
    if context.world_size == 1:
        return NoExchange()
    return AllReduce(bucket_mb=section.bucket_mb, find_unused_parameters=section.find_unused_parameters)


def _check_documents(recipe: Recipe, model: Any) -> None:
    if recipe.data.document_mask and mixes_documents(model):
        raise UserError(
            f"data.document_mask: {type(model).__name__} does not keep documents apart by their position_ids; leave it "
            "out"
        )


def _probe_run_model(run: ResolvedRun, model: Any) -> None:
    """Check the outputs of a model that has got its values one by one. Collectives: its own, if it is sharded.

    Raises:
        UserError: as of `build_run_model`.
    """
    run.task.check_model(model, run.prepared_data)
    probe_model(model, run.task)
    _check_documents(run.recipe, model)
    if run.recipe.train.loss_chunk is not None:
        check_same_loss(model)
    reshard(model)


def build_meta_model(run: ResolvedRun, context: DistContext) -> MetaModel | None:
    """Return the model of a run on the meta device; None if the process builds it as a whole by `build_run_model`.

    A sharded model gets its values from the first process of each replica. This reads stored weights one by one, as
    does a process that rounds them to bf16, and builds a model with random weights or TT layers as a whole on its CPU.
    If the machine has too little memory for that, each weight is drawn with a seed of its own; else the values are
    those of an unsharded run. Buffers have their values already, and so have whole parameters of a sharded model, and
    all of another one.

    Collectives: gathers; for a sharded model also `wait_for_all`, `run_on_all`, and a broadcast within the replica for
    each tensor.

    Raises:
        UserError: as of `build_run_model`, or the machine has too little memory.
    """
    with without_warnings():
        meta = _values_one_by_one(run, context)
        if meta is None and context.mesh is not None:
            meta = MetaModel(planned_model(run, []), _from_first(_whole_values(run, context), context))
    if meta is not None:
        params = meta.model.parameters() if context.mesh is None else whole_parameters(meta.model)
        meta.fill([*meta.model.buffers(), *params], context.device)
    return meta


def _values_one_by_one(run: ResolvedRun, context: DistContext) -> MetaModel | None:
    """Return a model whose values are read or drawn one by one; None if it is built as a whole."""
    recipe, machine = run.recipe, host_memory()
    dense = replace(run, recipe=recipe.model_copy(update={"tensor": None}))
    model, is_stored = planned_model(dense, [], buffers=True), reads_weights(recipe.model)
    # in fp32
    needed = 4 * sum(param.numel() for param in model.parameters()) * replicas_here(context.num_shards)
    exceeds = any(context.all_gather_object(machine is not None and needed > machine.available))
    if not exceeds and not reads_one_by_one(recipe, context.num_shards):
        return None
    read: Read | None = None

    def find() -> None:
        nonlocal read
        read = read_values(model, recipe.model) if is_stored else drawn_values(model, recipe.train.seed)

    if recipe.tensor is None:
        context.run_on_all(find, taking_part=_is_first(context))
    if read is not None and exceeds and not is_stored and context.is_rank0:
        logger.warning(
            "the whole model does not fit into the memory of this machine, so each weight is drawn with a seed of its "
            "own; on a machine with more memory the same train.seed gives other weights"
        )
    if any(context.all_gather_object(read is not None)):
        return MetaModel(model, _from_first(read, context), is_probed=False)
    if machine is not None and needed > machine.total + machine.swap:
        why = "tensor converts the whole model" if recipe.tensor else "they are stored in another form"
        raise UserError(
            f"the model needs {format_bytes(needed)} to be built, and this machine has {format_bytes(machine.total)}; "
            f"its weights cannot be read one by one, because {why}"
        )
    return None


def _whole_values(run: ResolvedRun, context: DistContext) -> Read:
    """Build the whole model on the first process of each replica; return the reader of its values."""
    values: dict[str, torch.Tensor] = {}

    def build() -> None:
        model = build_run_model(run)
        values.update({name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())})

    context.wait_for_all()  # a large model takes longer than a collective may
    context.run_on_all(build, taking_part=_is_first(context))
    return lambda name, _: values.pop(name)


def _is_first(context: DistContext) -> bool:
    """Return True for the process that gives the others of its replica their weights."""
    return context.rank % context.num_shards == 0


def _from_first(read: Read | None, context: DistContext) -> Read:
    """Return a reader whose values the first process of each replica reads; without a mesh it is `read` itself."""
    if context.mesh is None:
        assert read is not None
        return read
    group, first = context.mesh.get_group(SHARD), context.replica * context.num_shards

    def receive(name: str, tensor: torch.Tensor) -> torch.Tensor:
        value = torch.empty_like(tensor, device="cpu")
        if context.rank == first:
            assert read is not None
            value = read(name, tensor)
        if value.numel():
            # as bytes, because backends do not support every dtype
            dist.broadcast(value.contiguous().reshape(-1).view(torch.uint8), first, group=group)
        return value

    return receive


def shard_run_model(meta: MetaModel, groups: Sequence[ShardGroup], recipe: Recipe, context: DistContext) -> None:
    """Shard the groups of a model in place over the mesh of the context. Collectives: as of `build_meta_model`."""
    assert context.mesh is not None
    # other exchanges average between replicas themselves
    mesh = context.mesh[SHARD] if recipe.comm.name != "allreduce" or context.num_replicas == 1 else context.mesh
    shard_model(meta, groups, mesh, recipe.parallel, context.device)


def _seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    # numpy accepts seeds of 32 bits only
    np.random.seed(seed % 2**32)
    random.seed(seed)
