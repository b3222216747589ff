"""Report of a conversion to TT layers: sizes, weight errors, and a warning if trained weights are lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from scantling.errors import first_names
from scantling.tensor.experts import TTExperts
from scantling.tensor.find_layers import Candidate, is_embedding
from scantling.tensor.linear import TTLinear
from scantling.tensor.replace import Init, Layer, WhitenedWeights, dense_linears

logger = logging.getLogger(__name__)

LARGE_ERROR = 0.1
"""Relative error of a weight at or above which `tensorize` warns."""
_OUTLIER = 1.2
"""Largest singular value, relative to that of a random matrix, above which a weight counts as trained.

Initialized layers of 14 architectures reach 1.05; after 50 training steps the minimum of 16 weights is 1.6.
"""
_SAMPLE = 1024
"""Rows and columns of a weight that are inspected, at most."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence warnings about weights that a checkpoint replaces right after the conversion."""
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@dataclass(frozen=True)
class LayerReport:
    """One layer that `tensorize` has replaced.

    Attributes:
        name: name of the layer in the model.
        dense_parameters: number of parameters in the replaced weight.
        tt_parameters: number of parameters in the TT layer, without the bias.
        weight_error: ‖W − W'‖ / ‖W‖ in Frobenius norm with `init="svd"`, which is also the relative error of the
            output for inputs with independent features; None with `init="random"`, where W' is unrelated to W.
        output_error: ‖X W − X W'‖ / ‖X W‖ for the inputs X of a calibration; None without one, for embeddings, and for
            layers that had no inputs.
    """

    name: str
    dense_parameters: int
    tt_parameters: int
    weight_error: float | None
    output_error: float | None = None


def layer_report(
    candidate: Candidate, layer: Layer, init: Init, whitened: WhitenedWeights | None = None
) -> LayerReport:
    """Compare a TT layer with the module that it will replace.

    Args:
        candidate: modules to replace.
        layer: the TT layer.
        init: as in `scantling.tensorize`.
        whitened: weights with the Gram matrices of their inputs; None without calibration.
    """
    dense_size = sum(weight.numel() for weight in candidate.weights)
    size = layer.num_parameters()
    if isinstance(layer, TTLinear) and layer.bias is not None:
        size -= layer.out_features  # the bias is not replaced
    return LayerReport(
        candidate.name,
        dense_size,
        size,
        _weight_error(candidate, layer) if init == "svd" else None,
        None if whitened is None else _output_error(layer, whitened),
    )


def model_report(layers: Sequence[LayerReport], output_error: float) -> LayerReport:
    """Return the entry of the whole model: the sizes of all replaced layers, and the error of the model's output."""
    sizes = (sum(layer.dense_parameters for layer in layers), sum(layer.tt_parameters for layer in layers))
    return LayerReport("", *sizes, None, output_error)


@torch.no_grad()
def _weight_error(candidate: Candidate, layer: Layer) -> float:
    """Return ‖W − W'‖ / ‖W‖; 0 if W is 0."""
    squared_error = squared_norm = 0.0
    is_table = is_embedding(candidate.module)
    dense_layers = {"": [candidate.module]} if is_table else dense_linears(candidate.module)
    for part, layers in _tt_layers(layer).items():
        for tt_layer, dense in zip(layers, dense_layers[part], strict=True):
            weight = dense.get_parameter("weight").detach().float()
            squared_error += float((tt_layer.dense_weight().float() - weight).square().sum())
            squared_norm += float(weight.square().sum())
    return sqrt(squared_error / squared_norm) if squared_norm else 0.0


@torch.no_grad()
def _output_error(layer: Layer, whitened: WhitenedWeights) -> float | None:
    """Return ‖X W − X W'‖ / ‖X W‖; 0 if W is 0, None without inputs. Experts count by the mean over their tokens."""
    if not any(weight.has_inputs for weights in whitened.values() for weight in weights):
        return None
    squared_error = squared_norm = 0.0
    for part, layers in _tt_layers(layer).items():
        for tt_layer, weight in zip(layers, whitened[part], strict=True):
            squared_error += weight.squared_error(tt_layer.dense_weight())
            squared_norm += weight.squared_norm()
    return sqrt(squared_error / squared_norm) if squared_norm else 0.0


def _tt_layers(layer: Layer) -> dict[str, list[Any]]:
    """Return the layer itself, or the layers of experts by projection; see `WhitenedWeights`."""
    return {"up": [*layer.up], "down": [*layer.down]} if isinstance(layer, TTExperts) else {"": [layer]}


def log_errors(reports: Sequence[LayerReport]) -> None:
    """Log the errors of `init="svd"`: one summary line, a warning if one of them is large.

    They are the errors of the outputs if a calibration has measured them, otherwise those of the weights.
    """
    of_model = [each.output_error for each in reports if not each.name and each.output_error is not None]
    kind = "output" if of_model else "weight"
    found = ((getattr(each, f"{kind}_error"), each.name) for each in reports if each.name)
    errors = sorted((error, name) for error, name in found if error is not None)
    if not errors:
        return
    for error, name in errors:
        logger.debug("tensorize: %s: relative %s error %.2g", name, kind, error)
    (smallest, _), (median, _), (largest, worst) = errors[0], errors[len(errors) // 2], errors[-1]
    text = f"tensorize: init='svd' changes %d {kind}s by %.1f to %.1f %% of their norm, half of them by %.1f %% or more"
    text += "".join(f", and the output of the model by {100 * error:.1f} %%" for error in of_model)
    values = (len(errors), 100 * smallest, 100 * largest, 100 * median)
    if largest < LARGE_ERROR:
        logger.info(text, *values)
        return
    logger.warning(
        text + " (largest: %s), so the outputs of the model change; raise the rank, leave these layers dense, or "
        "continue training (sc.tensorize lists the error of each layer in its `report`)",
        *values,
        worst,
    )


def warn_if_trained(candidates: Sequence[Candidate], *, has_svd: bool) -> None:
    """Warn if new random TT layers replace weights that were loaded or trained."""
    # The marks of transformers are certain, the singular values are a guess.
    trained = [candidate.name for candidate in candidates if any(_is_loaded(weight) for weight in candidate.weights)]
    if not trained:
        trained = [
            candidate.name for candidate in candidates if any(_looks_trained(weight) for weight in candidate.weights)
        ]
        if 2 * len(trained) < len(candidates):  # a few structured weights, such as a table of sines, prove nothing
            return
    advice = "use init='svd' to approximate them" if has_svd else "use format='tt' or 'low-rank' with init='svd'"
    logger.warning(
        "tensorize: init='random' discards the trained weights of %d layers (%s). To keep them, %s; to train from "
        "scratch, build the model without loading weights",
        len(trained),
        first_names(trained),
        advice,
    )


def _is_loaded(weight: Tensor) -> bool:
    """True if transformers has read this parameter from a checkpoint, and not initialized it."""
    return bool(getattr(weight, "_is_hf_initialized", False))


@torch.no_grad()
def _looks_trained(weight: Tensor) -> bool:
    """True if a weight has a singular value larger than those of a matrix of independent random entries.

    The largest singular value of an (m, n) matrix of independent entries with standard deviation s is s (√m + √n);
    training adds larger ones. A few steps of subspace iteration on at most 1024 rows and columns find them.
    """
    if weight.is_meta:
        return False
    matrix = weight.detach().flatten(0, -2)
    strides = [max(1, size // _SAMPLE) for size in matrix.shape]
    matrix = matrix[:: strides[0], :: strides[1]][:_SAMPLE, :_SAMPLE].float()
    # The bound of a random matrix holds for large ones only.
    if min(matrix.shape) < 8:
        return False
    rms = float(matrix.square().mean().sqrt())
    if not isfinite(rms):
        return False
    # Subspace iteration with 4 probes: (columns, 4).
    # A separate generator, so that the check does not change the user's random numbers.
    probes = torch.randn(matrix.shape[1], 4, generator=torch.Generator().manual_seed(0)).to(matrix.device)
    for _ in range(4):
        probes = matrix.t() @ (matrix @ torch.linalg.qr(probes).Q)
    largest = float(torch.linalg.matrix_norm(matrix @ torch.linalg.qr(probes).Q, ord=2))
    return largest > _OUTLIER * rms * (sqrt(matrix.shape[0]) + sqrt(matrix.shape[1]))
