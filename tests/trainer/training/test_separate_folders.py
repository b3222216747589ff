"""Tests of runs on machines without a shared file system: each machine keeps its processes' files in its own folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scantling.distributed import folders
from scantling.distributed.context import SINGLE_PROCESS, DistContext
from scantling.trainer.training import checkpoint as saving
from scantling.trainer.training import run as training
from scantling.trainer.training.checkpoint import Checkpoint, Checkpointer, load_tensors
from tests import processes
from tests.runs import WIDE, Ended, on_machines, records, scantling, tiny_recipe, write_recipe

pytestmark = pytest.mark.dist

DEMO: dict[str, Any] = {"comm": {"name": "demo"}, "optim": {"name": "sign", "lr": 1e-3}}
ALLREDUCE: dict[str, Any] = {"comm": {"name": "allreduce"}, "optim": {"name": "came", "lr": 1e-3}}


LOCAL: dict[str, Any] = {
    "comm": {"name": "local_steps", "sync_every": 3, "values": "sign", "dense": "sign"},
    "optim": {"name": "came", "lr": 1e-3},
}


def write(folder: Path, sections: dict[str, Any], **train: Any) -> Path:
    recipe = tiny_recipe(folder, train={"steps": 6, "checkpoint_every": 2, "batch_size": 8, **train})
    recipe |= sections
    recipe["model"]["overrides"] |= {**WIDE, "num_hidden_layers": 1}
    return write_recipe(folder / "recipe.yaml", recipe)


def machines(folder: Path, count: int = 2) -> list[Path]:
    found = [folder / f"machine{number}" for number in range(count)]
    for path in found:
        path.mkdir()
    return found


def explain(ended: list[Ended]) -> str:
    return "\n".join(f"--- rank {rank}: {each}" for rank, each in enumerate(ended))


def all_done(ended: list[Ended]) -> None:
    assert [each.code for each in ended] == [0] * len(ended), explain(ended)


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_tensors(run / "checkpoints" / f"step-{step}")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(each, second[key]) for key, each in first.items())


def steps(run: Path) -> list[int]:
    return Checkpointer(run / "checkpoints", SINGLE_PROCESS).steps()


Runs = tuple[Path, list[Path]]
"""A recipe next to the folder of its run with a shared folder, and the run directories of two machines."""


def train_on_machines(folder: Path, sections: dict[str, Any]) -> Runs:
    """Train on two machines with two folders, and on as many processes with a shared folder as a reference."""
    recipe = write(folder, sections)
    done = scantling("train", recipe, "--run-dir", folder / "shared", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    both = machines(folder)
    ended = on_machines(both, "train", recipe)
    all_done(ended)
    assert "share no run directory" in ended[0].out
    assert "checkpoint runs/tiny/checkpoints/step-6" in ended[0].out
    return recipe, [each / "runs" / "tiny" for each in both]


@pytest.fixture(scope="module")
def demo_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs with per-rank states: residuals and random generators."""
    return train_on_machines(tmp_path_factory.mktemp("demo"), DEMO)


@pytest.fixture(scope="module")
def allreduce_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs whose only per-rank states are random generators."""
    return train_on_machines(tmp_path_factory.mktemp("allreduce"), ALLREDUCE)


@pytest.fixture(scope="module")
def local_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs in local steps, with an optimizer state of each replica; checkpoints 2 and 4 are between exchanges."""
    return train_on_machines(tmp_path_factory.mktemp("local"), LOCAL)


@pytest.fixture(params=["demo_runs", "allreduce_runs", "local_runs"])
def any_runs(request: pytest.FixtureRequest) -> Runs:
    runs: Runs = request.getfixturevalue(request.param)
    return runs


def copied(runs: list[Path], folder: Path) -> list[Path]:
    """Copy runs into working folders of new machines."""
    both = machines(folder, len(runs))
    for run, machine in zip(runs, both, strict=True):
        shutil.copytree(run, machine / "run")
    return both


def test_each_folder_holds_the_weights_and_its_own_ranks(any_runs: Runs) -> None:
    recipe, runs = any_runs
    whole = tensors(recipe.parent / "shared", 6)
    for rank, run in enumerate(runs):
        assert steps(run) == [6, 4]
        newest = Checkpointer(run / "checkpoints", SINGLE_PROCESS).newest(weights_only=True)
        assert newest is not None
        assert newest.path == run / "checkpoints" / "step-6"
        assert newest.index.ranks("rng") == [rank]
        own = tensors(run, 6)
        assert all(torch.equal(each, whole[key]) for key, each in own.items())
        assert {key for key in whole if key not in own} == {key for key in whole if f"/rank{1 - rank}/" in key}
        assert [record["step"] for record in records(run)] == [1, 2, 3, 4, 5, 6]
        assert json.loads((run / "result.json").read_text())["status"] == "done"
        assert (run / "report.html").is_file()


def test_either_folder_is_evaluated_and_exported(demo_runs: Runs, tmp_path: Path) -> None:
    _, runs = demo_runs
    losses = []
    for number, run in enumerate(runs):
        done = scantling("eval", run, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append(json.loads(done.stdout)["eval_loss"])
        done = scantling("export", run, "--to", "hf", tmp_path / str(number))
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses[0] == losses[1]


def test_eval_needs_no_residuals_of_other_ranks(demo_runs: Runs, tmp_path: Path) -> None:
    """Two processes on one machine: the second file holds the residuals and generators of rank 1 alone."""
    run = shutil.copytree(demo_runs[0].parent / "shared", tmp_path / "run")
    shard = run / "checkpoints" / "step-6" / "__1_0.distcp"
    content = shard.read_bytes()
    for damaged in (None, content[:100], bytes([content[0] ^ 1]) + content[1:]):
        if damaged is None:
            shard.unlink()
        else:
            shard.write_bytes(damaged)
        evaluated = scantling("eval", run, "--json")
        assert evaluated.returncode == 0, evaluated.stderr
        assert json.loads(evaluated.stdout)["step"] == 6
        assert "damaged" not in evaluated.stderr
    resumed = scantling("train", run, "--resume", processes=2)
    assert f"{shard.parent}isdamaged" in "".join((resumed.stdout + resumed.stderr).split())


def test_resumed_run_ends_with_the_same_bits(any_runs: Runs, tmp_path: Path) -> None:
    _, runs = any_runs
    both = copied(runs, tmp_path)
    for each in both:
        shutil.rmtree(each / "run" / "checkpoints" / "step-6")
    ended = on_machines(both, "train", "run", "--resume")
    all_done(ended)
    assert "resumed from run/checkpoints/step-4" in ended[0].out
    for rank, each in enumerate(both):
        assert same(tensors(each / "run", 6), tensors(runs[rank], 6))


@pytest.mark.parametrize("made", ["demo_runs", "local_runs"])
def test_machines_may_swap_ranks(made: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """torchrun numbers machines by arrival, so a rank may have to take its state from another machine's folder."""
    _, runs = request.getfixturevalue(made)
    both = copied(runs[::-1], tmp_path)
    for each in both:
        shutil.rmtree(each / "run" / "checkpoints" / "step-6")
    all_done(on_machines(both, "train", "run", "--resume"))
    for rank, each in enumerate(both):
        assert same(tensors(each / "run", 6), tensors(runs[rank], 6))


def test_resume_from_separate_folders_at_another_world_size(demo_runs: Runs, tmp_path: Path) -> None:
    recipe, runs = demo_runs
    shared = recipe.parent / "shared"
    (tmp_path / "one").mkdir()
    both, one = copied(runs, tmp_path), copied([shared], tmp_path / "one")
    for each in (*both, *one):
        shutil.rmtree(each / "run" / "checkpoints" / "step-6")
    all_done(on_machines(both, "train", "run", "--resume", processes=2))
    done = scantling("train", one[0] / "run", "--resume", processes=4)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = tensors(one[0] / "run", 6)
    for ranks, each in zip(([0, 1], [2, 3]), both, strict=True):
        own = tensors(each / "run", 6)
        assert Checkpoint.read(each / "run" / "checkpoints" / "step-6").index.ranks("rng") == ranks
        keys = [key for key in own if not key.startswith("rng/")]  # the generators start from the seed
        assert all(torch.equal(own[key], whole[key]) for key in keys)


def test_one_machine_resumes_alone(any_runs: Runs, tmp_path: Path) -> None:
    recipe, runs = any_runs
    (machine,) = copied(runs[1:], tmp_path)
    shutil.rmtree(machine / "run" / "checkpoints" / "step-6")
    done = scantling("train", machine / "run", "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("no folder of this run has the residuals of ranks 0" in " ".join(done.stderr.split())) == (
        "allreduce" not in recipe.read_text()
    )
    assert ("has the optimizer state of replica 0" in " ".join(done.stderr.split())) == (
        "local_steps" in recipe.read_text()
    )


Harm = Callable[[Path], None]


def _remove_folder(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def _remove_all(run: Path) -> None:
    shutil.rmtree(run)


def _flip(run: Path) -> None:
    for file in (run / "checkpoints").glob("step-*/__*_0.distcp"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def _remove_shard(run: Path) -> None:
    for file in (run / "checkpoints").glob("step-*/__*_0.distcp"):
        file.unlink()


@pytest.mark.parametrize(
    ("harm", "rank", "message"),
    [
        (_remove_shard, 1, "__1_0.distcp is missing"),
        (_flip, 0, "__0_0.distcp does not match its checksum"),
        (_remove_folder, 1, "there is no such folder"),
        (_remove_all, 0, "there is no"),
        (_remove_all, 1, "there is no"),
    ],
)
def test_missing_file_is_named_on_every_machine(
    demo_runs: Runs, tmp_path: Path, harm: Harm, rank: int, message: str
) -> None:
    recipe, runs = demo_runs
    both = copied(runs, tmp_path)
    harm(both[rank] / "run")
    ended = on_machines(both, "train", recipe, "--run-dir", "run", "--resume", timeout=60)
    assert [each.code for each in ended] == [2, 2], explain(ended)
    for each in ended:
        error = " ".join(each.err.split())
        assert f"rank {rank} on {os.uname().nodename}" in error
        assert message in error
    assert steps(both[1 - rank] / "run") == [6, 4]


def test_damage_on_one_machine_falls_back_on_all(demo_runs: Runs, tmp_path: Path) -> None:
    _, runs = demo_runs
    both = copied(runs, tmp_path)
    (both[1] / "run" / "checkpoints" / "step-6" / "__1_0.distcp").unlink()
    ended = on_machines(both, "train", "run", "--resume")
    all_done(ended)
    assert "resumed from run/checkpoints/step-4" in ended[0].out
    for each in ended:
        assert "__1_0.distcp is missing" in " ".join(each.err.split())
    for rank, each in enumerate(both):
        assert same(tensors(each / "run", 6), tensors(runs[rank], 6))


def test_copies_of_one_machine_lack_a_rank(demo_runs: Runs, tmp_path: Path) -> None:
    _, runs = demo_runs
    ended = on_machines(copied([runs[0], runs[0]], tmp_path), "train", "run", "--resume", timeout=60)
    assert [each.code for each in ended] == [2, 2], explain(ended)
    assert all(
        "no folder has the states of all ranks: __1_0.distcp missing" in " ".join(each.err.split()) for each in ended
    )


def test_folders_of_different_runs_are_refused(demo_runs: Runs, tmp_path: Path) -> None:
    recipe, runs = demo_runs
    (tmp_path / "again").mkdir()
    again = machines(tmp_path / "again")
    all_done(on_machines(again, "train", recipe, "--run-dir", "run"))
    both = copied([runs[0], again[1] / "run"], tmp_path)
    ended = on_machines(both, "train", "run", "--resume", timeout=60)
    assert [each.code for each in ended] == [2, 2], explain(ended)
    assert all("checkpoints of different saves" in " ".join(each.err.split()) for each in ended)


def test_two_machines_of_two_processes(tmp_path: Path) -> None:
    recipe, both = write(tmp_path, DEMO), machines(tmp_path)
    all_done(on_machines(both, "train", recipe, "--run-dir", "run", processes=2))
    for number, each in enumerate(both):
        assert Checkpoint.read(each / "run" / "checkpoints" / "step-6").index.ranks("rng") == [
            2 * number,
            2 * number + 1,
        ]
    straight = [tensors(each / "run", 6) for each in both]
    for each in both:
        shutil.rmtree(each / "run" / "checkpoints" / "step-6")
    all_done(on_machines(both, "train", "run", "--resume", processes=2))
    for before, each in zip(straight, both, strict=True):
        assert same(before, tensors(each / "run", 6))


def test_default_name_is_free_on_all_machines(tmp_path: Path) -> None:
    recipe, both = write(tmp_path, ALLREDUCE, steps=1), machines(tmp_path)
    (both[1] / "runs" / "tiny" / "checkpoints").mkdir(parents=True)
    all_done(on_machines(both, "train", recipe))
    for each in both:
        assert steps(each / "runs" / "tiny-2") == [1]


def test_folder_taken_on_one_machine_is_refused_on_all(tmp_path: Path) -> None:
    recipe, both = write(tmp_path, ALLREDUCE, steps=1), machines(tmp_path)
    (both[1] / "run" / "checkpoints").mkdir(parents=True)
    ended = on_machines(both, "train", recipe, "--run-dir", "run", timeout=60)
    assert [each.code for each in ended] == [2, 2], explain(ended)
    assert all("rank 1 on" in each.err and "already holds a run" in each.err for each in ended)


def _name_folder_on_rank_1() -> None:
    _change(lambda given: given | ({"run_dir": Path("run")} if os.environ["RANK"] == "1" else {}))


def _resume_on_rank_1() -> None:
    _change(lambda given: given | {"resume": os.environ["RANK"] == "1"})


def _change(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Make the command line train with other arguments than the given ones."""
    train = training.train
    training.train = lambda recipe, **given: train(recipe, **change(given))


def test_run_dir_of_one_machine_is_used_by_all(tmp_path: Path) -> None:
    recipe, both = write(tmp_path, ALLREDUCE, steps=1), machines(tmp_path)
    all_done(on_machines(both, "train", recipe, before=_name_folder_on_rank_1, timeout=60))
    for each in both:
        assert steps(each / "run") == [1]
        assert not (each / "runs").exists()


def test_resume_on_one_machine_is_refused_on_all(tmp_path: Path) -> None:
    recipe, both = write(tmp_path, ALLREDUCE, steps=1), machines(tmp_path)
    run = tmp_path / "shared"
    all_done(on_machines(both, "train", recipe, "--run-dir", run))
    ended = on_machines(both, "train", recipe, "--run-dir", run, "--force", before=_resume_on_rank_1, timeout=60)
    assert [each.code for each in ended] == [2, 2], explain(ended)
    assert all("only rank 1 on" in each.err for each in ended), explain(ended)
    assert steps(run) == [1]


@pytest.mark.parametrize("is_shared", [False, True])
def test_link_to_checkpoints_with_other_sharing_is_refused(tmp_path: Path, is_shared: bool) -> None:
    """Machines that share the run directory but link its checkpoints to separate disks, or the other way round."""
    recipe, both = write(tmp_path, ALLREDUCE, steps=1), machines(tmp_path)
    own = [machine / "scratch" for machine in both]
    for folder in (*own, tmp_path / "run"):
        folder.mkdir()
    if is_shared:
        (tmp_path / "run" / "checkpoints").symlink_to("/proc/self/cwd/scratch")
        run = tmp_path / "run"
    else:
        for folder in own:
            (folder / "checkpoints").symlink_to(tmp_path / "run")
        run = Path("scratch")
    ended = on_machines(both, "train", recipe, "--run-dir", run, "--force", timeout=60)
    assert [each.code for each in ended] == [2, 2], explain(ended)
    assert all("checkpoints is a link" in each.err for each in ended), explain(ended)


def _detect_while_another_run_creates_the_parent(folder: Path) -> None:
    rank, store, path = dist.get_rank(), dist.distributed_c10d._get_default_store(), folder / "out" / "run"
    if rank == 0:
        token_hex = folders.secrets.token_hex

        def after_a_look(count: int) -> str:
            path.parent.mkdir(exist_ok=True)
            store.set("made", "1")
            return token_hex(count)

        folders.secrets.token_hex = after_a_look
    else:
        store.wait(["made"])
    assert folders.detect_shared_folders(path, DistContext(rank, 2, torch.device("cpu"))).writers == (0, 0)
    assert not [*folder.glob("**/.scantling-*")]


def test_shared_folder_is_detected_while_another_run_creates_its_parent(tmp_path: Path) -> None:
    processes.run(2, _detect_while_another_run_creates_the_parent, tmp_path)


def _killed_while_saving() -> None:
    """Kill rank 1 before or after it renames the second checkpoint into place, as `TESTS_KILL` says."""
    rename, when = saving.publish, os.environ["TESTS_KILL"]

    def publish(aside: Path, target: Path) -> None:
        if target.name == "step-4" and os.environ["RANK"] == "1" and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(aside, target)
        if target.name == "step-4" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    saving.publish = publish  # type: ignore[assignment]


@pytest.mark.parametrize("when", ["before", "after"])
def test_kill_during_a_save_leaves_a_common_checkpoint(demo_runs: Runs, tmp_path: Path, when: str) -> None:
    recipe, both = write(tmp_path, DEMO, keep_checkpoints=1), machines(tmp_path)
    ended = on_machines(
        both, "train", recipe, "--run-dir", "run", env={"TESTS_KILL": when}, before=_killed_while_saving, timeout=90
    )
    assert [each.code for each in ended] == [1, -signal.SIGKILL], explain(ended)
    assert "step 4: checkpoint" not in ended[0].out
    again = on_machines(both, "train", "run", "--resume")
    all_done(again)
    assert f"resumed from run/checkpoints/step-{2 if when == 'before' else 4}" in again[0].out
    for broken, straight in zip(both, demo_runs[1], strict=True):  # runs of the same recipe without a kill
        assert steps(broken / "run") == [6]
        assert same(tensors(broken / "run", 6), tensors(straight, 6))


def test_machines_evaluate_together(demo_runs: Runs, tmp_path: Path) -> None:
    """All machines take the newest checkpoint that all of them have."""
    _, runs = demo_runs
    both = copied(runs, tmp_path)
    shutil.rmtree(both[1] / "run" / "checkpoints" / "step-6")
    ended = on_machines(both, "eval", "run", "--json")
    all_done(ended)
    together = json.loads(ended[0].out)
    assert together["step"] == 4
    shutil.rmtree(both[0] / "run" / "checkpoints" / "step-6")
    alone = scantling("eval", both[0] / "run", "--json")
    assert json.loads(alone.stdout)["eval_loss"] == pytest.approx(together["eval_loss"], rel=1e-5)


def _disk_full_on_rank_1() -> None:
    write_manifest = saving.write_manifest

    def write(folder: Path, content: Any) -> None:
        if content["step"] == 4 and os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_manifest(folder, content)

    saving.write_manifest = write


def test_full_disk_on_one_machine_is_reported_on_both(tmp_path: Path) -> None:
    recipe, both = write(tmp_path, DEMO), machines(tmp_path)
    ended = on_machines(both, "train", recipe, "--run-dir", "run", before=_disk_full_on_rank_1, timeout=60)
    assert [each.code for each in ended] == [1, 1], explain(ended)
    for each in ended:
        assert f"rank 1 on {os.uname().nodename}: the disk is full; the checkpoint of step 2 is intact" in each.err
    assert "step 4: checkpoint" not in ended[0].out
    for machine in both:
        assert [path.name for path in (machine / "run" / "checkpoints").iterdir()] == ["step-2"]
