"""Tests of the planned memory of sharded models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import scantling as sc
from scantling.trainer.models.sharding import ShardGroup, shard_groups
from scantling.trainer.planning.memory import gathered_bytes
from scantling.trainer.recipe.schema import ParallelSection
from tests.runs import WIDE, tiny_recipe


def groups_of(sizes: list[int], rest: int, *, reshards: bool = True) -> list[ShardGroup]:
    """Return groups of so many fp32 parameters, the rest of the model last."""

    def group(size: int, reshards: bool) -> ShardGroup:
        return ShardGroup(nn.Module(), [nn.Parameter(torch.empty(size, device="meta"))], reshards)

    return [*(group(size, reshards) for size in sizes), group(rest, False)]


def test_gathered_bytes_are_those_of_the_largest_phase() -> None:
    # weights, gradients and the copy that is sent of the largest group; the next block; the rest
    assert gathered_bytes(groups_of([5, 5, 5, 30], 1), 1.0) == 4 * (3 * 30 + 5 + 1)
    assert gathered_bytes(groups_of([5, 5, 5], 100), 1.0) == 4 * 3 * 100
    assert gathered_bytes(groups_of([5, 5, 5], 1, reshards=False), 1.0) == 4 * (16 + 2 * 5)
    # of a model whose layers are all TT layers, nothing is gathered
    assert gathered_bytes([ShardGroup(nn.Module(), [], False)], 1.0) == 0
    assert gathered_bytes([], 1.0) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_plan_of_a_rank_has_its_parts(tied: bool, tmp_path: Path) -> None:
    overrides = {**tiny_recipe(tmp_path)["model"]["overrides"], **WIDE, "tie_word_embeddings": tied}
    whole, half = (
        sc.plan(
            tiny_recipe(tmp_path, model={"overrides": overrides}, parallel={"shard": shards}),
            world_size=shards,
            device="cuda",
        )
        for shards in (1, 2)
    )
    assert half.num_parameters == whole.num_parameters
    vectors = 4 * whole.parameters_by_role["vector"]
    assert half.weight_bytes == (whole.weight_bytes - vectors) / 2 + vectors
    assert half.gradient_bytes == half.weight_bytes
    # each matrix is gathered for the forward and the backward pass, and reduced; the head once, and so are tied weights
    assert 2 * half.weight_bytes < half.wire_bytes < 3 * half.weight_bytes


def test_blocks_take_their_parameters_and_tied_ones_stay_with_the_rest() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 3}
    for tied, names in ((False, 3 + 2), (True, 3)):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**config, vocab_size=64, tie_word_embeddings=tied))
        *parts, rest = shard_groups(model, ParallelSection(shard=2))
        assert len(parts) == names
        assert rest.module is model
        assert rest.num_bytes == (4 * 64 * 32 if tied else 0)
        found = [id(param) for group in (*parts, rest) for param in group.params]
        assert len(found) == len(set(found))
        assert set(found) == {id(param) for param in model.parameters() if param.ndim > 1}
