from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SCANTLING_CACHE", str(folder))
    return folder
