"""What a task is: how its data is prepared, its loss, and its metrics."""

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

from scantling.data.batch import IGNORED, Batch
from scantling.data.bins import open_bins
from scantling.data.click_features import ClickFeatures
from scantling.data.loader import Collate
from scantling.data.packing import Dataset
from scantling.data.progress import Progress
from scantling.data.sources import check_documents
from scantling.data.tokenizers import ROLES, SPECIALS, ByteTokenizer, Ids, Tokenizer, load_tokenizer
from scantling.errors import UserError
from scantling.recipe.schema import BpeTokenizer, DataSection

LARGEST_EXPONENT = 700.0
"""A loss above this has no perplexity that a double could hold."""


@dataclass
class TaskData:
    """Data that is ready for a loop.

    Attributes:
        train: the training examples.
        heldout: the held-out examples, or None.
        collate: makes batches of examples of both.
        tokenizer: what made the ids, or None where that is not known.
        vocab_size: ids that the model must know.
        lengths: tokens of each training example, for bucketing, or None.
        heldout_bytes_per_token: bytes of held-out text for each target, where targets cover the text; else None.
        labels: the label set in the order of the ids, or None.
        features: what makes rows of a click log into inputs, or None.
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
    """What one forward pass gives.

    Attributes:
        loss: sum of the loss over the batch's targets in nats, a scalar in fp32 with its gradient.
        counts: further sums by name, such as `correct`, detached.
        outputs: values of each example by name, (batch,), detached, for metrics that are no sums.
    """

    loss: torch.Tensor
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


class Task(ABC):
    """One kind of training.

    Attributes:
        name: its name in a recipe.
        auto_class: the class of transformers that builds and loads its models.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]

    def find_auto_class(self, config: Any) -> Any:
        """Return the Auto class of transformers that builds the task's model of a configuration."""
        import transformers

        return getattr(transformers, self.auto_class)

    @abstractmethod
    def prepare(self, data: DataSection, *, seed: int, progress: Progress | None = None) -> TaskData:
        """Read, tokenise and split the data; what was done before comes from the cache.

        Raises:
            UserError: the data cannot be used for this task.
        """

    def check_data(self, data: DataSection) -> None:
        """Look at the data before a run: open each file or folder, and read no more than a first record.

        Raises:
            UserError: with what is wrong with the training data and with the held-out data, in the words of a run.
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
        """`check_data` for the training data, or for the held-out data."""
        if data.bin is not None:
            open_bins(data, seq_len=data.seq_len)
        else:
            check_documents(data, validation=validation)

    def config_overrides(self, data: TaskData) -> dict[str, Any]:
        """What the model's configuration takes from the data."""
        if data.tokenizer is None:
            return {}
        return self.token_ids({role: getattr(data.tokenizer, f"{role}_id") for role in ROLES})

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSums:
        """Put a batch through the model."""

    def extra_ids(self, data: DataSection, tokenizer: Tokenizer | None) -> int:
        """Ids the model needs above those of the tokenizer; None is one of our own that is not there yet."""
        return 0

    def sample_batch(self, batch_size: int, data: DataSection) -> Batch:
        """A batch of the largest shape a run can meet, with ids of 0, for tracing what a model costs."""
        ids = torch.zeros((batch_size, data.seq_len), dtype=torch.long)
        return Batch({"input_ids": ids}, ids.clone(), num_targets=ids.numel(), num_tokens=ids.numel())

    def examples_to_tokens(self, data: DataSection) -> int:
        """Tokens that the plan counts for one example."""
        return data.seq_len

    def planned_overrides(self, data: DataSection, notes: list[str]) -> dict[str, Any]:
        """What `config_overrides` will give, as far as it is known before the data is read; adds what is assumed."""
        return self.token_ids(planned_ids(data))

    def check_model(self, model: torch.nn.Module, data: TaskData) -> None:
        """Raise a UserError if a model cannot use the inputs that the data makes."""
        return

    def token_ids(self, ids: Mapping[str, int | None]) -> dict[str, Any]:
        """Return the ids of special tokens by their keys in a configuration.

        Args:
            ids: those of the tokenizer by role, None for a missing token; empty if the tokenizer is not known.
        """
        return {f"{role}_token_id": id_ for role, id_ in ids.items()}

    def probe(self, config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Random inputs of a model, on which it is compared with its exported copy."""
        vocab_size = config.get_text_config().vocab_size
        values = [value for key, value in vars(config).items() if key.endswith(("_token_id", "_token_index"))]
        marks = {id_ for value in values for id_ in (value if isinstance(value, list) else [value])}
        texts = torch.tensor([token for token in range(vocab_size) if token not in marks])  # no mark of an image
        ids = texts[torch.randint(0, len(texts), (2, 16), generator=generator)]
        return {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})

    def save_inputs(self, folder: Path, data: TaskData, config: Any) -> None:
        """Write what makes raw data into inputs beside an exported model."""
        if data.tokenizer is not None:
            token_types = (getattr(config, "type_vocab_size", None) or 0) > 1
            data.tokenizer.save_pretrained(folder, token_types=token_types)

    def metrics(self, sums: dict[str, float], data: TaskData) -> dict[str, float]:
        """Figures from sums over a dataset.

        Args:
            sums: "loss" and "targets", and the task's own counts.
            data: what was evaluated.

        Returns:
            `eval_loss` in nats a target, and what else has a meaning for the task.
        """
        return {"eval_loss": mean_loss(sums)}

    def output_metrics(self, outputs: dict[str, npt.NDArray[Any]]) -> dict[str, float]:
        """Further figures, from the `LossSums.outputs` of a dataset, each (examples,)."""
        return {}

    def baselines(self, data: TaskData, *, max_samples: int | None = None) -> dict[str, float]:
        """What trivial answers reach on the held-out data; empty where none is known.

        Args:
            data: what was prepared.
            max_samples: answer only so many examples, those of `eval_batches`; of clicks, all count.
        """
        return {}


def planned_ids(data: DataSection, *, padded: bool = False) -> dict[str, int | None]:
    """Return the ids of a recipe's special tokens by role, also of `with_padding`; only a tokenizer folder is read."""
    setting = data.tokenizer
    if isinstance(setting, BpeTokenizer):
        return {role: number for number, role in enumerate(SPECIALS)}  # the first ids of a BPE that is trained
    if setting == "bytes" and data.bin is not None:
        return {}
    tokenizer = ByteTokenizer() if setting == "bytes" else load_tokenizer(setting)
    tokenizer = tokenizer.with_padding() if padded else tokenizer
    return {role: getattr(tokenizer, f"{role}_id") for role in ROLES}


def label_names(labels: Sequence[str]) -> dict[str, Any]:
    """What the configuration of a classifier says of its labels, in the order of their ids."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }


def mean_loss(sums: dict[str, float]) -> float:
    """Nats a target."""
    if not sums.get("targets"):
        raise UserError("the held-out data has no targets to evaluate")
    return sums["loss"] / sums["targets"]


def loss_and_perplexity(loss: float) -> dict[str, float]:
    """The metrics of every language model."""
    figures = {"eval_loss": loss}
    if loss < LARGEST_EXPONENT:
        figures["perplexity"] = math.exp(loss)
    return figures


def loss_and_accuracy(sums: dict[str, float]) -> dict[str, float]:
    """The metrics of what is right or wrong: the mean loss, and the share of targets that are `correct`."""
    return {"eval_loss": mean_loss(sums), "accuracy": sums["correct"] / sums["targets"]}


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropy over the targets, in fp32.

    Args:
        logits: (..., num_classes).
        labels: (...), -100 for no target.
    """
    return F.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


def model_config(model: torch.nn.Module) -> Any:
    """The transformers configuration of a model, also inside a wrapper such as DDP."""
    return getattr(unwrapped(model), "config", None)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model inside a wrapper such as DDP."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


def without_cache(model: torch.nn.Module) -> dict[str, bool]:
    """Return `use_cache=False` if the forward pass of the model takes it.

    Training fills no KV cache. The configuration stays as it is, since it is exported.
    """
    return {"use_cache": False} if _takes_cache(type(unwrapped(model))) else {}


def _takes_cache(kind: type[torch.nn.Module]) -> bool:
    return "use_cache" in inspect.signature(kind.forward).parameters


def required(id_: int | None) -> int:
    """A special token's id after `Tokenizer.require` has seen that it is there."""
    if id_ is None:
        raise AssertionError("the tokenizer was not checked for its special tokens")
    return id_


def padded_length(lengths: Sequence[int], multiple: int | None, limit: int) -> int:
    """How long the rows of a batch become: the longest, or the next multiple of it up to a limit."""
    longest = max(lengths)
    return longest if multiple is None else max(longest, min(limit, -(-longest // multiple) * multiple))


def pad_rows(rows: Sequence[Ids], value: int, length: int = 0, *, left: bool = False) -> torch.Tensor:
    """Rows of different lengths as one tensor, (batch, longest), or of this length where it is longer."""
    result = np.full((len(rows), max(length, *map(len, rows))), value, dtype=np.int64)
    for number, row in enumerate(rows):
        begin = result.shape[1] - len(row) if left else 0
        result[number, begin : begin + len(row)] = row
    return torch.from_numpy(result)
