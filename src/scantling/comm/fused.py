"""The codec's work on blocks on a GPU, one launch a channel, by the kernels of `kernels/blocks_gpu.py`.

What `Channel.cut`, `dct`, `Section.select`, `Channel.paste` and `Grid.add` do in some operations for each parameter,
with a pass through memory for each. Without Triton, or with SCANTLING_NATIVE=0, those do it on a GPU too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scantling.comm import dct
from scantling.numerics.bits import width_for
from scantling.numerics.tables import FLOATS, Table, device_of, has_kernels, owners_of, triton_dtype
from scantling.numerics.torch_private import foreach_zero_

if TYPE_CHECKING:
    from scantling.comm.channels import Channel

DEVICES = ("cuda",)
FIELDS = ("tensor", "gradient", "first", "rows", "cols", "down", "across")
"""Of a parameter in the table: addresses of the tensor and of its gradient, its first block, the sides of its matrices
in numbers and in blocks."""
MOST_SIDE = 64
"""Of a block that a program holds."""
MOST_TERMS = 64
"""Coefficients of a block that are transformed back one by one."""
_LEAST_SIDE = 16
"""Of the factors of a product."""


def can_select(channel: Channel, residuals: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Whether `select` knows these tensors of a channel's members."""
    if not _knows(channel, residuals) or channel.kind.section.is_dense:
        return False
    dtypes = {gradient.dtype for gradient in gradients}
    return len(dtypes) == 1 and dtypes <= set(FLOATS) and all(map(Tensor.is_contiguous, gradients))


def select(channel: Channel, residuals: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Take gradients into residuals, r <- g + decay r, and select from them what the channel sends.

    Args:
        channel: whose members' tensors these are, in their order.
        residuals: fp32; overwritten.
        gradients: of one dtype.

    Returns:
        Index and values, as of `Section.select`.
    """
    from scantling.comm.kernels import blocks_gpu as kernels

    kind, device = channel.kind, residuals[0].device
    plan = _plan_of(channel, device)
    index = torch.empty(channel.count, kind.section.kept, dtype=torch.int64, device=device)
    values = torch.empty(channel.count, kind.section.kept, device=device)
    table = plan.selecting.send(_fields(channel, residuals, gradients), device)
    with device_of(table):
        kernels.select[(channel.count,)](
            *(table, plan.owners, plan.down, plan.across, index, values, kind.section.kept, kind.decay),
            gradient=triton_dtype(gradients[0].dtype),
            transformed=kind.transformed,
            precision=_precision(channel),
            aligned=_are_aligned(channel, [*residuals, *gradients]),
            **_shape(channel),
        )
    return index, values


def can_add(channel: Channel, values: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether `add` knows these tensors of a channel's members."""
    return _knows(channel, tensors) and (not channel.kind.transformed or values.shape[1] <= MOST_TERMS)


def add(
    channel: Channel, index: Tensor, values: Tensor, alpha: float, tensors: Sequence[Tensor], *, begins: bool = False
) -> None:
    """Add what a section sent, or several did beside each other, times alpha, to tensors of a channel's members.

    Args:
        channel: whose members' tensors these are, in their order.
        index, values: (blocks, count), as of `Section.select`, `kept` of each sender.
        alpha: factor.
        tensors: fp32.
        begins: write in place of what is there, which need not be set.
    """
    from scantling.comm.kernels import blocks_gpu as kernels

    kind, device = channel.kind, tensors[0].device
    plan = _plan_of(channel, device)
    sent = plan.beginning if begins else plan.adding
    table = sent.send(_fields(channel, tensors, ()), device)
    index, values = index.contiguous(), values.contiguous()
    own, count = (channel.count,), values.shape[1]
    with device_of(table):
        if kind.transformed:
            kernels.add_transformed[own](
                *(table, plan.owners, plan.down, plan.across, index, values, count, alpha),
                begins=begins,
                precision=_precision(channel),
                aligned=_are_aligned(channel, tensors),
                **_shape(channel),
            )
            return
        if begins:
            foreach_zero_(list(tensors))
        kept, size = kind.section.kept, 1 << width_for(kind.section.kept)
        for first in range(0, count, kept):  # one sender at a time
            kernels.add_numbers[own](
                *(table, plan.owners, index, values, count, first, kept, alpha, kind.height, kind.width, size)
            )


class _Plan(NamedTuple):
    """Of a channel on a device: the parameter of each block, both bases, and the tables of its launches."""

    owners: Tensor
    down: Tensor
    across: Tensor
    selecting: Table
    beginning: Table
    adding: Table


@lru_cache(maxsize=1024)
def _plan_of(channel: Channel, device: torch.device) -> _Plan:
    shape = _shape(channel)
    owners = owners_of([member.grid.count for member in channel.members], device)
    down = _padded_basis(shape["height"], shape["down"], device)
    across = _padded_basis(shape["width"], shape["across"], device)
    return _Plan(owners, down, across, Table(), Table(), Table())


def _padded_basis(side: int, room: int, device: torch.device) -> Tensor:
    basis = dct.basis(side, device, torch.float32)
    return torch.nn.functional.pad(basis, (0, room - side, 0, room - side)).contiguous()


def _shape(channel: Channel) -> dict[str, int]:
    """Sides of blocks, and powers of 2 that hold them."""
    height, width = channel.kind.height, channel.kind.width
    down, across = (max(_LEAST_SIDE, 1 << width_for(side)) for side in (height, width))
    return {"height": height, "width": width, "down": down, "across": across}


def _fields(channel: Channel, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    grids = [member.grid for member in channel.members]
    firsts = list(accumulate((grid.count for grid in grids), initial=0))[:-1]
    addresses = [gradient.data_ptr() for gradient in gradients] or [0] * len(grids)
    return np.array(
        [
            (tensor.data_ptr(), address, first, grid.rows, grid.cols, grid.down, grid.across)
            for tensor, address, first, grid in zip(tensors, addresses, firsts, grids, strict=True)
        ],
        dtype=np.int64,
    )


def _knows(channel: Channel, tensors: Sequence[Tensor]) -> bool:
    kind = channel.kind
    return (
        bool(tensors)
        and tensors[0].device.type in DEVICES
        and kind.is_matrix
        and max(kind.height, kind.width) <= MOST_SIDE
        and all(tensor.dtype == torch.float32 for tensor in tensors)
        and all(member.grid.lies_flat(tensor) for member, tensor in zip(channel.members, tensors, strict=True))
        and has_kernels(tensors[0].device)
    )


def _are_aligned(channel: Channel, tensors: Sequence[Tensor]) -> bool:
    """Whether four numbers can be read at a time."""
    sides = [channel.kind.width, *(member.grid.cols for member in channel.members)]
    return all(side % 4 == 0 for side in sides) and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _precision(channel: Channel) -> str:
    """Of products: what rounds values to few bits anyway, and loses from the residual what it sent, needs no more."""
    return "ieee" if torch.version.hip or channel.kind.section.values in ("fp32", "bf16") else "tf32"
