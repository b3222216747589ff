"""Tests of decoders that read images or sound in addition to text: their task, training on text, and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import scantling as sc
from scantling.errors import UserError
from scantling.trainer.models.build import build_model, default_task
from scantling.trainer.recipe.schema import ModelSection
from scantling.trainer.tasks import get_task
from scantling.trainer.training.trained_run import export_hf
from tests.runs import tiny_recipe

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
QWEN_ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
CONFIGS: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3",
        "text_config": {**TEXT, "layer_types": ["full_attention"]},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 300,
    },
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
        "image_token_index": 300,
    },
    "Qwen2VLForConditionalGeneration": {
        "model_type": "qwen2_vl",
        "text_config": {**TEXT, "rope_parameters": QWEN_ROPE},
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4},
        **{f"{name}_token_id": 300 + number for number, name in enumerate(("image", "video", "vision_start"))},
    },
    "Llama4ForConditionalGeneration": {  # only its text model is listed among causal language models
        "model_type": "llama4",
        "text_config": {**TEXT, "num_local_experts": 2, "intermediate_size_mlp": 64},
        "vision_config": {**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        "image_token_index": 300,
    },
    "Qwen2AudioForConditionalGeneration": {
        "model_type": "qwen2_audio",
        "text_config": {**TEXT, "model_type": "qwen2"},
        "audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64},
        "audio_token_index": 300,
    },
}


def write_config(folder: Path, architecture: str, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    content = {**CONFIGS[architecture], "architectures": [architecture], **changes}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("architecture", CONFIGS)
def test_multimodal_decoders_train_on_text_and_export_whole(architecture: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", architecture)
    assert default_task(ModelSection(hf=str(folder))) == "causal-lm"
    recipe = tiny_recipe(tmp_path, train={"steps": 2}) | {"model": {"hf": str(folder)}}
    measured = sc.train(recipe, run_dir=tmp_path / "run").metrics
    planned = json.loads((tmp_path / "run" / "plan.json").read_text())
    for key in ("num_trainable", "gradient_bytes", "optimizer_state_bytes"):
        assert planned[key] == measured.get(key, planned[key]), key
    assert planned["num_trainable"] < planned["num_parameters"], "text does not reach what reads images or sound"
    export_hf(tmp_path / "run", tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["architectures"] == [architecture]
    assert default_task(ModelSection(hf=str(tmp_path / "out"))) == "causal-lm"
    model = sc.load(tmp_path / "out").eval()
    assert type(model) is getattr(hf, architecture)
    ids = torch.arange(100, 120)[None]
    with torch.no_grad():
        assert model(input_ids=ids).logits.shape == (1, 20, 320)


def test_multimodal_configuration_without_architecture_is_a_decoder(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "Gemma3ForConditionalGeneration", architectures=None)
    assert default_task(ModelSection(hf=str(folder))) == "causal-lm"
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match=r"model\.task: .* names no training task"):
        default_task(ModelSection(hf=str(folder)))


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("t5", "T5ForConditionalGeneration"),
        ("bart", "BartForConditionalGeneration"),
        ("unknown", "AForConditionalGeneration"),
    ],
)
def test_encoder_decoders_stay_seq2seq(model_type: str, architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [architecture]}))
    assert default_task(ModelSection(hf=str(tmp_path))) == "seq2seq"


def test_text_config_is_checked_and_overridden_by_key(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "LlavaForConditionalGeneration")

    def make(overrides: dict[str, Any], vocab_size: int = 261, seq_len: int = 64) -> Any:
        section = ModelSection(hf=str(folder), overrides=overrides)
        task = get_task("causal-lm")
        return build_model(
            section, task, vocab_size=vocab_size, seq_len=seq_len, config_overrides={}, seed=0, device="meta"
        )

    with pytest.raises(UserError, match=r"400 ids.*only 320; set model\.overrides\.text_config\.vocab_size"):
        make({}, vocab_size=400)
    with pytest.raises(UserError, match=r"64 positions.*model\.overrides\.text_config\.max_position_embeddings"):
        make({}, seq_len=128)
    model = make({"text_config": {"vocab_size": 448}}, vocab_size=400)
    assert model.get_input_embeddings().weight.shape == (448, 32)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        (
            "IdeficsForVisionText2Text",
            {
                "model_type": "idefics",
                **{key: TEXT[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")},
                "num_attention_heads": 2,
                "additional_vocab_size": 0,
                "cross_layer_interval": 1,
                "vision_config": {**VISION, "embed_dim": 32},
            },
        ),
        (
            "BlipForConditionalGeneration",
            {
                "model_type": "blip",
                "text_config": {**TEXT, "encoder_hidden_size": 32, "is_decoder": True},
                "vision_config": VISION,
            },
        ),
    ],
)
def test_models_that_need_images_are_refused(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    section = ModelSection(hf=str(tmp_path), attention="eager")
    assert default_task(section) == "causal-lm"
    with pytest.raises(UserError, match=rf"{architecture} cannot be trained on text alone"):
        build_model(section, get_task("causal-lm"), vocab_size=261, seq_len=16, config_overrides={}, seed=0)
