"""The report's charts: each is a pure function from runs to one SVG, with text as text and no reference to anything outside.

Made with matplotlib's object interface (no pyplot, no global state). The same runs give the same bytes.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from scantling.reporting.format import format_bytes, format_number, format_seconds
from scantling.reporting.runs import Column, Run, number

COLORS = ("#2563eb", "#d9480f", "#0f8a6a", "#a21caf", "#b7791f", "#0e7490", "#be123c", "#4b5563")
"""One a run, in order, told apart also by people who see few colours; they repeat with dashed lines."""

PHASES = (
    ("data", "#94a3b8"),
    ("forward", "#7dabf8"),
    ("backward", "#2f5fd0"),
    ("exchange", "#d9480f"),
    ("optimizer", "#0f8a6a"),
    ("other", "#d6dbe3"),
)
"""The parts of a step and their colours; "other" is what the parts leave of the step's time."""

PLAN_PARTS = (
    ("weights", "weight_bytes", "#2f5fd0"),
    ("gradients", "gradient_bytes", "#7dabf8"),
    ("optimizer state", "optimizer_state_bytes", "#0f8a6a"),
    ("activations", "activation_bytes", "#d9480f"),
    ("temporary", "temporary_bytes", "#b7791f"),
    ("base", "base_bytes", "#d6dbe3"),
)
"""What a plan's peak memory is made of."""

MEASURED_PARTS = (("measured above base", "#4b5563"), ("base", "#d6dbe3"))

_INK, _FAINT, _GRID = "#1c2430", "#5b6675", "#e4e8ee"
_WIDTH, _HEIGHT = 5.0, 3.0
_MOST_POINTS = 1000

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.edgecolor": "#b8c0cc",
    "axes.labelcolor": _FAINT,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.color": _INK,
}


def loss_chart(runs: Sequence[Run], *, over: str = "step") -> str | None:
    """Training loss, every step faint and smoothed, with the held-out loss as dots, over `step` or `tokens`."""

    def draw(axes: Axes) -> None:
        for place, run in enumerate(runs):
            color, dashes = line_style(place)
            x, loss, held_out = run.column(over), run.column("loss"), run.column("eval_loss")
            axes.plot(*_thin(x, loss), color=color, alpha=0.22, linewidth=0.9)
            axes.plot(*_thin(x, smooth(loss)), color=color, linestyle=dashes, linewidth=1.8)
            seen = np.isfinite(held_out)
            axes.plot(
                x[seen], held_out[seen], "o", color="white", markeredgecolor=color, markeredgewidth=1.6, markersize=5.5, zorder=5
            )
        _curve_axes(axes, "tokens" if over == "tokens" else "step", "loss (nats)")

    if not _any_finite(runs, "loss"):
        return None
    return _svg(f"loss-{over}", _describe("Loss", runs, "loss", lambda v: f"{v:.3f}"), draw)


def curve_chart(runs: Sequence[Run], key: str, label: str, *, show: Callable[[float], str] = format_number) -> str | None:
    """One column of the records over the steps, every step faint and smoothed."""

    def draw(axes: Axes) -> None:
        highest = 0.0
        for place, run in enumerate(runs):
            color, dashes = line_style(place)
            values, smoothed = run.column(key), smooth(run.column(key))
            axes.plot(*_thin(run.steps, values), color=color, alpha=0.22, linewidth=0.9)
            axes.plot(*_thin(run.steps, smoothed), color=color, linestyle=dashes, linewidth=1.8)
            finite = values[np.isfinite(values)]
            if len(finite):
                highest = max(highest, 1.25 * float(np.percentile(finite, 98)), float(np.nanmax(smoothed)))
        _curve_axes(axes, "step", label)
        if highest > 0:
            axes.set_ylim(0, highest)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))

    return _svg(key, _describe(label.capitalize(), runs, key, show), draw) if _any_finite(runs, key) else None


def phase_chart(runs: Sequence[Run]) -> str | None:
    """Where the time of a step goes: one stacked bar a run, of the median seconds of each phase."""
    rows = [(run.name, phase_seconds(run)) for run in runs]
    if not any(seconds for _, seconds in rows):
        return None
    used = [(phase, color) for phase, color in PHASES if any(seconds.get(phase, 0.0) > 0 for _, seconds in rows)]

    def draw(axes: Axes) -> None:
        bars = [(name, [(seconds.get(phase, 0.0), phase, color) for phase, color in used]) for name, seconds in rows]
        _stacked_bars(axes, bars, format_seconds)

    listed = "; ".join(
        f"{name}: " + ", ".join(f"{phase} {format_seconds(value)}" for phase, value in seconds.items())
        for name, seconds in rows
    )
    return _svg("phases", f"Median time of one step by phase. {listed}", draw, height=_bar_height(len(rows)))


def memory_chart(runs: Sequence[Run]) -> str | None:
    """Peak memory: for each run the plan by its parts, and below it what was measured."""
    bars: list[tuple[str, list[tuple[float, str, str]]]] = []
    listed = []
    for run in runs:
        parts = [(number(run.plan.get(key)) or 0.0, label, color) for label, key, color in PLAN_PARTS]
        if any(value for value, _, _ in parts):
            bars.append((f"{_short(run.name)}, planned", parts))
        peak, base = run.figure("peak_memory_bytes"), run.figure("base_memory_bytes") or 0.0
        if peak is not None:
            (above, above_color), (below, below_color) = MEASURED_PARTS
            bars.append((f"{_short(run.name)}, measured", [(peak - base, above, above_color), (base, below, below_color)]))
            listed.append(f"{run.name}: planned {format_bytes(number(run.plan.get('peak_memory_bytes')))}, measured {format_bytes(peak)}")
    if not bars:
        return None

    def draw(axes: Axes) -> None:
        _stacked_bars(axes, bars, format_bytes)

    return _svg("memory", f"Peak memory, planned and measured. {'; '.join(listed)}", draw, height=_bar_height(len(bars)))


def phase_seconds(run: Run) -> dict[str, float]:
    """Median seconds of each phase of a step after the first tenth of the steps; phases that take no time are left out."""
    settled = slice(len(run.steps) // 10, None)
    step = run.column("step_s")[settled]
    if not np.isfinite(step).any():
        return {}
    columns = {phase: run.column(f"{phase}_s")[settled] for phase, _ in PHASES if phase != "other"}
    medians = {phase: float(np.nanmedian(values)) for phase, values in columns.items() if np.isfinite(values).any()}
    rest = float(np.nanmedian(step)) - sum(medians.values())
    return {phase: value for phase, value in {**medians, "other": max(0.0, rest)}.items() if value > 0}


def smooth(values: Column) -> Column:
    """A centred moving mean over about a fortieth of the steps; NaN counts as absent, the ends use what there is."""
    width = 2 * (len(values) // 80) + 1
    finite = np.isfinite(values)
    window = np.ones(width)
    total = np.convolve(np.where(finite, values, 0.0), window, mode="full")
    count = np.convolve(finite.astype(float), window, mode="full")
    middle = slice(width // 2, width // 2 + len(values))
    result = np.full(len(values), np.nan)
    np.divide(total[middle], count[middle], out=result, where=count[middle] > 0.5)
    return result


def line_style(place: int) -> tuple[str, str]:
    """Colour and dashes of the run at this place."""
    return COLORS[place % len(COLORS)], ("-", "--", ":", "-.")[place // len(COLORS) % 4]


def _curve_axes(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))


def _stacked_bars(
    axes: Axes, bars: Sequence[tuple[str, Sequence[tuple[float, str, str]]]], show: Callable[[float], str]
) -> None:
    """Horizontal bars, first on top, each of parts (value, label, colour), with its total at its end and one legend."""
    longest = max(sum(value for value, _, _ in parts) for _, parts in bars)
    labels: dict[str, str] = {}
    for row, (_, parts) in enumerate(bars):
        left = 0.0
        for value, label, color in parts:
            if value > 0:
                axes.barh(row, value, left=left, height=0.62, color=color, edgecolor="white", linewidth=0.6)
                labels.setdefault(label, color)
                left += value
        axes.text(left + 0.015 * longest, row, show(left), va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [_short(name) for name, _ in bars], color=_INK, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * longest)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    handles = [mpl.patches.Patch(color=color, label=label) for label, color in labels.items()]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=3, borderpad=0, handlelength=0.9, columnspacing=1.2
    )


def _bar_height(bars: int) -> float:
    return max(_HEIGHT, 0.9 + 0.34 * bars)


def _svg(name: str, description: str, draw: Callable[[Axes], None], *, height: float = _HEIGHT) -> str:
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        # With text as text, the reader's own fonts draw what ours lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(file.getvalue(), name, description)


def _inline(text: str, name: str, description: str) -> str:
    """An SVG file as an element for HTML: scaled by its box, described, its ids unique in the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    used = set(re.findall(r"""(?:href="#|url\(#)([^")]+)""", text))
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", text)
    text = re.sub(r"""(href="#|url\(#)""", rf"\g<1>{name}-", text)
    box = re.search(r'viewBox="([^"]+)"', text)
    if box is None:
        raise AssertionError("matplotlib writes a viewBox")
    label = html.escape(description, quote=True)
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box[1]}"'
        f' role="img" aria-label="{label}">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1).strip()


def _thin(x: Column, y: Column) -> tuple[Column, Column]:
    """At most about a thousand points, evenly chosen, the last always among them."""
    if len(x) <= _MOST_POINTS:
        return x, y
    chosen = np.unique(np.linspace(0, len(x) - 1, _MOST_POINTS).round().astype(int))
    return x[chosen], y[chosen]


def _any_finite(runs: Sequence[Run], key: str) -> bool:
    return any(np.isfinite(run.column(key)).any() for run in runs)


def _describe(title: str, runs: Sequence[Run], key: str, show: Callable[[float], str]) -> str:
    parts = []
    for run in runs:
        smoothed = smooth(run.column(key))
        finite = smoothed[np.isfinite(smoothed)]
        if len(finite):
            parts.append(f"{run.name}: from {show(float(finite[0]))} to {show(float(finite[-1]))}")
    return f"{title} over {len(max(runs, key=lambda run: len(run.steps)).steps)} steps. " + "; ".join(parts)


def _short(name: str, most: int = 26) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
