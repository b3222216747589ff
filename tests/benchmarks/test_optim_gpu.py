"""Tests of the GPU optimizer benchmark, at a small size on a CPU: every part runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("mode", ["alone", pytest.param("--end-to-end", marks=pytest.mark.slow)])
def test_all_of_it_runs_in_small(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import optim_gpu

    out = tmp_path / "report.json"
    given = ["optim_gpu.py", "--size", "tiny", "--device", "cpu", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", given + [mode] * (mode != "alone"))
    assert optim_gpu.main() == 0
    report = json.loads(out.read_text())
    results = report["results"]
    assert not [name for name, row in results.items() if "error" in row]
    assert results["CAME int8, stochastic"][f"ratio to {optim_gpu.CONTROLS[0]}"] > 0
    state = {name: row["state_bytes"] for name, row in results.items()}
    assert state["CAME int4, stochastic"] < state["CAME int8, stochastic"] < state["AdamW fused, bf16 moments"]
    if mode != "alone":
        assert results["CAME int8, stochastic"]["tokens_per_s"] > 0
