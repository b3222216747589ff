"""Tests from a recipe's data section to tokenized documents: content, splits, caching, errors."""

from __future__ import annotations

import errno
import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scantling.errors import UserError
from scantling.trainer.data import bpe
from scantling.trainer.data import prepare as module
from scantling.trainer.data.cache import Cache
from scantling.trainer.data.prepare import Prepared, prepare
from scantling.trainer.data.progress import NoProgress
from scantling.trainer.data.store import MappedArray, StoreWriter, TokenStore
from scantling.trainer.data.tokenizers import ByteTokenizer
from scantling.trainer.recipe.schema import BpeTokenizer, DataSection
from tests.texts import english_like

NLI = {"text": "premise", "pair": "hypothesis", "label": "label"}
LABELS = ["no", "yes", "maybe"]


def texts_of(store: TokenStore, prepared: Prepared) -> list[str]:
    """Return the documents of a stream."""
    eos = prepared.tokenizer.eos_id
    assert store.tokens[0] == eos
    begins = [1, *store.ends[:-1]]
    texts = []
    for begin, end in zip(begins, store.ends[:], strict=True):
        assert store.tokens[end - 1] == eos
        texts.append(prepared.tokenizer.decode(store.tokens[begin : end - 1]))
    assert store.ends[-1] == len(store.tokens)
    return texts


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[list[str], DataSection]:
    """Write 40 documents into one compressed file."""
    texts = [f"document {number} " + "the cat sat on the mat. é\n" * (number % 7 + 1) for number in range(40)]
    path = tmp_path / "corpus.txt.xz"
    path.write_bytes(lzma.compress("".join(f"#doc\n{text}" for text in texts).encode()))
    return texts, DataSection(text=str(path), document_separator="#doc", heldout=0.1)


def pairs_file(path: Path, count: int = 60, **changes: Any) -> Path:
    rows = [{"premise": f"p{n}", "hypothesis": f"h {n}" * (n % 5), "label": LABELS[n % 3]} for n in range(count)]
    path.write_text("".join(json.dumps(row | changes) + "\n" for row in rows))
    return path


class Recorder:
    """Progress display that records each task as [first word, total, done, True if finished]."""

    def __init__(self) -> None:
        self.works: list[list[Any]] = []

    def start(self, what: str, total: int | None) -> None:
        self.works.append([what.split()[0], total, 0, False])

    def advance(self, amount: int) -> None:
        self.works[-1][2] += amount

    def finish(self) -> None:
        self.works[-1][3] = True


@pytest.mark.parametrize("tokenizer", ["bytes", {"bpe": 280}])
def test_every_document_is_on_one_side_unchanged(corpus: tuple[list[str], DataSection], tokenizer: Any) -> None:
    texts, section = corpus
    prepared = prepare(section.model_copy(update={"tokenizer": DataSection(tokenizer=tokenizer).tokenizer}), seed=0)
    assert prepared.heldout is not None
    train, heldout = texts_of(prepared.train, prepared), texts_of(prepared.heldout, prepared)
    assert len(heldout) == 4
    assert sorted(train + heldout) == sorted(texts)
    assert [text for text in texts if text in set(train)] == train  # in the order of the source
    assert prepared.train.num_bytes == sum(len(text.encode()) for text in train)
    assert prepared.info["heldout"] == {
        "documents": 4,
        "tokens": len(prepared.heldout.tokens),
        "bytes": sum(len(text.encode()) for text in heldout),
    }
    assert prepared.info["heldout_by"] == "document"


def test_long_documents_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scantling.trainer.data.sources.PIECE", 50)
    monkeypatch.setattr("scantling.trainer.data.files.CHUNK", 30)
    monkeypatch.setattr(module, "ENCODE_CHARS", 120)
    texts = [f"file {name}\n" + "abc é\n" * 100 for name in "ab"]
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    prepared = prepare(DataSection(text=str(tmp_path / "*.txt"), heldout=0), seed=0)
    assert texts_of(prepared.train, prepared) == texts
    assert prepared.heldout is None


def test_second_time_comes_from_the_cache(
    corpus: tuple[list[str], DataSection], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, section = corpus
    section = section.model_copy(update={"tokenizer": DataSection(tokenizer={"bpe": 280}).tokenizer})
    first = prepare(section, seed=0)

    def fail(*_: Any) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr("scantling.trainer.data.cache._make", fail)
    again = prepare(section, seed=0)
    assert again.info == first.info
    assert again.train.tokens[:].tolist() == first.train.tokens[:].tolist()
    with pytest.raises(AssertionError):
        prepare(section, seed=1)  # holds out other documents


def test_moved_files_keep_their_entry(corpus: tuple[list[str], DataSection], tmp_path: Path) -> None:
    _, section = corpus
    assert isinstance(section.text, str)
    first = prepare(section, seed=0)
    moved = tmp_path / "moved.txt.xz"
    os.rename(section.text, moved)
    assert prepare(section.model_copy(update={"text": str(moved)}), seed=0).info["cache"] == first.info["cache"]


def test_torn_tokens_are_rebuilt(corpus: tuple[list[str], DataSection]) -> None:
    _, section = corpus
    first = prepare(section, seed=0)
    tokens = first.train.tokens[:].tolist()
    os.truncate(first.train.tokens.path, 100)
    assert prepare(section, seed=0).train.tokens[:].tolist() == tokens


def test_bpe_is_trained_on_training_documents_only(tmp_path: Path) -> None:
    rows = ["abab " * 200] * 10 + [f"zqzq {number} " * 200 for number in range(2)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    section = DataSection(jsonl=str(tmp_path / "a.jsonl"), tokenizer={"bpe": 262}, heldout=0.1)
    for seed in range(10):
        prepared = prepare(section, seed=seed)
        assert prepared.heldout is not None
        if not any("zqzq" in text for text in texts_of(prepared.train, prepared)):
            assert prepared.tokenizer.decode([261]) == "ab"
            break
    else:
        pytest.fail("no seed held out both documents")


def test_bpe_has_exactly_the_size(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(english_like(60_000))
    section = DataSection(text=str(tmp_path / "a.txt"), tokenizer={"bpe": 700}, heldout=0)
    prepared = prepare(section, seed=0)
    assert prepared.tokenizer.vocab_size == 700
    assert prepared.train.tokens.dtype == np.uint16
    assert max(prepared.train.tokens[:]) < 700


@pytest.mark.parametrize("num_bytes", [1, 5, 299, 300, 301, 1000])
def test_bpe_sample_is_limited_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Each letter takes two bytes; a cut within a letter leaves it out."""
    rows = ["é" * 150, "è" * 150]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    train, sizes = bpe._train, []

    def train_and_measure(vocab_size: int, texts: Iterator[str]) -> Any:
        sample = list(texts)
        sizes.append(len("".join(sample).encode()))
        return train(vocab_size, iter(sample))

    monkeypatch.setattr(bpe, "SAMPLE_BYTES", num_bytes)
    monkeypatch.setattr(bpe, "_train", train_and_measure)
    section = DataSection(jsonl=str(tmp_path / "a.jsonl"), tokenizer={"bpe": 261}, heldout=0)
    recorder = Recorder()
    prepare(section, seed=0, progress=recorder)
    assert sizes == [min(num_bytes, 600) // 2 * 2]
    assert recorder.works[1] == ["training", min(num_bytes, 600), min(num_bytes, 600), True]


def test_bpe_larger_than_the_text_allows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("only a few different words in here\n" * 50)
    section = DataSection(text=str(tmp_path / "a.txt"), tokenizer={"bpe": 5000}, heldout=0)
    with pytest.raises(UserError, match="give only"):
        prepare(section, seed=0)


def test_large_vocabulary_takes_32_bits(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w69999 w5 w65536")
    prepared = prepare(
        DataSection(text=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "tokenizer.json"), heldout=0), seed=0
    )
    assert prepared.train.tokens[:].tolist() == [70_000, 69_999, 5, 65_536, 70_000]


def test_pairs_and_labels(tmp_path: Path) -> None:
    section = DataSection(jsonl=str(pairs_file(tmp_path / "a.jsonl")), fields=NLI, heldout=0.1)
    prepared = prepare(section, seed=0, pairs=True)
    assert prepared.labels == ["maybe", "no", "yes"]
    rows = []
    for store in (prepared.train, prepared.heldout):
        assert store is not None
        assert store.middles is not None
        assert store.labels is not None
        for begin, middle, end, label in zip(
            [0, *store.ends[:-1]], store.middles[:], store.ends[:], store.labels[:], strict=True
        ):
            text, pair = (prepared.tokenizer.decode(store.tokens[a:b]) for a, b in ((begin, middle), (middle, end)))
            rows.append((text, pair, prepared.labels[label]))
    assert sorted(rows) == sorted((f"p{n}", f"h {n}" * (n % 5), LABELS[n % 3]) for n in range(60))


def test_given_labels_keep_their_order_and_numbers_sort_numerically(tmp_path: Path) -> None:
    section = DataSection(jsonl=str(pairs_file(tmp_path / "a.jsonl")), fields=NLI, labels=LABELS)
    assert prepare(section, seed=0, pairs=True).labels == LABELS
    path = tmp_path / "n.jsonl"
    path.write_text("".join(json.dumps({"text": f"t{n}", "label": n % 12 - 1}) + "\n" for n in range(100)))
    section = DataSection(jsonl=str(path), fields={"label": "label"}, heldout=0.05)
    assert prepare(section, seed=0, pairs=True).labels == [str(n) for n in range(-1, 11)]


def test_label_outside_the_set(tmp_path: Path) -> None:
    path = pairs_file(tmp_path / "a.jsonl")
    section = DataSection(jsonl=str(path), fields=NLI, labels=["no", "yes", "mabye"])
    with pytest.raises(UserError) as caught:
        prepare(section, seed=0, pairs=True)
    assert str(caught.value) == (
        f"{path}:3: the label 'maybe' is not in the label set; allowed: no, yes, mabye (did you mean 'mabye'?)"
    )


def test_label_of_validation_outside_the_set(tmp_path: Path) -> None:
    valid = tmp_path / "v.jsonl"
    valid.write_text(
        '{"premise": "a", "hypothesis": "b", "label": "no"}\n{"premise": "a", "hypothesis": "b", "label": "-"}\n'
    )
    section = DataSection(jsonl=str(pairs_file(tmp_path / "a.jsonl")), fields=NLI, validation=str(valid))
    with pytest.raises(UserError, match=r"v\.jsonl:2: the label '-' is not in the label set; allowed: maybe, no, yes"):
        prepare(section, seed=0, pairs=True)


def test_label_only_in_held_out_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    labels = ["rare", "yes", "no", "yes", "no"]
    path.write_text("".join(json.dumps({"text": f"t{n}", "label": label}) + "\n" for n, label in enumerate(labels)))
    section = DataSection(jsonl=str(path), fields={"label": "label"}, heldout=0.2)
    messages = []
    for seed in range(20):
        try:
            prepare(section, seed=seed, pairs=True)
        except UserError as error:
            messages.append(str(error))
    assert messages
    assert all(f"{path}:1: the label 'rare' occurs only in held-out documents" in message for message in messages)


@pytest.mark.parametrize("labels", [None, ["yes"]])
def test_one_label_is_too_few(tmp_path: Path, labels: list[str] | None) -> None:
    path = pairs_file(tmp_path / "a.jsonl", label="yes")
    with pytest.raises(UserError, match="two or more labels; given yes"):
        prepare(DataSection(jsonl=str(path), fields=NLI, labels=labels), seed=0, pairs=True)


def test_validation_files(corpus: tuple[list[str], DataSection], tmp_path: Path) -> None:
    texts, section = corpus
    (tmp_path / "v.txt").write_text("#doc\nheld\n#doc\nout\n")
    section = section.model_copy(update={"validation": str(tmp_path / "v.txt")})
    prepared = prepare(section, seed=0)
    assert prepared.heldout is not None
    assert texts_of(prepared.train, prepared) == texts
    assert texts_of(prepared.heldout, prepared) == ["held\n", "out\n"]
    assert prepared.info["heldout_by"] == "files"
    assert prepare(section, seed=0).info["fingerprint"] == prepared.info["fingerprint"]
    (tmp_path / "v.txt").write_text("#doc\nheld\n#doc\nelse\n")
    assert prepare(section, seed=0).info["fingerprint"] != prepared.info["fingerprint"]


def test_source_that_changes_while_it_is_read(
    corpus: tuple[list[str], DataSection], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, section = corpus
    real = module.scan

    def scan_less(*arguments: Any) -> Any:
        found = real(*arguments)
        return type(found)(found.digests[:-1], found.sizes[:-1], found.labels[:-1], [], [], "x")

    monkeypatch.setattr(module, "scan", scan_less)
    with pytest.raises(UserError, match="changed while it was read"):
        prepare(section, seed=0)


@pytest.mark.parametrize("during", ["reading", "training", "tokenizing"])
def test_source_changed_while_reading_is_not_cached(tmp_path: Path, during: str) -> None:
    path = tmp_path / "corpus.txt"
    text = "".join(f"#doc\ndocument {number} the cat sat on the mat\n" for number in range(40))
    path.write_text(text)
    section = DataSection(text=str(path), document_separator="#doc", tokenizer=BpeTokenizer(bpe=270), heldout=0.1)

    class Changes(NoProgress):
        def start(self, what: str, total: int | None) -> None:
            if what.startswith(during):
                path.write_text(text.replace("cat", "dog"))

    with pytest.raises(UserError, match="changed while it was read; run again"):
        prepare(section, seed=0, progress=Changes())
    path.write_text(text)
    prepared = prepare(section, seed=0)
    assert all("cat" in document for document in texts_of(prepared.train, prepared))


def test_read_only_cache_raises(
    corpus: tuple[list[str], DataSection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="cannot write the data cache"):
        prepare(corpus[1], seed=0)


def test_full_disk_while_caching_raises(corpus: tuple[list[str], DataSection], monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(StoreWriter):
        def add_text(self, ids: Any, *, last: bool) -> None:
            self._files["tokens"].write(b"x")
            raise OSError(errno.ENOSPC, "No space left on device")

    _, section = corpus
    monkeypatch.setattr(module, "StoreWriter", Full)
    with pytest.raises(UserError, match="the disk is full"):
        prepare(section, seed=0)
    assert not list(Cache().root.glob("tokens/*.tmp"))
    monkeypatch.undo()
    assert (
        len(texts_of(prepare(section, seed=0, cache=Cache(Cache().root / "c")).train, prepare(section, seed=0))) == 36
    )


def test_held_out_documents_in_training_data_are_counted(
    corpus: tuple[list[str], DataSection], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts, section = corpus
    (tmp_path / "v.txt").write_text(f"#doc\n{texts[3]}#doc\nnew\n")
    prepared = prepare(section.model_copy(update={"validation": str(tmp_path / "v.txt")}), seed=0)
    assert prepared.info["heldout_seen"] == 1
    assert "1 of 2 held-out documents are also among the training documents" in caplog.text
    assert prepare(section, seed=0).info["heldout_seen"] == 0


def test_progress_is_reported(corpus: tuple[list[str], DataSection]) -> None:
    texts, section = corpus
    section = section.model_copy(update={"tokenizer": DataSection(tokenizer={"bpe": 280}).tokenizer})
    recorder = Recorder()
    prepare(section, seed=0, progress=recorder)
    size = sum(len(text.encode()) for text in texts)
    assert [work[0] for work in recorder.works] == ["reading", "training", "tokenizing"]
    assert recorder.works[0][1:] == [None, size, True]
    assert all(work[3] for work in recorder.works)
    assert recorder.works[2][1] == recorder.works[2][2] == size


def test_mapped_arrays_travel_as_paths(tmp_path: Path) -> None:
    import pickle

    np.arange(100_000, dtype="<u2").tofile(tmp_path / "a")
    array = MappedArray(tmp_path / "a", "uint16", 10, 1000)
    assert array[3] == 13
    data = pickle.dumps(array)
    assert len(data) < 1000
    assert pickle.loads(data)[:].tolist() == list(range(10, 1010))  # noqa: S301 (our own bytes)
    (tmp_path / "empty").touch()
    assert MappedArray(tmp_path / "empty", "uint16")[:].tolist() == []


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Tokenizing 60 MB takes far less memory than 60 MB."""
    import tracemalloc

    path = tmp_path / "big.txt"
    with path.open("w") as file:
        for _ in range(60):
            file.write("a line of text that is long enough\n" * 29_000)
    tracemalloc.start()
    prepared = prepare(DataSection(text=str(path), heldout=0), seed=0, cache=Cache(tmp_path / "c"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(prepared.train.tokens) == path.stat().st_size + 2
    assert isinstance(prepared.tokenizer, ByteTokenizer)
    assert peak < 25e6
