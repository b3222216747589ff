"""Tests of the click-log generator: its distribution, its labels, its files."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scantling.trainer.data.click_files import click_files
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks.clicks import auc

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def zipf_clicks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import zipf_clicks

    return zipf_clicks


@pytest.mark.parametrize(("size", "exponent"), [(40, 1.05), (40, 1.0), (300, 1.5), (3, 0.8)])
def test_ids_follow_the_law(zipf_clicks: Any, size: int, exponent: float) -> None:
    """Evenly spaced draws match each id's probability to 1/200,000, and Zipf's law to 1 % from the fourth id on."""
    draws = (np.arange(200_000) + 0.5) / 200_000
    shares = np.bincount(zipf_clicks.zipf(draws, size, exponent), minlength=size) / len(draws)
    edges = np.arange(size + 1) + 0.5
    primitive = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    np.testing.assert_allclose(shares, np.diff(primitive) / (primitive[-1] - primitive[0]), atol=1e-5)
    plain = np.arange(1, size + 1) ** -exponent
    np.testing.assert_allclose(np.diff(primitive)[3:], plain[3:], rtol=0.015)


def test_every_id_is_in_its_table(zipf_clicks: Any) -> None:
    ends = np.array([0.0, 1 - 2.0**-53])
    for size in (1, 3, 10_131_227):
        assert zipf_clicks.zipf(ends, size, 1.05).tolist() == [0, size - 1]
    assert sum(zipf_clicks.CRITEO_KAGGLE) == 33_762_577
    assert len(zipf_clicks.CRITEO_KAGGLE) == 26


def test_rows_depend_on_their_number_alone_and_need_no_table(zipf_clicks: Any) -> None:
    clicks = zipf_clicks.ZipfClicks()
    tracemalloc.start()
    whole = clicks.rows(500, 300)
    assert tracemalloc.get_traced_memory()[1] < 2**20, "33.8 million categories, and less than a megabyte"
    tracemalloc.stop()
    for want, got in zip(whole, clicks.rows(600, 200), strict=True):
        np.testing.assert_array_equal(want[100:], got)
    other = zipf_clicks.ZipfClicks(seed=1).rows(500, 300)
    assert (whole.ids != other.ids).any()


def test_there_is_something_to_learn(zipf_clicks: Any) -> None:
    rows = zipf_clicks.ZipfClicks().rows(0, 10_000)
    assert 0.2 < rows.labels.mean() < 0.4
    best = auc(rows.logits, rows.labels)
    assert best is not None
    assert 0.8 < best < 0.95
    # labels are drawn from their probabilities: both means agree to 4 standard deviations of 10,000 draws
    assert rows.labels.mean() == pytest.approx((1 / (1 + np.exp(-rows.logits))).mean(), abs=0.02)


def test_file_holds_the_rows(zipf_clicks: Any, tmp_path: Path) -> None:
    path = zipf_clicks.write_criteo(tmp_path / "clicks.tsv", 500, first=7)
    rows = zipf_clicks.ZipfClicks().rows(7, 500)
    (block,) = click_files(DataSection(criteo=str(path))).blocks()
    np.testing.assert_array_equal(block.labels, rows.labels)
    np.testing.assert_array_equal(block.numbers, rows.numbers.astype(np.float32))
    for column in range(26):
        ids, keys = rows.ids[:, column], block.keys[:, column]
        pairs = set(zip(ids.tolist(), keys.tolist(), strict=True))
        assert len(pairs) == len(set(ids.tolist())) == len(set(keys.tolist()))
