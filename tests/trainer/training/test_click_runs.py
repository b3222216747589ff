"""Tests of a recommender through all stages: train, resume, several processes, plan, evaluate, export, report."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.cli import run as run_cli
from scantling.errors import UserError
from scantling.trainer.data.click_features import ClickFeatures
from scantling.trainer.models.dlrm import DLRM, DLRMConfig
from scantling.trainer.recipe import load_recipe
from scantling.trainer.training.checkpoint import load_tensors
from scantling.trainer.training.trained_run import load_run
from tests.clicks import click_rows, clicks_recipe
from tests.runs import kill_tree, records, scantling, start_scantling, wait_for_step, write_recipe

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two epochs."""
    folder = tmp_path_factory.mktemp("clicks")
    recipe = clicks_recipe(folder, train={"steps": 100, "eval_every": 50, "checkpoint_every": 100})
    sc.train(recipe, run_dir=folder / "run")
    return folder / "run"


def test_run_learns(trained: Path) -> None:
    first, last = (record for record in records(trained) if "auc" in record)
    assert last["auc"] > 0.75
    assert last["normalized_entropy"] < 0.9
    assert first["normalized_entropy"] < 1
    assert last["tokens"] == 100 * 64
    result = json.loads((trained / "result.json").read_text())
    assert result["auc"] == last["auc"]
    environment = json.loads((trained / "environment.json").read_text())
    assert environment["data"]["features"]["table_sizes"][0] == 50
    page = (trained / "report.html").read_text()
    assert "AUC" in page
    assert "64 rows" in page
    assert "sequence length" not in page, "rows have none"


def test_eval_repeats_the_metrics_of_the_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["eval", str(trained), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    last = records(trained)[-1]
    for key in ("eval_loss", "auc", "normalized_entropy", "accuracy"):
        assert figures[key] == pytest.approx(last[key], rel=1e-6), key
    assert figures["base_rate_loss"] > figures["eval_loss"]
    assert figures["majority_accuracy"] < figures["accuracy"]


def test_exported_folder_predicts_new_rows(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert run_cli(["export", str(trained), "--to", "hf", str(folder)]) == 0
    run = load_run(trained)
    data, own = run.data, run.model
    model, features = DLRM.from_pretrained(folder).eval(), ClickFeatures.from_pretrained(folder)
    rows = click_rows(4000)[:20]
    inputs = features({name: [row[name] for row in rows] for name in ("price", "age", "user", "shop")})
    stored = data.collate([(0, n, n) for n in range(20)])
    with torch.no_grad():
        # the run stored prices in fp32
        torch.testing.assert_close(model(**inputs).logits, own.eval()(**stored.inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_exported_folder_without_scantling_raises(tmp_path: Path) -> None:
    DLRM(DLRMConfig(table_sizes=[5, 4])).save_pretrained(tmp_path)
    code = f"from transformers import AutoModel; AutoModel.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "dlrm" in done.stderr


@pytest.mark.parametrize("optim", ["adamw", "came"])
def test_plan_matches_the_run(tmp_path: Path, optim: str) -> None:
    clicks = {**clicks_recipe(tmp_path)["data"]["clicks"], "table_size": {"user": 50, "shop": 20}}
    recipe = clicks_recipe(tmp_path, data={"clicks": clicks}, optim={"name": optim}, train={"steps": 2})
    planned = sc.plan(recipe)
    assert not planned.notes
    assert planned.parameters_by_role["embedding"] == 70 * 4
    assert planned.flops_per_token is not None
    measured = sc.train(recipe, run_dir=tmp_path / "run").metrics
    for key in ("num_parameters", "weight_bytes", "gradient_bytes", "optimizer_state_bytes", "wire_bytes"):
        assert getattr(planned, key) == measured[key], key
    assert planned.total_tokens == measured["tokens"] == 2 * 64


@pytest.mark.slow
def test_peak_memory_of_large_tables(tmp_path: Path) -> None:
    """Within 20 % of the resident set, mostly 2 million rows, their dense gradients and AdamW's state."""
    clicks = {**clicks_recipe(tmp_path)["data"]["clicks"], "table_size": 1_000_000}
    recipe = clicks_recipe(tmp_path, data={"clicks": clicks}, train={"steps": 2, "batch_size": 256})
    recipe["model"]["overrides"]["embedding_dim"] = 8
    code = (
        "import json, sys, scantling as sc; "
        "print(json.dumps(dict(sc.train(json.loads(sys.argv[1]), run_dir=sys.argv[2]).metrics)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(recipe), str(tmp_path / "run")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    planned = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert planned["optimizer_state_bytes"] == measured["optimizer_state_bytes"]
    assert planned["peak_memory_bytes"] == pytest.approx(measured["peak_memory_bytes"], rel=0.2)


def assert_equal_runs(straight: Path, broken: Path, last: int) -> None:
    for want, got in zip(records(straight), records(broken), strict=True):
        for key in ("step", "epoch", "tokens", "loss", "grad_norm", "lr", "eval_loss", "auc"):
            assert want.get(key) == got.get(key), (want["step"], key)
    want_tensors, got_tensors = (load_tensors(run / f"checkpoints/step-{last}") for run in (straight, broken))
    assert want_tensors.keys() == got_tensors.keys()
    assert all(torch.equal(tensor, got_tensors[key]) for key, tensor in want_tensors.items())


def test_resume_is_bitwise(tmp_path: Path) -> None:
    """Across the end of an epoch, with micro-batches."""
    train = {"steps": 20, "batch_size": 256, "micro_batch_size": 64, "checkpoint_every": 10, "eval_every": 8}
    sc.train(clicks_recipe(tmp_path, train=train), run_dir=tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-20")
    sc.train(tmp_path / "broken", resume=True)
    assert_equal_runs(tmp_path / "straight", tmp_path / "broken", 20)
    assert records(tmp_path / "broken")[-1]["epoch"] == 1


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2])
def test_kill_and_resume_is_bitwise(tmp_path: Path, processes: int) -> None:
    train = {"steps": 40, "batch_size": 256, "micro_batch_size": 64, "checkpoint_every": 3, "eval_every": 8}
    path = write_recipe(tmp_path / "recipe.yaml", clicks_recipe(tmp_path, train=train))
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    done = scantling("train", path, "--run-dir", straight, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    process = start_scantling("train", path, "--run-dir", broken, processes=processes)
    wait_for_step(broken / "metrics.jsonl", 8, process)
    kill_tree(process)
    resumed = scantling("train", broken, "--resume", processes=processes)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed from" in resumed.stdout
    assert_equal_runs(straight, broken, 40)


@pytest.mark.dist
def test_two_processes_match_one(tmp_path: Path) -> None:
    """The AUC too, whose scores are spread over both processes; only the order of sums differs, in fp32."""
    recipe = clicks_recipe(tmp_path, train={"batch_size": 128, "micro_batch_size": 32})
    sc.train(recipe, run_dir=tmp_path / "1")
    done = scantling("train", write_recipe(tmp_path / "r.yaml", recipe), "--run-dir", tmp_path / "2", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    for one, two in zip(records(tmp_path / "1"), records(tmp_path / "2"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two.get("auc") == pytest.approx(one.get("auc"), abs=1e-4)
        assert two["tokens"] == one["tokens"]


def test_resume_refuses_other_data(tmp_path: Path) -> None:
    recipe = clicks_recipe(tmp_path, train={"steps": 4, "checkpoint_every": 2})
    sc.train(recipe, run_dir=tmp_path / "run")
    with (tmp_path / "clicks.csv").open("a") as file:
        file.write("1,2,30,u1,100\n")
    with pytest.raises(UserError, match="the data is not what"):
        sc.train(tmp_path / "run", resume=True)


def test_flights_recipe_runs(tmp_path: Path) -> None:
    """No feature is known only after departure. Two passes over the rows: a third overfits."""
    recipe = load_recipe(ROOT / "recipes" / "flights-dlrm.yaml")
    assert recipe.data.clicks is not None
    used = {*(recipe.data.clicks.numeric or ()), *(recipe.data.clicks.categorical or ())}
    assert not used & {"dep_delay", "dep_time", "arr_time", "arr_delay", "air_time"}
    settings = [
        f"data.csv={ROOT / 'tests' / 'data' / 'flights.csv.gz'}",
        "train.steps=40",
        "train.batch_size=128",
    ]
    metrics = sc.train(recipe, run_dir=tmp_path / "run", settings=[*settings, "train.device=cpu"]).metrics
    assert metrics["auc"] > 0.6


def test_criteo_recipe_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from zipf_clicks import CRITEO_KAGGLE, ZipfClicks, write_criteo

    clicks = ZipfClicks(cardinalities=[min(size, 100) for size in CRITEO_KAGGLE])
    write_criteo(tmp_path / "train.txt", 3000, clicks=clicks)
    settings: list[Any] = [f"data.criteo={tmp_path / 'train.txt'}", "train.steps=60", "train.batch_size=128"]
    settings += ["model.overrides={embedding_dim: 4, bottom_mlp: [16], top_mlp: [16]}", "optim.lr=0.01"]
    recipe = load_recipe(ROOT / "recipes" / "papers" / "criteo-dlrm.yaml")
    assert recipe.tensor is not None
    large = {f"tables.{number}" for number, size in enumerate(CRITEO_KAGGLE) if size >= 90_000}
    assert large == {name for name in recipe.tensor.rank if name.startswith("tables")}
    settings.append('tensor.rank={"tables.*": 2}')
    metrics = sc.train(recipe, run_dir=tmp_path / "run", settings=[*settings, "train.device=cpu"]).metrics
    assert metrics["auc"] > 0.6
