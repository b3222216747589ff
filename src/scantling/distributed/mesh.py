"""Mesh of the processes of a run: replicas of one model, each sharded over several processes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scantling.distributed.context import DistContext

REPLICATE, SHARD = "replicate", "shard"


def with_mesh(context: DistContext, replicas: int, shards: int, *, timeout_s: float) -> DistContext:
    """Return the context with a mesh of (replicas, shards), or without one if models are not sharded.

    Neighboring ranks, which torchrun starts on one machine, share a replica. Collectives: a new process group for each
    row and each column of the mesh.

    Args:
        context: context of this process.
        replicas: number of replicas.
        shards: number of processes of each; replicas * shards = world size.
        timeout_s: timeout of a collective in seconds; the groups of `init_device_mesh` would have PyTorch's default.
    """
    if shards == 1:
        return context
    ranks = torch.arange(context.world_size).view(replicas, shards)
    timeout = timedelta(seconds=timeout_s)
    groups = []
    for lines in (ranks.T, ranks):  # a column has one process of each replica, a row the processes of one
        # every process takes part in making every group
        made = {tuple(line): dist.new_group(line, timeout=timeout) for line in lines.tolist()}
        groups.append(next(group for line, group in made.items() if context.rank in line))
    mesh = DeviceMesh.from_group(groups, context.device.type, ranks, mesh_dim_names=(REPLICATE, SHARD))
    return replace(context, mesh=mesh)
