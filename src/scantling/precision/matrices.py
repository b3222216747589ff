"""Weights of a model as matrices whose rows are channels, for every kind of layer.

| layer                         | parameter             | row                          | columns          |
| `nn.Linear`                   | (out, in)             | one output                   | inputs           |
| Conv1D of transformers        | (in, out)             | one output                   | inputs           |
| `nn.Embedding`                | (entries, dim)        | one entry                    | dim              |
| TT layer, each core           | (r, modes..., r')     | one index of the last bond   | r and the modes  |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scantling.conv1d import is_conv1d_subclass
from scantling.errors import UserError
from scantling.groups import output_layers
from scantling.numerics.torch_private import own_parameters
from scantling.precision.quantizer import in_dtype

logger = logging.getLogger(__name__)

Filter: TypeAlias = Callable[[str, nn.Module], bool]
_MAX_UNQUANTIZED = 0.1
"""Maximum share of a model's matrix parameters that may stay unquantized without a warning."""


@dataclass(eq=False)
class WeightMatrix:
    """One weight of a model, read and written as a matrix.

    Attributes:
        name: name of the parameter in the model.
        parameter: the weight.
        channels_last: True if the last dim of the parameter is the channel dim, False if it is the first.
        modules: layers that multiply their input by the weight; empty for embedding tables and TT cores.
        names: all names of the parameter in the model, including tied ones.
    """

    name: str
    parameter: nn.Parameter
    channels_last: bool
    modules: list[nn.Module] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def read(self) -> Tensor:
        """Return the weight as (channels, columns), as a view of the parameter if possible."""
        return as_matrix(self.parameter.detach(), self.channels_last)

    def write(self, values: Tensor) -> None:
        """Copy (channels, columns) into the parameter, cast to its dtype."""
        with torch.no_grad():
            shaped = from_matrix(values, self.parameter.shape, self.channels_last)
            self.parameter.copy_(in_dtype(shaped, self.parameter.dtype))


def as_matrix(tensor: Tensor, channels_last: bool) -> Tensor:
    """Return a parameter as a (channels, columns) matrix."""
    return tensor.reshape(-1, tensor.shape[-1]).t() if channels_last else tensor.reshape(tensor.shape[0], -1)


def from_matrix(matrix: Tensor, shape: torch.Size | tuple[int, ...], channels_last: bool) -> Tensor:
    """Return the parameter of a (channels, columns) matrix: the inverse of `as_matrix`."""
    return (matrix.t() if channels_last else matrix).reshape(shape)


def check_module(model: Any, caller: str) -> None:
    """Raise a UserError if `model` is not an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise UserError(f"{caller} takes a model, a torch.nn.Module; given {model!r}")


def find_matrices(model: nn.Module, filter_fn: Filter | None = None) -> list[WeightMatrix]:
    """Return the weights to quantize, each once, in the order of the model.

    Args:
        model: any module.
        filter_fn: see `find_layers`.

    Raises:
        UserError: if there are none, or if weights are sharded, on the meta device, or hold NaN or Inf.
    """
    matrices: dict[int, WeightMatrix] = {}  # by parameter id, so that a tied weight counts once
    for name, module in find_layers(model, filter_fn).items():
        for parameter_name, parameter, channels_last in _weights(name, module):
            matrices.setdefault(id(parameter), WeightMatrix(parameter_name, parameter, channels_last))
    if not matrices:
        raise UserError(_no_layers_message(model, filter_fn))
    _record_uses(model, matrices)
    for matrix in matrices.values():
        _check(matrix)
    return list(matrices.values())


def find_layers(model: nn.Module, filter_fn: Filter | None = None) -> dict[str, nn.Module]:
    """Return the layers to quantize by name. Training, export and post-training quantization share this choice.

    Included are `nn.Linear`, the Conv1D of transformers, embeddings, subclasses of all three, and TT layers. Excluded
    are layers whose weight is not their own parameter (`weight_norm` computes it), and parameters that no such layer
    holds, such as `in_proj_weight` of `nn.MultiheadAttention`, those of an LSTM, or stacked experts.

    Args:
        model: any module.
        filter_fn: function of a layer's name and the layer; True to take the layer. Default: all layers except
            embeddings inside a model, the layers that `get_output_embeddings()` returns, and linear layers that share
            a weight with these.
    """
    takes = _filter_or_default(model, filter_fn)
    layers = {name: module for name, module in model.named_modules() if _has_weights(module)}
    chosen = {name: module for name, module in layers.items() if takes(name, module)}
    if filter_fn is None:
        # A layer that shares a weight with an excluded one, such as a tied head, is excluded too.
        others = (module for name, module in layers.items() if name not in chosen)
        left_alone = {id(weight) for module in others for _, weight, _ in _weights("", module)}
        chosen = {name: each for name, each in chosen.items() if not _has_any_weight(each, left_alone)}
    return chosen


def sharing_layers(model: nn.Module, chosen: Iterable[nn.Module]) -> list[nn.Module]:
    """Return further layers that hold a weight of the chosen ones, such as the embedding of a tied head."""
    taken = {id(module): module for module in chosen}
    weights = {id(weight) for module in taken.values() for _, weight, _ in _weights("", module)}
    return [module for module in model.modules() if id(module) not in taken and _has_any_weight(module, weights)]


def warn_about_unquantized(model: nn.Module, taken: Iterable[Tensor], caller: str) -> None:
    """Log a warning if more than 10 % of a model's matrix parameters are in layers of unknown types.

    Args:
        model: any module.
        taken: the weights that are quantized.
        caller: name of the calling function, for the message.
    """
    chosen = {id(parameter): parameter.numel() for parameter in taken}
    left_alone = [*output_layers(model), *(module for module in model.modules() if is_table(module))]
    known = {id(parameter) for module in left_alone for parameter in module.parameters()} | set(chosen)
    rest = {name: each.numel() for name, each in model.named_parameters() if each.ndim > 1 and id(each) not in known}
    unquantized = sum(rest.values())
    if unquantized > _MAX_UNQUANTIZED * (sum(chosen.values()) + unquantized):
        logger.warning(
            "%s: %.0f %% of the matrix parameters stay unquantized, since their layers are of unknown types: %s",
            *(caller, 100.0 * unquantized / (sum(chosen.values()) + unquantized), ", ".join(list(rest)[:3])),
        )


def _filter_or_default(model: nn.Module, filter_fn: Filter | None) -> Filter:
    """Return the filter. Default: all layers except tables inside a model and the output embeddings.

    Raises:
        UserError: if the filter is not callable.
    """
    if filter_fn is not None:
        if not callable(filter_fn):
            raise UserError(f"filter_fn must be a function of a name and a module; given {filter_fn!r}")
        return filter_fn
    heads = {id(head) for head in output_layers(model)}
    return lambda _, module: (not is_table(module) or module is model) and id(module) not in heads


def is_table(module: nn.Module) -> bool:
    """True if a layer looks up rows: an embedding, dense or TT."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or (is_tt(module) and not hasattr(module, "in_features"))


def is_tt(module: nn.Module) -> bool:
    """True for a TT layer, whose weight is a chain of cores made by `sc.tensorize`."""
    return isinstance(getattr(module, "cores", None), nn.ParameterList) and hasattr(module, "parameter_roles")


def _has_weights(module: nn.Module) -> bool:
    return is_tt(module) or any(True for _ in _weights("", module))


def _has_any_weight(module: nn.Module, weights: set[int]) -> bool:
    return any(id(weight) in weights for _, weight, _ in _weights("", module))


def _weights(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yield (name, parameter, channels_last) for each weight of a layer that can be quantized."""
    prefix = f"{name}." if name else ""
    if is_tt(module):
        for i, core in enumerate(module.get_submodule("cores").parameters()):
            if core.numel():  # empty after all ranks of a bond were removed
                yield f"{prefix}cores.{i}", core, True
    elif is_conv1d_subclass(type(module)) or isinstance(module, nn.Linear | nn.Embedding | nn.EmbeddingBag):
        weight = own_parameters(module).get("weight")  # missing if `weight_norm` or similar computes it
        if weight is not None and weight.is_floating_point() and not is_lazy(weight):
            yield f"{prefix}weight", weight, is_conv1d_subclass(type(module))


def _record_uses(model: nn.Module, matrices: dict[int, WeightMatrix]) -> None:
    """Record all names of each parameter and the layers that multiply by it; no layers if any layer looks it up."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in matrices:
            matrices[id(parameter)].names.append(name)
    looked_up = set()
    for name, module in model.named_modules():
        for _, parameter, _ in _weights(name, module):
            if id(parameter) in matrices and (is_table(module) or is_tt(module)):
                looked_up.add(id(parameter))
            elif id(parameter) in matrices:
                matrices[id(parameter)].modules.append(module)
    # a GPTQ Hessian would describe only some of the uses of a weight that is also looked up
    for key in looked_up:
        matrices[key].modules.clear()


def _check(matrix: WeightMatrix) -> None:
    data = matrix.parameter.data
    # DTensors and other subclasses cannot be read as one matrix
    if type(data) is not Tensor or data.is_meta:
        kind = "on the meta device" if data.is_meta else f"a {type(data).__name__}"
        raise UserError(f"{matrix.name} is {kind}; quantize the model after its weights are loaded and before sharding")
    if not bool(torch.isfinite(data).all()):
        raise UserError(f"{matrix.name} holds NaN or Inf and cannot be quantized; load another checkpoint")


def _no_layers_message(model: nn.Module, filter_fn: Filter | None) -> str:
    if filter_fn is None:
        return f"{type(model).__name__} has no linear layers except its output layer; choose layers with filter_fn"
    return f"filter_fn takes no layer of {type(model).__name__}; it can take linear layers, embeddings and TT layers"
