"""Tests of the held-out split: by document, by content, reproducible."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.errors import UserError
from scantling.trainer.data.documents import Scan
from scantling.trainer.data.hashing import mix64
from scantling.trainer.data.split import HELDOUT, TRAIN, UNUSED, split


def scan_of(contents: list[int], sizes: list[int] | None = None) -> Scan:
    digests = mix64(np.array(contents, dtype=np.uint64))
    lengths = np.array([10] * len(contents) if sizes is None else sizes, dtype=np.int64)
    return Scan(digests, lengths, np.full(len(contents), -1, dtype=np.int32), [], [], "")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=60), st.floats(0.01, 0.99), st.integers(0, 100))
def test_identical_documents_stay_together(contents: list[int], share: float, seed: int) -> None:
    scan = scan_of(contents)
    if len(set(contents)) == 1:
        with pytest.raises(UserError, match="all of them equal"):
            split(scan, heldout=share, max_bytes=None, seed=seed, name="x")
        return
    sides = split(scan, heldout=share, max_bytes=None, seed=seed, name="x")
    for content in set(contents):
        assert len({int(side) for side, other in zip(sides, contents, strict=True) if other == content}) == 1
    assert (sides == TRAIN).any()
    room = math.ceil(share * len(contents)) - int((sides == HELDOUT).sum())
    counts = {content: contents.count(content) for content in contents}
    training = {content for side, content in zip(sides, contents, strict=True) if side == TRAIN}
    if len(training) > 1:  # none of those left for training would still fit
        assert min(counts[content] for content in training) > room
    assert (sides == HELDOUT).any()


@pytest.mark.parametrize("seed", range(4))
def test_share_below_all_numbers_of_copies_holds_out_the_fewest(seed: int) -> None:
    contents = [1] * 5 + [2] * 3 + [3] * 4
    sides = split(scan_of(contents), heldout=0.1, max_bytes=None, seed=seed, name="x")
    assert sides.tolist() == [HELDOUT if content == 2 else TRAIN for content in contents]


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 500), st.floats(0.001, 0.999), st.integers(0, 100))
def test_distinct_documents_give_the_exact_share(count: int, share: float, seed: int) -> None:
    sides = split(scan_of(list(range(count))), heldout=share, max_bytes=None, seed=seed, name="x")
    assert (sides == HELDOUT).sum() == min(math.ceil(share * count), count - 1)


def test_order_of_the_documents_does_not_matter() -> None:
    contents = list(range(100))
    sides = split(scan_of(contents), heldout=0.2, max_bytes=None, seed=3, name="x")
    backwards = split(scan_of(contents[::-1]), heldout=0.2, max_bytes=None, seed=3, name="x")
    assert sides.tolist() == backwards[::-1].tolist()
    assert sides.tolist() != split(scan_of(contents), heldout=0.2, max_bytes=None, seed=4, name="x").tolist()


def test_zero_share_holds_nothing_out_and_blank_documents_are_unused() -> None:
    sides = split(scan_of([1, 2, 3], [5, 0, 5]), heldout=0, max_bytes=None, seed=0, name="x")
    assert sides.tolist() == [TRAIN, UNUSED, TRAIN]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 2000))
def test_max_bytes_takes_whole_documents_within_the_budget(sizes: list[int], budget: int) -> None:
    scan = scan_of(list(range(len(sizes))), sizes)
    used = split(scan, heldout=0, max_bytes=budget, seed=0, name="x") == TRAIN
    assert used.any()
    assert scan.sizes[used].sum() <= budget or used.sum() == 1
    assert used.all() or scan.sizes[used].sum() + max(sizes) > budget
    other_seed = split(scan, heldout=0, max_bytes=budget, seed=1, name="x") == TRAIN
    assert used.tolist() == other_seed.tolist()
    more = split(scan, heldout=0, max_bytes=budget + 40, seed=0, name="x") == TRAIN
    assert (more | ~used).all()  # a larger budget keeps the documents of a smaller one


@pytest.mark.parametrize("budget", [None, 12])
def test_nothing_to_hold_out(budget: int | None) -> None:
    scan = scan_of([1] if budget is None else [1, 2, 3])
    with pytest.raises(
        UserError, match=r"^corpus: nothing can be held out of one document.*data\.validation"
    ) as caught:
        split(scan, heldout=0.05, max_bytes=budget, seed=0, name="corpus")
    assert ("max_bytes" in str(caught.value)) == (budget is not None)
