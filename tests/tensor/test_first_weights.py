"""Tests of the norms of random first weights: those of the replaced weights, or larger in a narrow model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import scantling as sc
from scantling.tensor.layer import TTLayer
from scantling.tensor.linear import TTLinear

SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}


def norms(model: nn.Module) -> dict[str, float]:
    """Return the norms of all weights of linear layers and tables by name."""
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, TTLayer):
            found[name] = float(module.dense_weight().detach().norm())
        elif isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D":
            found[name] = float(module.weight.detach().norm())
    return found


def growth(model: nn.Module, rank: Any = 4) -> dict[str, float]:
    """Return the norms of the converted layers after the conversion relative to those before, by name."""
    before = norms(model)
    sc.tensorize(model, rank)
    after = norms(model)
    return {name: after[name] / before[name] for name, each in model.named_modules() if isinstance(each, TTLayer)}


def bert(**shape: Any) -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=256, **{**SHAPE, **shape}))


def test_weights_of_a_narrow_model_grow_by_one_factor() -> None:
    model = bert()
    found = growth(model)
    expected = 1.0 / (0.02 * (3 * 64) ** 0.5)  # PyTorch's 1 / sqrt(3 in) instead of 0.02
    linear = [ratio for name, ratio in found.items() if isinstance(model.get_submodule(name), TTLinear)]
    assert linear == pytest.approx([linear[0]] * 14, rel=1e-3)
    assert linear[0] == pytest.approx(expected, rel=0.05)
    assert found["bert.embeddings.word_embeddings"] == pytest.approx(1.0, rel=1e-3)


def test_fitting_weights_keep_their_norms() -> None:
    """Those of PyTorch, of a wide model, and of a model whose layers next to the residual stream are small."""
    plain = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64), nn.Linear(64, 256))
    wide = bert(hidden_size=768, intermediate_size=768, num_hidden_layers=1)
    torch.manual_seed(0)
    scaled = GPT2LMHeadModel(GPT2Config(n_embd=128, n_layer=3, n_head=2, vocab_size=256, initializer_range=0.05))
    assert "c_proj" in " ".join(norms(scaled))
    for model in (plain, wide, scaled):
        found = list(growth(model).values())
        assert found == pytest.approx([1.0] * len(found), rel=1e-3)


def test_zero_weights_and_svd_do_not_grow() -> None:
    zero = bert()
    for param in zero.parameters():
        nn.init.zeros_(param)
    sc.tensorize(zero, 4)
    assert not any(norms(zero).values())
    model = bert()
    before = norms(model)
    sc.tensorize(model, 64, init="svd", filter_fn=lambda name, layer: isinstance(layer, nn.Linear))
    assert norms(model) == pytest.approx(before, rel=1e-3)


def test_frozen_layers_stay_frozen() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Embedding(64, 32)).requires_grad_(False)
    sc.tensorize(model, 2)
    assert not any(param.requires_grad for param in model.parameters())
