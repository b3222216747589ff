"""MomentumExchange: replicas exchange the largest components of their momentum in place of their gradients.

On each of N replicas, whose gradients are never averaged (DeMo, arXiv 2411.19870, algorithm 1):

    M_i  <-  decay M_i + g_i                          residual, different on each replica
    q_i   =  quantise(top-k(DCT(M_i)))                in blocks of chunk x chunk
    m     =  mean_i q_i                               the only thing that travels
    M_i  <-  M_i - alpha DCT^-1(q_i)                  what was said is forgotten, what was not is kept
    .grad =  DCT^-1(m)                                the same on all replicas

What is subtracted is what was sent, after quantisation, so that no error is lost: the mean of the residuals and what
was applied add up to the decayed sum of all gradients. Embeddings and vectors travel densely, in few bits with the same
error feedback (decay 1), as a synchronised gradient.

Cost: a residual of 4 bytes for each number of a parameter (1.03 in int8), but for what travels in full; `wire_bytes`
for the network.

With `delay=1` the result of an exchange comes at the next call, so that messages have the time of a whole step;
residuals are as the equations say. With `overlap` what is complete leaves during the backward pass. Both go through a
thread and a process group of their own.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from scantling.comm.accumulator import Accumulator, filled_up, seed_of, zeros_of
from scantling.comm.codec.message import Header
from scantling.comm.codec.quantize import DTYPES, Values
from scantling.comm.collectives import Outcome, Sparse, Strategy, exchange
from scantling.comm.config import Exchange, ExchangeConfig, Group, Transform, as_groups, check_groups
from scantling.comm.consistency import averaging_error, refuse_averaged, spread, unlike
from scantling.comm.ddp_guard import Averaging, find_averaging, find_wrappers
from scantling.comm.layout import (
    Bucket,
    Layout,
    all_block_groups,
    describe_layout,
    group_by_param,
    keeps_residuals,
    log_layout,
    make_buckets,
    parameter_names,
    planned_state_bytes,
    planned_wire_bytes,
    planned_wire_bytes_a_step,
    update_layout,
)
from scantling.comm.momentum_watch import MomentumWatch
from scantling.comm.residuals import Format
from scantling.comm.transport.background import Background
from scantling.comm.transport.group import ReplicaGroup, as_replica_group
from scantling.comm.transport.shards import all_agree, all_finite, as_gradient, check_meshes, match_placements, to_local
from scantling.errors import NonFiniteError, ReplicaError, SilentPeerError, UserError

logger = logging.getLogger(__name__)

Found: TypeAlias = tuple[list[Outcome], list[int]]


@dataclass(slots=True)
class Opened:
    """A step that has begun.

    Attributes:
        before: the result of the exchange before, where there is a delay.
        waiting: positions of the parameters of each bucket whose gradients have not come yet.
        is_due: whether its messages are sent; not between exchanges, and not after one that broke.
        next: number of the next bucket to send.
        failure: of the exchange before, where there is a delay.
    """

    before: list[Tensor] | None
    waiting: list[set[int]]
    is_due: bool
    next: int = 0
    failure: NonFiniteError | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A message on its way.

    Attributes:
        bucket: what it is about.
        step: when it was sent.
        arrived: waits for what came of it.
    """

    bucket: Bucket
    step: int
    arrived: Callable[[], Found]


class MomentumExchange(Accumulator):
    """Turn local gradients into the same decoded momentum on all replicas; any optimizer steps with it.

    Gradients must not have been averaged: no DistributedDataParallel, or every backward pass in its `no_sync()`.

    With a `torch.amp.GradScaler` the order is `scaler.unscale_(optimizer)`, `exchange()`, `optimizer.step()` and
    `scaler.update()`. Not `scaler.step(optimizer)`: it leaves out the step on a replica whose own gradients overflowed,
    though `.grad` is sound by then and the others step, which the exchange cannot see. `DeMo` takes `scaler.step`.

    Args:
        groups: of `scantling.param_groups`, whose `role` says what travels how; or parameters, of which those of two
            dims and more and at least 4,096 numbers count as matrices. A group may have the options below as keys.
        decay: of the residual of matrices, each step.
        topk: coefficients sent of a block of chunk x chunk; of a smaller block as large a share.
        chunk: longest side of a block.
        alpha: share of what was sent that is taken out of the residual.
        values: format of the coefficients: fp32, bf16, int8, int4 or sign.
        dense: format of what is no matrix.
        transform: "dct" selects among the coefficients of the cosine transform, "none" among the numbers themselves.
        exchange: all_gather, owner, or auto: what sends fewer bytes, see `rounds.py`; or whole: everything travels,
            in bf16, or in fp32 where `dense` is.
        sync_every: calls from one exchange to the next; at the others gradients go into the residuals, and no parameter
            has a gradient left.
        state_sync_every: exchanges after which the residuals are averaged over the replicas, which sends 8 bytes for
            each of their numbers; None for never.
        check_every: exchanges after which the parameters of all replicas are compared by hashes, which sends 8 bytes
            for each parameter, and `replica_divergence` is measured; None for never.
        delay: calls from an exchange to its result, 0 or 1. With 1 the network has the time of a whole step, and the
            first call has no result.
        overlap: whether what is ready leaves during the backward pass, in a context of `overlapped`.
        bucket_mb: with overlap, MiB of parameters that share a message, at least; there are about eight at most.
        residual: format of the residuals of matrices: "fp32", or "int8" with stochastic rounding, 1.03 bytes a number.
        process_group: group of the replicas, a mesh of one dim, or a `TorchFTGroup`; default all processes.

    Attributes:
        param_groups: the groups, with all options.
        state: by parameter: `residual`, and in int8 `residual_scale`; `pending`, a result that a delay holds back, once
            it was asked for by `state_dict`.
        wire_bytes: what this process sent in the exchange of the last result, headers included; without what compares
            the replicas at the start, where shapes or options have changed, and after a state was loaded, 8 bytes and
            more for each parameter.
        left_out: ranks whose gradients were NaN or Inf in it; with overlap, in a part of it.
        withheld: whether gradients of this process in the last call were NaN or Inf, and go into no exchange.
        announces: True if rank 0 prints the layout at the first exchange.
        replica_divergence: how far the residuals were apart when they were last compared, from 0 to 1.

    Raises:
        UserError: an option out of range, or processes that hold parts of one replica; at the first exchange, replicas
            that differ in parameters or options.

    Example:
        >>> exchange = sc.MomentumExchange(sc.param_groups(model), topk=8)  # doctest: +SKIP
        >>> loss.backward(); exchange.exchange(); optimizer.step(); optimizer.zero_grad()  # doctest: +SKIP
    """

    def __init__(
        self,
        groups: Iterable[Any],
        *,
        decay: float = 0.95,
        topk: int = 32,
        chunk: int = 64,
        alpha: float = 1.0,
        values: Values = "sign",
        dense: Values = "bf16",
        transform: Transform = "dct",
        exchange: Exchange = "auto",
        sync_every: int = 1,
        state_sync_every: int | None = None,
        check_every: int | None = 100,
        delay: int = 0,
        overlap: bool = False,
        bucket_mb: float = 25.0,
        residual: Format = "fp32",
        process_group: Any = None,
    ) -> None:
        options: dict[str, Any] = {"decay": decay, "topk": topk, "chunk": chunk, "alpha": alpha, "values": values}
        options |= {"dense": dense, "transform": transform, "residual": residual}
        defaults = {**options, "role": None, "matrix_dims": None, "compat": None}
        config = ExchangeConfig(exchange, sync_every, state_sync_every, check_every, delay, overlap, bucket_mb)
        self._begin(as_groups(groups, defaults), {}, config, as_replica_group(process_group))

    def _begin(
        self, groups: list[Group], state: dict[Tensor, dict[str, Any]], config: ExchangeConfig, replicas: ReplicaGroup
    ) -> None:
        check_groups(groups, config)
        if not replicas.is_static and (config.delay or config.overlap):
            raise UserError("delay and overlap need a fixed set of replicas; leave them out with a TorchFTGroup")
        self.param_groups, self.state, self.config, self.replicas = groups, state, config, replicas
        self.announces = True
        self._compared: tuple[str, ...] = ()
        self.facts: dict[str, Any] = {}
        self.replica_divergence: float | None = None
        self.step = self._calls = 0
        self.wire_bytes = 0
        self.left_out: list[int] = []
        self.withheld = False
        self._has_started = False
        self._wrappers: list[nn.Module] | None = None
        self._known_wrappers: list[weakref.ref[nn.Module]] = []
        self._watch: MomentumWatch | None = None
        self.watches_optimizer = True
        self._layout: Layout | None = None
        self._opened: Opened | None = None
        self._sent: list[Sent] = []
        self._settled: tuple[int, list[int]] = 0, []
        self._failure: NonFiniteError | None = None
        self._line: ReplicaGroup | None = None
        self._background: Background | None = None
        if replicas.is_static:
            check_meshes(self._parameters(), replicas.ranks)

    @torch.no_grad()
    def exchange(self) -> bool:
        """Take each `.grad` into the residual, exchange, and put the decoded momentum in its place.

        Collectives: one all-gather, or an all-to-all and an all-gather, see `rounds.py`, for each bucket of `overlap`;
        at the first call, whenever shapes have changed or a state was loaded, and every `check_every` exchanges two
        more, which compare the replicas. With `delay` or `overlap` they are those of a thread, in a process group of
        its own. Where a gradient is placed otherwise than its parameter, those of `match_placements` in `shards.py`.

        Returns:
            Whether there is a result; where not (`sync_every`, the first call with `delay`, and over a `TorchFTGroup`
            an exchange that broke), every `.grad` is None.

        Raises:
            UserError: replicas differ in parameters or options, or their gradients were averaged.
            NonFiniteError: the gradients of all replicas are NaN or Inf; nothing has changed but the step counter, and
                with `overlap` what has left before. With `delay` those of the call before; this one's have left.
            PayloadError: what came is damaged or of another step.
            ReplicaError: parameters are not alike any more.
        """
        decoded = self.decoded()
        self._watch_optimizer()
        for place, param in enumerate(self._parameters()):
            if param.requires_grad:
                param.grad = None if decoded is None else as_gradient(decoded[place], param)
        return decoded is not None

    def _watch_optimizer(self) -> None:
        """Warn of an optimizer with a momentum of its own once it steps."""
        if self._watch is not None:
            if self._watch.is_done:
                self._watch.stop()
        elif self.watches_optimizer and self.replicas.rank == 0:
            pairs = zip(self._parameters(), group_by_param(self.param_groups), self.are_matrices(), strict=True)
            self._watch = MomentumWatch(
                param for param, group, is_matrix in pairs if is_matrix and group["decay"] > 0 and param.requires_grad
            )

    def decoded(self) -> list[Tensor] | None:
        """As `exchange`, but the momentum of all parameters in fp32, of the local part of each; None without one.

        What is frozen has zeros.
        """
        opened = self._opened or self._open()
        self._opened = None
        while opened.next < len(opened.waiting):
            self._send(opened)
        if self.config.overlap:  # when the step began, there were no gradients yet
            self.check_gradients()
        if not self.replicas.should_commit():
            self._sent = []  # and so nothing of it leaves the residuals
            return None
        if opened.failure is not None:
            raise opened.failure
        return opened.before if self.config.delay else self._arrived()

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Context of the last backward pass before `exchange`: what is ready leaves while the pass goes on.

        Without `overlap` it does nothing. Gradients must be as they are to be exchanged: no clipping by a norm of all.

        After an error in it the next backward pass begins anew, unless gradients have left to other replicas: then
        the step has to be ended as it is on them, by `exchange`, before that.

        Raises:
            UserError: in the backward pass, a gradient that comes a second time after it has left.
        """
        if not self.config.overlap:
            yield
            return
        with torch.no_grad():
            opened = self._opened = self._opened or self._open()
        hooks = [
            param.register_post_accumulate_grad_hook(partial(self._ready, place))  # type: ignore[no-untyped-call]
            for place, param in enumerate(self._parameters())
            if param.requires_grad
        ]
        try:
            yield
        except BaseException as error:
            if opened.next == 0:
                opened.waiting = _waiting(self._update_layout())
            elif self.replicas.world_size == 1:  # what has left stays in the residuals
                self._opened, self._sent, self._failure = None, [], opened.failure
                self._set_pending(opened.before)
            else:
                error.add_note(
                    "gradients have left already, and the other replicas wait for the rest: end this step with "
                    "exchange(), or step() of DeMo, before the next backward pass"
                )
            raise
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def transfer_state(self, other: MomentumExchange) -> None:
        """Go on where another exchange is, over parameters some of which have other shapes or are gone.

        What it has on its way is waited for; its thread and the process group of that are used further.
        """
        other.flush()
        params = set(self._parameters())
        self.state = {param: state for param, state in other.state.items() if param in params}
        self.step, self._failure = other.step, other._failure
        self._settled = other._settled
        self._has_started, self._watch = other._has_started, other._watch
        if other._background is not None:
            self._line, self._background = other._line, other._background

    @torch.no_grad()
    def flush(self) -> None:
        """Wait for what `delay` has on its way, and keep it in the state for the next call.

        Call it before `destroy_process_group()` too, so that no collective goes on in a group that is being destroyed.
        """
        if not self._sent:
            return
        of_last = self.wire_bytes, self.left_out
        self.wire_bytes, self.left_out = 0, []
        found, self._failure = self._held_back()
        self._settled = self.wire_bytes, self.left_out
        self.wire_bytes, self.left_out = of_last
        self._set_pending(found)

    def _held_back(self) -> tuple[list[Tensor] | None, NonFiniteError | None]:
        """The result that a delay has held back; or why there is none, which is raised once this step has left."""
        try:
            return self._arrived(), self._failure
        except NonFiniteError as error:
            return None, error

    def _set_pending(self, result: list[Tensor] | None) -> None:
        """Keep the result of an exchange in the state, for the next call that has one."""
        for param, value in zip(self._parameters(), result or [], strict=False):
            self.state.setdefault(param, {})["pending"] = value

    def drop(self) -> None:
        """Wait for what is on its way and forget it: what is loaded is in its place. Replicas are compared again."""
        if self._layout is not None and self.replicas.is_static:  # over a TorchFTGroup, who comes loads alone
            self._layout = replace(self._layout, is_stale=True, is_late=self._layout.is_late or self._calls > 0)
        self._calls, self._opened, self._failure = 0, None, None
        sent, self._sent = self._sent, []
        for each in sent:
            with suppress(Exception):
                each.arrived()

    @property
    def has_begun(self) -> bool:
        """Whether `overlapped` has begun a step that no `exchange` has ended yet."""
        return self._opened is not None

    def _open(self) -> Opened:
        """Begin a step: take in what is still on its way, and compare the replicas where it is time to."""
        self.wire_bytes, self.left_out = self._settled
        self._settled, self.withheld = (0, []), False
        before, failure = self._held_back()
        self._failure = None
        if not self.config.delay:  # of a state that was saved with one: it comes with the result of this call
            self._set_pending(before)
            before = None
        if self.replicas.step is not None:
            self.step = self.replicas.step
        try:
            layout = self._begun()
        except SilentPeerError as error:
            self.replicas.handle_error(error)
            self._keep_gradients()
            return Opened(before, [], is_due=False, failure=failure)
        self.wire_bytes += self.replicas.wire_bytes
        if self._line is None:
            in_thread = bool(self.config.delay or self.config.overlap) and self.replicas.world_size > 1
            self._line = self.replicas.clone() if in_thread else self.replicas
            self._background = Background() if in_thread else None
        self._line.reset_wire_bytes()
        return Opened(before, _waiting(layout), self.config.is_due(self.step), failure=failure)

    def _keep_gradients(self) -> None:
        """Take the gradients of a step that cannot begin into the residuals. No replica is spoken to."""
        if self.config.exchange == "dense":
            return
        params = self._parameters()
        for bucket in make_buckets(self.param_groups, self.config):
            gradients = {place: _gradient(params[place]) for place in bucket.params}
            valid = self._is_valid(gradients)
            for block_group in bucket.block_groups:
                if keeps_residuals(block_group, self.config):
                    self._accumulated(block_group, gradients, valid=valid)

    def _begun(self) -> Layout:
        """The layout of a step that begins, after everything about which replicas speak before it."""
        self._look_around()
        layout = self._update_layout()
        self.step += 1
        config, params = self.config, self._parameters()
        if not config.overlap:
            self.check_gradients()
        self.replicas.reset_wire_bytes()
        if config.comes_round(self.step, config.check_every):
            self._compare(params)
        self._calls += 1
        if layout.strategy != "dense" and config.comes_round(self.step, config.state_sync_every):
            self._average()
        return layout

    def _look_around(self) -> None:
        """Find what wraps the model, in the first step in this process. No communication."""
        if not self._has_started:
            self._has_started, params = True, self._parameters()
            if self.replicas.is_static:
                check_meshes(
                    params, self.replicas.ranks
                )  # again: accelerate replaces parameters of a finished optimizer
            self._wrappers = [] if self.replicas.world_size == 1 else find_wrappers(params, self.replicas.ranks)

    def check_gradients(self) -> None:
        """Refuse gradients that were averaged.

        Collective in the first step in this process: one all-gather. Over a `TorchFTGroup` in the first step of all
        replicas, since one that comes later would be alone in it. Later steps ask the wrappers found then, without
        communication: a loop may leave out `no_sync()` later, or evaluate before its first step.
        """
        self._look_around()
        if self._wrappers is not None and (self.replicas.is_static or self.step == 1):
            refuse_averaged(self.replicas, self._parameters(), self._wrappers)
            self._known_wrappers, self._wrappers = [weakref.ref(wrapper) for wrapper in self._wrappers], None
            return
        wrappers = [wrapper for reference in self._known_wrappers if (wrapper := reference()) is not None]
        averaging = [wrapper for wrapper in wrappers if find_averaging(wrapper) is Averaging.YES]
        if averaging:
            raise averaging_error(averaging)

    def _ready(self, place: int, _: Tensor) -> None:
        """Note that a parameter has its gradient, and send the buckets that are complete, in their order."""
        opened = self._opened
        if opened is None or not any(place in waiting for waiting in opened.waiting[opened.next :]):
            name = parameter_names(self.param_groups)[place]
            raise UserError(
                f"{name} got a gradient after its own had left: overlapped() is for the "
                "last backward pass before exchange() alone, in which each parameter gets its gradient once "
                "(checkpointed layers: use_reentrant=False)"
            )
        for waiting in opened.waiting:
            waiting.discard(place)
        with torch.no_grad():
            while opened.next < len(opened.waiting) and not opened.waiting[opened.next]:
                self._send(opened)

    def _send(self, opened: Opened) -> None:
        """Take the gradients of the next bucket into its residuals and, where it is time to, begin its exchange."""
        layout, params, number = self._update_layout(), self._parameters(), opened.next
        opened.next += 1
        bucket = layout.buckets[number]
        gradients = {place: _gradient(params[place]) for place in bucket.params}
        valid = self._is_valid(gradients)
        self.withheld |= not valid
        if not bucket.block_groups:  # all of it is frozen, or empty
            if opened.is_due:
                self._sent.append(Sent(bucket, self.step, lambda: ([], [])))
            return
        selected: list[Sparse] = []
        for block_group in bucket.block_groups:
            if layout.strategy == "dense":
                blocks = (
                    block_group.to_blocks(filled_up(block_group, gradients, params))
                    if valid
                    else zeros_of(block_group, params)
                )
                selected.append((None, blocks.to(DTYPES[block_group.spec.codec.values])))
                continue
            if opened.is_due and valid and (at_once := self._selected_at_once(block_group, gradients)) is not None:
                selected.append(at_once)
                continue
            values = self._accumulated(block_group, gradients, valid=valid)
            if opened.is_due:
                blocks = block_group.to_blocks(values) if valid else zeros_of(block_group, params)
                selected.append(block_group.spec.codec.select(blocks))
        if not opened.is_due or self._line is None:
            if not valid:
                logger.warning("step %d, rank %d: NaN or Inf gradients are left out", self.step, self.replicas.rank)
            return
        if valid and layout.strategy != "dense" and not all_finite(values for _, values in selected):
            logger.warning("step %d, rank %d: a residual is NaN or Inf and begins anew", self.step, self.replicas.rank)
            for place in bucket.params:
                self.residuals.drop(params[place])
            valid, self.withheld = False, True
            selected = [
                block_group.spec.codec.select(zeros_of(block_group, params)) for block_group in bucket.block_groups
            ]
        configuration = (layout.configuration + number) & 0xFFFFFFFF
        header = Header(valid, self.replicas.quorum_id, self.step, self.replicas.rank, configuration)
        mean_over_senders = self.param_groups[0]["compat"] == "paper"
        work = partial(
            exchange,
            self._line,
            layout.strategy,
            bucket.block_groups,
            selected,
            header,
            mean_over_senders=mean_over_senders,
        )
        if self._background is None:
            try:
                found = work()
            except SilentPeerError as error:
                self.replicas.handle_error(error)
                opened.is_due = False
                return
            self._sent.append(Sent(bucket, self.step, lambda: found))
        else:
            device = to_local(params[bucket.params[0]]).device
            task = self._background.submit(work, device)
            self._sent.append(Sent(bucket, self.step, partial(task.result, _tensors)))

    def _arrived(self) -> list[Tensor] | None:
        """The momentum of what was sent, which residuals lose, and what was kept of it before; None without any."""
        params = self._parameters()
        if not self._sent:
            return self._kept()
        sent, self._sent = self._sent, []
        arrived, errors = [], []
        for each in sent:  # all of them, so that nothing is on its way any more when one raises
            try:
                arrived.append(each.arrived())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        self.left_out = sorted({rank for _, ranks in arrived for rank in ranks})
        self.wire_bytes += self._line.wire_bytes if self._line is not None else 0
        if self.left_out and self.replicas.rank == 0:
            logger.warning("step %d: ranks %s have NaN or Inf gradients and are left out", sent[0].step, self.left_out)
        found: list[Tensor | None] = [None] * len(params)
        is_whole, groups = (
            self._layout is not None and self._layout.strategy == "dense",
            group_by_param(self.param_groups),
        )
        for each, (outcomes, _) in zip(sent, arrived, strict=True):
            for block_group, outcome in zip(each.bucket.block_groups, outcomes, strict=True):
                for place, value in block_group.decode_sparse(*outcome.mean):
                    if is_whole:
                        seed = seed_of(each.step, 0, place)
                        value = self._followed(block_group, params[place], groups[place], value, seed)
                    found[place] = value
                self._forget(block_group, outcome, each.step)
        whole, kept = _filled(found, params), self._kept()
        if kept is None:
            return whole
        triples = zip(whole, kept, params, strict=True)
        return [one + other if param.requires_grad else one for one, other, param in triples]

    def _kept(self) -> list[Tensor] | None:
        """Take the result of an exchange out of the state, where there is one."""
        params = self._parameters()
        kept = [self.state[param].pop("pending", None) if param in self.state else None for param in params]
        return _filled(kept, params) if any(value is not None for value in kept) else None

    def _is_valid(self, gradients: Mapping[int, Tensor | None]) -> bool:
        """Whether all gradients are finite, on all processes that share the parameters of this replica.

        Collective: of sharded parameters, one all-reduce of 4 bytes for each dim of their mesh.
        """
        valid = all_finite(gradient for gradient in gradients.values() if gradient is not None)
        params = self._parameters()
        return all_agree([params[place] for place in gradients], valid)

    @property
    def strategy(self) -> Strategy:
        """How bytes travel, which for "auto" depends on their number and that of the processes.

        Collectives before the first call of `exchange`: those that compare the replicas.
        """
        return self._update_layout().strategy

    def planned_wire_bytes(self, num_processes: int | None = None) -> int:
        """Bytes that each process sends in an exchange of so many processes, headers included; no communication.

        What is sent now and then comes on top: `check_every`, `state_sync_every`.

        Args:
            num_processes: how many; those that there are unless given.
        """
        return planned_wire_bytes(self.param_groups, self.config, num_processes or self.replicas.world_size)

    def planned_wire_bytes_a_step(self, num_processes: int | None = None) -> float:
        """As `planned_wire_bytes`, in a call on average: with `sync_every`, and `state_sync_every`."""
        return planned_wire_bytes_a_step(self.param_groups, self.config, num_processes or self.replicas.world_size)

    def planned_state_bytes(self) -> int:
        """Bytes of the residuals once there was an exchange; no communication."""
        return planned_state_bytes(self.param_groups, self.config)

    def are_matrices(self) -> list[bool]:
        """For each parameter whether it goes by blocks."""
        found = [False] * len(self._parameters())
        for block_group in all_block_groups(self._update_layout().buckets):
            for slot in block_group.slots:
                found[slot.param] = block_group.spec.is_matrix
        return found

    def __str__(self) -> str:
        """What travels how, a line each."""
        return describe_layout(self.param_groups, self.config)

    def _update_layout(self) -> Layout:
        """How everything travels; compared with how it does on the other replicas where it is new."""
        compared: dict[str, Any] = {"also": self._compared, "facts": self.facts}
        found = update_layout(self.param_groups, self.config, self.replicas, self._layout, step=self.step, **compared)
        if self.announces and self._layout is None and self.replicas.rank == 0:
            log_layout(f"{self}\nexchange by {found.strategy} among {self.replicas.world_size} processes")
        self._layout = found
        return found

    def _compare(self, params: Sequence[Tensor]) -> None:
        """Compare the parameters of all replicas, and measure how far their residuals are apart."""
        found = unlike(self.replicas, params)
        if found is not None:
            rank, place, _ = found
            name = parameter_names(self.param_groups)[place]
            raise ReplicaError(
                f"step {self.step}: {name} on rank {rank} differs from the other ranks. Resume from the last checkpoint"
            )
        self.replica_divergence = spread(self.replicas, (value for _, value in self._all_residuals()), self.step)


def _tensors(found: Found) -> Iterator[Tensor]:
    for outcome in found[0]:
        for part in (outcome.mean, outcome.applied, outcome.owner_error):
            yield from (tensor for tensor in part or () if tensor is not None)


def _waiting(layout: Layout) -> list[set[int]]:
    """Of each bucket the positions of all its parameters."""
    return [set(bucket.params) for bucket in layout.buckets]


def _filled(found: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor]:
    """Zeros where a parameter has nothing: it is frozen, empty here, or was not there yet."""
    return [_zeros_like(param) if value is None else value for value, param in zip(found, params, strict=True)]


def _zeros_like(param: Tensor) -> Tensor:
    """Zeros in fp32 like the local part of a parameter; for a frozen one, which has no step, they take no memory."""
    part = to_local(param)
    if param.requires_grad:
        return torch.zeros_like(part, dtype=torch.float32)
    return torch.zeros((), dtype=torch.float32, device=part.device).expand(part.shape)


def _gradient(param: Tensor) -> Tensor | None:
    if param.grad is None:
        return None
    if param.grad.is_sparse:
        raise UserError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is sparse; use sparse=False in its embedding"
        )
    match_placements(param)
    return to_local(param.grad)
