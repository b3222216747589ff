"""Local shards of tensors: gradients, placements and finiteness."""

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
    """Return the local shard of a tensor, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def as_gradient(value: Tensor, param: Tensor) -> Tensor:
    """Convert a local tensor to a gradient with the dtype, placements and strides of a parameter.

    Fused optimizers read gradients in the memory order of the parameter, so the strides must match.
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
    """Give the gradient of a parameter the placements of the parameter.

    With tensor or sequence parallelism, the gradient of a replicated parameter can be a partial sum on each process.
    Collectives: those of the placements that differ; none with FSDP2 alone.
    """
    gradient = param.grad
    if isinstance(param, DTensor) and isinstance(gradient, DTensor) and gradient.placements != param.placements:
        param.grad = gradient.redistribute(placements=param.placements)


def check_meshes(params: Iterable[Tensor], ranks: Iterable[int]) -> None:
    """Raise if an exchange runs between shards of one replica instead of between replicas.

    Args:
        params: parameters, which may be sharded.
        ranks: global ranks of the exchange.

    Raises:
        UserError: some of the ranks share the mesh of a parameter.
    """
    members = set(ranks)
    for mesh in dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)):
        shared = sorted(members & set(mesh.mesh.flatten().tolist()))
        if len(shared) > 1:
            raise UserError(
                f"ranks {', '.join(map(str, shared))} hold shards of the same parameters, but would exchange as "
                "separate replicas; use process_group=mesh['replicate'] and fully_shard(mesh=mesh['shard'])"
            )


def all_finite(values: Iterable[Tensor]) -> bool:
    """Return True if every element is finite and so is the sum of magnitudes of each tensor.

    Larger values would become Inf in a mean or when rounded to a lower precision.
    """
    filled = [value for value in values if value.numel() and value.is_floating_point()]
    return _norms_at_most(filled, 2, float("inf")) or _norms_at_most(filled, 1, torch.finfo(torch.bfloat16).max)


def _norms_at_most(values: Sequence[Tensor], order: int, most: float) -> bool:
    """Return True if all norms are finite and at most `most`. Order 2 is several times faster than others."""
    if not values:
        return True
    dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
    norms = torch.stack([norm.float() for norm in foreach_norm(list(values), order, dtype)])
    return bool((torch.isfinite(norms) & (norms <= most)).all())


def all_agree(params: Iterable[Tensor], value: bool) -> bool:
    """Return True if the value is True on all processes that share parameters of this replica.

    Collectives, for sharded parameters: one all-reduce of 4 bytes per dim of their mesh.

    Raises:
        SilentPeerError: a process does not answer.
    """
    for mesh in dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)):
        agreed = torch.tensor([float(value)], device=mesh.device_type)
        for group in mesh.get_all_groups():
            with name_silent_ranks(group):
                dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
                value = bool(agreed)  # waits for a GPU, so that its errors are raised here
    return value
