"""Tests of the check for non-finite gradients before an exchange."""

from __future__ import annotations

import pytest
import torch

from scantling.comm.transport.shards import all_finite


def test_all_finite_with_mixed_dtypes() -> None:
    """The norm of the fp16 values exceeds the range of fp16."""
    values = [torch.full((64, 64), 6e4, dtype=torch.float16), torch.ones(3, dtype=torch.float64)]
    assert all_finite(values)
    assert not all_finite([*values, torch.tensor([torch.inf])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e30, -1e30], True),
        ([3.38e38], True),
        ([3.395e38], False),  # finite in fp32, Inf in bf16
        ([1e38, -1e38, 1e38, -1e38], False),  # sum of magnitudes
        ([torch.nan, 0.0], False),
        ([-torch.inf, 0.0], False),
    ],
)
def test_all_finite_has_the_range_of_bf16(dtype: torch.dtype, values: list[float], expected: bool) -> None:
    assert all_finite([torch.tensor(values, dtype=dtype), torch.ones(2)]) == expected
