"""Run everything that needs an NVIDIA GPU: the GPU tests, then every GPU benchmark, most important first.

    make bench-gpu            (or: PYTHONPATH=src python benchmarks/gpu.py --out benchmarks/results)

Each part has its own time limit and process. Its result is written as soon as it ends, so an interruption loses at most
one part. All parts together stay under nine minutes. To run a part that was skipped for lack of time, name it with
--parts. Without a GPU, the script says so and exits with code 4, because a test that did not run has not passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = 4
SECONDS = 530
"""Default time limit of all parts together, in seconds."""


@dataclass(frozen=True)
class Part:
    """A command and its time limit in seconds."""

    name: str
    seconds: int
    arguments: tuple[str, ...]


def parts(out: Path) -> list[Part]:
    """Return the parts to run, most important first."""
    shape = ("--presets", "llama-130m", "--batch-size", "16", "--seq-len", "1024", "--rounds", "1")
    baseline = (str(ROOT / "benchmarks/baseline.py"), "--device", "cuda", "--compute", "bf16", "--blocks", *shape)
    optim, tensor, comm = (str(ROOT / f"benchmarks/{name}_gpu.py") for name in ("optim", "tensor", "comm"))

    def alone(name: str, seconds: int, *arguments: str) -> Part:
        """Return a part that runs optim_gpu.py."""
        return Part(name, seconds, (optim, *arguments, "--out", str(out / f"gpu-{name}.json")))

    def steps(batch: int) -> Part:
        """Return a part that times training steps of the six-encoder transformer at one batch size."""
        name = f"tensor-steps-{batch}"
        found = str(out / f"gpu-{name}.json")
        return Part(name, 120, (tensor, "steps", "--batches", str(batch), "--rounds", "10", "--out", found))

    precision = (str(ROOT / "benchmarks/low_precision.py"), "--device", "cuda", "--rounds", "30")
    return [
        Part(
            "tests", 120, ("-m", "pytest", "-q", "-m", "gpu", "-n", "4", "-p", "no:cacheprovider", str(ROOT / "tests"))
        ),
        steps(32),
        steps(128),
        Part("low-precision", 120, (*precision, "--out", str(out / "gpu-low-precision.json"))),
        steps(1),
        Part("tensor-lookup", 60, (tensor, "lookup", "--out", str(out / "gpu-tensor-lookup.json"))),
        alone("optim-step-350m", 90, "--size", "350m"),
        Part("comm-codec-1.3b", 100, (comm, "--out", str(out / "gpu-comm-codec-1.3b.json"))),
        alone("optim-tokens-350m", 120, "--size", "350m", "--end-to-end", "--rounds", "20"),
        alone("optim-step-1.3b", 100, "--size", "1.3b", "--rounds", "30"),
        Part(
            "train-llama-130m-compiled",
            150,
            (*baseline, "--compile", "--steps", "60", "--out", str(out / "gpu-baseline-compiled.json")),
        ),
        Part(
            "train-llama-130m-eager",
            80,
            (*baseline, "--steps", "40", "--out", str(out / "gpu-baseline-eager.json")),
        ),
        alone("optim-tokens-1.3b", 150, "--size", "1.3b", "--end-to-end", "--rounds", "10"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="time for everything")
    parser.add_argument("--parts", nargs="*", help="only these, by name")
    options = parser.parse_args()
    chosen = [part for part in parts(options.out) if options.parts is None or part.name in options.parts]
    if not chosen:
        parser.error(f"no such part; there are {', '.join(part.name for part in parts(options.out))}")

    import torch

    if not torch.cuda.is_available():
        print("bench-gpu: no NVIDIA GPU here; nothing was run, and this does not count as passed")
        return NO_GPU
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    summary = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parts": {},
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    for part in chosen:
        box = min(part.seconds, end - time.monotonic())
        if box < 20:
            summary["parts"][part.name] = {"status": "not run: no time was left"}
            continue
        began = time.monotonic()
        log = options.out / f"gpu-{part.name}.log"
        with open(log, "w", encoding="utf-8") as file:
            try:
                done = subprocess.run(
                    [sys.executable, *part.arguments],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=box,
                    env=environment,
                    cwd=ROOT,
                    check=False,
                )
                status = "passed" if done.returncode == 0 else f"failed with exit code {done.returncode}"
            except subprocess.TimeoutExpired:
                status = f"stopped after its {box:.0f} s"
        text = log.read_text(encoding="utf-8")
        summary["parts"][part.name] = {"status": status, "seconds": round(time.monotonic() - began, 1)}
        (options.out / "gpu-summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        print(f"== {part.name}: {status}\n{text[-2500:]}", flush=True)
    return 0 if all(part["status"] == "passed" for part in summary["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
