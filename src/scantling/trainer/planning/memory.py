"""Memory that a trace does not show: gradients between passes and, on a CPU, memory kept by the allocator."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence, Set
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from scantling.torchrun_env import local_world_size_from_env
from scantling.trainer.planning.machine import host_memory
from scantling.trainer.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from scantling.groups import MatrixDims, Role
    from scantling.tensor.rank_budget import CoreBytes
    from scantling.trainer.models.sharding import ShardGroup

MIB = 2**20
_TUNED = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")


def allocator_bytes(working_bytes: int) -> int:
    """Return the bytes of freed blocks that glibc keeps in its heap; they count as resident memory.

    This is a fit to the runs of `benchmarks/peak_memory.py`, not a law: the first 100 MiB of a step's temporary
    tensors again, plus a tenth of all of them. The result is 0 if environment variables make the allocator return
    blocks (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_) or replace it (LD_PRELOAD).
    """
    if any(name in os.environ for name in _TUNED):
        return 0
    return min(working_bytes, 100 * MIB) + working_bytes // 10


def building_bytes(recipe: Recipe, parameters: Sequence[torch.Tensor], world_size: int) -> int:
    """Return the bytes of all weights in fp32 that a CPU process holds before they are rounded to bf16.

    The result is 0 for weights that are stored in fp32, and for values that are read or drawn one by one.

    Args:
        recipe: of the run.
        parameters: of the whole model.
        world_size: number of processes.
    """
    if recipe.precision.parameters != "bf16":
        return 0
    size = 4 * sum(param.numel() for param in parameters)
    _, shards = recipe.parallel.mesh_shape(world_size)
    machine = host_memory()
    exceeds = machine is not None and size * replicas_here(shards) > machine.available
    return 0 if exceeds or reads_one_by_one(recipe, shards) else size


def reads_one_by_one(recipe: Recipe, shards: int) -> bool:
    """True if stored weights are read one by one, so that a sharded or a bf16 run never holds all of them in fp32."""
    from scantling.trainer.models.build import reads_weights

    needed = shards > 1 or recipe.precision.parameters == "bf16"
    return needed and recipe.tensor is None and reads_weights(recipe.model)


def replicas_here(shards: int) -> int:
    """Return the number of replicas whose first process may run on this machine."""
    return math.ceil(local_world_size_from_env() / shards)


def frees_gradients(recipe: Recipe, *, world_size: int = 1) -> bool:
    """Return True if the step frees each gradient immediately; False if several passes accumulate into it."""
    in_one_pass = not recipe.accumulates(world_size) or recipe.accumulates_in_blocks(world_size)
    return recipe.optim.release_gradients and in_one_pass


def held_gradient_bytes(recipe: Recipe, sizes: Sequence[int], *, world_size: int = 1) -> int:
    """Return the bytes of gradients a process holds in a step: all, or the largest if each is freed immediately.

    Args:
        recipe: of the run.
        sizes: bytes of each trainable parameter on this process.
        world_size: number of processes.
    """
    return max(sizes, default=0) if frees_gradients(recipe, world_size=world_size) else sum(sizes)


def local_groups(groups: Sequence[dict[str, Any]], sharded: Set[int], shards: int) -> list[dict[str, Any]]:
    """Return parameter groups on the meta device with the shapes that the first process of a replica has.

    Args:
        groups: of `scantling.param_groups`.
        sharded: ids of the parameters that are sharded along their first dim; the others stay whole.
        shards: processes that share a replica.
    """
    import torch

    def part(param: torch.Tensor) -> torch.Tensor:
        if id(param) not in sharded:
            return param
        rows = -(-param.shape[0] // shards)
        local = torch.empty((rows, *param.shape[1:]), dtype=param.dtype, device="meta")
        return torch.nn.Parameter(local, requires_grad=param.requires_grad)

    return [{**group, "params": [(name, part(param)) for name, param in group["params"]]} for group in groups]


def gathered_bytes(groups: Sequence[ShardGroup], gradient_ratio: float) -> int:
    """Return the most bytes that gathered weights and their gradients take at a time in the passes of a micro-batch.

    In the backward pass, a gathered group is there with its gradients and with their copy that is sent, and on a GPU
    the next block is gathered already. The rest of the model, which comes last in `groups`, stays gathered in all
    passes, and so do all groups if none is resharded. The head is resharded after its backward pass, which comes first.

    Args:
        groups: of `shard_groups`.
        gradient_ratio: bytes of a sent gradient per byte of its parameter.
    """
    if not groups:
        return 0
    *parts, rest = (group.num_bytes for group in groups)
    each = sorted(parts) or [0]
    if not any(group.reshards for group in groups):
        return sum(parts) + rest + int((1 + gradient_ratio) * max([*parts, rest]))
    within = each[len(each) // 2] + int((2 + gradient_ratio) * each[-1])  # most groups are blocks, of one size
    return rest + max(within, int((1 + gradient_ratio) * rest))


def core_bytes(recipe: Recipe) -> CoreBytes | None:
    """Return a function for the bytes of weight, gradient and state of a TT parameter under the recipe's optimizer.

    Return None if the optimizer's state size is unknown, or if the recipe sets `bytes_per_parameter` itself.
    """
    import torch

    from scantling.optim.memory import predicted_state_bytes
    from scantling.trainer.planning.momentum import optimizer_groups

    assert recipe.tensor is not None
    if "bytes_per_parameter" in recipe.tensor.adapter:
        return None
    # the weight, and its gradient unless that is freed at once
    copies = 1 if frees_gradients(recipe) else 2

    @cache
    def tt_param_bytes(shape: tuple[int, ...], dtype: torch.dtype, role: Role, dims: MatrixDims) -> float:
        def make_group(shape: tuple[int, ...], role: Role, dims: MatrixDims) -> dict[str, Any]:
            param = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
            return {"params": [param], "role": role, "matrix_dims": dims}

        # add a matrix next to the TT core: Muon cannot be built without one, and leaves cores of more dims to AdamW
        core, matrix = make_group(shape, role, dims), make_group((1, 1), "matrix", ((0,), (1,)))
        name, options = recipe.optim.name, recipe.optimizer_options
        both, alone = (
            predicted_state_bytes(name, optimizer_groups(recipe, groups), **options)
            for groups in ([core, matrix], [matrix])
        )
        if both is None or alone is None:
            return float("nan")
        # the added matrix has state in both predictions, so the difference is the state of the core
        return copies * prod(shape) * dtype.itemsize + both - alone

    probe = tt_param_bytes((2, 2, 2), torch.float32, "matrix", ((0, 1), (2,)))
    # NaN differs from itself: the state size of this optimizer is unknown
    return tt_param_bytes if probe == probe else None
