"""Tests of span corruption: no token is lost, the shares are the paper's, and the result depends on the key only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.trainer.tasks.spans import Spans

SENTINELS = np.arange(1000, 1100)
END = 999


def restored(inputs: list[int], targets: list[int]) -> list[int]:
    """Return the original text: replace each sentinel of the input with the tokens after it in the target."""
    assert targets[-1] == END
    hidden: dict[int, list[int]] = {}
    for id_ in targets[:-1]:
        if id_ >= 1000:
            hidden[id_] = span = []
        else:
            span.append(id_)
    assert list(hidden) == [id_ for id_ in inputs if id_ >= 1000] == SENTINELS[: len(hidden)].tolist()
    assert all(hidden.values())
    return [id_ for token in inputs for id_ in hidden.get(token, [token])]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=150),
    st.floats(0.01, 0.9),
    st.floats(1.0, 12.0),
    st.tuples(st.integers(0, 9), st.integers(-1, 1000), st.integers(0, 2**40)),
)
def test_input_and_target_give_the_text_back(
    tokens: list[int], share: float, mean: float, key: tuple[int, ...]
) -> None:
    spans = Spans(share, mean)
    if spans.counts(len(tokens))[1] > len(SENTINELS):
        return
    inputs, targets = spans.corrupt(np.array(tokens), SENTINELS, END, key=key)
    assert restored(inputs.tolist(), targets.tolist()) == tokens
    assert (len(inputs), len(targets)) == spans.lengths(len(tokens))
    hidden = len(targets) - 1 - int((targets >= 1000).sum())
    assert hidden == max(1, min(round(len(tokens) * share), len(tokens) - 1))


def test_share_and_span_length_match_the_settings() -> None:
    """T5's values: of 568 tokens, 512 remain; one place is reserved for the end token that its tokenizer adds."""
    spans = Spans(0.15, 3.0)
    assert spans.window(511, 10**6) == 568
    assert spans.lengths(568) == (511, 85 + 28 + 1)
    lengths, covered = [], np.zeros(568)
    for index in range(400):
        inputs, targets = spans.corrupt(np.arange(568), SENTINELS + 1000, END + 1000, key=(0, 0, index))
        lengths += np.diff(np.flatnonzero(targets >= 1000)).tolist()
        covered[np.setdiff1d(np.arange(568), inputs)] += 1
    assert covered.sum() / (400 * 568) == pytest.approx(0.15, abs=1e-3)
    sizes = np.array(lengths[:]) - 1
    assert sizes.mean() == pytest.approx(85 / 28)
    # all splits of 85 tokens into 28 spans are equally likely: a first span of 1 has probability 27/84
    assert (sizes == 1).mean() == pytest.approx(27 / 84, abs=0.02)
    assert sizes.max() > 9
    # every position is hidden equally often, except at the ends, because texts start kept and end hidden
    middle = covered[60:-60] / 400
    assert middle.mean() == pytest.approx(0.15, abs=0.01)
    assert middle.max() < 0.26  # six standard deviations
    assert covered[0] == 0
    assert covered[-1] == 400


def test_entry_depends_on_its_key_only() -> None:
    spans, window = Spans(0.15, 3.0), np.arange(200)
    keys = [(seed, epoch, index) for seed in (0, 1) for epoch in (-1, 0, 1) for index in (0, 1)]
    seen = {tuple(spans.corrupt(window, SENTINELS, END, key=key)[0].tolist()) for key in keys}
    again = {tuple(spans.corrupt(window, SENTINELS, END, key=key)[0].tolist()) for key in keys}
    assert len(seen) == 12
    assert seen == again


@pytest.mark.parametrize("target_len", [8, 40, 1000])
@pytest.mark.parametrize("share", [0.05, 0.15, 0.5, 0.999999])
def test_window_fills_input_or_target(share: float, target_len: int) -> None:
    spans = Spans(share, 3.0)
    length = spans.window(100, target_len)
    inputs, targets = spans.lengths(length)
    assert inputs <= 100
    assert targets <= target_len
    longer = spans.lengths(length + 1)
    assert longer[0] > 100 or longer[1] > target_len
    assert spans.window(1, 100) == 1
    assert spans.window(100, 2) == 0
