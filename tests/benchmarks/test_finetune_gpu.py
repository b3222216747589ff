"""Tests of the GPU fine-tuning benchmark, at a tiny size on a CPU: every contender trains, and failures are results."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PACKAGES = {
    "torchao": ("torchao",),
    "FlashAdamW": ("flashoptim",),
    "bitsandbytes": ("bitsandbytes",),
    "APOLLO": ("apollo_torch", "bitsandbytes"),
    "GaLore": ("galore_torch", "bitsandbytes"),
    "LoRA": ("peft",),
}


def run(out: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    import finetune_gpu

    tiny = ["--device", "cpu", "--size", "tiny", "--steps", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["finetune_gpu.py", *tiny, *arguments])
    assert finetune_gpu.main() == 0
    results: dict[str, Any] = json.loads(out.read_text())["results"]
    return results


def installed(name: str) -> bool:
    needed = next((own for word, own in PACKAGES.items() if word in name), ())
    return all(importlib.util.find_spec(package) is not None for package in needed)


@pytest.mark.parametrize("group", ["scantling", "full", "low-rank"])
def test_every_contender_trains(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import finetune_rivals
    import gpu

    # torchao compiles its step for each shape, which takes minutes on a CPU
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    names = [name for name, each in finetune_rivals.CONTENDERS.items() if each.group == group]
    results = run(tmp_path / "report.json", monkeypatch, "--group", group)
    assert list(results) == names
    for name, rows in results.items():
        if not installed(name):
            assert rows["missing"].startswith("not installed: "), name
            continue
        row = rows["no limit"]
        assert "error" not in row, (name, row["error"])
        assert row["losses"][1] < row["losses"][0], name
        # one released gradient, or those of the adapters, against all gradients
        has_few = "released" in name or name.startswith(("Scantling", "LoRA"))
        assert (row["gradient_bytes"] < row["weight_bytes"] / 2) == has_few, name
        if name.startswith("AdamW"):
            assert row["bytes_per_parameter"] == pytest.approx(16 if "fp32" in name else 8, rel=1e-3)
    shown = dict(gpu._rows(tmp_path / "report.json"))
    assert set(shown) == {f"{name}, no limit" for name, rows in results.items() if "no limit" in rows}
    assert all({"ms", "bytes per parameter"} <= set(row) for row in shown.values())


def test_contender_of_the_recipe_has_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import finetune_gpu
    import finetune_rivals

    options = argparse.Namespace(device="cpu", size="tiny", exact_svd=False)
    contender = finetune_rivals.CONTENDERS["Scantling, CAME int4"]
    _, built, ids = finetune_gpu.build(contender, options, finetune_gpu.Phase())
    group = built.optimizer.param_groups[0]
    assert (group["momentum"], group["rounding"], group["lr"]) == ("int4", "stochastic", 1e-5)
    assert ids.shape == (2, 65)
    sizes, seq_len, chunk = finetune_gpu.shape("8b")
    assert (sizes["hidden_size"], sizes["vocab_size"], seq_len, chunk) == (4096, 128256, 2048, 512)


def test_out_of_memory_is_a_result_that_says_how_much_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import finetune_gpu

    def fail(name: str, options: argparse.Namespace, phase: Any) -> None:
        phase.name = "step 1"
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of …")

    monkeypatch.setattr(finetune_gpu, "train", fail)
    row = finetune_gpu.measure("AdamW, bf16 weights", argparse.Namespace(device="cpu", limit_gb=24.0))
    assert row["is_out_of_memory"] is True
    assert row["error"].startswith("out of memory in step 1: asked for 1.96 GiB with ")


def test_contender_out_of_memory_runs_again_without_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import finetune_gpu

    calls: list[dict[str, Any]] = []

    def child(name: str, options: argparse.Namespace, **given: Any) -> dict[str, Any]:
        calls.append(given)
        if given["limit_gb"] is None:
            return {"losses": [2.0, 1.0], "median_s": 0.1, "bytes_per_parameter": 8.0, "peak_bytes": 64_000_000_000}
        return {"error": "out of memory in step 1", "is_out_of_memory": True}

    monkeypatch.setattr(finetune_gpu, "run_child", child)
    options = argparse.Namespace(
        device="cuda",
        limit_gb=24.0,
        steps=20,
        unlimited_steps=3,
        seconds=100.0,
        contender_seconds=50.0,
        group="full",
        out=tmp_path / "report.json",
    )
    results = finetune_gpu.compare(["AdamW, bf16 weights"], options)
    assert list(results["AdamW, bf16 weights"]) == ["24 GB", "no limit"]
    assert [(call["limit_gb"], call["steps"]) for call in calls] == [(24.0, 20), (None, 3)]
    options.seconds = 1.0
    assert finetune_gpu.compare(["AdamW, bf16 weights"], options) == {
        "AdamW, bf16 weights": {"missing": "not run: no time was left"}
    }


def test_contender_in_its_own_process_returns_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    import finetune_gpu

    options = argparse.Namespace(device="cpu", size="tiny", exact_svd=False)
    row = finetune_gpu.run_child("Scantling, CAME int4", options, limit_gb=None, steps=1, seconds=100.0)
    assert len(row["losses"]) == 1, row
    row = finetune_gpu.run_child("Scantling, CAME int4", options, limit_gb=None, steps=1, seconds=0.1)
    assert row == {"error": "stopped after 0 s"}
