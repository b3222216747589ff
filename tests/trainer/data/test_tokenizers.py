"""Tests of tokenizers: decoding inverts encoding, and a saved tokenizer gives equal ids."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.errors import UserError
from scantling.trainer.data.tokenizers import (
    SPECIALS,
    ByteTokenizer,
    FastTokenizer,
    Ids,
    Tokenizer,
    load_tokenizer,
    truncated_lengths,
)
from tests.texts import english_like

TEXTS = [
    "",
    "Hello, world!",
    "  def f(x):\n\treturn x  # é 😀\r\n",
    "\x00\x7f\u2028 don't ' t",
    "a" * 1000,
    "ß\u0301 中文",
]
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def small_bpe(*, wrap: bool = False) -> FastTokenizer:
    from scantling.trainer.data.bpe import _train
    from scantling.trainer.data.tokenizers import finish_backend

    backend = _train(300, iter([english_like(20_000)]))
    return FastTokenizer(finish_backend(backend, use_regex=True, wrap=wrap), SPECIALS, "bpe")


def init_distributed(tokenizer: Tokenizer, text: str, pair: str | None, max_len: int) -> tuple[Ids, Ids]:
    """Return ids and token types of a text or a pair, with special tokens."""
    ids = tokenizer.encode_batch([text] if pair is None else [text, pair])
    return tokenizer.join(ids[0], None if pair is None else ids[1], max_len)


def wordpiece(folder: Path, **changes: Any) -> Path:
    """Write a BERT-style tokenizer folder as Hugging Face writes it."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "dog", "a", "##s"]
    backend = Backend(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    PreTrainedTokenizerFast(tokenizer_object=backend, **(names | changes)).save_pretrained(str(folder))
    return folder


@settings(max_examples=200, deadline=None)
@given(any_text)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode_batch([text])[0]
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_byte_specials() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id, tokenizer.cls_id, tokenizer.sep_id) == (
        256,
        257,
        258,
        259,
        260,
    )
    assert tokenizer.vocab_size == 261
    assert tokenizer.special_ids == set(range(256, 261))
    assert tokenizer.decode([256, 65, 260]) == "A"
    assert max(tokenizer.encode_batch(["<|endoftext|>"])[0]) < 256  # text is never a special token


@pytest.mark.parametrize("make", [ByteTokenizer, small_bpe])
@pytest.mark.parametrize("wrap", [False, True])
def test_saved_tokenizer_gives_equal_ids(tmp_path: Path, make: Any, wrap: bool) -> None:
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = make(wrap=wrap)
    tokenizer.save_pretrained(tmp_path, token_types=True)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert len(loaded) == tokenizer.vocab_size
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert loaded(text, add_special_tokens=False)["input_ids"] == ids.tolist()
        assert loaded.decode(ids.tolist()) == text == tokenizer.decode(ids)
    for name in SPECIALS:
        assert getattr(loaded, f"{name}_token_id") == getattr(tokenizer, f"{name}_id")
    if wrap:
        together = loaded("the cat", "a dog sat")
        ids, types = init_distributed(tokenizer, "the cat", "a dog sat", 100)
        assert together["input_ids"] == ids.tolist()
        assert together["token_type_ids"] == types.tolist()
    else:
        assert loaded("the cat")["input_ids"] == tokenizer.encode_batch(["the cat"])[0].tolist()


def test_own_folder_loads_as_the_same_tokenizer(tmp_path: Path) -> None:
    made = small_bpe()
    made.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(str(path))
        assert loaded.vocab_size == made.vocab_size == 300
        assert (loaded.eos_id, loaded.pad_id, loaded.mask_id) == (made.eos_id, made.pad_id, made.mask_id)
        assert loaded.special_ids == made.special_ids
        for ours, theirs in zip(made.encode_batch(TEXTS), loaded.encode_batch(TEXTS), strict=True):
            assert ours.tolist() == theirs.tolist()
    assert load_tokenizer(str(tmp_path)).fingerprint == load_tokenizer(str(tmp_path)).fingerprint
    assert small_bpe().fingerprint == made.fingerprint != small_bpe(wrap=True).fingerprint


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 300))
def test_truncation_is_longest_first(first: int, second: int, room: int) -> None:
    a, b = truncated_lengths(first, second, room)
    assert a <= first
    assert b <= second
    assert a + b == min(first + second, room)
    if a < first and b < second:
        assert abs(a - b) <= 1


def test_pairs_as_hugging_face_encodes_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = wordpiece(tmp_path / "bert")
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    for text in ("", "the cat", "the cat sat the cat sat", "cats cats cats"):
        for pair in (None, "a dog", "a dog sat the dog sat a cat cat"):
            for max_len in (5, 6, 7, 8, 50):
                ids, types = init_distributed(ours, text, pair, max_len)
                strategy = "longest_first" if pair is not None else True
                expected = theirs(text, pair, truncation=strategy, max_length=max_len, return_token_type_ids=True)
                assert (ids.tolist(), types.tolist()) == (expected["input_ids"], expected["token_type_ids"])
    assert ours.special_ids >= {0, 2, 3, 4}
    assert ours.eos_id is None


def test_roberta_style_pairs(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = ["<s>", "<pad>", "</s>", "<mask>", "the", "cat", "dog"]
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<mask>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(str(tmp_path))
    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
    assert init_distributed(ours, "the cat", "the dog", 20)[0].tolist() == theirs("the cat", "the dog")["input_ids"]
    assert init_distributed(ours, "the cat", None, 20)[0].tolist() == [0, 4, 5, 2]


def test_stored_truncation_and_padding_are_off(tmp_path: Path) -> None:
    made = small_bpe()
    made._backend.enable_truncation(3)
    made._backend.enable_padding(length=8)
    (tmp_path / "tokenizer.json").write_text(made._backend.to_str())
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert loaded.decode(loaded.encode_batch(["the cat sat on the mat"])[0]) == "the cat sat on the mat"
    assert len(loaded.encode_batch([""])[0]) == 0


def test_special_tokens_in_a_text() -> None:
    """In our own tokenizers, special tokens in a text are plain text; in other tokenizers they are special."""
    made = small_bpe()
    assert not set(made.encode_batch(["<|endoftext|><|mask|>"])[0].tolist()) & made.special_ids


def test_pickled_tokenizer_is_the_same() -> None:
    made = small_bpe()
    copied: FastTokenizer = pickle.loads(pickle.dumps(made))  # noqa: S301 (our own bytes)
    text = "the cat <|endoftext|>"
    assert copied.encode_batch([text])[0].tolist() == made.encode_batch([text])[0].tolist()


def test_no_room_for_text() -> None:
    with pytest.raises(UserError, match=r"data\.seq_len = 3 leaves no room for text next to 3 special tokens"):
        init_distributed(ByteTokenizer(), "a", "b", 3)


def test_missing_special_tokens_are_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(wordpiece(tmp_path / "bert", pad_token=None, mask_token=None)))
    with pytest.raises(UserError, match="has no pad and no mask token, which masked-lm needs"):
        tokenizer.require("masked-lm", "pad", "mask", "cls")


def test_unreadable_tokenizers_raise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file or folder: byte \(did you mean 'bytes'\?\)"):
        load_tokenizer("byte")
    with pytest.raises(UserError, match="cannot load a tokenizer from"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot load a tokenizer from .*tokenizer\.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_no_code_of_a_folder_is_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(UserError, match="cannot load a tokenizer"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_decode_takes_arrays() -> None:
    tokenizer = small_bpe()
    assert tokenizer.decode(np.array(tokenizer.encode_batch(["the cat"])[0], dtype=np.uint16)) == "the cat"
