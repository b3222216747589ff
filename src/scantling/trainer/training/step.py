"""One optimizer step: forward, backward, exchange, check, update.

The loss of a step is the sum over all targets of all micro-batches of all processes, divided by their number. So the
update does not depend on how the batch is divided into micro-batches and processes, even if targets are uneven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scantling.comm import GradientExchange
from scantling.comm.transport.shards import clip_gradients, combine_norms, local_norm, to_local, total_norm
from scantling.distributed.context import DistContext
from scantling.distributed.mesh import SHARD
from scantling.errors import NonFiniteError
from scantling.numerics.device import autocast
from scantling.numerics.torch_private import found_inf
from scantling.optim import CAME, ReleaseHandle, release_gradients
from scantling.trainer.data.loader import Batch
from scantling.trainer.tasks.base import Task
from scantling.trainer.training.cuda_graphs import CudaGraphs, StepGraphs
from scantling.trainer.training.meters import Stopwatch
from scantling.trainer.training.tensor_training import TensorTraining

MOST_UNSUMMED = 10
"""Most local steps without a sum over replicas, which also tells them of a signal to stop."""


@dataclass
class StepResult:
    """Result of one step; in local steps see `Stepper._finish_local_step`."""

    loss: float
    """Mean loss per target over all processes, in nats, before the update."""
    grad_norm: float
    """Global gradient norm before clipping; of this process alone with an exchange of momentum."""
    num_tokens: int
    """Tokens of all processes, without padding."""
    skipped: bool
    """True if fp16 gradients overflowed: no update, and a lower loss scale."""
    stop: bool
    """True if any process received a signal to stop."""
    is_applied: bool = True
    """False if the exchange broke, because a replica left: nothing was updated."""


class Stepper:
    """Takes optimizer steps.

    Collectives of one step with several processes: one all-reduce of the number of targets, those of the exchange, the
    scaler's, and one all-reduce of five numbers before the update; after a failure one gather of the reasons.

    Args:
        model: the bare model; the exchange wraps it.
        tensor: TT layers of the model; without any, `TensorTraining(None, ...)`.
        clip: largest global gradient norm, or None.
        release: takes the step within the backward pass; with one process, and without clip or fp16.
        compute: "fp32", "bf16" or "fp16".
        batch_weights: relative shares of all processes in a batch; equal by default.
        graph: capture the work of a step in CUDA graphs, see `StepGraphs`; with one process, a capturable optimizer,
            and without release or fp16.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: torch.optim.Optimizer,
        exchange: GradientExchange,
        context: DistContext,
        *,
        tensor: TensorTraining,
        clip: float | None = 1.0,
        compute: str = "fp32",
        batch_weights: Sequence[int] | None = None,
        release: GradientRelease | None = None,
        graph: bool = False,
    ) -> None:
        self.model, self.task, self.optimizer, self.exchange, self.context = model, task, optimizer, exchange, context
        self.tensor = tensor
        self.clip, self.compute, self.release = clip, compute, release
        weights = [1] * context.world_size if batch_weights is None else batch_weights
        # tokens of all replicas for each token of this one
        self._token_ratio = sum(weights) / (weights[context.rank] * context.num_shards)
        self.scaler = SharedGradScaler(context.device.type, enabled=compute == "fp16")
        self.forward_model = exchange.prepare(model)
        self.watch = Stopwatch(context.device)
        self.unsummed: list[list[float]] = []
        self.last_loss = 0.0
        self.graphs = StepGraphs(model, self._run_unwatched_passes, self._update, CudaGraphs) if graph else None

    def step(
        self, step: int, batches: Sequence[Batch], *, last: bool = False, stop: Callable[[], bool] = lambda: False
    ) -> StepResult:
        """Take step `step` (counted from 1), the `last` of the run or another one.

        Raises:
            NonFiniteError: the loss or a gradient is NaN or Inf; nothing was updated, except perhaps other parameters
                if gradients are released, see `GradientRelease`.
        """
        self.watch.lap("data")
        self.exchange.begin_step()
        self.watch.lap("exchange")
        self.tensor.begin_step()
        counts = self._count_targets(batches)
        scale = self._num_averaged / counts[0].float()  # the exchange averages over processes
        self.watch.lap("data")
        # forward and backward passes, and the exchange
        replayed = None if self.graphs is None else self.graphs.run_passes(batches, scale)
        if replayed is not None:
            self.watch.lap("backward")
        loss_sum, norm = replayed or self._run_passes(batches, scale, step)
        # check on all ranks: no NaN or Inf reaches an update
        own_loss = loss_sum.clone()
        checks = self._reduce_checks(loss_sum, norm, stop(), batches)
        total, bad_losses, bad_norms, stops, skipped_targets = checks
        self.watch.lap("exchange")
        # reading waits for the device: do it only after the passes are queued
        targets, tokens = counts.tolist()
        # a finite loss with non-finite fp16 gradients means that the loss scale was too large
        overflow = self.scaler.is_enabled() and bad_norms > 0 and bad_losses == 0
        # ranks whose gradients the exchange left out are no failure, unless it left out all
        if not self.exchange.keeps_replicas_equal:
            if self.context.num_shards == 1:
                self.last_loss = self.last_loss if bad_losses else float(own_loss) / targets
            elif not bad_losses and not self.exchange.local_nonfinite:  # else the sum over the shards has been dropped
                self.last_loss = total / targets
            if bad_losses:  # no other replica knows of it
                self.exchange.local_nonfinite = True
                self.optimizer.zero_grad(set_to_none=True)
                total, skipped_targets = 0.0, targets
        elif (
            bad_losses or (bad_norms and not overflow) or (skipped_targets == targets and not self.exchange.is_elastic)
        ):
            self._raise_nonfinite(step, own_loss)  # before clipping, which would spread a NaN to every gradient
        # clip and update
        if self.graphs is not None and replayed is not None:
            self.graphs.run_update()
        else:
            self._update(norm)
            # free the gradients; those of graphs stay, because their addresses are captured
            self.optimizer.zero_grad(set_to_none=True)
        self.watch.lap("optimizer")
        self.exchange.finish_step(last=last)
        self.watch.lap("exchange")
        # the scale starts at 2**16 and is halved after each overflow
        if overflow and self.scaler.get_scale() < 2.0**-16:
            raise NonFiniteError(f"step {step}: fp16 gradients overflow at any loss scale; use bf16 or a lower lr")
        if self.tensor.end_step(step, self.optimizer, self.exchange):
            self.reshape(batches[-1])
        self.watch.lap("optimizer")
        if not self.exchange.keeps_replicas_equal:
            own = [total, targets - skipped_targets, tokens, float(stops > 0)]
            return self._finish_local_step(step, own, self.last_loss, float(norm))
        if skipped_targets < targets:
            self.last_loss = total / (targets - skipped_targets)
        applied = self.exchange.is_applied
        return StepResult(self.last_loss, float(norm), int(tokens), overflow, stops > 0, is_applied=applied)

    def _finish_local_step(self, step: int, own: list[float], loss: float, norm: float) -> StepResult:
        """Return the result of a local step, in which replicas sum nothing; they do after an exchange or ten steps.

        The sums cost a round trip, in which nothing else happens. In between, the loss is that of this replica, and the
        tokens of all are estimated from its own.

        Args:
            step: number of the step.
            own: loss sum, targets, tokens and whether to stop, of this replica.
            loss: mean over the targets of this replica, also if its gradient was left out; the last finite one.
            norm: of the gradient of this replica.
        """
        flags = [float(self.exchange.local_nonfinite and rank == self.context.rank) for rank in self._ranks]
        self.unsummed.append([*own, *flags])
        if not self.exchange.is_synchronized and len(self.unsummed) < MOST_UNSUMMED:
            return StepResult(loss, norm, round(own[2] * self._token_ratio), False, False)
        reported = sum(round(row[2] * self._token_ratio) for row in self.unsummed[:-1])
        rows = torch.tensor(self.unsummed, dtype=torch.float64, device=self.context.device)
        self.unsummed = []
        # the processes of a replica have the same row
        losses, targets, tokens, stops, *left_out = (self.context.all_reduce(rows) / self.context.num_shards).T.tolist()
        self.exchange.nonfinite_ranks = tuple(rank for rank in self._ranks if any(left_out[rank]))
        if not any(targets):
            self._raise_nonfinite(step, torch.tensor(loss))
        mean = losses[-1] / targets[-1] if targets[-1] else loss
        return StepResult(mean, norm, round(sum(tokens) - reported), False, any(stops))

    @property
    def _ranks(self) -> range:
        return range(self.context.world_size)

    @property
    def _num_averaged(self) -> int:
        """Processes over which the gradients of a step are averaged."""
        return self.context.world_size if self.exchange.keeps_replicas_equal else self.context.num_shards

    def _sum(self, values: Tensor) -> Tensor:
        """Sum a small tensor in place, over all processes, or in local steps over those of the replica."""
        if self.exchange.keeps_replicas_equal:
            return self.context.all_reduce(values)
        if self.context.mesh is not None:
            dist.all_reduce(values, group=self.context.mesh.get_group(SHARD))
        return values

    def _count_targets(self, batches: Sequence[Batch]) -> Tensor:
        """Return the targets and tokens of all processes, or in local steps of the replica, (2,), on the device."""
        own = [sum(b.num_targets for b in batches), sum(b.num_tokens for b in batches)]
        # float64 counts exactly up to 2**53
        return self._sum(torch.tensor(own, dtype=torch.float64, device=self.context.device))

    def _reduce_checks(self, loss_sum: Tensor, norm: Tensor, stop: bool, batches: Sequence[Batch]) -> list[float]:
        """Sum as `_sum` does: loss, non-finite losses, non-finite norms, stop requests, skipped targets."""
        # (3,): count non-finite values separately, because one NaN makes the whole sum NaN
        own = torch.stack([loss_sum, (~torch.isfinite(loss_sum)).double(), (~torch.isfinite(norm)).double()])
        own_skipped = 0.0
        if self.exchange.local_nonfinite:  # this process's gradient was NaN or Inf and went into no exchange
            own.zero_()
            own_skipped = float(sum(b.num_targets for b in batches))
        rest = torch.tensor([float(stop), own_skipped], dtype=torch.float64, device=own.device)
        totals: list[float] = self._sum(torch.cat([own, rest])).tolist()
        return totals

    def _run_passes(self, batches: Sequence[Batch], scale: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Run forward and backward passes of all micro-batches, and the exchange; return loss sum and norm."""
        device = self.context.device
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        # each micro-batch adds its share of the step's mean to the gradients
        with ExitStack() as contexts:
            if self.release is not None:
                contexts.enter_context(self.release.release_in_step(step, len(batches)))
            # the exchange needs all gradients within the last pass, so cores are merged for the passes before it
            merged = contexts.enter_context(ExitStack())
            num_merged = len(batches) if self.context.world_size == 1 else len(batches) - 1
            merged.enter_context(self.tensor.merge_cores(self.model, num_merged))
            for i, batch in enumerate(batches):
                batch = batch.to(device, non_blocking=True)
                last = i == len(batches) - 1
                self.watch.lap("data")
                if i == num_merged:
                    merged.close()
                    self.watch.lap("backward")
                with self.exchange.accumulate(last=last):
                    with autocast(self.compute, device):
                        loss = self.task.loss(self.forward_model, batch).loss
                    loss_sum += loss.detach()
                    # the loss is a sum over targets; `scale` makes it this batch's share of the mean
                    scaled = self.tensor.add_penalty(loss * scale, 1.0 / len(batches))
                    self.watch.lap("forward")
                    if self.release is not None and last:
                        self._check_loss(step, loss_sum)  # the backward pass takes the step
                    self.scaler.scale(scaled).backward()  # type: ignore[no-untyped-call]
                    self.watch.lap("backward")
        self.watch.lap("backward")
        # after this, `.grad` holds the mean over processes, or the momentum of the exchange
        self.exchange.exchange()
        # unscale before the norm is taken, so that clipping sees the true gradients
        self.scaler.unscale_(self.optimizer)
        return loss_sum, self._total_norm()

    def _check_loss(self, step: int, own: Tensor) -> None:
        """Raise a NonFiniteError on all processes if the loss of one is NaN or Inf. Collective: one all-reduce."""
        bad = self.context.all_reduce((~torch.isfinite(own)).double())
        if bad:
            self._raise_nonfinite(step, own)

    def _run_unwatched_passes(self, batches: Sequence[Batch], scale: Tensor) -> tuple[Tensor, Tensor]:
        with self.watch.paused():
            return self._run_passes(batches, scale, 0)

    def _update(self, norm: Tensor) -> None:
        if self.clip is not None:
            clip_gradients(self.model.parameters(), self.clip, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _total_norm(self) -> Tensor:
        if self.release is not None:
            return self.release.total_norm()
        if self.exchange.norm is not None:
            return self.exchange.norm
        return total_norm([p.grad for p in self.model.parameters() if p.grad is not None])

    def reshape(self, batch: Batch) -> None:
        """Update exchange and graphs after parameters changed their shapes. Collectives: those of `rehearse`."""
        self.reset_graphs()
        if self.context.world_size > 1 or not self.exchange.keeps_replicas_equal:
            self.forward_model = self.exchange.prepare(self.model)
            self.rehearse(batch)

    def reset_graphs(self) -> None:
        """Drop captured graphs after parameters or state moved to other addresses."""
        if self.graphs is not None:
            self.graphs.reset()

    def close(self) -> None:
        """Drop captured graphs for good."""
        self.reset_graphs()
        self.graphs = None

    def rehearse(self, batch: Batch) -> None:
        """Pass a batch through the model and the exchange, and discard the gradients. Collectives: the exchange's.

        DDP rebuilds its buckets after its first pass, and over more than two processes the position of a gradient in a
        bucket decides the order of its summation. A resumed run rehearses before it loads its state, so that its first
        step sums in the same order as in a run without interruption. No-op for an exchange without such buckets.
        """
        if not self.exchange.needs_warm_up_pass:
            return
        self._pass(batch, last=True)
        self.exchange.exchange()
        self.optimizer.zero_grad(set_to_none=True)

    def run_without_exchange(self, batches: Sequence[Batch]) -> None:
        """Run forward and backward passes, wait for them, and discard the gradients."""
        losses = [self._pass(batch, last=False) for batch in batches]
        self.optimizer.zero_grad(set_to_none=True)
        float(losses[-1])  # waits for the device

    def _pass(self, batch: Batch, *, last: bool) -> Tensor:
        """Run a forward and a backward pass, the `last` of a step or another one; return the loss."""
        with self.exchange.accumulate(last=last), autocast(self.compute, self.context.device):
            loss = self.task.loss(self.forward_model, batch.to(self.context.device)).loss
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _raise_nonfinite(self, step: int, own_loss: Tensor) -> None:
        """Raise a NonFiniteError with the first NaN or Inf and its rank; the parameters are unchanged."""
        if self.release is not None and self.context.world_size == 1:
            self.release.check()
        own: str | None = None
        if not torch.isfinite(own_loss):
            own = f"the loss is {float(own_loss)}"
        elif bad := self.exchange.bad_parameters():
            own = self._first_nonfinite(bad) or f"the gradient of one of {', '.join(bad[:3])} is not finite"
        # the exchange spreads a NaN to all ranks, so ask each for the state before it
        first = self._first_nonfinite(None) if self.release is None else self.release.first_nonfinite()
        by_rank = self.context.all_gather_object((own, first))
        # of a sharded model, the process with the bad part of a gradient is named if no loss was bad
        failed = [(rank, reason) for rank, (reason, _) in enumerate(by_rank) if reason]
        failed = failed or [(rank, tensor) for rank, (_, tensor) in enumerate(by_rank) if tensor]
        rank, reason = failed[0] if failed else (self.context.rank, None)
        tensor = by_rank[rank][1]
        detail = f"; first bad tensor: {tensor}" if tensor and reason != tensor else ""
        raise NonFiniteError(
            f"step {step}, rank {rank}: {reason or 'the gradient norm is not finite'}{detail}; "
            "stopped before the update. Lower optim.lr, lengthen train.warmup, set train.clip, or compute in fp32"
        )

    def _first_nonfinite(self, among: list[str] | None) -> str | None:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None or (among is not None and name not in among):
                continue
            part = to_local(parameter.grad)
            finite = torch.isfinite(part)
            if not finite.all():
                count, kept = part.numel() - int(finite.sum()), part.numel()
                own = "" if kept == parameter.numel() else " on this process"
                return f"the gradient of {name} ({count} of {kept} values{own} are NaN or Inf)"
        return None


class SharedGradScaler(torch.amp.GradScaler):
    """A GradScaler with the same decision on all ranks: an overflow on one skips the update on all.

    Collective: one all-reduce of one number in `unscale_` with several processes and scaling on.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled() and dist.is_available() and dist.is_initialized():
            # 1 on one rank becomes 1 on all: each of them skips the update
            for flag in found_inf(self, optimizer):
                dist.all_reduce(flag, op=dist.ReduceOp.MAX)


class GradientRelease:
    """Takes the step of each parameter within the backward pass and keeps only the norm of its gradient.

    On a CPU a gradient that is not finite stops the run before it is used. On a GPU a check of each gradient would wait
    for the device each time, and of a sharded model for the other processes, so it is found after the step, before
    anything is saved.

    Args:
        optimizer: CAME, over parameters of the model. Of a sharded model, those that stay whole keep their gradients.
        see_gradient: called with each parameter while its gradient exists.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, see_gradient: Callable[[Tensor], None]
    ) -> None:
        assert isinstance(optimizer, CAME), "a checked recipe asks for this with came only"
        self._model, self._optimizer = model, optimizer
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._params = dict(model.named_parameters())
        # whole parameters of a sharded model are averaged after the backward pass, and stepped then
        self._is_sharded = any(isinstance(parameter, DTensor) for parameter in self._params.values())
        self._released = [p for p in self._params.values() if isinstance(p, DTensor) or not self._is_sharded]
        self._see_gradient = see_gradient
        self._norms: dict[str, Tensor] = {}  # in the order of the backward pass
        self._step = 0

    def release_in_step(self, step: int, num_passes: int) -> ReleaseHandle:
        """Let the last of `num_passes` backward passes take step `step`, until the handle is closed.

        Raises:
            NonFiniteError: from the backward pass on a CPU, a gradient is NaN or Inf.
        """
        self._norms, self._step = {}, step
        return release_gradients(
            self._model,
            self._optimizer,
            params=self._released,
            accumulation=num_passes,
            before_step=self._before_step,
        )

    def total_norm(self) -> Tensor:
        """Return the global norm of all gradients, released or kept."""
        for name, parameter in self._params.items():
            if parameter.grad is not None:
                self._norms[name] = local_norm(parameter.grad)
        # in the order of the parameters, so that the sum does not depend on the backward pass
        norms = [(parameter, self._norms[name]) for name, parameter in self._params.items() if name in self._norms]
        return combine_norms(norms)

    def first_nonfinite(self) -> str | None:
        """Return the first gradient that was not finite on this process, or None."""
        bad = (name for name, value in self._norms.items() if not torch.isfinite(value))
        return next((f"the gradient of {name}" for name in bad), None)

    def check(self) -> None:
        """Raise a NonFiniteError for the first gradient that was not finite."""
        for name, value in self._norms.items():
            self._check_norm(name, value)

    def _before_step(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        name = self._names[id(parameter)]
        self._norms[name] = local_norm(parameter.grad)
        # checks of a sharded model would wait for the other processes
        if parameter.device.type == "cpu" and not self._is_sharded:
            self._check_norm(name, self._norms[name])
        self._see_gradient(parameter)

    def _check_norm(self, name: str, value: Tensor) -> None:
        if torch.isfinite(value):
            return
        raise NonFiniteError(
            f"step {self._step}, rank 0: the gradient of {name} is not finite. With optim.release_gradients other "
            "parameters have taken the step already: resume from the last checkpoint. Lower optim.lr, lengthen "
            "train.warmup, or leave optim.release_gradients out and set train.clip"
        )
