"""Merging of the cores of equally shaped layers together, with one batched product per bond.

A layer merges its cores in several small products, each with a backward pass of two. On a GPU, and for small layers on
a CPU, launching them takes longer than computing them. So layers whose cores have equal shapes form a class. In each
forward pass of the model, the first call of a layer of a class merges the blocks of all its layers: their cores are
stacked, (layers, r, modes..., r'), and `torch.bmm` multiplies the stacks. The gradients of the cores come from stacked
products, too.

The parameters stay those of the layers, and nothing is kept beyond a pass. The layers of a class that are called
with another contraction order, because they have other token counts, are merged for that order in the same way. The
composition of the stacks depends on the model and on its calls alone, so that a resumed run repeats the same rounding.
Cores of layers that were not used get no gradient; under `torch.compile`, they get zeros. Layers are merged one by one
inside `torch.func`, without gradients, in compiled code on a CPU, if their cores are sharded, and if blocks are so
large that stacking saves nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scantling.numerics.device import without_autocast
from scantling.numerics.torch_private import fsdp_managed_modules, is_in_functorch, remove_forward_hooks
from scantling.tensor.contraction import Tree, block_numel, merge_block
from scantling.tensor.layer import TTLayer, running, scale_cores, without_saving_hooks

MAX_NUMEL_CPU = 1 << 17
"""Elements in the blocks of a layer from which stacking is slower on a CPU: copying the gradients of the blocks then
takes longer than launching the products. With one thread of an AVX-512 CPU, stacks take 0.6 times as long at 15
thousand elements (256 x 256, rank 30), 1.0 at 46 thousand, 1.1 at 131 thousand, 1.2 at 524 thousand.
"""
MAX_NUMEL = 1 << 22
"""The same on a GPU, where such a product takes longer than its launch."""


def stack_equal_layers(model: nn.Module) -> None:
    """Let equally shaped TT layers merge their cores together in each forward pass of a model, if it has any."""
    merge_alone(model)
    # A layer of two cores, one for inputs and one for outputs, has nothing to merge.
    if sum(isinstance(layer, TTLayer) and len(layer.cores) > 2 for layer in model.modules()) < 2:
        return
    model.register_forward_pre_hook(_begin_pass)
    model.register_forward_hook(_end_pass, always_call=True)


def merge_alone(model: nn.Module) -> None:
    """Undo `stack_equal_layers`."""
    remove_forward_hooks(model, (_begin_pass, _end_pass))


def _begin_pass(model: nn.Module, _: Any) -> None:
    running.passes.append(MergingPass(model))


def _end_pass(model: nn.Module, *_: Any) -> None:
    running.passes.pop()


class MergingPass:
    """Forward pass of a model, with the blocks merged in it.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._classes: dict[TTLayer, list[TTLayer]] | None = None
        self._called: set[TTLayer] = set()
        self._blocks: dict[TTLayer, dict[Tree, Tensor]] = {}
        self._is_compiled = torch.compiler.is_compiling()
        if self._is_compiled and torch.is_grad_enabled():
            self._merge_for_compiler()

    def blocks(self, layer: TTLayer, trees: Sequence[Tree]) -> list[Tensor] | None:
        """Return the merged blocks of a layer; None if no other layer is merged with it.

        Args:
            layer: layer that is called.
            trees: merge orders of its blocks.
        """
        if torch.compiler.is_compiling() and not self._is_compiled:
            return None  # a compiled part of a model: its graph must not depend on this pass
        if not self._is_compiled:
            self._merge_missing(layer, trees)
        own = self._blocks.get(layer, {})
        return [own[tree] for tree in trees] if all(tree in own for tree in trees) else None

    def _merge_missing(self, layer: TTLayer, trees: Sequence[Tree]) -> None:
        """Merge the blocks of a layer that are missing together with those of all equal layers, if it has any."""
        if self._classes is None:
            self._classes = _equal_layers(self._model)
        own = self._blocks.get(layer, {})
        if not all(tree in own for tree in trees):
            # Layers called before had another order.
            members = [one for one in self._classes.get(layer, ()) if one is layer or one not in self._called]
            if len(members) > 1 and _can_stack(layer, trees):
                self._merge(members, trees)
        self._called.add(layer)

    def _merge(self, layers: Sequence[TTLayer], trees: Sequence[Tree]) -> None:
        if not trees:
            return
        for layer, blocks in zip(layers, merge_stacked(layers, trees), strict=True):
            self._blocks.setdefault(layer, {}).update(zip(trees, blocks, strict=True))

    def _merge_for_compiler(self) -> None:
        """Merge the blocks of all orders before the first layer: in compiled code, checkpoints must not change it.

        Smaller blocks are parts of larger ones, so that this takes hardly more products than one order.
        """
        for layer, members in _equal_layers(self._model).items():
            if layer is members[0] and len(members) > 1:
                orders = [trees for trees in layer.orders_to_merge if _can_stack(layer, trees)]
                self._merge(members, list(dict.fromkeys(tree for trees in orders for tree in trees)))


def _can_stack(layer: TTLayer, trees: Sequence[Tree]) -> bool:
    """True if stacked products can merge these blocks and save time."""
    if all(isinstance(tree, int) for tree in trees) or _is_in_transform():
        return False
    return block_numel(layer.network, trees) < _max_numel(layer.log_gain.device)


def _max_numel(device: torch.device) -> int:
    """Return the number of elements in the blocks of a layer from which stacking saves no time."""
    if device.type != "cpu":
        return MAX_NUMEL
    # Compiled code for a CPU launches products quickly: steps take 1.04 times as long with stacks (width 256).
    return 0 if torch.compiler.is_compiling() else MAX_NUMEL_CPU


def _is_in_transform() -> bool:
    """True inside `torch.func`, which does not support the custom function of stacks."""
    return not torch.compiler.is_compiling() and is_in_functorch()


def _equal_layers(model: nn.Module) -> dict[TTLayer, list[TTLayer]]:
    """Return the layers that can be merged together, by each of them."""
    modules = list(model.modules())
    layers = [module for module in modules if isinstance(module, TTLayer)]
    # `fully_shard` expects the gradients of a block at the end of the block's backward pass.
    if any(hasattr(module, "unshard") for module in modules):
        managed = fsdp_managed_modules(model)
        layers = [layer for layer in layers if layer.cores not in managed]
    classes: dict[Hashable, list[TTLayer]] = {}
    for layer in layers:
        parts = layer.parts
        if all(type(part) is not DTensor and part.numel() for part in parts):
            key = [(part.shape, part.dtype, part.device, part.requires_grad) for part in parts]
            classes.setdefault((*key, layer.threshold, layer.formats), []).append(layer)
    return {layer: members for members in classes.values() for layer in members}


def merge_stacked(layers: Sequence[TTLayer], trees: Sequence[Tree]) -> list[list[Tensor]]:
    """Return the merged blocks of each of several equal layers.

    Args:
        layers: layers with the same shapes, dtypes and rounding.
        trees: merge orders of the blocks.
    """
    first = layers[0]
    # Rounding has a scale for each core, so rounded cores are scaled one by one.
    threshold = first.threshold if first.formats is None else None
    tensors = [tensor for layer in layers for tensor in (layer.parts if layer.formats is None else layer.gated_cores())]
    arguments = trees, len(first.chain), threshold
    if torch.compiler.is_compiling():
        blocks = [block for stack in _merge(_stack(tensors, len(layers)), *arguments, 1) for block in stack.unbind()]
    else:
        blocks = _MergeStacked.apply(*arguments, len(layers), *tensors)  # type: ignore[no-untyped-call]
    return [list(blocks[i :: len(layers)]) for i in range(len(layers))]


def _stack(tensors: list[Tensor] | tuple[Tensor, ...], num_layers: int) -> list[Tensor]:
    """Return one stack of each tensor of a layer, from those of all layers in turn."""
    num_tensors = len(tensors) // num_layers
    return [torch.stack(tensors[i::num_tensors]) for i in range(num_tensors)]


def _merge(
    tensors: Sequence[Tensor], trees: Sequence[Tree], num_cores: int, threshold: float | None, num_stack_dims: int
) -> list[Tensor]:
    """Return merged blocks from cores, gain and gates; from cores scaled already if the threshold is None."""
    cores: Sequence[Tensor] = tensors[:num_cores]
    if threshold is not None:
        cores = scale_cores(cores, tensors[num_cores], tensors[num_cores + 1 :], threshold, num_stack_dims)
    done: dict[Tree, Tensor] = {}
    return [merge_block(cores, tree, num_stack_dims, done) for tree in trees]


class _MergeStacked(torch.autograd.Function):
    """Merge the blocks of several layers by stacked products: those of the first tree for each layer, and so on.

    Layers whose blocks are not used get no gradients. The parts of a graph may run backward at different times, as
    those of single layers may: stacks are attributes instead of saved tensors, which one backward pass frees.
    """

    @staticmethod
    def forward(
        ctx: Any, trees: Sequence[Tree], num_cores: int, threshold: float | None, num_layers: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        stacks = _stack(tensors, num_layers)
        with torch.enable_grad(), without_saving_hooks():
            for stack, tensor in zip(stacks, tensors, strict=False):
                stack.requires_grad_(tensor.requires_grad)
            blocks = _merge(stacks, trees, num_cores, threshold, 1)
        ctx.set_materialize_grads(False)
        ctx.tensors, ctx.stacks, ctx.blocks = tensors, stacks, blocks
        ctx.arguments, ctx.num_layers = (trees, num_cores, threshold), num_layers
        return tuple(block for stack in blocks for block in stack.detach().unbind())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with without_autocast(ctx.tensors[0].device):
            # The stacks are copies, which have no second derivatives.
            found = _differentiable_gradients(ctx, grads) if torch.is_grad_enabled() else _gradients(ctx, grads)
        return (None,) * 4 + tuple(found)


def _gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of all tensors of all layers, from those of each block of each layer."""
    count, blocks, stacked = ctx.num_layers, [], []
    for i, block in enumerate(ctx.blocks):
        own = grads[i * count : (i + 1) * count]
        if any(grad is not None for grad in own):
            blocks.append(block)
            stacked.append(torch.stack([torch.zeros_like(block[0]) if grad is None else grad for grad in own]))
    trained = [stack for stack in ctx.stacks if stack.requires_grad]
    found = iter(torch.autograd.grad(blocks, trained, stacked, retain_graph=True, allow_unused=True))
    by_stack = [next(found) if stack.requires_grad else None for stack in ctx.stacks]
    is_used = [any(grad is not None for grad in grads[i::count]) for i in range(count)]
    return [stack[i] if is_used[i] and stack is not None else None for i in range(count) for stack in by_stack]


def _differentiable_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the same as `_gradients`, as differentiable functions of the tensors."""
    (trees, num_cores, threshold), size = ctx.arguments, len(ctx.stacks)
    tensors = [ctx.tensors[i * size : (i + 1) * size] for i in range(ctx.num_layers)]
    layers = [_merge(own, trees, num_cores, threshold, 0) for own in tensors]
    blocks = [block for tree in zip(*layers, strict=True) for block in tree]
    pairs = [(block, grad) for block, grad in zip(blocks, grads, strict=True) if grad is not None]
    trained = [tensor for tensor in ctx.tensors if tensor.requires_grad]
    found = iter(
        torch.autograd.grad(
            [block for block, _ in pairs], trained, [grad for _, grad in pairs], create_graph=True, allow_unused=True
        )
    )
    return [next(found) if tensor.requires_grad else None for tensor in ctx.tensors]
