"""Gradient all-reduce with DistributedDataParallel, in buckets that overlap the backward pass; averaging of buffers.

A communication hook counts the bytes, records when the last bucket was ready (later communication is exposed), and
finds NaN or Inf before it reaches the other processes.

Cost: a ring all-reduce of B bytes over N processes sends 2 (N - 1) / N · B bytes from each process (Patarasuk and Yuan,
2009). The finiteness check reads the gradients once more.
"""

# no `from __future__ import annotations`: DDP checks that the annotations of its hook are the classes themselves
import inspect
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scantling.comm.gradient_exchange import GradientExchange
from scantling.comm.transport.group import as_replica_group
from scantling.comm.transport.shards import to_local
from scantling.errors import UserError
from scantling.numerics.torch_private import non_persistent_buffers

_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"
"""PyTorch 2.13 renamed it. Buffers start equal on all ranks, so no forward pass needs to send them."""


def allreduce_wire_bytes(num_bytes: int, world_size: int) -> int:
    """Return the bytes that one process sends in a ring all-reduce of `num_bytes` over `world_size` processes.

    Each process sends 1 / world_size of the payload in each of 2 (world_size - 1) rounds.
    """
    return 0 if world_size < 2 else 2 * (world_size - 1) * num_bytes // world_size


class AllReduce(GradientExchange):
    """Average gradients over all processes of the default process group.

    Collectives: one all-reduce per bucket in each step, started from the backward pass of the last micro-batch; one
    broadcast of the parameters in `prepare`. With `find_unused_parameters`, one more all-reduce in each step, for the
    parameters in use.

    Args:
        bucket_mb: size of one bucket in MiB.
        find_unused_parameters: True if some parameters may get no gradient in a pass; DDP then walks the graph to find
            them. A parameter unused on all processes keeps no gradient. If False, such a pass is an error.
    """

    needs_warm_up_pass = True

    def __init__(self, *, bucket_mb: float = 25.0, find_unused_parameters: bool = False) -> None:
        self.bucket_mb, self.find_unused_parameters = bucket_mb, find_unused_parameters
        self._bytes = self._all_bytes = 0
        self._last_ready = 0.0
        self._norms: list[tuple[torch.Tensor, list[str]]] = []
        self._names: dict[int, str] = {}
        self._model: DistributedDataParallel | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._all_bytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        options: dict[str, Any] = {
            "bucket_cap_mb": self.bucket_mb,
            "gradient_as_bucket_view": True,
            "find_unused_parameters": self.find_unused_parameters,
            _SYNC_BUFFERS: False,
        }
        self._model = DistributedDataParallel(model, **options)
        self._model.register_comm_hook(self, _average)
        return self._model

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        if self._model is None:
            raise AssertionError("prepare() comes first")
        if not last:
            context: AbstractContextManager[None] = self._model.no_sync()
            return context
        self._bytes = 0
        self._norms.clear()
        return nullcontext()

    def exchange(self) -> None:
        """Finish the exchange of this step.

        Raises:
            UserError: parameters without a gradient, so that some buckets were not sent.
        """
        if self._bytes < self._all_bytes:
            raise UserError(
                f"{self._describe_unused()} got no gradient, so that their bucket was not averaged; set "
                "comm.find_unused_parameters: true, or train with one process"
            )
        self.wire_bytes = allreduce_wire_bytes(self._bytes, dist.get_world_size())
        self.exposed_s = max(0.0, time.perf_counter() - self._last_ready)

    def bad_parameters(self) -> list[str]:
        return [name for norm, names in self._norms if not torch.isfinite(norm) for name in names]

    def _describe_unused(self) -> str:
        named = [] if self._model is None else self._model.module.named_parameters()
        names = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "some parameters"


def _average(
    state: AllReduce,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    names = [state._names[id(parameter)] for parameter in bucket.parameters()]
    state._norms.append((torch.linalg.vector_norm(buffer, ord=float("inf")), names))
    state._bytes += buffer.nbytes
    state._last_ready = time.perf_counter()
    buffer.div_(dist.get_world_size())
    future = dist.all_reduce(buffer, async_op=True).get_future()
    averaged: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
    return averaged


@torch.no_grad()
def average_buffers(model: nn.Module, process_group: Any = None) -> int:
    """Average the buffers of all replicas, such as the running statistics of batch normalization.

    Only persistent floating-point buffers are averaged; others are counters and masks, which are equal. The mean is
    over the replicas with a finite buffer; without any, the buffer stays. Call it on all replicas before an evaluation
    or a checkpoint. Collectives: one all-reduce per dtype.

    Args:
        model: the same model on all replicas.
        process_group: group of the replicas, or a mesh of one dim. Default: all processes.

    Returns:
        Bytes that this process sent.
    """
    replicas = as_replica_group(process_group)
    replicas.reset_wire_bytes()
    buffers = [
        to_local(value)
        for module in model.modules()
        for name, value in module.named_buffers(recurse=False)
        if name not in non_persistent_buffers(module) and value.is_floating_point()
    ]
    for dtype in sorted({value.dtype for value in buffers}, key=str):
        parts = [value for value in buffers if value.dtype == dtype]
        finite = torch.stack([value.isfinite().all() for value in parts])
        sent = [torch.where(is_finite, value, 0.0).flatten() for is_finite, value in zip(finite, parts, strict=True)]
        sizes = [value.numel() for value in parts]
        *means, share = torch.split(
            replicas.all_reduce_mean(torch.cat([*sent, finite.to(dtype)])), [*sizes, len(parts)]
        )
        for value, mean, number in zip(
            parts, means, (share.float() * replicas.world_size).round().tolist(), strict=True
        ):
            if number:
                value.copy_(mean.view_as(value) * (replicas.world_size / number))
    return replicas.wire_bytes
