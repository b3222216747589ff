"""Tests of windows over streams and of document boundaries in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scantling.errors import UserError
from scantling.trainer.data.packing import WindowDataset, document_positions, training_windows
from scantling.trainer.data.store import MappedArray


def stream(folder: Path, tokens: np.ndarray, name: str = "a") -> MappedArray:
    tokens.astype("<u2").tofile(folder / name)
    return MappedArray(folder / name, "uint16")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 60), min_size=1, max_size=3), st.integers(1, 9), st.booleans())
def test_every_token_but_the_first_is_a_target_once(
    tmp_path: Path, sizes: list[int], seq_len: int, partial: bool
) -> None:
    begins = np.cumsum([0, *sizes])
    streams = [stream(tmp_path, np.arange(begins[n], begins[n + 1]), str(n)) for n in range(len(sizes))]
    windows = WindowDataset(streams, length=seq_len + 1, stride=seq_len, partial=partial)
    targets: list[int] = []
    for index in range(len(windows)):
        window = windows[index]
        assert window.dtype == np.int64
        assert np.array_equal(window, np.arange(window[0], window[0] + len(window)))  # no window crosses two streams
        assert len(window) == seq_len + 1 or (partial and 2 <= len(window) <= seq_len)
        targets += window[1:].tolist()
    wanted = []
    for number, size in enumerate(sizes):
        last = size if partial else 1 + (size - 1) // seq_len * seq_len
        wanted += list(range(begins[number] + 1, begins[number] + last))
    assert targets == wanted
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_too_short_for_one_sequence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"shorter than one sequence: 20 tokens, and data\.seq_len is 20"):
        training_windows([stream(tmp_path, np.arange(20))], length=21, stride=20, seq_len=20)
    assert len(training_windows([stream(tmp_path, np.arange(21))], length=21, stride=20, seq_len=20)) == 1


def test_positions_begin_again_at_each_document() -> None:
    eos = 9
    windows = np.array([[9, 1, 2, 9, 3, 9, 9, 4], [1, 2, 3, 9, 4, 5, 6, 7], [1, 1, 1, 1, 1, 1, 1, 9]])
    assert document_positions(windows, eos).tolist() == [
        [0, 1, 2, 0, 1, 0, 0, 1],
        [0, 1, 2, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6, 0],
    ]
