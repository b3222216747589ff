"""SVG output of the charts: style, colors and their dark counterparts, and text as text.

The charts use matplotlib's object interface: no pyplot, no global state. Equal input gives equal bytes.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

COLORS = ("#2563eb", "#d9480f", "#0f8a6a", "#a21caf", "#b7791f", "#0e7490", "#be123c", "#4b5563")
"""Colors of the runs, in order, also distinguishable by color-blind readers; they repeat with dashed lines."""

BASE, PLANNED, MEASURED = "#c9d0da", "#8a94a3", "#3b4554"

INK, _FAINT, _GRID, _EDGE, _PAPER = "#1c2430", "#5b6675", "#e4e8ee", "#b8c0cc", "#ffffff"
_WIDTH, HEIGHT = 5.0, 3.0

DARK = {
    **dict(
        zip(
            COLORS,
            ("#6ea0ff", "#ff8a4c", "#3ecf9f", "#e07bea", "#e5b04b", "#4cc3dc", "#ff7b93", "#aab4c2"),
            strict=True,
        )
    ),
    "#2f5fd0": "#5b8def",
    "#94a3b8": "#8796ab",
    "#7dabf8": "#a9c6fb",
    "#d6dbe3": "#5a6472",
    BASE: "#56606f",
    PLANNED: "#8d97a6",
    MEASURED: "#d3d9e2",
    "#56b4a0": "#7fd6c3",
    "#a78bda": "#bfa5ee",
    INK: "#e6e9ee",
    _FAINT: "#a3adba",
    _GRID: "#2c343f",
    _EDGE: "#4c5664",
    _PAPER: "#14181e",
}
"""The color on a dark page of each color on a light page."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.edgecolor": _EDGE,
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
    "legend.fontsize": 9.5,
    "text.color": INK,
}


def apply_theme(svg: str) -> str:
    """Return an SVG element whose colors are CSS variables, such as `var(--c2563eb, #2563eb)`."""
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: css_color(match[0]), svg)


def css_color(color: str) -> str:
    """Return the CSS variable of a chart's color; a color that is the same on every page is unchanged."""
    return f"var(--c{color[1:]}, {color})" if color in DARK else color


def line_style(i: int) -> tuple[str, str]:
    """Return color and dashes of the run with this index."""
    return COLORS[i % len(COLORS)], ("-", "--", ":", "-.")[i // len(COLORS) % 4]


def render_svg(name: str, description: str, draw: Callable[[Axes], None], *, height: float = HEIGHT) -> str:
    """Return a drawing as an SVG element in the report's style.

    Args:
        name: name of the chart, the prefix of its ids, which must be unique in the page.
        description: text for readers who cannot see the chart.
        draw: function that draws on empty axes.
        height: height in inches; all charts have the same width.
    """
    # matplotlib's salt makes ids equal from run to run
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        # with text kept as text, the reader's fonts supply glyphs that this font lacks
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        file = io.StringIO()
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    return _inline(file.getvalue(), name, description)


def _inline(text: str, name: str, description: str) -> str:
    """Return an SVG file as an HTML element: scaled to its box, with a description and unique ids."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # keep ids that are referenced, prefixed with the chart's name: ids of several charts share one page
    used = set(re.findall(r"""(?:href="#|url\(#)([^")]+)""", text))
    text = re.sub(r' id="([^"]+)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", text)
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
