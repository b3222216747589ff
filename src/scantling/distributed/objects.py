"""Collectives of JSON values and arrays; received values cannot run code.

The object collectives of `torch.distributed` send pickles, which can run code when they are loaded.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scantling.numerics.torch_private import default_group_devices

DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
"""Dtypes by their names in messages and files, such as `float32`."""


def to_json_types(value: Any) -> Any:
    """Return a value as it is after a JSON round trip: tuples as lists, keys as strings.

    Raises:
        TypeError: the value is not JSON.
    """
    return json.loads(json.dumps(value))


def broadcast_json(value: Any, group: Any = None) -> Any:
    """Return the JSON value of rank 0 on every rank. Collectives: two broadcasts.

    Args:
        value: the value to send on rank 0; ignored on other ranks.
        group: gloo group of all ranks; None for the default group.
    """
    device = _device(group)
    content = _to_bytes(json.dumps(value).encode(), device) if dist.get_rank() == 0 else None
    # send the length first: receivers need it to allocate the buffer
    length = torch.tensor([0 if content is None else content.numel()], device=device)
    dist.broadcast(length, src=0, group=group)
    if content is None:
        content = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(content, src=0, group=group)
    return json.loads(_from_bytes(content))


def broadcast_tensors(tensors: dict[str, torch.Tensor] | None, src: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one rank on every rank, on the CPU. Collectives: two all-gathers, a broadcast per tensor.

    Args:
        tensors: the tensors to send on rank `src`; ignored on other ranks.
        src: the sending rank.
    """
    sent = list(tensors.items()) if tensors is not None and dist.get_rank() == src else []
    headers = [[key, str(each.dtype).removeprefix("torch."), list(each.shape)] for key, each in sent]
    # send keys, dtypes and shapes first, so that receivers can allocate
    headers = all_gather_json(headers)[src]
    received: dict[str, torch.Tensor] = {}
    for index, (key, dtype, shape) in enumerate(headers):
        tensor = sent[index][1].cpu().contiguous() if sent else torch.empty(shape, dtype=DTYPES[dtype])
        # all ranks know the shape, so all skip the broadcast of an empty tensor
        if tensor.numel():
            # send bytes, because backends do not support every dtype: shape -> (nbytes,)
            content = tensor.reshape(-1).view(torch.uint8).to(_device())
            dist.broadcast(content, src=src)
            tensor = content.cpu().view(DTYPES[dtype]).reshape(shape)
        received[key] = tensor
    return received


def all_gather_json(value: Any, group: Any = None) -> list[Any]:
    """Return the JSON values of all ranks, in order; `group` as in `broadcast_json`. Collectives: two all-gathers."""
    return [json.loads(each) for each in _gather_bytes(json.dumps(value).encode(), group)]


def all_gather_arrays(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of all ranks, in order; shapes may differ. Collectives: four all-gathers."""
    # `dtype.str` includes the byte order, such as `<f4`
    headers = all_gather_json([array.dtype.str, array.shape])
    parts = _gather_bytes(np.ascontiguousarray(array).tobytes())
    return [
        np.frombuffer(part, dtype=np.dtype(dtype)).reshape(shape)
        for part, (dtype, shape) in zip(parts, headers, strict=True)
    ]


def _gather_bytes(content: bytes, group: Any = None) -> list[bytes]:
    device, world_size = _device(group), dist.get_world_size()
    # `all_gather` needs equal sizes: exchange the lengths, pad to the longest, cut afterwards
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(content)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    # all ranks see the same lengths, so all skip the second collective
    if not longest:
        return [b""] * world_size
    own = torch.zeros(longest, dtype=torch.uint8, device=device)
    if content:
        own[: len(content)] = _to_bytes(content, device)
    parts = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(parts, own, group=group)
    return [_from_bytes(part[: int(length)]) for part, length in zip(parts, lengths, strict=True)]


def _to_bytes(content: bytes, device: torch.device) -> torch.Tensor:
    # copy into a bytearray: `frombuffer` warns about read-only memory
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _from_bytes(content: torch.Tensor) -> bytes:
    return content.cpu().numpy().tobytes()


def _device(group: Any = None) -> torch.device:
    """Return a device that a process group supports; a default group with NCCL only needs the GPU."""
    if group is not None:
        return torch.device("cpu")
    types = default_group_devices()
    if torch.device("cpu") in types:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if torch.device("cuda") in types else types[0]
