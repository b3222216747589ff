"""Tests of the report in a real browser: headless Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from scantling.trainer.reporting import svg
from scantling.trainer.reporting.html import write_report
from scantling.trainer.reporting.runs import read_run
from tests.trainer.reporting.fake import make_run

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --enable-logging=stderr"
)


def chromium(page: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Open a page and return Chromium's output; skip if there is no Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser here: none of {', '.join(names)} is installed")
    command = [program, *FLAGS.split(), f"--user-data-dir={folder / 'profile'}", *arguments, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def report(tmp_path: Path) -> Path:
    dense = make_run(tmp_path / "dense", steps=80)
    lean = make_run(tmp_path / "lean", name="demo-lean <b>&amp;", steps=80, optim="came", seed=1)
    return write_report([read_run(dense), read_run(lean)], tmp_path / "report.html")


def test_browser_builds_whole_page(report: Path, tmp_path: Path) -> None:
    done = chromium(report, tmp_path, "--dump-dom")
    assert "CONSOLE" not in done.stderr, "the page gave errors: " + done.stderr
    dom = done.stdout
    assert dom.count("<svg") == dom.count("</svg>") == 6
    rows = re.findall(r"<tr>.*?</tr>", dom, flags=re.DOTALL)
    state = next(row for row in rows if "optimizer state" in row)
    assert re.sub(r"<[^>]*>|\s+", " ", state).split() == ["optimizer", "state", "9.02", "MiB", "4.62", "MiB", "×0.513"]
    assert "demo-lean &lt;b&gt;&amp;amp;" in dom


def phone(page: Path, folder: Path) -> Path:
    """Return a page with the report in a frame as wide as a phone, since a Chromium window cannot be so narrow."""
    frame = folder / "phone.html"
    frame.write_text(
        "<script>onmessage = event => document.title = event.data</script>"
        f'<body style="margin:0"><iframe src="{page.as_uri()}" style="width:390px;height:1600px;border:0"></iframe>'
    )
    return frame


def in_the_dark(page: Path, folder: Path) -> Path:
    """Return a copy of the page as a browser in dark mode shows it."""
    text, query = page.read_text(encoding="utf-8"), "@media screen and (prefers-color-scheme: dark)"
    assert text.count(query) == 1
    dark = folder / "dark.html"
    dark.write_text(text.replace(query, "@media screen"), encoding="utf-8")
    return dark


def test_browser_dark_page_shows_text_and_curves(report: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    page = in_the_dark(report, tmp_path)
    chromium(page, tmp_path, "--window-size=1200,1600", f"--screenshot={picture}")
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert np.median(pixels) < 0.15
    assert (pixels.min(axis=2) > 0.85).mean() < 0.05, "something is still a light page"
    for color in (svg.DARK[color] for color in svg.COLORS[:2]):
        wanted = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
        assert (np.abs(pixels - wanted).max(axis=2) < 0.02).sum() > 200


@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_browser_renders_on_desktop_and_phone(report: Path, tmp_path: Path, device: str) -> None:
    picture = tmp_path / "page.png"
    page = report if device == "desktop" else phone(report, tmp_path)
    chromium(page, tmp_path, "--window-size=1200,1600", f"--screenshot={picture}")
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert pixels.shape[0] == 1600
    if device == "phone":
        assert pixels[:, 390:].min() == 1.0
        pixels = pixels[:, :390]
    inked = (pixels.min(axis=2) < 0.6).mean()
    assert 0.01 < inked < 0.5
    orange = np.abs(pixels - np.array([0xD9, 0x48, 0x0F]) / 255).max(axis=2) < 0.02
    assert orange.sum() > 200, "the second run's curve is not there"


@pytest.mark.parametrize("count", [1, 2, 6])
def test_browser_phone_page_does_not_scroll_sideways(tmp_path: Path, count: int) -> None:
    """A script measures the widths; this copy of the page allows scripts. Wide tables scroll inside their own boxes."""
    folders = [make_run(tmp_path / f"{at}", name=f"run_{at}_" + 12 * "longword", steps=5) for at in range(count)]
    report = write_report(list(map(read_run, folders)), tmp_path / "report.html")
    text = report.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    script = "<script>parent.postMessage(innerWidth + ' ' + document.documentElement.scrollWidth, '*')</script></body>"
    (tmp_path / "inner.html").write_text(text.replace("</body>", script), encoding="utf-8")
    done = chromium(phone(tmp_path / "inner.html", tmp_path), tmp_path, "--virtual-time-budget=5000", "--dump-dom")
    title = re.search(r"<title>(\d+) (\d+)</title>", done.stdout)
    assert title, "the script did not run"
    assert (int(title[1]), int(title[2])) == (390, 390)
