"""How long each way to exchange takes to a loss on a slow link: what was trained, with the times of steps there.

    python benchmarks/time_to_loss.py benchmarks/results/network-2-10mbit-*.json

The losses by step are those of `comm_quality.py --data llama-10m-long`; what a step takes is what `network.py` measured
of the same model and the same batch on a link. A time to a loss is the product of the two: to what AdamW under DDP ends
at, and to 0.01 nats above it, since runs of one method differ by as much from seed to seed. Losses are means over the
seeds that a method has most runs of. A method that does not get there in as many steps may in a longer run, whose
learning rate decays later. Steps in which PowerSGD still averages everything take as long as those of DDP.

`bound` is what an exchange that takes no time would be faster than DDP by, at equal steps: of measured steps, and of
computing and then sending all gradients. The loss at equal time is that of every method when the first of them has
done all its steps: of DDP that of the best run with no more steps than that, and a schedule of its own, or of the long
run by then, whichever is lower.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import comm_quality as quality
import numpy as np
from dated import RESULTS
from network import step_of
from resumable import Ledger, Line, key_of, steps_to_reach

DATA, PRESET = "llama-10m-long", "llama-10m"
BASE = "ddp fp32"
ALONE = "alone"
TOLERANCE = 0.01
GOALS = {"exact": 0.0, "near": TOLERANCE}
"""How far above DDP's last loss."""
OF_THE_BOUND, AT_TEN_MBIT = 0.8, 10.0


def trained(
    lines: quality.Lines, data: str, method: str, replicas: int = quality.REPLICAS, **options: Any
) -> dict[int, Line]:
    """The runs of a method at its best rate, or of it with other options, by seed; none where one of them failed."""
    rate = quality.best_rate(lines, data, method)
    if rate is None:
        return {}
    seeds = quality.WORKS[data].few_seeds if options else quality.seeds_of(data, method)
    found = {seed: lines.get(key_of(quality.run_spec(data, method, rate, seed, replicas, **options))) for seed in seeds}
    done = {seed: line for seed, line in found.items() if line is not None}
    return {} if any(line["eval_loss"] is None for line in done.values()) else done


def steps_on(link: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step by method, in a file of network.py: the median over its rounds."""
    return {
        method: float(np.median([step_of(rows, method) for rows in rounds]))
        for method, rounds in link["methods"].items()
    }


def seconds_of(data: str, method: str, steps: float, step_s: dict[str, float]) -> float:
    """What so many steps from the beginning take."""
    dense = min(steps, quality.warm_up_steps(method, quality.WORKS[data].steps))
    return dense * step_s[BASE] + (steps - dense) * step_s[method]


def steps_in(data: str, method: str, seconds: float, step_s: dict[str, float]) -> float:
    """How many steps that time is enough for."""
    dense = quality.warm_up_steps(method, quality.WORKS[data].steps)
    if seconds <= dense * step_s[BASE]:
        return seconds / step_s[BASE]
    return dense + (seconds - dense * step_s[BASE]) / step_s[method]


def loss_after(curve: Sequence[Sequence[float]], steps: float) -> float | None:
    """The held-out loss after so many steps, linear between the points of a curve; None before its first."""
    at, losses = zip(*curve, strict=True)
    return None if steps < at[0] else float(np.interp(steps, at, losses))


def other_lengths(lines: quality.Lines, method: str, seed: int) -> list[Line]:
    """The runs of a method in fewer or more steps than the others."""
    rate = quality.best_rate(lines, DATA, method)
    if rate is None:
        return []
    specs = quality.length_specs(DATA, method, rate, seed, (*quality.SHORTER, *quality.LONGER))
    found = [lines.get(key_of(spec)) for spec in specs]
    return [line for line in found if line is not None and line["eval_loss"]]


def compared(lines: quality.Lines, step_s: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Times to the loss of DDP and losses at equal time, by method.

    Args:
        lines: of comm_quality.py.
        step_s: seconds of a step by method, of those that were measured.
    """
    runs = {method: found for method in step_s if (found := trained(lines, DATA, method))}
    if BASE not in runs:
        return {}
    shared = [seed for seed in runs[BASE] if all(seed in found for found in runs.values())]
    steps = quality.WORKS[DATA].steps
    end = min(seconds_of(DATA, method, steps, step_s) for method in runs)
    others = {method: {seed: other_lengths(lines, method, seed) for seed in shared} for method in runs}
    shorter = {method: with_most(found, lambda line: line["steps"] < steps) for method, found in others.items()}
    equal = [seed for seed in shared if all(seed in seeds for seeds in shorter.values())]
    result: dict[str, dict[str, Any]] = {}

    def seconds_to(method: str, seeds: Sequence[int], above: float) -> float:
        """Until the mean over seeds of a run of any length is at that of DDP's last loss, and so much above it."""
        goal = float(np.mean([runs[BASE][seed]["heldout"][-1][1] for seed in seeds])) + above
        every: list[dict[Any, Any]] = [
            {(line["steps"], line["lr"]): line["heldout"] for line in (runs[method][seed], *others[method][seed])}
            for seed in seeds
        ]
        curves = [mean_curve([own[key] for own in every]) for key in every[0] if all(key in own for own in every)]
        took = [reached for curve in curves if (reached := steps_to_reach(curve, goal)) is not None]
        return seconds_of(DATA, method, min(took), step_s) if took else float("inf")

    for method, found in runs.items():
        seeds = with_most(others[method], lambda line: line["steps"] > steps)
        times = {name: seconds_to(method, seeds, above) for name, above in GOALS.items()}
        done = steps_in(DATA, method, end, step_s)
        losses: list[float | None] = []
        for seed in equal:
            known = [loss_after(found[seed]["heldout"], done)]
            known += [other["eval_loss"] for other in others[method][seed] if other["steps"] <= done]
            losses.append(min((loss for loss in known if loss is not None), default=None))
        told = [loss for loss in losses if loss is not None]
        result[method] = {
            "step_s": step_s[method],
            **{f"{name}_s": time for name, time in times.items()},
            "seeds": seeds,
            "faster": {name: seconds_to(BASE, seeds, GOALS[name]) / time for name, time in times.items()},
            "loss_at_equal_time": float(np.mean(told)) if told and len(told) == len(losses) else None,
            "equal_seeds": equal,
        }
    return result


def mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Of runs that were evaluated at the same steps."""
    return [[points[0][0], float(np.mean([loss for _, loss in points]))] for points in zip(*curves, strict=True)]


def with_most(found: dict[int, list[Line]], counts: Callable[[Line], bool]) -> list[int]:
    """The seeds that have as many runs of some lengths as any."""
    numbers = {seed: sum(map(counts, lines)) for seed, lines in found.items()}
    return [seed for seed, number in numbers.items() if number == max(numbers.values())]


def show(found: dict[str, dict[str, Any]], step_s: Mapping[str, float], sending_s: float, mbit: float | None) -> None:
    """A row a method, and what the aims say.

    Args:
        found: of `compared`.
        step_s: what a step takes by method, also of those that were not trained, and of ALONE.
        sending_s: what all gradients take on the link.
        mbit: its rate.
    """
    base, alone_s = found[BASE], step_s.get(ALONE)
    print(f"of the mean over seeds; at equal time those of {', '.join(map(str, base['equal_seeds']))}")
    faster = {name: row["faster"]["near"] for name, row in found.items()}
    for method, row in found.items():
        loss = row["loss_at_equal_time"]
        reached = [f"{share:.2f} x" if share else "never" for share in row["faster"].values()]
        print(
            f"{method:22} {1e3 * row['step_s']:9.1f} ms a step  to the loss {reached[0]:>8}, to {TOLERANCE:g} above it "
            f"{reached[1]:>8} (seeds {', '.join(map(str, row['seeds']))})  at equal time "
            f"{'not evaluated yet' if loss is None else f'{loss:.4f}'}"
        )
    ours = max((times for method, times in faster.items() if method.startswith("ours")), default=None)
    if ours is None:
        return
    # of those that were not trained: were they to get there in as many steps as DDP
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
    options = parser.parse_args()
    lines = Ledger(options.results, Path(quality.__file__)).lines()
    for path in options.links:
        link = json.loads(path.read_text(encoding="utf-8"))
        work = quality.WORKS[DATA]
        told = tuple(link.get(key) for key in ("preset", "batch", "length", "compute", "replicas", "with_times"))
        trained_on = (work.batch // quality.REPLICAS, work.data["seq_len"], work.compute, quality.REPLICAS)
        if told != (PRESET, *trained_on, True):
            raise SystemExit(f"{path.name}: other steps than those that were trained, or of an older form: {told}")
        step_s = steps_on(link)
        delay = ", emulated" if link["emulated_round_trip"] else ""
        print(f"{path.name}: {link['rate']}, a round trip of {link['round_trip_ms']:.1f} ms{delay}")
        found = compared(lines, step_s)
        if not found:
            print("no runs of DDP to compare with: run comm_quality.py sweep and seeds")
            continue
        gradients = max(row["computed_bytes"] for rows in link["methods"][BASE] for row in rows)
        mbit = link["copied_mbit"]
        show(found, step_s, gradients * 8e-6 / mbit, 10 if link["rate"] == "10mbit" else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
