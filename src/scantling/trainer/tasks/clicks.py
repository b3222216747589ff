"""Click prediction: whether a row of features leads to a click, or another binary event."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from scantling.trainer.data.click_features import ClickFeatures
from scantling.trainer.data.click_files import click_columns, click_files
from scantling.trainer.data.click_prepare import prepare_clicks
from scantling.trainer.data.click_store import ClickStore, check_clicks
from scantling.trainer.data.loader import Batch, Numbered
from scantling.trainer.data.progress import Progress
from scantling.trainer.recipe.schema import Clicks, DataSection
from scantling.trainer.tasks.base import LossSums, Task, TaskData, loss_and_accuracy

ASSUMED_ROWS = 1000
"""Table size that the plan assumes if the data determines it."""


@dataclass(frozen=True)
class ClickBatches:
    """Collate function for row indices; reads all rows of a batch at once.

    Args:
        features: converts rows to inputs.
        store: rows from 0 on.
        held_store: rows from `len(store)` on, or None.
    """

    features: ClickFeatures
    store: ClickStore
    held_store: ClickStore | None = None

    def __call__(self, examples: list[Numbered]) -> Batch:
        rows = np.array([row for _, _, row in examples], dtype=np.int64)
        store = self.store
        if self.held_store is not None and rows[0] >= len(store):
            store, rows = self.held_store, rows - len(store)
        selected = store.take(rows)
        inputs = {"categorical": torch.from_numpy(self.features.ids(selected.keys))}
        if self.features.numeric:
            inputs["numeric"] = torch.from_numpy(self.features.scaled(selected.numbers))
        labels = torch.from_numpy(selected.labels.astype(np.float32))
        return Batch(inputs, labels, num_targets=len(rows), num_tokens=len(rows))


class ClickPrediction(Task):
    """Prediction of the probability of a click; a row counts as one token."""

    name: ClassVar[str] = "clicks"
    auto_class: ClassVar[str] = "AutoModel"

    def prepare(self, data: DataSection, *, seed: int, progress: Progress | None = None) -> TaskData:
        ready = prepare_clicks(data, seed=seed, progress=progress)
        heldout = ready.heldout
        if ready.held_store is not None:
            heldout = range(len(ready.store), len(ready.store) + len(ready.held_store))
        return TaskData(
            ready.train,
            heldout,
            ClickBatches(ready.features, ready.store, ready.held_store),
            tokenizer=None,
            vocab_size=0,
            features=ready.features,
            info=ready.info,
        )

    def _check_source(self, data: DataSection, *, validation: bool) -> None:
        check_clicks(click_files(data, validation=validation))

    def config_overrides(self, data: TaskData) -> dict[str, Any]:
        if data.features is None:
            raise AssertionError("prepared by another task")
        return {"num_numeric": len(data.features.numeric), "table_sizes": list(data.features.table_sizes)}

    def planned_overrides(self, data: DataSection, notes: list[str]) -> dict[str, Any]:
        columns, clicks = click_columns(data), data.clicks or Clicks()
        sizes = [clicks.num_rows(name) for name in columns.categorical]
        unknown = [name for name, size in zip(columns.categorical, sizes, strict=True) if size is None]
        if unknown:
            listed = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} more columns" if len(unknown) > 4 else "")
            notes.append(
                f"the tables of {listed} have as many rows as the data has categories, which is not known before it is "
                f"read; {ASSUMED_ROWS:,} are assumed"
            )
        return {"num_numeric": len(columns.numeric), "table_sizes": [size or ASSUMED_ROWS for size in sizes]}

    def examples_to_tokens(self, data: DataSection) -> int:
        return 1

    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSums:
        logits = model(**batch.inputs).logits.float()
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
        scores = logits.detach()
        counts = {"correct": ((scores > 0) == (batch.labels > 0.5)).sum(), "clicks": batch.labels.sum()}
        return LossSums(loss, counts, {"scores": scores, "labels": batch.labels})

    def sample_batch(self, batch_size: int, data: DataSection) -> Batch:
        columns = click_columns(data)
        inputs = {"categorical": torch.zeros((batch_size, len(columns.categorical)), dtype=torch.long)}
        if columns.numeric:
            inputs["numeric"] = torch.zeros((batch_size, len(columns.numeric)))
        return Batch(inputs, torch.zeros(batch_size), num_targets=batch_size, num_tokens=batch_size)

    def probe(self, config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
        ids = [torch.randint(0, size, (8,), generator=generator) for size in config.table_sizes]
        inputs = {"categorical": torch.stack(ids, dim=1)}
        return inputs | (
            {"numeric": torch.randn(8, config.num_numeric, generator=generator)} if config.num_numeric else {}
        )

    def save_inputs(self, folder: Path, data: TaskData, config: Any) -> None:
        if data.features is not None:
            data.features.save_pretrained(folder)

    def metrics(self, sums: dict[str, float], data: TaskData) -> dict[str, float]:
        figures = loss_and_accuracy(sums)
        entropy = binary_entropy(sums["clicks"] / sums["targets"])
        return figures | ({"normalized_entropy": figures["eval_loss"] / entropy} if entropy else {})

    def output_metrics(self, outputs: dict[str, npt.NDArray[Any]]) -> dict[str, float]:
        area = auc(outputs["scores"], outputs["labels"])
        return {} if area is None else {"auc": area}

    def baselines(self, data: TaskData, *, max_samples: int | None = None) -> dict[str, float]:
        """Return `base_rate_loss` and `majority_accuracy` of always predicting the training click rate."""
        train, held = data.info["train"], data.info["heldout"]
        if held is None:
            return {}
        rate, share = (side["clicks"] / side["rows"] for side in (train, held))
        figures = {"majority_accuracy": share if rate > 0.5 else 1 - share}
        if 0 < rate < 1:
            figures["base_rate_loss"] = -share * math.log(rate) - (1 - share) * math.log(1 - rate)
        return figures


def binary_entropy(share: float) -> float:
    """Return the entropy of an event with this probability in nats.

    The cross entropy of predictions, divided by that of the data's own click rate, is the normalized entropy of He et
    al., "Practical lessons from predicting clicks on ads at Facebook" (ADKDD 2014), section 3. It is 1 for always
    predicting the click rate, and lower for better predictions.
    """
    return -sum(p * math.log(p) for p in (share, 1 - share) if p > 0)


def auc(scores: npt.NDArray[Any], labels: npt.NDArray[Any]) -> float | None:
    """Return the area under the ROC curve: how often a click has a higher score than a non-click; ties count half.

    The result is exact, from the Mann-Whitney rank sum; ties get the mean of their ranks.

    Args:
        scores: (examples,), higher for a more likely click.
        labels: (examples,), 0 or 1.

    Returns:
        The area, or None if all labels are equal.
    """
    from scipy.stats import rankdata

    positive = labels > 0.5
    clicks = int(positive.sum())
    non_clicks = len(positive) - clicks
    if not clicks or not non_clicks:
        return None
    ranks = float(rankdata(scores)[positive].sum())
    # U = R - n(n + 1) / 2 for the rank sum R of n clicks; AUC = U / (n * non_clicks)
    return (ranks - clicks * (clicks + 1) / 2) / (clicks * non_clicks)
