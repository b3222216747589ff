"""Prepare a click log: read the rows, split them into training and held-out rows, and fit their features."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scantling.errors import UserError
from scantling.trainer.data.cache import FORMAT, Cache
from scantling.trainer.data.click_features import ClickFeatures, fit_features
from scantling.trainer.data.click_files import click_files
from scantling.trainer.data.click_store import ClickStore, read_clicks
from scantling.trainer.data.hashing import fingerprint, key64, permutation
from scantling.trainer.data.progress import NoProgress, Progress
from scantling.trainer.data.store import MappedArray, write_array
from scantling.trainer.recipe.schema import Clicks, DataSection

logger = logging.getLogger(__name__)

RowNumbers = MappedArray | range


@dataclass(frozen=True)
class PreparedClicks:
    """A prepared click log.

    Attributes:
        features: fitted to the training rows.
        store: the training rows, and those held out from the same files.
        held_store: the rows of `validation` files, or None.
        train: row indices in `store`, ascending.
        heldout: row indices, ascending, in `held_store` if it exists, else in `store`; None without held-out rows.
        info: facts for the run's records.
    """

    features: ClickFeatures
    store: ClickStore
    held_store: ClickStore | None
    train: RowNumbers
    heldout: RowNumbers | None
    info: dict[str, Any]


def prepare_clicks(
    section: DataSection, *, seed: int, cache: Cache | None = None, progress: Progress | None = None
) -> PreparedClicks:
    """Read, split and fit; reuse cached results.

    Rows are held out by a hash of their index and the seed: exactly the configured share, the same on every machine.

    Args:
        section: the recipe's data section.
        seed: determines which rows are held out.
        cache: stores results. Default: the user's cache.
        progress: receives the progress of long work.

    Raises:
        UserError: the files or their columns cannot be used.
    """
    cache, progress = cache or Cache(), progress or NoProgress()
    clicks = section.clicks or Clicks()
    files = click_files(section)
    store = read_clicks(files, cache, progress)
    held_store = None
    if section.validation is not None:
        held_store = read_clicks(click_files(section, validation=True), cache, progress)
        if held_store.content == store.content:
            logger.warning("data.validation: all of the held-out rows are also among those that are trained on")
    share = section.heldout if held_store is None else 0.0
    held = math.ceil(share * len(store))
    if held >= len(store):
        raise UserError(
            f"{store.name}: nothing would be left to train on of {len(store)} rows; lower data.heldout, give more, "
            "or name held-out files in data.validation"
        )
    settings = clicks.model_dump(include={"scaling", "table_size", "min_count"})

    def make(folder: Path) -> dict[str, Any]:
        train = _split(len(store), held, seed, folder)
        fit_features(clicks, files.columns.numeric, files.columns.categorical, store, train).save_pretrained(folder)
        return {}

    facts = ["click-features", FORMAT, store.content, held, seed if held else None, settings]
    entry = cache.get("click-features", fingerprint(facts), make)
    features = ClickFeatures.from_pretrained(entry.path)
    train: RowNumbers = MappedArray(entry.path / "train", "int64") if held else range(len(store))
    heldout: RowNumbers | None = MappedArray(entry.path / "heldout", "int64") if held else None
    if held_store is not None:
        heldout = range(len(held_store))
    info = {
        "source": files.name,
        "train": _count_rows(store, train),
        "heldout": None if heldout is None else _count_rows(held_store or store, heldout),
        "heldout_by": "files" if held_store is not None else "row" if held else None,
        "features": features.to_dict(),
        "cache": str(entry.path),
        "fingerprint": entry.path.name if held_store is None else fingerprint([entry.path.name, held_store.content]),
    }
    return PreparedClicks(features, store, held_store, train, heldout, info)


def _split(rows: int, held: int, seed: int, folder: Path) -> Sequence[int] | Any:
    """Write the indices of the held-out and of the training rows, and return the latter."""
    if not held:
        return range(rows)
    order = permutation(rows, key64("heldout", seed))
    # Ascending row numbers make reads of the mapped file sequential while fitting.
    write_array(folder / "heldout", np.sort(order[:held]).astype("<i8"))
    train = np.sort(order[held:]).astype("<i8")
    write_array(folder / "train", train)
    return train


def _count_rows(store: ClickStore, rows: RowNumbers) -> dict[str, int]:
    return {"rows": len(rows), "clicks": int(np.count_nonzero(store.labels[_index(rows)]))}


def _index(rows: RowNumbers) -> Any:
    return slice(rows.start, rows.stop) if isinstance(rows, range) else rows[:]
