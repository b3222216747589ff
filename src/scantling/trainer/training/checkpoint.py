"""Save, find and read the checkpoints of a run: written aside, fsynced, renamed, and verified before use.

A checkpoint is a folder `step-N` with the tensor files of torch.distributed.checkpoint, `index.json` (where each
tensor is) and `manifest.json` (step, world size, versions, all values that are not tensors, size and SHA-256 of each
file, and a checksum of the manifest itself). It is written to `step-N.tmp` and renamed when everything is on disk, so
a folder `step-N` is complete unless the disk damaged it, which the checksums detect.

Machines without a shared file system each have such folders: `model/`, `optimizer/` and `tensor/` complete in each,
per-rank states where those ranks ran. If they share replicas, each folder has only the parts that its ranks hold. Then
each index names all parts, and the manifest lists the files of the other folders under `elsewhere`, so that a folder is
whole once these files are copied into it.

Tensors are stored flat under plain keys, with the dtype they have: `model/<name>`, `optimizer/<parameter>/<key>`,
`rng/rank<r>/<device>`, `tensor/<key>`, `exchange/rank<r>/<name>` of replica r. Of a sharded tensor each rank writes its
part, so that another number of ranks can read it. Nothing read from a checkpoint can run code: tensors are read with
`weights_only=True`, everything else is JSON, and DCP's pickled index is never read.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import re
import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from scantling.distributed.context import DistContext
from scantling.errors import RunError, UserError, first_line
from scantling.files import fsync
from scantling.trainer.training.checkpoint_files import checkpoint_steps, publish, remove_checkpoint, remove_torn
from scantling.trainer.training.checkpoint_index import (
    INDEX,
    METADATA,
    Index,
    IndexedReader,
    describe_absent,
    merge_entries,
    read_index,
    write_index,
)
from scantling.trainer.training.checkpoint_manifest import file_digest, files_elsewhere, read_manifest, write_manifest
from scantling.trainer.training.checkpoint_parts import Part, own_parts, write_parts

logger = logging.getLogger(__name__)


@dataclass
class State:
    """Content of a checkpoint: flat tensors by key, and JSON values by key."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder with its manifest and index, each read once.

    Attributes:
        path: the folder.
        manifest: content of `manifest.json`.
        index: content of `index.json`, without states of single ranks whose files are missing.
    """

    path: Path
    manifest: Mapping[str, Any]
    index: Index

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read manifest and index; tensor files are not verified.

        Raises:
            UserError: one of the two is missing or damaged.
        """
        manifest = read_manifest(path)
        return cls(path, manifest, read_index(path, files_elsewhere(manifest), allow_lost_ranks=True))

    @property
    def values(self) -> dict[str, Any]:
        """Everything in the checkpoint that is not a tensor."""
        values: dict[str, Any] = self.manifest["values"]
        return values

    def load_tensors(self, prefix: str = "", into: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Read the tensors whose key begins with `prefix`, see `load_tensors`."""
        return load_tensors(self.path, prefix, into, index=self.index)


def verify_checkpoint(path: Path, *, weights_only: bool = False) -> Checkpoint:
    """Read a checkpoint and compare each file with its size and checksum.

    Args:
        path: the folder.
        weights_only: skip files that hold only states of single ranks, such as residuals.

    Raises:
        UserError: a file is missing, short or changed.
    """
    manifest = read_manifest(path)
    # a folder renamed to another step would resume at the wrong step
    if re.fullmatch(r"step-[0-9]+", path.name) and path.name != f"step-{manifest['step']}":
        raise UserError(f"its manifest is that of step {manifest['step']}")
    elsewhere = files_elsewhere(manifest)
    listed = manifest["files"] | {name: file.digest for name, file in elsewhere.items()}
    # with weights_only the index comes first, because it names the files with shared tensors
    index = read_index(path, elsewhere, allow_lost_ranks=True) if weights_only else None
    needed = listed.keys() if index is None else {METADATA, INDEX, *index.shared_files}
    for name in listed:
        # files of other machines are here if they were copied
        if name in needed and (name not in elsewhere or (path / name).exists()):
            _verify_file(path, name, listed[name])
    if index is None:
        index = read_index(path, elsewhere)
        # the two lists must be equal: each file has a checksum, and each checksum a file
        differing = {METADATA, INDEX, *index.files} ^ needed
    else:
        differing = needed - listed.keys()
    if differing:
        raise UserError(f"the manifest and the index name different files: {', '.join(sorted(differing))}")
    return Checkpoint(path, manifest, index)


def _verify_file(folder: Path, name: str, expected: Mapping[str, Any]) -> None:
    # the manifest is untrusted input: its names must not lead out of the folder
    if Path(name).name != name:
        raise UserError(f"{name} is not a plain file name")
    file = folder / name
    if not file.is_file():
        raise UserError(f"{name} is missing")
    # compare the size first: it finds a truncated file without reading it
    if file.stat().st_size != expected["bytes"]:
        raise UserError(f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}")
    if file_digest(file) != expected:
        raise UserError(f"{name} does not match its checksum")


class Checkpointer:
    """Saves and finds the checkpoints of one run.

    The ranks that see one folder write one checkpoint into it: the first of them the tensors that all ranks have, and
    each rank its own. Ranks that see several folders, such as machines without a shared file system, write one
    checkpoint into each; these belong together by the id of their save, and each names the parts in the others.

    Args:
        folder: the run's `checkpoints` folder, as this process sees it.
        context: this process's rank and world size, and which ranks see the same folder.
        keep: how many of the newest checkpoints stay.
    """

    def __init__(self, folder: Path, context: DistContext, *, keep: int = 2) -> None:
        self.folder, self.context, self.keep = folder, context, keep
        self.refused: list[str] = []
        """Why `newest` skipped checkpoints."""

    def save(self, step: int, state: State) -> Path:
        """Write one checkpoint and return its folder. Collectives: those of `write`.

        Raises:
            RunError: as of `write`.
        """
        return self.write(step, own_parts(state.tensors, self.context), state.values)

    def write(self, step: int, parts: Mapping[str, Part], values: dict[str, Any]) -> Path:
        """Write one checkpoint; on return it is on all disks, and old ones beyond `keep` are removed.

        Collectives: gathers of the errors of each part, and of the index entries that ranks have written.

        Args:
            step: of the checkpoint.
            parts: of `own_parts`.
            values: everything that is not a tensor.

        Raises:
            RunError: a rank could not write it, for example on a full disk; earlier checkpoints are untouched.
        """
        context, target, aside = self.context, self.folder / f"step-{step}", self.folder / f"step-{step}.tmp"
        save_id = context.broadcast_object(secrets.token_hex(8))
        entries: dict[str, Any] = {}
        digests: dict[str, Any] = {}
        # parts of one tensor in several folders: each index names all of them
        spreads = context.has_separate_folders and context.num_shards > 1

        def write_tensors() -> None:
            entries.update(write_parts(parts, aside, context.rank))

        header: dict[str, Any] = {"step": step, "world_size": context.world_size, "save": save_id}

        def seal() -> None:
            _seal(aside, entries, header, values, digests)

        # 1. an empty folder, 2. tensor files of each rank, 3. index and manifest, 4. rename
        problem = context.collect_errors(_run_io(lambda: _make_empty_folder(aside)) if context.is_writer else None)
        if problem is None:
            problem = self._run_io_everywhere(write_tensors)
        if problem is None:
            # the writer of each folder indexes the files of all ranks that see the folder
            by_rank = context.all_gather_object(entries if spreads or not context.is_writer else None)
            for rank in context.ranks_sharing(context.rank):
                if rank != context.rank:
                    merge_entries(entries, by_rank[rank] or {})
            if spreads:
                header["elsewhere"], problem = self._gather_elsewhere(aside, target, entries, digests)
                for other in by_rank if context.is_writer else ():
                    merge_entries(entries, other)
        if problem is None:
            problem = self._run_io_everywhere(seal, taking_part=context.is_writer)
        if problem is None:
            problem = context.collect_errors(
                _run_io(lambda: self._publish(aside, target)) if context.is_writer else None
            )
        # `problem` is the same on all ranks, so all of them raise or none
        if problem is not None:
            self._fail(step, aside, problem)
        if context.is_writer:  # after all have the new one: after a crash they resume from one that all have
            self._remove_old(step)
        return target

    @property
    def has_failed(self) -> bool:
        """True if `wait` raises the error of a save in the background."""
        return False

    @property
    def is_writing(self) -> bool:
        """True if `wait` waits for a save in the background."""
        return False

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once: nothing is saved in the background."""

    def _run_io_everywhere(self, action: Callable[[], None], *, taking_part: bool = True) -> str | None:
        """Run a file-system action on some ranks; return the errors of all ranks as text, or None."""
        own = _run_io(action) if taking_part else None
        self.context.wait_for_all()  # large files take longer than a collective may
        return self.context.collect_errors(own)

    def _gather_elsewhere(
        self, aside: Path, target: Path, entries: Mapping[str, Any], digests: dict[str, Any]
    ) -> tuple[list[Any], str | None]:
        """Return the tensor files of the other folders for the manifest, and the errors of all ranks as text, or None.

        Collectives: gathers.

        Args:
            aside, target: of the checkpoint.
            entries: of the files of this folder.
            digests: filled with those of the files of this folder.
        """
        context = self.context

        def digest() -> None:
            names = {chunk["file"] for entry in entries.values() for chunk in entry["chunks"]}
            digests.update({name: file_digest(aside / name) for name in sorted(names)})

        problem = self._run_io_everywhere(digest, taking_part=context.is_writer)
        host, folder = platform.node() or "an unnamed machine", os.path.abspath(target)
        folders = context.all_gather_object({"host": host, "folder": folder, "files": digests})
        return [folders[rank] for rank in sorted(set(context.writers) - {context.rank})], problem

    def _publish(self, aside: Path, target: Path) -> None:
        publish(aside, target)
        # the rename is durable only after its parent folder is synced
        fsync(self.folder)

    def _fail(self, step: int, aside: Path, problem: str) -> None:
        """Remove the unfinished checkpoint and raise a RunError."""
        if self.context.is_writer and aside.is_dir():
            with contextlib.suppress(OSError):
                remove_checkpoint(aside)
        newest = next((other for other in self.steps() if other != step), None)
        kept = f"the checkpoint of step {newest} is intact" if newest is not None else "there is no earlier checkpoint"
        raise RunError(f"cannot save the checkpoint of step {step} in {self.folder}: {problem}; {kept}")

    def _remove_old(self, step: int) -> None:
        steps = self.steps()
        kept = [other for other in steps if other <= step][: self.keep]  # later ones are from before a resume
        for other in set(steps) - set(kept):
            with contextlib.suppress(OSError):
                remove_checkpoint(self.folder / f"step-{other}")

    def steps(self) -> list[int]:
        """Return the steps of existing checkpoints, newest first, damaged ones included."""
        return checkpoint_steps(self.folder)

    def newest(self, *, weights_only: bool = False) -> Checkpoint | None:
        """Return the newest checkpoint that is complete in all folders; log a warning for each one that is skipped.

        Collectives: gathers, so that all ranks take the same. They wait for hours, because some ranks read whole files.

        Args:
            weights_only: states of single ranks, such as residuals, may be missing.
        """
        context = self.context
        self.refused = []
        by_rank = context.all_gather_object(self.steps() if context.is_writer else [])
        # try the steps of all folders; a step that one folder lacks is refused there
        for step in sorted(set().union(*by_rank), reverse=True):
            path = self.folder / f"step-{step}"
            checkpoint, finding = _inspect(path, weights_only=weights_only) if context.is_writer else (None, None)
            context.wait_for_all()
            problem = self._find_mismatch(context.all_gather_object(finding), weights_only=weights_only)
            if problem is None:
                # ranks that verified no files read manifest and index themselves
                return checkpoint or Checkpoint.read(path)
            self.refused.append(f"checkpoint {path} is damaged ({problem})")
            logger.warning("%s; trying the one before", self.refused[-1])
        return None

    def _find_mismatch(self, findings: list[Any], *, weights_only: bool) -> str | None:
        """Return why the folders of all ranks do not form one checkpoint, or None. No collective."""
        context = self.context
        by_writer = {rank: each for rank, each in enumerate(findings) if each is not None}
        problems = [
            f"{context.describe_rank(rank)}, {each['path']}: {each['problem']}"
            if context.has_separate_folders
            else each["problem"]
            for rank, each in by_writer.items()
            if each["problem"] is not None
        ]
        if problems:
            return "; ".join(problems)
        # folders with different ids of the same step are from different runs
        saves: dict[str, list[int]] = {}
        for rank, each in by_writer.items():
            saves.setdefault(each["save"], []).append(rank)
        if len(saves) > 1:
            groups = "; ".join(", ".join(map(context.describe_rank, ranks)) for ranks in saves.values())
            return f"the folders hold checkpoints of different saves: {groups}"
        # at the saved world size each rank needs its own state from some folder
        one = next(iter(by_writer.values()))
        missing = set(one["expected"]).difference(*(each["ranks"] for each in by_writer.values()))
        if missing and one["world_size"] == context.world_size and not weights_only:
            names = describe_absent([f"__{rank}_0.distcp" for rank in sorted(missing)], one["absent"])
            return f"no folder has the states of all ranks: {names} missing; copy the folders of all machines"
        return None


def _inspect(path: Path, *, weights_only: bool) -> tuple[Checkpoint | None, dict[str, Any]]:
    """Verify a checkpoint; return it and a JSON summary: its problem, or its save and the ranks with a state."""
    try:
        if not path.exists():
            raise UserError("there is no such folder")
        checkpoint = verify_checkpoint(path, weights_only=weights_only)
    except (UserError, OSError) as error:
        return None, {"path": str(path), "problem": str(error)}
    return checkpoint, {
        "path": str(path),
        "problem": None,
        "save": checkpoint.manifest["save"],
        "world_size": checkpoint.manifest["world_size"],
        "expected": sorted(map(int, checkpoint.values.get("rng") or {})),
        "ranks": checkpoint.index.ranks("rng"),
        "absent": checkpoint.index.absent,
    }


def load_tensors(
    path: Path, prefix: str = "", into: dict[str, torch.Tensor] | None = None, *, index: Index | None = None
) -> dict[str, torch.Tensor]:
    """Read the tensors whose key begins with `prefix`. Each rank reads its own; no collective.

    Args:
        path: a checkpoint folder.
        prefix: of the keys to read.
        into: tensors to fill in place, by key; others are created on the CPU with the stored shape and dtype.
        index: of the checkpoint, if it was read before.

    Raises:
        UserError: the checkpoint cannot be read, or a tensor in `into` has another shape.
    """
    index = index or Checkpoint.read(path).index
    target: dict[str, torch.Tensor] = {}
    for key, entry in index.entries(prefix).items():
        given = None if into is None else into.get(key)
        if given is not None and given.shape != entry.size:
            raise UserError(f"{path}: '{key}' has shape {tuple(entry.size)}, the model has {tuple(given.shape)}")
        target[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if given is None else given
    # DCP fills the tensors of `target` in place; without a group it warns
    if target:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                load(target, storage_reader=IndexedReader(path, index), no_dist=True)
            except CheckpointException as error:
                _raise_interrupt(error)
                for inner, _ in error.failures.values():
                    if isinstance(inner, UserError):
                        raise inner from None
                problem = "; ".join(sorted({first_line(inner[0]) for inner in error.failures.values()}))
                raise UserError(f"the tensors of checkpoint {path} cannot be read: {problem}") from None
    return target


def _run_io(action: Callable[[], None]) -> str | None:
    """Run a file-system action; return its error as text, or None."""
    try:
        action()
    except (OSError, RuntimeError) as error:
        return _describe_io_error(error)
    return None


def _raise_interrupt(error: CheckpointException) -> None:
    """Raise the KeyboardInterrupt that torch.distributed.checkpoint took for a failure, if it was one."""
    for inner, _ in error.failures.values():
        if isinstance(inner, KeyboardInterrupt):
            raise inner from None


def _describe_io_error(error: BaseException) -> str:
    # torch wraps the OSError of a full disk in other errors, some without the cause
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            return "the disk is full"
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    if "unexpected pos" in text or "PytorchStreamWriter" in text or "No space left" in text:
        return "the disk is full or the file system refused a write"
    return text or type(error).__name__


def _make_empty_folder(folder: Path) -> None:
    """Create the folder of one checkpoint, and remove the remains of saves that were killed."""
    if folder.parent.is_dir():
        remove_torn(folder.parent)
    folder.mkdir(parents=True, exist_ok=True)  # it still exists if it holds files of other programs


def _seal(
    folder: Path, entries: dict[str, Any], header: dict[str, Any], values: dict[str, Any], digests: Mapping[str, Any]
) -> None:
    """Write the index and the manifest of a checkpoint whose tensor files are complete; some digests may be known."""
    # the index first, because it names the files; the manifest with their checksums comes last
    elsewhere = files_elsewhere(header)
    names = {METADATA, INDEX, *write_index(entries, folder, elsewhere).files} - elsewhere.keys()
    manifest = {
        **header,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "values": values,
        "files": {name: digests.get(name) or file_digest(folder / name) for name in sorted(names)},
    }
    write_manifest(folder, manifest)
    fsync(folder)
