"""Conversion of a model's layers to TT layers, and back: `tensorize` and `densify`.

    nn.Linear, GPT-2's Conv1D        TTLinear
    nn.Embedding, nn.EmbeddingBag    TTMEmbedding, TTMEmbeddingBag
    experts of transformers 5        TTExperts: a TTLinear for each expert and projection
    heads tied to an embedding       TTMHead, without a weight

All layers are built before the first is replaced, so that an error leaves the model unchanged. A weight shared by
several modules stays shared; biases stay the same parameters.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from scantling.errors import UserError
from scantling.tensor.experts import is_fused_experts
from scantling.tensor.find_layers import Candidate, Filter, LayerFilter, Ranks, find_layers, is_linear
from scantling.tensor.options import Format, linear_options
from scantling.tensor.replace import (
    Init,
    Layer,
    build_layer,
    fill_layer,
    find_tt_layers,
    install,
    record_tied_names,
    rename_tied_names,
    restore_dense_layers,
)
from scantling.tensor.report import LayerReport, layer_report, log_errors, warn_if_trained
from scantling.tensor.shared_input import fuse_shared_inputs

logger = logging.getLogger(__name__)


def tensorize(
    model: nn.Module,
    rank: Ranks,
    *,
    format: Format = "tt",
    num_modes: int | None = None,
    init: Init = "random",
    filter_fn: Filter | None = None,
    report: list[LayerReport] | None = None,
) -> nn.Module:
    """Replace the linear layers, embeddings and experts of a model by TT layers, in place.

    Use it to train from scratch. Trained weights seldom have low rank: `init="random"` discards them, with a warning,
    and `init="svd"` changes them by the errors that `report` lists.

    Subclasses of the layers named above are not replaced, since they may compute more than the layer does. Unless
    `filter_fn` is given, layers whose cores would have at least as many parameters as the dense weight are not
    replaced either.

    Layers that share an input, recognized by their names in transformers, such as Q, K and V, multiply it in one
    product with the cores of all (`shared_input.py`).

    dtype, device, `requires_grad`, hooks and `padding_idx` are preserved; on the meta device the cores are meta
    tensors, too. A head that is tied to an embedding is converted together with it and never alone: select the
    embedding.

    Args:
        model: any module that contains layers; of transformers or not.
        rank: rank of all bonds: an integer; a sequence, one for each bond of every layer; or a mapping from name
            patterns to either, or to a mapping of arguments. Patterns use `fnmatch`; the first match decides, and
            layers without a match are not replaced. Arguments are `rank`, `num_modes`, and `in_modes`, `out_modes`,
            `activation` for linear layers or `row_modes`, `col_modes` for embeddings. The projections of experts have
            the names of the experts plus `.up` and `.down`. Ranks are clipped to the largest that the modes allow.
        format: format of linear layers and experts. `tt`: tensor trains, as in CoMERA. `low-rank`: y = (x A) B, two
            thin matrices. `cola`: y = silu(x A) B. `tt-silu`: the same with A and B as chains, so that the input modes
            reduce x and the output modes expand the output of silu. Layers with silu are not linear: they support
            neither `init="svd"` nor `densify`.
        num_modes: modes of the inputs and of the outputs of linear layers, 1 to 5; default 3 for chains and 1 for thin
            matrices. Embeddings have 4 cores unless a pattern says otherwise.
        init: `random`: draw the cores from torch's generator and scale them to the norm of the replaced weight. `svd`:
            use the closest cores that TT-SVD finds; a warning lists the weight errors if one of them is 10 % or more.
        filter_fn: function of a layer's name and the layer; True to replace the layer, whatever its size.
        report: a list to which a `LayerReport` is appended for each replaced layer: its name, its size before and
            after, and with `init="svd"` the relative error of its weight.

    Returns:
        The model.

    Raises:
        UserError: if there is nothing to replace, the model already has TT layers, ranks or modes do not fit a layer,
            a weight holds NaN, `svd` is used with meta weights or a format with silu, or the format does not exist.

    Source: CoMERA, arXiv 2405.14377; CoLA, arXiv 2502.10940.

    Example:
        >>> model = sc.tensorize(model, rank={"*mlp*": 32, "*embed*": {"rank": 16, "num_modes": 3}})
    """
    if init not in get_args(Init):
        raise UserError(f"given init={init!r}; it must be one of {', '.join(get_args(Init))}")
    if report is not None and not isinstance(report, list):
        raise UserError(f"given report={report!r}; it must be a list, to which tensorize appends")
    for names in find_tt_layers(model).values():
        raise UserError(f"{names[0] or 'the model'} is already a TT layer; call sc.densify(model) first")
    linear = linear_options(format, num_modes)
    selected = _select(model, LayerFilter(rank, filter_fn), linear, keep_larger=filter_fn is not None)
    # Build and fill all layers before the model changes, so that an error leaves it as it is.
    if init == "random":
        warn_if_trained([candidate for candidate, _ in selected], has_svd="activation" not in linear)
    replacements = [(candidate, fill_layer(candidate, layer, init)) for candidate, layer in selected]
    reports = [layer_report(candidate, layer, init) for candidate, layer in replacements]
    log_errors(reports)
    if report is not None:
        report.extend(reports)
    # Replace the modules, then update what refers to their weights by name.
    tied_names = record_tied_names(model)
    for candidate, layer in replacements:
        install(model, candidate, layer)
    fuse_shared_inputs(model)
    rename_tied_names(tied_names)
    if _has_pretrained_model(model):
        from scantling.tensor.pretrained import attach

        attach(model)
    return model


def densify(model: nn.Module) -> nn.Module:
    """Replace TT layers by equivalent dense layers, in place: the inverse of `tensorize`.

    Modules get their original classes back, so that the model's own checkpoint format is unchanged. A model without TT
    layers is unchanged.

    Args:
        model: model with TT layers, on any device except meta.

    Returns:
        The model.

    Raises:
        UserError: if the model is itself a TT layer (call its `to_dense()`), a `RankAdapter` is attached to it, or a
            layer has an activation between its cores.
    """
    restore_dense_layers(model)
    if _has_pretrained_model(model):
        from scantling.tensor.pretrained import detach

        detach(model)
    return model


def _has_pretrained_model(model: nn.Module) -> bool:
    """True if transformers is in use and the model, or a part of it, may be one of its models."""
    return "transformers" in sys.modules and any(hasattr(module, "save_pretrained") for module in model.modules())


def _select(
    model: nn.Module, layer_filter: LayerFilter, linear: Mapping[str, Any], *, keep_larger: bool
) -> list[tuple[Candidate, Layer]]:
    """Return the layers to replace, each with a TT layer on the meta device.

    Args:
        model: model without TT layers.
        layer_filter: the user's options for each layer.
        linear: default options of linear layers.
        keep_larger: True to replace selected layers even if the TT layer is not smaller.

    Raises:
        UserError: if there is nothing to replace, or options do not fit a layer.
    """
    candidates, refused = find_layers(model)
    selected, larger = [], {}
    for candidate in candidates:
        options = _layer_options(candidate, layer_filter, linear)
        if options is None:
            continue
        layer = build_layer(candidate, options)  # on the meta device: costs nothing if the layer is not replaced
        size, dense_size = layer.num_parameters(), sum(weight.numel() for weight in candidate.weights)
        if size >= dense_size:
            larger[candidate.name] = f"its cores would have {size} parameters, the dense weight has {dense_size}"
        if keep_larger or size < dense_size:
            selected.append((candidate, layer))
    if not selected:
        raise UserError(_nothing_to_replace(model, candidates, refused, larger))
    # The empty name is the model itself, which has no parent to replace it in.
    if selected[0][0].name == "":
        raise UserError(f"the model is itself a {type(model).__name__}; use from_dense of the TT layer instead")
    for pattern in layer_filter.unused_patterns():
        logger.warning("tensorize: the pattern %r selects no layer", pattern)
    if keep_larger and larger:
        logger.warning("tensorize: filter_fn selects layers that do not become smaller: %s", _first_reasons(larger))
    for name, reason in (refused if keep_larger else refused | larger).items():
        logger.info("tensorize does not replace %s: %s", name, reason)
    return selected


def _layer_options(candidate: Candidate, layer_filter: LayerFilter, linear: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of the TT layer for a candidate; None to leave it unchanged."""
    if is_fused_experts(candidate.module):
        # Patterns may name the experts, or one of their projections.
        projections: dict[str, Any] = {}
        for part in ("up", "down"):
            names = [*candidate.names, *(f"{name}.{part}" for name in candidate.names)]
            options = layer_filter.options(names, candidate.module)
            if options is None:
                return None
            projections[part] = {**linear, **options}
        return projections
    options = layer_filter.options(candidate.names, candidate.module)
    return {**linear, **options} if options is not None and is_linear(candidate.module) else options


def _nothing_to_replace(
    model: nn.Module, candidates: list[Candidate], refused: Mapping[str, str], larger: Mapping[str, str]
) -> str:
    """Return the reason that there is nothing to replace, and what to do."""
    text = f"tensorize: nothing to replace in this {type(model).__name__}"
    if larger:
        return f"{text}: {_first_reasons(larger)}; lower the rank, or select layers of any size with filter_fn"
    if not candidates and refused:
        return f"{text}: {_first_reasons(refused)}"
    if not candidates:
        return f"{text}: it has no linear layers, embeddings or experts (subclasses of them are not replaced)"
    heads = [name for candidate in candidates for _, names in candidate.heads for name in names]
    tied = f"; {', '.join(heads)} can only be replaced with the embedding it is tied to" if heads else ""
    names = [candidate.name for candidate in candidates]
    return f"{text}: rank and filter_fn select none of its {len(names)} layers, such as {', '.join(names[:3])}{tied}"


def _first_reasons(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
