"""Shard a model over the processes of a replica with FSDP2, block by block.

Weight matrices and embeddings are sharded along their first dim. Vectors, such as biases and norms, and the TT cores
and rank gates of TT layers are few numbers and stay whole on each process: a core of shape (1, n, r) would lie on one
process alone, and one group of FSDP2 has one dtype, while vectors stay fp32 if matrices are bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from scantling.errors import UserError
from scantling.groups import param_groups
from scantling.tensor.layer import TTLayer
from scantling.trainer.models.values import MetaModel
from scantling.trainer.recipe import Recipe
from scantling.trainer.recipe.schema import ParallelSection


@dataclass(frozen=True)
class ShardGroup:
    """A part of the model whose sharded parameters are gathered together.

    Attributes:
        module: the part; parameters of an inner part belong to that.
        params: its sharded parameters.
        reshards: True if they are freed after the forward pass and gathered again for the backward pass.
    """

    module: nn.Module
    params: Sequence[nn.Parameter]
    reshards: bool

    @property
    def gathers(self) -> int:
        """Number of times that the parameters are gathered in a forward and a backward pass."""
        return 2 if self.reshards else 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the gathered parameters."""
        return sum(param.nbytes for param in self.params)


def shard_groups(model: nn.Module, section: ParallelSection) -> list[ShardGroup]:
    """Divide a model into the parts that are gathered together: each block, the embedding, the head, and the rest.

    Blocks are the modules that transformers never splits over devices (`_no_split_modules`). A part that shares a
    parameter with another one, such as a tied embedding, belongs to the rest, which is gathered for the whole pass.

    Args:
        model: whole, on any device, also meta.
        section: `parallel` of the recipe.

    Returns:
        The groups, inner parts first, and the model itself last.

    Raises:
        UserError: the model does not name its blocks.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError(
            f"parallel.shard: {type(model).__name__} does not name its blocks (_no_split_modules of transformers), "
            "which are gathered one at a time; train it with parallel.shard: 1"
        )
    head = _layer(model, "get_output_embeddings")
    outside = [layer for layer in (_layer(model, "get_input_embeddings"), head) if layer is not None]
    whole = {id(param) for param in whole_parameters(model)}
    owners = _count_owners(model)
    seen = set(whole)
    groups = []
    # inner modules come after outer ones in `modules`, so in reverse the inner ones take their parameters first
    order = {id(module): index for index, module in enumerate(model.modules())}
    for module in sorted({id(each): each for each in (*blocks, *outside)}.values(), key=lambda each: -order[id(each)]):
        own = _count_owners(module)
        if any(owners[key] > count for key, count in own.items() if key not in whole):
            continue
        # the backward pass begins with the head
        reshards = section.reshard == "always" or (section.reshard == "auto" and module is not head)
        if params := _take(module, seen):
            groups.append(ShardGroup(module, params, reshards))
    return [*groups, ShardGroup(model, _take(model, seen), section.reshard == "always")]


def whole_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that stay whole on each process: vectors, all of TT layers, and packed codes."""
    of_layers = {id(param) for layer in model.modules() if isinstance(layer, TTLayer) for param in layer.parameters()}
    sharded = {
        id(param)
        for group in param_groups(model)
        for _, param in group["params"]
        if group["role"] != "vector" and id(param) not in of_layers
    }
    return [param for param in model.parameters() if id(param) not in sharded]


def shard_model(
    meta: MetaModel, groups: Iterable[ShardGroup], mesh: DeviceMesh, section: ParallelSection, device: torch.device
) -> None:
    """Shard a model in place, one group after the other, so that no process ever holds more than one whole group.

    Its sharded parameters become DTensors, under the same names.

    Args:
        meta: a model whose whole parameters and buffers have their values.
        groups: of `shard_groups`.
        mesh: (replicate, shard) if FSDP2 averages gradients over the replicas too, or (shard,).
        section: `parallel` of the recipe.
        device: device of the parts.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=_DTYPES[section.reduce_dtype]),
        "offload_policy": CPUOffloadPolicy() if section.offload else OffloadPolicy(),
        "ignored_params": set(whole_parameters(meta.model)),
    }
    for group in groups:
        meta.fill(group.params, device)
        fully_shard(group.module, reshard_after_forward=group.reshards, **options)


def gradient_ratio(recipe: Recipe) -> float:
    """Return the bytes of a gradient that is sent per byte of its parameter."""
    sizes = {"fp32": 4, "bf16": 2}
    return sizes[recipe.parallel.reduce_dtype] / sizes[recipe.precision.parameters]


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def reshard(model: nn.Module) -> None:
    """Free gathered parameters that a pass without a backward pass has left."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _layer(model: Any, getter: str) -> nn.Module | None:
    try:
        layer = getattr(model, getter)()
    except (AttributeError, NotImplementedError):  # models without such a layer
        return None
    return layer if isinstance(layer, nn.Module) else None


def _count_owners(module: nn.Module) -> dict[int, int]:
    """Return how many modules inside a module hold each parameter, by its id."""
    counts: dict[int, int] = {}
    for each in module.modules():
        for param in each.parameters(recurse=False):
            counts[id(param)] = counts.get(id(param), 0) + 1
    return counts


def _take(module: nn.Module, seen: set[int]) -> list[nn.Parameter]:
    """Return the parameters of a module that are not in `seen`, and add them to it."""
    params = [param for param in module.parameters() if id(param) not in seen]
    seen.update(id(param) for param in params)
    return params
