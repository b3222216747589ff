"""Tests of recipes with `precision.parameters: bf16`: weights in bf16 alone, written with stochastic rounding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

import scantling as sc
from scantling.errors import RecipeError
from scantling.trainer.training import build
from scantling.trainer.training.step import total_norm
from scantling.trainer.training.trained_run import evaluate_run, export_hf, load_run
from tests.runs import records, saved_tensors, scantling, tiny_recipe, write_recipe

BF16 = {"parameters": "bf16", "rounding": "stochastic"}


def build_recipe(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with CAME and bf16 weights; `sections` are merged in."""
    own: dict[str, dict[str, Any]] = {
        "optim": {"name": "came", "lr": 3e-3, "betas": [0.9, 0.95, 0.995], "debias": True},
        "precision": BF16,
    }
    for name, keys in sections.items():
        own[name] = {**own.get(name, {}), **keys}
    return tiny_recipe(folder, **own)


def test_matrices_are_bf16_and_the_loss_is_that_of_fp32(tmp_path: Path) -> None:
    runs = {}
    for name, precision in (("fp32", {"parameters": "fp32"}), ("bf16", BF16)):
        runs[name] = sc.train(build_recipe(tmp_path, precision=precision), run_dir=tmp_path / name)
    stored = saved_tensors(tmp_path / "bf16", prefix="model/")
    assert {value.dtype for value in stored.values() if value.ndim > 1} == {torch.bfloat16}
    assert {value.dtype for value in stored.values() if value.ndim == 1} == {torch.float32}
    assert runs["bf16"].metrics["eval_loss"] == pytest.approx(runs["fp32"].metrics["eval_loss"], abs=0.02)
    planned = json.loads((tmp_path / "bf16" / "plan.json").read_text())
    for record in records(tmp_path / "bf16"):
        for key in ("weight_bytes", "gradient_bytes", "optimizer_state_bytes"):
            assert record[key] == planned[key]
    assert planned["weight_bytes"] < 0.51 * json.loads((tmp_path / "fp32" / "plan.json").read_text())["weight_bytes"]
    assert evaluate_run(tmp_path / "bf16")["eval_loss"] == pytest.approx(runs["bf16"].metrics["eval_loss"], rel=1e-6)


def test_stored_weights_are_never_all_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stores bf16 reads weights one by one; drawn weights need all of the model in fp32 first."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    recipe = build_recipe(tmp_path) | {"model": {"hf": str(tmp_path / "model")}}
    sc.train(recipe, run_dir=tmp_path / "parts")
    with monkeypatch.context() as patch:
        patch.setattr(build, "reads_one_by_one", lambda *_: False)
        sc.train(recipe, run_dir=tmp_path / "whole")
    parts, whole = (saved_tensors(tmp_path / name) for name in ("parts", "whole"))
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[key], whole[key]) for key in parts)
    monkeypatch.setattr(build, "build_run_model", pytest.fail)
    sc.train(recipe, run_dir=tmp_path / "not whole")
    assert sc.plan(recipe).building_bytes == 0


def test_weights_in_fp32_before_they_are_rounded_count_as_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # the allocator keeps nothing
    optim = {"momentum": "int4", "release_gradients": True}
    recipe = build_recipe(tmp_path, optim=optim, train={"batch_size": 1, "clip": None})
    sizes = ["model.overrides.hidden_size=512", "model.overrides.num_hidden_layers=16", "data.seq_len=8"]
    planned = sc.plan(recipe, settings=sizes)
    assert planned.building_bytes == 4 * planned.num_parameters
    assert planned.peak_memory_bytes == planned.base_bytes + planned.building_bytes
    assert planned.rebase(0).peak_memory_bytes == planned.building_bytes
    assert "weights before rounding" in str(planned)
    assert sc.plan(recipe, settings=sizes, device="cuda").building_bytes == 0


def test_steps_below_the_last_bit_are_not_lost(tmp_path: Path) -> None:
    """At this rate rounding to the nearest would change nothing: a step is 1/1000 of a weight's last bit."""
    changed = {}
    for rounding in ("stochastic", "compensated"):
        recipe = build_recipe(tmp_path, precision={"rounding": rounding}, optim={"lr": 1e-7, "weight_decay": 0.0})
        sc.train(recipe, run_dir=tmp_path / rounding, train={"checkpoint_every": 1, "keep_checkpoints": 8})
        first, last = (saved_tensors(tmp_path / rounding, step, "model/") for step in (1, 8))
        name = "model/model.layers.0.mlp.up_proj.weight"
        changed[rounding] = float((first[name] != last[name]).float().mean())
    assert 1e-4 < changed["stochastic"] < 0.1
    errors = [value for key, value in saved_tensors(tmp_path / "compensated").items() if key.endswith("low")]
    assert errors
    assert all(error.any() for error in errors)


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "stochastic": {},
    "compensated": {"precision": {"rounding": "compensated"}},
    "released, int4 momentum": {
        "optim": {"release_gradients": True, "momentum": "int4"},
        "train": {"clip": None, "activation_checkpointing": True},
    },
    "accumulated, int8 momentum": {"optim": {"momentum": "int8"}, "train": {"micro_batch_size": 1}},
    "tensor": {"tensor": {"rank": 4, "size_target": 0.6}, "precision": {"weights": "int8"}},
    "int8 products": {"precision": {"weights": "int8", "activations": "int8", "compute": "int8"}},
    "demo": {"comm": {"name": "demo"}},
}


@pytest.mark.parametrize("case", CASES)
def test_resume_is_bitwise(case: str, tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, **CASES[case])
    recipe["train"] |= {"checkpoint_every": 4, "keep_checkpoints": 3}
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    sc.train(recipe, run_dir=straight)
    shutil.copytree(straight, broken)
    shutil.rmtree(broken / "checkpoints" / "step-8")
    sc.train(broken, resume=True)
    one, other = saved_tensors(straight), saved_tensors(broken)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    losses = [record["loss"] for record in records(straight)]
    assert losses == [record["loss"] for record in records(broken)]
    assert losses[-1] < losses[0]
    if case == "tensor":
        model = load_run(straight).model
        assert {core.dtype for name, core in model.named_parameters() if ".cores." in name} == {torch.float32}


@pytest.mark.parametrize("comm", ["allreduce", "demo"])
def test_two_processes(comm: str, tmp_path: Path) -> None:
    """All ranks round alike: replicas that differ would be found by the exchange's check, and by DDP's loss."""
    recipe = build_recipe(tmp_path, comm={"name": comm})
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    found = scantling("train", path, "--run-dir", tmp_path / "two", processes=2)
    assert found.returncode == 0, found.err
    if comm == "allreduce":
        one = sc.train(recipe, run_dir=tmp_path / "one").metrics["eval_loss"]
        assert records(tmp_path / "two")[-1]["eval_loss"] == pytest.approx(one, abs=0.02)


@pytest.mark.parametrize("tensor", [False, True])
def test_exports_have_one_dtype(tensor: bool, tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, **({"tensor": {"rank": 4}} if tensor else {}))
    run = sc.train(recipe, run_dir=tmp_path / "run")
    assert export_hf(run.run_dir, tmp_path / "model") == 0.0
    dtype = torch.float32 if tensor else torch.bfloat16
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118
    assert sc.load(tmp_path / "model").dtype == dtype


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path)
    recipe["model"]["overrides"]["tie_word_embeddings"] = True
    run = sc.train(recipe, run_dir=tmp_path / "run")
    model = load_run(run.run_dir).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optim": {"name": "adamw", "betas": [0.9, 0.95], "debias": None}}, "set optim.name: came"),
        ({"precision": {"compute": "fp16"}}, "leave precision.compute out"),
        ({"precision": {"compute": "fp32"}}, "leave precision.compute out"),
        ({"precision": {"parameters": "fp32", "rounding": "compensated"}}, "precision.rounding: has an effect with"),
        ({"optim": {"rounding": "stochastic"}}, "optim.rounding: belongs to precision.rounding"),
        ({"precision": {"parameters": "fp8"}}, "precision.parameters"),
        ({"precision": {"rounding": "nearest"}}, "precision.rounding"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    sections: dict[str, dict[str, Any]], message: str, tmp_path: Path
) -> None:
    recipe = build_recipe(tmp_path, **sections)
    recipe["optim"] = {key: value for key, value in recipe["optim"].items() if value is not None}
    with pytest.raises(RecipeError, match=message):
        sc.plan(recipe)


def test_norms_of_bf16_gradients_are_computed_in_fp32() -> None:
    grads = [torch.full((300, 7), 0.01), torch.full((1000,), 0.013, dtype=torch.bfloat16)]
    expected = float(torch.cat([grad.double().flatten() for grad in grads]).norm())
    assert float(total_norm(grads)) == pytest.approx(expected, rel=1e-6)
    assert total_norm(grads[:1]) == torch.nn.utils.get_total_norm(grads[:1])
