"""Load the texts of the fine-tuning benchmarks: Banking77, CLINC150 and natural language inference.

The training set, the set for choosing the learning rate (`dev`) and the reported test sets share no text or premise.
They are the same for every run: a hash of each text decides its set and whether a subset keeps it.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from small_models import data_folder
from torch import Tensor

from scantling.errors import UserError
from scantling.trainer.data.hashing import key64

DEV, TEST = 1000, 2000
"""Largest number of examples in the dev set and in each test set."""


@dataclass(frozen=True)
class Example:
    """A text or a pair of texts, with its label."""

    text: str
    label: str
    pair: str | None = None

    @property
    def draw(self) -> float:
        """Pseudorandom number in [0, 1), equal for equal texts and for pairs with the same first text."""
        return key64("split", " ".join(self.text.lower().split())) / 2**64

    @property
    def rank(self) -> int:
        """Sort key by which a subset of examples is chosen."""
        return key64("take", self.text, self.pair or "")


@dataclass(frozen=True)
class Data:
    """Training, dev and test data of a task.

    Attributes:
        labels: label names, in the order of their ids.
        train, dev: examples.
        tests: examples by the name of the test set.
    """

    labels: list[str]
    train: list[Example]
    dev: list[Example]
    tests: dict[str, list[Example]]


def banking77(examples: int) -> Data:
    """Return 77 intents of bank customers: a fifth of the training file is the test set, a tenth the dev set."""
    with open(_path("intent/banking77_train.csv"), encoding="utf-8", newline="") as file:
        rows = [Example(row["text"], row["category"]) for row in csv.DictReader(file)]
    test = [row for row in rows if row.draw < 0.2]
    dev = [row for row in rows if 0.2 <= row.draw < 0.3]
    train = [row for row in rows if row.draw >= 0.3]
    return _data(train, dev, {"banking77": test}, examples)


def clinc150(examples: int) -> Data:
    """Return 150 intents of users of an assistant: the test is the published validation set, the dev set a tenth of the
    training set.
    """
    with gzip.open(_path("intent/clinc150_train_val.json.gz"), "rt", encoding="utf-8") as file:
        parts = json.load(file)
    rows = {part: [Example(text, label) for text, label in parts[part]] for part in ("train", "val")}
    tested = {row.draw for row in rows["val"]}
    train = [row for row in rows["train"] if row.draw not in tested]
    dev = [row for row in train if row.draw < 0.1]
    return _data([row for row in train if row.draw >= 0.1], dev, {"clinc150": rows["val"]}, examples)


def nli(examples: int) -> Data:
    """Return pairs with entailment, contradiction or neutral; tests are LingNLI's validation set and half of MNLI's."""
    tests = {name: _pairs(f"nli/{name}.jsonl.gz") for name in ("lingnli_valid", "mnli_dev_matched_part_a")}
    tested = {row.text for rows in tests.values() for row in rows}
    rows = [row for row in _pairs("nli/train.jsonl.gz") if row.text not in tested]
    dev = [row for row in rows if row.draw < 0.05]
    return _data([row for row in rows if row.draw >= 0.05], dev, tests, examples)


TASKS: dict[str, Callable[[int], Data]] = {"banking77": banking77, "clinc150": clinc150, "nli": nli}


def similar_lengths(lengths: Tensor, batch: int, generator: torch.Generator) -> list[Tensor]:
    """Return the positions of one epoch's batches in random order.

    Batches are cut from groups of 16 batches sorted by length, so that they have little padding.

    Args:
        lengths: (n) lengths of the texts.
        batch: texts in a batch; the remaining ones of the epoch are left out.
        generator: generator of the order.
    """
    groups = torch.randperm(len(lengths), generator=generator).split(16 * batch)
    batches = [part for group in groups for part in group[lengths[group].argsort()].split(batch)]
    full = [part for part in batches if len(part) == batch]
    return [full[i] for i in torch.randperm(len(full), generator=generator).tolist()]


def _data(train: list[Example], dev: list[Example], tests: dict[str, list[Example]], examples: int) -> Data:
    few = {name: _take(rows, TEST) for name, rows in tests.items()}
    return Data(sorted({row.label for row in train}), _take(train, examples), _take(dev, DEV), few)


def _take(rows: Iterable[Example], count: int) -> list[Example]:
    return sorted(rows, key=lambda row: row.rank)[:count]


def _pairs(name: str) -> list[Example]:
    with gzip.open(_path(name), "rt", encoding="utf-8") as file:
        return [Example(row["premise"], row["label"], row["hypothesis"]) for row in map(json.loads, file)]


def _path(name: str) -> Path:
    path = data_folder() / name
    if not path.is_file():
        raise UserError(f"{path} is not there; set SCANTLING_DATA to the folder of real data")
    return path
