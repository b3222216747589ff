"""Gradient all-reduce: the mean of all gradients, in buckets that travel while the backward pass still runs.

PyTorch's DistributedDataParallel does the work; a communication hook of ours counts the bytes, notes when the last
bucket was ready (what follows is communication that nothing hides), and looks for NaN or Inf before one process's
gradient spreads to all.

Cost: a ring all-reduce of B bytes over N processes sends 2 (N - 1) / N · B bytes from each process (Patarasuk and Yuan,
2009). One more pass over the gradients reads them for the finiteness check.
"""

# No `from __future__ import annotations` here: DDP reads the annotations of its hook and wants the classes themselves.
import inspect
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scantling.comm.gradient_exchange import GradientExchange
from scantling.comm.transport.group import as_replica_group
from scantling.comm.transport.shards import to_local
from scantling.errors import UserError
from scantling.numerics.torch_private import non_persistent_buffers

_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"
"""PyTorch 2.13 renamed it; buffers are equal on all ranks from the start, and no forward pass needs to send them."""


def allreduce_wire_bytes(num_bytes: int, world_size: int) -> int:
    """Return the bytes that one process sends in an all-reduce of `num_bytes` over a ring of `world_size` processes.

    The payload has `world_size` pieces, and each process sends one piece in each of 2 (world_size - 1) rounds.
    """
    return 0 if world_size < 2 else 2 * (world_size - 1) * num_bytes // world_size


class AllReduce(GradientExchange):
    """Average gradients over all processes of the default process group.

    Collectives: one all-reduce per bucket in each step, started from the backward pass of the last micro-batch; one
    broadcast of the parameters in `prepare`. With `find_unused_parameters` another all-reduce in each step marks the
    used parameters.

    Args:
        bucket_mb: size of one bucket in MiB.
        find_unused_parameters: True to search the graph of each pass for parameters without a gradient; they have none
            afterwards if they get one on no process. Without it, such a pass is an error.
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
        # The hook runs in the last micro-batch only, and counts from 0.
        self._bytes = 0
        self._norms.clear()
        return nullcontext()

    def exchange(self) -> None:
        """Finish the exchange of this step.

        Raises:
            UserError: parameters got no gradient, so that not all was sent.
        """
        # DDP sends a bucket once it is complete: a missing gradient holds its whole bucket back.
        if self._bytes < self._all_bytes:
            raise UserError(
                f"{self._without_gradient()} got no gradient, so that other gradients were not averaged either; set "
                "comm.find_unused_parameters: true to search for such parameters in each step, or train on one process"
            )
        self.wire_bytes = allreduce_wire_bytes(self._bytes, dist.get_world_size())
        # After the last bucket was ready, no computation is left to hide communication.
        self.exposed_s = max(0.0, time.perf_counter() - self._last_ready)

    def bad_parameters(self) -> list[str]:
        return [name for norm, names in self._norms if not torch.isfinite(norm) for name in names]

    def _without_gradient(self) -> str:
        named = [] if self._model is None else self._model.module.named_parameters()
        names = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "some parameters"


def _average(
    state: AllReduce,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    names = [state._names[id(parameter)] for parameter in bucket.parameters()]
    # Before the all-reduce, which spreads NaN or Inf to all processes; the maximum keeps both.
    state._norms.append((torch.linalg.vector_norm(buffer, ord=float("inf")), names))
    state._bytes += buffer.nbytes
    state._last_ready = time.perf_counter()
    # Divide first, as DDP does: sums could overflow in fp16.
    buffer.div_(dist.get_world_size())
    future = dist.all_reduce(buffer, async_op=True).get_future()
    averaged: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
    return averaged


def averaged_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that `average_buffers` averages by name, on this process."""
    return {
        f"{path}.{name}" if path else name: to_local(value)
        for path, module in model.named_modules()
        for name, value in module.named_buffers(recurse=False)
        if name not in non_persistent_buffers(module) and value.is_floating_point()
    }


@torch.no_grad()
def average_buffers(model: nn.Module, process_group: Any = None) -> int:
    """Replace the buffers of all replicas by their mean, such as the running statistics of batch normalization.

    Only saved floating-point buffers are averaged: others are counters and masks, which are the same on all replicas.
    The mean of a buffer is over the replicas on which it is finite; if there is none, it stays. Call this on all
    replicas before an evaluation or a checkpoint. Collective: one all-reduce, in fp32 or, if a buffer is fp64, in fp64;
    none without such buffers.

    Args:
        model: the same on all replicas.
        process_group: group of the replicas, or a mesh of one dim; default all processes.

    Returns:
        The bytes that this process sent.
    """
    replicas = as_replica_group(process_group)
    replicas.reset_wire_bytes()
    buffers = [*averaged_buffers(model).values()]
    if not buffers:
        return 0
    # Not in bf16 or fp16: a sum of counts would stall at 256 or 2048 replicas, and sums of values round as much.
    dtype = torch.float64 if any(value.dtype == torch.float64 for value in buffers) else torch.float32
    is_finite = torch.stack([value.isfinite().all() for value in buffers])
    # A buffer that is not finite here counts as 0; `is_finite` is sent too, to count the others.
    sent = [torch.where(each, value, 0.0).flatten() for each, value in zip(is_finite, buffers, strict=True)]
    averaged = replicas.all_reduce_mean(torch.cat([value.to(dtype) for value in (*sent, is_finite)]))
    *means, share = torch.split(averaged, [*(value.numel() for value in buffers), len(buffers)])
    counts = (share * replicas.world_size).round().tolist()  # replicas on which each buffer is finite
    for value, mean, count in zip(buffers, means, counts, strict=True):
        # Mean over all replicas -> mean over those on which the buffer is finite
        if count:
            value.copy_(mean.view_as(value) * (replicas.world_size / count))
    return replicas.wire_bytes
