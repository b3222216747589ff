"""Checkpoints that survive anything: written aside, fsynced, renamed, verified before they are used.

A checkpoint is a folder `step-N` with the tensor files of torch.distributed.checkpoint, `index.json`, which says where
each tensor is, and `manifest.json`: step, world size, versions, everything that is no tensor, the size and SHA-256 of
each file, and a checksum of the manifest itself. It is written to `step-N.tmp` and renamed when all of it is on disk,
so a folder `step-N` is complete unless the disk damaged it, which the sums show.

Tensors are stored flat under plain keys, with the dtype they have: `model/<name>`, `optimizer/<parameter>/<key>`,
`rng/rank<r>/<device>`, `method/<name>/<key>`, `exchange/rank<r>/<name>`. Nothing read from a checkpoint can run code:
tensors are read with `weights_only=True`, everything else is JSON, and DCP's pickled index is never read.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import platform
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from scantling.errors import RunError, UserError, first_line
from scantling.files import sync
from scantling.training.cleanup import checkpoint_steps, publish, remove_checkpoint, remove_torn
from scantling.training.distributed import Place
from scantling.training.index import INDEX, METADATA, IndexedReader, read_index, write_index
from scantling.training.manifest import damage, file_digest, write_manifest

logger = logging.getLogger(__name__)


@dataclass
class State:
    """All that a checkpoint holds: flat tensors by key, and JSON values by key."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Checkpointer:
    """Saves and finds the checkpoints of one run.

    Args:
        folder: the run's `checkpoints` folder, on a file system that all processes see.
        place: this process's rank and world size.
        keep: how many of the newest checkpoints stay.
    """

    def __init__(self, folder: Path, place: Place, *, keep: int = 2) -> None:
        self.folder, self.place, self.keep = folder, place, keep

    def save(self, step: int, state: State) -> Path:
        """Write one checkpoint; on return it is on disk and the old ones beyond `keep` are gone.

        Collectives: those of DCP's save, and broadcasts of the outcome.

        Raises:
            RunError: it could not be written, such as on a full disk; earlier checkpoints are untouched.
        """
        target = self.folder / f"step-{step}"
        aside = self.folder / f"step-{step}.tmp"
        problem = self.place.share(_attempt(lambda: _fresh_folder(aside)) if self.place.is_main else None)
        if problem is None:
            problem = _attempt(lambda: _dcp_save(state.tensors, aside, self.place))
            problem = next((p for p in self.place.gather(problem) if p), None)
        if problem is None:
            outcome = _attempt(lambda: self._publish(step, state, aside, target)) if self.place.is_main else None
            self.place.meet()  # the sums of large files take longer than a collective may
            problem = self.place.share(outcome)
        if problem is not None:
            if self.place.is_main and aside.is_dir():
                with contextlib.suppress(OSError):
                    remove_checkpoint(aside)
            newest = next((other for other in self.steps() if other != step), None)
            kept = (
                f"the checkpoint of step {newest} is intact" if newest is not None else "there is no earlier checkpoint"
            )
            raise RunError(f"cannot save the checkpoint of step {step} in {self.folder}: {problem}; {kept}")
        return target

    def _publish(self, step: int, state: State, aside: Path, target: Path) -> None:
        names = {METADATA, INDEX, *read_index(aside).files}
        manifest = {
            "step": step,
            "world_size": self.place.world_size,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "values": state.values,
            "files": {name: file_digest(aside / name) for name in sorted(names)},
        }
        write_manifest(aside, manifest)
        sync(aside)
        publish(aside, target)
        sync(self.folder)
        steps = self.steps()
        kept = [other for other in steps if other <= step][: self.keep]  # the run has gone on from before later ones
        for other in set(steps) - set(kept):
            with contextlib.suppress(OSError):
                remove_checkpoint(self.folder / f"step-{other}")

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, newest first, damaged ones included."""
        return checkpoint_steps(self.folder)

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole; each damaged one that is passed over is a warning.

        Collective: one broadcast, so that all ranks take the same. They wait for rank 0, which reads whole files, as
        long as for data.
        """
        found: Path | None = None
        if self.place.is_main:
            for step in self.steps():
                path = self.folder / f"step-{step}"
                problem = damage(path)
                if problem is None:
                    found = path
                    break
                logger.warning("checkpoint %s is damaged (%s); trying the one before", path, problem)
        self.place.meet()
        result: Path | None = self.place.share(found)
        return result


def check_data(path: Path, values: dict[str, Any], fingerprint: str | None) -> None:
    """Raise a UserError where a checkpoint with these values is not of the data with this fingerprint."""
    trained_on = values.get("fingerprint")
    if trained_on is not None and trained_on != fingerprint:
        raise UserError(
            f"the data is not what {path} was trained on: a file, a tokenizer or the split has changed; "
            "put it back, or start a new run"
        )


def load_tensors(path: Path, prefix: str = "", into: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Read the tensors whose key begins with `prefix`. Each rank reads its own; there is no collective.

    Args:
        path: a checkpoint folder.
        prefix: keys to read.
        into: tensors to fill in place, by key; the others are made anew on the CPU with the stored shape and dtype.

    Raises:
        UserError: the checkpoint cannot be read, or a tensor in `into` has another shape.
    """
    stored = read_index(path).metadata.state_dict_metadata
    target: dict[str, torch.Tensor] = {}
    for key, entry in stored.items():
        if not key.startswith(prefix) or not isinstance(entry, TensorStorageMetadata):
            continue
        given = None if into is None else into.get(key)
        if given is not None and given.shape != entry.size:
            raise UserError(f"{path}: '{key}' has shape {tuple(entry.size)}, the model has {tuple(given.shape)}")
        target[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if given is None else given
    if target:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                load(target, storage_reader=IndexedReader(path), no_dist=True)
            except CheckpointException as error:
                problem = "; ".join(sorted({first_line(inner[0]) for inner in error.failures.values()}))
                raise UserError(f"the tensors of checkpoint {path} cannot be read: {problem}") from None
    return target


def _attempt(action: Any) -> str | None:
    """Run an action of the file system; return what went wrong in words, or None."""
    try:
        action()
    except CheckpointException as error:
        return "; ".join(sorted({_reason(inner[0]) for inner in error.failures.values()}))
    except (OSError, RuntimeError) as error:
        return _reason(error)
    return None


def _reason(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            return "the disk is full"
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    if "unexpected pos" in text or "PytorchStreamWriter" in text or "No space left" in text:
        return "the disk is full or the file system refused a write"
    return text or type(error).__name__


def _fresh_folder(folder: Path) -> None:
    """Make a folder for one checkpoint, and remove what is left of checkpoints that a kill has cut short."""
    if folder.parent.is_dir():
        remove_torn(folder.parent)
    folder.mkdir(parents=True, exist_ok=True)  # it is still there if other files are in it


def _dcp_save(tensors: dict[str, torch.Tensor], folder: Path, place: Place) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        writer = FileSystemWriter(folder, sync_files=True)
        flat = {k: t.detach() for k, t in tensors.items()}
        metadata = save(flat, storage_writer=writer, no_dist=place.world_size == 1)
    if place.is_main:
        write_index(metadata, folder)
