"""Tests of unwritable output and Ctrl-C: one line, the right exit code, and no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scantling.cli import INTERRUPTED, commands, run
from scantling.trainer.training import signals
from tests.damage import find_damage
from tests.runs import start_scantling, tiny_recipe, wait_for_step, write_recipe

heard: list[str] = []

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


def test_closed_streams_are_not_reused_for_files(tmp_path: Path) -> None:
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
def test_full_disk_does_not_stop_the_command(
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
def test_system_errors_are_one_line(
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


def test_interrupt_wrapped_by_a_library_is_reported_as_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(*_: object, **__: object) -> int:
        try:
            signals.interrupt(signal.SIGINT, None)
        except KeyboardInterrupt:
            raise ModuleNotFoundError("Could not import module 'PreTrainedModel'") from None
        return 0

    monkeypatch.setattr(commands, "plan", raises)
    monkeypatch.setattr(signals, "_counted", -10.0)
    monkeypatch.setattr(signals, "_is_interrupted", False)
    assert run(["plan", "x"]) == 130
    assert capsys.readouterr().err.startswith("scantling: interrupted")


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
    assert process.returncode in (INTERRUPTED, 3)  # 3 if it was already training
    if process.returncode == INTERRUPTED:
        assert shown == "scantling: interrupted; continue a run from its newest checkpoint with --resume\n"


@pytest.mark.parametrize("again", [signals.interrupt, lambda *_: heard.append("again")])
def test_a_burst_of_interrupts_is_one(again: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    monkeypatch.setattr(signals, "_counted", 0.0)
    heard.clear()
    before = signal.signal(signal.SIGINT, again)
    try:
        with signals.StopSignal() as stop:
            for _ in range(5):
                signal.raise_signal(signal.SIGINT)
            assert stop.received == signal.SIGINT
            now += 0.9
            signal.raise_signal(signal.SIGINT)
            assert not heard
            now += 0.2
            if again is signals.interrupt:
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            else:
                signal.raise_signal(signal.SIGINT)
                assert heard == ["again"]
        assert signal.getsignal(signal.SIGINT) is again
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.dist
def test_five_interrupts_while_training_lose_nothing(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, train={"steps": 100_000}))
    folder = tmp_path / "run"
    process = start_scantling("train", recipe, "--run-dir", folder)
    wait_for_step(folder / "metrics.jsonl", 3, process)
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        time.sleep(0.03)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 3, shown
    step = json.loads((folder / "result.json").read_text())["step"]
    assert find_damage(folder / "checkpoints" / f"step-{step}") is None
    assert "Traceback" not in shown
