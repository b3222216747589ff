"""Tests of decoders as classifiers, with tokenizers that name neither cls nor sep nor padding."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import scantling as sc
from scantling.errors import UserError
from scantling.trainer.data.loader import eval_batches
from scantling.trainer.data.tokenizers import load_tokenizer
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks import get_task
from scantling.trainer.training.quantize import quantize_run
from scantling.trainer.training.trained_run import evaluate_run, export_hf, load_run
from tests.runs import TINY
from tests.templates import IDS, TEMPLATES, made_tokenizer
from tests.trainer.training.test_token_ids import SIZES

KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    "llama": {**TINY, "num_hidden_layers": 1},
    "qwen2": {**TINY, "num_hidden_layers": 1},
    "jamba": {
        **TINY,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 32,
    },
}


def rows(path: Path, *, pairs: bool) -> list[dict[str, str]]:
    found = []
    for number in range(40):
        label = ("good", "bad")[number % 2]
        text = f"a {label} text" + " of words" * (number % 5)
        found.append({"text": text, "label": label} | ({"second": f"and {number}"} if pairs else {}))
    path.write_text("\n".join(map(json.dumps, found)))
    return found


def recipe(folder: Path, kind: str, family: str, *, pairs: bool = False, **sections: Any) -> dict[str, Any]:
    rows(folder / "rows.jsonl", pairs=pairs)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": kind, **KINDS[kind], "vocab_size": 320}))
    fields = {"text": "text", "label": "label"} | ({"pair": "second"} if pairs else {})
    tokenizer = made_tokenizer(folder / "tokenizer", family)
    return {
        "model": {
            "hf": str(folder / "model"),
            "task": "classification",
            "attention": "eager" if kind == "jamba" else "sdpa",
        },
        "data": {
            "jsonl": str(folder / "rows.jsonl"),
            "fields": fields,
            "tokenizer": str(tokenizer),
            "seq_len": 64,
            "heldout": 0.25,
        },
        "optim": {"name": "adamw", "lr": 3e-3},
        "train": {"steps": 2, "batch_size": 4, "device": "cpu"},
        **sections,
    }


@torch.no_grad()
def answers(model: Any, batch: Any) -> torch.Tensor:
    return torch.as_tensor(model(**{key: value for key, value in batch.items() if key != "token_type_ids"}).logits)


@pytest.mark.parametrize("family", ["gpt2", "llama", "llama-eos", "t5"])
@pytest.mark.parametrize("kind", KINDS)
def test_decoder_from_recipe_to_transformers(kind: str, family: str, tmp_path: Path) -> None:
    pairs = family in ("llama", "t5")
    given = recipe(tmp_path, kind, family, pairs=pairs)
    planned = sc.plan(given)
    assert planned.activation_bytes is not None
    run = sc.train(given, run_dir=tmp_path / "run")
    assert planned.num_parameters == run.metrics["num_parameters"]
    metrics = evaluate_run(tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "hf")
    theirs = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.config.pad_token_id == tokenizer.pad_token_id is not None
    trained = load_run(tmp_path / "run")
    found = rows(tmp_path / "rows.jsonl", pairs=pairs)
    examples = [[row["text"] for row in found[:6]]] + ([[row["second"] for row in found[:6]]] if pairs else [])
    batch = tokenizer(*examples, padding=True, return_tensors="pt")
    together = answers(theirs, batch)
    assert torch.allclose(together, answers(trained.model.eval(), batch), atol=1e-6)
    alone = [answers(theirs, tokenizer(*each, return_tensors="pt")) for each in zip(*examples, strict=True)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5), "padding changes answers"
    assert together.std() > 1e-3
    # the held-out loss equals that of transformers on the texts
    held = trained.data.heldout
    nats = []
    for ours in eval_batches(held, trained.data.collate, 5):
        with torch.no_grad():
            nats += [float(trained.task.loss(theirs, ours).loss)]
    assert sum(nats) / len(held) == pytest.approx(metrics["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("family", TEMPLATES)
def test_texts_keep_the_ids_of_the_tokenizer(family: str, tmp_path: Path) -> None:
    found = rows(tmp_path / "rows.jsonl", pairs=True)
    tokenizer = made_tokenizer(tmp_path / "tokenizer", family)
    theirs = hf.AutoTokenizer.from_pretrained(tokenizer)
    for pairs in (False, True):
        fields = {"text": "text", "label": "label"} | ({"pair": "second"} if pairs else {})
        section = DataSection(
            jsonl=str(tmp_path / "rows.jsonl"), fields=fields, tokenizer=str(tokenizer), heldout=0, seq_len=64
        )
        data = get_task("classification").prepare(section, seed=0)
        batch = data.collate([(0, index, data.train[index]) for index in range(8)])
        for row, text in enumerate(found[:8]):
            inside = batch.inputs["attention_mask"][row].bool()
            wanted = theirs(text["text"], text["second"] if pairs else None)["input_ids"]
            assert batch.inputs["input_ids"][row][inside].tolist() == wanted
            assert (batch.inputs["input_ids"][row][~inside] == data.tokenizer.pad_id).all()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "names", "pad"),
    [
        ("gpt2", {}, "</s>"),
        ("llama", {}, "</s>"),
        ("llama-eos", {}, "<unused>"),
        ("llama", {"pad_token": "<mask>"}, "<mask>"),
        ("bert", {"pad_token": None}, "<unused>"),
        ("t5", {}, "<pad>"),
    ],
)
def test_padding_differs_from_the_last_token_of_texts(family: str, names: Any, pad: str, tmp_path: Path) -> None:
    loaded = load_tokenizer(str(made_tokenizer(tmp_path / "tokenizer", family, **names)))
    padded = loaded.with_padding()
    assert padded.pad_id == IDS[pad]
    assert padded.with_padding() is padded
    assert load_tokenizer(str(tmp_path / "tokenizer")).pad_id == (IDS[pad] if pad in ("<mask>", "<pad>") else None)
    padded.save_pretrained(tmp_path / "saved")
    saved = hf.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (saved.pad_token, saved.padding_side) == (pad, "right")


def test_left_padding_tokenizer_is_exported_with_right_padding(tmp_path: Path) -> None:
    """GPT-2 counts positions from the first token, so left padding would shift them."""
    made = made_tokenizer(tmp_path / "t", "gpt2", pad_token="<pad>")
    config = json.loads((made / "tokenizer_config.json").read_text()) | {"padding_side": "left"}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    assert hf.AutoTokenizer.from_pretrained(made).padding_side == "left"
    loaded = load_tokenizer(str(made))
    loaded.with_padding().save_pretrained(tmp_path / "saved")
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "saved").padding_side == "right"


@pytest.mark.parametrize("tensor", [None, {"rank": 4}])
def test_pretrained_decoder_in_every_export(tensor: Any, tmp_path: Path) -> None:
    config = hf.LlamaConfig(**KINDS["llama"], vocab_size=320, bos_token_id=IDS["<s>"], eos_token_id=[7, IDS["</s>"]])
    torch.manual_seed(0)
    given = recipe(tmp_path, "llama", "llama")
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    if tensor:
        given["tensor"] = tensor
    sc.train(given, run_dir=tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "hf")
    export_hf(tmp_path / "run", tmp_path / "dense", dense=True)
    quantize_run(tmp_path / "run", "int8", tmp_path / "packed")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "packed")
    batch = tokenizer(["short", "a longer text than that"], padding=True, return_tensors="pt")
    wanted = answers(load_run(tmp_path / "run").model.eval(), batch)
    for name, tolerance in (("hf", 1e-6), ("dense", 1e-5), ("packed", 0.05)):
        model = sc.load(tmp_path / name)
        assert model.config.pad_token_id == IDS["</s>"] == tokenizer.pad_token_id
        assert model.config.eos_token_id == [7, IDS["</s>"]]
        assert torch.allclose(answers(model, batch), wanted, atol=tolerance)


def xlnet_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, processors

    made = made_tokenizer(folder, "bert")
    backend = Tokenizer.from_file(str(made / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="$A [SEP] [CLS]:2", pair="$A [SEP] $B:1 [SEP]:1 [CLS]:2", special_tokens=list(IDS.items())
    )
    backend.save(str(made / "tokenizer.json"))
    return made


def test_texts_that_end_in_cls_are_padded_on_the_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """XLNet's classifier reads the last position, so padding goes to the left."""
    monkeypatch.setitem(KINDS, "xlnet", {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32})
    given = recipe(tmp_path, "xlnet", "bert")
    given["model"]["attention"] = "eager"
    with caplog.at_level(logging.WARNING):
        sc.train({**given, "train": {**given["train"], "steps": 1}}, run_dir=tmp_path / "right")
    assert "padding changes the answers of XLNetForSequenceClassification" in caplog.text
    caplog.clear()
    xlnet_tokenizer(tmp_path / "tokenizer")
    with caplog.at_level(logging.WARNING):
        sc.train({**given, "train": {**given["train"], "steps": 1}}, run_dir=tmp_path / "left")
    assert "padding" not in caplog.text
    export_hf(tmp_path / "left", tmp_path / "hf")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.padding_side == "left"
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    batch = tokenizer(["a", "a longer text"], padding=True, return_tensors="pt")
    assert torch.allclose(answers(model, batch)[:1], answers(model, tokenizer(["a"], return_tensors="pt")), atol=1e-5)


def test_encoder_decoder_needs_an_end_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "bart", SIZES["bart"])
    given = recipe(tmp_path, "bart", "llama")
    with pytest.raises(UserError, match=r"puts no end-of-text token after a text, and BartForSequenceClassification"):
        sc.train(given, run_dir=tmp_path / "run")
    made_tokenizer(tmp_path / "tokenizer", "bart")
    sc.train(given, run_dir=tmp_path / "run")
    assert export_hf(tmp_path / "run", tmp_path / "hf") < 1e-5


def test_empty_text_is_padding(tmp_path: Path) -> None:
    from scantling.trainer.tasks.classification import LabeledText, PaddedTexts

    tokenizer = load_tokenizer(str(made_tokenizer(tmp_path / "t", "gpt2"))).with_padding()
    empty = LabeledText(np.array([], dtype=np.int64), None, 0)
    batch = PaddedTexts(tokenizer, 16)([(0, 0, empty)])
    assert batch.inputs["input_ids"].tolist() == [[IDS["</s>"]]]
    assert batch.inputs["attention_mask"].tolist() == [[1]]


def test_other_padding_side_is_refused(tmp_path: Path) -> None:
    given = recipe(tmp_path, "llama", "llama")
    given["model"]["overrides"] = {"pad_token_id": 0}
    with pytest.raises(UserError, match=r"overrides\.pad_token_id: 0 is not the token that pads texts, which is"):
        sc.train(given, run_dir=tmp_path / "run")
