"""One place in a model becomes a layer of cores, and back: shaped, filled with numbers, put into the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from scantling.errors import UserError
from scantling.tensor.choice import LINEAR_OPTIONS, TABLE_OPTIONS, check_options
from scantling.tensor.embedding import TTMEmbedding, TTMEmbeddingBag
from scantling.tensor.experts import DOWN, TTExperts, as_linears, up_name
from scantling.tensor.head import TTMHead
from scantling.tensor.linear import TTLinear
from scantling.tensor.sites import Site, is_linear, is_table

Init: TypeAlias = Literal["random", "svd"]
Layer: TypeAlias = TTLinear | TTMEmbedding | TTExperts
LAYERS = (TTLinear, TTMEmbedding, TTExperts, TTMHead)


@dataclass(frozen=True)
class Origin:
    """What a layer of cores took the place of, where its own attributes do not say it.

    Attributes:
        layer: the class.
        padding_idx, sparse: of an embedding.
    """

    layer: type[nn.Module]
    padding_idx: int | None = None
    sparse: bool = False


def layers_of_cores(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All layers of cores with their names, those inside `TTExperts` left out."""
    found: dict[nn.Module, list[str]] = {}
    inside = {id(layer) for module in model.modules() if isinstance(module, TTExperts) for layer in module.modules()}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TTExperts) or (isinstance(module, LAYERS) and id(module) not in inside):
            found.setdefault(module, []).append(name)
    return found


def shaped(site: Site, options: Mapping[str, Any]) -> Layer:
    """The layer for a place, on the meta device and without a bias.

    Args:
        site: where it goes.
        options: `rank`, and the modes; of experts one such mapping for each projection.

    Raises:
        UserError: ranks or modes that do not fit, with the name of the place.
    """
    weight = site.weights[0]
    like: dict[str, Any] = {"device": "meta", "dtype": weight.dtype}
    try:
        if is_linear(site.module):
            return _shaped_linear(weight.shape if type(site.module) is nn.Linear else weight.shape[::-1], options, like)
        if is_table(site.module):
            check_options(options, TABLE_OPTIONS)
            settings = {**options, **_table_settings(site.module), **like}
            return _table_class(site.module)(weight.shape[0], weight.shape[1], **settings)
        up, down = (
            [_shaped_linear(linear.weight.shape, options[part], like) for linear in as_linears(site.module, name)]
            for part, name in (("up", up_name(site.module)), ("down", DOWN))
        )
        return TTExperts(site.module, up, down)
    except UserError as error:
        raise UserError(f"{site.name}: {error}") from None


def _shaped_linear(shape: torch.Size, options: Mapping[str, Any], like: Mapping[str, Any]) -> TTLinear:
    check_options(options, LINEAR_OPTIONS)
    return TTLinear(shape[1], shape[0], **options, bias=False, **like)


def _table_class(module: nn.Module) -> type[TTMEmbedding]:
    return TTMEmbeddingBag if isinstance(module, nn.EmbeddingBag) else TTMEmbedding


def _table_settings(module: nn.Module) -> dict[str, Any]:
    bag = ("mode", "include_last_offset") if isinstance(module, nn.EmbeddingBag) else ()
    return {key: getattr(module, key) for key in ("padding_idx", *bag)}


def filled(site: Site, layer: Layer, init: Init) -> Layer:
    """Give a layer from `shaped` its numbers, and what it keeps of the module it replaces.

    Args:
        site: whose weights they follow.
        layer: on the meta device; with weights there it stays there.
        init: as of `scantling.tensorize`.

    Raises:
        UserError: a weight with NaN or Inf, or `svd` of one on the meta device.
    """
    module = site.module
    if isinstance(layer, TTExperts):
        for parts, name in ((layer.up, up_name(module)), (layer.down, DOWN)):
            for number, linear in enumerate(as_linears(module, name)):
                parts[number] = _with_numbers(parts[number], linear, init, f"{site.name}.{name}[{number}]")
    elif isinstance(layer, TTLinear):
        layer = _with_numbers(layer, as_linear(module), init, site.name)
        layer.bias = module.bias
    else:
        layer = _with_numbers(layer, module, init, site.name)
    origin = Origin(type(module), getattr(module, "padding_idx", None), getattr(module, "sparse", False))
    object.__setattr__(layer, "origin", origin)
    return layer.train(module.training)


def as_linear(module: nn.Module) -> nn.Linear:
    """The layer itself, or GPT-2's with its weight transposed."""
    if type(module) is nn.Linear:
        return module
    weight = module.get_parameter("weight")
    linear = nn.Linear(weight.shape[0], weight.shape[1], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().t(), requires_grad=weight.requires_grad)
    return linear


def _with_numbers(layer: Any, dense: Any, init: Init, name: str) -> Any:
    """A layer like this one with numbers: drawn to the norm of the dense weight, or its closest cores."""
    weight = dense.weight
    if weight.device.type == "meta":
        if init == "svd":
            raise UserError(f"{name}: init='svd' needs the weight, which is on the meta device: load it before")
        return layer.requires_grad_(weight.requires_grad)
    norm = float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float64))
    if not isfinite(norm):
        raise UserError(f"{name}: its weight holds NaN or Inf")
    if init == "svd" and getattr(layer, "activation", None) is not None:
        raise UserError(f"{name}: init='svd' needs a matrix, and {layer.activation} stands between the cores")
    if init == "svd" and norm > 0.0:
        layer = _closest(layer, dense)
    else:
        layer.to_empty(device=weight.device)
        _draw(layer, norm)
    return layer.requires_grad_(weight.requires_grad)


def _closest(layer: Any, dense: Any) -> Any:
    ranks, asked = layer.ranks[1:-1], {"allow_larger": True}  # tensorize itself warns of layers that grow
    if isinstance(layer, TTLinear):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        plain.weight = dense.weight
        return TTLinear.from_dense(plain, ranks, in_modes=layer.in_modes, out_modes=layer.out_modes, **asked)
    return type(layer).from_dense(dense, ranks, row_modes=layer.row_modes, col_modes=layer.col_modes, **asked)


def _draw(layer: Any, norm: float) -> None:
    """Cores whose matrix has this norm; for a matrix of zeros the last core alone is zero, so that it can learn."""
    layer.reset_parameters(norm=norm or 1.0)
    with torch.no_grad():
        if norm == 0.0:
            layer.cores[-1].zero_()
        elif getattr(layer, "padding_idx", None) is not None:
            factor = (norm / float(_norm_without_padding(layer, norm))) ** (1.0 / len(layer.cores))
            for core in layer.cores:
                core.mul_(factor)


def _norm_without_padding(table: TTMEmbedding, norm: float) -> float:
    """Norm of the rows that are given out, where all rows have this one."""
    padding, table.padding_idx = table.padding_idx, None
    row = table.rows(torch.tensor([padding], device=table.cores[0].device))
    table.padding_idx = padding
    return sqrt(max(norm**2 - float(row.double().square().sum()), 0.0)) or norm


def install(model: nn.Module, site: Site, layer: Layer) -> None:
    """Put a layer, and heads for what is tied to it, into the model."""
    put(model, site.names, site.module, layer)
    for linear, names in site.heads:
        assert isinstance(layer, TTMEmbedding)
        put(model, names, linear, TTMHead(layer, linear.bias).train(linear.training))


_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


def put(model: nn.Module, names: list[str], old: nn.Module, new: nn.Module) -> None:
    """Replace a module wherever it is, its hooks kept."""
    for hooks in _HOOKS:
        if hooks in vars(old):
            vars(new)[hooks] = vars(old)[hooks]
    for name in names:
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, new)


def as_dense(layer: nn.Module) -> nn.Module:
    """The dense module that computes the same, of the class that was replaced."""
    if isinstance(layer, TTExperts):
        return layer.to_dense()
    assert isinstance(layer, TTLinear | TTMEmbedding)
    dense: nn.Module = layer.to_dense()
    origin: Origin | None = getattr(layer, "origin", None)
    if isinstance(layer, TTLinear):
        dense.register_parameter("bias", layer.bias)
    elif origin is not None:
        vars(dense).update(padding_idx=origin.padding_idx, sparse=origin.sparse)
    if origin is None or isinstance(dense, origin.layer):
        return dense
    assert isinstance(layer, TTLinear)
    weight = dense.get_parameter("weight")
    with torch.device("meta"):  # draws nothing
        conv = origin.layer(layer.out_features, layer.in_features)
    conv.register_parameter("weight", nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad))
    conv.register_parameter("bias", layer.bias)
    return conv.train(layer.training)
