"""`resize_token_embeddings` of transformers for embeddings and output layers that are TT layers.

The first row mode is the most significant digit of an id. So a larger first mode adds ids to a table without changing
its existing rows: the core (1, m, n, r) becomes (1, m', n, r). An output layer does the same with its first output
mode.
"""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scantling.errors import UserError
from scantling.tensor.embedding import TTMEmbedding, TTMHead
from scantling.tensor.layer import TTLayer
from scantling.tensor.linear import TTLinear
from scantling.tensor.modes import check_size
from scantling.tensor.rank_adapter import find_adapter

_dense_embeddings = PreTrainedModel._get_resized_embeddings
_dense_head = PreTrainedModel._get_resized_lm_head


def resize_table(table: TTMEmbedding, num_embeddings: int, *, mean: bool = True) -> None:
    """Change the number of rows, in place; the first core becomes a new parameter.

    New rows are first those that the cores already have beyond the last id (padding of the modes), then rows of new
    slices of the first core.

    Args:
        table: table to resize; its other rows do not change.
        num_embeddings: new number of rows.
        mean: True to set new slices to the mean of the old ones; False to draw them with the RMS of the old ones.

    Raises:
        UserError: if a `RankAdapter` is attached.
    """
    size = check_size(num_embeddings, "new_num_tokens")
    _check_no_adapter(table)
    first = -(-size // prod(table.row_modes[1:]))  # smallest first mode that holds all rows
    _resize_core(table, 0, 1, first, mean)
    table.row_modes = (first, *table.row_modes[1:])
    table.num_embeddings = size
    if table.padding_idx is not None and table.padding_idx >= size:
        table.padding_idx = None
    origin = getattr(table, "origin", None)
    # `densify` builds its embedding with this index.
    if origin is not None and origin.padding_idx is not None and origin.padding_idx >= size:
        object.__setattr__(table, "origin", dataclasses.replace(origin, padding_idx=None))


def resize_outputs(layer: TTLinear, out_features: int, *, mean: bool = True) -> None:
    """Change the number of outputs, in place; arguments as in `resize_table`."""
    size = check_size(out_features, "new_num_tokens")
    _check_no_adapter(layer)
    first = -(-size // prod(layer.out_modes[1:]))
    _resize_core(layer, len(layer.in_modes), 1, first, mean)
    layer.out_modes = (first, *layer.out_modes[1:])
    layer.out_features = size
    layer.bias = _resized_bias(layer.bias, size, mean)


def _check_no_adapter(layer: TTLayer) -> None:
    if find_adapter(layer) is not None:
        raise UserError(
            "a RankAdapter is attached to the layer that is resized, and its size target depends on the size of the "
            "layer; resize before attaching it, or call its finish() or detach() first"
        )


@torch.no_grad()
def _resize_core(layer: TTLayer, index: int, dim: int, size: int, mean: bool) -> None:
    core = layer.chain[index]
    layer.cores[index] = nn.Parameter(_resized(core.detach(), dim, size, mean), requires_grad=core.requires_grad)


def _resized(values: Tensor, dim: int, size: int, mean: bool) -> Tensor:
    """Drop or add positions at the end of one dim."""
    missing = size - values.shape[dim]
    if missing <= 0:
        return values.narrow(dim, 0, size).clone()
    shape = [*values.shape]
    shape[dim] = missing
    if mean:
        added = values.mean(dim, keepdim=True).expand(shape)
    else:
        added = torch.randn(shape, dtype=values.dtype, device=values.device) * values.square().mean().sqrt()
    return torch.cat([values, added], dim)


def _resized_bias(bias: nn.Parameter | None, size: int, mean: bool) -> nn.Parameter | None:
    if bias is None or len(bias) == size:
        return bias
    added = bias.detach() if mean else torch.zeros_like(bias)
    values = torch.cat([bias.detach(), added.mean().expand(max(0, size - len(bias)))])[:size].clone()
    return nn.Parameter(values, requires_grad=bias.requires_grad)


def _resized_embeddings(
    self: Any,
    old_embeddings: nn.Module,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    if not isinstance(old_embeddings, TTMEmbedding):
        return _dense_embeddings(self, old_embeddings, new_num_tokens, pad_to_multiple_of, mean_resizing)  # type: ignore[no-any-return]
    # The arguments of transformers: None keeps the size, before rounding up.
    size = old_embeddings.num_embeddings if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
    if size != old_embeddings.num_embeddings:
        resize_table(old_embeddings, size, mean=mean_resizing)
    return old_embeddings


def _resized_head(
    self: Any,
    old_lm_head: nn.Module,
    new_num_tokens: int | None = None,
    transposed: bool = False,
    mean_resizing: bool = True,
) -> nn.Module:
    if not isinstance(old_lm_head, TTLinear | TTMHead):
        return _dense_head(self, old_lm_head, new_num_tokens, transposed, mean_resizing)  # type: ignore[no-any-return]
    if transposed:
        raise UserError(
            f"{type(self).__name__} keeps a part of its output layer transposed, which cannot be resized as a TT "
            "layer; call sc.densify(model), resize, and sc.tensorize(model, ...) again"
        )
    if isinstance(old_lm_head, TTLinear) and new_num_tokens not in (None, old_lm_head.out_features):
        resize_outputs(old_lm_head, new_num_tokens, mean=mean_resizing)
    elif isinstance(old_lm_head, TTMHead):  # its table has been resized before
        old_lm_head.bias = _resized_bias(old_lm_head.bias, old_lm_head.out_features, mean_resizing)
    return old_lm_head


def support_resizing() -> None:
    """Let every transformers model resize TT layers; dense layers are passed on to transformers."""
    PreTrainedModel._get_resized_embeddings = _resized_embeddings
    PreTrainedModel._get_resized_lm_head = _resized_head
