"""Tests that every combination of methods and process counts survives two random kills with the same final bits."""

from __future__ import annotations

import itertools
import random
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from scantling.trainer.training.checkpoint import load_tensors
from scantling.trainer.training.checkpoint_manifest import read_manifest
from tests.runs import WIDE, kill_tree, records, scantling, start_scantling, tiny_recipe, wait_for, write_recipe

STEPS = 24
LAST_KILL = 14.0  # a busy machine sees the records late: the run must still be going on
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tt": {"rank": 8, "size_target": 0.6, "adapt": 12, "truncate_every": 3},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 1e-3, "betas": [0.0, 0.95]},
    "came": {"name": "came", "lr": 1e-3, "betas": [0.0, 0.95, 0.995], "debias": True},
}
EXCHANGES: dict[str, dict[str, Any]] = {"allreduce": {"name": "allreduce"}, "demo": {"name": "demo", "topk": 8}}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "int8": {"weights": "int8", "activations": "int8"}}


def run_until_killed(words: list[str | Path], metrics: Path, moment: float, *, processes: int) -> None:
    """Start the command and SIGKILL all of its processes `moment` steps into the run; a fraction is part of a step."""
    process = start_scantling(*words, processes=processes)
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= int(moment), process)
    time.sleep((moment % 1) * 0.2)
    kill_tree(process)


def check_kills(tmp_path: Path, recipe: dict[str, Any], moments: Sequence[float], *, processes: int) -> None:
    """Compare a run with one that is killed at these moments, each in steps after the one before."""
    steps = recipe["train"]["steps"]
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    done = scantling("train", path, "--run-dir", straight, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr

    metrics, words = broken / "metrics.jsonl", ["train", path, "--run-dir", broken]
    lines = 0
    for moment in moments:
        run_until_killed(words, metrics, lines + moment, processes=processes)
        words = ["train", broken, "--resume"]
        lines = metrics.read_text().count("\n")  # the resumed run appends to the same file
    done = scantling("train", broken, "--resume", processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr

    for want, got in zip(records(straight), records(broken), strict=True):
        for key in ("step", "tokens", "loss", "grad_norm", "lr", "eval_loss", "tensor_parameters"):
            assert want.get(key) == got.get(key), (want["step"], key)
    want_tensors, got_tensors = (load_tensors(run / f"checkpoints/step-{steps}") for run in (straight, broken))
    assert want_tensors.keys() == got_tensors.keys()
    for key, tensor in want_tensors.items():
        assert torch.equal(tensor, got_tensors[key]), key
    want_values, got_values = (read_manifest(run / f"checkpoints/step-{steps}")["values"] for run in (straight, broken))
    for key in want_values.keys() - {"joules"}:
        assert want_values[key] == got_values[key], key


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("model", "optimizer", "exchange", "precision"),
    list(itertools.product(MODELS, OPTIMIZERS, EXCHANGES, PRECISIONS)),
)
def test_two_kills_at_random_moments_end_with_the_same_bits(
    tmp_path: Path, model: str, optimizer: str, exchange: str, precision: str, processes: int
) -> None:
    sections = {
        "tensor": MODELS[model],
        "optim": OPTIMIZERS[optimizer],
        "comm": EXCHANGES[exchange],
        "precision": PRECISIONS[precision],
        "train": {"steps": STEPS, "checkpoint_every": 2, "batch_size": 8},
    }
    recipe = tiny_recipe(tmp_path, **{name: keys for name, keys in sections.items() if keys})
    recipe["model"]["overrides"] |= WIDE
    chosen = random.Random(zlib.crc32(f"{model} {optimizer} {exchange} {precision} {processes}".encode()))
    first, second = sorted(chosen.uniform(2.5, LAST_KILL) for _ in range(2))
    check_kills(tmp_path, recipe, [first, max(1.0, second - first)], processes=processes)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_twenty_kills_of_sharded_replicas_end_with_the_same_bits(tmp_path: Path) -> None:
    """Two replicas of two processes each, which exchange momentum: TT layers, and dense layers with int8 momentum."""
    recipe = tiny_recipe(
        tmp_path,
        parallel={"shard": 2, "replicate": 2},
        comm=EXCHANGES["demo"],
        tensor={"rank": {"*mlp*": 8}, "size_target": 0.6, "adapt": 20, "truncate_every": 3},
        optim={**OPTIMIZERS["came"], "betas": [0.9, 0.95, 0.995], "momentum": "int8"},
        train={"steps": 60, "checkpoint_every": 2, "batch_size": 8},
    )
    recipe["model"]["overrides"] |= WIDE
    chosen = random.Random(0)
    check_kills(tmp_path, recipe, [chosen.uniform(0.5, 4.5) for _ in range(20)], processes=4)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("processes", "parallel"), [(2, {}), (4, {}), (4, {"shard": 2, "replicate": 2})])
def test_twenty_kills_in_local_steps_end_with_the_same_bits(
    tmp_path: Path, processes: int, parallel: dict[str, int]
) -> None:
    """Exchanges come after every third step, checkpoints after every second one."""
    recipe = tiny_recipe(
        tmp_path,
        parallel=parallel,
        comm={"name": "local_steps", "sync_every": 3, "topk": 192, "values": "sign", "dense": "sign", "outer_lr": 1.3},
        optim={**OPTIMIZERS["came"], "betas": [0.9, 0.95, 0.995], "momentum": "int8"},
        train={"steps": 60, "checkpoint_every": 2, "batch_size": 8},
    )
    recipe["model"]["overrides"] |= WIDE
    chosen = random.Random(processes + len(parallel))
    check_kills(tmp_path, recipe, [chosen.uniform(0.5, 4.5) for _ in range(20)], processes=processes)
