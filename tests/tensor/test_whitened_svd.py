"""Tests of the whitened SVD of one weight, against its definition and the plain SVD."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from scantling.tensor.cores import clip_ranks, dense
from scantling.tensor.whitened_svd import WhitenedWeight

CHAINS = {
    "thin matrices": ((40,), (24,)),
    "several modes": ((5, 8), (4, 6)),
    "padded modes": ((6, 7), (5, 5)),
}


def correlated_inputs(tokens: int = 400) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(tokens, 40) * torch.logspace(-2, 1, 40) @ torch.randn(40, 40)


def relative_error(x: Tensor, weight: Tensor, other: Tensor) -> float:
    return float((x @ (weight - other).t()).norm() / (x @ weight.t()).norm())


def approximation(weight: WhitenedWeight, chain: str, rank: int) -> Tensor:
    in_modes, out_modes = CHAINS[chain]
    cores = weight.cores(in_modes, out_modes, clip_ranks(rank, (*in_modes, *out_modes)))
    padded = dense(cores).reshape(-1, torch.Size(out_modes).numel())
    return padded[:40, :24].t().float()


@pytest.mark.parametrize("chain", CHAINS)
def test_whitened_error_is_below_plain_error(chain: str) -> None:
    x, linear = correlated_inputs(), nn.Linear(40, 24, bias=False)
    weight = linear.weight.detach()
    whitened = WhitenedWeight(weight, x.t() @ x / len(x))
    in_modes, out_modes = CHAINS[chain]
    plain = sc.TTLinear.from_dense(linear, 6, in_modes=in_modes, out_modes=out_modes).dense_weight().detach()
    found = approximation(whitened, chain, 6)
    assert relative_error(x, weight, found) < 0.7 * relative_error(x, weight, plain)


def test_error_is_the_smallest_of_its_rank() -> None:
    """The best rank-r approximation of X W in any form is its own truncated SVD (Eckart and Young)."""
    x, weight = correlated_inputs().double(), torch.randn(24, 40).double()
    whitened = WhitenedWeight(weight, x.t() @ x / len(x))
    values = torch.linalg.svdvals(x @ weight.t())
    for rank in (1, 5, 12):
        best = float(values[rank:].norm() / values.norm())
        found = relative_error(x, weight, approximation(whitened, "thin matrices", rank).double())
        assert found == pytest.approx(best, rel=1e-2)
        assert sqrt(whitened.squared_errors()[rank] / whitened.squared_norm()) == pytest.approx(best, rel=1e-2)


@pytest.mark.parametrize("chain", CHAINS)
def test_full_rank_is_exact(chain: str) -> None:
    x, weight = correlated_inputs(), torch.randn(24, 40)
    found = approximation(WhitenedWeight(weight, x.t() @ x / len(x)), chain, 1000)
    assert torch.allclose(found, weight, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5, 39])
def test_singular_gram_matrix_keeps_outputs_and_full_rank_weight(tokens: int) -> None:
    x, weight = correlated_inputs(tokens), torch.randn(24, 40)
    whitened = WhitenedWeight(weight, x.t() @ x / tokens)
    assert torch.allclose(approximation(whitened, "thin matrices", 24), weight, atol=1e-4)
    # As many ranks as tokens reproduce the outputs of these tokens, up to the damping.
    rank = min(tokens, 24)
    assert relative_error(x, weight, approximation(whitened, "thin matrices", rank)) < 0.05


def test_gram_matrix_that_rounding_made_indefinite_is_damped_further() -> None:
    gram = torch.ones(40, 40) - 0.5 * torch.eye(40)  # 39 eigenvalues of -0.5
    found = approximation(WhitenedWeight(torch.randn(24, 40), gram), "thin matrices", 4)
    assert torch.isfinite(found).all()


def test_without_gram_matrix_it_is_the_plain_svd() -> None:
    weight = torch.randn(24, 40)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    wanted = u[:, :6] * s[:6] @ v[:6]
    for gram in (None, torch.zeros(40, 40)):
        found = approximation(WhitenedWeight(weight, gram), "thin matrices", 6)
        assert torch.allclose(found, wanted, atol=1e-5)
