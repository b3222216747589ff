"""Launch the Triton kernels of `kernels.py`: a few launches per block group, not several operations per parameter.

They fuse the passes over memory of `BlockGroup.to_blocks`, `dct`, `TopKCodec.select`, `BlockGroup.from_blocks` and
`BlockGrid.scatter_add`, and the many small operations of `TopKCodec.pack` and `unpack` and of `checksum`. Without
Triton, or with SCANTLING_NATIVE=0, a GPU uses these PyTorch versions.
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
from scantling.comm.config import RESIDUAL_ROW
from scantling.numerics.bits import width_for
from scantling.numerics.device import FLOATS, DeviceTable, device_context, has_kernels, program_owners
from scantling.numerics.torch_private import foreach_zero_

if TYPE_CHECKING:
    from scantling.comm.codec.block_group import BlockGroup, BlockSpec
    from scantling.comm.codec.topk import TopKCodec

DEVICES = ("cuda",)
MOST_SIDE = 64
"""Largest side of a block that fits into one program."""
MOST_COLUMNS = 128
"""The same for rows that are sent densely."""
_LEAST_SIDE = 16
"""Smallest side of a `tl.dot` operand."""
_MOST_TERMS = 64
"""Most coefficients in one product of an inverse transform."""
_MOST_COEFFICIENTS = 4096
"""Most coefficients of a block that one program packs."""
_CHECKSUM_WORDS = 1024
"""8-byte words of a program."""


def can_accumulate(
    block_group: BlockGroup, residuals: Sequence[Tensor] | None, gradients: Sequence[Tensor | None]
) -> bool:
    """Return True if `accumulate_and_select` supports these tensors of a block group's parameters.

    Residuals in int8 must have scales of rows that are rows of blocks.
    """
    spec, given = block_group.spec, [gradient for gradient in gradients if gradient is not None]
    tensors = given if residuals is None else residuals
    if spec.transformed if spec.codec.is_dense else residuals is None:
        return False
    return (
        _is_supported(block_group, tensors)
        and {tensor.dtype for tensor in residuals or ()} in (set(), {torch.float32}, {torch.int8})
        and (not _is_coded(residuals) or (not spec.codec.is_dense and _has_row_scales(block_group)))
        and all(gradient.dtype in FLOATS for gradient in given)
        and (residuals is not None or len(given) == len(gradients))
        and all(
            gradient is None or slot.grid.is_row_major(gradient)
            for slot, gradient in zip(block_group.slots, gradients, strict=True)
        )
    )


def accumulate_and_select(
    block_group: BlockGroup,
    residuals: Sequence[Tensor] | None,
    gradients: Sequence[Tensor | None],
    sent: Sequence[Tensor] = (),
    *,
    scales: Sequence[Tensor] = (),
    seed: int = 0,
) -> tuple[Tensor | None, Tensor]:
    """Add gradients to residuals, r <- g + decay (r - s), and select the coefficients to send.

    Args:
        block_group: the tensors are those of its parameters, in order.
        residuals: fp32, or int8 with scales; overwritten. None if the group keeps none.
        gradients: None counts as zero.
        sent: index and values of the coefficients of s, (blocks, n); only with a transform and fp32 residuals. Empty
            for none.
        scales: of int8 residuals, one for each row of each block; overwritten.
        seed: of their stochastic rounding.

    Returns:
        Index and values, as `TopKCodec.select`.
    """
    # Import late: the kernels need Triton, which is optional.
    from scantling.comm.codec import kernels

    spec = block_group.spec
    tensors = [gradient for gradient in gradients if gradient is not None] if residuals is None else residuals
    device = tensors[0].device
    plan, own = _make_plan(block_group, device), (block_group.count,)
    values = torch.empty(block_group.count, spec.codec.k, device=device)
    table = plan.selecting.upload(_fields(block_group, tensors, gradients, scales), device)
    if spec.codec.is_dense:
        with device_context(table):
            kernels.accumulate_rows[own](
                table, plan.owners, values, spec.decay, keeps=residuals is not None, **_shape(block_group)
            )
        return None, values
    index = torch.empty(block_group.count, spec.codec.k, dtype=torch.int64, device=device)
    assert not sent or (spec.transformed and not scales)
    sent_index, sent_values = sent or (index, values)
    count = sent_values.shape[1] if sent else 0
    given = [gradient for gradient in gradients if gradient is not None]
    with device_context(table):
        kernels.select[own](
            *(table, plan.owners, plan.down, plan.across, sent_index, sent_values, count),
            *(index, values, spec.codec.k, spec.decay, _mix(seed) if scales else 0),
            size=_terms(count),
            transformed=spec.transformed,
            precision=_precision(spec),
            coded=bool(scales),
            aligned=_are_aligned(block_group, [*tensors, *given]),
            **_shape(block_group),
        )
    return index, values


def can_add(block_group: BlockGroup, index: Tensor | None, tensors: Sequence[Tensor]) -> bool:
    """Return True if `add` supports these tensors of a block group's parameters."""
    return _is_supported(block_group, tensors) and not (index is None and block_group.spec.transformed)


def add(
    block_group: BlockGroup,
    index: Tensor | None,
    values: Tensor,
    scale: float,
    tensors: Sequence[Tensor],
    *,
    overwrite: bool = False,
) -> None:
    """Decode coefficients of one sender or several side by side, and add them times `scale` to tensors.

    Args:
        block_group: the tensors are those of its parameters, in order.
        index, values: (blocks, senders * k); without an index, all elements of each block.
        scale: factor.
        tensors: of any of `FLOATS`.
        overwrite: write the tensors instead of adding to them.
    """
    from scantling.comm.codec import kernels

    spec, device = block_group.spec, tensors[0].device
    plan = _make_plan(block_group, device)
    sent = plan.overwriting if overwrite else plan.adding
    table = sent.upload(_fields(block_group, tensors, ()), device)
    values = values.contiguous()
    own, count, shape = (block_group.count,), values.shape[1], _shape(block_group)
    with device_context(table):
        if index is None:
            kernels.add_rows[own](table, plan.owners, values, scale, overwrite=overwrite, **shape)
            return
        index = index.contiguous()
        if spec.transformed:
            kernels.add_transformed[own](
                *(table, plan.owners, plan.down, plan.across, index, values, count, scale),
                size=_terms(count),
                overwrite=overwrite,
                precision=_precision(spec),
                aligned=_are_aligned(block_group, tensors),
                **shape,
            )
            return
        # The kernel below only adds.
        if overwrite:
            foreach_zero_(list(tensors))
        k = spec.codec.k
        for first in range(0, count, k):  # one sender at a time: its indices are distinct
            kernels.add_numbers[own](
                *(table, plan.owners, index, values, count, first, k, scale),
                height=spec.height,
                width=spec.width,
                size=_power(k),
            )


def add_to_coded(
    block_group: BlockGroup,
    index: Tensor,
    values: Tensor,
    scale: float,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    seed: int,
) -> None:
    """Decode coefficients as `add`, and add them to int8 residuals by stochastic rounding.

    Args:
        block_group: for which `can_accumulate` holds with these residuals.
        index, values: (blocks, n).
        scale: factor.
        codes, scales: of the residuals; overwritten.
        seed: of the rounding.
    """
    from scantling.comm.codec import kernels

    plan, count = _make_plan(block_group, values.device), values.shape[1]
    table = plan.adding.upload(_fields(block_group, codes, (), scales), values.device)
    with device_context(table):
        kernels.add_to_coded[(block_group.count,)](
            *(table, plan.owners, plan.down, plan.across, index.contiguous(), values.contiguous(), count, scale),
            seed=_mix(seed),
            size=_terms(count),
            precision=_precision(block_group.spec),
            **_shape(block_group),
        )


def can_select_again(block_group: BlockGroup, like: Tensor) -> bool:
    """Return True if `select_again` and `mask_unselected` support a block group."""
    return _has_small_blocks(block_group) and not block_group.spec.codec.is_dense and can_run(like)


def select_again(block_group: BlockGroup, index: Tensor, values: Tensor, senders: int, k: int) -> tuple[Tensor, Tensor]:
    """Select the k largest elements of the mean of the coefficients that several replicas sent.

    Args:
        block_group: of the blocks, or of a part of them.
        index, values: (blocks, senders * k).
        senders: number of replicas in the mean.
        k: coefficients of each block to select.

    Returns:
        Index and values, as `TopKCodec.select`.
    """
    from scantling.comm.codec import kernels

    count, shape = len(values), _shape(block_group)
    units = [_unit_matrix(shape[side], values.device) for side in ("down", "across")]
    found = torch.empty(count, k, dtype=torch.int64, device=values.device), values.new_empty(count, k)
    with device_context(values):
        kernels.select_again[(count,)](
            *(*units, index.contiguous(), values.contiguous(), values.shape[1], float(senders), *found, k),
            size=_terms(values.shape[1]),
            **shape,
        )
    return found


def mask_unselected(index: Tensor, values: Tensor, selected: Tensor) -> Tensor:
    """Return values (blocks, n) with zeros where their index (blocks, n) is not in `selected` (blocks, k)."""
    from scantling.comm.codec import kernels

    masked, index, selected = values.clone(), index.contiguous(), selected.contiguous()
    with device_context(values):
        kernels.mask_unselected[(len(values),)](
            index, masked, selected, index.shape[1], selected.shape[1], size=_power(index.shape[1])
        )
    return masked


def can_run(like: Tensor) -> bool:
    """Return True if kernels run on the device of a tensor, such as `message_checksum`."""
    return like.device.type in DEVICES and has_kernels(like.device)


def can_pack(codec: TopKCodec, like: Tensor) -> bool:
    """Return True if `pack` and `unpack` support the blocks of a codec; those of more coefficients compile slowly."""
    _, row = (0, 0) if codec.is_dense else codec.index_layout
    return can_run(like) and codec.k <= _MOST_COEFFICIENTS and row <= 4 * _MOST_COEFFICIENTS


def pack(codec: TopKCodec, index: Tensor | None, values: Tensor) -> Tensor:
    """Return the bytes of `TopKCodec.pack`."""
    from scantling.comm.codec import kernels

    count, k = values.shape
    length = codec.num_bytes(count)
    words = torch.zeros(-(-length // 4) + 1, dtype=torch.int32, device=values.device)  # the last one stays zero
    values = values.float().contiguous()
    if count and k:
        with device_context(values):
            kernels.pack[(count,)](
                *(values if index is None else index.contiguous(), values, words, k),
                *codec.offsets(count),
                size=_power(k),
                **_format(codec),
            )
    return words.view(torch.uint8)[:length]


def unpack(codec: TopKCodec, packed: Tensor, count: int) -> tuple[Tensor | None, Tensor]:
    """Return the index and values of `TopKCodec.unpack`."""
    from scantling.comm.codec import kernels

    k, form = codec.k, _format(codec)
    values = torch.empty(count, k, device=packed.device)
    # Zeros: a kernel writes as many indices as there are bits set in the high parts.
    index = None if codec.is_dense else torch.zeros(count, k, dtype=torch.int64, device=packed.device)
    if count and k:
        with device_context(packed):
            kernels.unpack[(count,)](
                *(packed.contiguous(), values if index is None else index, values, packed.numel(), k),
                *(codec.size - 1, *codec.offsets(count)),
                size=_power(k),
                row_size=_power(form["row"]),
                **form,
            )
    return index, values


def message_checksum(message: Tensor, front: int) -> Tensor:
    """Return the checksum of a message, (1,) int64, which leaves out its own 8 bytes after those of the front."""
    from scantling.comm.codec import kernels

    total = torch.zeros(1, dtype=torch.int64, device=message.device)
    programs = -(-message.numel() // (8 * _CHECKSUM_WORDS))
    with device_context(message):
        kernels.add_checksum[(programs,)](
            message.contiguous(), message.numel(), total, front=front, size=_CHECKSUM_WORDS
        )
    return total


class _Plan(NamedTuple):
    """Constants of a block group on a device: the parameter of each block, both bases, and a table per launch.

    Without a transform, the bases are unit matrices.
    """

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
    down, across = (
        _padded_basis(shape[side], shape[room], device)
        if block_group.spec.transformed
        else _unit_matrix(shape[room], device)
        for side, room in _SIDES
    )
    # A table per kind of launch: each is copied to the device only when its tensors change.
    return _Plan(owners, down, across, DeviceTable(), DeviceTable(), DeviceTable())


@lru_cache(maxsize=64)
def _unit_matrix(side: int, device: torch.device) -> Tensor:
    return torch.eye(side, device=device)


_SIDES = (("height", "down"), ("width", "across"))


def _padded_basis(side: int, room: int, device: torch.device) -> Tensor:
    basis = dct.basis(side, device, torch.float32)
    # Zero rows and columns: the padding of a tile adds nothing to its products.
    return torch.nn.functional.pad(basis, (0, room - side, 0, room - side)).contiguous()


def _shape(block_group: BlockGroup) -> dict[str, int]:
    """Return the sides of blocks, and the powers of 2 that hold them."""
    height, width = block_group.spec.height, block_group.spec.width
    least = 1 if block_group.spec.codec.is_dense else _LEAST_SIDE
    down, across = (max(least, _power(side)) for side in (height, width))
    return {"height": height, "width": width, "down": down, "across": across}


def _mix(seed: int) -> int:
    """Return 31 mixed bits of a seed: an argument that grows past 31 bits would compile the kernel again."""
    return (seed * 0x9E3779B97F4A7C15 % 2**64) >> 33


def _power(count: int) -> int:
    """Return the smallest power of 2 of at least `count`."""
    return 1 << width_for(count)


def _terms(count: int) -> int:
    """Return the number of coefficients in one product of an inverse transform of `count` coefficients."""
    return max(_LEAST_SIDE, min(_MOST_TERMS, _power(count)))


def _format(codec: TopKCodec) -> dict[str, int]:
    """Return the constants of `pack` and `unpack`."""
    low, row = (-1, 0) if codec.is_dense else codec.index_layout
    return {"low": low, "row": row, "bits": codec.value_bits, "levels": codec.levels}


def _fields(
    block_group: BlockGroup,
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    scales: Sequence[Tensor] = (),
) -> np.ndarray[Any, Any]:
    grids = [slot.grid for slot in block_group.slots]
    firsts = list(accumulate((grid.count for grid in grids), initial=0))[:-1]
    given = [*gradients] or [None] * len(grids)
    scale_addresses = [scale.data_ptr() for scale in scales] or [0] * len(grids)
    return np.array(
        [
            (
                *(tensor.data_ptr(), 0 if gradient is None else gradient.data_ptr(), first),
                *(grid.rows, grid.cols, grid.down, grid.across, _kind(tensor), _kind(gradient), scale),
            )
            for tensor, gradient, first, grid, scale in zip(tensors, given, firsts, grids, scale_addresses, strict=True)
        ],
        dtype=np.int64,
    )


def _kind(tensor: Tensor | None) -> int:
    return FLOATS.index(tensor.dtype) if tensor is not None and tensor.dtype in FLOATS else -1


def _is_coded(residuals: Sequence[Tensor] | None) -> bool:
    return any(residual.dtype == torch.int8 for residual in residuals or ())


def _has_row_scales(block_group: BlockGroup) -> bool:
    """Return True if each row of a block has its own scale of int8 residuals."""
    return block_group.spec.width == RESIDUAL_ROW and all(
        slot.grid.cols % RESIDUAL_ROW == 0 for slot in block_group.slots
    )


def _is_supported(block_group: BlockGroup, tensors: Sequence[Tensor]) -> bool:
    return (
        bool(tensors)
        and len(tensors) == len(block_group.slots)
        and can_run(tensors[0])
        and _has_small_blocks(block_group)
        and all(tensor.dtype in (*FLOATS, torch.int8) for tensor in tensors)
        and all(
            tuple(tensor.shape) == slot.grid.shape and slot.grid.is_row_major(tensor)
            for slot, tensor in zip(block_group.slots, tensors, strict=True)
        )
    )


def _has_small_blocks(block_group: BlockGroup) -> bool:
    """Return True if a block fits into one program."""
    spec = block_group.spec
    if spec.codec.is_dense and spec.height == 1:
        # Single elements, those of a dense exchange, would be one program each.
        return 1 < spec.width <= MOST_COLUMNS
    return max(spec.height, spec.width) <= MOST_SIDE


def _are_aligned(block_group: BlockGroup, tensors: Sequence[Tensor]) -> bool:
    """Return True if four elements can be read at a time."""
    # Blocks and rows must start at multiples of four elements, tensors at multiples of 16 bytes.
    sides = [block_group.spec.width, *(slot.grid.cols for slot in block_group.slots)]
    return all(side % 4 == 0 for side in sides) and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _precision(spec: BlockSpec) -> str:
    """Return the precision of products: low-precision formats round more, and error feedback keeps their error.

    Products with unit matrices are exact.
    """
    is_exact = torch.version.hip or not spec.transformed or spec.codec.values in ("fp32", "bf16")
    return "ieee" if is_exact else "tf32"
