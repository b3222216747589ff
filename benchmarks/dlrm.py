"""Measure a DLRM with TT tables: size, memory and speed at the size of Criteo Kaggle, and AUC on real flights.

    python benchmarks/dlrm.py size        parameter counts of both models, computed without building them
    python benchmarks/dlrm.py memory      peak memory of steps and of an evaluation, each row in a separate process
    python benchmarks/dlrm.py speed       time of a training step, interleaved
    python benchmarks/dlrm.py sweep       flights: one grid of learning rates for each kind of tables, one seed
    python benchmarks/dlrm.py auc         flights: each kind at its best rate, seeds 1 to 8
    python benchmarks/dlrm.py report      everything against the aims, from the raw lines alone

Aims (CoMERA, arXiv 2405.14377): 99 times fewer parameters and 7 times less peak training memory with 26 tables of 33.8
million rows, width 32, and batches of 10,000; AUC within 0.005 of dense.

The dense model is trained in two ways. `dense-sgd` is SGD with sparse gradients, as in the public DLRM; such a gradient
holds only the rows of a batch. `dense-adamw` (17 GB) is AdamW, whose dense gradients and two moments explain the
paper's 18 GB. A TT model is compared with the dense model of the same optimizer. Ids are Zipf-distributed
(zipf_clicks.py). `speed` leaves `dense-adamw` out unless `--row` names it, because both dense models together take 22
GB.

On the flights (click_tables.py), tables of the hashing trick and quotient-remainder tables have as many parameters as
the TT tables. Learning rates are chosen on a tenth of the training rows. A run reads the flights once, as is usual with
click logs: in a second pass (`--steps 1000`) dense tables memorize them. Runs are lines of
benchmarks/results/dlrm.jsonl; no run is repeated. `speed` writes dlrm-speed-cpu-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dated import RESULTS, dated, write
from interleaved import disturbed, ratio, take_turns
from resumable import (
    Grid,
    Ledger,
    Line,
    Spec,
    command_line,
    interval,
    side_by_side,
    spec_key,
    threads_a_job,
    verdict_on,
)
from small_models import printed, run_facts

Lines = dict[str, Line]
BATCH, BATCHES = 10_000, 4
STEPS_OF_MEMORY = 4
PAIRS = {"cores-sgd": "dense-sgd", "cores-adamw": "dense-adamw"}
"""TT rows, each with the dense row that it is compared with."""
DENSE_ADAMW_BYTES = 18 << 30
"""Free memory that `dense-adamw` needs."""
KINDS = ("dense", "cores", "hash", "qr", "uncrossed")
SEEDS = (1, 2, 3, 4, 5, 6, 7, 8)
STEPS, WIDTH, FLIGHTS_RANK = 475, 32, 16  # one pass over the flights
GRID = Grid([0.375e-3 * 2**power for power in range(-5, 8)], start=8)  # 12e-6 to 48e-3, starting at 3e-3


def memory_spec(row: str, options: argparse.Namespace, *, gives_back: bool) -> Spec:
    """Return the specification of one memory measurement."""
    settings = {"rank": options.rank, "shrink": options.shrink, "batch": options.batch}
    return {"measure": "memory", "row": row, "gives_back": gives_back, "evaluates": True, **settings}


def run_spec(kind: str, lr: float, seed: int, options: argparse.Namespace, *, dev: bool) -> Spec:
    """Return the specification of one training run on the flights."""
    settings = {"steps": options.steps, "every": options.every, "width": WIDTH, "rank": FLIGHTS_RANK}
    return {"kind": kind, "lr": lr, "seed": seed, "dev": dev, **settings}


def run_one(spec: Spec) -> Line:
    """Measure memory or train, in this process."""
    if spec.get("measure") == "memory":
        return memory_line(spec)
    import click_tables

    return click_tables.run_training(spec)


def memory_line(spec: Spec) -> Line:
    from click_models import Training, make_batches
    from own_process import peak_bytes

    began = time.time()
    batches = make_batches(BATCHES, spec["batch"], spec["shrink"])
    made = []

    def build() -> Any:
        made.append(Training(spec["row"], batches, rank=spec["rank"], shrink=spec["shrink"]))
        return made[0].step()

    small = make_batches(1, 8, shrink=10**7)
    warm = partial(
        lambda row: Training(row, small, rank=1, shrink=10**7).step()(), spec["row"].replace("cores", "dense")
    )
    measured = peak_bytes(
        build, warm=warm, steps=STEPS_OF_MEMORY, gives_back=spec["gives_back"], then=lambda: made[0].evaluate()
    )
    return {"key": spec_key(spec), **spec, **measured, **made[0].sizes(), **run_facts(began)}


def memory_specs(options: argparse.Namespace) -> Iterator[Spec]:
    from click_models import ROWS

    for row in options.row or ROWS:
        for gives_back in (True, False):
            yield memory_spec(row, options, gives_back=gives_back)


def fits(spec: Spec) -> bool:
    """Return True if there is enough free memory for a row; otherwise print why the row is left out."""
    if spec["row"] != "dense-adamw":
        return True
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    needed = DENSE_ADAMW_BYTES // spec["shrink"]
    if free < needed:
        print(f"dense-adamw is left out: {free / 2**30:.1f} GiB are free, it needs {needed / 2**30:.1f}")
    return free >= needed


def swept(lines: Lines, kind: str, options: argparse.Namespace) -> list[float | None]:
    """Return the dev-set loss of each learning rate with seed 0."""
    return GRID.results(lines, lambda rate: run_spec(kind, rate, 0, options, dev=True), "eval_loss")


def auc_specs(lines: Lines, options: argparse.Namespace) -> Iterator[Spec]:
    """Yield the runs of each kind of tables at its best rate."""
    for seed in SEEDS:
        for kind in options.row or KINDS:
            rate = GRID.best(swept(lines, kind, options))
            if rate is not None:
                yield run_spec(kind, rate, seed, options, dev=False)
            elif seed == SEEDS[0]:
                print(f"{kind}: its sweep has not ended")


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios of step times to the dense model's."""
    import torch
    from click_models import Training, make_batches

    torch.set_num_threads(options.threads or torch.get_num_threads())
    batches = make_batches(BATCHES, options.batch, options.shrink)
    names = [*dict.fromkeys(["dense-sgd", *(options.row or PAIRS)])]
    trainings = {name: Training(name, batches, rank=options.rank, shrink=options.shrink) for name in names}
    work = {name: training.step() for name, training in trainings.items()}
    work["dense-sgd again"] = work["dense-sgd"]
    times = take_turns(work, options.rounds, warmup=2)
    return {name: ratio(own, times["dense-sgd"]) for name, own in times.items()}


def write_speed(options: argparse.Namespace) -> None:
    settings = {"batch": options.batch, "rank": options.rank, "shrink": options.shrink}
    made = dated(__file__, settings=settings, rows=speed(options))
    report_speed(made)
    print(write(made, "dlrm-speed-cpu", options.times))


def report_size(options: argparse.Namespace) -> None:
    """Print the parameter counts of the dense and the TT model."""
    from click_models import build_model

    models = {
        row: build_model(row, rank=options.rank, shrink=options.shrink, device="meta") for row in ("dense", "cores")
    }
    numbers = {row: sum(param.numel() for param in model.parameters()) for row, model in models.items()}
    times = numbers["dense"] / numbers["cores"]
    print(
        f"dense {numbers['dense']:,} numbers, {4 * numbers['dense'] / 2**30:.3f} GiB; cores of rank {options.rank} "
        f"{numbers['cores']:,}, {4 * numbers['cores'] / 2**30:.3f} GiB: {times:.1f} times fewer "
        f"(aim 99: {_verdict(times >= 99)})"
    )


def report_memory(lines: Lines, options: argparse.Namespace) -> None:
    """Print the peak memory of each row, and the ratio of its dense row to it."""
    everything = argparse.Namespace(**{**vars(options), "row": None})
    found = {(spec["row"], spec["gives_back"]): lines.get(spec_key(spec)) for spec in memory_specs(everything)}
    for (row, gives_back), line in found.items():
        if line is None:
            continue
        peak = line["peak_above_base_bytes"]
        how = "held" if gives_back else "resident as it is"
        text = f"{row:12} peak {peak / 2**20:9.1f} MiB {how:18} {line['num_parameters']:,} numbers"
        other = found.get((PAIRS.get(row, ""), gives_back))
        if other is not None:
            less = other["peak_above_base_bytes"] / peak
            text += f"   {less:.2f} times less than {PAIRS[row]} (aim 7: {_verdict(less >= 7)})"
        print(text)


def report_speed(measured: Mapping[str, Any]) -> None:
    """Print step times relative to the dense model's; there is no aim, because the paper gives none."""
    rows = measured["rows"]
    if (refused := disturbed(rows["dense-sgd again"])) is not None:
        print(refused)
        return
    for row, times in rows.items():
        low, high = times["ratio_95"]
        print(f"{row:16} a step takes {times['ratio']:.3f} of dense-sgd's [{low:.3f}, {high:.3f}]")


def report_auc(lines: Lines, options: argparse.Namespace) -> None:
    """Print the AUC of each kind of tables, and its difference to dense, paired by seed."""
    print(f"flights, loss on the dev set by learning rate, seed 0\n{GRID.header()}")
    for kind in KINDS:
        print(GRID.row(kind, swept(lines, kind, options)))
    found: dict[str, dict[int, Line]] = {}
    for spec in auc_specs(lines, argparse.Namespace(**{**vars(options), "row": None})):
        line = lines.get(spec_key(spec))
        if line is not None and line["eval_loss"] is not None:
            found.setdefault(spec["kind"], {})[spec["seed"]] = line
    dense = found.get("dense", {})
    for kind, runs in found.items():
        mean, width = interval([line["auc"] for line in runs.values()])
        line = next(iter(runs.values()))
        entropy = sum(each["normalized_entropy"] for each in runs.values()) / len(runs)
        text = f"{kind:9} AUC {mean:.4f} ± {width:.4f} ({len(runs)} seeds), normalized entropy {entropy:.4f}"
        text += f", {line['table_numbers']:,} parameters in tables"
        shared = [line["auc"] - dense[seed]["auc"] for seed, line in runs.items() if seed in dense]
        if kind != "dense" and shared:
            mean, width = interval(shared)
            text += f"   minus dense {mean:+.4f} ± {width:.4f}"
            text += f" (aim -0.005: {verdict_on(mean, width, -0.005)})" if kind == "cores" else ""
        print(f"{text}, lr {line['lr']:g}")


def report(lines: Lines, options: argparse.Namespace) -> None:
    report_size(options)
    report_memory(lines, options)
    paths = [options.times] if options.times else sorted(RESULTS.glob("dlrm-speed-cpu-*.json"))[-1:]
    for path in paths:
        report_speed(json.loads(path.read_text()))
    report_auc(lines, options)


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def main() -> int:
    phases = ["size", "memory", "speed", "sweep", "auc", "report"]
    parser = command_line(__doc__, phases, RESULTS / "dlrm.jsonl")
    parser.add_argument("--row", action="append", help="only this row or kind; may be given several times")
    parser.add_argument("--rank", type=int, default=64, help="size, memory, speed: of the cores of tables")
    parser.add_argument("--batch", type=int, default=BATCH, help="memory, speed: rows of a batch")
    parser.add_argument("--shrink", type=int, default=1, help="size, memory, speed: so many times fewer table rows")
    parser.add_argument("--rounds", type=int, default=20, help="speed")
    parser.add_argument("--threads", type=int, help="speed")
    parser.add_argument("--steps", type=int, default=STEPS, help="sweep, auc: of a run")
    parser.add_argument("--every", type=int, default=1, help="sweep, auc: only each so-manieth flight")
    parser.add_argument("--times", type=Path, help="speed: file to write; report: to read, the newest by default")
    options = parser.parse_args()
    if options.phase == "one":
        printed(run_one(json.loads(options.spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__), threads_a_job(options.jobs))
    if options.phase == "report":
        report(ledger.lines(), options)
    elif options.phase == "size":
        report_size(options)
    elif options.phase == "speed":
        write_speed(options)
    elif options.phase == "memory":
        side_by_side(options.jobs, lambda spec: fits(spec) and ledger.run(spec), memory_specs(options))
    elif options.phase == "sweep":

        def sweep(kind: str) -> None:
            GRID.sweep(ledger, lambda rate: run_spec(kind, rate, 0, options, dev=True), "eval_loss")

        side_by_side(options.jobs, sweep, options.row or KINDS)
    else:
        side_by_side(options.jobs, ledger.run, list(auc_specs(ledger.lines(), options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
