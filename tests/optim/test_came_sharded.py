"""CAME on sharded parameters equals CAME on one device, with few exchanges, and its state moves between world sizes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

from scantling.optim import CAME

pytestmark = pytest.mark.dist

CONV, STACK = ((0,), (1, 2, 3)), ((1,), (2,))
# (shape, matrix_dims): matrices, one whose rows leave ranks empty, vectors, thin, convolution, stack
SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((33, 40), None),
    ((7, 300), ((1,), (0,))),
    ((7, 25, 30), STACK),
    ((16, 18), None),
    ((5,), None),
    ((130,), None),
    ((9, 3), None),
    ((17, 6, 3, 3), CONV),
]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95, 0.995), "debias": True}
STEPS = 50


def run(world: int, case: Callable[..., None], *args: Any) -> None:
    """Call `case(*args)` in `world` processes of one gloo group; an error in any of them is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, (world, f"file://{folder}/store", case, args), nprocs=world)


def _enter(rank: int, world: int, store: str, case: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        case(*args)
    finally:
        dist.destroy_process_group()


@contextmanager
def counted() -> Iterator[list[tuple[str, Any]]]:
    """The collectives that are called meanwhile, each with its process group."""
    calls: list[tuple[str, Any]] = []
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier", "all_gather")
    originals = {name: getattr(dist, name) for name in names}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, kwargs.get("group")))
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, wrap(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def gradient(shape: tuple[int, ...], step: int, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows and columns of different magnitude, so that a wrong mean shows; now and then a spike for the clip."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    grad = torch.randn(shape, generator=generator)
    for dim, size in enumerate(shape):
        grad *= torch.logspace(-1, 1, size).view([-1 if d == dim else 1 for d in range(len(shape))])
    return (grad * (10.0 if step % 7 == 3 else 0.1)).to(dtype)


class Pair:
    """The same parameters whole and sharded, with an optimizer each."""

    def __init__(self, mesh: Any, placements: list[list[Placement]], dtype: torch.dtype, **options: Any) -> None:
        self.mesh, self.placements, self.dtype = mesh, placements, dtype
        start = [torch.randn(s, generator=torch.Generator().manual_seed(i)).to(dtype) for i, (s, _) in used(placements)]
        self.whole = [nn.Parameter(value.clone()) for value in start]
        self.parts = [
            nn.Parameter(distribute_tensor(value, mesh, own))
            for value, own in zip(start, kept(placements), strict=True)
        ]
        self.dims = [dims for _, (_, dims) in used(placements)]
        settings = {**OPTIONS, **options}
        self.one, self.many = (
            CAME([{"params": [p], "matrix_dims": d} for p, d in zip(ps, self.dims, strict=True)], **settings)
            for ps in (self.whole, self.parts)
        )

    def step(self, number: int, absent: Callable[[int], bool] = lambda index: False) -> None:
        """One step of both; the sharded one on this rank without the gradients that are `absent`."""
        for index, (p, q) in enumerate(zip(self.whole, self.parts, strict=True)):
            p.grad = gradient(tuple(p.shape), number, index, self.dtype)
            q.grad = None if absent(index) else distribute_tensor(p.grad, self.mesh, q.placements, src_data_rank=None)
        self.one.step()
        self.many.step()

    def check(self, tolerance: float) -> None:
        for p, q in zip(self.whole, self.parts, strict=True):
            assert_close(q, p, tolerance, "param")
            for key, value in self.one.state[p].items():
                other = self.many.state[q][key]
                assert other.shape == value.shape
                # an instability is a difference of nearly equal numbers, its rounding errors weigh more
                assert_close(other, value, 10 * tolerance, key)


def used(placements: list[list[Placement]]) -> list[tuple[int, tuple[tuple[int, ...], Any]]]:
    return [(i, shape) for i, (shape, own) in enumerate(zip(SHAPES, placements, strict=True)) if own]


def kept(placements: list[list[Placement]]) -> list[list[Placement]]:
    return [own for own in placements if own]


def same(*placement: Placement) -> list[list[Placement]]:
    """For every shape; what has no such dim is left out."""
    most = max((p.dim for p in placement if isinstance(p, Shard)), default=0)
    return [list(placement) if most < len(shape) else [] for shape, _ in SHAPES]


def assert_close(sharded: Tensor, whole: Tensor, tolerance: float, what: str) -> None:
    full = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded
    error = (full.double() - whole.double()).norm() / whole.double().norm().clamp(min=1e-30)
    assert error <= tolerance, f"{what} of {tuple(whole.shape)} is off by {float(error):.2e}"


def equals_one_device(mesh_shape: tuple[int, ...], cases: list[tuple[Placement, ...]]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    for placements in cases:
        pair = Pair(mesh, same(*placements), torch.float32)
        with counted() as calls:
            for number in range(STEPS):
                pair.step(number)
        assert {name for name, _ in calls} <= {"all_reduce"}
        for group in {group for _, group in calls}:
            assert sum(g is group for _, g in calls) <= 3 * STEPS
        # fp32 sums in another order: a few roundings of 6e-8 in each of 50 steps
        pair.check(2e-6)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_fifty_steps_equal_one_device(world: int) -> None:
    """Seven rows over four ranks leave one of them empty."""
    run(world, equals_one_device, (world,), [(Shard(0),), (Shard(1),)])


@pytest.mark.parametrize(
    "cases",
    [
        [(Shard(0), Shard(1)), (Shard(1), Shard(0))],
        [(Shard(0), Shard(0)), (Shard(1), Shard(2)), (Replicate(), Shard(0)), (Replicate(), Replicate())],
    ],
    ids=["both dims", "twice, batched, replicated"],
)
def test_fifty_steps_equal_one_device_on_a_grid(cases: list[tuple[Placement, ...]]) -> None:
    run(4, equals_one_device, (2, 2), cases)
