"""Tests of the cache: entries are complete or rebuilt, and built once even if several processes need them."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from scantling.errors import UserError
from scantling.files import cache_root
from scantling.trainer.data.cache import Cache


def make(folder: Path) -> dict[str, Any]:
    (folder / "data").write_bytes(b"12345678")
    return {"fact": 3}


def never(folder: Path) -> dict[str, Any]:
    raise AssertionError("made again")


def test_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCANTLING_CACHE", "/somewhere")
    assert cache_root() == Path("/somewhere")
    monkeypatch.delenv("SCANTLING_CACHE")
    assert cache_root() == Path.home() / ".cache" / "scantling"


def test_entry_is_made_once(tmp_path: Path) -> None:
    first = Cache(tmp_path).get("kind", "key", make)
    again = Cache(tmp_path).get("kind", "key", never)
    assert first == again
    assert again.meta["fact"] == 3
    assert (again.path / "data").read_bytes() == b"12345678"
    assert not list(tmp_path.glob("kind/*.tmp"))


@pytest.mark.parametrize("damage", ["shorter", "gone", "no meta", "torn meta", "wrong meta"])
def test_torn_entry_is_rebuilt(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = Cache(tmp_path).get("kind", "key", make).path
    if damage == "shorter":
        os.truncate(path / "data", 5)
    elif damage == "gone":
        (path / "data").unlink()
    elif damage == "no meta":
        (path / "meta.json").unlink()
    elif damage == "torn meta":
        (path / "meta.json").write_text((path / "meta.json").read_text()[:20])
    else:
        (path / "meta.json").write_text(json.dumps(["files"]))
    entry = Cache(tmp_path).get("kind", "key", make)
    assert (entry.path / "data").read_bytes() == b"12345678"
    assert "is not whole and is made again" in caplog.text
    assert Cache(tmp_path).get("kind", "key", never) == entry


def test_failure_and_kill_leave_no_valid_entry(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        (folder / "data").write_text("half")
        raise UserError("bad input")

    with pytest.raises(UserError, match="bad input"):
        Cache(tmp_path).get("kind", "key", fail)
    assert {path.name for path in tmp_path.glob("kind/*")} == {"key.lock"}
    (tmp_path / "kind" / "key.tmp").mkdir()  # left by a killed process
    (tmp_path / "kind" / "key.tmp" / "old").write_text("half")
    entry = Cache(tmp_path).get("kind", "key", make)
    assert {path.name for path in entry.path.iterdir()} == {"data", "meta.json"}


def test_full_disk(tmp_path: Path) -> None:
    def full(folder: Path) -> dict[str, Any]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"cannot write the data cache .*: the disk is full; .*SCANTLING_CACHE"):
        Cache(tmp_path).get("kind", "key", full)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_while_writing_arrays(tmp_path: Path) -> None:
    import numpy as np

    from scantling.trainer.data.store import write_array

    with pytest.raises(OSError) as caught:
        write_array(Path("/dev/full"), np.zeros(1 << 20))
    assert caught.value.errno == errno.ENOSPC


def test_read_only_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the data cache .*SCANTLING_CACHE"):
        Cache(tmp_path / "file").get("kind", "key", make)


def _make_slowly(root: Path, results: Any) -> None:
    def slow(folder: Path) -> dict[str, Any]:
        time.sleep(0.3)
        (folder / "maker").write_text(str(os.getpid()))
        return {}

    entry = Cache(root).get("kind", "key", slow)
    results.put((entry.path / "maker").read_text())


@pytest.mark.dist
def test_processes_make_an_entry_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_make_slowly, args=(tmp_path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    makers = {results.get(timeout=30) for _ in processes}
    for process in processes:
        process.join(timeout=30)
        assert process.exitcode == 0
    assert len(makers) == 1
