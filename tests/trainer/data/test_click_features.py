"""Tests of click features: fitted to the training rows only, equal for new rows, kept on disk."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scantling.errors import UserError
from scantling.trainer.data import click_features, click_files
from scantling.trainer.data.click_features import ClickFeatures
from scantling.trainer.data.click_prepare import PreparedClicks, prepare_clicks
from scantling.trainer.data.hashing import key64
from scantling.trainer.recipe.schema import DataSection
from tests.clicks import click_rows, write_csv

COLUMNS = {"label": "clicked", "numeric": ["price", "age"], "categorical": ["user", "shop"]}


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return click_rows(1000)


@pytest.fixture
def path(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_csv(tmp_path / "clicks.csv", rows))


def prepared(path: str, *, seed: int = 0, clicks: dict[str, Any] | None = None, **data: Any) -> PreparedClicks:
    return prepare_clicks(DataSection(csv=path, clicks={**COLUMNS, **(clicks or {})}, **data), seed=seed)


def numbers(ready: PreparedClicks) -> tuple[list[int], list[int]]:
    assert ready.heldout is not None
    return [int(row) for row in ready.train], [int(row) for row in ready.heldout]


def test_rows_are_held_out_by_a_hash_of_their_number(path: str) -> None:
    train, held = numbers(prepared(path, heldout=0.25))
    assert sorted(train + held) == list(range(1000))
    assert len(held) == 250
    assert held[:4] == [4, 6, 9, 13], "pinned: the same on every machine"
    assert numbers(prepared(path, heldout=0.25)) == (train, held)
    assert numbers(prepared(path, heldout=0.25, seed=1))[1] != held
    everything = prepared(path, heldout=0)
    assert everything.heldout is None
    assert list(everything.train) == list(range(1000))


def test_validation_files_are_held_out_whole(tmp_path: Path, path: str) -> None:
    other = str(write_csv(tmp_path / "later.csv", click_rows(70, seed=5)))
    ready = prepared(path, validation=other)
    assert ready.held_store is not None
    assert (len(ready.train), numbers(ready)[1]) == (1000, list(range(70)))
    assert ready.info["heldout_by"] == "files"
    assert ready.info["heldout"] == {"rows": 70, "clicks": int(ready.held_store.labels[:].sum())}
    np.testing.assert_array_equal(ready.features.means, prepared(path, heldout=0).features.means)
    other = str(write_csv(tmp_path / "later.csv", click_rows(70, seed=6)))
    assert prepared(path, validation=other).info["fingerprint"] != ready.info["fingerprint"]


def test_validation_rows_in_training_data_warn(path: str, caplog: pytest.LogCaptureFixture) -> None:
    prepared(path, validation=path)
    assert "all of the held-out rows are also among those that are trained on" in caplog.text


def test_moments_are_those_of_the_training_rows(
    path: str, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments are combined from several chunks."""
    monkeypatch.setattr(click_features, "CHUNK", 64)
    ready = prepared(path, heldout=0.3)
    train = np.array([[rows[n][name] or np.nan for name in ("price", "age")] for n in numbers(ready)[0]], np.float64)
    # prices are stored in fp32
    np.testing.assert_allclose(ready.features.means, np.nanmean(train, axis=0), rtol=1e-6)
    np.testing.assert_allclose(ready.features.deviations, np.nanstd(train, axis=0), rtol=1e-6)
    scaled = ready.features.scaled(ready.store.take(np.array(numbers(ready)[0])).numbers)
    assert scaled.dtype == np.float32
    assert not np.isnan(scaled).any()
    assert (scaled[:, 0] == 0).sum() == np.isnan(train[:, 0]).sum()
    np.testing.assert_allclose(scaled[:, 1].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(scaled[:, 1].std(), 1, rtol=1e-6)


def test_log_scaling(path: str) -> None:
    ready = prepared(path, clicks={"scaling": "log1p"})
    values = np.array([[0.0, 9.0], [-3.0, np.nan]])
    np.testing.assert_allclose(ready.features.scaled(values), [[0, np.log(10)], [0, 0]], rtol=1e-6)


def test_hashed_and_fitted_ids(path: str, rows: list[dict[str, Any]]) -> None:
    ready = prepared(path, clicks={"table_size": {"user": 7}}, heldout=0.5)
    shops = sorted({key64(str(rows[n]["shop"] or "")) for n in numbers(ready)[0]})
    assert ready.features.table_sizes == (7, len(shops) + 1)
    keys = np.array([[key64("u5"), key64("100")], [key64("new"), key64("new")], [0, 0]], dtype=np.uint64)
    ids = ready.features.ids(keys)
    assert ids[:, 0].tolist() == [key64("u5") % 7, key64("new") % 7, 0]
    assert ids[:, 1].tolist() == [shops.index(key64("100")) + 1, 0, 0]


def test_rare_categories_share_the_unknown_id(path: str, rows: list[dict[str, Any]]) -> None:
    ready = prepared(path, clicks={"min_count": 22}, heldout=0.3)
    users = [rows[n]["user"] for n in numbers(ready)[0]]
    frequent = {user for user in users if users.count(user) >= 22}
    assert 0 < len(frequent) < 30
    assert ready.features.table_sizes[0] == len(frequent) + 1
    ids = ready.features.ids(ready.store.take(slice(0, 1000)).keys)[:, 0]
    for row, id_ in zip(rows, ids.tolist(), strict=True):
        assert (id_ > 0) == (row["user"] in frequent)
    assert len(set(ids[ids > 0].tolist())) == len(frequent)


def test_counts_over_chunks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepared(path, clicks={"min_count": 20}).features
    monkeypatch.setenv("SCANTLING_CACHE", path + "-cache")
    monkeypatch.setattr(click_features, "CHUNK", 33)
    parts = prepared(path, clicks={"min_count": 20}).features
    assert whole.table_sizes == parts.table_sizes
    for name in ("user", "shop"):
        np.testing.assert_array_equal(whole.known[name], parts.known[name])


def test_saved_features_make_the_same_inputs_of_new_rows(tmp_path: Path, path: str, rows: list[dict[str, Any]]) -> None:
    ready = prepared(path, clicks={"table_size": {"user": 50}})
    ready.features.save_pretrained(tmp_path)
    loaded = ClickFeatures.from_pretrained(tmp_path)
    columns = {name: [row[name] for row in rows] for name in ("price", "age", "user", "shop")}
    inputs = loaded(columns)
    stored = ready.store.take(slice(0, 1000))
    np.testing.assert_array_equal(inputs["categorical"].numpy(), ready.features.ids(stored.keys))
    # stored values are in fp32, the given ones in fp64
    np.testing.assert_allclose(inputs["numeric"].numpy(), ready.features.scaled(stored.numbers), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="no column 'age'; the model needs price, age, user, shop"):
        loaded({"price": [1]})
    with pytest.raises(UserError, match="column 'price' cannot be used"):
        loaded(columns | {"price": ["a"] * 1000})
    (tmp_path / "click_features.safetensors").unlink()
    with pytest.raises(UserError, match="cannot read"):
        ClickFeatures.from_pretrained(tmp_path)


def test_files_are_scanned_once_until_they_change(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(path)
    blocks = click_files.ClickFiles.blocks
    monkeypatch.setattr(click_files.ClickFiles, "blocks", lambda self: pytest.fail("read again"))
    assert prepared(path).info == first.info
    assert prepared(path, clicks={"table_size": 5}).features.table_sizes == (5, 5)
    monkeypatch.setattr(click_files.ClickFiles, "blocks", blocks)
    with open(path, "a") as file:
        file.write("1,2,3,u1,100\n")
    assert prepared(path).info["fingerprint"] != first.info["fingerprint"]


def test_unlabeled_rows_are_skipped_with_a_warning(
    tmp_path: Path, rows: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    rows[3]["clicked"] = rows[8]["clicked"] = ""
    with caplog.at_level(logging.WARNING):
        ready = prepared(str(write_csv(tmp_path / "a.csv", rows)))
    assert len(ready.store) == 998
    assert "left out 2 rows without a label" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shop": "x"}, r"column 'shop' has one value in all 8 training rows"),
        ({"price": 3}, r"column 'price' has one value in all 8 training rows"),
        ({"price": None}, r"column 'price' has one value"),
        ({"clicked": None}, r"the click log is empty: 10 rows, none with a label"),
    ],
)
def test_nothing_to_learn(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    rows = [row | changes for row in click_rows(10)]
    with pytest.raises(UserError, match=message):
        prepared(str(write_csv(tmp_path / "a.csv", rows)), heldout=0.2)


def test_missing_values_are_no_second_value(tmp_path: Path) -> None:
    rows = [row | {"price": 3 if index % 2 else None} for index, row in enumerate(click_rows(10))]
    path = str(write_csv(tmp_path / "a.csv", rows))
    for scaling in ("standard", "log1p"):
        with pytest.raises(UserError, match=r"column 'price' has one value"):
            prepared(path, clicks={"scaling": scaling}, heldout=0.2)


def test_too_few_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("clicked,price,age,user,shop\n")
    with pytest.raises(UserError, match=r"a\.csv: the click log is empty: it has no rows"):
        prepared(str(tmp_path / "a.csv"))
    with pytest.raises(UserError, match="nothing would be left to train on of 1 rows"):
        prepared(str(write_csv(tmp_path / "a.csv", click_rows(1))))
