"""Methods of communication as training steps: DDP, PowerSGD, Dion, one bit, DiLoCo, SparseLoCo, DeMo and ours."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from dion import Dion, average_over_replicas
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import scantling as sc
from scantling.comm import allreduce_wire_bytes, diloco, sparseloco
from scantling.comm.layout import all_block_groups, make_buckets
from scantling.optim.registry import build_optimizer

BETAS, WEIGHT_DECAY = (0.9, 0.98), 0.1
"""AdamW's; the best betas found by optim_quality.py."""
CLIP = 1.0
"""Largest gradient norm for AdamW and SGD; DeMo takes signs and needs no clipping."""
OURS = {"values": "sign", "dense": "sign", "decay": 0.95}

LOCAL = {"values": "sign", "dense": "sign", "outer_lr": 1.3, "keep_unsent": False}
"""Settings of the sparse exchange after AdamW steps, whose rounds begin with the common weights, as published."""
KEPT = {"values": "sign", "dense": "sign", "outer_lr": 1.0, "decay": 1.0, "keep_unsent": True}
"""The same with the residual of a replica in its weights."""
SIGNS = {**KEPT, "outer_lr": 1.3, "topk": 4096}
"""The same with the signs of all elements."""
SIGNS_EVERY = 15
"""Steps between exchanges of SIGNS."""
LOCAL_TOPK = {"all_gather": 192, "owner": 144}
"""Elements of 4,096 after five steps, 200 times below 16-bit gradients for two replicas, and for any number."""
KEPT_TOPK = {5: 176, 20: 960, 40: 4096}
"""The same by the number of local steps, for any number of replicas that exchange by the cheapest strategy."""


@dataclass
class Replica:
    """One of several replicas that train together.

    Attributes:
        model: the module that the loop calls.
        optimizer: object with `step`, `zero_grad` and `param_groups`.
        computed_bytes: returns the bytes that a process sends per step by formula, averaged over many steps; call it
            after a few steps.
        sent: returns the bytes that the method reports for the last step; None if it does not count them.
        last_backward: context of the last backward pass before a step.
        clip: largest gradient norm of a step.
        exchanging: called between the backward pass and the step.
        published_bytes: returns the bytes per step of the code that the method was published with.
        common_weights: returns a context in which all replicas have the same weights.
    """

    model: nn.Module
    optimizer: Any
    computed_bytes: Callable[[], float]
    sent: Callable[[], int] | None = None
    last_backward: Callable[[], AbstractContextManager[None]] = nullcontext
    clip: float | None = None
    exchanging: Callable[[], object] | None = None
    published_bytes: int | None = None
    common_weights: Callable[[], AbstractContextManager[None]] = nullcontext

    def step(self, compute_loss: Callable[[nn.Module], Tensor]) -> Tensor:
        """Run forward, backward, exchange and update; return the loss of this replica."""
        self.optimizer.zero_grad()
        loss = compute_loss(self.model)
        with self.last_backward():
            loss.backward()  # type: ignore[no-untyped-call]
        if self.exchanging is not None:
            self.exchanging()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.detach()


@contextmanager
def group(address: str, rank: int, count: int) -> Iterator[None]:
    """Open a process group and close it once all processes are done with it.

    Create modules wrapped in DistributedDataParallel inside a function that is called within this context. If such a
    module is freed after its group, it can wait forever for gloo's thread, which waits for the GIL.
    """
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=count)
    yield
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def numel(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def adamw_groups(
    model: nn.Module, lr: float, dense_lr: float | None = None, dense_betas: Sequence[float] = BETAS
) -> list[dict[str, Any]]:
    """Return parameter groups for AdamW, without weight decay on vectors.

    Args:
        model: the model to train.
        lr: learning rate of matrices.
        dense_lr: learning rate of embeddings and vectors; `lr` by default.
        dense_betas: their betas.
    """
    return [
        {
            "params": [param for _, param in group["params"]],
            "weight_decay": group["weight_decay"],
            "lr": lr if dense_lr is None or group["role"] == "matrix" else dense_lr,
            "betas": BETAS if group["role"] == "matrix" else tuple(dense_betas),
            "role": group["role"],
        }
        for group in sc.param_groups(model, weight_decay=WEIGHT_DECAY)
    ]


def adamw(model: nn.Module, lr: float, **dense: Any) -> torch.optim.Optimizer:
    """Return AdamW on `adamw_groups`."""
    return torch.optim.AdamW(adamw_groups(model, lr, **dense), lr=lr)


def muon(model: nn.Module, lr: float, **dense: Any) -> torch.optim.Optimizer:
    """Return Muon for matrices and AdamW for the rest, on `adamw_groups`."""
    groups = adamw_groups(model, lr, **dense)
    for group in groups:
        if group["role"] == "matrix":
            del group["betas"]
    return build_optimizer("muon", groups, lr=lr)


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return SGD with momentum and no decay, because its learning rate differs in scale from AdamW's."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)


def reduced(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Return DDP in its fastest form: no broadcast of buffers, which never change, and no copy of the gradients."""
    return DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True, **options)


def alone(model: nn.Module, lr: float) -> Replica:
    """Return a replica without any exchange: the time of computation alone."""
    return Replica(model, adamw(model, lr), lambda: 0.0, clip=CLIP)


def ddp(
    model: nn.Module,
    lr: float,
    *,
    half: bool = False,
    make: Callable[..., torch.optim.Optimizer] = adamw,
    **rates: Any,
) -> Replica:
    """Return a replica that averages gradients in fp32, or in fp16 during the transfer."""
    wrapped = reduced(model)
    if half:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    size = (2 if half else 4) * numel(model)
    sent = float(allreduce_wire_bytes(size, dist.get_world_size()))
    return Replica(wrapped, make(model, lr, **rates), lambda: sent, clip=CLIP)


def power_sgd(model: nn.Module, lr: float, *, rank: int, start: int = 2, **rates: Any) -> Replica:
    """Return a replica with PyTorch's PowerSGD, which starts after some steps of plain averaging.

    The computed bytes leave these first steps out. All gradients are in one bucket: the hook starts a second collective
    when the first has ended, so with two buckets the order of collectives differs between processes, and gloo hangs.
    """
    wrapped = reduced(model, bucket_cap_mb=(4 * numel(model) >> 20) + 1)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def computed() -> float:
        _, before, after = state.compression_stats()
        share = after / before if before else 1.0
        return float(allreduce_wire_bytes(round(4 * numel(model) * share), dist.get_world_size()))

    return Replica(wrapped, adamw(model, lr, **rates), computed, clip=CLIP)


def local_steps(
    model: nn.Module,
    lr: float,
    *,
    make: Callable[..., Any],
    every: int,
    optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    dense_lr: float | None = None,
    dense_betas: Sequence[float] = BETAS,
    embeddings: str = "dense",
    embeddings_topk: int | None = None,
    **options: Any,
) -> Replica:
    """Return a replica with DiLoCo or SparseLoCo around an optimizer, without a transform."""
    inner = optimizer(model, lr, dense_lr=dense_lr, dense_betas=dense_betas)
    groups = channels(model, embeddings, embeddings_topk=embeddings_topk)
    outer = make(inner, groups, sync_every=every, **options)
    return Replica(
        model,
        outer,
        lambda: outer.exchange.planned_wire_bytes() / every,
        lambda: outer.wire_bytes,
        clip=CLIP,
        common_weights=outer.common_parameters,
    )


def demo(
    model: nn.Module,
    lr: float,
    embeddings: str = "dense",
    transform: str = "dct",
    embeddings_topk: int | None = None,
    **options: Any,
) -> Replica:
    """Return a replica with sc.DeMo."""
    groups = channels(model, embeddings, transform, embeddings_topk, weight_decay=0.1)
    optimizer = sc.DeMo(groups, lr, **options)
    planned = optimizer.exchange.planned_wire_bytes_per_step
    sent = published_bytes(optimizer.exchange) if options.get("compat") == "paper" else None
    return Replica(
        model,
        optimizer,
        lambda: float(planned()),
        lambda: optimizer.wire_bytes,
        optimizer.overlapped,
        published_bytes=sent,
    )


def published_bytes(exchange: sc.MomentumExchange) -> int:
    """Return the bytes per step of DeMo's published code: an 8-byte index and a 4-byte value per coefficient."""
    block_groups = all_block_groups(make_buckets(exchange.param_groups, exchange.config))
    kept = sum(block_group.count * block_group.spec.codec.k for block_group in block_groups)
    return (dist.get_world_size() - 1) * 12 * kept


def channels(
    model: nn.Module,
    embeddings: str = "dense",
    transform: str = "dct",
    embeddings_topk: int | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return parameter groups for an exchange.

    Args:
        model: the model.
        embeddings: `dense`: sent in full, as gradients, like vectors; `sparse gradients`: the largest elements of
            blocks of gradients, as by default; `blocks`: those of their momentum, or of its cosine transform (`dct
            blocks`), as of matrices.
        transform: of the blocks of matrices, "dct" or "none".
        embeddings_topk: elements of a block of an embedding; None for the default.
        options: of `param_groups`.
    """
    groups = sc.param_groups(model, **options)
    for group in groups:
        group["transform"] = transform
        if group["role"] != "embedding":
            continue
        if embeddings_topk is not None:
            group["topk"] = embeddings_topk
        if embeddings != "sparse gradients":
            group["role"] = "vector" if embeddings == "dense" else "matrix"
            group["transform"] = "dct" if embeddings == "dct blocks" else "none"
    return groups


def exchanged(
    model: nn.Module,
    lr: float,
    *,
    came: bool = False,
    beta1: float,
    dense_lr: float | None = None,
    dense_betas: Sequence[float] = BETAS,
    embeddings: str = "dense",
    transform: str = "dct",
    embeddings_topk: int | None = None,
    decay_warmup: bool = False,
    **options: Any,
) -> Replica:
    """Return a replica with sc.MomentumExchange and an optimizer that steps matrices by the decoded momentum.

    `beta1` is the first beta of matrices, and of embeddings whose momentum is sent. Parameters whose gradients are
    synchronized have `dense_betas`. With `decay_warmup` the decay of step t is at most t / (t + 1).
    """
    groups = sc.param_groups(model, weight_decay=0.1)
    sent = channels(model, embeddings, transform, embeddings_topk, weight_decay=0.1)
    exchange = sc.MomentumExchange(sent, **{"topk": 8, "exchange": "all_gather", **OURS, **options})
    make = partial(sc.CAME, debias=True, confidence=False) if came else torch.optim.AdamW
    confidence_beta = (0.995,) if came else ()
    own = [
        {
            "params": [param for _, param in group["params"]],
            "weight_decay": group["weight_decay"],
            "lr": lr if dense_lr is None or group["role"] == "matrix" else dense_lr,
            "betas": (*((beta1, BETAS[1]) if each["role"] == "matrix" else dense_betas), *confidence_beta),
            **({"role": group["role"], "matrix_dims": group["matrix_dims"]} if came else {}),
        }
        for group, each in zip(groups, sent, strict=True)
    ]
    optimizer = make(own, lr=lr)
    final = exchange.config.decay
    steps = itertools.count(1)

    def exchanging() -> None:
        if decay_warmup:
            decay = min(final, (step := next(steps)) / (step + 1.0))
            for group in exchange.param_groups:
                group["decay"] = decay
        exchange.exchange()

    def computed() -> float:
        return float(exchange.planned_wire_bytes_per_step())

    return Replica(model, optimizer, computed, lambda: exchange.wire_bytes, exchanging=exchanging)


def one_bit(model: nn.Module, lr: float, **rates: Any) -> Replica:
    """Return a replica that sends the signs of all gradients with error feedback, and steps AdamW by their mean."""
    groups = [{**group, "role": "vector"} for group in sc.param_groups(model)]
    exchange = sc.MomentumExchange(groups, dense="sign", exchange="all_gather")
    return Replica(
        model,
        adamw(model, lr, **rates),
        lambda: float(exchange.planned_wire_bytes_per_step()),
        lambda: exchange.wire_bytes,
        clip=CLIP,
        exchanging=exchange.exchange,
    )


class Both:
    """Two optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def dion(model: nn.Module, lr: float, *, rank: int, **dense: Any) -> Replica:
    """Return a replica that averages factors of matrices, see `dion.Dion`, and the gradients of the rest for AdamW."""
    groups = adamw_groups(model, lr, **dense)
    matrices = Dion([group for group in groups if group["role"] == "matrix"], lr, rank=rank)
    rest = torch.optim.AdamW([group for group in groups if group["role"] != "matrix"])
    others = [param for group in rest.param_groups for param in group["params"]]

    def average() -> None:
        for param in others:
            assert param.grad is not None
            average_over_replicas(param.grad)

    def computed() -> float:
        dense = sum(param.numel() for param in others)
        return float(matrices.wire_bytes() + allreduce_wire_bytes(4 * dense, dist.get_world_size()))

    return Replica(model, Both(matrices, rest), computed, exchanging=average)


METHODS: dict[str, Callable[[nn.Module, float], Replica]] = {
    "alone": alone,
    "ddp fp32": ddp,
    "ddp fp16": partial(ddp, half=True),
    "ddp sgd": partial(ddp, make=sgd),
    "ddp muon": partial(ddp, make=muon),
    **{f"powersgd r{rank}": partial(power_sgd, rank=rank) for rank in (1, 4, 16)},
    **{f"diloco h{every}": partial(local_steps, make=diloco, every=every) for every in (30, 100)},
    "sparseloco h30": partial(
        local_steps, make=partial(sparseloco, topk=64, values="int4", dense="sign", keep_unsent=False), every=30
    ),
    **{
        f"ours k{topk} h5 {way}": partial(
            local_steps, make=partial(sparseloco, topk=topk, exchange=way, **LOCAL), every=5
        )
        for way, topk in LOCAL_TOPK.items()
    },
    **{
        f"ours {name} k{topk} h{every}": partial(
            local_steps, make=partial(sparseloco, topk=topk, **KEPT), every=every, optimizer=optimizer
        )
        for every, topk in KEPT_TOPK.items()
        for name, optimizer in (("kept", adamw), ("muon", muon))
    },
    **{
        f"ours {name} h{SIGNS_EVERY}": partial(
            local_steps, make=partial(sparseloco, **SIGNS), every=SIGNS_EVERY, optimizer=optimizer
        )
        for name, optimizer in (("adamw", adamw), ("muon", muon))
    },
    **{f"demo paper k{k}": partial(demo, compat="paper", topk=k) for k in (1, 2, 4, 8, 16, 32)},
    "demo paper k32 decay 0.95": partial(demo, compat="paper", topk=32, decay=0.95),
    **{
        f"ours k{k} {way}": partial(demo, topk=k, exchange=way, **OURS)
        for k in (2, 4, 8, 32)
        for way in ("all_gather", "owner")
    },
    "ours k8 muon": partial(demo, topk=8, exchange="all_gather", update="muon", **OURS),
    "ours k8 all_gather delay": partial(demo, topk=8, exchange="all_gather", delay=1, **OURS),
    "ours k8 all_gather overlap": partial(demo, topk=8, exchange="all_gather", overlap=True, **OURS),
    "ours whole": partial(demo, exchange="dense", **OURS),
    "exchange k8, adamw": partial(exchanged, beta1=0.9),
    "exchange k8, adamw beta1 0": partial(exchanged, beta1=0.0),
    "exchange k8, came beta1 0": partial(exchanged, came=True, beta1=0.0),
    "one bit, adamw": one_bit,
    **{f"dion r{rank}": partial(dion, rank=rank) for rank in (4, 16)},
    "ours k8 all_gather int8": partial(demo, topk=8, exchange="all_gather", residual="int8", **OURS),
}
