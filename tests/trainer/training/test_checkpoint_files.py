"""Tests that replacing a run, and keeping the newest checkpoints, remove only files of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import scantling as sc
from scantling.errors import RunError, UserError
from scantling.trainer.training.checkpoint import Checkpointer, State
from scantling.trainer.training.run_dir import RunDir
from scantling.trainer.training.sinks import EVENTS_SUFFIX
from tests.damage import find_damage
from tests.runs import tiny_recipe
from tests.trainer.training.test_checkpoint import SINGLE_PROCESS, newest_path


def save(folder: Path, *steps: int, keep: int = 9) -> Checkpointer:
    saver = Checkpointer(folder, SINGLE_PROCESS, keep=keep)
    for step in steps:
        saver.save(step, State({"x": torch.arange(step + 1)}))
    return saver


def write(path: Path, text: str = "mine") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_force_keeps_the_target_of_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, other = RunDir(tmp_path / "run"), tmp_path / "other"
    save(other, 1)
    files = [write(other / "thesis.tex"), write(other / "step-3" / "data.bin"), write(other / "step-4.tmp" / "a")]
    run.path.mkdir()
    run.checkpoints.symlink_to(other)
    (run.path / "tensorboard").symlink_to(other)
    run.clear()
    assert all(file.read_text() == "mine" for file in files)
    assert find_damage(other / "step-1") is None, "another run may use it"
    assert not run.checkpoints.is_symlink()
    assert not run.tensorboard.is_symlink()
    assert str(other) in caplog.text


def test_force_keeps_a_link_to_an_empty_folder(tmp_path: Path) -> None:
    run, scratch = RunDir(tmp_path / "run"), tmp_path / "scratch"
    run.path.mkdir()
    scratch.mkdir()
    run.checkpoints.symlink_to(scratch)
    run.clear()
    save(run.checkpoints, 1)
    assert names(scratch) == {"step-1"}


def test_force_removes_only_checkpoints(tmp_path: Path) -> None:
    run, other = RunDir(tmp_path / "run"), tmp_path / "other"
    save(run.checkpoints, 1, 2)
    save(other, 7)
    (run.checkpoints / "step-7").symlink_to(other / "step-7")
    write(run.checkpoints / "step-5.tmp" / "__0_0.distcp")
    kept = {
        write(run.checkpoints / "notes.txt"),
        write(run.checkpoints / "step-2" / "why.md"),
        write(run.checkpoints / "step-3" / "weights.pt"),
        write(run.checkpoints / "step-4" / "__0_0.distcp"),  # belongs to another program: it lacks our manifest
        write(run.checkpoints / "step-6.tmp" / "a.txt"),
        write(run.checkpoints / "step-best" / "manifest.json"),
        write(run.checkpoints / "step-٣" / "manifest.json"),
        write(run.checkpoints / "step-007" / "manifest.json"),
        write(run.tensorboard / "mine" / "events.out.tfevents.1"),
        write(run.tensorboard / "events.out.tfevents.2"),
        write(run.path / "README"),
    }
    write(run.tensorboard / f"events.out.tfevents.3{EVENTS_SUFFIX}")
    run.clear()
    assert {path for path in run.path.rglob("*") if path.is_file()} == kept
    assert not (run.checkpoints / "step-7").is_symlink()
    assert find_damage(other / "step-7") is None


def test_force_removes_empty_folders(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    save(run.checkpoints, 1)
    write(run.tensorboard / f"events.out.tfevents.3{EVENTS_SUFFIX}")
    run.clear()
    assert names(run.path) == set()


def test_keeping_the_newest_removes_no_other_folders(tmp_path: Path) -> None:
    other = tmp_path / "other"
    save(other, 9)
    folder = tmp_path / "checkpoints"
    kept = [
        write(folder / "step-100" / "model.bin"),
        write(folder / "step-50" / "__0_0.distcp"),
        write(folder / "x.tmp"),
    ]
    (folder / "step-9").symlink_to(other / "step-9")
    saver = save(folder, 1, 2, 3, keep=2)
    assert all(file.is_file() for file in kept)
    assert find_damage(other / "step-9") is None
    assert newest_path(saver) == folder / "step-3"
    assert names(folder) == {"step-2", "step-3", "step-50", "step-100", "x.tmp"}


def test_user_file_in_a_checkpoint_survives_its_removal(tmp_path: Path) -> None:
    saver = save(tmp_path, 1, keep=1)
    write(tmp_path / "step-1" / "notes.txt")
    save(tmp_path, 2, keep=1)
    assert names(tmp_path / "step-1") == {"notes.txt"}
    assert saver.steps() == [2]
    save(tmp_path, 1)
    assert names(tmp_path / "step-1") >= {"notes.txt", "manifest.json"}
    save(tmp_path, 1)
    assert (tmp_path / "step-1" / "notes.txt").read_text() == "mine"
    assert find_damage(tmp_path / "step-1") is None


def test_unfinished_checkpoint_with_other_files_does_not_block_a_save(tmp_path: Path) -> None:
    write(tmp_path / "step-1.tmp" / "__0_0.distcp", "half")
    write(tmp_path / "step-1.tmp" / "notes.txt")
    save(tmp_path, 1)
    assert names(tmp_path) == {"step-1"}
    assert (tmp_path / "step-1" / "notes.txt").read_text() == "mine"
    assert find_damage(tmp_path / "step-1") is None


@pytest.mark.parametrize("name", ["step-1/__0_0.distcp", "step-1"])
def test_folder_of_another_program_is_not_replaced(tmp_path: Path, name: str) -> None:
    save(tmp_path, 0)
    file = write(tmp_path / name)
    with pytest.raises(RunError, match=r"not written by this program.*step 0 is intact"):
        save(tmp_path, 1)
    assert file.read_text() == "mine"
    assert find_damage(tmp_path / "step-0") is None


def test_force_refuses_files_of_other_programs(tmp_path: Path) -> None:
    """Such as a recipe in the folder that is given as the run directory."""
    recipe = tiny_recipe(tmp_path, train={"steps": 1})
    for name in ("recipe.yaml", "report.html", "plan.json"):
        file = write(tmp_path / name / name)
        with pytest.raises(UserError, match=rf"holds {name}, and no run has been started there"):
            sc.train(recipe, run_dir=file.parent, force=True)
        assert file.read_text() == "mine"
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match="is not a folder"):
        sc.train(recipe, run_dir=tmp_path / "run", force=True)
