"""Layers of one input, such as Q, K and V, in one wide product.

    [t_q t_k t_v] = x [A_q A_k A_v]        then        y_q = t_q B_q,   y_k = t_k B_k,   y_v = t_v B_v

with A and B the merged cores of input and output. Each A is only a rank wide: alone it reads all of x for little work.
And in the backward pass the gradient of x is one product in place of three and their sum. It is done where all of the
layers would begin with A anyway, which is where there are many tokens; under `torch.compile` it is not.

The layer that is called first with a tensor computes the first product of all. The others find theirs if they are given
the same tensor, unchanged, before anything else has changed; if not, they compute as ever.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scantling.tensor.contraction import Step, cores_of

if TYPE_CHECKING:
    from scantling.tensor.linear import TTLinear

Rest: TypeAlias = tuple[Tensor, Sequence[Tensor], Sequence[Step]]
"""The state after the first step of an order, (tokens, rank), with the blocks and steps that follow."""

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("gate_proj", "up_proj"),
    ("wi_0", "wi_1"),
    ("w1", "w3"),
)
"""Names that transformers gives to layers of one input, inside one module."""
_CROSS = re.compile(r"cross|encdec|encoder_attn", re.IGNORECASE)
_MOST_WASTED = 3
"""Products that some layer never asked for, one after the other, after which they are taken to share no input."""


class Joint:
    """Linear layers that are given the same tensor.

    Args:
        layers: `TTLinear` layers with the same modes of the input.
    """

    def __init__(self, layers: Sequence[TTLinear]) -> None:
        self.layers = tuple(layers)
        self._wasted = 0
        self._waiting: _Waiting | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_waiting": None}

    def first_product(self, layer: TTLinear, x: Tensor, flat: Tensor, steps: Sequence[Step]) -> Rest | None:
        """x with the input cores of a layer, computed for all layers of this input at once.

        Args:
            layer: one of them.
            x: what it was called with, by which the others know it.
            flat: the same, (tokens, product of the input modes).
            steps: the best order of this layer.

        Returns:
            The product and what is left to do; None where the layer is to go its own way.
        """
        if self._wasted >= _MOST_WASTED or not _begins_with_input(layer, steps):
            return None
        mine = next((place for place, each in enumerate(self.layers) if each is layer), None)
        if mine is None:  # a replica of one of them
            return None
        waiting = self._waiting
        if waiting is not None and mine in waiting.products and waiting.is_for(x, self.layers):
            found = waiting.products.pop(mine)
            if not waiting.products:
                self._waiting, self._wasted = None, 0
            return found
        self._wasted += waiting is not None
        self._waiting = None
        return self._computed(mine, x, flat) if self._alike() else None

    def _alike(self) -> bool:
        """Whether one product can serve all layers."""
        kinds = {(core.dtype, core.device, core.requires_grad) for core in (each.cores[0] for each in self.layers)}
        return len(kinds) == 1 and not any(isinstance(core, DTensor) for each in self.layers for core in each.cores)

    def _computed(self, mine: int, x: Tensor, flat: Tensor) -> Rest | None:
        orders = [each._order(flat.shape[0]) for each in self.layers]
        if not all(map(_begins_with_input, self.layers, orders)):
            return None
        blocks = [each.blocks(steps) for each, steps in zip(self.layers, orders, strict=True)]
        matrices = [own[0].reshape(steps[0].inner, -1) for own, steps in zip(blocks, orders, strict=True)]
        product = flat @ torch.cat(matrices, dim=1)
        pieces = torch.split(product, [matrix.shape[1] for matrix in matrices], dim=1)
        found: dict[int, Rest] = {
            place: (piece, own[1:], steps[1:])
            for place, (piece, own, steps) in enumerate(zip(pieces, blocks, orders, strict=True))
        }
        result = found.pop(mine)
        self._waiting = _Waiting(x, self.layers, found)
        if product.requires_grad:
            product.register_hook(self._dropping())  # type: ignore[no-untyped-call]  # a backward pass frees what another one would need
        return result

    def _dropping(self) -> Callable[[Tensor], None]:
        joint = weakref.ref(self)

        def drop(_: Tensor) -> None:
            if (alive := joint()) is not None:
                alive._waiting = None

        return drop


class _Waiting:
    """Products for the layers that have not been called yet, by their place."""

    def __init__(self, x: Tensor, layers: Sequence[TTLinear], products: dict[int, Rest]) -> None:
        self._x, self._state = weakref.ref(x), _state(x, layers)
        self.products = products

    def is_for(self, x: Tensor, layers: Sequence[TTLinear]) -> bool:
        return self._x() is x and self._state == _state(x, layers)


def _state(x: Tensor, layers: Sequence[TTLinear]) -> tuple[Any, ...]:
    """What must be as it was for a product to be right."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    parts = [x, *(part for layer in layers for part in (*layer.cores, *(layer.controls or ())))]
    versions = [(id(part), 0 if part.is_inference() else part._version) for part in parts]
    return torch.is_grad_enabled(), autocast, [layer._shared is None for layer in layers], versions


def _begins_with_input(layer: TTLinear, steps: Sequence[Step]) -> bool:
    """Whether the first step takes all cores of the input, and no others."""
    return len(cores_of(steps[0].tree)) == len(layer.in_modes)


def join_siblings(model: nn.Module) -> None:
    """Let the layers of cores in a model that share an input by their names compute its first product together."""
    from scantling.tensor.linear import TTLinear

    for path, module in model.named_modules():
        for names in SIBLINGS:
            names = names[1:] if _CROSS.search(path) and len(names) == 3 else names
            layers = [layer for name in names if isinstance(layer := getattr(module, name, None), TTLinear)]
            if len(set(layers)) > 1 and len({(layer.in_features, layer.in_modes) for layer in layers}) == 1:
                joint = Joint(layers)
                for layer in layers:
                    layer.joint = joint
