"""Launch the Triton kernels of `kernels.py`: one launch per block group instead of several operations per parameter.

They fuse `BlockGroup.to_blocks`, `dct`, `TopKCodec.select`, `BlockGroup.from_blocks` and `BlockGrid.scatter_add`, each
of which passes over memory. Without Triton, or with SCANTLING_NATIVE=0, a GPU uses these PyTorch versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scantling.comm.codec import dct
from scantling.numerics.bits import width_for
from scantling.numerics.device import FLOATS, DeviceTable, device_context, has_kernels, program_owners, triton_dtype
from scantling.numerics.torch_private import foreach_zero_

if TYPE_CHECKING:
    from scantling.comm.codec.block_group import BlockGroup

DEVICES = ("cuda",)
MOST_SIDE = 64
"""Largest side of a block that fits into one program."""
MOST_TERMS = 64
"""Most coefficients of a block that are scattered one by one before the inverse transform."""
_LEAST_SIDE = 16
"""Smallest side of a `tl.dot` operand."""


def can_select(block_group: BlockGroup, residuals: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Return True if `select` supports these tensors of a block group's parameters."""
    if not _is_supported(block_group, residuals) or block_group.spec.codec.is_dense:
        return False
    dtypes = {gradient.dtype for gradient in gradients}
    return len(dtypes) == 1 and dtypes <= set(FLOATS) and all(map(Tensor.is_contiguous, gradients))


def select(block_group: BlockGroup, residuals: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Add gradients to residuals, r <- g + decay r, and select the coefficients to send.

    Args:
        block_group: the tensors are those of its parameters, in order.
        residuals: fp32; overwritten.
        gradients: of one dtype.

    Returns:
        Index and values, as `TopKCodec.select`.
    """
    # Import late: the kernels need Triton, which is optional.
    from scantling.comm.codec import kernels

    spec, device = block_group.spec, residuals[0].device
    plan = _make_plan(block_group, device)
    index = torch.empty(block_group.count, spec.codec.k, dtype=torch.int64, device=device)
    values = torch.empty(block_group.count, spec.codec.k, device=device)
    table = plan.selecting.upload(_fields(block_group, residuals, gradients), device)
    with device_context(table):
        kernels.select[(block_group.count,)](
            *(table, plan.owners, plan.down, plan.across, index, values, spec.codec.k, spec.decay),
            gradient=triton_dtype(gradients[0].dtype),
            transformed=spec.transformed,
            precision=_precision(block_group),
            aligned=_are_aligned(block_group, [*residuals, *gradients]),
            **_shape(block_group),
        )
    return index, values


def can_add(block_group: BlockGroup, values: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Return True if `add` supports these tensors of a block group's parameters."""
    return _is_supported(block_group, tensors) and (not block_group.spec.transformed or values.shape[1] <= MOST_TERMS)


def add(
    block_group: BlockGroup,
    index: Tensor,
    values: Tensor,
    scale: float,
    tensors: Sequence[Tensor],
    *,
    overwrite: bool = False,
) -> None:
    """Decode coefficients of one sender or several side by side, and add them times `scale` to tensors.

    Args:
        block_group: the tensors are those of its parameters, in order.
        index, values: (blocks, senders * k).
        scale: factor.
        tensors: fp32.
        overwrite: write the tensors instead of adding to them.
    """
    from scantling.comm.codec import kernels

    spec, device = block_group.spec, tensors[0].device
    plan = _make_plan(block_group, device)
    sent = plan.overwriting if overwrite else plan.adding
    table = sent.upload(_fields(block_group, tensors, ()), device)
    index, values = index.contiguous(), values.contiguous()
    own, count = (block_group.count,), values.shape[1]
    with device_context(table):
        if spec.transformed:
            kernels.add_transformed[own](
                *(table, plan.owners, plan.down, plan.across, index, values, count, scale),
                overwrite=overwrite,
                precision=_precision(block_group),
                aligned=_are_aligned(block_group, tensors),
                **_shape(block_group),
            )
            return
        # The kernel below only adds.
        if overwrite:
            foreach_zero_(list(tensors))
        k, size = spec.codec.k, 1 << width_for(spec.codec.k)
        for first in range(0, count, k):  # one sender at a time: its indices are distinct
            kernels.add_numbers[own](
                *(table, plan.owners, index, values, count, first, k, scale, spec.height, spec.width, size)
            )


class _Plan(NamedTuple):
    """Constants of a block group on a device: the parameter of each block, both bases, and a table per launch."""

    owners: Tensor
    down: Tensor
    across: Tensor
    selecting: DeviceTable
    overwriting: DeviceTable
    adding: DeviceTable


@lru_cache(maxsize=1024)
def _make_plan(block_group: BlockGroup, device: torch.device) -> _Plan:
    shape = _shape(block_group)
    owners = program_owners([slot.grid.count for slot in block_group.slots], device)
    down = _padded_basis(shape["height"], shape["down"], device)
    across = _padded_basis(shape["width"], shape["across"], device)
    # A table per kind of launch: each is copied to the device only when its tensors change.
    return _Plan(owners, down, across, DeviceTable(), DeviceTable(), DeviceTable())


def _padded_basis(side: int, room: int, device: torch.device) -> Tensor:
    basis = dct.basis(side, device, torch.float32)
    # Zero rows and columns: the padding of a tile adds nothing to its products.
    return torch.nn.functional.pad(basis, (0, room - side, 0, room - side)).contiguous()


def _shape(block_group: BlockGroup) -> dict[str, int]:
    """Return the sides of blocks, and the powers of 2 that hold them."""
    height, width = block_group.spec.height, block_group.spec.width
    down, across = (max(_LEAST_SIDE, 1 << width_for(side)) for side in (height, width))
    return {"height": height, "width": width, "down": down, "across": across}


def _fields(block_group: BlockGroup, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    grids = [slot.grid for slot in block_group.slots]
    firsts = list(accumulate((grid.count for grid in grids), initial=0))[:-1]
    # `add` reads no gradients: their column is 0.
    addresses = [gradient.data_ptr() for gradient in gradients] or [0] * len(grids)
    return np.array(
        [
            (tensor.data_ptr(), address, first, grid.rows, grid.cols, grid.down, grid.across)
            for tensor, address, first, grid in zip(tensors, addresses, firsts, grids, strict=True)
        ],
        dtype=np.int64,
    )


def _is_supported(block_group: BlockGroup, tensors: Sequence[Tensor]) -> bool:
    spec = block_group.spec
    return (
        bool(tensors)
        and tensors[0].device.type in DEVICES
        and spec.is_matrix
        and max(spec.height, spec.width) <= MOST_SIDE
        and all(tensor.dtype == torch.float32 for tensor in tensors)
        and all(slot.grid.is_row_major(tensor) for slot, tensor in zip(block_group.slots, tensors, strict=True))
        and has_kernels(tensors[0].device)
    )


def _are_aligned(block_group: BlockGroup, tensors: Sequence[Tensor]) -> bool:
    """Return True if four elements can be read at a time."""
    # Blocks and rows must start at multiples of four elements, tensors at multiples of 16 bytes.
    sides = [block_group.spec.width, *(slot.grid.cols for slot in block_group.slots)]
    return all(side % 4 == 0 for side in sides) and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _precision(block_group: BlockGroup) -> str:
    """Return the precision of products: low-precision formats round more, and error feedback keeps their error."""
    return "ieee" if torch.version.hip or block_group.spec.codec.values in ("fp32", "bf16") else "tf32"
