"""Training with low-precision weights, activations, keys and values (`quantize_training`).

Source: Kumar et al., "Scaling Laws for Precision", arXiv 2411.04330, section 2: the forward pass is rounded, weights
with one scale per output, activations with one scale per tensor; gradients pass as if nothing had been rounded. We add
formats other than integers, other granularities, gradient rounding, TT layers, and hardware int8 and fp8 products.

Our default differs from the paper in one point: activations, keys, values and queries have one scale per token, not
one per tensor. With one scale per tensor, the logits of a token depend on later tokens and on the other sequences of
the batch. A causal model is then not causal, and generation with a cache differs from generation without one.
Granularity `tensor` gives the paper's setting.

A TT layer (`scantling.tensorize`) rounds its cores, with one scale for every index of the last bond, and its input.
Intermediate products are not rounded. Hardware products also round the intermediate results and merged blocks of
cores, to int8 or fp8_e4m3 by row and column, since these products only multiply such codes.

Cost: training stores nothing in low precision, and rounding takes passes over weights and activations. The autograd
graph holds the rounded weights and activations in addition to the master weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from scantling.errors import UserError
from scantling.numerics.device import warn_if_slow_matmul
from scantling.numerics.literals import Granularity
from scantling.numerics.torch_private import remove_forward_hooks
from scantling.precision.attention import has_quantized_attention, quantize_attention, restore_attention
from scantling.precision.layers import (
    LayerFormats,
    RoundedSubclass,
    RoundedWeight,
    enter_forward,
    leave_forward,
    quantized_class,
)
from scantling.precision.matmul import Compute, Matmul, check_device
from scantling.precision.matrices import (
    Filter,
    check_module,
    find_layers,
    is_table,
    is_tt,
    sharing_layers,
    warn_about_unquantized,
)
from scantling.precision.quantizer import Quantizer

logger = logging.getLogger(__name__)

FormatSpec: TypeAlias = Quantizer | str | Mapping[str, Any]
Weights: TypeAlias = Literal["master", "rounded"]

_FAST_PATHS: dict[type, tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
"""PyTorch modules that may bypass their submodules: the attribute that controls it, and the value that forbids it."""


def quantize_training(
    model: nn.Module,
    *,
    weights: FormatSpec | None = None,
    activations: FormatSpec | None = None,
    kv_cache: FormatSpec | None = None,
    queries: FormatSpec | None = None,
    gradients: FormatSpec | None = None,
    compute: Compute | None = None,
    filter_fn: Filter | None = None,
) -> nn.Module:
    """Quantize the weights, activations, keys and values that a model computes with while it trains, in place.

    Quantized layers are `nn.Linear`, the Conv1D of transformers, their subclasses, and TT layers. The output layer
    that `get_output_embeddings()` returns and embeddings inside a model are left unquantized, unless `filter_fn` takes
    them. A weight is rounded wherever the model reads it, even if the layer that holds it is never called; the input
    of such a product is not rounded. Parameters keep their names, ties and hooks, so that optimizers and checkpoints
    are unaffected: they hold the unrounded weights.

    Args:
        model: any module; for `kv_cache` and `queries`, a model of transformers.
        weights: a format by name (`int8`, `fp8_e4m3`, `mxfp4_e2m1`, ...), a mapping such as {"format": "int4",
            "group_size": 64}, or a `Quantizer`. A format by name has one scale per output.
        activations: format of the inputs of layers; by name with one scale per token.
        kv_cache: format of keys and values in the attention; by name with one scale per token and head.
        queries: format of queries in the attention; by name with one scale per token and head.
        gradients: format of the output gradients of layers, in both products of the backward pass. By name with one
            scale per token; with `compute`, one per row of each factor.
        compute: None simulates the formats. `int8` and `fp8` use hardware products, and need formats of weights and
            activations.
        filter_fn: function of a layer's name and the layer; True to quantize the layer.

    Returns:
        The model.

    Raises:
        UserError: if there is nothing to quantize, a format does not exist, formats contradict each other or are not
            supported by the hardware, or the model is already quantized. Later forward passes raise it if an
            unsupported attention has been set, which would round nothing.

    Source: Kumar et al., arXiv 2411.04330, sections 2 and 4.

    Example:
        >>> model = sc.quantize_training(model, weights="int8", activations="int8", kv_cache="int8")
    """
    check_module(model, "quantize_training")

    def quantizer(given: FormatSpec | None, granularity: Granularity = "token") -> Quantizer | None:
        return None if given is None else Quantizer.from_spec(given, granularity)

    formats = LayerFormats(
        quantizer(weights, "channel"),
        quantizer(activations),
        quantizer(gradients),
        None if compute is None else Matmul(compute),
    )
    has_layer_formats = any(each is not None for each in (formats.weights, formats.activations, formats.gradients))
    attention = quantizer(kv_cache), quantizer(queries)
    if not has_layer_formats and attention == (None, None):
        raise UserError("quantize_training: give a format for weights, activations, kv_cache, queries or gradients")
    if has_quantized_attention(model) or any(_is_quantized_layer(module) for module in model.modules()):
        raise UserError("quantize_training: the model is already quantized; call scantling.precision.restore first")
    # all checks come first, so that an error leaves the model unchanged
    if formats.hardware is not None:
        _check_products(model, formats, formats.hardware)
    layers = _layers_to_quantize(model, filter_fn, formats) if has_layer_formats else {}
    if not any(parameter.is_meta for parameter in model.parameters()):  # skip for planning on the meta device
        _warn_of_mixed_tokens({"activations": formats.activations, "kv_cache": attention[0], "queries": attention[1]})
    if attention != (None, None):
        quantize_attention(model, *attention)
    if layers:
        _quantize_layers(model, layers, formats)
        if filter_fn is None:
            taken = (each for module in layers.values() for each in module.parameters() if each.ndim > 1)
            warn_about_unquantized(model, taken, "quantize_training")
    return model


def restore(model: nn.Module, *, weights: Weights = "master") -> nn.Module:
    """Restore the layers and the attention that a model had before `quantize_training`, in place.

    Args:
        model: quantized or not.
        weights: `master` leaves the parameters unchanged. `rounded` writes the rounded weights into them (for TT
            layers the rounded cores, before hardware products round merged blocks).

    Returns:
        The model.

    Raises:
        UserError: if `weights` is neither.
    """
    check_module(model, "restore")
    if weights not in get_args(Weights):
        raise UserError(f"restore: weights must be {' or '.join(get_args(Weights))}; given {weights!r}")
    restore_attention(model)
    _set_forward_hooks(model, on=False)
    rounded: set[int] = set()
    for module in model.modules():
        if isinstance(module, tuple(_FAST_PATHS)):
            _set_fast_path(module, on=True)
        if not _is_quantized_layer(module):
            continue
        if weights == "rounded":
            _round_weights(module, rounded)
        if is_tt(module):
            module.formats = None  # type: ignore[assignment]
        else:
            module.__class__ = _plain_class(type(module))
            del module.formats
    return model


@torch.no_grad()
def _round_weights(module: nn.Module, done: set[int]) -> None:
    """Write the rounded weights of a layer into its parameters, except those in `done` (ids)."""
    layer: Any = module
    if is_tt(module):
        # The rounded cores include gain and gates.
        rounded = [
            *zip(layer.cores, layer.gated_cores(), strict=True),
            (layer.log_gain, torch.zeros_like(layer.log_gain)),
        ]
        if layer.rank_gates is not None:
            gates = zip(layer.rank_gates, layer.active_ranks(), strict=True)
            rounded += [(gate, torch.where(is_active, 1.0, gate)) for gate, is_active in gates]
    else:
        rounded = [(layer.master_weight(), layer.rounded_weight())]
    for parameter, value in rounded:
        if id(parameter) not in done:  # tied weights are written once
            done.add(id(parameter))
            parameter.copy_(value)


def _quantize(module: nn.Module, formats: LayerFormats) -> None:
    """Quantize one layer: a TT layer takes the formats, another layer changes its class in place."""
    if not is_tt(module):
        kind: type = type(module)
        module.__class__ = quantized_class(kind)
    elif is_table(module):
        formats = replace(formats, hardware=None)  # row lookups multiply nothing
    module.formats = formats  # type: ignore[assignment]


def _layers_to_quantize(model: nn.Module, filter_fn: Filter | None, formats: LayerFormats) -> dict[str, nn.Module]:
    """Return the layers to quantize by name; embeddings only if weights are quantized.

    Raises:
        UserError: if there are none.
    """
    layers = find_layers(model, filter_fn)
    if formats.weights is None:
        layers = {name: each for name, each in layers.items() if not isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    if not layers:
        raise UserError(_no_layers_message(model, filter_fn))
    return layers


def _quantize_layers(model: nn.Module, layers: Mapping[str, nn.Module], formats: LayerFormats) -> None:
    """Quantize layers of a model, and the weights that other layers share with them."""
    for module in layers.values():
        _quantize(module, formats)
    custom = sorted({type(each).plain.__name__ for each in layers.values() if isinstance(each, RoundedSubclass)})
    if formats.hardware is not None and custom:
        logger.warning("quantize_training: products of %s are simulated, since their forward pass is custom", custom)
    if formats.weights is not None:
        # A tied weight must have the same rounded values in every layer that reads it, also in one the filter left out.
        for module in sharing_layers(model, layers.values()):
            _quantize(module, LayerFormats(weights=formats.weights))
        _set_forward_hooks(model)
    # the fused paths of nn.TransformerEncoder read weights without calling the layers
    for module in model.modules():
        if isinstance(module, tuple(_FAST_PATHS)) and any(map(_is_quantized_layer, module.modules())):
            _set_fast_path(module, on=False)


def _set_forward_hooks(model: nn.Module, *, on: bool = True) -> None:
    """Add or remove hooks that mark forward passes of modules around quantized layers, which read rounded weights."""
    for module in model.modules():
        if not on:
            leave_forward(module)
            remove_forward_hooks(module, [enter_forward, leave_forward])
        elif _contains_rounded_weights(module):
            module.register_forward_pre_hook(enter_forward)
            # always_call: a forward pass that raises must not leave the module marked as running
            module.register_forward_hook(leave_forward, always_call=True)


def _contains_rounded_weights(module: nn.Module) -> bool:
    return not isinstance(module, RoundedWeight) and any(isinstance(each, RoundedWeight) for each in module.modules())


def _check_products(model: nn.Module, formats: LayerFormats, matmul: Matmul) -> None:
    """Raise a UserError if the hardware cannot multiply these formats; warn if it is slow."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    check_device(matmul.name, device)
    if not torch.cuda.is_available():  # with a GPU, the model may still be moved there
        warn_if_slow_matmul(matmul.name, device, f"leave out compute: {matmul.name} to simulate them")
    matmul.check(formats.weights, "weights")
    matmul.check(formats.activations, "activations")
    if formats.gradients is not None:
        matmul.check(formats.gradients, "gradients")
    given = [each for each in (formats.weights, formats.activations, formats.gradients) if each is not None]
    for one, other in combinations(given, 2):
        matmul.check_pair(one, other)


def _warn_of_mixed_tokens(given: Mapping[str, Quantizer | None]) -> None:
    """Log a warning if tokens share a scale with later tokens and with other sequences."""
    mixing = [f"{part} ({quantizer})" for part, quantizer in given.items() if quantizer and quantizer.mixes_tokens]
    if mixing:
        logger.warning(
            "quantize_training: all tokens of a batch share scales of %s, so that the outputs for a token depend on "
            "later tokens and on the other sequences; granularity='token' avoids that",
            " and ".join(mixing),
        )


def _is_quantized_layer(module: nn.Module) -> bool:
    return isinstance(getattr(module, "formats", None), LayerFormats)


def _plain_class(kind: type) -> type:
    """Return the class of a layer before quantization; a class sharded since (`fully_shard`) stays sharded."""
    if "plain" in vars(kind):
        return vars(kind)["plain"]  # type: ignore[no-any-return]
    # `fully_shard` derives a class from the quantized one; derive the same class from the plain one instead.
    bases = tuple(_plain_class(base) if issubclass(base, nn.Module) else base for base in kind.__bases__)
    rest = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__.replace("Quantized", ""), bases, rest)


def _set_fast_path(module: nn.Module, *, on: bool) -> None:
    """Allow or forbid PyTorch's fused path, which bypasses submodules and would use the unrounded weights.

    For this path, `nn.TransformerEncoder` packs padded inputs into nested tensors, which other code cannot handle.
    """
    known: dict[str, Any] = vars(module)
    name, off = next(switch for kind, switch in _FAST_PATHS.items() if isinstance(module, kind))
    if on and "_fast_path" in known:
        known[name] = known.pop("_fast_path")
    elif not on:
        known["_fast_path"], known[name] = known[name], off


def _no_layers_message(model: nn.Module, filter_fn: Filter | None) -> str:
    count = len(find_layers(model, lambda *_: True))
    if filter_fn is not None and count:
        return f"quantize_training: filter_fn takes none of the {count} layers of this {type(model).__name__}"
    return (
        f"quantize_training: this {type(model).__name__} has no linear layers that can be quantized; embeddings and "
        "the output layer are only quantized if filter_fn takes them"
    )
