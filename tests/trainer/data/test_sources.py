"""Tests of every data source, and of one clear error for each fault."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from scantling.errors import UserError
from scantling.trainer.data import documents
from scantling.trainer.data.cache import Cache
from scantling.trainer.data.documents import Piece, Source, scan
from scantling.trainer.data.files import CHUNK, expand, read_lines
from scantling.trainer.data.progress import NoProgress
from scantling.trainer.data.sources import StandardLibrary, TextFiles, training_source, validation_source
from scantling.trainer.recipe.schema import DataSection

NLI = {"text": "premise", "pair": "hypothesis", "label": "label"}


def pieces(**section: Any) -> list[Piece]:
    return list(training_source(DataSection(**section)).pieces())


def refusal(**section: Any) -> str:
    try:
        scan(training_source(DataSection(**section)), Cache(), NoProgress())
    except UserError as error:
        return str(error)
    pytest.fail("the source was read")


def whole(found: list[Piece]) -> list[str]:
    """Join the pieces of documents."""
    texts, text = [], ""
    for piece in found:
        text += piece.text
        if piece.last:
            texts.append(text)
            text = ""
    return texts


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_standard_library_is_complete_and_in_order() -> None:
    source = StandardLibrary()
    names = [path.relative_to(source.root).as_posix() for path in source.paths]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "collections/__init__.py"} <= set(names)
    assert not any("site-packages" in name or "dist-packages" in name for name in names)
    assert source.size is not None
    assert source.size > 5_000_000


def test_standard_library_skips_non_utf8_files(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("b")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("x")
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "no.py").write_text("no")
    assert [piece.text for piece in StandardLibrary(tmp_path).pieces()] == ["x", "b"]


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_text_file_is_one_document(tmp_path: Path, suffix: str, pack: Any) -> None:
    text = "first line\r\nsecond: é😀\n" * 10
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(b"\xef\xbb\xbf" + text.encode()))
    assert [piece.text for piece in pieces(text=str(tmp_path / "*.txt*"))] == [text]


def test_long_document_comes_in_pieces_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {number} with é\n" for number in range(200_000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = pieces(text=str(tmp_path / "a.txt"))
    assert len(found) > 2
    assert whole(found) == [text]
    assert all(piece.text.endswith("\n") for piece in found[:-1])
    (tmp_path / "b.txt").write_text("é" * (2 * CHUNK), encoding="utf-8")  # no newline at which to split
    assert whole(pieces(text=str(tmp_path / "b.txt"))) == ["é" * (2 * CHUNK)]


def test_document_separator(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("head\n<|doc|> one\nA\nB\n<|doc|> two\nC <|doc|>\n", encoding="utf-8")
    found = pieces(text=str(tmp_path / "a.txt"), document_separator="<|doc|>")
    assert [piece.text for piece in found] == ["head\n", "A\nB\n", "C <|doc|>\n"]
    assert found[1].where.endswith("a.txt:3")


def test_long_separated_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scantling.trainer.data.sources.PIECE", 10)
    (tmp_path / "a.txt").write_text("#\n" + "abc\n" * 7 + "#\nx", encoding="utf-8")
    found = pieces(text=str(tmp_path / "a.txt"), document_separator="#")
    assert whole(found) == ["", "abc\n" * 7, "x"]
    assert len(found) > 3


def test_lines_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scantling.trainer.data.files.CHUNK", 3)
    for text in ("", "a", "\n", "ab\n\nécde\nf", "\n\n\n", "no newline at all", "x\u2028y\n\x85z\n"):
        path = tmp_path / "a.txt"
        path.write_text(text, encoding="utf-8", newline="")
        assert list(read_lines(path)) == [line + "\n" for line in text.split("\n")[:-1]] + (
            [text.split("\n")[-1]] if text.split("\n")[-1] else []
        )


def test_globs_are_sorted_and_several_paths_keep_their_order(tmp_path: Path) -> None:
    for name in ("c.txt", "a.txt", "b.md"):
        (tmp_path / name).write_text(name)
    found = pieces(text=[str(tmp_path / "b.md"), str(tmp_path / "*.txt")])
    assert [piece.text for piece in found] == ["b.md", "a.txt", "c.txt"]


def test_jsonl_and_csv_give_text_pair_and_label(tmp_path: Path) -> None:
    rows = [
        {"premise": "A, b", "hypothesis": 'say "x"\nand y', "label": 2, "other": None},
        {"premise": "C", "hypothesis": "D", "label": "no"},
    ]
    jsonl(tmp_path / "a.jsonl", *rows)
    (tmp_path / "a.csv").write_text('premise,label,hypothesis\r\n"A, b",2,"say ""x""\nand y"\r\nC,no,D\r\n', newline="")
    for section in ({"jsonl": str(tmp_path / "a.jsonl")}, {"csv": str(tmp_path / "a.csv")}):
        found = pieces(**section, fields=NLI)
        assert [(piece.text, piece.pair, piece.label) for piece in found] == [
            ("A, b", 'say "x"\nand y', "2"),
            ("C", "D", "no"),
        ]
    assert [piece.where for piece in found] == [f"{tmp_path / 'a.csv'}:2", f"{tmp_path / 'a.csv'}:4"]


def test_csv_takes_long_fields(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n" + "x" * 300_000 + "\n")
    assert len(pieces(csv=str(tmp_path / "a.csv"))[0].text) == 300_000


def test_parquet_and_datasets(tmp_path: Path) -> None:
    import datasets

    rows = {"premise": ["a", "b", "c"], "hypothesis": ["x", "y", "z"], "label": [1, 0, -1]}
    classes = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features(
        {"premise": datasets.Value("string"), "hypothesis": datasets.Value("string"), "label": classes}
    )
    data = datasets.Dataset.from_dict(rows, features=features)
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"dev": data}).save_to_disk(str(tmp_path / "dict"))
    data.to_parquet(str(tmp_path / "a.parquet"))
    named = [("a", "x", "yes"), ("b", "y", "no")]  # -1 marks a row without a label
    for section in ({"hf": str(tmp_path / "saved")}, {"hf": str(tmp_path / "dict"), "hf_split": "dev"}):
        assert [(p.text, p.pair, p.label) for p in pieces(**section, fields=NLI)] == named
    plain = pieces(parquet=str(tmp_path / "*.parquet"), fields=NLI)
    assert [(p.text, p.pair, p.label) for p in plain] == [("a", "x", "1"), ("b", "y", "0"), ("c", "z", "-1")]
    assert plain[1].where.endswith("a.parquet, row 2")
    message = refusal(hf=str(tmp_path / "saved"), hf_split="dev", fields=NLI)
    assert message.endswith("saved holds one data set, its split 'train', and no split 'dev'")
    assert "no split 'train'; it has dev" in refusal(hf=str(tmp_path / "dict"), fields=NLI)
    message = refusal(hf=str(tmp_path / "saved"), fields=NLI | {"text": "premises"})
    assert "no column 'premises'; columns: premise, hypothesis, label (did you mean 'premise'?)" in message
    assert "no column 'nothing'" in refusal(parquet=str(tmp_path / "a.parquet"), fields={"text": "nothing"})


@pytest.mark.parametrize("kind", [None, "torch", "numpy", "pandas", "arrow"])
@pytest.mark.parametrize("columns", [None, ["label"]])
def test_datasets_saved_with_a_format(tmp_path: Path, kind: str | None, columns: list[str] | None) -> None:
    import datasets

    classes = datasets.ClassLabel(names=["no", "yes"])
    text, number = datasets.Value("string"), datasets.Value("int32")
    features = datasets.Features({"premise": text, "hypothesis": text, "label": classes, "stars": number})
    rows = {"premise": ["a", "b", "c"], "hypothesis": ["x", "y", "z"], "label": [1, 0, -1], "stars": [5, 1, 3]}
    data = datasets.Dataset.from_dict(rows, features=features).with_format(kind, columns=columns)
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"dev": data}).save_to_disk(str(tmp_path / "dict"))
    for section in ({"hf": str(tmp_path / "saved")}, {"hf": str(tmp_path / "dict"), "hf_split": "dev"}):
        found = pieces(**section, fields=NLI)
        assert [(p.text, p.pair, p.label) for p in found] == [("a", "x", "yes"), ("b", "y", "no")]
        found = pieces(**section, fields={"text": "premise", "label": "stars"})
        assert [(p.text, p.label) for p in found] == [("a", "5"), ("b", "1"), ("c", "3")]


@pytest.mark.parametrize("kind", ["jax", "tensorflow", "polars"])
def test_datasets_saved_with_the_format_of_a_missing_library(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data sets were saved by a machine that had the library."""
    import datasets
    from datasets import formatting

    for alias in [kind, "tf"]:
        monkeypatch.delitem(formatting._FORMAT_TYPES, alias, raising=False)
    data = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 2]})
    data.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    datasets.DatasetDict({"dev": data}).save_to_disk(str(tmp_path / "dict"))
    for path in (tmp_path / "saved", tmp_path / "dict" / "dev"):
        state = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps(state | {"_format_type": kind, "_format_columns": ["label"]}))
    for section in ({"hf": str(tmp_path / "saved")}, {"hf": str(tmp_path / "dict"), "hf_split": "dev"}):
        found = pieces(**section, fields={"text": "text", "label": "label"})
        assert [(p.text, p.label) for p in found] == [("a", "0"), ("b", "1"), ("c", "2")]
    assert "no split 'train'; it has dev" in refusal(hf=str(tmp_path / "dict"))
    (tmp_path / "saved" / "state.json").write_text("{")
    assert "state.json is not valid JSON" in refusal(hf=str(tmp_path / "saved"))


def test_hub_name_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'someone/something' on the Hub (OfflineModeIsEnabled)\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    message = refusal(hf="someone/something")
    assert message.startswith("data.hf: cannot load 'someone/something' (split 'train'): Couldn't reach")
    assert "give a local folder" in message
    assert "\n" not in message


def test_folder_without_dataset_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "folder").mkdir()
    assert "cannot load" in refusal(hf=str(tmp_path / "folder"))
    (tmp_path / "folder" / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    message = refusal(hf=str(tmp_path / "folder"))
    assert "cannot load" in message
    assert "An error occurred" not in message


def test_file_named_twice_counts_once(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    found = pieces(text=[str(tmp_path / "b.txt"), str(tmp_path / "*.txt"), f"{tmp_path}/./b.txt"])
    assert whole(found) == ["b", "a"]


def test_validation_source(tmp_path: Path) -> None:
    jsonl(tmp_path / "t.jsonl", {"text": "a"})
    jsonl(tmp_path / "v.jsonl", {"text": "b"})
    section = DataSection(jsonl=str(tmp_path / "t.jsonl"), validation=str(tmp_path / "v.jsonl"))
    source = validation_source(section)
    assert isinstance(source, Source)
    assert [piece.text for piece in source.pieces()] == ["b"]
    assert validation_source(DataSection(jsonl=str(tmp_path / "t.jsonl"))) is None


# faults


def test_missing_file(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("x")
    assert refusal(text=str(tmp_path / "trian.txt")) == (
        f"data.text: file not found: {tmp_path / 'trian.txt'} (did you mean 'train.txt'?)"
    )
    assert "no file matches" in refusal(text=str(tmp_path / "*.md"))
    with pytest.raises(UserError, match="is a folder"):
        expand(str(tmp_path), "data.criteo")


def test_missing_validation_file_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"^data\.validation: file not found"):
        validation_source(DataSection(text=str(tmp_path / "a.txt"), validation=str(tmp_path / "v.txt")))


def test_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text(" \n\t\n")
    assert "the corpus is empty: 2 documents, none with any text" in refusal(text=str(tmp_path / "*.txt"))
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert "the corpus is empty: 0 documents" in refusal(jsonl=str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("pack", [False, True])
def test_not_utf8(tmp_path: Path, pack: bool) -> None:
    path = tmp_path / ("a.txt.gz" if pack else "a.txt")
    data = "é".encode() * CHUNK + b"caf\xe9 au lait"
    path.write_bytes(gzip.compress(data) if pack else data)
    message = refusal(text=str(path))
    assert f"{path}: not UTF-8: byte 0xe9 at offset {2 * CHUNK + 3}" in message
    assert ("decompressed" in message) == pack


def test_text_cut_inside_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xe2\x82")
    assert "not UTF-8: byte 0xe2 at offset 3" in refusal(text=str(tmp_path / "a.txt"))


def test_broken_json_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"\n', encoding="utf-8")
    assert refusal(jsonl=str(path)).startswith(f"{path}:3: not valid JSON: ")
    path.write_text('{"text": "a"}\n["b"]\n', encoding="utf-8")
    assert refusal(jsonl=str(path)) == f"{path}:2: a line must be a JSON object; given a list, ['b']"
    path.write_text("[" * 100_000, encoding="utf-8")
    assert f"{path}:1: not valid JSON" in refusal(jsonl=str(path))


def test_missing_column(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"txet": "a", "label": 1})
    assert refusal(jsonl=str(path)) == f"{path}:1: no column 'text'; columns: txet, label (did you mean 'txet'?)"
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    assert "a.csv:2: no column 'text'; columns: a, b" in refusal(csv=str(tmp_path / "a.csv"))


@pytest.mark.parametrize("value", [None, 3, ["a"], {"a": 1}, True])
def test_text_column_of_wrong_type_raises(tmp_path: Path, value: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "a"}, {"text": value})
    assert refusal(jsonl=str(path)).startswith(f"{path}:2: column 'text' must hold text; given ")


@pytest.mark.parametrize("value", [None, 0.5, ["a"], ""])
def test_label_of_wrong_type_raises(tmp_path: Path, value: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "a", "label": value})
    assert f"{path}:1: column 'label' must hold a label" in refusal(jsonl=str(path), fields={"label": "label"})


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a \\ud83d b"}\n')
    assert "a.jsonl:1: the text holds half of a surrogate pair (U+D83D)" in refusal(jsonl=str(tmp_path / "a.jsonl"))


def test_broken_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,label\na,1\n"b\nc",2,3\n')
    assert refusal(csv=str(path)) == f"{path}:3: 3 values for 2 columns (text, label)"
    path.write_text('text\na\n"b" c\n')
    assert refusal(csv=str(path)).startswith(f"{path}:3: not valid CSV: ")
    path.write_text("")
    assert "no header line" in refusal(csv=str(path))


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress)])
@pytest.mark.parametrize("damage", ["cut", "other", "flipped"])
def test_corrupt_archive(tmp_path: Path, suffix: str, pack: Any, damage: str) -> None:
    import random

    data = pack(random.Random(0).randbytes(50_000).hex().encode())
    flipped = data[:-5] + bytes([data[-5] ^ 255]) + data[-4:]
    path = tmp_path / f"a.txt.{suffix}"
    path.write_bytes({"cut": data[: len(data) // 2], "other": b"plain text" * 10, "flipped": flipped}[damage])
    assert refusal(text=str(path)).startswith(f"{path}: corrupt {suffix} file: ")


def test_unreadable_parquet(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    (tmp_path / "a.parquet").write_text("text")
    assert "a.parquet: not a readable Parquet file" in refusal(parquet=str(tmp_path / "a.parquet"))
    text = arrow.array([b"caf\xe9"], arrow.binary()).view(arrow.string())
    parquet.write_table(arrow.table({"text": text}), tmp_path / "b.parquet")
    assert "b.parquet: not a readable Parquet file: 'utf-8'" in refusal(parquet=str(tmp_path / "b.parquet"))


def test_link_to_nothing_in_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.py").symlink_to(tmp_path / "nowhere.py")
    assert [piece.text for piece in StandardLibrary(tmp_path).pieces()] == ["a = 1\n"]


def test_unknown_home_directory() -> None:
    assert "data.text: file not found: ~nobody-of-that-name/a.txt" in refusal(text="~nobody-of-that-name/a.txt")


def test_too_many_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LABELS", 3)
    path = jsonl(tmp_path / "a.jsonl", *({"text": "a", "label": n} for n in range(5)))
    assert "more than 3 labels" in refusal(jsonl=str(path), fields={"label": "label"})


# scans


def test_scan_is_cached_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = scan(TextFiles([path]), Cache(), NoProgress())

    def fail(*_: Any) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(TextFiles, "pieces", fail)
    again = scan(TextFiles([path]), Cache(), NoProgress())
    assert (again.digests.tolist(), again.content) == (first.digests.tolist(), first.content)
    monkeypatch.undo()
    path.write_text("another")
    assert scan(TextFiles([path]), Cache(tmp_path / "cache"), NoProgress()).content != first.content


def test_scan_describes_documents(tmp_path: Path) -> None:
    rows = [("a", "b", "yes"), ("é", "", "no"), ("a", "b", "no"), (" ", "\n", "no")]
    path = jsonl(tmp_path / "a.jsonl", *({"premise": p, "hypothesis": h, "label": label} for p, h, label in rows))
    found = scan(training_source(DataSection(jsonl=str(path), fields=NLI)), Cache(), NoProgress())
    assert found.sizes.tolist() == [2, 2, 2, 0]
    assert found.labels.tolist() == [0, 1, 1, 1]
    assert found.label_names == ["yes", "no"]
    assert found.label_places == [f"{path}:1", f"{path}:2"]
    assert found.digests[0] == found.digests[2]  # equal texts are on the same side, whatever their label
    assert len(set(found.digests.tolist())) == 3


def test_pieces_do_not_change_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc\n" * 1000)
    first = scan(TextFiles([path]), Cache(tmp_path / "c1"), NoProgress())
    monkeypatch.setattr("scantling.trainer.data.sources.PIECE", 16)
    monkeypatch.setattr("scantling.trainer.data.files.CHUNK", 7)
    assert len(list(TextFiles([path]).pieces())) > 10
    second = scan(TextFiles([path]), Cache(tmp_path / "c2"), NoProgress())
    assert (first.content, first.sizes.tolist()) == (second.content, second.sizes.tolist())
