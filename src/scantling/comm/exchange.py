"""MomentumExchange: replicas exchange the largest components of their momentum instead of their gradients.

On each of N replicas, whose gradients are never averaged (DeMo, arXiv 2411.19870, algorithm 1):

    (1)  M_i   <-  decay M_i + g_i                  accumulate; the residual differs on each replica
    (2)  q_i    =  quantize(top-k(DCT(M_i)))        select, in blocks of chunk x chunk
    (3)  m      =  mean_i q_i                       exchange; nothing else is sent
    (4)  M_i   <-  M_i - DCT^-1(q_i)                subtract the sent part, keep the rest
    (5)  .grad  =  DCT^-1(m)                        the same on all replicas

Quantized values are subtracted, so that no error is lost: the mean of the residuals and the applied momentum add up to
the decayed sum of all gradients. Of embeddings and output layers, the largest elements are sent without a transform,
and of vectors all in low precision, both with the same error feedback and decay 1: they are synchronized gradients.

Cost: a residual of 4 bytes per element (1.06 in int8) unless everything is sent exactly; `wire_bytes` for the network.

With `delay=1` the result of an exchange is used one step later, so that messages have a whole step to arrive. With
`overlap` complete buckets are sent during the backward pass. Both use a thread and their own process group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from scantling.comm.codec.block_group import BlockGroup
from scantling.comm.codec.message import Header
from scantling.comm.codec.quantize import DTYPES
from scantling.comm.collectives import Sparse, exchange_coefficients
from scantling.comm.config import ExchangeOptions, Strategy, document_options, is_integer, make_config
from scantling.comm.consistency import AveragingGuard, find_mismatch, residual_divergence
from scantling.comm.in_flight import InFlight
from scantling.comm.layout import (
    Layout,
    describe_layout,
    keeps_residuals,
    log_layout,
    make_buckets,
    planned_state_bytes,
    planned_wire_bytes,
    planned_wire_bytes_per_step,
    update_layout,
)
from scantling.comm.momentum_watch import MomentumWatch
from scantling.comm.param_groups import (
    INTERNAL_DEFAULTS,
    Group,
    check_groups,
    group_by_param,
    make_groups,
    parameter_names,
)
from scantling.comm.residuals import Residuals, check_state_keys, fill_zeros
from scantling.comm.transport.group import as_replica_group
from scantling.comm.transport.shards import all_agree, all_finite, as_gradient, check_meshes, match_placements, to_local
from scantling.errors import NonFiniteError, ReplicaError, SilentPeerError, UserError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenStep:
    """A step whose buckets are not all sent.

    Attributes:
        missing: for each bucket, indices of the parameters without a gradient so far in the backward pass.
        is_due: True if messages are sent: not between exchanges, nor after a broken exchange.
        previous: result of the exchange of the previous step, with `delay`.
        failure: error of the same exchange, to be raised after this step's messages are sent.
        next_bucket: index of the next bucket to send.
    """

    missing: list[set[int]]
    is_due: bool
    previous: list[Tensor] | None = None
    failure: NonFiniteError | None = None
    next_bucket: int = 0


@document_options
class MomentumExchange:
    """Turn local gradients into the same decoded momentum on all replicas; any optimizer steps with it.

    Gradients must not be averaged: no DistributedDataParallel, or every backward pass in its `no_sync()`.

    With a `torch.amp.GradScaler`, call `scaler.unscale_(optimizer)`, `exchange()`, `optimizer.step()` and
    `scaler.update()`. Do not call `scaler.step(optimizer)`: it skips the step on a replica whose own gradients
    overflowed, although its `.grad` is finite after the exchange and the other replicas step. `DeMo` supports
    `scaler.step`.

    Args:
        groups: of `scantling.param_groups`, whose `role` selects the encoding; or parameters, which are matrices if
            they have at least two dims and 4,096 elements. A group may override the options that concern parameters:
            decay, topk, chunk, values, dense, residual.
        process_group: group of the replicas, a mesh of one dim, or a `TorchFTGroup`; default all processes.
        {options}

    Attributes:
        param_groups: the groups, with all options.
        residuals: the error-feedback state of all parameters.
        state: by parameter: `residual`, with int8 `residual_scale`, and with `delay` `pending`, a result that is not
            applied yet.
        config: the options.
        replicas: group of the replicas.
        step: number of steps so far.
        wire_bytes: bytes that this process sent in the exchange of the last result, headers included. Comparisons of
            replicas at the start, after a change of shapes or options and after loading a state do not count; they send
            8 bytes and more per parameter.
        nonfinite_ranks: ranks whose gradients were NaN or Inf in that exchange; with overlap, in a part of it.
        local_nonfinite: True if this process's gradients in the last step were NaN or Inf, and were left out.
        announces: True if rank 0 reports the layout at the first exchange.
        compared_keys, compared_values: further keys of the groups, and values, that replicas must share.
        is_elementwise: True if replicas compute each element of their parameters from its own momentum alone. Without a
            transform, they may then have different processors and numbers of threads.
        decodes_to_fp32: True if a GPU must not write results of bf16 parameters in bf16.
        replica_divergence: relative distance between the replicas' residuals at the last comparison, from 0 to 1.

    Raises:
        UserError: an option out of range, or processes that hold parts of one replica; at the first exchange, replicas
            that differ in parameters or options.

    Example:
        >>> exchange = sc.MomentumExchange(sc.param_groups(model), topk=8)  # doctest: +SKIP
        >>> loss.backward(); exchange.exchange(); optimizer.step(); optimizer.zero_grad()  # doctest: +SKIP
    """

    def __init__(self, groups: Iterable[Any], *, process_group: Any = None, **options: Unpack[ExchangeOptions]) -> None:
        config, replicas = make_config(options), as_replica_group(process_group)
        param_groups = make_groups(groups, {**config.group_options, **INTERNAL_DEFAULTS})
        check_groups(param_groups, config)
        if not replicas.is_static and (config.delay or config.overlap or config.exchange == "dense"):
            raise UserError(
                "delay, overlap and exchange='dense' need a fixed set of replicas; leave them out with a TorchFTGroup"
            )
        self.residuals = Residuals(param_groups, {}, config)
        self.config, self.replicas = config, replicas
        self.announces = True
        self.compared_keys: tuple[str, ...] = ()
        self.compared_values: dict[str, Any] = {}
        self.is_elementwise = self.decodes_to_fp32 = False
        self.replica_divergence: float | None = None
        self.momentum_watch: MomentumWatch | None = None
        self.step = 0
        self.wire_bytes, self.nonfinite_ranks = 0, list[int]()
        self.local_nonfinite = False
        self._steps_in_process = 0
        self._layout: Layout | None = None
        self._averaging = AveragingGuard()
        self._open_step: OpenStep | None = None
        self._in_flight = InFlight()
        self._flushed: tuple[int, list[int]] = 0, []  # wire_bytes and nonfinite_ranks of a flushed result
        self._failure: NonFiniteError | None = None
        if replicas.is_static:
            check_meshes(self.residuals.params, replicas.ranks)

    @property
    def param_groups(self) -> list[Group]:
        return self.residuals.param_groups

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        self.residuals.subtract_sent()
        return self.residuals.state

    @torch.no_grad()
    def exchange(self) -> bool:
        """Accumulate each `.grad`, exchange, and replace `.grad` by the decoded momentum.

        Collectives: for each bucket one all-gather, or an all-to-all and an all-gather, see collectives.py. Two more,
        which compare the replicas, in the first step, after a change of shapes or a loaded state, and every
        `check_every` exchanges. With `delay` or `overlap` a thread runs them in its own process group. Gradients with
        other placements than their parameter take those of `match_placements`.

        Returns:
            True if there is a result. If not (between exchanges, in the first step with `delay`, and after a broken
            exchange over a `TorchFTGroup`), every `.grad` is None.

        Raises:
            UserError: replicas differ in parameters or options, or their gradients were averaged.
            NonFiniteError: the gradients of all replicas are NaN or Inf; nothing has changed but the step counter, and
                with `overlap` the buckets sent before. With `delay` the gradients are those of the previous step, and
                this step's buckets have been sent.
            PayloadError: a message is damaged or of another step.
            ReplicaError: parameters differ between replicas.
        """
        momentum = self.decode_momentum()
        self._watch_optimizer()
        for idx, param in enumerate(self.residuals.params):
            if param.requires_grad:
                param.grad = None if momentum is None else as_gradient(momentum[idx], param)
        return momentum is not None

    def decode_momentum(self) -> list[Tensor] | None:
        """Exchange, and return the decoded momentum of all parameters: local shards, zeros if frozen.

        In fp32; a GPU writes the momentum of bf16 matrices in bf16, except for Muon and for local steps.

        None if there is no result, see `exchange`.
        """
        step = self._open_step or self._begin_step()
        self._open_step = None
        # Equations 1 to 3, for the buckets that `overlap` has not sent in the backward pass.
        while step.next_bucket < len(step.missing):
            self._send_bucket(step)
        if self.config.overlap:  # when the step began, there were no gradients yet
            self.check_gradients()
        # A group with changing members may refuse the step, on all replicas together.
        if not self.replicas.should_commit():
            self._in_flight.clear()  # without a result, nothing is subtracted from the residuals
            return None
        # Raise only now: the other replicas need the messages of this step.
        if step.failure is not None:
            raise step.failure
        # Equations 4 and 5: with `delay`, `_begin_step` has received the previous step's result.
        return step.previous if self.config.delay else self._receive()

    def _send_bucket(self, step: OpenStep) -> None:
        """Accumulate and select the next bucket (equations 1 and 2), and start its exchange (3)."""
        layout, params, number = self._update_layout(), self.residuals.params, step.next_bucket
        step.next_bucket += 1
        bucket = layout.buckets[number]
        gradients = {idx: _local_gradient(params[idx]) for idx in bucket.params}
        valid = self._are_finite(gradients)
        self.local_nonfinite |= not valid
        # Between exchanges, gradients only accumulate (1). A dense exchange keeps no local momentum.
        if not step.is_due:
            for block_group in bucket.block_groups if layout.strategy != "dense" else ():
                self.residuals.accumulate(block_group, gradients, self.step, valid=valid)
            if not valid and bucket.block_groups:
                logger.warning("step %d, rank %d: NaN or Inf gradients are left out", self.step, self.replicas.rank)
            return
        # Accumulate and select (1, 2). An invalid bucket still sends zeros: all ranks must run the same collectives.
        selected = [self._select(block_group, gradients, layout, valid=valid) for block_group in bucket.block_groups]
        # A residual can overflow although all gradients are finite: start it from zero.
        if valid and layout.strategy != "dense" and not all_finite(values for _, values in selected):
            logger.warning("step %d, rank %d: a residual is NaN or Inf; reset to zero", self.step, self.replicas.rank)
            for idx in bucket.params:
                self.residuals.discard(params[idx])
            valid, self.local_nonfinite = False, True
            selected = [self._select(each, gradients, layout, valid=False) for each in bucket.block_groups]
        # The header makes a message of another step, layout or bucket an error instead of a wrong update.
        configuration = (layout.configuration + number) & 0xFFFFFFFF
        header = Header(valid, self.replicas.quorum_id, self.step, self.replicas.rank, configuration)
        exchange = partial(
            exchange_coefficients,
            strategy=layout.strategy,
            block_groups=bucket.block_groups,
            selected=selected,
            header=header,
            mean_over_senders=self.param_groups[0]["compat"] == "paper",
        )
        try:
            self._in_flight.send(bucket, self.step, exchange, to_local(params[0]).device)
        except SilentPeerError as error:
            self.replicas.handle_error(error)
            # The rest of this step only accumulates.
            step.is_due = False

    def _select(
        self, block_group: BlockGroup, gradients: Mapping[int, Tensor | None], layout: Layout, *, valid: bool
    ) -> Sparse:
        """Accumulate gradients and return the coefficients to send; zeros if the gradients are not valid."""
        params, codec = self.residuals.params, block_group.spec.codec
        if not valid:
            zeros = block_group.zeros(to_local(params[block_group.slots[0].param]).device)
            return (None, zeros.to(DTYPES[codec.values])) if layout.strategy == "dense" else codec.select(zeros)
        # Dense: the gradients themselves, in the dtype to send.
        if layout.strategy == "dense":
            indices = [slot.param for slot in block_group.slots]
            given = ((idx, gradients[idx]) for idx in indices)
            dense = {idx: torch.zeros_like(to_local(params[idx])) if grad is None else grad for idx, grad in given}
            return None, block_group.to_blocks(dense).to(DTYPES[codec.values])
        # On a GPU, one kernel for equations 1 and 2.
        fused = self.residuals.accumulate_and_select(block_group, gradients, self.step)
        if fused is not None:
            return fused
        sums = self.residuals.accumulate(block_group, gradients, self.step)
        return codec.select(block_group.to_blocks(sums))

    def _receive(self) -> list[Tensor] | None:
        """Wait for the exchanges in flight, decode the mean momentum (5) and subtract the sent part (4).

        Pending results that were loaded or flushed are added. None if there is neither.
        """
        params = self.residuals.params
        if not self._in_flight:
            return self.residuals.take_pending()
        received = self._in_flight.receive()
        self.nonfinite_ranks = sorted({rank for _, (_, ranks) in received for rank in ranks})
        self.wire_bytes += self._in_flight.wire_bytes
        if self.nonfinite_ranks and self.replicas.rank == 0:
            step = received[0][0].step
            logger.warning("step %d: ranks %s have NaN or Inf gradients; left out", step, self.nonfinite_ranks)
        is_dense = self._layout is not None and self._layout.strategy == "dense"
        momentum: list[Tensor | None] = [None] * len(params)
        # bf16 has the range of fp32, fp16 does not. Muon would turn the rounding errors of a matrix of low rank into
        # singular values as large as the others.
        dtypes = {
            idx: param.dtype
            for idx, (param, group) in enumerate(zip(params, group_by_param(self.param_groups), strict=True))
            if param.dtype == torch.bfloat16 and group.get("update") != "muon" and not self.decodes_to_fp32
        }
        for message, (outcomes, _) in received:
            for block_group, outcome in zip(message.bucket.block_groups, outcomes, strict=True):
                # (5) Decode the mean of all replicas: a few coefficients per block.
                for idx, value in block_group.decode_sparse(*outcome.mean, dtypes):
                    if is_dense:
                        value = self.residuals.update_dense_momentum(block_group, idx, value, message.step)
                    momentum[idx] = value
                # (4) Subtract this replica's part of the mean.
                self.residuals.subtract(block_group, outcome, message.step)
        result, pending = fill_zeros(momentum, params), self.residuals.take_pending()
        if pending is None:
            return result
        triples = zip(result, pending, params, strict=True)
        return [value + other if param.requires_grad else value for value, other, param in triples]

    def _begin_step(self) -> OpenStep:
        """Receive the result of the previous step with `delay`, and compare replicas when due."""
        (self.wire_bytes, self.nonfinite_ranks), self._flushed = self._flushed, (0, [])
        self.local_nonfinite = False
        # Before the comparisons: the sent part must be gone from the residuals.
        previous, failure = self._receive_or_failure()
        self._failure = None
        if not self.config.delay:  # of a state that was saved with `delay`: add it to this step's result
            self.residuals.set_pending(previous)
            previous = None
        # A group that counts steps (torchft) decides the step, also of a replica that joins.
        if self.replicas.step is not None:
            self.step = self.replicas.step
        try:
            layout = self._compare_replicas()
        except SilentPeerError as error:
            self.replicas.handle_error(error)
            self._accumulate_locally()
            return OpenStep([], is_due=False, previous=previous, failure=failure)
        self.wire_bytes += self.replicas.wire_bytes
        self._in_flight.start(self.replicas, in_thread=bool(self.config.delay or self.config.overlap))
        return OpenStep(_missing(layout), self.config.is_due(self.step), previous, failure)

    def _compare_replicas(self) -> Layout:
        """Count the step, and run all collectives that come before its exchange: comparisons and averages."""
        params = self.residuals.params
        self._averaging.find_wrappers(self.replicas, params)
        # The layout is compared before the step counts, so that a refused step can be repeated.
        layout = self._update_layout()
        self.step += 1
        if not self.config.overlap:
            self.check_gradients()
        self.replicas.reset_wire_bytes()
        if self.config.is_periodic(self.step, self.config.check_every):
            self._check_parameters(params)
        self._steps_in_process += 1
        if layout.strategy != "dense" and self.config.is_periodic(self.step, self.config.state_sync_every):
            self.residuals.average(self.replicas)
        return layout

    def _accumulate_locally(self) -> None:
        """Accumulate the gradients of an aborted step; no communication between replicas."""
        # A dense exchange keeps no local residuals: these gradients are lost.
        if self.config.exchange == "dense":
            return
        params = self.residuals.params
        for bucket in make_buckets(self.param_groups, self.config):
            gradients = {idx: _local_gradient(params[idx]) for idx in bucket.params}
            valid = self._are_finite(gradients)
            for block_group in bucket.block_groups:
                if keeps_residuals(block_group, self.config):
                    self.residuals.accumulate(block_group, gradients, self.step, valid=valid)

    def check_gradients(self) -> None:
        """Raise if gradients were averaged over the replicas. Collectives: see `AveragingGuard.check`."""
        self._averaging.check(self.replicas, self.residuals.params, self.step)

    def _check_parameters(self, params: Sequence[Tensor]) -> None:
        """Compare the parameters of all replicas, and measure the distance of their residuals."""
        mismatch = find_mismatch(self.replicas, params)
        if mismatch is not None:
            name = parameter_names(self.param_groups)[mismatch.param]
            raise ReplicaError(
                f"step {self.step}: {name} on rank {mismatch.rank} differs from the other ranks. Resume from the last "
                "checkpoint"
            )
        # A generator: int8 residuals are decoded one at a time.
        residuals = (value for _, value in self.residuals.finite_items())
        self.replica_divergence = residual_divergence(self.replicas, residuals, self.step)

    def _are_finite(self, gradients: Mapping[int, Tensor | None]) -> bool:
        """Return True if all gradients are finite, on all processes that share the parameters of this replica.

        Collective: of sharded parameters, one all-reduce of 4 bytes for each dim of their mesh.
        """
        valid = all_finite(gradient for gradient in gradients.values() if gradient is not None)
        params = self.residuals.params
        return all_agree([params[idx] for idx in gradients], valid)

    def _watch_optimizer(self) -> None:
        """Start to watch for an optimizer with its own momentum in the first step; end once all have stepped."""
        if self.momentum_watch is not None:
            if self.momentum_watch.is_done:
                self.momentum_watch.stop()
        elif self.replicas.rank == 0:
            pairs = zip(self.residuals.params, group_by_param(self.param_groups), self.are_matrices(), strict=True)
            self.momentum_watch = MomentumWatch(
                param for param, group, is_matrix in pairs if is_matrix and group["decay"] > 0 and param.requires_grad
            )

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Context of the last backward pass before `exchange`, in which complete buckets are sent at once.

        It does nothing without `overlap`. Gradients must be ready to send: no clipping by a global norm.

        After an error in it, the next backward pass starts from scratch, unless gradients have been sent to other
        replicas: then end the step by `exchange`, as the others do, before the next backward pass.

        Raises:
            UserError: in the backward pass, a second gradient for a parameter that has been sent.
        """
        if not self.config.overlap:
            yield
            return
        with torch.no_grad():
            step = self._open_step = self._open_step or self._begin_step()
        # Each hook runs when the gradient of its parameter is complete.
        hooks = [
            param.register_post_accumulate_grad_hook(partial(self._on_gradient, idx))  # type: ignore[no-untyped-call]
            for idx, param in enumerate(self.residuals.params)
            if param.requires_grad
        ]
        try:
            yield
        except BaseException as error:
            # Nothing was sent: the next backward pass starts the step from scratch.
            if step.next_bucket == 0:
                step.missing = _missing(self._update_layout())
            elif self.replicas.world_size == 1:  # nothing has left: the gradients stay in the residuals
                self._open_step, self._failure = None, step.failure
                self._in_flight.clear()
                self.residuals.set_pending(step.previous)
            else:
                error.add_note(
                    "gradients have been sent already, and the other replicas wait for the rest: end this step with "
                    "exchange(), or step() of DeMo, before the next backward pass"
                )
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def _on_gradient(self, idx: int, _: Tensor) -> None:
        """Note that a parameter has its gradient, and send complete buckets in order."""
        step = self._open_step
        if step is None or not any(idx in missing for missing in step.missing[step.next_bucket :]):
            raise UserError(
                f"{parameter_names(self.param_groups)[idx]} got a second gradient after its first was sent: use "
                "overlapped() only for the last backward pass before exchange(), in which each parameter gets one "
                "gradient (with checkpointed layers: use_reentrant=False)"
            )
        for missing in step.missing:
            missing.discard(idx)
        with torch.no_grad():
            # Buckets go in order, although gradients may not: all ranks must run the same collectives.
            while step.next_bucket < len(step.missing) and not step.missing[step.next_bucket]:
                self._send_bucket(step)

    @property
    def has_open_step(self) -> bool:
        """True if `overlapped` has begun a step that `exchange` has not ended."""
        return self._open_step is not None

    @torch.no_grad()
    def flush(self) -> None:
        """Wait for the result that `delay` holds back, and store it in the state for the next step.

        Call it before `destroy_process_group()` too, so that no collective runs in a group that is being destroyed.
        """
        self.residuals.subtract_sent()
        if not self._in_flight:
            return
        # Bytes and ranks of the flushed result count in the next step, which uses it.
        last = self.wire_bytes, self.nonfinite_ranks
        self.wire_bytes, self.nonfinite_ranks = 0, []
        result, self._failure = self._receive_or_failure()
        self._flushed = self.wire_bytes, self.nonfinite_ranks
        self.wire_bytes, self.nonfinite_ranks = last
        self.residuals.set_pending(result)
        self.residuals.subtract_sent()

    def discard_pending(self) -> None:
        """Wait for exchanges in flight and discard them, before a state is loaded. Replicas are compared again."""
        self.residuals.subtract_sent()
        if self._layout is not None and self.replicas.is_static:  # else a joining replica loads alone
            is_late = self._layout.is_late or self._steps_in_process > 0
            self._layout = replace(self._layout, is_stale=True, is_late=is_late)
        self._steps_in_process, self._open_step, self._failure = 0, None, None
        self._in_flight.wait_and_discard()

    def _receive_or_failure(self) -> tuple[list[Tensor] | None, NonFiniteError | None]:
        try:
            return self._receive(), self._failure
        except NonFiniteError as error:
            return None, error

    @torch.no_grad()
    def transfer_state(self, other: MomentumExchange) -> None:
        """Continue from another exchange, over parameters some of which have new shapes or are gone.

        Its exchanges in flight are waited for; its thread and process group are kept.
        """
        other.flush()
        params = set(self.residuals.params)
        self.residuals.state = {param: state for param, state in other.state.items() if param in params}
        self.step, self._failure, self._flushed = other.step, other._failure, other._flushed
        self._averaging, self.momentum_watch, self._in_flight = other._averaging, other.momentum_watch, other._in_flight

    def attach(self, param_groups: list[Group], state: MutableMapping[Tensor, dict[str, Any]]) -> None:
        """Use the groups and the state of an optimizer, which saves and loads them."""
        if self.residuals.state is not state:
            self.residuals.subtract_sent()
        self.residuals.param_groups, self.residuals.state = param_groups, state

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Keep some indices of one dim in the state of a parameter.

        Args:
            param: of this exchange; sliced before or after.
            dim: of the parameter.
            index: indices to keep, 1-D int64.
        """
        self.flush()
        self.residuals.slice(param, dim, index)

    def local_state_dict(self) -> dict[str, Any]:
        """Return the state of this replica alone: its residuals, by the names of their parameters."""
        self.flush()
        ranks = {"world_size": self.replicas.world_size, "rank": self.replicas.rank}
        return {**ranks, "residuals": self.residuals.state_dict()}

    def load_local_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `local_state_dict` returned on this replica.

        Args:
            state_dict: of the same rank and world size, or of `merge_local_states`, which fits every replica. Over a
                `TorchFTGroup`, whose ranks change, of any rank.

        Raises:
            UserError: another kind of state, world size or rank, other parameters or shapes; nothing has been loaded.
        """
        check_state_keys(state_dict, "local_state_dict", ("world_size", "rank", "residuals"))
        for key, own in (("world_size", self.replicas.world_size), ("rank", self.replicas.rank)):
            if self.replicas.is_static and state_dict[key] not in (None, own):
                raise UserError(
                    f"the residuals are those of {key} {state_dict[key]}, this is {key} {own}. Every replica has its "
                    "own; for another number of replicas load what scantling.comm.merge_local_states returns"
                )
        # Check before the first change.
        self.residuals.check_tensors("residual", state_dict["residuals"])
        self.discard_pending()
        self.residuals.load_state_dict(state_dict["residuals"])

    def shared_state_dict(self) -> dict[str, Any]:
        """Return the state that all replicas share: the number of steps, and with `delay` the pending result."""
        self.flush()
        return {"step": self.step, "pending": self.residuals.pending_state_dict()}

    def load_shared_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `shared_state_dict` returned on any replica.

        Without `delay`, a pending result is added to that of the next step.

        Raises:
            UserError: another kind of state, other parameters or shapes; nothing has been loaded.
        """
        check_state_keys(state_dict, "shared_state_dict", ("step",))
        pending = state_dict.get("pending", {})
        self.residuals.check_tensors("momentum", pending)
        self.discard_pending()
        self.step = int(state_dict["step"])
        self.residuals.load_pending_state_dict(pending)

    def state_dict(self) -> dict[str, Any]:
        """Return both states, for a replica that saves its own file."""
        return {"local": self.local_state_dict(), "shared": self.shared_state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this replica."""
        check_state_keys(state_dict, "state_dict", ("local", "shared"))
        self.load_local_state_dict(state_dict["local"])
        self.load_shared_state_dict(state_dict["shared"])

    @property
    def strategy(self) -> Strategy:
        """Strategy of the exchange; `auto` depends on the bytes and the number of replicas.

        Collectives before the first step: those that compare the replicas.
        """
        return self._update_layout().strategy

    def are_matrices(self) -> list[bool]:
        """Return for each parameter True if its momentum is sent, False if its gradient is."""
        matrices = [False] * len(self.residuals.params)
        for block_group in self._update_layout().block_groups:
            for slot in block_group.slots:
                matrices[slot.param] = block_group.spec.is_matrix
        return matrices

    def planned_wire_bytes(self, world_size: int | None = None) -> int:
        """Return the bytes that each replica sends in an exchange, headers included; no communication.

        Periodic collectives are not included: `check_every`, `state_sync_every`.

        Args:
            world_size: number of replicas; default the current one.

        Raises:
            UserError: `world_size` is not a positive integer.
        """
        return planned_wire_bytes(self.param_groups, self.config, self._number_of_replicas(world_size))

    def planned_wire_bytes_per_step(self, world_size: int | None = None) -> float:
        """Return the mean bytes per step, with `sync_every` and `state_sync_every`; see `planned_wire_bytes`."""
        return planned_wire_bytes_per_step(self.param_groups, self.config, self._number_of_replicas(world_size))

    def _number_of_replicas(self, world_size: int | None) -> int:
        if world_size is None:
            return self.replicas.world_size
        if not is_integer(world_size, least=1):
            raise UserError(f"world_size must be an integer of at least 1; given {world_size!r}")
        return world_size

    def planned_state_bytes(self) -> int:
        """Return the bytes of the residuals after the first exchange; no communication."""
        return planned_state_bytes(self.param_groups, self.config)

    def __str__(self) -> str:
        return describe_layout(self.param_groups, self.config)

    def _update_layout(self) -> Layout:
        """Return the current layout; a new one is compared with those of the other replicas."""
        layout = update_layout(
            self.param_groups,
            self.config,
            self.replicas,
            self._layout,
            step=self.step,
            compared_keys=self.compared_keys,
            compared_values=self.compared_values,
            is_elementwise=self.is_elementwise,
        )
        if self.announces and self._layout is None and self.replicas.rank == 0:
            log_layout(f"{self}\nexchange by {layout.strategy} among {self.replicas.world_size} processes")
        if layout is not self._layout:  # other block groups, options or parameters
            self.residuals.subtract_sent()
        self._layout = layout
        return layout


def _missing(layout: Layout) -> list[set[int]]:
    """Return the indices of all parameters of each bucket."""
    return [set(bucket.params) for bucket in layout.buckets]


def _local_gradient(param: Tensor) -> Tensor | None:
    if param.grad is None:
        return None
    if param.grad.is_sparse:
        raise UserError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is sparse; use sparse=False in its embedding"
        )
    match_placements(param)
    return to_local(param.grad)
