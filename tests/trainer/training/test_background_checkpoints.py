"""Tests of checkpoints that a thread writes while training goes on: the same files, and no loss by errors and kills."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.distributed.context import SINGLE_PROCESS
from scantling.errors import RunError, UserError
from scantling.trainer.training import checkpoint as saving
from scantling.trainer.training.checkpoint import Checkpointer, State, load_tensors
from scantling.trainer.training.checkpoint_background import BackgroundCheckpointer
from scantling.trainer.training.sinks import Record, Sink
from tests.damage import find_damage
from tests.runs import records, saved_tensors, scantling, start_scantling, tiny_recipe, wait_for_step, write_recipe
from tests.trainer.training.test_kill_matrix import EXCHANGES, MODELS, OPTIMIZERS, check_kills

ASYNC = {"async_checkpoint": True}


def steps(run: Path) -> list[int]:
    return Checkpointer(run / "checkpoints", SINGLE_PROCESS).steps()


def tensors(number: float) -> dict[str, torch.Tensor]:
    base = torch.arange(12.0).reshape(3, 4) + number
    return {
        "model/a": base,
        "model/transposed": base.t(),
        "model/slice": base[:, 1:3],
        "model/empty": torch.empty(0, 3),
        "optimizer/a/step": torch.tensor(number),
        "optimizer/a/momentum": base.to(torch.int8),
        "rng/rank0/cpu": torch.get_rng_state(),
    }


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_save_in_the_background_writes_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the ids of the saves, which are random
    monkeypatch.setattr(saving.secrets, "token_hex", lambda count: "ab" * count)
    monkeypatch.setattr(torch.distributed.checkpoint.filesystem, "_generate_uuid", lambda: "id")
    for kind in (Checkpointer, BackgroundCheckpointer):
        saver = kind(tmp_path / "run", SINGLE_PROCESS)  # the same path, which `.metadata` has
        for step in (1, 2, 3):
            state = State(tensors(step))
            saver.save(step, state)
            for tensor in state.tensors.values():
                tensor.zero_()
        saver.wait()
        assert saver.steps() == [3, 2]
        (tmp_path / "run").rename(tmp_path / kind.__name__)
    for step in (2, 3):
        one, other = (tmp_path / kind / f"step-{step}" for kind in ("Checkpointer", "BackgroundCheckpointer"))
        assert content(one) == content(other)
        assert torch.equal(load_tensors(other)["model/a"], tensors(step)["model/a"])


def test_next_save_uses_the_memory_of_the_copies_again(tmp_path: Path) -> None:
    saver = BackgroundCheckpointer(tmp_path, SINGLE_PROCESS)
    addresses = []
    for step in (1, 2):
        saver.save(step, State(tensors(step)))
        addresses.append({key: each.data_ptr() for key, each in saver._staged.items()})
    assert addresses[0] == addresses[1]
    # ranks of TT layers change shapes, and keys may come and go
    saver.save(3, State({"model/a": torch.zeros(2, 2), "model/b": torch.zeros(1)}))
    saver.wait()
    assert saver._staged.keys() == {"model/a", "model/b"}
    assert load_tensors(tmp_path / "step-3")["model/a"].shape == (2, 2)


class Steps(Sink):
    """Lists what a run reports, and calls a function after each record."""

    def __init__(self, action: Any = lambda step: None) -> None:
        self.events: list[str] = []
        self._action = action

    def record(self, record: Record) -> None:
        self.events.append(f"step {record['step']}")
        self._action(record["step"])

    def message(self, text: str) -> None:
        self.events.append(text.partition(" checkpoint")[0])


def test_training_goes_on_while_the_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, is_recorded = saving.write_parts, threading.Event()

    def write_late(*args: Any) -> dict[str, Any]:
        assert is_recorded.wait(60)
        return write(*args)

    monkeypatch.setattr(saving, "write_parts", write_late)
    recipe = tiny_recipe(tmp_path, train={"steps": 6, "checkpoint_every": 4}, parallel=ASYNC)
    sink = Steps(lambda step: is_recorded.set() if step == 5 else None)
    assert sc.train(recipe, run_dir=tmp_path / "run", sinks=[sink]).status == "done"
    assert sink.events.index("step 5") < sink.events.index("step 4:")
    assert sink.events[-1] == "step 6:"
    assert steps(tmp_path / "run") == [6, 4]


def test_error_of_a_step_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, has_failed = saving.write_parts, threading.Event()

    def write_late(*args: Any) -> dict[str, Any]:
        assert has_failed.wait(60)
        time.sleep(0.2)
        return write(*args)

    def fail(step: int) -> None:
        if step == 5:
            has_failed.set()
            raise RunError("a NaN")

    monkeypatch.setattr(saving, "write_parts", write_late)
    recipe = tiny_recipe(tmp_path, train={"checkpoint_every": 4}, parallel=ASYNC)
    with pytest.raises(RunError, match="a NaN"):
        sc.train(recipe, run_dir=tmp_path / "run", sinks=[Steps(fail)])
    assert steps(tmp_path / "run") == [4]
    assert find_damage(tmp_path / "run" / "checkpoints" / "step-4") is None


@pytest.mark.parametrize("last", [4, 100_000])
def test_error_of_the_thread_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """In the last step, and long before it."""
    write = saving.write_manifest

    def fail(folder: Path, content: Mapping[str, Any]) -> None:
        if content["step"] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, content)

    monkeypatch.setattr(saving, "write_manifest", fail)
    train = {"steps": last, "checkpoint_every": 2, "schedule": "constant"}
    recipe = tiny_recipe(tmp_path, train=train, parallel=ASYNC)
    with pytest.raises(RunError, match=r"step 4 .*: the disk is full; the checkpoint of step 2 is intact"):
        sc.train(recipe, run_dir=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]


def test_run_that_was_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    """The first checkpoint may be in the background until the second is due."""
    run = tmp_path / "run"
    recipe = tiny_recipe(tmp_path, train={"steps": 6, "checkpoint_every": 4}, parallel=ASYNC)
    sc.train(recipe, run_dir=run)
    shutil.rmtree(run / "checkpoints")
    (run / "result.json").unlink()
    assert sc.train(run, resume=True).step == 6
    assert len(records(run)) == 6
    shutil.rmtree(run / "checkpoints")
    (run / "result.json").unlink()
    line = (run / "metrics.jsonl").read_text().splitlines()[-1]
    (run / "metrics.jsonl").write_text(line.replace('"step": 6', '"step": 9') + "\n")
    with pytest.raises(UserError, match="records up to step 9 and no checkpoint"):
        sc.train(run, resume=True)


def sharded_recipe(folder: Path, **parallel: Any) -> dict[str, Any]:
    return tiny_recipe(
        folder,
        parallel={"shard": 2, **ASYNC, **parallel},
        optim=OPTIMIZERS["came"],
        train={"checkpoint_every": 2, "keep_checkpoints": 4},
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that share one replica, with checkpoints in the background."""
    folder = tmp_path_factory.mktemp("straight")
    path = write_recipe(folder / "recipe.yaml", sharded_recipe(folder))
    done = scantling("train", path, "--run-dir", folder / "run", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for step in (2, 4, 6, 8) for line in [f"step {step}: checkpoint"] if line not in done.stdout] == []
    return folder / "run"


@pytest.mark.dist
def test_shards_in_the_background_are_the_same_files(straight: Path, tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", sharded_recipe(tmp_path, async_checkpoint=False))
    done = scantling("train", path, "--run-dir", tmp_path / "run", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps(straight) == steps(tmp_path / "run") == [8, 6, 4, 2]
    for step in steps(straight):
        one, other = (content(run / "checkpoints" / f"step-{step}") for run in (straight, tmp_path / "run"))
        assert (
            one.keys() == other.keys() == {"__0_0.distcp", "__1_0.distcp", "index.json", ".metadata", "manifest.json"}
        )
        # the other two have the id of the save
        same = ["__0_0.distcp", "__1_0.distcp", "index.json"]
        assert [name for name in same if one[name] != other[name]] == []
    # the key may change in a resume
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-8")
    done = scantling("train", tmp_path / "run", "--resume", "--set", "parallel.async_checkpoint=true", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    want, got = saved_tensors(straight), saved_tensors(tmp_path / "run")
    assert want.keys() == got.keys()
    assert all(torch.equal(each, got[key]) for key, each in want.items())


def _kill_in_step_4() -> None:
    """Kill rank 1, or the rank that seals the checkpoint, in the thread of the save of step 4."""
    when = os.environ["TESTS_KILL"]
    rank = "1" if when == "write_parts" else "0"
    action = getattr(saving, when)

    def kill(*args: Any) -> Any:
        if os.environ["RANK"] == rank and any("step-4" in str(each) for each in args):
            assert threading.current_thread() is not threading.main_thread()
            os.kill(os.getpid(), signal.SIGKILL)
        return action(*args)

    setattr(saving, when, kill)


@pytest.mark.dist
@pytest.mark.parametrize("when", ["write_parts", "write_manifest", "publish"])
def test_kill_of_the_thread_leaves_the_checkpoint_before(straight: Path, tmp_path: Path, when: str) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", sharded_recipe(tmp_path))
    run = tmp_path / "run"
    done = scantling("train", path, "--run-dir", run, processes=2, before=_kill_in_step_4, env={"TESTS_KILL": when})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert steps(run) == [2]
    assert find_damage(run / "checkpoints" / "step-2") is None
    done = scantling("train", run, "--resume", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout
    want, got = saved_tensors(straight), saved_tensors(run)
    assert want.keys() == got.keys()
    assert all(torch.equal(each, got[key]) for key, each in want.items())


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2])
def test_kills_at_random_moments_end_with_the_same_bits(tmp_path: Path, processes: int) -> None:
    recipe = tiny_recipe(
        tmp_path,
        parallel={"shard": processes, **ASYNC},
        tensor={**MODELS["tt"], "rank": {"*mlp*": 8}},
        optim=OPTIMIZERS["came"],
        comm=EXCHANGES["allreduce"],
        train={"steps": 60, "checkpoint_every": 2, "batch_size": 8},
    )
    # after step 4 there is a checkpoint of step 2, without which a resume would replace the records
    check_kills(tmp_path, recipe, [6.3, 4.7, 2.1, 3.9], processes=processes)


def _fail_on_rank_1() -> None:
    write = saving.write_parts

    def fail(parts: Any, folder: Path, rank: int) -> dict[str, Any]:
        if rank == 1 and folder.name == "step-4.tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(parts, folder, rank)

    saving.write_parts = fail


@pytest.mark.dist
def test_error_of_one_rank_is_raised_on_both(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", sharded_recipe(tmp_path))
    run = tmp_path / "run"
    settings = ["--set", "train.steps=100000", "--set", "train.schedule=constant"]
    done = scantling("train", path, "--run-dir", run, *settings, processes=2, before=_fail_on_rank_1)
    assert done.returncode == 1
    # each of the two processes prints it
    text = "cannot save the checkpoint of step 4"
    assert done.stderr.count(text) == 2, done.stderr
    assert done.stderr.count(f"rank 1 on {os.uname().nodename}: the disk is full; the checkpoint of step 2 is") == 2
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-2"]
    assert find_damage(run / "checkpoints" / "step-2") is None


@pytest.mark.dist
def test_stopped_run_waits_for_its_checkpoint(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", sharded_recipe(tmp_path))
    run = tmp_path / "run"
    settings = ["--set", "train.steps=100000", "--set", "train.schedule=constant"]
    process = start_scantling("train", path, "--run-dir", run, *settings, processes=2)
    wait_for_step(run / "metrics.jsonl", 5, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert "--resume" in output
    assert "Traceback" not in output
    last = steps(run)[0]
    assert last == records(run)[-1]["step"]
    assert f"step {last}: checkpoint" in output
    assert find_damage(run / "checkpoints" / f"step-{last}") is None
