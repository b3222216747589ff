"""Tests of the cache of compiled C code: one compilation per machine, private files, no damaged library."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scantling.optim._compile import CompileError, load_library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a C file, with an empty cache and a compiler that counts its calls in `calls`."""
    path = tmp_path / "three.c"
    path.write_text("int three(void) { return 3; }\n")
    compiler = tmp_path / "counting-cc"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo x >> {tmp_path}/calls\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path / "cache"))
    return path


def load(source: Path, *flags: str) -> ctypes.CDLL:
    library = load_library(source, ["-shared", "-fPIC", *flags])
    assert library.three() == 3
    return library


def calls(source: Path) -> int:
    return len((source.parent / "calls").read_text().splitlines())


def library_folder(source: Path) -> Path:
    return source.parent / "cache" / "native"


def test_load_library_compiles_once_per_source_flags_and_compiler(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(source)
    load(source)
    assert calls(source) == 1
    load(source, "-O1")
    assert calls(source) == 2
    source.write_text("int three(void) { return 2 + 1; }\n")
    load(source)
    assert calls(source) == 3
    monkeypatch.setenv("CC", "cc")
    load(source)
    assert len(list(library_folder(source).glob("three-*.so"))) == 4
    assert not list(library_folder(source).glob("tmp-*"))


def test_load_library_keeps_a_private_folder(source: Path) -> None:
    before = os.umask(0)
    try:
        load(source)
    finally:
        os.umask(before)
    paths = [library_folder(source), *library_folder(source).iterdir()]
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "link", "writable"])
def test_load_library_compiles_again_if_damaged(source: Path, damage: str) -> None:
    load(source)
    (library,) = library_folder(source).glob("*.so")
    content = library.read_bytes()
    library.unlink()  # replaced by a new file, because the process has loaded the old one
    if damage == "link":
        (source.parent / "planted.so").write_bytes(content)
        library.symlink_to(source.parent / "planted.so")
        (source.parent / "calls").write_text("x\n")
    else:
        changed = {"truncated": content[:100], "flipped": content[:-9] + b"\xff" + content[-8:], "empty": b""}
        library.write_bytes(changed.get(damage, content))
        library.chmod(0o722 if damage == "writable" else 0o700)
    load(source)
    assert calls(source) == 2
    load(source)
    assert calls(source) == 2


@pytest.mark.parametrize("problem", ["open to others", "a link", "a file", "no cache folder"])
def test_load_library_compiles_aside_without_a_private_folder(
    source: Path, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    folder = library_folder(source)
    if problem == "no cache folder":
        monkeypatch.setenv("SCANTLING_CACHE", "/proc/no/such/folder")
    else:
        folder.parent.mkdir()
        if problem == "open to others":
            folder.mkdir()
            folder.chmod(0o770)
        elif problem == "a link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        else:
            folder.write_text("")
    load(source)
    assert len(caplog.records) == 1
    assert "compiling it for this process alone" in caplog.text
    assert not list(temporary.iterdir())
    assert not list(tmp_path.glob("elsewhere/*"))


def test_load_library_quotes_a_compiler_that_fails(source: Path) -> None:
    source.write_text("int three(void) { return missing; }\n")
    with pytest.raises(CompileError, match="missing"):
        load_library(source, ["-shared", "-fPIC"])
    assert [path.name for path in library_folder(source).iterdir()] == ["lock"]


LOAD = (
    "import sys; from pathlib import Path; from scantling.optim._compile import load_library;"
    " assert load_library(Path(sys.argv[1]), ['-shared', '-fPIC']).three() == 3"
)


def test_load_library_compiles_once_among_processes(source: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", LOAD, str(source)]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert calls(source) == 1


def test_load_library_leaves_nothing_after_a_kill(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "slow-cc"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\ntouch {tmp_path}/begun partial.o\nexec sleep 60\n')
    slow.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", LOAD, str(source)], env={**os.environ, "CC": str(slow)}, start_new_session=True
    )
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert list(library_folder(source).glob("tmp-*"))
    load(source)
    names = [path.name for path in library_folder(source).iterdir()]
    assert not [name for name in names if name.startswith("tmp-")]
    assert stat.S_ISREG(next(library_folder(source).glob("*.so")).stat().st_mode)
