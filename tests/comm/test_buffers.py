"""Tests of averaging buffers over replicas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scantling.comm import average_buffers
from tests.comm.replicas import ThreadGroup, together


def test_average_buffers_averages_running_statistics_only() -> None:
    nets = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)) for _ in range(3)]
    for rank, net in enumerate(nets):
        net.register_buffer("table", torch.full((5,), float(rank)), persistent=False)
        net[1].running_mean.fill_(rank)
        net[1].num_batches_tracked.fill_(7)
    weights = [net[0].weight.clone() for net in nets]

    def work(replicas: ThreadGroup) -> None:
        average_buffers(nets[replicas.rank], replicas)

    together(3, work)
    for rank, net in enumerate(nets):
        assert net[1].running_mean.tolist() == [1.0] * 6
        assert net[1].running_var.tolist() == [1.0] * 6
        assert int(net[1].num_batches_tracked) == 7
        assert net.table.tolist() == [float(rank)] * 5
        assert torch.equal(net[0].weight, weights[rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_average_buffers_skips_nonfinite_replicas(dtype: torch.dtype) -> None:
    nets = [nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6)).to(dtype) for _ in range(3)]
    for rank, net in enumerate(nets):
        net.register_buffer("mask", torch.full((5,), -torch.inf, dtype=dtype))
        net[0].running_mean.fill_(2 * rank)
        net[1].running_mean.fill_(rank)
    nets[1][0].running_mean[2] = torch.nan
    nets[2][1].running_var[0] = torch.inf

    def work(replicas: ThreadGroup) -> None:
        average_buffers(nets[replicas.rank], replicas)

    together(3, work)
    for net in nets:
        assert net[0].running_mean.tolist() == [2.0] * 6
        assert net[1].running_mean.tolist() == [1.0] * 6
        assert net[1].running_var.tolist() == [1.0] * 6
        assert net.mask.tolist() == [-torch.inf] * 5


def test_average_buffers_without_buffers_sends_nothing() -> None:
    assert average_buffers(nn.Linear(3, 3)) == 0
