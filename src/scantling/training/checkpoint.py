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
import random
import re
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from scantling.comm import GradientExchange
from scantling.comm.replica import mean_of_tensors
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


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each storage once (of tied parameters, the first name)."""
    seen: set[tuple[int, torch.Size]] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        tensors[name] = tensor
    return tensors


def model_state(model: nn.Module) -> State:
    """The model's part of a checkpoint."""
    return State({f"model/{name}": tensor for name, tensor in model_tensors(model).items()})


def load_model(model: nn.Module, path: Path) -> None:
    """Fill a model from a checkpoint, in place.

    Raises:
        UserError: the names or shapes of the checkpoint and of the model differ.
    """
    wanted = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    stored = load_tensors(path, "model/", wanted)
    missing, unknown = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or unknown:
        raise UserError(f"{path} does not fit the model: missing {missing[:5]}, unknown {unknown[:5]}")


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> State:
    """The optimizer's part: state by parameter name, and the hyper-parameters of each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = State()
    plain: dict[str, dict[str, Any]] = {}
    on_cpu: list[str] = []
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    state.tensors[f"optimizer/{name}/{key}"] = value
                    if value.device.type == "cpu" and parameter.device.type != "cpu":
                        on_cpu.append(f"{name}/{key}")
                else:
                    plain.setdefault(name, {})[key] = _json_value(value, f"{name}/{key}")
        hyper = {k: v for k, v in group.items() if k not in ("params", "param_names") and _is_json(v)}
        groups.append({"names": [names[id(p)] for p in group["params"]], "hyper": hyper})
    state.values["optimizer"] = {"plain": plain, "on_cpu": on_cpu, "groups": groups}
    return state


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    """Put the stored state back as it was: no dtype is changed, nothing is recomputed.

    Raises:
        UserError: the parameter groups of the checkpoint and of the optimizer differ.
    """
    values = read_manifest(path)["values"]["optimizer"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ours = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if ours != [group["names"] for group in values["groups"]]:
        raise UserError(f"{path}: its parameter groups are not those of this run's optimizer")
    by_name = dict(model.named_parameters())
    on_cpu = set(values["on_cpu"])
    states: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in values["plain"].items()}
    for key, tensor in load_tensors(path, "optimizer/").items():
        name, _, entry = key.removeprefix("optimizer/").rpartition("/")
        device = torch.device("cpu") if f"{name}/{entry}" in on_cpu else by_name[name].device
        states.setdefault(name, {})[entry] = tensor.to(device)
    for name, entries in states.items():
        optimizer.state[by_name[name]] = entries
    for group, stored in zip(optimizer.param_groups, values["groups"], strict=True):
        for key, value in stored["hyper"].items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            elif not _is_json(group.get(key)) or json.dumps(group.get(key)) != json.dumps(value):
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def exchange_state(exchange: GradientExchange, place: Place) -> State:
    """What each process keeps for the exchange, under keys of its rank. Collective: a gather of JSON values."""
    own = exchange.state_dict()
    tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
    state = State({f"exchange/rank{place.rank}/{key}": value for key, value in tensors.items()})
    values = place.gather({key: value for key, value in own.items() if key not in tensors})
    state.values["exchange"] = {str(rank): each for rank, each in enumerate(values)}
    return state


def load_exchange(exchange: GradientExchange, path: Path, place: Place) -> None:
    """Give the exchange back what this process kept; from another number of processes, the mean of what all kept."""
    manifest = read_manifest(path)
    values = manifest["values"].get("exchange", {})
    if not any(values.values()):
        return
    ranks = range(manifest["world_size"]) if manifest["world_size"] != place.world_size else [place.rank]
    prefixes = [f"exchange/rank{rank}/" for rank in ranks]
    kept = [
        {key.removeprefix(prefix): value for key, value in load_tensors(path, prefix).items()} for prefix in prefixes
    ]
    found = kept[0] if len(kept) == 1 else mean_of_tensors(kept)
    exchange.load_state_dict({**found, **values[str(ranks[0])]})


def rng_state(place: Place) -> State:
    """The random generators of this process, under keys of its rank."""
    numpy_name, numpy_keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    prefix = f"rng/rank{place.rank}"
    state = State(
        {f"{prefix}/cpu": torch.get_rng_state(), f"{prefix}/numpy": torch.from_numpy(np.array(numpy_keys, np.int64))}
    )
    if place.device.type == "cuda":
        state.tensors[f"{prefix}/cuda"] = torch.cuda.get_rng_state(place.device)
    ours = {
        "python": random.getstate(),
        "numpy": [numpy_name, int(position), int(has_gauss), float(cached)],
    }
    state.values["rng"] = {str(rank): values for rank, values in enumerate(place.gather(ours))}
    return state


def load_rng(path: Path, place: Place) -> None:
    """Restore this rank's generators, from a checkpoint of the same world size."""
    values = read_manifest(path)["values"]["rng"][str(place.rank)]
    prefix = f"rng/rank{place.rank}"
    tensors = load_tensors(path, prefix + "/")
    torch.set_rng_state(tensors[f"{prefix}/cpu"])
    if f"{prefix}/cuda" in tensors and place.device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"{prefix}/cuda"], place.device)
    name, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, tensors[f"{prefix}/numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))


def merge(*states: State) -> State:
    """One state from several whose keys differ."""
    result = State()
    for state in states:
        result.tensors.update(state.tensors)
        result.values.update(state.values)
    return result


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _json_value(value: Any, where: str) -> Any:
    if not _is_json(value):
        raise RunError(f"optimizer state {where} is a {type(value).__name__}, which a checkpoint cannot hold")
    return value


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
