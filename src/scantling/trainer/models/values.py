"""Build a model on the meta device, and give each parameter its value alone, so that no process holds them all.

A value is read from the safetensors files of a model folder, or drawn by the model's own initialization with a seed of
its own. Drawn values differ from those of a model that is initialized as a whole, which draws one after the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.saved_models import Weights

Read = Callable[[str, Tensor], Tensor]
"""Return the value of a parameter or buffer on the CPU, given its name and the tensor of the meta model."""


class MetaModel:
    """A model on the meta device whose parameters and buffers get their values one after the other.

    Args:
        model: on the meta device; its buffers may have values.
        read: called for each tensor, on all processes in the same order.
        is_probed: True if a whole model with these weights has been probed.
    """

    def __init__(self, model: nn.Module, read: Read, *, is_probed: bool = True) -> None:
        self.model, self.is_probed, self._read = model, is_probed, read
        self._names: dict[int, str] = {}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for path, module in model.named_modules():
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                self._names.setdefault(id(tensor), f"{path}.{name}" if path else name)
                self._owners.setdefault(id(tensor), []).append((module, name))

    def fill(self, tensors: Iterable[Tensor], device: torch.device | str = "cpu") -> None:
        """Replace tensors by their values, at each place of the model that holds them."""
        for tensor in tensors:
            value = self._read(self._names[id(tensor)], tensor).to(device)
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            for module, name in self._owners[id(tensor)]:
                setattr(module, name, value)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Context in which new modules put parameters on the meta device, and keep the values of buffers."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    with patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


def stored_values(model: Any, weights: Weights) -> Read | None:
    """Return a reader of stored weights, or None if they are not the parameters of the model as they are.

    Args:
        model: of transformers, on the meta device but for its buffers, with tied weights.
        weights: of the model folder.

    Returns:
        The reader; None if a name or a shape differs, or if transformers converts weights of this model, as it merges
        the experts of a layer.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    kept = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in kept.items():
        names.setdefault(id(tensor), []).append(name)
    stored = weights.stored.keys()
    chosen = {key: next((name for name in same if name in stored), "") for key, same in names.items()}
    fits = all(name and weights.stored[name].shape == [*kept[name].shape] for name in chosen.values())
    if not fits or stored - kept.keys() or get_model_conversion_mapping(model, add_legacy=False):
        return None
    by_name = {name: chosen[id(tensor)] for name, tensor in kept.items()}

    def read(name: str, tensor: Tensor) -> Tensor:
        if name not in by_name:  # a buffer that is not stored
            return tensor
        from safetensors import safe_open

        key = by_name[name]
        with safe_open(weights.stored[key].file, "pt") as file:
            value: Tensor = file.get_tensor(key)
        return value.to(tensor.dtype, copy=True)

    return read


def drawn_values(model: Any, seed: int) -> Read:
    """Return a function that draws a parameter by the model's own initialization, with a seed from its name.

    Args:
        model: of transformers, on the meta device but for its buffers.
        seed: of all draws.

    Raises:
        UserError: when called for a parameter that the initialization does not reach.
    """

    def draw(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:  # a buffer
            return tensor
        value = nn.Parameter(torch.full(tensor.shape, torch.nan))
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        # transformers leaves out what has this mark; the modules around the parameter are initialized once more
        for each in model.parameters():
            each._is_hf_initialized = True
        parts = path.split(".") if path else []
        for count in range(len(parts) + 1):
            model.get_submodule(".".join(parts[:count]))._is_hf_initialized = False
        kept = owner._parameters[last]
        owner._parameters[last] = value
        try:
            with torch.random.fork_rng([]):
                torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]))
                model.initialize_weights()
        finally:
            owner._parameters[last] = kept
        if value.isnan().any():
            raise UserError(
                f"{name} of {type(model).__name__} has no initialization of its own, so that the model has to be built "
                "as a whole; take a machine with more memory"
            )
        return value.detach().to(tensor.dtype)

    return draw
