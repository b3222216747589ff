"""Sharded parameters: the part on this rank, and the process groups over which its sums are partial.

The only file of `optim` that knows DTensor. All others work on local tensors and a `ShardPlan`.

A mesh dim that shards a row dim leaves column sums partial, one that shards a column dim leaves row sums partial, and
the sum of squares over the whole parameter is partial along every sharded dim, batch dims included. The process groups
that must sum are therefore selected by the dims of the parameter that were summed over: `ShardPlan.groups(dims)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class ShardedDim:
    """Dim of a parameter that a mesh dim shards.

    Attributes:
        dim: dim of the parameter.
        group: process group along the mesh dim.
        is_first_rank: True if this rank is the first of the group.
    """

    dim: int
    group: ProcessGroup
    is_first_rank: bool


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Position of the local part in the whole parameter, and the process groups that share the parameter.

    Attributes:
        shape: shape of the whole parameter.
        start: index of the local part's first element in the whole parameter, along each dim.
        sharded_dims: dims that are sharded over more than one rank, in the order of the mesh dims; empty on one device.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    sharded_dims: tuple[ShardedDim, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def groups(self, dims: Iterable[int]) -> tuple[ProcessGroup, ...]:
        """Return the process groups over which a sum along `dims` is partial, in the order in which to sum."""
        summed = set(dims)
        return tuple(each.group for each in self.sharded_dims if each.dim in summed)

    def is_first_rank(self, dims: Iterable[int]) -> bool:
        """True if this rank is the first of every group that sums along `dims`."""
        summed = set(dims)
        return all(each.is_first_rank for each in self.sharded_dims if each.dim in summed)

    def global_index(self, offset: Sequence[int]) -> int:
        """Return the row-major index in the whole parameter of the local element at `offset`."""
        return sum((a + b) * c for a, b, c in zip(self.start, offset, self.strides, strict=True))

    @property
    def strides(self) -> tuple[int, ...]:
        """Row-major strides of the whole parameter."""
        return row_major_strides(self.shape)


@lru_cache(maxsize=4096)
def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def shard_plan(param: Tensor) -> ShardPlan:
    """Return the plan of a parameter that passed `check_placements`. Collectives: none."""
    if not _is_dtensor(param):
        return _unsharded_plan(tuple(param.shape))
    mesh: Any = param.device_mesh  # type: ignore[attr-defined]
    start, sizes = [0] * param.ndim, list(param.shape)
    sharded_dims = []
    for mesh_dim, dim in enumerate(_dims_by_mesh_dim(param)):
        if dim is None or mesh.size(mesh_dim) == 1:
            continue
        # The part of this rank within the part left by the mesh dims before.
        rank = mesh.get_local_rank(mesh_dim)
        length = -(-sizes[dim] // mesh.size(mesh_dim))  # as in torch.chunk, the last parts are shorter or empty
        begin = min(rank * length, sizes[dim])
        sizes[dim] = min(length, sizes[dim] - begin)
        start[dim] += begin
        sharded_dims.append(ShardedDim(dim, mesh.get_group(mesh_dim), rank == 0))
    return ShardPlan(tuple(param.shape), tuple(start), tuple(sharded_dims))


@lru_cache(maxsize=4096)
def _unsharded_plan(shape: tuple[int, ...]) -> ShardPlan:
    return ShardPlan(shape, (0,) * len(shape))


def check_placements(name: str, param: Tensor) -> None:
    """Raise a UserError for a DTensor parameter with a placement other than Shard or Replicate."""
    if not _is_dtensor(param):
        return
    from torch.distributed.tensor import Replicate, Shard

    for placement in param.placements:  # type: ignore[attr-defined]
        if type(placement) in (Shard, Replicate):
            continue
        if placement.is_partial():
            advice = "Redistribute it to Replicate or Shard first"
        else:
            advice = (
                "If tensor parallelism and fully_shard shard the same dim, give fully_shard a shard_placement_fn that "
                "shards another dim"
            )
        raise UserError(f"CAME trains DTensors placed as Shard or Replicate; {name} is {placement!r}. {advice}")


def check_unsharded_rows(name: str, param: Tensor, first: int, momentum: str) -> None:
    """Raise a UserError if a dim that momentum blocks run along is sharded.

    Args:
        name: name of the parameter.
        param: any parameter.
        first: first of the dims that blocks run along.
        momentum: codec of the momentum.
    """
    sharded = {dim for dim in _dims_by_mesh_dim(param) if dim is not None and dim >= first}
    if sharded:
        raise UserError(
            f"momentum='{momentum}' keeps blocks along dims {tuple(range(first, param.ndim))} of {name}, and dim "
            f"{min(sharded)} is sharded; shard an earlier dim, or use momentum='bf16' or 'fp32' for it"
        )


def check_grad_placement(name: str, param: Tensor, grad: Tensor) -> None:
    """Raise a UserError for a gradient on another device mesh than its parameter."""
    if not _is_dtensor(param) and not _is_dtensor(grad):
        return
    if getattr(param, "device_mesh", None) != getattr(grad, "device_mesh", None):
        raise UserError(
            f"the gradient of {name} and the parameter must be on the same device mesh; one of them is on another "
            "mesh or is a plain tensor. Make both with fully_shard, distribute_module or distribute_tensor"
        )


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor on this rank, sharing its memory; a plain tensor is returned unchanged."""
    if not _is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def local_grad(param: Tensor) -> Tensor | None:
    """Return the gradient of the local part of a parameter, or None.

    Collectives: none if the gradient has the placements of the parameter. Otherwise, such as for the Partial gradient
    of a norm under sequence parallelism, it is redistributed, as element-wise optimizers do implicitly.
    """
    grad: Any = param.grad
    if grad is None or not _is_dtensor(param):
        return param.grad
    placements = param.placements  # type: ignore[attr-defined]
    return local_tensor(grad if grad.placements == placements else grad.redistribute(placements=placements))


def new_state_tensor(
    param: Tensor, size: tuple[int, ...], dtype: torch.dtype, averaged: Sequence[int] | None
) -> Tensor:
    """Return a new state tensor of a parameter: sharded like the parameter, replicated along averaged dims.

    Args:
        param: the parameter.
        size: shape of the tensor for the whole parameter.
        dtype: dtype of the tensor.
        averaged: dims of the parameter that were averaged; None for a plain tensor, identical on all ranks.
    """
    part = local_tensor(param)
    if averaged is None or not _is_dtensor(param):
        return _zeros_like(part, size, dtype)
    from torch.distributed.tensor import DTensor

    # run_check=False: a check would communicate.
    return DTensor.from_local(
        _zeros_like(part, _local_size(param, size, averaged), dtype),
        param.device_mesh,  # type: ignore[attr-defined]
        _state_placements(param, averaged),
        run_check=False,
        shape=torch.Size(size),
        stride=param.stride() if size == param.shape else row_major_strides(size),
    )


def local_bytes(param: Tensor, size: tuple[int, ...], dtype: torch.dtype, averaged: Sequence[int] | None) -> int:
    """Return the bytes on this rank of the tensor that `new_state_tensor` returns."""
    return prod(_local_size(param, size, averaged or ())) * dtype.itemsize


def copy_state_tensor(value: Tensor, param: Tensor, averaged: Sequence[int] | None) -> Tensor:
    """Return a copy of a loaded state tensor with the placements of `new_state_tensor`.

    Collectives: redistributes a DTensor that is on the parameter's mesh with other placements; otherwise none.

    Raises:
        UserError: a DTensor on another mesh.
    """
    if _is_dtensor(value) and getattr(param, "device_mesh", None) != getattr(value, "device_mesh", None):
        raise UserError(
            "the loaded state is a DTensor on another device mesh than its parameter; load it with "
            "torch.distributed.checkpoint, or as full tensors"
        )
    return distribute_like(value.to(param.device, copy=True), param, averaged)


def distribute_like(value: Tensor, param: Tensor, averaged: Sequence[int] | None) -> Tensor:
    """Give a state tensor the placements of `new_state_tensor`; without a mesh, return it unchanged."""
    if averaged is None or not _is_dtensor(param):
        return value
    from torch.distributed.tensor import distribute_tensor

    placements = _state_placements(param, averaged)
    if _is_dtensor(value):
        return value.redistribute(placements=placements)  # type: ignore[attr-defined, no-any-return]
    # src_data_rank=None: every rank has the whole tensor, so nothing is sent.
    return distribute_tensor(value, param.device_mesh, placements, src_data_rank=None)  # type: ignore[attr-defined]


def _local_size(param: Tensor, size: tuple[int, ...], averaged: Sequence[int]) -> tuple[int, ...]:
    part = local_tensor(param)
    # A state tensor is sharded along the dims of the parameter that it was not averaged over.
    kept = {dim for dim in _dims_by_mesh_dim(param) if dim is not None} - set(averaged)
    return tuple(part.shape[dim] if dim in kept else length for dim, length in enumerate(size))


def _zeros_like(part: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # The momentum keeps the memory format of the parameter, so that kernels read both in one order.
    if size == part.shape:
        return torch.zeros_like(part, dtype=dtype, memory_format=torch.preserve_format)
    return torch.zeros(size, dtype=dtype, device=part.device)


def _state_placements(param: Tensor, averaged: Sequence[int]) -> list[Any]:
    from torch.distributed.tensor import Replicate

    placements = param.placements  # type: ignore[attr-defined]
    return [
        Replicate() if dim is None or dim in averaged else placement
        for placement, dim in zip(placements, _dims_by_mesh_dim(param), strict=True)
    ]


def _dims_by_mesh_dim(param: Tensor) -> tuple[int | None, ...]:
    """Return, for each mesh dim, the dim of the parameter that it shards, or None."""
    return tuple(placement.dim if placement.is_shard() else None for placement in getattr(param, "placements", ()))


def _is_dtensor(tensor: Tensor) -> bool:
    """True for a DTensor; does not import torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh")


def is_sharded(tensor: Tensor) -> bool:
    """True if more than one rank holds a part of the tensor."""
    dims = _dims_by_mesh_dim(tensor)
    return any(dim is not None and tensor.device_mesh.size(mesh_dim) > 1 for mesh_dim, dim in enumerate(dims))  # type: ignore[attr-defined]
