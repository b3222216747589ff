"""Scantling in Hugging Face transformers: optimizers in its Trainer, models of cores in `from_pretrained`.

To import this module registers the cores, so that the Auto classes load what `save_pretrained` wrote.

`Trainer(optimizer_cls_and_kwargs=(first, kwargs))` has two forms. With an `Optimizer` class, the Trainer groups the
parameters itself, by their names, and no group says what its parameters are. Anything else is a factory, called as
`first()(model, **kwargs)`: it sees the model, so the groups here are those of `scantling.param_groups`.

Limits: the learning rate and the weight decay of `TrainingArguments` have no effect, those given here have.
Under FSDP the Trainer shards what the optimizer holds before the first step; that is not tested here yet.
"""

from __future__ import annotations

from typing import Any

import torch

from scantling.groups import param_groups
from scantling.integrations.hf_exchange import ExchangeCallback, attach
from scantling.integrations.hf_ranks import RankCallback
from scantling.optim._codec import Momentum
from scantling.optim._factor import Factor
from scantling.optim._rounding import Rounding
from scantling.optim.came import CAME
from scantling.optim.registry import build_optimizer
from scantling.tensor import pretrained  # registers the cores

__all__ = ["CAMEFactory", "ExchangeCallback", "RankCallback", "SignFactory", "attach", "came", "load", "sign"]

load = pretrained.load


class CAMEFactory:
    """What the Trainer makes and calls to get its optimizer; it takes no part in the training."""

    def __call__(
        self,
        model: torch.nn.Module,
        *,
        weight_decay: float,
        options: dict[str, Any],
        **rates: float | None,
    ) -> CAME:
        """CAME over the trainable parameters of a model.

        Args:
            model: the Trainer's.
            weight_decay: of matrices and embeddings.
            options: further arguments of `CAME`.
            rates: further arguments of `scantling.param_groups`.
        """
        return CAME(param_groups(model, weight_decay=weight_decay, **rates), **options)


def came(
    lr: float,
    *,
    weight_decay: float = 0.0,
    core_lr: float | None = None,
    embedding_core_lr: float | None = None,
    control_lr: float | None = None,
    embedding_lr: float | None = None,
    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
    eps: tuple[float, float] = (1e-30, 1e-16),
    clip_threshold: float = 1.0,
    debias: bool = False,
    momentum: Momentum = "fp32",
    rounding: Rounding = "nearest",
    factor: Factor = "auto",
    confidence: bool = True,
    maximize: bool = False,
    foreach: bool | None = None,
    capturable: bool = False,
) -> tuple[type[CAMEFactory], dict[str, Any]]:
    """CAME for the Trainer of transformers, with the groups of `scantling.param_groups`.

    Args:
        lr: peak learning rate. That of `TrainingArguments` has no effect; its schedule, warm-up and clipping have.
        weight_decay: of matrices and embeddings, decoupled; vectors are never decayed. That of `TrainingArguments` has
            no effect.
        core_lr: of the cores of a model of cores; a third of `lr` is a good start. Default: `lr`.
        embedding_core_lr: of the cores of its embeddings. Default: `core_lr`.
        control_lr: of the rank controls of a `RankAdapter`; ten times `lr` is a good start. Default: `lr`.
        embedding_lr: of embeddings; for T5 ten times `lr` is a good start. Default: `lr`.
        betas, eps, clip_threshold, debias, momentum, rounding: as in `scantling.CAME`.
        factor, confidence, maximize, foreach, capturable: as in `scantling.CAME`.

    Returns:
        What `Trainer(optimizer_cls_and_kwargs=...)` takes.

    Raises:
        UserError: a value out of range.

    Example:
        >>> Trainer(model=model, args=args, optimizer_cls_and_kwargs=sc.hf.came(lr=1e-3))  # doctest: +SKIP
    """
    options: dict[str, Any] = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "clip_threshold": clip_threshold,
        "debias": debias,
        "momentum": momentum,
        "rounding": rounding,
        "factor": factor,
        "confidence": confidence,
        "maximize": maximize,
        "foreach": foreach,
        "capturable": capturable,
    }
    # the Trainer builds the optimizer much later, after data and model are ready: what is wrong is said here
    trial = torch.nn.Linear(1, 1, dtype=torch.bfloat16)
    CAME(trial.parameters(), weight_decay=weight_decay, **options)
    rates: dict[str, Any] = {
        "core_lr": core_lr,
        "embedding_core_lr": embedding_core_lr,
        "control_lr": control_lr,
        "embedding_lr": embedding_lr,
    }
    param_groups(trial, **rates)
    return CAMEFactory, {"weight_decay": weight_decay, **rates, "options": options}


class SignFactory:
    """What the Trainer makes and calls to get its optimizer; it takes no part in the training."""

    def __call__(
        self, model: torch.nn.Module, *, lr: float, weight_decay: float, options: dict[str, Any]
    ) -> torch.optim.Optimizer:
        """Sign descent for the matrices of a model, AdamW for the rest; arguments as of `sign`."""
        groups = param_groups(model, weight_decay=weight_decay)
        return build_optimizer("sign", groups, lr=lr, weight_decay=0.0, **options)


def sign(lr: float, *, weight_decay: float = 0.0, **options: Any) -> tuple[type[SignFactory], dict[str, Any]]:
    """Sign descent for matrices and AdamW for the rest, for the Trainer: with `attach`, DeMo.

    Args:
        lr: what each number of a matrix moves by, and AdamW's rate; its schedule is that of `TrainingArguments`.
        weight_decay: of matrices and embeddings, decoupled; vectors are never decayed.
        options: `momentum` of the sign descent, `betas` and `eps` of AdamW.

    Returns:
        What `Trainer(optimizer_cls_and_kwargs=...)` takes.

    Raises:
        UserError: a value out of range.
    """
    SignFactory()(torch.nn.Linear(2, 2), lr=lr, weight_decay=weight_decay, options=options)  # says what is wrong now
    return SignFactory, {"lr": lr, "weight_decay": weight_decay, "options": options}
