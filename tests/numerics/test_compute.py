"""Tests of the compute format, on processors with and without instructions for it."""

from __future__ import annotations

import logging
import platform
from typing import Any

import pytest
import torch
from torch import nn

import scantling as sc
from scantling.numerics.compute import has_products, warn_of_slow_products

CPU = torch.device("cpu")


@pytest.mark.parametrize(("compute", "is_there"), [("int8", True), ("int8", False), ("fp8", False)])
def test_products_of_few_bits_are_warned_of_where_the_cpu_lacks_them(
    compute: Any, is_there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: is_there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    fmt = {"int8": "int8", "fp8": "fp8_e4m3"}[compute]
    with caplog.at_level(logging.WARNING):
        sc.quantize_training(nn.Sequential(nn.Linear(8, 8)), weights=fmt, activations=fmt, compute=compute)
    assert (f"no instructions for products in {compute}" in caplog.text) is not is_there
    assert (f"leave out compute: {compute}" in caplog.text) is not is_there


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_cpu_without_the_instructions_is_named(
    compute: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{compute}_supported", lambda: False)
    with caplog.at_level(logging.WARNING):
        warn_of_slow_products(compute, CPU, "take fp32")
    assert f"no instructions for products in {compute}" in caplog.text
    assert "take fp32" in caplog.text


def test_nothing_is_said_where_products_are_fast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    with caplog.at_level(logging.WARNING):
        for compute, device in (("bf16", CPU), ("fp32", CPU), ("fp16", torch.device("cuda"))):
            assert has_products(compute, device)
            warn_of_slow_products(compute, device, "take fp32")
    assert not caplog.text
