"""What trivial answers reach in classification, so that an accuracy can be judged.

A model of pairs that does no better than a linear model on the second sentence alone has not learned to compare them
(Gururangan et al., "Annotation artifacts in natural language inference data", NAACL 2018).
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from scantling.data.hashing import key64, permutation
from scantling.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from scantling.tasks.classification import LabelledDataset

FEATURES = 1 << 17
"""Buckets that words and pairs of words are hashed into."""
TRAIN_DOCUMENTS = 50_000
"""Most training documents used, chosen by hash."""
EPOCHS = 3
BATCH = 256
WORD = re.compile(r"\w+|[^\w\s]")


def majority_accuracy(train: npt.NDArray[np.int64], heldout: npt.NDArray[np.int64]) -> float:
    """Accuracy of always answering the most frequent training label; both arguments are label ids."""
    return float((heldout == np.bincount(train).argmax()).mean())


def bag_accuracy(
    train: LabelledDataset, heldout: LabelledDataset, tokenizer: Tokenizer, *, num_labels: int, seed: int = 0
) -> float:
    """Accuracy of logistic regression on hashed words and bigrams of the last text: the second one of pairs.

    Args:
        train: documents to learn from.
        heldout: documents to answer.
        tokenizer: what made their ids.
        num_labels: size of the label set.
        seed: decides the order of learning.
    """
    order = permutation(len(train), key64("bag", seed))[:TRAIN_DOCUMENTS]
    bags = [_features(train, int(index), tokenizer) for index in order]
    labels = torch.from_numpy(train.labels()[order])
    weights = torch.zeros(FEATURES, num_labels, requires_grad=True)
    bias = torch.zeros(num_labels, requires_grad=True)
    optimizer = torch.optim.Adagrad([weights, bias], lr=0.1)
    for epoch in range(EPOCHS):
        shuffled = permutation(len(bags), key64("bag", seed, epoch))
        for at in range(0, len(bags), BATCH):
            part = shuffled[at : at + BATCH]
            optimizer.zero_grad()
            loss = F.cross_entropy(_scores(weights, bias, [bags[index] for index in part]), labels[part])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    correct = 0
    with torch.no_grad():
        targets = torch.from_numpy(heldout.labels())
        for at in range(0, len(heldout), BATCH):
            numbers = range(at, min(at + BATCH, len(heldout)))
            scores = _scores(weights, bias, [_features(heldout, number, tokenizer) for number in numbers])
            correct += int((scores.argmax(-1) == targets[at : at + BATCH]).sum())
    return correct / len(heldout)


def _features(dataset: LabelledDataset, index: int, tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """The distinct features of a document."""
    example = dataset[index]
    ids = example.ids if example.pair_ids is None else example.pair_ids
    words = WORD.findall(tokenizer.decode(ids).lower())
    bigrams = (f"{first} {second}" for first, second in zip(["", *words], [*words, ""], strict=True))
    hashes = {zlib.crc32(feature.encode()) % FEATURES for feature in (*words, *bigrams)}
    return np.array(sorted(hashes), dtype=np.int64)


def _scores(weights: torch.Tensor, bias: torch.Tensor, bags: list[npt.NDArray[np.int64]]) -> torch.Tensor:
    """Logits, (documents, labels)."""
    ends = np.cumsum([len(bag) for bag in bags])
    offsets = torch.from_numpy(np.concatenate([[0], ends[:-1]]))
    indices = torch.from_numpy(np.concatenate(bags))
    return F.embedding_bag(indices, weights, offsets, mode="sum") + bias
