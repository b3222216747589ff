"""Tests of a vision transformer in all stages: train, resume, several processes, plan, evaluate, export, report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scantling as sc
from scantling.cli import run as run_cli
from scantling.trainer.training.checkpoint import load_tensors
from scantling.trainer.training.run_dir import RunDir
from scantling.trainer.training.trained_run import evaluate_run, load_run
from tests.images import image_arrays, images_recipe
from tests.runs import records, scantling, write_recipe

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three epochs on gray images that are converted to RGB."""
    folder = tmp_path_factory.mktemp("images")
    recipe = images_recipe(folder, data={"image_channels": 3}, train={"steps": 40, "eval_every": 20})
    sc.train(recipe, run_dir=folder / "run")
    return folder / "run"


def test_run_learns(trained: Path) -> None:
    first, last = (record for record in records(trained) if "accuracy" in record)
    assert last["accuracy"] > 0.95
    assert last["eval_loss"] < first["eval_loss"] < 1.1
    assert last["tokens"] == 40 * 32
    result = json.loads((trained / "result.json").read_text())
    assert result["accuracy"] == last["accuracy"]
    page = (trained / "report.html").read_text()
    assert "32 images" in page
    assert "sequence length" not in page, "images have none"


def test_eval_repeats_the_metrics_of_the_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["eval", str(trained), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    last = records(trained)[-1]
    for key in ("eval_loss", "accuracy"):
        assert figures[key] == pytest.approx(last[key], rel=1e-6), key
    assert figures["majority_accuracy"] < 0.5 < figures["class_mean_accuracy"]


def test_eval_uses_eval_samples_of_the_recipe(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    recipe = RunDir(run).read_recipe().model_dump(mode="json")
    write_recipe(run / "recipe.yaml", recipe | {"train": recipe["train"] | {"eval_samples": 3}})
    figures = evaluate_run(run)
    for key in ("accuracy", "majority_accuracy", "class_mean_accuracy"):
        assert float(figures[key]) * 3 == pytest.approx(round(float(figures[key]) * 3)), key


def test_exported_folder_takes_raw_images(trained: Path, tmp_path: Path) -> None:
    """With transformers' own image processor, also for images of another size."""
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

    folder = tmp_path / "model"
    assert run_cli(["export", str(trained), "--to", "hf", str(folder)]) == 0
    run = load_run(trained)
    data, own = run.data, run.model
    processor = AutoImageProcessor.from_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    images, labels = image_arrays(500)
    raw = {pixels.tobytes(): pixels for pixels in images}
    item = data.train[0]
    inputs = processor(Image.fromarray(raw[item.pixels[0].tobytes()]), return_tensors="pt")
    ours = data.collate([(-1, 0, item)]).inputs
    torch.testing.assert_close(inputs["pixel_values"], ours["pixel_values"], rtol=0, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, own.eval()(**ours).logits)
    large = [Image.fromarray(np.kron(pixels, np.ones((3, 3), np.uint8))) for pixels in images[:20]]
    answers = pipeline("image-classification", model=model, image_processor=processor)(large, top_k=1)
    assert np.mean([answer[0]["label"] == label for answer, label in zip(answers, labels, strict=False)]) > 0.8


def test_plan_matches_the_run(tmp_path: Path) -> None:
    recipe = images_recipe(tmp_path, data={"labels": ["left", "right", "top"]}, train={"steps": 2})
    planned = sc.plan(recipe)
    assert not planned.notes
    assert planned.flops_per_token is not None
    measured = sc.train(recipe, run_dir=tmp_path / "run").metrics
    for key in ("num_parameters", "weight_bytes", "gradient_bytes", "optimizer_state_bytes", "wire_bytes"):
        assert getattr(planned, key) == measured[key], key
    assert planned.total_tokens == measured["tokens"] == 2 * 32


def test_flops_count_the_matrix_products(tmp_path: Path) -> None:
    """16 patches and the class token; the classifier reads one vector."""
    planned = sc.plan(images_recipe(tmp_path, data={"labels": ["left", "right", "top"]}))
    tokens, hidden, wide, layers = 17, 32, 64, 2
    linear = 2 * tokens * (4 * hidden * hidden + 2 * hidden * wide)
    attention = 4 * tokens * tokens * hidden
    forward = 2 * 16 * 4 * hidden + layers * (linear + attention) + 2 * hidden * 3
    assert planned.flops_per_token == 3 * forward


def test_vit_base_has_its_size() -> None:
    """ViT-B/16 with 1,000 classes: 86.6 million parameters, 17.6 billion multiply-adds (35 GFLOP) per image."""
    labels = [str(number) for number in range(1000)]
    recipe = {
        "model": {"preset": "vit-base"},
        "data": {"images": "photos", "image_size": 224, "labels": labels},
        "train": {"steps": 1, "batch_size": 1},
    }
    planned = sc.plan(recipe, device="cpu")
    assert planned.num_parameters == 86_567_656
    assert planned.flops_per_token == pytest.approx(3 * 35.1e9, rel=0.01)


def assert_equal_runs(straight: Path, broken: Path, last: int) -> None:
    for want, got in zip(records(straight), records(broken), strict=True):
        for key in ("step", "epoch", "tokens", "loss", "grad_norm", "lr", "eval_loss", "accuracy"):
            assert want.get(key) == got.get(key), (want["step"], key)
    want_tensors, got_tensors = (load_tensors(run / f"checkpoints/step-{last}") for run in (straight, broken))
    assert want_tensors.keys() == got_tensors.keys()
    assert all(torch.equal(tensor, got_tensors[key]) for key, tensor in want_tensors.items())


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="dense"),
        pytest.param(
            {
                "tensor": {"rank": 4, "num_modes": 2, "size_target": 0.8, "adapt": 9, "truncate_every": 3},
                "optim": {"name": "came", "lr": 0.003, "debias": True},
            },
            id="tt",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"optim": {"name": "sign", "lr": 0.003}, "comm": {"name": "demo", "topk": 4, "chunk": 16}},
            id="demo",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_resume_is_bitwise(tmp_path: Path, sections: dict[str, Any]) -> None:
    """Across the end of an epoch, with micro-batches, shifted and mirrored images, and dropout."""
    train = {"steps": 12, "batch_size": 64, "micro_batch_size": 32, "checkpoint_every": 6, "eval_every": 8}
    recipe = images_recipe(tmp_path, **{**sections, "train": train, "data": {"image_flip": True}})
    recipe["model"]["overrides"]["hidden_dropout_prob"] = 0.1
    sc.train(recipe, run_dir=tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-12")
    sc.train(tmp_path / "broken", resume=True)
    assert_equal_runs(tmp_path / "straight", tmp_path / "broken", 12)
    assert records(tmp_path / "broken")[-1]["epoch"] == 1


@pytest.mark.dist
def test_two_processes_match_one(tmp_path: Path) -> None:
    """With workers too; only the order of sums differs, in fp32."""
    recipe = images_recipe(tmp_path, train={"micro_batch_size": 8}, data={"workers": 1})
    sc.train(recipe, run_dir=tmp_path / "1")
    done = scantling("train", write_recipe(tmp_path / "r.yaml", recipe), "--run-dir", tmp_path / "2", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    for one, two in zip(records(tmp_path / "1"), records(tmp_path / "2"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two.get("accuracy") == pytest.approx(one.get("accuracy"), abs=0.02)
        assert two["tokens"] == one["tokens"]


def test_digits_recipe_runs(tmp_path: Path) -> None:
    """Run a tenth of its steps."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed (pip install 'scantling[vision]')")
    settings = ["train.steps=120", "train.eval_every=120", "train.device=cpu"]
    result = sc.train(ROOT / "recipes" / "digits-vit.yaml", run_dir=tmp_path / "run", settings=settings)
    assert result.metrics["accuracy"] > 0.6
