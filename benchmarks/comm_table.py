"""Print the tables of docs/evidence/network*.md in Markdown: loss, bytes and times of the communication methods.

    python benchmarks/comm_table.py --data novels benchmarks/results/network-*-novels-*.json
    python benchmarks/comm_table.py --times benchmarks/results/network-2-10mbit-*.json      one column per link

The losses are lines of results/comm-quality.jsonl, at each method's best rate. Bytes and times come from the files of
network.py, measured with the same model and batch; without such files bytes are computed. Differences are paired by
seed, with 95 % intervals. The loss at equal time is a method's loss at the moment when the first method has done all
its steps. It is read from the method's own curve, so from a run that has not ended and whose learning rate is still
high.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import comm_quality as quality
import numpy as np
from dated import RESULTS
from network import cpu_seconds
from resumable import Ledger, Line, interval, spec_key, steps_to_reach
from time_to_loss import ALONE, BASE, HALF, elapsed_seconds, loss_after, steps_in, steps_on, trained

from scantling.comm import allreduce_wire_bytes

Link = dict[str, Any]
RATES = ("100mbit", "1gbit", "uncapped")
NONE = "–"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_mean(values: Sequence[float], form: str) -> str:
    """Format a mean and, given several values, its 95 % interval."""
    if not values:
        return NONE
    mean, width = interval(values)
    return f"{mean:{form}}" + ("" if len(values) < 2 else f" ± {width:{form.lstrip('+')}}")


def format_seeds(runs: dict[int, Line], value: str, form: str = ".3f", scale: float = 1.0) -> str:
    return format_mean([scale * line[value] for line in runs.values()], form)


def difference(runs: dict[int, Line], control: dict[int, Line]) -> str:
    """Format the difference to the control, paired by seed."""
    if runs is control:
        return NONE
    return format_mean(
        [line["eval_loss"] - control[seed]["eval_loss"] for seed, line in runs.items() if seed in control], "+.3f"
    )


def reached(runs: dict[int, Line], control: dict[int, Line]) -> str:
    """Return the steps to the last loss of the control: the median over the seeds that both have."""
    steps = [
        steps_to_reach(line["heldout"], control[seed]["heldout"][-1][1])
        for seed, line in runs.items()
        if seed in control
    ]
    middle = float(np.median([float("inf") if step is None else step for step in steps])) if steps else float("inf")
    return f"{middle:.0f}" if np.isfinite(middle) else "never"


def loss_table(lines: quality.Lines, data: str, *, has_bytes: bool) -> str:
    """Return rates, losses and differences to AdamW under DDP, with two replicas and with more if such runs exist.

    Args:
        lines: result lines of comm_quality.py.
        data: the data set of the losses.
        has_bytes: add the computed bytes per step.
    """
    work = quality.WORKS[data]
    control = trained(lines, data, BASE, quality.REPLICAS)
    right = any("accuracy" in line for line in control.values())
    methods = quality.methods_for(data)
    others = {count: {method: trained(lines, data, method, count) for method in methods} for count in quality.ALSO}
    more = [count for count, found in others.items() if any(found.values())]
    header = ["exchange", "rate", *(["kB per step", "× fewer than 16 bits"] if has_bytes else [])]
    header += ["seeds", "held-out loss", "to AdamW", "steps to its loss"]
    header += ["% right"] if right else []
    header += [title for count in more for title in (f"{count} replicas: loss", "to AdamW")]
    rows = []
    for method in methods:
        rates = quality.best_rates(lines, data, method)
        runs = control if method == BASE else trained(lines, data, method, quality.REPLICAS)
        if rates is None or not runs:
            continue
        row = [method, ", ".join(f"{rate:g}" for rate in rates.values())]
        if has_bytes:
            line = next(iter(runs.values()))
            sent, dense = line["computed_bytes"], allreduce_wire_bytes(2 * line["num_parameters"], quality.REPLICAS)
            row += [f"{sent / 1e3:,.1f}", f"{dense / sent:.{0 if dense > 10.0 * sent else 1}f}"]
        row += [str(len(runs)), format_seeds(runs, "eval_loss"), difference(runs, control)]
        row += [f"{work.steps}" if runs is control else reached(runs, control)]
        row += [format_seeds(runs, "accuracy", ".1f", 100.0)] if right else []
        for count in more:
            found, dense = others[count][method], others[count][BASE] or control
            row += [format_seeds(found, "eval_loss"), difference(found, dense)]
        rows.append(row)
    return markdown(header, rows)


def settings_table(lines: quality.Lines, data: str) -> str:
    """Return loss differences of other settings to the method's own, paired by seed, and their relative bytes."""
    rows = []
    for name, (method, options) in quality.settings_for(data).items():
        own, runs = trained(lines, data, method), trained(lines, data, method, **options)
        shares = [runs[seed]["computed_bytes"] / own[seed]["computed_bytes"] for seed in runs if seed in own]
        if shares:
            loss = format_seeds(runs, "eval_loss")
            rows.append([name, method, loss, difference(runs, own), f"{np.mean(shares):.2f}"])
    return markdown(["setting", "of", "held-out loss", "to the method's own", "bytes of its"], rows) if rows else ""


def rates_table(lines: quality.Lines, data: str) -> str:
    """Return the losses of the phase `rates` and their differences to averaged gradients, paired by seed."""
    found: dict[str, dict[int, Line]] = {}
    for name, spec in quality.rate_specs(data):
        if (line := lines.get(spec_key(spec))) is not None:
            found.setdefault(name, {})[spec["seed"]] = line
    control = next(iter(found.values()), {})
    rows = [[name, format_seeds(runs, "eval_loss"), difference(runs, control)] for name, runs in found.items()]
    return markdown(["averaged in every step", "held-out loss", "to averaged gradients"], rows) if rows else ""


def sent_bytes(link: Link | None, method: str) -> tuple[float, float] | None:
    """Return the bytes of a step, counted and by formula, for the replica that sends most."""
    rounds = link["methods"].get(method) if link else None
    if not rounds:
        return None
    rows = [row for each in rounds for row in each]
    return max(row["sent_bytes"] for row in rows), max(row["computed_bytes"] for row in rows)


def link_table(lines: quality.Lines, data: str, links: dict[tuple[int, str], Link]) -> str:
    """Return a table of bytes with 2, 4 and 8 replicas, and of step times with two.

    Args:
        lines: result lines of comm_quality.py.
        data: the data set of the losses.
        links: reports of network.py by number of replicas and rate.
    """
    slow = links[quality.REPLICAS, RATES[0]]
    step_s = steps_on(slow)
    times = {rate: steps_on(links[key]) for rate in RATES if (key := (quality.REPLICAS, rate)) in links}
    runs = {method: trained(lines, data, method, quality.REPLICAS) for method in step_s}
    timed = {method: found for method, found in runs.items() if found}
    end = min((elapsed_seconds(data, method, quality.WORKS[data].steps, step_s) for method in timed), default=0.0)
    header = ["exchange", "kB counted", "of the formula", "× fewer than fp32"]
    header += [f"kB, {count} replicas" for count in quality.ALSO]
    header += [f"ms at {rate}" for rate in RATES] + ["ms of a core", "loss at equal time"]
    whole = sent_bytes(slow, BASE)
    rows = []
    for method in slow["methods"]:
        counted = sent_bytes(slow, method)
        if method == ALONE or counted is None or whole is None:
            continue
        row = [method, f"{counted[0] / 1e3:.1f}", f"{counted[0] / counted[1]:.3f}", f"{whole[0] / counted[0]:.0f}"]
        for count in quality.ALSO:
            other = next(
                (
                    found
                    for (number, _), link in links.items()
                    if number == count and (found := sent_bytes(link, method))
                ),
                None,
            )
            row.append(NONE if other is None else f"{other[0] / 1e3:.1f}")
        for rate in RATES:
            seconds = times.get(rate, {}).get(method)
            row.append(NONE if seconds is None else f"{1e3 * seconds:.0f}")
        row.append(f"{1e3 * (cpu_seconds(slow['methods'][method]) - cpu_seconds(slow['methods'][ALONE])):+.0f}")
        found = [
            loss_after(line["heldout"], steps_in(data, method, end, step_s)) for line in timed.get(method, {}).values()
        ]
        known = [loss for loss in found if loss is not None]
        rows.append([*row, f"{np.mean(known):.3f}" if known and len(known) == len(found) else NONE])
    return markdown(header, rows)


def times_table(links: Sequence[Link]) -> str:
    """Return bytes, step times and speed-ups over DDP, one column per link, of the methods that all files have.

    The bytes are those counted on the first link. All files must have a run of DDP in 32 bits, or all one in 16.
    """
    columns = [steps_on(link) for link in links]
    base = next(method for method in (BASE, HALF) if all(method in times for times in columns))
    whole = sent_bytes(links[0], base)
    header = ["exchange", "kB counted", "× fewer"]
    for link in links:
        trip = f", round trip of {link['round_trip_ms']:.0f} ms" if link["emulated_round_trip"] else ""
        header += [f"{link['rate']}{trip}: ms", "× faster"]
    rows = []
    for method in columns[0]:
        if not all(method in times for times in columns):
            continue
        sent = sent_bytes(links[0], method)
        if sent is None or whole is None or method == ALONE:
            row = [method, NONE, NONE]
        else:
            row = [method, f"{sent[0] / 1e3:,.1f}", f"{whole[0] / sent[0]:.0f}"]
        for times in columns:
            row += [f"{1e3 * times[method]:.0f}", f"{times[base] / times[method]:.1f}"]
        rows.append(row)
    return markdown(header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("links", type=Path, nargs="*", help="files of network.py, of one model; a later one counts")
    parser.add_argument("--data", choices=list(quality.WORKS), default="novels")
    parser.add_argument("--times", action="store_true", help="times of steps alone, a column a link")
    parser.add_argument("--results", type=Path, default=RESULTS / "comm-quality.jsonl", help="of comm_quality.py")
    options = parser.parse_args()
    read: dict[Path, Link] = {path: json.loads(path.read_text(encoding="utf-8")) for path in options.links}
    if options.times:
        print(times_table(list(read.values())))
        return 0
    lines = Ledger(options.results, Path(quality.__file__)).lines()
    print(loss_table(lines, options.data, has_bytes=not read))
    for table in (settings_table(lines, options.data), rates_table(lines, options.data)):
        if table:
            print(f"\n{table}")
    links: dict[tuple[int, str], Link] = {}
    for _, link in sorted(read.items()):
        if not link["emulated_round_trip"]:
            links[link["replicas"], link["rate"]] = link
    if (quality.REPLICAS, RATES[0]) in links:
        print(f"\n{link_table(lines, options.data, links)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
