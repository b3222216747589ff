"""Tests of image classification: batches, augmentation by epoch, loss, baselines."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scantling.trainer.data.images import ImageSet
from scantling.trainer.data.loader import EVALUATION, evenly_spaced
from scantling.trainer.recipe.schema import DataSection
from scantling.trainer.tasks import baselines
from scantling.trainer.tasks.base import TaskData
from scantling.trainer.tasks.image_classification import ImageClassification, PixelBatches
from tests.images import images_recipe, write_npz

TASK = ImageClassification()


def prepared(folder: Path, **data: Any) -> TaskData:
    return TASK.prepare(DataSection(**{**images_recipe(folder)["data"], **data}), seed=0)


def test_pixels_go_from_minus_one_to_one(tmp_path: Path) -> None:
    data = prepared(tmp_path, image_shift=0)
    examples = [(0, n, data.train[n]) for n in (5, 0)]
    batch = data.collate(examples)
    pixels = batch.inputs["pixel_values"]
    assert pixels.shape == (2, 1, 8, 8)
    want = torch.from_numpy(np.stack([item.pixels for *_, item in examples])) / 255
    torch.testing.assert_close(pixels, (want - 0.5) / 0.5, rtol=0, atol=1e-6)
    assert batch.labels.tolist() == [item.label for *_, item in examples]
    assert (batch.num_targets, batch.num_tokens) == (2, 2)
    sent = pickle.loads(pickle.dumps((data.train, data.collate)))  # noqa: S301 (our own bytes)
    assert torch.equal(sent[1]([(0, 5, sent[0][5])]).inputs["pixel_values"], pixels[:1])


def test_shifts_are_all_equally_likely_and_of_the_epoch() -> None:
    """A single bright pixel shows where an image was shifted."""
    pixels = np.zeros((1, 8, 8), dtype=np.uint8)
    pixels[0, 4, 3] = 255
    batches = PixelBatches(shift=2, flip=False, seed=3)
    seen = np.zeros((8, 8))
    for epoch in range(5):
        for index in range(500):
            moved = batches.changed(epoch, index, pixels)
            assert moved.shape == pixels.shape
            assert np.array_equal(moved, batches.changed(epoch, index, pixels))
            seen += moved[0] / 255
    assert seen[2:7, 1:6].sum() == 2500
    assert (np.abs(seen[2:7, 1:6] - 100) < 5 * math.sqrt(100)).all(), "25 places, 100 expected in each"
    assert np.array_equal(batches.changed(EVALUATION, 0, pixels), pixels)


def test_shifted_in_pixels_are_black_and_half_are_mirrored() -> None:
    pixels = np.full((3, 4, 4), 200, dtype=np.uint8)
    changed = [PixelBatches(1, False, 0).changed(0, index, pixels) for index in range(50)]
    assert {int((moved == 200).sum()) for moved in changed} == {3 * 16, 3 * 12, 3 * 9}
    assert {int(value) for moved in changed for value in np.unique(moved)} == {0, 200}
    ramp = np.broadcast_to(np.arange(4, dtype=np.uint8), (1, 4, 4))
    mirrored = [np.array_equal(PixelBatches(0, True, 0).changed(0, n, ramp), ramp[:, :, ::-1]) for n in range(400)]
    plain = [np.array_equal(PixelBatches(0, True, 0).changed(0, n, ramp), ramp) for n in range(400)]
    assert sum(mirrored) + sum(plain) == 400
    assert 150 < sum(mirrored) < 250


def test_loss_is_the_sum_of_the_cross_entropies(tmp_path: Path) -> None:
    class Constant(torch.nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> Any:
            return type("Output", (), {"logits": torch.tensor([1.0, 0.0, 0.0]).expand(len(pixel_values), 3)})

    data = prepared(tmp_path)
    batch = data.collate([(0, n, data.train[n]) for n in range(100)])
    result = TASK.loss(Constant(), batch)
    first = int((batch.labels == 0).sum())
    rest = math.log(math.e + 2)
    assert float(result.loss) == pytest.approx(first * (rest - 1) + (100 - first) * rest, rel=1e-5)
    assert int(result.counts["correct"]) == first
    sums = {"loss": 30.0, "targets": 100.0, "correct": 90.0}
    assert TASK.metrics(sums, data) == {"eval_loss": 0.3, "accuracy": 0.9}


def test_baselines(tmp_path: Path) -> None:
    """Class means separate these classes; the most frequent label alone does not."""
    data = prepared(tmp_path)
    assert isinstance(data.train, ImageSet)
    assert isinstance(data.heldout, ImageSet)
    figures = TASK.baselines(data)
    assert figures["class_mean_accuracy"] > 0.95
    most = np.bincount(data.train.labels).argmax()
    assert figures["majority_accuracy"] == float((data.heldout.labels == most).mean())


@pytest.mark.parametrize("most", [None, 7])
def test_class_means_of_few_pixels_at_a_time(tmp_path: Path, most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The predictions equal those from direct differences, on the evaluated images."""
    write_npz(tmp_path / "images.npz", 60)
    images = np.load(tmp_path / "images.npz")
    noise = np.random.default_rng(1).permutation(images["labels"])  # otherwise nearly all answers would be right
    np.savez(tmp_path / "images.npz", images=images["images"], labels=noise)
    data = prepared(tmp_path)
    assert isinstance(data.heldout, ImageSet)
    pixels = np.stack([data.train[n].pixels for n in range(len(data.train))]).astype(np.float64)
    means = [pixels[data.train.labels == label].mean(0) for label in range(3)]
    evaluated = [data.heldout[n] for n in evenly_spaced(len(data.heldout), most)]
    distances = [[((item.pixels - mean) ** 2).sum() for mean in means] for item in evaluated]
    labels = [item.label for item in evaluated]
    monkeypatch.setattr(baselines, "PIXELS", 200)
    figures = TASK.baselines(data, max_samples=most)
    assert figures["class_mean_accuracy"] == np.mean(np.argmin(distances, axis=1) == labels)
    assert figures["majority_accuracy"] == np.mean(np.array(labels) == np.bincount(data.train.labels).argmax())


def test_configuration_comes_from_the_data(tmp_path: Path) -> None:
    found = TASK.config_overrides(prepared(tmp_path))
    assert (found["num_channels"], found["image_size"], found["num_labels"]) == (1, 8, 3)
    assert found["id2label"] == {0: "left", 1: "right", 2: "top"}
    notes: list[str] = []
    planned = TASK.planned_overrides(DataSection(**images_recipe(tmp_path)["data"]), notes)
    assert planned == {"num_channels": 1, "image_size": 8, "num_labels": 2}
    assert "2 are assumed" in notes[0]
    assert TASK.planned_overrides(DataSection(images="digits"), [])["num_labels"] == 10
