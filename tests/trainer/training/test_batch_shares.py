"""Tests of replicas that take unequal shares of each batch, as machines of different speed do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.comm import DemoExchange
from scantling.distributed.context import DistContext
from scantling.errors import RecipeError, UserError
from scantling.trainer.planning.changes import list_changes
from scantling.trainer.planning.plan import plan_run
from scantling.trainer.planning.resolve import resolve_run
from scantling.trainer.recipe import load_recipe
from scantling.trainer.training.build import build_exchange
from scantling.trainer.training.trained_run import evaluate_run
from tests.runs import WIDE, forget, records, saved_tensors, scantling, tiny_recipe, train_run, write_recipe
from tests.trainer.training import poisoned

pytestmark = pytest.mark.dist

CAME = {"name": "came", "lr": 3e-3, "betas": [0.9, 0.95, 0.995], "debias": True}
WHOLE = {"comm": {"name": "demo", "exchange": "dense", "dense": "fp32"}}


def recipe_of(folder: Path, *, clip: float | None = 1.0, **sections: Any) -> dict[str, Any]:
    train = {"batch_size": 12, "micro_batch_size": 2, "clip": clip, "checkpoint_every": 4, "keep_checkpoints": 3}
    own = {"model": {"overrides": {**tiny_recipe(folder)["model"]["overrides"], **WIDE}}, "train": train}
    return tiny_recipe(folder, **own, **sections)


@pytest.mark.parametrize(
    ("processes", "sections"),
    [
        (2, {"parallel": {"batch_shares": [2, 1]}}),
        (2, {"parallel": {"batch_shares": [1, 5]}, **WHOLE}),
        (4, {"parallel": {"batch_shares": [1, 2], "shard": 2}}),
    ],
    ids=["allreduce", "everything sent by demo", "sharded"],
)
def test_all_tokens_have_the_same_weight(processes: int, sections: dict[str, Any], tmp_path: Path) -> None:
    """With `demo` each process clips its own gradient, so that clipping would differ."""
    clip = None if "comm" in sections else 1.0
    alone = train_run(recipe_of(tmp_path, clip=clip, comm=sections.get("comm", {})), tmp_path, "alone", 1)
    shared = train_run(recipe_of(tmp_path, clip=clip, **sections), tmp_path, "shared", processes)
    for one, other in zip(records(alone), records(shared), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=2e-5 * one["step"])
        assert other["tokens"] == one["tokens"]


@pytest.mark.parametrize(
    ("processes", "parallel"), [(2, {}), (4, {"shard": 2})], ids=["two processes", "two sharded replicas"]
)
def test_local_steps_resume_bitwise(processes: int, parallel: dict[str, Any], tmp_path: Path) -> None:
    comm = {"name": "local_steps", "sync_every": 3, "topk": 4, "chunk": 16}
    recipe = recipe_of(tmp_path, comm=comm, optim=CAME, parallel={**parallel, "batch_shares": [2, 1]})
    straight = train_run(recipe, tmp_path, "straight", processes)
    equal = train_run({**recipe, "parallel": parallel}, tmp_path, "equal", processes)
    assert [each["tokens"] for each in records(straight)] == [each["tokens"] for each in records(equal)]
    assert records(straight)[-1]["loss"] != records(equal)[-1]["loss"]
    broken = tmp_path / "broken"
    shutil.copytree(straight, broken)
    forget(broken, 4)
    done = scantling("train", broken, "--resume", processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    expected, found = saved_tensors(straight), saved_tensors(broken)
    assert [key for key, value in expected.items() if not torch.equal(value, found[key])] == []


def test_resume_on_another_number_of_replicas(tmp_path: Path) -> None:
    straight = train_run(recipe_of(tmp_path, parallel={"batch_shares": [2, 1]}), tmp_path, "straight", 2)
    wanted = [each["loss"] for each in records(straight)]
    assert evaluate_run(straight)["eval_loss"] == pytest.approx(records(straight)[-1]["eval_loss"], rel=1e-5)
    forget(straight, 4)
    refused = scantling("train", straight, "--resume", processes=3)
    assert "parallel.batch_shares: [2, 1] must have one number for each replica; the run has 3" in refused.stderr
    done = scantling("train", straight, "--resume", "--set", "parallel.batch_shares=[4, 1, 1]", processes=3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each["loss"] for each in records(straight)] == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize(
    ("shares", "processes", "message"),
    [
        ([2, 1], 3, "must have one number for each replica; the run has 3"),
        ([2, 1], 1, "must have one number for each replica; the run has 1"),
        ([4, 1], 2, r"the batch of 12 sequences cannot be shared as parallel.batch_shares: \[4, 1\] says"),
    ],
)
def test_shares_that_do_not_fit_are_refused(shares: list[int], processes: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        sc.plan(recipe_of(tmp_path, parallel={"batch_shares": shares}), world_size=processes)


@pytest.mark.parametrize("shares", [[], [0, 1], [1.5, 1], "2:1"])
def test_shares_are_positive_integers(shares: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"parallel\.batch_shares"):
        load_recipe(recipe_of(tmp_path, parallel={"batch_shares": shares}))


def test_plan_is_that_of_the_largest_share(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, parallel={"batch_shares": [2, 1]})
    recipe["train"]["micro_batch_size"] = None
    uneven = sc.plan(recipe, world_size=2)
    equal = sc.plan({**recipe, "parallel": {}, "train": {**recipe["train"], "batch_size": 16}}, world_size=2)
    assert uneven.peak_memory_bytes - uneven.base_bytes == equal.peak_memory_bytes - equal.base_bytes


def test_clipping_is_in_proportion_to_the_share(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, clip=0.5, comm={"name": "demo"}, parallel={"batch_shares": [2, 1]})
    run = resolve_run(load_recipe(recipe), world_size=2, device="cpu")
    made = [build_exchange(run, [], DistContext(rank, 2, torch.device("cpu"))) for rank in (0, 1)]
    assert [each.clip for each in made if isinstance(each, DemoExchange)] == pytest.approx([2 / 3, 1 / 3])


def test_advice_to_shard_leaves_out_the_shares(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, parallel={"batch_shares": [2, 1]})
    run = resolve_run(load_recipe(recipe), world_size=2, device="cpu")
    changes = list_changes(run, plan_run(run))
    shard = next(change.settings for change in changes if "parallel.shard" in change.settings)
    assert shard == {"parallel.shard": 2, "parallel.batch_shares": None}


def test_run_goes_on_if_a_replica_with_its_share_is_left_out(tmp_path: Path) -> None:
    """Rank 1 has a NaN in step 3."""
    recipe = recipe_of(tmp_path, **WHOLE, parallel={"batch_shares": [3, 1]})
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    done = scantling("train", path, "--run-dir", tmp_path / "run", processes=2, before=poisoned.patch)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record.get("nonfinite_ranks") for record in records(tmp_path / "run")] == [*2 * [None], [1], *5 * [None]]
