"""Run each experiment once, and sweep learning rates outwards.

A run is a specification of plain values. Its result is one line of a JSON-lines file, keyed by the hash of the
specification, so a script can be stopped at any time and started again. A script provides a command `one SPEC` that
prints the line of a specification; each run has its own process. If a run starts its own processes, the ledger can make
its line in this process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Spec = dict[str, Any]
Line = dict[str, Any]
Score = str | Callable[[Line], float | None]
"""Score of a line, lower is better: the name of one of its values, or a function of it (None: the run failed)."""
Item = TypeVar("Item")


def spec_key(spec: Spec) -> str:
    """Return the key of a run: a hash of its specification."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Ledger:
    """A file of results, and the script that makes them.

    Attributes:
        path: the file, one JSON object per line.
        script: its command `one` takes a specification and prints the result as its last line.
        threads: threads of each run.
        make: makes the line of a specification in this process, instead of the script.
    """

    path: Path
    script: Path
    threads: int = 1
    make: Callable[[Spec], Line] | None = None

    def lines(self) -> dict[str, Line]:
        """Return all results by their keys."""
        if not self.path.exists():
            return {}
        return {line["key"]: line for line in map(json.loads, self.path.read_text(encoding="utf-8").splitlines())}

    def run(self, spec: Spec) -> bool:
        """Run a specification that has no line yet and append its line; return False if its process failed."""
        if spec_key(spec) in self.lines():
            return True
        try:
            found = self._by_script(spec) if self.make is None else self.make(spec)
        except Exception as error:
            print(f"failed: {spec}\n{str(error)[-2000:]}", flush=True)
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{spec} -> {found.get('eval_loss')} in {found.get('seconds')} s", flush=True)
        return True

    def _by_script(self, spec: Spec) -> Line:
        command = [sys.executable, str(self.script), "one", json.dumps(spec)]
        settings = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        finished = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
        if finished.returncode:
            raise RuntimeError(finished.stderr)
        found: Line = json.loads(finished.stdout.splitlines()[-1])
        return found


@dataclass(frozen=True)
class Grid:
    """Ascending learning rates, the index at which every sweep starts, and the least number of rates it takes."""

    rates: Sequence[float]
    start: int
    least: int = 0

    def results(self, lines: dict[str, Line], make_spec: Callable[[float], Spec], score: Score) -> list[float | None]:
        """Return the score of each rate, lower is better: infinity if the run failed, None if it was not run."""
        scored = score if callable(score) else itemgetter(score)
        found = [lines.get(spec_key(make_spec(rate))) for rate in self.rates]
        return [None if line is None else float("inf") if (value := scored(line)) is None else value for line in found]

    def next(self, results: Sequence[float | None]) -> int | None:
        """Return the index of the next rate: the start, then neighbors of the best rate, then the nearest others."""
        known = {index: result for index, result in enumerate(results) if result is not None}
        if not known:
            return self.start
        best = min(known, key=lambda index: (known[index], index))  # if everything failed, go down
        nearest = sorted(range(len(self.rates)), key=lambda index: (abs(index - best), index))
        wanted = (index for index in nearest if index not in known)
        index = next(wanted, None)
        return index if index is not None and (abs(index - best) == 1 or len(known) < self.least) else None

    def best(self, results: Sequence[float | None]) -> float | None:
        """Return the rate with the lowest score, or None if the sweep has not ended or every run failed."""
        if self.next(results) is not None:
            return None
        score, rate = min((s, rate) for s, rate in zip(results, self.rates, strict=True) if s is not None)
        return rate if score < float("inf") else None

    def sweep(self, ledger: Ledger, make_spec: Callable[[float], Spec], score: Score) -> None:
        """Run rates until the best one lies between two worse ones, or at an end of the grid."""
        while (index := self.next(self.results(ledger.lines(), make_spec, score))) is not None:
            if not ledger.run(make_spec(self.rates[index])):
                return

    def row(self, name: str, results: Sequence[float | None]) -> str:
        """Return one table row of a sweep; it notes if the best rate is at an end of the grid and may lie beyond."""
        at_end = self.best(results) in (self.rates[0], self.rates[-1])
        told = "   best at an end of the grid" if at_end else ""
        return f"{name:24}" + "".join("        -" if result is None else f"{result:9.4f}" for result in results) + told

    def header(self) -> str:
        """Return the header line of the table."""
        return " " * 24 + "".join(f"{rate:9.1e}" for rate in self.rates)


def side_by_side(jobs: int, work: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Do several things at once, started in the given order."""
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, items))


def threads_a_job(jobs: int) -> int:
    """Return the number of threads per run if several run at once."""
    return max(1, len(os.sched_getaffinity(0)) // jobs)


def command_line(description: str | None, phases: Sequence[str], results: Path) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all such scripts have: a phase, `one SPEC`, `--jobs`, `--results`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=[*phases, "one"])
    parser.add_argument("spec", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, each with its share of the cores")
    parser.add_argument("--results", type=Path, default=results, help="the file of the lines")
    return parser


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % interval (Student's t); infinite width for one value."""
    from scipy.stats import t

    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, float("inf")
    return mean, float(t.ppf(0.975, count - 1)) * float(np.std(values, ddof=1)) / count**0.5


def verdict_on(mean: float, width: float, least: float) -> str:
    """Say whether the mean and its 95 % interval meet an aim: met, missed, or open if it lies in the interval."""
    by_interval = "met" if mean - width >= least else "MISSED" if mean + width < least else "open"
    return f"{'met' if mean >= least else 'MISSED'}, by the interval {by_interval}"


def steps_to_reach(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Return the step at which a falling curve first reaches a value, linear between its points.

    Args:
        curve: (step, value) pairs, ascending in the step.
        target: the value to reach.

    Returns:
        None if the curve never reaches it. The first step if the curve starts at the value or below, because earlier
        values are unknown.
    """
    before: Sequence[float] | None = None
    for point in curve:
        step, value = point[0], point[1]
        if value <= target:
            if before is None:
                return float(step)
            share = (before[1] - target) / (before[1] - value)
            return float(before[0] + share * (step - before[0]))
        before = point
    return None
