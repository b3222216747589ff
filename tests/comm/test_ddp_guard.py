"""Tests of DistributedDataParallel combined with a momentum exchange."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import scantling as sc
from scantling.comm import diloco, refuse_reduction
from scantling.comm.ddp_guard import find_wrappers
from scantling.errors import UserError
from tests.processes import run

Step = Callable[[], None]
AVERAGED = "averages gradients over all processes before the exchange"


def test_refuse_reduction_raises_in_backward() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(4, 4))
        refuse_reduction(model)
        refuse_reduction(model)  # DDP accepts only one communication hook
        with model.no_sync():
            model(torch.randn(2, 4)).sum().backward()
        assert model.module.weight.grad is not None
        with pytest.raises(UserError, match=r"put every backward pass into model\.no_sync\(\)"):
            model(torch.randn(2, 4)).sum().backward()
    finally:
        dist.destroy_process_group()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))


def backward(model: nn.Module, seed: int | None = None) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    model(torch.randn(4, 64, generator=generator)).square().mean().backward()


def demo(net: nn.Module, **options: Any) -> sc.DeMo:
    return sc.DeMo(sc.param_groups(net), lr=1e-3, topk=8, **options)


def refused(step: Step, text: str = AVERAGED) -> None:
    with pytest.raises(UserError, match=text):
        step()


def wrapped_models_are_refused() -> None:
    net = network()
    optimizer, model = demo(net), DistributedDataParallel(net)
    backward(model)
    refused(optimizer.step)

    net = network()
    optimizer, model = demo(net), DistributedDataParallel(net)
    output = model(torch.randn(4, 64)).square().mean()
    with model.no_sync():
        output.backward()  # the forward pass ran outside of no_sync, and it decides
    refused(optimizer.step)

    net = network()
    optimizer, model = demo(net, overlap=True), DistributedDataParallel(net)
    with optimizer.overlapped():
        backward(model)
    refused(optimizer.step)

    net = network()
    optimizer, model = demo(net), DistributedDataParallel(net)
    saved = optimizer.state_dict()
    saved["param_groups"] = [{**group, "steps": 5} for group in saved["param_groups"]]
    optimizer.load_state_dict(saved)  # as in a resumed run
    backward(model)
    refused(optimizer.step)

    net = network()
    exchange, model = sc.MomentumExchange(sc.param_groups(net)), DistributedDataParallel(net)
    model.register_comm_hook(None, fp16_compress_hook)
    backward(model)
    refused(lambda: exchange.exchange() and None)

    net = network()
    steps = diloco(torch.optim.SGD(net.parameters(), lr=0.1), sc.param_groups(net), sync_every=50)
    model = DistributedDataParallel(net)
    backward(model)
    refused(steps.step)

    net = network()
    replicate(net)
    optimizer = demo(net)
    backward(net)
    refused(optimizer.step)

    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD):
        cpu = torch.device("cpu")
        sharded = FullyShardedDataParallel(network(), device_id=cpu, use_orig_params=True, sharding_strategy=strategy)
        optimizer = sc.DeMo(sharded.parameters(), lr=1e-3)
        backward(sharded)
        refused(optimizer.step, "in FullyShardedDataParallel, which averages gradients and leaves each process a shard")

    net = network()
    optimizer = sc.DeMo(net.parameters(), lr=1e-3)
    fully_shard(net, mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer.param_groups[0]["params"] = list(net.parameters())  # as accelerate does
    backward(net)
    refused(optimizer.step, "parameters are sharded over a mesh of ranks 0, 1, which would exchange")


@pytest.mark.dist
def test_averaging_wrapper_is_refused_in_first_step() -> None:
    run(2, wrapped_models_are_refused)


def wrappers_are_refused_in_later_steps() -> None:
    net = network()
    optimizer, model = demo(net), DistributedDataParallel(net)
    with model.no_sync():
        backward(model)
    optimizer.step()
    optimizer.zero_grad()
    backward(model)  # the loop forgets no_sync() after its first step
    refused(optimizer.step)

    net = network()
    optimizer, model = demo(net), DistributedDataParallel(net)
    for is_first in (True, False):
        backward(model)
        if is_first:
            with torch.no_grad():
                model(torch.randn(2, 64))  # an evaluation hides what the forward pass before it did
            optimizer.step()
            optimizer.zero_grad()
    refused(optimizer.step)


@pytest.mark.dist
def test_averaging_wrapper_is_refused_in_later_steps() -> None:
    run(2, wrappers_are_refused_in_later_steps)


def test_search_for_wrappers_leaves_other_threads_alone() -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    built: list[tuple[int, ...]] = []

    class DeepSpeedEngine(nn.Module):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            may_end.set()
            thread.join()
            return super().parameters(recurse)

    def numbers() -> Iterator[int]:
        has_begun.set()
        may_end.wait()
        yield from range(100)

    def build() -> None:
        built.append(tuple(numbers()))

    engine = DeepSpeedEngine()
    engine.weight = nn.Parameter(torch.ones(2))
    thread = threading.Thread(target=build)
    thread.start()
    has_begun.wait()
    # The other thread has a tuple of unknown length, which it cannot enlarge while anything else refers to it.
    assert find_wrappers([engine.weight], ()) == [engine]
    assert built == [tuple(range(100))]


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def local_gradients_pass() -> None:
    """DistributedDataParallel without averaging: gradients stay local, with different and with equal data."""
    handler = Records()
    logging.getLogger("scantling").addHandler(handler)
    bare = network()
    optimizer = demo(bare)
    backward(bare)
    optimizer.step()
    wanted = torch.cat([param.detach().flatten() for param in bare.parameters()])

    def no_sync(net: nn.Module, seed: int | None) -> nn.Module:
        model = DistributedDataParallel(net)
        with model.no_sync():
            backward(model, seed)
        return model

    def hook(net: nn.Module, seed: int | None) -> nn.Module:
        model = DistributedDataParallel(net)
        model.register_comm_hook(None, noop_hook)
        backward(model, seed)
        return model

    def alone_in_its_group(net: nn.Module, seed: int | None) -> nn.Module:
        groups = [dist.new_group([rank]) for rank in range(2)]
        model = DistributedDataParallel(net, process_group=groups[dist.get_rank()])
        backward(model, seed)
        return model

    for run_backward in (no_sync, hook, alone_in_its_group):
        for seed in (None, 0):
            net = network()
            optimizer = demo(net)
            handler.texts.clear()
            model = run_backward(net, seed)
            optimizer.step()
            assert model.module is net
            found = torch.cat([param.detach().flatten() for param in net.parameters()])
            assert torch.equal(found, wanted) == (seed is None), run_backward
            warned = any("all read the same data" in text for text in handler.texts)
            assert warned == (seed == 0 and dist.get_rank() == 0), run_backward
            assert not any("averages" in text for text in handler.texts)


@pytest.mark.dist
def test_wrapper_without_averaging_passes() -> None:
    run(2, local_gradients_pass)


def train_with_accelerate() -> None:
    def trained(prepare: bool, accumulate: int) -> tuple[torch.Tensor, int]:
        net = network()
        model: Any = net
        optimizer: Any = demo(net)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        if prepare:
            model, optimizer = accelerator.prepare(net, optimizer)
            assert isinstance(model, DistributedDataParallel)
        for step in range(4):
            seed = 10 * step + dist.get_rank()
            if not prepare:
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
                (model(x).square().mean() / accumulate).backward()
                if (step + 1) % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            with accelerator.accumulate(model), accelerator.no_sync(model):
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
                accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        inner = optimizer.optimizer if prepare else optimizer
        return torch.cat([param.detach().flatten() for param in net.parameters()]), inner.wire_bytes

    for accumulate in (1, 2):
        bare, sent = trained(False, accumulate)
        found, sent_too = trained(True, accumulate)
        assert torch.equal(found, bare)
        assert sent == sent_too > 0

    net = network()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, demo(net))
    accelerator.backward(model(torch.randn(4, 64)).square().mean())
    with pytest.raises(UserError, match=r"with accelerate: accelerator\.no_sync\(model\)"):
        optimizer.step()


def resume_with_accelerate(folder: str) -> None:
    """Save by hooks, as the guide shows, after two of four steps, and continue in new objects."""

    def make() -> tuple[Accelerator, Any, sc.DeMo]:
        net = network()
        optimizer = demo(net)
        accelerator = Accelerator(cpu=True)

        def path(folder: str) -> str:
            return f"{folder}/optimizer-{accelerator.process_index}.pt"

        accelerator.register_save_state_pre_hook(
            lambda models, weights, folder: torch.save(optimizer.state_dict(), path(folder))
        )
        accelerator.register_load_state_pre_hook(
            lambda models, folder: optimizer.load_state_dict(torch.load(path(folder)))
        )
        return accelerator, accelerator.prepare(net), optimizer

    def steps(accelerator: Accelerator, model: Any, optimizer: sc.DeMo, numbers: range) -> list[torch.Tensor]:
        for step in numbers:
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            with accelerator.no_sync(model):
                accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]

    accelerator, model, optimizer = make()
    steps(accelerator, model, optimizer, range(2))
    accelerator.save_state(folder)
    wanted = steps(accelerator, model, optimizer, range(2, 4))
    accelerator, model, optimizer = make()
    accelerator.load_state(folder)
    assert all(map(torch.equal, steps(accelerator, model, optimizer, range(2, 4)), wanted))

    # a prepared optimizer is saved from the first process alone
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(network(), demo(network()))
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()  # the first process may still be writing
    if dist.get_rank() == 1:
        with pytest.raises(UserError, match="this is the state of rank 0 of 2, here is 1 of 2"):
            accelerator.load_state(folder)


@pytest.mark.dist
def test_accelerate_saves_every_process(tmp_path: Path) -> None:
    run(2, resume_with_accelerate, str(tmp_path / "checkpoint"))


@pytest.mark.dist
def test_accelerate_needs_no_sync() -> None:
    run(2, train_with_accelerate)
