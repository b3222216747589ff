"""Tests of models whose parameters are read or drawn one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from scantling.errors import UserError
from scantling.saved_models import check_weights
from scantling.trainer.models.values import MetaModel, Read, drawn_values, parameters_on_meta, stored_values

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 640,
}
T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 640}
VIT = {**SIZES, "image_size": 32, "patch_size": 8}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": SIZES,
    "BertForMaskedLM": SIZES,
    "BertForSequenceClassification": {**SIZES, "num_labels": 4},
    # two modules initialize the same matrix
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 640},
    "MixtralForCausalLM": {**SIZES, "num_local_experts": 4},
    # the scale of the embedding is a buffer
    "Gemma3ForCausalLM": {**SIZES, "head_dim": 16, "num_key_value_heads": 2},
    "T5ForConditionalGeneration": T5,
    "ViTForImageClassification": VIT,
    # batch norms have stored buffers
    "ResNetForImageClassification": RESNET,
    "MambaForCausalLM": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 640},
}
CONVERTED = ("MixtralForCausalLM", "ViTForImageClassification")
"""Models whose weights transformers stores under other names."""


def build(name: str, *, on_meta: bool, **keys: Any) -> Any:
    model_class = getattr(transformers, name)
    config = model_class.config_class(**MODELS[name], **keys)
    torch.manual_seed(0)
    if not on_meta:
        return model_class(config)
    with parameters_on_meta():
        return model_class(config)


def fill(model: nn.Module, read: Read) -> None:
    MetaModel(model, read).fill([*model.buffers(), *model.parameters()])


@pytest.mark.parametrize("name", MODELS)
def test_drawn_values_have_the_distribution_of_the_whole_model(name: str) -> None:
    whole, parts = build(name, on_meta=False), build(name, on_meta=True)
    fill(parts, drawn_values(parts, 1))
    assert [each for each, tensor in parts.state_dict().items() if tensor.is_meta] == []
    for (key, one), (other_key, other) in zip(whole.named_buffers(), parts.named_buffers(), strict=True):
        assert (key, one.tolist()) == (other_key, other.tolist())
    for (key, one), (other_key, other) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        assert key == other_key
        spread = float(one.detach().std(correction=0))
        # the spread of n normal values is right to 1 / sqrt(2 n)
        assert float(other.detach().std(correction=0)) == pytest.approx(spread, rel=8 / (2 * one.numel()) ** 0.5), key
        assert float(other.detach().mean()) == pytest.approx(
            float(one.detach().mean()), abs=8 * spread / one.numel() ** 0.5 + 1e-7
        ), key


def test_drawn_values_depend_on_seed_and_name_alone() -> None:
    one, other, third = (build("LlamaForCausalLM", on_meta=True) for _ in range(3))
    state = torch.random.get_rng_state()
    fill(one, drawn_values(one, 1))
    MetaModel(other, drawn_values(other, 1)).fill(reversed([*other.parameters()]))
    fill(third, drawn_values(third, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    for (name, value), drawn, different in zip(
        one.named_parameters(), other.parameters(), third.parameters(), strict=True
    ):
        assert torch.equal(value, drawn), name
        assert value.ndim == 1 or not torch.equal(value, different), name
    first, second = (one.model.layers[index].mlp.up_proj.weight for index in range(2))
    assert not torch.equal(first, second)


def test_parameter_without_initialization_is_refused() -> None:
    model = build("LlamaForCausalLM", on_meta=True)
    model.model.layers[1].gate = nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(UserError, match=r"model\.layers\.1\.gate of LlamaForCausalLM has no initialization"):
        fill(model, drawn_values(model, 0))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_size", ["5GB", "50KB"])
def test_stored_values_are_those_of_the_files(name: str, shard_size: str, tmp_path: Path) -> None:
    whole = build(name, on_meta=False)
    for buffer in whole.buffers():  # such as running means
        if buffer.is_floating_point():
            buffer.add_(0.5)
    whole.save_pretrained(tmp_path, max_shard_size=shard_size)
    weights, parts = check_weights(tmp_path), build(name, on_meta=True)
    assert weights is not None
    read = stored_values(parts, weights)
    assert (read is None) == (name in CONVERTED)
    if read is None:
        return
    fill(parts, read)
    state = parts.state_dict()
    assert state.keys() == whole.state_dict().keys()
    assert [key for key, value in whole.state_dict().items() if not torch.equal(value, state[key])] == []


def test_stored_values_of_tied_weights_and_other_dtypes(tmp_path: Path) -> None:
    whole = build("LlamaForCausalLM", on_meta=False, tie_word_embeddings=True).half()
    whole.save_pretrained(tmp_path)
    parts, weights = build("LlamaForCausalLM", on_meta=True, tie_word_embeddings=True), check_weights(tmp_path)
    assert weights is not None
    parts.model.layers[0].mlp.up_proj.to(torch.bfloat16)
    read = stored_values(parts, weights)
    assert read is not None
    fill(parts, read)
    assert parts.lm_head.weight is parts.model.embed_tokens.weight
    assert torch.equal(parts.lm_head.weight, whole.lm_head.weight.float())
    assert torch.equal(parts.model.layers[0].mlp.up_proj.weight, whole.model.layers[0].mlp.up_proj.weight.bfloat16())


@pytest.mark.parametrize("change", ["missing", "additional", "shape"])
def test_files_of_another_model_have_no_stored_values(change: str, tmp_path: Path) -> None:
    build("LlamaForCausalLM", on_meta=False).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del tensors["lm_head.weight"]
    elif change == "additional":
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(128, 64)
    else:
        tensors["lm_head.weight"] = torch.zeros(64, 640)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    weights = check_weights(tmp_path)
    assert weights is not None
    assert stored_values(build("LlamaForCausalLM", on_meta=True), weights) is None
