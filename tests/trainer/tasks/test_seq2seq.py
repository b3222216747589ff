"""Tests of sequence to sequence: batches of hidden spans and of pairs, and a tiny T5 from recipe to export."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config

import scantling as sc
from scantling.cli import run as run_cli
from scantling.errors import RecipeError, UserError
from scantling.trainer.data.loader import Batch, eval_batches
from scantling.trainer.data.tokenizers import ByteTokenizer, load_tokenizer
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks.seq2seq import Seq2Seq
from tests.runs import records, tiny_recipe

BYTES = ByteTokenizer()
TINY_T5 = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_heads": 2, "num_layers": 2}


def texts(folder: Path) -> str:
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"document {number} " * 30)
    return str(folder / "*.txt")


def pairs(folder: Path, rows: int = 40) -> Path:
    """Return words, and the same words in capitals."""
    path = folder / "pairs.jsonl"
    source = np.random.default_rng(0)
    words = [" ".join(source.choice(["ab", "cd", "ef", "gh"], 1 + row % 5)) + f" {row}" for row in range(rows)]
    path.write_text("\n".join(json.dumps({"text": text, "answer": text.upper()}) for text in words))
    return path


def section(path: Path, **keys: Any) -> DataSection:
    return DataSection(jsonl=str(path), fields={"text": "text", "pair": "answer"}, heldout=0.1, **keys)


def t5_tokenizer(folder: Path) -> Path:
    """Write a tokenizer like T5's: sentinels count down from the last id, and an end token follows each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(50))]
    words += [f"<extra_id_{number}>" for number in reversed(range(20))]
    backend = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    saved = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=[f"<extra_id_{number}>" for number in range(20)],
    )
    saved.save_pretrained(folder)
    return folder


def loss_of(batch: Batch, vocab: int = 361) -> tuple[float, Any]:
    config = T5Config(vocab_size=vocab, **TINY_T5, decoder_start_token_id=257, pad_token_id=257, eos_token_id=256)
    torch.manual_seed(0)
    net = AutoModelForSeq2SeqLM.from_config(config).eval()
    with torch.no_grad():
        return float(Seq2Seq().loss(net, batch).loss), net


def test_spans_of_a_stream_are_hidden(tmp_path: Path) -> None:
    task = Seq2Seq()
    data = task.prepare(DataSection(text=texts(tmp_path), seq_len=64, heldout=0.1), seed=0)
    batch = data.collate([(0, index, data.train[index]) for index in range(4)])
    assert list(batch.inputs) == ["input_ids"], "whole windows need no mask"
    assert batch.inputs["input_ids"].shape == (4, 64)
    assert (batch.inputs["input_ids"][:, 0] == BYTES.cls_id).all()
    assert (batch.inputs["input_ids"][:, -1] == BYTES.sep_id).all()
    assert (batch.labels[:, 0] == 261).all(), "the first sentinel stands above the tokenizer's ids"
    assert (batch.labels[:, -1] == BYTES.eos_id).all()
    assert batch.num_targets == batch.labels.numel()
    assert batch.num_tokens == 4 * 64
    assert data.vocab_size == 361
    sample = task.sample_batch(4, DataSection(text="x", seq_len=64))
    assert sample.labels.shape[1] >= batch.labels.shape[1]
    assert sample.inputs["input_ids"].shape == batch.inputs["input_ids"].shape
    alone = data.collate([(0, 2, data.train[2])])
    assert torch.equal(alone.labels[0], batch.labels[2])
    assert not torch.equal(data.collate([(1, 2, data.train[2])]).inputs["input_ids"], alone.inputs["input_ids"])
    ids = {"bos": None, "eos": 256, "pad": 257, "mask": 258, "cls": 259, "sep": 260}
    assert task.config_overrides(data) == {f"{role}_token_id": id_ for role, id_ in ids.items()}


def test_held_out_stream_is_covered(tmp_path: Path) -> None:
    data = Seq2Seq().prepare(DataSection(text=texts(tmp_path), seq_len=64, heldout=0.1), seed=0)
    assert data.heldout is not None
    tokens = 0
    for batch in eval_batches(data.heldout, data.collate, 4):
        inputs = batch.inputs["input_ids"]
        ours = (inputs != BYTES.pad_id) & (inputs != BYTES.cls_id) & (inputs < 261)
        # without the separator at the end of each input and the end token of each target
        tokens += int(ours.sum()) + int(((batch.labels >= 0) & (batch.labels < 261)).sum()) - 2 * len(inputs)
    assert tokens == data.info["heldout"]["tokens"]


def test_sentinels_of_the_tokenizer_are_used(tmp_path: Path) -> None:
    folder = t5_tokenizer(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.sentinel_ids == tuple(range(72, 52, -1))
    (tmp_path / "a.txt").write_text(" ".join(f"w{number % 50}" for number in range(400)))
    data = Seq2Seq().prepare(
        DataSection(text=str(tmp_path / "a.txt"), tokenizer=str(folder), seq_len=32, heldout=0), seed=0
    )
    assert data.vocab_size == tokenizer.vocab_size == 73
    batch = data.collate([(0, 0, data.train[0])])
    assert batch.labels[0, 0] == 72
    assert batch.labels[0, -1] == batch.inputs["input_ids"][0, -1] == 1
    with pytest.raises(UserError, match=r"gives 28 spans, and .* has 20 sentinels"):
        Seq2Seq().prepare(
            DataSection(text=str(tmp_path / "a.txt"), tokenizer=str(folder), seq_len=512, heldout=0), seed=0
        )


def test_pairs_are_cut_padded_and_masked(tmp_path: Path) -> None:
    data = Seq2Seq().prepare(section(pairs(tmp_path), seq_len=12, target_len=5), seed=0)
    examples = [(0, index, data.train[index]) for index in range(len(data.train))]
    batch = data.collate(examples)
    for row, (_, _, item) in enumerate(examples):
        inside = batch.inputs["attention_mask"][row].bool()
        text = [BYTES.cls_id, *item.ids[:10], BYTES.sep_id]
        assert batch.inputs["input_ids"][row][inside].tolist() == text
        assert (batch.inputs["input_ids"][row][~inside] == BYTES.pad_id).all()
        target = [*item.pair_ids[:4], BYTES.eos_id]
        assert batch.labels[row].tolist() == target + [-100] * (batch.labels.shape[1] - len(target))
    assert batch.labels.shape[1] == 5
    assert batch.num_targets == int((batch.labels != -100).sum())
    assert batch.num_tokens == int(batch.inputs["attention_mask"].sum())
    assert data.vocab_size == BYTES.vocab_size
    assert data.lengths is not None
    assert data.lengths.max() <= 12 + 5
    sample = Seq2Seq().sample_batch(2, section(tmp_path, seq_len=12, target_len=5))
    assert sample.labels.shape == (2, 5)
    assert sample.inputs["attention_mask"].shape == sample.inputs["input_ids"].shape == (2, 12)


def test_padding_changes_no_loss(tmp_path: Path) -> None:
    data = Seq2Seq().prepare(section(pairs(tmp_path), seq_len=64), seed=0)
    examples = [(0, index, data.train[index]) for index in range(6)]
    together, _ = loss_of(data.collate(examples))
    assert together == pytest.approx(sum(loss_of(data.collate([example]))[0] for example in examples), rel=1e-5)
    wide = Seq2Seq().prepare(section(pairs(tmp_path), seq_len=64, target_len=60, pad_to_multiple_of=64), seed=0)
    batch = wide.collate(examples)
    assert batch.inputs["input_ids"].shape == batch.inputs["attention_mask"].shape == (6, 64)
    assert batch.labels.shape == (6, 60)
    assert loss_of(batch)[0] == pytest.approx(together, rel=1e-5)


def test_loss_matches_transformers(tmp_path: Path) -> None:
    data = Seq2Seq().prepare(DataSection(text=texts(tmp_path), seq_len=64, heldout=0.1), seed=0)
    batch = data.collate([(0, index, data.train[index]) for index in range(3)])
    loss, net = loss_of(batch)
    with torch.no_grad():
        theirs = float(net(**batch.inputs, labels=batch.labels).loss)
    assert loss / batch.num_targets == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seq_len": 3}, "leave no room"),
        ({"seq_len": 4096}, "has 100 sentinels; lower it or data.mask_probability, or raise data.span_length"),
        ({"fields": {"label": "x"}}, r"data\.fields\.label: has no meaning"),
    ],
)
def test_impossible_lengths_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Seq2Seq().prepare(DataSection(text=texts(tmp_path), heldout=0.1, **keys), seed=0)


def test_bin_files_need_their_tokenizer(tmp_path: Path) -> None:
    np.arange(200).astype("<u2").tofile(tmp_path / "a.bin")
    data = DataSection(bin=str(tmp_path / "a.bin"), seq_len=16)
    with pytest.raises(UserError, match="seq2seq needs the tokenizer of the bin files"):
        Seq2Seq().prepare(data, seed=0)
    ByteTokenizer(wrap=True).save_pretrained(tmp_path / "tokenizer")
    prepared = Seq2Seq().prepare(data.model_copy(update={"tokenizer": str(tmp_path / "tokenizer")}), seed=0)
    assert prepared.vocab_size == 361
    assert len(prepared.train[0]) == 15


def t5_recipe(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    recipe = tiny_recipe(folder, optim={"lr": 0.01}, train={"steps": 8, "checkpoint_every": 4}, **sections)
    return {**recipe, "model": {"preset": "t5-small", "overrides": TINY_T5}}


def test_t5_from_recipe_to_exported_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = t5_recipe(tmp_path)
    recipe["optim"] = {"name": "came", "momentum": "int8", "debias": True, "lr": 0.01, "embedding_lr_scale": 10}
    planned = sc.plan(recipe)
    result = sc.train(recipe, run_dir=tmp_path / "run")
    for key in ("num_parameters", "weight_bytes", "gradient_bytes", "optimizer_state_bytes"):
        assert getattr(planned, key) == result.metrics[key], key
    assert planned.total_tokens == result.metrics["tokens"]
    assert planned.notes == ()
    assert result.metrics["eval_loss"] < math.log(384) - 0.5, "no better than guessing one of the ids"
    assert result.metrics["perplexity"] == pytest.approx(math.exp(result.metrics["eval_loss"]))
    assert run_cli(["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf")]) == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    assert model.config.vocab_size == 384
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    made = model.generate(**tokenizer(["the quick brown fox"], return_tensors="pt"), max_new_tokens=4)
    assert made[0, 0] == BYTES.pad_id
    capsys.readouterr()
    assert run_cli(["eval", str(tmp_path / "run"), "--json"]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown[shown.index("{") :])["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-6)
    # the export works as a model folder; its task is read from its configuration
    again = {**recipe, "model": {"hf": str(tmp_path / "hf")}}
    more = sc.train(again, run_dir=tmp_path / "more", train={"steps": 2, "checkpoint_every": None})
    assert records(tmp_path / "more")[0]["loss"] < records(tmp_path / "run")[0]["loss"] - 0.5
    assert more.metrics["num_parameters"] == result.metrics["num_parameters"]


@pytest.mark.parametrize("kind", ["stream", "pairs"])
def test_resume_is_bitwise(tmp_path: Path, kind: str) -> None:
    recipe = t5_recipe(tmp_path)
    if kind == "pairs":
        fields = {"text": "text", "pair": "answer"}
        recipe["data"] = {"jsonl": str(pairs(tmp_path)), "fields": fields, "seq_len": 32, "target_len": 24}
    straight = sc.train(recipe, run_dir=tmp_path / "run")
    wanted = [record["loss"] for record in records(tmp_path / "run")]
    for folder in (tmp_path / "run" / "checkpoints").glob("*8*"):
        folder.rename(tmp_path / "gone")
    resumed = sc.train(tmp_path / "run", resume=True)
    assert [record["loss"] for record in records(tmp_path / "run")] == wanted
    assert resumed.metrics["eval_loss"] == straight.metrics["eval_loss"]


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        ({"bucket": False}, "data.bucket", "without pairs"),
        ({"document_mask": True}, "data.document_mask", "belongs to causal-lm"),
        ({"labels": ["a", "b"]}, "data.labels", "no meaning for the task 'seq2seq'"),
    ],
)
def test_recipe_reports_settings_without_effect(tmp_path: Path, data: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        sc.plan(t5_recipe(tmp_path, data=data))
    assert path in str(caught.value)
