"""Quantise the weights of a trained run, and write them packed."""

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
from scantling.trainer.training.trained import Trained, opened

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True)
class Prediction:
    """What a law says that quantisation adds to the loss.

    Attributes:
        law: its name.
        source: where its constants come from.
        degradation: nats a token; None where it says that training at these bits diverges.
        fitted: the range of each variable in the runs of its constants.
        outside: in words, what of this run lies outside of it.
        unknown: what was trained in few bits, and the law knows nothing of.
    """

    law: str
    source: str
    degradation: float | None
    fitted: Mapping[str, tuple[float, float]]
    outside: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class QuantizedRun:
    """What `quantize_run` did.

    Attributes:
        folder: that was written.
        step: of the checkpoint.
        quantizer: how weights were quantised, in words.
        method: rtn or gptq.
        before: held-out metrics of the model as it was trained; `after` those of the one that was written.
        trained: bits of what was rounded in training, by part.
        predictions: of the laws, for models of language.
        parameters: of the model, without embeddings and output layer.
        tokens: it was trained on.
        weights: what became of each quantised weight.
        saved: bytes on disk.
        memory: bytes of the weights once they are loaded again, in `dtype`: they are unpacked.
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
    """Quantise the newest whole checkpoint of a run, with calibration on its own training data.

    Args:
        run_dir: the directory of a run.
        format: of the weights, as of `scantling.quantize_weights`.
        folder: the folder to write; it must not exist or be empty.
        method: rtn or gptq.
        embeddings: quantise embeddings and the output layer, too.
        sequences: training examples to calibrate on, evenly spread over the data.
        dequantized: write a folder that transformers loads, with the quantised values in the dtype of the model, in
            place of packed ones.
        device: auto, cpu or cuda. Default: what the recipe of the run names.

    Raises:
        UserError: there is no such run, it holds nothing out, or what `quantize_weights` refuses.
        RunError: the folder cannot be written.
    """
    if sequences < 1:
        raise UserError(f"calibration needs 1 sequence or more; given {sequences}")
    folder = Path(folder)
    check_new_folder(folder)
    quantizer = Quantizer.from_spec(format, "channel")
    with opened(run_dir, device=device) as run:
        model, task = run.model, run.task
        before = run.evaluate()
        calibration = calibration_batches(run, sequences)
        taken = (lambda *_: True) if embeddings else None
        quantize_weights(model, quantizer, method=method, calibration=calibration, filter_fn=taken)
        after = run.evaluate()
        weights = quantized_weights(model)
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
    """Held-out losses of a trained run, each with its weights quantised in another way; nothing is written.

    They are computed on the device that the run's recipe names.

    Args:
        run_dir: the directory of a run.
        ways: formats of the weights, each with its method.
        sequences: training examples to calibrate on.

    Raises:
        UserError: as of `quantize_run`.
    """
    found = []
    with opened(run_dir) as run:
        needed = any(method != "rtn" for _, method in ways)  # with which rtn would measure errors
        batches = list(calibration_batches(run, sequences)) if needed else []
        for name, method in ways:
            one = copy.deepcopy(run.model)
            quantize_weights(one, name, method=method, calibration=None if method == "rtn" else batches)
            found.append(run.evaluate(one)["eval_loss"])
    return found


def calibration_batches(run: Trained, count: int) -> Iterator[Any]:
    """`count` training examples, evenly spread, as functions that put a batch through the model as the task does."""
    recipe, data = run.recipe, run.data
    for batch in eval_batches(data.train, data.collate, min(recipe.micro_batch_size(), count), max_samples=count):
        batch = batch.to(run.context.device)
        yield lambda model, batch=batch: run.task.loss(model, batch)


def trained_bits(recipe: Recipe) -> dict[str, int]:
    """The bits of what a run rounds in training, by the keys of its section `precision`."""
    given = recipe.precision.quantized
    return {part: Quantizer.from_spec(each).format.bits for part, each in given.items() if part != "compute"}


def predictions(
    parameters: int, tokens: int, quantizer: Quantizer, trained: Mapping[str, int]
) -> tuple[Prediction, ...]:
    """What every law with published constants for quantisation after training says.

    Args:
        parameters: without embeddings.
        tokens: of training.
        quantizer: of the weights; the laws know its bits alone.
        trained: bits in training, by part.
    """
    found = []
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
        added = float(after - before) if isfinite(before) else None
        unknown = tuple(part for part in trained if part not in known)
        found.append(Prediction(name, law.source, added, fitted, tuple(law.outside(**given)), unknown))
    return tuple(found)
