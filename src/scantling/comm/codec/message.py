"""One message: a header, and sections behind it.

    magic 4 | version 2 | valid 2 | epoch 4 | step 4 | rank 4 | configuration 4 | checksum 8

32 bytes, little-endian. `valid` is 0 where the sender has nothing to say, since its gradients are NaN or Inf. The
checksum is over all of the message but itself.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scantling.errors import PayloadError
from scantling.numerics.bits import checksum

MAGIC, VERSION = b"SCTL", 2
_FORMAT = struct.Struct("<4sHHIIII")
HEADER_BYTES = _FORMAT.size + 8
_ALONE = (
    "Was an option or what is frozen changed, or a state loaded, on one rank alone? All must do it before the same step"
)


@dataclass(frozen=True, slots=True)
class Header:
    """Who sent a message, when, and whether it counts.

    Attributes:
        valid: whether what follows is to be used.
        epoch: of the membership.
        step: of the sender.
        rank: of the sender in its group.
        configuration: a hash of what both sides must agree on.
    """

    valid: bool
    epoch: int
    step: int
    rank: int
    configuration: int


def pack_message(header: Header, body: Tensor) -> Tensor:
    """A message: (`HEADER_BYTES` + n,) uint8, of a body of n uint8."""
    fields = (header.epoch, header.step & 0xFFFFFFFF, header.rank, header.configuration)
    head = _FORMAT.pack(MAGIC, VERSION, int(header.valid), *fields)
    front = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(body.device, non_blocking=True)
    return torch.cat([front, checksum(torch.cat([front, body])).view(torch.uint8), body])


def unpack_messages(messages: Sequence[Tensor]) -> tuple[list[Header], list[Tensor]]:
    """Headers and bodies of messages; one copy to the host for all of them.

    Raises:
        PayloadError: one of them is damaged or no message.
    """
    for sender, message in enumerate(messages):
        if message.numel() < HEADER_BYTES:
            raise PayloadError(f"rank {sender} sent {message.numel()} bytes, which is less than a header. {_ALONE}")
    fronts = [message[: _FORMAT.size] for message in messages]
    bodies = [message[HEADER_BYTES:] for message in messages]
    sums = torch.stack([checksum(torch.cat(parts)) for parts in zip(fronts, bodies, strict=True)])
    heads = torch.stack([message[:HEADER_BYTES] for message in messages])
    wanted = heads[:, _FORMAT.size :].clone().view(torch.int64)
    facts = torch.cat([heads, (sums == wanted).to(torch.uint8)], dim=1).cpu()
    found = []
    for sender, row in enumerate(facts):
        magic, version, valid, epoch, step, rank, configuration = _FORMAT.unpack(bytes(row[: _FORMAT.size].tolist()))
        if magic != MAGIC or version != VERSION:
            sent = f"{magic!r} of version {version}, not {MAGIC!r} of version {VERSION}"
            raise PayloadError(f"rank {sender} sent {sent}. {_ALONE}")
        if not row[-1]:
            raise PayloadError(f"the message of rank {sender} was damaged on its way: its checksum is wrong")
        found.append(Header(bool(valid), epoch, step, rank, configuration))
    return found, bodies


def check_headers(headers: Sequence[Header], own: Header) -> None:
    """Whether the messages of all ranks belong to one step of one run.

    Args:
        headers: of rank 0, 1, ....
        own: of this rank.

    Raises:
        PayloadError: names the rank and what is different there.
    """
    for sender, header in enumerate(headers):
        facts = {
            "rank": (header.rank, sender),
            "epoch": (header.epoch, own.epoch),
            "step": (header.step, own.step & 0xFFFFFFFF),
            "configuration": (f"{header.configuration:08x}", f"{own.configuration:08x}"),
        }
        for name, (theirs, ours) in facts.items():
            if theirs != ours:
                text = f"rank {sender} sent a message of {name} {theirs}; rank {own.rank} expects {ours}"
                raise PayloadError(f"{text}. {_ALONE}")
