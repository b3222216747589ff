"""The parts of a run, each built from its section of the recipe."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from scantling.comm import AllReduce, DemoExchange, GradientExchange, NoExchange
from scantling.distributed.context import DistContext
from scantling.errors import UserError
from scantling.groups import param_groups
from scantling.numerics.device import warn_if_slow_matmul
from scantling.optim.registry import build_optimizer
from scantling.precision.matmul import check_device
from scantling.trainer.data.loader import BatchSource, eval_batches
from scantling.trainer.data.sampler import Sampler
from scantling.trainer.models.build import build_model, checkpoint_activations, convert_model, mixes_documents
from scantling.trainer.planning.memory import core_bytes, held_gradient_bytes
from scantling.trainer.planning.momentum import optimizer_groups
from scantling.trainer.recipe import Recipe
from scantling.trainer.recipe.schema import CommSection, TrainSection
from scantling.trainer.tasks.base import Task, TaskData
from scantling.trainer.training.checkpoint import Checkpointer
from scantling.trainer.training.evaluate import evaluate
from scantling.trainer.training.loop import Loop, Schedule
from scantling.trainer.training.meters import EnergyMeter, MemoryMeter
from scantling.trainer.training.methods import Method
from scantling.trainer.training.release import GradientRelease
from scantling.trainer.training.schedule import lr_factor
from scantling.trainer.training.sinks import Sink
from scantling.trainer.training.step import Stepper


def build_loop(
    recipe: Recipe,
    task: Task,
    data: TaskData,
    context: DistContext,
    checkpointer: Checkpointer,
    *,
    memory: MemoryMeter,
    energy: EnergyMeter,
) -> Loop:
    """Model, optimizer, exchange, batches and schedule from their sections, as one loop at step 0."""
    settings = recipe.train
    check_device(recipe.precision.compute, context.device)
    if context.rank == 0:
        autocast = recipe.precision.autocast(context.device.type)
        warn_if_slow_matmul(autocast, context.device, "set precision.compute: fp32")
    methods = build_methods(recipe)
    model = build_run_model(recipe, task, data, methods).to(context.device)
    for method in methods:
        method.attach(model)
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    if settings.compile:
        model.compile()
    optimizer = build_run_optimizer(recipe, model, context.device)
    _seed_generators(settings.seed + 1 + context.rank)  # dropout differs between ranks, weights do not
    looks = [method.see_gradient for method in methods]
    release = GradientRelease(model, optimizer, looks) if recipe.optim.release_gradients else None
    stepper = Stepper(
        model,
        task,
        optimizer,
        build_exchange(recipe.comm, context, settings.clip),
        context,
        methods=methods,
        clip=settings.clip if recipe.comm.name == "allreduce" else None,
        compute=recipe.precision.autocast(context.device.type),
        release=release,
        graph=settings.graph,
    )

    def facts() -> dict[str, Any]:
        weights = list(model.parameters())
        return {
            "num_parameters": sum(p.numel() for p in weights),
            "weight_bytes": sum(p.nbytes for p in weights),
            "gradient_bytes": held_gradient_bytes(recipe, weights, world_size=context.world_size),
        }

    held_out = None if data.heldout is None else partial(run_evaluation, recipe, model, task, data, context)
    return Loop(
        stepper,
        _batches(recipe, data, context),
        lr_schedule(settings),
        evaluate=held_out,
        checkpointer=checkpointer,
        sink=Sink(),
        memory=memory,
        energy=energy,
        facts=facts,
    )


def build_run_optimizer(recipe: Recipe, model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of a run, whose groups know the rate that a schedule multiplies as `initial_lr`."""
    rates = recipe.optim.rates | ({} if recipe.tensor is None else recipe.tensor.rates(recipe.optim.lr))
    groups = optimizer_groups(recipe, param_groups(model, weight_decay=recipe.optim.weight_decay, **rates))
    options = recipe.optim.options
    for group in groups:
        group["initial_lr"] = group.get("lr", recipe.optim.lr)
        if recipe.train.graph:
            group["lr"] = torch.tensor(group["initial_lr"], device=device)
    if recipe.train.graph:
        options = {**options, "capturable": True}
    return build_optimizer(
        recipe.optim.name, groups, lr=recipe.optim.lr, weight_decay=recipe.optim.weight_decay, **options
    )


def _batches(recipe: Recipe, data: TaskData, context: DistContext) -> BatchSource:
    return BatchSource(
        data.train,
        data.collate,
        Sampler(len(data.train), batch_size=recipe.batch_size, seed=recipe.train.seed, lengths=data.lengths),
        micro_batch_size=recipe.micro_batch_size(context.world_size),
        rank=context.rank,
        world_size=context.world_size,
        workers=recipe.data.workers,
        pin_memory=context.device.type == "cuda",
    )


def lr_schedule(settings: TrainSection) -> Schedule:
    """Return when what happens in a run, as its recipe says."""
    factor = partial(
        lr_factor,
        steps=settings.steps,
        schedule=settings.schedule,
        warmup=settings.warmup,
        decay=settings.decay,
        min_ratio=settings.min_lr_ratio,
    )
    return Schedule(
        steps=settings.steps,
        lr_factor=factor,
        eval_every=settings.eval_every,
        checkpoint_every=settings.checkpoint_every,
    )


def build_methods(recipe: Recipe) -> list[Method]:
    """The methods that take part in a run."""
    if recipe.tensor is None:
        return []
    from scantling.trainer.training.tensor import TensorMethod

    return [
        TensorMethod(
            recipe.tensor,
            steps=recipe.train.steps,
            core_bytes=core_bytes(recipe),
            merges=not recipe.optim.release_gradients,
        )
    ]


_OF_METHODS = 1 << 32
"""Added to the seed for what methods draw, such as cores, so that they do not draw what the weights did."""


def build_run_model(recipe: Recipe, task: Task, data: TaskData, methods: Sequence[Method] = ()) -> Any:
    """The model of a run on the CPU, with the weights it starts from."""
    model = build_model(
        recipe.model,
        task,
        vocab_size=data.vocab_size,
        seq_len=recipe.data.longest,
        config_overrides=task.config_overrides(data),
        seed=recipe.train.seed,
    )
    task.check_model(model, data)
    if recipe.data.document_mask and mixes_documents(model):
        raise UserError(
            f"data.document_mask: {type(model).__name__} does not keep documents apart by their position_ids; leave it "
            "out"
        )
    with torch.random.fork_rng([]):
        torch.manual_seed(recipe.train.seed + _OF_METHODS)
        model = convert_model(model, recipe)
        for method in methods:
            model = method.prepare(model)
    return model


def run_evaluation(
    recipe: Recipe, model: torch.nn.Module, task: Task, data: TaskData, context: DistContext
) -> dict[str, float]:
    """The held-out metrics of a model. Collectives: those of `evaluate`."""
    if data.heldout is None:
        raise UserError("nothing is held out: data.heldout is 0 and data.validation is not given")
    batches = eval_batches(
        data.heldout,
        data.collate,
        recipe.micro_batch_size(context.world_size),
        rank=context.rank,
        world_size=context.world_size,
        max_samples=recipe.train.eval_samples,
        workers=0,
    )
    return evaluate(model, task, data, batches, context, compute=recipe.precision.autocast(context.device.type))


def build_exchange(section: CommSection, context: DistContext, clip: float | None) -> GradientExchange:
    """What the processes exchange; gradients are left as they are where there is only one.

    Args:
        clip: largest norm of a gradient; an exchange of momentum clips by it, others leave it to the step.
    """
    if section.name == "demo":
        return DemoExchange(clip=clip, **section.demo_options)
    if context.world_size == 1:
        return NoExchange()
    return AllReduce(bucket_mb=section.bucket_mb, find_unused_parameters=section.find_unused_parameters)


def _seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
