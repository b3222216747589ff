"""DeMo: the exchange of momentum and the update that goes with it, as one optimizer.

For matrices, with m the mean of what all replicas sent (arXiv 2411.19870, algorithm 1; see `momentum.py`):

    p  <-  p (1 - lr weight_decay)
    p  <-  p - lr phi(m),        phi = sign, identity, or the nearest orthogonal matrix (Muon's map)

What is no matrix takes AdamW's step with its synchronised gradient, at `dense_lr`. With `compat="paper"` everything
goes as in the published code instead: gradients are scaled by lr before they are accumulated, the mean of a coefficient
is over the replicas that sent it, blocks have sides that divide those of the matrix, and vectors are matrices of one
row.

Cost: a residual of 4 bytes for each number of a matrix; for each of the rest 8 bytes of AdamW's moments, and 4 of a
residual but where it is sent in fp32.
"""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from scantling.comm.codec.blocks import BlockGrid
from scantling.comm.codec.quantize import Values
from scantling.comm.config import (
    Exchange,
    ExchangeConfig,
    check_given,
    check_group,
    check_groups,
    check_options,
    check_real,
    is_number,
)
from scantling.comm.exchange import MomentumExchange
from scantling.comm.residuals import KEYS, Format, num_rows
from scantling.comm.scaling import scale_of, unscale
from scantling.comm.transport.group import ReplicaGroup, as_replica_group
from scantling.comm.transport.shards import as_gradient, to_local
from scantling.errors import NonFiniteError, UserError
from scantling.groups import default_matrix_dims
from scantling.numerics.device import without_autocast
from scantling.optimizer_state import check_saved_keys, load_keeping_dtypes

logger = logging.getLogger(__name__)

Update: TypeAlias = Literal["sign", "identity", "muon"]
UPDATES: tuple[Update, ...] = get_args(Update)
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
COMPARED = ("lr", "weight_decay", "update", "dense_ratio", "dense_betas", "dense_eps")
"""Keys of groups that must be alike on all replicas at the start, beside those of the exchange."""
REPLICA = ("replica", "replicas")
"""Keys of saved groups that say whose state it is."""
_PAPER = {"decay": 0.999, "values": "fp32"}
_DEFAULT = {"decay": 0.95, "values": "sign"}


class DemoMomentum(MomentumExchange):
    """The exchange of an optimizer, on its groups and its state."""

    def __init__(self, optimizer: DeMo, replicas: ReplicaGroup) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._begin(optimizer.param_groups, optimizer.state, optimizer._rounds, replicas)
        self._compared = COMPARED


class DeMo(torch.optim.Optimizer):
    """DeMo (Peng et al., arXiv 2411.19870) as a plain `torch.optim.Optimizer`; it replaces the gradient all-reduce.

    Gradients must not have been averaged over the replicas: no DistributedDataParallel, or every backward pass in its
    `no_sync()`. Works unchanged on one process, and with `torch.amp.GradScaler.step`. Frozen parameters are left alone;
    one without a gradient counts as if that were zero: what is in its residual still travels, and it decays.

    Args:
        params: parameters, named parameters or groups; from `scantling.param_groups(model)` also what is an embedding.
            Bare parameters of two dims and more and at least 4,096 numbers count as matrices.
        lr: of matrices. With `update="sign"` each number moves by it: about a third of AdamW's is a good start.
        decay: of the residual; default 0.95, the paper's is 0.999.
        topk, chunk, alpha, values, dense, process_group: as of `MomentumExchange`.
        exchange, sync_every, state_sync_every, check_every: as of `MomentumExchange`.
        delay, overlap, bucket_mb, residual: as of `MomentumExchange`.
        weight_decay: decoupled, scaled by the current lr.
        update: what is done with the decoded momentum of matrices; of sharded ones, "muon" takes each shard for itself.
        dense_lr: of what is no matrix, by AdamW; default `lr`. It follows the schedule of `lr`, which must not be 0;
            changed in a group, it holds from the next step on and follows from there.
        dense_betas, dense_eps: of AdamW.
        compat: "paper" for the published code, step for step; its defaults are then those of the paper.

    Attributes:
        exchange: the `MomentumExchange`; print it to see what travels how.

    What is an option of a parameter (`lr` to `dense_eps`, `residual`) is a group key and can be set per group.

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
        decay: float | None = None,
        topk: int = 32,
        chunk: int = 64,
        alpha: float = 1.0,
        weight_decay: float = 0.0,
        values: Values | None = None,
        dense: Values = "bf16",
        exchange: Exchange = "auto",
        update: Update = "sign",
        dense_lr: float | None = None,
        dense_betas: tuple[float, float] = (0.9, 0.95),
        dense_eps: float = 1e-8,
        sync_every: int = 1,
        state_sync_every: int | None = None,
        check_every: int | None = 100,
        delay: int = 0,
        overlap: bool = False,
        bucket_mb: float = 25.0,
        residual: Format = "fp32",
        compat: Literal["paper"] | None = None,
        process_group: Any = None,
    ) -> None:
        preset = _PAPER if compat == "paper" else _DEFAULT
        defaults = {
            "lr": lr,
            "decay": preset["decay"] if decay is None else decay,
            "topk": topk,
            "chunk": chunk,
            "alpha": alpha,
            "weight_decay": weight_decay,
            "values": preset["values"] if values is None else values,
            "dense": dense,
            "transform": "dct",
            "residual": residual,
            "update": update,
            "dense_lr": dense_lr,
            "dense_betas": dense_betas,
            "dense_eps": dense_eps,
            "compat": compat,
            "role": None,
            "matrix_dims": None,
            "steps": 0,
        }
        _check(defaults)
        self._rounds = ExchangeConfig(exchange, sync_every, state_sync_every, check_every, delay, overlap, bucket_mb)
        check_given(params)
        super().__init__(params, defaults)
        self._connect(as_replica_group(process_group))

    def _connect(self, replicas: ReplicaGroup) -> None:
        self.exchange = DemoMomentum(self, replicas)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this process sent through its network interface in the last step, headers included."""
        return self.exchange.wire_bytes

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
            raise UserError(f"compat must be the same in all groups; given {group['compat']!r} beside {known!r}")
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
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
        """Exchange, and take the step with what came of it.

        Gradients of vectors are then what was exchanged, the same on all replicas, as `MomentumExchange.exchange`
        leaves them: what looks at gradients to decide something, such as a `RankAdapter`, decides alike. Where nothing
        was exchanged (`sync_every`, the first call with `delay`), every `.grad` is None.

        Collectives: those of `MomentumExchange.exchange`.

        Raises:
            UserError: a closure, which would be called after the exchange; replicas that differ.
            NonFiniteError: the gradients of all replicas are NaN or Inf; under a GradScaler the step is left out.
            PayloadError: what came is damaged or of another step.
        """
        if closure is not None:
            raise UserError("DeMo takes no closure: gradients of a loss that is computed again were not exchanged")
        for group in self.param_groups:
            sets_dense_lr = group["dense_lr"] != group["dense_set"]
            _check(group, sets_dense_lr=sets_dense_lr)
            if sets_dense_lr:
                _set_dense_ratio(group)
        self._reconnect()
        self._unscale()
        try:
            decoded = self.exchange.decoded()
        except NonFiniteError as error:
            if getattr(self, "found_inf", None) is None:
                raise
            logger.warning("%s; the step is left out, and the scaler lowers its scale", error)
            decoded = None
        for group in self.param_groups:
            group["steps"] = self.exchange.step
        if decoded is None:
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad = None  # it is of this replica alone, and what looks at it now would decide alone
            return None
        place, all_matrices = 0, self.exchange.are_matrices()
        for group in self.param_groups:
            values = decoded[place : place + len(group["params"])]
            matrices = all_matrices[place : place + len(group["params"])]
            place += len(group["params"])
            triples = [
                triple for triple in zip(group["params"], values, matrices, strict=True) if triple[0].requires_grad
            ]
            for param, value, _ in triples:
                if param.ndim < 2:
                    param.grad = as_gradient(value, param)
            _step_matrices(group, [(param, value) for param, value, is_matrix in triples if is_matrix])
            self._step_dense(group, [(param, value) for param, value, is_matrix in triples if not is_matrix])
        return None

    def _unscale(self) -> None:
        """Take a GradScaler's factor out of the gradients; it leaves that to the optimizer, and the finiteness too."""
        scale = scale_of(self)
        if scale is not None:
            if self.exchange.has_begun:
                raise UserError(
                    "overlap and a GradScaler do not go together: gradients leave in the backward pass, before the "
                    "scale is taken out of them. Use overlap=False, or bfloat16, which needs no scaler"
                )
            unscale((param for group in self.param_groups for param in group["params"]), scale)

    def _step_dense(self, group: dict[str, Any], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        pairs = [(param, value) for param, value in pairs if to_local(param).numel()]
        if not pairs:
            return
        states = [self.moments(param) for param, _ in pairs]
        parts = [to_local(param) for param, _ in pairs]
        whole = [part.to(_dense_dtype(part)) for part in parts]  # itself where it is fp32 or fp64
        adamw(
            whole,
            [value.to(part.dtype) for (_, value), part in zip(pairs, whole, strict=True)],
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
        for part, value in zip(parts, whole, strict=True):
            if value is not part:
                part.copy_(value)

    def overlapped(self) -> AbstractContextManager[None]:
        """Context of the last backward pass before a step, with `overlap`; see `MomentumExchange.overlapped`."""
        self._reconnect()
        return self.exchange.overlapped()

    def state_dict(self) -> dict[str, Any]:
        """What the step needs to go on on this rank; with `delay`, what is on its way is waited for."""
        self._reconnect()
        self.exchange.flush()
        found = super().state_dict()
        for group in found["param_groups"]:
            group["replica"], group["replicas"] = self.exchange.replicas.rank, self.exchange.replicas.world_size
        return found

    @torch.no_grad()
    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Cut the state of a parameter that keeps only some positions of one dim.

        Args:
            param: of this optimizer; cut before or after.
            dim: of the parameter.
            index: positions that stay, 1-D int64.
        """
        self._reconnect()
        self.exchange.slice_state(param, dim, index)
        state = self.state.get(param, {})
        for key in MOMENTS[:2]:
            if key in state:
                state[key] = state[key].index_select(dim, index)

    def moments(self, param: Tensor) -> dict[str, Tensor]:
        """AdamW's moments of a parameter, zeros where there are none yet; in fp32, in fp64 where the parameter is."""
        state = self.state[param]
        if MOMENTS[0] not in state:
            like = torch.zeros_like(to_local(param), dtype=_dense_dtype(param))
            state |= {"exp_avg": like, "exp_avg_sq": like.clone(), "step": torch.zeros((), dtype=torch.float32)}
        found: dict[str, Tensor] = state
        return found

    def local_state_dict(self) -> dict[str, Any]:
        """What this replica has for itself: its residuals, by the names of their parameters."""
        self._reconnect()
        return self.exchange.local_state_dict()

    def load_local_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of `MomentumExchange`.

        Args:
            state_dict: of `local_state_dict` on this rank, or of `scantling.comm.merge_local_states`.

        Raises:
            UserError: another world size or rank, other parameters or shapes.
        """
        self._reconnect()
        self.exchange.load_local_state_dict(state_dict)

    def shared_state_dict(self) -> dict[str, Any]:
        """What all replicas have alike: the groups with their options, and the moments of what is no matrix."""
        whole = self.state_dict()
        state = {
            key: {name: value for name, value in entries.items() if name not in KEYS}
            for key, entries in whole["state"].items()
        }
        groups = [{key: value for key, value in group.items() if key not in REPLICA} for group in whole["param_groups"]]
        return copy.deepcopy({"state": {key: entries for key, entries in state.items() if entries}, "groups": groups})

    def load_shared_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `shared_state_dict` gave on any replica; residuals stay.

        Args:
            state_dict: of `shared_state_dict`.

        Raises:
            UserError: another kind of state, or a moment of another shape than its parameter.
        """
        if not isinstance(state_dict, dict) or set(state_dict) != {"state", "groups"}:
            given = f"the keys {', '.join(map(str, state_dict))}" if isinstance(state_dict, dict) else repr(state_dict)
            raise UserError(f"what is loaded is what shared_state_dict gave, with 'state' and 'groups'; given {given}")
        residuals = {
            param: {key: state[key] for key in KEYS if key in state} for param, state in list(self.state.items())
        }
        self.load_state_dict({"state": state_dict["state"], "param_groups": state_dict["groups"]})
        for param, kept in residuals.items():
            self.state[param] |= kept

    def _reconnect(self) -> None:
        """The exchange works on the groups and the state of this optimizer, which loading and copying replace."""
        self.exchange.param_groups, self.exchange.state = self.param_groups, self.state
        if not self.exchange.has_begun:  # `overlapped` has counted the step that `step` ends
            self.exchange.step = self.param_groups[0]["steps"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this rank: every tensor keeps the dtype it was saved with.

        Raises:
            UserError: the state of another optimizer, rank or world size, options that do not go with those of this
                one, or a residual of another shape than its parameter; nothing has been loaded.
        """
        keys = [*self.defaults, "dense_ratio"]
        check_saved_keys("DeMo", state_dict, self.param_groups, keys)
        pairs = zip(state_dict["param_groups"], self.param_groups, strict=True)
        check_groups([{**saved, "params": group["params"]} for saved, group in pairs], self._rounds)
        replicas = self.exchange.replicas
        for group in state_dict["param_groups"]:
            saved = group.get("replica", replicas.rank), group.get("replicas", replicas.world_size)
            if replicas.is_static and saved != (replicas.rank, replicas.world_size):
                raise UserError(
                    f"this is the state of rank {saved[0]} of {saved[1]}, here is {replicas.rank} of "
                    f"{replicas.world_size}. Every "
                    "replica has residuals of its own: let each save and load a file of its own, or load what is alike "
                    "by load_shared_state_dict and what scantling.comm.merge_local_states makes of all the rest. For "
                    "torch.distributed.checkpoint there is scantling.comm.rank_tensors"
                )
        load_keeping_dtypes(self, super().load_state_dict, state_dict, _check_state, _place)
        self.exchange.drop()
        for group in self.param_groups:
            for key in REPLICA:
                group.pop(key, None)
        self._reconnect()

    def __getstate__(self) -> dict[str, Any]:
        self._reconnect()
        self.exchange.flush()
        return {
            **super().__getstate__(),
            "_rounds": self._rounds,
            "_had_group": self.exchange.replicas.group is not None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        had_group = state.pop("_had_group", False)
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("dense_set", group["dense_lr"])
        if "exchange" not in self.__dict__:  # not so when a state is loaded, which comes here too
            self._connect(ReplicaGroup())
            if had_group:
                logger.warning(
                    "this DeMo exchanged over a process group of its own, which a pickle does not keep: it now "
                    "exchanges over the default group. Make a new one with process_group= and load the state_dict of "
                    "this one"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> DeMo:
        """A copy between the same processes, which shares no tensor with this one."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy({**self.__getstate__(), "_had_group": False}, memo))
        made.exchange.replicas = self.exchange.replicas
        return made


def _dense_dtype(param: Tensor) -> torch.dtype:
    """Of AdamW's step."""
    return torch.promote_types(param.dtype, torch.float32)


def _step_matrices(group: dict[str, Any], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    lr = group["lr"]
    for param, value in pairs:
        part = to_local(param)
        part.mul_(1.0 - lr * group["weight_decay"])
        if group["update"] == "sign":
            part.add_(value.sign().to(part.dtype), alpha=-lr)
        elif group["update"] == "identity":
            part.add_(value.to(part.dtype), alpha=-lr)
        else:
            part.add_(_orthogonalised(value, group).to(part.dtype), alpha=-lr)


def _orthogonalised(value: Tensor, group: dict[str, Any]) -> Tensor:
    """The orthogonal matrix nearest to each matrix, nearly, with entries of RMS 0.2 as AdamW's updates have.

    Five steps of a Newton-Schulz iteration of degree 5 (Jordan et al., Muon, 2024), scaled after Liu et al.,
    arXiv 2502.16982.
    """
    dims = tuple(range(value.ndim))
    view = group["matrix_dims"] or (default_matrix_dims(value.ndim) if value.ndim > 1 else (dims[:-1], dims[-1:]))
    rows, cols = (prod(value.shape[dim] for dim in dims) for dims in view)
    whole = BlockGrid(tuple(value.shape), view, rows, cols)  # one block a matrix
    x = whole.to_blocks(value)
    tall = rows > cols
    x = x.transpose(1, 2) if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    with without_autocast(x.device):
        for _ in range(5):
            gram = x @ x.transpose(1, 2)
            x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    x = (x.transpose(1, 2) if tall else x) * (0.2 * float(max(rows, cols)) ** 0.5)
    return whole.from_blocks(x.contiguous())


def _set_dense_ratio(group: dict[str, Any]) -> None:
    """Keep `dense_lr` as a share of `lr` as it is now, so that it follows the schedule of that."""
    group["dense_ratio"] = 1.0 if group["dense_lr"] is None else group["dense_lr"] / group["lr"]
    group["dense_set"] = group["dense_lr"]


def _check(group: dict[str, Any], *, sets_dense_lr: bool = True) -> None:
    """Raise a UserError for a value out of range; a schedule may bring `lr` to 0 once `dense_lr` is set."""
    check_options(group)
    for key in ("lr", "weight_decay", "dense_eps", "dense_lr"):
        value = group[key]
        if key == "dense_lr" and value is None:
            continue
        if not is_number(value) or not 0.0 <= value < math.inf:
            raise UserError(f"{key} must be a number of at least 0; given {value!r}")
    if sets_dense_lr and group["dense_lr"] is not None and not group["lr"]:
        raise UserError("dense_lr follows the schedule of lr, which must be above 0 when it is set; given 0")
    if group["update"] not in UPDATES:
        raise UserError(f"update must be one of {', '.join(UPDATES)}; given {group['update']!r}")
    betas = group["dense_betas"]
    if group["compat"] == "paper" and group["update"] == "identity":
        raise UserError("compat='paper' accumulates gradients times lr, and update='identity' would take lr once more")
    if group["compat"] == "paper" and group["dense_lr"] is not None:
        raise UserError("with compat='paper' all parameters go by blocks, at lr; leave dense_lr out")
    numbers = isinstance(betas, tuple | list) and all(map(is_number, betas))
    if not numbers or len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise UserError(f"dense_betas must be two numbers from 0 to below 1; given {betas!r}")


def _check_state(group: dict[str, Any], param: Tensor, state: dict[str, Any], name: str) -> None:
    shape = tuple(to_local(param).shape)
    wanted = {"step": (), "residual_scale": (num_rows(to_local(param).numel()),)}
    for key, value in state.items():
        if tuple(value.shape) != wanted.get(key, shape):
            raise UserError(
                f"the loaded {key} of {name} has the shape {tuple(value.shape)}, this process holds "
                f"{shape} of it; load the file of this rank, saved at the same world size"
            )


def _place(group: dict[str, Any], param: Tensor, key: str, value: Tensor) -> Tensor:
    device = torch.device("cpu") if key == "step" else to_local(param).device  # AdamW reads its count on the CPU
    return value.detach().to(device, copy=True)
