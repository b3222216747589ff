"""Accuracy of intent classifiers over their parameters and the time of a step, from lines of `intent_accuracy.py`."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.figures.drawing import Drawing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PANELS = (
    ("banking77", "small", "Banking77, width 128"),
    ("clinc150", "small", "CLINC150, width 128"),
    ("banking77", "full", "Banking77, width 256"),
)
NAMES = {
    "dense": "dense",
    "tt": "TT",
    "low rank": "thin matrices, as large as TT",
    "cola": "CoLA, as large as TT",
    "dense as tt": "narrow dense, as large as TT",
    "galore": "GaLore",
    "tt 0.5": "TT at size target 0.5",
    "tt 0.2": "TT at size target 0.2",
    "low rank 0.2": "thin matrices at 0.2",
    "dense as tt 0.2": "narrow dense, as large as TT at 0.2",
}
LEFT, WIDTH, TOP, HEIGHT = 48, 205, 34, 190
COLUMN, ROW = 270, 256
LABEL_OFFSETS = [(13, 0), (-13, 0), (0, -13), (0, 14), (11, -10), (-11, -10), (11, 11), (-11, 11), (22, 0), (-22, 0)]
"""Centers of a label relative to its point, the best first."""


@dataclass(frozen=True)
class Point:
    """Means of one row's runs: accuracy in percent, number of parameters, and time of a step relative to dense."""

    accuracy: float
    parameters: float
    time: float


def row_of(line: dict[str, Any]) -> str:
    """Return the row of `intent_accuracy.py` that a line belongs to."""
    if line.get("as_large_as"):
        return f"dense as {line['as_large_as']}"
    if line.get("optimizer") == "galore":
        return "galore"
    form = line["form"].replace("-", " ")
    return f"{form} {line['target']:g}" if line.get("target") else form


def read_points(data: str, size: str) -> dict[str, Point]:
    """Return the points of the rows that were run with several seeds, at the rates of the last run, largest first."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in map(json.loads, (RESULTS / "intent-accuracy.jsonl").read_text(encoding="utf-8").splitlines()):
        if (line.get("size"), line["data"], line.get("dev")) == (size, data, False) and line["eval_loss"] is not None:
            runs[row_of(line)].append(line)
    found = {row: with_last_rates(lines) for row, lines in runs.items() if row in NAMES}
    newest = max(RESULTS.glob(f"intent-times-{size}-cpu-*.json"))
    times = json.loads(newest.read_text(encoding="utf-8"))["results"]
    points = {
        row: Point(
            statistics.fmean(100 * line["accuracy"] for line in lines),
            statistics.fmean(line["num_parameters"] for line in lines),
            times[row]["ratio"],
        )
        for row, lines in found.items()
        if len({line["seed"] for line in lines}) >= 4
    }
    return dict(sorted(points.items(), key=lambda item: -item[1].parameters))


def with_last_rates(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines with the learning rates of the last one: a search that went on has found better ones."""
    rates = ("lr", "layers_ratio", "embedding_ratio")
    return [line for line in lines if all(line[rate] == lines[-1][rate] for rate in rates)]


def ticks(low: float, high: float) -> list[float]:
    """Return the values 1, 2 and 5 times a power of ten between two values."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for power in powers for step in (1, 2, 5) if low <= (value := step * 10.0**power) <= high]


def draw_panel(
    drawing: Drawing, corner: tuple[float, float], title: str, label: str, points: Sequence[tuple[int, float, float]]
) -> None:
    """Draw one panel of numbered points (number, x on a logarithmic scale, accuracy)."""
    left, top = corner
    low, high = min(x for _, x, _ in points) / 1.25, max(x for _, x, _ in points) * 1.25
    floor, ceiling = 10 * math.floor(min(y for *_, y in points) / 10), 10 * math.ceil(max(y for *_, y in points) / 10)

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / low) / math.log(high / low)
        return left + WIDTH * across, top + HEIGHT * (ceiling - y) / (ceiling - floor)

    drawing.text(left, top - 12, title, "bold")
    for value in range(floor, ceiling + 1, 5):
        y = place(low, value)[1]
        drawing.rect(left, y, WIDTH, 1, "plain", 0)
        drawing.text(left - 6, y + 5, f"{value}", "muted", "end")
    for value in ticks(low, high):
        x = place(value, floor)[0]
        name = f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"
        drawing.line([(x, top + HEIGHT), (x, top + HEIGHT + 4)])
        drawing.text(x, top + HEIGHT + 18, name, "muted", "middle")
    drawing.text(left + WIDTH, top + HEIGHT + 34, label, "muted", "end")
    dots = [place(value, accuracy) for _, value, accuracy in points]
    labels: list[tuple[float, float]] = []
    for index, (x, y) in enumerate(dots):
        drawing.circle(x, y, 4, "accent")
        taken = [*dots[:index], *dots[index + 1 :], *labels]
        centers = [(x + across, y + down) for across, down in LABEL_OFFSETS]
        label = max(centers, key=lambda center: min([12, *(math.dist(center, one) for one in taken)]))
        labels.append(label)
        drawing.text(label[0], label[1] + 5, f"{points[index][0]}", "muted", "middle")


def accuracy() -> str:
    names = list(NAMES)
    legend = TOP + len(PANELS) * ROW + 8
    drawing = Drawing(
        540,
        legend + 20 * math.ceil(len(names) / 2) + 10,
        "Accuracy of intent classifiers over parameters and step time",
    )
    for row, (data, size, title) in enumerate(PANELS):
        points = read_points(data, size)
        for column, (key, label) in enumerate((("parameters", "parameters"), ("time", "time of a step, dense is 1"))):
            found = [(names.index(name) + 1, getattr(point, key), point.accuracy) for name, point in points.items()]
            draw_panel(drawing, (LEFT + COLUMN * column, TOP + ROW * row), f"{title}, %", label, found)
    for index, name in enumerate(NAMES.values()):
        column, row = divmod(index, math.ceil(len(names) / 2))
        drawing.text(20 + COLUMN * column, legend + 20 * row + 14, f"{index + 1}  {name}", "muted")
    return drawing.svg()


def draw_figures() -> dict[str, str]:
    return {"accuracy.svg": accuracy()}
