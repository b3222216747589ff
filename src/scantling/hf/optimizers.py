"""Optimizers for the Trainer of Hugging Face transformers.

`Trainer(optimizer_cls_and_kwargs=(first, kwargs))` has two forms. Given an `Optimizer` class, the Trainer groups the
parameters itself, by name, and its groups do not record the role of their parameters. Anything else is a factory,
called as `first()(model, **kwargs)`. This module uses factories, because they see the model and can build the groups
of `scantling.param_groups`.

Limits: the learning rate and weight decay of `TrainingArguments` have no effect; set them here. CAME works under the
Trainer's FSDP2 (`fsdp=True`), with an exact resume.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch

from scantling.groups import param_groups
from scantling.optim.came import CAME
from scantling.optim.codecs import Momentum, Rounding
from scantling.optim.registry import build_optimizer
from scantling.optim.state import Factor


class CAMEFactory:
    """Factory that the Trainer creates and calls to get a CAME optimizer."""

    def __call__(
        self,
        model: torch.nn.Module,
        *,
        weight_decay: float,
        options: dict[str, Any],
        **rates: float | None,
    ) -> CAME:
        """Return CAME over the trainable parameters of a model.

        Args:
            model: the Trainer's model.
            weight_decay: for matrices and embeddings.
            options: other arguments of `CAME`.
            rates: other arguments of `scantling.param_groups`.
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
    """Return CAME for the Trainer of transformers, with the groups of `scantling.param_groups`.

    Args:
        lr: peak learning rate. That of `TrainingArguments` has no effect; its schedule, warm-up and clipping do.
        weight_decay: decoupled, for matrices and embeddings; vectors are never decayed. That of `TrainingArguments` has
            no effect.
        core_lr: for the TT cores of linear layers; a third of `lr` is a good start. Default: `lr`.
        embedding_core_lr: for the TT cores of embeddings. Default: `lr`.
        control_lr: for the rank gates of a `RankAdapter`. Default: `core_lr`.
        embedding_lr: for embeddings; for T5 ten times `lr` is a good start. Default: `lr`.
        betas, eps, clip_threshold, debias, momentum, rounding: as in `scantling.CAME`.
        factor, confidence, maximize, foreach, capturable: as in `scantling.CAME`.

    Returns:
        The value for `Trainer(optimizer_cls_and_kwargs=...)`.

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
    # the Trainer builds the optimizer much later, after loading data and model; validate the arguments now
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


class _MatrixFactory:
    """Factory of an optimizer by name that steps matrices, with AdamW for all other parameters."""

    name: ClassVar[str]

    def __call__(
        self,
        model: torch.nn.Module,
        *,
        lr: float,
        weight_decay: float,
        embedding_lr: float | None,
        options: dict[str, Any],
    ) -> torch.optim.Optimizer:
        """Return the optimizer of a model; arguments as in `sign` and `muon`."""
        groups = param_groups(model, weight_decay=weight_decay, embedding_lr=embedding_lr)
        return build_optimizer(self.name, groups, lr=lr, weight_decay=0.0, **options)

    @classmethod
    def pair(cls, **arguments: Any) -> tuple[type[Self], dict[str, Any]]:
        """Return the value for the Trainer. Checks the arguments now; the Trainer builds the optimizer much later."""
        cls()(torch.nn.Linear(2, 2), **arguments)
        return cls, arguments


class SignFactory(_MatrixFactory):
    """Factory that the Trainer creates and calls to get a sign-descent optimizer."""

    name = "sign"


class MuonFactory(_MatrixFactory):
    """Factory that the Trainer creates and calls to get Muon."""

    name = "muon"


def sign(
    lr: float, *, weight_decay: float = 0.0, embedding_lr: float | None = None, **options: Any
) -> tuple[type[SignFactory], dict[str, Any]]:
    """Return sign descent for matrices and AdamW for the rest, for the Trainer; together with `attach`, this is DeMo.

    Args:
        lr: step size of each matrix element, and AdamW's learning rate; its schedule is that of `TrainingArguments`.
        weight_decay: decoupled, for matrices and embeddings; vectors are never decayed.
        embedding_lr: for embeddings. Default: `lr`.
        options: `momentum` of the sign descent, `betas` and `eps` of AdamW.

    Returns:
        The value for `Trainer(optimizer_cls_and_kwargs=...)`.

    Raises:
        UserError: a value out of range.
    """
    return SignFactory.pair(lr=lr, weight_decay=weight_decay, embedding_lr=embedding_lr, options=options)


def muon(
    lr: float, *, weight_decay: float = 0.0, embedding_lr: float | None = None, **options: Any
) -> tuple[type[MuonFactory], dict[str, Any]]:
    """Return Muon for matrices of two dimensions and AdamW for the rest, for the Trainer.

    A good inner optimizer for `attach(trainer, local_steps=15)` (arXiv 2505.23725). Its updates have the size of
    AdamW's (Liu et al., arXiv 2502.16982).

    Args:
        lr: learning rate of both; its schedule is that of `TrainingArguments`.
        weight_decay: decoupled, for matrices and embeddings; vectors are never decayed.
        embedding_lr: for embeddings. Default: `lr`.
        options: those of `torch.optim.Muon`, such as `momentum` and `ns_steps`; `betas` and `eps` of AdamW.

    Returns:
        The value for `Trainer(optimizer_cls_and_kwargs=...)`.

    Raises:
        UserError: a value out of range.
    """
    return MuonFactory.pair(lr=lr, weight_decay=weight_decay, embedding_lr=embedding_lr, options=options)
