"""Compare the quality of CAME, AdamW and others on small decoders and real text, at 20 tokens per parameter.

    python benchmarks/optim_quality.py sweep            one grid of learning rates for every optimizer, one seed
    python benchmarks/optim_quality.py short            the same grid on a quarter of the tokens
    python benchmarks/optim_quality.py finalists        the same for the finalists, with fp32 moments; another seed for
                                                        the two best rates
    python benchmarks/optim_quality.py seeds            the finalists at their best rate, 8 seeds, the same data order
    python benchmarks/optim_quality.py ablations        confidence, clip, betas, rounding of int4: on fewer tokens
    python benchmarks/optim_quality.py variants         other betas, clipping and weight decay, on all tokens, one seed
    python benchmarks/optim_quality.py batch            batches of 8, 32 and 128 sequences, a quarter of the tokens, and
                                                        then, at 128, three more seeds of each at its best rate
    python benchmarks/optim_quality.py longer           3 million parameters, nearly an hour per run, one grid of rates,
                                                        with held-out curves
    python benchmarks/optim_quality.py report           the results, from the raw lines alone

A sweep goes outwards from one rate of the grid until the best rate has a worse one on either side. The first rate is
the same for all optimizers but those in STARTS. Every run is one line of benchmarks/results/optim-quality.jsonl with
its recipe, losses and date, and is not repeated. So you can stop at any time and start again (`longer` also resumes an
interrupted run). `--jobs 2` runs two at once with one thread each. The data is the Python standard library (`--data
python`) or English novels from SCANTLING_DATA (`--data novels`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from dated import RESULTS
from resumable import Grid, Ledger, Line, Spec, command_line, interval, side_by_side, spec_key, threads_a_job
from small_models import OPTIMIZERS, ROOT, printed, text, train_line

MODEL = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
LONGER_MODEL = {**MODEL, "hidden_size": 256, "intermediate_size": 688}
TOKENS = 20 * 492_384  # 20 tokens per parameter of MODEL
LONGER_TOKENS = 10_000_000
SEQ_LEN, BATCH = 128, 32
GRID = Grid([0.125e-3 * 2**power for power in range(-2, 13)], start=7)
STARTS = {"came-reference": 5, "adafactor-momentum": 11, "scale-like": 6, "apollo-mini": 8, "lamb": 10}
"""Grid index at which a sweep starts, for optimizers whose learning rate has a different scale."""
SWEPT = ("adamw", "plain", "came", "came-reference", "adafactor-momentum", "muon", "scale-like", "apollo-mini")
SLOWER = ("came-slow", "adamw-slow")
"""Optimizers with a slower average of the second moment, tried at one rate."""
SEEDS = range(1, 9)
_SLOWER = {"confidence": False, "betas": [0.9, 0.98, 0.995]}
FINALISTS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {"betas": [0.9, 0.98]}),
    "no confidence": ("came", _SLOWER),
    "no confidence, int8": ("came", {**_SLOWER, "momentum": "int8"}),
    "no confidence, int4": ("came", {**_SLOWER, "momentum": "int4"}),
    "no confidence, full second moment": ("came", {**_SLOWER, "name": "cameunfactored"}),
    "came": ("came", {}),
}
"""The best variants with seed 0, which is not among SEEDS.

AdamW and CAME have a slower second moment than in the sweep, and CAME has no confidence. The full second moment shows
the effect of factoring. `came` is CAME with its confidence, as swept.
"""
FORMS = ("adamw", "no confidence", "came")
"""The finalists with fp32 moments; the other finalists take their rates."""
TUNING_SEEDS = (0, 9)
"""Seeds of the sweeps, not among SEEDS. On Python source, one seed cannot separate two neighboring rates."""
LONGER = ("adamw", "plain-int8")
Lines = dict[str, Line]
ABLATION_TOKENS = TOKENS // 4
ABLATION_SHARES = (0.5, 1.0)
"""Fractions of the best rate, which is too high for so few steps.

At the full rate (seed 0, novels), runs that differ only in rounding end up to 0.1 nats apart, and AdamW ends at 3.59
instead of 2.93. New runs take the first fraction.
"""
BATCHES = (0.25, 1, 4)
"""Batch sizes of the phase `batch`, as multiples of BATCH: 2404, 601 and 150 steps at equal tokens."""
LARGE_BATCH = ("adamw", "came-reference", "came", "plain", "lamb")
BATCH_SEEDS = range(1, 4)
"""Seeds at the largest batch."""
ABLATIONS: dict[str, dict[str, Any]] = {
    "came": {},
    "betas (0.9, 0.999, 0.9999)": {"optim": {"betas": [0.9, 0.999, 0.9999]}},
    "betas (0.9, 0.99, 0.999)": {"optim": {"betas": [0.9, 0.99, 0.999]}},
    "no confidence": {"optim": {"confidence": False}},
    "no debias": {"optim": {"debias": False}},
    "no debias, half the rate": {"optim": {"debias": False}, "share": 0.5},
    "no clip at all": {"optim": {"clip_threshold": 1e9}, "clip": None},
    "update clip alone": {"clip": None},
    "gradient norm alone": {"optim": {"clip_threshold": 1e9}},
    "int4": {"optim": {"momentum": "int4"}},
    "int4, to the nearest": {"optim": {"name": "camenearest", "momentum": "int4"}},
    "adamw": {"optimizer": "adamw"},
}
ABLATION_SEEDS = range(3)
VARIANTS: dict[str, dict[str, Any]] = {
    "betas (0.9, 0.95, 0.95)": {"betas": [0.9, 0.95, 0.95]},
    "weight decay 0.2": {"weight_decay": 0.2},
    "betas (0.9, 0.9, 0.95)": {"betas": [0.9, 0.9, 0.95]},
    "no confidence": {"confidence": False},
    "no confidence, no update clip": {"confidence": False, "clip_threshold": 1e9},
    "no confidence, weight decay 0.05": {"confidence": False, "weight_decay": 0.05},
    "no confidence, beta2 0.98": _SLOWER,
    "no confidence, beta2 0.98, no update clip": {**_SLOWER, "clip_threshold": 1e9},
    "no confidence, beta2 0.99": {"confidence": False, "betas": [0.9, 0.99, 0.995]},
    "no confidence, beta1 0.95": {"confidence": False, "betas": [0.95, 0.95, 0.995]},
}
"""Variants of CAME."""
ADAMW_VARIANTS: dict[str, dict[str, Any]] = {
    "adamw, beta2 0.98": {"betas": [0.9, 0.98]},
    "adamw, beta2 0.99": {"betas": [0.9, 0.99]},
    "adamw, beta2 0.98, weight decay 0.05": {"betas": [0.9, 0.98], "weight_decay": 0.05},
    "adamw, beta2 0.98, weight decay 0.2": {"betas": [0.9, 0.98], "weight_decay": 0.2},
    "adamw, betas (0.95, 0.98)": {"betas": [0.95, 0.98]},
}
"""Variants of AdamW that match those of CAME."""


def run_spec(data: str, optimizer: str, lr: float, seed: int, **changes: Any) -> Spec:
    """Return one run as plain values; their hash decides whether it has already been run."""
    optim = {"weight_decay": 0.1, **OPTIMIZERS[optimizer], "lr": lr, **changes}
    return {"data": data, "optimizer": optimizer, "optim": optim, "seed": seed, "batch": 1, "tokens": TOKENS}


def batch_spec(data: str, optimizer: str, lr: float, batch: float, seed: int = 0) -> Spec:
    """Return one run of the phase `batch`."""
    return {**run_spec(data, optimizer, lr, seed), "batch": batch, "tokens": ABLATION_TOKENS}


def sweep(ledger: Ledger, optimizer: str, make_spec: Callable[[float], Spec]) -> None:
    """Sweep an optimizer over the grid."""
    replace(GRID, start=STARTS.get(optimizer, GRID.start)).sweep(ledger, make_spec, "eval_loss")


def batch_results(lines: Lines, data: str, batch: float, optimizer: str) -> list[float | None]:
    """Return the held-out loss of each learning rate with a batch size, seed 0."""
    return GRID.results(lines, lambda rate: batch_spec(data, optimizer, rate, batch), "eval_loss")


def batch_finalist(lines: Lines, data: str, batch: float, optimizer: str, seed: int) -> Spec | None:
    """Return the run at the best rate with a batch size, or None if its sweep has not ended."""
    rate = GRID.best(batch_results(lines, data, batch, optimizer))
    return None if rate is None else batch_spec(data, optimizer, rate, batch, seed)


def ablation_spec(data: str, change: str, lr: float, seed: int) -> Spec:
    """Return one run of the phase `ablations`: CAME with one change, on a quarter of the tokens."""
    changed = ABLATIONS[change]
    spec = run_spec(data, changed.get("optimizer", "came"), lr, seed, **changed.get("optim", {}))
    clip = {"clip": changed["clip"]} if "clip" in changed else {}
    return {**spec, **clip, "tokens": ABLATION_TOKENS}


def longer_spec(data: str, optimizer: str, lr: float) -> Spec:
    """Return one run of the phase `longer`."""
    return {**run_spec(data, optimizer, lr, 0), "tokens": LONGER_TOKENS, "model": LONGER_MODEL}


def longer_results(lines: Lines, data: str, optimizer: str) -> list[float | None]:
    """Return the held-out loss of each learning rate in the phase `longer`."""
    return GRID.results(lines, lambda rate: longer_spec(data, optimizer, rate), "eval_loss")


def ablation_rate(lines: Lines, data: str, change: str, share: float = ABLATION_SHARES[0]) -> float:
    """Return the learning rate of a run of the phase `ablations`."""
    changed = ABLATIONS[change]
    return changed.get("share", 1.0) * share * best_rate(lines, data, changed.get("optimizer", "came"))


def build_recipe(spec: Spec) -> dict[str, Any]:
    batch = round(BATCH * spec["batch"])
    steps = spec["tokens"] // (batch * SEQ_LEN)
    train: dict[str, Any] = {
        "steps": steps,
        "batch_size": batch,
        "micro_batch_size": min(BATCH, batch),
        "warmup": 0.05,
        "eval_samples": 2000,
        "seed": spec["seed"],
        "device": "cpu",
    }
    if "clip" in spec:
        train["clip"] = spec["clip"]
    if "model" in spec:
        train |= {"eval_every": max(1, steps // 20), "eval_samples": 500, "checkpoint_every": max(1, steps // 20)}
    return {
        "name": "quality",
        "model": {"preset": "llama-1m", "overrides": spec.get("model", MODEL)},
        "data": {**text(spec["data"]), "tokenizer": {"bpe": 512}, "seq_len": SEQ_LEN},
        "optim": spec["optim"],
        "train": train,
    }


def sweep_results(lines: Lines, data: str, optimizer: str) -> list[float | None]:
    """Return the held-out loss of each learning rate with seed 0."""
    return GRID.results(lines, lambda rate: run_spec(data, optimizer, rate, 0), "eval_loss")


def best_rate(lines: Lines, data: str, optimizer: str) -> float:
    """Return the learning rate of the finished sweep with the lowest held-out loss."""
    rate = GRID.best(sweep_results(lines, data, optimizer.removesuffix("-int8").removesuffix("-int4")))
    if rate is None:
        raise SystemExit(f"run the sweep of {optimizer} on {data} first")
    return rate


def variant_spec(lines: Lines, data: str, change: str, seed: int) -> Spec:
    """Return one run of the phase `variants`; plain AdamW for an unknown change."""
    if change in VARIANTS:
        return run_spec(data, "came", best_rate(lines, data, "came"), seed, **VARIANTS[change])
    return run_spec(data, "adamw", best_rate(lines, data, "adamw"), seed, **ADAMW_VARIANTS.get(change, {}))


def finalist_spec(data: str, form: str, lr: float, seed: int = TUNING_SEEDS[0]) -> Spec:
    """Return one run of a finalist in the phase `finalists`."""
    optimizer, changes = FINALISTS[form]
    return run_spec(data, optimizer, lr, seed, **changes)


def finalist_results(lines: Lines, data: str, form: str, seed: int = TUNING_SEEDS[0]) -> list[float | None]:
    """Return the held-out loss of each learning rate of a finalist."""
    return GRID.results(lines, lambda rate: finalist_spec(data, form, rate, seed), "eval_loss")


def best_two(lines: Lines, data: str, form: str) -> list[float]:
    """Return the two best rates of a finalist's sweep, the better one first; [] if the sweep has not ended."""
    found = finalist_results(lines, data, form)
    if GRID.best(found) is None:
        return []
    return [rate for _, rate in sorted((loss, rate) for loss, rate in zip(found, GRID.rates, strict=True) if loss)[:2]]


def finalist_rate(lines: Lines, data: str, form: str) -> float | None:
    """Return the better of a finalist's two best rates by mean loss over the tuning seeds; None if a run is missing."""
    means = []
    for rate in best_two(lines, data, form):
        runs = [lines.get(spec_key(finalist_spec(data, form, rate, seed))) for seed in TUNING_SEEDS]
        losses = [run["eval_loss"] for run in runs if run is not None]
        if len(losses) < len(runs):
            return None
        means.append((float("inf") if None in losses else sum(losses), rate))
    return min(means)[1] if means else None


def seed_spec(lines: Lines, data: str, finalist: str, seed: int) -> Spec:
    """Return one run of the phase `seeds`, at the best rate of the finalist's or else its optimizer's sweep."""
    own = finalist_rate(lines, data, finalist.split(",")[0])
    return finalist_spec(data, finalist, own or best_rate(lines, data, FINALISTS[finalist][0]), seed)


def specs(phase: str, lines: Lines, data: str, names: Sequence[str] = tuple(FINALISTS)) -> Iterator[Spec]:
    """Yield the runs of a phase that do not depend on each other's results; in `seeds`, of these finalists."""
    if phase == "seeds":
        yield from (seed_spec(lines, data, name, seed) for seed in SEEDS for name in names)
    elif phase == "variants":
        yield from (variant_spec(lines, data, change, 0) for change in (*ADAMW_VARIANTS, *VARIANTS))
    elif phase == "ablations":
        for seed in ABLATION_SEEDS:
            for change in ABLATIONS:
                yield ablation_spec(data, change, ablation_rate(lines, data, change), seed)


def run_one(spec: Spec) -> Line:
    """Train in this process and return the result line."""
    run_dir = ROOT / "runs" / f"optim-quality-{spec_key(spec)}" if "model" in spec else None
    return train_line(spec, build_recipe(spec), run_dir=run_dir)


def report(lines: Lines, data: str) -> None:
    """Print tables: the sweep, differences to AdamW paired by seed, and the longer runs."""
    print(f"{data}: held-out nats a token by learning rate, seed 0\n{GRID.header()}")
    for name in (*SWEPT, *SLOWER):
        print(GRID.row(name, sweep_results(lines, data, name)))
    for name in SWEPT:
        found = batch_results(lines, data, 1, name)
        if any(loss is not None for loss in found):
            print(GRID.row(f"{name}, a quarter", found))
    for form, seed in product(FORMS, TUNING_SEEDS):
        print(GRID.row(f"{form}, seed {seed}", finalist_results(lines, data, form, seed)))
    for name in LONGER:
        if any(loss is not None for loss in longer_results(lines, data, name)):
            print(GRID.row(f"longer, {name}", longer_results(lines, data, name)))
    for line in lines.values():
        if "model" in line and line["data"] == data and line["eval_loss"] is not None:
            curve = " ".join(f"{loss:.3f}" for _, loss in line["heldout"])
            size = f"{line['num_parameters'] / 1e6:.1f} M parameters, {line['tokens'] / 1e6:.0f} M tokens"
            print(f"longer, {size}, {line['optimizer']} at {line['optim']['lr']:g}: {curve}")
    for batch, name in product(BATCHES, LARGE_BATCH):
        found = batch_results(lines, data, batch, name)
        if any(loss is not None for loss in found):
            print(GRID.row(f"{name} x{batch:g}", found))
    for name in LARGE_BATCH[1:]:
        make_spec = partial(batch_finalist, lines, data, BATCHES[-1])
        differences(lines, name, LARGE_BATCH[0], make_spec, BATCH_SEEDS, told=f"{name} x{BATCHES[-1]:g}")
    if None in (GRID.best(sweep_results(lines, data, name)) for name in ("adamw", "came")):
        return

    def ablation(share: float, change: str, seed: int) -> Spec:
        return ablation_spec(data, change, ablation_rate(lines, data, change, share), seed)

    for name in list(FINALISTS)[1:]:
        differences(lines, name, "adamw", partial(seed_spec, lines, data), SEEDS)
    print("variants, all tokens")
    for change in (*VARIANTS, *ADAMW_VARIANTS):
        differences(lines, change, "adamw", partial(variant_spec, lines, data), range(1))
    for share in ABLATION_SHARES:
        print(f"ablations, {ABLATION_TOKENS / 1e6:.1f} M tokens, at {share:g} of the best rate")
        for change in list(ABLATIONS)[1:]:
            differences(lines, change, "came", partial(ablation, share), ABLATION_SEEDS)


def differences(
    lines: Lines,
    name: str,
    base: str,
    make_spec: Callable[[str, int], Spec | None],
    seeds: range,
    *,
    told: str | None = None,
) -> None:
    """Return a line with the held-out loss difference of two kinds of run, paired by seed."""
    pairs, what = [], told or name
    for seed in seeds:
        specs = make_spec(name, seed), make_spec(base, seed)
        ours, theirs = (None if spec is None else lines.get(spec_key(spec)) for spec in specs)
        if ours is not None and theirs is not None:
            if ours["eval_loss"] is None or theirs["eval_loss"] is None:
                failed = ours if ours["eval_loss"] is None else theirs
                print(f"{what:33} failed at seed {seed}: {failed['failure']}")
                return
            pairs.append(ours["eval_loss"] - theirs["eval_loss"])
    if pairs:
        mean, width = interval(pairs)
        print(f"{what:33} - {base}: {mean:+.4f} [{mean - width:+.4f}, {mean + width:+.4f}] over {len(pairs)} seeds")


def main() -> int:
    phases = ["sweep", "short", "finalists", "seeds", "ablations", "variants", "batch", "longer", "report"]
    parser: argparse.ArgumentParser = command_line(__doc__, phases, RESULTS / "optim-quality.jsonl")
    parser.add_argument("--data", choices=["python", "novels"], default="python")
    parser.add_argument("--only", nargs="*", help="sweep, short and seeds: these optimizers")
    options = parser.parse_args()
    if options.phase == "one":
        printed(run_one(json.loads(options.spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__), threads_a_job(options.jobs))
    lines, data = ledger.lines(), options.data
    if options.phase == "report":
        report(lines, data)
    elif options.phase in ("sweep", "short"):
        names = [name for name in SWEPT if options.only is None or name in options.only]

        def make_spec(name: str, rate: float) -> Spec:
            return run_spec(data, name, rate, 0) if options.phase == "sweep" else batch_spec(data, name, rate, 1)

        side_by_side(options.jobs, lambda name: sweep(ledger, name, partial(make_spec, name)), names)
    elif options.phase == "finalists":

        def tune(form: str) -> None:
            GRID.sweep(ledger, lambda rate: finalist_spec(data, form, rate), "eval_loss")
            for rate in best_two(ledger.lines(), data, form):
                ledger.run(finalist_spec(data, form, rate, TUNING_SEEDS[-1]))

        side_by_side(options.jobs, tune, FORMS)
    elif options.phase == "batch":
        side_by_side(
            options.jobs,
            lambda pair: sweep(ledger, pair[1], lambda rate: batch_spec(data, pair[1], rate, pair[0])),
            product(BATCHES, LARGE_BATCH),
        )
        lines = ledger.lines()
        finalists = [
            batch_finalist(lines, data, BATCHES[-1], name, seed) for seed, name in product(BATCH_SEEDS, LARGE_BATCH)
        ]
        side_by_side(options.jobs, ledger.run, [spec for spec in finalists if spec is not None])
    elif options.phase == "longer":
        side_by_side(
            options.jobs,
            lambda name: sweep(ledger, name, lambda rate: longer_spec(data, name, rate)),
            LONGER,
        )
    else:
        names = [name for name in FINALISTS if options.only is None or name in options.only]
        side_by_side(options.jobs, ledger.run, specs(options.phase, lines, data, names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
