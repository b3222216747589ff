"""Tests of gradient release with FSDP2-sharded parameters: groups are stepped together, as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.utils.checkpoint import checkpoint

from scantling.errors import UserError
from scantling.groups import param_groups
from scantling.optim import CAME, release_gradients
from tests.processes import counted, run

pytestmark = pytest.mark.dist

WIDTH, VOCABULARY, STEPS = 24, 50, 4


class Block(nn.Module):
    """Two layers and `maybe`, which is not used if `skip` is set."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(hidden, WIDTH)
        self.maybe = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, skip: bool) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x if skip else x + self.maybe(x)


class Decoder(nn.Module):
    def __init__(
        self, *, hidden: int = 37, tied: bool = False, checkpoints: bool = False, order: tuple[int, ...] = (0, 1, 2)
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpoints, self.order = checkpoints, order

    def forward(self, ids: Tensor, *, skip: tuple[int, ...] = (), order: tuple[int, ...] | None = None) -> Tensor:
        x = self.embed(ids)
        for index in order or self.order:
            block, leave = self.blocks[index], index in skip
            x = checkpoint(block, x, skip=leave, use_reentrant=False) if self.checkpoints else block(x, skip=leave)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def build(seed: int = 0, **options: Any) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(**options)


def make_optimizer(model: nn.Module) -> CAME:
    return CAME(param_groups(model, weight_decay=0.1), lr=3e-3, betas=(0.9, 0.95, 0.995), debias=True)


def blocks(model: Decoder) -> list[Any]:
    return list(model.blocks)


def nested(model: Decoder) -> list[Any]:
    return [layer for block in model.blocks for layer in (block.maybe, block)]


def with_the_end(model: Decoder) -> list[Any]:
    return [*model.blocks, [model.norm, model.head]]


def batch(step: int, rank: int | None) -> Tensor:
    """Return twelve sequences: those of a rank, or all."""
    ids = torch.randint(VOCABULARY, (12, 5), generator=torch.Generator().manual_seed(step))
    return ids if rank is None else ids.chunk(dist.get_world_size())[rank]


def shard(model: Decoder, modules: Callable[[Decoder], list[Any]], **options: Any) -> int:
    """Shard the modules and the rest; return the number of groups."""
    chosen = modules(model)
    for module in [*chosen, model]:
        fully_shard(module, **options)
    return len(chosen) + 1


def largest_error(model: nn.Module, wanted: nn.Module) -> float:
    errors = []
    for param, whole in zip(model.parameters(), wanted.parameters(), strict=True):
        full = param.full_tensor() if isinstance(param, DTensor) else param
        want = whole.full_tensor() if isinstance(whole, DTensor) else whole
        errors.append(float((full - want).norm() / want.norm()))
    return max(errors)


def matches_ordinary_steps(
    modules: Callable[[Decoder], list[Any]],
    model_options: dict[str, Any],
    shard_options: dict[str, Any],
    uses: list[dict[str, Any]],
    accumulation: int = 1,
    exchange_always: bool = True,
    num_groups: int | None = None,
) -> None:
    """Compare released gradients with ordinary steps and with one device.

    Args:
        uses: keyword arguments of the model in each pass, in rotation.
        exchange_always: True if every pass of an accumulation exchanges gradients, not only the last one.
        num_groups: number of stepped groups, if not all; parameters used only in earlier passes count as one group.
    """
    whole, ordinary, released = (build(**model_options) for _ in range(3))
    groups = shard(ordinary, modules, **shard_options)
    shard(released, modules, **shard_options)
    models = [whole, ordinary, released]
    optimizers = [make_optimizer(model) for model in models]
    largest = max(len(list(module.parameters())) for module in ([whole, *whole.blocks]))
    alive: list[int] = []
    release_gradients(
        released,
        optimizers[2],
        accumulation=accumulation,
        before_step=lambda _: alive.append(sum(p.grad is not None for p in released.parameters())),
    )
    shards = {mesh for p in released.parameters() for mesh in [p.device_mesh.get_group(p.device_mesh.ndim - 1)]}
    for step in range(STEPS):
        for number in range(accumulation):
            index = step * accumulation + number
            last = number == accumulation - 1
            for model in models:
                ids = batch(index, None if model is whole else dist.get_rank())
                if model is not whole:
                    model.set_requires_gradient_sync(last or exchange_always)
                with counted() if model is released else nullcontext([]) as calls:
                    (model(ids, **uses[index % len(uses)]) / accumulation).backward()
                taken = [group for name, group in calls if name == "all_reduce" and group in shards]
                if model is released:
                    assert len(taken) == (3 * (num_groups or groups) if last else 0), len(taken)
        assert all(param.grad is None for param in released.parameters())
        with counted() as calls:
            optimizers[2].step()
        assert not calls
        for optimizer in optimizers[:2]:
            optimizer.step()
            optimizer.zero_grad()
    assert max(alive) <= largest
    # fp32 sums in another order, in gradients and statistics
    assert largest_error(released, whole) <= 2e-6
    assert largest_error(released, ordinary) <= (0.0 if dist.get_world_size() == 2 else 2e-6)


ALL: list[dict[str, Any]] = [{}]
CASES: dict[str, tuple[Any, ...]] = {
    "blocks": (blocks, {}, {}, ALL),
    "kept after forward": (blocks, {}, {"reshard_after_forward": False}, ALL),
    "one group": (lambda model: [], {}, {}, ALL),
    "nested": (nested, {}, {}, ALL),
    "several modules": (with_the_end, {}, {}, ALL),
    "tied": (blocks, {"tied": True}, {}, ALL),
    "used twice": (blocks, {"order": (0, 1, 0, 2, 1)}, {}, ALL),
    "checkpoints": (blocks, {"order": (0, 1, 0, 2), "checkpoints": True}, {}, ALL),
    "parameters unused": (blocks, {}, {}, [{}, {"skip": (0, 2)}, {"skip": (1,)}]),
    "a group unused": (blocks, {"order": (0, 2)}, {}, ALL, 1, True, 3),
    "accumulated": (blocks, {}, {}, ALL, 3),
    "accumulated without exchange": (blocks, {}, {}, ALL, 3, False),
    "accumulated, unused at last": (blocks, {}, {}, [{}, {"skip": (0, 2)}, {"skip": (1,)}], 3, True, 5),
}


SOME = ("several modules", "tied", "parameters unused", "accumulated without exchange")


def for_each(names: Iterable[str]) -> None:
    for name in names:
        try:
            matches_ordinary_steps(*CASES[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize(
    ("world", "names"), [(2, tuple(CASES)), pytest.param(3, SOME, marks=pytest.mark.slow)], ids=["2", "3"]
)
def test_release_matches_ordinary_steps(world: int, names: tuple[str, ...]) -> None:
    """With three ranks, shards are uneven; everything else is independent of the number of ranks."""
    run(world, for_each, names)


def all_ranks_take_part() -> None:
    """A rank without a use of a parameter exchanges zeros, if FSDP2 is set to, and steps it with the others."""
    whole, released = build(), build()
    shard(released, blocks)
    released.set_reduce_scatter_unused_params(True)
    optimizers = [make_optimizer(whole), make_optimizer(released)]
    release_gradients(released, optimizers[1])
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        for other in range(world):
            (whole(batch(step, other), skip=(other,)) / world).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        released(batch(step, rank), skip=(rank,)).backward()
    assert largest_error(released, whole) <= 2e-6
    with pytest.raises(UserError, match="a module must be called once per pass"):
        released(batch(0, rank), order=(0, 1, 0)).backward()


def two_roots_and_plain_parameters() -> None:
    """No module shards the whole model, so FSDP2 finishes each part separately; the norm and head are plain."""
    whole, released = build(), build()
    for module in (released.embed, *released.blocks):
        fully_shard(module)
    optimizers = [make_optimizer(whole), make_optimizer(released)]
    handle = release_gradients(released, optimizers[1], accumulation=2)
    for step in range(STEPS):
        for _ in range(2):
            for model in (whole, released):
                # the same batch on all ranks, because nothing averages plain gradients
                (model(batch(step, 0)) / 2).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        assert all(param.grad is None for param in released.parameters())
    assert largest_error(released, whole) <= 2e-6
    handle.remove()
    released(batch(0, 0)).backward()
    assert sum(param.grad is None for param in released.parameters()) == 0
    with counted() as calls:
        optimizers[1].step()
    assert [name for name, _ in calls] == ["all_reduce"] * 3


def on_two_mesh_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    matches_ordinary_steps(blocks, {}, {"mesh": mesh}, ALL)
    matches_ordinary_steps(blocks, {}, {"mesh": mesh}, ALL, 2, False)
    with_tensor_parallelism(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")))


def with_tensor_parallelism(mesh: DeviceMesh) -> None:
    """Shard the blocks by columns and rows, then by FSDP2 if the mesh has a dim for it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    tensor, rank, data = mesh["tensor"], 0, "data" in (mesh.mesh_dim_names or ())
    whole, released = build(hidden=36), build(hidden=36)
    for part in released.blocks:
        parallelize_module(part, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if data:
        rank = mesh.get_local_rank("data")
        for module in (*released.blocks, released):
            fully_shard(module, mesh=mesh["data"], shard_placement_fn=across)
    optimizers = [make_optimizer(whole), make_optimizer(released)]
    release_gradients(released, optimizers[1])
    for step in range(STEPS):
        for other in range(2 if data else 1):
            whole(batch(step, None).chunk(2)[other]).div(2 if data else 1).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        released(batch(step, None).chunk(2)[rank]).backward()
        assert all(param.grad is None for param in released.parameters())
    assert largest_error(released, whole) <= 2e-6


def across(param: nn.Parameter) -> Shard | None:
    """Return the placement along the dim that tensor parallelism does not shard."""
    if isinstance(param, DTensor) and any(isinstance(own, Shard) and own.dim == 0 for own in param.placements):
        return Shard(1) if param.ndim > 1 else None
    return None


def tensor_parallel_alone() -> None:
    with_tensor_parallelism(init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))


def on_two_ranks() -> None:
    all_ranks_take_part()
    two_roots_and_plain_parameters()
    tensor_parallel_alone()


def test_release_with_unused_plain_and_tensor_parallel_parameters() -> None:
    run(2, on_two_ranks)


def test_release_with_hybrid_sharding_and_tensor_parallelism() -> None:
    run(4, on_two_mesh_dims)
