"""Cost of a model, predicted before a run: FLOPs, and memory of the forward and backward pass.

FLOPs count matrix products only, two per multiply-add, as is usual (Kaplan et al., arXiv 2001.08361, section 2.1).
Elementwise operations, norms and softmax are not counted. The backward pass costs twice the forward pass: one product
for the gradient of the input and one for the gradient of the weight. Attention counts every pair of positions, masked
or not. Its backward pass costs twice its forward pass; products that a fused kernel recomputes are not counted. The
results therefore agree with `torch.utils.flop_counter` for the unfused kernel. FLOPs that activation checkpointing
recomputes are reported separately.

A module whose product is cheaper than its shapes suggest reports its own cost through a method `flops(tokens: int) ->
int` (forward). This cost then covers all modules inside it.

There are two ways to count FLOPs. `forward_flops` sums over the layers, from their shapes, and runs nothing.
`trace_step` runs one micro-batch with fake tensors, which have shapes but no memory, and counts every product,
however the architecture uses its layers. Memory comes from the trace only, because formulas for it would be wrong for
the next architecture: the trace follows each allocation until it is freed.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from scantling.conv1d import is_conv1d_subclass
from scantling.errors import UserError, first_line
from scantling.numerics.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    cpu_flash_attention,
    overload_packet,
    saved_tensor_hooks,
    storage_key,
)

BACKWARD = 2
"""Cost of the backward pass as a multiple of the forward pass."""


def linear_flops(tokens: int, in_features: int, out_features: int) -> int:
    """Return the forward FLOPs of a linear layer applied to `tokens` vectors."""
    return 2 * tokens * in_features * out_features


def attention_flops(sequences: int, seq_len: int, num_heads: int, head_dim: int) -> int:
    """Return the forward FLOPs of the two products of self-attention, Q Kᵀ and its product with V, over all heads."""
    # two products of 2 * seq_len * seq_len * head_dim each
    return 4 * sequences * num_heads * seq_len * seq_len * head_dim


def forward_flops(model: nn.Module, *, sequences: int, seq_len: int) -> int | None:
    """Return the forward FLOPs of a transformers model, from the shapes of its layers.

    Args:
        model: a transformers model that applies each layer once to every token, such as Llama, GPT-2 or BERT. It may
            be on the meta device.
        sequences: number of sequences.
        seq_len: length of each sequence in tokens.

    Returns:
        The FLOPs. None for an encoder-decoder model, a model without plain attention, or a model with other weight
        matrices than those of linear layers and embeddings (experts, convolutions).
    """
    tokens = sequences * seq_len
    config: Any = model.config
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if layers is None or heads is None or getattr(config, "is_encoder_decoder", False):
        return None
    total = 0
    for flops in _products(model, tokens, sequences):
        if flops is None:
            return None
        total += flops
    # some models set a head_dim that differs from hidden_size / heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return total + int(layers) * attention_flops(sequences, seq_len, heads, head_dim)


def _products(model: nn.Module, tokens: int, sequences: int) -> Iterator[int | None]:
    """Yield the FLOPs of each matrix product; None for a module whose matrices are used in an unknown way."""
    pooled = _heads_on_one_position(model)
    # modules inside of one that reports its own cost, which must not count again
    spoken_for: set[int] = set()
    module: Any
    for name, module in model.named_modules():
        if id(module) in spoken_for:
            continue
        # vectors that the module multiplies: one per sequence for heads on one position, else one per token
        seen = sequences if any(name == head or name.startswith(head + ".") for head in pooled) else tokens
        if states_flops(module):
            spoken_for.update(id(inner) for inner in module.modules())
            yield int(module.flops(seen))
        elif isinstance(module, nn.Linear) or is_conv1d_subclass(type(module)):
            first, second = module.weight.shape
            # Conv1D stores (in, out) and Linear (out, in); the product is the same
            yield linear_flops(seen, first, second)
        # a lookup costs no product; any other matrix is used in a way that its shape does not tell
        elif not isinstance(module, nn.Embedding) and any(map(_is_matrix, module.parameters(recurse=False))):
            yield None


def _is_matrix(parameter: torch.Tensor) -> bool:
    # a shape such as (1, 1, dim) is a vector
    return sum(length > 1 for length in parameter.shape) > 1


def states_flops(module: Any) -> bool:
    """Return True if a module reports its own cost."""
    return callable(getattr(module, "flops", None))


def _heads_on_one_position(model: nn.Module) -> list[str]:
    """Return the names of modules that see one position of each sequence: poolers, and the classifiers after them."""
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "pooler"]
    return names + (["classifier"] if classifies else [])


@dataclass(frozen=True)
class Trace:
    """Cost of the forward and backward pass of one micro-batch; memory excludes parameters and buffers.

    Attributes:
        forward_flops: FLOPs of the forward pass.
        recomputed_flops: forward FLOPs that the backward pass repeats because of activation checkpointing.
        activation_bytes: memory held at the end of the forward pass: saved activations, inputs and outputs.
        peak_bytes: peak memory, including the gradients that the backward pass allocates.
    """

    forward_flops: int
    recomputed_flops: int
    activation_bytes: int
    peak_bytes: int


def trace_step(
    model: nn.Module,
    loss: Callable[[nn.Module], torch.Tensor],
    *,
    gradients_held: bool = False,
    step_bytes: int | None = None,
) -> Trace:
    """Trace the forward and backward pass of one micro-batch without memory or arithmetic.

    Kernels are selected as on a CPU. Memory that a kernel allocates and frees internally is not counted.

    Args:
        model: on the meta device. It holds fake tensors afterwards and cannot be used again.
        loss: creates a micro-batch, passes it through the model and returns the scalar loss; called under fake
            tensors.
        gradients_held: True if the gradients are already allocated, as with gradient accumulation; `peak_bytes` then
            excludes them.
        step_bytes: temporary memory of one parameter's optimizer step, if the optimizer steps each parameter within
            the backward pass and frees its gradient; None if all gradients are kept.

    Raises:
        UserError: the model cannot be traced, for example because its control flow depends on values.
    """
    try:
        # its errors are also raised
        with (
            silent_logger("torch._subclasses.fake_tensor", logging.CRITICAL),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            # fake tensors on the CPU: kernels are selected by device, and meta tensors would select others
            model.to_empty(device="cpu")
            # to_empty allocates each parameter separately, which breaks ties
            tie = getattr(model, "tie_weights", None)
            if tie is not None:
                tie()
            parameters = [p for p in model.parameters() if p.requires_grad]
            # gradients that exist before the pass are known to the meter, which does not count them
            if gradients_held:
                for parameter in parameters:
                    parameter.grad = torch.empty_like(parameter)
            if step_bytes is not None:
                for parameter in parameters:
                    parameter.register_post_accumulate_grad_hook(partial(_step_and_free, num_bytes=step_bytes))  # type: ignore[no-untyped-call]
            # after to_empty and tie_weights, which replace the storages that the meter identifies tensors by
            gradients = [p.grad for p in parameters if p.grad is not None]
            meter = _Meter([*model.parameters(), *model.buffers(), *gradients])
            with _stated_flops(model, meter), meter, _traceable_experts():
                result = loss(model)
                # read at the peak of stored activations, before the backward pass frees them
                flops, activations = meter.flops, meter.live_bytes
                meter.in_backward = True
                result.backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # the code of any architecture runs here, on tensors that it was not written for
        raise UserError(f"this model cannot be traced: {first_line(error)}") from None
    # in the backward pass the meter counts recomputed products only
    return Trace(flops, meter.flops - flops, activations, meter.peak_bytes)


def _step_and_free(parameter: torch.Tensor, *, num_bytes: int) -> None:
    # seen by the meter, then freed at once: the temporaries of the step
    torch.empty(num_bytes, dtype=torch.uint8)
    parameter.grad = None


@contextlib.contextmanager
def no_packed_documents() -> Iterator[None]:
    """Disable transformers' detection of packed documents, which treats all fake tensors as packed.

    For real tensors, transformers inspects the position ids and builds no mask if each row is one document.
    """
    from transformers import masking_utils

    with _replaced(masking_utils, "find_packed_sequence_indices", lambda position_ids: None):
        yield


@contextlib.contextmanager
def _traceable_experts() -> Iterator[None]:
    """Make transformers' experts avoid torch's grouped matrix product, which rejects fake fp32 tensors.

    The fallback of transformers has the same shapes and accepts them.
    """
    from transformers.integrations import moe

    with _replaced(moe, "_can_use_grouped_mm", lambda *args: False):
        yield


@contextlib.contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    found = getattr(module, name, None)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, found)


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of forward FLOPs and of live bytes: the memory of every operation's outputs until it is freed.

    Args:
        known: tensors whose memory is not counted.

    Attributes:
        in_backward: True during the backward pass, where only recomputed FLOPs count.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {storage_key(tensor.untyped_storage()) for tensor in known}
        self._live: dict[int, int] = {}
        self._formulas = _flop_formulas()
        self.in_backward = False
        self.flops = 0
        self.live_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # run first: the formulas need the shapes of the output
        result = func(*args, **kwargs)
        formula = self._formulas.get(overload_packet(func))
        if formula is not None and (not self.in_backward or _is_recomputing()):
            self.flops += int(formula(*args, **kwargs, out_val=result))
        # views share the storage of their base, so they add nothing
        for value in result if isinstance(result, list | tuple) else (result,):
            if isinstance(value, torch.Tensor):
                self._allocated(value.untyped_storage())
        return result

    def _allocated(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key in self._known or key in self._live:
            return
        self._live[key] = storage.nbytes()
        self.live_bytes += self._live[key]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        # drop the key with the storage, because a later storage may get the same address
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.live_bytes -= self._live.pop(key)


def _is_recomputing() -> bool:
    """Return True during recomputation in the backward pass: only then are saved-tensor hooks active there."""
    return saved_tensor_hooks(even_if_tracing=False) is not None


def _flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return torch's FLOP formulas, plus those for CPU flash attention and transformers' experts, which torch lacks."""
    from torch.utils.flop_counter import flop_registry
    from transformers.integrations import moe  # noqa: F401 (registers its product)

    def fused_attention(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> int:
        # query (batch, heads, length, head_dim), key (batch, heads, key length, head_dim)
        sequences, heads, length, head_dim = query.shape
        return 4 * sequences * heads * length * key.shape[-2] * head_dim

    def grouped(vectors: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> int:
        return linear_flops(len(vectors), *weight.shape[1:])  # one vector per (token, expert) pair

    return {
        **flop_registry,
        cpu_flash_attention(): fused_attention,
        torch.ops.transformers.grouped_mm_fallback: grouped,
    }


@contextlib.contextmanager
def _stated_flops(model: nn.Module, meter: _Meter) -> Iterator[None]:
    """Replace the counted FLOPs inside modules that report their own cost by the reported number."""
    # a stack: a module that reports its cost may contain another one, whose number the outer one replaces
    before: list[int] = []

    # hooks also run while checkpointing recomputes a module, so recomputed products are replaced, too
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        before.append(meter.flops)

    def leave(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        # activations (..., features) hold one vector per leading index; token ids (...) are one lookup each
        vectors = first[..., 0] if first.is_floating_point() else first
        meter.flops = before.pop() + int(module.flops(vectors.numel()))

    stating = [module for module in model.modules() if states_flops(module)]
    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in stating]
    handles += [module.register_forward_hook(leave, with_kwargs=True) for module in stating]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def silent_logger(name: str, level: int) -> Iterator[None]:
    """Context in which a logger emits only messages of at least this level."""
    named = logging.getLogger(name)
    before = named.level
    named.setLevel(level)
    try:
        yield
    finally:
        named.setLevel(before)
