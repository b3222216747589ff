"""Which parameter travels how, in which message: what all replicas must agree on, and what it comes to in bytes.

All parameters share one message, or, to overlap with the backward pass, runs of them from the last one on: gradients
come in about the reverse order of the parameters.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor

from scantling.comm.channels import MOST_NUMBERS, MOST_ON_DEVICE, Channel, channels_of, kind_and_grid
from scantling.comm.consistency import check_alike
from scantling.comm.options import OPTIONS, Group, Rounds, check_groups
from scantling.comm.residuals import Format, residual_bytes
from scantling.comm.rounds import Way, cheaper_way, wire_bytes
from scantling.comm.transport.group import ReplicaGroup
from scantling.comm.transport.shards import to_local

logger = logging.getLogger(__name__)

MOST_BUCKETS = 8
"""Messages of an exchange, about. Each costs rounds and hundreds of launches, and the last one, which nothing hides, is
an eighth of all."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose momentum travels in one message.

    Attributes:
        params: their positions among all.
        channels: how they travel.
    """

    params: tuple[int, ...]
    channels: tuple[Channel, ...]


class Origin(NamedTuple):
    """What a layout was made of.

    Attributes:
        exchange: how everything travels.
        replicas: generation of the replicas, number of its processes and rank among them.
        shapes: of each parameter, with what tells it from others and whether it is trained.
        options: of each group.
    """

    exchange: str
    replicas: tuple[int, int, int]
    shapes: tuple[Any, ...]
    options: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How everything travels.

    Attributes:
        origin: what it was made of.
        buckets: a message each.
        configuration: a hash of what all replicas agree on.
        way: of the messages.
        is_stale: whether a state was loaded since, so that replicas are compared again.
        is_late: whether that was after the first call, when others that have loaded nothing may be exchanging.
    """

    origin: Origin
    buckets: list[Bucket]
    configuration: int
    way: Way
    is_stale: bool = False
    is_late: bool = False


def laid_out(
    groups: Sequence[Group],
    rounds: Rounds,
    replicas: ReplicaGroup,
    last: Layout | None,
    *,
    step: int,
    also: Sequence[str],
    facts: Mapping[str, Any],
) -> Layout:
    """How parameters travel; compared with how they do on the other replicas where it is new.

    Args:
        groups: with all options.
        rounds: of all of them.
        replicas: to the other replicas.
        last: the layout until now.
        step: calls so far, which must be alike too.
        also: further keys of groups that must be alike when something is new.
        facts: what else must be then.

    Collectives: those of `check_alike` where something has changed since the last time.
    """
    params = parameters_of(groups)
    shapes = tuple((id(param), tuple(param.shape), param.requires_grad) for param in params)
    options_of = tuple(tuple(group[option] for option in OPTIONS) for group in groups)
    origin = Origin(rounds.exchange, (replicas.generation, replicas.world_size, replicas.rank), shapes, options_of)
    if last is not None and last.origin == origin and not last.is_stale:
        return last
    check_groups(groups, rounds)
    has_changed = last is not None and (
        last.is_late or (last.origin.shapes, last.origin.options) != (shapes, options_of)
    )
    if has_changed and replicas.world_size != 1:
        logger.warning(
            "step %d, rank %d: options, shapes or what is frozen have changed, or a state was loaded; replicas are "
            "compared. If nothing has changed on the others, they are exchanging now, and the run hangs or ends in an "
            "error",
            *(step, replicas.rank),
        )
    described = []
    for param, group in zip(params, groups_of(groups), strict=True):
        options = {option: group[option] for option in (*OPTIONS, *also)} | asdict(rounds)
        own = {"shape": tuple(param.shape), "dtype": param.dtype, "frozen": not param.requires_grad, **options}
        described.append({**own, **facts, "calls so far": step})
    buckets = buckets_of(groups, rounds)
    return Layout(
        origin,
        buckets,
        check_alike(replicas, described, names_of(groups), params),
        way_of(groups, rounds, replicas.world_size),
    )


def buckets_of(groups: Sequence[Group], rounds: Rounds) -> list[Bucket]:
    """The messages, in their order; it depends on shapes and options alone. What is frozen does not travel."""
    params, each_group = parameters_of(groups), groups_of(groups)
    runs: list[list[int]] = [[]]
    size = 0
    sizes = [param.numel() * param.element_size() for param in params]  # whole, so that all shards cut alike
    least = max(rounds.bucket_mb * 2**20, sum(sizes) / MOST_BUCKETS)
    for position in reversed([place for place, param in enumerate(params) if param.requires_grad]):
        if rounds.overlap and size >= least:
            runs.append([])
            size = 0
        runs[-1].append(position)
        size += sizes[position]
    most = MOST_ON_DEVICE if params and params[0].device.type == "cuda" else MOST_NUMBERS
    found = []
    for run in runs:
        positions = sorted(run)
        shapes = {position: tuple(to_local(params[position]).shape) for position in positions}
        numels = {position: params[position].numel() for position in positions}
        channels = channels_of(shapes, numels, each_group, whole=rounds.exchange == "whole", most=most)
        found.append(Bucket(tuple(positions), tuple(channels)))
    return found


def way_of(groups: Sequence[Group], rounds: Rounds, num_processes: int) -> Way:
    """How bytes travel between so many processes."""
    if rounds.exchange != "auto":
        return rounds.exchange
    if groups[0]["compat"] == "paper":
        return "all_gather"
    return cheaper_way(channels_in(buckets_of(groups, rounds)), num_processes)


def keeps_residuals(channel: Channel, rounds: Rounds) -> bool:
    """Whether the members of a channel have residuals: not where everything is sent in full at every call.

    Where everything travels, it is the momentum of matrices, alike on all replicas, that is kept in their place.
    """
    if rounds.exchange == "whole":
        return channel.kind.is_matrix and 0.0 < channel.kind.decay < 1.0
    return not (channel.kind.is_exact and rounds.sync_every == 1)


def residual_format(param: Tensor, group: Group) -> Format:
    """How the residual of a parameter is kept: of what travels densely, the residual is below the steps of few bits."""
    form: Format = group["residual"]
    if form == "fp32":
        return form
    kind, _ = kind_and_grid(tuple(to_local(param).shape), param.numel(), group)
    return form if kind.is_matrix else "fp32"


def planned_wire_bytes(groups: Sequence[Group], rounds: Rounds, num_processes: int) -> int:
    """Bytes that each process sends in an exchange, headers included."""
    way = way_of(groups, rounds, num_processes)
    return sum(wire_bytes(bucket.channels, num_processes, way) for bucket in buckets_of(groups, rounds))


def planned_wire_bytes_a_step(groups: Sequence[Group], rounds: Rounds, num_processes: int) -> float:
    """Bytes that each process sends in a call on average: with what is averaged now and then, without comparisons."""
    sent = float(planned_wire_bytes(groups, rounds, num_processes))
    if rounds.state_sync_every is not None and rounds.exchange != "whole" and num_processes > 1:
        params = parameters_of(groups)
        numbers = sum(
            to_local(params[member.param]).numel()
            for channel in channels_in(buckets_of(groups, rounds))
            if keeps_residuals(channel, rounds)
            for member in channel.members
        )
        sent += 2 * (num_processes - 1) / num_processes * 4 * numbers / rounds.state_sync_every
    return sent / rounds.sync_every


def planned_state_bytes(groups: Sequence[Group], rounds: Rounds) -> int:
    """Bytes of the residuals once there was an exchange."""
    params, each_group = parameters_of(groups), groups_of(groups)
    return sum(
        residual_bytes(to_local(param).numel(), residual_format(param, group))
        for channel in channels_in(buckets_of(groups, rounds))
        if keeps_residuals(channel, rounds)
        for param, group in ((params[member.param], each_group[member.param]) for member in channel.members)
    )


def described(groups: Sequence[Group], rounds: Rounds) -> str:
    """What travels how, a line each."""
    lines = []
    params = parameters_of(groups)
    for channel in channels_in(buckets_of(groups, rounds)):
        kind, section = channel.kind, channel.kind.section
        numbers = sum(to_local(params[member.param]).numel() for member in channel.members)
        what = f"{section.kept} of {kind.height} x {kind.width}" if kind.is_matrix else f"rows of {kind.width}"
        if rounds.exchange == "whole":
            what = "all of a matrix" if kind.is_matrix else "all"
        lines.append(
            f"{len(channel.members):4} tensors, {numbers:>12,} numbers: {what}, {section.values}, "
            f"{channel.num_bytes:,} bytes"
        )
    return "\n".join(lines)


def announce(text: str) -> None:
    """Say what travels how when a run begins: by logging, or on stderr where that would not show it."""
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    else:
        print(text, file=sys.stderr)


def channels_in(buckets: Sequence[Bucket]) -> list[Channel]:
    """The channels of all messages."""
    return [channel for bucket in buckets for channel in bucket.channels]


def parameters_of(groups: Sequence[Group]) -> list[Tensor]:
    """All parameters, in their order."""
    return [param for group in groups for param in group["params"]]


def groups_of(groups: Sequence[Group]) -> list[Group]:
    """The group of each parameter."""
    return [group for group in groups for _ in group["params"]]


def names_of(groups: Sequence[Group]) -> list[str]:
    """The names of all parameters, each one once: with their group where two have one name, or their places."""
    pairs: list[tuple[int, str]] = []
    for number, group in enumerate(groups):
        given = group.get("param_names") or [f"group {number}, parameter {k}" for k in range(len(group["params"]))]
        pairs += [(number, name) for name in given]
    times = Counter(name for _, name in pairs)
    return [name if times[name] == 1 else f"group {number}, {name}" for number, name in pairs]
