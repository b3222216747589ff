"""Tests of replicas that die, stop and join while the others train."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import scantling as sc
from scantling.comm import TorchFTGroup
from scantling.errors import SilentPeerError, UserError
from tests.processes import quiet_exit, server


class ScriptedManager:
    """Replacement of a torchft manager for one replica, with scripted step outcomes."""

    def __init__(self, outcomes: list[bool]) -> None:
        self.outcomes, self.applied, self.errors = outcomes, 0, []
        self.given: Any = None

    def current_step(self) -> int:
        return self.applied

    def report_error(self, error: Exception) -> None:
        self.errors.append(error)

    def should_commit(self) -> bool:
        outcome = self.outcomes.pop(0)
        self.applied += outcome
        return outcome

    def register_state_dict_fn(self, key: str, take: Callable[[Any], None], give: Callable[[], Any]) -> None:
        self.given = take, give


def make_optimizer(net: nn.Module, replicas: TorchFTGroup, **options: Any) -> sc.DeMo:
    return sc.DeMo(sc.param_groups(net), lr=1e-3, topk=4, update="identity", process_group=replicas, **options)


def backward(net: nn.Module, seed: int) -> list[Tensor]:
    net.zero_grad()
    net(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    return [param.grad.clone() for param in net.parameters()]


def copy_weights(net: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def test_uncommitted_step_keeps_gradients() -> None:
    """M <- decay M + g, nothing is subtracted and no weight changes; the next step applies the accumulated momentum."""
    net = nn.Linear(64, 64, bias=False)
    optimizer = make_optimizer(net, TorchFTGroup(ScriptedManager([True, False, True]), None), decay=0.9)
    backward(net, 0)
    optimizer.step()
    before, (held,) = copy_weights(net), optimizer.local_state_dict()["residuals"].values()
    (gradient,) = backward(net, 1)
    optimizer.step()
    assert all(torch.equal(was, now) for was, now in zip(before, copy_weights(net), strict=True))
    (residual,) = optimizer.local_state_dict()["residuals"].values()
    torch.testing.assert_close(residual, 0.9 * held + gradient)
    (gradient,) = backward(net, 2)
    optimizer.step()
    moved = (before[0] - copy_weights(net)[0]) / 1e-3
    (left,) = optimizer.local_state_dict()["residuals"].values()
    assert moved.any()
    torch.testing.assert_close(left + moved, 0.9 * residual + gradient, rtol=1e-3, atol=1e-4)
    assert optimizer.param_groups[0]["steps"] == 2, "steps are those that were applied"


def test_broken_exchange_is_reported_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = ScriptedManager([False, True])
    params = [nn.Parameter(torch.ones(64, 64))]
    replicas = TorchFTGroup(manager, None)
    exchange = sc.MomentumExchange(params, topk=4, process_group=replicas)
    params[0].grad = torch.ones(64, 64)

    def broken(message: Tensor) -> list[Tensor]:
        raise SilentPeerError("another replica does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(replicas, "all_gather", broken)
        assert not exchange.exchange()
    assert [type(error) for error in manager.errors] == [SilentPeerError]
    assert params[0].grad is None
    assert exchange.exchange(), "and goes on"


def test_broken_comparison_keeps_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a membership change, a collective fails before the exchange begins."""
    param = nn.Parameter(torch.ones(64, 64))
    replicas = TorchFTGroup(ScriptedManager([True, False]), None)
    exchange = sc.MomentumExchange([param], topk=4, decay=0.9, process_group=replicas)
    generator = torch.Generator().manual_seed(0)
    param.grad = torch.randn(64, 64, generator=generator)
    exchange.exchange()
    (held,) = exchange.local_state_dict()["residuals"].values()
    held, gradient = held.clone(), torch.randn(64, 64, generator=generator)

    def broken(message: Tensor) -> list[Tensor]:
        raise SilentPeerError("another replica does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(replicas, "all_gather", broken)
        patch.setattr(TorchFTGroup, "world_size", 2)
        param.grad = gradient.clone()
        assert not exchange.exchange()
    (residual,) = exchange.local_state_dict()["residuals"].values()
    torch.testing.assert_close(residual, 0.9 * held + gradient)


def test_state_loads_on_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> sc.DeMo:
        return make_optimizer(nn.Linear(64, 64), TorchFTGroup(ScriptedManager([True]), None))

    first = build()
    with monkeypatch.context() as patch:
        patch.setattr(TorchFTGroup, "world_size", 2)
        patch.setattr(TorchFTGroup, "rank", 1)
        whole, local = first.state_dict(), first.local_state_dict()
    again = build()
    again.load_state_dict(whole)
    again.load_local_state_dict(local)


def test_joining_replica_copies_all_but_residuals() -> None:
    def build(seed: int) -> tuple[nn.Module, sc.DeMo, ScriptedManager]:
        torch.manual_seed(seed)
        net, manager = nn.Linear(64, 64), ScriptedManager([True] * 4)
        replicas = TorchFTGroup(manager, None)
        optimizer = make_optimizer(net, replicas)
        replicas.join(net, optimizer)
        return net, optimizer, manager

    (old, donor, there), (new, joiner, here) = build(0), build(1)
    for step in range(3):
        backward(old, step)
        donor.step()
    backward(new, 9)
    joiner.step()
    here.given[0](there.given[1]())
    assert all(torch.equal(was, now) for was, now in zip(copy_weights(old), copy_weights(new), strict=True))
    assert joiner.local_state_dict()["residuals"] == {}
    assert joiner.param_groups[0]["steps"] == 3
    assert torch.equal(joiner.state[new.bias]["exp_avg_sq"], donor.state[old.bias]["exp_avg_sq"])


@pytest.mark.parametrize("options", [{"delay": 1}, {"overlap": True}, {"exchange": "dense"}])
def test_options_that_need_static_replicas(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="TorchFTGroup"):
        sc.MomentumExchange(
            [nn.Parameter(torch.ones(64, 64))], process_group=TorchFTGroup(ScriptedManager([]), None), **options
        )


def test_asynchronous_quorum_is_refused() -> None:
    manager = ScriptedManager([])
    manager._use_async_quorum = True
    with pytest.raises(UserError, match="use_async_quorum=False"):
        TorchFTGroup(manager, None)


def replica(name: str, address: str, folder: Path, enough: Path, exchange: str) -> None:
    """Train until a file tells the replica to end, and reach the step that the file names."""
    import torchft

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=4))
    manager = torchft.Manager(
        pg=group,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"replica_{name}",
        hostname="127.0.0.1",
    )
    torch.manual_seed(int(name))  # a different seed per replica: the manager synchronizes the weights
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    replicas = TorchFTGroup(manager, group)
    optimizer = make_optimizer(net, replicas, exchange=exchange, check_every=5)
    replicas.join(net, optimizer)
    steps = 0
    log = (folder / f"{name}.jsonl").open("a")
    while True:
        manager.start_quorum()
        backward(net, 100 * int(name) + steps)
        optimizer.step()
        steps += 1
        total = float(torch.stack([param.detach().double().sum() for param in net.parameters()]).sum())
        line = {"step": manager.current_step(), "size": replicas.world_size, "sum": total, "sent": optimizer.wire_bytes}
        log.write(json.dumps(line) + "\n")
        log.flush()
        if enough.exists() and manager.current_step() >= int(enough.read_text() or 1 << 30):
            quiet_exit()
        time.sleep(0.02)


class Replicas:
    """Processes that run `replica`, and the lines they write."""

    def __init__(self, folder: Path, exchange: str) -> None:
        coordination = pytest.importorskip("torchft.coordination")
        self.lighthouse = coordination.LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=3000, heartbeat_timeout_ms=2000, quorum_tick_ms=50
        )
        self.address = f"http://127.0.0.1:{self.lighthouse.address().rsplit(':', 1)[1]}"
        self.folder, self.exchange = folder, exchange
        self.processes: dict[str, BaseProcess] = {}

    def start(self, name: str) -> None:
        args = (name, self.address, self.folder, self.folder / "enough", self.exchange)
        self.processes[name] = server().Process(target=replica, args=args)
        self.processes[name].start()

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 240  # a process takes up to a minute to start on a busy machine
        while not condition():
            assert time.monotonic() < until, {name: self.lines(name)[-3:] for name in self.processes}
            time.sleep(0.05)

    def is_among(self, name: str, size: int, steps: int = 3) -> bool:
        """Return True if a replica took its last steps with this number of replicas."""
        last = self.lines(name)[-steps:]
        return len(last) == steps and all(line["size"] == size for line in last)

    def finish(self, names: tuple[str, ...]) -> None:
        """Train all replicas to one step and end them; check that replicas with a common step have the same weights."""
        last = max(line["step"] for name in names for line in self.lines(name)) + 30
        (self.folder / "writing").write_text(str(last))
        (self.folder / "writing").rename(self.folder / "enough")
        for name in names:
            self.processes[name].join(60)
            assert self.processes[name].exitcode == 0, name
        sums = [{line["step"]: line["sum"] for line in self.lines(name)} for name in names]
        assert all(found[last] == sums[0][last] for found in sums)
        common = set.intersection(*map(set, sums))
        agreeing = [step for step in common if len({found[step] for found in sums}) == 1]
        assert len(agreeing) >= 30

    def stop(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
        self.lighthouse.shutdown()


@pytest.mark.dist
@pytest.mark.parametrize("exchange", ["all_gather", pytest.param("owner", marks=pytest.mark.slow)])
def test_killed_replica_is_replaced(tmp_path: Path, exchange: str) -> None:
    replicas = Replicas(tmp_path, exchange)
    try:
        for name in ("0", "1", "2"):
            replicas.start(name)
        replicas.wait(lambda: all(replicas.is_among(name, 3) for name in "012"))
        replicas.processes["2"].kill()
        replicas.wait(lambda: all(replicas.is_among(name, 2) for name in "01"))
        replicas.start("3")
        replicas.wait(lambda: all(replicas.is_among(name, 3) for name in "013"))
        first = replicas.lines("3")[0]["step"]
        assert first > replicas.lines("2")[-1]["step"], "it began where the others were"
        replicas.finish(("0", "1", "3"))
    finally:
        replicas.stop()


@pytest.mark.dist
@pytest.mark.slow
def test_stopped_replica_joins_again(tmp_path: Path) -> None:
    """The resumed replica does not train alone and takes over the state of the others."""
    replicas = Replicas(tmp_path, "all_gather")
    try:
        for name in ("0", "1", "2"):
            replicas.start(name)
        replicas.wait(lambda: all(replicas.is_among(name, 3) for name in "012"))
        os.kill(replicas.processes["2"].pid or 0, signal.SIGSTOP)
        replicas.wait(lambda: all(replicas.is_among(name, 2, 10) for name in "01"))
        stopped_at = replicas.lines("2")[-1]["step"]
        os.kill(replicas.processes["2"].pid or 0, signal.SIGCONT)
        replicas.wait(lambda: all(replicas.is_among(name, 3) for name in "012"))
        steps = [line["step"] for line in replicas.lines("2")]
        assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) >= 10, (stopped_at, steps)
        replicas.finish(("0", "1", "2"))
    finally:
        replicas.stop()
