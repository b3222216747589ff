"""Low-precision weights for a trained model (`quantize_weights`).

The model keeps computing in its own dtype; its parameters hold the dequantized values. The codes are kept as well,
packed and on the CPU, so that `save_quantized` writes codes instead of dequantized values.

In a model of `quantize_training`, the master weights are quantized and their layers stop rounding them, so that the
layers compute with the values found here. Activations, keys and values are still rounded.

TT layers are quantized core by core, always rounding to nearest: GPTQ assumes that outputs are linear in each column
separately, which does not hold for a chain of cores. Embedding tables are rounded to nearest, too, since each row is
read separately.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from scantling.errors import UserError, with_hint
from scantling.precision.calibration import Batch, Calibration
from scantling.precision.gptq import BLOCK, gptq, output_error
from scantling.precision.layers import LayerFormats
from scantling.precision.matrices import (
    Filter,
    WeightMatrix,
    as_matrix,
    check_module,
    find_matrices,
    from_matrix,
    warn_about_unquantized,
)
from scantling.precision.packing import PackedMatrix
from scantling.precision.quantizer import Encoded, Quantizer, in_dtype

logger = logging.getLogger(__name__)

Method: TypeAlias = Literal["rtn", "gptq"]
_ATTRIBUTE = "_scantling_quantized"


@dataclass(frozen=True)
class QuantizedWeight:
    """One weight of a model after `quantize_weights`.

    Attributes:
        packed: codes and scales.
        channels_last: True if the last dim of the parameter is the row dim of `packed`.
        quantizer: description of the quantizer.
        method: rtn or gptq.
        weight_error: Frobenius norm of the weight's error, relative to that of the weight.
        output_error: RMS error of the layer's outputs on the calibration data, relative to their RMS; None without
            calibration data, or if no layer multiplies by the weight.
    """

    packed: PackedMatrix
    channels_last: bool
    quantizer: str
    method: Method
    weight_error: float
    output_error: float | None = None

    def values(self, like: Tensor) -> Tensor:
        """Return the quantized parameter, in the shape and dtype of `like`, on the CPU."""
        return in_dtype(from_matrix(self.packed.decode(), like.shape, self.channels_last), like.dtype)


@torch.no_grad()
def quantize_weights(
    model: nn.Module,
    format: Quantizer | str | Mapping[str, Any],
    *,
    method: Method = "rtn",
    calibration: Iterable[Batch] | None = None,
    filter_fn: Filter | None = None,
    damping: float = 0.01,
    act_order: bool = False,
) -> nn.Module:
    """Quantize the weights of a trained model, in place.

    Linear layers (`nn.Linear`, the Conv1D of GPT-2) and TT layers are quantized. The output layer that
    `get_output_embeddings()` returns and embeddings are not, unless `filter_fn` takes them. A second call can quantize
    other layers to another format.

    Args:
        model: any module, of transformers or not; on any device.
        format: format of the weights by name (`int4`, `fp6_e3m2`, `mxfp4_e2m1`), with one scale per output; a mapping
            such as {"format": "int4", "group_size": 64}; or a `Quantizer`.
        method: `rtn` rounds to nearest. `gptq` minimizes the change of the outputs on the calibration data.
        calibration: batches of typical input: mappings of the model's arguments, tensors of token ids (also alone in a
            tuple or list), or functions that run the model on a batch. A few hundred sequences are usual. GPTQ needs
            them; with `rtn` they only measure output errors. All positions count, padding included. Weights of layers
            that see no input are rounded to nearest; a warning names them.
        filter_fn: function of a layer's name and the layer; True to quantize the layer.
        damping: GPTQ: value added to the diagonal of the Hessian, as a share of the diagonal's mean.
        act_order: GPTQ: True to process columns by decreasing input magnitude.

    Returns:
        The model. `scantling.precision.quantized_weights` returns the errors of each layer.

    Raises:
        UserError: if a setting does not exist, settings contradict each other, there is no layer to quantize, weights
            hold NaN, or the calibration has no batches or calls none of the layers. An error during quantization gets
            a note with the number of weights already quantized.

    Source: arXiv 2210.17323 for GPTQ. For the costs see `scantling.precision.gptq` and `calibration`.

    Example:
        >>> model = sc.quantize_weights(model, "int4", method="gptq", calibration=batches)
    """
    check_module(model, "quantize_weights")
    quantizer = Quantizer.from_spec(format, "channel")
    _check(quantizer, method, calibration, damping, act_order)
    matrices = find_matrices(model, filter_fn)
    if filter_fn is None:
        warn_about_unquantized(model, (matrix.parameter for matrix in matrices), "quantize_weights")
    # trace the order of calls before any weight changes
    calibrated = None if calibration is None else Calibration(model, matrices, calibration)
    _stop_rounding(model, matrices)
    records = _Records(model, quantizer)
    with records.note_progress_in_errors():
        for matrix in matrices:
            # No statistics are needed for these: embedding tables, TT cores, or all weights without calibration.
            if calibrated is None or not matrix.modules:
                records.quantize(matrix, quantizer.encode(matrix.read()), "rtn")
        if calibrated is None:
            return model
        seen: set[str] = set()
        for block in calibrated.blocks():
            hessians = calibrated.hessians(block)  # from inputs that the quantized earlier blocks produce
            for matrix in block:
                hessian = hessians.get(matrix.name)
                if hessian is None:
                    continue
                seen.add(matrix.name)
                if method == "gptq":
                    encoded = _gptq(matrix, hessian, quantizer, damping=damping, act_order=act_order)
                else:
                    encoded = quantizer.encode(matrix.read())
                records.quantize(matrix, encoded, method, hessian)
        unseen = [matrix for matrix in matrices if matrix.modules and matrix.name not in seen]
        for matrix in unseen:
            records.quantize(matrix, quantizer.encode(matrix.read()), "rtn")
    _warn_about_calibration(calibrated, matrices, [matrix.name for matrix in unseen])
    return model


class _Records:
    """Quantized weights that a model keeps, by parameter name."""

    def __init__(self, model: nn.Module, quantizer: Quantizer) -> None:
        self._quantizer = quantizer
        self._weights: dict[str, QuantizedWeight] = vars(model).setdefault(_ATTRIBUTE, {})
        # Weights that changed since an earlier call no longer have the recorded codes.
        for name in dict(_changed_weights(model, self._weights)):
            del self._weights[name]
        self._before = dict(self._weights)

    def quantize(self, matrix: WeightMatrix, encoded: Encoded, method: Method, hessian: Tensor | None = None) -> None:
        """Write the dequantized values into the parameter, and keep the codes and the errors."""
        before, packed = matrix.read().clone(), PackedMatrix.from_encoded(encoded, self._quantizer)
        matrix.write(packed.decode())
        # read again: the write has rounded the values to the dtype of the parameter, which is part of the error
        error = torch.linalg.vector_norm(matrix.read() - before, dtype=torch.float64)
        norm = torch.linalg.vector_norm(before, dtype=torch.float64)
        for name in matrix.names:  # a tied weight may have been quantized by another name
            self._weights.pop(name, None)
        self._weights[matrix.name] = QuantizedWeight(
            packed,
            matrix.channels_last,
            str(self._quantizer),
            method,
            float(error / norm) if norm > 0.0 else 0.0,
            None if hessian is None else output_error(before, matrix.read(), hessian),
        )

    @contextmanager
    def note_progress_in_errors(self) -> Iterator[None]:
        """Add to an error how many weights are already quantized; undoing them would need a copy of all weights."""
        try:
            yield
        except BaseException as error:
            done = sum(self._before.get(name) is not weight for name, weight in self._weights.items())
            if done:
                error.add_note(f"{done} weights of the model are already quantized; load the model again")
            raise


def _gptq(matrix: WeightMatrix, hessian: Tensor, quantizer: Quantizer, *, damping: float, act_order: bool) -> Encoded:
    """Return the codes of GPTQ; an error names the weight."""
    try:
        return gptq(matrix.read(), hessian, quantizer, damping=damping, act_order=act_order, block=BLOCK)
    except UserError as error:
        raise UserError(f"{matrix.name}: {error}") from None


def _warn_about_calibration(calibrated: Calibration, matrices: list[WeightMatrix], unseen: list[str]) -> None:
    """Log one line for weights that no calibration input reached, and one for weights with fewer tokens than inputs."""
    if unseen:
        logger.warning(
            "%d of %d weights are rounded to nearest, since no calibration input reaches their layers: %s",
            *(len(unseen), len(matrices), _first_names(unseen)),
        )
    few = []
    for matrix in matrices:
        columns = matrix.parameter.shape[0 if matrix.channels_last else 1]
        tokens = calibrated.tokens.get(matrix.name, columns)
        # fewer tokens than inputs: the Hessian is singular, and only the damping makes it invertible
        if tokens < columns:
            few.append(f"{matrix.name}: {columns} inputs, {tokens} tokens")
    if few:
        logger.warning(
            "%d of %d weights have more inputs than calibration tokens (%s); calibrate on more text",
            *(len(few), len(matrices), few[0]),
        )


def _first_names(names: list[str]) -> str:
    """Return the first three names and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the weights of a model that `quantize_weights` quantized, by parameter name.

    Raises:
        UserError: if a weight has changed since or is missing.
    """
    weights: dict[str, QuantizedWeight] = vars(model).get(_ATTRIBUTE, {})
    for name, change in _changed_weights(model, weights):
        raise UserError(f"{name} {change}; quantize the model again")
    return dict(weights)


def _changed_weights(model: nn.Module, weights: Mapping[str, QuantizedWeight]) -> Iterator[tuple[str, str]]:
    """Yield the names of quantized weights that have changed or are missing, and what happened to them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in weights.items():
        parameter = parameters.get(name)
        if parameter is None:
            yield name, "was quantized and is no longer in the model"
            continue
        rows = as_matrix(parameter, weight.channels_last).shape if parameter.ndim > 1 else ()
        if tuple(rows) != weight.packed.shape or not torch.equal(weight.values(parameter), parameter.detach().cpu()):
            yield name, "has changed since it was quantized"


def _stop_rounding(model: nn.Module, matrices: list[WeightMatrix]) -> None:
    """Stop layers of `quantize_training` from rounding these weights."""
    taken = {id(matrix.parameter) for matrix in matrices}
    for module in model.modules():
        formats = getattr(module, "formats", None)
        if isinstance(formats, LayerFormats) and any(id(each) in taken for each in module.parameters()):
            # Activations may still be rounded; hardware products need formats of both factors, so they end here.
            module.formats = replace(formats, weights=None, hardware=None)  # type: ignore[assignment]


def check_method(method: str) -> Method:
    """Return the method of this name.

    Raises:
        UserError: if there is no such method.
    """
    if method not in get_args(Method):
        raise UserError(with_hint(f"method must be rtn or gptq; given {method!r}", method, get_args(Method)))
    return cast("Method", method)


def _check(
    quantizer: Quantizer, method: str, calibration: Iterable[Batch] | None, damping: float, act_order: bool
) -> None:
    check_method(method)
    if method == "gptq" and calibration is None:
        raise UserError("method='gptq' needs calibration, batches of typical inputs; give them, or method='rtn'")
    if method == "gptq" and quantizer.rounding != "nearest":
        raise UserError(f"method='gptq' needs rounding='nearest'; given rounding={quantizer.rounding!r}")
    if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0.0 <= damping < float("inf"):
        raise UserError(f"damping must be at least 0 and finite; given {damping!r}")
    if not isinstance(act_order, bool):
        raise UserError(f"act_order must be True or False; given {act_order!r}")
