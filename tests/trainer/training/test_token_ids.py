"""Tests of special-token ids in all exported files: tokenizer, configuration and generation configuration agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import scantling as sc
from scantling.trainer.data.tokenizers import ROLES, load_tokenizer
from scantling.trainer.models.build import build_model
from scantling.trainer.models.token_ids import config_ids, set_text_ids
from scantling.trainer.recipe.schema import ModelSection
from scantling.trainer.tasks import get_task
from scantling.trainer.training.quantize import quantize_run
from scantling.trainer.training.trained_run import export_hf
from tests.runs import TINY
from tests.templates import IDS, TEMPLATES, made_tokenizer

SIZES = {
    "llama": {**TINY, "num_hidden_layers": 1},
    "qwen2": {**TINY, "num_hidden_layers": 1},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 1},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 32,
    },
    "t5": {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_heads": 2, "num_layers": 1},
    "bart": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    },
    "bert": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    "roberta": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    "modernbert": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
}
NAMED = ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token", "mask_token")


def recipe(folder: Path, model_path: str, tokenizer: Path, **sections: Any) -> dict[str, Any]:
    path = folder / "texts.jsonl"
    rows = [{"text": f"document {number} of many", "answer": f"{number}"} for number in range(30)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return {
        "model": {"hf": model_path, **sections.pop("model", {})},
        "data": {"jsonl": str(path), "tokenizer": str(tokenizer), "seq_len": 24, **sections.pop("data", {})},
        "optim": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 1, "batch_size": 2, "device": "cpu"},
        **sections,
    }


def configuration(folder: Path, kind: str, **keys: Any) -> str:
    folder.mkdir()
    sizes = {**SIZES[kind], "vocab_size": 320, **keys}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
    return str(folder)


def exported(run_dir: Path, out: Path, *, packed: bool = True) -> list[Path]:
    export_hf(run_dir, out / "export")
    export_hf(run_dir, out / "dense", dense=True)
    if packed:
        quantize_run(run_dir, "int8", out / "packed")
        quantize_run(run_dir, "int8", out / "dequantized", dequantized=True)
    return [path for name in ("export", "dense", "packed", "dequantized") if (path := out / name).exists()]


def check_agreement(folder: Path, *, known: tuple[str, ...] = ()) -> None:
    """Check that each id in the model's files is the tokenizer's, except for `known` ids of the weights."""
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    loaded = hf.AutoConfig.from_pretrained(folder)
    for name in NAMED:
        id_ = getattr(tokenizer, f"{name}_id")
        for where, ids in (("config.json", config), ("generation_config.json", generation)):
            given = ids.get(f"{name}_id")
            assert given is None or name in known or id_ in (given if isinstance(given, list) else [given]), (
                f"{where}: {name}"
            )
        if id_ is not None and name in ("bos_token", "eos_token", "pad_token"):
            assert getattr(loaded, f"{name}_id") is not None, name
    for role in ("bos", "eos"):
        for ids in (config, generation):
            assert ids.get(f"forced_{role}_token_id") in (None, getattr(tokenizer, f"{role}_token_id"))
    if generation and loaded.is_encoder_decoder:
        assert generation["decoder_start_token_id"] == config["decoder_start_token_id"]


@pytest.mark.parametrize(
    ("kind", "family"),
    [*(("llama", family) for family in TEMPLATES), ("gpt2", "gpt2"), ("gpt2", "t5"), ("mamba", "gpt2")],
)
def test_causal_models_from_random_weights(kind: str, family: str, tmp_path: Path) -> None:
    tokenizer = made_tokenizer(tmp_path / "tokenizer", family)
    given = recipe(tmp_path, configuration(tmp_path / "model", kind), tokenizer, model={"task": "causal-lm"})
    if kind == "mamba":
        given["model"]["attention"] = "eager"
    run = sc.train(given, run_dir=tmp_path / "run")
    for folder in exported(run.run_dir, tmp_path, packed=kind == "llama"):
        check_agreement(folder)


def test_own_tokenizers_and_presets_and_tt(tmp_path: Path) -> None:
    for number, tokenizer in enumerate(("bytes", {"bpe": 262})):
        given = recipe(tmp_path, "", Path("bytes"), tensor={"rank": 2})
        given["model"] = {"preset": "llama-1m", "overrides": {**TINY, "num_hidden_layers": 1}}
        given["data"]["tokenizer"] = tokenizer
        run = sc.train(given, run_dir=tmp_path / f"run-{number}")
        out = tmp_path / f"out-{number}"
        out.mkdir()
        for folder in exported(run.run_dir, out):
            check_agreement(folder)
            assert json.loads((folder / "config.json").read_text())["bos_token_id"] is not None


@pytest.mark.parametrize(("kind", "family"), [("bert", "bert"), ("roberta", "bart"), ("modernbert", "bert")])
def test_masked_models(kind: str, family: str, tmp_path: Path) -> None:
    tokenizer = made_tokenizer(tmp_path / "tokenizer", family)
    model = configuration(tmp_path / "model", kind)
    for name, given in (("folder", tokenizer), ("bytes", "bytes")):
        run = sc.train(
            recipe(tmp_path, model, Path(given), model={"task": "masked-lm"}), run_dir=tmp_path / f"run-{name}"
        )
        (out := tmp_path / name).mkdir()
        for folder in exported(run.run_dir, out):
            check_agreement(folder)


@pytest.mark.parametrize(
    ("kind", "family", "pairs"),
    [("t5", "t5", False), ("bart", "bart", False), ("bart", "t5", True), ("t5", "t5", True)],
)
def test_sequence_to_sequence_models(kind: str, family: str, pairs: bool, tmp_path: Path) -> None:
    tokenizer = made_tokenizer(tmp_path / "tokenizer", family)
    fields = {"fields": {"text": "text", "pair": "answer"}} if pairs else {}
    model = configuration(tmp_path / "model", kind, vocab_size=384)
    given = recipe(tmp_path, model, tokenizer, model={"task": "seq2seq"}, data=fields)
    run = sc.train(given, run_dir=tmp_path / "run")
    for folder in exported(run.run_dir, tmp_path):
        check_agreement(folder)


def pretrained(folder: Path, kind: str = "llama", *, generation: dict[str, Any] | None = None, **ids: Any) -> str:
    torch.manual_seed(0)
    config = hf.CONFIG_MAPPING[kind](**SIZES[kind], vocab_size=320, **ids)
    model = hf.AutoModelForCausalLM.from_config(config)
    if generation is not None:
        model.generation_config.update(**generation)
    model.save_pretrained(folder)
    return str(folder)


def read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return dict(json.loads((folder / name).read_text()))


def test_pretrained_folder_keeps_its_ids(tmp_path: Path) -> None:
    bos, eos, other = IDS["<s>"], IDS["</s>"], IDS["<mask>"]
    tokenizer = made_tokenizer(tmp_path / "tokenizer", "llama")
    generation = {"eos_token_id": [eos, other], "pad_token_id": 5}
    model = pretrained(tmp_path / "model", bos_token_id=bos, eos_token_id=[other, eos], generation=generation)
    run = sc.train(recipe(tmp_path, model, tokenizer), run_dir=tmp_path / "run")
    for folder in exported(run.run_dir, tmp_path):
        check_agreement(folder, known=("pad_token",))
        config, found = read(folder), read(folder, "generation_config.json")
        assert (config["bos_token_id"], config["eos_token_id"]) == (bos, [other, eos])
        assert (found["bos_token_id"], found["eos_token_id"], found["pad_token_id"]) == (bos, [eos, other], 5)
        assert sc.load(folder).generation_config.eos_token_id == [eos, other]


def test_id_unknown_to_the_tokenizer_is_kept(tmp_path: Path) -> None:
    """Qwen2's configuration has a beginning token that its tokenizer lacks."""
    eos = IDS["</s>"]
    tokenizer = made_tokenizer(tmp_path / "tokenizer", "gpt2")
    model = pretrained(tmp_path / "model", "qwen2", bos_token_id=eos, eos_token_id=eos)
    run = sc.train(recipe(tmp_path, model, tokenizer), run_dir=tmp_path / "run")
    export_hf(run.run_dir, tmp_path / "export")
    assert read(tmp_path / "export")["bos_token_id"] == eos
    fresh = recipe(tmp_path, model, tokenizer, model={"pretrained": False})
    run = sc.train(fresh, run_dir=tmp_path / "fresh")
    export_hf(run.run_dir, tmp_path / "fresh-export")
    assert read(tmp_path / "fresh-export").get("bos_token_id") is None


def test_another_tokenizer_overrides_ids(tmp_path: Path) -> None:
    """It also overrides several end tokens of a folder, which are kept after its own."""
    tokenizer = made_tokenizer(tmp_path / "tokenizer", "llama")
    model = pretrained(tmp_path / "model", bos_token_id=3, eos_token_id=4, generation={"eos_token_id": [4, 6]})
    run = sc.train(recipe(tmp_path, model, tokenizer), run_dir=tmp_path / "run")
    export_hf(run.run_dir, tmp_path / "export")
    check_agreement(tmp_path / "export")
    assert read(tmp_path / "export")["eos_token_id"] == IDS["</s>"]
    assert read(tmp_path / "export", "generation_config.json")["eos_token_id"] == [IDS["</s>"], 4, 6]


def test_recipe_can_set_ids(tmp_path: Path) -> None:
    tokenizer = made_tokenizer(tmp_path / "tokenizer", "llama")
    given = recipe(tmp_path, configuration(tmp_path / "model", "llama"), tokenizer)
    given["model"] |= {"task": "causal-lm", "overrides": {"eos_token_id": 9}}
    run = sc.train(given, run_dir=tmp_path / "run")
    export_hf(run.run_dir, tmp_path / "export")
    assert read(tmp_path / "export")["eos_token_id"] == 9
    assert read(tmp_path / "export", "generation_config.json")["eos_token_id"] == 9


def test_text_model_in_a_multimodal_config(tmp_path: Path) -> None:
    tokenizer = made_tokenizer(tmp_path / "tokenizer", "llama")
    text = {**TINY, "num_hidden_layers": 1, "vocab_size": 320, "head_dim": 16, "model_type": "gemma3_text"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "model").mkdir()
    config = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {**vision, "image_size": 16, "patch_size": 8},
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"mm_tokens_per_image": 4}))
    section = ModelSection(hf=str(tmp_path / "model"), task="causal-lm")
    ids = {f"{role}_token_id": getattr(load_tokenizer(str(tokenizer)), f"{role}_id") for role in ROLES}
    model = build_model(
        section, get_task("causal-lm"), vocab_size=320, seq_len=16, config_overrides=ids, seed=0, device="meta"
    )
    text = model.config.get_text_config()
    assert (text.bos_token_id, text.eos_token_id, text.pad_token_id) == (IDS["<s>"], IDS["</s>"], None)
    assert model.generation_config.bos_token_id == IDS["<s>"]
    assert model.generation_config.eos_token_id == IDS["</s>"]


@pytest.mark.parametrize("kind", ["modernbert", "roberta"])
def test_plan_uses_the_ids_of_the_run(kind: str, tmp_path: Path) -> None:
    """ModernBERT's default padding id, 50283, lies beyond a small vocabulary."""
    tokenizer = made_tokenizer(tmp_path / "tokenizer", "bert")
    model = configuration(tmp_path / "model", kind)
    given = recipe(tmp_path, model, tokenizer, model={"task": "masked-lm"})
    assert sc.plan(given).activation_bytes is not None
    given["data"]["tokenizer"] = {"bpe": 300}
    assert sc.plan(given).activation_bytes is not None


def test_required_ids_keep_their_defaults(tmp_path: Path) -> None:
    """EuroBERT does not accept None as its mask id."""
    plain = hf.EuroBertConfig()
    ids = config_ids({"mask_token_id": None, "eos_token_id": 7}, {}, plain, pretrained=False)
    assert ids == {"eos_token_id": 7}
    config = hf.MllamaConfig()
    set_text_ids(config, {"bos_token_id": None, "eos_token_id": 7}, pretrained=False)
    assert config.get_text_config().eos_token_id == 7
    assert config.get_text_config().bos_token_id is not None
