"""Tests of masked LM: which tokens are masked, and how."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForMaskedLM, BertConfig

from scantling.errors import UserError
from scantling.trainer.data.loader import eval_batches
from scantling.trainer.data.tokenizers import ByteTokenizer
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks.masked_lm import MaskedLM, MaskedWindows

BYTES = ByteTokenizer()


def collate(probability: float = 0.15, seed: int = 0) -> MaskedWindows:
    return MaskedWindows(BYTES, seq_len=130, probability=probability, seed=seed)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 260), min_size=1, max_size=40),
    st.floats(0.001, 0.999),
    st.integers(-1, 1000),
    st.integers(0, 2**40),
)
def test_targets(tokens: list[int], probability: float, epoch: int, index: int) -> None:
    window = np.array(tokens)
    ids, labels = collate(probability).hide(epoch, index, window)
    original = np.array([BYTES.cls_id, *tokens, BYTES.sep_id])
    chosen = labels != -100
    assert np.array_equal(labels[chosen], original[chosen])
    assert np.array_equal(ids[~chosen], original[~chosen])
    assert not (original[chosen] > 255).any()  # special tokens are never targets
    assert chosen.any() == (window < 256).any()  # at least one target if possible
    assert set(ids[chosen].tolist()) <= {*range(256), BYTES.mask_id}


def test_choice_depends_on_seed_epoch_and_index_alone() -> None:
    window = np.arange(128)
    same = [collate()([(2, 7, window)]), collate()([(9, 9, window), (2, 7, window)])]
    assert same[0].inputs["input_ids"][0].tolist() == same[1].inputs["input_ids"][1].tolist()
    others = {tuple(collate(seed=s).hide(e, i, window)[1].tolist()) for s in (0, 1) for e in (-1, 0, 1) for i in (0, 1)}
    assert len(others) == 12


def test_shares_are_80_10_10() -> None:
    function, window = collate(), np.full(128, 65)
    hidden, labels = zip(*(function.hide(0, index, window) for index in range(4000)), strict=True)
    ids, targets = np.concatenate(hidden), np.concatenate(labels) != -100
    total = targets.sum()
    # standard deviations of these shares are below 0.0006 and 0.0015
    assert total / (4000 * 128) == pytest.approx(0.15, abs=0.003)
    assert (ids[targets] == BYTES.mask_id).sum() / total == pytest.approx(0.8, abs=0.006)
    assert (ids[targets] == 65).sum() / total == pytest.approx(0.1 + 0.1 / 256, abs=0.006)
    random = ids[targets & (ids != BYTES.mask_id) & (ids != 65)]
    assert len(set(random.tolist())) == 255
    assert np.bincount(random, minlength=256).max() < 70  # mean 30


def test_batch_is_padded_to_its_longest_text() -> None:
    full = collate()([(0, 0, np.arange(8)), (0, 1, np.arange(8))])
    assert list(full.inputs) == ["input_ids"]
    ragged = collate()([(0, 0, np.arange(8)), (0, 1, np.arange(3))])
    assert ragged.inputs["attention_mask"].tolist() == [[1] * 10, [1] * 5 + [0] * 5]
    assert (ragged.inputs["input_ids"][1, 5:] == BYTES.pad_id).all()
    assert ragged.num_tokens == 15
    assert ragged.num_targets == int((ragged.labels != -100).sum())


def test_prepare_and_evaluate(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 30)
    task = MaskedLM()
    data = task.prepare(DataSection(text=str(tmp_path / "*.txt"), seq_len=64, heldout=0.1), seed=0)
    batch = data.collate([(0, index, data.train[index]) for index in range(4)])
    assert batch.inputs["input_ids"].shape == (4, 64)
    assert (batch.inputs["input_ids"][:, 0] == BYTES.cls_id).all()
    assert (batch.inputs["input_ids"][:, -1] == BYTES.sep_id).all()
    config = BertConfig(
        vocab_size=261, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    net = AutoModelForMaskedLM.from_config(config).eval()
    sums = {"loss": 0.0, "targets": 0.0, "correct": 0.0}
    assert data.heldout is not None
    tokens = 0
    for batch in eval_batches(data.heldout, data.collate, 4):
        with torch.no_grad():
            result = task.loss(net, batch)
        sums["loss"] += float(result.loss)
        sums["targets"] += batch.num_targets
        sums["correct"] += float(result.counts["correct"])
        tokens += batch.num_tokens
    assert tokens == data.info["heldout"]["tokens"] + 2 * len(data.heldout)
    figures = task.metrics(sums, data)
    assert 4 < figures["eval_loss"] < 7
    assert 0 <= figures["accuracy"] < 0.2
    ids = {"bos": None, "eos": 256, "pad": 257, "mask": 258, "cls": 259, "sep": 260}
    assert task.config_overrides(data) == {f"{role}_token_id": id_ for role, id_ in ids.items()}


def test_tokenizer_without_mask(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a a a")
    section = DataSection(text=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "tokenizer.json"), heldout=0)
    with pytest.raises(UserError, match="has no mask and no pad token, which masked-lm needs"):
        MaskedLM().prepare(section, seed=0)


def test_no_room(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a a a")
    with pytest.raises(UserError, match="leaves no room"):
        MaskedLM().prepare(DataSection(text=str(tmp_path / "a.txt"), seq_len=2, heldout=0), seed=0)


def test_bin_files_need_their_tokenizer(tmp_path: Path) -> None:
    np.arange(200).astype("<u2").tofile(tmp_path / "a.bin")
    section = DataSection(bin=str(tmp_path / "a.bin"), seq_len=16)
    with pytest.raises(UserError, match="masked-lm needs the tokenizer of the bin files"):
        MaskedLM().prepare(section, seed=0)
    ByteTokenizer(wrap=True).save_pretrained(tmp_path / "tokenizer")
    data = MaskedLM().prepare(section.model_copy(update={"tokenizer": str(tmp_path / "tokenizer")}), seed=0)
    batch = data.collate([(0, 1, data.train[1])])
    assert batch.inputs["input_ids"].shape == (1, 16)
    original = torch.where(batch.labels == -100, batch.inputs["input_ids"], batch.labels)
    assert original[0, 1:-1].tolist() == list(range(14, 28))
