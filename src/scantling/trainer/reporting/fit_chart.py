"""Chart of a fitted scaling law: predicted over measured loss of each run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes

from scantling.trainer.reporting.charts import COLORS, svg
from scantling.trainer.reporting.format import format_number, format_percent

if TYPE_CHECKING:
    from scantling.laws import Fit


def fit_chart(fit: Fit) -> str:
    """Return predicted over measured loss, one dot per run, colored by size; a perfect prediction is on the line.

    Args:
        fit: of any law.

    Returns:
        A self-contained SVG element.
    """
    measured = fit.runs["loss"]
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
    return svg(f"fit-{fit.law.name}", description, draw)
