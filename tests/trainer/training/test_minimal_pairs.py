"""Tests of minimal-pair scores, computed by hand and by a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import scantling as sc
from scantling.errors import UserError
from scantling.numerics.device import autocast
from scantling.trainer.data.blimp import MinimalPair
from scantling.trainer.data.tokenizers import ByteTokenizer, load_tokenizer
from scantling.trainer.recipe import load_recipe
from scantling.trainer.training import minimal_pairs
from scantling.trainer.training.lm_harness import _set_document_start, evaluate_tasks
from scantling.trainer.training.minimal_pairs import evaluate_pairs, log_probabilities, prefers_good, tally
from scantling.trainer.training.run_dir import RunDir
from scantling.trainer.training.trained_run import load_run
from tests.runs import tiny_recipe
from tests.templates import IDS, made_tokenizer


class Bigrams(nn.Module):
    """Model that predicts each token from the previous one, by a table."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        text = SimpleNamespace(vocab_size=len(table), max_position_embeddings=6)
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def test_log_probabilities_of_a_known_model() -> None:
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    known = table.double().log_softmax(1).numpy()
    model = Bigrams(table).train()
    sentences = [np.array(ids) for ids in ([1, 2, 3], [4], [3, 3], [2])]
    expected = [known[0, 1] + known[1, 2] + known[2, 3], known[0, 4], known[0, 3] + known[3, 3], known[0, 2]]
    assert log_probabilities(model, sentences, prefix=[0]) == pytest.approx(expected, rel=1e-6)
    expected = [known[1, 2] + known[2, 3], 0.0, known[3, 3], 0.0]
    assert log_probabilities(model, sentences, prefix=[]) == pytest.approx(expected, rel=1e-6)
    assert model.training
    with pytest.raises(UserError, match="a sentence of 7 tokens is longer than the model's context of 6"):
        log_probabilities(model, [np.arange(7) % 5], prefix=[0])
    log_probabilities(model, [np.arange(6) % 5], prefix=[0])


def test_batches_do_not_change_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences of many lengths in one batch score as they do one by one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes))
    source = np.random.default_rng(0)
    sentences = [source.integers(0, 40, size) for size in source.integers(1, 30, 50)]
    together = log_probabilities(model, sentences, prefix=[3])
    one_by_one = [float(log_probabilities(model, [sentence], prefix=[3])[0]) for sentence in sentences]
    assert together == pytest.approx(one_by_one, rel=1e-5)  # fp32 sums in another order
    monkeypatch.setattr(minimal_pairs, "BATCH_TOKENS", 64)
    assert log_probabilities(model, sentences, prefix=[3]) == pytest.approx(one_by_one, rel=1e-5)


def test_sentences_of_other_lengths_do_not_change_scores() -> None:
    """Also if one scale covers all activations, keys or values of a batch."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes))
    sc.quantize_training(model, activations="int4", kv_cache="int4")
    source = np.random.default_rng(0)
    short, long = ([source.integers(0, 40, size) for _ in range(8)] for size in (5, 9))
    both = log_probabilities(model, [*short, *long], prefix=[3])
    apart = np.concatenate([log_probabilities(model, each, prefix=[3]) for each in (short, long)])
    assert both == pytest.approx(apart, rel=1e-6)


def test_more_probable_sentence_is_preferred() -> None:
    table = torch.zeros(261, 261)
    table[ord("a"), ord("b")] = 3.0
    pairs = [
        MinimalPair("ab", "ba", "order", "1"),
        MinimalPair("ba", "ab", "order", "2"),
        MinimalPair("ac", "ca", "x", "3"),
    ]
    right = prefers_good(Bigrams(table), ByteTokenizer(), pairs)
    assert right.tolist() == [True, False, False], "equal sums do not count"
    figures = tally(pairs, right)
    assert (figures["correct"], figures["count"]) == (1, 3)
    assert figures["interval"] == pytest.approx([0.0615, 0.7923], abs=1e-4)  # Wilson's interval of 1 in 3
    assert figures["phenomena"]["order"]["accuracy"] == 0.5
    assert list(figures["paradigms"]) == ["1", "2", "3"]


def test_run_scores_pairs_with_its_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model trained on ordered words finds them more probable than the same letters in another order."""
    sc.train(tiny_recipe(tmp_path, optim={"lr": 0.01}, train={"steps": 40}), run_dir=tmp_path / "run")
    good = ["the quick brown fox", "seven bold vikings wait", "a lazy dog jumps over", "the bold vikings wait"]
    lines = [{"sentence_good": text, "sentence_bad": "".join(sorted(text, reverse=True))} for text in good]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    figures = evaluate_pairs(tmp_path / "run", [str(tmp_path / "pairs.jsonl")])
    assert (figures["step"], figures["correct"], figures["count"]) == (40, 4, 4)
    assert "trained on sequences" not in caplog.text
    lines[0]["sentence_bad"] = "x" * 40
    (tmp_path / "pairs.jsonl").write_text(json.dumps(lines[0]))
    evaluate_pairs(tmp_path / "run", [str(tmp_path / "pairs.jsonl")])
    assert "the longest sentence has 40 tokens; the run was trained on sequences of 32" in caplog.text
    lines[0]["sentence_bad"] = "x" * 2049
    (tmp_path / "pairs.jsonl").write_text(json.dumps(lines[0]))
    with pytest.raises(UserError, match="longer than the model's context of 2048"):
        evaluate_pairs(tmp_path / "run", [str(tmp_path / "pairs.jsonl")])


def test_runs_of_other_tasks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "a", "sentence_bad": "b"}')
    recipe = tiny_recipe(tmp_path) | {"model": {"preset": "bert-6-encoder"}}
    RunDir(tmp_path / "masked").write_recipe(load_recipe(recipe))
    with pytest.raises(UserError, match="a run of the task 'masked-lm'"):
        evaluate_pairs(tmp_path / "masked", [str(tmp_path / "pairs.jsonl")])
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    recipe = tiny_recipe(tmp_path, train={"steps": 1}) | {"data": {"bin": str(tmp_path / "ids.bin"), "seq_len": 32}}
    sc.train(recipe, run_dir=tmp_path / "ids")
    with pytest.raises(UserError, match="trained on token ids"):
        evaluate_pairs(tmp_path / "ids", [str(tmp_path / "pairs.jsonl")])


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_harness_model_computes_in_training_precision(
    compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness calls a model with autocast disabled, as its version 0.4.13 does."""
    ids = torch.arange(4, 20)[None]

    def simple_evaluate(model: Any, *, tasks: list[str], task_manager: Any) -> Any:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            generated = model.generate(ids, max_new_tokens=2, do_sample=False)
            return {"results": {"logits": model(ids).logits, "length": generated.shape[1]}}

    stub = ModuleType("lm_eval")
    vars(stub)["simple_evaluate"] = simple_evaluate
    for name, holds in (
        ("lm_eval", stub),
        ("lm_eval.models", ModuleType("")),
        ("lm_eval.models.huggingface", SimpleNamespace(HFLM=lambda *, pretrained, **_: pretrained)),
        ("lm_eval.tasks", SimpleNamespace(TaskManager=lambda: SimpleNamespace(all_tasks=["blimp"]))),
    ):
        monkeypatch.setitem(sys.modules, name, holds)
    sc.train(tiny_recipe(tmp_path, train={"steps": 2}, precision={"compute": compute}), run_dir=tmp_path / "run")
    found = evaluate_tasks(tmp_path / "run", ["blimp"])
    model = load_run(tmp_path / "run").model.eval()
    with torch.no_grad(), autocast(compute, torch.device("cpu")):
        expected = model(ids).logits
    assert found["logits"].dtype == torch.float32
    assert found["length"] == 18
    assert torch.equal(found["logits"], expected.float())


@pytest.mark.parametrize(
    ("family", "before", "settings"),
    [
        ("gpt2", [], {"add_bos_token": False, "prefix_token_id": IDS["</s>"]}),
        ("llama", [IDS["<s>"]], {"add_bos_token": True, "prefix_token_id": IDS["<s>"]}),
        ("llama-eos", [IDS["<s>"]], {"add_bos_token": True, "prefix_token_id": IDS["<s>"]}),
    ],
)
def test_harness_requests_start_like_documents(
    family: str, before: list[int], settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = made_tokenizer(tmp_path / family, family)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert _set_document_start(theirs, load_tokenizer(str(folder))) == settings
    assert theirs("ab", add_special_tokens=settings["add_bos_token"])["input_ids"] == [*before, *b"ab"]


def test_missing_harness_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'scantling\[harness\]'"):
        evaluate_tasks(tmp_path, ["blimp"])
