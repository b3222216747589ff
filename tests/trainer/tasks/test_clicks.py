"""Tests of click prediction: batches, metrics, baselines."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks.base import TaskData
from scantling.trainer.tasks.clicks import ClickPrediction, auc, binary_entropy
from tests.clicks import click_rows, clicks_recipe, write_csv

TASK = ClickPrediction()


def prepared(folder: Path, **data: Any) -> TaskData:
    return TASK.prepare(DataSection(**{**clicks_recipe(folder)["data"], **data}), seed=0)


@settings(deadline=None)  # the first call imports scipy
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
def test_auc_counts_pairs_and_ties_by_half(rows: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in rows], dtype=np.float32)
    labels = np.array([label for _, label in rows], dtype=np.float32)
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels == 1] for b in scores[labels == 0]]
    if not pairs:
        assert auc(scores, labels) is None
    else:
        assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def test_metrics_have_their_definitions() -> None:
    figures = TASK.metrics({"loss": 30.0, "targets": 100.0, "correct": 90.0, "clicks": 20.0}, None)  # type: ignore[arg-type]
    entropy = -0.2 * math.log(0.2) - 0.8 * math.log(0.8)
    assert binary_entropy(0.2) == pytest.approx(entropy)
    assert figures == {"eval_loss": 0.3, "accuracy": 0.9, "normalized_entropy": pytest.approx(0.3 / entropy)}
    one_class = TASK.metrics({"loss": 30.0, "targets": 100.0, "correct": 90.0, "clicks": 0.0}, None)  # type: ignore[arg-type]
    assert "normalized_entropy" not in one_class
    assert TASK.output_metrics({"scores": np.zeros(3), "labels": np.ones(3)}) == {}


def test_batches_hold_the_requested_rows(tmp_path: Path) -> None:
    rows = click_rows(4000)
    later = write_csv(tmp_path / "later.csv", click_rows(50, seed=3))
    data = prepared(tmp_path, validation=str(later), heldout=0)
    assert data.heldout is not None
    batch = data.collate([(0, n, data.train[n]) for n in (7, 3999, 0)])
    assert batch.labels.tolist() == [rows[n]["clicked"] for n in (7, 3999, 0)]
    assert (batch.num_targets, batch.num_tokens) == (3, 3)
    assert data.features is not None
    wanted = data.features({name: [rows[n][name] for n in (7, 3999, 0)] for name in ("price", "age", "user", "shop")})
    assert torch.equal(batch.inputs["categorical"], wanted["categorical"])
    torch.testing.assert_close(batch.inputs["numeric"], wanted["numeric"], rtol=1e-5, atol=1e-6)
    held = data.collate([(-1, n, data.heldout[n]) for n in range(50)])
    assert held.labels.tolist() == [row["clicked"] for row in click_rows(50, seed=3)]
    sent = pickle.loads(pickle.dumps(data.collate))  # noqa: S301 (our own bytes)
    assert torch.equal(sent([(0, 7, 7)]).inputs["categorical"], batch.inputs["categorical"][:1])


def test_loss_is_the_sum_of_the_cross_entropies(tmp_path: Path) -> None:
    class Constant(torch.nn.Module):
        def forward(self, **inputs: torch.Tensor) -> Any:
            return type("Output", (), {"logits": torch.full((len(inputs["categorical"]),), 0.3)})

    data = prepared(tmp_path)
    batch = data.collate([(0, n, data.train[n]) for n in range(200)])
    result = TASK.loss(Constant(), batch)
    clicks = int(batch.labels.sum())
    p = 1 / (1 + math.exp(-0.3))
    assert float(result.loss) == pytest.approx(-clicks * math.log(p) - (200 - clicks) * math.log(1 - p), rel=1e-5)
    assert int(result.counts["correct"]) == int(result.counts["clicks"]) == clicks
    assert TASK.output_metrics({name: value.numpy() for name, value in result.outputs.items()}) == {"auc": 0.5}


def test_baselines_are_those_of_the_share_of_clicks(tmp_path: Path) -> None:
    data = prepared(tmp_path)
    assert data.heldout is not None
    rows = click_rows(4000)
    labels = [rows[data.heldout[n]]["clicked"] for n in range(len(data.heldout))]
    rate = data.info["train"]["clicks"] / data.info["train"]["rows"]
    losses = [-math.log(rate if label else 1 - rate) for label in labels]
    figures = TASK.baselines(data)
    assert figures["base_rate_loss"] == pytest.approx(np.mean(losses))
    assert figures["majority_accuracy"] == pytest.approx(np.mean([label == (rate > 0.5) for label in labels]))
    assert TASK.baselines(prepared(tmp_path, heldout=0)) == {}


def test_plan_before_the_data_is_read(tmp_path: Path) -> None:
    section = DataSection(**clicks_recipe(tmp_path)["data"])
    notes: list[str] = []
    assert TASK.planned_overrides(section, notes) == {"num_numeric": 2, "table_sizes": [50, 1000]}
    assert "the tables of shop have as many rows" in notes[0]
    hashed = DataSection(criteo="x", clicks={"table_size": 300})
    assert TASK.planned_overrides(hashed, notes) == {"num_numeric": 13, "table_sizes": [300] * 26}
    assert len(notes) == 1
