"""Tests that exported folders hold the settings of the model, not those of its training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import scantling as sc
from scantling.trainer.models.checkpointing import checkpoint_activations
from scantling.trainer.tasks.base import without_cache
from scantling.trainer.training.quantize import quantize_run
from scantling.trainer.training.trained_run import export_hf
from tests.runs import TINY, tiny_recipe

SIZES = {**TINY, "num_hidden_layers": 1, "vocab_size": 512, "max_position_embeddings": 64}
OF_THE_TOKENIZER = {"bos_token_id", "eos_token_id", "pad_token_id"}


def models() -> dict[str, Any]:
    gpt2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 512, "n_positions": 64}
    opt = {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 32,
    }
    mamba = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 512}
    return {
        "llama": hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, attention_dropout=0.1)),
        "gpt2": hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "opt": hf.OPTForCausalLM(hf.OPTConfig(**opt, vocab_size=512, max_position_embeddings=64)),
        "mamba": hf.MambaForCausalLM(hf.MambaConfig(**mamba)),
    }


def read(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / name).read_text()))


def exports(run_dir: Path, out: Path) -> list[Path]:
    """Export a run in every form."""
    export_hf(run_dir, out / "export")
    export_hf(run_dir, out / "dense", dense=True)
    quantize_run(run_dir, "int8", out / "packed")
    quantize_run(run_dir, "int8", out / "dequantized", dequantized=True)
    return [out / name for name in ("export", "dense", "packed", "dequantized")]


@pytest.mark.parametrize("tensor", [None, {"rank": 4}], ids=["dense", "tt"])
def test_exports_generate_with_a_cache(tensor: dict[str, Any] | None, tmp_path: Path) -> None:
    sections = {"tensor": tensor} if tensor else {}
    train = {"steps": 1, "activation_checkpointing": True}
    run = sc.train(tiny_recipe(tmp_path, **sections, train=train), run_dir=tmp_path / "run")
    for folder in exports(run.run_dir, tmp_path):
        assert read(folder, "config.json")["use_cache"] is True
        assert read(folder, "generation_config.json").get("use_cache", True) is True
        model = sc.load(folder)
        assert model.generation_config.use_cache is not False
        assert not model.is_gradient_checkpointing
        ids = torch.arange(4)[None]
        found = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True, do_sample=False)
        assert found.past_key_values is not None


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mamba"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_exports_keep_the_settings_of_a_pretrained_folder(family: str, use_cache: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models()[family]
    model.config.use_cache = use_cache
    model.generation_config.update(temperature=0.7, top_k=20, do_sample=True, max_new_tokens=9, use_cache=use_cache)
    model.save_pretrained(tmp_path / "pretrained")
    attention = "eager" if family == "mamba" else "sdpa"
    recipe = tiny_recipe(tmp_path, data={"seq_len": 16}, train={"steps": 1})
    recipe["model"] = {"hf": str(tmp_path / "pretrained"), "attention": attention}
    run = sc.train(recipe, run_dir=tmp_path / "run")
    export_hf(run.run_dir, tmp_path / "export")
    quantize_run(run.run_dir, "int8", tmp_path / "packed")
    for folder in (tmp_path / "export", tmp_path / "packed"):
        for name in ("config.json", "generation_config.json"):
            before, after = (read(each, name) for each in (tmp_path / "pretrained", folder))
            changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
            assert changed <= OF_THE_TOKENIZER, f"{folder.name}/{name}"
        assert sc.load(folder).generation_config.temperature == 0.7


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_passes_fill_no_cache(checkpointed: bool) -> None:
    classifier = hf.LlamaForSequenceClassification(hf.LlamaConfig(**SIZES, pad_token_id=0, num_labels=2)).train()
    if checkpointed:
        checkpoint_activations(classifier)
    ids = torch.arange(1, 9)[None]
    assert classifier(ids, **without_cache(classifier)).past_key_values is None
    encoder = hf.ViTForImageClassification(hf.ViTConfig(**TINY, image_size=8, patch_size=4))
    assert without_cache(encoder) == {}
