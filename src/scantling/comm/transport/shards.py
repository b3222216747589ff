"""Local shards of tensors, and checks of their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from scantling.comm.transport.failures import name_silent_ranks
from scantling.errors import UserError
from scantling.numerics.torch_private import foreach_norm


def to_local(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def as_gradient(value: Tensor, param: Tensor) -> Tensor:
    """Return a local tensor as the gradient of a parameter, with its dtype, placements and strides.

    Fused optimizers read the elements of a gradient in the memory order of its parameter.
    """
    cast, part = value.to(param.dtype), to_local(param)
    if cast.stride() != part.stride():
        cast = torch.empty_like(part).copy_(cast)
    return as_shard(cast, param)


def as_shard(value: Tensor, param: Tensor) -> Tensor:
    """Return a local tensor as the part on this process of a tensor that is sharded like a parameter."""
    if not isinstance(param, DTensor):
        return value
    # Shape and stride are given: they cannot be inferred from an uneven shard.
    return DTensor.from_local(
        value, param.device_mesh, param.placements, shape=param.shape, stride=param.stride(), run_check=False
    )


def match_placements(param: Tensor) -> None:
    """Redistribute the gradient of a parameter to the placements of the parameter.

    Under tensor and sequence parallelism, the gradient of a replicated parameter can be a partial sum on each process.
    Collectives: those of placements that differ; none with FSDP2 only.
    """
    gradient = param.grad
    if isinstance(param, DTensor) and isinstance(gradient, DTensor) and gradient.placements != param.placements:
        param.grad = gradient.redistribute(placements=param.placements)


def check_meshes(params: Iterable[Tensor], ranks: Iterable[int]) -> None:
    """Raise if an exchange would be between shards of one replica instead of between replicas.

    Args:
        params: sharded or not.
        ranks: global ranks of the processes of the exchange.

    Raises:
        UserError: several of these processes are on one mesh of a parameter.
    """
    between = set(ranks)
    for mesh in dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)):
        shared = sorted(between & set(mesh.mesh.flatten().tolist()))
        if len(shared) > 1:
            raise UserError(
                f"parameters are sharded over a mesh of ranks {', '.join(map(str, shared))}, which would exchange with "
                "each other as if each had a full replica; give the exchange the group of processes with the same "
                "shard, such as process_group=mesh['replicate'], and use fully_shard with mesh['shard']"
            )


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together, a plain 0-D tensor; computed in fp32 for those in bf16.

    Collectives: of sharded gradients, one all-reduce of 8 bytes for each set of process groups that share them.

    Args:
        gradients: sharded ones count as a whole, others, which are equal on all processes of a replica, once.
    """
    if any(isinstance(gradient, DTensor) or gradient.dtype == torch.bfloat16 for gradient in gradients):
        return combine_norms([(gradient, local_norm(gradient)) for gradient in gradients])
    return torch.nn.utils.get_total_norm(gradients)


def local_norm(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient, of a sharded one that of the part on this process; at least in fp32."""
    found: Tensor = torch.linalg.vector_norm(
        to_local(gradient), dtype=torch.promote_types(gradient.dtype, torch.float32)
    )
    return found


def combine_norms(norms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the norm of several tensors together from the norms of their parts on this process.

    Collectives: as of `total_norm`.

    Args:
        norms: pairs (tensor or parameter, norm of its part on this process), in the same order on all processes.
    """
    if not any(isinstance(tensor, DTensor) for tensor, _ in norms):
        return torch.nn.utils.get_total_norm([value for _, value in norms])
    squares: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor, value in norms:
        squares.setdefault(_sharding_groups(tensor), []).append(value.double().square())
    total = torch.zeros((), dtype=torch.float64, device=norms[0][1].device)
    for groups, values in squares.items():
        found = torch.stack([value.to(total.device) for value in values]).sum()
        for group in groups:
            with name_silent_ranks(group):
                dist.all_reduce(found, group=group)
        total = total + found
    return total.sqrt().float()


def _sharding_groups(tensor: Tensor) -> tuple[Any, ...]:
    """Return the process groups that hold different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(dim) for dim, each in enumerate(tensor.placements) if each.is_shard())


def clip_gradients(params: Iterable[Tensor], most: float, found: Tensor) -> None:
    """Scale the gradients of parameters so that their norm is at most `most`.

    Args:
        params: sharded or not.
        most: the largest norm.
        found: the norm, of `total_norm`.
    """
    params = [param for param in params if param.grad is not None]
    if not any(isinstance(param, DTensor) for param in params):
        torch.nn.utils.clip_grads_with_norm_(params, most, found)
        return
    # torch multiplies lists of DTensors only, or of plain tensors only
    scale = (most / (found + 1e-6)).clamp(max=1.0)
    for param in params:
        assert param.grad is not None
        to_local(param.grad).mul_(scale.to(param.grad.device))


def all_finite(values: Iterable[Tensor]) -> bool:
    """Return True if all elements, and the sum of magnitudes of each tensor, are finite in bf16.

    Larger sums would become Inf in a mean or when they are rounded to a message format.
    """
    filled = [value for value in values if value.numel() and value.is_floating_point()]
    # A norm of at most 1.8e19, whose square fp32 holds, implies both; otherwise the sum of magnitudes decides.
    limit = torch.finfo(torch.float32).max ** 0.5
    return _norms_at_most(filled, 2, limit) or _norms_at_most(filled, 1, torch.finfo(torch.bfloat16).max)


def _norms_at_most(values: Sequence[Tensor], order: int, most: float) -> bool:
    """Return True if all norms, in fp32 or fp64, are at most `most`; order 2 is several times faster than others."""
    if not values:
        return True
    dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
    found = torch.stack([norm.float() for norm in foreach_norm(list(values), order, dtype)])
    return bool((found <= most).all())  # False for NaN


def all_agree(params: Iterable[Tensor], value: bool) -> bool:
    """Return True if `value` is True on all processes that share parameters of this replica.

    Collectives: of sharded parameters, one all-reduce of 4 bytes for each dim of their mesh.

    Raises:
        SilentPeerError: a process does not answer.
    """
    # Meshes in the order of the parameters: all processes run the same collectives.
    for mesh in dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)):
        found = torch.tensor([float(value)], device=mesh.device_type)
        # A minimum over one dim after the other is the minimum over the mesh.
        for group in mesh.get_all_groups():
            with name_silent_ranks(group):
                dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
                value = bool(found)  # waits for a GPU, so that its errors are raised here
    return value
