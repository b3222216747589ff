"""Compare the planned peak memory of training runs on a CPU with the measured peak.

    python benchmarks/peak_memory.py

Each case is a run in its own process, once with defaults and once with MALLOC_MMAP_THRESHOLD_=65536. With the latter,
glibc returns freed blocks, so the resident set equals the memory held by tensors. `error` is planned / measured - 1 for
the whole peak; `error_above_base` leaves out the memory that the process held before the model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dated import dated, write

SCRIPT = """
import json, sys, scantling as sc
from pathlib import Path
result = sc.train(json.loads(sys.argv[1]), run_dir=sys.argv[2])
plan = json.loads((Path(sys.argv[2]) / "plan.json").read_text())
print(json.dumps({"plan": plan, "measured": dict(result.metrics)}))
"""


def recipe(preset: str, optim: str, batch_size: int, seq_len: int, steps: int, **train: Any) -> dict[str, Any]:
    model = {"preset": preset, "task": "masked-lm"} if preset.startswith("bert") else {"preset": preset}
    return {
        "name": f"{preset}-{optim}-{batch_size}x{seq_len}",
        "model": model,
        "data": {"corpus": "python-stdlib", "seq_len": seq_len, "max_bytes": 2_000_000},
        "optim": {"name": optim},
        "train": {"steps": steps, "batch_size": batch_size, "eval_samples": batch_size, "device": "cpu", **train},
    }


CASES = [
    recipe("llama-1m", "adamw", 8, 64, 60),
    recipe("llama-1m", "adamw", 16, 128, 60),
    recipe("llama-1m", "came", 16, 128, 60),
    recipe("llama-1m", "adamw", 16, 256, 40),
    recipe("llama-10m", "came", 8, 256, 12),
    recipe("llama-10m", "adamw", 8, 256, 12, micro_batch_size=2),
    recipe("bert-6-encoder", "adamw", 4, 256, 5),
]


def run(case: dict[str, Any], tuned: bool) -> dict[str, Any]:
    settings = os.environ | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if tuned else {})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", SCRIPT, json.dumps(case), str(Path(folder) / "run")]
        done = subprocess.run(command, capture_output=True, text=True, env=settings, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    plan, measured = found["plan"], found["measured"]
    planned_above = plan["peak_memory_bytes"] - plan["base_bytes"]
    measured_above = measured["peak_memory_bytes"] - measured["base_memory_bytes"]
    return {
        "name": case["name"],
        "gives_blocks_back": tuned,
        "planned": plan["peak_memory_bytes"],
        "measured": measured["peak_memory_bytes"],
        "error": plan["peak_memory_bytes"] / measured["peak_memory_bytes"] - 1,
        "planned_above_base": planned_above,
        "measured_above_base": measured_above,
        "error_above_base": planned_above / measured_above - 1,
        "plan": plan,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    report = dated(__file__, results=rows)
    for case in CASES:
        for tuned in (False, True):
            row = run(case, tuned)
            rows.append(row)
            write(report, "peak-memory", options.out)
            print(
                f"{row['name']:28} {'blocks given back' if tuned else 'as it is':18} "
                f"planned {row['planned'] / 2**20:6.0f} MiB, measured {row['measured'] / 2**20:6.0f} MiB "
                f"({row['error']:+.1%}; above base {row['error_above_base']:+.1%})",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
