"""Tests of token-id files made by other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scantling.errors import UserError
from scantling.trainer.data.bins import open_bins, read_through
from scantling.trainer.data.cache import Cache
from scantling.trainer.recipe.schema import DataSection


def write(path: Path, count: int, dtype: str = "<u2", begin: int = 0) -> str:
    np.arange(begin, begin + count).astype(dtype).tofile(path)
    return str(path)


def test_end_of_the_last_file_is_held_out_from_a_window_on(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.bin", 100), write(tmp_path / "b.bin", 1000)]
    train, heldout, held_by = open_bins(DataSection(bin=paths, heldout=0.1), seq_len=16)
    assert held_by == "window"
    assert [len(stream) for stream in train] == [100, 880]
    assert [len(stream) for stream in heldout] == [120]
    assert heldout[0][0] == 880
    assert train[1][-1] == 879


def test_files_are_memory_mapped_unchanged(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", 500, "<u4", begin=70_000)
    train, heldout, held_by = open_bins(DataSection(bin=path, bin_dtype="uint32", heldout=0), seq_len=16)
    assert (train[0].path, heldout, held_by) == (Path(path), [], None)
    assert train[0][:].tolist() == list(range(70_000, 70_500))


def test_validation_files(tmp_path: Path) -> None:
    section = DataSection(bin=write(tmp_path / "a.bin", 500), validation=write(tmp_path / "v.bin", 50))
    train, heldout, held_by = open_bins(section, seq_len=16)
    assert (len(train[0]), len(heldout[0]), held_by) == (500, 50, "files")


def test_scan_of_files_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scantling.trainer.data.bins.CHUNK", 7)
    cache = Cache(tmp_path / "cache")
    train, heldout, _ = open_bins(DataSection(bin=write(tmp_path / "a.bin", 1000), heldout=0.1), seq_len=16)
    largest, content = read_through([*train, *heldout], cache)
    assert largest == 999

    def fail(*_: Any) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr("scantling.trainer.data.cache._make", fail)
    assert read_through(train, cache)[0] == 999
    assert read_through([*train, *heldout], cache)[1] == content != read_through(train, cache)[1]


def test_file_named_twice_is_not_both_trained_on_and_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", 1000)
    train, heldout, _ = open_bins(DataSection(bin=[path, str(tmp_path / "*.bin")], heldout=0.1), seq_len=16)
    assert sum(map(len, [*train, *heldout])) == 1000


def test_unusable_files_raise(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    with pytest.raises(UserError, match=r"a\.bin has 3 bytes, no whole number of uint16 ids"):
        open_bins(DataSection(bin=str(path)), seq_len=4)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.bin is empty"):
        open_bins(DataSection(bin=str(path)), seq_len=4)
    with pytest.raises(UserError, match=r"data\.bin: file not found"):
        open_bins(DataSection(bin=str(tmp_path / "b.bin")), seq_len=4)
    write(path, 10)
    with pytest.raises(UserError, match="cannot hold 16 tokens out of the last file, which has 10"):
        open_bins(DataSection(bin=str(path)), seq_len=16)
