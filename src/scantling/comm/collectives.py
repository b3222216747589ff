"""Exchange of selected coefficients between all replicas, by one of three strategies.

    all_gather   every replica gets the messages of all others: (N - 1) |m| bytes each (arXiv 2411.19870)
    owner        replica j owns 1/N of the blocks: it receives all coefficients of these, takes the mean, selects again,
                 and sends a reply to all: (N - 1)/N (|m| + |reply|) bytes each, whatever N is
    dense        no selection: an all-reduce of everything, 2 (N - 1)/N of its bytes, after an all-gather of headers;
                 for links that are faster than the selection

With each strategy all replicas compute the mean from the same bytes in the same order, so that it is bitwise equal.
Messages that are marked invalid (NaN or Inf at their sender) are left out of the mean.

Coefficients that an owner does not select are not applied and stay in the residuals of their senders. An owner adds
its own rounding error of the mean, times the number of valid senders, to its residual, so that all residuals together
lose the applied mean once for each valid sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from scantling.comm.codec import triton
from scantling.comm.codec.block_group import BlockGroup, BlockSpec
from scantling.comm.codec.message import HEADER_BYTES, Header, check_headers, pack_message, unpack_messages
from scantling.comm.codec.topk import TopKCodec
from scantling.comm.config import Strategy
from scantling.comm.transport.group import ReplicaGroup
from scantling.errors import NonFiniteError

Sparse: TypeAlias = tuple[Tensor | None, Tensor]
"""Coefficients of blocks: indices (count, k), None for all of them, and values (count, k)."""
Result: TypeAlias = "tuple[list[Outcome], list[int]]"
"""The outcome of each block group, and the ranks whose messages were invalid."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the exchange of one block group.

    Attributes:
        mean: over all valid replicas; values of equal indices are to be added.
        applied: this replica's coefficients that are part of the mean, to be subtracted from its residuals; None if its
            message was invalid.
        owner_error: rounding error of the mean, to be added to this replica's residuals; None except for owners.
    """

    mean: Sparse
    applied: Sparse | None
    owner_error: Sparse | None = None


def exchange_coefficients(
    replicas: ReplicaGroup,
    strategy: Strategy,
    block_groups: Sequence[BlockGroup],
    selected: Sequence[Sparse],
    header: Header,
    *,
    mean_over_senders: bool,
) -> Result:
    """Exchange the selected coefficients of each block group. Collectives: those of the strategy.

    Args:
        replicas: the group of all replicas.
        strategy: all_gather, owner or dense.
        block_groups: the same on all replicas.
        selected: this replica's coefficients, see `TopKCodec.select`; zeros if its header is invalid. With dense, in
            the dtype to send; they are overwritten by the mean.
        header: of this replica.
        mean_over_senders: True for the mean of a coefficient over the replicas that sent it, as in the published code,
            instead of over all. With all_gather only.

    Raises:
        NonFiniteError: no replica has a valid message.
        PayloadError: a message is damaged, or of another step or run.
    """
    if strategy == "dense":
        return _exchange_dense(replicas, selected, header)
    if strategy == "owner":
        return _exchange_by_owners(replicas, block_groups, selected, header)
    # all_gather: one message with the blocks of all groups
    packed = [each.spec.codec.pack(*part) for each, part in zip(block_groups, selected, strict=True)]
    headers, bodies = unpack_messages(replicas.all_gather(pack_message(header, torch.cat(packed))))
    valid = _valid_ranks(headers, header)
    sizes = [each.num_bytes for each in block_groups]
    messages = [torch.split(bodies[rank], sizes) for rank in valid]
    outcomes = []
    for number, block_group in enumerate(block_groups):
        codec = block_group.spec.codec
        # On a CPU it is cheaper to quantize this replica's own values than to unpack them.
        quantizes_own = not triton.can_run(selected[number][1])
        parts = [
            codec.round_trip(*selected[number])
            if quantizes_own and rank == header.rank
            else codec.unpack(message[number], block_group.count)
            for rank, message in zip(valid, messages, strict=True)
        ]
        applied = parts[valid.index(header.rank)] if header.rank in valid else None
        outcomes.append(Outcome(_mean(block_group.spec, parts, over_senders=mean_over_senders), applied))
    return outcomes, _invalid_ranks(headers)


def _exchange_dense(replicas: ReplicaGroup, selected: Sequence[Sparse], header: Header) -> Result:
    device = selected[0][1].device if selected else None
    # An all-reduce carries no headers: gather these first, to know which ranks are valid.
    message = pack_message(header, torch.empty(0, dtype=torch.uint8, device=device))
    headers, _ = unpack_messages(replicas.all_gather(message))
    valid = _valid_ranks(headers, header)
    outcomes = []
    for _, values in selected:
        mean = replicas.all_reduce_mean(values)
        if len(valid) < replicas.world_size:  # invalid replicas sent zeros
            mean *= replicas.world_size / len(valid)
        outcomes.append(Outcome((None, mean), None))
    return outcomes, _invalid_ranks(headers)


def _exchange_by_owners(
    replicas: ReplicaGroup, block_groups: Sequence[BlockGroup], selected: Sequence[Sparse], header: Header
) -> Result:
    world_size = replicas.world_size
    codecs = [each.spec.codec for each in block_groups]
    shares = [_blocks_per_owner(each, world_size) for each in block_groups]
    # 1. Send to each owner the coefficients of its blocks.
    parts = [_split_by_owner(each, share, world_size) for each, share in zip(selected, shares, strict=True)]
    messages = [
        pack_message(header, torch.cat([codec.pack(*part[rank]) for codec, part in zip(codecs, parts, strict=True)]))
        for rank in range(world_size)
    ]
    headers, bodies = unpack_messages(replicas.all_to_all(messages))
    valid = _valid_ranks(headers, header)
    sizes = [codec.num_bytes(share) for codec, share in zip(codecs, shares, strict=True)]
    received = [torch.split(bodies[rank], sizes) for rank in valid]
    # 2. As an owner, take the mean of the valid messages, and select from it again.
    reply_codecs = [_reply_codec(codec) for codec in codecs]
    own_reply, exact_means = [], []
    for number, (codec, reply_codec, share) in enumerate(zip(codecs, reply_codecs, shares, strict=True)):
        coefficients = [codec.unpack(message[number], share) for message in received]
        index, values = _select_again(block_groups[number], reply_codec, coefficients)
        exact_means.append(values)
        own_reply.append(reply_codec.pack(index, values))
    # 3. Send the reply to all replicas.
    reply_headers, replies = unpack_messages(replicas.all_gather(pack_message(header, torch.cat(own_reply))))
    # A rank with invalid gradients still replies as an owner.
    check_headers(reply_headers, header)
    sizes = [codec.num_bytes(share) for codec, share in zip(reply_codecs, shares, strict=True)]
    split_replies = [torch.split(reply, sizes) for reply in replies]
    # 4. Join the replies of all owners, and find this replica's part of the mean.
    outcomes = []
    for number, (block_group, codec, share) in enumerate(zip(block_groups, reply_codecs, shares, strict=True)):
        means = [codec.unpack(reply[number], share) for reply in split_replies]
        index, values = _concatenate(means, block_group.count)
        # Senders subtract len(valid) times the exact mean in total; the owner adds back what rounding lost.
        error = torch.zeros(world_size, share, codec.k, dtype=torch.float32, device=values.device)
        error[header.rank] = len(valid) * (exact_means[number] - means[header.rank][1])
        applied = None
        if header.rank in valid:
            applied = _mask_unselected(codecs[number], codecs[number].round_trip(*selected[number]), index)
        outcomes.append(Outcome((index, values), applied, (index, error.flatten(0, 1)[: block_group.count])))
    return outcomes, _invalid_ranks(headers)


def wire_bytes(block_groups: Sequence[BlockGroup], world_size: int, strategy: Strategy) -> int:
    """Return the bytes that each replica sends in one exchange, headers included.

    Args:
        block_groups: all of them.
        world_size: number of replicas, N.
        strategy: all_gather: (N - 1) |m|. owner: (N - 1) (|m_j| + |reply_j|), the messages about one owner's blocks.
            dense: 2 (N - 1)/N of everything, and headers.
    """
    if world_size < 2:
        return 0
    others = world_size - 1
    if strategy == "all_gather":
        return others * (HEADER_BYTES + sum(each.num_bytes for each in block_groups))
    if strategy == "dense":
        return others * HEADER_BYTES + sum(2 * others * each.num_bytes // world_size for each in block_groups)
    # owner: an all-to-all and an all-gather, each with a header
    total = 2 * HEADER_BYTES
    for each in block_groups:
        codec, share = each.spec.codec, _blocks_per_owner(each, world_size)
        total += codec.num_bytes(share) + _reply_codec(codec).num_bytes(share)
    return others * total


def cheapest_strategy(block_groups: Sequence[BlockGroup], world_size: int) -> Strategy:
    """Return the strategy that sends fewer bytes; all_gather if they are equal, since it takes one collective."""
    owner, gather = (wire_bytes(block_groups, world_size, strategy) for strategy in ("owner", "all_gather"))
    return "owner" if owner < gather else "all_gather"


def _reply_codec(codec: TopKCodec) -> TopKCodec:
    """Return the codec of the owner's reply.

    One bit is too coarse for the largest elements of a mean, so their signs become int4. Signs of all elements stay
    signs: the error of each goes into the residual of the owner.
    """
    return replace(codec, values="int4") if codec.values == "sign" and not codec.is_dense else codec


def _blocks_per_owner(block_group: BlockGroup, world_size: int) -> int:
    """Return the number of blocks that each replica owns; the last owner's are padded with empty blocks."""
    return -(-block_group.count // world_size)


def _valid_ranks(headers: Sequence[Header], own: Header) -> list[int]:
    check_headers(headers, own)
    valid = [header.rank for header in headers if header.valid]
    if not valid:
        raise NonFiniteError(
            f"step {own.step}: the gradients of all {len(headers)} processes are NaN or Inf; stopped before the update"
        )
    return valid


def _invalid_ranks(headers: Sequence[Header]) -> list[int]:
    return [header.rank for header in headers if not header.valid]


def _mean(spec: BlockSpec, parts: Sequence[Sparse], *, over_senders: bool) -> Sparse:
    codec = spec.codec
    # With few coefficients per block, decoding them sparsely is cheaper than adding up whole blocks.
    most = spec.width // 2 if spec.transformed else codec.size // 4
    if triton.can_run(parts[0][1]):  # a kernel needs no whole blocks
        most = codec.size * len(parts)
    if not over_senders and not codec.is_dense and len(parts) * codec.k <= most:
        indices, values = _side_by_side(parts)
        return indices, values / len(parts)
    total = parts[0][1].new_zeros(len(parts[0][1]), codec.size)
    senders = torch.zeros_like(total) if over_senders else None
    for index, values in parts:  # one rank at a time: distinct indices, and a fixed order of sums
        codec.add(index, values, to=total)
        if senders is not None:
            codec.add(index, torch.ones_like(values), to=senders)
    # At least 1: a coefficient that no rank sent stays 0.
    return None, total.div_(len(parts) if senders is None else senders.clamp_(min=1.0))


def _side_by_side(parts: Sequence[Sparse]) -> tuple[Tensor, Tensor]:
    """Return the coefficients of several senders in one row for each block: (count, senders * k)."""
    indices = torch.cat([index for index, _ in parts if index is not None], dim=1)
    return indices, torch.cat([values for _, values in parts], dim=1)


def _select_again(block_group: BlockGroup, codec: TopKCodec, parts: Sequence[Sparse]) -> Sparse:
    """Return the largest coefficients of the mean over the senders of a part of the blocks."""
    first = parts[0][1]
    if triton.can_select_again(block_group, first):
        return triton.select_again(block_group, *_side_by_side(parts), len(parts), codec.k)
    # (share, size) fp32; ranks are added in ascending order.
    total = torch.zeros(len(first), codec.size, dtype=torch.float32, device=first.device)
    for index, values in parts:
        codec.add(index, values, to=total)
    return codec.select(total / len(parts))


def _split_by_owner(selected: Sparse, share: int, world_size: int) -> list[Sparse]:
    """Return the coefficients of each owner's blocks, padded with blocks of zeros."""
    index, values = selected
    missing = share * world_size - len(values)
    values = torch.nn.functional.pad(values, (0, 0, 0, missing))
    if index is None:
        return [(None, part) for part in torch.split(values, share)]
    # Padded blocks need valid indices too: ascending and distinct.
    padding = torch.arange(index.shape[1], device=index.device).expand(missing, -1)
    return list(zip(torch.split(torch.cat([index, padding]), share), torch.split(values, share), strict=True))


def _concatenate(parts: Sequence[Sparse], count: int) -> Sparse:
    """Return the first `count` blocks of all parts."""
    values = torch.cat([values for _, values in parts])[:count]
    indices = [index for index, _ in parts if index is not None]
    return (torch.cat(indices)[:count] if indices else None), values


def _mask_unselected(codec: TopKCodec, sent: Sparse, selected: Tensor | None) -> Sparse:
    """Return the coefficients we sent, with zeros where the owner did not select their index."""
    index, values = sent
    if index is None or selected is None:
        return sent
    if triton.can_run(values):
        return index, triton.mask_unselected(index, values, selected)
    # (count, size), True for the coefficients of the mean
    mask = torch.zeros(len(values), codec.size, dtype=torch.bool, device=values.device).scatter_(1, selected, True)
    return index, values * mask.gather(1, index)
