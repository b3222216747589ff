"""Memory and FLOPs of the forward and backward passes of a step, from a trace of one micro-batch."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from scantling.errors import UserError
from scantling.numerics.device import autocast
from scantling.trainer.models.costs import Trace, forward_flops, no_packed_documents, trace_step
from scantling.trainer.planning.cache import recipe_key
from scantling.trainer.planning.resolve import ResolvedRun


@dataclass(frozen=True)
class Passes:
    """Cost of the passes of a step; None for unknown values.

    Attributes:
        forward_flops: FLOPs of the forward passes of all ranks.
        recomputed_flops: FLOPs that the backward passes of all ranks repeat because of activation checkpointing.
        activation_bytes: memory held on one rank between the two passes of a micro-batch.
        peak_bytes: peak memory of one rank, with gradients but without weights and optimizer state.
        notes: which values are unknown, and why.
    """

    forward_flops: int | None
    recomputed_flops: int | None
    activation_bytes: int | None
    peak_bytes: int | None
    notes: list[str] = field(default_factory=list)


def plan_passes(
    run: ResolvedRun,
    model: Any,
    *,
    step_bytes: int | None = None,
    gathered: int = 0,
    held: int | None = None,
    may_trace: bool = True,
) -> Passes:
    """Trace one micro-batch through the model, without allocating memory.

    From the second micro-batch on, the gradients of earlier ones are already allocated. With several processes they
    always are, because the buckets of the exchange hold them.

    Args:
        run: its recipe determines the micro-batch size and the precision, its task provides a batch and the loss.
        model: on the meta device; it cannot be used afterwards.
        step_bytes: temporary memory of one parameter's step, if it runs within the backward pass.
        gathered: memory that a sharded model gathers weights and gradients in.
        held: bytes of the gradients of a sharded model on one process.
        may_trace: False to leave the memory unknown unless the run's cache has the trace.
    """
    recipe, task, world_size = run.recipe, run.task, run.world_size
    seq_len = recipe.data.seq_len
    micro = recipe.pass_size(world_size)
    gradients_held = micro < recipe.batch_share(world_size) or world_size > 1
    if held is None:
        held = sum(p.nbytes for p in model.parameters() if p.requires_grad) if gradients_held else 0
    # before the trace, which makes the model unusable; the result is used only if the trace fails
    from_shapes = forward_flops(model, sequences=recipe.batch_size, seq_len=seq_len)

    def loss(traced: torch.nn.Module) -> torch.Tensor:
        batch = task.sample_batch(micro, recipe.data)
        # the dtype that the run would use on its device, but the traced tensors are on the CPU
        with autocast(recipe.precision.autocast(run.device), torch.device("cpu")):
            return task.loss(traced, batch).loss

    def trace_passes() -> Trace:
        # transformers would take the fake position ids for packed documents
        with nullcontext() if recipe.data.document_mask else no_packed_documents():
            return trace_step(model, loss, gradients_held=gradients_held, step_bytes=step_bytes)

    key = _trace_key(run, gradients_held=gradients_held, step_bytes=step_bytes)
    if not may_trace and key not in run.cache:
        return Passes(from_shapes, None, None, None)
    try:
        trace = run.cache.get_trace(key, trace_passes, parts=num_parts(run))
    except UserError as error:
        notes = [f"activations and peak memory are not known: {error}"]
        # only the trace counts the products that checkpointing repeats
        recomputed = None if recipe.train.activation_checkpointing else 0
        if from_shapes is None or recomputed is None:
            notes.append("FLOPs are not known: the shapes of the layers do not tell them")
        return Passes(from_shapes, recomputed, None, None, notes)
    # from one micro-batch to the batch of all ranks
    forward, recomputed = (each * recipe.batch_size // micro for each in (trace.forward_flops, trace.recomputed_flops))
    # the trace leaves out gradients that exist before it; those of a sharded model, without other micro-batches, come
    # while activations go
    is_first = bool(gathered) and micro == recipe.batch_share(world_size)
    working = max(trace.peak_bytes, trace.activation_bytes + held) if is_first else trace.peak_bytes + held
    return Passes(forward, recomputed, trace.activation_bytes, working + gathered)


def num_parts(run: ResolvedRun) -> int:
    """Return the number of parts in which the blocks of a model take the batch that passes it at a time."""
    recipe, world_size = run.recipe, run.world_size
    return -(-recipe.pass_size(world_size) // recipe.micro_batch_size(world_size))


def _trace_key(run: ResolvedRun, **options: Any) -> Hashable:
    """Return everything that the trace of a run depends on."""
    recipe, world_size = run.recipe, run.world_size
    return (
        "trace",
        recipe_key(recipe, "model", "data", "tensor", "precision"),
        repr(run.sizes),
        run.device,
        recipe.train.activation_checkpointing,
        recipe.train.loss_chunk,
        recipe.pass_size(world_size),
        num_parts(run),
        recipe.micro_batch_size(world_size),
        *options.items(),
    )
