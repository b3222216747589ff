"""Tests of the report of `tensorize` on sizes, errors and trained weights; `from_dense` does not grow unasked."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tensor.families import FAMILIES, VOCAB, batch, make_model
from torch import nn

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.report import LayerReport
from scantling.trainer.training.trained_run import export_hf
from tests.runs import tiny_recipe
from tests.texts import english_like

DISCARDS = "discards the trained weights"


def test_tensorize_warns_of_discarded_pretrained_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model("llama").save_pretrained(tmp_path)
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path)
    sc.tensorize(copy.deepcopy(loaded), 4, init="svd")
    assert DISCARDS not in caplog.text
    sc.tensorize(loaded, 4)
    assert caplog.text.count(DISCARDS) == 1
    assert "use init='svd'" in caplog.text


@pytest.mark.parametrize("format", ["cola", "tt-silu"])
def test_warning_does_not_suggest_svd_for_activation_formats(
    format: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    sc.tensorize(hf.AutoModelForCausalLM.from_pretrained(tmp_path), 4, format=format)
    assert DISCARDS in caplog.text
    assert "use init='svd'" not in caplog.text


def test_tensorize_warns_for_base_model_and_new_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model("bert").save_pretrained(tmp_path)
    for auto in (hf.AutoModel, hf.AutoModelForSequenceClassification):
        caplog.clear()
        sc.tensorize(auto.from_pretrained(tmp_path), 4)
        assert DISCARDS in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_tensorize_does_not_warn_for_new_models(family: str, caplog: pytest.LogCaptureFixture) -> None:
    sc.tensorize(make_model(family), 4)
    assert DISCARDS not in caplog.text


def test_tensorize_does_not_warn_for_new_model_of_pretrained_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    config = hf.AutoConfig.from_pretrained(tmp_path)
    sc.tensorize(hf.AutoModelForCausalLM.from_config(config), 4)
    assert DISCARDS not in caplog.text


@pytest.mark.parametrize("way", ["trained here", "state dict", "copy"])
def test_tensorize_recognizes_trained_weights(way: str, caplog: pytest.LogCaptureFixture) -> None:
    stream = torch.tensor(list(english_like(20_000).encode("ascii"))) % VOCAB
    model = make_model("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(50):
        ids = torch.stack([stream[at : at + 24] for at in torch.randint(len(stream) - 24, (8,)).tolist()])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if way == "state dict":
        state = model.state_dict()
        model = make_model("llama", seed=1)
        model.load_state_dict(state)
    elif way == "copy":
        model = copy.deepcopy(model)
    sc.tensorize(model, 4)
    assert DISCARDS in caplog.text


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "llama-tied"])
def test_report_has_size_and_error_of_each_layer(family: str) -> None:
    model = make_model(family)
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = sum(parameter.numel() for parameter in model.parameters())
    report: list[LayerReport] = []
    sc.tensorize(model, 8, init="svd", report=report)
    saved = sum(each.dense_parameters - each.tt_parameters for each in report)
    assert before - sum(parameter.numel() for parameter in model.parameters()) == saved > 0
    back = sc.densify(model).state_dict()
    for each in report:
        names = [name for name in dense if name.startswith(f"{each.name}.") and dense[name].ndim > 1]
        lost = sum(float((dense[name] - back[name]).square().sum()) for name in names) ** 0.5
        norm = sum(float(dense[name].square().sum()) for name in names) ** 0.5
        assert each.weight_error == pytest.approx(lost / norm, rel=1e-3, abs=1e-5)
    assert any((each.weight_error or 0) > 0.1 for each in report)


def test_run_warns_once_and_export_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=320, **shape)).save_pretrained(tmp_path / "model")
    recipe = tiny_recipe(tmp_path, tensor={"rank": 4}, train={"steps": 1})
    sc.train(recipe | {"model": {"hf": str(tmp_path / "model")}}, run_dir=tmp_path / "run")
    assert caplog.text.count(DISCARDS) == 1
    export_hf(tmp_path / "run", tmp_path / "out")
    assert caplog.text.count(DISCARDS) == 1


def test_warning_names_formats_that_keep_weights(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    sc.tensorize(hf.AutoModelForCausalLM.from_pretrained(tmp_path), 4, format="cola")
    assert "To keep them, use format='tt' or 'low-rank' with init='svd'" in caplog.text


def test_report_of_random_init_has_no_errors() -> None:
    report: list[LayerReport] = []
    sc.tensorize(make_model("llama"), 4, report=report)
    assert report
    assert all(each.weight_error is None and each.tt_parameters < each.dense_parameters for each in report)


@pytest.mark.parametrize("report", [True, {}, "errors.json"], ids=str)
def test_tensorize_refuses_report_that_is_no_list(report: Any) -> None:
    model = make_model("llama")
    with pytest.raises(UserError, match=r"report=.* must be a list"):
        sc.tensorize(model, 4, report=report)
    model(**batch())


def test_tensorize_warns_of_large_svd_errors(caplog: pytest.LogCaptureFixture) -> None:
    report: list[LayerReport] = []
    sc.tensorize(make_model("llama"), 4, init="svd", report=report)
    (record,) = (record for record in caplog.records if "init='svd' changes" in record.message)
    worst = max(report, key=lambda each: each.weight_error or 0)
    assert record.levelname == "WARNING"
    assert f"{100 * (worst.weight_error or 0):.1f} % of their norm" in record.message
    caplog.clear()
    sc.tensorize(make_model("llama"), 64, init="svd", filter_fn=lambda name, module: True)
    assert not any("init='svd' changes" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        (sc.TTLinear, nn.Linear(64, 96)),
        (sc.TTMEmbedding, nn.Embedding(64, 96)),
        (sc.TTMEmbeddingBag, nn.EmbeddingBag(64, 96)),
    ],
)
def test_from_dense_refuses_error_that_needs_more_parameters(
    kind: Any, layer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match=r"from_dense: .* times as many as the dense weight.*allow_larger=True"):
        kind.from_dense(layer, error=0.05)
    larger = kind.from_dense(layer, error=0.05, allow_larger=True)
    assert sum(core.numel() for core in larger.cores) > layer.weight.numel()
    assert not caplog.records
    kind.from_dense(layer, rank=1000)
    assert "times as many as the dense weight" in caplog.text
    assert sum(core.numel() for core in kind.from_dense(layer, error=0.95).cores) < layer.weight.numel()
