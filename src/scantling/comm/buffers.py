"""Buffers of replicas: running statistics that each gathers from data of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scantling.comm.link import link_to
from scantling.comm.shards import local
from scantling.numerics.torch_private import non_persistent_buffers


@torch.no_grad()
def average_buffers(model: nn.Module, process_group: Any = None) -> int:
    """Give all replicas the mean of their buffers, such as the running statistics of batch normalisation.

    Of the buffers that are saved, those of real numbers: others are counters and masks, which are alike. The mean of a
    buffer is over the replicas on which it is finite; where it is on none, it stays. Call it before an evaluation or a
    checkpoint, on all replicas. Collective: one all-reduce for each dtype among them.

    Args:
        model: the same on all replicas.
        process_group: of the replicas, or a mesh of one dim; default all processes.

    Returns:
        Bytes that this process sent.
    """
    link = link_to(process_group)
    link.start()
    found = [
        local(value)
        for module in model.modules()
        for name, value in module.named_buffers(recurse=False)
        if name not in non_persistent_buffers(module) and value.is_floating_point()
    ]
    for dtype in sorted({value.dtype for value in found}, key=str):
        parts = [value for value in found if value.dtype == dtype]
        sound = torch.stack([value.isfinite().all() for value in parts])
        sent = [torch.where(each, value, 0.0).flatten() for each, value in zip(sound, parts, strict=True)]
        sizes = [value.numel() for value in parts]
        *means, share = torch.split(link.mean(torch.cat([*sent, sound.to(dtype)])), [*sizes, len(parts)])
        for value, mean, number in zip(parts, means, (share.float() * link.size).round().tolist(), strict=True):
            if number:
                value.copy_(mean.view_as(value) * (link.size / number))
    return link.wire_bytes
