"""Merging of the cores of equally shaped layers together, with one batched product per bond.

A layer merges its cores in several small products, each with a backward pass of two. On a GPU, and for small layers on
a CPU, launching them takes longer than computing them. So layers whose cores have equal shapes form a class. In each
forward pass of the model, the first call of a layer of a class merges the blocks of all its layers: their cores are
stacked, (layers, r, modes..., r'), and `torch.bmm` multiplies the stacks. The gradients of the cores come from stacked
products, too.

Where a launch costs more than it computes (see `costs.py`), layers whose ranks differ, as after the removal of ranks,
form one class, too: their cores are padded with zeros to the largest ranks of the class.

The parameters stay those of the layers, and nothing is kept beyond a pass. The layers of a class that are called
with another contraction order, because they have other token counts, are merged for that order in the same way. The
composition of the stacks depends on the model and on its calls alone, so that a resumed run repeats the same rounding.
Cores of layers that were not used get no gradient; under `torch.compile`, they get zeros. Layers are merged one by one
inside `torch.func` and forward-mode differentiation, without gradients, in compiled code on a CPU, if their cores are
sharded, and if blocks are so large that stacking saves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scantling.numerics.device import is_capturing, keep_for_replays, without_autocast
from scantling.numerics.torch_private import (
    fsdp_managed_modules,
    is_in_dispatch_mode,
    is_in_transform,
    remove_forward_hooks,
)
from scantling.tensor.contraction import Tree, block_ends, block_numel, merge_block, pad_to
from scantling.tensor.launches import are_plain
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
        # By the first and last core: layers of other ranks would merge a block in another order.
        self._blocks: dict[TTLayer, dict[tuple[int, int], Tensor]] = {}
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
        own, ends = self._blocks.get(layer, {}), [block_ends(tree) for tree in trees]
        return [own[block] for block in ends] if own.keys() >= set(ends) else None

    def _merge_missing(self, layer: TTLayer, trees: Sequence[Tree]) -> None:
        """Merge the blocks of a layer that are missing together with those of all equal layers, if it has any."""
        if self._classes is None:
            self._classes = _equal_layers(self._model)
        if not self._blocks.get(layer, {}).keys() >= {block_ends(tree) for tree in trees}:
            # Layers called before had another order.
            members = [one for one in self._classes.get(layer, ()) if one is layer or one not in self._called]
            if len(members) > 1 and _can_stack(layer, trees):
                self._merge(members, trees)
        self._called.add(layer)

    def _merge(self, layers: Sequence[TTLayer], trees: Sequence[Tree]) -> None:
        if not trees:
            return
        for layer, blocks in zip(layers, merge_stacked(layers, trees), strict=True):
            self._blocks.setdefault(layer, {}).update(zip(map(block_ends, trees), blocks, strict=True))

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
    """True inside `torch.func` and forward-mode differentiation, which do not support the function of stacks."""
    return not torch.compiler.is_compiling() and is_in_transform()


def _equal_layers(model: nn.Module) -> dict[TTLayer, list[TTLayer]]:
    """Return the layers that can be merged together, by each of them."""
    modules = list(model.modules())
    layers = [module for module in modules if isinstance(module, TTLayer)]
    # `fully_shard` expects the gradients of a block at the end of the block's backward pass.
    if any(hasattr(module, "unshard") for module in modules):
        managed = fsdp_managed_modules(model)
        layers = [layer for layer in layers if layer.cores not in managed]
    classes: dict[Hashable, dict[tuple[int, ...], list[TTLayer]]] = {}
    for layer in layers:
        parts = layer.parts
        if all(type(part) is not DTensor and part.numel() for part in parts):
            key = [(part.dtype, part.device, part.requires_grad) for part in parts]
            kind = (*key, type(layer), *layer.mode_shapes(), layer.threshold, layer.formats)
            classes.setdefault(kind, {}).setdefault(layer.ranks, []).append(layer)
    found = [members for by_ranks in classes.values() for members in _join_ranks(list(by_ranks.values()))]
    return {layer: members for members in found for layer in members}


def _join_ranks(classes: list[list[TTLayer]]) -> list[list[TTLayer]]:
    """Return classes of layers that differ in ranks alone as one class, if merging it takes less time on the device."""
    if len(classes) == 1:
        return classes
    largest, num_layers = _largest(layer.ranks for layer, *_ in classes), sum(map(len, classes))
    apart: float = sum(members[0].merging_cost(members[0].ranks, len(members)) for members in classes)
    together: float = max(layer.merging_cost(largest, num_layers) for layer, *_ in classes)
    return [list(chain.from_iterable(classes))] if together < apart else classes


def _largest(ranks: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the largest rank of each bond."""
    return tuple(map(max, zip(*ranks, strict=True)))


def merge_stacked(layers: Sequence[TTLayer], trees: Sequence[Tree]) -> list[list[Tensor]]:
    """Return the merged blocks of each of several layers, with padded ranks.

    Args:
        layers: layers with the same modes, dtypes and rounding.
        trees: merge orders of the blocks.
    """
    first = layers[0]
    # Rounding has a scale for each core, so rounded cores are scaled one by one.
    threshold = first.threshold if first.formats is None else None
    tensors = [tensor for layer in layers for tensor in (layer.parts if layer.formats is None else layer.gated_cores())]
    ranks = [layer.padded_ranks for layer in layers]
    merge = _Merge(
        *(tuple(trees), len(first.chain), threshold, _largest(layer.ranks for layer in layers), _largest(ranks)),
        {} if torch.compiler.is_compiling() else _kept_paddings(layers),
    )
    if torch.compiler.is_compiling():
        blocks = _split(merge.stacked(merge.stack(tensors, len(layers))), merge.trees, ranks)
    else:
        blocks = _MergeStacked.apply(merge, ranks, *tensors)  # type: ignore[no-untyped-call]
    return [list(blocks[i :: len(layers)]) for i in range(len(layers))]


@dataclass(frozen=True)
class _Merge:
    """Merging of the blocks of an order.

    Attributes:
        trees: merge orders of the blocks.
        num_cores: number of cores of a layer.
        threshold: gates at or below it count as 0; None if the cores are scaled already.
        ranks: ranks of all bonds in the stacks.
        padded_ranks: ranks of all bonds at the ends of blocks.
        paddings: paddings of earlier passes.
    """

    trees: tuple[Tree, ...]
    num_cores: int
    threshold: float | None
    ranks: tuple[int, ...]
    padded_ranks: tuple[int, ...]
    paddings: Paddings

    def stack(self, tensors: Sequence[Tensor], num_layers: int) -> list[Tensor]:
        """Return one stack of each tensor of a layer, padded to `ranks`, from the tensors of all layers in turn."""
        num_tensors = len(tensors) // num_layers
        stacks = []
        for i in range(num_tensors):
            members, shape = tensors[i::num_tensors], list(tensors[i].shape)
            if i < self.num_cores:
                shape[0], shape[-1] = self.ranks[i], self.ranks[i + 1]
            elif i > self.num_cores:  # the gates follow the gain; the first one belongs to the first inner bond
                shape = [self.ranks[i - self.num_cores]]
            stacks.append(_stack_padded(members, shape, self.paddings))
        return stacks

    def stacked(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the merged blocks of all layers, from stacks of their cores, gains and gates."""
        blocks = self._blocks(tensors, 1)
        return [
            pad_to(block, (len(block), self.padded_ranks[first], *block.shape[2:-1], self.padded_ranks[last + 1]))
            for block, (first, last) in zip(blocks, map(block_ends, self.trees), strict=True)
        ]

    def alone(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the merged blocks of one layer, from its cores, gain and gates."""
        return self._blocks(tensors, 0)

    def _blocks(self, tensors: Sequence[Tensor], num_stack_dims: int) -> list[Tensor]:
        cores: Sequence[Tensor] = tensors[: self.num_cores]
        if self.threshold is not None:
            gain, *gates = tensors[self.num_cores :]
            cores = scale_cores(cores, gain, gates, self.threshold, num_stack_dims)
        done: dict[Tree, Tensor] = {}
        return [merge_block(cores, tree, num_stack_dims, done) for tree in self.trees]


def _stack_padded(tensors: Sequence[Tensor], shape: Sequence[int], paddings: Paddings) -> Tensor:
    """Return a stack of tensors of this shape; smaller ones are padded with zeros."""
    is_compiling = torch.compiler.is_compiling()
    if is_compiling or all(tensor.shape == torch.Size(shape) for tensor in tensors) or not are_plain(tensors):
        return torch.stack([pad_to(tensor, shape) for tensor in tensors])
    # Three launches, where padding each tensor takes one per tensor: tensors are joined along the dim that is padded,
    # or as a whole, with zeros at the end, and all elements are taken from there.
    dims = [i for i, size in enumerate(shape) if any(tensor.shape[i] != size for tensor in tensors)]
    if len(dims) > 1:
        flat = [tensor.reshape(-1) for tensor in tensors]
        joined = _stack_along(0, flat, [tensor.shape for tensor in tensors], shape, paddings)
        return joined.view(len(tensors), *shape)
    (dim,) = dims
    sizes = [tensor.shape[dim : dim + 1] for tensor in tensors]
    joined = _stack_along(dim, tensors, sizes, shape[dim : dim + 1], paddings)
    rows = joined.view(*joined.shape[:dim], len(tensors), shape[dim], *joined.shape[dim + 1 :])
    return rows.movedim(dim, 0)


def _stack_along(
    dim: int, tensors: Sequence[Tensor], shapes: Sequence[torch.Size], shape: Sequence[int], paddings: Paddings
) -> Tensor:
    """Return tensors one after the other along a dim, each padded with zeros.

    Args:
        dim: the dim, whose elements stand for a tensor of one of the shapes.
        tensors: tensors that differ in this dim alone.
        shapes: shape that the dim of each tensor stands for.
        shape: padded shape.
        paddings: paddings of earlier passes.
    """
    sources = _indices(_find_sources, tensors[0].device, shapes, shape, paddings)
    zeros = torch.zeros_like(tensors[0].narrow(dim, 0, 1))
    return torch.cat([*tensors, zeros], dim).index_select(dim, sources)


def _unstack(stack: Tensor, shapes: Sequence[torch.Size], paddings: Paddings) -> list[Tensor]:
    """Return the tensors of a stack without padding; contiguous, or autograd would copy each."""
    if all(shape == stack.shape[1:] for shape in shapes):
        return list(stack.unbind())
    if not are_plain([stack]):
        return [_shrink_to(row, shape).contiguous() for row, shape in zip(stack, shapes, strict=True)]
    positions = _indices(_find_positions, stack.device, shapes, stack.shape[1:], paddings)
    values = stack.reshape(-1).index_select(0, positions)
    parts = torch.split(values, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


Paddings: TypeAlias = dict[Hashable, Tensor]
"""Indices that pad the tensors of some layers, or remove the padding, see `_indices`."""


def _find_positions(shapes: Sequence[torch.Size], shape: Sequence[int], device: torch.device) -> Tensor:
    """Return where in a stack of padded tensors the elements are that are no padding: (elements) int32.

    Args:
        shapes: shape of each tensor without padding.
        shape: shape of each padded tensor.
        device: device of the result.
    """
    stack = torch.arange(len(shapes) * prod(shape), dtype=torch.int32, device=device).view(len(shapes), *shape)
    return torch.cat([_shrink_to(row, own).reshape(-1) for row, own in zip(stack, shapes, strict=True)])


def _find_sources(shapes: Sequence[torch.Size], shape: Sequence[int], device: torch.device) -> Tensor:
    """Return where the elements of a stack come from, among those of all tensors one after the other; padding comes
    from behind the last one: (elements of the stack) int32.
    """
    positions = _find_positions(shapes, shape, device)
    values = torch.arange(len(positions), dtype=torch.int32, device=device)
    sources = torch.full((len(shapes) * prod(shape),), len(positions), dtype=torch.int32, device=device)
    return sources.index_copy_(0, positions.long(), values)


def _indices(
    find: Callable[[Sequence[torch.Size], Sequence[int], torch.device], Tensor],
    device: torch.device,
    shapes: Sequence[torch.Size],
    shape: Sequence[int],
    paddings: Paddings,
) -> Tensor:
    """Return indices that `find` returns, from an earlier pass if there was one."""
    if is_in_dispatch_mode():  # its tensors may be fake
        return find(shapes, shape, device)
    key = find, tuple(shapes), tuple(shape)
    if not is_capturing(device):
        if key not in paddings:
            paddings[key] = find(shapes, shape, device)
        return paddings[key]
    if key not in paddings:  # tensors of a capture hold values in a replay only
        return find(shapes, shape, device)
    keep_for_replays(paddings[key])
    return paddings[key]


MAX_KEPT_PADDINGS = 2
"""Sets of layers whose paddings are kept, by the first layer; when ranks are removed, the old ones go."""


def _kept_paddings(layers: Sequence[TTLayer]) -> Paddings:
    """Return the paddings of earlier passes of these layers."""
    sets, ranks = layers[0].paddings, tuple(layer.ranks for layer in layers)
    if ranks not in sets and len(sets) >= MAX_KEPT_PADDINGS:
        sets.clear()
    paddings: Paddings = sets.setdefault(ranks, {})
    return paddings


def _shrink_to(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first elements of each dim as a view."""
    for dim, size in enumerate(shape):
        values = values if values.shape[dim] == size else values.narrow(dim, 0, size)
    return values


def _split(stacks: Sequence[Tensor], trees: Sequence[Tree], ranks: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the blocks of the layers, those of the first stack first, cut to the ranks of each layer."""
    blocks = []
    for stack, tree in zip(stacks, trees, strict=True):
        for block, own in zip(stack.unbind(), ranks, strict=True):
            blocks.append(_shrink_to(block, _block_shape(block.shape, tree, own)))
    return blocks


def _block_shape(shape: Sequence[int], tree: Tree, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a merged block with the ranks of its layer."""
    first, last = block_ends(tree)
    return (ranks[first], *shape[1:-1], ranks[last + 1])


class _MergeStacked(torch.autograd.Function):
    """Merge the blocks of several layers by stacked products: those of the first tree for each layer, and so on.

    Layers whose blocks are not used get no gradients. The parts of a graph may run backward at different times, as
    those of single layers may: stacks are attributes instead of saved tensors, which one backward pass frees.
    """

    @staticmethod
    def forward(ctx: Any, merge: _Merge, ranks: Sequence[tuple[int, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        stacks = merge.stack(tensors, len(ranks))
        with torch.enable_grad(), without_saving_hooks():
            for stack, tensor in zip(stacks, tensors, strict=False):
                stack.requires_grad_(tensor.requires_grad)
            blocks = merge.stacked(stacks)
        ctx.set_materialize_grads(False)
        ctx.tensors, ctx.stacks, ctx.blocks = tensors, stacks, blocks
        ctx.merge, ctx.ranks, ctx.num_layers = merge, ranks, len(ranks)
        return tuple(_split([stack.detach() for stack in blocks], merge.trees, ranks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with without_autocast(ctx.tensors[0].device):
            # The stacks are copies, which have no second derivatives.
            found = _differentiable_gradients(ctx, grads) if torch.is_grad_enabled() else _gradients(ctx, grads)
        return (None, None, *found)


def _gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of all tensors of all layers, from those of each block of each layer."""
    count, blocks, stacked = ctx.num_layers, [], []
    for i, block in enumerate(ctx.blocks):
        own = grads[i * count : (i + 1) * count]
        if any(grad is not None for grad in own):
            blocks.append(block)
            # Missing gradients have the shapes of others, so that the padding is the same in each pass.
            wanted = (_block_shape(block.shape[1:], ctx.merge.trees[i], ranks) for ranks in ctx.ranks)
            given = [block.new_zeros(shape) if grad is None else grad for grad, shape in zip(own, wanted, strict=True)]
            stacked.append(_stack_padded(given, block.shape[1:], ctx.merge.paddings))
    trained = [stack for stack in ctx.stacks if stack.requires_grad]
    found = iter(torch.autograd.grad(blocks, trained, stacked, retain_graph=True, allow_unused=True))
    by_stack = [next(found) if stack.requires_grad else None for stack in ctx.stacks]
    is_used = [any(grad is not None for grad in grads[i::count]) for i in range(count)]
    shapes = [tensor.shape for tensor in ctx.tensors]
    by_tensor = [
        [None] * count if stack is None else _unstack(stack, shapes[i :: len(by_stack)], ctx.merge.paddings)
        for i, stack in enumerate(by_stack)
    ]
    return [own[i] if is_used[i] else None for i in range(count) for own in by_tensor]


def _differentiable_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the same as `_gradients`, as differentiable functions of the tensors."""
    size = len(ctx.stacks)
    layers = [ctx.merge.alone(ctx.tensors[i * size : (i + 1) * size]) for i in range(ctx.num_layers)]
    blocks = [block for tree in zip(*layers, strict=True) for block in tree]
    pairs = [
        (block, _shrink_to(grad, block.shape)) for block, grad in zip(blocks, grads, strict=True) if grad is not None
    ]
    trained = [tensor for tensor in ctx.tensors if tensor.requires_grad]
    found = iter(
        torch.autograd.grad(
            [block for block, _ in pairs], trained, [grad for _, grad in pairs], create_graph=True, allow_unused=True
        )
    )
    return [next(found) if tensor.requires_grad else None for tensor in ctx.tensors]
