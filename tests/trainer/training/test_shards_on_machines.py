"""Tests of sharded runs on machines without a shared file system: each machine has the parts that it wrote."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scantling.errors import UserError
from scantling.trainer.training.trained_run import evaluate_run, export_hf
from tests.damage import find_damage
from tests.runs import Ended, on_machines, records, saved_tensors, scantling, write_recipe
from tests.trainer.training.test_sharded_runs import recipe_of

pytestmark = pytest.mark.dist

HOST = os.uname().nodename


def machines(folder: Path, count: int) -> list[Path]:
    found = [folder / f"machine{number}" for number in range(count)]
    for path in found:
        path.mkdir(parents=True)
    return found


def train(folders: list[Path], *words: str | Path, processes: int = 1, code: int = 0) -> list[Ended]:
    ended = on_machines(folders, "train", *words, processes=processes)
    assert [each.code for each in ended] == [code] * len(ended), "\n".join(map(str, ended))
    return ended


def copied(folders: list[Path], target: Path) -> list[Path]:
    """Copy the runs of machines to new machines, without their last checkpoint."""
    new = machines(target, len(folders))
    for old, each in zip(folders, new, strict=True):
        shutil.copytree(old / "run", each / "run")
        shutil.rmtree(each / "run" / "checkpoints" / "step-8")
    return new


def bring_files(source: Path, target: Path, step: int) -> None:
    """Copy the tensor files of a checkpoint from one machine to another."""
    for file in (source / "run" / "checkpoints" / f"step-{step}").glob("*.distcp"):
        if not (there := target / "run" / "checkpoints" / f"step-{step}" / file.name).exists():
            shutil.copy(file, there)


def all_tensors(folders: list[Path], target: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint, whose files are on several machines."""
    shutil.copytree(folders[0], target / "all")
    for other in folders[1:]:
        bring_files(other, target / "all", 8)
    assert find_damage(target / "all" / "run" / "checkpoints" / "step-8") is None
    return saved_tensors(target / "all" / "run")


def check_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key, each in one.items() if not torch.equal(each, other[key])] == []


def names(folder: Path, step: int = 8) -> set[str]:
    return {file.name for file in (folder / "run" / "checkpoints" / f"step-{step}").glob("*.distcp")}


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two machines with one process and half of each matrix each."""
    folder = tmp_path_factory.mktemp("halves")
    path = write_recipe(folder / "recipe.yaml", recipe_of("dense came allreduce", folder, shard=2))
    both = machines(folder, 2)
    train(both, path, "--run-dir", "run")
    done = scantling("train", path, "--run-dir", folder / "shared", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    return both


def test_each_machine_writes_and_reads_its_own_parts(halves: list[Path], tmp_path: Path) -> None:
    for rank, machine in enumerate(halves):
        assert names(machine) == {f"__{rank}_0.distcp"}
        assert find_damage(machine / "run" / "checkpoints" / "step-8") is None
    straight = all_tensors(halves, tmp_path)
    check_same(straight, saved_tensors(halves[0].parent / "shared"))
    # the parts of one machine alone are no model, but enough for its rank
    both = copied(halves, tmp_path)
    ended = train(both, "run", "--resume")
    assert "resumed from run/checkpoints/step-4" in ended[0].out
    check_same(straight, all_tensors(both, tmp_path / "again"))
    # both together evaluate them, with the same layout
    ended = on_machines(both, "eval", "run", "--json")
    assert [each.code for each in ended] == [0, 0], ended
    assert json.loads(ended[0].out)["eval_loss"] == pytest.approx(records(both[0] / "run")[-1]["eval_loss"], rel=1e-4)


def test_missing_parts_are_named_and_may_be_copied(halves: list[Path], tmp_path: Path) -> None:
    machine = shutil.copytree(halves[0], tmp_path / "machine")
    step = machine / "run" / "checkpoints" / "step-8"
    there = halves[1] / "run" / "checkpoints" / "step-8"
    message = rf"{step} has only the parts .* missing: __1_0.distcp of {HOST}, {there}\. Copy these files into {step}"
    with pytest.raises(UserError, match=message):
        evaluate_run(machine / "run")
    with pytest.raises(UserError, match=message):
        export_hf(machine / "run", tmp_path / "exported")
    # one process with whole matrices
    done = scantling("train", machine / "run", "--resume", "--set", "parallel.shard=1", "--set", "train.steps=9")
    assert done.returncode == 2
    bring_files(halves[1], machine, 8)
    assert evaluate_run(machine / "run")["eval_loss"] == pytest.approx(
        records(machine / "run")[-1]["eval_loss"], rel=1e-4
    )
    export_hf(machine / "run", tmp_path / "exported")
    # a copy of another save is no copy
    shutil.copy(halves[1] / "run" / "checkpoints" / "step-4" / "__1_0.distcp", step)
    assert "__1_0.distcp" in str(find_damage(step))


def test_machines_in_another_order_need_each_others_files(halves: list[Path], tmp_path: Path) -> None:
    straight = all_tensors(halves, tmp_path)
    both = copied(halves[::-1], tmp_path)
    ended = train(both, "run", "--resume", code=2)
    for each in ended:
        error = " ".join(each.err.split())
        for rank, name in enumerate(("__0_0.distcp", "__1_0.distcp")):
            place = halves[rank] / "run" / "checkpoints" / "step-4"
            assert f"missing: {name} of {HOST}, {place}" in error
            assert f"rank {rank} on {HOST}: run/checkpoints/step-4 has only the parts" in error
    for one, other in (both, both[::-1]):
        bring_files(one, other, 4)
    train(both, "run", "--resume")
    check_same(straight, all_tensors(both, tmp_path / "again"))


def test_one_machine_with_all_processes_needs_the_files_of_the_other(halves: list[Path], tmp_path: Path) -> None:
    straight = all_tensors(halves, tmp_path)
    machine, other = copied(halves, tmp_path)
    done = scantling("train", machine / "run", "--resume", processes=2)
    assert done.returncode == 1
    place = halves[1] / "run" / "checkpoints" / "step-4"
    assert f"__1_0.distcp of {HOST}, {place} missing" in " ".join(done.stderr.split())
    bring_files(other, machine, 4)
    done = scantling("train", machine / "run", "--resume", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(straight, saved_tensors(machine / "run"))


def run_replicas(folder: Path, count: int, processes: int, **parallel: Any) -> list[Path]:
    recipe = recipe_of("dense int8 demo", folder, shard=2, replicate=2, **parallel)
    found = machines(folder, count)
    train(found, write_recipe(folder / "recipe.yaml", recipe), "--run-dir", "run", processes=processes)
    return found


def test_replica_on_each_machine(tmp_path: Path) -> None:
    both = run_replicas(tmp_path, 2, 2)
    for number, machine in enumerate(both):
        assert names(machine) == {f"__{2 * number}_0.distcp", f"__{2 * number + 1}_0.distcp"}
        # a whole model on each machine
        assert evaluate_run(machine / "run")["eval_loss"] == pytest.approx(
            records(machine / "run")[-1]["eval_loss"], rel=1e-4
        )
    straight = all_tensors(both, tmp_path)
    again = copied(both, tmp_path / "again")
    train(again, "run", "--resume", processes=2)
    check_same(straight, all_tensors(again, tmp_path / "again"))
    # in another order the residuals are missing, and nothing else
    swapped = copied(both[::-1], tmp_path / "swapped")
    ended = train(swapped, "run", "--resume", processes=2, code=2)
    place = both[0] / "run" / "checkpoints" / "step-4"
    for each in (ended[0], ended[2]):  # the first process of each machine
        error = " ".join(each.err.split())
        assert f"rank 0 on {HOST}: run/checkpoints/step-4 has only the parts" in error
        assert f"missing: __0_0.distcp of {HOST}, {place}" in error
    for one, other in (swapped, swapped[::-1]):
        bring_files(one, other, 4)
    train(swapped, "run", "--resume", processes=2)
    check_same(straight, all_tensors(swapped, tmp_path / "swapped"))


def test_replicas_across_machines(tmp_path: Path) -> None:
    """Four machines with one process each: two replicas of two machines. Checkpoints are written in the background."""
    four = run_replicas(tmp_path, 4, 1, async_checkpoint=True)
    for rank, machine in enumerate(four):
        assert names(machine) == {f"__{rank}_0.distcp"}
    straight = all_tensors(four, tmp_path)
    again = copied(four, tmp_path / "again")
    train(again, "run", "--resume")
    check_same(straight, all_tensors(again, tmp_path / "again"))
    # one replica alone, on two machines: the mean of the residuals of both replicas needs those of the other one
    pair = copied(four[:2], tmp_path / "pair")
    ended = train(pair, "run", "--resume", "--set", "parallel.replicate=1", code=2)
    assert all("missing: __2_0.distcp of" in " ".join(each.err.split()) for each in ended)
    for machine in pair:
        bring_files(four[2], machine, 4)
        bring_files(four[3], machine, 4)
    ended = train(pair, "run", "--resume", "--set", "parallel.replicate=1")
    assert "mean of the residuals of 2 replicas" in ended[0].out
