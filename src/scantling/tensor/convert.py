"""Conversion of a model's layers to TT layers, and back: `tensorize` and `densify`.

    nn.Linear, GPT-2's Conv1D        TTLinear
    nn.Embedding, nn.EmbeddingBag    TTMEmbedding, TTMEmbeddingBag
    experts of transformers 5        TTExperts: a TTLinear for each expert and projection
    heads tied to an embedding       TTMHead, which has no weight of its own

All layers are built before the first is replaced, so that an error leaves the model unchanged. A weight shared by
several modules stays shared; biases stay the same parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from scantling.errors import UserError
from scantling.tensor.experts import is_fused_experts
from scantling.tensor.find_layers import Candidate, find_layers, is_linear
from scantling.tensor.formats import Format, linear_options
from scantling.tensor.head import TTMHead
from scantling.tensor.layer import TTLayer
from scantling.tensor.layer_filter import Filter, LayerFilter, Ranks
from scantling.tensor.linear import TTLinear
from scantling.tensor.rank_adapter import adapter_of
from scantling.tensor.replace import Init, build_dense, build_layer, fill_layer, find_tt_layers, install, replace_module
from scantling.tensor.report import LayerReport, layer_report, log_errors, warn_if_trained
from scantling.tensor.shared_input import fuse_shared_inputs
from scantling.tensor.tied_weights import record_tied_names, rename_tied_names, restore_tied_names

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
    product with the cores of all (`joint.py`).

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
        raise UserError(f"init must be one of {', '.join(get_args(Init))}; given {init!r}")
    if report is not None and not isinstance(report, list):
        raise UserError(f"report must be a list, which tensorize fills; given {report!r}; pass report=[] by a name")
    for names in find_tt_layers(model).values():
        raise UserError(f"{names[0] or 'the model'} already has TT cores; densify the model first")
    choice, linear = LayerFilter(rank, filter_fn), linear_options(format, num_modes)
    candidates, refused = find_layers(model)
    chosen, larger = [], {}
    for candidate in candidates:
        options = _options(candidate, choice, linear)
        if options is None:
            continue
        layer = build_layer(candidate, options)
        numbers, dense = layer.num_parameters(), sum(weight.numel() for weight in candidate.weights)
        if numbers >= dense:
            larger[candidate.name] = f"its cores would hold {numbers} numbers, the dense weight holds {dense}"
        if filter_fn is not None or numbers < dense:
            chosen.append((candidate, layer))
    if not chosen:
        raise UserError(_nothing(model, candidates, refused, larger))
    if chosen[0][0].name == "":
        raise UserError(f"the model is itself a {type(model).__name__}; make the layer with from_dense")
    for pattern in choice.unused_patterns():
        logger.warning("tensorize: the pattern %r decides on no layer", pattern)
    if filter_fn is not None and larger:
        logger.warning("tensorize: filter_fn chooses layers that become no smaller: %s", _some(larger))
    for name, why in (refused if filter_fn is not None else refused | larger).items():
        logger.info("tensorize leaves %s alone: %s", name, why)
    if init == "random":
        warn_if_trained([candidate for candidate, _ in chosen], has_svd="activation" not in linear)
    made = [(candidate, fill_layer(candidate, layer, init)) for candidate, layer in chosen]
    reports = [layer_report(candidate, layer, init) for candidate, layer in made]
    log_errors(reports)
    if report is not None:
        report.extend(reports)
    noted = record_tied_names(model)
    for candidate, layer in made:
        install(model, candidate, layer)
    fuse_shared_inputs(model)
    rename_tied_names(noted)
    if any(hasattr(module, "save_pretrained") for module in model.modules()):
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
    found = find_tt_layers(model)
    if model in found:
        raise UserError(f"the model is itself a {type(model).__name__}; it has to_dense()")
    for name, layer in model.named_modules():
        if isinstance(layer, TTLayer) and adapter_of(layer) is not None:
            raise UserError(
                f"a RankAdapter is attached to '{name}', which would go on with cores that are no longer in the "
                "model; call its finish() or detach() before, or densify a copy.deepcopy(model)"
            )
        if isinstance(layer, TTLinear) and layer.activation is not None:
            raise UserError(f"'{name}' has no dense weight: {layer.activation} stands between its cores")
    made = {layer: build_dense(layer) for layer in found if not isinstance(layer, TTMHead)}
    for head in found:
        if isinstance(head, TTMHead):
            table = made.get(head.table)
            made[head] = head.to_dense(None if table is None else table.get_parameter("weight"))
    for layer, dense in made.items():
        replace_module(model, found[layer], layer, dense)
        if isinstance(layer, TTLinear) and layer.shared_input is not None:
            layer.shared_input.remove()
    restore_tied_names(model)
    if any(hasattr(module, "save_pretrained") for module in model.modules()):
        from scantling.tensor.pretrained import detach

        detach(model)
    return model


def _options(candidate: Candidate, choice: LayerFilter, linear: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of the layer for a site; None to leave the site unchanged."""
    if is_fused_experts(candidate.module):
        parts: dict[str, Any] = {}
        for part in ("up", "down"):
            found = choice.options(
                [*candidate.names, *(f"{name}.{part}" for name in candidate.names)], candidate.module
            )
            if found is None:
                return None
            parts[part] = {**linear, **found}
        return parts
    found = choice.options(candidate.names, candidate.module)
    return {**linear, **found} if found is not None and is_linear(candidate.module) else found


def _nothing(
    model: nn.Module, candidates: list[Candidate], refused: Mapping[str, str], larger: Mapping[str, str]
) -> str:
    """Return why there is nothing to replace, and what to do."""
    text = f"tensorize: nothing to replace in this {type(model).__name__}"
    if larger:
        return f"{text}: {_some(larger)}; lower the rank, or choose layers with filter_fn, whatever their size"
    if not candidates and refused:
        return f"{text}: {_some(refused)}"
    if not candidates:
        return f"{text}: it has no linear layers, embeddings or experts (subclasses of them are left alone)"
    heads = [name for candidate in candidates for _, names in candidate.heads for name in names]
    tied = f"; {', '.join(heads)} can only follow the embedding it is tied to" if heads else ""
    names = [candidate.name for candidate in candidates]
    return f"{text}: rank and filter_fn choose none of its {len(names)} layers, such as {', '.join(names[:3])}{tied}"


def _some(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:3])
