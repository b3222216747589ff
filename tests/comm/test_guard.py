"""DistributedDataParallel beside an exchange of momentum."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scantling.comm import refuse_reduction
from scantling.errors import UserError


def test_a_backward_pass_that_would_reduce_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(4, 4))
        refuse_reduction(model)
        refuse_reduction(model)  # DDP itself takes one hook in its life
        with model.no_sync():
            model(torch.randn(2, 4)).sum().backward()
        assert model.module.weight.grad is not None
        with pytest.raises(UserError, match=r"put every backward pass into model\.no_sync\(\)"):
            model(torch.randn(2, 4)).sum().backward()
    finally:
        dist.destroy_process_group()
