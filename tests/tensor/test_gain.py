"""Tests of the trainable gain of TT layers: weight = exp(GAIN_RATE * log_gain) * product of the cores."""

from __future__ import annotations

from math import exp
from pathlib import Path

import pytest
import torch
from torch import nn

import scantling as sc
from scantling.precision.training import restore
from scantling.tensor.cores import dense
from scantling.tensor.layer import GAIN_RATE, TTLayer
from tests.tensor.families import make_model


def set_gain(layer: TTLayer, gain: float) -> None:
    with torch.no_grad():
        layer.log_gain.fill_(torch.tensor(gain).log().item() / GAIN_RATE)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gain_scales_the_output_without_the_bias(activation: str | None) -> None:
    layer, x = sc.TTLinear(12, 8, rank=3, activation=activation).double(), torch.randn(5, 12, dtype=torch.float64)
    assert layer.bias is not None
    before = layer(x) - layer.bias
    set_gain(layer, 2.5)
    torch.testing.assert_close(layer(x) - layer.bias, 2.5 * before)


def test_gain_scales_rows_of_a_table_and_its_logits() -> None:
    table = sc.TTMEmbedding(50, 8, rank=3).double()
    ids, hidden = torch.tensor([0, 7, 7, 49]), torch.randn(3, 8, dtype=torch.float64)
    rows, logits = table(ids), table.logits(hidden)
    set_gain(table, 0.5)
    torch.testing.assert_close(table(ids), 0.5 * rows)
    torch.testing.assert_close(table.logits(hidden), 0.5 * logits)


def test_gradient_of_the_gain_is_the_derivative_of_the_scale() -> None:
    layer = sc.TTLinear(12, 8, rank=3).double()
    set_gain(layer, 1.7)
    upstream = torch.randn(8, 12, dtype=torch.float64)
    (layer.dense_weight() * upstream).sum().backward()
    product = dense(layer.chain).reshape(12, 8).t()
    expected = GAIN_RATE * exp(GAIN_RATE * layer.log_gain.item()) * (product * upstream).sum()
    assert layer.log_gain.grad is not None
    torch.testing.assert_close(layer.log_gain.grad.squeeze(), expected.detach())


def test_a_weight_that_starts_too_small_grows_by_the_gain() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    teacher = sc.TTLinear(16, 16, rank=4, bias=False)
    target = teacher(x).detach()
    errors = {}
    for has_gain in (True, False):
        torch.manual_seed(1)
        student = sc.TTLinear(16, 16, rank=4, bias=False)
        student.reset_parameters(norm=0.02 * float(teacher.dense_weight().norm()))
        student.log_gain.requires_grad_(has_gain)
        optimizer = torch.optim.AdamW(sc.param_groups(student, core_lr=1e-3 / 3), lr=1e-3)
        for _ in range(200):
            optimizer.zero_grad()
            error = (student(x) - target).square().mean() / target.square().mean()
            error.backward()
            optimizer.step()
        errors[has_gain] = error.item()
    assert errors[True] < 0.5 * errors[False]


def test_the_gain_is_folded_into_cores_with_the_gates() -> None:
    model = nn.Sequential(sc.TTLinear(16, 16, rank=4))
    x = torch.randn(3, 16)
    adapter = sc.RankAdapter(model, size_target=1.0)
    set_gain(model[0], 3.0)
    before = model(x)
    adapter.finish()
    assert model[0].log_gain.item() == 0.0
    torch.testing.assert_close(model(x), before)


def test_densify_keeps_the_gain_and_svd_starts_at_1() -> None:
    model = nn.Sequential(sc.TTLinear(16, 12, rank=4))
    set_gain(model[0], 3.0)
    x = torch.randn(3, 16)
    before = model(x)
    sc.densify(model)
    torch.testing.assert_close(model(x), before)
    sc.tensorize(model, 16, init="svd", filter_fn=lambda name, layer: True)
    assert model[0].log_gain.item() == 0.0
    torch.testing.assert_close(model(x), before)


def test_rounded_weights_include_the_gain() -> None:
    model = nn.Sequential(sc.TTLinear(16, 12, rank=4))
    set_gain(model[0], 3.0)
    sc.quantize_training(model, weights="int8")
    before = model[0].dense_weight()
    restore(model, weights="rounded")
    assert model[0].log_gain.item() == 0.0
    torch.testing.assert_close(model[0].dense_weight(), before)


def test_frozen_layers_freeze_their_gain() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Embedding(64, 32)).requires_grad_(False)
    sc.tensorize(model, 2)
    assert not any(param.requires_grad for param in model.parameters())


@pytest.mark.parametrize("family", ["llama", "t5", "mixtral"])
def test_the_gain_is_saved_and_loaded(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    sc.tensorize(model, 4)
    layers = [module for module in model.modules() if isinstance(module, TTLayer)]
    for i, layer in enumerate(layers):
        set_gain(layer, 1.0 + i)
    model.save_pretrained(tmp_path)
    loaded = sc.load(tmp_path)
    gains = [module.log_gain.item() for module in loaded.modules() if isinstance(module, TTLayer)]
    assert gains == [layer.log_gain.item() for layer in layers]
