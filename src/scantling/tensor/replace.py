"""Replacement of a module by a TT layer, and back: create it, fill in values, put it into the model, and update the
names of tied weights.

A `PreTrainedModel` of transformers records in `_tied_weights_keys` and `all_tied_weights_keys` which parameter is tied
to which other parameter, by name: {"lm_head.weight": "model.embed_tokens.weight"}. It ties by these names after
loading, and leaves one of each pair out of saved files. With TT layers the names change: a head has no weight,
and two tied embeddings share each core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.numerics.torch_private import share_hooks
from scantling.tensor.embedding import TTMEmbedding, TTMEmbeddingBag, TTMHead
from scantling.tensor.experts import TTExperts, expert_linears, is_fused_experts, projection_linears, projections
from scantling.tensor.find_layers import (
    LINEAR_OPTIONS,
    TABLE_OPTIONS,
    Candidate,
    check_layer_options,
    is_embedding,
    is_linear,
)
from scantling.tensor.layer import TTLayer
from scantling.tensor.linear import TTLinear
from scantling.tensor.merging import stack_equal_layers
from scantling.tensor.rank_adapter import find_adapter
from scantling.tensor.whitened_svd import WhitenedWeight

Init: TypeAlias = Literal["random", "svd"]
Layer: TypeAlias = TTLinear | TTMEmbedding | TTExperts
WhitenedWeights: TypeAlias = dict[str, list[WhitenedWeight]]
"""Weights of a candidate with the Gram matrices of their inputs: for each projection of experts one per expert; for a
linear layer under the empty name.
"""
LAYERS = (TTLinear, TTMEmbedding, TTExperts, TTMHead)


@dataclass(frozen=True)
class DenseOrigin:
    """Properties of the replaced module that the TT layer's attributes do not hold.

    Attributes:
        layer: class of the module.
        padding_idx, sparse: settings of an embedding.
    """

    layer: type[nn.Module]
    padding_idx: int | None = None
    sparse: bool = False


def find_tt_layers(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return all TT layers with their names, except those inside `TTExperts`."""
    layers: dict[nn.Module, list[str]] = {}
    inside = {id(layer) for module in model.modules() if isinstance(module, TTExperts) for layer in module.modules()}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TTExperts) or (isinstance(module, LAYERS) and id(module) not in inside):
            layers.setdefault(module, []).append(name)
    return layers


def build_layer(candidate: Candidate, options: Mapping[str, Any]) -> Layer:
    """Return the TT layer for a candidate, on the meta device and without bias.

    Args:
        candidate: modules to replace.
        options: `rank`, and the modes; for experts one such mapping per projection.

    Raises:
        UserError: if ranks or modes do not fit; the message names the candidate.
    """
    weight = candidate.weights[0]
    factory: dict[str, Any] = {"device": "meta", "dtype": weight.dtype}
    try:
        if is_linear(candidate.module):
            return _build_linear(
                weight.shape if type(candidate.module) is nn.Linear else weight.shape[::-1], options, factory
            )
        if is_embedding(candidate.module):
            check_layer_options(options, TABLE_OPTIONS)
            is_bag = isinstance(candidate.module, nn.EmbeddingBag)
            keys = ("padding_idx", "mode", "include_last_offset") if is_bag else ("padding_idx",)
            settings = {**options, **{key: getattr(candidate.module, key) for key in keys}, **factory}
            return (TTMEmbeddingBag if is_bag else TTMEmbedding)(weight.shape[0], weight.shape[1], **settings)
        up, down = (
            [
                _build_linear(linear.weight.shape, options[part], factory)
                for linear in expert_linears(candidate.module, name)
            ]
            for part, name in projections(candidate.module).items()
        )
        return TTExperts(candidate.module, up, down)
    except UserError as error:
        raise UserError(f"{candidate.name}: {error}") from None


def _build_linear(shape: torch.Size, options: Mapping[str, Any], factory: Mapping[str, Any]) -> TTLinear:
    check_layer_options(options, LINEAR_OPTIONS)
    return TTLinear(shape[1], shape[0], **options, bias=False, **factory)


def fill_layer(candidate: Candidate, layer: Layer, init: Init, whitened: WhitenedWeights | None = None) -> Layer:
    """Give a layer from `build_layer` its values and the parts of the replaced module that it keeps.

    Args:
        candidate: modules whose weights determine the values.
        layer: on the meta device; it stays there if the weights are there.
        init: as in `scantling.tensorize`.
        whitened: weights with the Gram matrices of their inputs, for `svd`; None for the closest cores.

    Raises:
        UserError: if a weight holds NaN or Inf, or is on the meta device with `svd`.
    """
    module = candidate.module
    if isinstance(layer, TTExperts):
        for part, name in projections(module).items():
            experts = getattr(layer, part)
            for i, linear in enumerate(expert_linears(module, name)):
                weight = None if whitened is None else whitened[part][i]
                experts[i] = _with_values(experts[i], linear, init, f"{candidate.name}.{name}[{i}]", weight)
    elif isinstance(layer, TTLinear):
        weight = None if whitened is None else whitened[""][0]
        layer = _with_values(layer, as_linear(module), init, candidate.name, weight)
        layer.bias = module.bias  # the same parameter
    else:
        layer = _with_values(layer, module, init, candidate.name)
    # An attribute of the module that is no submodule and no parameter.
    origin = DenseOrigin(type(module), getattr(module, "padding_idx", None), getattr(module, "sparse", False))
    object.__setattr__(layer, "origin", origin)
    return layer.train(module.training)


def dense_linears(module: nn.Module) -> dict[str, list[nn.Linear]]:
    """Return the linear layers of a candidate without biases, by projection as in `WhitenedWeights`."""
    return projection_linears(module) if is_fused_experts(module) else {"": [as_linear(module)]}


def as_linear(module: nn.Module) -> nn.Linear:
    """Return the layer itself, or for GPT-2's Conv1D a linear layer with the transposed weight."""
    if type(module) is nn.Linear:
        return module
    weight = module.get_parameter("weight")
    linear = nn.Linear(weight.shape[0], weight.shape[1], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().t(), requires_grad=weight.requires_grad)
    return linear


def _with_values(layer: Any, dense: Any, init: Init, name: str, whitened: WhitenedWeight | None = None) -> Any:
    """Return such a layer with values: random with the norm of the dense weight, or by SVD."""
    weight = dense.weight
    if weight.device.type == "meta" and init == "random":
        return layer.requires_grad_(weight.requires_grad)
    norm = check_weight(weight, name)
    if init == "svd" and getattr(layer, "activation", None) is not None:
        raise UserError(
            f"{name}: init='svd' needs a linear layer, but this one has {layer.activation} between its cores; use "
            "init='random' or a format without an activation"
        )
    if init == "svd" and norm > 0.0 and whitened is not None:
        cores = whitened.cores(layer.in_modes, layer.out_modes, layer.ranks)
        layer.replace_cores(core.to(weight.dtype) for core in cores)
    elif init == "svd" and norm > 0.0:
        layer = _from_svd(layer, dense)
    else:
        layer.to_empty(device=weight.device)
        _draw_cores(layer, norm)
    return layer.requires_grad_(weight.requires_grad)


def check_weight(weight: Tensor, name: str) -> float:
    """Return the norm of a weight.

    Raises:
        UserError: if it holds NaN or Inf, or is on the meta device.
    """
    if weight.is_meta:
        raise UserError(f"{name}: init='svd' needs the weight, which is on the meta device; load it first")
    norm = float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float64))
    if not isfinite(norm):
        raise UserError(f"{name}: its weight holds NaN or Inf")
    return norm


def _from_svd(layer: Any, dense: Any) -> Any:
    """Return a layer of the same ranks and modes with the closest cores that TT-SVD finds."""
    ranks, options = layer.ranks[1:-1], {"allow_larger": True}  # tensorize itself warns of larger layers
    if isinstance(layer, TTLinear):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        plain.weight = dense.weight
        return TTLinear.from_dense(plain, ranks, in_modes=layer.in_modes, out_modes=layer.out_modes, **options)
    return type(layer).from_dense(dense, ranks, row_modes=layer.row_modes, col_modes=layer.col_modes, **options)


def _draw_cores(layer: Any, norm: float) -> None:
    """Draw cores whose matrix has this norm; for a zero matrix only the last core is zero, so that it can learn."""
    layer.reset_parameters(norm=norm or 1.0)
    with torch.no_grad():
        if norm == 0.0:
            layer.cores[-1].zero_()  # the gradient of this core is not 0
        elif getattr(layer, "padding_idx", None) is not None:
            # Lookups leave out the padding row, so the other rows alone must have the norm.
            factor = (norm / float(_norm_without_padding(layer, norm))) ** (1.0 / len(layer.cores))
            for core in layer.cores:
                core.mul_(factor)


def _norm_without_padding(table: TTMEmbedding, norm: float) -> float:
    """Return the norm of the table without the padding row, if all rows together have the given norm."""
    # Lookups return zeros at `padding_idx`, so unset it to read the values of the cores.
    padding, table.padding_idx = table.padding_idx, None
    row = table.rows(torch.tensor([padding], device=table.cores[0].device))
    table.padding_idx = padding
    return sqrt(max(norm**2 - float(row.double().square().sum()), 0.0)) or norm


def install(model: nn.Module, candidate: Candidate, layer: Layer) -> None:
    """Put a layer, and heads that are tied to it, into the model."""
    replace_module(model, candidate.names, candidate.module, layer)
    for linear, names in candidate.heads:
        assert isinstance(layer, TTMEmbedding)
        replace_module(model, names, linear, TTMHead(layer, linear.bias).train(linear.training))


def replace_module(model: nn.Module, names: list[str], old: nn.Module, new: nn.Module) -> None:
    """Replace a module under all its names, keeping its hooks."""
    share_hooks(old, new)
    for name in names:
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, new)


def build_dense(layer: nn.Module) -> nn.Module:
    """Return the equivalent dense module, of the replaced class."""
    if isinstance(layer, TTExperts):
        return layer.to_dense()
    assert isinstance(layer, TTLinear | TTMEmbedding)
    dense: nn.Module = layer.to_dense()
    origin: DenseOrigin | None = getattr(layer, "origin", None)
    if isinstance(layer, TTLinear):
        dense.register_parameter("bias", layer.bias)
    elif origin is not None:
        vars(dense).update(padding_idx=origin.padding_idx, sparse=origin.sparse)
    if origin is None or isinstance(dense, origin.layer):
        return dense
    assert isinstance(layer, TTLinear)
    weight = dense.get_parameter("weight")
    with torch.device("meta"):  # draws no random numbers
        conv = origin.layer(layer.out_features, layer.in_features)
    conv.register_parameter("weight", nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad))
    conv.register_parameter("bias", layer.bias)
    return conv.train(layer.training)


def restore_dense_layers(model: nn.Module) -> None:
    """Replace all TT layers of a model by equivalent dense layers of the original classes; see `scantling.densify`.

    Raises:
        UserError: as in `scantling.densify`.
    """
    names = find_tt_layers(model)
    if model in names:
        raise UserError(f"the model is itself a {type(model).__name__}; use its to_dense()")
    for name, layer in model.named_modules():
        if isinstance(layer, TTLayer) and find_adapter(layer) is not None:
            raise UserError(
                f"a RankAdapter is attached to '{name}'; call its finish() or detach() first, or densify a "
                "copy.deepcopy(model)"
            )
        if isinstance(layer, TTLinear) and layer.activation is not None:
            raise UserError(f"'{name}' has no dense weight, because {layer.activation} is between its cores")
    # Build all dense layers before the model changes.
    dense_layers = {layer: build_dense(layer) for layer in names if not isinstance(layer, TTMHead)}
    for head in names:
        if isinstance(head, TTMHead):  # tied to the dense embedding that replaces its table
            table = dense_layers.get(head.table)
            dense_layers[head] = head.to_dense(None if table is None else table.get_parameter("weight"))
    for layer, dense in dense_layers.items():
        replace_module(model, names[layer], layer, dense)
        if isinstance(layer, TTLinear) and layer.shared_input is not None:
            layer.shared_input.remove()  # its hooks are on the parent module, which stays
    stack_equal_layers(model)  # removes their hooks
    restore_tied_names(model)


_RECORDS = ("_tied_weights_keys", "all_tied_weights_keys")
_DENSE_RECORDS = "_dense_tied_weights_keys"
"""Attribute that keeps a module's records of the dense model."""


def record_tied_names(model: nn.Module) -> dict[nn.Module, dict[str, dict[str, str]]]:
    """Return the names of tied parameters, by the submodule that records them; call it before replacing anything."""
    records = {}
    for module in model.modules():
        expand = getattr(module, "get_expanded_tied_weights_keys", None)
        if callable(expand) and hasattr(module, _RECORDS[1]):
            records[module] = {
                _RECORDS[0]: expand(all_submodels=False),
                _RECORDS[1]: dict(getattr(module, _RECORDS[1])),
            }
    return records


def rename_tied_names(records: dict[nn.Module, dict[str, dict[str, str]]]) -> None:
    """Replace the names of tables by those of their parameters; the old records are kept for `restore_tied_names`."""
    for module, before in records.items():
        after = {record: _renamed(module, pairs) for record, pairs in before.items()}
        if after == before:
            continue
        setattr(module, _DENSE_RECORDS, {record: vars(module)[record] for record in _RECORDS if record in vars(module)})
        for record, pairs in after.items():
            setattr(module, record, pairs)


def restore_tied_names(model: nn.Module) -> None:
    """Restore the names that `rename_tied_names` replaced."""
    for module in model.modules():
        dense_records: dict[str, Any] | None = vars(module).pop(_DENSE_RECORDS, None)
        if dense_records is not None:
            for record in _RECORDS:
                vars(module).pop(record, None)
            vars(module).update(dense_records)


def _renamed(module: nn.Module, pairs: dict[str, str]) -> dict[str, str]:
    """Return pairs of tied names (target, source) that name TT parameters instead of dense weights."""
    renamed = {}
    for target, source in pairs.items():
        (path, _, name), (source_path, _, source_name) = target.rpartition("."), source.rpartition(".")
        owner, source_owner = module.get_submodule(path), module.get_submodule(source_path)
        if not (_is_tt_weight(owner, name) or _is_tt_weight(source_owner, source_name)):
            renamed[target] = source
        elif owner is source_owner and path != source_path:
            # Two tied embeddings are one TT table under two names: each parameter is tied to itself.
            renamed |= {f"{path}.{own}": f"{source_path}.{own}" for own, _ in owner.named_parameters()}
    return renamed


def _is_tt_weight(owner: nn.Module, name: str) -> bool:
    return name == "weight" and isinstance(owner, TTLinear | TTMEmbedding | TTMHead)
