"""What fewer bytes cost in loss: every way to exchange, from the same weights and the same order of data.

    python benchmarks/comm_quality.py sweep      one grid of learning rates for every method, seed 0
    python benchmarks/comm_quality.py seeds      each at its best rate, 5 seeds, the same data order
    python benchmarks/comm_quality.py settings   ours with other coefficients, decay, alpha, formats; a quarter of seeds
    python benchmarks/comm_quality.py report     loss, bytes, paired differences to AdamW, and steps to AdamW's loss

A decoder of 0.9 million parameters on English novels, or with `--data digits` a vision transformer of 0.2 million on
scikit-learn's digits; two replicas that are two processes, each with half of every batch. Bytes are those of the
formulas, which benchmarks/network.py holds to what an interface counts. DeMo's AdamW, for embeddings and vectors, has
the rate that is best for AdamW alone. PowerSGD begins after a tenth of the steps, as its documentation advises. The
decay of 0.999 that DeMo was published with is that of long runs: it stands beside 0.95, which ours has. Runs are lines
of results/comm-quality.jsonl; none is made twice.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dated import RESULTS
from resumable import Grid, Ledger, Line, Spec, command_line, interval, key_of
from small_models import facts, printed, text

MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
REPLICAS, SEEDS = 2, 5
GRID = Grid([0.125e-3 * 2**power for power in range(9)], start=4)  # 0.125e-3 to 32e-3, from 2e-3 on


@dataclass(frozen=True)
class Work:
    """What is trained, and what is fixed for all its runs.

    Attributes:
        model, data: sections of the recipe.
        batch: examples in a step of all replicas.
        steps: of a run.
        dense_lr: of DeMo's AdamW.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    batch: int
    steps: int
    dense_lr: float


WORKS = {
    "novels": Work(
        {"preset": "llama-1m", "overrides": MODEL},
        {**text("novels"), "tokenizer": {"bpe": 512}, "seq_len": 128},
        batch=32,
        steps=600,
        dense_lr=4e-3,
    ),
    "digits": Work({"preset": "vit-digits"}, {"images": "digits", "heldout": 0.2}, batch=64, steps=300, dense_lr=2e-3),
}
METHODS = (
    "ddp fp32",
    "ddp fp16",
    "powersgd r1",
    "powersgd r4",
    "powersgd r16",
    "diloco h30",
    "diloco h100",
    "sparseloco h30",
    *(f"demo paper k{k}" for k in (32, 16, 8, 4, 2, 1)),
    "demo paper k32 decay 0.95",
    "ours k32 all_gather",
    "ours k8 all_gather",
    "ours k8 owner",
)
OURS = "ours k8 all_gather"
SETTINGS: dict[str, dict[str, Any]] = {
    "decay 0.9": {"decay": 0.9},
    "delay 1": {"delay": 1},
    "residual int8": {"residual": "int8"},
    "decay 0.98": {"decay": 0.98},
    "decay 0.99": {"decay": 0.99},
    "alpha 0.5": {"alpha": 0.5},
    "alpha 0.2": {"alpha": 0.2},
    "values int8": {"values": "int8"},
    "values fp32": {"values": "fp32"},
    "dense bf16": {"dense": "bf16"},
    "dense int4": {"dense": "int4"},
    "topk 2": {"topk": 2},
    "chunk 32, topk 2": {"chunk": 32, "topk": 2},
    "chunk 16, topk 1": {"chunk": 16, "topk": 1},
    "update identity": {"update": "identity"},
    "update muon": {"update": "muon"},
    "residuals averaged every 50": {"state_sync_every": 50},
}
Lines = dict[str, Line]


def run_spec(data: str, method: str, lr: float, seed: int, **options: Any) -> Spec:
    """One run, as plain values."""
    named = {} if data == "novels" else {"data": data}  # as the first lines of the results have it
    steps = WORKS[data].steps
    return {**named, "method": method, "lr": lr, "seed": seed, "steps": steps, "replicas": REPLICAS, "options": options}


def work_of(spec: Spec) -> Work:
    return WORKS[spec.get("data", "novels")]


def recipe_of(spec: Spec) -> dict[str, Any]:
    work = work_of(spec)
    return {
        "name": "comm",
        "model": work.model,
        "data": work.data,
        "train": {
            "steps": spec["steps"],
            "batch_size": work.batch,
            "warmup": 0.05,
            "eval_samples": 1000,
            "seed": spec["seed"],
            "device": "cpu",
        },
    }


def replica(rank: int, spec: Spec, port: int, out: str) -> None:
    """One of the processes of a run; the first one writes the outcome."""
    import torch
    import torch.distributed as dist
    from comm_methods import METHODS as KNOWN

    from scantling.data.loader import BatchSource
    from scantling.data.sampler import Sampler
    from scantling.recipe import load_recipe
    from scantling.tasks import get_task
    from scantling.training.distributed import Place
    from scantling.training.run import build_run_model, recipe_task, run_evaluation
    from scantling.training.schedule import lr_factor

    torch.set_num_threads(1)
    world = spec["replicas"]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    recipe = load_recipe(recipe_of(spec))
    task = get_task(recipe_task(recipe))
    data = task.prepare(recipe.data, seed=0)
    model = build_run_model(recipe, task, data)
    work = work_of(spec)
    options: dict[str, Any] = {"dense_lr": work.dense_lr} if spec["method"].startswith("ours") else {}
    if spec["method"].startswith("powersgd"):
        options["start"] = spec["steps"] // 10
    trained = KNOWN[spec["method"]](model, spec["lr"], **options, **spec["options"])
    sampler = Sampler(len(data.train), batch_size=work.batch, seed=spec["seed"], lengths=data.lengths)
    share = work.batch // world
    batches = BatchSource(data.train, data.collate, sampler, micro_batch_size=share, rank=rank, world_size=world)
    place = Place(rank, world, torch.device("cpu"))
    rates = [group["lr"] for group in trained.optimizer.param_groups]
    losses, heldout, figures = [], [], {}
    for step in range(1, spec["steps"] + 1):
        factor = lr_factor(step, steps=spec["steps"], schedule="cosine", warmup=0.05)
        for group, rate in zip(trained.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        (batch,) = batches.next_step()
        loss = trained.step(lambda called, batch=batch: task.loss(called, batch).loss / batch.num_targets)
        losses.append(float(loss))
        if step % (spec["steps"] // 10) == 0:
            figures = run_evaluation(recipe, model, task, data, place)
            heldout.append([step, figures["eval_loss"]])
            model.train()
    if rank == 0:
        found = {
            "eval_loss": heldout[-1][1],
            "heldout": heldout,
            **{name: figures[name] for name in ("accuracy",) if name in figures},
            "train_loss": sum(losses[-20:]) / 20,
            "computed_bytes": trained.computed_bytes(),
            "num_parameters": sum(param.numel() for param in model.parameters()),
        }
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run_one(spec: Spec) -> Line:
    """Train with processes of their own, and return the line of the result."""
    import torch.multiprocessing as mp

    began = time.time()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "found.json")
        mp.spawn(replica, (spec, port, out), nprocs=spec["replicas"])
        found = json.loads(Path(out).read_text())
    if not found["eval_loss"] < 100.0:
        found |= {"eval_loss": None, "failure": "the loss is not finite"}
    return {"key": key_of(spec), **spec, **found, **facts(began)}


def swept(lines: Lines, data: str, method: str) -> list[float | None]:
    return GRID.results(lines, lambda rate: run_spec(data, method, rate, 0), "eval_loss")


def best_rate(lines: Lines, data: str, method: str) -> float:
    rate = GRID.best(swept(lines, data, method))
    if rate is None:
        raise SystemExit(f"run the sweep of {method} first")
    return rate


def setting_specs(lines: Lines, data: str) -> Iterator[Spec]:
    rate = best_rate(lines, data, OURS)
    for options in SETTINGS.values():
        yield from (run_spec(data, OURS, rate, seed, **options) for seed in range(2))


def report(lines: Lines, data: str) -> None:
    """The sweep, then each method at its best rate beside AdamW under DDP."""
    print(f"{data}: held-out nats a target by learning rate, seed 0\n{GRID.header()}")
    for method in METHODS:
        print(GRID.row(method[:15], swept(lines, data, method)))
    base = GRID.best(swept(lines, data, METHODS[0]))
    if base is None:
        return
    control = [lines.get(key_of(run_spec(data, METHODS[0], base, seed))) for seed in range(SEEDS)]
    for method in METHODS:
        rate = GRID.best(swept(lines, data, method))
        if rate is not None:
            found = [lines.get(key_of(run_spec(data, method, rate, seed))) for seed in range(SEEDS)]
            row(f"{method} at {rate:g}", found, control)
    rate = GRID.best(swept(lines, data, OURS))
    for name, options in SETTINGS.items() if rate is not None else ():
        found = [lines.get(key_of(run_spec(data, OURS, rate, seed, **options))) for seed in range(2)]
        if any(found):
            row(name, found, [lines.get(key_of(run_spec(data, OURS, rate, seed))) for seed in range(2)])


def row(name: str, found: list[Line | None], control: list[Line | None]) -> None:
    """Loss, bytes and differences of one kind of runs to those of another, paired by seed."""
    done = [line for line in found if line is not None]
    if not done or any(line["eval_loss"] is None for line in done):
        return
    pairs = [(a, b) for a, b in zip(found, control, strict=True) if a is not None and b is not None]
    sent = done[0]["computed_bytes"]
    dense = next((line["computed_bytes"] for line in control if line is not None), sent)
    mean, _ = interval([line["eval_loss"] for line in done])
    parts = [f"{name:32} {mean:.4f} ({len(done)} seeds)  {sent / 1e3:9.2f} kB a step, {dense / sent:7.1f} x fewer"]
    if "accuracy" in done[0]:
        right, width = interval([100 * line["accuracy"] for line in done])
        parts.append(f"{right:.2f} ± {width:.2f} % right")
    if pairs and found is not control:
        difference, width = interval([a["eval_loss"] - b["eval_loss"] for a, b in pairs])
        parts.append(f"{difference:+.4f} ± {width:.4f}")
        goals = [(a["heldout"], b["heldout"][-1][1]) for a, b in pairs]
        reached = [next((step for step, loss in curve if loss <= goal), None) for curve, goal in goals]
        parts.append("reaches its loss at " + ", ".join("never" if step is None else str(step) for step in reached))
    print("  ".join(parts))


def main() -> int:
    phases = ["sweep", "seeds", "settings", "report"]
    parser = command_line(__doc__, phases, RESULTS / "comm-quality.jsonl")
    parser.add_argument("--data", choices=list(WORKS), default="novels", help="what is trained on; novels unless given")
    parser.add_argument("--only", nargs="*", help="sweep and seeds: these methods")
    options = parser.parse_args()
    if options.phase == "one":
        printed(run_one(json.loads(options.spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__))
    methods = options.only or METHODS
    if options.phase == "report":
        report(ledger.lines(), options.data)
    elif options.phase == "sweep":
        for method in methods:
            GRID.sweep(ledger, lambda rate, method=method: run_spec(options.data, method, rate, 0), "eval_loss")
    elif options.phase == "seeds":
        lines = ledger.lines()
        for seed in range(SEEDS):
            for method in methods:
                ledger.run(run_spec(options.data, method, best_rate(lines, options.data, method), seed))
    else:
        for spec in list(setting_specs(ledger.lines(), options.data)):
            ledger.run(spec)
    return 0


if __name__ == "__main__":
    sys.exit(main())
