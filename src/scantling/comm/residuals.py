"""Error-feedback state of all parameters: the part of a replica's momentum that it has not sent yet.

    accumulate    M <- decay M + g               before an exchange
    subtract      M <- M - DCT^-1(q)             after it, for the coefficients q that are part of the mean

A residual takes 4 bytes per element in fp32, and 1.06 in int8: rows of `RESIDUAL_ROW` elements share a scale, their
largest magnitude m, and

    code = floor(127 v / m + noise),  noise uniform in [0, 1)

is unbiased, so that values below the step of their row are kept on average. The largest element of a row keeps its
code, so that decoded values encode to the same codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from scantling.comm.codec import triton
from scantling.comm.codec.block_group import BlockGroup
from scantling.comm.collectives import Outcome, Sparse
from scantling.comm.config import RESIDUAL_ROW, ExchangeConfig, ResidualFormat
from scantling.comm.layout import keeps_residuals, residual_format, residual_indices
from scantling.comm.param_groups import Group, all_parameters, group_by_param, parameter_names, split_by_numel
from scantling.comm.transport.group import ReplicaGroup
from scantling.comm.transport.shards import all_finite, to_local
from scantling.errors import UserError
from scantling.numerics.block_quantizer import BlockQuantizer, join_blocks, split_blocks

KEYS = ("residual", "residual_scale")
"""Keys of a parameter's state."""
INT8 = BlockQuantizer(8)
MAX_AVERAGED_NUMEL = 1 << 24
"""Elements of the residuals that are averaged in one collective; a larger parameter has its own."""


class Residuals:
    """Residuals of all parameters, and with `delay` the pending result, in the state of an optimizer or an exchange.

    Args:
        param_groups: groups with all options.
        state: by parameter; the entries `KEYS` and `pending` are read and written.
        config: options of the exchange.
    """

    def __init__(
        self, param_groups: list[Group], state: MutableMapping[Tensor, dict[str, Any]], config: ExchangeConfig
    ) -> None:
        self.param_groups, self.state, self.config = param_groups, state, config
        # Block groups that a kernel has accumulated and whose outcome has not been subtracted
        self._in_kernels: set[BlockGroup] = set()
        # Parameters, index and values of sent coefficients that the kernel of the next accumulation subtracts
        self._sent: dict[BlockGroup, tuple[list[Tensor], Tensor, Tensor]] = {}

    @property
    def params(self) -> list[Tensor]:
        return all_parameters(self.param_groups)

    def __contains__(self, param: Tensor) -> bool:
        return "residual" in self.state.get(param, {})

    def read(self, param: Tensor) -> Tensor:
        """Return the residual of a parameter in fp32: the stored tensor itself if it is fp32, or zeros if none is."""
        self.subtract_sent()
        return self._read(param)

    def _read(self, param: Tensor) -> Tensor:
        """Return what `read` does, with the sent coefficients that have not been subtracted."""
        if param not in self:
            return torch.zeros_like(to_local(param), dtype=torch.float32)
        state = self.state[param]
        residual: Tensor = state["residual"]
        return residual if residual.dtype == torch.float32 else decode_int8(residual, state["residual_scale"])

    def write(self, param: Tensor, value: Tensor, form: ResidualFormat, seed: int | None = None) -> None:
        """Store a residual.

        Args:
            param: the parameter.
            value: fp32; stored itself if the format is fp32.
            form: the format.
            seed: of the noise of int8; None rounds to nearest, which gives back the codes of a value that was read.
        """
        state = self.state.setdefault(param, {})
        if form == "fp32":
            state["residual"] = value
            state.pop("residual_scale", None)
        else:
            state["residual"], state["residual_scale"] = encode_int8(value, seed)

    @torch.no_grad()
    def subtract_sent(self) -> None:
        """Subtract all sent coefficients now, before somebody else reads, writes or replaces the state."""
        for block_group, (params, index, values) in list(self._sent.items()):
            if all(param in self for param in params):  # else somebody has cleared the state
                residuals = {
                    slot.param: self._read(param) for slot, param in zip(block_group.slots, params, strict=True)
                }
                block_group.add_sparse(index, values, -1.0, to=residuals.__getitem__)
            del self._sent[block_group]

    def discard(self, param: Tensor) -> None:
        """Remove the residual of a parameter."""
        self.subtract_sent()
        self._in_kernels.clear()
        for key in KEYS:
            self.state.get(param, {}).pop(key, None)

    def discard_unused(self) -> None:
        """Remove residuals of frozen parameters, and loaded ones of parameters that are now sent exactly."""
        used = {*residual_indices(self.param_groups, self.config)}
        for idx, param in enumerate(self.params):
            if idx not in used and param in self:
                self.discard(param)

    def accumulate(
        self, block_group: BlockGroup, gradients: Mapping[int, Tensor | None], step: int, *, valid: bool = True
    ) -> dict[int, Tensor]:
        """Add gradients to residuals, and return the sums in fp32 by parameter index.

        Args:
            block_group: its parameters are updated.
            gradients: by parameter index; None counts as zero.
            step: seed of stochastic rounding.
            valid: False to leave out the gradients, which are NaN or Inf.
        """
        sums: dict[int, Tensor] = {}
        params, groups, decay = self.params, group_by_param(self.param_groups), block_group.spec.decay
        for slot in block_group.slots:
            param, group, gradient = params[slot.param], groups[slot.param], gradients[slot.param]
            # Everything is sent exactly in every step: nothing is left to keep.
            if not keeps_residuals(block_group, self.config):
                sums[slot.param] = torch.zeros_like(to_local(param)) if gradient is None else gradient
                continue
            residual = sums[slot.param] = self.read(param)
            # Without the gradients the residual does not decay either.
            if not valid:
                continue
            lr = float(group["lr"]) if group["compat"] == "paper" else 1.0  # the published code accumulates lr g
            # (1)  M <- decay M + g, in one pass over memory where possible
            if gradient is None:
                residual.mul_(decay)
            elif lr == 1.0:
                torch.add(gradient, residual, alpha=decay, out=residual)
            else:
                residual.mul_(decay).add_(gradient, alpha=lr)
            self._write(slot.param, residual, rounding_seed(step, 0, slot.param))
        return sums

    def accumulate_and_select(
        self, block_group: BlockGroup, gradients: Mapping[int, Tensor | None], step: int
    ) -> Sparse | None:
        """Accumulate and select coefficients in one kernel; None if there is no kernel for this case.

        Args:
            block_group: its parameters are updated.
            gradients: by parameter index; None counts as zero.
            step: seed of stochastic rounding.
        """
        self._in_kernels.discard(block_group)
        params, groups = self.params, group_by_param(self.param_groups)
        own = [params[slot.param] for slot in block_group.slots]
        forms: set[ResidualFormat] = {groups[slot.param]["residual"] for slot in block_group.slots}
        if not block_group.spec.is_sparse:
            forms = {"fp32"}
        if (
            to_local(own[0]).device.type not in triton.DEVICES
            or len(forms) > 1
            or any(groups[slot.param]["compat"] == "paper" for slot in block_group.slots)
        ):
            return None
        given = [gradients[slot.param] for slot in block_group.slots]
        (form,) = forms
        residuals, scales = None, list[Tensor]()
        if keeps_residuals(block_group, self.config):
            if not all(param in self for param in own):  # somebody has cleared the state
                self._sent.pop(block_group, None)
            residuals, scales = self._stored(own, form)
        if not triton.can_accumulate(block_group, residuals, given):
            return None
        _, *sent = self._sent.get(block_group, (None,))
        seed = rounding_seed(step, 0, block_group.slots[0].param)
        selected = triton.accumulate_and_select(block_group, residuals, given, sent, scales=scales, seed=seed)
        self._sent.pop(block_group, None)
        self._in_kernels.add(block_group)
        return selected

    def _stored(self, params: Sequence[Tensor], form: ResidualFormat) -> tuple[list[Tensor], list[Tensor]]:
        """Return the stored residuals of parameters, and the scales of int8 ones; missing ones become zeros.

        Residuals in another format, of a loaded state or before a change of the option, are converted.
        """
        wanted = torch.float32 if form == "fp32" else torch.int8
        for param in params:
            if param not in self or self.state[param]["residual"].dtype != wanted:
                self.write(param, self.read(param), form)
        states = [self.state[param] for param in params]
        scales = [state["residual_scale"] for state in states] if form == "int8" else []
        return [state["residual"] for state in states], scales

    def subtract(self, block_group: BlockGroup, outcome: Outcome, step: int) -> None:
        """Subtract the coefficients that were applied, and add the rounding error of a mean that this replica owns.

        Args:
            block_group: its parameters are updated.
            outcome: of its exchange.
            step: seed of stochastic rounding.
        """
        if not keeps_residuals(block_group, self.config):
            return
        if self._subtract_in_kernel(block_group, outcome, step):
            return
        # Decode each residual once, although coefficients may be added to it twice.
        params = self.params
        changed: dict[int, Tensor] = {}

        def read(idx: int) -> Tensor:
            if idx not in changed:
                changed[idx] = self.read(params[idx])
            return changed[idx]

        # (4)  M <- M - DCT^-1(q), and for an owner + DCT^-1(its rounding error of the mean)
        for coefficients, sign in ((outcome.applied, -1.0), (outcome.owner_error, 1.0)):
            if coefficients is not None:
                block_group.add_sparse(*coefficients, sign, to=read)
        for idx, residual in changed.items():
            self._write(idx, residual, rounding_seed(step, 1, idx))

    def _subtract_in_kernel(self, block_group: BlockGroup, outcome: Outcome, step: int) -> bool:
        """Subtract as `subtract` in a kernel; return False if there is none for this case.

        The next accumulation subtracts from fp32 residuals, which saves a pass over them. An int8 residual is rounded
        now: it must not depend on whether somebody reads it in between. Without a transform, few elements of an fp32
        residual change, and no pass over it is needed.
        """
        parts = [(part, sign) for part, sign in ((outcome.applied, 1.0), (outcome.owner_error, -1.0)) if part]
        indices = [index for (index, _), _ in parts if index is not None]
        if block_group not in self._in_kernels:  # such as after a NaN gradient, which was not accumulated
            return False
        self._in_kernels.remove(block_group)
        if not parts or len(indices) < len(parts):
            return False
        own = [self.params[slot.param] for slot in block_group.slots]
        is_fp32 = self.state[own[0]]["residual"].dtype == torch.float32
        if is_fp32 and not block_group.spec.transformed:
            return False
        signed = [values if sign == 1.0 else -values for (_, values), sign in parts]
        index, values = (each[0] if len(each) == 1 else torch.cat(each, dim=1) for each in (indices, signed))
        if is_fp32:
            assert block_group not in self._sent, "an accumulation by a kernel subtracts the coefficients before"
            self._sent[block_group] = own, index, values
        else:
            seed = rounding_seed(step, 1, block_group.slots[0].param)
            triton.add_to_coded(block_group, index, values, -1.0, *self._stored(own, "int8"), seed)
        return True

    def update_dense_momentum(self, block_group: BlockGroup, idx: int, mean: Tensor, step: int) -> Tensor:
        """Add the mean gradient of a dense exchange to a parameter's momentum, and return its update.

        M <- decay M + mean, and the update is (1 - decay) M: in total, each gradient is applied once, as it is with
        selection. The update of a parameter that is not a matrix is the mean; a residual that was loaded is applied.
        """
        param, decay = self.params[idx], block_group.spec.decay
        momentum = self.read(param)
        # No momentum to keep: the update is the mean, and once a residual that was loaded.
        if not keeps_residuals(block_group, self.config):
            self.discard(param)
            return momentum.add_(mean)
        momentum.mul_(decay).add_(mean)  # separate operations: a fused one rounds differently on other processors
        self._write(idx, momentum, rounding_seed(step, 0, idx))
        return momentum * (1.0 - decay)

    def average(self, replicas: ReplicaGroup) -> None:
        """Replace all residuals by their mean over the replicas. Collectives: all-reduces of up to 64 MiB."""
        numels = [to_local(self.params[idx]).numel() for idx in residual_indices(self.param_groups, self.config)]
        items = self.finite_items()
        # Batches depend on shapes only, so that all replicas run the same all-reduces.
        for batch in split_by_numel(numels, MAX_AVERAGED_NUMEL):
            self._average_batch(replicas, list(islice(items, len(batch))))

    def _average_batch(self, replicas: ReplicaGroup, batch: Sequence[tuple[int, Tensor]]) -> None:
        # One flat buffer: few large collectives instead of one for each parameter.
        mean = replicas.all_reduce_mean(torch.cat([residual.flatten() for _, residual in batch]))
        parts = torch.split(mean, [residual.numel() for _, residual in batch])
        for (idx, residual), part in zip(batch, parts, strict=True):
            # Clone: a view would keep the whole buffer alive.
            self._write(idx, part.view_as(residual).clone())

    def finite_items(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (parameter index, residual) in an order common to all replicas; zeros if absent or not finite here."""
        params = self.params
        for idx in residual_indices(self.param_groups, self.config):
            residual = self.read(params[idx])
            # Zeros instead of NaN: this replica must take part in the collective without spoiling the mean.
            yield idx, residual if all_finite([residual]) else torch.zeros_like(residual)

    def set_pending(self, result: Sequence[Tensor] | None) -> None:
        """Store a result of an exchange that is applied in a later step."""
        # Not strict: without a result, nothing is stored. The zeros of a frozen parameter are one element.
        for param, value in zip(self.params, result or [], strict=False):
            if param.requires_grad:
                self.state.setdefault(param, {})["pending"] = value

    def take_pending(self) -> list[Tensor] | None:
        """Remove and return the pending result, if there is one."""
        params = self.params
        pending = [self.state[param].pop("pending", None) if param in self.state else None for param in params]
        return fill_zeros(pending, params) if any(value is not None for value in pending) else None

    def pending_state_dict(self) -> dict[str, Tensor]:
        """Return the pending result by the names of the parameters; empty without one."""
        pairs = zip(parameter_names(self.param_groups), self.params, strict=True)
        return {name: self.state[param]["pending"] for name, param in pairs if "pending" in self.state.get(param, {})}

    def load_pending_state_dict(self, pending: Mapping[str, Tensor]) -> None:
        """Load a pending result, which replaces the current one."""
        for name, param in zip(parameter_names(self.param_groups), self.params, strict=True):
            self.state.get(param, {}).pop("pending", None)
            if name in pending:
                self.state.setdefault(param, {})["pending"] = pending[name].to(to_local(param).device, copy=True)

    def slice(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Keep some indices, 1-D int64, of one dim of a parameter's residual and pending result."""
        if "pending" in self.state.get(param, {}):
            self.state[param]["pending"] = self.state[param]["pending"].index_select(dim, index)
        if param in self:
            idx = next(idx for idx, each in enumerate(self.params) if each is param)
            self._write(idx, self.read(param).index_select(dim, index))

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the residuals in fp32, by the names of their parameters."""
        pairs = zip(parameter_names(self.param_groups), self.params, strict=True)
        return {name: self.read(param).clone() for name, param in pairs if param in self}

    def load_state_dict(self, residuals: Mapping[str, Tensor]) -> None:
        """Load residuals; parameters without one lose theirs.

        Raises:
            UserError: other parameters or shapes; nothing has been loaded.
        """
        # Check everything before the first change.
        self.check_tensors("residual", residuals)
        self.subtract_sent()
        for idx, (name, param) in enumerate(zip(parameter_names(self.param_groups), self.params, strict=True)):
            if name in residuals:
                device = to_local(param).device
                self._write(idx, residuals[name].to(device=device, dtype=torch.float32, copy=True))
            else:
                self.discard(param)

    def check_tensors(self, kind: str, tensors: Any) -> None:
        """Raise a UserError unless these are tensors by name, each of the shape of its parameter.

        Args:
            kind: noun for the message.
            tensors: to be loaded.
        """
        if not isinstance(tensors, Mapping):
            raise UserError(f"each {kind} is given by the name of its parameter; given {tensors!r}")
        params = dict(zip(parameter_names(self.param_groups), self.params, strict=True))
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise UserError(f"the {kind} of {name} must be a tensor; given {tensor!r}")
            shape = tuple(to_local(params[name]).shape) if name in params else None
            if tuple(tensor.shape) != shape:
                raise UserError(
                    f"the {kind} of {name} has the shape {tuple(tensor.shape)}, "
                    + ("but there is no such parameter" if shape is None else f"but the parameter's is {shape}")
                )

    def _write(self, idx: int, value: Tensor, seed: int | None = None) -> None:
        param, group = self.params[idx], group_by_param(self.param_groups)[idx]
        self.write(param, value, residual_format(param, group), seed)


def fill_zeros(values: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros for parameters without a value, which are frozen, empty on this process, or new."""
    return [zeros_like_local(param) if value is None else value for value, param in zip(values, params, strict=True)]


def zeros_like_local(param: Tensor) -> Tensor:
    """Return fp32 zeros like the local shard of a parameter; for a frozen one they take no memory."""
    part = to_local(param)
    if param.requires_grad:
        return torch.zeros_like(part, dtype=torch.float32)
    return torch.zeros((), dtype=torch.float32, device=part.device).expand(part.shape)


def rounding_seed(step: int, turn: int, idx: int) -> int:
    """Return the seed of one stochastic rounding: before (turn 0) or after (turn 1) the exchange of a step."""
    # Distinct for all steps, turns and parameters, for up to 2^24 parameters.
    return ((2 * step + turn) << 24) + idx


def num_rows(numel: int) -> int:
    """Return the number of scales in int8."""
    return -(-numel // RESIDUAL_ROW)


def mean_of_tensors(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of tensors by name; a missing tensor counts as zeros.

    Raises:
        UserError: tensors of one name differ in shape.
    """
    means: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for state in states for name in state):
        tensors = [state[name] for state in states if name in state]
        if len({each.shape for each in tensors}) > 1:
            raise UserError(f"the states of the replicas differ in the shape of {name}: they are of different models")
        means[name] = torch.stack(tensors).sum(0) / len(states)
    return means


def encode_int8(value: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Return int8 codes of the shape of `value`, and the scale of each row of `RESIDUAL_ROW` elements."""
    rows = split_blocks(value.flatten(), RESIDUAL_ROW)  # (rows, RESIDUAL_ROW)
    scale = rows.abs().amax(1)
    # Seeded noise: a resumed run rounds as the uninterrupted one does.
    noise = None
    if seed is not None:
        generator = torch.Generator(value.device).manual_seed(seed)
        noise = torch.rand(rows.shape, generator=generator, dtype=torch.float32, device=value.device)
    codes = INT8.encode(rows, scale, noise).to(torch.int8)
    # Clone: the joined codes can be a view of padded rows.
    return join_blocks(codes, value.numel()).view(value.shape).clone(), scale


def decode_int8(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the fp32 values of codes and scales."""
    values = INT8.decode(split_blocks(codes.flatten(), RESIDUAL_ROW).float(), scale)
    return join_blocks(values, codes.numel()).view(codes.shape)


def merge_local_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the local state with which every replica of a new number of replicas starts: the mean of all residuals.

    The mean over the replicas, which later exchanges apply, stays the same. A replica without a residual, such as one
    whose gradients were never finite, counts as zeros.

    Args:
        states: of `local_state_dict`, one of every replica.

    Returns:
        A state for `load_local_state_dict` on any rank of any number of replicas.

    Raises:
        UserError: a missing or repeated rank, or residuals of different shapes.
    """
    for state in states:
        check_state_keys(state, "local_state_dict", ("world_size", "rank", "residuals"))
    ranks = sorted(state["rank"] for state in states)
    if not states or ranks != list(range(states[0]["world_size"])):
        raise UserError(f"merge_local_states needs one state of every replica; given those of ranks {ranks}")
    residuals = mean_of_tensors([state["residuals"] for state in states])
    return {"world_size": None, "rank": None, "residuals": residuals}


def check_state_keys(state: Any, method: str, keys: Sequence[str]) -> None:
    """Raise a UserError if a state that is to be loaded lacks keys, since another method returned it."""
    missing = [key for key in keys if not isinstance(state, Mapping) or key not in state]
    if missing:
        given = f"the keys {', '.join(map(str, state))}" if isinstance(state, Mapping) else repr(state)
        raise UserError(f"load what {method} of an exchange returned, which has {missing[0]!r}; given {given}")
