"""Tests of the choice of ranks by error and by size."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from scantling.errors import UserError
from scantling.tensor.svd_ranks import Spectrum, ranks_by_error, ranks_by_size


def spectrum(seed: int, rank_numel: int, dense_numel: int, count: int = 6) -> Spectrum:
    values = torch.rand(count, generator=torch.Generator().manual_seed(seed)).sort(descending=True).values.double()
    errors = torch.cat([values.flip(0).cumsum(0).flip(0), torch.zeros(1)])
    return Spectrum(errors / errors[0], rank_numel, dense_numel)


def total(spectra: list[Spectrum], ranks: list[int | None]) -> tuple[int, float]:
    """Return the size and the sum of squared errors."""
    sizes = [
        each.dense_numel if rank is None else rank * each.rank_numel for each, rank in zip(spectra, ranks, strict=True)
    ]
    errors = [
        0.0 if rank is None else float(each.squared_errors[rank]) for each, rank in zip(spectra, ranks, strict=True)
    ]
    return sum(sizes), sum(errors)


def test_ranks_by_error_are_the_lowest_or_leave_the_layer_dense() -> None:
    spectra = [spectrum(seed, 10, 45) for seed in range(5)]
    for error in (0.1, 0.5, 0.9):
        for own, rank in zip(spectra, ranks_by_error(spectra, error), strict=True):
            fitting = [r for r in range(1, 5) if own.squared_errors[r] <= error**2]
            assert rank == (fitting[0] if fitting else None)


@pytest.mark.parametrize("size", [60, 100, 130, 170, 300])
def test_ranks_by_size_are_near_the_best_of_all_choices(size: int) -> None:
    spectra = [spectrum(0, 10, 45), spectrum(1, 7, 35), spectrum(2, 16, 90), spectrum(3, 9, 30)]
    choices = [[rank for _, _, rank in each.points()] for each in spectra]
    all_totals = [total(spectra, list(ranks)) for ranks in product(*choices)]
    best = min(error for own, error in all_totals if own <= size)
    used, found = total(spectra, ranks_by_size(spectra, size))
    assert used <= size
    # The rest of the size that the hulls leave is less than one step of a layer.
    slack = max(each.dense_numel for each in spectra)
    looser = min((error for own, error in all_totals if own <= size - slack), default=float("inf"))
    assert best <= found <= looser


def test_ranks_by_size_refuse_sizes_below_rank_one() -> None:
    with pytest.raises(UserError, match="size target of 16 parameters; it must be at least 17"):
        ranks_by_size([spectrum(0, 10, 45), spectrum(1, 7, 35)], 16)


def test_all_ranks_fit_into_the_dense_size() -> None:
    spectra = [spectrum(0, 10, 45), spectrum(1, 7, 35)]
    assert ranks_by_size(spectra, 80) == [None, None]
