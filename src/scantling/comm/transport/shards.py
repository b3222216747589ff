"""The part of a tensor that this process holds, and whether it can be sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from scantling.comm.transport.failures import name_silent_ranks
from scantling.errors import UserError
from scantling.numerics.torch_private import foreach_norm


def to_local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, without a gradient."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def as_gradient(value: Tensor, param: Tensor) -> Tensor:
    """A local tensor as the gradient of a parameter: of its dtype, placed as it is, and laid out as it is in memory.

    Fused optimizers read a gradient in the order in which the numbers of its parameter lie.
    """
    cast, part = value.to(param.dtype), to_local(param)
    if cast.stride() != part.stride():
        cast = torch.empty_like(part).copy_(cast)
    if isinstance(param, DTensor):
        return DTensor.from_local(
            cast, param.device_mesh, param.placements, shape=param.shape, stride=param.stride(), run_check=False
        )
    return cast


def match_placements(param: Tensor) -> None:
    """Place the gradient of a parameter as the parameter is placed.

    Under tensor and sequence parallelism each process can hold a part of the sum that is the gradient of a parameter
    which all of them hold whole. Collectives: those of the placements that differ; none with FSDP2 alone.
    """
    gradient = param.grad
    if isinstance(param, DTensor) and isinstance(gradient, DTensor) and gradient.placements != param.placements:
        param.grad = gradient.redistribute(placements=param.placements)


def check_meshes(params: Iterable[Tensor], ranks: Iterable[int]) -> None:
    """See that an exchange goes between replicas, and not between the parts of one.

    Args:
        params: some of them sharded.
        ranks: of the processes of the exchange.

    Raises:
        UserError: processes that share a mesh of a parameter are to exchange with each other.
    """
    between = set(ranks)
    for mesh in dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)):
        shared = sorted(between & set(mesh.mesh.flatten().tolist()))
        if len(shared) > 1:
            raise UserError(
                f"parameters are sharded over a mesh of which ranks {', '.join(map(str, shared))} would exchange with "
                "each other as if each had a whole replica; give the exchange the group of those with one shard, such "
                "as process_group=mesh['replicate'], and fully_shard mesh['shard'] alone"
            )


def all_finite(values: Iterable[Tensor]) -> bool:
    """Whether no number is NaN or Inf, nor the sum of all magnitudes of a tensor.

    What is finite but as large as that becomes Inf on its way, in a mean or in the rounding to fewer bits.
    """
    filled = [value for value in values if value.numel() and value.is_floating_point()]
    return _norms_at_most(filled, 2, float("inf")) or _norms_at_most(filled, 1, torch.finfo(torch.bfloat16).max)


def _norms_at_most(values: Sequence[Tensor], order: int, most: float) -> bool:
    """Whether all norms are finite and at most so large; that of order 2 is several times as fast as others."""
    if not values:
        return True
    dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
    found = torch.stack([norm.float() for norm in foreach_norm(list(values), order, dtype)])
    return bool((torch.isfinite(found) & (found <= most)).all())


def all_agree(params: Iterable[Tensor], value: bool) -> bool:
    """Whether it is so on all processes that share parameters of this replica.

    Collectives: of sharded parameters, one all-reduce of 4 bytes for each dim of their mesh.

    Raises:
        SilentPeerError: one of them does not answer.
    """
    for mesh in dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)):
        found = torch.tensor([float(value)], device=mesh.device_type)
        for group in mesh.get_all_groups():
            with name_silent_ranks(group):
                dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
                value = bool(found)  # a GPU is waited for here, so that its errors come here too
    return value
