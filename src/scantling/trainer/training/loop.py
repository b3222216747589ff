"""The loop: steps, evaluation, checkpoints, records. It knows no method and no recipe.

The order in one step: learning rate → batches → `Stepper.step` → evaluation when due → record → checkpoint when due.
The record comes before the checkpoint, so that no step before a checkpoint can lack its line; after a crash between the
two, the step is taken and recorded once more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scantling.distributed.context import DistContext
from scantling.errors import NonFiniteError, RunError, first_line
from scantling.optim.memory import state_bytes
from scantling.trainer.data.loader import BatchSource
from scantling.trainer.training.checkpoint import Checkpointer, State, check_data, load_tensors
from scantling.trainer.training.manifest import read_manifest
from scantling.trainer.training.meters import EnergyMeter, MemoryMeter
from scantling.trainer.training.methods import Method
from scantling.trainer.training.signals import StopSignal
from scantling.trainer.training.sinks import Sink
from scantling.trainer.training.states import (
    exchange_state,
    load_exchange,
    load_model,
    load_optimizer,
    load_rng,
    merge,
    model_state,
    optimizer_state,
    rng_state,
)
from scantling.trainer.training.step import Stepper


@dataclass(frozen=True)
class Schedule:
    """When what happens.

    Args:
        steps: length of the run.
        lr_factor: the learning rate of a step (from 1) as a share of each group's peak.
        eval_every: steps between evaluations, or None for only after the last.
        checkpoint_every: steps between checkpoints, or None for only after the last.
    """

    steps: int
    lr_factor: Callable[[int], float]
    eval_every: int | None = None
    checkpoint_every: int | None = None


@dataclass
class Outcome:
    """How the loop ended."""

    step: int
    tokens: int
    stopped: bool
    """A signal ended it, after saving."""


class Loop:
    """Runs a model through its steps.

    Args:
        stepper: takes the steps; holds model, optimizer, exchange and methods.
        batches: the source of this rank's micro-batches.
        evaluate: returns the held-out metrics of the model as it is, or None where nothing is held out.
        checkpointer: where checkpoints go.
        sink: receives the records, on rank 0.
        memory, energy: meters made before the model was built.
        facts: gives figures of the model as it is, added to each record (`num_parameters`, `weight_bytes`, ...).
    """

    def __init__(
        self,
        stepper: Stepper,
        batches: BatchSource,
        schedule: Schedule,
        *,
        evaluate: Callable[[], dict[str, float]] | None,
        checkpointer: Checkpointer,
        sink: Sink,
        memory: MemoryMeter,
        energy: EnergyMeter,
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        self.stepper, self.batches, self.schedule = stepper, batches, schedule
        self.evaluate, self.checkpointer, self.sink = evaluate, checkpointer, sink
        self.memory, self.energy, self.facts = memory, energy, facts
        self.step = 0
        self.tokens = 0
        self.fingerprint: str | None = None
        """What the prepared data is known by; a checkpoint of other data is refused."""
        self.recipe: dict[str, Any] | None = None
        """The recipe of the run, for its checkpoints."""
        self.first_phase: str | None = "first step"
        """The phase of the first step that is taken here; None after it."""
        self._earlier_joules = 0.0

    @property
    def context(self) -> DistContext:
        return self.stepper.context

    @property
    def model(self) -> nn.Module:
        return self.stepper.model

    @property
    def methods(self) -> Sequence[Method]:
        return self.stepper.methods

    def run(self) -> Outcome:
        """Go on to the last step, or to the step in which a signal comes.

        Collectives: those of the stepper, of the evaluation and of the checkpoints, on every rank in the same order.
        """
        self.model.train()
        with StopSignal() as stop:
            self.sink.phase("first batch")
            while self.step < self.schedule.steps:
                if self._one_step(stop):
                    return Outcome(self.step, self.tokens, stopped=True)
        return Outcome(self.step, self.tokens, stopped=False)

    def _one_step(self, stop: StopSignal) -> bool:
        """Take one step with all that belongs to it; whether the run is to stop before its end."""
        began = time.perf_counter()
        step, optimizer = self.step + 1, self.stepper.optimizer
        for group in optimizer.param_groups:  # before any is set: groups may share one tensor
            if "initial_lr" not in group:
                group["initial_lr"] = float(group["lr"])
        factor = self.schedule.lr_factor(step)
        for group in optimizer.param_groups:
            _set_lr(group, group["initial_lr"] * factor)
        self.stepper.watch.start()
        batches = self.batches.next_step()
        if self.first_phase is not None:
            self.sink.phase(self.first_phase)
            self.first_phase = None
        result = self.stepper.step(step, batches, stop=lambda: stop.received is not None)
        phases = self.stepper.watch.read()
        step_s = time.perf_counter() - began
        exposed = self.stepper.exchange.exposed_s
        self.step, self.tokens = step, self.tokens + result.num_tokens
        record = {
            "step": step,
            "epoch": self.batches.epoch,
            "tokens": self.tokens,
            "loss": result.loss,
            "grad_norm": result.grad_norm if not result.skipped and math.isfinite(result.grad_norm) else None,
            "lr": max(group["initial_lr"] for group in optimizer.param_groups) * factor,
            "tokens_per_s": result.num_tokens / step_s,
            "step_s": step_s,
            "data_s": phases.get("data", 0.0),
            "forward_s": phases.get("forward", 0.0),
            "backward_s": max(0.0, phases.get("backward", 0.0) - exposed),
            "exchange_s": phases.get("exchange", 0.0) + exposed,
            "optimizer_s": phases.get("optimizer", 0.0),
            "peak_memory_bytes": self.memory.peak_bytes(),
            "memory_source": self.memory.source,
            "base_memory_bytes": self.memory.base_bytes,
            "optimizer_state_bytes": state_bytes(optimizer),
            "wire_bytes": self.stepper.exchange.wire_bytes,
            **self.facts(),
        }
        if result.skipped:
            record["skipped"] = True
        if self.stepper.exchange.nonfinite_ranks:
            record["nonfinite_ranks"] = list(self.stepper.exchange.nonfinite_ranks)
        record |= self.stepper.exchange.metrics()
        for method in self.methods:
            record |= method.metrics()
        last = step == self.schedule.steps
        if last or _due(step, self.schedule.eval_every):
            self.sink.phase("evaluating")
            record |= self._evaluated(step)
        joules = self.energy.joules()
        record["energy_j"] = None if joules is None else joules + self._earlier_joules
        record["energy_source"] = self.energy.source
        record["time"] = time.time()
        self.sink.record(record)
        if last or result.stop or _due(step, self.schedule.checkpoint_every):
            self.sink.phase("writing a checkpoint")
            self.sink.sync()
            path = self.save()
            self.sink.phase(None)
            self.sink.message(f"step {step}: checkpoint {path}")
        return result.stop and not last

    def _evaluated(self, step: int) -> dict[str, float]:
        if self.evaluate is None:
            return {}
        figures = self.evaluate()
        if not math.isfinite(figures["eval_loss"]):
            raise NonFiniteError(
                f"step {step}: the held-out loss is {figures['eval_loss']}; lower optim.lr or lengthen train.warmup"
            )
        return figures

    def save(self) -> Path:
        """Write a checkpoint of this moment. Collectives: those of `Checkpointer.save`."""
        methods = State()
        for method in self.methods:
            for key, value in method.state_dict().items():
                if isinstance(value, torch.Tensor):
                    methods.tensors[f"method/{method.name}/{key}"] = value
                else:
                    methods.values.setdefault("methods", {}).setdefault(method.name, {})[key] = value
        joules = self.energy.joules()
        own = State(
            values={
                "step": self.step,
                "tokens": self.tokens,
                "recipe": self.recipe,
                "data": self.batches.state_dict(),
                "fingerprint": self.fingerprint,
                "scaler": self.stepper.scaler.state_dict(),
                "joules": None if joules is None else joules + self._earlier_joules,
            }
        )
        parts = (
            model_state(self.model),
            optimizer_state(self.stepper.optimizer, self.model),
            exchange_state(self.stepper.exchange, self.context),
            rng_state(self.context),
        )
        return self.checkpointer.save(self.step, merge(*parts, methods, own))

    def resume(self, path: Path) -> bool:
        """Take everything back from a checkpoint, so that the next step is the one that would have come.

        Collectives: those of `Stepper.rehearse`, with several processes.

        Returns:
            Whether the random generators were taken back too: they are not on another number of processes.

        Raises:
            UserError: the checkpoint does not fit this run.
        """
        manifest = read_manifest(path)
        values = manifest["values"]
        check_data(path, values, self.fingerprint)
        load_methods(self.methods, path, values)
        if self.context.world_size > 1:
            self.model.train()
            self.stepper.reshape(self.batches.next_step()[-1])
        load_model(self.model, path)
        load_optimizer(self.stepper.optimizer, self.model, path)
        load_exchange(self.stepper.exchange, path, self.context)
        self.stepper.recapture()
        self.batches.load_state_dict(values["data"])
        if values["scaler"]:
            self.stepper.scaler.load_state_dict(values["scaler"])
        self.step, self.tokens = values["step"], values["tokens"]
        self._earlier_joules = values["joules"] or 0.0
        same = bool(manifest["world_size"] == self.context.world_size)
        if same:
            load_rng(path, self.context)
        return same


def load_methods(methods: Sequence[Method], path: Path, values: dict[str, Any]) -> None:
    """Give each method its state from a checkpoint with these values; those of model and optimizer come after it."""
    own = values.get("methods", {})
    for method in methods:
        prefix = f"method/{method.name}/"
        stored: dict[str, Any] = {
            key.removeprefix(prefix): tensor for key, tensor in load_tensors(path, prefix).items()
        }
        method.load_state_dict(stored | own.get(method.name, {}))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def out_of_memory(error: BaseException) -> RunError | None:
    """A clear error for a failed allocation, or None for any other error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return RunError(
            f"out of memory: {first_line(error)}. "
            "Set train.micro_batch_size lower, train.activation_checkpointing: true, or a smaller model; "
            "`scantling plan` shows what each part needs"
        )
    return None
