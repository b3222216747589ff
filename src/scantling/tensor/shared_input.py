"""One wide product for layers that share an input, such as Q, K and V.

    [t_q t_k t_v] = x [A_q A_k A_v]        then        y_q = t_q B_q,   y_k = t_k B_k,   y_v = t_v B_v

where A and B are the merged input and output cores. Each A is only one rank wide, so a separate product reads all of x
for little work. In the backward pass, the gradient of x is one product instead of three and a sum. This is used if all
layers would start with A anyway, that is for many tokens; not under `torch.compile`.

Within a forward pass of the parent module, the first layer called with a tensor computes the first product of all
layers. The others use it if they get the same unchanged tensor. The products are dropped when the forward pass
ends. If some product was not used, the layers are assumed not to share their input from then on, unless the pass is
checkpointed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scantling.numerics.torch_private import saved_tensor_hooks, version_counter
from scantling.tensor.contraction import Step, core_indices
from scantling.tensor.linear import TTLinear

Remainder: TypeAlias = tuple[Tensor, Sequence[Tensor], Sequence[Step]]
"""State after the first step of an order, (tokens, rank), with the remaining blocks and steps."""

SHARED_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("gate_proj", "up_proj"),
    ("wi_0", "wi_1"),
    ("w1", "w3"),
)
"""Names that transformers gives to layers that share an input, inside one module."""
_CROSS = re.compile(r"cross|encdec|encoder_attn", re.IGNORECASE)


@dataclass
class _Pass:
    """One forward pass of the parent module.

    Attributes:
        layers: layers that may share their input, by name.
        hooks: hooks of saved tensors at the start of the pass, such as those of a checkpoint.
        x: shared input tensor, and the state that must not change for its products to be valid.
        products: products of layers not called yet.
    """

    layers: dict[str, TTLinear]
    hooks: Any
    x: tuple[Tensor, tuple[Any, ...]] | None
    products: dict[str, Remainder]


class SharedInputGroup:
    """Linear layers of one module that receive the same tensor.

    Args:
        parent: the module.
        names: names of its `TTLinear` layers, which have the same input modes.
    """

    def __init__(self, parent: nn.Module, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.is_disabled = False
        self._passes: dict[int, _Pass] = {}  # by thread
        self._handles = [
            parent.register_forward_pre_hook(self._begin_pass),
            parent.register_forward_hook(self._end_pass, always_call=True),
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_passes": {}}

    def remove(self) -> None:
        """Remove the hooks from the module."""
        for handle in self._handles:
            handle.remove()

    def first_product(self, layer: TTLinear, x: Tensor, tokens: Tensor, steps: Sequence[Step]) -> Remainder | None:
        """Return x times the input cores of a layer, computed for all layers of this input at once.

        Args:
            layer: one of the layers.
            x: input of the layer, which identifies the shared tensor.
            tokens: the same values, (tokens, product of the input modes).
            steps: best order of this layer.

        Returns:
            The product and the remaining steps; None if the layer has to compute it itself.
        """
        current = self._passes.get(get_ident())
        # Inference tensors have no version counter, so that a change of x would go unnoticed.
        if current is None or not _starts_with_inputs(layer, steps) or x.is_inference():
            return None
        if _saving_hooks() is not current.hooks:
            return None
        name = next((name for name, other in current.layers.items() if other is layer), None)
        if name is None:
            return None
        if current.x is not None and current.x[0] is x and current.x[1] == _state(x) and name in current.products:
            return current.products.pop(name)
        if current.products:
            return None  # not the input of the previous layer
        products = _first_products(current.layers, tokens)
        if name not in products:
            return None
        own = products.pop(name)
        current.x, current.products = (x, _state(x)), products
        return own

    def _begin_pass(self, parent: nn.Module, *_: Any) -> None:
        if self.is_disabled or torch.compiler.is_compiling():
            return
        modules: dict[str, Any] = {name: getattr(parent, name, None) for name in self.names}
        layers = {name: module for name, module in modules.items() if getattr(module, "shared_input", None) is self}
        if len(layers) > 1 and _can_fuse(list(layers.values())):
            self._passes[get_ident()] = _Pass(layers, _saving_hooks(), None, {})

    def _end_pass(self, parent: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        ended = self._passes.pop(get_ident(), None)
        # A failed pass proves nothing; a checkpointed pass must be repeated in the same way.
        if ended is not None and ended.products and output is not None and ended.hooks is None:
            self.is_disabled = True


def _can_fuse(layers: Sequence[TTLinear]) -> bool:
    """True if one product can serve all layers."""
    kinds = {
        (core.dtype, core.device, layer.is_trainable, layer.formats) for layer in layers for core in layer.chain[:1]
    }
    return len(kinds) == 1 and not any(isinstance(core, DTensor) for layer in layers for core in layer.cores)


def _first_products(layers: dict[str, TTLinear], tokens: Tensor) -> dict[str, Remainder]:
    """Return the first product of all layers; empty if one of them starts differently."""
    orders = {name: layer._best_steps(tokens.shape[0]) for name, layer in layers.items()}
    if not all(_starts_with_inputs(layers[name], steps) for name, steps in orders.items()):
        return {}
    blocks = {name: layer.blocks(orders[name]) for name, layer in layers.items()}
    # x [A_q A_k A_v], then one piece for each layer.
    matrices = [own[0].reshape(orders[name][0].inner, -1) for name, own in blocks.items()]
    pieces = torch.split(tokens @ torch.cat(matrices, dim=1), [matrix.shape[1] for matrix in matrices], dim=1)
    return {name: (piece, own[1:], orders[name][1:]) for piece, (name, own) in zip(pieces, blocks.items(), strict=True)}


def _state(x: Tensor) -> tuple[Any, ...]:
    """Return the state that must not change for a product with x to stay valid."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return version_counter(x), x.requires_grad, torch.is_grad_enabled(), autocast


def _saving_hooks() -> Any:
    """Return the innermost saved-tensor hooks: a tensor saved under some hooks must not be used under others."""
    hooks = saved_tensor_hooks(even_if_tracing=True)
    return None if hooks is None else hooks[0]


def _starts_with_inputs(layer: TTLinear, steps: Sequence[Step]) -> bool:
    """True if the first step contracts all input cores, and no others."""
    return len(core_indices(steps[0].tree)) == len(layer.in_modes)


def fuse_shared_inputs(model: nn.Module) -> None:
    """Let TT layers that share an input, recognized by their names, compute the first product together."""
    for path, module in model.named_modules():
        for names in SHARED_INPUTS:
            # In cross-attention, K and V share the encoder's states, Q has another input.
            names = names[1:] if _CROSS.search(path) and len(names) == 3 else names
            layers = {name: layer for name in names if isinstance(layer := getattr(module, name, None), TTLinear)}
            input_shapes = {(layer.in_features, layer.in_modes) for layer in layers.values()}
            if len(set(layers.values())) > 1 and len(input_shapes) == 1:
                shared_input = SharedInputGroup(module, list(layers))
                for layer in layers.values():
                    layer.shared_input = shared_input
