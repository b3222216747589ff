"""Prepare images: convert them to one shape, store them on disk, and split them into training and held-out images.

An entry holds `pixels` (uint8, image by image, channels first), memory-mapped, and a label and a digest of each
image. Each image is read, decoded and resized once, and again only if the source or the shape has changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scantling.errors import UserError
from scantling.trainer.data.cache import FORMAT, Cache
from scantling.trainer.data.documents import MAX_LABELS, Scan
from scantling.trainer.data.files import refuse_changed
from scantling.trainer.data.hashing import fingerprint, fingerprint_array
from scantling.trainer.data.image_files import ImageSource, image_source, to_pixels
from scantling.trainer.data.prepare import check_labels, label_set
from scantling.trainer.data.progress import NoProgress, Progress
from scantling.trainer.data.split import HELDOUT, TRAIN, assign_all, split
from scantling.trainer.data.store import MappedArray, write_array
from scantling.trainer.recipe.schema import DataSection

logger = logging.getLogger(__name__)

Shape = tuple[int, int, int]


class LabeledImage(NamedTuple):
    """One example: pixels, (channels, height, width) in uint8, and the label's id."""

    pixels: npt.NDArray[np.uint8]
    label: int


@dataclass(frozen=True)
class ImageSet:
    """Labeled images by index.

    Attributes:
        pixels: of all images of the entry.
        shape: channels, height and width.
        numbers: indices of these images in the entry, (images,).
        labels: their label ids, (images,).
    """

    pixels: MappedArray
    shape: Shape
    numbers: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> LabeledImage:
        if not 0 <= index < len(self):
            raise IndexError(index)
        size = prod(self.shape)
        begin = int(self.numbers[index]) * size
        return LabeledImage(self.pixels[begin : begin + size].reshape(self.shape), int(self.labels[index]))


@dataclass(frozen=True)
class PreparedImages:
    """Prepared images.

    Attributes:
        train: the training images.
        heldout: the held-out images, or None.
        labels: the label set in the order of the ids.
        info: facts for the run's records.
    """

    train: ImageSet
    heldout: ImageSet | None
    labels: list[str]
    info: dict[str, Any]


def prepare_images(
    section: DataSection, *, seed: int, cache: Cache | None = None, progress: Progress | None = None
) -> PreparedImages:
    """Read, resize and split; reuse cached results.

    Images are held out by a hash of their pixels and the seed, so that identical images are on the same side.

    Args:
        section: the recipe's data section.
        seed: determines which images are held out.
        cache: stores results. Default: the user's cache.
        progress: receives the progress of long work.

    Raises:
        UserError: the images or their labels cannot be used.
    """
    cache, progress = cache or Cache(), progress or NoProgress()
    shape = section.image_shape
    source = image_source(section)
    path, scan_result = _read(source, shape, cache, progress)
    share = 0.0 if section.validation is not None else section.heldout
    sides = split(scan_result, heldout=share, max_bytes=None, seed=seed, name=source.name, unit="image")
    labels = label_set(section, scan_result, sides, source.name)
    heldout, held_by, num_seen = None, None, 0
    facts = ["images", FORMAT, scan_result.content, shape, fingerprint_array(sides), labels]
    if (sides == HELDOUT).any():
        heldout, held_by = _select(path, shape, scan_result, sides == HELDOUT, labels), "image"
    if section.validation is not None:
        held_source = image_source(section, validation=True)
        held_path, held_scan = _read(held_source, shape, cache, progress)
        check_labels(labels, held_scan, held_source.name)
        held_sides = assign_all(held_scan, HELDOUT)
        heldout, held_by = _select(held_path, shape, held_scan, held_sides == HELDOUT, labels), "files"
        facts.append(held_scan.content)
        num_seen = int(np.isin(held_scan.digests, scan_result.digests).sum())
        if num_seen:
            logger.warning("%d of %d held-out images are also among the training images", num_seen, len(held_scan))
    train = _select(path, shape, scan_result, sides == TRAIN, labels)
    info = {
        "source": source.name,
        "train": {"images": len(train)},
        "heldout": None if heldout is None else {"images": len(heldout)},
        "heldout_by": held_by,
        "heldout_seen": num_seen,
        "shape": list(shape),
        "cache": str(path),
        "fingerprint": fingerprint(facts),
    }
    return PreparedImages(train, heldout, labels, info)


def _select(path: Path, shape: Shape, scan_result: Scan, which: npt.NDArray[np.bool_], labels: list[str]) -> ImageSet:
    ids = np.array([labels.index(name) if name in labels else -1 for name in scan_result.label_names], dtype=np.int64)
    numbers = np.flatnonzero(which)
    return ImageSet(MappedArray(path / "pixels", "uint8"), shape, numbers, ids[scan_result.labels[numbers]])


def _read(source: ImageSource, shape: Shape, cache: Cache, progress: Progress) -> tuple[Path, Scan]:
    """Return the cache entry of a source, and the scan of its images."""
    stamp = source.stamp()
    key = fingerprint(["images", FORMAT, shape, stamp])
    entry = cache.get("images", key, lambda folder: _write(source, stamp, shape, folder, progress))
    names, label_places = json.loads((entry.path / "labels.json").read_text(encoding="utf-8"))
    digests = np.fromfile(entry.path / "digests", dtype=np.uint64)
    sizes = np.full(len(digests), prod(shape), dtype=np.int64)
    labels = np.fromfile(entry.path / "labels", dtype=np.int32)
    return entry.path, Scan(digests, sizes, labels, names, label_places, entry.meta["content"])


def _write(source: ImageSource, stamp: Any, shape: Shape, folder: Path, progress: Progress) -> dict[str, Any]:
    digests, labels = array("Q"), array("i")
    label_places: dict[str, str] = {}
    ids: dict[str, int] = {}
    content = hashlib.sha256()
    progress.start(f"reading {source.name}", None)
    try:
        with (folder / "pixels").open("wb") as file:
            for picture in source.pictures():
                pixels = to_pixels(picture, shape)
                file.write(pixels.data)
                digest = hashlib.blake2b(pixels.data, digest_size=16).digest()
                content.update(digest + picture.label.encode(errors="backslashreplace") + b"\0")
                digests.append(int.from_bytes(digest[:8], "little"))
                labels.append(ids.setdefault(picture.label, len(ids)))
                label_places.setdefault(picture.label, picture.where)
                if len(ids) > MAX_LABELS:
                    raise UserError(f"{picture.where}: more than {MAX_LABELS} labels; are they the labels?")
                progress.advance(pixels.size)
    finally:
        progress.finish()
    refuse_changed(source.name, stamp, source.stamp())
    if not digests:
        raise UserError(f"{source.name}: there are no labeled images in it")
    write_array(folder / "digests", np.array(digests, dtype=np.uint64))
    write_array(folder / "labels", np.array(labels, dtype=np.int32))
    (folder / "labels.json").write_text(json.dumps([list(ids), list(label_places.values())]), encoding="utf-8")
    return {"content": content.hexdigest()}
