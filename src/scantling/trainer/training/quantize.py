"""Quantize the weights of a trained run, and write them packed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from scantling.errors import UserError
from scantling.files import check_new_folder
from scantling.groups import num_non_embedding
from scantling.laws.law import without_range_warnings
from scantling.laws.registry import find_law, names
from scantling.precision import Quantizer
from scantling.precision.packed_files import SavedBytes, save_quantized
from scantling.precision.training import restore
from scantling.precision.weights import Method, QuantizedWeight, quantize_weights, quantized_weights
from scantling.trainer.data.loader import eval_batches
from scantling.trainer.recipe import Recipe
from scantling.trainer.training.trained_run import TrainedRun, open_run

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True)
class Prediction:
    """Increase of the loss by quantization that a scaling law predicts.

    Attributes:
        law: its name.
        source: source of its constants.
        degradation: nats per token; None if the law predicts that training at these bits diverges.
        fitted: range of each variable in the runs from which the constants were fitted.
        outside: descriptions of variables of this run that are outside of their range.
        unknown: parts trained in low precision that the law does not model.
    """

    law: str
    source: str
    degradation: float | None
    fitted: Mapping[str, tuple[float, float]]
    outside: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class QuantizedRun:
    """Result of `quantize_run`.

    Attributes:
        folder: the folder that was written.
        step: step of the checkpoint.
        quantizer: description of the quantizer of the weights.
        method: rtn or gptq.
        before: held-out metrics before quantization; `after` those after it.
        trained: number of bits of each part that was rounded in training.
        predictions: of the scaling laws, for language models.
        parameters: number of parameters without embeddings and output layer.
        tokens: number of training tokens.
        weights: result of each quantized weight.
        saved: bytes on disk.
        memory: bytes of the weights after loading, in `dtype`, because they are unpacked.
        dtype: of the loaded weights, such as fp32.
    """

    folder: Path
    step: int
    quantizer: str
    method: Method
    before: dict[str, float]
    after: dict[str, float]
    trained: dict[str, int]
    predictions: tuple[Prediction, ...]
    parameters: int
    tokens: int
    weights: dict[str, QuantizedWeight]
    saved: SavedBytes
    memory: int
    dtype: str


def quantize_run(
    run_dir: str | Path,
    format: Quantizer | str | Mapping[str, Any],
    folder: str | Path,
    *,
    method: Method = "rtn",
    embeddings: bool = False,
    sequences: int = 128,
    dequantized: bool = False,
    device: str | None = None,
) -> QuantizedRun:
    """Quantize the newest complete checkpoint of a run, with calibration on its own training data.

    Args:
        run_dir: the directory of a run.
        format: of the weights, as of `scantling.quantize_weights`.
        folder: the folder to write; it must not exist or be empty.
        method: rtn or gptq.
        embeddings: quantize embeddings and the output layer, too.
        sequences: training examples to calibrate on, evenly spread over the data.
        dequantized: write a folder that transformers loads, with the quantized values in the dtype of the model instead
            of packed ones.
        device: auto, cpu or cuda. Default: `train.device` of the run's recipe.

    Raises:
        UserError: there is no such run, it has no held-out data, or as of `quantize_weights`.
        RunError: the folder cannot be written.
    """
    if sequences < 1:
        raise UserError(f"calibration needs 1 sequence or more; given {sequences}")
    folder = Path(folder)
    # refuse the folder before the calibration, not after it
    check_new_folder(folder)
    quantizer = Quantizer.from_spec(format, "channel")
    with open_run(run_dir, device=device) as run:
        model, task = run.model, run.task
        # the weights are rounded in place, so the loss before comes first
        before = run.evaluate()
        calibration = calibration_batches(run, sequences)
        filter_fn = (lambda *_: True) if embeddings else None
        quantize_weights(model, quantizer, method=method, calibration=calibration, filter_fn=filter_fn)
        after = run.evaluate()
        weights = quantized_weights(model)
        # back to plain layers, which then hold the rounded weights
        restore(model, weights="rounded")
        also = partial(task.save_inputs, data=run.data, config=model.config)
        saved = save_quantized(model, folder, also=also, packed=not dequantized)
    parameters, trained = num_non_embedding(model), trained_bits(run.recipe)
    return QuantizedRun(
        folder=folder,
        step=run.step,
        quantizer=str(quantizer),
        method=method,
        before=before,
        after=after,
        trained=trained,
        predictions=predictions(parameters, run.tokens, quantizer, trained) if task.name == "causal-lm" else (),
        parameters=parameters,
        tokens=run.tokens,
        weights=weights,
        saved=saved,
        memory=sum(parameter.nbytes for parameter in model.parameters()),
        dtype=_NAMES.get(model.dtype, str(model.dtype).removeprefix("torch.")),
    )


def losses_after(run_dir: str | Path, ways: Sequence[tuple[str, Method]], *, sequences: int = 128) -> list[float]:
    """Return the held-out losses of a trained run after several quantizations; nothing is written.

    The device is `train.device` of the run's recipe.

    Args:
        run_dir: the directory of a run.
        ways: formats of the weights, each with its method.
        sequences: training examples to calibrate on.

    Raises:
        UserError: as of `quantize_run`.
    """
    losses = []
    with open_run(run_dir) as run:
        # without calibration rtn skips the measurement of errors
        needed = any(method != "rtn" for _, method in ways)
        batches = list(calibration_batches(run, sequences)) if needed else []
        for name, method in ways:
            # rounding is in place, and each method must start from the trained weights
            model = copy.deepcopy(run.model)
            quantize_weights(model, name, method=method, calibration=None if method == "rtn" else batches)
            losses.append(run.evaluate(model)["eval_loss"])
    return losses


def calibration_batches(run: TrainedRun, count: int) -> Iterator[Any]:
    """Yield `count` training examples, evenly spread, as functions that compute the task's loss of a batch."""
    recipe, data = run.recipe, run.data
    for batch in eval_batches(data.train, data.collate, min(recipe.micro_batch_size(), count), max_samples=count):
        batch = batch.to(run.context.device)
        yield lambda model, batch=batch: run.task.loss(model, batch)


def trained_bits(recipe: Recipe) -> dict[str, int]:
    """Return the number of bits of each part that a run rounds in training, by the keys of its section `precision`."""
    given = recipe.precision.quantized
    return {part: Quantizer.from_spec(each).format.bits for part, each in given.items() if part != "compute"}


def predictions(
    parameters: int, tokens: int, quantizer: Quantizer, trained: Mapping[str, int]
) -> tuple[Prediction, ...]:
    """Return the prediction of each law with published constants for quantization after training.

    Args:
        parameters: number of parameters without embeddings.
        tokens: number of training tokens.
        quantizer: of the weights; the laws depend only on its bits.
        trained: bits in training, by part.
    """
    results = []
    for name in names():
        kind = find_law(name)
        if "post" not in kind.VARIABLES or not kind.PUBLISHED:
            continue
        law: Any = kind.published()
        known = {part: bits for part, bits in trained.items() if part in law.modeled_parts()}
        given = {"N": parameters, "D": tokens, **known}
        with without_range_warnings():  # they are in `outside`
            before, after = law.loss(**given), law.loss(**given, post=quantizer.format.bits)
        given["post"] = quantizer.format.bits
        fitted = {key: law.fitted_ranges[key] for key in given if key in law.fitted_ranges}
        # a predicted divergence has an infinite loss, whose difference would be NaN
        added = float(after - before) if isfinite(before) else None
        unknown = tuple(part for part in trained if part not in known)
        results.append(Prediction(name, law.source, added, fitted, tuple(law.outside(**given)), unknown))
    return tuple(results)
