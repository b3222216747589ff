"""Output that cannot be written, and Ctrl-C: one line, the right exit code, and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scantling import cli
from scantling.cli import INTERRUPTED, commands, run
from tests.runs import tiny_recipe, write_recipe

FULL = "scantling: error: cannot write to the standard output: No space left on device\n"


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = line.replace("scantling", f"{sys.executable} -m scantling", 1)
    return subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("scantling schema > /dev/full", 1, "scantling: error: cannot write: No space left on device\n"),
        ("scantling --version > /dev/full", 1, "scantling: error: cannot write: No space left on device\n"),
        ("scantling train no.yaml > /dev/full", 2, "scantling: error: recipe not found: no.yaml\n"),
        ("scantling train no.yaml 2> /dev/full", 2, ""),
        ("scantling train no.yaml > /dev/full 2>&1", 2, ""),
        ("scantling trian 2> /dev/full", 2, ""),
        ("scantling train no.yaml 2>&-", 2, ""),
        ("scantling schema >&- 2>&-", 0, ""),
        ("scantling schema | true", 1, ""),
        ("scantling train no.yaml 2>&1 | true", 2, ""),
    ],
)
def test_lost_output_is_one_line(line: str, code: int, message: str, tmp_path: Path) -> None:
    done = shell(line, tmp_path)
    assert (done.returncode, done.stderr) == (code, message)


def test_closed_streams_are_not_given_to_files(tmp_path: Path) -> None:
    script = "import os; from scantling.cli import main; main(['--version'])"
    found = tmp_path / "numbers"
    script = script.replace(
        "main([",
        f"import atexit; atexit.register(lambda: open({str(found)!r}, 'w')"
        ".write(str([os.path.realpath(f'/proc/self/fd/{n}') for n in range(3)]))); main([",
    )
    subprocess.run(["bash", "-c", f'{sys.executable} -c "$0" <&- >&- 2>&-', script], check=True)
    assert found.read_text() == str(["/dev/null"] * 3)


@pytest.mark.parametrize("output", ["table", "json"])
def test_full_disk_of_the_output_does_not_end_the_work(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path))
    arguments = ["plan", str(recipe), "--json"]
    if output == "table":
        arguments = ["train", str(recipe), "--run-dir", str(tmp_path / "run"), "--set", "train.steps=2"]
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert run(arguments) == 1
    assert capsys.readouterr().err == FULL
    if output == "table":
        assert (tmp_path / "run" / "result.json").is_file()
        assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(28, "No space left on device"), 1, "cannot write: No space left on device"),
        (OSError(28, "No space left on device", "a/b"), 1, "a/b: No space left on device"),
        (OSError(13, "Permission denied", "a/b"), 2, "a/b: Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_of_the_system_are_one_line(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def raises(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(commands, "plan", raises)
    assert run(["plan", "x"]) == code
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("delay", [0.05, 0.3, 1.0, 2.0])
def test_five_interrupts_at_the_start_are_one_line(delay: float, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path))
    command = [sys.executable, "-c", "import sys; from scantling.cli import main; print('.', flush=True); main()"]
    process = subprocess.Popen(
        [*command, "train", str(recipe), "--run-dir", str(tmp_path / "run"), "--set", "train.steps=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay)
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        time.sleep(0.03)
    _, shown = process.communicate(timeout=60)
    assert process.returncode in (INTERRUPTED, 3)  # 3 if it was training already
    if process.returncode == INTERRUPTED:
        assert shown == "scantling: interrupted; a run goes on from its newest checkpoint with --resume\n"


def test_a_burst_of_interrupts_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(cli.time, "monotonic", lambda: now)
    with pytest.raises(KeyboardInterrupt):
        cli._interrupt(2, None)
    now += 0.9
    cli._interrupt(2, None)
    now += 1.1
    with pytest.raises(KeyboardInterrupt):
        cli._interrupt(2, None)
