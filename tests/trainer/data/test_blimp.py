"""Tests of minimal-pair files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from scantling.errors import UserError
from scantling.trainer.data.blimp import MinimalPair, read_pairs

BLIMP = {
    "sentence_good": "The dog runs.",
    "sentence_bad": "The dog run.",
    "UID": "agree_1",
    "linguistics_term": "agree",
}


def test_file_formats(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "blimp.jsonl.gz", "wt") as file:
        file.write(json.dumps(BLIMP) + "\n")
    (tmp_path / "own.csv").write_text('sentence_bad,sentence_good\n"Who, me run?","Who, me?"\n')
    (tmp_path / "notes.txt").write_text("no pairs")
    blimp = MinimalPair("The dog runs.", "The dog run.", "agree", "agree_1")
    own = MinimalPair("Who, me?", "Who, me run?", "own", "own")
    assert read_pairs([str(tmp_path)]) == [blimp, own]
    assert read_pairs([str(tmp_path / "own.csv"), str(tmp_path / "*.jsonl.gz")]) == [own, blimp]
    assert read_pairs([str(tmp_path / "own.csv"), str(tmp_path / "own.csv")]) == [own]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("pairs.jsonl", "", "holds no minimal pair"),
        ("pairs.csv", "sentence_good,sentence_bad\n", "holds no minimal pair"),
        ("pairs.jsonl", '{"sentence_goood": "a", "sentence_bad": "b"}', "did you mean 'sentence_goood'"),
        (
            "pairs.jsonl",
            '{"sentence_good": "a", "sentence_bad": 3}',
            "'sentence_bad' must hold a sentence; given a num",
        ),
        ("pairs.csv", 'sentence_good,sentence_bad\na," "', "'sentence_bad' must hold a sentence"),
        ("pairs.tsv", "a\tb", "neither .jsonl nor .csv"),
    ],
)
def test_bad_pairs_raise(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        read_pairs([str(tmp_path / name)])


def test_missing_files_raise(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(BLIMP))
    with pytest.raises(UserError, match=r"file not found.*did you mean 'pairs.jsonl'"):
        read_pairs([str(tmp_path / "pair.jsonl")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no \.jsonl and no \.csv file in the folder"):
        read_pairs([str(tmp_path / "empty")])
