"""Tests of the recipe's `tensor` section: TT layers in a run, rank reduction, the same bits after a stop."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.errors import RecipeError, UserError
from scantling.optim.memory import ParameterSpec, predicted_state_bytes
from scantling.optim.registry import optimizer_names
from scantling.tensor.layer import TTLayer
from scantling.tensor.linear import TTLinear
from scantling.trainer.planning.resolve import resolve_run
from scantling.trainer.recipe import load_recipe
from scantling.trainer.recipe.schema import TensorSection
from scantling.trainer.training.build import build_run_model
from scantling.trainer.training.checkpoint import load_tensors
from scantling.trainer.training.checkpoint_manifest import read_manifest
from scantling.trainer.training.trained_run import evaluate_run, export_hf, load_run
from tests.runs import records, scantling, tiny_recipe, write_recipe

SAVED = {"checkpoint_every": 3, "keep_checkpoints": 4}
ADAPTING = {"rank": 6, "size_target": 0.5, "adapt": 8, "truncate_every": 3}
CAME = {"name": "came", "lr": 0.003, "debias": True, "betas": [0.9, 0.95, 0.995], "momentum": "int8"}


def recipe(folder: Path, **sections: Any) -> dict[str, Any]:
    train = {"steps": 12, "micro_batch_size": 2}
    return tiny_recipe(
        folder, **{"tensor": ADAPTING, "optim": CAME, **sections, "train": {**train, **sections.get("train", {})}}
    )


def test_cores_depend_on_the_seed_alone(tmp_path: Path) -> None:
    def first_core(seed: int) -> torch.Tensor:
        torch.rand(3)  # the state of the global generator must not matter
        given = load_recipe(recipe(tmp_path, tensor={"rank": 6}, train={"seed": seed}))
        run = resolve_run(given, world_size=1, device="cpu")
        model = build_run_model(replace(run, data=run.task.prepare(given.data, seed=seed)))
        return next(layer.cores[0] for layer in model.modules() if isinstance(layer, TTLayer)).detach()

    assert torch.equal(first_core(0), first_core(0))
    assert not torch.equal(first_core(0), first_core(1))


@pytest.mark.charts
def test_run_starts_at_the_planned_size_and_ends_at_the_target(tmp_path: Path) -> None:
    result = sc.train(recipe(tmp_path), run_dir=tmp_path / "run")
    lines = records(result.run_dir)
    plan = json.loads((result.run_dir / "plan.json").read_text())
    assert lines[0]["num_parameters"] == plan["num_parameters"]
    assert lines[0]["optimizer_state_bytes"] == plan["optimizer_state_bytes"]
    assert lines[0]["tensor_size"] == 1.0
    assert lines[-1]["tensor_compression"] == pytest.approx(lines[0]["tensor_compression"] / 0.5, rel=0.02)
    assert lines[-1]["mean_rank"] < lines[0]["mean_rank"]
    assert lines[-1]["tensor_size"] == pytest.approx(0.5, rel=0.02)
    assert lines[-1]["num_parameters"] < lines[0]["num_parameters"]
    assert lines[-1]["optimizer_state_bytes"] < lines[0]["optimizer_state_bytes"]
    assert any("come down to" in note for note in plan["notes"])
    ranks = [line["ranks"] for line in lines if "ranks" in line]
    assert len(ranks) > 2
    assert sum(map(sum, ranks[-1].values())) < sum(map(sum, ranks[0].values()))
    page = (result.run_dir / "report.html").read_text()
    assert "TT parameters" in page
    assert "Mean rank of each layer at the end" in page

    run = load_run(result.run_dir)
    task, data, model = run.task, run.data, run.model
    layers = [layer for layer in model.modules() if isinstance(layer, TTLayer)]
    assert layers
    assert all(layer.rank_gates is None for layer in layers)
    assert sum(core.numel() for layer in layers for core in layer.cores) == lines[-1]["tensor_parameters"]
    assert task.name == "causal-lm"
    assert data.heldout is not None
    assert run.evaluate()["eval_loss"] == pytest.approx(lines[-1]["eval_loss"], rel=1e-6)


def test_layers_have_the_format_of_the_recipe(tmp_path: Path) -> None:
    result = sc.train(recipe(tmp_path, tensor={**ADAPTING, "format": "cola"}), run_dir=tmp_path / "run")
    lines = records(result.run_dir)
    plan = json.loads((result.run_dir / "plan.json").read_text())
    assert lines[0]["num_parameters"] == plan["num_parameters"]
    assert lines[-1]["tensor_size"] == pytest.approx(0.5, rel=0.02)
    model = load_run(result.run_dir).model
    layers = [layer for layer in model.modules() if isinstance(layer, TTLinear)]
    assert {(layer.activation, len(layer.cores)) for layer in layers} == {("silu", 2)}


def test_exported_tt_model_can_be_trained_further(tmp_path: Path) -> None:
    first = sc.train(recipe(tmp_path, tensor={"rank": 4}), run_dir=tmp_path / "first")
    assert export_hf(first.run_dir, tmp_path / "model") == 0.0
    given = recipe(tmp_path, train={"steps": 1})
    del given["tensor"]
    given["model"] = {"hf": str(tmp_path / "model")}
    given["optim"] = {"name": "sgd", "lr": 1e-12}
    second = sc.train(given, run_dir=tmp_path / "second")
    assert second.metrics["num_parameters"] == first.metrics["num_parameters"]
    assert second.metrics["eval_loss"] == pytest.approx(first.metrics["eval_loss"], abs=1e-6)
    plan = json.loads((second.run_dir / "plan.json").read_text())
    assert plan["num_parameters"] == first.metrics["num_parameters"]
    with pytest.raises(UserError, match="describes TT layers; give a folder that has their weights"):
        sc.train({**given, "model": {**given["model"], "pretrained": False}}, run_dir=tmp_path / "third")
    export_hf(first.run_dir, tmp_path / "dense", dense=True)
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_resume_is_bitwise_across_rank_removal_with_the_paper_schedule(tmp_path: Path) -> None:
    """Other schedules: `test_optimizers_resume_bitwise_across_rank_removal`."""
    adapter = {"schedule": "paper", "interval": 1, "early_steps": 4, "gamma": 1.0}
    given = recipe(tmp_path, tensor={**ADAPTING, "adapter": adapter}, train=SAVED)
    straight = sc.train(given, run_dir=tmp_path / "straight").run_dir
    broken = tmp_path / "broken"
    shutil.copytree(straight, broken)
    for later in (9, 12):  # ranks are removed before step 6 and after it
        shutil.rmtree(broken / "checkpoints" / f"step-{later}")
    sc.train(broken, resume=True)
    check_same_bits(straight, broken, 12)


RELEASED = {**CAME, "release_gradients": True}
OPTIMIZERS = [{"name": name, "lr": 0.003} for name in optimizer_names()] + [RELEASED]
EXACT = [
    pytest.param(optim, comm, id=f"{optim['name']}{'-released' * (optim is RELEASED)}-{comm}", marks=marks)
    for comm in ("none", "demo")
    for optim in OPTIMIZERS
    if not (comm == "demo" and optim is RELEASED)  # released gradients cannot be exchanged
    for marks in [[] if (optim["name"], comm) == ("sign", "demo") else [pytest.mark.slow]]
]


@pytest.mark.parametrize(("optim", "comm"), EXACT)
def test_optimizers_resume_bitwise_across_rank_removal(tmp_path: Path, optim: dict[str, Any], comm: str) -> None:
    adapting = {**ADAPTING, "adapt": 9, "adapter": {"interval": 1}}
    if optim["name"] == "muon":
        adapting["rank"] = {"*mlp*": 6}  # needs dense matrices in addition to the TT layers
    train: dict[str, Any] = {"checkpoint_every": 4, "keep_checkpoints": 3, "eval_samples": 2}
    if optim is RELEASED:
        train["clip"] = None
    sections = {"comm": {"name": comm}} if comm != "none" else {}
    given = recipe(tmp_path, tensor=adapting, optim=optim, train=train, **sections)
    straight = sc.train(given, run_dir=tmp_path / "straight").run_dir
    broken = tmp_path / "broken"
    shutil.copytree(straight, broken)
    shutil.rmtree(broken / "checkpoints" / "step-12")
    sc.train(broken, resume=True)
    check_same_bits(straight, broken, 12)


def test_evaluation_merges_cores_once_for_all_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    gated = TTLayer.gated_cores

    def record_merged(self: TTLayer) -> list[torch.Tensor]:
        if not torch.is_grad_enabled():
            kept.append(self._merged_kept is not None)
        return gated(self)

    monkeypatch.setattr(TTLayer, "gated_cores", record_merged)
    sc.train(recipe(tmp_path, tensor={"rank": 4}, train={"steps": 1}), run_dir=tmp_path / "run")
    assert any(kept)


@pytest.mark.parametrize("optim", [{"name": "sgd", "lr": 0.1}, CAME])
def test_target_in_bytes_counts_the_state_of_the_optimizer(tmp_path: Path, optim: dict[str, Any]) -> None:
    share = {**ADAPTING, "unit": "bytes", "size_target": 12_000, "adapter": {"interval": 1}}
    result = sc.train(recipe(tmp_path, tensor=share, optim=optim), run_dir=tmp_path / "run")
    model = load_run(result.run_dir).model
    layers = [layer for layer in model.modules() if isinstance(layer, TTLayer)]
    specs = [
        ParameterSpec(core.shape, core.dtype, own.core_role, own.core_dims) for own in layers for core in own.cores
    ]
    settings = {key: value for key, value in optim.items() if key not in ("name", "lr")}
    numel = sum(core.numel() for layer in layers for core in layer.cores)
    held = 8 * numel + (predicted_state_bytes(optim["name"], specs, **settings) or 0)
    assert held == pytest.approx(12_000, rel=0.02)


def test_activation_checkpointing_keeps_the_losses(tmp_path: Path) -> None:
    losses = []
    for checkpointing in (False, True, "feed_forward"):
        train = {"steps": 4, "activation_checkpointing": checkpointing}
        given = recipe(tmp_path, tensor={**ADAPTING, "adapt": 2, "truncate_every": 2}, train=train)
        lines = records(sc.train(given, run_dir=tmp_path / str(checkpointing)).run_dir)
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.dist
def test_two_processes_remove_the_same_ranks_and_resume_bitwise(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", recipe(tmp_path, train={"batch_size": 8, "eval_samples": 2, **SAVED}))
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    done = scantling("train", path, "--run-dir", straight, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = records(straight)
    assert lines[-1]["tensor_size"] == pytest.approx(0.5, rel=0.02)
    assert lines[-1]["wire_bytes"] == lines[-1]["gradient_bytes"]
    assert lines[-1]["wire_bytes"] < lines[0]["wire_bytes"]
    shutil.copytree(straight, broken)
    for later in (9, 12):
        shutil.rmtree(broken / "checkpoints" / f"step-{later}")
    done = scantling("train", broken, "--resume", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    check_same_bits(straight, broken, 12)


def check_same_bits(one: Path, other: Path, step: int) -> None:
    for want, got in zip(records(one), records(other), strict=True):
        for key in ("step", "loss", "grad_norm", "num_parameters", "tensor_size", "rank_price"):
            assert want[key] == got[key], (want["step"], key)
    wanted, given = (load_tensors(run / "checkpoints" / f"step-{step}") for run in (one, other))
    assert wanted.keys() == given.keys()
    assert all(torch.equal(tensor, given[key]) for key, tensor in wanted.items())


@pytest.mark.parametrize("release", [False, True])
def test_tt_layers_without_a_target_keep_their_ranks(tmp_path: Path, release: bool) -> None:
    optim = {**CAME, "release_gradients": release}
    result = sc.train(recipe(tmp_path, tensor={"rank": 4}, optim=optim, train={"clip": None}), run_dir=tmp_path / "run")
    lines = records(result.run_dir)
    assert lines[0]["num_parameters"] == lines[-1]["num_parameters"]
    assert "tensor_size" not in lines[-1]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_mnli_recipe_runs(tmp_path: Path, data_folder: Path) -> None:
    """One layer of the full width, on pairs in MultiNLI's columns."""
    for part, name, rows in (("train", "train", 120), ("dev_matched", "mnli_dev_matched_part_a", 24)):
        with gzip.open(data_folder / "nli" / f"{name}.jsonl.gz", "rt") as source:
            pairs = [json.loads(line) for line in islice(source, rows)]
        columns = [
            {"sentence1": pair["premise"], "sentence2": pair["hypothesis"], "gold_label": pair["label"]}
            for pair in pairs
        ]
        (tmp_path / f"mnli_{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in columns))
    settings = [f"data.jsonl={tmp_path / 'mnli_train.jsonl'}", f"data.validation={tmp_path / 'mnli_dev_matched.jsonl'}"]
    settings += ["data.tokenizer={bpe: 300}", "model.overrides={num_hidden_layers: 1}", "train.steps=6"]
    settings += ["train.batch_size=2", "tensor.adapt=4", "tensor.adapter={begin: 2}", "tensor.truncate_every=2"]
    path = Path(__file__).parents[3] / "recipes" / "papers" / "mnli-six-encoder.yaml"
    result = sc.train(path, run_dir=tmp_path / "run", settings=[*settings, "train.device=cpu"])
    lines = records(result.run_dir)
    assert lines[0]["tensor_parameters"] == 167_808 + 4 * 20_448 + 2 * 28_960 + 20_448
    assert lines[-1]["tensor_size"] == pytest.approx(0.2, rel=0.02)
    assert "accuracy" in lines[-1]


def test_invalid_tensor_sections_are_refused(tmp_path: Path) -> None:
    for tensor, message in (
        ({"rank": 4, "adapt": 0.3}, "tensor.adapt: has no effect without tensor.size_target"),
        ({"size_target": 0.5, "adapt": 100}, "tensor.adapt: is longer than the run of 12 steps"),
        ({"size_target": 0.5, "adapter": {"gama": 1.0}}, "tensor.adapter.gama: is unknown .did you mean 'gamma'"),
        (
            {"size_target": 0.5, "adapter": {"beta": -1.0}},
            "tensor.adapter.beta: must be a finite number of at",
        ),
        ({"size_target": 0.5, "adapter": {"steps": 9}}, "tensor.adapter.steps: belongs to tensor.adapt"),
        ({"size_target": 0.5, "adapt": 4, "adapter": {"begin": 5}}, "tensor.adapter.begin: must be below steps=4"),
        ({"num_modes": 6}, "tensor.num_modes"),
        ({"format": "colla"}, "tensor.format"),
        ({"format": "cola", "num_modes": 3}, "tensor.num_modes: given num_modes=3 with format='cola'"),
        ({"format": "tt-silu", "init": "svd"}, "tensor.init: svd needs a matrix"),
        ({"ranks": 4}, "tensor.ranks: .*did you mean 'rank'"),
    ):
        with pytest.raises(RecipeError, match=message):
            sc.train(recipe(tmp_path, tensor={"rank": 4, **tensor}), run_dir=tmp_path / "run")
    for tensor, message in (
        ({"rank": {"*nowhere*": 4}}, "select none of its .* layers"),
        ({"rank": 4, "size_target": 1e-6}, "one rank on every bond"),
    ):
        with pytest.raises(UserError, match=message):
            sc.train({**recipe(tmp_path), "tensor": tensor}, run_dir=tmp_path / "run")
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_target_holds_if_ranks_shrink_until_the_last_step(tmp_path: Path) -> None:
    """The fused optimizer does not increment version counters, but evaluations see its changes."""
    optim = {"name": "adamw", "lr": 0.003, "fused": True}
    tensor = {**ADAPTING, "adapt": 1.0}
    given = recipe(tmp_path, optim=optim, tensor=tensor, train={"eval_every": 4})
    result = sc.train(given, run_dir=tmp_path / "run")
    lines = records(result.run_dir)
    assert lines[-1]["tensor_size"] == pytest.approx(0.5, rel=0.02)
    evaluated = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(set(evaluated)) == len(evaluated) == 3
    assert evaluate_run(result.run_dir)["eval_loss"] == pytest.approx(evaluated[-1], rel=1e-6)


def test_ranks_pruned_at_the_end_of_the_schedule_are_removed_then(tmp_path: Path) -> None:
    tensor = {**ADAPTING, "adapt": 4, "truncate_every": 50}
    lines = records(sc.train(recipe(tmp_path, tensor=tensor, train={"steps": 6}), run_dir=tmp_path / "run").run_dir)
    numbers = [line["num_parameters"] for line in lines if "num_parameters" in line]
    assert numbers[2] == numbers[0] > numbers[3] == numbers[-1]


def test_lr_scale_applies_to_cores_of_layers_only(tmp_path: Path) -> None:
    result = sc.train(
        recipe(tmp_path, tensor={"rank": 4, "lr_scale": 0.5}, train={"steps": 1}), run_dir=tmp_path / "run"
    )
    newest = sorted((result.run_dir / "checkpoints").glob("step-*"))[-1]
    groups = read_manifest(newest)["values"]["optimizer"]["groups"]
    rates = {name: group["hyper"]["initial_lr"] for group in groups for name in group["names"]}
    layers = {name for name in rates if ".cores." in name and "embed" not in name}
    assert {rates[name] for name in layers} == {0.0015}
    assert {rate for name, rate in rates.items() if name not in layers} == {0.003}


@pytest.mark.parametrize(("scales", "expected"), [({}, 0.0015), ({"control_lr_scale": 2.0}, 0.006)])
def test_rank_gates_learn_at_the_rate_of_the_cores_by_default(scales: dict[str, float], expected: float) -> None:
    section = TensorSection(lr_scale=0.5, size_target=0.5, **scales)
    assert section.rates(0.003)["control_lr"] == pytest.approx(expected)
    assert section.rates(0.003)["core_lr"] == pytest.approx(0.0015)
