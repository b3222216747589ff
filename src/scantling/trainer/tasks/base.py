"""Interface of a task: data preparation, loss and metrics."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from scantling.errors import UserError
from scantling.trainer.data.bins import open_bins
from scantling.trainer.data.click_features import ClickFeatures
from scantling.trainer.data.loader import IGNORED, Batch, Collate
from scantling.trainer.data.packing import Dataset
from scantling.trainer.data.progress import Progress
from scantling.trainer.data.sources import check_documents
from scantling.trainer.data.tokenizers import ROLES, SPECIALS, ByteTokenizer, Ids, Tokenizer, load_tokenizer
from scantling.trainer.recipe.schema import BpeTokenizer, DataSection

LARGEST_EXPONENT = 700.0
"""Largest loss whose perplexity fits into a double."""


@dataclass
class TaskData:
    """Prepared data of a run.

    Attributes:
        train: the training examples.
        heldout: the held-out examples, or None.
        collate: makes batches of training and held-out examples.
        tokenizer: the tokenizer of the ids, or None if unknown.
        vocab_size: number of ids that the model needs.
        lengths: tokens of each training example, for bucketing, or None.
        heldout_bytes_per_token: bytes of held-out text per target, if targets cover the text; else None.
        labels: the label set in the order of the ids, or None.
        features: converts rows of a click log to model inputs, or None.
        info: facts for the run's records.
    """

    train: Dataset
    heldout: Dataset | None
    collate: Collate
    tokenizer: Tokenizer | None
    vocab_size: int
    lengths: npt.NDArray[np.int64] | None = None
    heldout_bytes_per_token: float | None = None
    labels: list[str] | None = None
    features: ClickFeatures | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class LossSums:
    """Results of one forward pass.

    Attributes:
        loss: sum of the loss over the batch's targets in nats, an fp32 scalar with its gradient.
        counts: other sums by name, such as `correct`, detached.
        outputs: values per example by name, (batch,), detached, for metrics that are not sums.
    """

    loss: torch.Tensor
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


class Task(ABC):
    """Base class of tasks.

    Attributes:
        name: its name in a recipe.
        auto_class: the class of transformers that builds and loads its models.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]

    def find_auto_class(self, config: Any) -> Any:
        """Return the Auto class of transformers that builds the task's model from a configuration."""
        import transformers

        return getattr(transformers, self.auto_class)

    @abstractmethod
    def prepare(self, data: DataSection, *, seed: int, progress: Progress | None = None) -> TaskData:
        """Read, tokenize and split the data; reuse cached results.

        Raises:
            UserError: the data cannot be used for this task.
        """

    def check_data(self, data: DataSection) -> None:
        """Check the data before a run: open each file or folder, and read at most the first record.

        Raises:
            UserError: the problems of the training data and of the held-out data, worded as in a run.
        """
        problems = []
        for validation in (False, True) if data.validation is not None else (False,):
            try:
                self._check_source(data, validation=validation)
            except UserError as error:
                problems.append(str(error))
        if problems:
            raise UserError("\n".join(dict.fromkeys(problems)))

    def _check_source(self, data: DataSection, *, validation: bool) -> None:
        """Run `check_data` for the training data, or for the held-out data."""
        if data.bin is not None:
            open_bins(data, seq_len=data.seq_len)
        else:
            check_documents(data, validation=validation)

    def config_overrides(self, data: TaskData) -> dict[str, Any]:
        """Return the configuration keys that depend on the data."""
        if data.tokenizer is None:
            return {}
        return self.token_ids({role: getattr(data.tokenizer, f"{role}_id") for role in ROLES})

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSums:
        """Run the forward pass of a batch and return its loss."""

    def extra_ids(self, data: DataSection, tokenizer: Tokenizer | None) -> int:
        """Return the number of ids that the model needs beyond the tokenizer's; None is an untrained BPE."""
        return 0

    def sample_batch(self, batch_size: int, data: DataSection) -> Batch:
        """Return a batch of the largest shape in a run, with ids of 0, to trace the cost of a model."""
        ids = torch.zeros((batch_size, data.seq_len), dtype=torch.long)
        return Batch({"input_ids": ids}, ids.clone(), num_targets=ids.numel(), num_tokens=ids.numel())

    def examples_to_tokens(self, data: DataSection) -> int:
        """Return the number of tokens that the plan counts per example."""
        return data.seq_len

    def planned_overrides(self, data: DataSection, notes: list[str]) -> dict[str, Any]:
        """Return `config_overrides` as far as it is known before the data is read; append assumptions to `notes`."""
        return self.token_ids(planned_ids(data))

    def check_model(self, model: torch.nn.Module, data: TaskData) -> None:
        """Raise a UserError if a model cannot use the inputs of this data."""
        return

    def token_ids(self, ids: Mapping[str, int | None]) -> dict[str, Any]:
        """Return the ids of special tokens by configuration key.

        Args:
            ids: the tokenizer's ids by role, None for a missing token; empty if the tokenizer is unknown.
        """
        return {f"{role}_token_id": id_ for role, id_ in ids.items()}

    def probe(self, config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return random inputs, to compare a model with its exported copy."""
        vocab_size = config.get_text_config().vocab_size
        values = [value for key, value in vars(config).items() if key.endswith(("_token_id", "_token_index"))]
        marks = {id_ for value in values for id_ in (value if isinstance(value, list) else [value])}
        texts = torch.tensor([token for token in range(vocab_size) if token not in marks])  # no image marker
        ids = texts[torch.randint(0, len(texts), (2, 16), generator=generator)]
        return {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})

    def save_inputs(self, folder: Path, data: TaskData, config: Any) -> None:
        """Write the preprocessing of raw data next to an exported model."""
        if data.tokenizer is not None:
            token_types = (getattr(config, "type_vocab_size", None) or 0) > 1
            data.tokenizer.save_pretrained(folder, token_types=token_types)

    def metrics(self, sums: dict[str, float], data: TaskData) -> dict[str, float]:
        """Compute metrics from sums over a dataset.

        Args:
            sums: "loss" and "targets", and the task's own counts.
            data: the evaluated data.

        Returns:
            `eval_loss` in nats per target, and the task's other metrics.
        """
        return {"eval_loss": mean_loss(sums)}

    def output_metrics(self, outputs: dict[str, npt.NDArray[Any]]) -> dict[str, float]:
        """Compute other metrics, from the `LossSums.outputs` of a dataset, each (examples,)."""
        return {}

    def baselines(self, data: TaskData, *, max_samples: int | None = None) -> dict[str, float]:
        """Return the metrics of trivial predictors on the held-out data; empty if the task has none.

        Args:
            data: the prepared data.
            max_samples: use at most this many examples, those of `eval_batches`; click prediction always uses all.
        """
        return {}


def planned_ids(data: DataSection, *, padded: bool = False) -> dict[str, int | None]:
    """Return the ids of a recipe's special tokens by role, with padding if `padded`; reads only a tokenizer folder."""
    setting = data.tokenizer
    if isinstance(setting, BpeTokenizer):
        return {role: number for number, role in enumerate(SPECIALS)}  # a trained BPE has its special tokens first
    if setting == "bytes" and data.bin is not None:
        return {}
    tokenizer = ByteTokenizer() if setting == "bytes" else load_tokenizer(setting)
    tokenizer = tokenizer.with_padding() if padded else tokenizer
    return {role: getattr(tokenizer, f"{role}_id") for role in ROLES}


def label_names(labels: Sequence[str]) -> dict[str, Any]:
    """Return a classifier's configuration keys for its labels, in the order of their ids."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }


def mean_loss(sums: dict[str, float]) -> float:
    """Return the loss in nats per target."""
    if not sums.get("targets"):
        raise UserError("the held-out data has no targets to evaluate")
    return sums["loss"] / sums["targets"]


def loss_and_perplexity(loss: float) -> dict[str, float]:
    """Return the metrics of a language model."""
    figures = {"eval_loss": loss}
    if loss < LARGEST_EXPONENT:
        figures["perplexity"] = math.exp(loss)
    return figures


def loss_and_accuracy(sums: dict[str, float]) -> dict[str, float]:
    """Return the mean loss and the share of targets that are `correct`."""
    return {"eval_loss": mean_loss(sums), "accuracy": sums["correct"] / sums["targets"]}


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross entropy over the targets, in fp32.

    Args:
        logits: (..., num_classes).
        labels: (...), -100 for no target.
    """
    # fp32 logits: a sum over thousands of targets is too coarse in bf16.
    # (..., num_classes) -> (targets, num_classes)
    return F.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


def model_config(model: torch.nn.Module) -> Any:
    """Return the transformers configuration of a model, also inside a wrapper such as DDP."""
    return getattr(unwrapped(model), "config", None)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the transformers model inside a wrapper such as DDP."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


def without_cache(model: torch.nn.Module) -> dict[str, bool]:
    """Return `use_cache=False` if the forward pass of the model takes it.

    Training needs no KV cache. The configuration is not changed, because it is exported.
    """
    return {"use_cache": False} if _takes_cache(type(unwrapped(model))) else {}


def _takes_cache(kind: type[torch.nn.Module]) -> bool:
    return "use_cache" in inspect.signature(kind.forward).parameters


def required(id_: int | None) -> int:
    """Return a special token's id, which `Tokenizer.require` has checked before."""
    if id_ is None:
        raise AssertionError("the tokenizer was not checked for its special tokens")
    return id_


def padded_length(lengths: Sequence[int], multiple: int | None, limit: int) -> int:
    """Return the padded length of a batch: the longest row, rounded up to a multiple but at most `limit`."""
    longest = max(lengths)
    return longest if multiple is None else max(longest, min(limit, -(-longest // multiple) * multiple))


def pad_rows(rows: Sequence[Ids], value: int, length: int = 0, *, left: bool = False) -> torch.Tensor:
    """Stack rows of different lengths into a tensor (batch, longest), or (batch, length) if `length` is larger."""
    result = np.full((len(rows), max(length, *map(len, rows))), value, dtype=np.int64)
    for number, row in enumerate(rows):
        begin = result.shape[1] - len(row) if left else 0
        result[number, begin : begin + len(row)] = row
    return torch.from_numpy(result)
