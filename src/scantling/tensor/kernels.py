"""Triton kernels of low-rank layers: products with two factors, and feed-forward layers.

A layer y = (x A) B + b takes one launch, and its gradients three. Of a feed-forward layer, the part between the states
h1 and h2, which are only one rank wide, takes one and two:

    h2 = v A    with    v = f(h1 B + b),    or    v = f(g1 B_g + b_g) (h1 B + b)

v, the hidden layer, stays on the chip in chunks, and is computed again for the gradients. Each result has one writer,
and partial sums are added in a fixed order, so that results repeat bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _activate(z, activation: tl.constexpr):
    """Return f(z)."""
    if activation == "silu":
        return z * tl.sigmoid(z)
    elif activation == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif activation == "gelu_tanh":
        return 0.5 * z * (1.0 + _tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))
    else:
        return tl.where(z > 0.0, z, z * 0.0)  # NaN stays NaN


@triton.jit
def _slope(z, activation: tl.constexpr):
    """Return f'(z)."""
    if activation == "silu":
        s = tl.sigmoid(z)
        return s * (1.0 + z * (1.0 - s))
    elif activation == "gelu":
        return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif activation == "gelu_tanh":
        t = _tanh(0.7978845608028654 * (z + 0.044715 * z * z * z))
        return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * z * z)
    else:
        return tl.where(z > 0.0, 1.0, 0.0)


@triton.jit
def _load(matrix, row, col, rows, cols, stride):
    """Return a tile of a matrix with contiguous rows, 0 outside of it."""
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    return tl.load(matrix + row[:, None].to(tl.int64) * stride + col[None, :], mask=inside, other=0.0)


@triton.jit
def _store(matrix, row, col, rows, cols, tile):
    """Write a tile into a contiguous matrix."""
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(matrix + row[:, None].to(tl.int64) * cols + col[None, :], tile, mask=inside)


@triton.jit
def _expand(state, b, bias, col, hidden, has_bias: tl.constexpr, precision: tl.constexpr):
    """Return a chunk of state B + bias in fp32."""
    z = tl.dot(state, b, input_precision=precision)
    if has_bias:
        z += tl.load(bias + col, mask=col < hidden, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def contract_hidden(
    state,
    b,
    bias,
    gate_state,
    gate_b,
    gate_bias,
    a,
    out,
    tokens,
    hidden,
    width,
    out_width,
    state_stride,
    b_stride,
    gate_stride,
    gate_b_stride,
    a_stride,
    split_stride,
    chunks,
    activation: tl.constexpr,
    has_gate: tl.constexpr,
    has_bias: tl.constexpr,
    precision: tl.constexpr,
    token_tile: tl.constexpr,
    hidden_tile: tl.constexpr,
    width_tile: tl.constexpr,
    out_tile: tl.constexpr,
):
    """Write h2 = v A for a tile of tokens, summed over some chunks of the hidden layer.

    Program (i, j) has token tile i and chunks j * chunks and following. `out`, (tokens, out_width), is that of j = 0;
    others are `split_stride` elements apart.
    """
    row = tl.program_id(0) * token_tile + tl.arange(0, token_tile)
    split = tl.program_id(1)
    inner, outer = tl.arange(0, width_tile), tl.arange(0, out_tile)
    h = _load(state, row, inner, tokens, width, state_stride)
    g = h
    if has_gate:
        g = _load(gate_state, row, inner, tokens, width, gate_stride)
    total = tl.zeros([token_tile, out_tile], tl.float32)
    for chunk in range(split * chunks, (split + 1) * chunks):
        col = chunk * hidden_tile + tl.arange(0, hidden_tile)
        z = _expand(h, _load(b, inner, col, width, hidden, b_stride), bias, col, hidden, has_bias, precision)
        if has_gate:
            weights = _load(gate_b, inner, col, width, hidden, gate_b_stride)
            value = _activate(_expand(g, weights, gate_bias, col, hidden, has_bias, precision), activation) * z
        else:
            value = _activate(z, activation)
        weights = _load(a, col, outer, hidden, out_width, a_stride)
        total += tl.dot(value.to(h.dtype), weights, input_precision=precision)
    _store(out + split.to(tl.int64) * split_stride, row, outer, tokens, out_width, total)


@triton.jit
def state_gradients(
    state,
    b,
    bias,
    gate_state,
    gate_b,
    gate_bias,
    a,
    grad,
    state_grad,
    gate_grad,
    tokens,
    hidden,
    width,
    out_width,
    state_stride,
    b_stride,
    gate_stride,
    gate_b_stride,
    a_stride,
    split_stride,
    chunks,
    activation: tl.constexpr,
    has_gate: tl.constexpr,
    has_bias: tl.constexpr,
    precision: tl.constexpr,
    token_tile: tl.constexpr,
    hidden_tile: tl.constexpr,
    width_tile: tl.constexpr,
    out_tile: tl.constexpr,
):
    """Write the gradients of h1 and g1, (tokens, width), for a tile of tokens, summed as in `contract_hidden`.

    `grad` is that of h2, contiguous.
    """
    row = tl.program_id(0) * token_tile + tl.arange(0, token_tile)
    split = tl.program_id(1)
    inner, outer = tl.arange(0, width_tile), tl.arange(0, out_tile)
    h = _load(state, row, inner, tokens, width, state_stride)
    g = h
    if has_gate:
        g = _load(gate_state, row, inner, tokens, width, gate_stride)
    upstream = _load(grad, row, outer, tokens, out_width, out_width)
    total = tl.zeros([token_tile, width_tile], tl.float32)
    gate_total = tl.zeros([token_tile, width_tile], tl.float32)
    for chunk in range(split * chunks, (split + 1) * chunks):
        col = chunk * hidden_tile + tl.arange(0, hidden_tile)
        weights = _load(b, inner, col, width, hidden, b_stride)
        z = _expand(h, weights, bias, col, hidden, has_bias, precision)
        value_grad = tl.dot(
            upstream, tl.trans(_load(a, col, outer, hidden, out_width, a_stride)), input_precision=precision
        )
        if has_gate:
            gate_weights = _load(gate_b, inner, col, width, hidden, gate_b_stride)
            y = _expand(g, gate_weights, gate_bias, col, hidden, has_bias, precision)
            y_grad = value_grad * z * _slope(y, activation)
            gate_total += tl.dot(y_grad.to(h.dtype), tl.trans(gate_weights), input_precision=precision)
            z_grad = value_grad * _activate(y, activation)
        else:
            z_grad = value_grad * _slope(z, activation)
        total += tl.dot(z_grad.to(h.dtype), tl.trans(weights), input_precision=precision)
    first = split.to(tl.int64) * split_stride
    _store(state_grad + first, row, inner, tokens, width, total)
    if has_gate:
        _store(gate_grad + first, row, inner, tokens, width, gate_total)


@triton.jit
def weight_gradients(
    state,
    b,
    bias,
    gate_state,
    gate_b,
    gate_bias,
    a,
    grad,
    b_grad,
    bias_grad,
    gate_b_grad,
    gate_bias_grad,
    a_grad,
    tokens,
    hidden,
    width,
    out_width,
    state_stride,
    b_stride,
    gate_stride,
    gate_b_stride,
    a_stride,
    split_stride,
    tiles,
    activation: tl.constexpr,
    has_gate: tl.constexpr,
    has_bias: tl.constexpr,
    precision: tl.constexpr,
    token_tile: tl.constexpr,
    hidden_tile: tl.constexpr,
    width_tile: tl.constexpr,
    out_tile: tl.constexpr,
):
    """Write the gradients of B, b, B_g, b_g and A for a chunk of the hidden layer, summed over some token tiles.

    Program (i, j) has chunk i and token tiles j * tiles and following. Outputs are those of the first j.
    """
    col = tl.program_id(0) * hidden_tile + tl.arange(0, hidden_tile)
    split = tl.program_id(1)
    inner, outer = tl.arange(0, width_tile), tl.arange(0, out_tile)
    b_weights = _load(b, inner, col, width, hidden, b_stride)
    gate_weights = b_weights
    if has_gate:
        gate_weights = _load(gate_b, inner, col, width, hidden, gate_b_stride)
    a_weights = tl.trans(_load(a, col, outer, hidden, out_width, a_stride))
    b_total = tl.zeros([width_tile, hidden_tile], tl.float32)
    gate_total = tl.zeros([width_tile, hidden_tile], tl.float32)
    a_total = tl.zeros([hidden_tile, out_tile], tl.float32)
    bias_total = tl.zeros([hidden_tile], tl.float32)
    gate_bias_total = tl.zeros([hidden_tile], tl.float32)
    for tile in range(split * tiles, (split + 1) * tiles):
        row = tile * token_tile + tl.arange(0, token_tile)
        h = _load(state, row, inner, tokens, width, state_stride)
        upstream = _load(grad, row, outer, tokens, out_width, out_width)
        z = _expand(h, b_weights, bias, col, hidden, has_bias, precision)
        # Rows beyond the last token have no upstream gradient, so that they add nothing.
        value_grad = tl.dot(upstream, a_weights, input_precision=precision)
        if has_gate:
            g = _load(gate_state, row, inner, tokens, width, gate_stride)
            y = _expand(g, gate_weights, gate_bias, col, hidden, has_bias, precision)
            factor = _activate(y, activation)
            value = factor * z
            y_grad = value_grad * z * _slope(y, activation)
            gate_total += tl.dot(tl.trans(g), y_grad.to(h.dtype), input_precision=precision)
            gate_bias_total += tl.sum(y_grad, axis=0)
            z_grad = value_grad * factor
        else:
            value = _activate(z, activation)
            z_grad = value_grad * _slope(z, activation)
        b_total += tl.dot(tl.trans(h), z_grad.to(h.dtype), input_precision=precision)
        bias_total += tl.sum(z_grad, axis=0)
        a_total += tl.dot(tl.trans(value.to(h.dtype)), upstream, input_precision=precision)
    first = split.to(tl.int64) * split_stride
    _store(b_grad + first, inner, col, width, hidden, b_total)
    _store(a_grad + first, col, outer, hidden, out_width, a_total)
    if has_bias:
        tl.store(bias_grad + first + col, bias_total, mask=col < hidden)
    if has_gate:
        _store(gate_b_grad + first, inner, col, width, hidden, gate_total)
        if has_bias:
            tl.store(gate_bias_grad + first + col, gate_bias_total, mask=col < hidden)


@triton.jit
def low_rank_product(
    x,
    a,
    b,
    bias,
    state,
    out,
    tokens,
    inputs,
    rank,
    outputs,
    x_stride,
    a_stride,
    b_stride,
    chunks,
    has_bias: tl.constexpr,
    precision: tl.constexpr,
    token_tile: tl.constexpr,
    chunk_tile: tl.constexpr,
    rank_tile: tl.constexpr,
):
    """Write h = x A and some chunks of y = h B + b for a tile of tokens.

    Program (i, j) has token tile i and chunks j * chunks and following. All programs of a tile compute h, the first one
    writes it.
    """
    row = tl.program_id(0) * token_tile + tl.arange(0, token_tile)
    split, inner = tl.program_id(1), tl.arange(0, rank_tile)
    total = tl.zeros([token_tile, rank_tile], tl.float32)
    for first in range(0, inputs, chunk_tile):
        col = first + tl.arange(0, chunk_tile)
        tile = _load(x, row, col, tokens, inputs, x_stride)
        total += tl.dot(tile, _load(a, col, inner, inputs, rank, a_stride), input_precision=precision)
    h = total.to(out.dtype.element_ty)
    if split == 0:
        _store(state, row, inner, tokens, rank, h)
    for chunk in range(split * chunks, (split + 1) * chunks):
        col = chunk * chunk_tile + tl.arange(0, chunk_tile)
        weights = _load(b, inner, col, rank, outputs, b_stride)
        _store(out, row, col, tokens, outputs, _expand(h, weights, bias, col, outputs, has_bias, precision))


@triton.jit
def low_rank_input_gradient(
    grad,
    a,
    b,
    state_grad,
    out,
    tokens,
    inputs,
    rank,
    outputs,
    grad_stride,
    a_stride,
    b_stride,
    chunks,
    precision: tl.constexpr,
    token_tile: tl.constexpr,
    chunk_tile: tl.constexpr,
    rank_tile: tl.constexpr,
):
    """Write the gradients of h and of some chunks of x for a tile of tokens, as in `low_rank_product`."""
    row = tl.program_id(0) * token_tile + tl.arange(0, token_tile)
    split, inner = tl.program_id(1), tl.arange(0, rank_tile)
    total = tl.zeros([token_tile, rank_tile], tl.float32)
    for first in range(0, outputs, chunk_tile):
        col = first + tl.arange(0, chunk_tile)
        weights = tl.trans(_load(b, inner, col, rank, outputs, b_stride))
        total += tl.dot(_load(grad, row, col, tokens, outputs, grad_stride), weights, input_precision=precision)
    h_grad = total.to(out.dtype.element_ty)
    if split == 0:
        _store(state_grad, row, inner, tokens, rank, h_grad)
    for chunk in range(split * chunks, (split + 1) * chunks):
        col = chunk * chunk_tile + tl.arange(0, chunk_tile)
        weights = tl.trans(_load(a, col, inner, inputs, rank, a_stride))
        _store(out, row, col, tokens, inputs, tl.dot(h_grad, weights, input_precision=precision))


@triton.jit
def outer_sums(
    left,
    right,
    out,
    sums,
    tokens,
    rank,
    width,
    left_stride,
    right_stride,
    split_stride,
    tiles,
    has_sums: tl.constexpr,
    precision: tl.constexpr,
    token_tile: tl.constexpr,
    chunk_tile: tl.constexpr,
    rank_tile: tl.constexpr,
):
    """Write a chunk of left^T right, (rank, width), and of the column sums of `right`, summed over some token tiles.

    Program (i, j) has chunk i and token tiles j * tiles and following. Outputs are those of the first j.
    """
    col = tl.program_id(0) * chunk_tile + tl.arange(0, chunk_tile)
    split, inner = tl.program_id(1), tl.arange(0, rank_tile)
    total = tl.zeros([rank_tile, chunk_tile], tl.float32)
    column_total = tl.zeros([chunk_tile], tl.float32)
    for tile in range(split * tiles, (split + 1) * tiles):
        row = tile * token_tile + tl.arange(0, token_tile)
        values = _load(right, row, col, tokens, width, right_stride)
        states = tl.trans(_load(left, row, inner, tokens, rank, left_stride))
        total += tl.dot(states, values, input_precision=precision)
        if has_sums:
            column_total += tl.sum(values.to(tl.float32), axis=0)
    first = split.to(tl.int64) * split_stride
    _store(out + first, inner, col, rank, width, total)
    if has_sums:
        tl.store(sums + first + col, column_total, mask=col < width)
