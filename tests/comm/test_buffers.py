"""Tests of averaging buffers over replicas."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from torch import Tensor, nn

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


def test_average_buffers_counts_many_replicas_exactly() -> None:
    """A sum of ones in bf16 stalls at 256."""
    nets = [nn.BatchNorm1d(1).to(torch.bfloat16) for _ in range(260)]
    for rank, net in enumerate(nets):
        net.running_mean.fill_(rank % 2)

    def work(replicas: ThreadGroup) -> None:
        def sum_in_dtype(values: Tensor) -> Tensor:
            return reduce(torch.add, replicas.room.meet(replicas.rank, values.clone())) / replicas.world_size

        replicas.all_reduce_mean = sum_in_dtype  # type: ignore[method-assign]
        average_buffers(nets[replicas.rank], replicas)

    together(len(nets), work)
    assert {net.running_mean.item() for net in nets} == {0.5}
    assert {net.running_var.item() for net in nets} == {1.0}


def test_average_buffers_keeps_all_dtypes() -> None:
    nets = [nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2).double(), nn.BatchNorm1d(2).half()]) for _ in range(2)]
    for rank, net in enumerate(nets):
        for layer in net:
            layer.running_mean.fill_(1.0 + rank * 2.0**-40)
    together(2, lambda replicas: average_buffers(nets[replicas.rank], replicas))
    for net in nets:
        assert [layer.running_mean.dtype for layer in net] == [torch.float32, torch.float64, torch.float16]
        assert [layer.running_mean[0].item() for layer in net] == [1.0, 1.0 + 2.0**-41, 1.0]


def test_average_buffers_without_buffers_sends_nothing() -> None:
    assert average_buffers(nn.Linear(3, 3)) == 0
