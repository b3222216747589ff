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

Cost: a residual of 4 bytes for each number of a parameter, but for what travels in full; `wire_bytes` for the network.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from scantling.comm.agreement import check_alike, spread, unlike
from scantling.comm.channels import Channel, channels_of
from scantling.comm.link import Link
from scantling.comm.payload import Header
from scantling.comm.rounds import Outcome, Sparse, Way, cheaper_way, exchange, wire_bytes
from scantling.comm.values import VALUES, Values
from scantling.errors import ReplicaError, UserError

logger = logging.getLogger(__name__)

Exchange: TypeAlias = Literal["auto", "all_gather", "owner"]
Transform: TypeAlias = Literal["dct", "none"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)
Group: TypeAlias = dict[str, Any]
OPTIONS = ("decay", "topk", "chunk", "alpha", "values", "dense", "transform", "role", "matrix_dims", "compat")
"""Keys of a group that say how its parameters travel."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """When replicas exchange what; the arguments of `MomentumExchange`."""

    exchange: Exchange
    sync_every: int
    state_sync_every: int | None
    check_every: int | None
    on_mismatch: Literal["stop", "resync"]

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise UserError(f"exchange must be one of {', '.join(EXCHANGES)}; given {self.exchange!r}")
        if self.on_mismatch not in ("stop", "resync"):
            raise UserError(f"on_mismatch must be 'stop' or 'resync'; given {self.on_mismatch!r}")
        for key in ("sync_every", "state_sync_every", "check_every"):
            value = getattr(self, key)
            if not (isinstance(value, int) and value >= 1) and not (value is None and key != "sync_every"):
                raise UserError(f"{key} must be a whole number from 1 on; given {value!r}")


class MomentumExchange:
    """Turn local gradients into the same decoded momentum on all replicas; any optimizer steps with it.

    Gradients must not have been averaged: no DistributedDataParallel, or every backward pass in its `no_sync()`.

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
        exchange: all_gather, owner, or auto: what sends fewer bytes, see `rounds.py`.
        sync_every: calls from one exchange to the next; at the others gradients go into the residuals, and no parameter
            has a gradient left.
        state_sync_every: exchanges after which the residuals are averaged over the replicas, which sends 8 bytes for
            each of their numbers; None for never.
        check_every: exchanges after which the parameters of all replicas are compared by hashes, which sends 8 bytes
            for each parameter, and `replica_divergence` is measured; None for never.
        on_mismatch: what is done with parameters that are not alike: "stop" with an error that names tensor and rank,
            or "resync" with a warning, from the lowest rank that has what most have.
        process_group: group of the replicas, or a mesh of one dim; default all processes.

    Attributes:
        param_groups: the groups, with all options.
        state: by parameter: `residual`, in fp32.
        wire_bytes: what this process sent in the last exchange, headers included.
        left_out: ranks whose gradients were NaN or Inf in the last exchange.
        replica_divergence: how far the residuals were apart when they were last compared, from 0 to 1.

    Raises:
        UserError: an option out of range; at the first exchange, replicas that differ in parameters or options.

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
        on_mismatch: Literal["stop", "resync"] = "stop",
        process_group: Any = None,
    ) -> None:
        options = {"decay": decay, "topk": topk, "chunk": chunk, "alpha": alpha, "values": values, "dense": dense}
        defaults = {**options, "transform": transform, "role": None, "matrix_dims": None, "compat": None}
        self.link = Link(process_group)
        self._begin(
            _as_groups(groups, defaults),
            {},
            Rounds(exchange, sync_every, state_sync_every, check_every, on_mismatch),
        )

    @classmethod
    def _over(
        cls, groups: list[Group], state: dict[Tensor, dict[str, Any]], rounds: Rounds, link: Link
    ) -> MomentumExchange:
        """The exchange of an optimizer, on its own groups and state."""
        self = cls.__new__(cls)
        self.link = link
        self._begin(groups, state, rounds)
        return self

    def _begin(self, groups: list[Group], state: dict[Tensor, dict[str, Any]], rounds: Rounds) -> None:
        for group in groups:
            check_options(group)
        if len({group["compat"] for group in groups}) > 1:
            raise UserError("compat must be the same in all groups: it says how the mean over replicas is taken")
        if groups[0]["compat"] == "paper" and rounds.exchange == "owner":
            raise UserError("compat='paper' takes the mean over those that sent a coefficient: exchange='all_gather'")
        self.param_groups, self.state, self.rounds = groups, state, rounds
        self.replica_divergence: float | None = None
        self.step = self.epoch = 0
        self.wire_bytes = 0
        self.left_out: list[int] = []
        self._laid_out: tuple[Any, list[Channel], int] | None = None

    @torch.no_grad()
    def exchange(self) -> bool:
        """Take each `.grad` into the residual, exchange, and put the decoded momentum in its place.

        Collectives: one all-gather, or an all-to-all and an all-gather, see `rounds.py`; at the first call, whenever
        shapes have changed, and every `check_every` exchanges two more, which compare the replicas.

        Returns:
            Whether there was an exchange; where not (`sync_every`), every `.grad` is None.

        Raises:
            UserError: replicas differ in parameters or options.
            NonFiniteError: the gradients of all replicas are NaN or Inf; nothing has changed but the step counter.
            PayloadError: what came is damaged or of another step.
            ReplicaError: parameters are not alike any more.
        """
        decoded = self.decoded()
        for place, param in enumerate(self._parameters()):
            param.grad = None if decoded is None else as_gradient(decoded[place], param)
        return decoded is not None

    def decoded(self) -> list[Tensor] | None:
        """As `exchange`, but the momentum of all parameters in fp32, of the local part of each; None without one."""
        channels, configuration = self._channels()
        self.step += 1
        params = self._parameters()
        gradients = [_gradient(param) for param in params]
        valid = _all_finite(gradients)
        residuals = [self._accumulated(channel, gradients, valid=valid) for channel in channels]
        rounds, number = self.rounds, self.step // self.rounds.sync_every
        if self.step % rounds.sync_every:
            return None
        if number > 1 and _due(number - 1, rounds.check_every):
            self._compare(params)
        if number > 1 and _due(number - 1, rounds.state_sync_every):
            for residual in self._residuals():
                self.link.mean(residual)
        selected = []
        for channel, values in zip(channels, residuals, strict=True):
            blocks = channel.cut(values) if valid else _zeros(channel, params)
            selected.append(channel.kind.section.select(blocks))
        header = Header(valid, self.epoch, self.step, self.link.rank, configuration)
        self.link.start()
        outcomes, self.left_out = exchange(
            self.link, self.way, channels, selected, header, by_senders=self.param_groups[0]["compat"] == "paper"
        )
        self.wire_bytes = self.link.wire_bytes
        if self.left_out and self.link.rank == 0:
            logger.warning("step %d: ranks %s have NaN or Inf gradients and are left out", self.step, self.left_out)
        found: list[Tensor] = [torch.zeros(0)] * len(params)
        for channel, outcome in zip(channels, outcomes, strict=True):
            for place, value in channel.paste_sent(*outcome.mean):
                found[place] = value
            self._forget(channel, outcome)
        for place, param in enumerate(params):
            if not local(param).numel():
                found[place] = torch.zeros_like(local(param), dtype=torch.float32)
        return found

    @property
    def way(self) -> Way:
        """How bytes travel, which for "auto" depends on their number and that of the processes."""
        return self._way_of(self._channels()[0], self.link.size)

    def _way_of(self, channels: Sequence[Channel], size: int) -> Way:
        if self.rounds.exchange != "auto":
            return self.rounds.exchange
        return "all_gather" if self.param_groups[0]["compat"] == "paper" else cheaper_way(channels, size)

    def planned_wire_bytes(self, num_processes: int | None = None) -> int:
        """Bytes that each process sends in an exchange of so many processes, headers included; no communication."""
        channels = self._lay_out()
        size = self.link.size if num_processes is None else num_processes
        return wire_bytes(channels, size, self._way_of(channels, size))

    def planned_state_bytes(self) -> int:
        """Bytes of the residuals once there was an exchange; no communication."""
        params = self._parameters()
        return sum(
            torch.float32.itemsize * local(params[member.param]).numel()
            for channel in self._lay_out()
            if self._keeps(channel)
            for member in channel.members
        )

    def are_matrices(self) -> list[bool]:
        """For each parameter whether it goes by blocks."""
        found = [False] * len(self._parameters())
        for channel in self._channels()[0]:
            for member in channel.members:
                found[member.param] = channel.kind.is_matrix
        return found

    def local_state_dict(self) -> dict[str, Any]:
        """What this replica has for itself: its residuals, by the names of their parameters."""
        pairs = zip(self._names(), self._parameters(), strict=True)
        residuals = {name: self.state[param]["residual"].clone() for name, param in pairs if self._has(param)}
        return {"world_size": self.link.size, "rank": self.link.rank, "residuals": residuals}

    def load_local_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `local_state_dict` gave on this replica.

        Args:
            state_dict: of the same rank and world size, or of `merge_local_states`, which fits every replica.

        Raises:
            UserError: another world size or rank, other parameters or shapes; nothing has been loaded.
        """
        for key, own in (("world_size", self.link.size), ("rank", self.link.rank)):
            if state_dict[key] not in (None, own):
                raise UserError(
                    f"the residuals are those of {key} {state_dict[key]}, this is {key} {own}. Every replica has its "
                    "own; for another number of replicas give each what scantling.comm.merge_local_states makes of all"
                )
        known = dict(zip(self._names(), self._parameters(), strict=True))
        for name, residual in state_dict["residuals"].items():
            if name not in known or tuple(residual.shape) != tuple(local(known[name]).shape):
                shape = tuple(local(known[name]).shape) if name in known else None
                raise UserError(
                    f"the residual of {name} has the shape {tuple(residual.shape)}, "
                    + ("there is no such parameter here" if shape is None else f"its parameter here {shape}")
                )
        for name, param in known.items():
            if name in state_dict["residuals"]:
                self._residual(param).copy_(state_dict["residuals"][name])
            elif self._has(param):
                del self.state[param]["residual"]

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Cut the residual of a parameter that keeps only some positions of one dim.

        Args:
            param: of this exchange; cut before or after.
            dim: of the parameter.
            index: positions that stay, 1-D int64.
        """
        if self._has(param):
            self.state[param]["residual"] = self.state[param]["residual"].index_select(dim, index)

    def shared_state_dict(self) -> dict[str, Any]:
        """What all replicas have alike: the number of steps."""
        return {"step": self.step}

    def load_shared_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `shared_state_dict` gave on any replica."""
        self.step = int(state_dict["step"])

    def state_dict(self) -> dict[str, Any]:
        """Both, for a replica that keeps a file of its own."""
        return {"local": self.local_state_dict(), "shared": self.shared_state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this replica."""
        self.load_local_state_dict(state_dict["local"])
        self.load_shared_state_dict(state_dict["shared"])

    def _has(self, param: Tensor) -> bool:
        return "residual" in self.state.get(param, {})

    def __str__(self) -> str:
        """What travels how, a line each."""
        lines = []
        params = self._parameters()
        for channel in self._lay_out():
            kind, section = channel.kind, channel.kind.section
            numbers = sum(local(params[member.param]).numel() for member in channel.members)
            what = f"{section.kept} of {kind.height} x {kind.width}" if kind.is_matrix else f"rows of {kind.width}"
            lines.append(
                f"{len(channel.members):4} tensors, {numbers:>12,} numbers: {what}, {section.values}, "
                f"{channel.num_bytes:,} bytes"
            )
        return "\n".join(lines)

    def _compare(self, params: Sequence[Tensor]) -> None:
        """Compare the parameters of all replicas, and measure how far their residuals are apart."""
        found = unlike(self.link, params)
        if found is not None:
            rank, place, sound = found
            text = f"step {self.step}: {self._names()[place]} is not on rank {rank} what it is on others"
            if self.rounds.on_mismatch == "stop":
                raise ReplicaError(
                    f"{text}. Go on from the last checkpoint; on_mismatch='resync' takes the values of rank {sound}"
                )
            if self.link.rank == 0:
                logger.warning("%s; all take those of rank %d", text, sound)
            for param in params:
                self.link.broadcast(local(param), sound)
        self.replica_divergence = spread(self.link, self._residuals(), self.step)

    def _residuals(self) -> list[Tensor]:
        return [self.state[param]["residual"] for param in self._parameters() if self._has(param)]

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _groups(self) -> list[Group]:
        return [group for group in self.param_groups for _ in group["params"]]

    def _lay_out(self) -> list[Channel]:
        params = self._parameters()
        shapes, numels = [tuple(local(param).shape) for param in params], [param.numel() for param in params]
        return channels_of(shapes, numels, self._groups())

    def _channels(self) -> tuple[list[Channel], int]:
        """The channels, and the hash of what all replicas agree on; compared with theirs where it is new."""
        shapes = tuple((id(param), tuple(param.shape)) for param in self._parameters())
        state = shapes, tuple(tuple(group[key] for key in OPTIONS) for group in self.param_groups)
        if self._laid_out is None or self._laid_out[0] != state:
            channels = self._lay_out()
            configuration = check_alike(self.link, self._described(), self._names(), self._parameters())
            first = self._laid_out is None
            self._laid_out = state, channels, configuration
            if first and self.link.rank == 0:
                logger.info("%s; exchange by %s among %d processes", self, self.way, self.link.size)
        return self._laid_out[1], self._laid_out[2]

    def _names(self) -> list[str]:
        names: list[str] = []
        for number, group in enumerate(self.param_groups):
            given = group.get("param_names")
            names += given or [f"group {number}, parameter {place}" for place in range(len(group["params"]))]
        return names

    def _described(self) -> list[str]:
        """What each parameter is and how it travels, for the comparison of replicas."""
        texts = []
        for param, group in zip(self._parameters(), self._groups(), strict=True):
            options = {key: group[key] for key in OPTIONS} | asdict(self.rounds)
            texts.append(f"shape {tuple(param.shape)}, {param.dtype}, {options}")
        return texts

    def _accumulated(self, channel: Channel, gradients: Sequence[Tensor | None], *, valid: bool) -> dict[int, Tensor]:
        """The residuals of a channel's members with their gradients in them, by position."""
        found: dict[int, Tensor] = {}
        params, groups = self._parameters(), self._groups()
        for member in channel.members:
            param, gradient = params[member.param], gradients[member.param]
            group = groups[member.param]
            scale = float(group["lr"]) if group["compat"] == "paper" else 1.0
            if not self._keeps(channel):
                part = local(param)
                found[member.param] = torch.zeros_like(part) if gradient is None else gradient
                continue
            residual = self._residual(param)
            if valid and gradient is None:
                residual.mul_(channel.kind.decay)
            elif valid and gradient is not None and scale == 1.0:
                torch.add(gradient, residual, alpha=channel.kind.decay, out=residual)
            elif valid and gradient is not None:
                residual.mul_(channel.kind.decay).add_(gradient, alpha=scale)
            found[member.param] = residual
        return found

    def _keeps(self, channel: Channel) -> bool:
        """Whether the members of a channel have residuals: not where everything is sent in full at every call."""
        return not (channel.kind.is_exact and self.rounds.sync_every == 1)

    def _residual(self, param: Tensor) -> Tensor:
        state = self.state.setdefault(param, {})
        if "residual" not in state:
            state["residual"] = torch.zeros_like(local(param), dtype=torch.float32)
        residual: Tensor = state["residual"]
        return residual

    def _forget(self, channel: Channel, outcome: Outcome) -> None:
        """Take out of the residuals what is in the mean, and into them what an owner owes."""
        if not self._keeps(channel):
            return
        params = self._parameters()
        pairs: list[tuple[Sparse | None, float]] = [(outcome.accepted, -1.0), (outcome.gained, 1.0)]
        for part, sign in pairs:
            if part is not None:
                for place, value in channel.paste_sent(*part):
                    self._residual(params[place]).add_(value, alpha=sign * channel.kind.alpha)


def _due(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0


def merge_local_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The local state that every replica of another number of them begins with: the mean of all residuals.

    The mean over the replicas, which is what the next exchanges apply, stays what it was.

    Args:
        states: of `local_state_dict`, one of every replica.

    Raises:
        UserError: not one of every replica, or of other parameters.
    """
    ranks = sorted(state["rank"] for state in states)
    if not states or ranks != list(range(states[0]["world_size"])):
        raise UserError(f"merge_local_states needs one state of every replica; given those of ranks {ranks}")
    names = states[0]["residuals"].keys()
    if any(state["residuals"].keys() != names for state in states):
        raise UserError("merge_local_states: the states are of different parameters")
    residuals = {name: torch.stack([state["residuals"][name] for state in states]).mean(0) for name in names}
    return {"world_size": None, "rank": None, "residuals": residuals}


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def check_options(group: Group) -> None:
    """Raise a UserError for the first option of a group that is out of range."""
    for key, least in (("chunk", 1), ("topk", 1)):
        if not isinstance(group[key], int) or group[key] < least:
            raise UserError(f"{key} must be a whole number from {least} on; given {group[key]!r}")
    if group["topk"] > group["chunk"] ** 2:
        raise UserError(
            f"topk must be at most chunk^2 = {group['chunk'] ** 2}, all there is in a block; given {group['topk']}"
        )
    if group["chunk"] > 4096:
        raise UserError(f"chunk must be at most 4096; given {group['chunk']}")
    for key in ("decay", "alpha"):
        if not isinstance(group[key], float | int) or not 0.0 <= group[key] <= 1.0:
            raise UserError(f"{key} must be from 0 to 1; given {group[key]!r}")
    for key in ("values", "dense"):
        if group[key] not in VALUES:
            raise UserError(f"{key} must be one of {', '.join(VALUES)}; given {group[key]!r}")
    if group["transform"] not in ("dct", "none"):
        raise UserError(f"transform must be 'dct' or 'none'; given {group['transform']!r}")
    if group["compat"] not in (None, "paper"):
        raise UserError(f"compat must be None or 'paper'; given {group['compat']!r}")


def _as_groups(given: Iterable[Any], defaults: Group) -> list[Group]:
    """Groups with all options; parameters alone, or (name, parameter) pairs, are one group."""
    items = list(given)
    if not items:
        raise UserError("MomentumExchange needs at least one parameter; given none")
    if not isinstance(items[0], dict):
        items = [{"params": items}]
    groups = []
    for item in items:
        pairs = [pair if isinstance(pair, tuple) else (None, pair) for pair in item["params"]]
        group = {**defaults, **item, "params": [param for _, param in pairs]}
        if all(name is not None for name, _ in pairs):
            group["param_names"] = [name for name, _ in pairs]
        groups.append(group)
    return groups


def _gradient(param: Tensor) -> Tensor | None:
    if param.grad is None:
        return None
    if param.grad.is_sparse:
        raise UserError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is sparse; use sparse=False in its embedding"
        )
    return local(param.grad)


def _all_finite(gradients: Iterable[Tensor | None]) -> bool:
    """Whether no number is NaN or Inf; by sums, which is several times as fast as to look at each."""
    sums = [each.sum(dtype=torch.float32) for each in gradients if each is not None and each.numel()]
    return not sums or bool(torch.isfinite(torch.stack(sums)).all())


def _zeros(channel: Channel, params: Sequence[Tensor]) -> Tensor:
    like = local(params[channel.members[0].param])
    return torch.zeros(channel.count, channel.kind.section.size, device=like.device)


def as_gradient(value: Tensor, param: Tensor) -> Tensor:
    """A local tensor as the gradient of a parameter: of its dtype, and placed as it is."""
    cast = value.to(param.dtype)
    if isinstance(param, DTensor):
        return DTensor.from_local(
            cast, param.device_mesh, param.placements, shape=param.shape, stride=param.stride(), run_check=False
        )
    return cast
