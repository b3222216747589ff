"""Operations on the merged blocks of a TT table: unique ids, lookups of rows, and products with all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scantling.errors import UserError
from scantling.numerics.device import is_capturing, without_autocast
from scantling.numerics.torch_private import FakeTensor, assert_async, is_batched, is_in_transform
from scantling.tensor.contraction import Step


def check_ids(ids: Tensor, num_embeddings: int) -> None:
    """Raise if ids are not integers from 0 to `num_embeddings` - 1.

    Raises:
        UserError: if the dtype is not an integer type.
        IndexError: if an id is out of range. Compiled code raises a RuntimeError, and a GPU a device-side assertion.
    """
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise UserError(f"ids have the dtype {ids.dtype}; it must be an integer type, such as torch.int64")
    if isinstance(ids, FakeTensor) or ids.is_meta or _is_vmapped(ids):
        return  # no values to check
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        # The assertion needs a message; compiled code drops it otherwise.
        assert_async(((ids >= 0) & (ids < num_embeddings)).all(), f"id out of range: rows 0 to {num_embeddings - 1}")
        return
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < num_embeddings):
        worst = ids.min() if int(ids.min()) < 0 else ids.max()
        raise IndexError(f"id {int(worst)} is out of range: this table has the rows 0 to {num_embeddings - 1}")


def unique_ids(ids: Tensor, num_embeddings: int, capacity: int | None) -> tuple[Tensor, Tensor | None]:
    """Return the 1-D ids to look up, and each id's index among them; None if these are all ids in order.

    Args:
        ids: ids of any shape.
        num_embeddings: number of rows of the table.
        capacity: fixed number of rows to look up; None for the actual number of unique ids.
    """
    if capacity is not None:
        return _unique_within(ids, capacity)
    if not _is_count_unknown(ids):
        unique, inverse = torch.unique(ids, return_inverse=True)
        return unique, inverse
    if ids.numel() > num_embeddings:  # fewer rows than ids: look up all rows once
        return torch.arange(num_embeddings, dtype=ids.dtype, device=ids.device), ids
    return ids.reshape(-1), None


def _unique_within(ids: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the unique ids in a vector of length `capacity`, padded with 0, and the index of each id in it."""
    ordered, order = ids.reshape(-1).sort()
    # The index of an id is the number of changes before it in the sorted ids: the same for equal ids.
    is_new = torch.cat([ordered.new_zeros(min(1, len(ordered))), (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
    index = is_new.cumsum(0)
    assert_async((index < capacity).all(), f"more than {capacity} unique ids, the capacity of this table")
    # The assertion may be asynchronous: keep the scatter within bounds until it is raised.
    index = index.clamp(max=capacity - 1)
    # Equal ids write the same value to the same position, so the order of the writes does not matter.
    unique = ordered.new_zeros(capacity).scatter(0, index, ordered)
    # Undo the sort: each index goes back to the position of its id in the input.
    return unique, torch.empty_like(index).scatter(0, order, index).view(ids.shape)


def _is_count_unknown(ids: Tensor) -> bool:
    """True if the number of unique ids is data-dependent and unavailable (compile, graph capture, meta, vmap)."""
    if torch.compiler.is_compiling() or ids.is_meta or isinstance(ids, FakeTensor) or _is_vmapped(ids):
        return True
    return is_capturing(ids.device)


def _is_vmapped(values: Tensor) -> bool:
    """True if the values belong to one example inside `torch.func.vmap`, so that their values cannot be read."""
    return not torch.compiler.is_compiling() and is_batched(values)


def lookup_multiply(state: Tensor, table: Tensor, digits: Tensor, step: Step) -> Tensor:
    """Multiply the state of each id by its row of a merged block.

    Args:
        state: (ids, P, K).
        table: block, (rows, K Q).
        digits: row of each id, (ids).
        step: step of the contraction.

    Returns:
        (ids, P, Q).
    """
    device = state.device.type
    if torch.is_autocast_enabled(device):  # custom autograd functions ignore it in the backward pass
        state, table = (value.to(torch.get_autocast_dtype(device)) for value in (state, table))
    # The custom function has no rules for transforms.
    is_transformed = not torch.compiler.is_compiling() and is_in_transform()
    function: Any = _look_up_and_multiply if is_transformed else _LookupMultiply.apply
    result: Tensor = function(state, table, digits, step.inner, step.width)
    return result


def _look_up_and_multiply(state: Tensor, table: Tensor, digits: Tensor, inner: int, width: int) -> Tensor:
    # (ids, P, K) (ids, K, Q) -> (ids, P, Q)
    return state @ nn.functional.embedding(digits, table).view(digits.numel(), inner, width)


class _LookupMultiply(torch.autograd.Function):
    """Product of each id's state with its looked-up row of a block.

    The rows are r times larger than the state, so the backward pass looks them up again instead of saving them.
    """

    @staticmethod
    def forward(ctx: Any, state: Tensor, table: Tensor, digits: Tensor, *row_shape: int) -> Tensor:
        ctx.row_shape = row_shape
        ctx.save_for_backward(state, table, digits)
        return _look_up_and_multiply(state, table, digits, *row_shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        state, table, digits = ctx.saved_tensors
        row_grads = (state.transpose(1, 2) @ grad).reshape(len(state), -1)  # (ids, K Q)
        table_grad = torch.ops.aten.embedding_dense_backward(row_grads, digits, table.shape[0], -1, False)
        del row_grads  # as large as all rows: free it before they are looked up again
        rows = nn.functional.embedding(digits, table).view(digits.numel(), *ctx.row_shape)
        # (ids, P, Q) (ids, Q, K) -> (ids, P, K)
        return grad @ rows.transpose(1, 2), table_grad, None, None, None


def multiply_by_blocks(x: Tensor, blocks: Sequence[Tensor], steps: Sequence[Step], max_elements: int) -> Tensor:
    """Multiply x by all rows of a table, block by block: (tokens, columns) to (tokens, rows).

    Args:
        x: (tokens, columns).
        blocks: merged blocks, each (r, row modes, column modes, r').
        steps: steps of the contraction.
        max_elements: maximum number of elements of an intermediate result; tokens are processed in parts.
    """
    # (r, rows, columns, r') -> (r columns, rows r'), which is K x Q
    matrices = [
        block.transpose(1, 2).reshape(step.inner, step.width) for block, step in zip(blocks, steps, strict=True)
    ]
    # Elements per token of the largest intermediate result.
    largest = max(step.leading * step.width * step.trailing for step in steps)

    def product(part: Tensor) -> Tensor:
        state = part
        # Unlike in `contract`, the new dims of each step come before the remaining ones.
        for step, matrix in zip(steps, matrices, strict=True):
            state = matrix.t() @ state.reshape(part.shape[0] * step.leading, step.inner, step.trailing)
        return state.reshape(part.shape[0], steps[-1].leading * steps[-1].width)

    products = [product(part) for part in torch.split(x, max(1, max_elements // largest))]
    return torch.cat(products) if len(products) > 1 else products[0]


def multiply_by_rows(x: Tensor, left: Tensor, right: Tensor, max_elements: int) -> Tensor:
    """Multiply x by all rows of a table in two blocks, some rows at a time: (tokens, columns) to (tokens, rows).

    Args:
        x: (tokens, columns).
        left: (row modes, column modes, r).
        right: (r, row modes, column modes).
        max_elements: maximum number of elements of a part, which is at most a quarter of the table.
    """
    row_numel = x.shape[1] * right.shape[1]
    num_rows = max(1, min(max_elements // row_numel, -(-left.shape[0] // 4)))

    def product(x: Tensor, part: Tensor, right: Tensor) -> Tensor:
        with without_autocast(x.device):
            # (m_1 n_1, r) (r, m_2 n_2)
            rows = part.flatten(0, 1) @ right.flatten(1)
        rows = rows.view(part.shape[0], part.shape[1], right.shape[1], right.shape[2])  # (m_1, n_1, m_2, n_2)
        # (tokens, n_1 n_2) (n_1 n_2, m_1 m_2) -> (tokens, m_1 m_2)
        return x @ rows.permute(1, 3, 0, 2).reshape(x.shape[1], -1).to(x.dtype)

    parts = torch.split(left, num_rows)
    # Rebuild the rows in the backward pass instead of saving them. `torch.func` does not support checkpoints.
    is_transformed = not torch.compiler.is_compiling() and is_in_transform()
    if torch.is_grad_enabled() and not is_transformed:
        made = [checkpoint(product, x, part, right, use_reentrant=False, preserve_rng_state=False) for part in parts]
    else:
        made = [product(x, part, right) for part in parts]
    return torch.cat(made, dim=1)
