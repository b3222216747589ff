"""Charts of the reports: each is a pure function from runs, or a fitted law, to one self-contained SVG element."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from scantling.trainer.reporting.format import format_bytes, format_number, format_percent, format_seconds
from scantling.trainer.reporting.metrics import Column, finite_or_none
from scantling.trainer.reporting.runs import Run
from scantling.trainer.reporting.svg import BASE, COLORS, HEIGHT, INK, MEASURED, PLANNED, line_style, render_svg

if TYPE_CHECKING:
    from scantling.laws import Fit

PHASES = (
    ("data", "#94a3b8"),
    ("forward", "#7dabf8"),
    ("backward", "#2f5fd0"),
    ("exchange", "#d9480f"),
    ("optimizer", "#0f8a6a"),
    ("other", "#d6dbe3"),
)
"""Phases of a step and their colors; "other" is the remaining time of the step."""

PARTS = {
    "base": ("base_bytes", BASE),
    "weights": ("weight_bytes", "#2f5fd0"),
    "optimizer state": ("optimizer_state_bytes", "#0f8a6a"),
    "residuals": ("residual_bytes", "#56b4a0"),
    "gradients": ("gradient_bytes", "#7dabf8"),
    "activations": ("activation_bytes", "#d9480f"),
    "temporary": ("temporary_bytes", "#b7791f"),
    "allocator": ("allocator_bytes", "#a78bda"),
}
"""Parts of a plan's peak memory, from the bottom up: label, key of the plan, color."""

_MAX_POINTS = 1000
_SMOOTH_BLOCKS = 4096
_MAX_VALUE = 1e60
"""Larger values are not drawn, because sums and axis limits would overflow."""
_MAX_LAYERS, _RANK_CELLS = 60, 60
_RANK_COLORS = mpl.colormaps["Blues"]

Parts = list[tuple[float, str, str]]
"""Parts of a bar: value, label, color."""


def loss_chart(runs: Sequence[Run]) -> str | None:
    """Return the training loss over steps, raw (faint) and smoothed, with the held-out loss as dots.

    The first twentieth of the steps may exceed the axis, so that later differences are visible.
    """

    def draw(axes: Axes) -> None:
        _loss_curves(axes, runs, "step")
        _curve_axes(axes, "step", "loss (nats)")
        later = [
            np.r_[smooth(_values(run, "loss"))[start:], _values(run, "eval_loss")[start:]] for run, start in starts
        ]
        shown = np.concatenate(later)
        shown = shown[np.isfinite(shown)]
        low, high = (float(shown.min()), float(shown.max())) if len(shown) else (0.0, 0.0)
        if high > low:
            axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))

    if not _any_finite(runs, "loss"):
        return None
    starts = [(run, len(run.steps) // 20) for run in runs]
    return render_svg("loss", _describe("Loss", runs, "loss", lambda v: f"{v:.3f}"), draw)


def loss_by_tokens_chart(runs: Sequence[Run]) -> str | None:
    """Return training and held-out loss over training tokens, on a logarithmic axis, from the first step."""

    def draw(axes: Axes) -> None:
        _loss_curves(axes, runs, "tokens")
        axes.set_xscale("log")
        _curve_axes(axes, "tokens (log scale)", "loss (nats)")

    if not any((np.isfinite(_values(run, "loss")) & (_values(run, "tokens") > 0)).any() for run in runs):
        return None
    return render_svg("loss-by-tokens", _describe("Loss", runs, "loss", lambda v: f"{v:.3f}"), draw)


def curve_chart(runs: Sequence[Run], key: str, label: str) -> str | None:
    """Return one metric over the steps, raw (faint) and smoothed, from zero up to most of its values."""

    def draw(axes: Axes) -> None:
        highest = 0.0
        for i, run in enumerate(runs):
            values = _values(run, key)
            _curve(axes, i, run.steps, values)
            finite = values[np.isfinite(values)]
            if len(finite):
                highest = max(highest, 1.25 * float(np.percentile(finite, 98)), float(np.nanmax(smooth(values))))
        _curve_axes(axes, "step", label)
        if highest > 0:
            axes.set_ylim(0, highest)

    if not _any_finite(runs, key):
        return None
    return render_svg(key, _describe(label.capitalize(), runs, key, format_number), draw)


def phase_chart(runs: Sequence[Run]) -> str | None:
    """Return the median seconds of each phase of a step, as one stacked bar per run if there are several."""
    timed = [(run.name, phase_seconds(run)) for run in runs]
    timed = [(name, seconds) for name, seconds in timed if seconds]
    if not timed:
        return None
    bars = [(name, [(seconds.get(phase, 0.0), phase, color) for phase, color in PHASES]) for name, seconds in timed]
    listed = "; ".join(
        f"{name}: " + ", ".join(f"{phase} {format_seconds(value)}" for phase, value in seconds.items())
        for name, seconds in timed
    )
    description = f"Median time of one step by phase. {listed}"
    if len(runs) > 1:
        return render_svg(
            "phases", description, lambda axes: _stacked_bars(axes, bars, format_seconds), height=_bar_height(len(bars))
        )
    parts = bars[0][1]
    total = sum(value for value, _, _ in parts)
    rows = [
        (label, start, value, color, f"{format_seconds(value)}, {format_percent(value / total, 0)}")
        for label, start, value, color in _stack(parts)
    ]
    return render_svg("phases", description, lambda axes: _waterfall(axes, rows))


def memory_chart(runs: Sequence[Run]) -> str | None:
    """Return peak memory, planned by parts and as measured; stacked bars if there are several runs."""
    planned = [_planned_parts(run) for run in runs]
    measured = [_measured_parts(run) for run in runs]
    listed = "; ".join(
        f"{run.name}: planned {format_bytes(finite_or_none(run.plan.get('peak_memory_bytes')))},"
        f" measured {format_bytes(run.metric('peak_memory_bytes'))}"
        for run in runs
    )
    description = f"Peak memory, planned and measured. {listed}"
    if len(runs) > 1:
        bars = []
        for run, plan, result in zip(runs, planned, measured, strict=True):
            bars += [
                (f"{_truncate(run.name, 16)}, {kind}", parts)
                for kind, parts in (("planned", plan), ("measured", result))
            ]
        bars = [(name, parts) for name, parts in bars if any(value for value, _, _ in parts)]
        if not bars:
            return None
        return render_svg(
            "memory", description, lambda axes: _stacked_bars(axes, bars, format_bytes), height=_bar_height(len(bars))
        )
    rows = [(label, start, value, color, format_bytes(value)) for label, start, value, color in _stack(planned[0])]
    for label, parts in (("planned peak", planned[0]), ("measured peak", measured[0])):
        total = sum(value for value, _, _ in parts)
        if total:
            rows.append((label, 0.0, total, MEASURED if "measured" in label else PLANNED, format_bytes(total)))
    if not rows:
        return None
    return render_svg("memory", description, lambda axes: _waterfall(axes, rows), height=_bar_height(len(rows)))


def rank_chart(run: Run) -> str | None:
    """Return the ranks of TT layers over the steps: a row per layer, darker for a larger share of initial ranks."""
    if len(run.ranks) < 2:
        return None
    names = [name for name in run.ranks[0][1] if all(name in ranks for _, ranks in run.ranks)][:_MAX_LAYERS]
    if not names:
        return None
    last = int(run.steps[-1])
    edges = np.unique(np.linspace(run.ranks[0][0] - 1, last, _RANK_CELLS + 1).astype(int))
    changes = [step for step, _ in run.ranks]
    # ranks at the end of each cell: the last change at or before it
    at = [run.ranks[max(0, bisect_right(changes, edge) - 1)][1] for edge in edges[1:]]
    # (layers, cells)
    shares = np.array(
        [
            [_mean_inner_rank(ranks[name]) / max(1, _mean_inner_rank(run.ranks[0][1][name])) for ranks in at]
            for name in names
        ]
    )

    def draw(axes: Axes) -> None:
        for row, (name, values) in enumerate(zip(names, shares, strict=True)):
            # merge neighboring cells of equal rank into one span, so that the file stays small
            starts = [0, *(np.flatnonzero(np.diff(values)) + 1), len(values)]
            spans = [(edges[a], edges[b] - edges[a]) for a, b in itertools.pairwise(starts)]
            colors = [_RANK_COLORS(0.08 + 0.8 * values[a]) for a in starts[:-1]]
            axes.broken_barh(spans, (row - 0.42, 0.84), facecolors=colors, linewidth=0)
            axes.text(last * 1.01, row, f"{_mean_inner_rank(at[-1][name]):g}", va="center", fontsize=8)
        axes.set_yticks(range(len(names)), [_truncate(name[-26:]) for name in names], fontsize=8, parse_math=False)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(edges[0], last * 1.06)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)

    ends = ", ".join(f"{name} {_mean_inner_rank(at[-1][name]):g}" for name in names)
    return render_svg(
        "ranks", f"Mean rank of each layer at the end: {ends}", draw, height=max(HEIGHT, 0.7 + 0.2 * len(names))
    )


def fit_chart(fit: Fit) -> str:
    """Return predicted over measured loss, one dot per run, colored by size; a perfect prediction is on the line.

    Args:
        fit: fit of any law.
    """
    measured = fit.runs["loss"]
    # residuals are log(predicted / measured)
    predicted = measured * np.exp(fit.residuals)
    sizes = np.unique(fit.runs["N"])
    groups = np.array_split(sizes, min(len(sizes), len(COLORS)))

    def draw(axes: Axes) -> None:
        ends = [min(measured.min(), predicted.min()), max(measured.max(), predicted.max())]
        axes.plot(ends, ends, color="#b8c0cc", linewidth=1)
        for group, color in zip(groups, COLORS, strict=False):
            chosen = np.isin(fit.runs["N"], group)
            label = " to ".join(dict.fromkeys(format_number(float(each)) for each in (group[0], group[-1])))
            axes.plot(measured[chosen], predicted[chosen], "o", color=color, markersize=3.5, alpha=0.8, label=label)
        axes.set_xlabel("measured loss (nats)")
        axes.set_ylabel("predicted loss (nats)")
        axes.grid(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(title="parameters", loc="upper left", bbox_to_anchor=(1.0, 1.0))

    error = format_percent(fit.mean_error, 2)
    description = f"Predicted over measured loss of {fit.runs.count} runs; mean error {error}."
    return render_svg(f"fit-{fit.law.name}", description, draw)


def _mean_inner_rank(ranks: Sequence[int]) -> float:
    """Return the mean of the ranks between TT cores, without the outer ones."""
    return float(np.mean(ranks[1:-1])) if len(ranks) > 2 else 1.0


def phase_seconds(run: Run) -> dict[str, float]:
    """Return the median seconds of each phase after the first tenth of the steps, without phases that take no time."""
    settled = slice(len(run.steps) // 10, None)
    step = _values(run, "step_s")[settled]
    if not np.isfinite(step).any():
        return {}
    columns = {phase: _values(run, f"{phase}_s")[settled] for phase, _ in PHASES if phase != "other"}
    medians = {phase: float(np.nanmedian(values)) for phase, values in columns.items() if np.isfinite(values).any()}
    rest = float(np.nanmedian(step)) - sum(medians.values())
    return {phase: value for phase, value in {**medians, "other": max(0.0, rest)}.items() if value > 0}


def smooth(values: Column) -> Column:
    """Return a centered moving mean over 1/25 of the steps; it ignores NaN and shrinks its window at both ends.

    From 8,192 steps on it averages 4,096 to 8,191 blocks of steps, which is finer than a chart can show.
    """
    block = max(1, len(values) // _SMOOTH_BLOCKS)
    finite = np.isfinite(values)
    starts = np.arange(0, len(values), block)
    # (steps) -> (blocks): sums and counts of each block
    total = np.add.reduceat(np.where(finite, values, 0.0), starts)
    count = np.add.reduceat(finite.astype(float), starts)
    # an odd width keeps the window centered
    width = 2 * (len(starts) // 50) + 1
    middle = slice(width // 2, width // 2 + len(starts))
    # moving sums of values and of counts; their ratio is the mean of the finite values
    total, count = (np.convolve(each, np.ones(width), mode="full")[middle] for each in (total, count))
    result = np.full(len(starts), np.nan)
    np.divide(total, count, out=result, where=count > 0.5)
    return np.repeat(result, block)[: len(values)]


def _loss_curves(axes: Axes, runs: Sequence[Run], over: str) -> None:
    for i, run in enumerate(runs):
        x, held_out = _values(run, over), _values(run, "eval_loss")
        if over == "tokens":  # on a logarithmic axis
            x = np.where(x > 0, x, np.nan)
        _curve(axes, i, x, _values(run, "loss"))
        seen = _pick_evenly(np.flatnonzero(np.isfinite(held_out)), _MAX_POINTS)
        axes.plot(
            x[seen],
            held_out[seen],
            "o",
            color="white",
            markeredgecolor=line_style(i)[0],
            markeredgewidth=1.6,
            markersize=5.5,
            zorder=5,
        )


def _curve(axes: Axes, i: int, x: Column, y: Column) -> None:
    """Draw one run's values, raw (faint) and smoothed; a single value as a small square, because a line needs two."""
    color, dashes = line_style(i)
    extremes = _extremes(y)
    axes.plot(x[extremes], y[extremes], color=color, alpha=0.22, linewidth=0.9)
    shown = _pick_evenly(np.arange(len(x)), _MAX_POINTS)
    axes.plot(
        x[shown],
        smooth(y)[shown],
        color=color,
        linestyle=dashes,
        linewidth=1.8,
        marker="s" if len(x) == 1 else "",
        markersize=4,
    )


def _curve_axes(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.margins(x=0.02)
    if axes.get_xscale() == "log":
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=8))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        low, high = axes.get_xlim()
        if high - low < 1:  # only one step
            axes.set_xlim(low - 1, high + 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _waterfall(axes: Axes, rows: Sequence[tuple[str, float, float, str, str]]) -> None:
    """Draw horizontal bars, first on top, each (label, start, length, color, text at its end)."""
    longest = max(start + value for _, start, value, _, _ in rows)
    for row, (_, start, value, color, text) in enumerate(rows):
        axes.barh(row, value, left=start, height=0.66, color=color)
        axes.text(start + value + 0.015 * longest, row, text, va="center", fontsize=9.5)
    _bar_axes(axes, [label for label, *_ in rows], longest)


def _stacked_bars(axes: Axes, bars: Sequence[tuple[str, Parts]], show: Callable[[float], str]) -> None:
    """Draw horizontal bars, first on top, each of parts (value, label, color), with totals and one legend."""
    longest = max(sum(value for value, _, _ in parts) for _, parts in bars)
    labels: dict[str, str] = {}
    for row, (_, parts) in enumerate(bars):
        total = sum(value for value, _, _ in parts)
        for label, start, value, color in _stack(parts):
            axes.barh(row, value, left=start, height=0.62, color=color, edgecolor="white", linewidth=0.6)
            if value > 0.002 * longest:  # invisible parts need no legend
                labels.setdefault(label, color)
        axes.text(total + 0.015 * longest, row, show(total), va="center", fontsize=9.5)
    _bar_axes(axes, [name for name, _ in bars], longest)
    columns = 4 if sum(map(len, labels)) > 40 else 6
    handles = [Patch(color=color, label=label) for label, color in labels.items()]
    axes.figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, borderpad=0, handlelength=0.9, columnspacing=1.1
    )


def _bar_axes(axes: Axes, labels: Sequence[str], longest: float) -> None:
    axes.set_yticks(range(len(labels)), [_truncate(label) for label in labels], color=INK, parse_math=False)
    axes.set_ylim(max(len(labels), 3) - 0.4, -0.6)
    axes.set_xlim(0, 1.28 * longest)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)


def _stack(parts: Parts) -> list[tuple[str, float, float, str]]:
    """Return the nonempty parts as (label, start, length, color), each starting at the end of the previous one."""
    rows, start = [], 0.0
    for value, label, color in parts:
        if value > 0:
            rows.append((label, start, value, color))
            start += value
    return rows


def _planned_parts(run: Run) -> Parts:
    """Return the parts of the planned peak, with only the larger of gradients and activations.

    Activations are freed while gradients are allocated.
    """
    parts = {label: (_size(run.plan.get(key)), label, color) for label, (key, color) in PARTS.items()}
    del parts[min("gradients", "activations", key=lambda label: parts[label][0])]
    return list(parts.values())


def _measured_parts(run: Run) -> Parts:
    peak, base = (_size(run.result.get(key)) for key in ("peak_memory_bytes", "base_memory_bytes"))
    if not peak:
        return []
    return [(base, "base", BASE), (peak - base, "measured", MEASURED)]


def _bar_height(bars: int) -> float:
    return max(HEIGHT, 0.9 + 0.3 * bars)


def _pick_evenly(indices: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """Return at most `most` of the indices, evenly spaced, including the first and the last."""
    if len(indices) <= most:
        return indices
    chosen: NDArray[np.intp] = indices[np.linspace(0, len(indices) - 1, most).round().astype(int)]
    return chosen


def _extremes(y: Column) -> NDArray[np.intp]:
    """Return indices of at most about `_MAX_POINTS` values: minimum and maximum of each bucket, and both ends."""
    if len(y) <= _MAX_POINTS:
        return np.arange(len(y))
    starts = np.linspace(0, len(y), _MAX_POINTS // 2 + 1).astype(int)
    # NaN becomes inf, so that argmin never chooses it unless the whole bucket is NaN
    parts = (np.where(np.isfinite(y), y, np.inf), np.where(np.isfinite(y), -y, np.inf))
    buckets = list(itertools.pairwise(starts))
    chosen = [start + int(part[start:end].argmin()) for start, end in buckets for part in parts]
    return np.unique([0, *chosen, len(y) - 1])


def _values(run: Run, key: str) -> Column:
    """Return a column without values that are too large to draw."""
    values = run.column(key)
    return np.where(np.abs(values) <= _MAX_VALUE, values, np.nan)


def _size(value: object) -> float:
    """Return a number of bytes that can be drawn; 0 for everything else."""
    size = finite_or_none(value)
    return size if size is not None and 0 < size <= _MAX_VALUE else 0.0


def _any_finite(runs: Sequence[Run], key: str) -> bool:
    return any(np.isfinite(_values(run, key)).any() for run in runs)


def _describe(title: str, runs: Sequence[Run], key: str, show: Callable[[float], str]) -> str:
    parts = []
    for run in runs:
        smoothed = smooth(_values(run, key))
        finite = smoothed[np.isfinite(smoothed)]
        if len(finite):
            parts.append(f"{run.name}: from {show(float(finite[0]))} to {show(float(finite[-1]))}")
    return f"{title} over {len(max(runs, key=lambda run: len(run.steps)).steps)} steps. " + "; ".join(parts)


def _tick(value: float) -> str:
    """Return a tick label, such as `8k` for `8.00k`."""
    return re.sub(r"\.?0+(?=[a-zA-Z]|$)", "", text) if "." in (text := format_number(value)) else text


def _truncate(name: str, most: int = 26) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
