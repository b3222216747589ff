"""What a model costs: floating-point operations and bytes kept for the backward pass, before anything runs.

FLOPs are counted as two for each multiplication with its addition, in matrix products only, as is usual (Kaplan et al.,
arXiv 2001.08361, section 2.1); elementwise work, norms and softmax are left out. The backward pass costs twice the
forward pass: one product for the gradient of the input and one for that of the weight. Attention counts every pair of
positions whether a mask hides it or not, and its backward pass twice the forward (what a kernel recomputes is not
counted), so that figures agree with those of `torch.utils.flop_counter` for the unfused kernel.

A module with a cheaper product than its shapes suggest states its own cost by having a method
`flops(tokens: int) -> int` (forward); it then speaks for all modules inside it.

Bytes kept for the backward pass are not estimated from formulas, which would be wrong for the next architecture: one
micro-batch is taken through the model with fake tensors, which have shapes and no memory, and what autograd saves is
added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scantling.errors import UserError

BACKWARD = 2
"""Cost of the backward pass as a multiple of the forward pass."""


def linear_flops(tokens: int, in_features: int, out_features: int) -> int:
    """Forward FLOPs of a linear map of `tokens` vectors."""
    return 2 * tokens * in_features * out_features


def attention_flops(sequences: int, seq_len: int, num_heads: int, head_dim: int) -> int:
    """Forward FLOPs of the two products of self-attention, Q Kᵀ and its product with V, over all heads."""
    return 4 * sequences * num_heads * seq_len * seq_len * head_dim


def forward_flops(model: nn.Module, *, sequences: int, seq_len: int) -> int | None:
    """Forward FLOPs of a transformers model.

    Args:
        model: any transformers model whose matrix products are in `nn.Linear`, transformers' `Conv1D`, modules that
            state their own `flops(tokens)`, and self-attention. It may be on the meta device.
        sequences: how many sequences.
        seq_len: their length in tokens.

    Returns:
        The FLOPs, or None for a model with matrices in modules of another kind (experts, convolutions), with an
        encoder beside its decoder, or without plain attention.
    """
    tokens = sequences * seq_len
    config: Any = model.config
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    if layers is None or heads is None or getattr(config, "is_encoder_decoder", False) or _other_matrices(model):
        return None
    total = sum(_products(model, tokens, sequences))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return total + int(layers) * attention_flops(sequences, seq_len, heads, head_dim)


def _products(model: nn.Module, tokens: int, sequences: int) -> Iterator[int]:
    """The FLOPs of each matrix product."""
    pooled = _heads_on_one_position(model)
    spoken_for: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in spoken_for:
            continue
        own = getattr(module, "flops", None)
        seen = sequences if any(name == head or name.startswith(head + ".") for head in pooled) else tokens
        if callable(own):
            spoken_for.update(id(inner) for inner in module.modules())
            yield int(own(seen))
        elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            first, second = module.weight.shape
            yield linear_flops(seen, first, second)


def _other_matrices(model: nn.Module) -> bool:
    """Whether a weight of two or more dims lies in a module whose cost is not known."""
    known = (nn.Linear, nn.Embedding)
    spoken_for: set[int] = set()
    for module in model.modules():
        if callable(getattr(module, "flops", None)):
            spoken_for.update(id(inner) for inner in module.modules())
        if id(module) in spoken_for or isinstance(module, known) or type(module).__name__ == "Conv1D":
            continue
        if any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False)):
            return True
    return False


def _heads_on_one_position(model: nn.Module) -> list[str]:
    """Modules that see one position of each sequence: poolers, and the classification heads behind them."""
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "pooler"]
    return names + (["classifier"] if classifies else [])


@dataclass(frozen=True)
class Trace:
    """What one forward pass of a micro-batch leaves in memory.

    Attributes:
        saved_bytes: tensors kept for the backward pass, without parameters and inputs.
        output_bytes: the output the loss is taken of, in fp32.
    """

    saved_bytes: int
    output_bytes: int


def trace_forward(make: Callable[[], nn.Module], loss: Callable[[nn.Module], torch.Tensor]) -> Trace:
    """Trace one forward pass without memory or arithmetic.

    Args:
        make: builds the model; called under fake tensors, so that it takes no memory.
        loss: puts a micro-batch through the model and returns the scalar loss; called under the same.

    Raises:
        UserError: the model does something that cannot be traced.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    saved: dict[int, torch.UntypedStorage] = {}
    outputs: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    def largest_output(module: nn.Module, arguments: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if isinstance(logits, torch.Tensor):
            outputs.append(logits.numel() * torch.float32.itemsize)

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = make()
            known = {p.untyped_storage()._cdata for p in [*model.parameters(), *model.buffers()]}
            model.register_forward_hook(largest_output)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = loss(model)
            total = sum(storage.nbytes() for key, storage in saved.items() if key not in known)
            del result
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UserError(f"this model cannot be traced for its memory: {str(error).splitlines()[0]}") from None
    return Trace(total, max(outputs, default=0))
