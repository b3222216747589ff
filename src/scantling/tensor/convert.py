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
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, get_args

from torch import nn

from scantling.errors import UserError, first_names
from scantling.tensor.calibration import Calibration, calibrate
from scantling.tensor.experts import is_fused_experts
from scantling.tensor.find_layers import Candidate, Filter, LayerFilter, Ranks, find_layers, is_embedding, is_linear
from scantling.tensor.merging import stack_equal_layers
from scantling.tensor.options import Format, linear_options
from scantling.tensor.replace import (
    Init,
    Layer,
    WhitenedWeights,
    build_layer,
    check_weight,
    dense_linears,
    fill_layer,
    find_tt_layers,
    install,
    record_tied_names,
    rename_tied_names,
    restore_dense_layers,
)
from scantling.tensor.report import LayerReport, layer_report, log_errors, model_report, warn_if_trained
from scantling.tensor.shared_input import fuse_shared_inputs
from scantling.tensor.svd_ranks import Spectrum, ranks_by_error, ranks_by_size
from scantling.tensor.whitened_svd import WhitenedWeight

logger = logging.getLogger(__name__)


def tensorize(
    model: nn.Module,
    rank: Ranks | None = None,
    *,
    error: float | None = None,
    size_target: float | None = None,
    format: Format | None = None,
    num_modes: int | None = None,
    init: Init = "random",
    calibration: Iterable[Any] | None = None,
    filter_fn: Filter | None = None,
    report: list[LayerReport] | None = None,
) -> nn.Module:
    """Replace the linear layers, embeddings and experts of a model by TT layers, in place.

    Use it to train from scratch: `init="random"` discards trained weights, with a warning. To keep them, use
    `init="svd"` with `calibration` and `size_target`, and train again, since trained weights seldom have low rank.
    Exactly one of `rank`, `error` and `size_target` sets the ranks.

    Subclasses of the layers named above are not replaced, since they may compute more than the layer does. Unless
    `filter_fn` is given, layers whose cores would have at least as many parameters as the dense weight are not
    replaced either.

    Every TT layer has a trainable scale of its weight, `log_gain`, which is 1 at first; see `layer.GAIN_RATE`.

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
        error: give each linear layer and each projection of experts the lowest rank with at most this relative error of
            its output, from 0 to 1. Layers that would not become smaller stay dense, and so do embeddings. Needs
            `init="svd"`. Without `calibration` it is the relative error of the weight.
        size_target: size of these layers together: up to 1 a fraction of their dense size, above 1 a number of
            parameters. The ranks, and the layers that stay dense, minimize the error of the model's output, which is
            predicted from its gradients. Layers that this output does not depend on stay dense and do not count; a
            warning names them. Needs `init="svd"` and `calibration`.
        format: format of linear layers and experts; default `tt`, or `low-rank` with `error` or `size_target`, which
            need thin matrices. `tt`: tensor trains, as in CoMERA. `low-rank`: y = (x A) B, two thin matrices. `cola`:
            y = silu(x A) B. `tt-silu`: the same with A and B as chains, so that the input modes reduce x and the output
            modes expand the output of silu. Layers with silu are not linear: they support neither `init="svd"` nor
            `densify`.
        num_modes: modes of the inputs and of the outputs of linear layers, 1 to 5; default 3 for chains and 1 for thin
            matrices. Embeddings have 4 cores unless a pattern says otherwise.
        init: `random`: draw the cores from torch's generator and scale them to the norm of the replaced weight. `svd`:
            use the closest cores that TT-SVD finds; a warning lists the errors if one of them is 10 % or more.
        calibration: batches of typical inputs: mappings of keyword arguments (as transformers takes them), sequences of
            arguments, or tensors; a few dozen tokenized texts are enough. With `init="svd"`, linear layers and experts
            get cores that minimize the error of their outputs for these inputs instead of the error of their weights.
            The model runs over them once in evaluation mode, with a backward pass for `size_target`; one (in, in)
            matrix in fp32 is kept for each layer until the end.
        filter_fn: function of a layer's name and the layer; True to replace the layer, whatever its size.
        report: a list to which a `LayerReport` is appended for each replaced layer: its name, its size before and
            after, and with `init="svd"` the relative error of its weight. With `calibration` it has the relative error
            of the output, too, and a last entry without a name has that of the model's output for the first batch.

    Returns:
        The model.

    Raises:
        UserError: if there is nothing to replace, the model already has TT layers, ranks or modes do not fit a layer,
            a weight holds NaN, `svd` is used with meta weights or a format with silu, the format does not exist, no
            ranks can have the error or the size, or `calibration` is empty, reaches no layer, or has inputs with NaN.

    Source: CoMERA, arXiv 2405.14377; CoLA, arXiv 2502.10940; SVD-LLM, arXiv 2403.07378.

    Example:
        >>> model = sc.tensorize(model, rank={"*mlp*": 32, "*embed*": {"rank": 16, "num_modes": 3}})

        Pretrained weights, half as large:

        >>> model = sc.tensorize(pretrained, size_target=0.5, init="svd", calibration=batches)  # doctest: +SKIP
    """
    if init not in get_args(Init):
        raise UserError(f"given init={init!r}; it must be one of {', '.join(get_args(Init))}")
    if report is not None and not isinstance(report, list):
        raise UserError(f"given report={report!r}; it must be a list, to which tensorize appends")
    for names in find_tt_layers(model).values():
        raise UserError(f"{names[0] or 'the model'} is already a TT layer; call sc.densify(model) first")
    _check_options(rank, error, size_target, init, calibration)
    linear = linear_options(format or ("tt" if rank is not None else "low-rank"), num_modes)
    if init == "svd" and "activation" in linear:
        raise UserError(
            f"init='svd' needs linear layers, but format={format!r} has {linear['activation']} in them; "
            "use 'tt' or 'low-rank'"
        )
    layer_filter = LayerFilter(1 if rank is None else rank, filter_fn)
    measured: Calibration | None = None
    whitened: dict[nn.Module, WhitenedWeights] = {}
    if rank is not None:
        selected = _select(model, layer_filter, linear, keep_larger=filter_fn is not None)
        candidates = [candidate for candidate, _ in selected]
    else:
        if linear["num_modes"] != 1:
            raise UserError("error and size_target choose the ranks of thin matrices; use format='low-rank'")
        candidates = _select_linear(model, layer_filter)
    if init == "svd" and (calibration is not None or rank is None):
        measured, whitened = _whiten(model, candidates, calibration, with_effects=size_target is not None)
    if rank is None:
        effects = {} if measured is None else measured.effects
        if size_target is not None:
            candidates = _with_effects(candidates, effects)
        selected = _select_ranks(candidates, whitened, linear, error, size_target, effects)
    # Build and fill all layers before the model changes, so that an error leaves it as it is.
    if init == "random":
        warn_if_trained(candidates, has_svd="activation" not in linear)
    replacements = [
        (candidate, fill_layer(candidate, layer, init, whitened.get(candidate.module))) for candidate, layer in selected
    ]
    reports = [
        layer_report(candidate, layer, init, whitened.get(candidate.module) if measured is not None else None)
        for candidate, layer in replacements
    ]
    # Replace the modules, then update what refers to their weights by name.
    tied_names = record_tied_names(model)
    for candidate, layer in replacements:
        install(model, candidate, layer)
    fuse_shared_inputs(model)
    stack_equal_layers(model)
    rename_tied_names(tied_names)
    if _has_pretrained_model(model):
        from scantling.tensor.pretrained import attach

        attach(model)
    if measured is not None:
        reports.append(model_report(reports, measured.output_error(model)))
    log_errors(reports)
    if report is not None:
        report.extend(reports)
    return model


def _check_options(
    rank: Ranks | None, error: float | None, size_target: float | None, init: Init, calibration: object
) -> None:
    """Raise unless exactly one option sets the ranks, and those that need `init="svd"` have it."""
    given = {"rank": rank, "error": error, "size_target": size_target}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise UserError(f"given {' and '.join(names) or 'no ranks'}; give exactly one of {', '.join(given)}")
    for name, value, bound in (("error", error, 1.0), ("size_target", size_target, inf)):
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < bound:
            limit = "a number above 0" + (" and below 1" if bound == 1.0 else "")
            raise UserError(f"given {name}={value!r}; it must be {limit}")
    needing = {"error": error, "size_target": size_target, "calibration": calibration}
    if size_target is not None and calibration is None:
        raise UserError("given size_target without calibration; give a few batches of typical inputs as calibration=")
    if init != "svd" and (names := [name for name, value in needing.items() if value is not None]):
        raise UserError(f"given {' and '.join(names)} with init={init!r}; use init='svd', which keeps the weights")


def _select_linear(model: nn.Module, layer_filter: LayerFilter) -> list[Candidate]:
    """Return the linear layers and experts among the selected layers.

    Raises:
        UserError: if there are none.
    """
    candidates, refused = find_layers(model)
    linear = [
        candidate
        for candidate in candidates
        if not is_embedding(candidate.module) and layer_filter.options(candidate.names, candidate.module) is not None
    ]
    if not linear:
        raise UserError(
            _nothing_to_replace(model, [each for each in candidates if not is_embedding(each.module)], refused, {})
        )
    _check_has_parent(linear[0])
    return linear


def _check_has_parent(candidate: Candidate) -> None:
    """Raise if a layer is the model itself, which has no parent to replace it in."""
    if candidate.name == "":
        raise UserError(
            f"the model is itself a {type(candidate.module).__name__}; use from_dense of the TT layer instead"
        )


def _with_effects(candidates: Sequence[Candidate], effects: Mapping[nn.Module, float]) -> list[Candidate]:
    """Return the layers that the output of the model depends on, with a warning that names the others.

    Raises:
        UserError: if there are none.
    """
    has_effect = [effects.get(candidate.module, 0.0) > 0.0 for candidate in candidates]
    found = [candidate for candidate, has in zip(candidates, has_effect, strict=True) if has]
    if all(has_effect):
        return found
    others = [candidate.name for candidate, has in zip(candidates, has_effect, strict=True) if not has]
    text = (
        f"the output of the model for the calibration batches does not depend on {len(others)} layers "
        f"({first_names(others)})"
    )
    if not found:
        raise UserError(f"calibration: {text}, which are all layers to convert; give batches that run through them")
    logger.warning("tensorize: %s; they stay dense, and size_target does not count them", text)
    return found


def _whiten(
    model: nn.Module, candidates: Sequence[Candidate], batches: Iterable[Any] | None, *, with_effects: bool
) -> tuple[Calibration | None, dict[nn.Module, WhitenedWeights]]:
    """Return the weights of linear layers and experts with the Gram matrices of their inputs, by module.

    Args:
        model: dense model.
        candidates: layers to replace; embeddings among them are left out.
        batches: calibration batches; None for no Gram matrices.
        with_effects: True to measure the effects of the layers on the output of the model.
    """
    candidates = [candidate for candidate in candidates if not is_embedding(candidate.module)]
    for candidate in candidates:
        for weight in candidate.weights:
            check_weight(weight, candidate.name)
    measured = None if batches is None else calibrate(model, candidates, batches, with_effects=with_effects)
    whitened: dict[nn.Module, WhitenedWeights] = {}
    for candidate in candidates:
        grams = None if measured is None else measured.grams[candidate.module]
        whitened[candidate.module] = {
            part: [
                WhitenedWeight(layer.weight, None if grams is None else grams[part][i])
                for i, layer in enumerate(layers)
            ]
            for part, layers in dense_linears(candidate.module).items()
        }
    return measured, whitened


def _select_ranks(
    candidates: Sequence[Candidate],
    whitened: Mapping[nn.Module, WhitenedWeights],
    linear: Mapping[str, Any],
    error: float | None,
    size_target: float | None,
    effects: Mapping[nn.Module, float],
) -> list[tuple[Candidate, Layer]]:
    """Return the layers that become smaller, each with thin matrices on the meta device, by error or by total size.

    Args:
        candidates: linear layers and experts.
        whitened: their weights.
        linear: default options of linear layers.
        error, size_target: as in `tensorize`; one of them is None.
        effects: effects of the layers on the output of the model, see `Calibration`.

    Raises:
        UserError: if there are none, or no ranks have the size.
    """
    spectra = [Spectrum.from_weights(whitened[each.module], effects.get(each.module, 0.0)) for each in candidates]
    if error is not None:
        ranks, reason = ranks_by_error(spectra, error), f"error={error:g}"
    else:
        assert size_target is not None
        dense_size = sum(spectrum.dense_numel for spectrum in spectra)
        size = size_target * dense_size if size_target <= 1.0 else size_target
        ranks, reason = ranks_by_size(spectra, size), f"size_target={size_target:g}"
    selected = []
    for candidate, rank in zip(candidates, ranks, strict=True):
        if rank is None:
            logger.info("tensorize does not replace %s: with %s it would not become smaller", candidate.name, reason)
            continue
        options = {**linear, "rank": rank}
        both = dict.fromkeys(whitened[candidate.module], options)
        selected.append((candidate, build_layer(candidate, both if is_fused_experts(candidate.module) else options)))
    if not selected:
        raise UserError(f"tensorize: with {reason} none of the {len(candidates)} layers becomes smaller")
    return selected


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
    _check_has_parent(selected[0][0])
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
