"""Shared by all tests: no network, one thread, a cache of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process from scratch would compile all that it imports

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, by whatever test that is

from tests.runs import NO_CHARTS, no_charts

WITHOUT_CHARTS = ("planning", "sweeping", "tasks", "training")
"""Folders of tests whose runs draw no charts, but where a test is marked so, or a fixture of its module runs them."""


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("SCANTLING_CACHE")
    os.environ["SCANTLING_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["SCANTLING_CACHE"]
    else:
        os.environ["SCANTLING_CACHE"] = before


@pytest.fixture(autouse=True)
def _charts_only_where_they_matter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that takes a second or two, drawing its charts is nearly half."""
    if request.path.parent.name in WITHOUT_CHARTS and request.node.get_closest_marker("charts") is None:
        monkeypatch.setenv(NO_CHARTS, "1")
        monkeypatch.setattr("scantling.reporting.html._charts", no_charts)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` where there is none."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("there is no NVIDIA GPU here")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data, or a skip that says what is missing."""
    folder = Path(os.environ.get("SCANTLING_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data is not here: {folder} (set SCANTLING_DATA)")
    return folder
