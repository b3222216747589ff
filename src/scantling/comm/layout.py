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

from scantling.comm.codec.block_group import MOST_NUMBERS, MOST_ON_DEVICE, BlockGroup, group_blocks, make_spec
from scantling.comm.collectives import Strategy, cheapest_strategy, wire_bytes
from scantling.comm.config import OPTIONS, ExchangeConfig, Group, check_groups
from scantling.comm.consistency import check_alike
from scantling.comm.residuals import Format, residual_bytes
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
    block_groups: tuple[BlockGroup, ...]


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
    strategy: Strategy
    is_stale: bool = False
    is_late: bool = False


def update_layout(
    groups: Sequence[Group],
    config: ExchangeConfig,
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
    params = all_parameters(groups)
    shapes = tuple((id(param), tuple(param.shape), param.requires_grad) for param in params)
    options_of = tuple(tuple(group[option] for option in OPTIONS) for group in groups)
    origin = Origin(config.exchange, (replicas.generation, replicas.world_size, replicas.rank), shapes, options_of)
    if last is not None and last.origin == origin and not last.is_stale:
        return last
    check_groups(groups, config)
    has_changed = last is not None and (
        last.is_late or (last.origin.shapes, last.origin.options) != (shapes, options_of)
    )
    if has_changed and replicas.world_size > 1:
        logger.warning(
            "step %d, rank %d: options, shapes or what is frozen have changed, or a state was loaded; replicas are "
            "compared. If nothing has changed on the others, they are exchanging now, and the run hangs or ends in an "
            "error",
            *(step, replicas.rank),
        )
    describe_layout = []
    for param, group in zip(params, group_by_param(groups), strict=True):
        options = {option: group[option] for option in (*OPTIONS, *also)} | asdict(config)
        own = {"shape": tuple(param.shape), "dtype": param.dtype, "frozen": not param.requires_grad, **options}
        describe_layout.append({**own, **facts, "calls so far": step})
    buckets = make_buckets(groups, config)
    return Layout(
        origin,
        buckets,
        check_alike(replicas, describe_layout, parameter_names(groups), params),
        choose_strategy(groups, config, replicas.world_size),
    )


def make_buckets(groups: Sequence[Group], config: ExchangeConfig) -> list[Bucket]:
    """The messages, in their order; it depends on shapes and options alone. What is frozen does not travel."""
    params, each_group = all_parameters(groups), group_by_param(groups)
    runs: list[list[int]] = [[]]
    size = 0
    sizes = [param.numel() * param.element_size() for param in params]  # whole, so that all shards cut alike
    least = max(config.bucket_mb * 2**20, sum(sizes) / MOST_BUCKETS)
    for position in reversed([place for place, param in enumerate(params) if param.requires_grad]):
        if config.overlap and size >= least:
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
        block_groups = group_blocks(shapes, numels, each_group, whole=config.exchange == "dense", most=most)
        found.append(Bucket(tuple(positions), tuple(block_groups)))
    return found


def choose_strategy(groups: Sequence[Group], config: ExchangeConfig, num_processes: int) -> Strategy:
    """How bytes travel between so many processes."""
    if config.exchange != "auto":
        return config.exchange
    if groups[0]["compat"] == "paper":
        return "all_gather"
    return cheapest_strategy(all_block_groups(make_buckets(groups, config)), num_processes)


def keeps_residuals(block_group: BlockGroup, config: ExchangeConfig) -> bool:
    """Whether the members of a channel have residuals: not where everything is sent in full at every call.

    Where everything travels, it is the momentum of matrices, alike on all replicas, that is kept in their place.
    """
    if config.exchange == "dense":
        return block_group.spec.is_matrix and 0.0 < block_group.spec.decay < 1.0
    return not (block_group.spec.is_exact and config.sync_every == 1)


def residual_format(param: Tensor, group: Group) -> Format:
    """How the residual of a parameter is kept: of what travels densely, the residual is below the steps of few bits."""
    form: Format = group["residual"]
    if form == "fp32":
        return form
    spec, _ = make_spec(tuple(to_local(param).shape), param.numel(), group)
    return form if spec.is_matrix else "fp32"


def planned_wire_bytes(groups: Sequence[Group], config: ExchangeConfig, num_processes: int) -> int:
    """Bytes that each process sends in an exchange, headers included."""
    strategy = choose_strategy(groups, config, num_processes)
    return sum(wire_bytes(bucket.block_groups, num_processes, strategy) for bucket in make_buckets(groups, config))


def planned_wire_bytes_a_step(groups: Sequence[Group], config: ExchangeConfig, num_processes: int) -> float:
    """Bytes that each process sends in a call on average: with what is averaged now and then, without comparisons."""
    sent = float(planned_wire_bytes(groups, config, num_processes))
    if config.state_sync_every is not None and config.exchange != "dense" and num_processes > 1:
        params = all_parameters(groups)
        numbers = sum(
            to_local(params[slot.param]).numel()
            for block_group in all_block_groups(make_buckets(groups, config))
            if keeps_residuals(block_group, config)
            for slot in block_group.slots
        )
        sent += 2 * (num_processes - 1) / num_processes * 4 * numbers / config.state_sync_every
    return sent / config.sync_every


def planned_state_bytes(groups: Sequence[Group], config: ExchangeConfig) -> int:
    """Bytes of the residuals once there was an exchange."""
    params, each_group = all_parameters(groups), group_by_param(groups)
    return sum(
        residual_bytes(to_local(param).numel(), residual_format(param, group))
        for block_group in all_block_groups(make_buckets(groups, config))
        if keeps_residuals(block_group, config)
        for param, group in ((params[slot.param], each_group[slot.param]) for slot in block_group.slots)
    )


def describe_layout(groups: Sequence[Group], config: ExchangeConfig) -> str:
    """What travels how, a line each."""
    lines = []
    params = all_parameters(groups)
    for block_group in all_block_groups(make_buckets(groups, config)):
        spec, codec = block_group.spec, block_group.spec.codec
        numbers = sum(to_local(params[slot.param]).numel() for slot in block_group.slots)
        what = f"{codec.kept} of {spec.height} x {spec.width}" if spec.is_matrix else f"rows of {spec.width}"
        if config.exchange == "dense":
            what = "all of a matrix" if spec.is_matrix else "all"
        lines.append(
            f"{len(block_group.slots):4} tensors, {numbers:>12,} numbers: {what}, {codec.values}, "
            f"{block_group.num_bytes:,} bytes"
        )
    return "\n".join(lines)


def log_layout(text: str) -> None:
    """Say what travels how when a run begins: by logging, or on stderr where that would not show it."""
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    else:
        print(text, file=sys.stderr)


def all_block_groups(buckets: Sequence[Bucket]) -> list[BlockGroup]:
    """The channels of all messages."""
    return [block_group for bucket in buckets for block_group in bucket.block_groups]


def all_parameters(groups: Sequence[Group]) -> list[Tensor]:
    """All parameters, in their order."""
    return [param for group in groups for param in group["params"]]


def group_by_param(groups: Sequence[Group]) -> list[Group]:
    """The group of each parameter."""
    return [group for group in groups for _ in group["params"]]


def parameter_names(groups: Sequence[Group]) -> list[str]:
    """The names of all parameters, each one once: with their group where two have one name, or their places."""
    pairs: list[tuple[int, str]] = []
    for number, group in enumerate(groups):
        given = group.get("param_names") or [f"group {number}, parameter {k}" for k in range(len(group["params"]))]
        pairs += [(number, name) for name in given]
    times = Counter(name for _, name in pairs)
    return [name if times[name] == 1 else f"group {number}, {name}" for number, name in pairs]
