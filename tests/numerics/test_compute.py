"""The compute format, where the processor has instructions for it and where it has not."""

from __future__ import annotations

import logging

import pytest
import torch

from scantling.numerics.compute import has_products, warn_of_slow_products

CPU = torch.device("cpu")


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_cpu_without_the_instructions_is_named(
    compute: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{compute}_supported", lambda: False)
    with caplog.at_level(logging.WARNING):
        warn_of_slow_products(compute, CPU)
    assert f"no instructions for products in {compute}" in caplog.text


def test_nothing_is_said_where_products_are_fast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    with caplog.at_level(logging.WARNING):
        for compute, device in (("bf16", CPU), ("fp32", CPU), ("fp16", torch.device("cuda"))):
            assert has_products(compute, device)
            warn_of_slow_products(compute, device)
    assert not caplog.text
