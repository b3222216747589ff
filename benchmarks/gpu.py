"""Run everything that needs an NVIDIA GPU: the GPU tests, then every GPU benchmark, most important first.

    make bench-gpu            (or: PYTHONPATH=src python benchmarks/gpu.py)
    python benchmarks/gpu.py --dry           the same parts, tiny and on the CPU, to find mistakes without a GPU
    python benchmarks/gpu.py --table         write the table of the newest results into docs/evidence/gpu.md

Each part has its own process and time limit, and compares rows with controls of the same process. All parts together
take at most 15 minutes. Results are files of benchmarks/results/gpu-DATE, written as soon as they exist, so that an
interruption loses at most one part; gpu-DATE/summary.json lists the parts. Name single parts with --parts; those of
`ON_REQUEST`, which fine-tune 8 billion parameters, run only then. Without a GPU, the script says so and exits with code
4, because a test that did not run has not passed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs" / "evidence" / "gpu.md"
BEGIN, END = "<!-- table of benchmarks/gpu.py -->", "<!-- end of the table -->"
NO_GPU = 4
SECONDS = 840
"""Time limit of all parts together, in seconds."""
CACHE = "cache"
"""Folder for files that the library keeps, such as the measured costs of the GPU, which stay with the results."""
LEAST_SECONDS = 20
"""Time below which no part is begun."""


@dataclass(frozen=True)
class Part:
    """A script of this folder with its arguments.

    Attributes:
        name: name of the part and of its result.
        seconds: time limit.
        script: name of the script.
        arguments: arguments on a GPU.
        dry: arguments of a tiny run on the CPU.
    """

    name: str
    seconds: int
    script: str
    arguments: str = ""
    dry: str = "--device cpu --rounds 1"

    def command(self, out: Path, *, is_dry: bool) -> list[str]:
        """Return the command line, which writes its result to a file of `out`."""
        arguments = (self.dry if is_dry else self.arguments).split()
        return [
            sys.executable,
            str(ROOT / "benchmarks" / self.script),
            *arguments,
            "--out",
            str(out / f"{self.name}.json"),
        ]


TINY = "--device cpu --rounds 1 --size tiny"
PARTS = (
    Part("steps-1", 70, "tensor_gpu.py", "steps --batches 1 --rounds 20", "steps --batches 1 --device cpu --rounds 1"),
    Part(
        "steps-32", 70, "tensor_gpu.py", "steps --batches 32 --rounds 10", "steps --batches 2 --device cpu --rounds 1"
    ),
    Part(
        "steps-128", 70, "tensor_gpu.py", "steps --batches 128 --rounds 10", "steps --batches 3 --device cpu --rounds 1"
    ),
    Part("blocks", 110, "tensor_gpu.py", "blocks --rounds 10", "blocks --device cpu --rounds 1"),
    Part("exchange", 65, "comm_gpu.py", "--rounds 10", "--tiny --device cpu --rounds 1"),
    Part("optim-tokens-350m", 60, "optim_gpu.py", "--size 350m --end-to-end --rounds 20", f"--end-to-end {TINY}"),
    Part("optim-tokens-1.3b", 80, "optim_gpu.py", "--size 1.3b --end-to-end --rounds 10", f"--end-to-end {TINY}"),
    Part("optim-sharded-1.3b", 40, "optim_gpu.py", "--size 1.3b --sharded --rounds 20", f"--sharded {TINY}"),
    Part("optim-step-350m", 40, "optim_gpu.py", "--size 350m --rounds 20", TINY),
    Part(
        "low-precision",
        50,
        "low_precision.py",
        "--device cuda --rounds 15",
        "--device cpu --rounds 1 --size 64 --rank 4 --tokens 32 --kinds cores --eager",
    ),
    Part("lookup", 25, "tensor_gpu.py", "lookup --rounds 10", "lookup --device cpu --rounds 1"),
    Part("orders", 25, "tensor_gpu.py", "orders --rounds 10", "orders --device cpu --rounds 1"),
    Part("llama-130m", 300, "llama_gpu.py", "--seconds 50", "--device cpu"),
)
"""Parts after the tests, most important first; the last one takes the rest of the time."""
TINY_FINETUNE = "--device cpu --size tiny --steps 2"
ON_REQUEST = (
    Part(
        "finetune-scantling",
        160,
        "finetune_gpu.py",
        "--group scantling --seconds 150",
        f"--group scantling {TINY_FINETUNE}",
    ),
    Part("finetune-full", 500, "finetune_gpu.py", "--group full --seconds 490", f"--group full {TINY_FINETUNE}"),
    Part(
        "finetune-low-rank",
        400,
        "finetune_gpu.py",
        "--group low-rank --seconds 390",
        f"--group low-rank {TINY_FINETUNE}",
    ),
)
"""Parts that run only if --parts names them: 8 billion parameters, on a GPU of 24 GB or more."""
TESTS = ("-m", "pytest", "-q", "-m", "gpu", "-n", "4", "-p", "no:cacheprovider", str(ROOT / "tests"))
TESTS_SECONDS = 100
CHOICES = ("tests", *(part.name for part in (*ON_REQUEST, *PARTS)))


def run_part(command: list[str], log: Path, seconds: float) -> str:
    """Run a command with its output in a file; return its status."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "SCANTLING_CACHE": str(log.parent / CACHE)}
    with open(log, "w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, env=environment, cwd=ROOT, check=False
            )
        except subprocess.TimeoutExpired:
            return f"stopped after its {seconds:.0f} s"
    return "passed" if done.returncode == 0 else f"failed with exit code {done.returncode}"


def run_all(names: list[str] | None, out: Path, seconds: float, *, is_dry: bool) -> int:
    """Run the tests and the parts in order; return the exit code."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    commands = {} if is_dry else {"tests": ([sys.executable, *TESTS], TESTS_SECONDS)}
    parts = [*(part for part in ON_REQUEST if part.name in (names or ())), *PARTS]
    commands |= {part.name: (part.command(out, is_dry=is_dry), part.seconds) for part in parts}
    end = time.monotonic() + seconds
    summary: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": None if is_dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parts": {},
    }
    for name, (command, limit) in commands.items():
        if names is not None and name not in names:
            continue
        box = min(limit, end - time.monotonic())
        if box < LEAST_SECONDS:
            summary["parts"][name] = {"status": "not run: no time was left"}
            continue
        began = time.monotonic()
        log = out / f"{name}.log"
        status = run_part(command, log, box)
        summary["parts"][name] = {"status": status, "seconds": round(time.monotonic() - began, 1)}
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        print(f"== {name}: {status}\n{log.read_text(encoding='utf-8')[-2500:]}", flush=True)
    costs = out / CACHE / "device-costs.json"
    if costs.exists():
        costs.replace(out / costs.name)
    shutil.rmtree(out / CACHE, ignore_errors=True)
    print("\n".join(table(out)))
    return 0 if all(part["status"] == "passed" for part in summary["parts"].values()) else 1


# the table


SHOWN = {
    "share_of_step": "share of a step",
    "valid_loss": "loss, nats",
    "tokens": "tokens",
    "worst_over_best": "worst chosen order, best order is 1",
    "ratio": "time, layer without rounding is 1",
    "bytes_per_parameter": "bytes per parameter",
}
"""Other values that the table shows, and the titles of their columns."""


def table(folder: Path) -> Iterator[str]:
    """Yield the lines of a table of the results in a folder, in Markdown."""
    summary = json.loads((folder / "summary.json").read_text())
    yield f"{summary['gpu']}, torch {summary['torch']}, {summary['date']}; raw times in `{folder.name}`."
    for name, part in summary["parts"].items():
        yield ""
        rows = list(_rows(folder / f"{name}.json"))
        yield f"**{name}**: {part['status']}" + (", in {} s".format(part["seconds"]) if "seconds" in part else "")
        if rows:
            keys = list(dict.fromkeys(key for _, row in rows for key in row))
            yield from ("", f"| | {' | '.join(keys)} |", "|" + "---|" * (len(keys) + 1))
            yield from (f"| {label} | {' | '.join(row.get(key, '') for key in keys)} |" for label, row in rows)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of a result: a label, and values by the titles of their columns."""
    if not path.exists():
        return
    report = json.loads(path.read_text())
    # comm_gpu.py has a list of cases
    cases = {
        f"topk {case['topk']}, residual {case['residual']}, {case['dtype']}": case for case in report.get("cases", ())
    }
    for label, row in _leaves(report.get("results", cases), ""):
        found = {}
        if "error" in row:
            found["error"] = row["error"].replace("|", "/").replace("\n", " ")[:80]
        if "median_s" in row:
            found["ms"] = f"{1e3 * row['median_s']:.2f}"
        if "peak_bytes" in row:
            found["peak MiB"] = f"{row['peak_bytes'] / 2**20:.0f}"
        if "peak_reserved_bytes" in row:
            found["reserved MiB"] = f"{row['peak_reserved_bytes'] / 2**20:.0f}"
        for key, value in row.items():
            if key.startswith("to "):
                found[f"faster than {key[3:]}"] = f"{value['faster']:.2f}"
            elif key.startswith("ratio to "):
                found[f"time, {key[9:]} is 1"] = f"{value:.2f}"
            elif key in SHOWN:
                found[SHOWN[key]] = f"{value:.4g}"
        if found:
            yield label, found


def _leaves(results: Any, label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the innermost dictionaries that hold a measurement, with the names that lead to them."""
    if not isinstance(results, dict):
        return
    if any(key in results for key in ("median_s", "error", *SHOWN)):
        yield label, results
        return
    for name, inner in results.items():
        yield from _leaves(inner, f"{label}, {name}" if label else name)


def write_docs(folder: Path) -> None:
    """Write the table into the page of GPU results, between its two marks."""
    text = DOCS.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    body = "\n".join(table(folder))
    DOCS.write_text(f"{text[:begin]}\n\n{body}\n\n{text[end:]}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="time for everything")
    parser.add_argument("--parts", nargs="+", choices=CHOICES, help="only these")
    parser.add_argument("--dry", action="store_true", help="tiny and on the CPU")
    parser.add_argument("--table", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    if options.table:
        write_docs(options.out or max(RESULTS.glob("gpu-*-*-*")))
        return 0

    import torch

    if not options.dry and not torch.cuda.is_available():
        print("bench-gpu: no NVIDIA GPU here; nothing was run, and this does not count as passed")
        return NO_GPU
    out = options.out or (ROOT / "build" / "gpu-dry" if options.dry else RESULTS / time.strftime("gpu-%Y-%m-%d"))
    return run_all(options.parts, out, options.seconds, is_dry=options.dry)


if __name__ == "__main__":
    sys.exit(main())
