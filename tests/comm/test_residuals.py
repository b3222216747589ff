"""Tests of residuals in fp32 and int8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scantling.comm.config import RESIDUAL_ROW as ROW
from scantling.comm.config import ExchangeConfig
from scantling.comm.exchange import MomentumExchange
from scantling.comm.layout import MIN_MATRIX_NUMEL, residual_bytes
from scantling.comm.residuals import Residuals
from tests.comm.replicas import ThreadGroup, together
from tests.comm.test_exchange import gradient, make_exchange, make_params


def make_residuals(value: Tensor, seed: int | None) -> tuple[Residuals, Tensor]:
    residuals, param = Residuals([], {}, ExchangeConfig()), torch.empty_like(value)
    residuals.write(param, value, "int8", seed)
    return residuals, param


@pytest.mark.parametrize("shape", [(), (1,), (ROW,), (3, 1021), (0, 5), (7, 5, 3)])
def test_int8_residual_is_unbiased(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(shape)
    for seed in range(200):
        residuals, param = make_residuals(value, seed)
        found = residuals.read(param)
        assert found.shape == value.shape
        if value.numel():
            assert (found - value).abs().max() <= value.abs().max() / 127 * 1.001
        total += found
    if value.numel():
        step = value.abs().max() / 127
        assert (total / 200 - value).abs().max() < 5 * step / (4 * 200) ** 0.5


def test_int8_codes_round_trip() -> None:
    value = torch.randn(37, 129, generator=torch.Generator().manual_seed(2))
    first, param = make_residuals(value, 5)
    again, other = make_residuals(first.read(param), None)
    for key in ("residual", "residual_scale"):
        assert torch.equal(first.state[param][key], again.state[other][key])


def test_residual_bytes_equal_plan() -> None:
    params = [nn.Parameter(torch.zeros(64, 80)), nn.Parameter(torch.zeros(70, 77)), nn.Parameter(torch.zeros(33))]
    for form in ("fp32", "int8"):
        made = MomentumExchange(params, residual=form)
        for param in params:
            param.grad = torch.randn_like(param)
        made.exchange()
        held = [value for state in made.state.values() for value in state.values()]
        assert sum(value.nbytes for value in held) == made.planned_state_bytes()
    assert residual_bytes(1 << 20, "int8") == (1 << 20) * (1 + 4 / ROW)


@pytest.mark.parametrize("strategy", ["all_gather", "owner"])
def test_int8_residuals_lose_little_without_bias(strategy: str) -> None:
    """Like `test_nothing_is_lost`, with rounding noise: a random walk with steps of 1/127 of the largest element.

    Densely exchanged parameters keep fp32 residuals.
    """

    def work(replicas: ThreadGroup) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        params = make_params()
        made = make_exchange(replicas, params, decay=1.0, exchange=strategy, residual="int8", topk=1)
        given, applied = ([torch.zeros_like(param) for param in params] for _ in range(2))
        for step in range(20):
            for place, param in enumerate(params):
                param.grad = gradient(replicas.rank, step, param.shape)
                given[place] += param.grad
            made.exchange()
            for place, param in enumerate(params):
                applied[place] += param.grad
        left = [made.residuals.read(param) for param in params]
        return given, applied, left

    found = together(2, work)
    for place in range(len(make_params())):
        given, left = (torch.stack([each[part][place] for each in found]).mean(0) for part in (0, 2))
        error = found[0][1][place] + left - given
        step = max(each[2][place].abs().max() for each in found) / 127
        assert error.abs().max() < (8 * step if error.numel() >= MIN_MATRIX_NUMEL else 1e-4)
        assert error.mean().abs() < 1e-4 + 4 * error.std(correction=0) / error.numel() ** 0.5
