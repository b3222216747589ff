"""Local optimizer steps between exchanges: DiLoCo and SparseLoCo.

Each of N replicas steps its own optimizer H times. Then, with p0 the common parameters, r the residual of a replica
(its unsent moves), and p its parameters:

    d   =  p0 - outer_lr r / N - p       pseudo-gradient of the H steps, different on each replica
    D   =  exchange(d)                   mean over replicas: dense, or of a few components; changes r
    p0  <-  outer step with D            SGD, for DiLoCo with Nesterov momentum
    p   <-  p0 - outer_lr r / N

DiLoCo (Douillard et al., arXiv 2311.08105) exchanges everything; SparseLoCo (Sarfi et al., arXiv 2508.15706) the
largest components of each block, without a transform and without outer momentum. It begins each round at p0, and the
residual, which decays except for embeddings, waits outside of the weights. Here a replica keeps outer_lr r / N in its
weights (`keep_unsent`). That is the step which p0 will take once the whole residual is sent, if it does not decay: the
mean over the replicas divides it by N. So only the other replicas wait for the moves of a replica.

Weights in bf16 begin each round as p0 - outer_lr r / N rounded to bf16, and d is their distance from there: p0 itself
stays in fp32, so that no outer step is too small for it.

Replicas may have different processors and numbers of threads, unless a transform is exchanged: the mean and the outer
step are single multiplications and additions of each element, which all processors round the same way.

Cost: 4 bytes for each parameter for p0, and those of exchange and outer momentum; `wire_bytes` every H steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from scantling.comm.config import (
    DILOCO_STEPS,
    LOCAL_STEPS,
    OPTIONS,
    OUTER_LR,
    SELECTION_OPTIONS,
    is_integer,
    is_number,
    local_step_defaults,
)
from scantling.comm.demo import grad_scale, unscale_gradients
from scantling.comm.exchange import MomentumExchange
from scantling.comm.momentum_watch import MomentumWatch
from scantling.comm.param_groups import make_groups, split_by_numel
from scantling.comm.residuals import check_state_keys
from scantling.comm.transport.shards import all_agree, all_finite, as_gradient, to_local
from scantling.errors import UserError
from scantling.numerics.torch_private import foreach_add_, foreach_copy_, foreach_mul_

logger = logging.getLogger(__name__)

_BUCKET_NUMEL = 1 << 26
"""Elements of a bucket of parameters, copied and stepped at once: few launches on a GPU, little memory for copies."""


class OuterOptimizer:
    """Synchronization of replicas that take local steps: the pseudo-gradients, their exchange, and the outer step.

    A parameter that is frozen between two exchanges is reset to its value after the first.

    Args:
        exchange: over the parameters of the replica, with `sync_every=1`.
        sync_every: local steps H between exchanges.
        outer_lr, outer_momentum: of the outer SGD with Nesterov momentum.
        batch_shares: relative numbers of tokens that the replicas train on, by which their pseudo-gradients are
            weighted; equal by default.
        keep_unsent: True to begin each round with the outer step of this replica's residual, divided by the number of
            replicas, in its parameters; False to begin it with the common parameters, as published.

    Attributes:
        anchors: the common parameters after the last exchange, local shards in the order of the exchange; of trained
            parameters in bf16 or fp16, in fp32.
        momenta: of the outer SGD, by index; empty before the first exchange, and without momentum.
        steps: local steps so far.
        weight: of the moves of this replica: the number of replicas times its share of the batch.
        is_synchronized: True if the parameters are the common ones: after an exchange, until the next round begins.
        wire_bytes: bytes that this process sent in the last step; 0 except every H-th.

    Raises:
        UserError: a value out of range, an exchange at other times, or a `TorchFTGroup`.
    """

    def __init__(
        self,
        exchange: MomentumExchange,
        *,
        sync_every: int,
        outer_lr: float,
        outer_momentum: float = 0.0,
        batch_shares: Sequence[float] | None = None,
        keep_unsent: bool = True,
    ) -> None:
        if not is_integer(sync_every, least=1):
            raise UserError(f"sync_every must be an integer of at least 1; given {sync_every!r}")
        if not is_number(outer_lr) or not 0.0 < outer_lr < math.inf:
            raise UserError(f"outer_lr must be above 0 and finite; given {outer_lr!r}")
        if not is_number(outer_momentum) or not 0.0 <= outer_momentum < 1.0:
            raise UserError(f"outer_momentum must be from 0 to below 1; given {outer_momentum!r}")
        size = exchange.replicas.world_size
        if batch_shares is None:
            batch_shares = [1.0] * size
        shares = [*batch_shares] if isinstance(batch_shares, Iterable) else []
        if len(shares) != size or not all(is_number(share) and 0.0 < share < math.inf for share in shares):
            raise UserError(
                f"batch_shares must be {size} numbers above 0, one for each replica; given {batch_shares!r}"
            )
        self._shares = shares
        self.weight = size * shares[exchange.replicas.rank] / sum(shares)
        self.exchange, self.sync_every, self.keep_unsent = exchange, sync_every, keep_unsent
        self._params = [param for group in exchange.param_groups for param in group["params"]]
        for name, usual in (("delay", 0), ("overlap", False), ("sync_every", 1)):
            given = getattr(exchange.config, name)
            if given != usual:
                raise UserError(f"{name}={given} is for an exchange in every step, not for local steps; leave it out")
        if not exchange.replicas.is_static:
            raise UserError(
                "local steps need a fixed set of replicas: a joining replica would lack the parameters that the others "
                "started from. With a TorchFTGroup use sc.DeMo"
            )
        # p0: replicas start from the same parameters, which the exchange checks.
        self.anchors = [to_local(param).detach().to(anchor_dtype(param), copy=True) for param in self._params]
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.momenta: dict[int, Tensor] = {}
        self.steps, self.wire_bytes, self.is_synchronized = 0, 0, True
        self._own: list[Tensor] | None = None  # parameters of this replica while they hold the common ones
        self._buckets = split_by_numel([anchor.numel() for anchor in self.anchors], _BUCKET_NUMEL)
        # watches nothing: pseudo-gradients are no momentum, and the outer one is wanted
        exchange.momentum_watch = MomentumWatch(())
        exchange.is_elementwise = exchange.decodes_to_fp32 = True
        exchange.compared_values = {
            "local steps": sync_every,
            "outer_lr": outer_lr,
            "outer_momentum": outer_momentum,
            "batch_shares": shares,
            "keep_unsent": keep_unsent,
        }

    @torch.no_grad()
    def begin_round(self) -> None:
        """Put the residual of this replica into its parameters, if the last step ended with an exchange.

        The residual of a frozen parameter is dropped.
        """
        if self.is_synchronized and self._holds_residuals:
            self.exchange.residuals.discard_unused()
            for bucket in self._buckets:
                foreach_copy_(self._parts(bucket), self._starts(bucket))
            self.is_synchronized = False

    @property
    def _holds_residuals(self) -> bool:
        """True if residuals are in the parameters; those of a dense exchange are a momentum, equal on all replicas."""
        return self.keep_unsent and self.exchange.config.exchange != "dense"

    def _parts(self, bucket: Iterable[int]) -> list[Tensor]:
        return [to_local(self._params[idx]) for idx in bucket]

    def _trained(self, bucket: Iterable[int]) -> list[int]:
        return [idx for idx in bucket if self._params[idx].requires_grad]

    def _starts(self, bucket: Sequence[int]) -> list[Tensor]:
        """Return parameters as this replica began the round, in new tensors of their dtypes."""
        anchors, residuals = [self.anchors[idx] for idx in bucket], self.exchange.residuals
        starts = _copy_like(anchors, anchors)
        pairs = [
            (start, residuals.read(self._params[idx]))
            for idx, start in zip(bucket, starts, strict=True)
            if self._holds_residuals and self._params[idx] in residuals
        ]
        if pairs:
            changed, unsent = map(list, zip(*pairs, strict=True))
            foreach_add_(changed, unsent, alpha=-self._unsent_rate())
        parts = self._parts(bucket)
        is_narrow = any(part.dtype != start.dtype for part, start in zip(parts, starts, strict=True))
        return _copy_like(starts, parts) if is_narrow else starts

    def _unsent_rate(self, num_replicas: int | None = None) -> float:
        return self.outer_lr / (num_replicas or self.exchange.replicas.world_size)

    def unsent_step(self, residual: Tensor, *, num_replicas: int | None = None) -> Tensor:
        """Return by how much the residual of one replica lowers its parameters before it is sent.

        Args:
            residual: of one parameter.
            num_replicas: number of replicas that exchange; by default those of this exchange.
        """
        if not self._holds_residuals:
            return torch.zeros_like(residual)
        return residual * self._unsent_rate(num_replicas)

    @torch.no_grad()
    def advance(self, *, at_once: bool = False) -> bool:
        """Count a local step, and synchronize the replicas after every H-th.

        Collectives: those of `MomentumExchange.exchange` when it synchronizes; one all-gather the first time.

        Args:
            at_once: synchronize after this step too, such as after the last one of a run; the same on all replicas.

        Returns:
            True if the replicas have the same parameters now.

        Raises:
            UserError, NonFiniteError, PayloadError: as of `MomentumExchange.exchange`.
        """
        self.steps += 1
        self.wire_bytes = 0
        if self.is_synchronized and self._holds_residuals:  # the step was taken from the common parameters
            moves = [to_local(param) - anchor for param, anchor in zip(self._params, self.anchors, strict=True)]
            self.begin_round()
            for param, move in zip(self._params, moves, strict=True):
                to_local(param).add_(move)
        self.is_synchronized = False
        if at_once or self.steps % self.sync_every == 0:
            self.synchronize()
        return self.is_synchronized

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange pseudo-gradients, and take the outer step. Collectives and errors as of `advance`."""
        for idx, param in enumerate(self._params):
            if param.requires_grad:  # perhaps since the last exchange
                self.anchors[idx] = self.anchors[idx].to(anchor_dtype(param))
            param.grad = None
        for bucket in self._buckets:
            # frozen parameters are not exchanged, and must not change on one replica
            if trained := self._trained(bucket):
                # d: the way from the start of the round, times N by the share of the replica
                moved = self._starts(trained)
                foreach_add_(moved, self._parts(trained), alpha=-1.0)
                if self.weight != 1.0:
                    foreach_mul_(moved, self.weight)
                for idx, move in zip(trained, moved, strict=True):
                    self._params[idx].grad = as_gradient(move, self._params[idx])
            foreach_copy_(self._parts(bucket), [self.anchors[idx] for idx in bucket])  # replicas compare these values
        # D = mean of d over the replicas
        self.is_synchronized = True  # also if the exchange fails
        try:
            mean = self.exchange.decode_momentum()
        finally:
            for param in self._params:
                param.grad = None  # pseudo-gradients must not add to the next local gradients
        assert mean is not None  # there is a result in every exchange of a static group
        self.wire_bytes = self.exchange.wire_bytes
        # The weights of the mean add up to less or more if replicas were left out.
        correction = mean_correction(self._shares, self.exchange.nonfinite_ranks)
        for bucket in self._buckets:
            if trained := self._trained(bucket):
                anchors = [self.anchors[idx] for idx in trained]
                means = [mean[idx].to(anchor.dtype) for idx, anchor in zip(trained, anchors, strict=True)]
                self._take_outer_step(trained, anchors, means, correction)
            foreach_copy_(self._parts(bucket), [self.anchors[idx] for idx in bucket])

    def _take_outer_step(
        self, bucket: Sequence[int], anchors: list[Tensor], means: list[Tensor], correction: float
    ) -> None:
        """Take the step of SGD with Nesterov momentum from anchors; overwrites the mean pseudo-gradients D.

        Multiplications and additions are separate operations: `torch.optim.SGD` fuses them where the processor can,
        which rounds once instead of twice, so that replicas on other processors would part.
        """
        if correction != 1.0:
            foreach_mul_(means, correction)
        if self.outer_momentum:
            # m <- mu m + D;  D <- D + mu m
            for idx, each in zip(bucket, means, strict=True):
                momentum = self.momenta.get(idx)
                self.momenta[idx] = each.clone() if momentum is None else momentum.mul_(self.outer_momentum).add_(each)
                each += self.momenta[idx] * self.outer_momentum
        foreach_mul_(means, self.outer_lr)
        foreach_add_(anchors, means, alpha=-1.0)

    @contextmanager
    def common_parameters(self) -> Iterator[None]:
        """Context in which the parameters are those after the last exchange, which are equal on all replicas.

        With FSDP2 reshard the modules before the context ends: gathered parameters would remain the common ones.
        """
        if self.is_synchronized or self._own is not None:
            yield
            return
        self._own = [to_local(param).detach().clone() for param in self._params]
        self._write(self.anchors)
        try:
            yield
        finally:
            self._write(self._own)
            self._own = None

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for param, value in zip(self._params, values, strict=True):
            to_local(param).copy_(value)

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Take the parameters of this replica, which are equal on all of them, as the common ones.

        An anchor whose rounded value is that of its parameter keeps its further bits.
        """
        for param, anchor in zip(self._params, self.anchors, strict=True):
            part = to_local(param)
            has_moved = anchor.to(part.dtype) != part
            anchor.copy_(part if anchor.dtype == part.dtype else torch.where(has_moved, part.to(anchor.dtype), anchor))

    def wide_anchors(self) -> dict[int, Tensor]:
        """Return the anchors with more bits than their parameters, by index."""
        pairs = zip(self._params, self.anchors, strict=True)
        return {idx: anchor for idx, (param, anchor) in enumerate(pairs) if anchor.dtype != param.dtype}

    @torch.no_grad()
    def load_wide_anchors(self, anchors: Mapping[int, Tensor]) -> None:
        """Load the result of `wide_anchors` after the parameters, which count if they differ by more than rounding."""
        for idx, anchor in anchors.items():
            self.anchors[idx] = anchor.to(self.anchors[idx].device, copy=True)
        self.adopt_parameters()

    def transfer_state(self, other: OuterOptimizer) -> None:
        """Continue from another one, whose parameters may have been sliced or removed since.

        Both must be synchronized.
        """
        self.exchange.transfer_state(other.exchange)
        self.steps = other.steps
        theirs = {param: number for number, param in enumerate(other._params)}
        for idx, (param, anchor) in enumerate(zip(self._params, self.anchors, strict=True)):
            number = theirs.get(param)
            if number is not None and other.anchors[number].shape == anchor.shape:
                anchor.copy_(other.anchors[number])
                if number in other.momenta:
                    self.momenta[idx] = other.momenta[number]
        self.adopt_parameters()

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Keep some indices of one dim in the state of a parameter; see `MomentumExchange.slice_state`."""
        self.exchange.slice_state(param, dim, index)
        number = next(number for number, each in enumerate(self._params) if each is param)
        self.anchors[number] = self.anchors[number].index_select(dim, index)
        if number in self.momenta:
            self.momenta[number] = self.momenta[number].index_select(dim, index)


def _copy_like(values: list[Tensor], likes: list[Tensor]) -> list[Tensor]:
    """Return copies of values in the dtypes of other tensors of the same shapes."""
    copies = [torch.empty_like(like) for like in likes]
    foreach_copy_(copies, values)
    return copies


def anchor_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's anchor: fp32 if it is trained in bf16 or fp16, else its own."""
    is_narrow = param.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if param.requires_grad and is_narrow else param.dtype


def mean_correction(shares: Sequence[float], left_out: Sequence[int]) -> float:
    """Return the factor that makes the plain mean over the other replicas a mean by their shares.

    Args:
        shares: of all replicas; each has multiplied its values by N times its share of the sum.
        left_out: ranks that have sent nothing.
    """
    kept = [share for rank, share in enumerate(shares) if rank not in left_out]
    return len(kept) * sum(shares) / (len(shares) * sum(kept))


def refuse_compensated(optimizer: torch.optim.Optimizer) -> None:
    """Raise a UserError if an inner optimizer keeps bits of bf16 weights, which an exchange would replace."""
    for group in optimizer.param_groups:
        if group.get("rounding") == "compensated" and any(p.dtype == torch.bfloat16 for p in group["params"]):
            raise UserError(
                'rounding="compensated" keeps bits of weights that local steps replace in every exchange; set '
                'rounding="stochastic"'
            )


class LocalSteps(OuterOptimizer):
    """Optimizer that steps each replica locally and synchronizes the replicas every `sync_every` steps.

    A step with NaN or Inf gradients is skipped on its replica.

    Use it as an optimizer: `step()`, `zero_grad()`, `state_dict()`, and `torch.amp.GradScaler.step`. Learning rate
    schedules belong to the inner optimizer. Evaluate and save the model in the context `common_parameters()`.

    Args:
        inner: any optimizer of this replica's parameters; gradients must not be averaged.
        exchange: over the same parameters, with `sync_every=1`.
        options: of `OuterOptimizer`.

    Raises:
        UserError: as of `OuterOptimizer`, or an exchange over other parameters; in a step, a parameter that a
            `RankAdapter` has sliced: it selects ranks by gradients, which differ between replicas.
    """

    _step_supports_amp_scaling = True  # a scaler skips no step: steps are counted

    def __init__(self, inner: torch.optim.Optimizer, exchange: MomentumExchange, **options: Any) -> None:
        refuse_compensated(inner)
        self.inner = inner
        super().__init__(exchange, **options)
        if {id(p) for group in inner.param_groups for p in group["params"]} != {id(p) for p in self._params}:
            raise UserError("the inner optimizer and the exchange must hold the same parameters")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the inner optimizer."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """Take a step of the inner optimizer, and every H-th time synchronize the replicas after it.

        Collectives: those of `MomentumExchange.exchange`, every H-th time; one all-gather the first time; of sharded
        parameters one all-reduce of 4 bytes for each dim of their mesh.

        Raises:
            UserError, NonFiniteError, PayloadError: as of `MomentumExchange.exchange`.
        """
        if any(to_local(param).shape != anchor.shape for param, anchor in zip(self._params, self.anchors, strict=True)):
            raise UserError(
                "a parameter has another shape than when local steps began: with a RankAdapter each replica would "
                "select ranks by its own gradients. Use sc.DeMo or sc.MomentumExchange with it"
            )
        self.exchange.check_gradients()
        if (scale := grad_scale(self)) is not None:
            unscale_gradients(self._params, scale)
        # All shards of a replica must step or skip together.
        finite = all_finite(to_local(param.grad) for param in self._params if param.grad is not None)
        if all_agree(self._params, finite):
            self.inner.step()
        else:
            logger.warning("local step %d is skipped: a gradient of this replica is NaN or Inf", self.steps + 1)
        self.advance()
        self.begin_round()  # gradients of the common parameters would repeat the moves that have not been sent

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this replica."""
        return {
            "inner": self.inner.state_dict(),
            "momenta": {idx: momentum.clone() for idx, momentum in self.momenta.items()},
            "exchange": self.exchange.state_dict(),
            "anchors": [anchor.clone() for anchor in self.anchors],
            "steps": self.steps,
            "parameters": self._own_parameters(),
        }

    def _own_parameters(self) -> list[Tensor]:
        """Return copies of the parameters of this replica between exchanges; empty right after one."""
        if self.is_synchronized:
            return []
        return [value.detach().clone() for value in self._own or map(to_local, self._params)]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this replica, after the model: it holds the replica's own parameters.

        Raises:
            UserError: another kind of state.
        """
        keys = ("inner", "momenta", "exchange", "anchors", "steps", "parameters")
        check_state_keys(state_dict, "state_dict of local steps", keys)
        self.inner.load_state_dict(state_dict["inner"])
        self.momenta = {
            idx: momentum.to(self.anchors[idx], copy=True) for idx, momentum in state_dict["momenta"].items()
        }
        self.exchange.load_state_dict(state_dict["exchange"])
        self.anchors = [
            saved.to(anchor.device, copy=True)
            for anchor, saved in zip(self.anchors, state_dict["anchors"], strict=True)
        ]
        self.steps, self.is_synchronized = int(state_dict["steps"]), not state_dict["parameters"]
        self._write(state_dict["parameters"] or self.anchors)
        self.begin_round()


def diloco(
    inner: torch.optim.Optimizer,
    groups: Iterable[Any],
    *,
    sync_every: int = DILOCO_STEPS,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    batch_shares: Sequence[float] | None = None,
    **options: Any,
) -> LocalSteps:
    """Return DiLoCo (arXiv 2311.08105): everything is exchanged every `sync_every` steps.

    Args:
        inner: the optimizer of this replica, AdamW in the paper.
        groups: the same parameters, or groups of them.
        sync_every: 500 in the paper.
        outer_lr, outer_momentum: of the outer optimizer; the defaults are the paper's.
        batch_shares: of `OuterOptimizer`.
        options: of `MomentumExchange`; `dense` is the format, fp32 unless given.

    Returns:
        The optimizer of this replica, to be used instead of `inner`.

    Raises:
        UserError: an option that concerns selection; and as `LocalSteps`.
    """
    if unused := sorted(SELECTION_OPTIONS & set(options)):
        raise UserError(
            f"diloco exchanges everything, so that {', '.join(unused)} would have no effect: leave them out, or use "
            "sparseloco; set the format by dense="
        )
    exchange = outer_exchange("diloco", groups, **options)
    outer: dict[str, Any] = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "batch_shares": batch_shares}
    return LocalSteps(inner, exchange, sync_every=sync_every, **outer)


def sparseloco(
    inner: torch.optim.Optimizer,
    groups: Iterable[Any],
    *,
    sync_every: int = LOCAL_STEPS,
    outer_lr: float = OUTER_LR,
    batch_shares: Sequence[float] | None = None,
    keep_unsent: bool = True,
    **options: Any,
) -> LocalSteps:
    """Return SparseLoCo (arXiv 2508.15706): the largest elements of each block every `sync_every` steps.

    The defaults send the signs of all elements every 15 steps, and keep the residual in the weights. At 200 times fewer
    bytes than 16-bit gradients this measured best with four replicas, and about equal to the signs of 960 of 4096
    elements with two. The paper sends `topk=64` elements of 4096 in fewer bits every 30 steps, with
    `keep_unsent=False`.

    Args:
        inner: the optimizer of this replica.
        groups: the same parameters, or groups of them from `scantling.param_groups`.
        sync_every: 15 to 250 in the paper.
        outer_lr: of the outer step.
        batch_shares, keep_unsent: of `OuterOptimizer`.
        options: of `MomentumExchange`; default values="sign", dense="sign", topk of whole blocks, decay=1.0 with
            `keep_unsent` and else 0.95.

    Returns:
        The optimizer of this replica, to be used instead of `inner`.

    Raises:
        UserError: as `LocalSteps` and `MomentumExchange`.
    """
    published = {} if keep_unsent else {"decay": 0.95}
    exchange = outer_exchange("sparseloco", groups, **{**published, **options})
    outer: dict[str, Any] = {"outer_lr": outer_lr, "batch_shares": batch_shares, "keep_unsent": keep_unsent}
    return LocalSteps(inner, exchange, sync_every=sync_every, **outer)


def outer_exchange(method: str, groups: Iterable[Any], **options: Any) -> MomentumExchange:
    """Return the exchange of pseudo-gradients of DiLoCo or SparseLoCo.

    Args:
        method: "diloco": everything is sent; "sparseloco": the largest elements of each block, without a transform.
        groups: parameters, or groups of them.
        options: of `MomentumExchange`; the others have the defaults of `diloco` and `sparseloco`.
    """
    given, options = make_groups(groups, {}), outer_options(method, options)
    if method == "diloco":
        kept = ("params", "param_names")
        # The role "vector" sends parameters densely, whatever their shape.
        dense = [{key: group[key] for key in kept if key in group} | {"role": "vector"} for group in given]
        return MomentumExchange(dense, **options)
    return MomentumExchange([{**group, "transform": "none"} for group in given], **options)


def outer_options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of an exchange of pseudo-gradients with the defaults of `diloco` or `sparseloco` for the rest."""
    if method == "diloco":
        return {"dense": "fp32", **options}
    chunk = options.get("chunk", OPTIONS["chunk"].default)
    defaults = local_step_defaults(chunk) if is_integer(chunk, least=1) else {}  # the exchange refuses other blocks
    return {**defaults, **options}
