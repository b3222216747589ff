"""Low-rank feed-forward layers on a GPU, whose hidden layer never reaches memory.

    y = h2 B2    with    h2 = v A2,    v = f(h1 B1 + b1),    h1 = x A1

or v = f(g1 B_g + b_g) (h1 B1 + b1) with a gate. The hidden layer v is several times as wide as x, while h1 and h2 are
only one rank wide. One kernel computes h2 from h1, and two compute the gradients, from h1 and v computed again.
Kernels and a checkpoint are timed once for each shape, see `scantling.tensor.costs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scantling.numerics.device import device_context, without_autocast
from scantling.numerics.torch_private import runs_own_forward
from scantling.tensor.launches import (
    CHUNK_TILE,
    MAX_RANK,
    PartialSums,
    are_kernels_faster,
    are_plain,
    can_multiply,
    launch_dtype,
    needs_torch,
    num_splits,
    precision,
    tile_side,
    timed_tokens,
    torch_gradients,
    with_dense_rows,
)
from scantling.tensor.linear import TTLinear

TOKEN_TILE = 32
"""Tokens that a program computes at once."""
_TWO_LAYERS = {
    "CLIPMLP": ("fc1", "fc2"),
    "GPT2MLP": ("c_fc", "c_proj"),
    "GPTJMLP": ("fc_in", "fc_out"),
    "GPTNeoXMLP": ("dense_h_to_4h", "dense_4h_to_h"),
    "PhiMLP": ("fc1", "fc2"),
    "SiglipMLP": ("fc1", "fc2"),
}
"""Classes of transformers that apply a layer, an activation, another layer and perhaps dropout."""
_GATED = ("gate_proj", "up_proj", "down_proj")
_GATED_CLASSES = frozenset(
    ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "GemmaMLP", "Gemma2MLP", "Gemma3MLP", "OlmoMLP", "Olmo2MLP")
)
"""Classes of transformers that compute down(f(gate(x)) * up(x)) and nothing else; others scale, clamp or drop."""
_ACTIVATIONS = ("act_fn", "act", "activation_fn")


@dataclass(frozen=True)
class _Parts:
    """Parts of a feed-forward layer.

    Attributes:
        layers: the gate, if there is one, the layer that widens, and the one that narrows.
        activation: the kernels' name of f.
        finish: function that maps y and the input to the module's output.
    """

    layers: tuple[TTLinear, ...]
    activation: str
    finish: Callable[[Tensor, Tensor], Tensor]


def fused_feed_forward(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return the output of a feed-forward layer; it stores only states of one rank width for the backward pass.

    Args:
        module: a feed-forward layer of transformers, or a block of BERT, whose method `feed_forward_chunk` it replaces.
        x: (..., width).

    Returns:
        None if the kernels do not run on this device, do not know the layer's structure or its activation, or its
        layers are not low-rank in two factors of at most `MAX_RANK`, or a checkpoint is faster; also in compiled code,
        inside `torch.func` or without gradients.
    """
    dtype = launch_dtype(module, x)
    parts = None if dtype is None else _find_parts(module)
    if parts is None:
        return None
    num_tokens, (*widening, down) = x.shape[:-1].numel(), parts.layers
    if not all(layer.is_pair(num_tokens) and layer.middle_rank <= MAX_RANK for layer in parts.layers):
        return None
    params = [param for layer in parts.layers for param in (*layer.chain, layer.bias)]
    if not can_multiply(x, params) or not _is_faster(parts, num_tokens, x.new_empty(0, dtype=dtype)):
        return None
    a, finish = down.factors(num_tokens)
    paths = [(*layer.first_factor(x), layer.bias) for layer in widening]
    operands = [None if value is None else value.to(dtype) for path in paths for value in path]
    with without_autocast(x.device):
        h2 = _ContractHidden.apply(parts.activation, a.to(dtype), *operands)  # type: ignore[no-untyped-call]
    return parts.finish(finish(h2).view(*x.shape[:-1], down.out_features), x)


def _is_faster(parts: _Parts, num_tokens: int, like: Tensor) -> bool:
    """True if the kernels take less time than a checkpoint of the same part, for tensors like this one."""
    *widening, down = parts.layers
    layer = widening[-1]
    state, hidden = (timed_tokens(num_tokens), layer.middle_rank), layer.out_features
    path = state, (layer.middle_rank, hidden), None if layer.bias is None else (hidden,)
    function = partial(_contract_in_torch, parts.activation)
    return are_kernels_faster(
        f"{'gated ' if len(widening) > 1 else ''}{parts.activation} layer",
        partial(_ContractHidden.apply, parts.activation),
        partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False),
        [(hidden, down.middle_rank), *path * len(widening)],
        like,
    )


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "relu": nn.functional.relu,
}
"""Activations by the kernels' names."""


def _contract_in_torch(activation: str, a: Tensor, *paths: Any) -> Tensor:
    """Return the same as `_ContractHidden`, by torch's operations."""
    expanded = []
    for state, b, bias in zip(paths[::3], paths[1::3], paths[2::3], strict=True):
        expanded.append(state @ b if bias is None else state @ b + bias)
    value = _FUNCTIONS[activation](expanded[0])
    return (value if len(expanded) == 1 else value * expanded[1]) @ a


def _find_parts(module: nn.Module) -> _Parts | None:
    """Return the parts of a feed-forward layer of known structure, with TT layers that nothing hooks into."""
    found = _find_bert_layers(module) if hasattr(module, "feed_forward_chunk") else _find_layers(module)
    if found is None:
        return None
    layers, function, finish = found
    if any(type(layer) is not TTLinear or not are_plain(layer.parameters()) for layer in layers):
        return None
    # The modules that the kernels compute are not called.
    replaced = [*layers, function, *(getattr(module, name, None) for name in ("intermediate", "output"))]
    if not all(runs_own_forward(part) for part in replaced if isinstance(part, nn.Module)):
        return None
    # One kernel has one rank of its inputs, and all biases or none.
    kinds = {(layer.middle_rank, layer.bias is None) for layer in layers[:-1]}
    activation = _activation_name(function)
    return None if activation is None or len(kinds) > 1 else _Parts(layers, activation, finish)


def _find_layers(module: nn.Module) -> tuple[tuple[Any, ...], Any, Callable[[Tensor, Tensor], Tensor]] | None:
    """Return layers, activation and the function after them of a module whose forward pass is known."""
    children = dict(module.named_children())
    name = next((name for name in _ACTIVATIONS if callable(getattr(module, name, None))), None)
    if name is None:
        return None
    rest, activation = children.keys() - {name}, getattr(module, name)
    if type(module).__name__ in _GATED_CLASSES and rest == set(_GATED):
        return tuple(children[name] for name in _GATED), activation, lambda y, _: y
    names = _TWO_LAYERS.get(type(module).__name__)
    if names is None or not set(names) <= rest <= {*names, "dropout"}:
        return None
    dropout = children.get("dropout", nn.Identity())
    return tuple(children[name] for name in names), activation, lambda y, _: dropout(y)


def _find_bert_layers(block: Any) -> tuple[tuple[Any, ...], Any, Callable[[Tensor, Tensor], Tensor]] | None:
    inner, outer = getattr(block, "intermediate", None), getattr(block, "output", None)
    if not isinstance(inner, nn.Module) or not isinstance(outer, nn.Module):
        return None
    names = {name for name, _ in inner.named_children()} - {"intermediate_act_fn"}
    if names != {"dense"} or {name for name, _ in outer.named_children()} != {"dense", "dropout", "LayerNorm"}:
        return None
    known: Any = outer
    finish = lambda y, x: known.LayerNorm(known.dropout(y) + x)  # noqa: E731
    return (inner.dense, known.dense), inner.intermediate_act_fn, finish


class _ContractHidden(torch.autograd.Function):
    """h2 = v A2 from f, A2, and state, matrix and bias of the gate, if there is one, and of the layer itself."""

    @staticmethod
    def forward(ctx: Any, activation: str, a: Tensor, *paths: Tensor | None) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(a, *paths)
        return _Launch(activation, a, paths).forward()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, *paths = ctx.saved_tensors
        if needs_torch(grad):
            function = partial(_contract_in_torch, ctx.activation)
            return (None, *torch_gradients(function, (a, *paths), ctx.needs_input_grad[1:], grad))
        return (None, *_Launch(ctx.activation, a, paths).backward(grad.contiguous()))


def _activation_name(activation: Any) -> str | None:
    """Return the kernels' name of an activation of torch or transformers; None for others."""
    kind = type(activation).__name__
    if kind == "GELU":
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    if kind in ("function", "builtin_function_or_method", "partial"):
        return {nn.functional.silu: "silu", nn.functional.gelu: "gelu", nn.functional.relu: "relu"}.get(activation)
    return {
        "SiLU": "silu",
        "SiLUActivation": "silu",
        "GELUActivation": "gelu",
        "GELUTanh": "gelu_tanh",
        "NewGELUActivation": "gelu_tanh",
        "ReLU": "relu",
    }.get(kind)


def constants(*ranks: int) -> dict[str, Any]:
    """Return the constants of a launch with these ranks of h1 and h2, among them the warps of a program."""
    width_tile, out_tile = map(tile_side, ranks)
    return {
        "precision": precision(),
        "token_tile": TOKEN_TILE,
        "hidden_tile": CHUNK_TILE,
        "width_tile": width_tile,
        "out_tile": out_tile,
        # With 4, the values of larger tiles do not fit into the registers.
        "num_warps": 8 if max(width_tile, out_tile) > 32 else 4,
    }


class _Launch:
    """Launches of the kernels for one call: h2, and the gradients.

    Args:
        activation: name of f.
        a: A2, (hidden, out rank).
        paths: state, matrix and bias of the gate, if there is one, and of the layer itself.
    """

    def __init__(self, activation: str, a: Tensor, paths: Sequence[Any]) -> None:
        # Kernels read rows of any distance, but their elements must be neighbors.
        operands: list[Any] = [None if value is None else with_dense_rows(value) for value in paths]
        *gate, state, b, bias = operands
        a = with_dense_rows(a)
        # Without a gate or a bias, the kernels read none; any pointer will do.
        gate_state, gate_b, gate_bias = gate or (state, b, bias)
        self._has_gate, self._has_bias = bool(gate), bias is not None
        self._state: Tensor = state
        self._tokens, self._width = self._state.shape
        self._hidden, self._out_width = a.shape
        self._num_tiles, self._num_chunks = -(-self._tokens // TOKEN_TILE), -(-self._hidden // CHUNK_TILE)
        biases = (state if value is None else value for value in (bias, gate_bias))
        self._inputs = (state, b, next(biases), gate_state, gate_b, next(biases), a)
        self._sizes = (
            *(self._tokens, self._hidden, self._width, self._out_width),
            *(value.stride(0) for value in (state, b, gate_state, gate_b, a)),
        )
        self._constants = {
            "activation": activation,
            "has_gate": self._has_gate,
            "has_bias": self._has_bias,
            **constants(self._width, self._out_width),
        }

    def forward(self) -> Tensor:
        """Return h2, (tokens, out rank)."""
        grid = self._num_tiles, num_splits(self._num_chunks, self._num_tiles)
        sums = PartialSums(self._state, grid[1], [(self._tokens, self._out_width)])
        self._launch("contract_hidden", grid, self._num_chunks, sums, sums.parts[0])
        return sums.add()[0]

    def backward(self, grad: Tensor) -> list[Tensor | None]:
        """Return the gradients of A2 and of the paths.

        Args:
            grad: (tokens, out rank), contiguous.
        """
        num_paths = 2 if self._has_gate else 1  # here the layer itself is first
        grid = self._num_tiles, num_splits(self._num_chunks, self._num_tiles)
        sums = PartialSums(self._state, grid[1], [(self._tokens, self._width)] * num_paths)
        self._launch("state_gradients", grid, self._num_chunks, sums, grad, sums.parts[0], sums.parts[-1])
        states = sums.add()
        grid = self._num_chunks, num_splits(self._num_tiles, self._num_chunks)
        shapes = [(self._width, self._hidden), (self._hidden,)] * num_paths
        sums = PartialSums(self._state, grid[1], [*shapes, (self._hidden, self._out_width)])
        matrix, bias, *_, a = sums.parts
        gate_matrix, gate_bias = sums.parts[-3:-1]
        outputs = matrix, bias, gate_matrix, gate_bias, a
        self._launch("weight_gradients", grid, self._num_tiles, sums, grad, *outputs)
        *found, a = sums.add()
        paths: list[Tensor | None] = []
        for i in reversed(range(num_paths)):
            paths += [states[i], found[2 * i], found[2 * i + 1] if self._has_bias else None]
        return [a, *paths]

    def _launch(self, name: str, grid: tuple[int, int], num_parts: int, sums: PartialSums, *tensors: Tensor) -> None:
        """Launch a kernel whose programs share the parts of a sum among the splits, the second dim of the grid."""
        # Import late: the kernels need Triton, which is optional.
        from scantling.tensor import kernels

        with device_context(self._state):
            getattr(kernels, name)[grid](
                *(*self._inputs, *tensors, *self._sizes, sums.stride, -(-num_parts // grid[1])), **self._constants
            )
