"""What the grids of the precision experiment say of the claims of "Scaling Laws for Precision" (arXiv 2411.04330).

    scantling sweep recipes/sweep-precision-parts.yaml --jobs 2
    scantling sweep recipes/sweep-precision-tokens.yaml --jobs 2
    python benchmarks/precision_claims.py

From the two tables in benchmarks/results, of runs that are done:

    saturation        what each part costs by its bits: nats above the run of the same size and tokens at 16 bits
    parts multiply    Kumar's law fitted to runs with one part in few bits predicts the others, beside a fit to all
    after training    nats lost when weights are quantised after training: the power of tokens they grow with, of runs
                      whose learning rate decays and of runs whose rate stays
    robustness        the same of runs that were trained with weights in few bits, beside those that were not
    downstream        accuracy on minimal pairs beside the loss

One seed a run: differences of a hundredth of a nat are chance.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dated import RESULTS, dated, write

import scantling as sc
from scantling.errors import UserError

PARTS = ("weights", "activations", "kv_cache")
POST = "post."
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """The finished runs of a table of `scantling sweep`, with numbers for N, D and the losses, 16 for whole parts."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["state"] == "done"]
    return [_numbers(row) for row in rows]


def _numbers(row: dict[str, str]) -> Row:
    found: Row = {part: _bits(row.get(f"precision.{part}", "")) for part in PARTS}
    found |= {name: float(row[name]) for name in ("N", "D", "loss")}
    found["key"] = Path(row["run"]).name
    found["schedule"] = row.get("train.schedule") or "cosine"
    found["minimal_pairs"] = float(row["minimal_pairs"]) if row.get("minimal_pairs") else None
    found["post"] = {_bits(name.removeprefix(POST)): float(v) for name, v in row.items() if name.startswith(POST) and v}
    return found


def _bits(name: str) -> int:
    return int(name.removeprefix("int")) if name else 16


def together(*tables: Sequence[Row]) -> list[Row]:
    """The runs of several tables, one that is in two of them once."""
    return list({row["key"]: row for rows in tables for row in rows}.values())


def in_few_bits(row: Row) -> list[str]:
    """The parts of a run that were not whole."""
    return [part for part in PARTS if row[part] < 16]


def beside_whole(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Each run with the one of its size and tokens at 16 bits."""
    whole = {(row["N"], row["D"]): row for row in rows if not in_few_bits(row) and row["schedule"] == "cosine"}
    return [(row, whole[row["N"], row["D"]]) for row in rows if (row["N"], row["D"]) in whole]


def saturation(rows: Sequence[Row]) -> dict[str, Any]:
    """Nats above 16 bits, for each part alone and all together, by bits: the mean over sizes and tokens, and all."""
    found: dict[str, Any] = {}
    for name, parts in (*((part, [part]) for part in PARTS), ("all", list(PARTS))):
        by_bits: dict[int, list[float]] = {}
        for row, whole in beside_whole(rows):
            bits = {row[part] for part in parts}
            if in_few_bits(row) == parts and len(bits) == 1:
                by_bits.setdefault(bits.pop(), []).append(row["loss"] - whole["loss"])
        found[name] = {bits: {"mean": float(np.mean(own)), "raw": own} for bits, own in sorted(by_bits.items())}
    return found


def parts_multiply(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors on runs with several parts in few bits, of a fit without them and of a fit with them."""
    whole = [row for row in rows if not in_few_bits(row) and row["schedule"] == "cosine"]
    alone = [row for row in rows if len(in_few_bits(row)) == 1]
    several = [row for row in rows if len(in_few_bits(row)) > 1]
    base = sc.laws.fit(_table(whole), tie={"beta": "alpha"})
    found: dict[str, Any] = {"base": base.law.constants(), "runs": {"alone": len(alone), "several": len(several)}}
    for name, fitted_to in (("alone", alone), ("all", alone + several)):
        law = sc.laws.fit(_table(whole + fitted_to), law="kumar", base=base).law
        errors = [law.loss(**_given(row)) / row["loss"] - 1.0 for row in several]
        found[f"fitted to {name}"] = {
            "constants": law.constants(),
            "mean_error": float(np.mean(np.abs(errors))),
            "worst_error": float(np.max(np.abs(errors))),
            "errors": [float(error) for error in errors],
        }
    return found


def _given(row: Row) -> Row:
    return {name: row[name] for name in ("N", "D", *PARTS)}


def _table(rows: Iterable[Row]) -> list[Row]:
    return [{**_given(row), "loss": row["loss"]} for row in rows]


def after_training(rows: Sequence[Row]) -> dict[str, Any]:
    """Nats lost by tokens for each size, schedule and number of bits, and the slope of their logarithms."""
    found: dict[str, Any] = {}
    whole = [row for row in rows if not in_few_bits(row)]
    for schedule in sorted({row["schedule"] for row in whole}):
        for size in sorted({row["N"] for row in whole}):
            runs = sorted(
                (row for row in whole if (row["N"], row["schedule"]) == (size, schedule)), key=lambda r: r["D"]
            )
            for bits in sorted({bits for row in runs for bits in row["post"]}):
                lost = [(row["D"], row["post"][bits] - row["loss"]) for row in runs if bits in row["post"]]
                found[f"{schedule}, N={size:.0f}, int{bits}"] = {"lost": lost, "power_of_D": _slope(lost)}
    return found


def _slope(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Of log lost on log D; None where something gained."""
    if len(pairs) < 3 or min(lost for _, lost in pairs) <= 0.0:
        return None
    tokens, lost = np.log(np.array(pairs)).T
    return float(np.polyfit(tokens, lost, 1)[0])


def robustness(rows: Sequence[Row]) -> dict[str, Any]:
    """Nats lost after training, by the bits of the weights while training and after: means over sizes and tokens."""
    found: dict[str, dict[int, list[float]]] = {}
    for row, whole in beside_whole(rows):
        if in_few_bits(row) in ([], ["weights"]) and row["schedule"] == "cosine":
            for bits in row["post"].keys() & whole["post"].keys():
                own = found.setdefault(f"trained at {row['weights']}", {}).setdefault(bits, [])
                own.append(row["post"][bits] - row["loss"])
    return {
        name: {bits: {"mean": float(np.mean(own)), "raw": own} for bits, own in sorted(by_bits.items())}
        for name, by_bits in sorted(found.items())
    }


def downstream(rows: Sequence[Row]) -> dict[str, Any]:
    """How accuracy on minimal pairs goes with the loss, and whether few bits change that."""
    pairs = [(row["loss"], row["minimal_pairs"], len(in_few_bits(row)) > 0) for row in rows if row["minimal_pairs"]]
    if len(pairs) < 3:
        return {}
    loss, accuracy, few = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    design = np.stack([np.ones_like(loss), loss, few], axis=1)
    coefficients, *_ = np.linalg.lstsq(design, accuracy, rcond=None)
    return {
        "correlation": float(np.corrcoef(loss, accuracy)[0, 1]),
        "accuracy_a_nat": float(coefficients[1]),
        "of_few_bits_at_equal_loss": float(coefficients[2]),
        "runs": len(pairs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=Path, default=RESULTS / "precision-parts.csv")
    parser.add_argument("--tokens", type=Path, default=RESULTS / "precision-tokens.csv")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    parts, tokens = (read(path) if path.exists() else [] for path in (options.parts, options.tokens))
    both = together(parts, tokens)
    counts = {"parts": len(parts), "tokens": len(tokens), "together": len(both)}
    results: dict[str, Any] = {"runs": counts, "saturation": saturation(parts)}
    try:
        results["parts multiply"] = parts_multiply(both)
    except UserError as error:
        results["parts multiply"] = {"error": str(error)}
    results |= {
        "after training": after_training(tokens),
        "robustness": robustness(both),
        "downstream": downstream(both),
    }
    report(results)
    print(write(dated(__file__, results=results), "precision-claims", options.out))
    return 0


def report(results: dict[str, Any]) -> None:
    """The results in words."""
    print("{parts} and {tokens} runs, {together} different ones".format(**results["runs"]))
    for name in ("saturation", "robustness"):
        print(f"\n{name}: nats, by bits")
        for what, by_bits in results[name].items():
            print(f"  {what:14} " + "  ".join(f"{bits}: {own['mean']:+.4f}" for bits, own in by_bits.items()))
    print("\nparts multiply: relative errors on runs with several parts in few bits")
    for what, found in results["parts multiply"].items():
        if "mean_error" in found:
            print(f"  {what:18} mean {found['mean_error']:.3%}, worst {found['worst_error']:.3%}")
        elif what == "error":
            print(f"  {found}")
    print("\nafter training: nats lost by tokens")
    for what, found in results["after training"].items():
        power = "" if found["power_of_D"] is None else f"   D^{found['power_of_D']:.2f}"
        print(f"  {what:26} " + "  ".join(f"{lost:.4f}" for _, lost in found["lost"]) + power)
    if results["downstream"]:
        print("\ndownstream: " + ", ".join(f"{name} {value:.4g}" for name, value in results["downstream"].items()))


if __name__ == "__main__":
    sys.exit(main())
