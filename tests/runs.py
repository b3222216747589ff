"""Tiny runs for tests: a recipe that trains in seconds, and the command line in child processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import yaml

from scantling.trainer.reporting import html
from tests.processes import server, torchrun_names

if TYPE_CHECKING:
    import torch

TINY: dict[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


WIDE: dict[str, int] = {"hidden_size": 64, "intermediate_size": 128}
"""Sizes for which DeMo sends matrices as blocks of 4,096 elements."""


NO_CHARTS = "SCANTLING_TESTS_WITHOUT_CHARTS"
"""Environment variable that tells child processes of tests to draw no charts."""


def no_charts(runs: Sequence[Any]) -> list[Any]:
    """Replacement for the function that draws the charts of a report."""
    return []


def write_corpus(path: Path, *, documents: int = 40, seed: int = 0) -> Path:
    """Write a file of documents with a learnable pattern, each after a line that begins with `<doc>`."""
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
    """Return a recipe as a mapping: a 2-layer Llama on `write_corpus`, 8 steps; `sections` are merged in."""
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
    """Return the command line, under torchrun for several processes; `launcher` has further options of torchrun."""
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
    before: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command line in one process, or in several as torchrun starts them, and return its output.

    Args:
        before: called in each process before the command; a module-level function, because it is pickled by name.
    """
    with _started(arguments, processes, cwd=cwd, env=env, before=before) as (started, files):
        code = started.wait(timeout)
        out, err = ("".join(path.read_text() for path in paths) for paths in zip(*files, strict=True))
        return subprocess.CompletedProcess(arguments, code, out, err)


def train_run(recipe: dict[str, Any], folder: Path, name: str, processes: int) -> Path:
    """Train a recipe to its end in child processes, and return its run directory `folder / name`."""
    path = write_recipe(folder / f"{name}.yaml", recipe)
    done = scantling("train", path, "--run-dir", folder / name, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


@dataclass(frozen=True)
class Ended:
    """Result of one of several processes.

    Attributes:
        code: exit code.
        out, err: output.
    """

    code: int | None
    out: str
    err: str


def on_machines(
    folders: Sequence[Path],
    *arguments: str | Path,
    processes: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    before: Callable[[], None] | None = None,
) -> list[Ended]:
    """Run the command line on machines that share no folder except those in the arguments, and return each result.

    Args:
        folders: the working folder of each machine.
        arguments: arguments of the command line.
        processes: number of processes on each machine.
        before: called in each process before the command; a module-level function, because it is pickled by name.
    """
    count = len(folders) * processes
    with _started(arguments, count, env=env, before=before, machines=folders) as (started, files):
        codes = started.wait_for_each(timeout)
        return [Ended(code, *(path.read_text() for path in paths)) for code, paths in zip(codes, files, strict=True)]


@contextlib.contextmanager
def _started(
    arguments: Sequence[str | Path], count: int, **options: Any
) -> Iterator[tuple[Started, list[tuple[Path, Path]]]]:
    """Start the command line in `count` processes with files for their output; kill remaining processes at the end."""
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder) / f"out-{rank}", Path(folder) / f"err-{rank}") for rank in range(count)]
        started = Started(["scantling", *map(str, arguments)], files, **options)
        try:
            yield started, files
        finally:
            started.kill()


class Started:
    """`python -m` in one process, or in several as torchrun starts them, with the parts of Popen that tests use.

    The server of `tests.processes` forks the processes. In contrast, `start` starts a new interpreter and torchrun
    itself.

    Args:
        words: a module and its arguments.
        files: files for the output and the errors of each process; the two may be the same file.
        own_session: True if each process leads its own process group.
        before: called in each process before the module runs.
        machines: working folders of machines, over which the processes are spread; by default one machine in `cwd`.
    """

    def __init__(
        self,
        words: Sequence[str],
        files: Sequence[tuple[Path, Path]],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        own_session: bool = False,
        before: Callable[[], None] | None = None,
        machines: Sequence[Path] = (),
    ) -> None:
        self._words, self._log = words, files[0][0]
        folders = machines or [cwd or Path.cwd()]
        rank_env: list[dict[str, str]] = [{}]
        if len(files) > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            rank_env = [torchrun_names(rank, len(files), port, len(folders)) for rank in range(len(files))]
        self._processes: list[BaseProcess] = []
        self._is_terminated = False
        # otherwise this process would wait at exit for all processes left
        weakref.finalize(self, _kill, self._processes)
        for rank, (own_env, paths) in enumerate(zip(rank_env, files, strict=True)):
            full_env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), **own_env}
            args = (words, folders[rank * len(folders) // len(files)], full_env, paths, own_session, before)
            self._processes.append(server().Process(target=_command, args=args))
            self._processes[-1].start()

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    @property
    def pid(self) -> int:
        return self.pids[0]

    @property
    def returncode(self) -> int | None:
        """Exit code of a single process; for several, 0 if all succeeded and 1 otherwise."""
        codes = [process.exitcode for process in self._processes]
        if None in codes:
            return None
        return codes[0] if len(codes) == 1 else int(any(codes))

    def poll(self) -> int | None:
        """Return the exit code once all have ended; if one has failed, terminate the others."""
        if not self._is_terminated and any(process.exitcode for process in self._processes):
            self._is_terminated = True
            self.terminate()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(self._words, timeout or 0)
            connection.wait([process.sentinel for process in self._processes if process.exitcode is None], timeout=0.5)
        return code

    def wait_for_each(self, timeout: float) -> list[int | None]:
        """Wait until each process has ended by itself, and return their exit codes."""
        until = time.monotonic() + timeout
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        if None in codes:
            raise subprocess.TimeoutExpired(self._words, timeout)
        return codes

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return the output once all processes have ended."""
        self.wait(timeout)
        return self._log.read_text(), None

    def send_signal(self, number: int) -> None:
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                # The fork server can reap a process that was killed before its exit code arrives here.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        _kill(self._processes)


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def _command(
    words: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    files: tuple[Path, Path],
    own_session: bool,
    before: Callable[[], None] | None,
) -> None:
    """Run a module as `python -m` does, in a forked process."""
    if own_session:
        os.setsid()
    os.environ.clear()
    os.environ |= env
    os.chdir(folder)
    for number, path in enumerate(files, start=1):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if NO_CHARTS in env:
        html._charts = no_charts
    if before is not None:
        before()
    sys.argv = [*words]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def start_scantling(*arguments: str | Path, processes: int = 1, **env: str) -> Started:
    """Start the command line, each process in its own process group, so that tests can signal it."""
    folder = Path(tempfile.mkdtemp())
    log = folder / "log"
    log.touch()
    started = Started(["scantling", *map(str, arguments)], [(log, log)] * processes, env=env, own_session=True)
    weakref.finalize(started, shutil.rmtree, folder, ignore_errors=True)
    return started


def popen(
    words: Sequence[str],
    *,
    stdout: IO[bytes],
    env: Mapping[str, str] | None = None,
    start_new_session: bool = False,
    **_: int,
) -> Started:
    """Replace `subprocess.Popen` for calls of `python -m`; all output goes to a file."""
    assert [*words[:2]] == [sys.executable, "-m"]
    log = Path(stdout.name).absolute()
    return Started(words[2:], [(log, log)], env=env, own_session=start_new_session)


def start(words: Sequence[str], **env: str) -> subprocess.Popen[str]:
    """Start a command in a new interpreter and its own process group, so that tests can signal it."""
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        start_new_session=True,
        preexec_fn=_restore_interrupts,
    )


def _restore_interrupts() -> None:
    """Restore the default SIGINT and SIGHUP handling, because children inherit ignored signals (shell jobs, nohup)."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


Running = subprocess.Popen[str] | Started


def wait_for(condition: Callable[[], bool], process: Running, *, timeout: float = 180) -> None:
    """Return once the condition holds; fail if the process ends first."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if condition():
            return
        if process.poll() is not None:
            raise AssertionError(f"the process ended too early, with {process.returncode}:\n{process.communicate()[0]}")
        time.sleep(0.005)
    raise AssertionError(f"the condition did not hold within {timeout} s")


def wait_for_step(metrics: Path, step: int, process: Running) -> None:
    """Return once the run has recorded `step`."""
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= step, process)


def forget(run: Path, last: int) -> None:
    """Remove checkpoints of later steps."""
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name[5:].removesuffix(".tmp") or 0) > last:
            shutil.rmtree(folder)


def kill_tree(process: Running) -> None:
    """Send SIGKILL to the process and all of its descendants (torchrun starts its workers in separate sessions)."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    doomed = [*getattr(process, "pids", [process.pid])]
    for pid in doomed:
        doomed += [child for child, parent in parents.items() if parent == pid]
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of a run, the last line for each step."""
    by_step = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


def saved_tensors(run_dir: Path, step: int = 8, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint whose keys begin with `prefix`; step 8 is the last of `tiny_recipe`."""
    from scantling.trainer.training.checkpoint import load_tensors

    return load_tensors(run_dir / "checkpoints" / f"step-{step}", prefix)
