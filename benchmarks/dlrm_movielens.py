"""Measure the accuracy of a DLRM with compressed tables on MovieLens small.

    python benchmarks/dlrm_movielens.py sweep     tune each contender on the dev set with seed 0
    python benchmarks/dlrm_movielens.py seeds     each contender at its best settings, seeds 1 to 5, on the test set
    python benchmarks/dlrm_movielens.py report    the table of the results

The model predicts whether a user rates a movie 4 or higher (movielens.py). Its tables, for users, movies and sets of
genres, have 391,168 parameters at width 64. Contenders have 10 or 99 times fewer: narrower dense tables, TT tables, TT
tables with rank gates, TT tables that a `RankAdapter` shrinks to the size, the hashing trick, and quotient-remainder
tables (Shi et al., arXiv 1909.02107). `biases` is a logistic regression and `no-item` the dense model, at its settings,
without ids of movies; they show the value of the tables.

Every contender is tuned by coordinate descent over its settings. At the full width and at 99 times, this takes up to 25
runs for dense and 21 for compressed tables; at 10 times, where rates are tuned once, up to 14 for each. All have the
same regularizers: the squared norm of the rows in a batch, dropout of rows, early stopping. The order of ids is a
setting of compressed tables alone; it has no effect on dense ones. Aim: AUC at 99 times within 0.002 of dense. Runs are
lines of benchmarks/results/dlrm-movielens.jsonl; no run is repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from dated import RESULTS
from resumable import Ledger, Line, Spec, command_line, interval, spec_key, verdict_on
from small_models import printed

Lines = dict[str, Line]
TABLE_ROWS, DIM = 6112, 64
NUMEL = TABLE_ROWS * DIM
AIM = -0.002
SEEDS = (1, 2, 3, 4, 5)
START = {"lr": 3e-3, "table_rate": 1.0, "penalty": 0.03, "order": "key", "dropout": 0.0, "modes": 2}
DENSE_GRID: dict[str, tuple[Any, ...]] = {
    "lr": (0.75e-3, 1.5e-3, 3e-3, 6e-3),
    "table_rate": (0.3, 1.0, 3.0, 10.0),
    "penalty": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "dropout": (0.0, 0.3, 0.5),
}
SMALL_GRID: dict[str, tuple[Any, ...]] = {
    "order": ("key", "frequency", "rating"),
    "lr": (1.5e-3, 3e-3, 6e-3),
    "table_rate": (0.3, 1.0, 3.0),
    "dim": (64, 32, 16),
    "penalty": (0.003, 0.01, 0.03, 0.1),
    "dropout": (0.0, 0.3),
}
AGAIN = ("lr", "table_rate", "penalty")
"""Settings that dense tables and those of the smallest sizes tune a second time, at the best values of the others."""
TT_GRID = SMALL_GRID | {"modes": (2, 3)}
CONTENDERS: dict[str, tuple[str, int, int]] = {
    "dense": ("dense", 1, 64),
    "TT, 99 times": ("tt", 99, 64),
    "TT with gates, 99 times": ("tt-gates", 99, 64),
    "TT by adapter, 99 times": ("tt-adapter", 99, 64),
    "hashing, 99 times": ("hash", 99, 64),
    "quotient-remainder, 99 times": ("qr", 99, 16),
    "dense, width 1": ("dense", 64, 1),
    "TT, 10 times": ("tt", 10, 64),
    "TT with gates, 10 times": ("tt-gates", 10, 64),
    "dense, width 6": ("dense", 10, 6),
    "hashing, 10 times": ("hash", 10, 64),
    "quotient-remainder, 10 times": ("qr", 10, 64),
    "biases": ("biases", 64, 1),
    "no-item": ("no-item", 1, 64),
}
"""Kind, factor by which the tables have fewer parameters, and the width at which its sweep starts."""


def grid(name: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of each setting that a contender tries, in the order in which they are tuned."""
    kind, _, dim = CONTENDERS[name]
    if kind == "dense":
        return DENSE_GRID
    if kind == "biases":
        return {"lr": (3e-3, 10e-3, 30e-3)}
    chosen = TT_GRID if kind.startswith("tt") else SMALL_GRID
    # The width bounds the number of quotient and remainder rows from below.
    return chosen if dim == DIM else chosen | {"dim": (16, 8)}


def run_spec(name: str, settings: dict[str, Any], seed: int) -> Spec:
    """Return the specification of one run."""
    kind, factor, _ = CONTENDERS[name]
    return {"kind": kind, "budget": NUMEL // factor, **settings, "seed": seed}


def tuned(lines: Lines, name: str) -> tuple[dict[str, Any], Spec | None]:
    """Return the best settings of a contender so far, and the next run of its sweep, None at its end."""
    if name == "no-item":
        return tuned(lines, "dense")
    settings = {**START, "dim": CONTENDERS[name][2]}
    own = grid(name)
    is_tuned_again = CONTENDERS[name][1] != 10 and name != "biases"
    for setting in (*own, *(AGAIN if is_tuned_again else ())):
        values = own[setting]
        specs = {value: run_spec(name, settings | {setting: value}, 0) for value in values}
        for spec in specs.values():
            if spec_key(spec) not in lines:
                return settings, spec
        settings[setting] = max(values, key=lambda value: lines[spec_key(specs[value])]["dev_auc"])
    return settings, None


def sweep(ledger: Ledger, name: str) -> None:
    while (spec := tuned(ledger.lines(), name)[1]) is not None:
        if not ledger.run(spec):
            return


def seed_specs(lines: Lines) -> Iterator[tuple[str, Spec]]:
    """Yield contender and specification of the runs on the test set, for contenders whose sweep has ended."""
    for seed in SEEDS:
        for name in CONTENDERS:
            settings, pending = tuned(lines, name)
            if pending is None:
                yield name, run_spec(name, settings, seed)


def report(lines: Lines) -> None:
    """Print one row for each contender, with differences from dense paired by seed."""
    found: dict[str, dict[int, Line]] = {name: {} for name in CONTENDERS}
    for name, spec in seed_specs(lines):
        if (line := lines.get(spec_key(spec))) is not None:
            found[name][spec["seed"]] = line
    dense = found["dense"]
    print("| tables | parameters in tables | times fewer | in the model | seeds | AUC | minus dense | norm. entropy |")
    print("|---|---|---|---|---|---|---|---|")
    for name, runs in sorted(
        found.items(), key=lambda item: -max((r["table_numel"] for r in item[1].values()), default=0)
    ):
        if not runs:
            continue
        line = next(iter(runs.values()))
        mean, width = interval([each["auc"] for each in runs.values()])
        entropy = interval([each["normalized_entropy"] for each in runs.values()])
        cells = [name, f"{line['table_numel']:,}", f"{NUMEL / line['table_numel']:.1f}", f"{line['num_parameters']:,}"]
        cells += [str(len(runs)), f"{mean:.4f} ± {width:.4f}", "", f"{entropy[0]:.3f} ± {entropy[1]:.3f}"]
        if name != "dense":
            gap, width = interval([each["auc"] - dense[seed]["auc"] for seed, each in runs.items() if seed in dense])
            cells[6] = f"{gap:+.4f} ± {width:.4f}"
            if CONTENDERS[name][1] == 99:
                cells[0] += f" (aim {AIM}: {verdict_on(gap, width, AIM)})"
        print("| " + " | ".join(cells) + " |")
    print("\ndev AUC by the order of ids, seed 0, other settings as at the start of the sweep")
    for name, (_, _, dim) in CONTENDERS.items():
        specs = [run_spec(name, {**START, "dim": dim, "order": order}, 0) for order in SMALL_GRID["order"]]
        areas = [lines[key]["dev_auc"] for key in map(spec_key, specs) if key in lines]
        if len(areas) == len(specs):
            print(f"{name}: " + ", ".join(f"{o} {a:.4f}" for o, a in zip(SMALL_GRID["order"], areas, strict=True)))
    print()
    for name in CONTENDERS:
        settings, pending = tuned(lines, name)
        ended = "" if pending is None else ", sweep not ended"
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in settings.items())}{ended}")


def main() -> int:
    parser = command_line(__doc__, ["sweep", "seeds", "report"], RESULTS / "dlrm-movielens.jsonl")
    parser.add_argument("--row", action="append", choices=CONTENDERS, help="only this contender; may be repeated")
    options: argparse.Namespace = parser.parse_args()
    if options.phase == "report":
        report(Ledger(options.results, Path(__file__)).lines())
        return 0
    from movielens import run_training

    torch.set_num_threads(1)
    if options.phase == "one":
        printed(run_training(json.loads(options.spec)))
        return 0
    # A run takes seconds, so all are made in this process.
    ledger = Ledger(options.results, Path(__file__), make=run_training)
    if options.phase == "sweep":
        for name in options.row or CONTENDERS:
            sweep(ledger, name)
    else:
        for name, spec in list(seed_specs(ledger.lines())):
            if name in (options.row or CONTENDERS):
                ledger.run(spec)
    return 0


if __name__ == "__main__":
    sys.exit(main())
