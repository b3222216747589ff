"""DeMo: an optimizer that updates parameters with the momentum that replicas exchange.

For matrices, with m the mean of all replicas' messages (arXiv 2411.19870, algorithm 1; equations 1 to 5: exchange.py):

    (6)  p  <-  p (1 - lr weight_decay)
    (7)  p  <-  p - lr phi(m),        phi = sign, identity, or the nearest orthogonal matrix (Muon's map)

Other parameters take AdamW's step with their synchronized gradient, at `dense_lr`. With `compat="paper"` everything is
done as in the published code instead: gradients are scaled by lr before they are accumulated, the mean of a coefficient
is over the replicas that sent it, blocks have sides that divide those of the matrix, and vectors are matrices of one
row.

Cost: a residual of 4 bytes per element (1.06 in int8) of matrices and embeddings, and of vectors unless they are sent
in fp32; AdamW's moments of 8 bytes for parameters that are not matrices.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Literal, TypeAlias, Unpack, get_args

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from scantling.comm.codec.blocks import BlockGrid
from scantling.comm.config import OPTIONS, ExchangeOptions, document_options, is_number, make_config
from scantling.comm.exchange import MomentumExchange
from scantling.comm.param_groups import (
    INTERNAL_DEFAULTS,
    check_given,
    check_group,
    check_group_options,
    check_groups,
    check_real,
)
from scantling.comm.residuals import KEYS, num_rows
from scantling.comm.transport.group import ReplicaGroup, as_replica_group
from scantling.comm.transport.shards import as_gradient, to_local
from scantling.errors import NonFiniteError, UserError
from scantling.groups import default_matrix_dims
from scantling.numerics.device import without_autocast
from scantling.numerics.torch_private import foreach_add_, foreach_div_, foreach_mul_, foreach_sign_
from scantling.optimizer_state import check_saved_keys, load_keeping_dtypes

logger = logging.getLogger(__name__)

Update: TypeAlias = Literal["sign", "identity", "muon"]
UPDATES: tuple[Update, ...] = get_args(Update)
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""Keys of AdamW's state of a parameter."""
COMPARED_KEYS = ("lr", "weight_decay", "update", "dense_ratio", "dense_betas", "dense_eps")
"""Keys of groups that replicas must share at the start, next to those of the exchange."""
SAVED_RANK_KEYS = ("replica", "replicas")
"""Keys of saved groups: rank and number of the replicas that saved them."""
PAPER_OPTIONS: ExchangeOptions = {"decay": 0.999, "values": "fp32"}
"""Defaults with `compat="paper"`."""


@document_options
class DeMo(torch.optim.Optimizer):
    """DeMo (Peng et al., arXiv 2411.19870) as a plain `torch.optim.Optimizer`; it replaces the gradient all-reduce.

    Gradients must not be averaged over the replicas: no DistributedDataParallel, or every backward pass in its
    `no_sync()`. It works unchanged on one process, and with `torch.amp.GradScaler.step`. Frozen parameters are skipped.
    A parameter without a gradient counts as having a zero gradient: its residual is still sent, and its weight decays.

    Args:
        params: parameters, named parameters or groups; `scantling.param_groups(model)` also marks embeddings. Bare
            parameters with at least two dims and 4,096 elements are matrices.
        lr: learning rate of matrices. With `update="sign"`, start with about a third of AdamW's.
        weight_decay: decoupled, scaled by the current lr.
        update: function of the decoded momentum of matrices; "muon" treats each shard of a sharded matrix separately.
        dense_lr: learning rate of other parameters, by AdamW; default `lr`. It follows the schedule of `lr`, which must
            not be 0. A new value in a group takes effect in the next step and follows the schedule from there.
        dense_betas, dense_eps: of AdamW.
        compat: "paper" for the published code, step for step, with the paper's defaults (decay 0.999, values fp32).
        process_group: group of the replicas, a mesh of one dim, or a `TorchFTGroup`; default all processes.
        {options}

    Attributes:
        exchange: the `MomentumExchange`; print it to see the layout of the messages.

    Options that concern parameters (`lr` to `dense_eps`; decay, topk, chunk, values, dense, residual) are group keys
    and can be set per group.

    Raises:
        UserError: a value out of range; from `step`, a closure, and replicas that differ.

    Example:
        >>> optimizer = sc.DeMo(sc.param_groups(model, weight_decay=0.1), lr=3e-4, topk=8)  # doctest: +SKIP
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()  # doctest: +SKIP
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        weight_decay: float = 0.0,
        update: Update = "sign",
        dense_lr: float | None = None,
        dense_betas: tuple[float, float] = (0.9, 0.95),
        dense_eps: float = 1e-8,
        compat: Literal["paper"] | None = None,
        process_group: Any = None,
        **options: Unpack[ExchangeOptions],
    ) -> None:
        self._config = make_config({**PAPER_OPTIONS, **options} if compat == "paper" else options)
        defaults = {
            **self._config.group_options,
            **INTERNAL_DEFAULTS,
            "lr": lr,
            "weight_decay": weight_decay,
            "update": update,
            "dense_lr": dense_lr,
            "dense_betas": dense_betas,
            "dense_eps": dense_eps,
            "compat": compat,
            "steps": 0,
        }
        _check(defaults)
        check_given(params)
        super().__init__(params, defaults)
        self._connect(as_replica_group(process_group))

    def _connect(self, replicas: ReplicaGroup) -> None:
        """Make the exchange; the property `exchange` lets it keep its residuals in this optimizer's state."""
        options = {name: getattr(self._config, name) for name in OPTIONS}
        self._exchange = MomentumExchange(self.param_groups, process_group=replicas, **options)
        self._exchange.compared_keys = COMPARED_KEYS
        self._exchange.step = self.param_groups[0]["steps"]

    @property
    def exchange(self) -> MomentumExchange:
        """The exchange, on the current groups and state: loading a state replaces these objects."""
        self._exchange.attach(self.param_groups, self.state)
        return self._exchange

    @property
    def wire_bytes(self) -> int:
        """Bytes that this process sent in the last step, headers included."""
        return self._exchange.wire_bytes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its keys override the defaults.

        Raises:
            UserError: a value out of range, a parameter given twice, or a complex one; the group is not added.
        """
        check_group(param_group)
        group = {**self.defaults, **param_group}
        _check(group)
        known = self.param_groups[0]["compat"] if self.param_groups else group["compat"]
        if group["compat"] != known:
            raise UserError(f"compat must be the same in all groups; given {group['compat']!r} and {known!r}")
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        # torch has added the group already: remove it if a check fails.
        try:
            check_real(params)
            if len(set(map(id, params))) < len(params):
                raise UserError("a parameter is given twice in one group; each must be in one group once")
        except UserError:
            self.param_groups.pop()
            raise
        _set_dense_ratio(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Exchange momentum, and update the parameters with it.

        Gradients of vectors are then the synchronized ones, as after `MomentumExchange.exchange`: code that decides by
        gradients, such as a `RankAdapter`, decides the same on all replicas. Without a result (`sync_every`, the first
        step with `delay`), every `.grad` is None.

        Collectives: those of `MomentumExchange.exchange`.

        Raises:
            UserError: a closure, which would be called after the exchange; replicas that differ.
            NonFiniteError: the gradients of all replicas are NaN or Inf; under a GradScaler the step is skipped.
            PayloadError: a message is damaged or of another step.
        """
        if closure is not None:
            raise UserError("DeMo takes no closure: gradients of a loss that is computed again were not exchanged")
        for group in self.param_groups:
            # Schedules change `lr` only: another `dense_lr` was set by the user.
            has_new_dense_lr = group["dense_lr"] != group["dense_set"]
            _check(group, checks_lr=has_new_dense_lr)
            if has_new_dense_lr:
                _set_dense_ratio(group)
        # Equations 1 to 5, see exchange.py.
        momentum = self._exchange_momentum()
        for group in self.param_groups:
            group["steps"] = self.exchange.step
        if momentum is None:
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad = None  # local to this replica: replicas that decided by it would differ
            return None
        # Equations 6 and 7 for matrices; AdamW's step for the others.
        start, are_matrices = 0, self.exchange.are_matrices()
        for group in self.param_groups:
            end = start + len(group["params"])
            matrices: list[tuple[Tensor, Tensor]] = []
            others: list[tuple[Tensor, Tensor]] = []
            for param, value, is_matrix in zip(
                group["params"], momentum[start:end], are_matrices[start:end], strict=True
            ):
                if param.requires_grad:
                    (matrices if is_matrix else others).append((param, value))
                    if param.ndim < 2:
                        param.grad = as_gradient(value.clone() if is_matrix else value, param)
            _step_matrices(group, matrices)
            self._step_dense(group, others)
            start = end
        return None

    def _exchange_momentum(self) -> list[Tensor] | None:
        """Return the decoded momentum; None without a result, and in a step that a GradScaler skips."""
        scale = grad_scale(self)
        if scale is not None:
            if self.exchange.has_open_step:
                raise UserError(
                    "overlap does not work with a GradScaler: gradients are sent in the backward pass, before they are "
                    "unscaled. Use overlap=False, or bfloat16, which needs no scaler"
                )
            unscale_gradients((param for group in self.param_groups for param in group["params"]), scale)
        try:
            return self.exchange.decode_momentum()
        except NonFiniteError as error:
            # Only a GradScaler sets `found_inf`.
            if getattr(self, "found_inf", None) is None:
                raise
            logger.warning("%s; the step is skipped, and the scaler lowers its scale", error)
            return None

    def _step_dense(self, group: dict[str, Any], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take AdamW's step with pairs of parameter and synchronized gradient."""
        pairs = [(param, value) for param, value in pairs if to_local(param).numel()]
        if not pairs:
            return
        states = [self.moments(param) for param, _ in pairs]
        parts = [to_local(param) for param, _ in pairs]
        masters = [part.to(_dense_dtype(part)) for part in parts]  # the tensor itself in fp32 and fp64
        # The functional form steps local shards in fp32 or fp64; bf16 shards have a copy for it.
        adamw(
            masters,
            [value.to(part.dtype) for (_, value), part in zip(pairs, masters, strict=True)],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["dense_betas"][0],
            beta2=group["dense_betas"][1],
            lr=group["lr"] * group["dense_ratio"],
            weight_decay=group["weight_decay"],
            eps=group["dense_eps"],
            maximize=False,
        )
        for part, master in zip(parts, masters, strict=True):
            if master is not part:
                part.copy_(master)

    def moments(self, param: Tensor) -> dict[str, Tensor]:
        """Return AdamW's state of a parameter, zeros at first; in fp32, or in fp64 as the parameter."""
        state: dict[str, Tensor] = self.state[param]
        if MOMENTS[0] not in state:
            zeros = torch.zeros_like(to_local(param), dtype=_dense_dtype(param))
            state |= {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "step": torch.zeros((), dtype=torch.float32)}
        return state

    def overlapped(self) -> AbstractContextManager[None]:
        """Return the context of the last backward pass before a step; see `MomentumExchange.overlapped`."""
        return self.exchange.overlapped()

    @torch.no_grad()
    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Keep some indices of one dim in the state of a parameter.

        Args:
            param: of this optimizer; sliced before or after.
            dim: of the parameter.
            index: indices to keep, 1-D int64.
        """
        self.exchange.slice_state(param, dim, index)
        state = self.state.get(param, {})
        # `step` is a scalar.
        for key in MOMENTS[:2]:
            if key in state:
                state[key] = state[key].index_select(dim, index)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; a result that `delay` holds back is waited for."""
        self.exchange.flush()
        saved = super().state_dict()
        # Residuals belong to one replica: loading compares its rank.
        for group in saved["param_groups"]:
            group["replica"], group["replicas"] = self.exchange.replicas.rank, self.exchange.replicas.world_size
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this rank; every tensor keeps its saved dtype.

        Raises:
            UserError: the state of another optimizer, rank or world size, options that do not fit those of this one,
                or a residual of another shape than its parameter; nothing has been loaded.
        """
        check_saved_keys("DeMo", state_dict, self.param_groups, [*self.defaults, "dense_ratio"])
        pairs = zip(state_dict["param_groups"], self.param_groups, strict=True)
        check_groups([{**saved, "params": group["params"]} for saved, group in pairs], self._config)
        replicas = self.exchange.replicas
        own = replicas.rank, replicas.world_size
        for group in state_dict["param_groups"]:
            saved = group.get("replica", own[0]), group.get("replicas", own[1])
            if replicas.is_static and saved != own:
                raise UserError(
                    f"this is the state of rank {saved[0]} of {saved[1]}, here is {own[0]} of {own[1]}. Every replica "
                    "has its own residuals: let each save and load its own file, or load the common state by "
                    "load_shared_state_dict and what scantling.comm.merge_local_states returns. For "
                    "torch.distributed.checkpoint use scantling.comm.rank_tensors"
                )
        self.exchange.residuals.subtract_sent()  # into the state that is replaced here
        load_keeping_dtypes(self, super().load_state_dict, state_dict, _check_state, _copy_to_device)
        self.exchange.discard_pending()
        for group in self.param_groups:
            for key in SAVED_RANK_KEYS:
                group.pop(key, None)
        self.exchange.step = self.param_groups[0]["steps"]

    def local_state_dict(self) -> dict[str, Any]:
        """Return the state of this replica alone: its residuals, by the names of their parameters."""
        return self.exchange.local_state_dict()

    def load_local_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `local_state_dict` returned on this rank, or `merge_local_states`; see `MomentumExchange`."""
        self.exchange.load_local_state_dict(state_dict)

    def shared_state_dict(self) -> dict[str, Any]:
        """Return the state that all replicas share: groups with their options, and moments of dense parameters."""
        saved = self.state_dict()
        state = {
            key: {name: value for name, value in entries.items() if name not in KEYS}
            for key, entries in saved["state"].items()
        }
        groups = [
            {key: value for key, value in group.items() if key not in SAVED_RANK_KEYS}
            for group in saved["param_groups"]
        ]
        return copy.deepcopy({"state": {key: entries for key, entries in state.items() if entries}, "groups": groups})

    def load_shared_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `shared_state_dict` returned on any replica; residuals stay.

        Raises:
            UserError: another kind of state, or a moment of another shape than its parameter.
        """
        if not isinstance(state_dict, dict) or set(state_dict) != {"state", "groups"}:
            given = f"the keys {', '.join(map(str, state_dict))}" if isinstance(state_dict, dict) else repr(state_dict)
            raise UserError(f"load what shared_state_dict returned, with 'state' and 'groups'; given {given}")
        self.exchange.residuals.subtract_sent()
        # `load_state_dict` replaces the state: keep the residuals, which are not shared.
        residuals = {
            param: {key: state[key] for key in KEYS if key in state} for param, state in list(self.state.items())
        }
        self.load_state_dict({"state": state_dict["state"], "param_groups": state_dict["groups"]})
        for param, kept in residuals.items():
            self.state[param] |= kept

    def __getstate__(self) -> dict[str, Any]:
        self.exchange.flush()
        had_group = self.exchange.replicas.group is not None
        return {**super().__getstate__(), "_config": self._config, "_had_group": had_group}

    def __setstate__(self, state: dict[str, Any]) -> None:
        had_group = state.pop("_had_group", False)
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("dense_set", group["dense_lr"])
        if "_exchange" not in self.__dict__:  # a copy; `load_state_dict` also comes here
            self._connect(ReplicaGroup())
            if had_group:
                logger.warning(
                    "this DeMo exchanged over its own process group, which a pickle does not contain: it now uses the "
                    "default group. Make a new one with process_group= and load the state_dict of this one"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> DeMo:
        """Return a copy between the same processes, which shares no tensor with this one."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        # No warning: the copy uses the same process group, see below.
        made.__setstate__(copy.deepcopy({**self.__getstate__(), "_had_group": False}, memo))
        made.exchange.replicas = self.exchange.replicas
        return made


def grad_scale(optimizer: Any) -> Tensor | None:
    """Return the factor in the gradients within `GradScaler.step`; it leaves the unscaling to such optimizers."""
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    return scale


def unscale_gradients(params: Iterable[Tensor], scale: Tensor) -> None:
    """Divide gradients by a GradScaler's factor, in place. Overflowed gradients stay Inf or NaN."""
    gradients = [to_local(param.grad) for param in params if param.grad is not None]
    if gradients:
        foreach_div_(gradients, scale)


def _dense_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of AdamW's step."""
    return torch.promote_types(param.dtype, torch.float32)


def _step_matrices(group: dict[str, Any], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Update pairs of matrix and decoded momentum (equations 6 and 7); the momentum is overwritten."""
    if not pairs:
        return
    lr, parts, values = group["lr"], [to_local(param) for param, _ in pairs], [value for _, value in pairs]
    # (6) Decay first, so that the update itself does not decay.
    if group["weight_decay"]:
        foreach_mul_(parts, 1.0 - lr * group["weight_decay"])
    # (7)
    if group["update"] == "muon":
        for part, value in zip(parts, values, strict=True):
            part.add_(_orthogonalize(value, group).to(part.dtype), alpha=-lr)
        return
    if group["update"] == "sign":
        foreach_sign_(values)
    foreach_add_(parts, [value.to(part.dtype) for part, value in zip(parts, values, strict=True)], alpha=-lr)


def _orthogonalize(value: Tensor, group: dict[str, Any]) -> Tensor:
    """Return nearly the nearest orthogonal matrix to each matrix, with entries of RMS 0.2 as AdamW's updates have.

    Five steps of a Newton-Schulz iteration of degree 5 (Jordan et al., Muon, 2024), scaled after Liu et al.,
    arXiv 2502.16982.
    """
    dims = tuple(range(value.ndim))
    view = group["matrix_dims"] or (default_matrix_dims(value.ndim) if value.ndim > 1 else (dims[:-1], dims[-1:]))
    rows, cols = (prod(value.shape[dim] for dim in dims) for dims in view)
    grid = BlockGrid(tuple(value.shape), view, rows, cols)  # one block per matrix
    x = grid.to_blocks(value)  # (matrices, rows, cols)
    is_tall = rows > cols
    # Rows on the shorter side make the smaller Gram matrix.
    x = x.transpose(1, 2) if is_tall else x
    # Singular values of at most 1, as the iteration needs.
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    with without_autocast(x.device):
        for _ in range(5):
            # x <- (a I + b G + c G^2) x with G = x x^T moves all singular values towards 1.
            gram = x @ x.transpose(1, 2)
            x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    # An orthogonal matrix has entries of RMS 1 / sqrt(max(rows, cols)).
    x = (x.transpose(1, 2) if is_tall else x) * (0.2 * float(max(rows, cols)) ** 0.5)
    return grid.from_blocks(x.contiguous())


def _set_dense_ratio(group: dict[str, Any]) -> None:
    """Fix the current ratio of `dense_lr` to `lr`, so that `dense_lr` follows the schedule of `lr`."""
    group["dense_ratio"] = 1.0 if group["dense_lr"] is None else group["dense_lr"] / group["lr"]
    group["dense_set"] = group["dense_lr"]


def _check(group: dict[str, Any], *, checks_lr: bool = True) -> None:
    """Raise a UserError for a value out of range; a schedule may lower `lr` to 0 once `dense_lr` is set."""
    check_group_options(group)
    for key in ("lr", "weight_decay", "dense_eps", "dense_lr"):
        value = group[key]
        if key == "dense_lr" and value is None:
            continue
        if not is_number(value) or not 0.0 <= value < math.inf:
            raise UserError(f"{key} must be a number of at least 0; given {value!r}")
    if checks_lr and group["dense_lr"] is not None and not group["lr"]:
        raise UserError("dense_lr follows the schedule of lr, which must be above 0 when it is set; given 0")
    if group["update"] not in UPDATES:
        raise UserError(f"update must be one of {', '.join(UPDATES)}; given {group['update']!r}")
    betas = group["dense_betas"]
    if group["compat"] == "paper" and group["update"] == "identity":
        raise UserError("compat='paper' accumulates gradients times lr, and update='identity' would apply lr again")
    if group["compat"] == "paper" and group["dense_lr"] is not None:
        raise UserError("with compat='paper' all parameters are matrices, updated at lr; leave dense_lr out")
    are_numbers = isinstance(betas, tuple | list) and all(map(is_number, betas))
    if not are_numbers or len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise UserError(f"dense_betas must be two numbers from 0 to below 1; given {betas!r}")


def _check_state(group: dict[str, Any], param: Tensor, state: dict[str, Any], name: str) -> None:
    shape = tuple(to_local(param).shape)
    expected = {"step": (), "residual_scale": (num_rows(to_local(param).numel()),)}
    for key, value in state.items():
        if tuple(value.shape) != expected.get(key, shape):
            raise UserError(
                f"the loaded {key} of {name} has the shape {tuple(value.shape)}, this process holds "
                f"{shape} of it; load the file of this rank, saved at the same world size"
            )


def _copy_to_device(group: dict[str, Any], param: Tensor, key: str, value: Tensor) -> Tensor:
    device = torch.device("cpu") if key == "step" else to_local(param).device  # AdamW reads its count on the CPU
    return value.detach().to(device, copy=True)
