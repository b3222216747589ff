"""Tests of the recipe's `precision` section: low-precision runs, alone and with the other methods."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.errors import RecipeError
from scantling.trainer.training.checkpoint import load_tensors
from scantling.trainer.training.trained_run import evaluate_run, export_hf, load_run
from tests.runs import records, tiny_recipe

FORMATS = {"weights": "int8", "activations": {"format": "int8", "granularity": "token"}, "kv_cache": "int6"}
STOCHASTIC = {"weights": "int8", "gradients": {"format": "int8", "rounding": "stochastic"}}


def test_loss_falls_and_plan_matches_the_run(tmp_path: Path) -> None:
    result = sc.train(tiny_recipe(tmp_path, precision=FORMATS), run_dir=tmp_path / "run")
    lines = records(result.run_dir)
    assert lines[-1]["loss"] < lines[0]["loss"]
    plan = json.loads((result.run_dir / "plan.json").read_text())
    assert lines[0]["num_parameters"] == plan["num_parameters"]
    dense = sc.plan(tiny_recipe(tmp_path))
    assert plan["activation_bytes"] > dense.activation_bytes  # rounded weights and inputs
    assert plan["flops_per_step"] == dense.flops_per_step
    assert "weights int8, activations int8 (token), kv cache int6" in (result.run_dir / "report.html").read_text()


def test_int8_products_train_like_simulated_ones(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, precision={**FORMATS, "kv_cache": None})
    simulated = sc.train(recipe, run_dir=tmp_path / "simulated").metrics["eval_loss"]
    real = sc.train(recipe, run_dir=tmp_path / "real", precision={"compute": "int8"}).metrics["eval_loss"]
    assert real == pytest.approx(simulated, rel=1e-3)


def test_stochastic_rounding_resumes_bitwise(tmp_path: Path) -> None:
    """Rounding to nearest has no state; with all methods: `test_all_methods_on_two_processes_resume_bitwise`."""
    train = {"steps": 8, "checkpoint_every": 4, "keep_checkpoints": 3}
    recipe = tiny_recipe(tmp_path, precision=STOCHASTIC, train=train)
    whole = sc.train(recipe, run_dir=tmp_path / "whole")
    part = shutil.copytree(whole.run_dir, tmp_path / "part")
    shutil.rmtree(part / "checkpoints" / "step-8")
    resumed = sc.train(part, resume=True)
    states = [load_tensors(run.run_dir / "checkpoints" / "step-8") for run in (whole, resumed)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_loaded_model_has_the_eval_loss_of_the_run(tmp_path: Path) -> None:
    given = tiny_recipe(tmp_path, precision={"weights": "int3", "activations": "int4"})
    result = sc.train(given, run_dir=tmp_path / "run")
    again = load_run(result.run_dir).evaluate()
    assert again["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-6)


def test_evaluations_do_not_change_stochastic_rounding(tmp_path: Path) -> None:
    rounding = {"format": "int4", "rounding": "stochastic"}
    recipe = tiny_recipe(tmp_path, precision={"activations": rounding}, train={"steps": 6})
    losses = []
    for every, samples in ((1, 8), (6, 2)):
        run_dir = tmp_path / f"every-{every}"
        sc.train(recipe, run_dir=run_dir, train={"eval_every": every, "eval_samples": samples})
        losses.append([record["loss"] for record in records(run_dir)])
    assert losses[0] == losses[1]
    evaluated = [evaluate_run(run_dir)["eval_loss"] for _ in range(2)]
    assert evaluated[0] == evaluated[1] == records(run_dir)[-1]["eval_loss"]


def test_export_has_rounded_weights_and_plain_layers(tmp_path: Path) -> None:
    result = sc.train(tiny_recipe(tmp_path, precision={"weights": "int2"}), run_dir=tmp_path / "run")
    export_hf(result.run_dir, tmp_path / "model")
    model = sc.load(tmp_path / "model")
    weight = model.model.layers[0].mlp.up_proj.weight
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert all(row.unique().numel() <= 3 for row in weight)


@pytest.mark.parametrize("compute", ["fp32", "int8"])
def test_dense_export_of_tt_layers_has_the_rounded_weights(compute: str, tmp_path: Path) -> None:
    precision = {"weights": "int4", "activations": "int8", "compute": compute}
    result = sc.train(tiny_recipe(tmp_path, precision=precision, tensor={"rank": 6}), run_dir=tmp_path / "run")
    layer = load_run(result.run_dir).model.model.layers[0].mlp.up_proj
    export_hf(result.run_dir, tmp_path / "model", dense=True)
    weight = sc.load(tmp_path / "model").model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight, layer.dense_weight())
    layer.formats = None
    assert not torch.equal(weight, layer.dense_weight())


def test_all_faults_are_reported_with_their_paths(tmp_path: Path) -> None:
    precision = {
        "weights": "int4x",
        "activations": {"format": "int8", "granularity": "channels"},
        "kv_cache": {"format": "int8", "granularity": "group"},
    }
    with pytest.raises(RecipeError) as caught:
        sc.plan(tiny_recipe(tmp_path, precision=precision, model={"attention": "eager"}))
    text = str(caught.value)
    assert "precision.weights: a number format must be one of" in text
    assert "precision.activations.granularity: must be one of" in text
    assert "precision.kv_cache: group_size and granularity" in text


def test_formats_without_hardware_support_are_refused(tmp_path: Path) -> None:
    precision = {"compute": "fp8", "weights": "fp8_e5m2", "activations": "fp8_e5m2"}
    with pytest.raises(RecipeError) as caught:
        sc.plan(tiny_recipe(tmp_path, precision=precision, model={"attention": "flash"}))
    text = str(caught.value)
    assert "precision.compute: compute='fp8' cannot multiply two formats with 5 exponent bits" in text
    assert "model.attention: " in text


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"precision": {"kv_cache": "int8"}, "model": {"attention": "eager"}}, "needs model.attention: sdpa"),
        ({"precision": {"compute": "int8", "weights": "int8"}}, "give one for activations"),
        ({"precision": {"compute": "fp8", "weights": "int8", "activations": "int8"}}, "takes weights in fp8_e4m3"),
    ],
)
def test_contradictory_settings_are_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        sc.plan(tiny_recipe(tmp_path, **sections))
