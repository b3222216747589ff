"""Baselines for classification: accuracy of trivial predictors, to judge a model's accuracy.

A model of text pairs that is no better than a linear model on the second sentence alone has not learned to compare
them (Gururangan et al., "Annotation artifacts in natural language inference data", NAACL 2018).
"""

from __future__ import annotations

import re
import zlib
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from scantling.trainer.data.hashing import key64, permutation
from scantling.trainer.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from scantling.trainer.data.images import ImageSet
    from scantling.trainer.tasks.classification import LabeledDataset

FEATURES = 1 << 17
"""Most hash buckets for words and bigrams."""
WEIGHTS = 1 << 24
"""Most weights, buckets times labels, unless there are very many labels."""
TRAIN_DOCUMENTS = 50_000
"""Most training documents used, selected by hash."""
PIXELS = 1 << 24
"""Most elements of held-out images compared at a time, unless a single image has more."""
EPOCHS = 3
BATCH = 256
LR = 0.1
Floats = npt.NDArray[np.float64]
WORD = re.compile(r"\w+|[^\w\s]")


def majority_accuracy(train: npt.NDArray[np.int64], heldout: npt.NDArray[np.int64]) -> float:
    """Return the accuracy of always predicting the most frequent training label; both arguments are label ids."""
    return float((heldout == np.bincount(train).argmax()).mean())


def bag_accuracy(
    train: LabeledDataset,
    heldout: LabeledDataset,
    tokenizer: Tokenizer,
    *,
    num_labels: int,
    chosen: npt.NDArray[np.int64],
    seed: int = 0,
) -> float:
    """Return the accuracy of logistic regression on hashed words and bigrams; for pairs, of the second text only.

    Args:
        train: documents to learn from.
        heldout: documents to classify.
        tokenizer: the tokenizer of their ids.
        num_labels: size of the label set.
        chosen: indices of the held-out documents to classify.
        seed: determines the order of training.
    """
    size = min(FEATURES, max(1 << 10, WEIGHTS // num_labels))
    order = permutation(len(train), key64("bag", seed))[:TRAIN_DOCUMENTS]
    bags = [_features(train, int(index), tokenizer, size) for index in order]
    targets = train.labels()[order]
    weights, bias = np.zeros((size, num_labels)), np.zeros(num_labels)
    squares, bias_squares = np.full_like(weights, 1e-10), np.full_like(bias, 1e-10)
    for epoch in range(EPOCHS):
        shuffled = permutation(len(bags), key64("bag", seed, epoch))
        for at in range(0, len(bags), BATCH):
            part = shuffled[at : at + BATCH]
            batch = _Bags([bags[index] for index in part])
            # Gradient of the cross entropy with respect to the logits: softmax - one-hot, (documents, labels).
            error = softmax(batch.scores(weights, bias), axis=1)
            error[np.arange(len(part)), targets[part]] -= 1
            error /= len(part)
            rows, gradient = batch.gradient(error)  # Adagrad updates only the rows that have a gradient
            squares[rows] += gradient**2
            weights[rows] -= LR * gradient / np.sqrt(squares[rows])
            bias_squares += error.sum(0) ** 2
            bias -= LR * error.sum(0) / np.sqrt(bias_squares)
    correct, labels = 0, heldout.labels()
    for at in range(0, len(chosen), BATCH):
        indices = chosen[at : at + BATCH]
        batch = _Bags([_features(heldout, int(index), tokenizer, size) for index in indices])
        correct += int((batch.scores(weights, bias).argmax(1) == labels[indices]).sum())
    return correct / len(chosen)


def class_mean_accuracy(train: ImageSet, heldout: ImageSet, *, num_labels: int, seed: int = 0) -> float:
    """Return the accuracy of predicting the class whose mean training image is closest in squared distance.

    In |p - m|^2 = |p|^2 - 2 p m + |m|^2, the first term is the same for all classes.

    Args:
        train: images to average.
        heldout: images to classify.
        num_labels: size of the label set.
        seed: determines which training images are used if there are many.
    """
    chosen = permutation(len(train), key64("means", seed))[:TRAIN_DOCUMENTS]
    means, counts = np.zeros((num_labels, prod(train.shape))), np.zeros(num_labels)
    for index in chosen:
        pixels, label = train[int(index)]
        means[label] += pixels.ravel()
        counts[label] += 1
    means /= np.maximum(counts, 1)[:, None]
    # A class without training images is never the closest.
    squares = np.where(counts > 0, np.einsum("cp,cp->c", means, means), np.inf)
    correct, step = 0, max(1, PIXELS // prod(train.shape))
    for at in range(0, len(heldout), step):
        indices = range(at, min(at + step, len(heldout)))
        images = np.stack([heldout[index].pixels.ravel() for index in indices]).astype(np.float64)
        correct += int(((squares - 2 * (images @ means.T)).argmin(1) == heldout.labels[at : at + step]).sum())
    return correct / len(heldout)


def _features(dataset: LabeledDataset, index: int, tokenizer: Tokenizer, size: int) -> npt.NDArray[np.int64]:
    """Return the distinct features of a document, integers below `size`; there is at least one."""
    example = dataset[index]
    ids = example.ids if example.pair_ids is None else example.pair_ids
    words = WORD.findall(tokenizer.decode(ids).lower())
    bigrams = (f"{first} {second}" for first, second in zip(["", *words], [*words, ""], strict=True))
    hashes = {zlib.crc32(feature.encode()) % size for feature in (*words, *bigrams)}
    return np.array(sorted(hashes), dtype=np.int64)


class _Bags:
    """Nonempty sets of features. Each is a vector of length 1; otherwise the model would memorize long documents."""

    def __init__(self, bags: list[npt.NDArray[np.int64]]) -> None:
        counts = np.array([len(bag) for bag in bags])
        self._features, self._begins = np.concatenate(bags), np.cumsum(counts) - counts
        self._documents, self._scale = np.repeat(np.arange(len(bags)), counts), counts[:, None] ** -0.5

    def scores(self, weights: Floats, bias: Floats) -> Floats:
        """Return the logits, (documents, labels)."""
        sums: Floats = np.add.reduceat(weights[self._features], self._begins, axis=0)
        return sums * self._scale + bias

    def gradient(self, error: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
        """Return the features that occur, (rows,), and the gradient of their weights, (rows, labels)."""
        rows, inverse = np.unique(self._features, return_inverse=True)
        gradient = np.zeros((len(rows), error.shape[1]))
        # (documents, labels) -> (features of all documents, labels) -> (rows, labels)
        np.add.at(gradient, inverse, (error * self._scale)[self._documents])
        return rows, gradient
