"""Tests of matrix products in low precision, on processors with and without instructions for them."""

from __future__ import annotations

import logging
import platform
from typing import Any

import pytest
import torch
from torch import nn

import scantling as sc
from scantling.numerics.device import has_fast_matmul, warn_if_slow_matmul

CPU = torch.device("cpu")


@pytest.mark.parametrize(("compute", "has_instructions"), [("int8", True), ("int8", False), ("fp8", False)])
def test_quantize_training_warns_if_the_cpu_lacks_instructions(
    compute: Any, has_instructions: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_instructions)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    fmt = {"int8": "int8", "fp8": "fp8_e4m3"}[compute]
    with caplog.at_level(logging.WARNING):
        sc.quantize_training(nn.Sequential(nn.Linear(8, 8)), weights=fmt, activations=fmt, compute=compute)
    assert (f"no instructions for {compute} matrix products" in caplog.text) is not has_instructions
    assert (f"leave out compute: {compute}" in caplog.text) is not has_instructions


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_warn_if_slow_matmul_names_the_format(
    compute: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{compute}_supported", lambda: False)
    with caplog.at_level(logging.WARNING):
        warn_if_slow_matmul(compute, CPU, "take fp32")
    assert f"no instructions for {compute} matrix products" in caplog.text
    assert "take fp32" in caplog.text


def test_warn_if_slow_matmul_is_silent_on_fast_devices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    with caplog.at_level(logging.WARNING):
        for compute, device in (("bf16", CPU), ("fp32", CPU), ("fp16", torch.device("cuda"))):
            assert has_fast_matmul(compute, device)
            warn_if_slow_matmul(compute, device, "take fp32")
    assert not caplog.text
