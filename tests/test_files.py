"""Tests of atomic file writes, which never follow a planted link."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

from scantling import files
from scantling.distributed.context import SINGLE_PROCESS
from scantling.errors import RunError, UserError
from scantling.trainer.data.cache import Cache
from scantling.trainer.training.checkpoint import Checkpointer, State
from scantling.trainer.training.run_dir import RunDir
from scantling.trainer.training.sinks import JsonlSink
from tests.damage import find_damage


def test_write_atomic_follows_no_planted_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    monkeypatch.setattr("secrets.token_hex", lambda size: "0")
    for name in (f"result.json.{os.getpid()}.tmp", "result.json.0.tmp"):
        (tmp_path / name).symlink_to(victim)
    with pytest.raises(RunError, match="cannot write"):
        files.write_atomic(tmp_path / "result.json", "new")
    assert victim.read_text() == "kept"


def test_write_atomic_uses_unpredictable_names(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / f"result.json.{os.getpid()}.tmp").symlink_to(victim)
    files.write_atomic(tmp_path / "result.json", "new")
    assert ((tmp_path / "result.json").read_text(), victim.read_text()) == ("new", "kept")


@pytest.mark.parametrize(
    "error", [OSError(28, os.strerror(28)), Exception("Error while serializing: I/O error: ... (os error 28)")]
)
def test_atomic_folder_on_a_full_disk_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    def write() -> None:
        with files.atomic_folder(tmp_path / "whole") as aside:
            (aside / "part").write_text("x")
            raise error

    with pytest.raises(RunError, match=r"cannot write .*/whole: No space left on device"):
        write()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_write_atomic_uses_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        files.write_atomic(tmp_path / "result.json", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "result.json").stat().st_mode & 0o777 == 0o666 & ~mask
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_run_lock_follows_no_planted_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    (run.path / ".lock").symlink_to(victim)
    with pytest.raises(UserError, match="cannot write into the run directory"):
        run.lock()
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("writer", ["export", "data cache"])
@pytest.mark.parametrize("planted", ["link", "dangling link", "folder"])
def test_atomic_folder_follows_no_planted_link(tmp_path: Path, writer: str, planted: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    target = tmp_path / "kind" / "key"
    target.parent.mkdir()
    aside = target.with_name(".key.scantling" if writer == "export" else "key.tmp")
    if planted == "folder":
        aside.mkdir()
        (aside / "stale").touch()
    else:
        aside.symlink_to(victim if planted == "link" else tmp_path / "nowhere")

    def fill(folder: Path) -> dict[str, object]:
        (folder / "data").write_text("new")
        return {}

    if writer == "export":
        with files.atomic_folder(target) as folder:
            fill(folder)
    else:
        Cache(tmp_path).get("kind", "key", fill)
    assert {path.name for path in target.iterdir()} <= {"data", "meta.json"}
    assert (target / "data").read_text() == "new"
    assert [path.name for path in victim.iterdir()] == ["kept"]
    assert not (tmp_path / "nowhere").exists()


def test_data_cache_lock_follows_no_planted_link(tmp_path: Path) -> None:
    (tmp_path / "kind").mkdir()
    (tmp_path / "kind" / "key.lock").symlink_to(tmp_path / "planted")
    with pytest.raises(UserError, match="cannot write the data cache"):
        Cache(tmp_path).get("kind", "key", lambda folder: {})
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("existing", [None, "kept\ntorn"])
def test_records_follow_no_planted_link(tmp_path: Path, existing: str | None) -> None:
    victim = tmp_path / "victim"
    if existing is not None:
        victim.write_text(existing)
    (tmp_path / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl"):
        JsonlSink(tmp_path / "metrics.jsonl")
    assert (victim.read_text() if victim.exists() else None) == existing


@pytest.mark.parametrize("name", ["step-3.tmp", "step-3.tmp/index.json", "step-3.tmp/manifest.json", "step-3"])
@pytest.mark.parametrize("target", ["folder", "file", "nothing"])
def test_checkpoints_follow_no_planted_link(tmp_path: Path, name: str, target: str) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "checkpoints"
    if target == "folder":
        victim.mkdir()
        (victim / "file").write_text("kept")
    elif target == "file":
        victim.write_text("kept")
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(victim)
    checkpointer = Checkpointer(folder, SINGLE_PROCESS)
    with contextlib.suppress(RunError):
        checkpointer.save(3, State({"a": torch.arange(3)}, {}))
        assert find_damage(folder / "step-3") is None
        assert not (folder / "step-3").is_symlink()
    if target == "folder":
        assert [(path.name, path.read_text()) for path in victim.iterdir()] == [("file", "kept")]
    elif target == "file":
        assert victim.read_text() == "kept"
    else:
        assert not victim.exists()
