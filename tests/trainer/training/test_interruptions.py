"""Tests of interruptions: signals, full disks, damaged checkpoints, a second process, another recipe, a NaN."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scantling as sc
from scantling.distributed.context import DistContext
from scantling.errors import NonFiniteError, RunError, UserError
from scantling.trainer.data.cache import _locked
from scantling.trainer.training.checkpoint import Checkpointer
from scantling.trainer.training.run_dir import InUseError, RunDir
from scantling.trainer.training.sinks import Sink, Sinks
from scantling.trainer.training.step import Stepper
from scantling.trainer.training.trained_run import evaluate_run
from tests.damage import find_damage
from tests.runs import (
    command,
    records,
    scantling,
    start,
    start_scantling,
    tiny_recipe,
    wait_for,
    wait_for_step,
    write_corpus,
    write_recipe,
)
from tests.trainer.training import poisoned

SINGLE_PROCESS = DistContext(0, 1, torch.device("cpu"))


def newest_step(run_dir: Path) -> int:
    return Checkpointer(run_dir / "checkpoints", SINGLE_PROCESS).steps()[0]


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_saves_after_the_step_and_exits_with_3(tmp_path: Path, number: signal.Signals) -> None:
    """The first case starts a new interpreter, as users do."""
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, train={"steps": 100_000}))
    run = tmp_path / "run"
    words = ["train", path, "--run-dir", run]
    process = start(command(words)) if number == signal.SIGTERM else start_scantling(*words)
    wait_for_step(run / "metrics.jsonl", 3, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert "--resume" in output
    assert "Traceback" not in output
    assert newest_step(run) == records(run)[-1]["step"]
    assert find_damage(run / "checkpoints" / f"step-{newest_step(run)}") is None
    assert json.loads((run / "result.json").read_text())["status"] == "stopped"


def test_damaged_newest_checkpoint_falls_back_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = tiny_recipe(tmp_path, train={"checkpoint_every": 2, "keep_checkpoints": 3})
    sc.train(recipe, run_dir=tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(os.listdir(checkpoints)) == ["step-4", "step-6", "step-8"]
    wanted = records(tmp_path / "run")

    data = next((checkpoints / "step-8").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    manifest = checkpoints / "step-6" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"initial_lr": 0.001', '"initial_lr": 0.007'))
    result = sc.train(tmp_path / "run", resume=True)
    assert result.step == 8
    assert "step-8 is damaged" in caplog.text
    assert "checksum" in caplog.text
    assert "step-6 is damaged" in caplog.text
    assert [r["loss"] for r in records(tmp_path / "run")] == [r["loss"] for r in wanted]

    for folder in checkpoints.iterdir():
        (folder / ".metadata").unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        sc.train(tmp_path / "run", resume=True)


def test_resume_with_another_recipe_lists_the_keys(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    sc.train(recipe, run_dir=tmp_path / "run", train={"steps": 2})
    with pytest.raises(UserError, match=r"optim\.lr: 0\.001 -> 0\.01") as caught:
        sc.train(recipe, run_dir=tmp_path / "run", resume=True, optim={"lr": 0.01}, train={"steps": 3})
    assert "train.steps: 2 -> 3" in str(caught.value)
    assert "train.seed" not in str(caught.value)


def test_run_directory_is_overwritten_only_with_force(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, train={"steps": 1})
    sc.train(recipe, run_dir=tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="already holds a run"):
        sc.train(recipe, run_dir=tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(UserError, match="not found"):
        sc.train(recipe, run_dir=tmp_path / "run", force=True, data={"text": str(tmp_path / "missing.txt")})
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before, "the old run went before the new one could be"
    sc.train(recipe, run_dir=tmp_path / "run", force=True)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    with pytest.raises(UserError, match="holds no run to resume"):
        sc.train(recipe, run_dir=tmp_path / "other", resume=True)


def test_locked_run_directory_is_refused(tmp_path: Path) -> None:
    holder = RunDir(tmp_path / "run")
    holder.lock()
    with pytest.raises(UserError, match=rf"in use by process {os.getpid()}"):
        sc.train(tiny_recipe(tmp_path), run_dir=tmp_path / "run")
    holder.unlock()
    assert sc.train(tiny_recipe(tmp_path, train={"steps": 1}), run_dir=tmp_path / "run").status == "done"


def test_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="cannot lock the run directory runs/tiny: No locks available"):
        sc.train(tiny_recipe(tmp_path, train={"steps": 1}))


def test_force_follows_no_links_and_replaces_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = tmp_path / "run", tmp_path / "scratch"
    run.mkdir()
    other.mkdir()
    (run / "checkpoints").symlink_to(other)
    recipe = tiny_recipe(tmp_path, train={"steps": 2, "checkpoint_every": 1})
    assert sc.train(recipe, run_dir=run, force=True).step == 2
    assert {path.name for path in other.iterdir()} == {"step-1", "step-2"}, "a link to an empty folder stays"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="needs TensorBoard"):
        sc.train(recipe, run_dir=run, force=True, train={"tensorboard": True})
    assert len(records(run)) == 2
    assert sc.train(recipe, run_dir=run, force=True, train={"steps": 1}).step == 1
    assert {path.name for path in other.iterdir()} == {"step-1", "step-2"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-1"}


def test_sinks_are_all_closed_after_an_error() -> None:
    class Broken(Sink):
        def close(self) -> None:
            raise RunError("a full disk")

    closed: list[bool] = []
    last = Sink()
    last.close = lambda: closed.append(True)  # type: ignore[method-assign]
    with pytest.raises(RunError, match="a full disk"):
        Sinks([Broken(), last]).close()
    assert closed == [True]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 5 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and os.geteuid() == 0
    if (
        not mounted
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.dist
@pytest.mark.parametrize("is_async", [False, True])
def test_full_disk_keeps_the_checkpoint_before(tmp_path: Path, small_disk: Path, is_async: bool) -> None:
    sections = {"train": {"steps": 12, "checkpoint_every": 4}, "parallel": {"async_checkpoint": is_async}}
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, **sections))
    run = small_disk / "run"
    filler = small_disk / "filler"
    process = start_scantling(
        "train", path, "--run-dir", run, "--set", "train.steps=100000", "--set", "train.checkpoint_every=50"
    )
    wait_for_step(run / "metrics.jsonl", 60, process)
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(b"x" * max(0, free - 200_000))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    assert "disk is full" in output or "No space left" in output
    steps = Checkpointer(run / "checkpoints", SINGLE_PROCESS).steps()
    assert steps
    assert find_damage(run / "checkpoints" / f"step-{steps[0]}") is None
    assert not list((run / "checkpoints").glob("*.tmp")), "the half-written checkpoint was not removed"
    filler.unlink()
    again = start_scantling("train", run, "--resume")
    wait_for_step(run / "metrics.jsonl", 150, again)
    again.send_signal(signal.SIGTERM)
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 3, output


@pytest.mark.dist
def test_signal_to_the_whole_group_reaches_no_data_worker(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, train={"steps": 100_000}, data={"workers": 2}))
    run = tmp_path / "run"
    process = start_scantling("train", path, "--run-dir", run)
    wait_for_step(run / "metrics.jsonl", 3, process)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert find_damage(run / "checkpoints" / f"step-{newest_step(run)}") is None


def descendants(parent: int) -> list[int]:
    """Return the child processes of a process, recursively."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = [parent]
    for pid in found:
        found += [child for child, its_parent in parents.items() if its_parent == pid]
    return found[1:]


def has_checkpoint(run: Path, step: int) -> bool:
    return any(found >= step for found in Checkpointer(run / "checkpoints", SINGLE_PROCESS).steps())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="workers end with their parent on Linux alone")
@pytest.mark.parametrize("forked", [True, False], ids=["forked", "from a fork server"])
def test_killed_run_with_data_workers_resumes_at_once(tmp_path: Path, forked: bool) -> None:
    """SIGKILL the run itself, not its workers, and resume without a pause."""
    train = {"steps": 100_000, "checkpoint_every": 2, "eval_every": 5, "eval_samples": 4}
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, train=train, data={"workers": 2}))
    run = tmp_path / "run"

    def started(*arguments: Any) -> Any:
        return start(command(list(arguments))) if forked else start_scantling(*arguments)

    process = started("train", path, "--run-dir", run)
    wait_for(partial(has_checkpoint, run, 4), process)
    workers = descendants(process.pid)
    assert len(workers) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    lock = RunDir(run)
    lock.lock()  # an InUseError if a worker still held it
    lock.unlock()
    until = time.monotonic() + 2
    while any(map(is_alive, workers)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(is_alive, workers))
    process = started("train", run, "--resume")
    wait_for(partial(has_checkpoint, run, 8), process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output


@pytest.mark.parametrize("kind", ["run", "cache"])
def test_forked_process_does_not_keep_a_lock(tmp_path: Path, kind: str) -> None:
    """This includes children of a data loader, of a tokenizer, and of user code."""
    folder = RunDir(tmp_path)
    cache_lock = _locked(tmp_path / ".lock")
    if kind == "cache":
        cache_lock.__enter__()
    else:
        folder.lock()
    ready, release = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready[1], b"1")
        os.read(release[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        with pytest.raises(InUseError):
            RunDir(tmp_path).lock()  # the lock of this process is still held
        if kind == "cache":
            cache_lock.__exit__(None, None, None)
        else:
            folder.unlock()
        other = RunDir(tmp_path)
        other.lock()
        other.unlock()
    finally:
        os.write(release[1], b"1")
        os.waitpid(pid, 0)
        for handle in (*ready, *release):
            os.close(handle)


def test_changed_data_is_not_resumed(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, train={"steps": 4, "checkpoint_every": 2})
    sc.train(recipe, run_dir=tmp_path / "run")
    write_corpus(tmp_path / "corpus.txt", seed=1)
    with pytest.raises(UserError, match="the data is not what"):
        sc.train(tmp_path / "run", resume=True)


def test_changed_data_is_not_evaluated(tmp_path: Path) -> None:
    """Flat id files, and texts: both are refused, before a new tokenizer would be trained on the changed texts."""
    np.arange(2000, dtype="<u2").tofile(tmp_path / "a.bin")
    flat = {"text": None, "document_separator": None, "bin": str(tmp_path / "a.bin")}
    for name, data, file in (("text", {}, "corpus.txt"), ("bin", flat, "a.bin")):
        run = tmp_path / name
        recipe = tiny_recipe(tmp_path, data=data, train={"steps": 2, "checkpoint_every": 1})
        sc.train(recipe, run_dir=run)
        assert evaluate_run(run)["step"] == 2
        (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-200])
        with pytest.raises(UserError, match=r"the data is not what .* was trained on"):
            evaluate_run(run)
        shutil.rmtree(run / "checkpoints" / "step-2")
        with pytest.raises(UserError, match=r"the data is not what .* was trained on"):
            sc.train(run, resume=True)


def test_resume_with_damaged_records(tmp_path: Path) -> None:
    sc.train(tiny_recipe(tmp_path), run_dir=tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    content = metrics.read_text()
    metrics.write_text(content[:200] + "\n{]\n" + content)
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        sc.train(tmp_path / "run", resume=True)
    metrics.unlink()
    assert sc.train(tmp_path / "run", resume=True).status == "done"


def test_unwritable_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write into the run directory"):
        sc.train(tiny_recipe(tmp_path), run_dir=tmp_path / "file" / "run")


def test_nan_stops_before_the_update_and_names_step_and_tensor(tmp_path: Path) -> None:
    """A learning rate of 1e30 makes the second step's loss infinite or NaN; the weights of the first step are kept."""
    recipe = tiny_recipe(
        tmp_path, optim={"name": "sgd", "lr": 1e30, "weight_decay": 0.0}, train={"warmup": 0, "clip": None}
    )
    with pytest.raises(NonFiniteError, match=r"step \d+, rank 0: .*(loss|gradient)"):
        sc.train(recipe, run_dir=tmp_path / "run")
    for record in records(tmp_path / "run"):
        assert record["loss"] == record["loss"]
    assert issubclass(NonFiniteError, RunError)


@pytest.mark.parametrize("comm", [{}, {"name": "demo"}], ids=str)
def test_overflow_of_the_gradient_norm_stops_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comm: dict[str, Any]
) -> None:
    passes = Stepper._run_passes

    def huge_passes(stepper: Stepper, batches: Any, share: torch.Tensor, step: int) -> Any:
        if step == 3:
            stepper.model.get_parameter("model.norm.weight").register_hook(lambda gradient: gradient.sign() * 1e25)
        return passes(stepper, batches, share, step)

    monkeypatch.setattr(Stepper, "_run_passes", huge_passes)
    sections: dict[str, Any] = {"comm": comm} if comm else {}
    with pytest.raises(NonFiniteError, match="step 3, rank 0: the gradient norm is not finite"):
        sc.train(tiny_recipe(tmp_path, optim={"name": "came", "lr": 1e-3}, **sections), run_dir=tmp_path / "run")


@pytest.mark.dist
def test_nan_on_one_of_two_ranks_is_named_with_its_rank(tmp_path: Path) -> None:
    """Only rank 1's own gradient is NaN; after the exchange, all would be NaN and the origin would be lost."""
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, train={"checkpoint_every": 1}))
    done = scantling("train", path, "--run-dir", tmp_path / "run", processes=2, before=poisoned.patch)
    assert done.returncode == 1
    assert f"step 3, rank 1: the gradient of {poisoned.POISONED} " in done.stderr, done.stderr
    assert newest_step(tmp_path / "run") == 2
    assert find_damage(tmp_path / "run" / "checkpoints" / "step-2") is None


def test_loss_too_large_for_a_perplexity_is_recorded(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path,
        optim={"name": "sgd", "lr": 1e6, "weight_decay": 0.0},
        train={"steps": 1, "warmup": 0, "clip": None, "schedule": "constant"},
    )
    result = sc.train(recipe, run_dir=tmp_path / "run")
    assert result.metrics["eval_loss"] > 700
    assert "perplexity" not in result.metrics


@pytest.mark.dist
def test_bad_input_gets_one_message_and_exit_code_2(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, data={"text": str(tmp_path / "missing.txt")})
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    done = scantling("train", path, "--run-dir", tmp_path / "run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "missing.txt" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.dist
def test_interrupt_during_preparation_loses_nothing(tmp_path: Path) -> None:
    """Ctrl-C during tokenization: one line, no partial cache entry, no run directory in the way."""
    line = "seven bold vikings wait while the quick brown fox jumps\n"
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n" + line * 20_000)
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, data={"text": str(tmp_path / "*.txt")}))
    cache = tmp_path / "cache"
    process = start_scantling("train", path, "--run-dir", tmp_path / "run", SCANTLING_CACHE=str(cache))
    wait_for(lambda: any(cache.glob("*/*")), process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert "Traceback" not in output
    for file in tmp_path.glob("[0-9]*.txt"):
        file.write_text(file.read_text()[:400])
    assert sc.train(tiny_recipe(tmp_path, data={"text": str(tmp_path / "*.txt")}), run_dir=tmp_path / "run").step == 8
