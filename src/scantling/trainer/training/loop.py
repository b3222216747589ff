"""Training loop: steps, evaluations, records and checkpoints.

Order in one step: learning rate → batches → `Stepper.step` → evaluation if due → record → checkpoint if due. The record
precedes the checkpoint, so that every step before a checkpoint has its line; after a crash between the two, the step is
taken and recorded again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from scantling.comm import DemoExchange
from scantling.comm.consistency import describe_decoder
from scantling.comm.transport.background import WAIT_S
from scantling.distributed.context import DistContext
from scantling.errors import NonFiniteError, RunError, ScantlingError, SilentPeerError, UserError, first_line
from scantling.optim.memory import state_bytes
from scantling.trainer.data.loader import BatchSource
from scantling.trainer.training.checkpoint import Checkpoint, Checkpointer, State
from scantling.trainer.training.checkpoint_state import (
    exchange_state,
    load_exchange,
    load_model,
    load_optimizer,
    load_own_optimizer,
    load_rng,
    load_tensor,
    merge_states,
    model_state,
    optimizer_state,
    rng_state,
    tensor_state,
)
from scantling.trainer.training.elastic import ElasticReplicas, hash_identity
from scantling.trainer.training.meters import EnergyMeter, MemoryMeter
from scantling.trainer.training.schedule import Schedule
from scantling.trainer.training.signals import StopSignal
from scantling.trainer.training.sinks import Sink
from scantling.trainer.training.step import Stepper, StepResult

logger = logging.getLogger(__name__)

MOST_BROKEN = 10
"""Steps in a row whose exchange may break, before an elastic replica ends."""


@dataclass
class Outcome:
    """End of a loop."""

    step: int
    tokens: int
    stopped: bool
    """True if a signal ended it, after a checkpoint."""


class Loop:
    """Runs a model through its steps.

    Args:
        stepper: takes the steps; holds model, optimizer and exchange.
        batches: source of this rank's micro-batches.
        schedule: learning rates, evaluations and checkpoints.
        evaluate: returns the held-out metrics of the model; None if nothing is held out.
        checkpointer: saves checkpoints.
        sink: receives the records, on rank 0.
        memory, energy: meters made before the model was built.
        model_stats: returns sizes of the model, added to each record (`num_parameters`, `weight_bytes`, ...).
        fingerprint: of the prepared data, saved in checkpoints.
        recipe: as JSON values, saved in checkpoints.
        first_phase: text for the first step, which takes longer than others.
        elastic: replicas that leave and join; None if they stay.
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
        model_stats: Callable[[], dict[str, Any]],
        fingerprint: str | None = None,
        recipe: dict[str, Any] | None = None,
        first_phase: str = "first step",
        elastic: ElasticReplicas | None = None,
    ) -> None:
        self.stepper, self.batches, self.schedule = stepper, batches, schedule
        self.evaluate, self.checkpointer, self.sink = evaluate, checkpointer, sink
        self.memory, self.energy, self.model_stats = memory, energy, model_stats
        self.fingerprint, self.recipe, self.elastic = fingerprint, recipe, elastic
        self.step = 0
        self.tokens = 0
        self._first_phase: str | None = first_phase
        self._saving: tuple[int, Path] | None = None
        self._earlier_joules = 0.0
        self._num_broken = 0

    @property
    def context(self) -> DistContext:
        return self.stepper.context

    @property
    def model(self) -> nn.Module:
        return self.stepper.model

    def run(self) -> Outcome:
        """Run to the last step, or to the step in which a signal comes.

        Collectives: those of the stepper, of the evaluation and of the checkpoints, on every rank in the same order.
        """
        self.model.train()
        is_stopped = False
        try:
            with StopSignal() as stop:
                if self.elastic is not None:
                    self._join(self.elastic)
                self.sink.phase("first batch")
                while self.step < self.schedule.steps and not is_stopped:
                    is_stopped = self._run_step(stop)
                self._finish_save()
        except Exception as error:
            self._finish_save_after(error)
            raise
        return Outcome(self.step, self.tokens, stopped=is_stopped)

    def _run_step(self, stop: StopSignal) -> bool:
        """Take one step, evaluate, record and save; True if the run stops before its end."""
        # 1. learning rate and batches
        began = time.perf_counter()
        if self.elastic is not None and not self._find_replicas(self.elastic, stop):
            self._save_before_end()
            return True
        step = self.step + 1
        lr = self._set_lr(step)
        self.stepper.watch.start()
        batches = self.batches.next_step()
        if self._first_phase is not None:
            self.sink.phase(self._first_phase)
            self._first_phase = None
        # 2. forward, backward, exchange, update
        # a save that has failed ends the run on all ranks, also if others still write their files
        try:
            result = self.stepper.step(
                step,
                batches,
                last=step == self.schedule.steps,
                stop=lambda: stop.received is not None or self.checkpointer.has_failed,
            )
        except UserError:  # another replica differs, before anything was updated
            if self.elastic is not None:
                self._save_before_end()
            raise
        seconds = self.stepper.watch.read()
        step_s = time.perf_counter() - began
        if not result.is_applied:
            self._count_broken(step)
            return False
        self._num_broken = 0
        if self.elastic is not None:  # the others have as many tokens for each sample
            ratio = self.elastic.group.world_size / self.stepper.exchange.share
            result = replace(result, num_tokens=round(ratio * result.num_tokens))
        self.step, self.tokens = step, self.tokens + result.num_tokens
        # 3. evaluation, 4. record, 5. checkpoint
        record = self._make_record(result, seconds, step_s, lr)
        if self.schedule.evaluates_after(step) and self.evaluate is not None:
            self.sink.phase("evaluating")
            record |= self._evaluate(self.evaluate)
        self._record(record)
        if result.stop or self.schedule.saves_after(step):
            if result.stop and self.elastic is not None:
                self.elastic.close()  # the others do not wait for the save
            self._start_save()
        if not self.checkpointer.is_writing and not self.checkpointer.has_failed:
            self._finish_save()
        # a signal in the last step changes nothing: the run is complete
        return result.stop and step < self.schedule.steps

    def _join(self, elastic: ElasticReplicas) -> None:
        """Make the state of this replica available to others that join."""
        exchange = self.stepper.exchange
        progress = SimpleNamespace(state_dict=self._progress, load_state_dict=self._load_progress)
        assert isinstance(exchange, DemoExchange), "a checked recipe asks for this with demo only"
        decoder = describe_decoder(self.context.device, has_products=True)
        identity = {"recipe": self.recipe, "fingerprint": self.fingerprint, "decoder": decoder}
        # replicas that resume at the same step take over nothing
        exchange.inner.compared_values["run"] = hash_identity(identity)
        elastic.join(self.step, identity, self.model, self.stepper.optimizer, exchange.inner, progress)

    def _find_replicas(self, elastic: ElasticReplicas, stop: StopSignal) -> bool:
        """Find out who takes part in the next step, take over their state if this replica has none, and its share.

        Returns:
            False if a signal to stop came before.
        """
        step, members = self.step, elastic.group.world_size
        try:
            if not elastic.begin_step(lambda: stop.received is not None):
                return False
        except RunError:
            self._save_before_end()
            raise
        if self.step != step:
            self.sink.message(f"took over the state of step {self.step} from another replica")
        if elastic.group.world_size != members:
            self.sink.message(f"step {self.step + 1}: {elastic.group.world_size} replicas")
        self.stepper.exchange.share = self.batches.divide(elastic.group.rank, elastic.group.world_size)
        return True

    def _count_broken(self, step: int) -> None:
        """Report a step whose exchange broke; raise a RunError, after a checkpoint, if too many did in a row."""
        self._num_broken += 1
        if self._num_broken == MOST_BROKEN:
            self._save_before_end()
            raise RunError(f"step {step}: the exchange between the replicas broke {MOST_BROKEN} times in a row")
        self.sink.message(f"step {step} is repeated, because a replica has left or does not answer")

    def _progress(self) -> dict[str, Any]:
        """Return the position in the run, as JSON values."""
        return {"step": self.step, "tokens": self.tokens, "data": self.batches.state_dict()}

    def _load_progress(self, values: Mapping[str, Any]) -> None:
        self.step, self.tokens = values["step"], values["tokens"]
        self.batches.load_state_dict(values["data"])

    def _save_before_end(self) -> None:
        """Save a checkpoint of the last step, if there was one, before something else ends the run."""
        if self.step:
            self._start_save()

    def _start_save(self) -> None:
        """Save a checkpoint of the last step, in the background if the recipe says so."""
        self._finish_save()
        self.sink.phase("writing a checkpoint")
        self.sink.sync()
        self._saving = self.step, self.save()
        self.sink.phase(None)

    def _finish_save(self, timeout_s: float | None = None) -> None:
        """Wait until the last checkpoint is on all disks, and report it; arguments and errors as of `wait`."""
        if self._saving is not None:
            (step, path), self._saving = self._saving, None
            if is_writing := self.checkpointer.is_writing:
                self.sink.phase("writing a checkpoint")
            self.checkpointer.wait(timeout_s)
            if is_writing:
                self.sink.phase(None)
            self.sink.message(f"step {step}: checkpoint {path}")

    def _finish_save_after(self, error: Exception) -> None:
        """Finish the save in the background before a run ends with an error, if the other processes still answer."""
        answer = isinstance(error, ScantlingError) and not isinstance(error, SilentPeerError)
        try:
            self._finish_save(None if answer or self.context.world_size == 1 else WAIT_S)
        except Exception as failed:
            logger.warning("the last checkpoint was not saved: %s", first_line(failed))

    def _set_lr(self, step: int) -> float:
        """Set the learning rate of each group, and return the largest."""
        groups = self.stepper.optimizer.param_groups
        for group in groups:  # all before any is set, because groups may share one tensor
            if "initial_lr" not in group:
                group["initial_lr"] = float(group["lr"])
        factor = self.schedule.lr_factor(step)
        for group in groups:
            lr = group["initial_lr"] * factor
            if isinstance(group["lr"], torch.Tensor):  # a CUDA graph reads it
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        return factor * max(float(group["initial_lr"]) for group in groups)

    def _make_record(self, result: StepResult, seconds: dict[str, float], step_s: float, lr: float) -> dict[str, Any]:
        """Return the record of the last step, keys as in `metrics.jsonl`."""
        exchange = self.stepper.exchange
        # communication at the end of the backward pass counts as exchange, not as backward
        exposed = exchange.exposed_s
        record = {
            "step": self.step,
            "epoch": self.batches.epoch,
            "tokens": self.tokens,
            "loss": result.loss,
            # JSON has no NaN or Inf
            "grad_norm": result.grad_norm if not result.skipped and math.isfinite(result.grad_norm) else None,
            "lr": lr,
            "tokens_per_s": result.num_tokens / step_s,
            "step_s": step_s,
            "data_s": seconds.get("data", 0.0),
            "forward_s": seconds.get("forward", 0.0),
            "backward_s": max(0.0, seconds.get("backward", 0.0) - exposed),
            "exchange_s": seconds.get("exchange", 0.0) + exposed,
            "optimizer_s": seconds.get("optimizer", 0.0),
            "peak_memory_bytes": self.memory.peak_bytes(),
            "memory_source": self.memory.source,
            "base_memory_bytes": self.memory.base_bytes,
            "optimizer_state_bytes": state_bytes(self.stepper.optimizer),
            "wire_bytes": exchange.wire_bytes,
            **self.model_stats(),
        }
        if result.skipped:
            record["skipped"] = True
        if exchange.nonfinite_ranks:
            record["nonfinite_ranks"] = list(exchange.nonfinite_ranks)
        return record | exchange.metrics() | self.stepper.tensor.metrics()

    def _evaluate(self, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
        with self.stepper.exchange.common_weights():
            metrics = evaluate()
        if not math.isfinite(metrics["eval_loss"]):
            raise NonFiniteError(
                f"step {self.step}: the held-out loss is {metrics['eval_loss']}; "
                "lower optim.lr or lengthen train.warmup"
            )
        return metrics

    def _record(self, record: dict[str, Any]) -> None:
        # read after the evaluation, whose energy counts too
        record["energy_j"] = self._joules()
        record["energy_source"] = self.energy.source
        record["time"] = time.time()
        self.sink.record(record)

    def _joules(self) -> float | None:
        """Return the energy of the run, also before a resume; None without a meter."""
        joules = self.energy.joules()
        return None if joules is None else joules + self._earlier_joules

    def save(self) -> Path:
        """Save a checkpoint of the current state, and return its folder. Collectives: those of `Checkpointer.save`."""
        progress = State(
            values={
                **self._progress(),
                "recipe": self.recipe,
                "fingerprint": self.fingerprint,
                "scaler": self.stepper.scaler.state_dict(),
                "joules": self._joules(),
            }
        )
        exchange = self.stepper.exchange
        # before the common weights, because it has the weights of this replica
        of_exchange = exchange_state(exchange, self.model, self.context, self._replica_values())
        with exchange.common_weights():
            state = merge_states(
                model_state(self.model),
                optimizer_state(self.stepper.optimizer, self.model, self._replicas),
                of_exchange,
                rng_state(self.context),
                tensor_state(self.stepper.tensor),
                progress,
            )
            return self.checkpointer.save(self.step, state)

    def _replica_values(self) -> dict[str, Any]:
        """Return values that differ between replicas in local steps, for their checkpoints."""
        if self._replicas is None:
            return {}
        return {"tensor": self.stepper.tensor.replica_values(), "unsummed": self.stepper.unsummed}

    @property
    def _replicas(self) -> DistContext | None:
        """The context of replicas whose optimizer states differ; None if these are equal."""
        return None if self.stepper.exchange.keeps_replicas_equal else self.context

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restore everything from a checkpoint, so that the next step is the one that would have come.

        Collectives: those of `Stepper.rehearse`, with several processes, of `run_on_all` and of the loaded states.

        Raises:
            UserError: the checkpoint does not fit this run, or parts of it are on another machine.
        """
        values = checkpoint.values
        load_tensor(self.stepper.tensor, checkpoint)  # first, because it sets the shapes of the parameters
        # a pass before the state is loaded: DDP rebuilds its buckets, see `Stepper.rehearse`
        if self.context.world_size > 1:
            self.model.train()
            self.stepper.reshape(self.batches.next_step()[-1])
        # model, optimizer and exchange in place; captured graphs have other addresses afterwards

        def load() -> None:
            load_model(self.model, checkpoint)
            if self._replicas is None:
                load_optimizer(self.stepper.optimizer, self.model, checkpoint)

        self.context.run_on_all(load)  # each rank names the files that it misses
        if self._replicas is not None:
            load_own_optimizer(self.stepper.optimizer, self.model, checkpoint, self.context)
        own = load_exchange(self.stepper.exchange, self.model, checkpoint, self.context)
        self.stepper.tensor.load_replica_values(own.get("tensor", {}))
        if checkpoint.manifest["world_size"] == self.context.world_size:  # rows of as many processes
            self.stepper.unsummed = own.get("unsummed", [])
        self.stepper.reset_graphs()
        # this also takes back the batch of the rehearsal
        self._load_progress(values)
        if values["scaler"]:
            self.stepper.scaler.load_state_dict(values["scaler"])
        self._earlier_joules = values["joules"] or 0.0
        if checkpoint.manifest["world_size"] == self.context.world_size:
            load_rng(checkpoint, self.context)  # last, because the steps above may draw random numbers


def explain_out_of_memory(error: BaseException) -> RunError | None:
    """Return a clear error for a failed allocation, or None for any other error."""
    # PyTorch's CPU allocator raises a plain RuntimeError
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return RunError(
            f"out of memory: {first_line(error)}. "
            "Set train.micro_batch_size lower, train.activation_checkpointing: true, or a smaller model; "
            "`scantling plan` shows the memory of each part"
        )
    return None
