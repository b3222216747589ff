"""Layers in few bits under FSDP2: the same losses as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

import scantling as sc
from tests import processes
from tests.precision.test_training import INPUT, llama

FORMATS: dict[str, Any] = {
    "weights": "int4",
    "activations": {"format": "int8", "granularity": "token"},
    "kv_cache": "int8",
}


def losses(model: LlamaForCausalLM) -> list[float]:
    optimizer = sc.CAME(sc.param_groups(model), lr=3e-3, debias=True, betas=(0.9, 0.95, 0.995))
    found = []
    for _ in range(5):
        loss = model(INPUT, labels=INPUT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def sharded(expected: list[float]) -> None:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = sc.quantize_training(llama(), **FORMATS)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert losses(model) == pytest.approx(expected, rel=1e-5)


@pytest.mark.dist
def test_sharded_it_trains_as_on_one_process() -> None:
    torch.set_num_threads(1)
    processes.run(2, sharded, losses(sc.quantize_training(llama(), **FORMATS)))
