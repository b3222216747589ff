"""One exchange of coefficients between all processes, in one of three ways.

    all_gather   every process gets what all others send: (N - 1) |m| bytes each, one turn (arXiv 2411.19870)
    owner        process j owns a share of 1/N of the blocks: it is sent what all have of them, takes the mean, selects
                 again, and tells everybody: (N - 1)/N (|m| + |m'|) bytes each, two turns, whatever N is
    whole        nothing is selected: an all-reduce of everything, 2 (N - 1)/N bytes for each of its bytes, after a
                 gather of the headers; for links that are faster than the selection

In all, all processes compute the mean from the same bytes in the same order, so that it is the same to the last bit.
A message that is marked invalid (NaN or Inf at its sender) is left out of the mean.

What an owner does not select was not applied, and stays in the residuals it came from. What an owner loses when it
rounds the mean, e, it takes into its own residual N times, so that the mean of the residuals over all processes loses
exactly what was applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from scantling.comm.codec.block_group import BlockGroup, BlockSpec
from scantling.comm.codec.message import HEADER_BYTES, Header, check_headers, pack_message, unpack_messages
from scantling.comm.codec.topk import TopKCodec
from scantling.comm.transport.group import ReplicaGroup
from scantling.errors import NonFiniteError

Strategy: TypeAlias = Literal["all_gather", "owner", "dense"]
Sparse: TypeAlias = tuple[Tensor | None, Tensor]
"""Coefficients of blocks: places (count, k), None for all of them, and values (count, k)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one channel's coefficients.

    Attributes:
        mean: over all valid processes; a place may occur more than once, its values are then added.
        accepted: those of this process that are in the mean, which its residual loses; None where it was left out.
        gained: what this process takes into its residual as an owner; None where it takes nothing.
    """

    mean: Sparse
    applied: Sparse | None
    owner_error: Sparse | None = None


def exchange(
    replicas: ReplicaGroup,
    strategy: Strategy,
    block_groups: Sequence[BlockGroup],
    selected: Sequence[Sparse],
    header: Header,
    *,
    mean_over_senders: bool,
) -> tuple[list[Outcome], list[int]]:
    """Exchange what was selected in each channel. Collectives: those of the way.

    Args:
        replicas: to the other processes.
        way: all_gather, owner or whole.
        channels: the same on all processes.
        selected: coefficients of this process, see `Section.select`; of zeros where its header is not valid. With whole
            of the dtype that travels; they become the mean.
        header: of this process.
        by_senders: whether the mean of a coefficient is over the processes that sent it, as in the published code, and
            not over all. With all_gather alone.

    Returns:
        What became of each channel, and the ranks that were left out.

    Raises:
        NonFiniteError: no process has a valid message.
        PayloadError: a message that is damaged, or of another step or run.
    """
    if strategy == "dense":
        return _in_full(replicas, selected, header)
    if strategy == "owner":
        return _by_owners(replicas, block_groups, selected, header)
    packed = [block_group.spec.codec.pack(*one) for block_group, one in zip(block_groups, selected, strict=True)]
    headers, bodies = unpack_messages(replicas.all_gather(pack_message(header, torch.cat(packed))))
    valid = _valid(headers, header)
    sizes = [block_group.num_bytes for block_group in block_groups]
    found = [torch.split(bodies[rank], sizes) for rank in valid]
    outcomes = []
    for place, block_group in enumerate(block_groups):
        codec = block_group.spec.codec
        parts = [
            codec.as_received(*selected[place]) if rank == header.rank else codec.unpack(body[place], block_group.count)
            for rank, body in zip(valid, found, strict=True)
        ]
        applied = parts[valid.index(header.rank)] if header.rank in valid else None
        outcomes.append(Outcome(_mean(block_group.spec, parts, mean_over_senders=mean_over_senders), applied))
    return outcomes, _left_out(headers)


def _in_full(replicas: ReplicaGroup, selected: Sequence[Sparse], header: Header) -> tuple[list[Outcome], list[int]]:
    device = selected[0][1].device if selected else None
    headers, _ = unpack_messages(
        replicas.all_gather(pack_message(header, torch.empty(0, dtype=torch.uint8, device=device)))
    )
    valid = _valid(headers, header)
    outcomes = []
    for _, values in selected:
        mean = replicas.all_reduce_mean(values)
        if len(valid) < replicas.world_size:
            mean *= replicas.world_size / len(valid)
        outcomes.append(Outcome((None, mean), None))
    return outcomes, _left_out(headers)


def _by_owners(
    replicas: ReplicaGroup, block_groups: Sequence[BlockGroup], selected: Sequence[Sparse], header: Header
) -> tuple[list[Outcome], list[int]]:
    shares = [_share(block_group, replicas.world_size) for block_group in block_groups]
    parted = [_parted(one, share, replicas.world_size) for one, share in zip(selected, shares, strict=True)]
    packed = [
        [block_group.spec.codec.pack(*parts[rank]) for block_group, parts in zip(block_groups, parted, strict=True)]
        for rank in range(replicas.world_size)
    ]
    headers, bodies = unpack_messages(replicas.all_to_all([pack_message(header, torch.cat(each)) for each in packed]))
    valid = _valid(headers, header)
    sizes = [block_group.spec.codec.num_bytes(share) for block_group, share in zip(block_groups, shares, strict=True)]
    found = [torch.split(bodies[rank], sizes) for rank in valid]
    own, exact = [], []
    for place, (block_group, share) in enumerate(zip(block_groups, shares, strict=True)):
        codec = block_group.spec.codec
        total = torch.zeros(share, codec.size, dtype=torch.float32, device=bodies[0].device)
        for body in found:
            codec.add(*codec.unpack(body[place], share), to=total)
        index, values = _back(codec).select(total / len(valid))
        exact.append(values)
        own.append(_back(codec).pack(index, values))
    headers_back, answers = unpack_messages(replicas.all_gather(pack_message(header, torch.cat(own))))
    check_headers(headers_back, header)
    sizes = [
        _back(block_group.spec.codec).num_bytes(share) for block_group, share in zip(block_groups, shares, strict=True)
    ]
    told = [torch.split(answer, sizes) for answer in answers]
    outcomes = []
    for place, (block_group, share) in enumerate(zip(block_groups, shares, strict=True)):
        back = _back(block_group.spec.codec)
        parts = [back.unpack(answer[place], share) for answer in told]
        index, values = _joined(parts, block_group.count)
        owner_error = torch.zeros(replicas.world_size, share, back.kept, dtype=torch.float32, device=values.device)
        owner_error[header.rank] = len(valid) * (exact[place] - parts[header.rank][1])
        applied = None
        if header.rank in valid:
            applied = _accepted(block_group.spec.codec, block_group.spec.codec.as_received(*selected[place]), index)
        outcomes.append(Outcome((index, values), applied, (index, owner_error.flatten(0, 1)[: block_group.count])))
    return outcomes, _left_out(headers)


def wire_bytes(block_groups: Sequence[BlockGroup], num_processes: int, strategy: Strategy) -> int:
    """Bytes that each process sends in one exchange, headers included.

    Args:
        channels: of the run.
        num_processes: N.
        way: all_gather: (N - 1) |m|. owner: (N - 1) (|m_j| + |m'_j|), the messages about the blocks of one owner.
            whole: 2 (N - 1)/N of everything, and headers.
    """
    if num_processes < 2:
        return 0
    if strategy == "all_gather":
        return (num_processes - 1) * (HEADER_BYTES + sum(block_group.num_bytes for block_group in block_groups))
    if strategy == "dense":
        turns = 2 * (num_processes - 1)
        return (num_processes - 1) * HEADER_BYTES + sum(
            turns * each.num_bytes // num_processes for each in block_groups
        )
    total = 2 * HEADER_BYTES
    for block_group in block_groups:
        codec, share = block_group.spec.codec, _share(block_group, num_processes)
        total += codec.num_bytes(share) + _back(codec).num_bytes(share)
    return (num_processes - 1) * total


def cheapest_strategy(block_groups: Sequence[BlockGroup], num_processes: int) -> Strategy:
    """The way that sends fewer bytes; all_gather where they are equal, since it takes one turn."""
    owner, gather = (wire_bytes(block_groups, num_processes, strategy) for strategy in ("owner", "all_gather"))
    return "owner" if owner < gather else "all_gather"


def _back(codec: TopKCodec) -> TopKCodec:
    """How an owner tells the mean: a sign alone would say too little of a mean of many."""
    return replace(codec, values="int4") if codec.values == "sign" else codec


def _share(block_group: BlockGroup, num_processes: int) -> int:
    """Blocks of a channel that each process owns; what is beyond the last block is empty."""
    return -(-block_group.count // num_processes)


def _valid(headers: Sequence[Header], own: Header) -> list[int]:
    check_headers(headers, own)
    valid = [header.rank for header in headers if header.valid]
    if not valid:
        raise NonFiniteError(
            f"step {own.step}: the gradients of all {len(headers)} processes are NaN or Inf; stopped before the update"
        )
    return valid


def _left_out(headers: Sequence[Header]) -> list[int]:
    return [header.rank for header in headers if not header.valid]


def _mean(spec: BlockSpec, parts: Sequence[Sparse], *, mean_over_senders: bool) -> Sparse:
    codec = spec.codec
    few = spec.width // 2 if spec.transformed else codec.size // 4
    if not mean_over_senders and not codec.is_dense and len(parts) * codec.kept <= few:
        places = torch.cat([index for index, _ in parts if index is not None], dim=1)
        return places, torch.cat([values for _, values in parts], dim=1) / len(parts)
    total = parts[0][1].new_zeros(len(parts[0][1]), codec.size)
    senders = torch.zeros_like(total) if mean_over_senders else None
    for index, values in parts:  # rank by rank: no two additions to one place at a time, and always in one order
        codec.add(index, values, to=total)
        if senders is not None:
            codec.add(index, torch.ones_like(values), to=senders)
    return None, total.div_(len(parts) if senders is None else senders.clamp_(min=1.0))


def _parted(selected: Sparse, share: int, num_processes: int) -> list[Sparse]:
    """The coefficients of each owner's blocks, with blocks of zeros where there are no more."""
    index, values = selected
    missing = share * num_processes - len(values)
    values = torch.nn.functional.pad(values, (0, 0, 0, missing))
    if index is None:
        return [(None, part) for part in torch.split(values, share)]
    rest = torch.arange(index.shape[1], device=index.device).expand(missing, -1)
    return list(zip(torch.split(torch.cat([index, rest]), share), torch.split(values, share), strict=True))


def _joined(parts: Sequence[Sparse], count: int) -> Sparse:
    values = torch.cat([values for _, values in parts])[:count]
    indices = [index for index, _ in parts if index is not None]
    return (torch.cat(indices)[:count] if indices else None), values


def _accepted(codec: TopKCodec, sent: Sparse, told: Tensor | None) -> Sparse:
    """Of what was sent, what is among the places that were told."""
    index, values = sent
    if index is None or told is None:
        return sent
    mask = torch.zeros(len(values), codec.size, dtype=torch.bool, device=values.device).scatter_(1, told, True)
    return index, values * mask.gather(1, index)
