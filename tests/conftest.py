"""Settings shared by all tests: no network, one thread, a private cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise each new process would compile all modules it imports

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read at Triton's first import, which may happen in any test

from tests.runs import NO_CHARTS, no_charts

WITHOUT_CHARTS = ("planning", "sweeping", "tasks", "training")
"""Test folders whose runs draw no charts, except in tests with the mark `charts` and in module fixtures."""


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
    """Skip charts in most tests: they take nearly half of the time of a short run."""
    if request.path.parent.name in WITHOUT_CHARTS and request.node.get_closest_marker("charts") is None:
        monkeypatch.setenv(NO_CHARTS, "1")
        monkeypatch.setattr("scantling.trainer.reporting.html._charts", no_charts)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` if there is no GPU."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("there is no NVIDIA GPU here")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder of real data, or skip with a message if it is missing."""
    folder = Path(os.environ.get("SCANTLING_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data is not here: {folder} (set SCANTLING_DATA)")
    return folder
