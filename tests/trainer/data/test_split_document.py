"""Tests of held-out data from a single document (its end), and of folders as sources."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.cli import run
from scantling.errors import UserError
from scantling.trainer.data.documents import Piece, Scan, Source
from scantling.trainer.data.prepare import Prepared, prepare
from scantling.trainer.data.sources import training_source
from scantling.trainer.data.split import TRAIN, assign_all, split_document
from scantling.trainer.recipe.schema import DataSection
from tests.runs import tiny_recipe, write_recipe
from tests.texts import english_like


def text_of(prepared: Prepared, side: str) -> str:
    store = prepared.train if side == "train" else prepared.heldout
    assert store is not None
    assert store.num_documents == 1
    return prepared.tokenizer.decode(store.tokens[:])


@pytest.mark.parametrize("share", [0.05, 0.3])
@pytest.mark.parametrize("tokenizer", ["bytes", {"bpe": 300}])
def test_end_of_a_single_file_is_held_out(share: float, tokenizer: Any, tmp_path: Path) -> None:
    text = english_like(6000)
    (tmp_path / "one.txt").write_text(text)
    section = DataSection(text=str(tmp_path / "one.txt"), heldout=share, tokenizer=tokenizer)
    prepared = prepare(section, seed=0)
    train, held = text_of(prepared, "train"), text_of(prepared, "heldout")
    assert train + held == text
    assert len(held) == pytest.approx(share * len(text), rel=0.11)
    assert train[-1] in "\n "
    assert prepared.info["heldout_by"] == "end of the document"
    assert prepared.info["train"]["bytes"] + prepared.info["heldout"]["bytes"] == len(text.encode())
    again = prepare(section, seed=7)
    assert again.info["fingerprint"] == prepared.info["fingerprint"]
    assert prepare(section.model_copy(update={"heldout": 0.0}), seed=0).heldout is None


def sources(folder: Path, text: str) -> dict[str, DataSection]:
    (folder / "one.txt").write_text(text)
    (folder / "one.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "blank.txt").write_text(" \n")
    (folder / "separated.txt").write_text(f"#doc\n{text}")
    (folder / "one.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": ""}) + "\n")
    (folder / "many.txt").write_text(f"{text * 2}\n#doc\n{text}#doc\nabc\n")
    return {
        "gz": DataSection(text=str(folder / "one.txt.gz")),
        "blank": DataSection(text=[str(folder / "blank.txt"), str(folder / "one.txt")]),
        "separated": DataSection(text=str(folder / "separated.txt"), document_separator="#doc"),
        "no separator": DataSection(text=str(folder / "one.txt"), document_separator="#doc"),
        "jsonl": DataSection(jsonl=str(folder / "one.jsonl")),
    }


def test_every_source_of_one_document(tmp_path: Path) -> None:
    text = english_like(3000)
    for section in sources(tmp_path, text).values():
        prepared = prepare(section, seed=0)
        assert text_of(prepared, "train") + text_of(prepared, "heldout") == text
    section = DataSection(text=str(tmp_path / "many.txt"), document_separator="#doc", max_bytes=10)
    prepared = prepare(section, seed=0)
    assert prepared.info["heldout_by"] == "end of the document"


class OneText(Source):
    name = "one"

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def stamp(self) -> Any:
        return self._pieces

    def pieces(self) -> Any:
        for piece in self._pieces:
            yield Piece(piece, last=False)
        yield Piece("")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("aé \n😀", max_size=30), min_size=1, max_size=5), st.floats(0.01, 0.99))
def test_no_character_is_lost_at_a_cut(pieces: list[str], share: float) -> None:
    size = len("".join(pieces).encode())
    found = Scan(np.array([1], np.uint64), np.array([size]), np.array([-1], np.int32), [], [], "")
    if not size:
        return
    parts = split_document(OneText(pieces), found, assign_all(found, TRAIN), share)
    if parts is None:
        assert math.ceil(share * size) == size
        return
    texts = []
    for part in parts:
        every = list(part.pieces())
        assert [piece.last for piece in every] == [False] * (len(every) - 1) + [True]
        texts.append("".join(piece.text for piece in every))
    assert "".join(texts) == "".join(pieces)


def test_short_or_non_text_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(UserError, match="nothing can be held out of one document"):
        prepare(DataSection(text=str(tmp_path / "one.txt")), seed=0)
    (tmp_path / "one.txt").write_text("a few words" + "\n" * 9)
    with pytest.raises(UserError, match=r"one\.txt \(the end\): the corpus is empty.*another share in data\.heldout"):
        prepare(DataSection(text=str(tmp_path / "one.txt")), seed=0)
    rows = json.dumps({"text": "a long text", "label": "x"}) + "\n"
    (tmp_path / "one.jsonl").write_text(rows)
    section = DataSection(jsonl=str(tmp_path / "one.jsonl"), fields={"text": "text", "label": "label"})
    with pytest.raises(UserError, match="nothing can be held out of one document"):
        prepare(section, seed=0, pairs=True)


def folder_of(root: Path) -> Path:
    for name in ("b.txt", "a.md", "deep/c", "deep/d.TXT.gz", ".hidden", ".git/e.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(name.encode()) if name.endswith(".gz") else name.encode())
    (root / "link").symlink_to("nowhere")
    return root


def texts(section: DataSection) -> list[str]:
    return [piece.text for piece in training_source(section).pieces()]


def test_folder_stands_for_its_files(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "texts")
    assert texts(DataSection(text=str(root))) == ["a.md", "b.txt", "deep/c", "deep/d.TXT.gz"]
    assert texts(DataSection(text=[str(root / "b.txt"), str(root)])) == ["b.txt", "a.md", "deep/c", "deep/d.TXT.gz"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.text: there is no file in the folder .*empty; give files or a glob"):
        training_source(DataSection(text=str(tmp_path / "empty")))
    with pytest.raises(UserError, match=r"data\.csv: there is no file in the folder .* that ends in \.csv"):
        training_source(DataSection(csv=str(root)))


def test_folders_of_other_kinds(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.ndjson", "deep/c.JSON.gz"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        line = (json.dumps({"text": name}) + "\n").encode()
        path.write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
    (tmp_path / "README.md").write_text("no JSON")
    assert texts(DataSection(jsonl=str(tmp_path))) == ["a.ndjson", "b.jsonl", "deep/c.JSON.gz"]
    (tmp_path / "x.csv").write_text("text\nhello\n")
    assert texts(DataSection(csv=str(tmp_path))) == ["hello"]


def test_validation_may_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("hello world\n" * 20)
    root = folder_of(tmp_path / "held")
    prepared = prepare(DataSection(text=str(tmp_path / "train.txt"), validation=str(root)), seed=0)
    assert prepared.heldout is not None
    assert prepared.heldout.num_documents == 4
    assert prepared.info["heldout_by"] == "files"


def test_train_and_eval_on_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text(english_like(4000))
    recipe = tiny_recipe(tmp_path, train={"steps": 2})
    recipe["data"] = {"text": str(tmp_path / "book.txt"), "seq_len": 32}
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    assert run(["train", str(path), "--run-dir", str(tmp_path / "run")]) == 0
    assert run(["eval", str(tmp_path / "run"), "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.rindex("{") :])["eval_loss"] > 0
