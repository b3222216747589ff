"""Tests of TT cores: norms, ranks, TT-SVD."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.errors import UserError
from scantling.tensor.cores import clip_ranks, dense, num_parameters, random_cores, squared_norm, tt_svd
from scantling.tensor.modes import boxes

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def chain(sizes: list[int], rank: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ranks = clip_ranks(rank, sizes)
    return [
        torch.randn(left, size, right, dtype=torch.float64, generator=generator)
        for left, size, right in zip(ranks[:-1], sizes, ranks[1:], strict=True)
    ]


@given(SIZES, st.integers(1, 9))
def test_clip_ranks_to_modes(sizes: list[int], rank: int) -> None:
    ranks = clip_ranks(rank, sizes)
    for bond in range(1, len(sizes)):
        assert ranks[bond] == min(rank, prod(sizes[:bond]), prod(sizes[bond:]))


def test_num_parameters_matches_cores() -> None:
    sizes = (12, 8, 8, 8, 8, 12)
    assert num_parameters(sizes, clip_ranks(30, sizes)) == 20_448


@pytest.mark.parametrize("rank", [0, -1, [2], [2, 0], "3", [1.5, 2]])
def test_clip_ranks_refuses_invalid_ranks(rank: object) -> None:
    with pytest.raises(UserError, match="one for each of the 2 bonds"):
        clip_ranks(rank, (2, 3, 4))  # type: ignore[arg-type]


@given(SIZES, st.integers(1, 6))
@settings(deadline=None)
def test_squared_norm_matches_dense_tensor(sizes: list[int], rank: int) -> None:
    cores = chain(sizes, rank)
    torch.testing.assert_close(squared_norm(cores), dense(cores).square().sum())


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 6), st.integers(0, 3))
@settings(deadline=None)
def test_random_cores_have_exact_norm_without_padding(rows: int, cols: int, rank: int, seed: int) -> None:
    row_modes, col_modes = (4, 4, 4), (8, 8)
    shapes = [(mode,) for mode in row_modes + col_modes]
    valid = [[(s,) for s in a + b] for a in boxes(rows, row_modes) for b in boxes(cols, col_modes)]
    generator = torch.Generator().manual_seed(seed)
    ranks = clip_ranks(rank, row_modes + col_modes)
    cores = random_cores(shapes, ranks, 3.0, valid, len(row_modes), dtype=torch.float64, generator=generator)
    assert dense(cores).reshape(64, 64)[:rows, :cols].norm().item() == pytest.approx(3.0, rel=1e-12)


def test_random_cores_are_well_conditioned() -> None:
    sizes, ranks = (6, 4, 4, 4, 4, 6), (1, 6, 10, 10, 10, 6, 1)
    everything = [[(slice(0, size),) for size in sizes]]
    cores = random_cores([(size,) for size in sizes], ranks, 5.0, everything, 3, dtype=torch.float64)
    values = torch.linalg.svdvals(dense(cores).reshape(96, 96))
    torch.testing.assert_close(values[:10], torch.full((10,), 5.0 / 10**0.5, dtype=torch.float64))
    assert values[10] < 1e-12
    assert (
        len(
            {
                round(core.norm().item() / (core.shape[0] if place > 2 else core.shape[-1]) ** 0.5, 9)
                for place, core in enumerate(cores)
            }
        )
        == 1
    )


@given(SIZES, st.integers(1, 4), st.sampled_from([1, 2]))
@settings(deadline=None)
def test_tt_svd_recovers_low_rank_tensor(sizes: list[int], rank: int, modes: int) -> None:
    cores = chain(sizes, rank)
    whole = dense(cores)
    shapes = [(size,) for size in sizes]
    if modes == 2:
        whole, shapes = whole.reshape([part for size in sizes for part in (size, 1)]), [(size, 1) for size in sizes]
    found = tt_svd(whole, shapes, clip_ranks(rank, sizes))
    torch.testing.assert_close(dense(found), whole)
    assert [core.shape[0] for core in found] == [core.shape[0] for core in tt_svd(whole, shapes, None, 1e-10)]


@pytest.mark.parametrize("error", [0.05, 0.3, 0.8])
def test_tt_svd_respects_error_bound(error: float) -> None:
    whole = torch.randn(6, 5, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = tt_svd(whole, [(6,), (5,), (4,), (7,)], None, error)
    made = float((dense(found) - whole).norm() / whole.norm())
    assert error / 8 < made <= error


def test_tt_svd_spends_remaining_error_budget() -> None:
    torch.manual_seed(0)
    noisy = torch.zeros(4, 4, 64, 64)  # all error has to arise at the middle bond and after it
    noisy[0, 0] = torch.linalg.qr(torch.randn(64, 64)).Q
    found = tt_svd(noisy, [(4,), (4,), (64,), (64,)], None, 0.5)
    assert (dense(found) - noisy).norm() / noisy.norm() == pytest.approx(0.5, abs=0.01)
    assert found[-1].shape[0] == 48  # 3/4 of the 64 equal singular values; 59 with a third of the error


def test_tt_svd_of_zeros_is_zero() -> None:
    found = tt_svd(torch.zeros(4, 4, 4), [(4,)] * 3, (1, 4, 4, 1))
    assert not dense(found).any()
    assert all(core.isfinite().all() for core in found)
