"""Tests of the exchange between processes: bytes over a real group, and replicas made of shards."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import scantling as sc
from scantling.comm import AllReduce, diloco, load_rank_tensors, rank_tensors, refuse_reduction, sparseloco
from scantling.comm.consistency import SKETCH
from scantling.comm.transport.failures import name_silent_ranks
from scantling.comm.transport.group import ReplicaGroup
from scantling.errors import SilentPeerError, UserError
from tests.processes import counted, run

pytestmark = pytest.mark.dist


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 130), nn.Tanh(), nn.Linear(130, 33), nn.LayerNorm(33))


def train(net: nn.Module, optimizer: Any, replica: int, steps: range, schedule: LRScheduler | None = None) -> None:
    for step in steps:
        x = torch.randn(8, 70, generator=torch.Generator().manual_seed(1000 * replica + step))
        optimizer.zero_grad()
        (net(x) - x[:, :33]).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def assert_alike(net: nn.Module) -> None:
    flat = torch.cat([param.detach().flatten() for param in net.parameters()])
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    assert all(torch.equal(each, flat) for each in found)


def bytes_and_turns() -> None:
    rank = dist.get_rank()
    for strategy, names in (("all_gather", ["all_gather"]), ("owner", ["all_to_all", "all_gather"])):
        net = model()
        optimizer = sc.DeMo(sc.param_groups(net), lr=1e-3, topk=4, exchange=strategy, dense="sign", check_every=2)
        train(net, optimizer, rank, range(1))
        with counted() as calls:
            train(net, optimizer, rank, range(1, 2))
        assert [name.removesuffix("_single").removesuffix("_into_tensor") for name, _ in calls] == names
        assert optimizer.wire_bytes == optimizer.exchange.planned_wire_bytes() > 0
        train(net, optimizer, rank, range(2, 5))
        assert 0.0 < (optimizer.exchange.replica_divergence or 0.0) < 1.0
        assert_alike(net)


def beside_the_training() -> None:
    """Send messages from a thread while the backward pass and other collectives run."""
    rank = dist.get_rank()
    for strategy in ("all_gather", "owner"):
        net = model()
        options: dict[str, Any] = {"delay": 1, "overlap": True, "bucket_mb": 0.01, "check_every": 3}
        optimizer = sc.DeMo(sc.param_groups(net), lr=1e-3, topk=4, exchange=strategy, dense="sign", **options)
        for step in range(20):
            x = torch.randn(8, 70, generator=torch.Generator().manual_seed(1000 * rank + step))
            optimizer.zero_grad()
            loss = (net(x) - x[:, :33]).square().mean()
            with optimizer.overlapped():
                loss.backward()
            dist.all_reduce(loss.detach())
            optimizer.step()
            beyond = optimizer.wire_bytes - (optimizer.exchange.planned_wire_bytes() if step else 0)
            compared = 8 * (len(list(net.parameters())) + 1 + SKETCH)
            assert beyond == (compared if optimizer.exchange.config.is_periodic(step + 1, 3) else 0)
        assert_alike(net)


def many_steps(strategy: str, sync_every: int) -> None:
    """Take 2,000 steps with error feedback and stochastic rounding; replicas stay equal."""
    rank = dist.get_rank()
    net = model()
    options: dict[str, Any] = {"values": "int4", "dense": "sign", "residual": "int8", "check_every": 25}
    optimizer = sc.DeMo(sc.param_groups(net), lr=1e-3, topk=4, exchange=strategy, sync_every=sync_every, **options)
    for begin in range(0, 2000, 100):
        train(net, optimizer, rank, range(begin, begin + 100))
        assert_alike(net)


def shard(net: nn.Module, mesh: DeviceMesh) -> None:
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)


def a_nan_in_a_shard() -> None:
    """A NaN in one shard skips the replica's local step on all processes that hold its shards."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    net = model()
    shard(net, mesh["shard"])
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer = sparseloco(inner, sc.param_groups(net), sync_every=4, process_group=mesh["replicate"])
    train(net, optimizer, 0, range(2))
    if dist.get_rank() == 0:
        hook = net[0].weight.register_post_accumulate_grad_hook(lambda param: param.grad.to_local().fill_(torch.nan))
    train(net, optimizer, 0, range(2, 3))
    assert {int(state["step"]) for state in inner.state.values()} == {2}
    if dist.get_rank() == 0:
        hook.remove()
    train(net, optimizer, 0, range(3, 8))
    assert {int(state["step"]) for state in inner.state.values()} == {7}


def anchors_of_shards() -> None:
    """Saved anchors of local steps are detached tensors, not part of an autograd graph."""
    net = model()
    shard(net, init_device_mesh("cpu", (1,)))
    optimizer = diloco(torch.optim.SGD(net.parameters(), lr=0.1), sc.param_groups(net), sync_every=2)
    train(net, optimizer, 0, range(3))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(net, optimizer, 0, range(3, 4))
    assert optimizer.steps == 4
    assert not any(anchor.requires_grad for anchor in optimizer.anchors)


def replicas_of_shards() -> None:
    """Compare two replicas with two shards each, everything sent, with two unsharded replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = mesh.get_local_rank("replicate")
    options: dict[str, Any] = {"lr": 1e-2, "topk": 4096, "values": "fp32", "dense": "fp32", "update": "identity"}
    plain = model()
    first = sc.DeMo(sc.param_groups(plain, weight_decay=0.1), process_group=mesh["replicate"], **options)
    train(plain, first, replica, range(4))
    sharded = model()
    shard(sharded, mesh["shard"])
    second = sc.DeMo(sc.param_groups(sharded, weight_decay=0.1), process_group=mesh["replicate"], **options)
    train(sharded, second, replica, range(4))
    for whole, part in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert isinstance(part, DTensor)
        torch.testing.assert_close(part.full_tensor(), whole, rtol=1e-4, atol=1e-6)
    replicas = ReplicaGroup()
    replicas.broadcast(torch.zeros(6), 0)
    assert replicas.wire_bytes == 3 * 24 // 4
    for group in (None, mesh["shard"]):
        with pytest.raises(UserError, match=r"would exchange with each other .* process_group=mesh\['replicate'\]"):
            sc.DeMo(sc.param_groups(sharded), lr=1e-3, process_group=group)
    if mesh.get_local_rank("shard") == 0:  # in this shard's group; the other group knows nothing of the failure
        with (
            pytest.raises(SilentPeerError, match="all are still there"),
            name_silent_ranks(mesh["replicate"].get_group()),
        ):
            raise RuntimeError("gloo: connection closed")


def partial_sums() -> None:
    """With sequence parallelism, each process has a partial sum of the gradient and full weights."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "tensor"))
    x = torch.randn(6, 4, 33, generator=torch.Generator().manual_seed(0))
    for options in ({}, {"overlap": True}):
        plain, parted = nn.LayerNorm(33), nn.LayerNorm(33)
        plain(x).square().mean(dim=(0, 2)).sum().backward()
        parallelize_module(parted, mesh["tensor"], SequenceParallel())
        made = sc.MomentumExchange(parted.parameters(), dense="fp32", process_group=mesh["replicate"], **options)
        loss = parted(x.chunk(2, 1)[mesh.get_local_rank("tensor")]).square().mean(dim=(0, 2)).sum()
        with made.overlapped():
            loss.to_local().backward()
        made.exchange()
        for whole, part in zip(plain.parameters(), parted.parameters(), strict=True):
            assert isinstance(part.grad, DTensor)
            torch.testing.assert_close(part.grad.to_local(), whole.grad)


class Uneven(nn.Module):
    """Model with one-row parameters, of which a second shard holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 3)
        self.gain, self.shift = nn.Parameter(torch.ones(1, 64)), nn.Parameter(torch.ones(1, 64))
        self.wide = nn.Parameter(torch.ones(1, 8192))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.gain + self.shift).sum() + self.wide.sum()


def uneven_shards(options: dict[str, Any]) -> None:
    """Shards run their collectives in the same order, whatever parameters each of them holds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    net = Uneven()
    for part in (net.first, net.last, net):
        fully_shard(part, mesh=mesh["shard"])
    optimizer = sc.DeMo(sc.param_groups(net), lr=1e-3, topk=4, process_group=mesh["replicate"], **options)
    for step in range(7):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * mesh.get_local_rank("replicate") + step))
        loss = net(x).square()
        with optimizer.overlapped():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    replicas = ReplicaGroup(mesh["replicate"])
    for param in net.parameters():
        assert isinstance(param, DTensor)
        one, other = replicas.all_gather(param.to_local().flatten())
        assert torch.equal(one, other)


def run_with_empty_shard() -> None:
    """A shard without any elements takes part in the exchange."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = nn.Linear(8192, 1, bias=False)
    fully_shard(net, mesh=mesh["shard"])
    optimizer = sc.DeMo(sc.param_groups(net), lr=1e-3, topk=4, process_group=mesh["replicate"])
    for _ in range(7):
        net(torch.randn(2, 8192)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.exchange.step == 7


def goes_on_from_a_distributed_checkpoint(folder: str, sharded: bool, half: int) -> None:
    """Resume from a distributed checkpoint in new objects: bitwise equal to uninterrupted steps, on all processes."""
    mesh = init_device_mesh("cpu", (2, 2) if sharded else (2,), mesh_dim_names=("replicate", "shard")[: 1 + sharded])
    replica = mesh.get_local_rank("replicate") if sharded else dist.get_rank()

    def begin() -> tuple[nn.Module, sc.DeMo, LRScheduler]:
        net = model()
        if sharded:
            shard(net, mesh["shard"])
        options: dict[str, Any] = {"topk": 4, "dense": "sign", "residual": "int8", "delay": int(not sharded)}
        group = mesh["replicate"] if sharded else None
        made = sc.DeMo(sc.param_groups(net, weight_decay=0.1), lr=1e-3, process_group=group, **options)
        return net, made, CosineAnnealingLR(made, 2 * half)

    straight, optimizer, schedule = begin()
    train(straight, optimizer, replica, range(half), schedule)
    of_schedule = schedule.state_dict()
    state = {"model": get_model_state_dict(straight), "optimizer": rank_tensors(optimizer)}
    dcp.save(state, checkpoint_id=folder)
    train(straight, optimizer, replica, range(half, 2 * half), schedule)
    again, second, schedule = begin()
    state = {"model": get_model_state_dict(again), "optimizer": rank_tensors(second)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(again, state["model"])
    load_rank_tensors(second, state["optimizer"])
    schedule.load_state_dict(of_schedule)
    train(again, second, replica, range(half, 2 * half), schedule)
    for one, other in zip(straight.parameters(), again.parameters(), strict=True):
        parts = [part.to_local() if isinstance(part, DTensor) else part for part in (one, other)]
        assert torch.equal(*parts)
    own = second.exchange.local_state_dict()["residuals"]
    assert own
    for name, residual in optimizer.exchange.local_state_dict()["residuals"].items():
        assert torch.equal(residual, own[name])


@pytest.mark.parametrize(
    ("sharded", "half"),
    [(False, 10), *(pytest.param(sharded, 100, marks=pytest.mark.slow) for sharded in (False, True))],
)
def test_rank_tensors_resume_bitwise_from_distributed_checkpoint(tmp_path: Path, sharded: bool, half: int) -> None:
    run(4 if sharded else 2, goes_on_from_a_distributed_checkpoint, str(tmp_path / "checkpoint"), sharded, half)


class Tied(nn.Module):
    """An embedding tied to the output layer, with a layer in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(130, 70)
        self.inner = nn.Linear(70, 70)
        self.head = nn.Linear(70, 130, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.inner(self.table(ids)).tanh())
        return logits


def tied_and_wrapped() -> None:
    """Tied weights are sent once: in the backward pass, in the step, and with or without DDP."""
    rank = dist.get_rank()
    found = []
    for overlap, wrapped in ((False, False), (True, False), (False, True)):
        net = Tied()
        optimizer = sc.DeMo(sc.param_groups(net), lr=1e-3, topk=4, dense="sign", overlap=overlap, bucket_mb=0.01)
        whole = nn.parallel.DistributedDataParallel(net) if wrapped else net
        if isinstance(whole, nn.parallel.DistributedDataParallel):
            refuse_reduction(whole)
        for step in range(5):
            ids = torch.randint(130, (16,), generator=torch.Generator().manual_seed(1000 * rank + step))
            context = whole.no_sync() if isinstance(whole, nn.parallel.DistributedDataParallel) else nullcontext()
            optimizer.zero_grad()
            with context:
                loss = nn.functional.cross_entropy(whole(ids), ids)
                with optimizer.overlapped():
                    loss.backward()
            optimizer.step()
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 3
        assert_alike(net)
        found.append([param.detach().clone() for param in net.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


class Unused(nn.Module):
    """Model whose second layer is used by every other process only, and whose third layer is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(vectors) + (self.second(vectors) if dist.get_rank() % 2 else 0.0)
        return result


def parameters_without_a_gradient() -> None:
    exchange = AllReduce(find_unused_parameters=True)
    net = Unused()
    wrapped = exchange.prepare(net)
    for _ in range(3):
        net.zero_grad()
        with exchange.accumulate(last=True):
            wrapped(torch.ones(2, 4)).sum().backward()
        exchange.exchange()
        assert exchange.wire_bytes == 3 * 20 * 4
        assert (net.first.bias.grad == 2).all()
        assert (net.second.bias.grad == 1).all(), "the mean over a process with and one without"
        assert net.third.bias.grad is None
    net.second.requires_grad_(False)
    exchange = AllReduce()
    wrapped = exchange.prepare(net)
    net.zero_grad()
    wrapped(torch.ones(2, 4)).sum().backward()
    with pytest.raises(UserError, match=r"third\.weight, third\.bias got no gradient, .*comm\.find_unused_parameters"):
        exchange.exchange()


def test_allreduce_with_parameters_without_gradient() -> None:
    run(2, parameters_without_a_gradient)


def test_allreduce_with_tied_weights() -> None:
    run(2, tied_and_wrapped)


def test_load_rank_tensors_refuses_another_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    optimizer = sc.DeMo(sc.param_groups(net), lr=1e-3, topk=4)
    train(net, optimizer, 0, range(2))
    tensors = rank_tensors(optimizer)
    load_rank_tensors(optimizer, tensors)
    with pytest.raises(UserError, match="saved by 4 processes, and these are 1: the residuals of the others"):
        load_rank_tensors(optimizer, {**tensors, "rank0/processes": torch.tensor([4])})
    with pytest.raises(UserError, match="the saved tensors have no rank0/step"):
        load_rank_tensors(optimizer, {})
    name = next(name for name in tensors if name.endswith("/residual"))
    with pytest.raises(UserError, match=rf"{name} should have the shape .*; given \(1,\)"):
        load_rank_tensors(optimizer, {**tensors, name: torch.zeros(1)})
    with pytest.raises(UserError, match="those of a DeMo or a MomentumExchange; given a AdamW"):
        rank_tensors(torch.optim.AdamW(net.parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("delay", [0, 1])
def test_rank_tensors_resume_exchange_without_optimizer(delay: int) -> None:
    net = model()
    exchange = sc.MomentumExchange(sc.param_groups(net), topk=4, delay=delay)

    def momenta(made: sc.MomentumExchange, number: int) -> list[torch.Tensor]:
        for place, param in enumerate(net.parameters()):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * number + place))
        made.exchange()
        return [torch.zeros(0) if param.grad is None else param.grad.clone() for param in net.parameters()]

    for number in range(3):
        momenta(exchange, number)
    again = sc.MomentumExchange(sc.param_groups(net), topk=4, delay=delay)
    load_rank_tensors(again, rank_tensors(exchange))
    assert again.step == 3
    assert all(map(torch.equal, momenta(exchange, 3), momenta(again, 3)))


def test_layout_is_printed_without_logging(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The message goes to stderr if logging is not set up or would hide it, and to the log otherwise."""
    for handled, shown in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr(logging.Logger, "hasHandlers", lambda _, handled=handled: handled)
        monkeypatch.setattr(logging.Logger, "isEnabledFor", lambda *_, shown=shown: shown)
        listens = handled and shown
        net = model()
        train(net, sc.DeMo(sc.param_groups(net), lr=1e-3, topk=4), 0, range(2))
        told = capsys.readouterr().err
        assert ("exchange by" in told) != listens
        assert listens or told.count("9,100 elements: 2 of 44 x 35") == 1


@pytest.mark.parametrize("world", [2, 3])
def test_replicas_send_planned_bytes_and_stay_equal(world: int) -> None:
    run(world, bytes_and_turns)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "sync_every"), [("all_gather", 1), ("owner", 1), ("all_gather", 4)])
def test_replicas_stay_equal_for_two_thousand_steps(strategy: str, sync_every: int) -> None:
    run(2, many_steps, strategy, sync_every)


def test_exchange_overlaps_with_training() -> None:
    run(2, beside_the_training)


def test_local_steps_anchors_are_local_shards() -> None:
    run(1, anchors_of_shards)


def test_shards_are_exchanged_between_replicas() -> None:
    run(4, replicas_of_shards)


def test_partial_gradients_are_reduced() -> None:
    run(2, partial_sums)


@pytest.mark.parametrize("options", [{}, {"overlap": True, "bucket_mb": 1e-4}], ids=str)
def test_uneven_shards(options: dict[str, Any]) -> None:
    run(4, uneven_shards, options)


def test_exchange_with_empty_shard() -> None:
    run(4, run_with_empty_shard)


def test_nan_in_one_shard_skips_local_step_on_all_shards() -> None:
    run(2, a_nan_in_a_shard)
