"""Tests of the weight formats compared with tensor trains, and of the comparison at equal time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("shape", [(16, 16), (24, 60), (256, 512)])
def test_block_tt_equals_the_matrix_of_its_cores(shape: tuple[int, int]) -> None:
    from formats import BlockTensorTrain

    torch.manual_seed(0)
    layer = BlockTensorTrain(*shape, 3).double()
    (i1, i2), (o1, o2) = layer.inputs, layer.outputs
    right, left = layer.cores[0].view(i1, i2, o2, 3), layer.cores[1].view(o2, i1, 3, o1)
    matrix = torch.einsum("abpr,parq->abqp", right, left).reshape(shape)
    x = torch.randn(2, 5, shape[0], dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ matrix)


@pytest.mark.parametrize("name", ["tt", "tt silu", "low rank", "cola", "btt"])
def test_formats_have_their_share_of_the_numbers_and_the_variance_of_the_layer(name: str) -> None:
    from formats import build_layer, num_parameters

    torch.manual_seed(0)
    linear = nn.Linear(256, 512, bias=False)
    nn.init.normal_(linear.weight, std=0.02)
    layer = build_layer(name, linear, 0.25)
    held = sum(parameter.numel() for parameter in layer.parameters())
    assert held == pytest.approx(0.25 * linear.weight.numel(), rel=0.02)
    assert held in {num_parameters(name, 256, 512, rank) for rank in range(1, 257)}
    x = torch.randn(4000, 256)
    with torch.no_grad():
        assert float(layer(x).var()) == pytest.approx(float(linear(x).var()), rel=0.1)


def test_equal_time_is_steps_by_the_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tensor_formats
    from equal_clock import Comparison
    from resumable import spec_key

    comparison: Comparison = tensor_formats.COMPARISON
    forms = comparison.forms
    times: dict[str, Any] = {form: {"ratio": 1.0 if form == "dense" else 0.4} for form in forms}
    lines: dict[str, Any] = {}

    def add(form: str, rate: float, seed: int, loss: float, steps: int | None = None) -> None:
        spec = comparison.spec(form, rate, seed, steps)
        lines[spec_key(spec)] = {**spec, "eval_loss": loss, "num_parameters": 4000 if form == "dense" else 1000}

    with pytest.raises(SystemExit, match="sweep of tt"):
        comparison.tuned(lines, "tt")
    for form, less in (("dense", 0.0), ("tt", 0.5)):
        for rate, loss in ((1e-3, 4.0), (2e-3, 3.5), (4e-3, 3.75)):
            add(form, rate, 0, loss - less)
        for seed in (1, 2):
            add(form, 2e-3, seed, 3.7 + seed / 10 - less)
    comparison.report(lines)
    printed = capsys.readouterr().out
    assert "equal time" not in printed, "there is no clock yet"
    lines[spec_key(comparison.clock_spec())] = {"times": times}
    assert comparison.tuned(lines, "tt") == 2e-3
    assert comparison.steps_in_time(lines, "tt") == 750
    add("tt", 2e-3, 1, 3.0, 750)
    comparison.report(lines)
    printed = capsys.readouterr().out
    assert "0.40 of the control's step" in printed
    assert "1,000 parameters, 4.00 times fewer" in printed
    assert "at equal steps 3.3500 ± 0.6353 (2 seeds), minus the control -0.5000 ± 0.0000" in printed
    assert "at equal time 3.0000 ± inf (1 seeds), minus the control -0.8000 ± inf" in printed
    wider = replace(comparison, longer=600, clocked=("dense, wide", "tt, wide"))
    lines[spec_key(wider.clock_spec(wider.clocked))] = {
        "times": {"dense, wide": {"ratio": 1.0}, "tt, wide": times["tt"]}
    }
    add("dense", 2e-3, 1, 3.2, 600)
    add("tt", 2e-3, 1, 3.1, 600)
    wider.report(lines)
    printed = capsys.readouterr().out
    assert "at equal 600 steps 3.1000 ± inf (1 seeds), minus the control -0.1000 ± inf" in printed, "of as many steps"
    assert "dense, wide 1.00, tt, wide 0.40: time of a step" in printed


def test_disturbed_timing_is_refused() -> None:
    from interleaved import disturbed

    assert disturbed({"ratio": 1.02, "ratio_95": [0.95, 1.07]}) is None
    assert (
        disturbed({"ratio": 1.2, "ratio_95": [1.1, 1.3]}) == "refused: the control against itself is 1.20 [1.10, 1.30]"
    )
    assert disturbed({"ratio": 1.0, "ratio_95": [0.7, 1.3]}) is not None
