"""Measure the accuracy and the time of the scaling-law fits.

    python benchmarks/laws.py                     (results/laws-DATE.json; about half an hour on two idle cores)
    python benchmarks/laws.py epoch quest optimum (the parts that take a minute)

    epoch     Chinchilla's figure 4 with Epoch's data: constants, CPU seconds, 4,000 bootstraps. Needs SCANTLING_DATA
    quest     QuEST's runs up to 200M: predict each size from the others, on Quartet's base. Needs SCANTLING_DATA
    optimum   the best bits with the published constants, and three published models
    recovery  synthetic runs from the published constants on the paper's grid, with noise of 0, 0.1 % and 1 %, 20 seeds
    coverage  at 1 % noise: in how many of 200 seeds the bootstrap intervals contain the true constants

Times are CPU seconds of one core, not wall-clock time. The exit code is 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from dated import dated, write
from small_models import data_folder
from synthetic_runs import kumar_grid, simulate

from scantling.laws import ChinchillaLaw, Fit, PrecisionLaw, fit

Result = dict[str, Any]

GAMMAS = ("gamma_w", "gamma_a", "gamma_kv")
KUMAR = PrecisionLaw.published()
TIED = {"beta": "alpha"}
GOLDEN = {"A": 477.8, "B": 2143, "E": 1.8172, "alpha": 0.3473, "beta": 0.3672}
FIT_S, BOOTSTRAP_S, BOOTSTRAPS = 10.0, 300.0, 4000
WITHIN = {"gamma_w": 0.05, "gamma_a": 0.05, "gamma_kv": 0.10}
HOLD_OUT, COVERAGE = 0.005, 0.90
HADAMARD = ("HadamardTrustQuantizer", "HalfHadamardTrustQuantizer")
QUEST = {"N": "non_embedding_parameters", "D": "tokens", "weights": "w_bits", "activations": "a_bits"}
SHARED = {"gamma_a": "gamma_w", "n_a": "n_w"}
MODELS = {"Llama-3 8B": (8e9, 15e12), "Gemma-2 9B": (9e9, 8e12), "GPT-3 175B": (175e9, 300e9)}


def epoch(arguments: argparse.Namespace) -> Result:
    with open(data_folder() / "scaling" / "epoch_chinchilla_fig4.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    N, C, loss = (np.array([float(row[name]) for row in rows]) for name in ("Model Size", "Training FLOP", "loss"))
    D = C / (6 * N)
    kept = np.argsort(D / N)[5:]
    fitted, fit_s = time_call(lambda: ChinchillaLaw.fit(N[kept], D[kept], loss[kept]))
    intervals, bootstrap_s = time_call(lambda: fitted.bootstrap(arguments.bootstraps))
    constants = {name: getattr(fitted, name) for name in GOLDEN}
    return {
        "runs": len(kept),
        "constants": constants,
        "objective": fitted.objective,
        "intervals": intervals,
        "bootstraps": arguments.bootstraps,
        "fit_cpu_s": fit_s,
        "bootstrap_cpu_s": bootstrap_s,
        "condition_number": fitted.condition_number,
        "not_identified": fitted.unidentified,
        "aims": {
            "four figures": all(abs(constants[name] / value - 1) < 5e-4 for name, value in GOLDEN.items()),
            "fit under 10 s": fit_s < FIT_S,
            "4,000 bootstraps under 5 minutes": bootstrap_s * BOOTSTRAPS / arguments.bootstraps < BOOTSTRAP_S,
        },
    }


def quest(arguments: argparse.Namespace) -> Result:
    with open(data_folder() / "scaling" / "quest_precision_runs_upto_200M.csv", newline="") as file:
        runs = list(csv.DictReader(file))
    both = [run for run in runs if {run["w_quant"], run["a_quant"]} <= {*HADAMARD, "NoQuantizer"}]
    tables = {
        "weights and activations, Hadamard": ([run for run in both if run["w_bits"] == run["a_bits"]], SHARED),
        "weights and activations": (
            [run for run in runs if run["w_quant"] in ("TrustQuantizer", "NoQuantizer")],
            SHARED,
        ),
        "weights, Hadamard": ([run for run in both if run["a_quant"] == "NoQuantizer"], {}),
    }
    base = ChinchillaLaw.published("quartet")
    results: Result = {}
    for name, (chosen, tie) in tables.items():
        results[name] = hold_out_report(fit(chosen, "kumar", base=base, columns=QUEST, tie=tie))
    schemes = [{**run, "scheme": f"w{run['w_bits']}a{run['a_bits']}"} for run in both if run["w_bits"] != "16"]
    sizes = {name: QUEST[name] for name in ("N", "D")}
    results["efficiencies, Hadamard"] = hold_out_report(fit(schemes, "efficiency", base=base, columns=sizes))
    free = fit(both, "kumar", columns=QUEST, tie=SHARED)
    results["without a base"] = {**hold_out_report(free), "not_identified": free.unidentified}
    named = list(tables)
    results["aims"] = {f"{name}: 0.5 % or less": results[name]["mean"] <= HOLD_OUT for name in named}
    results["aims"]["its base is not identified alone"] = {"E", "alpha", "beta"} <= set(free.unidentified)
    return results


def hold_out_report(fitted: Fit) -> Result:
    errors = fitted.hold_out()
    return {
        "runs": fitted.runs.count,
        "constants": {n: v for n, v in fitted.law.constants().items() if n in fitted.fitted_constants},
        "mean": errors.mean,
        "worst": errors.worst,
        "by_size": {f"{size:.0f}": float(np.abs(each).mean()) for size, each in errors.errors.items()},
    }


def optimum(arguments: argparse.Namespace) -> Result:
    plain = PrecisionLaw.published(offsets=False)
    mean_gamma = sum(getattr(plain, name) for name in GAMMAS) / 3
    bits = {
        "product": {f"{10.0**power:.0e}": KUMAR.optimum(compute=10.0**power).bits for power in (18, 21, 24, 27)},
        "averages": KUMAR.averaged().optimum(compute=1e21).bits,
        "without offsets": plain.optimum(compute=1e21).bits,
    }
    x = float(plain.averaged().optimum(compute=1e21).bits or math.nan) / mean_gamma
    models = {
        name: {
            "N free": asdict(KUMAR.optimum(compute=6 * N * D)),
            "N given": asdict(KUMAR.optimum(compute=6 * N * D, N=N)),
            "critical_tokens": {post: KUMAR.critical_tokens(N, post=post) for post in (3, 4, 5, 6)},
        }
        for name, (N, D) in MODELS.items()
    }
    product = bits["product"].values()
    aims = {
        "x": abs(x - 1.9038136944) < 1e-9,
        "7.00 bits at any compute": all(abs(each - 7.002) < 1e-3 for each in product),
        "7.64 bits of the averages": abs(bits["averages"] - 7.641) < 1e-3,
    }
    return {"bits": bits, "x": x, "models": models, "aims": aims}


def recovery(arguments: argparse.Namespace) -> Result:
    results: Result = {}
    for noise in (0.0, 0.001, 0.01):
        seeds = range(1 if noise == 0 else 20)
        fits = [fit(simulate(KUMAR, kumar_grid(), noise=noise, seed=seed), "kumar", tie=TIED) for seed in seeds]
        results[f"{noise:g}"] = {
            name: [getattr(each, name) / getattr(KUMAR, name) - 1 for each in fits] for name in GAMMAS
        }
    small = results["0.001"]
    results["aims"] = {f"{name} at 0.1 % noise": max(map(abs, small[name])) < limit for name, limit in WITHIN.items()}
    return results


def coverage(arguments: argparse.Namespace) -> Result:
    tasks = [(seed, arguments.samples) for seed in range(arguments.seeds)]
    with ProcessPoolExecutor(arguments.processes) as pool:
        seeds = list(pool.map(fit_seed, tasks))
    covered = {
        name: sum(each["intervals"][name][0] <= getattr(KUMAR, name) <= each["intervals"][name][1] for each in seeds)
        for name in GAMMAS
    }
    flagged = {name: sum(name in each["not_identified"] for each in seeds) for name in GAMMAS}
    return {
        "seeds": len(seeds),
        "bootstraps": arguments.samples,
        "covered": covered,
        "flagged": flagged,
        "each": seeds,
        "aims": {f"{name} covered": count >= COVERAGE * len(seeds) for name, count in covered.items()}
        | {"gamma_kv flagged": flagged["gamma_kv"] >= COVERAGE * len(seeds)},
    }


def fit_seed(task: tuple[int, int]) -> Result:
    """Fit all constants to the paper's grid at 1 % noise, with alpha and beta tied as in the paper."""
    seed, samples = task
    fitted = fit(simulate(KUMAR, kumar_grid(), noise=0.01, seed=seed), "kumar", tie=TIED)
    intervals = fitted.bootstrap(samples)
    return {
        "seed": seed,
        "values": {name: getattr(fitted, name) for name in GAMMAS},
        "intervals": {name: intervals[name] for name in GAMMAS},
        "not_identified": sorted(fitted.unidentified),
    }


def time_call(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call and its CPU seconds."""
    began = time.process_time()
    results = work()
    return results, time.process_time() - began


PARTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "epoch": epoch,
    "quest": quest,
    "optimum": optimum,
    "recovery": recovery,
    "coverage": coverage,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none runs all")
    parser.add_argument("--bootstraps", type=int, default=BOOTSTRAPS, help="of the part epoch")
    parser.add_argument("--seeds", type=int, default=200, help="of the part coverage")
    parser.add_argument("--samples", type=int, default=200, help="bootstraps of each of its seeds")
    parser.add_argument("--processes", type=int, default=2, help="concurrent processes of the part coverage")
    parser.add_argument("--out", type=Path, help="another file for the result")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    logging.getLogger("scantling").setLevel(logging.ERROR)
    results = {}
    for name in arguments.parts or PARTS:
        results[name] = PARTS[name](arguments)
        for aim, met in results[name]["aims"].items():
            print(f"{name:9} {'met   ' if met else 'MISSED'} {aim}", flush=True)
    print(write(dated(__file__, **results), "laws", arguments.out))
    return 0 if all(met for part in results.values() for met in part["aims"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
