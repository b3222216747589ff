"""Tests of batches: independent of processes, workers, micro-batches, and of where a run was resumed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.trainer.data.loader import EVALUATION, Batch, BatchSource, Numbered, eval_batches
from scantling.trainer.data.sampler import Sampler


class Squares:
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> int:
        return index * index


def collate(examples: list[Numbered]) -> Batch:
    assert all(value == index * index for _, index, value in examples)
    ids = torch.tensor([(epoch, index) for epoch, index, _ in examples])
    return Batch({"ids": ids}, ids[:, 1], num_targets=len(examples), num_tokens=len(examples))


@contextmanager
def opened(
    *, rank: int = 0, world: int = 1, micro: int = 3, workers: int = 0, bucket: bool = False
) -> Iterator[BatchSource]:
    lengths = np.arange(37) % 7 if bucket else None
    sampler = Sampler(37, batch_size=8, seed=5, lengths=lengths)
    source = BatchSource(
        Squares(), collate, sampler, micro_batch_size=micro, rank=rank, world_size=world, workers=workers
    )
    yield source
    source.close()


def step(source: BatchSource) -> list[tuple[int, int]]:
    return [tuple(pair) for batch in source.next_step() for pair in batch.inputs["ids"].tolist()]


STEPS = 14  # three epochs


def expected(*, bucket: bool = False) -> list[list[tuple[int, int]]]:
    with opened(bucket=bucket) as source:
        return [step(source) for _ in range(STEPS)]


@pytest.mark.parametrize("bucket", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_and_workers_share_the_same_batches(world: int, workers: int, bucket: bool) -> None:
    wanted = expected(bucket=bucket)
    parts = []
    for rank in range(world):
        with opened(rank=rank, world=world, workers=workers, bucket=bucket, micro=2) as source:
            parts.append([step(source) for _ in range(STEPS)])
    assert [list(chain.from_iterable(shares)) for shares in zip(*parts, strict=True)] == wanted
    for epoch in range(3):
        assert sorted(index for batch in wanted for own, index in batch if own == epoch) == list(range(37))


def test_weights_share_a_batch_unevenly() -> None:
    wanted = expected()
    parts = []
    for rank in range(3):
        sampler = Sampler(37, batch_size=8, seed=5)
        source = BatchSource(
            Squares(), collate, sampler, micro_batch_size=3, rank=rank, world_size=3, weights=[4, 1, 3]
        )
        parts.append([step(source) for _ in range(STEPS)])
    assert [list(chain.from_iterable(shares)) for shares in zip(*parts, strict=True)] == wanted
    assert {tuple(map(len, shares)) for shares in zip(*parts, strict=True)} == {(4, 1, 3)}
    with pytest.raises(ValueError, match="whole samples"):
        BatchSource(Squares(), collate, Sampler(37, batch_size=8, seed=5), micro_batch_size=3, weights=[2, 1])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, STEPS - 2), st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_source_resumes_from_any_step(before: int, micro: int, world: int, bucket: bool) -> None:
    wanted = expected(bucket=bucket)
    with opened(bucket=bucket) as source:
        for _ in range(before):
            source.next_step()
        state = source.state_dict()
        assert source.epoch == state["epoch"]
    parts = []
    for rank in range(world):
        with opened(rank=rank, world=world, micro=micro, bucket=bucket) as source:
            source.load_state_dict(state)
            parts.append([step(source) for _ in range(before, STEPS)])
    assert [list(chain.from_iterable(shares)) for shares in zip(*parts, strict=True)] == wanted[before:]


def test_batches_made_ahead_are_not_in_the_state() -> None:
    wanted = expected()
    with opened(workers=2) as source:
        for _ in range(5):
            source.next_step()
        state = source.state_dict()
        assert (state["epoch"], state["index"]) == divmod(40, 37)
        source.next_step()
        source.load_state_dict(state)  # an open source can be rewound
        assert step(source) == wanted[5]
        assert source.state_dict()["index"] == state["index"] + 8


def test_micro_batches_are_cut_from_the_share() -> None:
    with opened(world=2, rank=1, micro=3) as source:
        assert [batch.num_targets for batch in source.next_step()] == [3, 1]
    with pytest.raises(ValueError, match="cannot divide a batch of 8 into whole samples"), opened(world=3):
        pass


def test_workers_leave_the_global_random_numbers_alone() -> None:
    draws = []
    for workers in (0, 1):
        torch.manual_seed(0)
        with opened(workers=workers) as source:
            source.next_step()
            draws.append(torch.rand(3).tolist())
    assert draws[0] == draws[1]


def test_errors_of_workers_are_raised() -> None:
    def refuse(examples: list[Numbered]) -> Batch:
        raise ValueError("broken example")

    source = BatchSource(Squares(), refuse, Sampler(37, batch_size=8, seed=5), micro_batch_size=8, workers=1)
    with pytest.raises(ValueError, match="broken example"):
        source.next_step()
    source.close()


def test_workers_end_with_their_parent_only() -> None:
    """After an error, a source may stay alive until the process exits, which then waits for its workers."""
    script = textwrap.dedent(
        """
        import os, signal, time
        from tests.trainer.data.test_loader import Sampler, Squares, collate, BatchSource
        source = BatchSource(Squares(), collate, Sampler(37, batch_size=8, seed=5), micro_batch_size=8, workers=1)
        source.next_step()
        child = int(open(f"/proc/self/task/{os.getpid()}/children").read().split()[-1])
        os.system(f"kill -TERM {child}; kill -INT {child}")
        time.sleep(0.5)
        for _ in range(8):
            source.next_step()
        print("still there", flush=True)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "still there\n"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_is_in_order_and_complete(world: int, workers: int) -> None:
    seen = []
    for rank in range(world):
        batches = eval_batches(Squares(), collate, 5, rank=rank, world_size=world, workers=workers)
        own = [pair for batch in batches for pair in batch.inputs["ids"].tolist()]
        assert own == [[EVALUATION, index] for index in range(rank, 37, world)]
        seen += own
    assert len(seen) == 37


def test_evaluation_of_fewer_samples_is_spread_evenly() -> None:
    batches = list(eval_batches(Squares(), collate, 2, max_samples=5))
    assert [batch.num_targets for batch in batches] == [2, 2, 1]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [0, 7, 14, 22, 29]
    assert len(list(eval_batches(Squares(), collate, 40, max_samples=100))) == 1


def test_batches_move_as_a_whole() -> None:
    batch = collate([(0, 1, 1), (0, 2, 4)]).to("meta", non_blocking=True)
    assert batch.labels.device.type == batch.inputs["ids"].device.type == "meta"
    assert (batch.num_targets, batch.num_tokens) == (2, 2)
