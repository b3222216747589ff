"""Index of a checkpoint, as JSON: the file and the bytes of each tensor.

torch.distributed.checkpoint keeps its index as a pickle, `.metadata`, which could run code when it is read. It is
written for other programs and never read here; `index.json` holds the same as plain numbers and strings.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import WriteResult

from scantling.distributed.objects import DTYPES
from scantling.errors import UserError
from scantling.files import no_follow
from scantling.numerics.torch_private import checkpoint_storage_info

INDEX = "index.json"
METADATA = ".metadata"
MAX_BYTES = 1 << 30
"""Largest index that is read; a tensor takes about 250 bytes."""

_RANK_KEY = re.compile(r"(exchange|inner|rng)/rank(0|[1-9][0-9]{0,6})/")
# many programs read JSON integers as doubles, which are exact up to 2**53
Count = Annotated[int, Field(ge=0, le=2**53)]
_Dims = Annotated[list[Count], Field(max_length=64)]


class StrictModel(BaseModel):
    """Base of the JSON objects in a checkpoint: no unknown keys, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Chunk(StrictModel):
    offsets: _Dims
    sizes: _Dims
    # only DCP's own file names match; a path out of the folder does not
    file: Annotated[str, Field(pattern=r"^__[0-9]+_[0-9]+\.distcp$")]
    offset: Count
    length: Count


class _Tensor(StrictModel):
    dtype: str
    size: _Dims
    chunks: Annotated[list[_Chunk], Field(min_length=1)]


class _Tensors(StrictModel):
    tensors: dict[str, _Tensor]


@dataclass(frozen=True)
class Elsewhere:
    """A file that another machine has written into its own folder.

    Attributes:
        place: the machine and its folder, as text.
        digest: size and SHA-256 of the file.
    """

    place: str
    digest: Mapping[str, Any]


@dataclass(frozen=True)
class Index:
    """A checked index.

    Attributes:
        metadata: the index in the form of torch.distributed.checkpoint.
        files: names of the files with tensors.
        shared_files: the files with a tensor that all ranks have, such as a weight.
        absent: the files that only the folder of another machine has, with the name of that machine and folder.
    """

    metadata: Metadata
    files: frozenset[str]
    shared_files: frozenset[str]
    absent: Mapping[str, str] = field(default_factory=dict)

    def entries(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """Return the entries of the tensors whose key begins with `prefix`, by key."""
        stored = self.metadata.state_dict_metadata.items()
        return {
            key: entry for key, entry in stored if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def ranks(self, kind: str, *, absent: bool = False) -> list[int]:
        """Return the ranks whose own state of a kind, "rng", "exchange" or "inner", is complete in this folder.

        A rank whose exchange has no tensors yet has an empty state, in the folder of its random generators.

        Args:
            kind: of the state.
            absent: add the ranks with a state in a file that only the folder of another machine has.
        """
        by_kind: dict[str, dict[int, bool]] = {"rng": {}, kind: {}}
        for position, stored in self.metadata.storage_data.items():
            if (match := _RANK_KEY.match(position.fqn)) and match[1] in by_kind:
                found, rank = by_kind[match[1]], int(match[2])
                found[rank] = found.get(rank, True) and stored.relative_path not in self.absent
        return sorted(rank for rank, is_here in (by_kind["rng"] | by_kind[kind]).items() if is_here or absent)

    def check_present(self, folder: Path, positions: Iterable[MetadataIndex]) -> None:
        """Raise a UserError if tensors lie in files that only the folder of another machine has.

        Args:
            folder: the checkpoint folder.
            positions: of the tensors, or of parts of them.
        """
        names = {self.metadata.storage_data[position].relative_path for position in positions}
        if missing := sorted(names & self.absent.keys()):
            raise UserError(
                f"{folder} has only the parts of the tensors that this machine wrote; missing: "
                f"{describe_absent(missing, self.absent)}. Copy these files into {folder}"
            )


def describe_absent(names: Iterable[str], absent: Mapping[str, str]) -> str:
    """Return file names with the machine and the folder that have them, as text; `absent` as of `Index`."""
    by_place: dict[str, list[str]] = {}
    for name in names:
        by_place.setdefault(absent.get(name, ""), []).append(name)
    return "; ".join(f"{', '.join(each)} of {place}" if place else ", ".join(each) for place, each in by_place.items())


def index_entries(metadata: Metadata) -> dict[str, Any]:
    """Return the entries of the index by key, as JSON values.

    Args:
        metadata: returned by `torch.distributed.checkpoint.save` for a state dict of tensors.
    """
    tensors: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[key] = {"dtype": dtype, "size": list(entry.size), "chunks": []}
        for chunk in entry.chunks:
            stored = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            tensors[key]["chunks"].append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": stored.relative_path,
                    "offset": stored.offset,
                    "length": stored.length,
                }
            )
    return tensors


def merge_entries(entries: dict[str, Any], others: dict[str, Any]) -> None:
    """Add the entries of another rank to `entries`; of a sharded tensor each rank has written a part.

    Of a part that is in both, the file in `entries` stays: each folder has its own copy of what its replicas share.
    """
    for key, entry in others.items():
        if key in entries:
            known = [chunk["offsets"] for chunk in entries[key]["chunks"]]
            entries[key]["chunks"] += [chunk for chunk in entry["chunks"] if chunk["offsets"] not in known]
        else:
            entries[key] = entry


def write_index(
    entries: dict[str, Any], folder: Path, elsewhere: Mapping[str, Elsewhere] = MappingProxyType({})
) -> Index:
    """Write the index and `.metadata`, which other programs read, fsync both, and return the index.

    Args:
        entries: of all tensors in the files of the folder, as of `index_entries`, and of those in `elsewhere`.
        folder: the checkpoint folder.
        elsewhere: as of `read_index`.
    """
    with open(folder / INDEX, "w", encoding="utf-8", opener=no_follow) as file:
        json.dump({"tensors": entries}, file)
        file.flush()
        os.fsync(file.fileno())
    # read it back, which checks it against the files: a bad index must fail the save, not the resume
    index = read_index(folder, elsewhere)
    # DCP's own index, for other programs; it is never read here
    metadata = index.metadata
    results = [WriteResult(position, stored.length, stored) for position, stored in metadata.storage_data.items()]
    FileSystemWriter(folder).finish(metadata, [results])
    return index


def read_index(
    folder: Path, elsewhere: Mapping[str, Elsewhere] = MappingProxyType({}), *, allow_lost_ranks: bool = False
) -> Index:
    """Read and check the index of a checkpoint folder.

    Args:
        folder: the checkpoint folder.
        elsewhere: files in the folders of other machines, by name; they may be copied into this one.
        allow_lost_ranks: leave out states of single ranks, such as residuals, whose file is missing or too short.

    Raises:
        UserError: the index is missing or damaged, or refers to bytes outside of its files.
    """
    file = folder / INDEX
    try:
        if not file.is_file():
            raise UserError(f"the index of checkpoint {folder} cannot be read: there is no {INDEX}")
        # checked before the file is read into memory
        if file.stat().st_size > MAX_BYTES:
            raise UserError(f"{file} has {file.stat().st_size} bytes; an index has at most {MAX_BYTES}")
        content = _Tensors.model_validate_json(file.read_bytes())
        return _check(content, folder, elsewhere, allow_lost_ranks)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise UserError(f"the index of checkpoint {folder} cannot be read: {problem}")


def _check(content: _Tensors, folder: Path, elsewhere: Mapping[str, Elsewhere], allow_lost_ranks: bool) -> Index:
    names = {chunk.file for tensor in content.tensors.values() for chunk in tensor.chunks}
    # -1 marks a missing file, which `_check_chunk` reports
    lengths = {name: (folder / name).stat().st_size if (folder / name).is_file() else -1 for name in names}
    absent = {name: elsewhere[name].place for name in names & elsewhere.keys() if lengths[name] < 0}
    lengths |= {name: elsewhere[name].digest["bytes"] for name in absent}
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for key, tensor in content.tensors.items():
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise ValueError(f"{key}: there is no dtype {tensor.dtype!r:.40}")
        chunks: list[ChunkStorageMetadata] = []
        try:
            for chunk in tensor.chunks:
                _check_chunk(key, tensor, chunk, dtype.itemsize, lengths[chunk.file])
        except ValueError:
            # weights can be used without a lost rank's residuals
            if allow_lost_ranks and is_rank_key(key):
                continue
            raise
        for chunk in tensor.chunks:
            offsets = torch.Size(chunk.offsets)
            # DCP ignores the third field in comparisons, so equal offsets are found as duplicates
            position = MetadataIndex(key, offsets, len(chunks))
            if position in storage:
                raise ValueError(f"{key}: two chunks begin at {chunk.offsets}")
            storage[position] = checkpoint_storage_info(chunk.file, chunk.offset, chunk.length)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
        # disjoint chunks with as many elements as the tensor cover it
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
            raise ValueError(f"{key}: its chunks do not add up to the size {tensor.size}")
        if not _are_disjoint([chunk for chunk in tensor.chunks if math.prod(chunk.sizes)]):
            raise ValueError(f"{key}: its chunks overlap or are not a grid")
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor.size), chunks)
    # a file with only per-rank keys may be missing when just the weights are loaded
    shared_files = {info.relative_path for index, info in storage.items() if not is_rank_key(index.fqn)}
    planner_data = {key: (key,) for key in entries}  # as of a flat state dict
    return Index(Metadata(entries, planner_data, storage), frozenset(names), frozenset(shared_files), absent)


def _check_chunk(key: str, tensor: _Tensor, chunk: _Chunk, itemsize: int, file_bytes: int) -> None:
    """Check that a chunk lies within its tensor and its file, so that nothing larger than the file is allocated."""
    if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size):
        raise ValueError(f"{key}: a chunk has another number of dimensions than the tensor")
    if any(start + size > whole for start, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)):
        raise ValueError(f"{key}: a chunk reaches beyond the tensor")
    if file_bytes < 0:
        raise ValueError(f"{chunk.file} is missing")
    if chunk.offset + chunk.length > file_bytes or math.prod(chunk.sizes) * itemsize > chunk.length:
        raise ValueError(f"{key}: a chunk of {chunk.sizes} does not fit into the bytes of {chunk.file}")


def _are_disjoint(chunks: list[_Chunk], dim: int = 0) -> bool:
    """Return True if chunks do not overlap, as the cells of a grid, which all shardings of a DTensor are.

    The ranges of the chunks along a dim are equal or disjoint; chunks of equal range are compared along the next dim.
    This takes O(n log n) for n chunks; any layout would take O(n²).
    """
    if len(chunks) < 2:
        return True
    if dim == len(chunks[0].sizes):
        return False
    by_range: dict[tuple[int, int], list[_Chunk]] = {}
    for chunk in chunks:
        by_range.setdefault((chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]), []).append(chunk)
    return all(end <= begin for (_, end), (begin, _) in pairwise(sorted(by_range))) and all(
        _are_disjoint(equal, dim + 1) for equal in by_range.values()
    )


def is_rank_key(key: str) -> bool:
    """True for the key of a tensor that one rank has for itself, such as `exchange/rank0/residuals`."""
    return _RANK_KEY.match(key) is not None


class IndexedReader(FileSystemReader):
    """Reader of torch.distributed.checkpoint that uses `index.json` instead of its pickled index."""

    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__(folder)
        self._folder, self._index, self._metadata = folder, index, index.metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        # the plan has the parts that this process needs
        self._index.check_present(self._folder, [item.storage_index for item in plan.items])
        return super().prepare_local_plan(plan)
