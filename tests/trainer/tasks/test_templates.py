"""Tests that every task feeds a tokenizer's template: the tokens that it adds around a text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import scantling as sc
from scantling.trainer.data.loader import eval_batches
from scantling.trainer.data.prepare import document_marks
from scantling.trainer.data.tokenizers import ByteTokenizer, load_tokenizer
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks import TaskData, get_task
from scantling.trainer.training.minimal_pairs import prefers_good
from scantling.trainer.training.trained_run import evaluate_run, export_hf
from tests.templates import IDS, TEMPLATES, made_tokenizer

TEXTS = [f"document {number} says {number * number}" for number in range(40)]


def corpus(folder: Path, texts: list[str] = TEXTS) -> str:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n")
    return str(path)


def prepared(
    task: str, folder: Path, family: str, *, texts: list[str] = TEXTS, names: dict[str, Any] | None = None, **keys: Any
) -> tuple[TaskData, Any]:
    """Return the data of a task with all documents for training, and the tokenizer as transformers loads it."""
    tokenizer = made_tokenizer(folder / family, family, **(names or {}))
    section = DataSection(jsonl=corpus(folder, texts), tokenizer=str(tokenizer), heldout=0, **keys)
    return get_task(task).prepare(section, seed=0), AutoTokenizer.from_pretrained(tokenizer)


def stream(data: TaskData) -> list[int]:
    return list(data.train.streams[0][:])  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", TEMPLATES)
def test_causal_streams_equal_the_tokenizer(family: str, tmp_path: Path) -> None:
    data, theirs = prepared("causal-lm", tmp_path, family, seq_len=16)
    texts = [theirs(text)["input_ids"] for text in TEXTS]
    end = IDS["</s>"]
    if family == "gpt2":
        texts = [[*ids, end] for ids in texts]
    first = [end] if family in ("gpt2", "t5") else []
    assert stream(data) == [*first, *(id_ for ids in texts for id_ in ids)]


@pytest.mark.parametrize("family", ["llama", "llama-eos", "bert", "bart"])
def test_first_token_of_a_document_is_no_target(family: str, tmp_path: Path) -> None:
    data, theirs = prepared("causal-lm", tmp_path, family, seq_len=16)
    begin = theirs("")["input_ids"][0]
    batch = data.collate([(0, index, data.train[index]) for index in range(len(data.train))])
    windows = torch.tensor(np.stack([data.train[index] for index in range(len(data.train))]))
    assert torch.equal(batch.labels, windows[:, 1:].where(windows[:, 1:] != begin, -100))
    assert (windows[:, 1:] == begin).sum() > 10
    assert batch.num_targets == (batch.labels != -100).sum()
    assert batch.num_tokens == batch.labels.numel()


def test_bos_equal_to_eos_ends_the_previous_document(tmp_path: Path) -> None:
    """OPT's tokenizer puts its end-of-text token before a text."""
    data, _ = prepared("causal-lm", tmp_path, "llama", seq_len=16, names={"bos_token": None, "eos_token": "<s>"})
    batch = data.collate([(0, index, data.train[index]) for index in range(len(data.train))])
    assert (batch.labels == IDS["<s>"]).sum() > 10


@pytest.mark.parametrize("family", TEMPLATES)
def test_bits_per_byte_count_each_token_of_the_text_once(family: str, tmp_path: Path) -> None:
    tokenizer = made_tokenizer(tmp_path / "tokenizer", family)
    section = DataSection(jsonl=corpus(tmp_path), tokenizer=str(tokenizer), heldout=0.2, seq_len=24)
    data = get_task("causal-lm").prepare(section, seed=0)
    facts = data.info["heldout"]
    ends = 0 if family == "llama" else facts["documents"]
    assert data.heldout is not None
    targets = sum(batch.num_targets for batch in eval_batches(data.heldout, data.collate, 3))
    assert targets == facts["bytes"] + ends
    assert data.heldout_bytes_per_token == facts["bytes"] / targets


def llama(folder: Path, seed: int = 0, **ids: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=320, max_position_embeddings=128, **ids))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", TEMPLATES)
def test_loss_of_packed_documents_equals_separate_texts(family: str, tmp_path: Path) -> None:
    """`scantling eval` of unchanged pretrained weights agrees with transformers and its tokenizer."""
    tokenizer = made_tokenizer(tmp_path / "tokenizer", family)
    model = llama(tmp_path / "model")
    held = TEXTS[::5]
    (tmp_path / "held.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in held) + "\n")
    recipe = {
        "model": {"hf": str(tmp_path / "model")},
        "data": {
            "jsonl": corpus(tmp_path),
            "validation": str(tmp_path / "held.jsonl"),
            "tokenizer": str(tokenizer),
            "seq_len": 1024 // 8,
            "document_mask": True,
        },
        "optim": {"name": "adamw", "lr": 1e-30},
        "train": {"steps": 1, "batch_size": 2, "device": "cpu"},
    }
    sc.train(recipe, run_dir=tmp_path / "run")
    found = evaluate_run(tmp_path / "run")
    theirs, end = AutoTokenizer.from_pretrained(tokenizer), IDS["</s>"]
    nats, targets = 0.0, 0
    for text in held:
        ids = theirs(text)["input_ids"]
        ids = [end, *ids, end] if family == "gpt2" else [end, *ids] if family == "t5" else ids
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]])).logits[0]
        nats += float(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        targets += len(ids) - 1
    # windows split some documents, whose later parts then lack their beginnings
    assert found["eval_loss"] == pytest.approx(nats / targets, rel=2e-3)
    size = sum(len(text) for text in held)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=2e-3)


@pytest.mark.parametrize("family", ["bert", "bart", "llama", "t5"])
@pytest.mark.parametrize("task", ["masked-lm", "seq2seq"])
def test_window_of_one_document_equals_the_tokenizer(task: str, family: str, tmp_path: Path) -> None:
    names = {"mask_token": "<mask>", "pad_token": "<pad>", "eos_token": "</s>"}
    text = "one document that fills a window and a little more of the next " * 3
    data, theirs = prepared(task, tmp_path, family, texts=[text], names=names, seq_len=64)
    assert stream(data) == list(text.encode()), "nothing is added to a document inside of a window"
    inputs = data.collate([(0, 0, data.train[0])]).inputs["input_ids"][0].tolist()
    begin, end = ([IDS[token] for token in part.split()] for part in TEMPLATES[family][0].split("$A"))
    assert inputs[: len(begin)] == begin == theirs(text)["input_ids"][: len(begin)]
    assert inputs[64 - len(end) :] == end


@pytest.mark.parametrize(
    ("family", "between"), [("bert", "[SEP]"), ("bart", "</s>"), ("llama", "</s>"), ("t5", "</s>")]
)
def test_documents_in_windows_are_kept_apart(family: str, between: str, tmp_path: Path) -> None:
    data, _ = prepared("masked-lm", tmp_path, family, seq_len=16, names={"mask_token": "<mask>", "pad_token": "<pad>"})
    expected = list(TEXTS[0].encode())
    for text in TEXTS[1:]:
        expected += [IDS[between], *text.encode()]
    assert stream(data) == expected


def test_streams_of_another_template_are_rebuilt(tmp_path: Path) -> None:
    """Streams are rebuilt even if ids and fingerprint are equal, as for bytes with and without special tokens."""
    section = DataSection(jsonl=corpus(tmp_path), heldout=0, seq_len=16)
    packed = get_task("causal-lm").prepare(section, seed=0)
    masked = get_task("masked-lm").prepare(section, seed=0)
    assert packed.tokenizer is not None
    assert masked.tokenizer is not None
    assert packed.tokenizer.fingerprint == masked.tokenizer.fingerprint
    assert stream(packed)[:2] == [256, ord("d")]
    assert stream(masked)[0] == ord("d")


@pytest.mark.parametrize("family", ["llama", "llama-eos"])
def test_positions_begin_again_with_the_beginning_of_a_document(family: str, tmp_path: Path) -> None:
    data, _ = prepared("causal-lm", tmp_path, family, seq_len=32, document_mask=True)
    batch = data.collate([(0, 1, data.train[1])])
    ids, positions = batch.inputs["input_ids"][0], batch.inputs["position_ids"][0]
    starts = (ids == IDS["<s>"]).nonzero().flatten().tolist()
    assert starts
    for start in starts:
        assert positions[start] == 0
    assert (positions == 0).sum() == len(starts) + (0 not in starts)


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_sentences_are_scored_after_the_document_prefix(family: str, tmp_path: Path) -> None:
    from scantling.trainer.data.blimp import MinimalPair

    model = llama(tmp_path / "model").eval()
    tokenizer = load_tokenizer(str(made_tokenizer(tmp_path / family, family)))
    begin = {"llama": "<s>", "bert": "[CLS]", "gpt2": "</s>"}[family]
    assert document_marks(tokenizer).first == (IDS[begin],)

    def score(text: str) -> float:
        ids = torch.tensor([[IDS[begin], *text.encode()]])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0]
        return -float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))

    pairs = [MinimalPair(f"{number} is it", f"{number} it is", "p", "q") for number in range(8)]
    expected = [score(pair.good) > score(pair.bad) for pair in pairs]
    assert prefers_good(model, tokenizer, pairs).tolist() == expected


def test_template_is_found_without_single_letter_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "word": 2}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert loaded.single.parts == ((0,), (1,))
    assert loaded.pair.parts == ((0,), (1,), (1,))


def test_built_in_tokenizers_add_their_saved_specials(tmp_path: Path) -> None:
    for wrap in (False, True):
        ByteTokenizer(wrap=wrap).save_pretrained(tmp_path / str(wrap))
        loaded = load_tokenizer(str(tmp_path / str(wrap)))
        assert loaded.document == ByteTokenizer(wrap=wrap).document
        assert loaded.bos_id == ByteTokenizer(wrap=wrap).bos_id


def test_bin_files_with_a_tokenizer_are_evaluated_as_their_texts(tmp_path: Path) -> None:
    data, theirs = prepared("causal-lm", tmp_path, "llama", seq_len=16)
    ids = np.array([id_ for text in TEXTS for id_ in theirs(text)["input_ids"]])
    ids.astype("<u2").tofile(tmp_path / "ids.bin")
    section = DataSection(bin=str(tmp_path / "ids.bin"), tokenizer=str(tmp_path / "llama"), heldout=0, seq_len=16)
    flat = get_task("causal-lm").prepare(section, seed=0)
    for index in (0, 3):
        one, other = (each.collate([(0, index, each.train[index])]) for each in (data, flat))
        assert torch.equal(one.labels, other.labels)
        assert one.num_targets == other.num_targets


def test_export_checks_what_was_trained(tmp_path: Path) -> None:
    tokenizer = made_tokenizer(tmp_path / "tokenizer", "llama")
    llama(tmp_path / "model", bos_token_id=IDS["<s>"], eos_token_id=IDS["</s>"])
    recipe = {
        "model": {"hf": str(tmp_path / "model")},
        "data": {"jsonl": corpus(tmp_path), "tokenizer": str(tokenizer), "seq_len": 32},
        "optim": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 1, "batch_size": 2, "device": "cpu"},
    }
    sc.train(recipe, run_dir=tmp_path / "run")
    assert export_hf(tmp_path / "run", tmp_path / "export") < 1e-4
    exported = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert exported("a")["input_ids"] == [IDS["<s>"], ord("a")]


@pytest.mark.parametrize("family", ["t5", "bart", "llama", "llama-eos", "bert", "gpt2"])
def test_targets_equal_the_tokenizer(family: str, tmp_path: Path) -> None:
    """Targets end in end-of-text, even if the tokenizer does not add it, because a decoder has to learn to stop."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "answer": text.upper()}) for text in TEXTS))
    folder = made_tokenizer(tmp_path / family, family, pad_token="<pad>", eos_token="</s>")
    fields = {"text": "text", "pair": "answer"}
    section = DataSection(jsonl=str(path), fields=fields, tokenizer=str(folder), heldout=0, seq_len=64, target_len=20)
    data = get_task("seq2seq").prepare(section, seed=0)
    batch = data.collate([(0, index, data.train[index]) for index in range(8)])
    theirs, end = AutoTokenizer.from_pretrained(folder), IDS["</s>"]
    for row, text in enumerate(TEXTS[:8]):
        source = batch.inputs["input_ids"][row]
        assert source[: len(theirs(text)["input_ids"])].tolist() == theirs(text)["input_ids"]
        target = [int(id_) for id_ in batch.labels[row] if id_ >= 0]
        wanted = theirs(text_target=text.upper())["input_ids"]
        wanted = {"bert": [*text.upper().encode(), end], "llama": [*wanted, end], "gpt2": [*wanted, end]}.get(
            family, wanted
        )
        cut = 1 if wanted[-1] == end else 0
        assert target == ([*wanted[: 20 - cut], end] if len(wanted) > 20 else wanted)
    model = {"model_type": "bart", "d_model": 16, "vocab_size": 320} | {
        f"{side}_{key}": number
        for side in ("encoder", "decoder")
        for key, number in (("layers", 1), ("ffn_dim", 16), ("attention_heads", 2))
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    recipe = {
        "model": {"hf": str(tmp_path), "task": "seq2seq"},
        "data": {"jsonl": str(path), "fields": fields, "tokenizer": str(folder), "seq_len": 64},
        "optim": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 1, "batch_size": 2, "device": "cpu"},
    }
    sc.train(recipe, run_dir=tmp_path / "run")
    assert export_hf(tmp_path / "run", tmp_path / "export") < 1e-4


def test_targets_in_another_language_have_its_mark(tmp_path: Path) -> None:
    from transformers import MBartTokenizer

    words = ["<s>", "<pad>", "</s>", "<unk>", "\u2581a", "\u2581b"]
    MBartTokenizer(vocab=[(word, 0.0) for word in words], src_lang="en_XX", tgt_lang="ro_RO").save_pretrained(tmp_path)
    theirs, loaded = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    text = loaded.encode_batch(["a"])[0].tolist()
    assert [*text, *loaded.single.parts[1]] == theirs("a")["input_ids"]
    before, after = loaded.target
    assert [*before, *text, *after] == theirs(text_target="a")["input_ids"] != theirs("a")["input_ids"]
