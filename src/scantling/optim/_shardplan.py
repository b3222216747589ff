"""How a parameter lies on the ranks: which of its sums are partial and over which process groups they are added up.

The only file that knows DTensor. Everything else works on local tensors, with a `ShardPlan` that says which part of the
parameter they are.

A mesh dim that shards a row dim leaves column sums partial, one that shards a column dim leaves row sums partial, and
the sum of squares over the whole parameter is partial along every sharded dim, batch dims included. What a group of
ranks must add up is therefore named by the dims of the parameter that were summed away: `groups(dims)`.
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
class Cut:
    """A dim of the parameter that a mesh dim shards.

    Attributes:
        dim: of the parameter.
        group: the ranks along the mesh dim, each with another part.
        is_first: whether this rank is the first of them.
    """

    dim: int
    group: ProcessGroup
    is_first: bool


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Which part of a parameter this rank has, and with whom it sums.

    Attributes:
        shape: of the whole parameter.
        start: index of the local part's first element in the whole parameter, along each dim.
        cuts: the dims that are sharded over more than one rank, in the order of the mesh dims; none on one device.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def groups(self, dims: Iterable[int]) -> tuple[ProcessGroup, ...]:
        """The process groups, one after the other, over which a sum along `dims` is partial."""
        summed = set(dims)
        return tuple(cut.group for cut in self.cuts if cut.dim in summed)

    def is_first(self, dims: Iterable[int]) -> bool:
        """Whether this rank is the one, of those that sum along `dims`, that adds what all of them hold alike."""
        summed = set(dims)
        return all(cut.is_first for cut in self.cuts if cut.dim in summed)

    def index_of(self, offset: Sequence[int]) -> int:
        """Place in the whole parameter, in row-major order, of the local element at `offset`."""
        return sum((a + b) * c for a, b, c in zip(self.start, offset, self.strides, strict=True))

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the whole parameter in row-major order."""
        return row_major(self.shape)


@lru_cache(maxsize=4096)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def plan_of(param: Tensor) -> ShardPlan:
    """The plan of a parameter whose placements `check_placements` let pass; no communication."""
    if not _is_dtensor(param):
        return _whole(tuple(param.shape))
    mesh: Any = param.device_mesh  # type: ignore[attr-defined]
    start, sizes = [0] * param.ndim, list(param.shape)
    cuts = []
    for mesh_dim, dim in enumerate(_sharded_dims(param)):
        if dim is None or mesh.size(mesh_dim) == 1:
            continue
        rank = mesh.get_local_rank(mesh_dim)
        length = -(-sizes[dim] // mesh.size(mesh_dim))  # as torch.chunk: the last parts are shorter, or empty
        begin = min(rank * length, sizes[dim])
        sizes[dim] = min(length, sizes[dim] - begin)
        start[dim] += begin
        cuts.append(Cut(dim, mesh.get_group(mesh_dim), rank == 0))
    return ShardPlan(tuple(param.shape), tuple(start), tuple(cuts))


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> ShardPlan:
    return ShardPlan(shape, (0,) * len(shape))


def check_placements(name: str, param: Tensor) -> None:
    """Raise a UserError for a DTensor parameter that is neither replicated nor cut into plain shards."""
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
                "If fully_shard has sharded it along the dim that tensor parallelism had sharded already, give "
                "fully_shard a shard_placement_fn that takes another dim"
            )
        raise UserError(f"CAME trains DTensors placed as Shard or Replicate; {name} is {placement!r}. {advice}")


def check_rows_whole(name: str, param: Tensor, first: int, momentum: str) -> None:
    """Raise a UserError where a dim that rows of momentum blocks run along is sharded.

    Args:
        name: of the parameter.
        param: any parameter.
        first: blocks run along its dims from this one on.
        momentum: the codec.
    """
    cut = {dim for dim in _sharded_dims(param) if dim is not None and dim >= first}
    if cut:
        raise UserError(
            f"momentum='{momentum}' keeps blocks along dims {tuple(range(first, param.ndim))} of {name}, and dim "
            f"{min(cut)} is sharded; shard an earlier dim, or use momentum='bf16' or 'fp32' for it"
        )


def check_grad_placement(name: str, param: Tensor, grad: Tensor) -> None:
    """Raise a UserError for a gradient that does not lie on its parameter's mesh."""
    if not _is_dtensor(param) and not _is_dtensor(grad):
        return
    if getattr(param, "device_mesh", None) != getattr(grad, "device_mesh", None):
        raise UserError(
            f"the gradient of {name} must lie on the device mesh of the parameter; one of them is a DTensor on "
            "another mesh, or none. Make both with fully_shard, distribute_module or distribute_tensor"
        )


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank, sharing its memory; a plain tensor as it is."""
    if not _is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def local_grad(param: Tensor) -> Tensor | None:
    """The part of a parameter's gradient that belongs to the local part of the parameter.

    Collectives: none where the gradient is placed as the parameter. A gradient that is not, such as the Partial one of
    a norm under sequence parallelism, is redistributed, as element-wise optimizers do it implicitly.
    """
    grad: Any = param.grad
    if grad is None or not _is_dtensor(param):
        return param.grad
    placements = param.placements  # type: ignore[attr-defined]
    return local(grad if grad.placements == placements else grad.redistribute(placements=placements))


def zeros(param: Tensor, size: tuple[int, ...], dtype: torch.dtype, averaged: Sequence[int] | None) -> Tensor:
    """A state tensor of a parameter: sharded where the parameter is, replicated where it was averaged over.

    Args:
        param: the parameter.
        size: of the tensor for the whole parameter; dims that are sharded are the parameter's, or averaged.
        dtype: of the tensor.
        averaged: the dims of the parameter that were averaged away; None for a plain tensor, the same on all ranks.
    """
    part = local(param)
    if averaged is None or not _is_dtensor(param):
        return _zeros_like(part, size, dtype)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        _zeros_like(part, _local_size(param, size, averaged), dtype),
        param.device_mesh,  # type: ignore[attr-defined]
        _state_placements(param, averaged),
        run_check=False,
        shape=torch.Size(size),
        stride=param.stride() if size == param.shape else row_major(size),
    )


def local_bytes(param: Tensor, size: tuple[int, ...], dtype: torch.dtype, averaged: Sequence[int] | None) -> int:
    """Bytes on this rank of what `zeros` returns."""
    return prod(_local_size(param, size, averaged or ())) * dtype.itemsize


def place(value: Tensor, param: Tensor, averaged: Sequence[int] | None) -> Tensor:
    """A copy of a loaded state tensor, laid out as `zeros` would have laid it out.

    Collectives: a DTensor on the parameter's mesh with other placements is redistributed; otherwise none.

    Raises:
        UserError: a DTensor on another mesh.
    """
    if _is_dtensor(value) and getattr(param, "device_mesh", None) != getattr(value, "device_mesh", None):
        raise UserError(
            "the loaded state is a DTensor on another mesh than its parameter; load it with "
            "torch.distributed.checkpoint, or as full tensors"
        )
    return laid_out(value.to(param.device, copy=True), param, averaged)


def laid_out(value: Tensor, param: Tensor, averaged: Sequence[int] | None) -> Tensor:
    """A state tensor on the parameter's device and mesh as `zeros` would have laid it out; itself without a mesh."""
    if averaged is None or not _is_dtensor(param):
        return value
    from torch.distributed.tensor import distribute_tensor

    placements = _state_placements(param, averaged)
    if _is_dtensor(value):
        return value.redistribute(placements=placements)  # type: ignore[attr-defined, no-any-return]
    return distribute_tensor(value, param.device_mesh, placements, src_data_rank=None)  # type: ignore[attr-defined]


def _local_size(param: Tensor, size: tuple[int, ...], averaged: Sequence[int]) -> tuple[int, ...]:
    part = local(param)
    kept = {dim for dim in _sharded_dims(param) if dim is not None} - set(averaged)
    return tuple(part.shape[dim] if dim in kept else length for dim, length in enumerate(size))


def _zeros_like(part: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if size == part.shape:
        return torch.zeros_like(part, dtype=dtype, memory_format=torch.preserve_format)
    return torch.zeros(size, dtype=dtype, device=part.device)


def _state_placements(param: Tensor, averaged: Sequence[int]) -> list[Any]:
    from torch.distributed.tensor import Replicate

    placements = param.placements  # type: ignore[attr-defined]
    return [
        Replicate() if dim is None or dim in averaged else placement
        for placement, dim in zip(placements, _sharded_dims(param), strict=True)
    ]


def _sharded_dims(param: Tensor) -> tuple[int | None, ...]:
    """For each mesh dim the dim of the parameter that it shards, or None."""
    return tuple(placement.dim if placement.is_shard() else None for placement in getattr(param, "placements", ()))


def _is_dtensor(tensor: Tensor) -> bool:
    """Whether this is a DTensor, without importing what defines it."""
    return hasattr(tensor, "device_mesh")
