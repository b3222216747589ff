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

from scantling.comm.channels import Channel, Kind
from scantling.comm.payload import HEADER_BYTES, Header, check, seal, unseal
from scantling.comm.section import Section
from scantling.comm.transport.group import ReplicaGroup
from scantling.errors import NonFiniteError

Way: TypeAlias = Literal["all_gather", "owner", "whole"]
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
    accepted: Sparse | None
    gained: Sparse | None = None


def exchange(
    replicas: ReplicaGroup,
    way: Way,
    channels: Sequence[Channel],
    selected: Sequence[Sparse],
    header: Header,
    *,
    by_senders: bool,
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
    if way == "whole":
        return _in_full(replicas, selected, header)
    if way == "owner":
        return _by_owners(replicas, channels, selected, header)
    packed = [channel.kind.section.pack(*one) for channel, one in zip(channels, selected, strict=True)]
    headers, bodies = unseal(replicas.all_gather(seal(header, torch.cat(packed))))
    valid = _valid(headers, header)
    sizes = [channel.num_bytes for channel in channels]
    found = [torch.split(bodies[rank], sizes) for rank in valid]
    outcomes = []
    for place, channel in enumerate(channels):
        section = channel.kind.section
        parts = [
            section.as_received(*selected[place]) if rank == header.rank else section.unpack(body[place], channel.count)
            for rank, body in zip(valid, found, strict=True)
        ]
        accepted = parts[valid.index(header.rank)] if header.rank in valid else None
        outcomes.append(Outcome(_mean(channel.kind, parts, by_senders=by_senders), accepted))
    return outcomes, _left_out(headers)


def _in_full(replicas: ReplicaGroup, selected: Sequence[Sparse], header: Header) -> tuple[list[Outcome], list[int]]:
    device = selected[0][1].device if selected else None
    headers, _ = unseal(replicas.all_gather(seal(header, torch.empty(0, dtype=torch.uint8, device=device))))
    valid = _valid(headers, header)
    outcomes = []
    for _, values in selected:
        mean = replicas.all_reduce_mean(values)
        if len(valid) < replicas.world_size:
            mean *= replicas.world_size / len(valid)
        outcomes.append(Outcome((None, mean), None))
    return outcomes, _left_out(headers)


def _by_owners(
    replicas: ReplicaGroup, channels: Sequence[Channel], selected: Sequence[Sparse], header: Header
) -> tuple[list[Outcome], list[int]]:
    shares = [_share(channel, replicas.world_size) for channel in channels]
    parted = [_parted(one, share, replicas.world_size) for one, share in zip(selected, shares, strict=True)]
    packed = [
        [channel.kind.section.pack(*parts[rank]) for channel, parts in zip(channels, parted, strict=True)]
        for rank in range(replicas.world_size)
    ]
    headers, bodies = unseal(replicas.all_to_all([seal(header, torch.cat(each)) for each in packed]))
    valid = _valid(headers, header)
    sizes = [channel.kind.section.num_bytes(share) for channel, share in zip(channels, shares, strict=True)]
    found = [torch.split(bodies[rank], sizes) for rank in valid]
    own, exact = [], []
    for place, (channel, share) in enumerate(zip(channels, shares, strict=True)):
        section = channel.kind.section
        total = torch.zeros(share, section.size, dtype=torch.float32, device=bodies[0].device)
        for body in found:
            section.add(*section.unpack(body[place], share), to=total)
        index, values = _back(section).select(total / len(valid))
        exact.append(values)
        own.append(_back(section).pack(index, values))
    headers_back, answers = unseal(replicas.all_gather(seal(header, torch.cat(own))))
    check(headers_back, header)
    sizes = [_back(channel.kind.section).num_bytes(share) for channel, share in zip(channels, shares, strict=True)]
    told = [torch.split(answer, sizes) for answer in answers]
    outcomes = []
    for place, (channel, share) in enumerate(zip(channels, shares, strict=True)):
        back = _back(channel.kind.section)
        parts = [back.unpack(answer[place], share) for answer in told]
        index, values = _joined(parts, channel.count)
        gained = torch.zeros(replicas.world_size, share, back.kept, dtype=torch.float32, device=values.device)
        gained[header.rank] = len(valid) * (exact[place] - parts[header.rank][1])
        accepted = None
        if header.rank in valid:
            accepted = _accepted(channel.kind.section, channel.kind.section.as_received(*selected[place]), index)
        outcomes.append(Outcome((index, values), accepted, (index, gained.flatten(0, 1)[: channel.count])))
    return outcomes, _left_out(headers)


def wire_bytes(channels: Sequence[Channel], num_processes: int, way: Way) -> int:
    """Bytes that each process sends in one exchange, headers included.

    Args:
        channels: of the run.
        num_processes: N.
        way: all_gather: (N - 1) |m|. owner: (N - 1) (|m_j| + |m'_j|), the messages about the blocks of one owner.
            whole: 2 (N - 1)/N of everything, and headers.
    """
    if num_processes < 2:
        return 0
    if way == "all_gather":
        return (num_processes - 1) * (HEADER_BYTES + sum(channel.num_bytes for channel in channels))
    if way == "whole":
        turns = 2 * (num_processes - 1)
        return (num_processes - 1) * HEADER_BYTES + sum(turns * each.num_bytes // num_processes for each in channels)
    total = 2 * HEADER_BYTES
    for channel in channels:
        section, share = channel.kind.section, _share(channel, num_processes)
        total += section.num_bytes(share) + _back(section).num_bytes(share)
    return (num_processes - 1) * total


def cheaper_way(channels: Sequence[Channel], num_processes: int) -> Way:
    """The way that sends fewer bytes; all_gather where they are equal, since it takes one turn."""
    owner, gather = (wire_bytes(channels, num_processes, way) for way in ("owner", "all_gather"))
    return "owner" if owner < gather else "all_gather"


def _back(section: Section) -> Section:
    """How an owner tells the mean: a sign alone would say too little of a mean of many."""
    return replace(section, values="int4") if section.values == "sign" else section


def _share(channel: Channel, num_processes: int) -> int:
    """Blocks of a channel that each process owns; what is beyond the last block is empty."""
    return -(-channel.count // num_processes)


def _valid(headers: Sequence[Header], own: Header) -> list[int]:
    check(headers, own)
    valid = [header.rank for header in headers if header.valid]
    if not valid:
        raise NonFiniteError(
            f"step {own.step}: the gradients of all {len(headers)} processes are NaN or Inf; stopped before the update"
        )
    return valid


def _left_out(headers: Sequence[Header]) -> list[int]:
    return [header.rank for header in headers if not header.valid]


def _mean(kind: Kind, parts: Sequence[Sparse], *, by_senders: bool) -> Sparse:
    section = kind.section
    few = kind.width // 2 if kind.transformed else section.size // 4
    if not by_senders and not section.is_dense and len(parts) * section.kept <= few:
        places = torch.cat([index for index, _ in parts if index is not None], dim=1)
        return places, torch.cat([values for _, values in parts], dim=1) / len(parts)
    total = parts[0][1].new_zeros(len(parts[0][1]), section.size)
    senders = torch.zeros_like(total) if by_senders else None
    for index, values in parts:  # rank by rank: no two additions to one place at a time, and always in one order
        section.add(index, values, to=total)
        if senders is not None:
            section.add(index, torch.ones_like(values), to=senders)
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


def _accepted(section: Section, sent: Sparse, told: Tensor | None) -> Sparse:
    """Of what was sent, what is among the places that were told."""
    index, values = sent
    if index is None or told is None:
        return sent
    mask = torch.zeros(len(values), section.size, dtype=torch.bool, device=values.device).scatter_(1, told, True)
    return index, values * mask.gather(1, index)
