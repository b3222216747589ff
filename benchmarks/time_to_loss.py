"""Compute how long each communication method takes to reach a loss on a slow link, from training runs and step times.

    python benchmarks/time_to_loss.py --base "ddp fp16" benchmarks/results/network-2-10mbit-llama-10m-8k-batch32-*.json

The losses by step come from `comm_quality.py`, of the data that `network.py --preset` names. The step times come from
`network.py`, measured with the same model and batch on a link. The time to a loss is the number of steps times the step
time. DDP in 16 bits is taken to need as many steps as in 32 bits. There are two target losses: the final loss of AdamW
under DDP, and 0.01 nats above it, because runs of one method differ by as much between seeds. Losses are means over the
seeds that all methods have. Steps in which PowerSGD still averages everything take as long as those of DDP.

`bound` is the speed-up over DDP of an exchange that takes no time, at equal steps. It is computed from measured steps,
and from the time of computing and then sending all gradients. The loss at equal time is each method's loss at the
moment when the first method has done all its steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import comm_quality as quality
import numpy as np
from dated import RESULTS
from network import step_seconds
from resumable import Ledger, Line, spec_key, steps_to_reach

BASE, HALF = "ddp fp32", "ddp fp16"
ALONE = "alone"
TOLERANCE = 0.01
GOALS = {"exact": 0.0, "near": TOLERANCE}
"""Target losses in nats above DDP's final loss."""
OF_THE_BOUND, AT_TEN_MBIT = 0.8, 10.0


def trained(
    lines: quality.Lines, data: str, method: str, replicas: int = quality.REPLICAS, **options: Any
) -> dict[int, Line]:
    """Return the runs of a method at its best rate, with optional changes, by seed; empty if one of them failed."""
    rates = quality.best_rates(lines, data, method)
    if rates is None:
        return {}
    seeds = quality.setting_seeds(data) if options else quality.seeds_for(data, method)
    specs = {
        seed: quality.run_spec(data, method, seed=seed, replicas=replicas, **{**rates, **options}) for seed in seeds
    }
    found = {seed: lines.get(spec_key(spec)) for seed, spec in specs.items()}
    done = {seed: line for seed, line in found.items() if line is not None}
    return {} if any(line["eval_loss"] is None for line in done.values()) else done


def steps_on(link: dict[str, Any]) -> dict[str, float]:
    """Return seconds of a step by method from a file of network.py: the median over its rounds."""
    return {
        method: float(np.median([step_seconds(rows, method) for rows in rounds]))
        for method, rounds in link["methods"].items()
    }


def dense_seconds(steps: float, step_s: dict[str, float]) -> float:
    """Return the seconds of steps that average everything, which only some methods take and only some files time."""
    return steps * step_s[BASE] if steps else 0.0


def elapsed_seconds(data: str, method: str, steps: float, step_s: dict[str, float]) -> float:
    """Return the seconds of the first `steps` steps."""
    dense = min(steps, quality.warm_up_steps(method, quality.WORKS[data].steps))
    return dense_seconds(dense, step_s) + (steps - dense) * step_s[method]


def steps_in(data: str, method: str, seconds: float, step_s: dict[str, float]) -> float:
    """Return the number of steps that fit into a time."""
    dense = quality.warm_up_steps(method, quality.WORKS[data].steps)
    rest = seconds - dense_seconds(dense, step_s)
    return dense + rest / step_s[method if rest >= 0.0 else BASE]


def loss_after(curve: Sequence[Sequence[float]], steps: float) -> float | None:
    """Return the held-out loss after a number of steps, linear between a curve's points; None before the first."""
    at, losses = zip(*curve, strict=True)
    return None if steps < at[0] else float(np.interp(steps, at, losses))


def compared(lines: quality.Lines, data: str, step_s: dict[str, float], base: str = BASE) -> dict[str, dict[str, Any]]:
    """Return the times to DDP's loss and the losses at equal time, by method.

    Args:
        lines: result lines of comm_quality.py.
        data: of the lines.
        step_s: seconds of a step by measured method.
        base: the method to compare with.
    """
    trained_as = {method: BASE if method == HALF else method for method in step_s}
    runs = {method: found for method, name in trained_as.items() if (found := trained(lines, data, name))}
    if base not in runs:
        return {}
    shared = [seed for seed in runs[base] if all(seed in found for found in runs.values())]
    steps = quality.WORKS[data].steps
    end = min(elapsed_seconds(data, method, steps, step_s) for method in runs)
    result: dict[str, dict[str, Any]] = {}

    def seconds_to(method: str, above: float) -> float:
        """Return the seconds until the mean over seeds is `above` nats above DDP's final loss."""
        goal = float(np.mean([runs[base][seed]["heldout"][-1][1] for seed in shared])) + above
        took = steps_to_reach(mean_curve([runs[method][seed]["heldout"] for seed in shared]), goal)
        return float("inf") if took is None else elapsed_seconds(data, method, took, step_s)

    for method, found in runs.items():
        times = {name: seconds_to(method, above) for name, above in GOALS.items()}
        done = steps_in(data, method, end, step_s)
        losses = [loss_after(found[seed]["heldout"], done) for seed in shared]
        told = [loss for loss in losses if loss is not None]
        result[method] = {
            "step_s": step_s[method],
            **{f"{name}_s": time for name, time in times.items()},
            "seeds": shared,
            "faster": {name: seconds_to(base, GOALS[name]) / time for name, time in times.items()},
            "loss_at_equal_time": float(np.mean(told)) if told and len(told) == len(losses) else None,
        }
    return result


def mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Return the mean of curves that were evaluated at the same steps."""
    return [[points[0][0], float(np.mean([loss for _, loss in points]))] for points in zip(*curves, strict=True)]


def show(
    found: dict[str, dict[str, Any]],
    step_s: Mapping[str, float],
    sending_s: float,
    mbit: float | None,
    base_name: str = BASE,
) -> None:
    """Print a row per method, and the verdicts on the aims.

    Args:
        found: the result of `compared`.
        step_s: seconds of a step by method, including untrained methods and ALONE.
        sending_s: seconds to send all gradients over the link.
        mbit: rate of the link.
        base_name: the method to compare with.
    """
    base, alone_s = found[base_name], step_s.get(ALONE)
    print(f"of the mean over the seeds {', '.join(map(str, base['seeds']))}")
    faster = {name: row["faster"]["near"] for name, row in found.items()}
    for method, row in found.items():
        loss = row["loss_at_equal_time"]
        reached = [f"{share:.2f} x" if share else "never" for share in row["faster"].values()]
        print(
            f"{method:22} {1e3 * row['step_s']:9.1f} ms a step  to the loss {reached[0]:>8}, to {TOLERANCE:g} above it "
            f"{reached[1]:>8}  at equal time "
            f"{'not evaluated yet' if loss is None else f'{loss:.4f}'}"
        )
    ours = max((times for method, times in faster.items() if method.startswith("ours")), default=None)
    if ours is None:
        return
    # untrained methods: assume that they reach the loss in as many steps as DDP
    most = {method: base["step_s"] / seconds for method, seconds in step_s.items()}
    others = {
        method: faster.get(method, most[method]) for method in step_s if method.startswith(("powersgd", "diloco"))
    }
    if alone_s is not None:
        for name, bound in (("measured", base["step_s"] / alone_s), ("computed", 1.0 + sending_s / alone_s)):
            verdict = "met" if ours >= OF_THE_BOUND * bound else "MISSED"
            print(f"bound, {name}: {bound:.2f} x; ours {ours:.2f} x: {ours / bound:.0%} of it, {verdict}")
    if mbit == 10:
        print(f"at least {AT_TEN_MBIT:g} times DDP: {'met' if ours >= AT_TEN_MBIT else 'MISSED'}")
    if others:
        best = max(others, key=lambda method: others[method])
        at_most = "" if best in faster else "at most (it was not trained) "
        print(f"{best} {at_most}{others[best]:.2f} x: {'met' if ours >= others[best] else 'MISSED'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("links", type=Path, nargs="+", help="files of network.py")
    parser.add_argument("--results", type=Path, default=RESULTS / "comm-quality.jsonl", help="of comm_quality.py")
    parser.add_argument("--base", choices=[BASE, HALF], default=BASE, help="the averaged gradients to compare with")
    options = parser.parse_args()
    lines = Ledger(options.results, Path(quality.__file__)).lines()
    for path in options.links:
        link = json.loads(path.read_text(encoding="utf-8"))
        data = link.get("preset")
        if data not in quality.WORKS:
            raise SystemExit(f"{path.name}: no runs of this model, {data}")
        work = quality.WORKS[data]
        told = tuple(link.get(key) for key in ("batch", "length", "compute", "replicas", "with_times"))
        trained_on = (work.batch // quality.REPLICAS, work.data["seq_len"], work.compute, quality.REPLICAS)
        if told != (*trained_on, True):
            raise SystemExit(f"{path.name}: other steps than those that were trained, or of an older form: {told}")
        step_s = steps_on(link)
        delay = ", emulated" if link["emulated_round_trip"] else ""
        print(f"{path.name}: {link['rate']}, a round trip of {link['round_trip_ms']:.1f} ms{delay}")
        found = compared(lines, data, step_s, options.base)
        if not found:
            print("no runs of DDP to compare with: run comm_quality.py sweep and seeds")
            continue
        gradients = max(row["computed_bytes"] for rows in link["methods"][options.base] for row in rows)
        mbit = link["copied_mbit"]
        show(found, step_s, gradients * 8e-6 / mbit, 10 if link["rate"] == "10mbit" else None, options.base)
    return 0


if __name__ == "__main__":
    sys.exit(main())
