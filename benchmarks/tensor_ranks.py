"""Compare ways to reduce ranks: by importance, as in the paper, or small from the start.

    python benchmarks/tensor_ranks.py adapt      every schedule at the same size targets, in the same data order
    python benchmarks/tensor_ranks.py start      orthonormal and Gaussian cores, and two thin matrices, by learning rate
                                                 and by the cores' share of it
    python benchmarks/tensor_ranks.py cut        step time of a trained model before and after the removal of its pruned
                                                 ranks, in turns
    python benchmarks/tensor_ranks.py report     held-out loss, reached size and step time, from the raw lines

The decoder is that of optim_quality.py with TT layers of rank 24. The ranks are reduced over the first half of the run.
`not held` is the paper's schedule alone; all other schedules are forced to the target at the end. Rank gates learn at
the rate of the cores; `fast gates` at ten times the rate of the run, about as in the code of the paper's authors. Rows
`with gates` prune nothing and show how the scale of each rank affects training.
Halfway through the run, `importance, all at once` prunes the ranks that matter least to the loss, and `one cut` prunes
those that contribute least to the weights.

`small from the start` trains with the same rank in every layer and as many parameters, or a few percent more. All
schedules share one learning rate; those in MAIN and WHOLE have three seeds. `cut` uses a 2-layer decoder of width 768
with TT layers of rank 64: at the width of the other runs, overhead dominates the step time at any rank. Runs are stored
as in optim_quality.py: one line each in benchmarks/results/tensor-ranks.jsonl; no run is repeated.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from dated import RESULTS
from equal_clock import training_step
from interleaved import disturbed, ratio, take_turns
from optim_quality import MODEL
from resumable import Ledger, Line, Spec, command_line, side_by_side, spec_key, threads_a_job
from small_models import CAME, printed, run_facts, text, train_line
from transformers import LlamaConfig, LlamaForCausalLM

import scantling as sc
from scantling.tensor import linear
from scantling.tensor.cores import squared_norm

TOKENS = 1_228_800  # 300 steps
SEQ_LEN, BATCH, RANK = 128, 32, 24
WIDE_MODEL = {**MODEL, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 12}
WIDE_MODEL["num_key_value_heads"] = 12
WIDE_RANK, WIDE_RATE, CUT_STEPS = 64, 1e-3, 60
RATE, SEEDS = 8e-3, 3
TARGETS = (0.5, 0.2)
STARTS = (
    *(("orthonormal cores", scale) for scale in (1.0, 1 / 3, 0.1)),
    ("Gaussian cores", 1 / 3),
    ("two thin matrices", 1 / 3),
)
"""Initializations of layers, with the cores' share of the learning rate."""
RATES = (2e-3, 4e-3, 8e-3, 16e-3)
SMALL_RANKS = {0.5: 16, 0.2: 9}  # equal ranks whose cores have at least as many parameters
LATE = {"schedule": "paper", "early_steps": 75, "beta": 1e-4}
FAST = {"control_lr_scale": 10.0}
"""The price of the paper's schedule moves the gates, which takes this rate."""
KEPT = {"size_target": 0.99, "adapter": {"schedule": "paper", "gamma": 0.0}}
"""Settings with rank gates that are never pruned."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "importance": {},
    "importance, fast gates": FAST,
    "importance, all at once": {"adapter": {"begin": 149}},
    "one cut": {"adapter": {"schedule": "paper", "gamma": 0.0}},
    "paper, early, gamma 0.1": {**FAST, "adapter": {"schedule": "paper", "gamma": 0.1}},
    "paper, early, gamma 1": {**FAST, "adapter": {"schedule": "paper", "gamma": 1.0}},
    "paper, late": {**FAST, "adapter": {**LATE, "gamma": 0.1}},
    "paper, late, not held": {**FAST, "adapter": {**LATE, "gamma": 0.1, "hold": False}},
    "paper, late, gamma 1, not held": {**FAST, "adapter": {**LATE, "gamma": 1.0, "hold": False}},
}
"""Further keys of the recipe's `tensor` section for each schedule, next to ranks and target."""
SMALL = ("small from the start", "small from the start, with gates")
MAIN = (*SMALL, "importance", "importance, fast gates", "paper, late")
"""Schedules run at every target and with every seed; the others run at the lowest target with the first seed."""
WHOLE = ("all ranks", "all ranks, with gates")


def run_spec(schedule: str, target: float, seed: int) -> Spec:
    """Return the specification of one run, as plain values."""
    tensor: dict[str, Any] = {"rank": SMALL_RANKS[target] if schedule in SMALL else RANK}
    if schedule.endswith("with gates"):
        tensor |= KEPT
    elif schedule not in (*SMALL, *WHOLE):
        tensor |= {"size_target": target, "truncate_every": 25, **SCHEDULES[schedule]}
    optim = {**CAME, "lr": RATE, "weight_decay": 0.1}
    return {"schedule": schedule, "tensor": tensor, "optim": optim, "seed": seed, "tokens": TOKENS}


def start_spec(start: str, scale: float, rate: float, seed: int) -> Spec:
    """Return a run with some initialization of the layers and a dense embedding."""
    layers = {"rank": RANK, "num_modes": 1} if start == "two thin matrices" else RANK
    optim = {**CAME, "lr": rate, "weight_decay": 0.1}
    tensor = {"rank": {"*layers*": layers}, "lr_scale": scale}
    return {"start": start, "tensor": tensor, "optim": optim, "seed": seed, "tokens": TOKENS}


def start_with_gaussian_cores() -> None:
    """Draw cores as the paper does, with independent normal entries, scaled to the norm of the weight."""

    def gaussian(shapes: Any, ranks: Any, norm: float, boxes: Any, center: int, *, generator: Any = None) -> list[Any]:
        drawn = [
            torch.randn(left, *shape, right, dtype=torch.float64, generator=generator) / right**0.5
            for left, shape, right in zip(ranks[:-1], shapes, ranks[1:], strict=True)
        ]
        factor = (norm / sum(float(squared_norm(drawn, box)) for box in boxes) ** 0.5) ** (1.0 / len(drawn))
        return [(core * factor).to(torch.get_default_dtype()) for core in drawn]

    linear.random_cores = gaussian  # type: ignore[assignment]


def build_recipe(spec: Spec) -> dict[str, Any]:
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
        yield from (run_spec(schedule, 1.0, seed) for schedule in WHOLE)
        yield from (run_spec(schedule, target, seed) for target in TARGETS for schedule in MAIN)
    yield from (run_spec(schedule, TARGETS[-1], 0) for schedule in SCHEDULES if schedule not in MAIN)


def starts() -> Iterator[Spec]:
    yield from (start_spec(*start, rate, 0) for rate in RATES for start in STARTS)


def cut_spec(target: float) -> Spec:
    """Return the specification of a step-time measurement before and after the ranks of a trained model are removed."""
    return {"measure": "cut", "target": target, "steps": CUT_STEPS, "rank": WIDE_RANK, "model": WIDE_MODEL}


def cut_line(spec: Spec) -> Line:
    """Train on bytes of the standard library with pruned ranks kept in place; remove them; time all models in turns."""
    began = time.time()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **spec["model"]))
    sc.tensorize(model, spec["rank"])
    every = copy.deepcopy(model)
    adapter = sc.RankAdapter(model, size_target=spec["target"], steps=max(1, spec["steps"] // 2))
    optimizer = torch.optim.AdamW(sc.param_groups(model, core_lr=WIDE_RATE / 3), lr=WIDE_RATE, fused=True)
    text = b"".join(path.read_bytes() for path in sorted(Path(copy.__file__).parent.glob("*.py")))
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)
    losses = []
    for _ in range(spec["steps"]):
        ids = rows[torch.randint(len(rows), (BATCH,))].long()
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        adapter.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    batch = {"input_ids": ids, "labels": ids}
    shut = copy.deepcopy(model)
    with torch.no_grad():
        before = model(ids).logits
        adapter.truncate(optimizer)
        moved = float((model(ids).logits - before).norm() / before.norm())
    removed = copy.deepcopy(model)
    adapter.detach()
    forms = {"all ranks": every, "shut": shut, "removed": removed, "folded": model, "all ranks again": every}
    times = take_turns({name: training_step(form, batch) for name, form in forms.items()}, rounds=30)
    return {
        "key": spec_key(spec),
        **spec,
        "losses": [losses[0], losses[-1]],
        "logits_moved": moved,
        "numbers": {name: sum(param.numel() for param in form.parameters()) for name, form in forms.items()},
        "ranks": adapter.ranks(),
        "times": {name: ratio(own, times["all ranks"]) for name, own in times.items()},
        **run_facts(began),
    }


def report_cuts(lines: dict[str, Line]) -> None:
    """Print step times before and after the removal, relative to the original model."""
    for target in TARGETS:
        line = lines.get(spec_key(cut_spec(target)))
        if line is None:
            continue
        if (refused := disturbed(line["times"]["all ranks again"])) is not None:
            print(f"cut to {target}: {refused}")
            continue
        parts = (f"{name} {line['times'][name]['ratio']:.2f}" for name in ("shut", "removed", "folded"))
        print(f"cut to {target}, a step of all ranks is 1: {', '.join(parts)}; logits moved {line['logits_moved']:.1e}")


def report(lines: dict[str, Line]) -> None:
    """Print a row per initialization and rate, per schedule and target, and per removal."""
    report_cuts(lines)
    for start, rate in product(STARTS, RATES):
        line = lines.get(spec_key(start_spec(*start, rate, 0)))
        if line is not None:
            numbers = f"{line['num_parameters']:,} parameters"
            print(f"{start[0]:18} at {rate:g}, of it {start[1]:.2f}: {line['eval_loss']:.4f}  {numbers}")
    for spec in specs():
        if spec["seed"]:
            continue
        found = [lines.get(spec_key({**spec, "seed": seed})) for seed in range(SEEDS)]
        done = [line for line in found if line is not None and line["eval_loss"] is not None]
        if done:
            losses = ", ".join(f"{line['eval_loss']:.4f}" for line in done)
            target = spec["tensor"].get("size_target")
            sizes = "" if target is None else f" to {target:g}: " + ", ".join(f"{x['tensor_size']:.4f}" for x in done)
            print(f"{spec['schedule']:30} {losses}  {done[0]['num_parameters']:,} parameters{sizes}")


def main() -> int:
    parser: argparse.ArgumentParser = command_line(
        __doc__, ["adapt", "start", "cut", "report"], RESULTS / "tensor-ranks.jsonl"
    )
    options = parser.parse_args()
    if options.phase == "one":
        spec = json.loads(options.spec)
        if spec.get("measure") == "cut":
            printed(cut_line(spec))
            return 0
        if spec.get("start") == "Gaussian cores":
            start_with_gaussian_cores()
        printed(train_line(spec, build_recipe(spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__), threads_a_job(options.jobs))
    if options.phase == "report":
        report(ledger.lines())
    elif options.phase == "cut":
        side_by_side(1, ledger.run, map(cut_spec, TARGETS))  # one at a time, because timed runs need the whole machine
    else:
        side_by_side(options.jobs, ledger.run, list(starts() if options.phase == "start" else specs()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
