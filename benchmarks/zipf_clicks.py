"""Generate learnable click logs of any size: Zipf-distributed categories in Criteo's layout.

    python benchmarks/zipf_clicks.py clicks.tsv --rows 100000

A row is a function of its index and the seed, so rows can be made in any order without generator state. Nothing as
large as a vocabulary is ever held in memory.

- Category k = 1..n of a column has a probability proportional to the integral of x^-s over k-1/2..k+1/2, which is
  Zipf's k^-s to 1 % from k = 4 on (at s = 1.05); it is drawn by inverting the integral. Its id is k - 1.
- Numeric features are integers with a log-normal distribution, like counts; one in ten is missing.
- The label is drawn from a logistic model. It has a hidden effect, from hashes, of each category and of each pair of
  categories in neighboring columns, and a weight for the logarithm of each numeric feature.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import expit, ndtri

from scantling.trainer.data.hashing import key64, mix64, uniform

CRITEO_KAGGLE = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652),
    *(2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Number of categories in each of the 26 columns of Criteo Kaggle, 33.8 million in total."""

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class ClickRows(NamedTuple):
    """Rows of a click log.

    Attributes:
        labels: 0 or 1, (rows,).
        logits: logits of the click probabilities, (rows,).
        numbers: integers, NaN if missing, (rows, numeric columns).
        ids: category ids, (rows, categorical columns).
    """

    labels: Ids
    logits: Floats
    numbers: Floats
    ids: Ids


@dataclass(frozen=True)
class ZipfClicks:
    """An endless click log.

    Args:
        cardinalities: number of categories in each column.
        num_numeric: number of numeric columns.
        exponent: s of Zipf's law.
        effect: standard deviation of a category's effect; that of a pair is half of it.
        bias: the logit of a click without any effect; -1 gives about Criteo Kaggle's share of clicks.
        seed: seed of all random values.
    """

    cardinalities: Sequence[int] = CRITEO_KAGGLE
    num_numeric: int = 13
    exponent: float = 1.05
    effect: float = 0.3
    bias: float = -1.2
    seed: int = 0

    def rows(self, first: int, count: int) -> ClickRows:
        """Return rows `first` to `first + count - 1`."""
        row = np.arange(first, first + count, dtype=np.uint64)
        columns = range(len(self.cardinalities))
        draws = [uniform(row, key64("category", self.seed, column)) for column in columns]
        drawn = zip(draws, self.cardinalities, strict=True)
        ids = np.stack([zipf(draw, size, self.exponent) for draw, size in drawn], axis=1)
        logits = np.full(count, self.bias)
        for column in columns:
            logits += self.effect * self._hidden("effect", column, ids[:, column].astype(np.uint64))
        for column in columns[1:]:
            pairs = mix64(ids[:, column - 1]) ^ ids[:, column].astype(np.uint64)
            logits += self.effect / 2 * self._hidden("pair", column, pairs)
        numbers = np.empty((count, self.num_numeric))
        for column in range(self.num_numeric):
            normal = self._hidden("number", column, row)
            weight = self.effect * float(self._hidden("weight", 0, np.array([column], dtype=np.uint64))[0])
            missing = uniform(row, key64("missing", self.seed, column)) < 0.1
            numbers[:, column] = np.where(missing, np.nan, np.floor(np.exp(1.5 + 1.2 * normal)))
            logits += np.where(missing, 0.0, weight * normal)
        labels = uniform(row, key64("label", self.seed)) < expit(logits)
        return ClickRows(labels.astype(np.int64), logits, numbers, ids)

    def _hidden(self, what: str, column: int, of: npt.NDArray[np.uint64]) -> Floats:
        """Return a standard normal number for each input, always the same for equal inputs."""
        normal: Floats = ndtri(uniform(of, key64(what, self.seed, column)) + 2.0**-54)
        return normal


def zipf(draws: Floats, size: int, exponent: float) -> Ids:
    """Map uniform numbers to ids 0 to size - 1, most frequent first, by the inverse of a power law's distribution."""
    low, high = 0.5, size + 0.5
    if exponent == 1:
        x = low * (high / low) ** draws
    else:
        power = 1 - exponent
        x = (low**power + draws * (high**power - low**power)) ** (1 / power)
    return np.clip(np.rint(x).astype(np.int64), 1, size) - 1


def write_criteo(path: str | Path, rows: int, *, clicks: ZipfClicks | None = None, first: int = 0) -> Path:
    """Write rows in Criteo's layout: label, numbers, categories as 8 hex digits; tab-separated, empty if missing."""
    clicks, path = clicks or ZipfClicks(), Path(path)
    with path.open("w", encoding="utf-8") as file:
        for at in range(first, first + rows, 4096):
            made = clicks.rows(at, min(4096, first + rows - at))
            # odd multipliers keep different categories of a column different
            factors = np.array([2 * key64("hex", column) + 1 for column in range(made.ids.shape[1])], dtype=object)
            texts = made.ids.astype(object) * factors % 2**32
            for label, numbers, categories in zip(made.labels, made.numbers, texts, strict=True):
                shown = ["" if np.isnan(value) else str(int(value)) for value in numbers]
                file.write("\t".join([str(label), *shown, *(f"{text:08x}" for text in categories)]) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(write_criteo(arguments.path, arguments.rows, clicks=ZipfClicks(seed=arguments.seed)))


if __name__ == "__main__":
    main()
