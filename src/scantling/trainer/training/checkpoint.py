"""Checkpoints that survive anything: written aside, fsynced, renamed, verified before they are used.

A checkpoint is a folder `step-N` with the tensor files of torch.distributed.checkpoint, `index.json`, which says where
each tensor is, and `manifest.json`: step, world size, versions, everything that is no tensor, the size and SHA-256 of
each file, and a checksum of the manifest itself. It is written to `step-N.tmp` and renamed when all of it is on disk,
so a folder `step-N` is complete unless the disk damaged it, which the sums show. Machines without a shared file system
each have such folders: `model/`, `optimizer/` and `method/` whole in each, the states of ranks where those ranks ran.

Tensors are stored flat under plain keys, with the dtype they have: `model/<name>`, `optimizer/<parameter>/<key>`,
`rng/rank<r>/<device>`, `method/<name>/<key>`, `exchange/rank<r>/<name>`. Nothing read from a checkpoint can run code:
tensors are read with `weights_only=True`, everything else is JSON, and DCP's pickled index is never read.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import platform
import secrets
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from scantling.distributed.context import DistContext
from scantling.errors import RunError, UserError, first_line
from scantling.files import fsync
from scantling.trainer.training.cleanup import checkpoint_steps, publish, remove_checkpoint, remove_torn
from scantling.trainer.training.index import (
    INDEX,
    METADATA,
    IndexedReader,
    RankWriter,
    index_entries,
    is_rank_key,
    ranks_held,
    read_index,
    write_index,
)
from scantling.trainer.training.manifest import damage, file_digest, read_manifest, write_manifest

logger = logging.getLogger(__name__)


@dataclass
class State:
    """All that a checkpoint holds: flat tensors by key, and JSON values by key."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Checkpointer:
    """Saves and finds the checkpoints of one run.

    The ranks that see one folder write one checkpoint into it: the first of them the tensors that all ranks have, each
    its own. Ranks that see several folders, such as machines without a shared file system, write one into each; they
    belong together by the number of their save.

    Args:
        folder: the run's `checkpoints` folder, as this process sees it.
        context: this process's rank and world size, and which ranks see the same folder.
        keep: how many of the newest checkpoints stay.
    """

    def __init__(self, folder: Path, context: DistContext, *, keep: int = 2) -> None:
        self.folder, self.context, self.keep = folder, context, keep
        self.refused: list[str] = []
        """Why `newest` passed over checkpoints."""

    def save(self, step: int, state: State) -> Path:
        """Write one checkpoint; on return it is on all disks, and the old ones beyond `keep` are gone.

        Collectives: gathers of the outcome of each part, and of what ranks have written.

        Raises:
            RunError: a rank could not write it, such as on a full disk; earlier checkpoints are untouched.
        """
        context, target, aside = self.context, self.folder / f"step-{step}", self.folder / f"step-{step}.tmp"
        number = context.broadcast_object(secrets.token_hex(8))
        written: dict[str, Any] = {}
        problem = context.collect_errors(_attempt(lambda: _fresh_folder(aside)) if context.is_writer else None)
        if problem is None:
            own = {key: each for key, each in state.tensors.items() if context.is_writer or is_rank_key(key)}
            problem = self._try(lambda: written.update(_save_tensors(own, aside, context.rank)))
        if problem is None:
            parts = context.all_gather_object(None if context.is_writer else written)
            for rank in context.ranks_sharing(context.rank):
                written.update(parts[rank] or {})
            problem = self._try(lambda: self._seal(step, number, state, written, aside), taking_part=context.is_writer)
        if problem is None:
            problem = context.collect_errors(
                _attempt(lambda: self._publish(aside, target)) if context.is_writer else None
            )
        if problem is not None:
            if context.is_writer and aside.is_dir():
                with contextlib.suppress(OSError):
                    remove_checkpoint(aside)
            newest = next((other for other in self.steps() if other != step), None)
            kept = (
                f"the checkpoint of step {newest} is intact" if newest is not None else "there is no earlier checkpoint"
            )
            raise RunError(f"cannot save the checkpoint of step {step} in {self.folder}: {problem}; {kept}")
        if context.is_writer:  # not before all have the new one: after a crash they go on from one that all have
            self._remove_old(step)
        return target

    def _try(self, action: Callable[[], None], *, taking_part: bool = True) -> str | None:
        """Run an action of the file system on some ranks; return what went wrong on any of them."""
        own = _attempt(action) if taking_part else None
        self.context.wait_for_all()  # large files take longer than a collective may
        return self.context.collect_errors(own)

    def _seal(self, step: int, number: str, state: State, entries: dict[str, Any], aside: Path) -> None:
        write_index(entries, aside)
        names = {METADATA, INDEX, *read_index(aside).files}
        manifest = {
            "step": step,
            "world_size": self.context.world_size,
            "save": number,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "values": state.values,
            "files": {name: file_digest(aside / name) for name in sorted(names)},
        }
        write_manifest(aside, manifest)
        fsync(aside)

    def _publish(self, aside: Path, target: Path) -> None:
        publish(aside, target)
        fsync(self.folder)

    def _remove_old(self, step: int) -> None:
        steps = self.steps()
        kept = [other for other in steps if other <= step][: self.keep]  # the run has gone on from before later ones
        for other in set(steps) - set(kept):
            with contextlib.suppress(OSError):
                remove_checkpoint(self.folder / f"step-{other}")

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, newest first, damaged ones included."""
        return checkpoint_steps(self.folder)

    def newest(self, *, weights_only: bool = False) -> Path | None:
        """The newest checkpoint that is whole in all folders; each one that is passed over is a warning.

        Collective: gathers, so that all ranks take the same. They wait for those that read whole files, as long as for
        data.

        Args:
            weights_only: the own states of ranks, such as residuals, may be missing.
        """
        context = self.context
        self.refused = []
        by_rank = context.all_gather_object(self.steps() if context.is_writer else [])
        for step in sorted(set().union(*by_rank), reverse=True):
            path = self.folder / f"step-{step}"
            found = _look(path, weights_only=weights_only) if context.is_writer else None
            context.wait_for_all()
            problem = self._disagreement(context.all_gather_object(found), weights_only=weights_only)
            if problem is None:
                return path
            self.refused.append(f"checkpoint {path} is damaged ({problem})")
            logger.warning("%s; trying the one before", self.refused[-1])
        return None

    def _disagreement(self, found: list[Any], *, weights_only: bool) -> str | None:
        """Return why the checkpoints of all folders are not one, or None. No collective."""
        context = self.context
        held = {rank: each for rank, each in enumerate(found) if each is not None}
        problems = [
            f"{context.describe_rank(rank)}, {each['path']}: {each['problem']}"
            if context.has_separate_folders
            else each["problem"]
            for rank, each in held.items()
            if each["problem"] is not None
        ]
        if problems:
            return "; ".join(problems)
        saves: dict[str, list[int]] = {}
        for rank, each in held.items():
            saves.setdefault(each["save"], []).append(rank)
        if len(saves) > 1:
            groups = "; ".join(", ".join(map(context.describe_rank, ranks)) for ranks in saves.values())
            return f"the folders hold checkpoints of different saves: {groups}"
        one = next(iter(held.values()))
        missing = set(one["expected"]).difference(*(each["ranks"] for each in held.values()))
        if missing and one["world_size"] == context.world_size and not weights_only:
            names = ", ".join(f"__{rank}_0.distcp" for rank in sorted(missing))
            return f"each rank has a state of its own, and no folder has {names}; bring the folders of all machines"
        return None


def _look(path: Path, *, weights_only: bool) -> dict[str, Any]:
    """Return what is wrong with a checkpoint, else its save and the ranks whose states it should have and has."""
    problem = damage(path, weights_only=weights_only) if path.exists() else "there is no such folder"
    if problem is not None:
        return {"path": str(path), "problem": problem}
    manifest = read_manifest(path)
    return {
        "path": str(path),
        "problem": None,
        "save": manifest["save"],
        "world_size": manifest["world_size"],
        "expected": sorted(map(int, manifest["values"].get("rng") or {})),
        "ranks": [] if weights_only else ranks_held(path),
    }


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
    stored = read_index(path, allow_lost_ranks=True).metadata.state_dict_metadata
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
                _raise_interrupt(error)
                problem = "; ".join(sorted({first_line(inner[0]) for inner in error.failures.values()}))
                raise UserError(f"the tensors of checkpoint {path} cannot be read: {problem}") from None
    return target


def _attempt(action: Any) -> str | None:
    """Run an action of the file system; return what went wrong in words, or None."""
    try:
        action()
    except CheckpointException as error:
        _raise_interrupt(error)
        return "; ".join(sorted({_reason(inner[0]) for inner in error.failures.values()}))
    except (OSError, RuntimeError) as error:
        return _reason(error)
    return None


def _raise_interrupt(error: CheckpointException) -> None:
    """Raise the KeyboardInterrupt that torch.distributed.checkpoint took for a failure, if it was one."""
    for inner, _ in error.failures.values():
        if isinstance(inner, KeyboardInterrupt):
            raise inner from None


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


def _save_tensors(tensors: dict[str, torch.Tensor], folder: Path, rank: int) -> dict[str, Any]:
    """Write one rank's tensors, and return their entries of the index. No collective: those of DCP send pickles."""
    if not tensors:
        return {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        flat = {key: tensor.detach() for key, tensor in tensors.items()}
        return index_entries(save(flat, storage_writer=RankWriter(folder, rank), no_dist=True))
