"""Compare CoMERA's six-encoder transformer at width 768: dense, TT, TT at size targets, and with GaLore.

    pip install --no-deps --target DIR galore-torch bitsandbytes       and DIR on PYTHONPATH

    python benchmarks/six_encoder.py memory      peak memory, with an evaluation, each in its own process
    python benchmarks/six_encoder.py speed       time of a training step, interleaved
    python benchmarks/six_encoder.py report      everything against the aims, from the raw lines alone

Aims, with parameters counted by numel(): 44.9 times fewer parameters at the paper's first ranks; at target 0.2, 320
times fewer in TT layers and 80 times fewer in total; a step 3 times as fast as dense; at batch 1, 9 times less peak
training memory than GaLore and twice its speed. Accuracy is measured in intent_accuracy.py.

GaLore has a quarter of the width as its rank, as its authors train Llamas. Speed and memory are also measured at 30,
the rank of the TT layers. Memory is also measured, without an aim, for the authors' variant that steps each parameter
in the backward pass and frees its gradient. GaLore computes its SVD in the first step and then every 200 steps. `speed`
excludes the SVD from the step and reports a 200th of it separately; `memory` includes it.

In bf16 on a CPU and at large batches, most of a small model's step is work that the dense model has too: drawing
dropout masks, attention, and page faults, because glibc unmaps freed blocks of more than 32 MiB. `speed --dropout 0`
and `--keep-blocks` show the effect of the layers without dropout and page faults.

`memory` appends lines to benchmarks/results/six-encoder.jsonl; no run is repeated. `speed` writes
six-encoder-speed-DTYPE-batch-BATCHES-cpu-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from dated import RESULTS, dated, write
from interleaved import disturbed, ratio, take_turns
from own_process import keep_blocks
from resumable import Ledger, Line, Spec, command_line, side_by_side, spec_key, threads_a_job
from small_models import printed, run_facts

Lines = dict[str, Line]
ROUNDS = {1: 60, 32: 9, 128: 5}
"""Rounds of `speed`, by batch size."""
STEPS_OF_MEMORY = 3
SVD_EVERY = 200
DTYPES = ("float32", "bfloat16")
TIMED = ("dense", "galore", "galore-30", "cores", "cores-adapting", "cores-0.8", "cores-0.5", "cores-0.2")
TARGET_ROWS = ("cores-0.8", "cores-0.5", "cores-0.2", "cores-361x")
UNTRAINED = (
    "Ranks of the rows of size targets are those of untrained weights, brought down at once: numbers follow from the "
    "target, but trained ranks lie otherwise between the layers, and with them time and memory."
)
SIZE_AIMS = [("cores-adapting", 64.7, 44.9), ("cores-0.2", 320.0, 80.0), ("cores-361x", 361.0, 80.0)]
"""Aims: the factors by which parameters shrink in TT layers and in the whole model."""


def memory_spec(row: str, batch: int, *, gives_back: bool, layers: int, length: int) -> Spec:
    """Return the specification of one measurement at width 768."""
    shape = {"layers": layers, "length": length}
    return {"measure": "memory", "row": row, "batch": batch, "gives_back": gives_back, "evaluates": True, **shape}


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
    """Print sizes, memory and speed, each with its aim."""
    report_sizes(lines, options)
    for measured in times:
        report_speed(measured)


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
    parser = command_line(__doc__, ["memory", "speed", "report"], RESULTS / "six-encoder.jsonl")
    parser.add_argument("--row", action="append", help="only this row; may be given several times")
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
    if options.phase == "one":
        printed(memory_line(json.loads(options.spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__), threads_a_job(options.jobs))
    if options.phase == "report":
        report(ledger.lines(), newest_times(options.times), options)
    elif options.phase == "speed":
        write_speed(options)
    else:
        side_by_side(options.jobs, ledger.run, list(memory_specs(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
