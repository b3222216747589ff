"""Tests of the sample order: every sample once per epoch, a function of (seed, epoch), resumable anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.errors import UserError
from scantling.trainer.data.hashing import mix64, permutation, uniform
from scantling.trainer.data.sampler import BUCKET_BATCHES, Sampler


def make(samples: int, batch: int, seed: int, bucket: bool) -> Sampler:
    lengths = (mix64(np.arange(samples, dtype=np.uint64)) % np.uint64(100)).astype(np.int64) if bucket else None
    return Sampler(samples, batch_size=batch, seed=seed, lengths=lengths)


def draw(sampler: Sampler, batches: int) -> list[tuple[int, int]]:
    drawn: list[tuple[int, int]] = []
    for _ in range(batches):
        batch = sampler.next_batch()
        assert len(batch.epochs) == len(batch.indices) == sampler.batch_size
        drawn += zip(batch.epochs.tolist(), batch.indices.tolist(), strict=True)
    return drawn


sizes = st.integers(1, 60), st.integers(1, 25), st.integers(0, 2**32 - 1), st.booleans()


@settings(max_examples=150, deadline=None)
@given(*sizes)
def test_each_epoch_has_each_sample_once(samples: int, batch: int, seed: int, bucket: bool) -> None:
    batches = 3 * samples // batch + 2
    drawn = draw(make(samples, batch, seed, bucket), batches)
    epochs = [epoch for epoch, _ in drawn]
    assert epochs == sorted(epochs)
    for epoch in range(3):
        assert sorted(index for own, index in drawn if own == epoch) == list(range(samples))


@settings(max_examples=150, deadline=None)
@given(*sizes, st.integers(0, 12))
def test_sampler_resumes_from_any_sample(samples: int, batch: int, seed: int, bucket: bool, before: int) -> None:
    straight = draw(make(samples, batch, seed, bucket), before + 5)
    sampler = make(samples, batch, seed, bucket)
    draw(sampler, before)
    state = sampler.state_dict()
    assert set(state) == {"seed", "epoch", "index"}
    assert (state["epoch"], state["index"]) == divmod(before * batch, samples)
    resumed = make(samples, batch, seed, bucket)
    resumed.load_state_dict(state)
    assert draw(resumed, 5) == straight[before * batch :] == draw(sampler.copy(), 5)
    skipped = make(samples, batch, seed, bucket)
    skipped.skip(before * batch)
    assert draw(skipped, 5) == straight[before * batch :]


def test_order_differs_by_epoch_and_seed() -> None:
    orders = {tuple(Sampler(50, batch_size=5, seed=seed).order(epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_order_matches_golden_values() -> None:
    """Resuming depends on the order, so these numbers must not change with any version."""
    assert mix64([0, 1], 0).tolist() == [16294208416658607535, 10451216379200822465]  # first outputs of seeds 0 and 1
    assert permutation(8, 1).tolist() == [2, 4, 6, 5, 0, 3, 7, 1]
    for batch_size in (1, 4):
        assert Sampler(8, batch_size=batch_size, seed=3).order(2).tolist() == [2, 1, 6, 7, 5, 0, 4, 3]


def test_hashes_are_uniform() -> None:
    values = uniform(np.arange(100_000), 5)
    assert 0 <= values.min() < values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert abs(counts - 5000).max() < 5 * np.sqrt(5000)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02
    first = permutation(1000, 0).argsort()[:10]
    assert np.std([permutation(1000, key).argsort()[0] for key in range(300)]) > 200
    assert len(set(first.tolist())) == 10


def test_buckets_save_padding_without_sorting_the_epoch() -> None:
    samples, batch = 10_000, 16
    sampler = make(samples, batch, 0, True)
    lengths = sampler.lengths
    assert lengths is not None

    def padding(order: np.ndarray) -> float:
        batches = lengths[order[: samples // batch * batch]].reshape(-1, batch)
        return float(1 - batches.sum() / (batches.max(axis=1) * batch).sum())

    plain = Sampler(samples, batch_size=batch, seed=0)
    assert padding(sampler.order(0)) < 0.1 < 0.3 < padding(plain.order(0))
    means = lengths[sampler.order(0)].reshape(-1, batch).mean(axis=1)
    assert abs(np.corrcoef(np.arange(BUCKET_BATCHES), means[:BUCKET_BATCHES])[0, 1]) < 0.5


def test_buckets_stay_aligned_with_batches_in_later_epochs() -> None:
    sampler = make(1000, 16, 0, True)
    lengths = sampler.lengths
    assert lengths is not None
    spreads = []
    for _ in range(300):
        batch = sampler.next_batch()
        if len(set(batch.epochs.tolist())) == 1:
            spreads.append(np.ptp(lengths[batch.indices]))
    assert np.mean(spreads) < 10


def test_positions_of_another_dataset_are_refused() -> None:
    sampler = Sampler(10, batch_size=2, seed=1)
    with pytest.raises(UserError, match="saved with seed 2; given seed 1"):
        sampler.load_state_dict({"seed": 2, "epoch": 0, "index": 0})
    with pytest.raises(UserError, match="the dataset has 10 now"):
        sampler.load_state_dict({"seed": 1, "epoch": 0, "index": 10})
    with pytest.raises(ValueError):
        Sampler(0, batch_size=1, seed=0)
    with pytest.raises(ValueError):
        Sampler(2, batch_size=1, seed=0, lengths=np.zeros(3, dtype=np.int64))
