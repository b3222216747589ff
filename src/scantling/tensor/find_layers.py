"""Layers of a model that become TT layers: those that can, with the modules that share their weights, and the user's
selection among them (the `rank` and `filter_fn` arguments of `tensorize`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import Tensor, nn

from scantling.conv1d import is_conv1d
from scantling.errors import UserError, with_hint
from scantling.numerics.torch_private import own_parameters
from scantling.tensor.embedding import unsupported_reason
from scantling.tensor.experts import is_fused_experts, projections
from scantling.tensor.modes import positive_ints

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
            return [self.module.get_parameter(name) for name in projections(self.module).values()]
        return [self.module.get_parameter("weight")]


def find_layers(model: nn.Module) -> tuple[list[Candidate], dict[str, str]]:
    """Return all layers that can become TT layers.

    Only exact classes count, since the forward pass of a subclass may compute more.

    Returns:
        Candidates in the order of the model, and reasons for linear layers and tables that cannot be converted.
    """
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    owners: dict[int, list[nn.Module]] = defaultdict(list)  # modules that hold a parameter, by its id
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
        # Modules that share a weight become one TT layer, and tied linear layers its heads.
        sharing = [each for weight in candidate.weights for each in owners[id(weight)] if each is not module]
        if is_linear(module) and any(is_embedding(each) for each in sharing):
            continue  # a head is converted with its table
        reason = _unsupported_reason(module, candidate.weights) or _tied_unsupported_reason(module, sharing)
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
    """True for an `nn.Linear` or GPT-2's Conv1D, not for a subclass of them."""
    return (type(module) is nn.Linear or is_conv1d(type(module))) and _has_weight(module)


def is_embedding(module: nn.Module) -> bool:
    """True for an `nn.Embedding` or `nn.EmbeddingBag`, not for a subclass of them."""
    return type(module) in (nn.Embedding, nn.EmbeddingBag) and _has_weight(module)


def _has_weight(module: nn.Module) -> bool:
    """True if the weight is a parameter; the old `weight_norm` and others compute it from other parameters."""
    return own_parameters(module).get("weight") is not None


def _unsupported_reason(module: nn.Module, weights: list[nn.Parameter]) -> str | None:
    """Return the reason that a module cannot be replaced; None if it can."""
    if "forward" in vars(module):
        return "its forward method was replaced, as offloading does; convert the model before offloading"
    for weight in weights:
        if not weight.numel():
            return f"its weight is empty, {tuple(weight.shape)}"
        if type(weight.data) is not Tensor:
            return f"its weight is a {type(weight.data).__name__}; convert the model before it is sharded or quantized"
        if not weight.is_floating_point() or weight.is_complex():
            return f"its weight has the dtype {weight.dtype}, which is not a real floating-point type"
    return unsupported_reason(module) if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None


def _tied_unsupported_reason(module: nn.Module, sharing: list[nn.Module]) -> str | None:
    """Return the reason that a module cannot share cores with the modules that share its weight; None if it can."""
    for each in sharing:
        if not is_embedding(module) or not (is_embedding(each) or type(each) is nn.Linear):
            return f"its weight is shared with a {type(each).__name__}, which cannot share cores with it"
        if is_embedding(each) and _settings(each) != _settings(module):
            return "its weight is shared with a table that has other settings"
    return None


def _settings(table: nn.Module) -> tuple[object, ...]:
    keys = ("padding_idx", "max_norm", "scale_grad_by_freq", "mode", "include_last_offset")
    return type(table), *(getattr(table, key, None) for key in keys)


Rank: TypeAlias = int | Sequence[int]
Ranks: TypeAlias = Rank | Mapping[str, Rank | Mapping[str, Any]]
Filter: TypeAlias = Callable[[str, nn.Module], bool]

LINEAR_OPTIONS = ("rank", "num_modes", "in_modes", "out_modes", "activation")
TABLE_OPTIONS = ("rank", "num_modes", "row_modes", "col_modes")


class LayerFilter:
    """User's options for each layer.

    Args:
        rank: rank for all layers, or a mapping of patterns; see `scantling.tensorize`.
        filter_fn: function of a layer's name and the layer; True to replace the layer. None selects all.

    Raises:
        UserError: if a rank, a pattern or options have the wrong form.
    """

    def __init__(self, rank: Ranks, filter_fn: Filter | None = None) -> None:
        if filter_fn is not None and not callable(filter_fn):
            raise UserError(f"given filter_fn={filter_fn!r}; it must be a function of a name and a module")
        by_pattern = rank if isinstance(rank, Mapping) else {"*": rank}
        if not by_pattern:
            raise UserError("rank is an empty mapping; it needs at least one pattern, such as {'*': 32}")
        self._options = {pattern: _parse_options(pattern, value) for pattern, value in by_pattern.items()}
        self._filter = filter_fn
        self._used: set[str] = set()

    def options(self, names: Iterable[str], module: nn.Module) -> dict[str, Any] | None:
        """Return the options of the first pattern that matches one of a layer's names; None to leave the layer
        unchanged.
        """
        selected = [name for name in names if self._filter is None or self._filter(name, module)]
        for pattern, options in self._options.items():
            if any(fnmatchcase(name, pattern) for name in selected):
                self._used.add(pattern)
                return dict(options)
        return None

    def unused_patterns(self) -> list[str]:
        """Return the patterns that selected no layer."""
        return [pattern for pattern in self._options if pattern not in self._used]


def check_layer_options(options: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raise if a layer does not accept an option.

    Raises:
        UserError: with the closest known option, if there is one.
    """
    for key in options:
        if key not in allowed:
            raise UserError(
                with_hint(f"given the option {key!r}; it must be one of {', '.join(allowed)}", key, allowed)
            )


def _parse_options(pattern: Any, value: Any) -> dict[str, Any]:
    if not isinstance(pattern, str):
        raise UserError(f"given the pattern {pattern!r}; patterns of layer names must be strings")
    options = dict(value) if isinstance(value, Mapping) else {"rank": value}
    rank = options.get("rank")
    single = positive_ints([rank])
    ranks = single or (None if isinstance(rank, str) else positive_ints(rank))
    if not ranks:
        where = "rank" if pattern == "*" else f"rank of the pattern {pattern!r}"
        raise UserError(f"{where}: given {rank!r}; it must be a positive integer or a sequence of them")
    return {**options, "rank": ranks[0] if single else list(ranks)}
