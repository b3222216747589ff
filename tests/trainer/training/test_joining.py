"""Tests of processes that wait for each other, and of pairs with an unresponsive process."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scantling.distributed.context import DistContext, init_distributed
from scantling.distributed.peers import group_store, record_error
from scantling.errors import RunError, SilentPeerError
from scantling.trainer.training import doctor
from tests import processes


@pytest.mark.parametrize("rank", [0, 1])
def test_process_without_peers_names_the_address(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": 0}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    with (
        pytest.raises(SilentPeerError, match=rf"did not connect to 127\.0\.0\.1:{port}"),
        init_distributed("cpu", timeout_s=2.0),
    ):
        pass
    assert not dist.is_initialized()


def test_unresponsive_pair_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for the pair at the next barrier, and name this pair and not the next one."""
    left = [0]

    def barrier() -> None:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("Timed out waiting for a barrier\nand more")

    def pair(*_: Any) -> None:
        return None

    monkeypatch.setattr(dist, "barrier", barrier)
    monkeypatch.setattr(doctor, "_measure_pair", pair)
    context = DistContext(2, 3, torch.device("cpu"))
    for silent, message in ((1, "before the first pair"), (2, "no message arrived between rank 0 and rank 1")):
        left[0] = silent
        with pytest.raises(RunError, match=f"{message}.*Timed out waiting for a barrier"):
            doctor.measure_pairs(context)


def test_pair_is_measured_until_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of operations queued on a device shows only when a result is read."""
    queued, clock = [0.0], [0.0]

    def send(message: torch.Tensor, _: int) -> None:
        queued[0] += 0.25 if message.numel() == 1 else 2.0

    def read(_: torch.Tensor) -> int:
        clock[0] += queued[0]
        queued[0] = 0.0
        return 1

    def zeros(*size: int, **options: Any) -> torch.Tensor:
        queued[0] += 64.0
        return torch.ones(*size, **options)

    monkeypatch.setattr(dist, "send", send)
    monkeypatch.setattr(dist, "recv", send)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.Tensor, "__int__", read)
    monkeypatch.setattr(doctor, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    measured = doctor._measure_pair(DistContext(0, 2, torch.device("cpu")), 0, 1)
    assert measured == doctor.Pair(0, 1, 0.25, 65536 / 2.0)


def meetings(world: int) -> None:
    """Wait longer than a collective's timeout, two times; then one process does not come, and then one has ended."""
    rank = dist.get_rank()
    context = DistContext(rank, world, torch.device("cpu"))
    for slow in range(2):
        if rank == slow:
            time.sleep(1.5)
        context.wait_for_all()
    store = group_store()
    if rank != 1:
        with pytest.raises(SilentPeerError, match=rf"^rank 1 of {world} did not arrive within 2 s$"):
            context.wait_for_all(2.0)
        store.add("waited", 1)
        with pytest.raises(RunError, match=r"^rank 1 on .* ended: no bread$"):
            context.wait_for_all()
    else:
        while store.add("waited", 0) < world - 1:
            time.sleep(0.1)
        record_error(store, RunError("no bread"))


def test_processes_wait_for_one_that_still_prepares() -> None:
    processes.run(3, meetings, 3)
