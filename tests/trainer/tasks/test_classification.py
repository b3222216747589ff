"""Tests of classification: batches, models with and without token types, baselines."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, LlamaConfig, RobertaConfig

from scantling.errors import UserError
from scantling.trainer.data.loader import BatchSource
from scantling.trainer.data.sampler import Sampler
from scantling.trainer.data.tokenizers import ByteTokenizer
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks.baselines import majority_accuracy
from scantling.trainer.tasks.classification import Classification, LabeledDataset, LabeledText, PaddedTexts

FIELDS = {"text": "premise", "pair": "hypothesis", "label": "label"}
BYTES = ByteTokenizer()
REAL = Path(os.environ.get("SCANTLING_DATA", "../shared/data")) / "nli"


def example(text: bytes, pair: bytes | None, label: int) -> LabeledText:
    return LabeledText(np.frombuffer(text, np.uint8), None if pair is None else np.frombuffer(pair, np.uint8), label)


def pairs(folder: Path, count: int = 300) -> str:
    """Return pairs whose label depends on the second sentence only."""
    words = ["never", "some", "outdoors"]
    rows = [
        {"premise": f"text {n}", "hypothesis": f"it is {words[n % 3]} {n * 7 % 11}", "label": ["c", "n", "e"][n % 3]}
        for n in range(count)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_batches_are_padded_to_their_longest() -> None:
    collate = PaddedTexts(BYTES, 12)
    batch = collate(
        [(0, 0, example(b"abc", b"de", 2)), (0, 1, example(b"a" * 9, b"bcd", 0)), (0, 2, example(b"", b"", 1))]
    )
    cls, sep, pad = 259, 260, 257
    assert batch.inputs["input_ids"].tolist() == [
        [cls, 97, 98, 99, sep, 100, 101, sep, pad, pad, pad, pad],
        [cls, *[97] * 6, sep, 98, 99, 100, sep],
        [cls, sep, sep, *[pad] * 9],
    ]
    assert batch.inputs["attention_mask"].sum(1).tolist() == [8, 12, 3]
    assert batch.inputs["token_type_ids"].tolist()[0] == [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert batch.labels.tolist() == [2, 0, 1]
    assert (batch.num_targets, batch.num_tokens) == (3, 23)
    single = [(0, 0, example(b"abc", None, 0))]
    assert collate(single).inputs["input_ids"].tolist() == [[cls, 97, 98, 99, sep]]
    wider = PaddedTexts(BYTES, 12, 8)(single)
    assert wider.inputs["input_ids"].tolist() == [[cls, 97, 98, 99, sep, *[pad] * 3]]
    assert wider.inputs["attention_mask"].tolist() == [[1] * 5 + [0] * 3]
    assert wider.num_tokens == 5
    longest = [(0, 0, example(b"a" * 20, None, 0))]
    assert PaddedTexts(BYTES, 12, 8)(longest).inputs["input_ids"].shape == (1, 12)


def test_datasets_give_back_the_documents(tmp_path: Path) -> None:
    data = Classification().prepare(DataSection(jsonl=pairs(tmp_path), fields=FIELDS, seq_len=20, heldout=0.1), seed=0)
    assert data.labels == ["c", "e", "n"]
    assert isinstance(data.train, LabeledDataset)
    assert data.heldout is not None
    rows = [data.train[n] for n in range(len(data.train))] + [data.heldout[n] for n in range(len(data.heldout))]
    words = {"c": "never", "n": "some", "e": "outdoors"}
    for row in rows:
        assert BYTES.decode(row.ids).startswith("text ")
        assert row.pair_ids is not None
        assert words[data.labels[row.label]] in BYTES.decode(row.pair_ids)
    assert len({BYTES.decode(row.ids) for row in rows}) == 300
    lengths = [min(20, len(row.ids) + len(row.pair_ids)) for row in rows[: len(data.train)] if row.pair_ids is not None]
    assert data.lengths is not None
    assert data.lengths.tolist() == lengths
    with pytest.raises(IndexError):
        data.train[len(data.train)]


def test_collate_can_be_sent_to_a_worker(tmp_path: Path) -> None:
    section = DataSection(jsonl=pairs(tmp_path), fields=FIELDS, tokenizer={"bpe": 270}, heldout=0)
    data = Classification().prepare(section, seed=0)
    sent, dataset = pickle.loads(pickle.dumps((data.collate, data.train)))  # noqa: S301 (our own bytes)
    own, theirs = (f([(0, n, d[n]) for n in range(3)]) for f, d in ((data.collate, data.train), (sent, dataset)))
    assert own.inputs["input_ids"].tolist() == theirs.inputs["input_ids"].tolist()


def test_buckets_can_be_turned_off(tmp_path: Path) -> None:
    section = DataSection(jsonl=pairs(tmp_path), fields=FIELDS, bucket=False)
    assert Classification().prepare(section, seed=0).lengths is None


@pytest.mark.parametrize("kind", ["bert", "roberta", "llama"])
def test_loss_of_models_with_and_without_token_types(tmp_path: Path, kind: str) -> None:
    task = Classification()
    data = task.prepare(DataSection(jsonl=pairs(tmp_path), fields=FIELDS, seq_len=64), seed=0)
    size: dict[str, Any] = {
        "vocab_size": 261,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        **task.config_overrides(data),
    }
    if kind == "roberta":
        size |= {"type_vocab_size": 1, "max_position_embeddings": 400}
    config = {"bert": BertConfig, "roberta": RobertaConfig, "llama": LlamaConfig}[kind](**size)
    assert config.num_labels == 3
    assert config.id2label == {0: "c", 1: "e", 2: "n"}
    torch.manual_seed(0)
    net = AutoModelForSequenceClassification.from_config(config).eval()
    seen: dict[str, Any] = {}
    net.base_model.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    batch = data.collate([(0, n, data.train[n]) for n in range(7)])
    result = task.loss(net, batch)
    assert (seen.get("token_type_ids") is not None) == (kind == "bert")
    inputs = {"input_ids": batch.inputs["input_ids"], "attention_mask": batch.inputs["attention_mask"]}
    if kind == "bert":
        inputs["token_type_ids"] = batch.inputs["token_type_ids"]
    logits = net(**inputs).logits
    wanted = -logits.log_softmax(-1)[torch.arange(7), batch.labels].sum()
    torch.testing.assert_close(result.loss, wanted, rtol=1e-5, atol=1e-5)
    assert int(result.counts["correct"]) == int((logits.argmax(-1) == batch.labels).sum())
    wrapped = torch.nn.Module()
    wrapped.module = net
    wrapped.forward = net.forward  # as with DDP: the configuration is one level down
    torch.testing.assert_close(task.loss(wrapped, batch).loss, wanted, rtol=1e-5, atol=1e-5)
    figures = task.metrics({"loss": 14.0, "targets": 7.0, "correct": 3.0}, data)
    assert figures == {"eval_loss": 2.0, "accuracy": 3 / 7}


def test_epochs_with_buckets_use_each_example_once(tmp_path: Path) -> None:
    data = Classification().prepare(DataSection(jsonl=pairs(tmp_path), fields=FIELDS, heldout=0), seed=0)
    sampler = Sampler(len(data.train), batch_size=10, seed=0, lengths=data.lengths)
    source = BatchSource(data.train, data.collate, sampler, micro_batch_size=4, workers=1)
    targets = [batch.num_targets for _ in range(30) for batch in source.next_step()]
    assert targets == [4, 4, 2] * 30
    assert source.epoch == 1
    source.close()


def test_baselines(tmp_path: Path) -> None:
    task = Classification()
    data = task.prepare(DataSection(jsonl=pairs(tmp_path), fields=FIELDS, heldout=0.2), seed=0)
    figures = task.baselines(data)
    assert set(figures) == {"majority_accuracy", "hypothesis_only_accuracy"}
    assert figures["hypothesis_only_accuracy"] > 0.95
    assert 0.1 < figures["majority_accuracy"] < 0.6
    assert set(task.baselines(data, max_samples=1).values()) <= {0.0, 1.0}, "of one document"
    only_first = FIELDS | {"pair": None}
    figures = task.baselines(task.prepare(DataSection(jsonl=pairs(tmp_path), fields=only_first, heldout=0.2), seed=0))
    assert set(figures) == {"majority_accuracy", "bag_of_words_accuracy"}
    assert figures["bag_of_words_accuracy"] < 0.6  # the first sentence has no information
    nothing = task.prepare(DataSection(jsonl=pairs(tmp_path), fields=FIELDS, heldout=0), seed=0)
    assert task.baselines(nothing) == {}


def test_majority() -> None:
    assert majority_accuracy(np.array([0, 2, 2]), np.array([2, 1, 2, 0])) == 0.5


def test_tokenizer_without_special_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    section = DataSection(jsonl=pairs(tmp_path), fields=FIELDS, tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="has no pad token, which classification needs"):
        Classification().prepare(section, seed=0)


def test_label_column_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.fields\.label: missing"):
        Classification().prepare(DataSection(jsonl=pairs(tmp_path), fields={"text": "premise"}), seed=0)


@pytest.mark.skipif(not REAL.is_dir(), reason=f"needs the NLI data in {REAL} (set SCANTLING_DATA)")
def test_hypothesis_only_on_real_pairs(tmp_path: Path) -> None:
    """Trained on other collections, a hypothesis-only model is right on nearly half of MNLI."""
    section = DataSection(
        jsonl=str(REAL / "train.jsonl.gz"),
        validation=str(REAL / "mnli_dev_matched_part_a.jsonl.gz"),
        fields=FIELDS,
        labels=["entailment", "neutral", "contradiction"],
    )
    task = Classification()
    data = task.prepare(section, seed=0)
    assert (len(data.train), data.info["heldout"]["documents"]) == (60_051, 4_912)
    figures = task.baselines(data)
    assert 0.30 < figures["majority_accuracy"] < 0.38
    assert 0.43 < figures["hypothesis_only_accuracy"] < 0.54
