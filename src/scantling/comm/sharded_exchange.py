"""Exchange of a model that FSDP2 shards: within a replica FSDP2 averages gradients, between replicas an exchange does.

FSDP2 gathers the weights of a block before its passes, and averages its gradients over the processes of the replica in
the backward pass, so that each process keeps the part that it owns. Parameters that stay whole on each process (see
trainer/models/sharding.py) are averaged here, all in one message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from scantling.comm.ddp import allreduce_wire_bytes
from scantling.comm.gradient_exchange import GradientExchange, NoExchange
from scantling.comm.transport.failures import name_silent_ranks


def sharded_wire_bytes(
    gathers: Sequence[tuple[int, int]],
    whole_bytes: int,
    *,
    gradient_ratio: float,
    shards: int,
    replicas: int,
    whole_processes: int,
    passes: int,
) -> int:
    """Return the bytes that one process sends in a step of a sharded model.

    Args:
        gathers: bytes of the parameters of each group, and how often they are gathered in one micro-batch.
        whole_bytes: bytes of the gradients of parameters that stay whole.
        gradient_ratio: bytes of a sent gradient per byte of its parameter, such as 2 for fp32 gradients of bf16
            weights.
        shards: processes that share a replica.
        replicas: replicas whose gradients FSDP2 averages; 1 if another exchange does.
        whole_processes: processes over which the gradients of whole parameters are averaged.
        passes: micro-batches of a step, each with its own reduction of gradients within the replica.
    """
    # gather and reduce-scatter over a ring: each process sends all parts but one
    gathered = sum(size * times for size, times in gathers) * (shards - 1) // shards
    gradients = int(gradient_ratio * sum(size for size, _ in gathers))
    sent = passes * (gathered + gradients * (shards - 1) // shards)
    sent += allreduce_wire_bytes(gradients // shards, replicas)
    return sent + allreduce_wire_bytes(whole_bytes, whole_processes)


class ShardedExchange(GradientExchange):
    """Average the gradients of a replica over its processes, and then between replicas.

    Collectives: those of FSDP2 in each pass; one all-reduce of the gradients of whole parameters for each dtype; those
    of `between`.

    Args:
        mesh: (replicate, shard) of all processes.
        between: exchange between replicas; None if FSDP2 averages over them too.
        gathers: as of `sharded_wire_bytes`.
        gradient_ratio: as of `sharded_wire_bytes`.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        between: GradientExchange | None,
        *,
        gathers: Sequence[tuple[int, int]],
        gradient_ratio: float,
    ) -> None:
        self._mesh, self._between = mesh, between or NoExchange()
        self._averages_replicas = between is None
        self.keeps_replicas_equal = self._between.keeps_replicas_equal
        self._gathers, self._gradient_ratio, self._passes = gathers, gradient_ratio, 0
        self._replica_bytes = 0  # of `wire_bytes`, those that went to other replicas
        self._whole: list[nn.Parameter] = []

    def describe(self) -> str | None:
        replicas, shards = self._mesh.shape
        text = f"{replicas} replica{'s' if replicas > 1 else ''} of {shards} processes each"
        between = self._between.describe()
        return text if between is None else f"{text}\n{between}"

    def prepare(self, model: nn.Module) -> nn.Module:
        self._model = model
        self._whole = [param for param in model.parameters() if param.requires_grad and not isinstance(param, DTensor)]
        self._between.prepare(model)
        return model

    def begin_step(self) -> None:
        self._between.begin_step()

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        assert isinstance(self._model, FSDPModule)
        # gradients are kept sharded between micro-batches; only their last sum goes to the other replicas
        self._model.set_requires_all_reduce(last)
        self._passes += 1
        with self._between.accumulate(last=last):
            yield

    def exchange(self) -> None:
        """Average the gradients of whole parameters, and exchange between replicas."""
        began = time.perf_counter()
        replicas, shards = self._mesh.shape
        between, everywhere = self._between, self._averages_replicas
        self._average_whole(None if everywhere else self._mesh.get_group(1))
        self.wire_bytes = sharded_wire_bytes(
            self._gathers,
            sum(param.nbytes for param in self._whole),
            gradient_ratio=self._gradient_ratio,
            shards=shards,
            replicas=replicas if everywhere else 1,
            whole_processes=replicas * shards if everywhere else shards,
            passes=self._passes,
        )
        self._passes = 0
        between.exchange()
        self._replica_bytes = between.wire_bytes
        self.wire_bytes += self._replica_bytes
        self.norm, self.nonfinite_ranks = between.norm, between.nonfinite_ranks
        self.local_nonfinite = between.local_nonfinite
        self.exposed_s = time.perf_counter() - began

    def _average_whole(self, group: Any) -> None:
        """Replace the gradients of whole parameters by their mean; None stays None if no process has a gradient."""
        count = dist.get_world_size(group)
        for dtype in dict.fromkeys(param.dtype for param in self._whole):
            params = [param for param in self._whole if param.dtype == dtype]
            given = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
            # whether there is a gradient is sent with it, as one number for each parameter
            flags = given[0].new_tensor([float(param.grad is not None) for param in params])
            flat = torch.cat([*(grad.flatten() for grad in given), flags])
            with name_silent_ranks(group):
                dist.all_reduce(flat, group=group)
            *sums, found = torch.split(flat, [*(param.numel() for param in params), len(params)])
            # read only if a gradient is missing here, because the CPU would wait for the GPU
            is_missing = any(param.grad is None for param in params)
            has_grads = found.tolist() if is_missing else [True] * len(params)
            for param, total, has_grad in zip(params, sums, has_grads, strict=True):
                param.grad = (total / count).view_as(param) if has_grad else None

    def finish_step(self, *, last: bool) -> int:
        sent = self._between.finish_step(last=last)
        self.wire_bytes += sent
        self._replica_bytes += sent
        return sent

    @property
    def is_synchronized(self) -> bool:
        return self._between.is_synchronized

    def adopt_weights(self) -> None:
        self._between.adopt_weights()

    def common_weights(self) -> AbstractContextManager[None]:
        return self._between.common_weights()

    def bad_parameters(self) -> list[str]:
        return self._between.bad_parameters()

    def metrics(self) -> dict[str, Any]:
        own = {} if self._averages_replicas else {"replica_wire_bytes": self._replica_bytes}
        return own | self._between.metrics()

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        self._between.slice_state(param, dim, index)

    def state_dict(self) -> dict[str, Any]:
        return self._between.state_dict()

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._between.merge_states(states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._between.load_state_dict(state)
