"""Tests of the count of an exchange's launches."""

from __future__ import annotations


def test_kernels_save_launches() -> None:
    import comm_launches

    operations, kernels = (comm_launches.count("topk 8, signs", kernels=kernels) for kernels in (False, True))
    assert operations["kernels"] == 0
    assert kernels["by_name"]["select"] == kernels["block_groups"] - 1  # vectors are not selected
    assert kernels["launches"] < 0.2 * operations["launches"]
