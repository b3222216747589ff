"""Tests of GPTQ against a dense reference of its update, and of properties that follow from its equations."""

from __future__ import annotations

import pytest
import torch

from scantling.errors import UserError
from scantling.precision import Quantizer
from scantling.precision.gptq import gptq, output_error


def problem(out: int = 7, columns: int = 23, tokens: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight, and the Hessian of correlated inputs."""
    x = torch.randn(tokens, columns, dtype=torch.float64) @ torch.randn(columns, columns, dtype=torch.float64)
    return torch.randn(out, columns, dtype=torch.float64), x.t() @ x / tokens


def obq(weight: torch.Tensor, hessian: torch.Tensor, quantizer: Quantizer, damping: float) -> torch.Tensor:
    """arXiv 2210.17323, Eqs. 2 and 3: process one column at a time and remove its row and column from the inverse."""
    weight, scale = weight.clone(), quantizer.encode(weight).scale
    if scale.ndim == 3:
        scale = scale.expand(-1, -1, quantizer.group_size).flatten(1)[:, : weight.shape[1]]
    scale = scale.expand_as(weight)
    inverse = torch.linalg.inv(hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian)).double())
    out = torch.empty_like(weight)
    for i in range(weight.shape[1]):
        out[:, i] = quantizer.format.round(weight[:, i] / scale[:, i]) * scale[:, i]
        weight -= (weight[:, i] - out[:, i])[:, None] / inverse[i, i] * inverse[i]
        inverse = inverse - inverse[:, i : i + 1] @ inverse[i : i + 1] / inverse[i, i]
    return out


@pytest.mark.parametrize("block", [1, 5, 128])
@pytest.mark.parametrize("given", ["int2", "int3", "int8", "fp4_e2m1", {"format": "int4", "granularity": "tensor"}])
def test_gptq_matches_obq(given: str, block: int) -> None:
    torch.manual_seed(0)
    weight, hessian = problem()
    quantizer = Quantizer.from_spec(given, "channel")
    found = gptq(weight, hessian, quantizer, block=block).decode()
    torch.testing.assert_close(found, obq(weight, hessian, quantizer, 0.01), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("given", ["int4", {"format": "int4", "group_size": 4}])
def test_gptq_act_order_matches_sorted_columns(given: str) -> None:
    torch.manual_seed(0)
    weight, hessian = problem()
    quantizer = Quantizer.from_spec(given, "channel")
    order = hessian.diagonal().argsort(descending=True)
    found = gptq(weight, hessian, quantizer, act_order=True).decode()
    by_tensor = Quantizer.from_spec("int4")
    turned = obq(weight[:, order], hessian[order][:, order], by_tensor, 0.01)[:, order.argsort()]
    assert torch.equal(
        gptq(weight, hessian, by_tensor, act_order=True).decode().round(decimals=9), turned.round(decimals=9)
    )
    assert torch.equal(gptq(weight, hessian, quantizer, act_order=True).scale, quantizer.encode(weight).scale)
    assert output_error(weight, found, hessian) < output_error(weight, quantizer(weight), hessian)


@pytest.mark.parametrize("given", ["int4", "fp6_e3m2", {"format": "int3", "group_size": 5}, "mxfp4_e2m1", "nvfp4"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_rounds_independent_inputs_to_nearest(given: str, act_order: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 40)
    quantizer = Quantizer.from_spec(given, "channel")
    for hessian in (torch.eye(40), torch.diag(torch.rand(40)), torch.zeros(40, 40)):
        found = gptq(weight, hessian, quantizer, act_order=act_order)
        assert torch.equal(found.decode(), quantizer.encode(weight).decode())


@pytest.mark.parametrize(
    "given", ["int3", "int4", {"format": "int3", "group_size": 8}, "fp4_e2m1", "mxfp4_e2m1", "nvfp4"]
)
def test_gptq_output_error_is_below_rtn(given: str) -> None:
    torch.manual_seed(0)
    quantizer = Quantizer.from_spec(given, "channel")
    for _ in range(3):
        weight, hessian = problem(32, 64)
        found = gptq(weight, hessian, quantizer).decode()
        assert output_error(weight, found, hessian) < 0.8 * output_error(weight, quantizer(weight), hessian)


def test_gptq_group_scales_include_compensation() -> None:
    torch.manual_seed(0)
    weight, hessian = problem(8, 24)
    quantizer = Quantizer.from_spec({"format": "int3", "group_size": 8})
    found = gptq(weight, hessian, quantizer, block=3)
    still = quantizer.encode(weight).scale
    assert torch.equal(found.scale[:, 0], still[:, 0])
    assert not torch.equal(found.scale[:, 1:], still[:, 1:])
    for block in (8, 16, 128):
        torch.testing.assert_close(gptq(weight, hessian, quantizer, block=block).decode(), found.decode())
    by_hand = weight.clone()
    inverse = torch.linalg.inv(hessian + 0.01 * hessian.diagonal().mean() * torch.eye(24).double())
    for i in range(8):  # only the first group is quantized; the second absorbs the rest of its errors
        q = quantizer.format.round(by_hand[:, i] / still[:, 0, 0]) * still[:, 0, 0]
        by_hand -= (by_hand[:, i] - q)[:, None] / inverse[i, i] * inverse[i]
        inverse = inverse - inverse[:, i : i + 1] @ inverse[i : i + 1] / inverse[i, i]
    torch.testing.assert_close(found.scale[:, 1, 0], by_hand[:, 8:16].abs().amax(1) / 3)


def test_gptq_rounds_dead_inputs_to_nearest() -> None:
    torch.manual_seed(0)
    weight, hessian = problem()
    hessian[4], hessian[:, 4] = 0.0, 0.0
    quantizer = Quantizer.from_spec("int4", "channel")
    for damping in (0.01, 0.0):
        found = gptq(weight, hessian, quantizer, damping=damping).decode()
        assert torch.equal(found[:, 4], quantizer(weight)[:, 4])


def test_gptq_does_not_modify_its_arguments() -> None:
    weight, hessian = problem()
    # (in, out) as in Conv1D: a view is easy to get wrong
    for given in (weight.float(), weight.float().t().contiguous().t()):
        before, kept = given.clone(), hessian.clone()
        for act_order in (False, True):
            gptq(given, hessian, Quantizer.from_spec("int3", "channel"), act_order=act_order)
        assert torch.equal(given, before)
        assert torch.equal(hessian, kept)


@pytest.mark.parametrize(
    ("bad", "damping", "words"),
    [
        (torch.nan, 0.01, "NaN or Inf"),
        (torch.inf, 0.01, "NaN or Inf"),
        (1.0, 0.0, "singular with damping=0.0; raise it"),
    ],
)
def test_gptq_refuses_singular_hessians(bad: float, damping: float, words: str) -> None:
    hessian = torch.ones(5, 5)
    hessian[2, 2] = bad
    with pytest.raises(UserError, match=words):
        gptq(torch.randn(3, 5), hessian, Quantizer.from_spec("int4", "channel"), damping=damping)
