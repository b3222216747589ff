"""Tests of runs whose replicas leave and join: `comm.elastic`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scantling as sc
from scantling.comm import DemoExchange, TorchFTGroup
from scantling.errors import RecipeError, UserError
from scantling.trainer.data.loader import Batch, BatchSource
from scantling.trainer.data.sampler import Sampler
from scantling.trainer.recipe import load_recipe
from scantling.trainer.training import build
from scantling.trainer.training.elastic import LIGHTHOUSE, compare_identities, hash_identity
from scantling.trainer.training.sinks import Sink
from scantling.trainer.training.step import Stepper
from tests.processes import quiet_exit, server
from tests.runs import WIDE, saved_tensors, scantling, tiny_recipe, write_corpus, write_recipe
from tests.trainer.training import poisoned

ELASTIC = {"name": "demo", "elastic": True, "topk": 4, "check_every": 5, "timeout": 30}


def recipe_of(folder: Path, **sections: Any) -> dict[str, Any]:
    own = {
        "model": {"overrides": {**tiny_recipe(folder)["model"]["overrides"], **WIDE}},
        "comm": ELASTIC,
        "optim": {"name": "sign", "lr": 1e-3},
        "train": {"steps": 1000, "checkpoint_every": 5, "keep_checkpoints": 2},
    }
    return tiny_recipe(folder, **{**own, **sections})


class Pace(Sink):
    """Sink that takes time in each step until a file exists."""

    def __init__(self, enough: Path) -> None:
        self.enough = enough

    def record(self, record: dict[str, Any]) -> None:
        if not self.enough.exists():
            time.sleep(0.3)


class PoisonedOnce(Stepper):
    """Stepper with a NaN in a gradient of one step, when a file says so."""

    poison: Path

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.poison.exists():
            return super().step(*args, **kwargs)
        self.poison.unlink()
        hook = self.model.get_parameter(poisoned.POISONED).register_hook(poisoned.poison)
        try:
            return super().step(*args, **kwargs)
        finally:
            hook.remove()


def fail(*args: Any, **options: Any) -> None:
    raise OSError("a firewall (a test)")


def replica(recipe: dict[str, Any], address: str, run_dir: Path, resume: bool, variant: str | None) -> None:
    """Train one replica; `variant` makes it one that cannot join, or is slow."""
    torch.set_num_threads(2 if variant == "threads" else 1)
    os.environ[LIGHTHOUSE] = address
    if variant == "firewall":
        from torchft.checkpointing.http_transport import HTTPTransport

        HTTPTransport.recv_checkpoint = fail
    if variant == "busy":
        pause = time.sleep
        Pace.record = lambda self, record: pause(15.0 if record["step"] == 6 else 0.1)  # type: ignore[method-assign]
    PoisonedOnce.poison = run_dir.with_suffix(".poison")
    build.Stepper = PoisonedOnce  # type: ignore[misc]
    sc.train(recipe, run_dir=run_dir, resume=resume, sinks=[Pace(run_dir.parent / "enough")])
    quiet_exit()


class Replicas:
    """Processes that train with each other, each in its own run directory."""

    def __init__(self, folder: Path) -> None:
        coordination = pytest.importorskip("torchft.coordination")
        self.lighthouse = coordination.LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=3000, heartbeat_timeout_ms=2000, quorum_tick_ms=50
        )
        self.address = f"http://127.0.0.1:{self.lighthouse.address().rsplit(':', 1)[1]}"
        self.folder, self.recipe = folder, recipe_of(folder)
        self.processes: dict[str, BaseProcess] = {}

    def start(self, name: str, *, resume: bool = False, variant: str | None = None) -> None:
        args = (self.recipe, self.address, self.folder / name, resume, variant)
        self.processes[name] = server().Process(target=replica, args=args)
        self.processes[name].start()

    def records(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for(self, size: int, *names: str) -> None:
        """Wait until replicas have taken steps with this number of replicas."""
        self.wait(lambda: all([line["replicas"] for line in self.records(name)[-2:]] == [size] * 2 for name in names))

    def wait(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 240  # a process takes up to a minute to start on a busy machine
        while not condition():
            assert time.monotonic() < until, {name: self.records(name)[-1:] for name in self.processes}
            time.sleep(0.05)

    def end(self, name: str) -> None:
        self.processes[name].join(120)
        assert self.processes[name].exitcode == 0

    def stop(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
        self.lighthouse.shutdown()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    found = Replicas(tmp_path)
    try:
        yield found
    finally:
        found.stop()


@pytest.mark.dist
def test_replicas_leave_and_join(replicas: Replicas, tmp_path: Path) -> None:
    """One is killed, a new one joins and has a NaN, one is stopped and resumed; all end with the same weights."""
    replicas.recipe["train"]["steps"] = 200
    replicas.start("a")
    replicas.start("b")
    replicas.wait_for(2, "a", "b")
    os.kill(replicas.processes["b"].pid or 0, signal.SIGKILL)
    replicas.wait_for(1, "a")
    replicas.start("c")
    replicas.wait_for(2, "a", "c")
    first = replicas.records("c")[0]["step"]
    assert first > replicas.records("b")[-1]["step"], "it began where the others were"
    (tmp_path / "c.poison").touch()
    replicas.wait(lambda: all(any("nonfinite_ranks" in line for line in replicas.records(name)) for name in "ac"))
    os.kill(replicas.processes["a"].pid or 0, signal.SIGTERM)
    replicas.end("a")
    stopped = json.loads((tmp_path / "a" / "result.json").read_text())
    assert stopped["status"] == "stopped"
    replicas.wait_for(1, "c")
    replicas.start("a", resume=True)
    replicas.wait_for(2, "a", "c")
    steps = [line["step"] for line in replicas.records("a")]
    assert steps == sorted(set(steps))
    assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) > 1, "it did not repeat the steps of the other"
    (tmp_path / "enough").touch()
    for name in "ac":
        replicas.end(name)
    first_weights, second_weights = (saved_tensors(tmp_path / name, 200, "model/") for name in "ac")
    assert first_weights
    assert first_weights.keys() == second_weights.keys()
    assert all(torch.equal(first_weights[name], second_weights[name]) for name in first_weights)
    lines = replicas.records("c")
    assert {b["tokens"] - a["tokens"] for a, b in zip(lines, lines[1:], strict=False)} == {4 * 32}, "of all replicas"
    losses = [line["loss"] for line in lines]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["threads", "firewall"])
def test_replica_that_cannot_join_ends_alone(replicas: Replicas, variant: str) -> None:
    replicas.start("a")
    replicas.wait_for(1, "a")
    replicas.start("b", variant=variant)
    replicas.processes["b"].join(120)
    assert replicas.processes["b"].exitcode == 1
    last = replicas.records("a")[-1]["step"]
    replicas.wait(lambda: replicas.records("a")[-1]["step"] > last + 3)
    replicas.wait_for(1, "a")


@pytest.mark.dist
@pytest.mark.slow
def test_others_wait_for_a_busy_replica(replicas: Replicas, tmp_path: Path) -> None:
    replicas.recipe["comm"] = {**ELASTIC, "timeout": 4}
    replicas.recipe["train"]["steps"] = 30
    replicas.start("a", variant="busy")
    replicas.start("b")
    (tmp_path / "enough").touch()
    for name in "ab":
        replicas.end(name)
    first, second = (saved_tensors(tmp_path / name, 30, "model/") for name in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.dist
def test_end_of_the_lighthouse_saves_a_checkpoint(replicas: Replicas, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # a process of its own: the server of this process would answer after its shutdown
    words = ["--bind", f"127.0.0.1:{port}", "--min_replicas", "1"]
    lighthouse = subprocess.Popen([Path(sys.executable).parent / "torchft_lighthouse", *words])
    replicas.address, replicas.recipe["comm"] = f"http://127.0.0.1:{port}", {**ELASTIC, "timeout": 3}
    try:
        replicas.start("a")
        replicas.wait_for(1, "a")
    finally:
        lighthouse.kill()
        lighthouse.wait()
    replicas.processes["a"].join(120)
    assert replicas.processes["a"].exitcode == 1
    last = replicas.records("a")[-1]["step"]
    assert saved_tensors(tmp_path / "a", last, "model/")


@pytest.mark.dist
@pytest.mark.slow
def test_other_recipe_or_data_is_refused(replicas: Replicas, tmp_path: Path) -> None:
    replicas.start("a")
    replicas.wait_for(1, "a")
    recipe = replicas.recipe
    write_corpus(tmp_path / "other.txt", seed=1)
    other = {**recipe, "data": {**recipe["data"], "text": str(tmp_path / "other.txt")}}
    for name, changed, said in (
        ("b", {**recipe, "optim": {"name": "sign", "lr": 2e-3}}, "optim.lr: 0.001 -> 0.002"),
        ("c", other, "the data differs from that of the other replicas"),
    ):
        path = write_recipe(tmp_path / f"{name}.yaml", changed)
        environment = {**os.environ, LIGHTHOUSE: replicas.address}
        done = scantling("train", path, "--run-dir", tmp_path / name, env=environment)
        assert done.returncode == 2
        assert said in done.stderr
        assert not list((tmp_path / name).glob("checkpoints/step-*"))
    replicas.wait_for(1, "a")


def test_hash_has_what_is_compared(tmp_path: Path) -> None:
    def identity(**changed: Any) -> dict[str, Any]:
        recipe = load_recipe(recipe_of(tmp_path, **changed)).model_dump(mode="json")
        return {"recipe": recipe, "fingerprint": "data", "decoder": "PyTorch"}

    own = identity()
    write_corpus(tmp_path / "elsewhere.txt")
    for same in (
        {"train": {"steps": 1000, "checkpoint_every": 7}},
        {"data": {"text": str(tmp_path / "elsewhere.txt")}},
    ):
        compare_identities(identity(**same), own)
        assert hash_identity(identity(**same)) == hash_identity(own)
    for other in (identity(optim={"name": "sign", "lr": 2e-3}), {**own, "fingerprint": "x"}, {**own, "decoder": "x"}):
        with pytest.raises(UserError, match="the other replicas"):
            compare_identities(other, own)
        assert hash_identity(other) != hash_identity(own)


def test_lighthouse_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchft")
    for address in ("", "host:29510", "http://host", "http://host:port"):
        monkeypatch.setenv(LIGHTHOUSE, address)
        with pytest.raises(UserError, match=f"{LIGHTHOUSE}.*http://host:29510"):
            sc.train(recipe_of(tmp_path), run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"comm": {**ELASTIC, "delay": 1}}, "comm.delay"),
        ({"comm": {**ELASTIC, "sync_every": 2}}, "comm.sync_every"),
        ({"comm": {**ELASTIC, "state_sync_every": 2}}, "comm.state_sync_every"),
        ({"comm": {**ELASTIC, "exchange": "dense"}}, "comm.exchange"),
        ({"comm": {"name": "demo", "elastic": True, "budget": "1 MB/step"}}, "comm.budget"),
        ({"comm": {"name": "local_steps", "elastic": True}}, "comm.elastic"),
        ({"comm": {"elastic": True}}, "comm.elastic"),
        ({"data": {"workers": 1}}, "data.workers"),
        ({"parallel": {"shard": 2}}, "parallel.shard"),
        ({"tensor": {"rank": 4, "size_target": 0.5}}, "tensor.size_target"),
    ],
)
def test_recipes_that_need_fixed_replicas(tmp_path: Path, sections: dict[str, Any], named: str) -> None:
    with pytest.raises(RecipeError, match=named):
        load_recipe(recipe_of(tmp_path, **sections))


def test_models_with_running_statistics_are_refused() -> None:
    exchange = DemoExchange(process_group=TorchFTGroup(None, None))
    with pytest.raises(UserError, match="running_mean"):
        exchange.prepare(torch.nn.BatchNorm1d(3))


def source(batch_size: int = 10) -> BatchSource:
    def collate(examples: list[tuple[int, int, Any]]) -> Batch:
        labels = torch.tensor([index for _, index, _ in examples])
        return Batch({}, labels, len(examples), len(examples))

    sampler = Sampler(100, batch_size=batch_size, seed=0)
    return BatchSource(range(100), collate, sampler, micro_batch_size=3)  # type: ignore[arg-type]


def labels_of(batches: list[Batch]) -> list[int]:
    return [int(label) for batch in batches for label in batch.labels]


@pytest.mark.parametrize("world", [1, 2, 3, 7, 10])
def test_shares_of_a_batch(world: int) -> None:
    """All samples of a batch are taken once, and each has the same weight in the mean over the replicas."""
    whole = labels_of(source().next_step())
    parts, shares = [], []
    for rank in range(world):
        own = source()
        shares.append(own.divide(rank, world))
        parts.append(labels_of(own.next_step()))
    assert [label for part in parts for label in part] == whole
    # a replica's gradient is the mean of its samples
    assert np.allclose([share / (world * len(part)) for share, part in zip(shares, parts, strict=True)], 1 / 10)


def test_more_replicas_than_samples() -> None:
    own = [source(batch_size=2) for _ in range(3)]
    shares = [each.divide(rank, 3) for rank, each in enumerate(own)]
    assert shares == [1.0, 1.0, 1.0]
    assert {len(labels_of(each.next_step())) for each in own} == {1}


def test_divided_source_keeps_its_position() -> None:
    whole, own = source(), source()
    steps = [labels_of(whole.next_step()) for _ in range(3)]
    assert labels_of(own.next_step()) == steps[0]
    own.divide(1, 2)
    assert labels_of(own.next_step()) == steps[1][5:]
    own.divide(0, 1)
    assert labels_of(own.next_step()) == steps[2]
