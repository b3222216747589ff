"""Compare CoMERA's six-encoder transformer on sentence pairs: dense, TT, TT at size targets, and with GaLore.

    pip install --no-deps --target DIR galore-torch bitsandbytes       and DIR on PYTHONPATH

    python benchmarks/six_encoder.py sweep       width 256: one grid of learning rates per row, one seed
    python benchmarks/six_encoder.py seeds       dense, cores and target 0.2 at their best rate, seeds 1, 2 and 3; the
                                                 other rows seed 1; trivial baselines
    python benchmarks/six_encoder.py memory      width 768: peak memory, with an evaluation, each in its own process
    python benchmarks/six_encoder.py speed       width 768: time of a training step, interleaved
    python benchmarks/six_encoder.py report      everything against the aims, from the raw lines alone

Aims at width 768, with parameters counted by numel(): 44.9 times fewer parameters at the paper's first ranks; at target
0.2, 320 times fewer in TT layers and 80 times fewer in total; a step 3 times as fast as dense; at batch 1, 9 times less
peak training memory than GaLore and twice its speed. At width 256: accuracy within 1 point of dense.

Accuracy is measured at width 256, because a full-size epoch takes hours on two cores. The data are the pairs of
SCANTLING_DATA/nli, whose test sets share no premise with the training set. The ranks are the paper's there too, so the
layers, a third as wide, shrink less than in the paper. With a third of the ranks, a model learns nothing for so many
epochs that accuracies would be meaningless.

All runs take four epochs, under autocast to bf16 and with pairs of similar length in a batch. Learning rates are chosen
in runs of two epochs, because in runs of less than one a rate that is too high for TT layers looks best. The criterion
is the accuracy on held-out pairs, not the loss: in the second epoch the dense model begins to overfit, and its held-out
loss rises while its accuracy does not fall. Dense embeddings learn at the same rate in all rows. A size target takes
the rate of the TT model it starts from. Ranks are reduced in the third epoch, when a model has learned how important
they are.

GaLore has a quarter of the width as its rank, as its authors train Llamas. Speed and memory are also measured at 30,
the rank of the TT layers. Memory is also measured, without an aim, for the authors' variant that steps each parameter
in the backward pass and frees its gradient. GaLore computes its SVD in the first step and then every 200 steps. `speed`
excludes the SVD from the step and reports a 200th of it separately; `memory` includes it.

In bf16 on a CPU and at large batches, most of a small model's step is work that the dense model has too: drawing
dropout masks, attention, and page faults, because glibc unmaps freed blocks of more than 32 MiB. `speed --dropout 0`
and `--keep-blocks` show the effect of the layers without dropout and page faults.

Runs are lines of benchmarks/results/six-encoder.jsonl; no run is repeated, and an interrupted training resumes. `speed`
writes six-encoder-speed-DTYPE-batch-BATCHES-cpu-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from dated import RESULTS, dated, write
from encoder_accuracy import (
    COMPARED,
    EPOCHS,
    GRID,
    PAIRS_A_BATCH,
    ROWS,
    SEEDS,
    STARTS,
    SWEEP_STEPS,
    TESTS,
    TRAINING_PAIRS,
    heldout_error,
    run_spec,
    run_training,
    swept,
    swept_row,
    trivial_line,
    trivial_spec,
)
from interleaved import disturbed, ratio, take_turns
from own_process import keep_blocks
from resumable import Ledger, Line, Spec, command_line, interval, side_by_side, spec_key, threads_a_job, verdict_on
from small_models import printed, run_facts

Lines = dict[str, Line]
ROUNDS = {1: 60, 32: 9, 128: 5}
"""Rounds of `speed`, by batch size."""
STEPS_OF_MEMORY = 3
SVD_EVERY = 200
DTYPES = ("float32", "bfloat16")
TIMED = ("dense", "galore", "galore-30", "cores", "cores-adapting", "cores-0.8", "cores-0.5", "cores-0.2")
BOTH = "both"
TARGET_ROWS = ("cores-0.8", "cores-0.5", "cores-0.2", "cores-361x")
UNTRAINED = (
    "Ranks of the rows of size targets are those of untrained weights, brought down at once: numbers follow from the "
    "target, but trained ranks lie otherwise between the layers, and with them time and memory. Accuracy is of other "
    "models, trained at width 256."
)
SIZE_AIMS = [("cores-adapting", 64.7, 44.9), ("cores-0.2", 320.0, 80.0), ("cores-361x", 361.0, 80.0)]
"""Aims: the factors by which parameters shrink in TT layers and in the whole model."""


def memory_spec(row: str, batch: int, *, gives_back: bool, layers: int, length: int) -> Spec:
    """Return the specification of one measurement at width 768."""
    shape = {"layers": layers, "length": length}
    return {"measure": "memory", "row": row, "batch": batch, "gives_back": gives_back, "evaluates": True, **shape}


def run_one(spec: Spec) -> Line:
    """Train, measure memory, or evaluate trivial baselines, in this process."""
    measures = {"memory": memory_line, "trivial": trivial_line}
    return measures.get(spec.get("measure", ""), run_training)(spec)


def memory_line(spec: Spec) -> Line:
    """Measure the peak memory of training steps at width 768 in this process."""
    from encoder_models import Shape, Training, warm_up
    from own_process import peak_bytes

    began = time.time()
    made = []

    def build() -> Any:
        made.append(Training(spec["row"], Shape(spec["layers"], spec["length"])))
        return made[0].step(spec["batch"])

    warm = partial(warm_up, spec["row"])
    measured = peak_bytes(
        build,
        warm=warm,
        steps=STEPS_OF_MEMORY,
        gives_back=spec["gives_back"],
        then=lambda: made[0].evaluate(spec["batch"]),
    )
    return {"key": spec_key(spec), **spec, **measured, **made[0].sizes(), **run_facts(began)}


def memory_specs(options: argparse.Namespace) -> Iterator[Spec]:
    """Yield each row with a `malloc` that returns freed blocks and, at batch 1 for the aim, with glibc's defaults."""
    from encoder_models import CONFIGURATIONS

    for batch in options.batches:
        for row in options.row or CONFIGURATIONS:
            for gives_back in (True, False) if batch == 1 else (True,):
                yield memory_spec(row, batch, gives_back=gives_back, layers=options.layers, length=options.length)


def seed_specs(lines: Lines, options: argparse.Namespace) -> Iterator[Spec]:
    """Yield each row at its best rate, and the trivial baselines."""
    yield from map(trivial_spec, TESTS)
    for seed in SEEDS:
        for row in options.row or (ROWS if seed == SEEDS[0] else COMPARED):
            rate = GRID.best(swept(lines, swept_row(row), options.sweep_steps))
            if rate is not None:
                yield run_spec(row, rate, seed, options.steps, dev=False)
            elif seed == SEEDS[0]:
                print(f"{row}: its rate is that of {swept_row(row)}, whose sweep has not ended")


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios of step times to the dense model's, for each batch size."""
    import torch
    from encoder_models import GALORE_RANKS, Shape, Training

    if options.keep_blocks:
        keep_blocks()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    shape = Shape(options.layers, options.length, options.dropout)
    names = [*dict.fromkeys(["dense", *(options.row or TIMED)])]
    trainings = {name: Training(name, shape, options.dtype) for name in names}
    rows: dict[str, Any] = {}
    first: dict[str, float] = {}
    svd_s: dict[str, float] = {}
    for batch in options.batches:
        steps = {name: training.step(batch) for name, training in trainings.items()}
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            first.setdefault(name, time.perf_counter() - began)
        steps["dense again"] = steps["dense"]
        times = take_turns(steps, options.rounds or ROUNDS.get(batch, 5), warmup=1)
        found = {name: ratio(own, times["dense"]) for name, own in times.items()}
        for name in GALORE_RANKS:
            # the SVD is in the first step of the first batch size, and its time is independent of the batch
            if name in times:
                svd_s.setdefault(name, first[name] - float(np.median(times[name])))
        rows[str(batch)] = {name: {**row, "svd_s": svd_s.get(name)} for name, row in found.items()}
        for name, row in found.items():
            low, high = row["ratio_95"]
            print(f"batch {batch:<4} {name:16} {row['ratio']:6.3f} of dense [{low:.3f}, {high:.3f}]", flush=True)
    given = {name: getattr(options, name) for name in ("dtype", "layers", "length", "dropout", "keep_blocks")}
    return {**given, "batches": rows}


def write_speed(options: argparse.Namespace) -> None:
    from encoder_models import FULL

    made = dated(__file__, **speed(options))
    batches = "-".join(map(str, options.batches))
    varied = f"-dropout-{options.dropout:g}" * (options.dropout != FULL.dropout) + "-kept" * options.keep_blocks
    print(write(made, f"six-encoder-speed-{options.dtype}-batch-{batches}{varied}-cpu", options.times))


def report(lines: Lines, times: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Print accuracies, sizes, memory and speed, each with its aim."""
    report_accuracy(lines, options.steps, options.sweep_steps)
    report_sizes(lines, options)
    for measured in times:
        report_speed(measured)


def report_accuracy(lines: Lines, steps: int, sweep_steps: int) -> None:
    print(f"width 256, error on held-out training pairs by learning rate after {sweep_steps} steps, seed 0")
    print(GRID.header())
    for row in dict.fromkeys(map(swept_row, ROWS)):
        print(GRID.row(row, swept(lines, row, sweep_steps)))
    found: dict[str, dict[int, Line]] = {}
    for row in ROWS:
        rate = GRID.best(swept(lines, swept_row(row), sweep_steps))
        for seed in SEEDS if rate is not None else ():
            line = lines.get(spec_key(run_spec(row, rate, seed, steps, dev=False)))
            if line is not None and "tests" in line:
                pairs = line["pairs"]
                pooled = sum(line["tests"][test] * pairs[test] for test in TESTS) / sum(pairs.values())
                found.setdefault(row, {})[seed] = {**line, "tests": {**line["tests"], BOTH: pooled}}
    for test in (*TESTS, BOTH):
        trivial = lines.get(spec_key(trivial_spec(test))) if test in TESTS else None
        print(f"\naccuracy on {test}, {steps} steps")
        if trivial is not None:
            figures = (f"{name}_accuracy" for name in ("majority", "hypothesis_only"))
            print("majority {:.2f} %, hypothesis alone {:.2f} %".format(*(100 * trivial[each] for each in figures)))
        for row, runs in found.items():
            _accuracy_row(test, row, runs, found.get("dense", {}))
    print(f"\n{TESTS[-1]} after each pass, % right, mean over the seeds")
    for row, runs in found.items():
        by_pass = 100 * np.mean([[right for _, right in line["accuracy"]] for line in runs.values()], axis=0)
        print(f"{row:12} " + " ".join(f"{right:6.2f}" for right in by_pass))


def _accuracy_row(test: str, row: str, runs: Mapping[int, Line], dense: Mapping[int, Line]) -> None:
    mean, width = interval([100 * line["tests"][test] for line in runs.values()])
    line = next(iter(runs.values()))
    text = f"{row:12} {mean:6.2f} ± {width:.2f} % ({len(runs)} seeds)"
    shared = [100 * (runs[seed]["tests"][test] - dense[seed]["tests"][test]) for seed in runs if seed in dense]
    if row != "dense" and shared:
        mean, width = interval(shared)
        text += f"   minus dense {mean:+.2f} ± {width:.2f}"
        text += f" (aim -1: {verdict_on(mean, width, -1.0)})" if row.startswith("cores") else ""
    ratio = f", its layers / {line['dense_numbers'] / line['core_numbers']:.1f}" if line["core_numbers"] else ""
    state = line["training_state_bytes"] / 2**20
    rate = line["optim"]["lr"]
    print(f"{text}   {line['num_parameters']:,} parameters{ratio}, state {state:.1f} MiB, lr {rate:g}")


def report_sizes(lines: Lines, options: argparse.Namespace) -> None:
    """Print parameters and peak memory at width 768."""
    from encoder_models import CONFIGURATIONS, DENSE_PART, GALORE_RANKS

    for batch in options.batches:
        found: dict[str, dict[bool, Line]] = {}
        for spec in memory_specs(argparse.Namespace(**{**vars(options), "batches": [batch], "row": CONFIGURATIONS})):
            line = lines.get(spec_key(spec))
            if line is not None:
                found.setdefault(spec["row"], {})[spec["gives_back"]] = line
        if not found:
            continue
        print(f"\nwidth 768, batch {batch}: peak of a training step above the memory before it, MiB")
        dense = found.get("dense", {}).get(True)
        galore = {r: found[r][True]["peak_above_base_bytes"] for r in GALORE_RANKS if True in found.get(r, {})}
        per_layer = galore.pop("galore-per-layer", None)
        for row, by_malloc in found.items():
            peaks = {freed: line["peak_above_base_bytes"] for freed, line in by_malloc.items()}
            line = next(iter(by_malloc.values()))
            text = f"{row:15}" + "".join(
                f" {peaks[freed] / 2**20:8.1f} {what}"
                for freed, what in ((True, "held"), (False, "resident as it is"))
                if freed in peaks
            )
            text += f", state {line['training_state_bytes'] / 2**20:.1f}, {line['num_parameters']:,} parameters"
            if row.startswith("cores"):
                if dense is not None and True in peaks:
                    text += f"   dense takes {dense['peak_above_base_bytes'] / peaks[True]:.2f} times as much"
                if galore and True in peaks:
                    less = min(galore.values()) / peaks[True]
                    text += f", GaLore {less:.2f} times" + (f" (aim 9: {_verdict(less >= 9)})" if batch == 1 else "")
                if per_layer is not None and True in peaks:
                    text += f", layer by layer {per_layer / peaks[True]:.2f} times"
            print(text)
        if any(row in TARGET_ROWS for row in found):
            print(UNTRAINED)
        if dense is not None and batch == options.batches[0] and options.layers == 6:
            for row, part_aim, whole_aim in SIZE_AIMS:
                if row in found:
                    line = next(iter(found[row].values()))
                    part = DENSE_PART / line["core_numbers"]
                    whole = dense["num_parameters"] / line["num_parameters"]
                    print(
                        f"{row:15} {part:.1f} times fewer parameters in its layers (aim {part_aim:g}: "
                        f"{_verdict(part >= part_aim)}), {whole:.2f} in all (aim {whole_aim:g}: "
                        f"{_verdict(whole >= whole_aim)})"
                    )


def report_speed(measured: Mapping[str, Any]) -> None:
    """Print the speed-ups of a step over dense and over GaLore."""
    from encoder_models import FULL, GALORE_RANKS

    for batch, rows in measured["batches"].items():
        varied = "" if measured.get("dropout", FULL.dropout) == FULL.dropout else f", dropout {measured['dropout']:g}"
        varied += ", freed blocks kept" if measured.get("keep_blocks") else ""
        print(f"\nwidth 768, {measured['dtype']}, batch {batch}{varied}: speed of a training step, dense is 1")
        if (refused := disturbed(rows["dense again"])) is not None:
            print(refused)
            continue
        galore = [rows[row]["ratio"] for row in GALORE_RANKS if row in rows]
        for row, times in rows.items():
            faster = 1.0 / times["ratio"]
            low, high = sorted(1.0 / bound for bound in times["ratio_95"])
            text = f"{row:15} {faster:6.2f} [{low:.2f}, {high:.2f}]"
            if row in GALORE_RANKS:
                extra = times["svd_s"] / SVD_EVERY / np.median(times["raw_s"])
                text += f"   with its share of the SVD {faster / (1 + extra):.2f}"
            if row.startswith("cores"):
                text += f" (aim 3: {_verdict(faster >= 3)})"
                if galore:
                    over = min(galore) / times["ratio"]
                    text += f", {over:.2f} times GaLore" + (f" (aim 2: {_verdict(over >= 2)})" if batch == "1" else "")
            print(text)
        if any(row in TARGET_ROWS for row in rows):
            print(UNTRAINED)


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def newest_times(path: Path | None) -> list[Any]:
    """Return the given file, or the newest file for each dtype and set of batch sizes."""
    found: dict[str, Path] = {}
    for each in [path] if path is not None else sorted(RESULTS.glob("six-encoder-speed-*.json")):
        found[each.stem[: -len("-2026-01-01")]] = each
    return [json.loads(each.read_text()) for each in found.values()]


def main() -> int:
    parser = command_line(__doc__, ["sweep", "seeds", "memory", "speed", "report"], RESULTS / "six-encoder.jsonl")
    parser.add_argument("--row", action="append", help="only this row; may be given several times")
    parser.add_argument("--epochs", type=float, default=EPOCHS, help="seeds: of a run")
    parser.add_argument("--sweep-steps", type=int, default=SWEEP_STEPS, help="sweep: steps of a run")
    parser.add_argument("--batches", type=int, nargs="+", default=list(ROUNDS), help="memory, speed: batch sizes")
    parser.add_argument("--rounds", type=int, help="speed: of each batch size")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="speed: or autocast")
    parser.add_argument("--dropout", type=float, default=0.1, help="speed")
    parser.add_argument("--keep-blocks", action="store_true", help="speed: malloc unmaps no large block that is freed")
    parser.add_argument("--threads", type=int, help="speed")
    parser.add_argument("--layers", type=int, default=6, help="memory, speed: fewer, for a quick look")
    parser.add_argument("--length", type=int, default=128, help="memory, speed: tokens, fewer for a quick look")
    parser.add_argument("--times", type=Path, help="speed: file to write; report: to read, the newest by default")
    options = parser.parse_args()
    options.steps = max(1, round(options.epochs * TRAINING_PAIRS / PAIRS_A_BATCH))
    if options.phase == "one":
        printed(run_one(json.loads(options.spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__), threads_a_job(options.jobs))
    if options.phase == "report":
        report(ledger.lines(), newest_times(options.times), options)
    elif options.phase == "speed":
        write_speed(options)
    elif options.phase == "sweep":
        rows = [*dict.fromkeys(map(swept_row, options.row or ROWS))]

        def sweep(row: str) -> None:
            grid = replace(GRID, start=STARTS.get(row, GRID.start))
            grid.sweep(ledger, lambda rate: run_spec(row, rate, 0, options.sweep_steps, dev=True), heldout_error)

        side_by_side(options.jobs, sweep, rows)
    else:
        runs = memory_specs(options) if options.phase == "memory" else seed_specs(ledger.lines(), options)
        side_by_side(options.jobs, ledger.run, list(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
