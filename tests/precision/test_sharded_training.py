"""Tests of low-precision layers under FSDP2: the losses are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaForCausalLM

import scantling as sc
from scantling.precision import fake_quantize
from tests import processes
from tests.precision.llamas import INPUT, llama

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
        fully_shard(layer.mlp.up_proj, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert losses(model) == pytest.approx(expected, rel=1e-5)
    before = model(INPUT).logits
    sc.precision.restore(model)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "FSDPLinear"
    assert not torch.equal(model(INPUT).logits, before)


def rounded_where_it_is(name: str) -> None:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    shard = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(fake_quantize(shard, name).full_tensor(), fake_quantize(whole, name))


def formats_of_shards() -> None:
    for name in ("int4", "fp4_e2m1", "fp8_e4m3", "mxfp4_e2m1", "nvfp4"):
        rounded_where_it_is(name)


@pytest.mark.dist
def test_sharded_weights_round_like_unsharded() -> None:
    processes.run(2, formats_of_shards)


@pytest.mark.dist
def test_sharded_training_matches_one_process() -> None:
    torch.set_num_threads(1)
    processes.run(2, sharded, losses(sc.quantize_training(llama(), **FORMATS)))
