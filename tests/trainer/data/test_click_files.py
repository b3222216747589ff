"""Tests of reading click logs: three layouts give the same rows, and errors name their location."""

from __future__ import annotations

import gzip
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from scantling.errors import UserError
from scantling.trainer.data.click_files import CRITEO_CATEGORICAL, CRITEO_NUMERIC, Block, category_keys, click_files
from scantling.trainer.data.hashing import key64
from scantling.trainer.recipe.schema import DataSection
from tests.clicks import click_rows, write_csv

COLUMNS = {"label": "clicked", "numeric": ["price", "age"], "categorical": ["user", "shop"]}


def read(**data: Any) -> Block:
    """Return all rows of a click log as one block."""
    blocks = list(click_files(DataSection(**data)).blocks())
    joined = (np.concatenate([getattr(block, name) for block in blocks]) for name in Block._fields[:3])
    return Block(*joined, sum(block.unlabeled for block in blocks))


def criteo_line(
    label: str = "1", numbers: dict[int, str] | None = None, categories: dict[int, str] | None = None
) -> str:
    values = [label] + [(numbers or {}).get(n, str(n)) for n in range(13)]
    return "\t".join(values + [(categories or {}).get(n, f"{n:08x}") for n in range(26)]) + "\n"


def test_csv_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    rows = click_rows(300)
    text = read(csv=str(write_csv(tmp_path / "a.csv", rows)), clicks=COLUMNS)
    table = arrow.table({name: [row[name] for row in rows] for name in rows[0]})
    parquet.write_table(table, tmp_path / "a.parquet")
    whole = table.set_column(4, "shop", table["shop"].cast(arrow.float64()))  # as pandas stores integers with gaps
    parquet.write_table(whole, tmp_path / "b.parquet")
    for name in ("a.parquet", "b.parquet"):
        columns = read(parquet=str(tmp_path / name), clicks=COLUMNS)
        for want, got in zip(text, columns, strict=True):
            np.testing.assert_array_equal(want, got)
    assert text.labels.tolist() == [row["clicked"] for row in rows]
    wanted = np.array([[np.nan if row["price"] is None else row["price"], row["age"]] for row in rows], np.float32)
    np.testing.assert_array_equal(text.numbers, wanted)
    assert text.keys[:, 0].tolist() == category_keys([row["user"] for row in rows])
    assert (text.keys[:, 1] == key64("")).tolist() == [row["shop"] is None for row in rows]


def test_files_are_read_in_order_and_unpacked(tmp_path: Path) -> None:
    rows = click_rows(50)
    write_csv(tmp_path / "1.csv", rows[:20])
    write_csv(tmp_path / "2.csv", rows[20:])
    (tmp_path / "2.csv.gz").write_bytes(gzip.compress((tmp_path / "2.csv").read_bytes()))
    block = read(csv=[str(tmp_path / "1.csv"), str(tmp_path / "2.csv.gz")], clicks=COLUMNS)
    assert block.labels.tolist() == [row["clicked"] for row in rows]


def test_criteo_layout(tmp_path: Path) -> None:
    path = tmp_path / "day_0.tsv"
    path.write_text(criteo_line("1") + criteo_line("0", {1: "-2", 4: ""}, {0: "", 25: '"quote'}))
    block = read(criteo=str(path))
    assert block.labels.tolist() == [1, 0]
    assert (block.numbers.shape, block.keys.shape) == ((2, len(CRITEO_NUMERIC)), (2, len(CRITEO_CATEGORICAL)))
    assert block.numbers[0].tolist() == list(range(13))
    assert block.numbers[1, 1] == -2
    assert np.isnan(block.numbers[1, 4])
    assert block.keys[0].tolist() == [key64(f"{n:08x}") for n in range(26)]
    assert (block.keys[1, 0], block.keys[1, 25]) == (key64(""), key64('"quote'))
    some = read(criteo=str(path), clicks={"numeric": ["I5", "I2"], "categorical": ["C26"]})
    np.testing.assert_array_equal(some.numbers, block.numbers[:, [4, 1]])
    np.testing.assert_array_equal(some.keys, block.keys[:, [25]])


def test_hashes_are_the_same_everywhere() -> None:
    """Pinned values: if hashes changed, the tables of saved models would be wrong."""
    assert category_keys(["68fd1e64", "u1", ""]) == [
        16152645408540456209,
        15378189911849802130,
        13020603013274838756,
    ]
    assert category_keys([7, 7.0, "7", np.int64(7)]) == [key64("7")] * 4
    assert category_keys(np.array([7], dtype=np.float32)) == [key64("7")]
    assert category_keys(np.array([0.1, 0.5], dtype=np.float32)) == category_keys([float(np.float32(0.1)), 0.5])
    assert category_keys(np.array([7, 0.5], dtype=np.float16)) == [key64("7"), key64("0.5")]
    assert category_keys([None, float("nan"), ""]) == [key64("")] * 3
    assert category_keys([True, 0.5]) == [key64("1"), key64("0.5")]


def test_decimals_equal_their_floats() -> None:
    pairs = [(Decimal("7.00"), 7), (Decimal("7.50"), 7.5), (Decimal("1E+2"), "100"), (Decimal("0.1"), "0.1")]
    for decimal, other in pairs:
        assert category_keys([decimal]) == category_keys([other])


def test_label_above_compares_with_a_threshold(tmp_path: Path) -> None:
    rows = [{"delay": delay, "user": "a"} for delay in ("15", "15.5", "-3", "NA", "", "1e3")]
    block = read(
        csv=str(write_csv(tmp_path / "a.csv", rows)),
        clicks={"label": "delay", "label_above": 15, "categorical": ["user"]},
    )
    assert block.labels.tolist() == [0, 1, 0, 1]
    assert block.unlabeled == 2
    assert (block.numbers.shape, block.keys.shape) == ((4, 0), (4, 1))


CSV = "clicked,price,age,user,shop\n1,2,3,a,b\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            CSV + "2,2,3,a,b\n",
            r"a\.csv:3: the label in column 'clicked' must be 0 or 1; given text, '2'; .*label_above",
        ),
        (CSV + "yes,2,3,a,b\n", r"a\.csv:3: column 'clicked' must hold numbers; given text, 'yes'"),
        (CSV + "\n\n1,cheap,3,a,b\n", r"a\.csv:5: column 'price' must hold numbers; given text, 'cheap'"),
        (CSV + "1,2,inf,a,b\n", r"a\.csv:3: column 'age' must hold values within the range of fp32; given text, 'inf'"),
        (CSV + "1,2,1e60,a,b\n", r"a\.csv:3: column 'age' must hold values within the range of fp32"),
        (CSV + "1,2,3\n", r"a\.csv:3: 3 values for 5 columns"),
        (CSV.replace("shop", "shops"), r"a\.csv: no column 'shop'; .*did you mean 'shops'"),
        ("", r"a\.csv: no header line"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read(csv=str(tmp_path / "a.csv"), clicks=COLUMNS)


def test_bad_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    good = {"clicked": [1, 0], "price": [1.0, 2.0], "age": [1, 2], "user": ["a", "b"], "shop": [1, 2]}

    def fault(**columns: Any) -> str:
        parquet.write_table(arrow.table({**good, **columns}), path)
        with pytest.raises(UserError) as caught:
            read(parquet=str(path), clicks=COLUMNS)
        return str(caught.value)

    assert "row 1: column 'user' must hold one category a row; given a list, [1]" in fault(user=[[1], [2, 3]])
    assert "row 1: column 'price' must hold numbers; given text, 'a'" in fault(price=["a", "b"])
    assert "row 2: the label in column 'clicked' must be 0 or 1; given a number, 3" in fault(clicked=[1, 3])
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read(parquet=str(path), clicks=COLUMNS)


def test_bad_criteo(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(criteo_line() + criteo_line().partition("\t")[2])
    with pytest.raises(UserError, match=r"train\.txt:2: 39 values for 40 columns"):
        read(criteo=str(path))
    path.write_text(criteo_line() + criteo_line(numbers={2: "x"}))
    with pytest.raises(UserError, match=r"train\.txt:2: column 'I3' must hold numbers; given text, 'x'"):
        read(criteo=str(path))
    with pytest.raises(UserError, match="no column 'C27'"):
        read(criteo=str(path), clicks={"categorical": ["C27"]})
    with pytest.raises(UserError, match=r"file not found: .*did you mean 'train.txt'"):
        read(criteo=str(tmp_path / "tran.txt"))


def test_columns_have_to_be_named(tmp_path: Path) -> None:
    path = str(write_csv(tmp_path / "a.csv", click_rows(3)))
    with pytest.raises(UserError, match=r"data\.clicks: name the columns"):
        click_files(DataSection(csv=path))
    with pytest.raises(UserError, match="a click log is one of criteo, csv, parquet"):
        click_files(DataSection(jsonl=path, clicks=COLUMNS))
