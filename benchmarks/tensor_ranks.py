"""How ranks come down best: the controlled schedule, the paper's, and starting at the small ranks, on a small decoder.

    python benchmarks/tensor_ranks.py adapt      every schedule to the same size targets, the same data order, 2 seeds
    python benchmarks/tensor_ranks.py start      orthonormal and Gaussian cores, and two thin matrices, by learning rate
                                                 and by the share of it that cores have
    python benchmarks/tensor_ranks.py report     held-out loss, size reached, and what a step takes, from the raw lines

The decoder is that of optim_quality.py with its layers as cores of rank 24; the ranks come down over the first half of
the run. `small from the start` trains at equal ranks everywhere that give the same number of parameters. Runs are kept
as in optim_quality.py: one line each in benchmarks/results/tensor-ranks.jsonl, never run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from dated import RESULTS
from optim_quality import MODEL
from resumable import Ledger, Line, Spec, command_line, interval, key_of, side_by_side, threads_a_job
from small_models import CAME, printed, text, train_line

from scantling.tensor import linear
from scantling.tensor.cores import gram

TOKENS = 1_228_800  # 300 steps
SEQ_LEN, BATCH, RANK = 128, 32, 24
RATE, SEEDS = 4e-3, 2
TARGETS = (0.5, 0.2)
STARTS = (
    *(("orthonormal cores", scale) for scale in (1.0, 1 / 3, 1 / 9)),
    ("Gaussian cores", 1 / 3),
    *(("two thin matrices", scale) for scale in (1.0, 1 / 3)),
)
"""How cores begin, and their share of the learning rate."""
RATES = (2e-3, 4e-3, 8e-3)
SMALL_RANKS = {0.5: 16, 0.2: 9}  # equal ranks whose cores hold as many numbers, next above
SCHEDULES: dict[str, dict[str, Any]] = {
    "controlled": {},
    "controlled, no price": {"price": 0.0},
    "controlled, early price": {"price": 1.0},
    "controlled, beta 1e-4": {"beta": 1e-4},
    "paper, early, gamma 0.01": {"schedule": "paper", "gamma": 0.01},
    "paper, early, gamma 1": {"schedule": "paper", "gamma": 1.0},
    "paper, early, gamma 10": {"schedule": "paper", "gamma": 10.0},
    "paper, late": {"schedule": "paper", "gamma": 0.01, "early_steps": 75, "beta": 1e-4},
}
ALL = ("small from the start", *SCHEDULES)


def run_spec(schedule: str, target: float, seed: int) -> Spec:
    """One run, as plain values."""
    if target == 1.0:
        tensor: dict[str, Any] = {"rank": RANK}
    elif schedule == ALL[0]:
        tensor = {"rank": SMALL_RANKS[target]}
    else:
        tensor = {"rank": RANK, "size_target": target, "truncate_every": 25, "adapter": SCHEDULES[schedule]}
    optim = {**CAME, "lr": RATE, "weight_decay": 0.1}
    return {"schedule": schedule, "tensor": tensor, "optim": optim, "seed": seed, "tokens": TOKENS}


def start_spec(start: str, scale: float, rate: float, seed: int) -> Spec:
    """A run whose layers begin in some way, the embedding dense."""
    layers = {"rank": RANK, "num_modes": 1} if start == "two thin matrices" else RANK
    optim = {**CAME, "lr": rate, "weight_decay": 0.1}
    tensor = {"rank": {"*layers*": layers}, "lr_scale": scale}
    return {"start": start, "tensor": tensor, "optim": optim, "seed": seed, "tokens": TOKENS}


def start_with_gaussian_cores() -> None:
    """Cores as the paper draws them, scaled to the norm of the weight: independent normal entries."""

    def gaussian(shapes: Any, ranks: Any, norm: float, boxes: Any, center: int, *, generator: Any = None) -> list[Any]:
        drawn = [
            torch.randn(left, *shape, right, dtype=torch.float64, generator=generator) / right**0.5
            for left, shape, right in zip(ranks[:-1], shapes, ranks[1:], strict=True)
        ]
        factor = (norm / sum(float(gram(drawn, box)) for box in boxes) ** 0.5) ** (1.0 / len(drawn))
        return [(core * factor).to(torch.get_default_dtype()) for core in drawn]

    linear.random_cores = gaussian  # type: ignore[assignment]


def recipe_of(spec: Spec) -> dict[str, Any]:
    return {
        "name": "ranks",
        "model": {"preset": "llama-1m", "overrides": MODEL},
        "data": {**text("python"), "tokenizer": {"bpe": 512}, "seq_len": SEQ_LEN},
        "tensor": spec["tensor"],
        "optim": spec["optim"],
        "train": {
            "steps": spec["tokens"] // (BATCH * SEQ_LEN),
            "batch_size": BATCH,
            "warmup": 0.05,
            "eval_samples": 1000,
            "seed": spec["seed"],
            "device": "cpu",
        },
    }


def specs() -> Iterator[Spec]:
    for seed in range(SEEDS):
        yield run_spec("all ranks", 1.0, seed)
        for target in TARGETS:
            yield from (run_spec(schedule, target, seed) for schedule in ALL)


def starts() -> Iterator[Spec]:
    yield from (start_spec(*start, rate, seed) for seed in range(SEEDS) for rate in RATES for start in STARTS)


def report(lines: dict[str, Line]) -> None:
    """A row a start and rate, a row a schedule and target."""
    for start, rate in product(STARTS, RATES):
        done = [lines[key] for seed in range(SEEDS) if (key := key_of(start_spec(*start, rate, seed))) in lines]
        if done:
            losses = ", ".join(f"{line['eval_loss']:.4f}" for line in done)
            print(
                f"{start[0]:18} at {rate:g}, of it {start[1]:.2f}: {losses}  {done[0]['num_parameters']:,} parameters"
            )
    for spec in specs():
        if spec["seed"]:
            continue
        found = [lines.get(key_of({**spec, "seed": seed})) for seed in range(SEEDS)]
        done = [line for line in found if line is not None and line["eval_loss"] is not None]
        if done:
            mean, width = interval([line["eval_loss"] for line in done])
            target = spec["tensor"].get("size_target", "")
            numbers = ", ".join(f"{line['num_parameters']:,}" for line in done)
            print(
                f"{spec['schedule']:28} {target!s:5} {mean:.4f} ± {width:.4f} ({len(done)} seeds)  {numbers} parameters"
            )


def main() -> int:
    parser: argparse.ArgumentParser = command_line(
        __doc__, ["adapt", "start", "report"], RESULTS / "tensor-ranks.jsonl"
    )
    options = parser.parse_args()
    if options.phase == "one":
        spec = json.loads(options.spec)
        if spec.get("start") == "Gaussian cores":
            start_with_gaussian_cores()
        printed(train_line(spec, recipe_of(spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__), threads_a_job(options.jobs))
    if options.phase == "report":
        report(ledger.lines())
    else:
        side_by_side(options.jobs, ledger.run, list(starts() if options.phase == "start" else specs()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
