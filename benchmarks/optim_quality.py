"""Quality of CAME beside AdamW and its rivals: small decoders on real text at 20 tokens a parameter.

    python benchmarks/optim_quality.py sweep            one grid of learning rates for every optimizer, one seed
    python benchmarks/optim_quality.py seeds            the finalists at their best rate, 8 seeds, the same data order
    python benchmarks/optim_quality.py ablations        confidence, clip, betas, rounding of int4
    python benchmarks/optim_quality.py batch            batch x1, x4, x16 at equal tokens
    python benchmarks/optim_quality.py report           what the results say, from the raw lines alone

The sweep starts every optimizer at the same rate of the grid and goes outwards until the best rate has a worse one on
either side. Every run is one line of benchmarks/results/optim-quality.jsonl with its recipe, losses and date, and is
not run again: stop at any time and start again. `--jobs 2` runs two at once with one thread each. The data is the
Python standard library (`--data python`) or English novels from SCANTLING_DATA (`--data novels`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "optim-quality.jsonl"
MODEL = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
TOKENS = 20 * 492_384  # 20 for each parameter of MODEL
SEQ_LEN, BATCH = 128, 32
CONFIDENT = [0.9, 0.95, 0.995]
CAME = {"name": "came", "debias": True, "betas": CONFIDENT}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "betas": [0.9, 0.95]},
    "adafactor": {"name": "adafactor"},
    "came-reference": {"name": "came", "factor": "last2"},
    "came": CAME,
    "came-int8": {**CAME, "momentum": "int8"},
    "came-int4": {**CAME, "momentum": "int4"},
    "muon": {"name": "muon"},
    "scale-like": {"name": "scalelike"},
    "apollo-mini": {"name": "apollomini"},
    "lamb": {"name": "lamb", "betas": [0.9, 0.95]},
}
RATES = [0.125e-3, 0.25e-3, 0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3]
START = RATES.index(4e-3)
SWEPT = ("adamw", "came", "came-reference", "adafactor", "muon", "scale-like", "apollo-mini")
FINALISTS = ("adamw", "came", "came-int8", "came-int4")
Lines = dict[str, dict[str, Any]]
ABLATIONS: dict[str, dict[str, Any]] = {
    "came": {},
    "betas (0.9, 0.999, 0.9999)": {"betas": [0.9, 0.999, 0.9999]},
    "betas (0.9, 0.99, 0.999)": {"betas": [0.9, 0.99, 0.999]},
    "betas (0.9, 0.95, 0.95)": {"betas": [0.9, 0.95, 0.95]},
    "no update clip": {"clip_threshold": 1e9},
    "no debias": {"debias": False},
}


def run_spec(data: str, optimizer: str, lr: float, seed: int, *, batch: int = 1, **changes: Any) -> dict[str, Any]:
    """One run, as plain values: what is in it decides whether it has been run."""
    optim = {**OPTIMIZERS[optimizer], "lr": lr, "weight_decay": 0.1, **changes}
    return {"data": data, "optimizer": optimizer, "optim": optim, "seed": seed, "batch": batch, "tokens": TOKENS}


def recipe_of(spec: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {"corpus": "python-stdlib", "max_bytes": 30_000_000}
    if spec["data"] == "novels":
        folder = Path(os.environ.get("SCANTLING_DATA", ROOT.parent / "shared" / "data"))
        data = {
            "text": str(folder / "lm" / "english_novels_train.txt.xz"),
            "validation": str(folder / "lm" / "english_novels_valid.txt.xz"),
            "document_separator": "<|doc|>",
            "max_bytes": 40_000_000,
        }
    batch = BATCH * spec["batch"]
    return {
        "name": "quality",
        "model": {"preset": "llama-1m", "overrides": MODEL},
        "data": {**data, "tokenizer": {"bpe": 512}, "seq_len": SEQ_LEN},
        "optim": spec["optim"],
        "train": {
            "steps": spec["tokens"] // (batch * SEQ_LEN),
            "batch_size": batch,
            "micro_batch_size": BATCH,
            "warmup": 0.05,
            "eval_samples": 2000,
            "seed": spec["seed"],
            "device": "cpu",
        },
    }


def key_of(spec: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def results() -> Lines:
    if not RESULTS.exists():
        return {}
    return {line["key"]: line for line in map(json.loads, RESULTS.read_text().splitlines())}


def swept(done: Lines, data: str, optimizer: str, **changes: Any) -> list[float | None]:
    """The held-out loss of each rate with seed 0: infinite where the run failed, None where it was not run."""
    lines = [done.get(key_of(run_spec(data, optimizer, rate, 0, **changes))) for rate in RATES]
    return [
        None if line is None else float("inf") if line["eval_loss"] is None else line["eval_loss"] for line in lines
    ]


def next_rate(losses: list[float | None]) -> int | None:
    """Which rate to run next: the start, then the neighbours of the best one; None when both are known."""
    known = {index: loss for index, loss in enumerate(losses) if loss is not None}
    if not known:
        return START
    best = min(known, key=lambda index: (known[index], index))  # everything failed: go down
    wanted = (index for index in (best - 1, best + 1) if 0 <= index < len(RATES) and index not in known)
    return next(wanted, None)


def best_rate(done: Lines, data: str, optimizer: str) -> float:
    """The rate of the finished sweep with the lowest held-out loss."""
    losses = swept(done, data, "came" if optimizer.startswith("came-int") else optimizer)
    if next_rate(losses) is not None:
        raise SystemExit(f"run the sweep of {optimizer} on {data} first")
    return min((loss, rate) for loss, rate in zip(losses, RATES, strict=True) if loss is not None)[1]


def sweep(data: str, optimizer: str, threads: int, **changes: Any) -> None:
    """Run rates until the best one is between two worse ones."""
    while (index := next_rate(swept(results(), data, optimizer, **changes))) is not None:
        if not run_in_process(run_spec(data, optimizer, RATES[index], 0, **changes), threads):
            return


def specs(phase: str, data: str) -> Iterator[dict[str, Any]]:
    """The runs of a phase that need no result of each other."""
    done = results()
    if phase == "seeds":
        yield from (run_spec(data, n, best_rate(done, data, n), seed) for seed in range(8) for n in FINALISTS)
    elif phase == "ablations":
        rate = best_rate(done, data, "came")
        yield from (run_spec(data, "came", rate, s, **change) for s in range(3) for change in ABLATIONS.values())


def run_one(spec: dict[str, Any]) -> dict[str, Any]:
    """Train in this process and return the line of the result."""
    import torch

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from peers import register

    import scantling as sc
    from scantling.errors import NonFiniteError
    from scantling.training.rundir import environment

    register()
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            metrics = dict(sc.train(recipe_of(spec), run_dir=Path(folder) / "run").metrics)
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
            losses = [json.loads(line)["loss"] for line in lines]
            outcome = {key: metrics.get(key) for key in ("eval_loss", "bits_per_byte", "loss", "optimizer_state_bytes")}
            outcome["curve"] = [round(float(np.mean(part)), 4) for part in np.array_split(np.array(losses), 50)]
            outcome["num_parameters"] = metrics["num_parameters"]
        except NonFiniteError as error:
            outcome = {"eval_loss": None, "failure": str(error)}
    facts = environment()
    return {
        "key": key_of(spec),
        **spec,
        **outcome,
        "seconds": round(time.time() - began),
        "date": time.strftime("%Y-%m-%d"),
        "threads": torch.get_num_threads(),
        "versions": facts["versions"],
        "cpu": facts["hardware"]["cpu"],
        "git_commit": facts["git_commit"],
    }


def run_in_process(spec: dict[str, Any], threads: int) -> bool:
    """Run one spec in a process of its own and append its line; False when the process failed."""
    command = [sys.executable, __file__, "one", json.dumps(spec)]
    settings = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    finished = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    if finished.returncode:
        print(f"failed: {spec}\n{finished.stderr[-2000:]}", flush=True)
        return False
    line = finished.stdout.splitlines()[-1]
    with open(RESULTS, "a", encoding="utf-8") as file:
        file.write(line + "\n")
    found = json.loads(line)
    print(f"{found['data']} {found['optim']} seed {found['seed']}: {found['eval_loss']}", flush=True)
    return True


def report(data: str) -> None:
    """Tables from the raw lines: the sweep, and paired differences to AdamW over the seeds."""
    done = results()
    print(f"{data}: held-out nats a token by learning rate, seed 0\n{'':16}" + "".join(f"{r:9.1e}" for r in RATES))
    for name in SWEPT:
        cells = ["        -" if loss is None else f"{loss:9.4f}" for loss in swept(done, data, name)]
        print(f"{name:16}" + "".join(cells))
    if not any(line["seed"] for line in done.values()):
        return
    for name in FINALISTS[1:]:
        pairs = []
        for seed in range(8):
            lines = [done.get(key_of(run_spec(data, n, best_rate(done, data, n), seed))) for n in (name, "adamw")]
            if all(lines):
                pairs.append(lines[0]["eval_loss"] - lines[1]["eval_loss"])  # type: ignore[index]
        if len(pairs) > 1:
            from scipy.stats import t

            mean, error = float(np.mean(pairs)), float(np.std(pairs, ddof=1) / len(pairs) ** 0.5)
            width = float(t.ppf(0.975, len(pairs) - 1)) * error
            interval = f"[{mean - width:+.4f}, {mean + width:+.4f}]"
            print(f"{name} - adamw: {mean:+.4f} {interval} over {len(pairs)} seeds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["sweep", "seeds", "ablations", "batch", "report", "one"])
    parser.add_argument("spec", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--data", choices=["python", "novels"], default="python")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.phase == "one":
        print(json.dumps(run_one(json.loads(options.spec))))
        return 0
    if options.phase == "report":
        report(options.data)
        return 0
    threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
    with ThreadPoolExecutor(options.jobs) as pool:
        if options.phase == "sweep":
            list(pool.map(lambda name: sweep(options.data, name, threads), SWEPT))
        elif options.phase == "batch":
            pairs = [(name, batch) for batch in (1, 4, 16) for name in ("adamw", "adafactor", "came", "lamb")]
            list(pool.map(lambda pair: sweep(options.data, pair[0], threads, batch=pair[1]), pairs))
        else:
            done = results()
            waiting = {key_of(spec): spec for spec in specs(options.phase, options.data)}
            list(pool.map(lambda s: run_in_process(s, threads), [s for k, s in waiting.items() if k not in done]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
