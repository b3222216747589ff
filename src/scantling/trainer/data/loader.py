"""Micro-batches of this process, in the sampler's order, made in this process or ahead of time by workers."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from scantling.trainer.data.packing import Dataset
from scantling.trainer.data.sampler import Sampler

IGNORED = -100
"""Label of a position that is not a target."""


@dataclass
class Batch:
    """Tensors for one forward pass.

    Attributes:
        inputs: arguments of the model by name, such as `input_ids` of shape (batch, seq_len).
        labels: the targets, (batch, seq_len) for language models and (batch,) for classification; -100 is no target.
        num_targets: number of labels that count.
        num_tokens: tokens passed to the model, excluding padding.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    num_targets: int
    num_tokens: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on a device."""
        inputs = {name: value.to(device, non_blocking=non_blocking) for name, value in self.inputs.items()}
        return Batch(inputs, self.labels.to(device, non_blocking=non_blocking), self.num_targets, self.num_tokens)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory, from which copies to a GPU are asynchronous."""
        inputs = {name: value.pin_memory() for name, value in self.inputs.items()}
        return Batch(inputs, self.labels.pin_memory(), self.num_targets, self.num_tokens)


Numbered = tuple[int, int, Any]
"""Epoch, index in the dataset, example."""
Collate = Callable[[list[Numbered]], Batch]
"""Function that makes a batch; deterministic in the epochs and indices."""
EVALUATION = -1
"""The epoch number of evaluation: its random choices are always the same, and differ from those in training."""
_PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that this process gets when its parent ends for any reason."""


@dataclass
class _Fetch:
    """Dataset whose keys are (epoch, index)."""

    dataset: Dataset

    def __getitem__(self, key: tuple[int, int]) -> Numbered:
        epoch, index = key
        return epoch, index, self.dataset[index]


@dataclass
class _Keys:
    """Endless keys of this process's micro-batches, from a sampler's current position."""

    sampler: Sampler
    slices: list[slice]

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        # The sampler counts the samples that were returned. Workers run ahead of it, so they get a copy.
        sampler = self.sampler.copy()
        while True:
            batch = sampler.next_batch()
            # The keys are those of the global batch; each rank keeps its own slices, without communication.
            keys = list(zip(batch.epochs.tolist(), batch.indices.tolist(), strict=True))
            for part in self.slices:
                yield keys[part]


class BatchSource:
    """Share of one process in each global batch, split into micro-batches.

    Rank r of W takes samples [r*B/W, (r+1)*B/W) of a global batch of B, or a part by its weight. Workers make batches
    ahead of time. Neither the number of workers nor the number of processes changes which samples a step has.

    Args:
        dataset: examples by index.
        collate: makes a batch of `(epoch, index, example)`.
        sampler: the order; its state counts the samples that were returned.
        micro_batch_size: most samples in a micro-batch.
        rank: this process.
        world_size: number of processes.
        weights: relative shares of the processes; equal by default. Each share must be a whole number of samples.
        workers: processes that make batches; 0 makes them in this process.
        pin_memory: put batches into pinned memory.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate: Collate,
        sampler: Sampler,
        *,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        weights: Sequence[int] | None = None,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        weights = [1] * world_size if weights is None else weights
        size, total = sampler.batch_size, sum(weights)
        if any(size * weight % total for weight in weights):
            raise ValueError(f"processes with shares {weights} cannot divide a batch of {size} into whole samples")
        self._dataset, self._collate, self._sampler = dataset, collate, sampler
        self._workers, self._pin, self._micro_batch_size = workers, pin_memory, micro_batch_size
        self._batches: Iterator[Batch] | None = None
        self._take(size * sum(weights[:rank]) // total, size * weights[rank] // total)

    def _take(self, first: int, count: int) -> None:
        """Take these samples of each global batch from the next step on."""
        # Micro-batches never cross the end of this rank's share; the last one may be smaller.
        cuts, end = range(first, first + count, self._micro_batch_size), first + count
        self._slices = [slice(begin, min(begin + self._micro_batch_size, end)) for begin in cuts]

    def divide(self, rank: int, world_size: int) -> float:
        """Take the share of this rank among another number of processes from the next step on; not with workers.

        Shares may differ by a sample. With more processes than samples, some processes have the same one.

        Returns:
            The samples of this process, relative to the mean of all processes.
        """
        assert self._workers == 0, "workers have made batches of the old share"
        size = self._sampler.batch_size
        firsts = [size * other // world_size for other in range(world_size)]
        counts = [max(1, size * (other + 1) // world_size - first) for other, first in enumerate(firsts)]
        before = self._slices
        self._take(firsts[rank], counts[rank])
        if self._slices != before:
            self._batches = None
        return counts[rank] * world_size / sum(counts)

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._sampler.epoch

    def next_step(self) -> list[Batch]:
        """Return this process's micro-batches of the next optimizer step."""
        # Iterators are created late, so that `load_state_dict` can still move the sampler.
        if self._batches is None:
            keys = _Keys(self._sampler, self._slices)
            self._batches = _load(self._dataset, self._collate, keys, workers=self._workers, pin_memory=self._pin)
        batches = [next(self._batches) for _ in self._slices]
        # Count samples only after all micro-batches exist: a failing worker leaves the position unchanged.
        self._sampler.skip(self._sampler.batch_size)
        return batches

    def state_dict(self) -> dict[str, int]:
        """Return the position after the samples that were returned; batches that workers made ahead do not count."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        self.close()
        self._sampler.load_state_dict(state)

    def close(self) -> None:
        """Stop the workers."""
        self._batches = None


def _load(dataset: Dataset, collate: Collate, keys: Any, *, workers: int, pin_memory: bool) -> Iterator[Batch]:
    if workers == 0:
        return _load_here(dataset, collate, keys, pin_memory=pin_memory)
    loader: DataLoader[Any] = DataLoader(
        _Fetch(dataset),  # type: ignore[arg-type]
        batch_sampler=keys,
        collate_fn=collate,
        num_workers=workers,
        worker_init_fn=_begin_worker,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # otherwise it would draw from the global one, and dropout would depend on workers
    )
    return iter(loader)


def _begin_worker(worker: int) -> None:
    """Make a worker end with its parent, and leave signals to the parent.

    A signal to the whole process group must not end a worker before the step and its checkpoint are done. A signal
    from the parent must: at exit, the parent ends the remaining workers and waits for them.
    """
    parent = multiprocessing.parent_process()
    # The kernel kills the worker even if the parent gets SIGKILL and cannot clean up.
    if sys.platform == "linux" and parent is not None and parent.pid == os.getppid():  # not under a fork server
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # While SIGTERM is blocked, one thread waits for it and can read the sender's pid.
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        parents = {os.getppid(), os.getppid() if parent is None else parent.pid}
        threading.Thread(target=_end_when_a_parent_says, args=(parents,), daemon=True).start()
    if parent is not None and parent.pid != os.getppid():  # under a fork server, or the parent has ended already
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()  # its SIGTERM is blocked too


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _end_when_a_parent_says(parents: set[int | None]) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid not in parents:
        pass
    os._exit(0)


def _load_here(dataset: Dataset, collate: Collate, keys: Any, *, pin_memory: bool) -> Iterator[Batch]:
    fetch = _Fetch(dataset)
    for part in keys:
        batch = collate([fetch[key] for key in part])
        yield batch.pin_memory() if pin_memory else batch


def evenly_spaced(size: int, most: int | None) -> npt.NDArray[np.int64]:
    """Return at most `most` of the indices 0 .. size-1, spread evenly; all if None."""
    count = size if most is None else min(most, size)
    # Multiply before dividing: integers stay exact.
    return np.arange(count) * size // count


def eval_batches(
    dataset: Dataset,
    collate: Collate,
    batch_size: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    max_samples: int | None = None,
    workers: int = 0,
) -> Iterator[Batch]:
    """Yield batches of a held-out dataset; rank r of W takes every W-th sample from the r-th on. No collectives.

    Args:
        dataset: examples by index.
        collate: makes a batch.
        batch_size: most samples in a batch.
        rank: this process.
        world_size: number of processes.
        max_samples: use at most this many samples, spread evenly over the dataset.
        workers: processes that make batches.
    """
    # Subsample before sharding, so that the samples do not depend on the number of processes.
    indices = evenly_spaced(len(dataset), max_samples)[rank::world_size].tolist()
    parts = [indices[at : at + batch_size] for at in range(0, len(indices), batch_size)]
    keys = [[(EVALUATION, index) for index in part] for part in parts]
    return _load(dataset, collate, keys, workers=workers, pin_memory=False)
