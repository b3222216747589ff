"""Messages: a header and a body.

    magic 4 | version 2 | valid 2 | epoch 4 | step 4 | rank 4 | configuration 4 | checksum 8

The header has 32 bytes, little-endian. `epoch` is the id of the membership (quorum). `valid` is 0 if the sender's
gradients are NaN or Inf: its message is then ignored. The checksum covers all other bytes of the message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scantling.comm.codec import triton
from scantling.errors import PayloadError
from scantling.numerics.bits import checksum

MAGIC, VERSION = b"SCTL", 2
_FORMAT = struct.Struct("<4sHHIIII")
HEADER_BYTES = _FORMAT.size + 8
_ADVICE = "If one rank changed options, froze parameters or loaded a state, all ranks must do so before the same step"


@dataclass(frozen=True, slots=True)
class Header:
    """Sender, step and validity of a message.

    Attributes:
        valid: True if the body is to be used.
        epoch: id of the membership.
        step: the sender's step.
        rank: the sender's rank in its group.
        configuration: hash of the options and shapes that all replicas must share.
    """

    valid: bool
    epoch: int
    step: int
    rank: int
    configuration: int


def pack_message(header: Header, body: Tensor) -> Tensor:
    """Return a message, (`HEADER_BYTES` + n,) uint8, with a body of n bytes."""
    # Fields have 32 bits: the step wraps around, and receivers compare it modulo 2^32.
    fields = (header.epoch, header.step & 0xFFFFFFFF, header.rank, header.configuration)
    head = _FORMAT.pack(MAGIC, VERSION, int(header.valid), *fields)
    front = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(body.device, non_blocking=True)
    message = torch.cat([front, front.new_zeros(HEADER_BYTES - _FORMAT.size), body])
    message[_FORMAT.size : HEADER_BYTES] = _message_checksum(message).view(torch.uint8)
    return message


def unpack_messages(messages: Sequence[Tensor]) -> tuple[list[Header], list[Tensor]]:
    """Return headers and bodies of messages; the headers take one copy to the host.

    Raises:
        PayloadError: a message is damaged or has another format.
    """
    # Check lengths first: the slices below assume a full header.
    for sender, message in enumerate(messages):
        if message.numel() < HEADER_BYTES:
            raise PayloadError(f"rank {sender} sent {message.numel()} bytes, less than a header. {_ADVICE}")
    # Verify all checksums on the device, then copy headers and results to the host at once.
    bodies = [message[HEADER_BYTES:] for message in messages]
    sums = torch.stack([_message_checksum(message) for message in messages])
    heads = torch.stack([message[:HEADER_BYTES] for message in messages])
    wanted = heads[:, _FORMAT.size :].clone().view(torch.int64)
    rows = torch.cat([heads, (sums == wanted).to(torch.uint8)], dim=1).cpu()
    parsed = []
    for sender, row in enumerate(rows):
        magic, version, valid, epoch, step, rank, configuration = _FORMAT.unpack(bytes(row[: _FORMAT.size].tolist()))
        # Before the checksum: a message of another version should be reported as such.
        if magic != MAGIC or version != VERSION:
            sent = f"{magic!r} of version {version}, not {MAGIC!r} of version {VERSION}"
            raise PayloadError(f"rank {sender} sent {sent}. {_ADVICE}")
        if not row[-1]:
            raise PayloadError(f"the message of rank {sender} was damaged in transit: its checksum is wrong")
        parsed.append(Header(bool(valid), epoch, step, rank, configuration))
    return parsed, bodies


def _message_checksum(message: Tensor) -> Tensor:
    """Return the checksum of all bytes but those of the checksum: (1,) int64."""
    if triton.can_run(message):
        return triton.message_checksum(message, _FORMAT.size)
    return checksum(torch.cat([message[: _FORMAT.size], message[HEADER_BYTES:]]))


def check_headers(headers: Sequence[Header], own: Header) -> None:
    """Raise if the messages of all ranks do not belong to one step of one run.

    Args:
        headers: of ranks 0, 1, and so on.
        own: header of this rank.

    Raises:
        PayloadError: names the rank and the field that differs.
    """
    for sender, header in enumerate(headers):
        compared = {
            "rank": (header.rank, sender),
            "epoch": (header.epoch, own.epoch),
            "step": (header.step, own.step & 0xFFFFFFFF),
            "configuration": (f"{header.configuration:08x}", f"{own.configuration:08x}"),
        }
        for name, (theirs, ours) in compared.items():
            if theirs != ours:
                text = f"rank {sender} sent a message of {name} {theirs}; rank {own.rank} expects {ours}"
                raise PayloadError(f"{text}. {_ADVICE}")
