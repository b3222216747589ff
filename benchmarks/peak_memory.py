"""Compare the planned peak memory of training runs on a CPU with the measured peak.

    python benchmarks/peak_memory.py
    python benchmarks/peak_memory.py --only sharded 24gb

Each case is a run in its own process, once with defaults and once with MALLOC_MMAP_THRESHOLD_=65536. With the latter,
glibc returns freed blocks, so the resident set equals the memory held by tensors. `error` is planned / measured - 1 for
the whole peak; `error_above_base` leaves out the memory that the process held before the model. The lines of the plan
that a record has too (weights, gradients, optimizer state, bytes sent) are compared one by one.

`sharded` is a Llama of 60 million parameters, sharded over 1, 2 and 4 processes. `24gb` is
recipes/finetune-8b-24gb.yaml with the sizes of a model of 1/32 of its parameters and 512 tokens of 2,048, once with
random weights, all of which a run on a CPU holds in fp32 before it rounds them, and once with stored weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml
from dated import dated, write

ROOT = Path(__file__).parents[1]
STORED = "stored"
"""Placeholder for a model folder that is written before the run."""
LINES = ("weight_bytes", "gradient_bytes", "optimizer_state_bytes", "wire_bytes")


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


def sharded(shards: int) -> dict[str, Any]:
    case = recipe("llama-60m", "came", 4, 128, 4, micro_batch_size=1)
    case["model"]["overrides"] = {"vocab_size": 32000}
    return {**case, "name": f"{case['name']}-shard-{shards}", "parallel": {"shard": shards}}


def part_of_8b(stored: bool) -> dict[str, Any]:
    case: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / "finetune-8b-24gb.yaml").read_text())
    sizes = {"vocab_size": 16032, "hidden_size": 768, "intermediate_size": 2432, "num_attention_heads": 12}
    case["model"]["overrides"] |= {**sizes, "num_key_value_heads": 4}
    case["data"] |= {"seq_len": 512, "max_bytes": 2_000_000}
    case["train"] |= {"steps": 2, "eval_samples": 2, "loss_chunk": 128, "device": "cpu"}
    if stored:
        case["model"] = {"hf": STORED, "overrides": case["model"]["overrides"]}
    return {**case, "name": f"finetune-8b-24gb-1-32-{'stored' if stored else 'random'}"}


def save_model(overrides: dict[str, Any], folder: Path) -> None:
    """Write a Llama with random weights in bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**overrides, max_position_embeddings=2048)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


GROUPS = {
    "one": CASES,
    "sharded": [sharded(shards) for shards in (1, 2, 4)],
    "24gb": [part_of_8b(stored=False), part_of_8b(stored=True)],
}


def run(case: dict[str, Any], tuned: bool) -> dict[str, Any]:
    settings = os.environ | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if tuned else {})
    processes = case.get("parallel", {}).get("shard", 1)
    launcher = (
        [] if processes == 1 else ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    )
    with tempfile.TemporaryDirectory() as folder:
        path, run_dir = Path(folder) / "recipe.yaml", Path(folder) / "run"
        if case["model"].get("hf") == STORED:
            # in its own process, because a process never gives back all memory of a model
            model = {"hf": str(Path(folder) / "model")}
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                pool.submit(save_model, case["model"]["overrides"], Path(model["hf"])).result()
            case = {**case, "model": model}
        path.write_text(yaml.safe_dump(case))
        command = [sys.executable, "-m", *launcher, "scantling", "train", str(path), "--run-dir", str(run_dir)]
        done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        plan = json.loads((run_dir / "plan.json").read_text())
        measured = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
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
        "lines": {name: {"planned": plan[name], "measured": measured[name]} for name in LINES},
        "plan": plan,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=[*GROUPS])
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    report = dated(__file__, results=rows)
    for case in (case for name in options.only for case in GROUPS[name]):
        for tuned in (False, True):
            row = run(case, tuned)
            rows.append(row)
            write(report, "peak-memory", options.out)
            wrong = [name for name, line in row["lines"].items() if line["planned"] != line["measured"]]
            print(
                f"{row['name']:28} {'blocks given back' if tuned else 'as it is':18} "
                f"planned {row['planned'] / 2**20:6.0f} MiB, measured {row['measured'] / 2**20:6.0f} MiB "
                f"({row['error']:+.1%}; above base {row['error_above_base']:+.1%})"
                + (f", other {', '.join(wrong)}" if wrong else ""),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
