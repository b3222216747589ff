"""Tests of the HTML report: its content, its escaping, and that it loads nothing."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from scantling.errors import UserError
from scantling.trainer.reporting import svg
from scantling.trainer.reporting.charts import memory_chart, phase_seconds, smooth
from scantling.trainer.reporting.format import format_bytes
from scantling.trainer.reporting.html import _plan_lines, render, write_report
from scantling.trainer.reporting.runs import Run, read_run
from tests.trainer.reporting.fake import make_run

HOSTILE = "<script>alert('x')</script>\"&' $\\frac{1}$ 日本語"
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Parser that checks that tags are closed in order, and stores their content."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def several(folder: Path) -> list[Run]:
    """Make five runs: two complete, one stopped without evaluation, one crashed without a plan, one with one step."""
    paths = [
        make_run(folder / "a", steps=60),
        make_run(folder / "b", name="demo-lean", steps=60, optim="came", seed=1),
        make_run(folder / "c", name="stopped", steps=21, planned_steps=60, status="stopped", evaluated=False),
        make_run(folder / "d", name=HOSTILE, steps=30, planned_steps=60, status=None, with_plan=False),
        make_run(folder / "e", name="one", steps=1),
    ]
    return [read_run(path) for path in paths]


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_report_of_one_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    path = write_report([run], tmp_path / "report.html")
    page = Page(path.read_text(encoding="utf-8"))
    text = squeezed(page.text)
    for expected in (
        "demo-dense",
        "200 of 200 steps",
        "1.18M",
        "9.02 MiB",
        f"{run.metric('eval_loss'):.4f}",
        "2.13.0+cpu",
    ):
        assert expected in text
    assert "as planned" not in text
    assert "exact" in text
    assert page.count("svg") == 6
    assert "weight_decay: 0.1" in page.text
    assert "Recipe differences" not in text


@pytest.mark.parametrize("count", [2, 5])
def test_report_of_several_runs(tmp_path: Path, count: int) -> None:
    runs = several(tmp_path)[:count]
    page = Page(render(runs))
    text = squeezed(page.text)
    assert all(run.name in page.text for run in runs)
    assert re.search(r"optim\.name ?adamw ?came", text)
    assert "×0.513" in text
    assert page.count("svg") == 6
    assert page.count("details") == count
    if count == 5:
        assert "unfinished" in text
        assert "21 of 60 steps" in text


@pytest.mark.parametrize("i", range(5))
def test_report_of_each_odd_run(tmp_path: Path, i: int) -> None:
    run = several(tmp_path)[i]
    page = Page(render([run]))
    assert page.count("svg") == 6
    assert ("held-out loss" in page.text.lower()) == bool(np.isfinite(run.column("eval_loss")).any())
    assert ("Plan vs. measurement" in page.text) == bool(run.plan)
    foretold = [label for label, _ in _plan_lines([run])]
    assert ("optimizer state" in foretold) == ("peak memory" in foretold) == bool(run.plan)


def test_report_of_minimal_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {preset: x}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": null}\n')
    page = Page(render([read_run(tmp_path)]))
    assert page.count("svg") == 1
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert Page(render([read_run(tmp_path)])).count("svg") == 0


def test_report_escapes_text(tmp_path: Path) -> None:
    text = render(several(tmp_path)[3:4])
    page = Page(text)
    assert page.count("script") == 0
    assert "<script" not in text
    assert HOSTILE in page.text
    labels = [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]
    assert any(label and HOSTILE in label for label in labels)


def test_report_survives_hostile_values(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=2, status=None)
    attack = "</code></pre></style><img src=x onerror=alert(1)>"
    for name in ("recipe.yaml", "environment.json", "plan.json"):
        file = path / name
        file.write_text(
            file.read_text().replace("cpu", attack).replace("llama-1m", attack).replace("demo-dense", attack)
        )
    page = Page(render([read_run(path)]))
    assert page.count("img") == 0
    assert attack in page.text


def test_report_loads_no_external_resources(tmp_path: Path) -> None:
    text = render(several(tmp_path))
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "embed", "img", "base", "form", "a"} & {
        tag for tag, _ in page.tags
    }
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "action", "data")]
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "@import" not in text
    assert "default-src 'none'" in html.unescape(text)


def test_report_svgs_are_valid_with_unique_ids(tmp_path: Path) -> None:
    text = render(several(tmp_path))
    svgs = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    for chart in svgs:
        root = ElementTree.fromstring(chart)
        assert root.get("role") == "img"
        assert len(root.get("aria-label") or "") > 20
        assert root.get("width") is None
        assert "<metadata" not in chart
        assert "<text" in chart
    ids = [attributes["id"] for _, attributes in Page(text).tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    for target in re.findall(r'(?:url\(#|href="#|aria-labelledby=")([^")]+)', text):
        assert target in ids


def test_report_tables_are_accessible(tmp_path: Path) -> None:
    page = Page(render(several(tmp_path)))
    assert all(attributes.get("scope") for tag, attributes in page.tags if tag == "th")
    regions = [attributes for _, attributes in page.tags if attributes.get("role") == "region"]
    assert regions
    assert all(attributes.get("aria-labelledby") and attributes.get("tabindex") == "0" for attributes in regions)
    assert ("html", {"lang": "en"}) in page.tags


def test_report_is_deterministic(tmp_path: Path) -> None:
    runs = several(tmp_path)
    assert render(runs) == render(runs)


def test_write_report_refuses_no_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one run"):
        write_report([], tmp_path / "report.html")


def test_report_of_long_runs_stays_small(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=5000))
    assert len(render([run])) < 300_000


def test_smooth_is_a_moving_mean() -> None:
    noisy = np.where(np.arange(801) % 2, 3.0, 1.0)
    smoothed = smooth(noisy)
    assert smoothed[400] == pytest.approx(2.0, abs=0.05)
    assert np.isfinite(smoothed).all()
    gap = noisy.copy()
    gap[100] = np.nan
    assert np.isfinite(smooth(gap)).all()
    assert smooth(np.array([1.0, 5.0, 2.0])).tolist() == [1.0, 5.0, 2.0]
    assert np.isnan(smooth(np.full(200, np.nan))).all()
    ramp = np.arange(400.0)
    assert smooth(ramp)[8:-8] == pytest.approx(ramp[8:-8])


def test_memory_chart_planned_peak_is_sum_of_parts(tmp_path: Path) -> None:
    """Activations are freed while gradients are created, so the smaller of the two is not in the chart."""
    path = make_run(tmp_path / "run", steps=3)
    plan = path / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"notes": ["a note & more"]}))
    run = read_run(path)
    planned = format_bytes(run.plan["peak_memory_bytes"])
    chart = memory_chart([run])
    assert chart is not None
    assert re.findall(r">([^<>]+) MiB<", chart)[-2:] == [planned.split()[0], "717"]
    assert ">activations<" in chart
    assert ">gradients<" not in chart
    assert "a note & more" in Page(render([run])).text


def test_phase_seconds_add_up_to_step(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=50))
    seconds = phase_seconds(run)
    assert sum(seconds.values()) == pytest.approx(float(np.median(run.column("step_s")[5:])))
    assert "exchange" not in seconds
    assert seconds["backward"] > seconds["forward"] > seconds["optimizer"] > seconds["data"]


def luminance(color: str) -> float:
    """Return the relative luminance as WCAG defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_chart_colors_have_contrast_on_light_and_dark_pages() -> None:
    dark = svg.DARK[svg._PAPER]
    for color in svg.COLORS:
        assert contrast(color, "#ffffff") >= 3
        assert contrast(svg.DARK[color], dark) >= 3
    for color in (svg.INK, svg._FAINT):  # text
        assert contrast(color, "#ffffff") >= 4.5
        assert contrast(svg.DARK[color], dark) >= 4.5


def test_every_chart_color_has_a_dark_one(tmp_path: Path) -> None:
    """All but the colors of ranks, a scale from light to dark blue that is readable on both pages."""
    runs = [read_run(make_run(tmp_path / f"{at}", steps=20, seed=at)) for at in range(9)]
    page = render(runs)
    for chart in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        colors = set(re.findall(r"(?<!, )#[0-9a-f]{6}\b", chart))
        assert not colors
        assert set(re.findall(r"var\((--c[0-9a-f]{6}),", chart)) <= set(re.findall(r"(--c[0-9a-f]{6}): #", page))
