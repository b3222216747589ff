"""Order of the samples: a function of (seed, epoch) only. The sampler's state is a position in this order."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scantling.errors import UserError
from scantling.trainer.data.hashing import key64, permutation

BUCKET_BATCHES = 64
"""Number of batches whose samples are sorted by length together."""


class Indices(NamedTuple):
    """Samples of one global batch, in order.

    Attributes:
        epochs: the epoch of each sample, (batch_size,); a batch may extend into the next epoch.
        indices: the index of each sample in the dataset, (batch_size,).
    """

    epochs: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]


class Sampler:
    """Endless global batches; each epoch visits each sample once, in its own order.

    The sampler is independent of the number of processes: its batches are those of the whole run. With `lengths`,
    batches have samples of similar length: within `BUCKET_BATCHES` batches, samples are sorted by length, then
    batches are shuffled.

    Args:
        num_samples: size of the dataset.
        batch_size: samples in a global batch.
        seed: determines the order.
        lengths: the length of each sample, (num_samples,), for bucketing.
    """

    def __init__(
        self, num_samples: int, *, batch_size: int, seed: int, lengths: npt.NDArray[np.int64] | None = None
    ) -> None:
        if num_samples < 1 or batch_size < 1:
            raise ValueError(f"num_samples and batch_size must be at least 1; given {num_samples} and {batch_size}")
        if lengths is not None and len(lengths) != num_samples:
            raise ValueError(f"lengths must have one entry a sample; given {len(lengths)} for {num_samples}")
        self.num_samples, self.batch_size, self.seed, self.lengths = num_samples, batch_size, seed, lengths
        self._epoch = self._index = 0
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._epoch

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the samples of an epoch in order, (num_samples,)."""
        # Each epoch's order costs one sort of all indices: keep the current one.
        if self._order is None or self._order[0] != epoch:
            order = permutation(self.num_samples, key64("epoch", self.seed, epoch))
            self._order = epoch, order if self.lengths is None else self._bucketed(order, epoch)
        return self._order[1]

    def _bucketed(self, order: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        """Sort within groups of batches, then shuffle the batches, from the first batch that begins in this epoch."""
        if self.lengths is None:
            return order
        size = self.batch_size
        begin = -epoch * self.num_samples % size  # these complete the last batch of the previous epoch
        result = order.copy()
        num_batches = (self.num_samples - begin) // size
        for number, first in enumerate(range(0, num_batches, BUCKET_BATCHES)):
            count = min(BUCKET_BATCHES, num_batches - first)
            window = slice(begin + first * size, begin + (first + count) * size)
            group = order[window]
            # The stable sort keeps the shuffled order among equal lengths.
            # (count * size,) -> (count, size)
            batches = group[np.argsort(self.lengths[group], kind="stable")].reshape(count, size)
            # Shuffle whole batches, so that training does not go from short to long samples.
            result[window] = batches[permutation(count, key64("bucket", self.seed, epoch, number))].ravel()
        return result

    def next_batch(self) -> Indices:
        """Return the next global batch."""
        epochs, indices = [], []
        remaining = self.batch_size
        # A batch that reaches the end of an epoch takes its other samples from the next epoch.
        while remaining:
            part = self.order(self._epoch)[self._index : self._index + remaining]
            epochs.append(np.full(len(part), self._epoch, dtype=np.int64))
            indices.append(part)
            remaining -= len(part)
            self.skip(len(part))
        return Indices(np.concatenate(epochs), np.concatenate(indices))

    def skip(self, count: int) -> None:
        """Advance by `count` samples."""
        epochs, self._index = divmod(self._index + count, self.num_samples)
        self._epoch += epochs

    def copy(self) -> Sampler:
        """Return a sampler at the same position."""
        other = Sampler(self.num_samples, batch_size=self.batch_size, seed=self.seed, lengths=self.lengths)
        other.load_state_dict(self.state_dict())
        return other

    def state_dict(self) -> dict[str, int]:
        """Return the position: seed, epoch, and number of samples taken in the epoch."""
        return {"seed": self.seed, "epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position.

        Raises:
            UserError: the position belongs to another seed or another dataset.
        """
        if int(state["seed"]) != self.seed:
            raise UserError(f"the order of the data was saved with seed {state['seed']}; given seed {self.seed}")
        epoch, index = int(state["epoch"]), int(state["index"])
        if epoch < 0 or not 0 <= index < self.num_samples:
            raise UserError(f"sample {index} of an epoch was saved; the dataset has {self.num_samples} now")
        self._epoch, self._index = epoch, index
