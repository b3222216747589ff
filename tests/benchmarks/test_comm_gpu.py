"""Tests of the GPU codec benchmark, at a small size on a CPU: every part runs, and non-repeatable results are found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch


def test_all_of_it_runs_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import comm_gpu

    out = tmp_path / "report.json"
    given = ["comm_gpu.py", "--tiny", "--device", "cpu", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", given)
    assert comm_gpu.main() == 0
    report = json.loads(out.read_text())
    assert [(row["topk"], row["residual"], row["dtype"]) for row in report["cases"]] == [
        tuple(case.values()) for case in comm_gpu.CASES
    ]
    sent = [row["wire_bytes"] for row in report["cases"]]
    assert sent[0] < sent[1] < sent[2]
    assert sent[1] == sent[3] == sent[4]
    for row in report["cases"]:
        assert row["repeatable"] is True
        seconds = row["parts"]["exchange"]["median_s"]
        assert row["share_of_step"] == pytest.approx(seconds / (seconds + report["compute"]["compute_s"]))
        assert row["parts"].keys() == {"copy", "encode", "pack", "decode", "exchange"}
        assert row["launches"] is None
    outer = report["local_steps"]
    assert outer["wire_bytes"] > sent[2]
    seconds = outer["parts"]["synchronization"]["median_s"] / outer["every"]
    assert outer["share_of_step"] == pytest.approx(seconds / (seconds + report["compute"]["compute_s"]))


def test_codec_parts_match_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas with equal messages decode to the result of one replica alone; added noise is detected."""
    import comm_gpu

    shape = comm_gpu.SIZES["tiny"]
    made = comm_gpu.build_exchange(shape, 320, comm_gpu.CASES[1], "cpu")
    gradients = comm_gpu.make_gradients(made, seed=1)
    parts = comm_gpu.Codec(made, gradients)
    assert len(parts.messages[0]) == made.planned_wire_bytes(2)
    decoded = parts.decode()
    order = [slot.param for group in parts.block_groups for slot in group.slots]
    comm_gpu.stepped(made, gradients)
    for place, value in zip(order, decoded, strict=True):
        torch.testing.assert_close(parts.params[place].grad, value.to(torch.bfloat16), rtol=1e-2, atol=1e-4)
    assert parts.is_repeatable()
    encode = parts.encode
    monkeypatch.setattr(parts, "encode", lambda: [(i, v + torch.randn_like(v)) for i, v in encode()])
    assert not parts.is_repeatable()
