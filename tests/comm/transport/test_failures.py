"""Tests of stopped or killed processes: no other process hangs, all name the missing rank, and none continues alone."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import scantling as sc
from scantling.comm.transport import failures
from scantling.errors import SilentPeerError
from tests.processes import quiet_exit, start_all

pytestmark = pytest.mark.dist

WORLD, TIMEOUT_S, LAST_STEP = 3, 4.0, 3


def replica(rank: int, folder: Path, port: int, victim: int, what: signal.Signals, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    torch.manual_seed(0)
    net = nn.Linear(64, 64)
    optimizer = sc.DeMo(sc.param_groups(net), lr=1e-3, topk=4, **options)
    step = 0
    try:
        while step < 50:
            net(torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
            if rank == victim and step == LAST_STEP:
                (folder / "ready").touch()
                os.kill(os.getpid(), what)
            optimizer.step()
            step += 1
        outcome = "done"
    except SilentPeerError as error:
        outcome = str(error)
    (folder / f"{rank}").write_text(f"{step} {outcome}")
    quiet_exit()


@pytest.mark.parametrize(
    ("victim", "what", "options", "text"),
    [
        (2, signal.SIGSTOP, {}, "no answer from rank 2 of 3"),
        pytest.param(2, signal.SIGKILL, {"exchange": "owner"}, "no answer from rank 2 of 3", marks=pytest.mark.slow),
        (1, signal.SIGKILL, {"delay": 1}, "no answer from rank 1 of 3"),
        (0, signal.SIGSTOP, {}, "holds the store of the group, in general rank 0, does not answer"),
    ],
)
def test_failed_rank_is_named_by_the_others(
    tmp_path: Path, victim: int, what: signal.Signals, options: dict[str, Any], text: str
) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = start_all(replica, (tmp_path, port, victim, what, options), WORLD, join=False)
    processes = context.processes
    try:
        others = [rank for rank in range(WORLD) if rank != victim]
        wait_until(lambda: (tmp_path / "ready").exists(), 120)
        wait_until(lambda: all((tmp_path / f"{rank}").exists() for rank in others), 60)
        for rank in others:
            step, outcome = (tmp_path / f"{rank}").read_text().split(" ", 1)
            assert int(step) <= LAST_STEP + 1, "it went on alone"
            assert text in outcome
            assert "Start the run again from its last checkpoint" in outcome
        if what == signal.SIGSTOP:
            os.kill(processes[victim].pid, signal.SIGCONT)
            wait_until(lambda: (tmp_path / f"{victim}").exists(), 60)
            assert not (tmp_path / f"{victim}").read_text().endswith("done"), "it went on without the others"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


class Store:
    """A store in which given ranks have left notes, and which fails after a number of queries."""

    def __init__(self, notes: set[int], questions: int) -> None:
        self.notes, self.questions = notes, questions

    def set(self, key: str, value: str) -> None:
        self.check([key])

    def check(self, keys: list[str]) -> bool:
        if not self.questions:
            raise RuntimeError("Connection reset by peer")
        self.questions -= 1
        return int(keys[0].rpartition("/")[2]) in self.notes


@pytest.mark.parametrize(
    ("notes", "questions", "text"),
    [
        ({0, 1, 2}, 10, r"^no answer from rank 3 of 4 \("),
        ({1, 2}, 10, r"^no sign from ranks 0, 3 of 4, of whom at least one is gone \("),
        ({0, 1, 2}, 4, r"^no answer from rank 3 of 4 \("),  # rank 0 knew it too, and has already exited
        ({0, 1, 2}, 3, "^the process that holds the store of the group, in general rank 0, does not answer"),
        ({0, 1, 2, 3}, 10, "^the connection between the processes broke, and all are still there"),
    ],
)
def test_silent_ranks_are_named(monkeypatch: pytest.MonkeyPatch, notes: set[int], questions: int, text: str) -> None:
    monkeypatch.setattr(failures, "WAIT_S", 0.3)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2, 3])
    store = Store(notes, questions)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    with pytest.raises(SilentPeerError, match=text), failures.name_silent_ranks():
        raise RuntimeError("gloo: connection closed by peer")


def wait_until(condition: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nobody came to an end"
        time.sleep(0.1)
