"""How long each way to exchange takes to a loss on a slow link: what was trained, with the times of steps there.

    python benchmarks/time_to_loss.py benchmarks/results/network-2-100mbit-*.json

The losses by step are those of `comm_quality.py --data llama-10m`; what a step takes is what `network.py` measured of
the same model and the same batch on a link, both medians. A time to a loss is their product: to the last held-out loss
of AdamW under DDP, as the median over the seeds. The bound is what an exchange that takes no time would be faster than
DDP by, at equal steps. The loss at equal time is that of every method at the moment at which the first of them has done
all its steps; the learning rate of the others has not come down by then.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import comm_quality as quality
import numpy as np
from dated import RESULTS
from network import step_of
from resumable import Ledger, Line, key_of, steps_to_reach

DATA = "llama-10m"
BASE = "ddp fp32"
OF_THE_BOUND = 0.8


def trained(lines: quality.Lines, method: str) -> dict[int, Line]:
    """The runs of a method at its best rate, by seed; none where one of them failed."""
    rate = quality.best_rate(lines, DATA, method)
    if rate is None:
        return {}
    found = {seed: lines.get(key_of(quality.run_spec(DATA, method, rate, seed))) for seed in quality.seeds_of(method)}
    done = {seed: line for seed, line in found.items() if line is not None}
    return {} if any(line["eval_loss"] is None for line in done.values()) else done


def loss_after(curve: Sequence[Sequence[float]], steps: float) -> float | None:
    """The held-out loss after so many steps, linear between the points of a curve; None before its first."""
    at, losses = zip(*curve, strict=True)
    return None if steps < at[0] else float(np.interp(steps, at, losses))


def compared(lines: quality.Lines, step_s: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Times to the loss of DDP and losses at equal time, by method.

    Args:
        lines: of comm_quality.py.
        step_s: seconds of a step by method, of those that were measured.
    """
    runs = {method: found for method in step_s if (found := trained(lines, method))}
    if BASE not in runs:
        return {}
    shared = [seed for seed in runs[BASE] if all(seed in found for found in runs.values())]
    end = min(step_s[method] * quality.WORKS[DATA].steps for method in runs)
    result: dict[str, dict[str, Any]] = {}
    for method, found in runs.items():
        times, losses = [], []
        for seed in shared:
            curve = found[seed]["heldout"]
            reached = steps_to_reach(curve, runs[BASE][seed]["heldout"][-1][1])
            times.append(float("inf") if reached is None else reached * step_s[method])
            losses.append(loss_after(curve, end / step_s[method]))
        known = [loss for loss in losses if loss is not None]
        result[method] = {
            "step_s": step_s[method],
            "time_s": float(np.median(times)),
            "loss_at_equal_time": float(np.mean(known)) if len(known) == len(losses) else None,
            "seeds": shared,
        }
    return result


def show(found: dict[str, dict[str, Any]], alone_s: float | None) -> None:
    """A row a method, and what the aims say."""
    base = found[BASE]
    for method, row in found.items():
        faster = base["time_s"] / row["time_s"]
        loss = row["loss_at_equal_time"]
        print(
            f"{method:22} {1e3 * row['step_s']:9.1f} ms a step  "
            + (f"{row['time_s']:9.1f} s to the loss, {faster:6.2f} x" if faster else "never reaches the loss")
            + f"  at equal time {'not evaluated yet' if loss is None else f'{loss:.4f}'}"
        )
    ours = max(base["time_s"] / row["time_s"] for method, row in found.items() if method.startswith("ours"))
    others = [row for method, row in found.items() if method.startswith(("powersgd", "diloco"))]
    if alone_s is not None:
        bound = base["step_s"] / alone_s
        print(f"bound {bound:.2f} x; ours {ours:.2f} x: {ours / bound:.0%} of it (aim {OF_THE_BOUND:.0%})")
    if others:
        best = max(base["time_s"] / row["time_s"] for row in others)
        print(f"best of PowerSGD and DiLoCo {best:.2f} x: {'met' if ours >= best else 'MISSED'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("links", type=Path, nargs="+", help="files of network.py")
    parser.add_argument("--results", type=Path, default=RESULTS / "comm-quality.jsonl", help="of comm_quality.py")
    options = parser.parse_args()
    lines = Ledger(options.results, Path(quality.__file__)).lines()
    for path in options.links:
        link = json.loads(path.read_text(encoding="utf-8"))
        length = quality.WORKS[DATA].data["seq_len"]
        batch = quality.WORKS[DATA].batch // quality.REPLICAS
        told = (link["preset"], link["batch"], link["length"], link["replicas"], link["with_times"])
        if told != (DATA, batch, length, quality.REPLICAS, True):
            raise SystemExit(f"{path.name}: other steps than those that were trained: {told}")
        step_s = {
            method: float(np.median([step_of(rows) for rows in rounds])) for method, rounds in link["methods"].items()
        }
        delay = ", emulated" if link["emulated_round_trip"] else ""
        print(f"{path.name}: {link['rate']}, a round trip of {link['round_trip_ms']:.1f} ms{delay}")
        found = compared(lines, step_s)
        if found:
            show(found, step_s.get("alone"))
        else:
            print("no runs of DDP to compare with: run comm_quality.py sweep and seeds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
