"""Test the claims of "Scaling Laws for Precision" (arXiv 2411.04330) on the grids of the precision experiment.

    scantling sweep recipes/sweep-precision-parts.yaml --jobs 2
    scantling sweep recipes/sweep-precision-tokens.yaml --jobs 2
    scantling sweep recipes/sweep-precision-seeds.yaml --jobs 2
    python benchmarks/precision_claims.py

The results come from the tables of finished runs in benchmarks/results:

    noise             variation between runs that differ only in their seed: loss, nats above 16 bits, nats lost after
                      training
    saturation        cost of each part by its bits: nats above the 16-bit run of the same size and tokens, averaged
                      over the sizes and tokens that have runs at all bits
    parts multiply    the same excess for runs with several low-precision parts, and its prediction by four rules:
                      Kumar's law fitted to runs with one low-precision part, and to all runs; a lower bound of its
                      product from each part's measured excess; and the sum of each part's own excess
    best bits         the common bits of weights, activations and KV cache that are optimal for any budget by the law
                      fitted to all of these runs, if compute is proportional to bits; the paper finds 7 to 8
    after training    nats lost when weights are quantized after training: the power of tokens with which they grow,
                      with a decaying and a constant learning rate; and the loss after it, which shows whether more
                      tokens still help
    decay             nats lost after training with another schedule, as a multiple of the loss with cosine, at equal
                      size and tokens
    robustness        nats lost when weights trained at low precision are quantized to still fewer bits, minus the
                      nats lost by the 16-bit run of the same size and tokens; and the difference of their final losses
    downstream        relation of accuracy on minimal pairs to the loss

Except in `noise`, every result comes from one seed, so an effect that is not clearly above the noise is chance.
Constants that are not identifiable from the runs are listed.
"""

from __future__ import annotations

import argparse
import csv
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dated import RESULTS, dated, write

import scantling as sc
from scantling.errors import UserError
from scantling.laws.inputs import parse_bits

PARTS = ("weights", "activations", "kv_cache")
POST = "post."
TIED = {"beta": "alpha"}
SAMPLES = 200
"""Number of refits for an interval."""
ANY_COMPUTE = 1e14
"""Compute budget in FLOPs; the best bits are the same for all budgets."""
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Return the finished runs of a `scantling sweep` table with N, D, losses and bits; unquantized is 16 bits."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["state"] != "done":
            print(f"{path.name}: {row['run']} is {row['state']}: {row.get('error', '')}")
    return [_parse_row(row) for row in rows if row["state"] == "done"]


def _parse_row(row: dict[str, str]) -> Row:
    found: Row = {part: _bits(row.get(f"precision.{part}", "")) for part in PARTS}
    found |= {name: float(row[name]) for name in ("N", "D", "loss")}
    found["key"] = Path(row["run"]).name
    found["schedule"] = row.get("train.schedule") or "cosine"
    found["seed"] = int(row.get("train.seed") or 0)
    found["minimal_pairs"] = float(row["minimal_pairs"]) if row.get("minimal_pairs") else None
    found["post"] = {name.removeprefix(POST): float(v) for name, v in row.items() if name.startswith(POST) and v}
    return found


def _bits(name: str) -> float:
    """Return the bits of a format, or of a format with its quantization method, such as `int3.gptq`."""
    return parse_bits(name.partition(".")[0]) if name else 16


def together(*tables: Sequence[Row]) -> list[Row]:
    """Return the runs of several tables without duplicates."""
    return list({row["key"]: row for rows in tables for row in rows}.values())


def low_parts(row: Row) -> list[str]:
    """Return the low-precision parts of a run."""
    return [part for part in PARTS if row[part] < 16]


def beside_whole(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pair each run with the 16-bit run of the same size, tokens and seed."""
    whole = {_run_key(row): row for row in rows if not low_parts(row) and row["schedule"] == "cosine"}
    return [(row, whole[_run_key(row)]) for row in rows if _run_key(row) in whole]


def _run_key(row: Row) -> tuple[Any, ...]:
    return row["N"], row["D"], row["seed"]


def noise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return mean and standard deviation over seeds, for each kind of run with several seeds.

    The statistics cover the loss, its excess over 16 bits, and the loss increase of each quantization after training.
    """
    excess = {id(row): row["loss"] - whole["loss"] for row, whole in beside_whole(rows) if low_parts(row)}
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        bits = ", ".join(f"{part} {row[part]:g}" for part in low_parts(row)) or "16 bits"
        schedule = "" if row["schedule"] == "cosine" else f", {row['schedule']}"
        kinds.setdefault(f"N={row['N']:.0f}, D={row['D']:.0f}, {bits}{schedule}", []).append(row)
    return {
        kind: {
            "of_loss": _mean_and_deviation([row["loss"] for row in own]),
            "of_excess": _mean_and_deviation([excess[id(row)] for row in own if id(row) in excess]),
            "of_lost_after": {
                name: _mean_and_deviation([row["post"][name] - row["loss"] for row in own if name in row["post"]])
                for name in own[0]["post"]
            },
            "seeds": len(own),
        }
        for kind, own in kinds.items()
        if len({row["seed"] for row in own}) > 2
    }


def _mean_and_deviation(values: Sequence[float]) -> dict[str, float] | None:
    return {"mean": float(np.mean(values)), "deviation": float(np.std(values, ddof=1))} if len(values) > 1 else None


def saturation(rows: Sequence[Row]) -> dict[str, Any]:
    """Return nats above 16 bits by bits, for each part alone and for all parts together.

    The mean is over the sizes and tokens that have runs at all these bits; `raw` has N, D and nats of all runs.
    """
    found: dict[str, Any] = {}
    for name, parts in (*((part, [part]) for part in PARTS), ("all", list(PARTS))):
        by_bits: dict[int, dict[tuple[Any, ...], float]] = {}
        for row, whole in beside_whole(rows):
            bits = {row[part] for part in parts}
            if low_parts(row) == parts and len(bits) == 1:
                by_bits.setdefault(bits.pop(), {})[_run_key(row)] = row["loss"] - whole["loss"]
        shared = set.intersection(*(set(own) for own in by_bits.values())) if by_bits else set()
        found[name] = {
            bits: {
                "mean": float(np.mean([own[place] for place in shared])) if shared else None,
                "cells": len(shared),
                "raw": [[*place[:2], nats] for place, nats in sorted(own.items())],
            }
            for bits, own in sorted(by_bits.items())
        }
    return found


def with_several_parts(rows: Sequence[Row]) -> list[Row]:
    """Return the runs at those sizes and tokens that have runs with several low-precision parts.

    The other runs belong to another grid. Its shortest runs end before a power law in tokens describes the loss.
    """
    places = {_run_key(row) for row in rows if len(low_parts(row)) > 1}
    return [row for row in rows if _run_key(row) in places and row["schedule"] == "cosine"]


def fit_base(rows: Sequence[Row]) -> sc.laws.Fit:
    """Fit Chinchilla's law to the 16-bit runs, with one exponent as in the paper."""
    return sc.laws.fit(_table(row for row in rows if not low_parts(row)), tie=TIED)


def parts_multiply(rows: Sequence[Row]) -> dict[str, Any]:
    """Return nats above 16 bits of runs with several low-precision parts: measured, predicted by each rule, and the
    error.

    A product of N_eff factors multiplies the part of the loss that depends on N by one factor per low-precision part.
    The runs hardly identify how large this part is. The smaller it is, the larger the predicted excess. It is taken as
    the whole loss, which gives a lower bound.
    """
    rows = with_several_parts(rows)
    whole = [row for row in rows if not low_parts(row)]
    alone = [row for row in rows if len(low_parts(row)) == 1]
    pairs = [(row, beside) for row, beside in beside_whole(rows) if len(low_parts(row)) > 1]
    base = fit_base(rows)
    fits = {
        f"Kumar's law, fitted to {name}": sc.laws.fit(_table(whole + fitted_to), law="kumar", base=base)
        for name, fitted_to in (("alone", alone), ("all", alone + [row for row, _ in pairs]))
    }
    laws = {name: fitted.law for name, fitted in fits.items()}
    costs = {
        (_run_key(row), part, row[part]): row["loss"] - beside["loss"]
        for row, beside in beside_whole(alone + whole)
        for part in low_parts(row)
    }
    foretold: dict[str, list[float]] = {name: [] for name in (*laws, "the product, at least", "their sum")}
    measured, cells = list[float](), list[list[float]]()
    for row, beside in pairs:
        own = [costs.get((_run_key(row), part, row[part])) for part in low_parts(row)]
        known = [cost for cost in own if cost is not None]
        if len(known) < len(own):
            continue
        measured.append(row["loss"] - beside["loss"])
        cells.append([row["N"], row["D"], *(row[part] for part in PARTS)])
        for name, law in laws.items():
            given = _law_inputs(row)
            foretold[name].append(float(law.loss(**given) - law.loss(**given | dict.fromkeys(PARTS, 16))))
        # lower bound of a product of N_eff factors: each part scales the whole loss, not only its N-dependent term
        product = float(np.prod([1.0 + cost / beside["loss"] for cost in known]))
        foretold["the product, at least"].append(beside["loss"] * (product - 1.0))
        foretold["their sum"].append(sum(known))
    rules = {
        name: {
            "mean_error": float(np.mean(np.abs(np.array(values) - measured))),
            "bias": float(np.mean(np.array(values) - measured)),
            "foretold": values,
        }
        for name, values in foretold.items()
    }
    counts = {"alone": len(alone), "several": len(measured)}
    return {
        "base": base.law.constants(),
        "runs": counts,
        "constants": {name: law.constants() for name, law in laws.items()},
        "not_identified": {"base": base.unidentified} | {name: fitted.unidentified for name, fitted in fits.items()},
        "cells": cells,
        "measured": measured,
        "rules": rules,
    }


def means_by_bits(multiply: dict[str, Any]) -> dict[tuple[float, ...], dict[str, float]]:
    """Return mean nats above 16 bits of runs with equal bits in each part, measured and by each rule."""
    columns = {"measured": multiply["measured"]}
    columns |= {name: rule["foretold"] for name, rule in multiply["rules"].items()}
    kinds = [tuple(cell[2:]) for cell in multiply["cells"]]
    return {
        kind: {
            name: float(np.mean([value for value, own in zip(values, kinds, strict=True) if own == kind]))
            for name, values in columns.items()
        }
        for kind in sorted(set(kinds))
    }


def best_bits(rows: Sequence[Row], samples: int = SAMPLES) -> dict[str, Any]:
    """Return the best bits by Kumar's law, with bootstrap intervals.

    The law is fitted in two ways: in two stages, with a base fitted to the 16-bit runs and then fixed; and with all
    constants together.
    """
    rows = with_several_parts(rows)
    fits = {
        "in two stages": sc.laws.fit(_table(rows), law="kumar", base=fit_base(rows)),
        "together": sc.laws.fit(_table(rows), law="kumar", tie=TIED),
    }

    def bits(law: sc.laws.Law) -> float:
        found = law.optimum(compute=ANY_COMPUTE).bits
        assert found is not None
        return found

    return {
        name: {
            "bits": bits(fitted.law),
            "interval": fitted.interval(bits, samples),
            "mean_error": fitted.mean_error,
            "constants": fitted.law.constants(),
            "not_identified": fitted.unidentified,
        }
        for name, fitted in fits.items()
    }


def _law_inputs(row: Row) -> Row:
    return {name: row[name] for name in ("N", "D", *PARTS)}


def _table(rows: Iterable[Row]) -> list[Row]:
    return [{**_law_inputs(row), "loss": row["loss"]} for row in rows]


def after_training(rows: Sequence[Row]) -> dict[str, Any]:
    """Return nats lost by tokens for each size, schedule and format, their log-log slope, and the quantized loss."""
    found: dict[str, Any] = {}
    whole = [row for row in rows if not low_parts(row) and not row["seed"]]
    for schedule in sorted({row["schedule"] for row in whole}):
        for size in sorted({row["N"] for row in whole}):
            runs = sorted(
                (row for row in whole if (row["N"], row["schedule"]) == (size, schedule)), key=lambda r: r["D"]
            )
            for name in sorted({name for row in runs for name in row["post"]}):
                lost = [(row["D"], row["post"][name] - row["loss"]) for row in runs if name in row["post"]]
                ends = [(row["D"], row["post"][name]) for row in runs if name in row["post"]]
                found[f"{schedule}, N={size:.0f}, {name}"] = {
                    "lost": lost,
                    "power_of_D": _slope(lost),
                    "ends_at": ends,
                    "best_tokens": min(ends, key=lambda pair: pair[1])[0],
                }
    return found


def decay(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the ratio of nats lost after training to those with cosine by schedule and format, over all sizes and
    tokens.

    `raw` has N, D, and the nats of both.
    """
    whole = [row for row in rows if not low_parts(row)]
    by_cosine = {_run_key(row): row for row in whole if row["schedule"] == "cosine"}
    pairs: dict[str, dict[str, list[list[float]]]] = {}
    for row in whole:
        beside = by_cosine.get(_run_key(row))
        if beside is None or row["schedule"] == "cosine":
            continue
        for name in sorted(row["post"].keys() & beside["post"].keys()):
            by_format = pairs.setdefault(row["schedule"], {})
            lost = [each["post"][name] - each["loss"] for each in (row, beside)]
            by_format.setdefault(name, []).append([row["N"], row["D"], *lost])
    found: dict[str, Any] = {}
    for schedule, by_format in pairs.items():
        for name, own in by_format.items():
            lost, of_cosine = (sum(each[place] for each in own) for place in (2, 3))
            times = lost / of_cosine if of_cosine > 0.0 else None
            found.setdefault(schedule, {})[name] = {"times": times, "raw": own}
    return found


def _slope(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the slope of log lost over log D, or None if a quantization lowered the loss."""
    if len(pairs) < 3 or min(lost for _, lost in pairs) <= 0.0:
        return None
    tokens, lost = np.log(np.array(pairs)).T
    return float(np.polyfit(tokens, lost, 1)[0])


def robustness(rows: Sequence[Row]) -> dict[str, Any]:
    """Return nats lost minus those of 16-bit runs, and the final difference, by final format and training bits of
    weights.

    Means are over the sizes and tokens that have runs at all these bits; `raw` has N, D and both values of all runs.
    """
    cells: dict[str, dict[str, dict[tuple[Any, ...], list[float]]]] = {}
    for row, whole in beside_whole(rows):
        if low_parts(row) == ["weights"] and row["schedule"] == "cosine":
            for name in row["post"].keys() & whole["post"].keys():
                if _bits(name) < row["weights"]:
                    own = cells.setdefault(name, {}).setdefault(f"trained at {row['weights']:g}", {})
                    lost = row["post"][name] - row["loss"] - (whole["post"][name] - whole["loss"])
                    own[_run_key(row)] = [lost, row["post"][name] - whole["post"][name]]
    found: dict[str, Any] = {}
    for name, by_bits in sorted(cells.items()):
        shared = set.intersection(*map(set, by_bits.values()))
        for trained, own in sorted(by_bits.items()):
            means = np.mean([own[place] for place in shared], axis=0).tolist() if shared else [None, None]
            raw = [[*place[:2], *both] for place, both in sorted(own.items())]
            figures = {"mean": means[0], "mean_end": means[1], "cells": len(shared), "raw": raw}
            found.setdefault(name, {})[trained] = figures
    return found


def downstream(rows: Sequence[Row]) -> dict[str, Any]:
    """Regress accuracy on minimal pairs on the loss, with an offset for low precision."""
    pairs = [(row["loss"], row["minimal_pairs"], len(low_parts(row)) > 0) for row in rows if row["minimal_pairs"]]
    if len(pairs) < 3:
        return {}
    loss, accuracy, few = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    design = np.stack([np.ones_like(loss), loss, few], axis=1)
    coefficients, *_ = np.linalg.lstsq(design, accuracy, rcond=None)
    rest = accuracy - design @ coefficients
    variance = rest @ rest / max(1, len(pairs) - design.shape[1])
    errors = np.sqrt(variance * np.diag(np.linalg.pinv(design.T @ design)))
    return {
        "correlation": float(np.corrcoef(loss, accuracy)[0, 1]),
        "accuracy_a_nat": float(coefficients[1]),
        "its_standard_error": float(errors[1]),
        "of_few_bits_at_equal_loss": float(coefficients[2]),
        "standard_error_of_that": float(errors[2]),
        "runs": len(pairs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=Path, default=RESULTS / "precision-parts.csv")
    parser.add_argument("--tokens", type=Path, default=RESULTS / "precision-tokens.csv")
    parser.add_argument("--seeds", type=Path, default=RESULTS / "precision-seeds.csv")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    # suppresses the warning about extrapolation, which any budget causes
    logging.getLogger("scantling").setLevel(logging.ERROR)
    tables = {name: getattr(options, name) for name in ("parts", "tokens", "seeds")}
    read_tables = {name: read(path) if path.exists() else [] for name, path in tables.items()}
    every = together(*read_tables.values())
    first = [row for row in every if not row["seed"]]
    counts = {**{name: len(rows) for name, rows in read_tables.items()}, "together": len(every)}
    results: dict[str, Any] = {"runs": counts, "noise": noise(every), "saturation": saturation(first)}
    try:
        results |= {"parts multiply": parts_multiply(first), "best bits": best_bits(first)}
    except UserError as error:
        results |= {"parts multiply": {"error": str(error)}, "best bits": {}}
    results |= {
        "after training": after_training(first),
        "decay": decay(first),
        "robustness": robustness(first),
        "downstream": downstream(every),
    }
    report(results)
    print(write(dated(__file__, results=results), "precision-claims", options.out))
    return 0


def report(results: dict[str, Any]) -> None:
    """Print the results in words."""
    print("{parts}, {tokens} and {seeds} runs, {together} different ones".format(**results["runs"]))
    print("\nnoise: mean over seeds and standard deviation, nats")
    for kind, found in results["noise"].items():
        figures = {"loss": found["of_loss"], "above 16 bits": found["of_excess"]}
        figures |= {f"lost at {name}": own for name, own in found["of_lost_after"].items()}
        told = [f"{name} {own['mean']:.4f} ± {own['deviation']:.4f}" for name, own in figures.items() if own]
        print(f"  {kind} ({found['seeds']} seeds): " + ", ".join(told))
    print("\nsaturation: nats above 16 bits, by bits")
    for what, by_bits in results["saturation"].items():
        means = (f"{bits:g}: {own['mean']:+.4f}" for bits, own in by_bits.items() if own["mean"] is not None)
        cells = max((own["cells"] for own in by_bits.values()), default=0)
        print(f"  {what:14} " + "  ".join(means) + f"   ({cells} sizes and tokens)")
    multiply = results["parts multiply"]
    print("\nparts multiply: errors on the nats above 16 bits of runs with several parts in low precision")
    if "error" in multiply:
        print(f"  {multiply['error']}")
    else:
        print(f"  measured: mean {np.mean(multiply['measured']):.4f} of {multiply['runs']['several']} runs")
        for rule, found in multiply["rules"].items():
            print(f"  {rule:34} off by {found['mean_error']:.4f}, too much by {found['bias']:+.4f}")
        print(f"  means by bits of {', '.join(PARTS)}: measured, then by the same rules")
        for kind, means in means_by_bits(multiply).items():
            told = "  ".join(f"{mean:+.4f}" for mean in means.values())
            print(f"    {' '.join(f'{bits:g}' for bits in kind):10} {told}")
        for law, reasons in multiply["not_identified"].items():
            for name, reason in reasons.items():
                print(f"  {law}: {name} is not identified: {reason}")
    print("\nbest bits of weights, activations and KV cache together, with 95 % intervals")
    for name, found in results["best bits"].items():
        low, high = found["interval"]
        print(f"  fitted {name:14} {found['bits']:.2f} [{low:.2f}, {high:.2f}], mean error {found['mean_error']:.2%}")
    print("\nafter training: nats lost by tokens, and the tokens beyond which the loss with them grows")
    for what, found in results["after training"].items():
        power = "" if found["power_of_D"] is None else f"   D^{found['power_of_D']:.2f}"
        lost = "  ".join(f"{lost:.4f}" for _, lost in found["lost"])
        print(f"  {what:26} {lost}{power}   best at {found['best_tokens']:.3g} tokens")
    print("\ndecay: times as much is lost after training as with cosine")
    for schedule, by_format in results["decay"].items():
        told = (f"{name}: {own['times']:.2f}" for name, own in by_format.items() if own["times"] is not None)
        count = max(len(own["raw"]) for own in by_format.values())
        print(f"  {schedule:14} " + "  ".join(told) + f"   ({count} sizes and tokens)")
    print("\nrobustness: nats lost more than by the run at 16 bits, and (end against its end)")
    for name, by_bits in results["robustness"].items():
        told = [f"{b}: {o['mean']:+.4f} ({o['mean_end']:+.4f})" for b, o in by_bits.items() if o["cells"]]
        count = max(own["cells"] for own in by_bits.values())
        print(f"  {name:14} " + "  ".join(told) + f"   ({count} sizes and tokens)")
    if results["downstream"]:
        print("\ndownstream: " + ", ".join(f"{name} {value:.4g}" for name, value in results["downstream"].items()))


if __name__ == "__main__":
    sys.exit(main())
