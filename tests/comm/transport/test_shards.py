"""Tests of the check for non-finite gradients before an exchange."""

from __future__ import annotations

import torch

from scantling.comm.transport.shards import all_finite


def test_all_finite_with_mixed_dtypes() -> None:
    """The norm of the fp16 values exceeds the range of fp16."""
    values = [torch.full((64, 64), 6e4, dtype=torch.float16), torch.ones(3, dtype=torch.float64)]
    assert all_finite(values)
    assert not all_finite([*values, torch.tensor([torch.inf])])
