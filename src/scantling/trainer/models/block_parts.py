"""Activation checkpointing of blocks that pass a batch part by part, so that each parameter gets its gradient once.

Gradient accumulation repeats the whole model for each micro-batch, and keeps the gradients of all parameters until the
last one. Here the whole batch passes one block after the other, and each block takes it in parts: it stores its input
alone, and in the backward pass it repeats its forward pass for a part, computes the gradients of the part, and adds
them up. When it is done, the gradients of its parameters are complete and can be released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scantling.numerics.torch_private import tree_flatten, tree_unflatten
from scantling.tensor.layer import without_saving_hooks


def checkpoint_in_parts(model: nn.Module, size: int) -> None:
    """Let the checkpointed blocks of a model pass a batch in parts.

    Args:
        model: model of transformers with activation checkpointing; changed in place.
        size: sequences of a part.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module._gradient_checkpointing_func = partial(_run, module, size)


def _run(module: nn.Module, size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)` for a batch, computed in parts."""
    # the hidden states come first; options are in the partial function
    options = dict(function.keywords) if isinstance(function, partial) else {}
    plain = partial(function.func, *function.args) if isinstance(function, partial) else function
    leaves, tree = tree_flatten((args, options))
    params = [param for param in module.parameters() if param.requires_grad]
    call = _Call(plain, leaves, tree, size, len(args[0]))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    outputs = _Parts.apply(call, len(tensors), *tensors, *params)  # type: ignore[no-untyped-call]
    return call.result(outputs)


class _Call:
    """A call of a block.

    Args:
        function: the forward pass of the block.
        leaves, tree: its arguments, flattened.
        size: sequences of a part.
        batch: sequences of the batch; tensors whose first dim has another length belong to every part.
    """

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any], tree: Any, size: int, batch: int) -> None:
        self._function, self._tree = function, tree
        self._others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self._batch = batch
        self.starts = range(0, batch, size)
        self._size = size
        self._outputs: tuple[list[Any], Any] = [], None

    def slice_batch(self, tensors: Sequence[Tensor], start: int) -> list[Tensor]:
        """Return the sequences of a part, from the first one on, of each tensor that has the whole batch."""
        stop = start + self._size
        return [each[start:stop] if each.ndim and len(each) == self._batch else each for each in tensors]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs for a part, flattened."""
        given = iter(tensors)
        leaves = [next(given) if own else other for own, other in zip(self._is_tensor, self._others, strict=True)]
        args, options = tree_unflatten(leaves, self._tree)
        outputs, tree = tree_flatten(self._function(*args, **options))
        self._outputs = [None if isinstance(each, Tensor) else each for each in outputs], tree
        self._is_output = [isinstance(each, Tensor) for each in outputs]
        # one row for all sequences, such as a position bias, becomes one for each, so that parts can be joined
        count = max((len(each) for each in outputs if isinstance(each, Tensor)), default=1)
        return [
            each.expand(count, *each.shape[1:]) if len(each) == 1 else each
            for each in outputs
            if isinstance(each, Tensor)
        ]

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return the outputs in the form in which the block returns them."""
        given, (others, tree) = iter(tensors), self._outputs
        leaves = [next(given) if own else other for own, other in zip(self._is_output, others, strict=True)]
        return tree_unflatten(leaves, tree)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        device = tensors[0].device
        ctx.call, ctx.count, ctx.states = call, count, []
        ctx.autocast = _current_autocast(device.type)
        found: list[list[Tensor]] = []
        for start in call.starts:
            ctx.states.append(_random_state(device))
            found.append(call(call.slice_batch(tensors[:count], start)))
        ctx.save_for_backward(*tensors)
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        tensors = ctx.saved_tensors
        inputs, params = tensors[: ctx.count], tensors[ctx.count :]
        wanted = ctx.needs_input_grad[2 : 2 + ctx.count]
        sums: list[Tensor | None] = [None] * len(params)
        # gradients of inputs: of each part for those with a part for each sequence, and a sum for others
        of_inputs: list[list[Tensor]] = [[] for _ in inputs]
        device = inputs[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for start, state in zip(call.starts, ctx.states, strict=True):
                _set_random_state(device, state)
                part = [
                    each.detach().requires_grad_(needed)
                    for each, needed in zip(call.slice_batch(inputs, start), wanted, strict=True)
                ]
                # a plan counts products inside saving hooks, as those of a checkpoint, as recomputed
                with torch.enable_grad(), ctx.autocast(), without_saving_hooks():
                    outputs = call(part)
                pairs = [
                    (output, grad)
                    for output, grad in zip(outputs, call.slice_batch(grads, start), strict=True)
                    if output.requires_grad
                ]
                sources = [each for each in part if each.requires_grad]
                found = torch.autograd.grad(
                    [output for output, _ in pairs],
                    [*sources, *params],
                    [grad for _, grad in pairs],
                    allow_unused=True,
                )
                of_sources = iter(found[: len(sources)])
                for own, each in zip(of_inputs, part, strict=True):
                    if each.requires_grad:
                        grad = next(of_sources)
                        own.append(torch.zeros_like(each) if grad is None else grad)
                for index, grad in enumerate(found[len(sources) :]):
                    if grad is not None:
                        total = sums[index]
                        sums[index] = grad if total is None else total.add_(grad)
        return None, None, *(_join(own, each) for own, each in zip(of_inputs, inputs, strict=True)), *sums


def _join(grads: Sequence[Tensor], whole: Tensor) -> Tensor | None:
    """Return the gradient of an input from those of the parts; None if it needs none."""
    if not grads:
        return None
    if sum(len(grad) for grad in grads) == len(whole):
        return torch.cat(list(grads))
    return torch.stack(list(grads)).sum(0)


def _current_autocast(device_type: str) -> Callable[[], Any]:
    """Return a function that makes the context of the current autocast."""
    return partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


def _random_state(device: torch.device) -> tuple[Tensor, ...]:
    cpu = torch.get_rng_state()
    return (cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (cpu,)


def _set_random_state(device: torch.device, state: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
