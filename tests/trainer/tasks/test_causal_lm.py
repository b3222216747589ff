"""Tests of causal LM: windows, the loss, isolated documents, and exact bits per byte."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from scantling.errors import UserError
from scantling.trainer.data.loader import eval_batches
from scantling.trainer.data.store import Marks
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks import TASKS, TaskData, get_task
from scantling.trainer.tasks.base import cross_entropy_sum, mean_loss
from scantling.trainer.tasks.causal_lm import CausalLM, ShiftedWindows

EOS = 256
BETWEEN = Marks(first=(EOS,), end=(EOS,))


def model(vocab_size: int = 261, *, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return AutoModelForCausalLM.from_config(config)


def corpus(folder: Path, count: int = 20) -> str:
    for number in range(count):
        (folder / f"{number:02}.txt").write_text(f"document {number}: " + "é words " * (number + 1))
    return str(folder / "*.txt")


def held_out(task: CausalLM, data: TaskData, net: torch.nn.Module, batch_size: int = 4) -> dict[str, float]:
    sums = {"loss": 0.0, "targets": 0.0}
    assert data.heldout is not None
    with torch.no_grad():
        for batch in eval_batches(data.heldout, data.collate, batch_size):
            sums["loss"] += float(task.loss(net, batch).loss)
            sums["targets"] += batch.num_targets
    return sums


def test_names() -> None:
    text = ["causal-lm", "masked-lm", "seq2seq", "classification"]
    assert list(TASKS) == [*text, "clicks", "image-classification"]
    with pytest.raises(UserError, match=r"given 'casual-lm' \(did you mean 'causal-lm'\?\)"):
        get_task("casual-lm")


def test_labels_are_the_next_tokens() -> None:
    batch = ShiftedWindows()([(0, 0, np.arange(9)), (0, 1, np.arange(10, 15))])
    assert batch.inputs["input_ids"].tolist() == [[*range(8)], [10, 11, 12, 13, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[*range(1, 9)], [11, 12, 13, 14, -100, -100, -100, -100]]
    assert batch.num_targets == batch.num_tokens == 12
    assert list(batch.inputs) == ["input_ids"]


def test_prepared_data(tmp_path: Path) -> None:
    task = CausalLM()
    data = task.prepare(DataSection(text=corpus(tmp_path), seq_len=32, heldout=0.1), seed=0)
    assert data.vocab_size == 261
    assert data.tokenizer is not None
    text = data.tokenizer.decode(np.concatenate([data.train[index][1:] for index in range(len(data.train))]))
    assert text.startswith("document 1: é words é words document 2: é")  # document 0 is held out
    assert data.info["heldout"]["documents"] == 2
    ids = {"bos": EOS, "eos": EOS, "pad": 257, "mask": 258, "cls": 259, "sep": 260}
    assert task.config_overrides(data) == {f"{role}_token_id": id_ for role, id_ in ids.items()}


def test_loss_is_the_sum_in_fp32_with_its_gradient() -> None:
    batch = ShiftedWindows()([(0, 0, np.arange(9)), (0, 1, np.arange(10, 15))])
    net = model()
    found = CausalLM().loss(net, batch).loss
    found.backward()
    gradient = net.lm_head.weight.grad.clone()
    net.zero_grad()
    logits = net(input_ids=batch.inputs["input_ids"]).logits
    wanted = -sum(
        logits[row, place].log_softmax(-1)[label]
        for row, labels in enumerate(batch.labels.tolist())
        for place, label in enumerate(labels)
        if label != -100
    )
    wanted.backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gradient, net.lm_head.weight.grad, rtol=1e-4, atol=1e-5)
    low = cross_entropy_sum(logits.detach().bfloat16(), batch.labels)
    assert low.dtype == torch.float32


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_do_not_attend_to_neighbors(attention: str) -> None:
    """Logits of the second document equal those of the document alone, whatever precedes it."""
    net = model(attention=attention).eval()
    document = [EOS, *b"the second one"]

    def logits(before: list[int], mask: bool) -> torch.Tensor:
        window = np.array([*before, *document, EOS])
        batch = ShiftedWindows(document_mask=mask, marks=BETWEEN)([(0, 0, window)])
        captured: dict[str, Any] = {}
        handle = net.register_forward_hook(lambda *a: captured.update(logits=a[2].logits))
        CausalLM().loss(net, batch)
        handle.remove()
        return captured["logits"][0, len(before) :]

    with torch.no_grad():
        alone = logits([], True)
        for before in ([EOS, *b"first"], [EOS, *b"other"], [*b"rest of a long one", EOS, *b"x"], [EOS]):
            torch.testing.assert_close(logits(before, True), alone, rtol=1e-5, atol=1e-5)
        assert (logits([EOS, *b"first"], False) - logits([EOS, *b"other"], False)).abs().max() > 1e-3


def test_document_mask_keeps_all_targets() -> None:
    """A document's last token predicts its end; the end-of-text token predicts the next document's first token."""
    window = np.array([EOS, 1, 2, EOS, 3, 4, EOS, 5])
    plain = ShiftedWindows()([(0, 0, window)])
    masked = ShiftedWindows(document_mask=True, marks=BETWEEN)([(0, 0, window)])
    assert plain.labels.tolist() == masked.labels.tolist()
    assert masked.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0]]


@pytest.mark.parametrize("seq_len", [16, 31, 500])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_bits_per_byte_are_exact(tmp_path: Path, seq_len: int, batch_size: int) -> None:
    """Every held-out byte and every document end is coded once, for all window sizes."""
    task = CausalLM()
    data = task.prepare(DataSection(text=corpus(tmp_path), seq_len=seq_len, heldout=0.2), seed=1)
    facts = data.info["heldout"]

    class Uniform(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 256)})

    sums = {"loss": 0.0, "targets": 0.0}
    assert data.heldout is not None
    for batch in eval_batches(data.heldout, data.collate, batch_size):
        batch.labels[batch.labels == EOS] = 0  # the model has only 256 logits
        sums["loss"] += float(task.loss(Uniform(), batch).loss)
        sums["targets"] += batch.num_targets
    assert sums["targets"] == facts["bytes"] + facts["documents"]
    figures = task.metrics(sums, data)
    assert figures["bits_per_byte"] == pytest.approx(8 * (1 + facts["documents"] / facts["bytes"]), rel=1e-6)
    assert figures["perplexity"] == pytest.approx(256, rel=1e-5)  # the sum is in fp32


def test_bits_per_byte_of_a_model_with_windows_as_documents(tmp_path: Path) -> None:
    task = CausalLM()
    data = task.prepare(DataSection(text=corpus(tmp_path), seq_len=24, tokenizer={"bpe": 270}), seed=1)
    sums = held_out(task, data, model(270))
    figures = task.metrics(sums, data)
    assert figures["bits_per_byte"] == pytest.approx(sums["loss"] / math.log(2) / data.info["heldout"]["bytes"])
    assert held_out(task, data, model(270), batch_size=1) == pytest.approx(sums, rel=1e-5)


def test_metrics_at_the_limits() -> None:
    with pytest.raises(UserError, match="no targets"):
        mean_loss({"loss": 0.0, "targets": 0.0})


def test_too_short(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("too short")
    with pytest.raises(UserError, match=r"shorter than one sequence: 11 tokens, and data\.seq_len is 256"):
        CausalLM().prepare(DataSection(text=str(tmp_path / "a.txt"), heldout=0), seed=0)


def test_pair_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "b": "c"}\n')
    with pytest.raises(UserError, match=r"data\.fields\.pair: has no meaning for the task 'causal-lm'"):
        CausalLM().prepare(DataSection(jsonl=str(tmp_path / "a.jsonl"), fields={"pair": "b"}), seed=0)


def test_bin_files(tmp_path: Path) -> None:
    np.tile(np.array([5, 6, EOS, 7]), 250).astype("<u2").tofile(tmp_path / "a.bin")
    section = DataSection(bin=str(tmp_path / "a.bin"), seq_len=16, heldout=0.1)
    task = CausalLM()
    data = task.prepare(section, seed=0)
    assert data.vocab_size == EOS + 1
    assert data.tokenizer is None
    assert task.config_overrides(data) == {}
    assert data.info["heldout_by"] == "window"
    assert data.heldout is not None
    assert data.train[1].tolist() == np.tile([5, 6, EOS, 7], 5)[:17].tolist()
    assert set(task.metrics(held_out(task, data, model()), data)) == {"eval_loss", "perplexity"}


def test_bin_files_with_huge_ids_need_their_tokenizer(tmp_path: Path) -> None:
    ids = np.tile(np.array([5, 6, EOS, 7]), 250).astype("<u4")
    ids[77] = 2**31 - 1
    ids.tofile(tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"hold the id 2147483647, .* Is data\.bin_dtype right\?"):
        CausalLM().prepare(DataSection(bin=str(tmp_path / "a.bin"), bin_dtype="uint32", seq_len=16), seed=0)


def test_bin_files_with_their_tokenizer(tmp_path: Path) -> None:
    from scantling.trainer.data.tokenizers import ByteTokenizer

    ByteTokenizer().save_pretrained(tmp_path / "tokenizer")
    np.tile(np.array([5, 6, EOS, 7]), 250).astype("<u2").tofile(tmp_path / "a.bin")
    section = DataSection(bin=str(tmp_path / "a.bin"), seq_len=16, document_mask=True)
    with pytest.raises(UserError, match=r"data\.document_mask: .* name the tokenizer"):
        CausalLM().prepare(section, seed=0)
    named = section.model_copy(update={"tokenizer": str(tmp_path / "tokenizer")})
    data = CausalLM().prepare(named, seed=0)
    assert data.vocab_size == 261
    assert data.collate([(0, 0, data.train[0])]).inputs["position_ids"][0, :6].tolist() == [0, 1, 0, 1, 2, 3]
    np.full(1000, 300).astype("<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"the files hold the id 300; .* has 261 ids"):
        CausalLM().prepare(named, seed=0)
    with pytest.raises(UserError, match="bin files hold ids already"):
        CausalLM().prepare(
            section.model_copy(update={"tokenizer": DataSection(tokenizer={"bpe": 300}).tokenizer}), seed=0
        )
