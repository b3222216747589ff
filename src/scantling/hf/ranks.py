"""Rank adaptation in the Trainer of transformers.

A callback cannot change the loss, and the Trainer would scale an added term by accumulation steps and processes in
ways that depend on the model. The term that a schedule adds, a size penalty or a norm, does not depend on the data.
Its gradient is therefore added once per update, after gradients are averaged and clipped, and is the same on all
processes.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from scantling.errors import UserError
from scantling.tensor.rank_adapter import RankAdapter

logger = logging.getLogger(__name__)


class RankCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Callback that reduces the ranks of a TT model during training with the Trainer.

    When the training ends, pruned ranks are removed and the rank gates are folded into the cores, so that
    `trainer.save_model` writes the small model. Until then shapes do not change, because DistributedDataParallel and
    the Trainer's own resume rely on them. The adapter's state is in `trainer_state.json`. Another `train()` trains
    the small model with a fresh optimizer state.

    Args:
        adapter: of the Trainer's model, attached before the Trainer is built. Its schedule must not have a late stage,
            because a late stage weights the loss of the task.

    Raises:
        UserError: an adapter with a late stage; when training begins, fp16 without clipping if the schedule adds a
            penalty or a norm to the loss.

    Example:
        >>> adapter = sc.RankAdapter(sc.tensorize(model, rank=32), size_target=0.2, steps=500)  # doctest: +SKIP
        >>> Trainer(model=model, args=args, callbacks=[sc.hf.RankCallback(adapter)])  # doctest: +SKIP
    """

    def __init__(self, adapter: RankAdapter) -> None:
        options = adapter.options
        if options.schedule == "paper" and options.early_steps is not None and options.early_steps < options.steps:
            raise UserError(
                "RankCallback: the late stage weights the task loss, which a callback cannot; given early_steps="
                f"{options.early_steps} of {options.steps} steps: leave early_steps out, or use another schedule"
            )
        self.adapter = adapter

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.restore_callback_states_from_checkpoint:
            raise UserError(
                "RankCallback: restore_callback_states_from_checkpoint builds new callbacks, but this one needs its "
                "adapter; leave the option out, since the adapter's state is restored in any case"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.adapter.adds_to_loss and args.fp16 and not args.max_grad_norm:
            raise UserError(
                f"RankCallback: given fp16 and max_grad_norm={args.max_grad_norm}. The Trainer unscales gradients only "
                "if it clips them, and the schedule adds unscaled gradients; set max_grad_norm above 0, or use bf16"
            )
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and saved is not None:
            self.adapter.load_state_dict(saved["attributes"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with torch.enable_grad():
            penalty = self.adapter.loss(torch.zeros((), device=self.adapter.device))
        if penalty.requires_grad:
            penalty.backward()  # type: ignore[no-untyped-call]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs is not None and self.adapter.is_attached:
            metrics = self.adapter.metrics()
            logs.update(metrics)
            state.log_history[-1].update(metrics)  # the log entry was copied before callbacks run

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if not self.adapter.is_attached:
            return
        if self.adapter.step >= self.adapter.options.steps:
            self.adapter.finish()
            if optimizer is not None:  # the Trainer reuses it in another train(); its state is of gated cores
                optimizer.state.clear()
        else:
            logger.warning(
                "RankCallback: training ended after %d of the %d steps in which ranks decrease; the size is %.0f, the "
                "target %.0f, and the rank gates remain. Call adapter.finish() to reach the target now",
                self.adapter.step,
                self.adapter.options.steps,
                self.adapter.size(),
                self.adapter.target,
            )

    def state(self) -> dict[str, Any]:
        """Return the state that `trainer_state.json` stores."""
        return {"args": {}, "attributes": self.adapter.state_dict()}
