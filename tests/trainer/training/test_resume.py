"""Tests that resuming is bitwise: N steps at once equal k steps, SIGKILL, and a resume in new processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scantling.distributed.context import DistContext
from scantling.trainer.training.checkpoint import Checkpointer, load_tensors
from scantling.trainer.training.checkpoint_manifest import read_manifest
from tests.runs import (
    forget,
    kill_tree,
    records,
    scantling,
    start_scantling,
    tiny_recipe,
    wait_for_step,
    write_corpus,
    write_recipe,
)

SINGLE_PROCESS = DistContext(0, 1, torch.device("cpu"))


def gpt2_with_dropout(folder: Path) -> Path:
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "vocab_size": 320,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.dist
@pytest.mark.parametrize(
    ("processes", "optim", "compute", "steps", "comm"),
    [
        pytest.param(1, "came", "bf16", 40, {}, marks=pytest.mark.slow),
        (1, "adamw", "fp16", 20, {}),
        (2, "came", "fp32", 20, {}),
        pytest.param(2, "sign", "fp32", 20, {"name": "demo"}, marks=pytest.mark.slow),
        (2, "sign", "fp32", 20, {"name": "demo", "delay": 1, "overlap": True, "residual": "int8"}),
    ],
)
def test_kill_and_resume_is_bitwise(
    tmp_path: Path, processes: int, optim: str, compute: str, steps: int, comm: dict[str, Any]
) -> None:
    """With dropout, accumulation, and an epoch's end in between: all generators and counters matter."""
    write_corpus(tmp_path / "corpus.txt", documents=10)
    recipe = tiny_recipe(
        tmp_path,
        model={"preset": None, "overrides": {}, "hf": str(gpt2_with_dropout(tmp_path / "model"))},
        optim={"name": optim, "lr": 0.003},
        precision={"compute": compute},
        comm=comm,
        train={
            "steps": steps,
            "batch_size": 320 // steps,
            "micro_batch_size": 80 // steps,
            "checkpoint_every": 3,
            "eval_every": 6,
            "clip": None if comm.get("overlap") else 1.0,
        },
    )
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    straight, broken = tmp_path / "straight", tmp_path / "broken"

    done = scantling("train", path, "--run-dir", straight, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert records(straight)[-1]["epoch"] == 1
    process = start_scantling("train", path, "--run-dir", broken, processes=processes)
    wait_for_step(broken / "metrics.jsonl", 8, process)
    kill_tree(process)
    before = (broken / "metrics.jsonl").read_bytes()
    assert max(Checkpointer(broken / "checkpoints", SINGLE_PROCESS).steps()) < steps, (
        "the run was over before it was killed"
    )
    resumed = scantling("train", broken, "--resume", processes=processes)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed from" in resumed.stdout

    after = (broken / "metrics.jsonl").read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1]), "existing lines have changed"
    for want, got in zip(records(straight), records(broken), strict=True):
        for key in ("step", "epoch", "tokens", "loss", "grad_norm", "lr", "eval_loss"):
            assert want.get(key) == got.get(key), (want["step"], key)
    checkpoint = f"checkpoints/step-{steps}"
    want_tensors, got_tensors = (load_tensors(run / checkpoint) for run in (straight, broken))
    assert want_tensors.keys() == got_tensors.keys()
    assert any(key.startswith("optimizer/") for key in want_tensors)
    if comm:
        own, other = (want_tensors[f"exchange/rank{rank}/transformer.h.0.attn.c_attn.weight"] for rank in range(2))
        assert not torch.equal(own, other)
    for key, tensor in want_tensors.items():
        assert tensor.dtype == got_tensors[key].dtype
        assert torch.equal(tensor, got_tensors[key]), key
    assert (
        read_manifest(straight / checkpoint)["values"]["data"] == read_manifest(broken / checkpoint)["values"]["data"]
    )


@pytest.mark.dist
def test_resume_of_four_processes_is_bitwise(tmp_path: Path) -> None:
    """Four processes sum in an order that depends on the buckets, which DDP rebuilds after its first pass."""
    train = {"batch_size": 16, "checkpoint_every": 4, "keep_checkpoints": 2}
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, comm={"bucket_mb": 0.05}, train=train))
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    done = scantling("train", path, "--run-dir", straight, processes=4)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(straight, broken)
    shutil.rmtree(broken / "checkpoints" / "step-8")
    done = scantling("train", broken, "--resume", processes=4)
    assert done.returncode == 0, done.stdout + done.stderr
    for want, got in zip(records(straight), records(broken), strict=True):
        assert (want["loss"], want["grad_norm"]) == (got["loss"], got["grad_norm"]), want["step"]
    want_tensors, got_tensors = (load_tensors(run / "checkpoints" / "step-8") for run in (straight, broken))
    assert want_tensors.keys() == got_tensors.keys()
    assert all(torch.equal(tensor, got_tensors[key]) for key, tensor in want_tensors.items())


@pytest.mark.dist
def test_two_processes_match_one(tmp_path: Path) -> None:
    """At the same global batch, losses agree to 1e-5 relative: only the order of sums differs, in fp32."""
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, train={"batch_size": 8, "micro_batch_size": 2}))
    for processes in (1, 2):
        done = scantling("train", path, "--run-dir", tmp_path / str(processes), processes=processes)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = records(tmp_path / "1"), records(tmp_path / "2")
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert (a["tokens"], a["epoch"]) == (b["tokens"], b["epoch"])
    assert two[-1]["eval_loss"] == pytest.approx(one[-1]["eval_loss"], rel=1e-5)
    assert one[-1]["wire_bytes"] == 0
    assert two[-1]["wire_bytes"] == two[-1]["gradient_bytes"], "2 (N - 1) / N of the gradients, with N = 2"
    assert json.loads((tmp_path / "2" / "plan.json").read_text())["wire_bytes"] == two[-1]["wire_bytes"]


@pytest.mark.dist
def test_resume_at_another_world_size(tmp_path: Path) -> None:
    """1 → 2 → 1 processes: the data position is kept, so without dropout the losses are those of one run."""
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, train={"steps": 12, "checkpoint_every": 4}))
    assert scantling("train", path, "--run-dir", tmp_path / "straight").returncode == 0
    moved = tmp_path / "moved"
    for processes, last in ((1, 4), (2, 8), (1, 12)):
        if last == 4:
            process = start_scantling("train", path, "--run-dir", moved)
            wait_for_step(moved / "metrics.jsonl", 6, process)
            kill_tree(process)
        else:
            done = scantling("train", moved, "--resume", processes=processes)
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"now {processes}: the random generators start again" in done.stdout
        forget(moved, last)
    for want, got in zip(records(tmp_path / "straight"), records(moved), strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
