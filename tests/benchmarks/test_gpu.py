"""Tests of the GPU benchmarks as a whole: every part runs in small on a CPU, and the table shows its results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


def test_every_part_runs_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import gpu

    assert gpu.run_all(None, tmp_path, 600, is_dry=True) == 0, capsys.readouterr().out
    parts = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert list(parts) == [part.name for part in gpu.PARTS]
    table = "\n".join(gpu.table(tmp_path))
    for part in gpu.PARTS:
        rows = list(gpu._rows(tmp_path / f"{part.name}.json"))
        assert rows, part.name
        assert all(label in table for label, _ in rows)
        assert not [row for label, row in rows if "error" in row and "galore" not in label.lower()], part.name


def test_the_table_replaces_only_what_is_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    page = tmp_path / "gpu.md"
    shutil.copy(gpu.DOCS, page)
    monkeypatch.setattr(gpu, "DOCS", page)
    before = page.read_text()
    summary = {"gpu": "H200", "torch": "2.13", "date": "2026-11-28", "parts": {"steps-1": {"status": "passed"}}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    row = {"median_s": 0.002, "to dense": {"faster": 1.5, "less_memory": 2.0}}
    (tmp_path / "steps-1.json").write_text(json.dumps({"results": {"batch 1": {"TT": row}}}))
    gpu.write_docs(tmp_path)
    gpu.write_docs(tmp_path)
    after = page.read_text()
    assert after.startswith(before[: before.index(gpu.BEGIN)])
    assert after.endswith(before[before.index(gpu.END) :])
    assert "| batch 1, TT | 2.00 | 1.50 |" in after
    assert after.count("H200") == 1


def test_parts_that_run_too_long_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    monkeypatch.setattr(gpu, "PARTS", (gpu.Part("slow", 1, "own_process.py"), gpu.PARTS[-2]))
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0)
    monkeypatch.setattr(gpu, "run_part", lambda command, log, seconds: log.write_text("") or f"{seconds:.0f} s")
    assert gpu.run_all(None, tmp_path, 30, is_dry=True) == 1
    assert json.loads((tmp_path / "summary.json").read_text())["parts"]["slow"]["status"] == "1 s"


def test_parts_on_request_run_only_if_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    monkeypatch.setattr(gpu, "run_part", lambda command, log, seconds: log.write_text("") or "passed")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "H200")
    for names, count in ((None, 0), (["finetune-full"], 1)):
        gpu.run_all(names, tmp_path, gpu.SECONDS, is_dry=False)
        parts = json.loads((tmp_path / "summary.json").read_text())["parts"]
        assert sum(name.startswith("finetune") for name in parts) == count


def test_parts_on_request_fit_into_a_call_of_ten_minutes() -> None:
    import gpu

    for part in gpu.ON_REQUEST:
        own = int(part.arguments.split("--seconds ")[1])
        assert own < part.seconds < 600  # the script stops its processes itself


def test_all_parts_fit_into_the_total() -> None:
    """The last one takes the rest of the time."""
    import gpu

    assert gpu.TESTS_SECONDS + sum(part.seconds for part in gpu.PARTS[:-1]) <= gpu.SECONDS - gpu.LEAST_SECONDS
