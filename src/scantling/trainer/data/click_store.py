"""Click logs on disk, as memory-mapped arrays; files are read once, and again only if one has changed.

An entry holds `labels` (uint8), and per row `numbers` (fp32, NaN for missing values) and `keys` (uint64, hashes of
the categories). It holds nothing that depends on the settings (means, ids), so changing them requires no new reading.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scantling.errors import UserError
from scantling.trainer.data.cache import FORMAT, Cache
from scantling.trainer.data.click_files import ClickFiles
from scantling.trainer.data.files import refuse_changed
from scantling.trainer.data.hashing import fingerprint
from scantling.trainer.data.progress import Progress
from scantling.trainer.data.store import MappedArray
from scantling.trainer.data.tables import warn_about_unlabeled


class Rows(NamedTuple):
    """Rows of a click log: labels (rows,), numbers (rows, numeric columns), keys (rows, categorical columns)."""

    labels: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.float32]
    keys: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class ClickStore:
    """A click log that has been read.

    Attributes:
        name: name of the log for messages.
        labels: of all rows.
        numbers, keys: of all rows, flat.
        widths: number of numeric and of categorical columns.
        content: hash of the whole content.
    """

    name: str
    labels: MappedArray
    numbers: MappedArray
    keys: MappedArray
    widths: tuple[int, int]
    content: str

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: npt.NDArray[np.int64] | slice) -> Rows:
        """Return rows by index."""
        numeric, categorical = self.widths
        return Rows(
            self.labels[rows],
            self.numbers[:].reshape(len(self), numeric)[rows],
            self.keys[:].reshape(len(self), categorical)[rows],
        )


def read_clicks(files: ClickFiles, cache: Cache, progress: Progress) -> ClickStore:
    """Return the rows of a click log; cached until a file or the selected columns change.

    Raises:
        UserError: the files cannot be read or hold no row with a label.
    """
    stamp = files.stamp()
    key = fingerprint(["clicks, decimals as numbers", FORMAT, stamp])
    entry = cache.get("clicks", key, lambda folder: _write(files, stamp, folder, progress))
    warn_about_unlabeled(files.name, entry.meta["unlabeled"])
    return ClickStore(
        files.name,
        MappedArray(entry.path / "labels", "uint8"),
        MappedArray(entry.path / "numbers", "float32"),
        MappedArray(entry.path / "keys", "uint64"),
        (len(files.columns.numeric), len(files.columns.categorical)),
        entry.meta["content"],
    )


def _write(files: ClickFiles, stamp: Any, folder: Path, progress: Progress) -> dict[str, Any]:
    content = {name: hashlib.sha256() for name in Rows._fields}
    rows = unlabeled = 0
    bytes_per_row = 1 + 4 * len(files.columns.numeric) + 8 * len(files.columns.categorical)
    progress.start(f"reading {files.name}", None)
    with ExitStack() as stack:
        stack.callback(progress.finish)
        opened = {name: stack.enter_context((folder / name).open("wb")) for name in Rows._fields}
        for block in files.blocks():
            for name, file in opened.items():
                values = getattr(block, name)
                data = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).data
                file.write(data)
                content[name].update(data)
            rows += len(block.labels)
            unlabeled += block.unlabeled
            progress.advance(len(block.labels) * bytes_per_row)
    refuse_changed(files.name, stamp, files.stamp())
    if not rows:
        raise empty_log_error(files, unlabeled)
    digests = [digest.hexdigest() for digest in content.values()]
    return {"content": fingerprint([rows, files.columns, *digests]), "unlabeled": unlabeled}


def check_clicks(files: ClickFiles) -> None:
    """Read the first rows of a click log.

    Raises:
        UserError: they cannot be used; the message is the same as in a run.
    """
    if next(files.blocks(), None) is None:
        raise empty_log_error(files, 0)


def empty_log_error(files: ClickFiles, unlabeled: int) -> UserError:
    """Return the error for a click log with this many unlabeled rows, and no others."""
    reason = f"{unlabeled} rows, none with a label" if unlabeled else "it has no rows"
    return UserError(f"{files.name}: the click log is empty: {reason}")
