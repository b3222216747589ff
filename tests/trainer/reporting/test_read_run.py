"""Tests of reading a run directory, including those of crashed runs and of other programs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scantling.errors import UserError
from scantling.trainer.reporting.runs import read_run
from tests.trainer.reporting.fake import PARAMETERS, TOKENS_PER_STEP, make_run


def append(run: Path, *records: dict[str, object]) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_read_run_reads_all_files(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=100))
    assert run.name == "demo-dense"
    assert run.status == "done"
    assert run.planned_steps == 100
    assert run.recipe["optim"]["name"] == "adamw"
    assert run.environment["device"] == "cpu"
    assert run.plan["num_parameters"] == PARAMETERS
    assert run.steps.tolist() == list(range(1, 101))
    assert run.column("tokens")[-1] == 100 * TOKENS_PER_STEP
    assert np.flatnonzero(np.isfinite(run.column("eval_loss"))).tolist() == [49, 99]
    assert run.metric("eval_loss") == run.column("eval_loss")[-1]
    assert run.metric("energy_j") is None
    assert np.isnan(run.column("energy_j")).all()
    assert "memory_source" not in run.columns


def test_read_run_skips_incomplete_last_line(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=5, status=None)
    metrics = path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    assert read_run(path).steps.tolist() == [1, 2, 3, 4]


def test_read_run_prefers_records_after_resume(tmp_path: Path) -> None:
    """Steps 4 to 6 of the first process are discarded; the second process recorded steps 4 and 5."""
    path = make_run(tmp_path / "run", steps=6, status=None)
    append(path, {"step": 4, "loss": 40.0, "tokens": 4}, {"step": 5, "loss": 50.0, "tokens": 5})
    run = read_run(path)
    assert run.steps.tolist() == [1, 2, 3, 4, 5]
    assert run.column("loss")[3:].tolist() == [40.0, 50.0]


def test_read_run_computes_missing_result(tmp_path: Path) -> None:
    whole = read_run(make_run(tmp_path / "whole", steps=60))
    crashed = read_run(make_run(tmp_path / "crashed", steps=60, planned_steps=90, status=None))
    assert crashed.status == "unfinished"
    assert crashed.planned_steps == 90
    for key in ("train_loss", "train_loss_steps", "last_step_loss"):
        assert crashed.metric(key) == pytest.approx(whole.metric(key))
    assert crashed.metric("peak_memory_bytes") == whole.metric("peak_memory_bytes")
    settled = whole.column("step_s")[6:]
    assert crashed.metric("step_s") == pytest.approx(float(np.median(settled)))
    assert crashed.result["memory_source"] == "rss"


def test_read_run_ignores_result_from_before_resume(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=5, planned_steps=10, status="stopped")
    assert read_run(path).status == "stopped"
    append(path, {"step": 6, "loss": 1.0})
    run = read_run(path)
    assert (run.status, run.result["step"]) == ("unfinished", 6)


def test_read_run_drops_non_numbers(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=2, status=None)
    with open(path / "metrics.jsonl", "a") as file:
        file.write(
            '{"step": 3, "loss": NaN, "grad_norm": null, "lr": "high", "step_s": true, "tokens": 1' + "0" * 400 + "}\n"
        )
    run = read_run(path)
    for key in ("loss", "grad_norm", "lr", "step_s", "tokens"):
        assert np.isnan(run.column(key)[-1])
        assert np.isfinite(run.column(key)[0])


def test_read_run_names_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run directory not found"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"recipe\.yaml and metrics\.jsonl not found"):
        read_run(tmp_path)
    path = make_run(tmp_path / "run", steps=1)
    (path / "metrics.jsonl").write_text('{"step": 1')
    with pytest.raises(UserError, match="no step yet"):
        read_run(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 1}\nnot json\n{"step": 2}\n', "line 2"),
        ("metrics.jsonl", '{"step": 1}\n[3]\n', "line 2"),
        ("metrics.jsonl", '{"step": "1"}\n', "line 1"),
        ("result.json", "[1]", "not a JSON object"),
        ("plan.json", '{"a": ', "cannot read"),
        ("recipe.yaml", "a: [1", "not valid YAML"),
        ("recipe.yaml", "just text", "a recipe is a mapping"),
    ],
)
def test_read_run_names_broken_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = make_run(tmp_path / "run", steps=1)
    (path / name).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        read_run(path)
    assert name in str(caught.value)


def test_read_run_recipe_cannot_run_code(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=1)
    marker = tmp_path / "ran"
    (path / "recipe.yaml").write_text(f"name: !!python/object/apply:os.system ['touch {marker}']\n")
    with pytest.raises(UserError, match="not valid YAML"):
        read_run(path)
    assert not marker.exists()
