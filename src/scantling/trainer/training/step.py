"""One optimizer step: batches in, an update and its figures out.

The loss of a step is the sum over all targets of all micro-batches of all processes, divided by their number. So the
update does not depend on how the batch was cut into micro-batches and processes, nor on how unevenly targets fell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from scantling.comm import GradientExchange
from scantling.distributed.context import DistContext
from scantling.errors import NonFiniteError
from scantling.numerics.device import autocast
from scantling.trainer.data.loader import Batch
from scantling.trainer.tasks.base import Task
from scantling.trainer.training.graph import CudaGraphs, StepGraphs
from scantling.trainer.training.meters import Stopwatch
from scantling.trainer.training.methods import Method
from scantling.trainer.training.release import GradientRelease
from scantling.trainer.training.scaler import SharedGradScaler


@dataclass
class StepResult:
    """What one step did."""

    loss: float
    """Mean loss per target over all processes, in nats, before the update."""
    grad_norm: float
    """Global gradient norm before clipping; with an exchange of momentum that of this process alone."""
    num_tokens: int
    """Tokens put through the model by all processes, padding left out."""
    skipped: bool
    """Whether fp16 gradients overflowed, so that the update was left out and the loss scale lowered."""
    stop: bool
    """Whether any process was told to stop."""


class Stepper:
    """Takes optimizer steps.

    Collectives of one step with several processes: one all-reduce of the number of targets, those of the exchange, the
    scaler's, and one all-reduce of four numbers before the update; after a failure one gather of the reasons.

    Args:
        model: the bare model; the exchange wraps it.
        clip: largest global gradient norm, or None.
        release: where not None, it takes the step within the backward pass, with one process, and without clip or fp16.
        compute: "fp32", "bf16" or "fp16".
        graph: whether the work of a step is captured in CUDA graphs, see `StepGraphs`; with one process, an optimizer
            that is capturable, and without release or fp16.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: torch.optim.Optimizer,
        exchange: GradientExchange,
        context: DistContext,
        *,
        methods: Sequence[Method] = (),
        clip: float | None = 1.0,
        compute: str = "fp32",
        release: GradientRelease | None = None,
        graph: bool = False,
    ) -> None:
        self.model, self.task, self.optimizer, self.exchange, self.context = model, task, optimizer, exchange, context
        self.methods = list(methods)
        self.clip, self.compute, self.release = clip, compute, release
        self.scaler = SharedGradScaler(context.device.type, enabled=compute == "fp16")
        self.forward_model = exchange.prepare(model)
        self.watch = Stopwatch(context.device)
        self.graphs = StepGraphs(model, self._unwatched_passes, self._update, CudaGraphs) if graph else None

    def step(self, step: int, batches: Sequence[Batch], *, stop: Callable[[], bool] = lambda: False) -> StepResult:
        """Take step `step` (counted from 1).

        Raises:
            NonFiniteError: the loss or a gradient is NaN or Inf; nothing was updated, but where gradients are released
                perhaps other parameters, see `GradientRelease`.
        """
        device = self.context.device
        for method in self.methods:
            method.before_step(step)
        counts = torch.tensor(
            [sum(b.num_targets for b in batches), sum(b.num_tokens for b in batches)], dtype=torch.float64
        )
        counts = self.context.all_reduce(counts.to(device, torch.float32 if device.type == "mps" else torch.float64))
        share = self.context.world_size / counts[0].float()  # the exchange takes the mean over processes
        self.watch.lap("data")
        replayed = None if self.graphs is None else self.graphs.passes(batches, share)
        if replayed is not None:
            self.watch.lap("backward")
        loss_sum, norm = replayed or self._passes(batches, share, step)
        figures = torch.stack([loss_sum, (~torch.isfinite(loss_sum)).double(), (~torch.isfinite(norm)).double()])
        own_loss = loss_sum.clone()
        own_skipped = 0.0
        if self.exchange.local_nonfinite:
            figures.zero_()
            own_skipped = float(sum(b.num_targets for b in batches))
        rest = torch.tensor([float(stop()), own_skipped], dtype=torch.float64, device=device)
        figures = self.context.all_reduce(torch.cat([figures, rest]))
        self.watch.lap("exchange")
        total, bad_losses, bad_norms, stops, skipped_targets = figures.tolist()
        targets, tokens = counts.tolist()
        overflow = self.scaler.is_enabled() and bad_norms > 0 and bad_losses == 0
        if bad_losses or (bad_norms and not overflow) or skipped_targets == targets:
            self._refuse(step, own_loss)  # before clipping, which would spread a NaN to every gradient
        if self.graphs is not None and replayed is not None:
            self.graphs.update()
        else:
            self._update(norm)
            self.optimizer.zero_grad(set_to_none=True)
        if overflow and self.scaler.get_scale() < 2.0**-16:
            raise NonFiniteError(f"step {step}: fp16 gradients overflow at any loss scale; use bf16 or a lower lr")
        reshaped = [method.after_step(step, self.optimizer, self.exchange) for method in self.methods]
        if any(reshaped):
            self.reshape(batches[-1])
        self.watch.lap("optimizer")
        return StepResult(total / (targets - skipped_targets), float(norm), int(tokens), overflow, stops > 0)

    def _passes(self, batches: Sequence[Batch], share: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward passes of all micro-batches, and the exchange: the sum of the losses, the norm."""
        device = self.context.device
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        with ExitStack() as around:
            if self.release is not None:
                around.enter_context(self.release.during(step, len(batches)))
            # an exchange wants all gradients of the last pass in that pass
            shared = around.enter_context(ExitStack())
            together = len(batches) if self.context.world_size == 1 else len(batches) - 1
            for method in self.methods:
                shared.enter_context(method.passes(self.model, together))
            for index, batch in enumerate(batches):
                batch = batch.to(device, non_blocking=True)
                last = index == len(batches) - 1
                self.watch.lap("data")
                if index == together:
                    shared.close()
                    self.watch.lap("backward")
                with self.exchange.accumulate(last=last):
                    with autocast(self.compute, device):
                        loss = self.task.loss(self.forward_model, batch).loss
                    loss_sum += loss.detach()
                    scaled = loss * share
                    for method in self.methods:
                        scaled = method.extra_loss(scaled, 1.0 / len(batches))
                    self.watch.lap("forward")
                    if self.release is not None and last and not torch.isfinite(loss_sum):
                        self._refuse(step, loss_sum)  # the backward pass would take the step
                    self.scaler.scale(scaled).backward()  # type: ignore[no-untyped-call]
                    self.watch.lap("backward")
        self.watch.lap("backward")
        self.exchange.exchange()
        self.scaler.unscale_(self.optimizer)
        norm = self._total_norm()
        return loss_sum, norm

    def _unwatched_passes(self, batches: Sequence[Batch], share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self.watch.paused():
            return self._passes(batches, share, 0)

    def _update(self, norm: torch.Tensor) -> None:
        self._clip(norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def reshape(self, batch: Batch) -> None:
        """Let exchange and graphs see the parameters anew: some have other shapes. Collectives: those of `rehearse`."""
        self.recapture()
        if self.context.world_size > 1:
            self.forward_model = self.exchange.prepare(self.model)
            self.rehearse(batch)

    def recapture(self) -> None:
        """Drop what was captured: parameters or state are elsewhere than before."""
        if self.graphs is not None:
            self.graphs.forget()

    def close(self) -> None:
        """Let go of what was captured, for good."""
        self.recapture()
        self.graphs = None

    def rehearse(self, batch: Batch) -> None:
        """Pass a batch through the model and the exchange, and throw the gradients away.

        DDP lays its buckets out anew after its first pass, and over more than two processes the place of a gradient in
        a bucket decides the order in which it is summed. A resumed run rehearses before it takes its state back, so
        that its first step is summed as the step of the run that was never stopped. Collectives: the exchange's. An
        exchange that learns nothing from a pass is left alone.
        """
        if not self.exchange.needs_warm_up_pass:
            return
        with self.exchange.accumulate(last=True), autocast(self.compute, self.context.device):
            loss = self.task.loss(self.forward_model, batch.to(self.context.device)).loss
            loss.backward()  # type: ignore[no-untyped-call]
        self.exchange.exchange()
        self.optimizer.zero_grad(set_to_none=True)

    def _total_norm(self) -> torch.Tensor:
        if self.release is not None:
            return self.release.total_norm()
        if self.exchange.norm is not None:
            return self.exchange.norm
        return torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])

    def _clip(self, norm: torch.Tensor) -> None:
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.clip, norm)

    def _refuse(self, step: int, own_loss: torch.Tensor) -> None:
        """Say where the first NaN or Inf is, on which rank, and stop; the parameters are untouched."""
        if self.release is not None:
            self.release.check()
        found: str | None = None
        if not torch.isfinite(own_loss):
            found = f"the loss is {float(own_loss)}"
        elif bad := self.exchange.bad_parameters():
            found = self._first_bad(bad) or f"the gradient of one of {', '.join(bad[:3])} is not finite"
        everywhere = self.context.all_gather_object((found, self._first_bad(None)))
        ranks = [(rank, own) for rank, (own, _) in enumerate(everywhere) if own]
        rank, reason = ranks[0] if ranks else (self.context.rank, everywhere[self.context.rank][1])
        names = everywhere[rank][1]
        detail = f"; first bad tensor: {names}" if names and reason != names else ""
        raise NonFiniteError(
            f"step {step}, rank {rank}: {reason or 'the gradient norm is not finite'}{detail}; "
            "stopped before the update. Lower optim.lr, lengthen train.warmup, set train.clip, or compute in fp32"
        )

    def _first_bad(self, among: list[str] | None) -> str | None:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None or (among is not None and name not in among):
                continue
            finite = torch.isfinite(parameter.grad)
            if not finite.all():
                count = parameter.numel() - int(finite.sum())
                return f"the gradient of {name} ({count} of {parameter.numel()} values are NaN or Inf)"
        return None
