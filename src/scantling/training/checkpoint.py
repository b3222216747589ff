"""Checkpoints that survive anything: written aside, fsynced, renamed, verified before they are used.

A checkpoint is a folder `step-N` with the tensor files of torch.distributed.checkpoint and `manifest.json`: step, world
size, versions, everything that is no tensor, and the size and SHA-256 of each file. It is written to `step-N.tmp` and
renamed when all of it is on disk, so a folder `step-N` is complete unless the disk damaged it, which the sums show.

Tensors are stored flat under plain keys, with the dtype they have: `model/<name>`, `optimizer/<parameter>/<key>`,
`rng/rank<r>/<device>`, `method/<name>/<key>`, `exchange/rank<r>/<name>`. Nothing read from a checkpoint can run code:
there are no pickled objects but DCP's own index, which is read by an unpickler that knows its few classes and no
others.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import io
import json
import logging
import os
import pickle
import platform
import re
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from scantling.errors import RunError, UserError
from scantling.files import sync
from scantling.training.distributed import Place

logger = logging.getLogger(__name__)

FORMAT = 1
_MANIFEST = "manifest.json"


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
            if self.place.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            newest = next(iter(self.steps()), None)
            kept = (
                f"the checkpoint of step {newest} is intact" if newest is not None else "there is no earlier checkpoint"
            )
            raise RunError(f"cannot save the checkpoint of step {step} in {self.folder}: {problem}; {kept}")
        return target

    def _publish(self, step: int, state: State, aside: Path, target: Path) -> None:
        files = {path.name: _digest(path) for path in sorted(aside.iterdir())}
        manifest = {
            "format": FORMAT,
            "step": step,
            "world_size": self.place.world_size,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "values": state.values,
            "files": files,
        }
        with open(aside / _MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
        sync(aside)
        if target.exists():
            shutil.rmtree(target)
        os.rename(aside, target)
        sync(self.folder)
        steps = self.steps()
        kept = [other for other in steps if other <= step][: self.keep]  # the run has gone on from before later ones
        for other in set(steps) - set(kept):
            shutil.rmtree(self.folder / f"step-{other}", ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, newest first, damaged ones included."""
        if not self.folder.is_dir():
            return []
        names = (re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.iterdir())
        return sorted((int(match[1]) for match in names if match), reverse=True)

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


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder; `UserError` where there is none that can be read."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} has no readable {_MANIFEST}: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        given = manifest.get("format") if isinstance(manifest, dict) else None
        raise UserError(f"{path} has checkpoint format {given}; this version reads format {FORMAT}")
    return manifest


def check_data(path: Path, values: dict[str, Any], fingerprint: str | None) -> None:
    """Raise a UserError where a checkpoint with these values is not of the data with this fingerprint."""
    trained_on = values.get("fingerprint")
    if trained_on is not None and trained_on != fingerprint:
        raise UserError(
            f"the data is not what {path} was trained on: a file, a tokenizer or the split has changed; "
            "put it back, or start a new run"
        )


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder (a missing, short or altered file), or None."""
    try:
        manifest = read_manifest(path)
        for name, expected in manifest["files"].items():
            if Path(name).name != name:
                return f"{name} is not a plain file name"
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
            if _digest(file) != expected:
                return f"{name} does not match its checksum"
    except (UserError, OSError, KeyError, TypeError, AttributeError) as error:
        return str(error)
    return None


def load_tensors(path: Path, prefix: str = "", into: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Read the tensors whose key begins with `prefix`. Each rank reads its own; there is no collective.

    Args:
        path: a checkpoint folder.
        prefix: keys to read.
        into: tensors to fill in place, by key; the others are made anew on the CPU with the stored shape and dtype.

    Raises:
        UserError: the checkpoint holds anything but tensors, or a tensor in `into` has another shape.
    """
    reader = _SafeReader(path)
    entries = {k: e for k, e in reader.read_metadata().state_dict_metadata.items() if k.startswith(prefix)}
    target: dict[str, torch.Tensor] = {}
    for key, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata) or not isinstance(entry, TensorStorageMetadata):
            raise UserError(f"{path} holds '{key}', which is no tensor; such a checkpoint is not read")
        given = None if into is None else into.get(key)
        if given is not None and given.shape != entry.size:
            raise UserError(f"{path}: '{key}' has shape {tuple(entry.size)}, the model has {tuple(given.shape)}")
        target[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if given is None else given
    if target:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(target, storage_reader=_SafeReader(path), no_dist=True)
    return target


class _SafeReader(FileSystemReader):
    """DCP's reader with an index that cannot name any class but DCP's own."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        content = (Path(self.path) / ".metadata").read_bytes()
        try:
            metadata = _IndexUnpickler(io.BytesIO(content)).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ValueError, KeyError) as error:
            raise UserError(f"the index of checkpoint {self.path} cannot be read: {error}") from None
        if not isinstance(metadata, Metadata):
            raise UserError(f"the index of checkpoint {self.path} is not one of torch.distributed.checkpoint")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    _ALLOWED: ClassVar[dict[str, set[str]]] = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "SerializationFormat"},
        "torch": {"Size", *(str(t).removeprefix("torch.") for t in vars(torch).values() if isinstance(t, torch.dtype))},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"Path", "PosixPath"},
        "collections": {"OrderedDict"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if name in self._ALLOWED.get(module, ()):
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of ours does")


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
    """Make a folder anew for one checkpoint, and remove what others left that a kill tore."""
    for torn in folder.parent.glob("step-*.tmp"):
        shutil.rmtree(torn, ignore_errors=torn != folder)
    folder.mkdir(parents=True)


def _dcp_save(tensors: dict[str, torch.Tensor], folder: Path, place: Place) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        writer = FileSystemWriter(folder, sync_files=True)
        save({k: t.detach() for k, t in tensors.items()}, storage_writer=writer, no_dist=place.world_size == 1)


def _digest(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
