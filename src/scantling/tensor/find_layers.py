"""Search for layers that can become TT layers, and for modules that share their weights."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor, nn

from scantling.conv1d import is_conv1d
from scantling.numerics.torch_private import own_parameters
from scantling.tensor.embedding import unsupported_reason
from scantling.tensor.experts import DOWN_PROJ, is_fused_experts, up_name

Table: TypeAlias = nn.Embedding | nn.EmbeddingBag


@dataclass
class Candidate:
    """Modules that become one TT layer, and the heads that are tied to it.

    Attributes:
        module: first of the modules.
        names: names of these modules in the model.
        heads: linear layers that share the weight of `module`, with their names.
    """

    module: nn.Module
    names: list[str]
    heads: list[tuple[nn.Linear, list[str]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def weights(self) -> list[nn.Parameter]:
        """Weights that the cores replace."""
        if is_fused_experts(self.module):
            return [self.module.get_parameter(name) for name in (up_name(self.module), DOWN_PROJ)]
        return [self.module.get_parameter("weight")]


def find_layers(model: nn.Module) -> tuple[list[Candidate], dict[str, str]]:
    """Return all layers that can become TT layers.

    Only exact classes count, since the forward pass of a subclass may compute more.

    Returns:
        Sites in the order of the model, and reasons for linear layers and tables that cannot be converted.
    """
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    owners: dict[int, list[nn.Module]] = defaultdict(list)
    for module in names:
        for parameter in own_parameters(module).values():
            if parameter is not None:
                owners[id(parameter)].append(module)

    candidates: list[Candidate] = []
    refused: dict[str, str] = {}
    tied: set[nn.Module] = set()
    for module in names:
        if module in tied or not (is_linear(module) or is_embedding(module) or is_fused_experts(module)):
            continue
        candidate = Candidate(module, names[module])
        sharing = [each for weight in candidate.weights for each in owners[id(weight)] if each is not module]
        if is_linear(module) and any(is_embedding(each) for each in sharing):
            continue  # a head is converted with its table
        reason = _refusal(module, candidate.weights) or _tied_refusal(module, sharing)
        if reason:
            refused |= {name: reason for each in (module, *sharing) for name in names[each]}
            continue
        for each in sharing:
            if isinstance(each, nn.Linear):
                candidate.heads.append((each, names[each]))
            else:
                candidate.names.extend(names[each])
        tied.update(sharing)
        candidates.append(candidate)
    return candidates, refused


def is_linear(module: nn.Module) -> bool:
    return (type(module) is nn.Linear or is_conv1d(type(module))) and _has_weight(module)


def is_embedding(module: nn.Module) -> bool:
    return type(module) in (nn.Embedding, nn.EmbeddingBag) and _has_weight(module)


def _has_weight(module: nn.Module) -> bool:
    """True if the weight is a parameter; the old `weight_norm` and others compute it from other parameters."""
    return own_parameters(module).get("weight") is not None


def _refusal(module: nn.Module, weights: list[nn.Parameter]) -> str | None:
    """Return why a module cannot be replaced; None if it can."""
    if "forward" in vars(module):
        return "its forward was replaced, as offloading does; convert the model before that"
    for weight in weights:
        if not weight.numel():
            return f"its weight has no numbers, {tuple(weight.shape)}"
        if type(weight.data) is not Tensor:
            return f"its weight is a {type(weight.data).__name__}; convert the model before it is sharded or quantized"
        if not weight.is_floating_point() or weight.is_complex():
            return f"its weight is {weight.dtype}"
    return unsupported_reason(module) if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None


def _tied_refusal(module: nn.Module, sharing: list[nn.Module]) -> str | None:
    for each in sharing:
        if not is_embedding(module) or not (is_embedding(each) or type(each) is nn.Linear):
            return f"its weight is also that of a {type(each).__name__}, which cannot share cores with it"
        if is_embedding(each) and _settings(each) != _settings(module):
            return "its weight is also that of a table with other settings"
    return None


def _settings(table: nn.Module) -> tuple[object, ...]:
    keys = ("padding_idx", "max_norm", "scale_grad_by_freq", "mode", "include_last_offset")
    return type(table), *(getattr(table, key, None) for key in keys)
