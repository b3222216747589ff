"""Tests of a killed process: torchrun restarts all, which resume from the newest checkpoint to the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import scantling as sc
from scantling.distributed.context import launch_id
from scantling.errors import UserError
from scantling.trainer.training.checkpoint import load_tensors
from scantling.trainer.training.run_dir import RunDir
from tests.runs import WIDE, command, records, scantling, start, tiny_recipe, wait_for_step, write_recipe


def workers(parent: int) -> list[int]:
    """Return the live processes that torchrun has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, its_parent = status.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(its_parent) == parent and state != "Z":
            found.append(int(status.parent.name))
    return sorted(found)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kills", "steps", "comm"),
    [
        (1, 16, {"name": "demo", "delay": 1}),
        pytest.param(20, 60, {"name": "demo"}, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_run_killed_at_random_steps_ends_with_the_same_bits(
    tmp_path: Path, kills: int, steps: int, comm: dict[str, object]
) -> None:
    train = {"steps": steps, "checkpoint_every": 2, "batch_size": 16}
    recipe = {**tiny_recipe(tmp_path, comm=comm, train=train), "optim": {"name": "sign", "lr": 1e-3}}
    recipe["model"]["overrides"] |= WIDE
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    done = scantling("train", path, "--run-dir", straight, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr

    chosen = random.Random(0)
    at = sorted(chosen.sample(range(3, steps - 4), kills))
    again = ["--max-restarts", str(kills), "--monitor-interval", "0.1"]
    process = start(command(["train", path, "--run-dir", broken], processes=2, launcher=again))
    killed: set[int] = set()
    for step in at:
        wait_for_step(broken / "metrics.jsonl", step, process)
        alive = [pid for pid in workers(process.pid) if pid not in killed]
        assert len(alive) == 2
        os.kill(chosen.choice(alive), signal.SIGKILL)
        killed |= set(alive)
        wait_until_restarted(process, killed)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert output.count("resumed from") == kills
    assert [record["loss"] for record in records(broken)] == [record["loss"] for record in records(straight)]
    wanted, found = (load_tensors(run / "checkpoints" / f"step-{steps}") for run in (straight, broken))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in wanted.items())


def wait_until_restarted(process: subprocess.Popen[str], before: set[int]) -> None:
    until = time.monotonic() + 120
    while len([pid for pid in workers(process.pid) if pid not in before]) < 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.05)


def test_restart_needs_a_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UserError, match="pass --run-dir"):
        sc.train(tiny_recipe(tmp_path))


def test_restart_before_the_first_checkpoint_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path, train={"steps": 2})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    RunDir(tmp_path / "run").write_launch(launch_id())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert sc.train(recipe, run_dir=tmp_path / "run").status == "done"


def test_restart_leaves_runs_of_other_launches_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run = tiny_recipe(tmp_path, train={"steps": 2}), tmp_path / "run"
    sc.train(recipe, run_dir=run)
    (file,) = (run / "checkpoints" / "step-2").glob("*.distcp")
    file.write_bytes(file.read_bytes() + b"x")
    kept = (run / "metrics.jsonl").read_bytes()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    with pytest.raises(UserError, match="already holds a run"):
        sc.train(recipe, run_dir=run)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # its own run id, whose checkpoints cannot be read
    with pytest.raises(UserError, match="no complete checkpoint"):
        sc.train(recipe, run_dir=run)
    assert (run / "metrics.jsonl").read_bytes() == kept
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert sc.train(recipe, run_dir=run, force=True).step == 2
