"""Parts of the tensors of a checkpoint that one rank writes into its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from scantling.comm.transport.shards import to_local
from scantling.distributed.context import DistContext
from scantling.numerics.torch_private import checkpoint_file_prefix
from scantling.optim.sharding import is_sharded, shard_plan
from scantling.trainer.training.checkpoint_index import index_entries, is_rank_key


@dataclass(frozen=True)
class Part:
    """Part of a tensor on this process.

    Attributes:
        values: the part; the whole tensor unless it is sharded.
        size: shape of the whole tensor.
        offsets: index of the first element of the part in the whole tensor, along each dim.
    """

    values: torch.Tensor
    size: tuple[int, ...]
    offsets: tuple[int, ...]


def own_parts(tensors: Mapping[str, torch.Tensor], context: DistContext) -> dict[str, Part]:
    """Return the parts that this rank writes, by key; each part is written once in a folder."""
    parts = {}
    for key, tensor in tensors.items():
        if _is_written_here(key, tensor, context):
            part = Part(to_local(tensor), tuple(tensor.shape), shard_plan(tensor).start)
            # a tensor with fewer rows than ranks has empty parts
            if part.values.numel() or not is_sharded(tensor):
                parts[key] = part
    return parts


def _is_written_here(key: str, tensor: torch.Tensor, context: DistContext) -> bool:
    """Return True if this rank is the first with this tensor, or part of a tensor, among those that see its folder."""
    ranks = context.ranks_sharing(context.writers[context.rank] if context.writers else 0)
    if is_rank_key(key):
        if key.startswith("rng/"):
            return True
        ranks = [rank for rank in ranks if rank // context.num_shards == context.replica]
    if is_sharded(tensor):
        ranks = [rank for rank in ranks if rank % context.num_shards == context.rank % context.num_shards]
    return context.rank == ranks[0]


def write_parts(parts: Mapping[str, Part], folder: Path, rank: int) -> dict[str, Any]:
    """Write the parts of one rank into its file, fsync it, and return their index entries. No collective.

    `torch.distributed.checkpoint.save` would do the same, but its collectives send pickles, and without them it warns,
    which a thread cannot suppress for itself alone.
    """
    if not parts:
        return {}
    writer, planner = RankWriter(folder, rank), DefaultSavePlanner()
    planner.set_up_planner({key: part.values for key, part in parts.items()}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])
    entries = index_entries(metadata)
    for key, part in parts.items():
        entries[key]["size"] = list(part.size)
        entries[key]["chunks"][0]["offsets"] = list(part.offsets)
    return entries


class RankWriter(FileSystemWriter):
    """A writer of one rank's tensors: their file has its rank in its name, and nothing else is written."""

    def __init__(self, folder: Path, rank: int) -> None:
        # without copies ahead of the file, tensors of a GPU and of a CPU are written in the same order
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=0)
        self._prefix = checkpoint_file_prefix(f"__{rank}_")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # the base class names files by the position of the plan, which is 0 on each rank without a group
        return [replace(plan, storage_data=self._prefix) for plan in plans]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # keep only the file positions, for `index_entries`; the base class would write `.metadata`
        metadata.storage_data = {each.index: each.storage_data for part in results for each in part}
