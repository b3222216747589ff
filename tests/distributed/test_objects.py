"""Tests of messages between processes: JSON values and arrays, never pickles."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import scantling
from scantling.distributed.context import DistContext
from tests import processes

VALUE = {"a": [1, 2.5, None, True, float("inf")], "\udc80é": "", "deep": [[[]]]}


def dist_context() -> DistContext:
    return DistContext(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def exchanged() -> None:
    here = dist_context()
    assert here.broadcast_object(VALUE if here.rank == 0 else "other") == VALUE
    assert here.all_gather_object([here.rank, "x" * 1000 * here.rank]) == [
        [rank, "x" * 1000 * rank] for rank in range(3)
    ]
    assert here.all_gather_object(None) == [None] * 3
    parts = here.all_gather_arrays(np.arange(2 * here.rank, dtype=np.float32).reshape(here.rank, 2))
    assert [part.shape for part in parts] == [(0, 2), (1, 2), (2, 2)]
    assert all(part.dtype == np.float32 for part in parts)
    np.testing.assert_array_equal(parts[2], [[0, 1], [2, 3]])


@pytest.mark.dist
def test_collectives_return_values_and_arrays_of_all_ranks() -> None:
    processes.run(3, exchanged)


def test_one_process_returns_json_types() -> None:
    alone = DistContext(0, 1, torch.device("cpu"))
    assert alone.broadcast_object((1, {"a": (2,)})) == [1, {"a": [2]}]
    assert alone.all_gather_object((1,)) == [[1]]


class Hostile:
    """Object that touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def attacked(file: Path) -> None:
    """Send a pickle from rank 1 through the collectives of a gather."""
    here = dist_context()
    if here.rank != 1:
        with pytest.raises(ValueError):  # not JSON
            here.all_gather_object(0)
        return
    content = pickle.dumps(Hostile(file))
    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(lengths, torch.tensor([len(content)]))
    dist.all_gather([torch.empty_like(sent) for _ in range(2)], sent)


@pytest.mark.dist
def test_pickles_of_other_ranks_are_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "touched"
    processes.run(2, attacked, file)
    assert not file.exists()


def test_no_module_uses_object_collectives_of_torch() -> None:
    for path in Path(scantling.__file__).parent.rglob("*.py"):
        assert not re.search(r"\b(dist|distributed|distributed_c10d)(\.| import .*)\w*_object", path.read_text()), path
