"""Tests of images from folders, arrays and data sets: conversion, splits, and refusals."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scantling.errors import UserError
from scantling.trainer.data import images as images_module
from scantling.trainer.data.images import PreparedImages, prepare_images
from scantling.trainer.recipe.schema import DataSection
from tests.images import NAMES, image_arrays, write_npz


def prepared(**data: Any) -> PreparedImages:
    return prepare_images(DataSection(**{"image_size": 8, "image_channels": 1, "heldout": 0.2, **data}), seed=0)


def write_folder(root: Path, count: int = 60) -> Path:
    """Write a folder of images per class, one of them nested, and some files that are not images."""
    for number, (pixels, label) in enumerate(zip(*image_arrays(count), strict=True)):
        folder = root / label / ("deeper" if number == 0 else "")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    (root / ".hidden").mkdir()
    (root / "README").write_text("no image")
    (root / NAMES[0] / "notes.txt").write_text("no image")
    return root


def test_class_folders_and_arrays_give_the_same_images(tmp_path: Path) -> None:
    images, labels = image_arrays(60)
    write_npz(tmp_path / "i.npz", 60)
    from_folder, from_arrays = (
        prepared(images=str(path)) for path in (write_folder(tmp_path / "f"), tmp_path / "i.npz")
    )
    assert from_folder.labels == from_arrays.labels == sorted(NAMES)
    assert from_arrays.heldout is not None
    assert len(from_arrays.train) + len(from_arrays.heldout) == 60
    assert len(from_arrays.heldout) == 12
    want = {(pixels.tobytes(), label) for pixels, label in zip(images, labels, strict=True)}
    for ready in (from_folder, from_arrays):
        assert ready.heldout is not None
        sides = [[side[n] for n in range(len(side))] for side in (ready.train, ready.heldout)]
        found = [{(pixels.tobytes(), ready.labels[label]) for pixels, label in side} for side in sides]
        assert found[0] | found[1] == want
        assert not found[0] & found[1]
        assert sides[0][0].pixels.shape == (1, 8, 8)


def test_equal_images_are_on_one_side(tmp_path: Path) -> None:
    images, labels = image_arrays(20)
    np.savez(tmp_path / "i.npz", images=np.repeat(images, 5, axis=0), labels=np.repeat(labels, 5))
    ready = prepared(images=str(tmp_path / "i.npz"), heldout=0.3)
    assert ready.heldout is not None
    sides = [{side[n].pixels.tobytes() for n in range(len(side))} for side in (ready.train, ready.heldout)]
    assert sides[1]
    assert not sides[0] & sides[1]


def test_images_are_resized_and_converted(tmp_path: Path) -> None:
    """EXIF orientation is applied too: the red row at the top of the file becomes a column."""
    pixels = np.zeros((6, 10, 3), dtype=np.uint8)
    pixels[0, :, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the file's top edge is on the right
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        Image.fromarray(pixels).save(tmp_path / label / "i.png", exif=exif)
        Image.fromarray(pixels + np.uint8(ord(label) - 97)).convert("RGBA").save(tmp_path / label / "j.png")
    ready = prepared(images=str(tmp_path), image_size=4, image_channels=None, heldout=0)
    assert ready.heldout is None
    turned, plain = ready.train[0].pixels, ready.train[1].pixels
    assert turned.shape == plain.shape == (3, 4, 4)
    assert turned[0].astype(int).sum(0).argmax() == 3
    assert plain[0].astype(int).sum(1).argmax() == 0
    assert turned[1:].sum() == 0
    want = Image.fromarray(pixels).resize((4, 4), Image.Resampling.BILINEAR)
    assert np.array_equal(plain.transpose(1, 2, 0), np.asarray(want))


def test_hugging_face_dataset(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    datasets = pytest.importorskip("datasets")
    images, _ = image_arrays(30)
    classes = [["no", "yes"][number % 2] for number in range(30)]
    features = datasets.Features({"img": datasets.Image(), "fine": datasets.ClassLabel(names=["no", "yes"])})
    columns = {"img": [Image.fromarray(pixels) for pixels in images], "fine": classes}
    data = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict({"train": data, "test": data.select(range(10))}).save_to_disk(str(tmp_path / "d"))
    section: dict[str, Any] = {"hf": str(tmp_path / "d"), "fields": {"image": "img", "label": "fine"}}
    with caplog.at_level(logging.WARNING):
        ready = prepared(**section, validation="test", heldout=0)
    assert "10 of 10 held-out images are also among the training images" in caplog.text
    assert ready.labels == ["no", "yes"]
    assert ready.heldout is not None
    assert (len(ready.train), len(ready.heldout)) == (30, 10)
    assert np.array_equal(ready.train[3].pixels[0], images[3])
    assert ready.train.labels.tolist() == [number % 2 for number in range(30)]
    with pytest.raises(UserError, match="no column 'image'"):
        prepared(hf=str(tmp_path / "d"), fields={"label": "fine"})
    with pytest.raises(UserError, match="must hold images; given a number"):
        prepared(hf=str(tmp_path / "d"), fields={"image": "fine", "label": "fine"})


@pytest.mark.parametrize("kind", ["torch", "numpy", "arrow"])
def test_dataset_saved_with_a_format(tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    images, _ = image_arrays(4)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": [Image.fromarray(pixels) for pixels in images], "label": [0, 1, 1, 0]}
    data = datasets.Dataset.from_dict(columns, features=features).with_format(kind, columns=["label"])
    data.save_to_disk(str(tmp_path / "d"))
    ready = prepared(hf=str(tmp_path / "d"), fields={"label": "label"}, heldout=0)
    assert ready.train.labels.tolist() == [0, 1, 1, 0]
    assert np.array_equal(ready.train[3].pixels[0], images[3])


def test_rows_without_a_label_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    datasets = pytest.importorskip("datasets")
    images, _ = image_arrays(6)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])})
    columns = {"image": [Image.fromarray(pixels) for pixels in images], "label": [0, 1, -1, 0, -1, 1]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "d"))
    ready = prepared(hf=str(tmp_path / "d"), fields={"label": "label"}, heldout=0)
    assert ready.train.labels.tolist() == [0, 1, 0, 1]
    assert "left out 2 rows without a label" in caplog.text


def test_digits_are_those_of_scikit_learn() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed (pip install 'scantling[vision]')")
    ready = prepared(images="digits", image_size=None, image_channels=None)
    assert ready.heldout is not None
    assert (len(ready.train), len(ready.heldout)) == (1437, 360)
    assert ready.labels == [str(digit) for digit in range(10)]
    assert ready.train.shape == (1, 8, 8)
    shades = {int(shade) for n in range(50) for shade in np.unique(ready.train[n].pixels)}
    assert shades <= {round(level * 255 / 16) for level in range(17)}


def test_validation_and_labels(tmp_path: Path) -> None:
    write_npz(tmp_path / "train.npz", 40)
    write_npz(tmp_path / "valid.npz", 10, seed=1)
    ready = prepared(images=str(tmp_path / "train.npz"), validation=str(tmp_path / "valid.npz"), heldout=0)
    assert ready.heldout is not None
    assert (len(ready.train), len(ready.heldout)) == (40, 10)
    assert ready.info["heldout_by"] == "files"
    images, labels = image_arrays(10, seed=1)
    assert [ready.labels[label] for label in ready.heldout.labels] == labels.tolist()
    write_npz(tmp_path / "valid.npz", 10, seed=2)
    again = prepared(images=str(tmp_path / "train.npz"), validation=str(tmp_path / "valid.npz"), heldout=0)
    assert again.info["fingerprint"] != ready.info["fingerprint"]
    ordered = prepared(images=str(tmp_path / "train.npz"), labels=["top", "right", "left"])
    assert ordered.labels == ["top", "right", "left"]
    assert ordered.info["fingerprint"] != ready.info["fingerprint"]
    np.savez(tmp_path / "other.npz", images=images, labels=["lft", *labels[1:]])
    with pytest.raises(UserError, match=r"image 1: the label 'lft' is not in the label set.*did you mean 'left'"):
        prepared(images=str(tmp_path / "train.npz"), validation=str(tmp_path / "other.npz"), heldout=0)


def test_numbers_as_labels_are_ordered_as_numbers(tmp_path: Path) -> None:
    images, _ = image_arrays(24)
    np.savez(tmp_path / "i.npz", images=images, labels=np.arange(24) % 12)
    assert prepared(images=str(tmp_path / "i.npz"), heldout=0).labels == [str(number) for number in range(12)]


def test_images_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_npz(tmp_path / "i.npz", 30)
    first = prepared(images=str(path))
    monkeypatch.setattr(images_module, "to_pixels", None)  # any decoding now fails
    assert prepared(images=str(path)).info == first.info
    with pytest.raises(TypeError):
        prepared(images=str(path), image_size=4)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((4, 8, 8)), "labels": np.arange(4)}, "must be uint8 .*; given float64 of shape"),
        ({"images": np.zeros((4, 8, 8, 2), np.uint8), "labels": np.arange(4)}, r"given uint8 of shape \(4, 8, 8, 2\)"),
        ({"images": np.zeros((4, 8, 8), np.uint8), "labels": np.arange(3)}, r"shape \(3,\), for 4 images"),
        ({"images": np.zeros((4, 8, 8), np.uint8), "label": np.arange(4)}, "no column 'labels'.*did you mean 'label'"),
        (
            {"images": np.zeros((4, 8, 8), np.uint8), "labels": np.zeros(4)},
            "image 1: column 'labels' must hold a label",
        ),
        ({"images": np.zeros((0, 8, 8), np.uint8), "labels": np.zeros(0, int)}, "no labeled images"),
        (
            {"images": np.zeros((4, 8, 8), np.uint8), "labels": np.zeros(4, int)},
            "4 images, all of them equal; .* or give more images$",
        ),
        ({"images": np.array([{}]), "labels": np.zeros(1, int)}, "not a readable .npz file"),
    ],
)
def test_bad_arrays_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "i.npz", **arrays)
    with pytest.raises(UserError, match=message):
        prepared(images=str(tmp_path / "i.npz"))


def test_bad_files_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="no folder in it"):
        prepared(images=str(tmp_path / "train"))
    with pytest.raises(UserError, match=r"is not there; .*did you mean 'train'"):
        prepared(images=str(tmp_path / "tain"))
    (tmp_path / "i.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(UserError, match=r"not a readable \.npz file"):
        prepared(images=str(tmp_path / "i.npz"))
    (tmp_path / "i.txt").touch()
    with pytest.raises(UserError, match=r"neither a folder nor an \.npz file"):
        prepared(images=str(tmp_path / "i.txt"))
    folder = tmp_path / "train" / "cat"
    folder.mkdir()
    with pytest.raises(UserError, match="cat: no image of this class"):
        prepared(images=str(tmp_path / "train"))
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(folder / "a.png")
    with pytest.raises(UserError, match=r"a.png: pixels of more than 8 bits"):
        prepared(images=str(tmp_path / "train"))
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40), np.uint8)).save(folder / "a.png")
    (folder / "a.png").write_bytes((folder / "a.png").read_bytes()[:500])
    with pytest.raises(UserError, match=r"a.png: not a readable image"):
        prepared(images=str(tmp_path / "train"))
    (folder / "a.png").write_text("text")
    with pytest.raises(UserError, match=r"a.png: not a readable image"):
        prepared(images=str(tmp_path / "train"))
    (folder / "a.png").unlink()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "b.webp", exif=b"MM\0\xcc\0\0\0\x08")
    with pytest.raises(UserError, match=r"b.webp: not a readable image: not a TIFF file"):
        prepared(images=str(tmp_path / "train"))
