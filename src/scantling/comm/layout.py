"""Layout of the messages: which parameter is encoded how, and travels in which message.

- A parameter with at least two dims, at least `MIN_MATRIX_NUMEL` elements and the role `matrix` is divided into blocks
  of at most chunk x chunk. Of the coefficients of a block's cosine transform, a share of topk / chunk^2 is sent, at
  least one: a smaller block sends less.
- The table of an embedding or an output layer of that size is divided into the same blocks. The largest elements of its
  gradient are sent, without a transform: rows belong to tokens, so neighboring rows have nothing in common. They are
  `TABLE_FACTOR` times as many as coefficients of a matrix, because an element that is not sent does not move. What is
  not sent stays in the residual without decay, because a rare token may not return for many steps.
- Everything else (vectors, small parameters) is sent densely, without a transform: in rows of at most `ROW` elements
  along the last dim, or along all dims if that one is short. Each row has its own scale.
- With `exchange="dense"`, blocks are single elements and everything is sent.

All parameters share one message. With `overlap` there are several, from the last parameters to the first: gradients
become available in about this order.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from scantling.comm.codec.block_group import BlockGroup, BlockSpec, ParamSlot
from scantling.comm.codec.blocks import BlockGrid, even_side, make_grid
from scantling.comm.codec.topk import TopKCodec
from scantling.comm.collectives import cheapest_strategy, wire_bytes
from scantling.comm.config import RESIDUAL_ROW, ExchangeConfig, ResidualFormat, Strategy
from scantling.comm.consistency import check_replicas
from scantling.comm.param_groups import (
    COMPARED_OPTIONS,
    Group,
    all_parameters,
    check_groups,
    group_by_param,
    parameter_names,
)
from scantling.comm.transport.group import ReplicaGroup
from scantling.comm.transport.shards import to_local
from scantling.errors import UserError
from scantling.groups import MatrixDims, default_matrix_dims

logger = logging.getLogger(__name__)

MIN_MATRIX_NUMEL = 4096
ROW = 128
"""Largest number of elements of a dense parameter that share a scale."""
TABLE_FACTOR = 4
"""Elements of an embedding's block that are sent for each coefficient of a matrix's: docs/evidence/network.md."""
MAX_GROUP_NUMEL = 1 << 24
"""Elements of a block group, which bounds temporary memory; a larger parameter has its own group."""
MAX_GROUP_NUMEL_CUDA = 1 << 28
"""The same on a GPU, where launches cost more than memory, and kernels need no temporary blocks."""
CODEC_NS_PER_ELEMENT = 21.0
"""Time of one exchange without a network on a CPU core: benchmarks/results/comm-codec-cpu-2026-11-26.json."""
MAX_BUCKETS = 8
"""Approximate number of messages with `overlap`: each costs collectives and launches, and the last is never hidden."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that share a message.

    Attributes:
        params: their indices among all parameters.
        block_groups: their encoding.
    """

    params: tuple[int, ...]
    block_groups: tuple[BlockGroup, ...]


class LayoutKey(NamedTuple):
    """Inputs of a layout, which is made again when they change.

    Attributes:
        exchange: the option.
        replicas: generation and size of the replica group, and rank.
        shapes: identity, shape and requires_grad of each parameter.
        options: of each parameter group.
    """

    exchange: str
    replicas: tuple[int, int, int]
    shapes: tuple[Any, ...]
    options: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of all messages.

    Attributes:
        key: the inputs of this layout.
        buckets: one for each message.
        configuration: hash of the options and shapes that all replicas must share.
        strategy: of the messages.
        is_stale: True if a state was loaded, so that replicas are compared again.
        is_late: True if that was after the first step: replicas that loaded nothing may be exchanging.
    """

    key: LayoutKey
    buckets: list[Bucket]
    configuration: int
    strategy: Strategy
    is_stale: bool = False
    is_late: bool = False

    @property
    def block_groups(self) -> list[BlockGroup]:
        """Block groups of all messages."""
        return all_block_groups(self.buckets)


def update_layout(
    groups: Sequence[Group],
    config: ExchangeConfig,
    replicas: ReplicaGroup,
    last: Layout | None,
    *,
    step: int,
    compared_keys: Sequence[str],
    compared_values: Mapping[str, Any],
    is_elementwise: bool,
) -> Layout:
    """Return `last` if it is up to date, else a new layout, which is compared with those of the other replicas.

    Args:
        groups: parameter groups with all options.
        config: options of the exchange.
        replicas: group of all replicas.
        last: the previous layout.
        step: steps so far; compared too.
        compared_keys: further keys of groups that replicas must share.
        compared_values: further values that replicas must share.
        is_elementwise: True if replicas step each element by its own momentum alone.

    Collectives: those of `check_replicas` for a new layout.
    """
    params = all_parameters(groups)
    shapes = tuple((id(param), tuple(param.shape), param.requires_grad) for param in params)
    options = tuple(tuple(group[option] for option in COMPARED_OPTIONS) for group in groups)
    key = LayoutKey(config.exchange, (replicas.generation, replicas.world_size, replicas.rank), shapes, options)
    # The common case: nothing has changed, and no communication is needed.
    if last is not None and last.key == key and not last.is_stale:
        return last
    check_groups(groups, config)
    # Members change on all replicas together; options and shapes may change on one alone.
    has_changed = last is not None and (last.is_late or (last.key.shapes, last.key.options) != (shapes, options))
    if has_changed and replicas.world_size > 1:
        logger.warning(
            "step %d, rank %d: options, shapes or frozen parameters have changed, or a state was loaded; comparing "
            "replicas. If nothing has changed on the others, they are exchanging now, and the run hangs or fails",
            *(step, replicas.rank),
        )
    # All properties that replicas must share, by parameter: an error can name the one that differs.
    descriptions = [
        {
            "shape": tuple(param.shape),
            "dtype": param.dtype,
            "frozen": not param.requires_grad,
            **asdict(config),
            **{option: group[option] for option in (*COMPARED_OPTIONS, *compared_keys)},
            **compared_values,
            "step": step,
        }
        for param, group in zip(params, group_by_param(groups), strict=True)
    ]
    buckets = make_buckets(groups, config)
    has_products = not is_elementwise or any(each.spec.transformed for each in all_block_groups(buckets))
    names = parameter_names(groups)
    configuration = check_replicas(replicas, descriptions, names, params, has_products=has_products)
    return Layout(key, buckets, configuration, choose_strategy(groups, config, replicas.world_size))


def make_buckets(groups: Sequence[Group], config: ExchangeConfig) -> list[Bucket]:
    """Return the messages in order, which depends on shapes and options only. Frozen parameters are left out."""
    params, param_groups = all_parameters(groups), group_by_param(groups)
    # Split the parameters into runs, from the last one on: their gradients are complete first.
    runs: list[list[int]] = [[]]
    size = 0
    sizes = [param.numel() * param.element_size() for param in params]  # unsharded, so that all shards agree
    least = max(config.bucket_mb * 2**20, sum(sizes) / MAX_BUCKETS)
    for idx in reversed([idx for idx, param in enumerate(params) if param.requires_grad]):
        if config.overlap and size >= least:
            runs.append([])
            size = 0
        runs[-1].append(idx)
        size += sizes[idx]
    # Within a run, parameters keep their order, and equal specs share a block group.
    is_cuda = bool(params) and params[0].device.type == "cuda"
    most = MAX_GROUP_NUMEL_CUDA if is_cuda else MAX_GROUP_NUMEL
    buckets = []
    for run in runs:
        indices = sorted(run)
        shapes = {idx: tuple(to_local(params[idx]).shape) for idx in indices}
        numels = {idx: params[idx].numel() for idx in indices}
        dense = config.exchange == "dense"
        block_groups = make_block_groups(shapes, numels, param_groups, dense=dense, max_numel=most)
        buckets.append(Bucket(tuple(indices), tuple(block_groups)))
    return buckets


def make_block_groups(
    shapes: Mapping[int, tuple[int, ...]],
    numels: Mapping[int, int],
    groups: Sequence[Group],
    *,
    dense: bool = False,
    max_numel: int = MAX_GROUP_NUMEL,
) -> list[BlockGroup]:
    """Return the block groups of parameters, in an order that depends on shapes and options only.

    Args:
        shapes: of the parameters, or of this process's shards, by index.
        numels: elements of the unsharded parameters, by index.
        groups: of all parameters.
        dense: True to send everything.
        max_numel: most elements of a block group.
    """
    unfinished: dict[BlockSpec, list[ParamSlot]] = {}
    block_groups: list[BlockGroup] = []
    for idx, shape in shapes.items():
        spec, grid = make_spec(shape, numels[idx], groups[idx], dense=dense)
        # An empty shard sends nothing.
        if not grid.count:
            continue
        # Close a block group before it exceeds the limit, which bounds the temporary blocks.
        slots = unfinished.setdefault(spec, [])
        size = spec.height * spec.width
        if slots and size * (grid.count + sum(slot.grid.count for slot in slots)) > max_numel:
            block_groups.append(BlockGroup(spec, tuple(slots)))
            slots.clear()
        slots.append(ParamSlot(idx, grid))
    # Dicts keep their order, so that it is the same on all replicas.
    return [*block_groups, *(BlockGroup(spec, tuple(slots)) for spec, slots in unfinished.items())]


def make_spec(shape: tuple[int, ...], numel: int, group: Group, *, dense: bool = False) -> tuple[BlockSpec, BlockGrid]:
    """Return the encoding of a parameter.

    Args:
        shape: of the parameter, or of this process's shard.
        numel: elements of the unsharded parameter; small ones are not matrices.
        group: its parameter group.
        dense: True to send everything.
    """
    chunk, topk = group["chunk"], group["topk"]
    is_paper = group["compat"] == "paper"
    is_matrix = is_paper or is_block_matrix(shape, numel, group["role"])
    # cores of TT embeddings have more dims; they are small, and their gradients are dense
    is_table = not is_paper and group["role"] == "embedding" and len(shape) == 2 and _is_large(shape, numel)
    # Dense exchange: blocks of one element, so that tensors are copied without a transform.
    if dense:
        codec = TopKCodec(1, 1, "fp32" if group["dense"] == "fp32" else "bf16")
        grid = BlockGrid(shape, ((), tuple(range(len(shape)))), 1, 1)
        return BlockSpec(codec, 1, 1, is_matrix, False, group["decay"] if is_matrix else 1.0), grid
    # Matrix or embedding: blocks of the row dims x column dims view, and a share of their coefficients.
    if is_matrix or is_table:
        rows, cols = group["matrix_dims"] or (default_matrix_dims(len(shape)) if len(shape) > 1 else _last_dim(shape))
        view: MatrixDims = tuple(rows), tuple(cols)  # hashable, although a user may give lists
        dims = [*rows, *cols]
        if len(set(dims)) < len(dims) or not set(dims) <= set(range(len(shape))) or (len(shape) > 1 and not view[1]):
            raise UserError(f"matrix_dims must be dims of shape {shape}, of rows and of columns; given {view!r}")
        grid = make_grid(shape, view, chunk, divide=is_paper)
        size = grid.height * grid.width
        # local steps send elements of matrices, too, and equally many
        if is_table and group["transform"] == "dct":
            topk = min(chunk**2, TABLE_FACTOR * topk)
        # The published code sends topk coefficients of a smaller block too.
        k = min(topk, size) if is_paper else max(1, min(size, round(topk * size / chunk**2)))
        codec = TopKCodec(size, k, group["values"])
        transformed, decay = (False, 1.0) if is_table else (group["transform"] == "dct", group["decay"])
        return BlockSpec(codec, grid.height, grid.width, is_matrix, transformed, decay), grid
    # Everything else: rows with one scale each, all elements sent.
    view = _last_dim(shape) if shape and shape[-1] >= ROW // 2 else ((), tuple(range(len(shape))))
    grid = BlockGrid(shape, view, 1, even_side(prod(shape[dim] for dim in view[1]), ROW))
    codec = TopKCodec(grid.width, grid.width, group["dense"])
    return BlockSpec(codec, grid.height, grid.width, False, False, 1.0), grid


def is_block_matrix(shape: tuple[int, ...], numel: int, role: str | None) -> bool:
    """Return True if a parameter's momentum is sent, in blocks; of others, gradients are."""
    return role in (None, "matrix") and _is_large(shape, numel)


def _is_large(shape: tuple[int, ...], numel: int) -> bool:
    """Return True if a parameter is large enough for blocks."""
    return len(shape) >= 2 and numel >= MIN_MATRIX_NUMEL


def choose_strategy(groups: Sequence[Group], config: ExchangeConfig, world_size: int) -> Strategy:
    """Return the strategy of an exchange among this many replicas."""
    if config.exchange != "auto":
        return config.exchange
    # The mean over senders needs the messages of all.
    if groups[0]["compat"] == "paper":
        return "all_gather"
    return cheapest_strategy(all_block_groups(make_buckets(groups, config)), world_size)


def keeps_residuals(block_group: BlockGroup, config: ExchangeConfig) -> bool:
    """Return True if the parameters of a block group have residuals; not if everything is sent exactly in every step.

    A dense exchange keeps the momentum of matrices as residuals; it is the same on all replicas.
    """
    if config.exchange == "dense":
        return block_group.spec.is_matrix and 0.0 < block_group.spec.decay < 1.0
    return not (block_group.spec.is_exact and config.sync_every == 1)


def residual_format(param: Tensor, group: Group) -> ResidualFormat:
    """Return the format of a parameter's residual: always fp32 if it is sent densely, where residuals are tiny."""
    form: ResidualFormat = group["residual"]
    if form == "fp32":
        return form
    spec, _ = make_spec(tuple(to_local(param).shape), param.numel(), group)
    return form if spec.is_sparse else "fp32"


def all_block_groups(buckets: Sequence[Bucket]) -> list[BlockGroup]:
    """Return the block groups of all messages."""
    return [block_group for bucket in buckets for block_group in bucket.block_groups]


def residual_bytes(numel: int, form: ResidualFormat) -> int:
    """Return the bytes of a residual: 4 per element, or one and a scale per row in int8."""
    return 4 * numel if form == "fp32" else numel + 4 * -(-numel // RESIDUAL_ROW)


def log_layout(text: str) -> None:
    """Report the layout at the start of a run: by logging, or on stderr if logging would not show it."""
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    else:
        print(text, file=sys.stderr)


def planned_wire_bytes(groups: Sequence[Group], config: ExchangeConfig, world_size: int) -> int:
    """Return the bytes that each replica sends in an exchange, headers included."""
    strategy = choose_strategy(groups, config, world_size)
    return sum(wire_bytes(bucket.block_groups, world_size, strategy) for bucket in make_buckets(groups, config))


def planned_wire_bytes_per_step(groups: Sequence[Group], config: ExchangeConfig, world_size: int) -> float:
    """Return the mean bytes per step: exchanges and averages of residuals, without comparisons of replicas."""
    sent = float(planned_wire_bytes(groups, config, world_size))
    if config.state_sync_every is not None and config.exchange != "dense" and world_size > 1:
        numel = sum(_numels(groups, config))
        # A ring all-reduce in fp32
        sent += 2 * (world_size - 1) / world_size * 4 * numel / config.state_sync_every
    return sent / config.sync_every


def planned_state_bytes(groups: Sequence[Group], config: ExchangeConfig) -> int:
    """Return the bytes of the residuals after the first exchange."""
    params, param_groups = all_parameters(groups), group_by_param(groups)
    return sum(
        residual_bytes(to_local(params[idx]).numel(), residual_format(params[idx], param_groups[idx]))
        for idx in residual_indices(groups, config)
    )


def dense_crossover_mbit(world_size: int) -> float:
    """Return the link speed in Mbit/s above which `exchange="dense"` is faster on CPUs, with one core per process.

    There the all-reduce of everything in bf16 takes less time than the codec, whose own bytes are neglected.
    """
    bits = 2 * (world_size - 1) / world_size * 16  # sent per element
    return 1e3 * bits / CODEC_NS_PER_ELEMENT


def describe_layout(groups: Sequence[Group], config: ExchangeConfig) -> str:
    """Return one line for each block group (number and size of its parameters, selection, bytes), and the shares.

    The shares are those of matrices, embeddings and vectors in the bytes of a message, largest first.
    """
    block_groups = all_block_groups(make_buckets(groups, config))
    lines = [_describe(each, groups, config) for each in block_groups]
    shares = message_shares(block_groups, groups)
    if len(shares) > 1:
        lines.append("message: " + ", ".join(f"{share:.0%} {kind}" for kind, share in shares.items()))
    return "\n".join(lines)


def message_shares(block_groups: Sequence[BlockGroup], groups: Sequence[Group]) -> dict[str, float]:
    """Return the shares of the kinds of parameters in the bytes of a message, largest first."""
    params, by_param = all_parameters(groups), group_by_param(groups)
    found: dict[str, float] = {}
    for each in block_groups:
        sizes = {slot.param: to_local(params[slot.param]).numel() for slot in each.slots}
        for idx, numel in sizes.items():
            role = by_param[idx]["role"] or ("matrix" if each.spec.is_matrix else "vector")
            kind = {"matrix": "matrices", "embedding": "embeddings", "vector": "vectors"}[role]
            found[kind] = found.get(kind, 0.0) + each.num_bytes * numel / max(1, sum(sizes.values()))
    total = sum(found.values()) or 1.0
    return {kind: size / total for kind, size in sorted(found.items(), key=lambda item: -item[1])}


def _describe(block_group: BlockGroup, groups: Sequence[Group], config: ExchangeConfig) -> str:
    spec, params = block_group.spec, all_parameters(groups)
    numel = sum(to_local(params[slot.param]).numel() for slot in block_group.slots)
    what = f"{spec.codec.k} of {spec.height} x {spec.width}" if spec.is_sparse else f"rows of {spec.width}"
    if config.exchange == "dense":
        what = "all of a matrix" if spec.is_matrix else "all"
    return (
        f"{len(block_group.slots):4} tensors, {numel:>12,} elements: {what}, {spec.codec.values}, "
        f"{block_group.num_bytes:,} bytes"
    )


def residual_indices(groups: Sequence[Group], config: ExchangeConfig) -> list[int]:
    """Return the indices of the parameters that have residuals."""
    block_groups = all_block_groups(make_buckets(groups, config))
    return [slot.param for each in block_groups if keeps_residuals(each, config) for slot in each.slots]


def _numels(groups: Sequence[Group], config: ExchangeConfig) -> list[int]:
    params = all_parameters(groups)
    return [to_local(params[idx]).numel() for idx in residual_indices(groups, config)]


def _last_dim(shape: tuple[int, ...]) -> MatrixDims:
    """Return the view with the last dim as columns and the others as rows."""
    dims = tuple(range(len(shape)))
    return dims[:-1], dims[-1:]
