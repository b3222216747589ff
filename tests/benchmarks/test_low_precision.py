"""Tests of the low-precision layer benchmark and its time limit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest


def test_stop_keeps_finished_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import low_precision

    def measure(kind: str, tokens: int, options: Any) -> dict[str, Any]:
        if tokens == 8:
            raise KeyboardInterrupt
        return {"simulated int8": {"ratio": 2.5}, "products int8": {"ratio": 3.0}}

    out = tmp_path / "report.json"
    monkeypatch.setattr(low_precision, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["low_precision.py", "--tokens", "4", "8", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        low_precision.main()
    report = json.loads(out.read_text())
    assert list(report["results"]) == ["dense, 4 tokens"]
    assert report["settings"]["missed"] == ["dense, 4 tokens: simulated int8"]
