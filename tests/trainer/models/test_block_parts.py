"""Tests of blocks that pass a batch in parts: the gradients of the whole batch, each parameter's once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, BertConfig, LlamaConfig, MixtralConfig, T5Config, ViTConfig

import scantling as sc
from scantling.trainer.models.block_parts import checkpoint_in_parts
from scantling.trainer.models.checkpointing import checkpoint_activations
from tests.runs import records, saved_tensors, tiny_recipe

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**SIZES, "vocab_size": 96, "num_key_value_heads": 2}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**DECODER),
    "experts": MixtralConfig(**DECODER, num_local_experts=4),
    "bert": BertConfig(**SIZES, vocab_size=96, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "vit": ViTConfig(**SIZES, image_size=16, patch_size=4, hidden_dropout_prob=0.0),
    "t5": T5Config(d_model=32, d_ff=48, d_kv=16, num_layers=2, num_heads=2, vocab_size=96, dropout_rate=0.0),
}


def loss_of(model: Any, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if kind == "vit":
        return model(pixel_values=torch.randn(5, 3, 16, 16, generator=generator)).last_hidden_state.square().sum()
    ids = torch.randint(0, 96, (5, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind == "t5":
        inputs["decoder_input_ids"] = ids[:, :4]
    weights = torch.randn(32, generator=generator)
    found: torch.Tensor = (model(**inputs, use_cache=False).last_hidden_state @ weights)[:, :4].square().sum()
    return found


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_are_those_of_the_whole_batch(kind: str, size: int) -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(CONFIGS[kind]).train()
    loss_of(model, kind).backward()
    wanted = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    checkpoint_activations(model, True)
    checkpoint_in_parts(model, size)
    counts: dict[str, int] = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: counts.update({name: counts.get(name, 0) + 1}))
    loss_of(model, kind).backward()
    for name, param in model.named_parameters():
        if wanted[name] is None:
            assert param.grad is None
            continue
        torch.testing.assert_close(param.grad, wanted[name], rtol=1e-4, atol=1e-4)
    assert set(counts.values()) == {1}


def test_dropout_is_the_same_in_both_passes() -> None:
    """The gradient of a quadratic function of the output shows the output of the repeated pass."""
    model = AutoModel.from_config(BertConfig(**SIZES, vocab_size=96, hidden_dropout_prob=0.5)).train()
    grads = []
    for parts in (False, True):
        if parts:
            checkpoint_activations(model, True)
            checkpoint_in_parts(model, 5)  # one part: the same random numbers as a whole batch
        model.zero_grad()
        torch.manual_seed(1)
        loss_of(model, "bert").backward()
        grads.append([param.grad for param in model.parameters() if param.grad is not None])
        state = torch.get_rng_state()
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    torch.manual_seed(1)
    with torch.no_grad():
        loss_of(model, "bert")
    assert torch.equal(state, torch.get_rng_state())  # the backward pass leaves the generator as it was


CAME = {"name": "came", "lr": 3e-3, "betas": [0.9, 0.95, 0.995], "debias": True, "momentum": "int4"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_released_run_in_parts_holds_one_gradient(precision: str, tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "optim": {**CAME, "release_gradients": True},
        "train": {"clip": None, "micro_batch_size": 1, "loss_chunk": 8, "checkpoint_every": 4},
        "precision": {"parameters": precision},
    }
    runs = {}
    for name, checkpoints in (("passes", False), ("parts", True)):
        recipe = tiny_recipe(tmp_path, **sections)
        recipe["train"]["activation_checkpointing"] = checkpoints
        runs[name] = sc.train(recipe, run_dir=tmp_path / name)
    for one, other in zip(records(tmp_path / "passes"), records(tmp_path / "parts"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=2e-2 if precision == "bf16" else 2e-5)
        assert other["gradient_bytes"] < 0.4 * one["gradient_bytes"]
    whole = sc.plan(recipe)
    assert whole.gradient_bytes == records(tmp_path / "parts")[-1]["gradient_bytes"]
    # resume gives the same bits
    (tmp_path / "parts" / "checkpoints" / "step-8").rename(tmp_path / "step-8")
    sc.train(tmp_path / "parts", resume=True)
    (tmp_path / "first" / "checkpoints").mkdir(parents=True)
    (tmp_path / "step-8").rename(tmp_path / "first" / "checkpoints" / "step-8")
    one, other = saved_tensors(tmp_path / "first"), saved_tensors(tmp_path / "parts")
    assert all(torch.equal(value, other[key]) for key, value in one.items())
