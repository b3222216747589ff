"""DeMo's momentum exchange, or local steps, in the Trainer of transformers.

The Trainer wraps its model in DistributedDataParallel, which averages gradients. A no-op communication hook leaves
each process's gradients unchanged. Before each optimizer step, `MomentumExchange` replaces them by the decoded
momentum, which is the same on all processes. With local steps, `OuterOptimizer` synchronizes the processes after some
steps. Each process saves its residuals, and with local steps the state of its optimizer, next to the Trainer's own
files, which hold the state of rank 0 only.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from scantling.comm import DeMo, LocalSteps, MomentumExchange, average_buffers
from scantling.comm.config import OUTER_LR
from scantling.comm.demo_exchange import exchange_groups
from scantling.comm.local_steps import OuterOptimizer, outer_exchange, outer_options, refuse_compensated
from scantling.comm.residuals import check_state_keys, merge_local_states
from scantling.comm.transport.shards import all_finite
from scantling.distributed.context import DistContext
from scantling.distributed.folders import detect_shared_folders
from scantling.errors import UserError
from scantling.files import no_follow
from scantling.numerics.torch_private import unwrap_compiled
from scantling.tensor.layer import TTLayer
from scantling.tensor.rank_adapter import RankAdapter, find_adapter

logger = logging.getLogger(__name__)

FILE = "exchange-rank{}.pt"


class ExchangeCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that exchanges momentum instead of gradients; created and added by `attach`.

    Attributes:
        exchange: the `MomentumExchange`, once the training has begun.
        outer: with local steps, what synchronizes the processes; then.
    """

    def __init__(self, trainer: Trainer, options: dict[str, Any], outer_options: dict[str, Any] | None) -> None:
        self._trainer, self._options, self._outer_options = trainer, options, outer_options
        self.exchange: MomentumExchange | None = None
        self.outer: OuterOptimizer | None = None
        self._adapters: list[RankAdapter] = []  # whose ranks change when the processes synchronize
        self._synchronizer = _Synchronizer(self)
        self._sent_bytes = self._sent_steps = 0  # since the last log of a loss
        self.checkpoint: Path | None = None
        self._hooked: DistributedDataParallel | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        # Callbacks that ask for an evaluation or a checkpoint at the end of a step must come before the
        # synchronization, and those that write logs after `on_log`. The Trainer is iterating over the old list, so
        # replace it instead of changing it.
        moved = (self, self._synchronizer)
        others = [each for each in trainer.callback_handler.callbacks if each not in moved]
        trainer.callback_handler.callbacks = [self, *others, self._synchronizer]
        _check_optimizer(trainer.optimizer)
        _check_saves(args)
        self._keep_gradients_local(trainer.model_wrapped)
        if self._outer_options is None:
            self.exchange = MomentumExchange(exchange_groups(trainer.model, self._options), **self._options)
        else:
            refuse_compensated(getattr(trainer.optimizer, "optimizer", trainer.optimizer))
            options = outer_options("sparseloco", self._options)
            self.exchange = outer_exchange("sparseloco", exchange_groups(trainer.model, options), **options)
            self.outer = OuterOptimizer(self.exchange, **self._outer_options)
            self._adapters = _rank_adapters(trainer.model)
            for adapter in self._adapters:
                adapter.waits_for_replicas = True
            self.exchange.is_elementwise = not self._adapters
            args.average_tokens_across_devices = False  # it gathers the number of tokens in each step
        if state.global_step and self.checkpoint is not None:
            self._load_state(self._read_state(self.checkpoint))

    def _keep_gradients_local(self, model: torch.nn.Module) -> None:
        """Disable DistributedDataParallel's gradient averaging, once per module: it accepts only one hook.

        With local steps it sends nothing else either, as in `no_sync()`.
        """
        model = unwrap_compiled(model)
        if isinstance(model, DistributedDataParallel):
            if model is not self._hooked:
                model.register_comm_hook(None, noop_hook)
                self._hooked = model
            if self._outer_options is not None:
                model.require_backward_grad_sync = model.require_forward_param_sync = False
        elif dist.is_initialized() and dist.get_world_size() > 1:
            raise UserError(
                f"sc.hf.attach: the Trainer trains a {type(model).__name__} on {dist.get_world_size()} processes "
                "without DistributedDataParallel, whose averaging the exchange replaces; on CPUs use "
                "TrainingArguments(use_cpu=True)"
            )

    def _state(self) -> dict[str, Any]:
        assert self.exchange is not None
        state = self.exchange.state_dict()
        if self.outer is not None:
            state["steps"], state["optimizer"] = self.outer.steps, self._trainer.optimizer.state_dict()
            state["anchors"] = self.outer.wide_anchors()
        return state

    def _read_state(self, folder: Path) -> dict[str, Any]:
        """Return the state of this process; of another number of processes, the mean of their residuals.

        With local steps, process i takes the optimizer state of process i modulo the saved number.

        Raises:
            UserError: a file is missing.
        """
        assert self.exchange is not None
        replicas = self.exchange.replicas
        files = {int(path.stem.rpartition("rank")[2]): path for path in folder.glob(FILE.format("*"))}

        def read(rank: int) -> dict[str, Any]:
            if rank not in files:
                raise UserError(
                    f"{folder / FILE.format(rank)} is missing, which holds the residuals of process {rank}; copy it "
                    "there from the machine that wrote it"
                )
            state: dict[str, Any] = torch.load(files[rank], weights_only=True, map_location="cpu")
            return state

        own = read(replicas.rank if replicas.rank in files or not files else min(files))
        saved = own["local"]["world_size"]
        if saved == replicas.world_size:
            return own if own["local"]["rank"] == replicas.rank else read(replicas.rank)
        states = [read(rank) for rank in range(saved)]
        if replicas.rank == 0:
            logger.warning(
                "%s was saved by %d processes, now %d: the exchange starts from the mean of the residuals of %d",
                folder,
                saved,
                replicas.world_size,
                saved,
            )
        return {**states[replicas.rank % saved], "local": merge_local_states([state["local"] for state in states])}

    def _load_state(self, state: dict[str, Any]) -> None:
        assert self.exchange is not None
        self.exchange.load_state_dict(state)
        if self.outer is not None:
            check_state_keys(state, "the callback with local_steps", ("steps", "optimizer", "anchors"))
            self.outer.steps = state["steps"]
            self.outer.load_wide_anchors(state["anchors"])
            self._trainer.optimizer.load_state_dict(state["optimizer"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.outer is not None:
            self.outer.begin_round()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.exchange is None:
            return
        if self.outer is None:
            self.exchange.exchange()
            self._sent_bytes += self.exchange.wire_bytes
            self._sent_steps += 1
            return
        params = self.exchange.residuals.params
        if not all_finite(param.grad for param in params if param.grad is not None):
            logger.warning("local step %d is skipped: a gradient is NaN or Inf", state.global_step + 1)
            for param in params:
                param.grad = None

    def end_step(self, *, at_once: bool) -> None:
        """Count a local step, and synchronize the processes if it is due or `at_once`."""
        if self.outer is None:
            return
        self._sent_steps += 1
        if self.outer.advance(at_once=at_once):
            self._finish_synchronization(self.outer)

    def synchronize(self) -> None:
        """Synchronize the processes if they take local steps and are not synchronized."""
        if self.outer is not None and not self.outer.is_synchronized:
            self.outer.synchronize()
            self._finish_synchronization(self.outer)

    def _finish_synchronization(self, outer: OuterOptimizer) -> None:
        self._sent_bytes += outer.wire_bytes + average_buffers(self._trainer.model)
        for adapter in self._adapters:
            adapter.change_ranks_together()
        if self._adapters:
            outer.adopt_parameters()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # the best model, of an earlier step, may have been loaded
        if not args.load_best_model_at_end:
            self.synchronize()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add the mean bytes per step since the last log of a loss."""
        if logs is not None and "loss" in logs and self._sent_steps:
            metrics = {"wire_bytes": round(self._sent_bytes / self._sent_steps)}
            self._sent_bytes = self._sent_steps = 0
            logs.update(metrics)
            state.log_history[-1].update(metrics)  # the log entry was copied before callbacks run

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.exchange is None:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / FILE.format(self.exchange.replicas.rank), "wb", opener=no_follow) as file:
            torch.save(self._state(), file)
        if dist.is_initialized():
            dist.barrier()


class _Synchronizer(TrainerCallback):  # type: ignore[misc]
    """Last callback of a Trainer: synchronizes after local steps, and before evaluations and checkpoints."""

    def __init__(self, callback: ExchangeCallback) -> None:
        self._callback = callback

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._callback.end_step(at_once=control.should_evaluate or control.should_save or control.should_training_stop)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._callback.synchronize()


def _rank_adapters(model: torch.nn.Module) -> list[RankAdapter]:
    """Return the adapters that are attached to layers of a model."""
    found = [find_adapter(layer) for layer in model.modules() if isinstance(layer, TTLayer)]
    return [*dict.fromkeys(adapter for adapter in found if adapter is not None)]


def _check_optimizer(optimizer: Any) -> None:
    """Raise if the optimizer of a Trainer exchanges momentum or parameters itself."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # unwrap accelerate's wrapper
    if isinstance(optimizer, DeMo | LocalSteps):
        raise UserError(
            f"sc.hf.attach: the Trainer's optimizer is {type(optimizer).__name__}, which also exchanges, so that "
            "everything would be exchanged twice; use sc.hf.sign(lr=...), which with attach is DeMo"
        )


def _check_saves(args: Any) -> None:
    """Raise a UserError if machines do not share the output folder and only the first would save the model.

    Runs the collectives of `detect_shared_folders` if there are several processes.
    """
    if not dist.is_initialized() or args.save_on_each_node or args.save_strategy == "no":
        return
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if detect_shared_folders(
        folder, DistContext(dist.get_rank(), dist.get_world_size(), args.device)
    ).has_separate_folders:
        raise UserError(
            f"sc.hf.attach: the machines do not share the output_dir {folder}, so that only one of them would have "
            "the model of a checkpoint; set save_on_each_node=True in TrainingArguments"
        )


def attach(
    trainer: Trainer, *, local_steps: int | None = None, outer_lr: float | None = None, **options: Any
) -> ExchangeCallback:
    """Make the processes of a Trainer exchange momentum instead of gradients, or take local steps.

    Gradient clipping applies to each process's own gradient. Any optimizer works on the exchanged momentum. An
    optimizer with its own momentum then applies a second one, which increases the loss and triggers a warning. Avoid
    this with `TrainingArguments(adam_beta1=0.0)`, `sc.hf.came(betas=(0.0, 0.95, 0.995))`, or `sc.hf.sign`.

    With `local_steps`, each process takes that many steps of its own optimizer, whose momentum is wanted then, between
    exchanges (as SparseLoCo, arXiv 2508.15706, with the residual in the weights). The processes also exchange before an
    evaluation and a checkpoint, so that these are of the same weights on all of them, and after the last step. The loss
    of a process is the mean over its own tokens (`average_tokens_across_devices` is turned off), and the ranks of a
    `RankAdapter` change after exchanges.

    Args:
        trainer: before `train()`; with one process or several, not under FSDP or DeepSpeed.
        local_steps: steps between exchanges; None for an exchange of momentum in each step.
        outer_lr: with `local_steps`, learning rate of the outer step; default 1.3.
        options: arguments of `scantling.MomentumExchange`; with `local_steps`, the defaults of
            `scantling.comm.sparseloco`.

    Returns:
        The callback that was added to the trainer.

    Raises:
        UserError: FSDP or DeepSpeed, fp16, `overlap`, options out of range, an optimizer that exchanges too, or a
            second call. When training begins: several processes without DistributedDataParallel, or missing residuals
            of a process in the checkpoint to resume from. Of a checkpoint of another number of processes, all residuals
            are needed, and their mean is taken.

    Example:
        >>> trainer = Trainer(model=model, args=args, train_dataset=texts)  # doctest: +SKIP
        >>> sc.hf.attach(trainer, topk=8)  # doctest: +SKIP
        >>> sc.hf.attach(trainer, local_steps=15)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    for name, enabled in (("FSDP", trainer.is_fsdp_enabled), ("DeepSpeed", trainer.is_deepspeed_enabled)):
        if enabled:
            raise UserError(
                f"sc.hf.attach: with {name} the Trainer averages gradients over all processes before callbacks run; "
                "use DistributedDataParallel (torchrun alone), or sc.DeMo with FSDP2 in a custom loop"
            )
    if trainer.args.fp16:
        raise UserError(
            "sc.hf.attach: fp16 changes the loss scale during training, and the momentum would mix scales; use bf16"
        )
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        raise UserError(
            "sc.hf.attach: enable_jit_checkpoint saves without calling callbacks, so that the residuals would be "
            "missing from the checkpoint; leave it out"
        )
    if options.get("overlap"):
        raise UserError("sc.hf.attach: overlap sends gradients before the Trainer clips them; leave it out")
    # validate the options now
    outer_options: dict[str, Any] | None = None
    probed = [torch.nn.Parameter(torch.zeros(1))]
    if local_steps is not None:
        outer_options = {"sync_every": local_steps, "outer_lr": OUTER_LR if outer_lr is None else outer_lr}
        OuterOptimizer(outer_exchange("sparseloco", probed, **options), **outer_options)
    else:
        MomentumExchange(probed, **options)
        if outer_lr is not None:
            raise UserError("sc.hf.attach: outer_lr has an effect with local_steps alone; leave it out")
    if any(isinstance(each, ExchangeCallback) for each in trainer.callback_handler.callbacks):
        raise UserError("sc.hf.attach: this Trainer already exchanges momentum; call attach once")
    _check_optimizer(trainer.optimizer)
    callback = ExchangeCallback(trainer, options, outer_options)
    trainer.add_callback(callback)
    train = trainer.train

    @functools.wraps(train)
    def train_from(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(trainer.args.output_dir)
        callback.checkpoint = Path(checkpoint) if checkpoint else None
        return train(resume_from_checkpoint, *args, **kwargs)

    trainer.train = train_from
    return callback
