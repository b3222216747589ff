"""Tiny runs for tests: a recipe that trains in seconds, and the command line in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml

from scantling.cli import main
from tests.processes import server, torchrun_names

TINY: dict[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


WIDE: dict[str, int] = {"hidden_size": 64, "intermediate_size": 128}
"""Wide enough that DeMo sends matrices by blocks: 4,096 numbers each."""


def write_corpus(path: Path, *, documents: int = 40, seed: int = 0) -> Path:
    """A file of documents with a pattern to learn, each after a line that begins with `<doc>`."""
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "while",
        "seven",
        "bold",
        "vikings",
        "wait",
    ]
    source = random.Random(seed)
    lines = []
    for number in range(documents):
        lines += [f"<doc> {number}", " ".join(source.choice(words) for _ in range(120))]
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny_recipe(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe as a mapping: a 2-layer Llama on `write_corpus`, 8 steps; `sections` are merged in."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        write_corpus(corpus)
    recipe: dict[str, Any] = {
        "name": "tiny",
        "model": {"preset": "llama-1m", "overrides": dict(TINY)},
        "data": {"text": str(corpus), "document_separator": "<doc>", "seq_len": 32, "heldout": 0.1},
        "train": {"steps": 8, "batch_size": 4, "eval_samples": 8, "device": "cpu", "warmup": 0.2},
    }
    for name, keys in sections.items():
        recipe[name] = {**recipe.get(name, {}), **keys}
    return recipe


def write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def command(arguments: Sequence[str | Path], *, processes: int = 1, launcher: Sequence[str] = ()) -> list[str]:
    """The command line, under torchrun for several processes; `launcher` are further options of it."""
    words = [sys.executable]
    if processes > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *launcher]
    return [*words, "-m", "scantling", *(str(a) for a in arguments)]


def scantling(
    *arguments: str | Path,
    processes: int = 1,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, or in several as torchrun starts them, and return what it printed.

    The processes come from the server of `tests.processes`. Those of `start_scantling` begin from nothing, and under
    torchrun itself.
    """
    words = [str(argument) for argument in arguments]
    places: list[dict[str, str]] = [{}]
    if processes > 1:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        places = [torchrun_names(rank, processes, port) for rank in range(processes)]
    context = server()
    with tempfile.TemporaryDirectory() as folder:
        started: list[BaseProcess] = []
        for place in places:
            whole = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), **place}
            files = [Path(folder) / f"{name}-{len(started)}" for name in ("out", "err")]
            started.append(context.Process(target=_command, args=(words, cwd or Path.cwd(), whole, *files)))
            started[-1].start()
        try:
            _wait_for_all(started, words, timeout)
        finally:
            for process in started:
                process.kill()
                process.join()
        codes = [process.exitcode or 0 for process in started]
        code = codes[0] if processes == 1 else int(any(codes))
        out, err = ("".join(path.read_text() for path in sorted(Path(folder).glob(f"{n}-*"))) for n in ("out", "err"))
        return subprocess.CompletedProcess(words, code, out, err)


def _wait_for_all(processes: Sequence[BaseProcess], words: Sequence[str], timeout: float) -> None:
    """Until all have ended; where one has failed the others are told to end."""
    until, has_told = time.monotonic() + timeout, False
    while waited_for := [process for process in processes if process.exitcode is None]:
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired(words, timeout)
        if not has_told and any(process.exitcode for process in processes):
            for process in waited_for:
                process.terminate()
            has_told = True
        connection.wait([process.sentinel for process in waited_for], timeout=1.0)


def _command(arguments: list[str], folder: Path, env: dict[str, str], out: Path, err: Path) -> None:
    """The command line in a process that was forked."""
    os.environ.clear()
    os.environ |= env
    os.chdir(folder)
    for path, number in ((out, 1), (err, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    _heed_interrupts()
    sys.argv = ["scantling", *arguments]
    main(arguments)


def run_script(script: str, *arguments: str | Path, processes: int) -> subprocess.CompletedProcess[str]:
    """Run a script in place of the command line under torchrun and return what it printed."""
    return subprocess.run(
        [*command([], processes=processes)[:-2], script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def start_scantling(*arguments: str | Path, processes: int = 1, **env: str) -> subprocess.Popen[str]:
    """Start the command line in a process group of its own, to be signalled."""
    return start(command(arguments, processes=processes), **env)


def start(words: Sequence[str], **env: str) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, to be signalled."""
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    )


def _heed_interrupts() -> None:
    """A test suite in the background of a shell ignores SIGINT, one under nohup SIGHUP, and its children inherit it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], *, timeout: float = 180) -> None:
    """Return once the condition holds; fail when the process ends first."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if condition():
            return
        if process.poll() is not None:
            output = process.stdout.read() if process.stdout else ""
            raise AssertionError(f"the process ended too early, with {process.returncode}:\n{output}")
        time.sleep(0.005)
    raise AssertionError(f"what was waited for did not come in {timeout} s")


def wait_for_step(metrics: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Return once the run has recorded `step`."""
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= step, process)


def forget(run: Path, last: int) -> None:
    """Remove checkpoints of later steps."""
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name[5:].removesuffix(".tmp") or 0) > last:
            shutil.rmtree(folder)


def kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the process and to all it started (torchrun gives its workers sessions of their own)."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    doomed = [process.pid]
    for pid in doomed:
        doomed += [child for child, parent in parents.items() if parent == pid]
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run, the last line of each step."""
    by_step = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]
