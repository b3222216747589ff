"""Tests of DLRM against its formulas, and of saving and loading it."""

from __future__ import annotations

from itertools import combinations
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import scantling as sc
from scantling.errors import UserError
from scantling.groups import param_groups
from scantling.trainer.models.build import build_model, default_task
from scantling.trainer.models.dlrm import DLRM, DLRMConfig, interactions, register
from scantling.trainer.recipe.schema import ModelSection
from scantling.trainer.tasks import get_task

SHAPE: dict[str, Any] = {"embedding_dim": 4, "bottom_mlp": [6], "top_mlp": [5]}


def naive_interactions(vectors: torch.Tensor) -> torch.Tensor:
    """Compute the interactions as in the paper: all pairs (i, j) with i > j, in the order of i, then j."""
    pairs = [(i, j) for i in range(vectors.shape[1]) for j in range(i)]
    return torch.stack([(vectors[:, i] * vectors[:, j]).sum(-1) for i, j in pairs], dim=1)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_interactions_are_those_of_the_paper(count: int) -> None:
    vectors = torch.randn(5, count, 4, dtype=torch.float64, requires_grad=True)
    want = naive_interactions(vectors)
    got = interactions(vectors)
    assert got.shape == (5, len(list(combinations(range(count), 2))))
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(want)
    want_grad, got_grad = (torch.autograd.grad((y * weights).sum(), vectors)[0] for y in (want, got))
    torch.testing.assert_close(got_grad, want_grad)
    assert torch.autograd.gradcheck(interactions, vectors)


@pytest.mark.parametrize(("numeric", "sizes"), [(3, [10, 7]), (1, [5]), (0, [4, 9, 2])])
def test_forward_is_the_formula(numeric: int, sizes: list[int]) -> None:
    torch.manual_seed(0)
    model = DLRM(DLRMConfig(num_numeric=numeric, table_sizes=sizes, **SHAPE))
    x = torch.randn(6, numeric) if numeric else None
    ids = torch.stack([torch.randint(0, size, (6,)) for size in sizes], dim=1)
    vectors = [table.weight[ids[:, place]] for place, table in enumerate(model.tables)]
    parts = []
    if x is not None:
        hidden = torch.relu(model.bottom[0](x))
        parts = [torch.relu(model.bottom[2](hidden))]
    parts.append(naive_interactions(torch.stack([*parts, *vectors], dim=1)))
    want = model.top[2](torch.relu(model.top[0](torch.cat(parts, dim=1))))[:, 0]
    torch.testing.assert_close(model(numeric=x, categorical=ids).logits, want)


def test_initial_weights_follow_the_paper() -> None:
    torch.manual_seed(0)
    model = DLRM(DLRMConfig(num_numeric=40, table_sizes=[3000, 50], embedding_dim=64, bottom_mlp=[500], top_mlp=[400]))
    for table in model.tables:
        bound = 1 / sqrt(table.num_embeddings)
        assert table.weight.abs().max() <= bound
        # a uniform variable has variance bound² / 3; 3,200 or more draws determine the deviation to 3 %
        assert table.weight.std().item() == pytest.approx(bound / sqrt(3), rel=0.03)
    for layer in (model.bottom[0], model.bottom[2], model.top[0]):
        fan_out, fan_in = layer.weight.shape
        assert layer.weight.std().item() == pytest.approx(sqrt(2 / (fan_in + fan_out)), rel=0.03)
    # 500 draws determine a deviation to 3 %; allow two of those
    assert model.bottom[0].bias.std().item() == pytest.approx(sqrt(1 / 500), rel=0.07)


def test_layers_are_plain_and_parameters_have_roles() -> None:
    model = DLRM(DLRMConfig(num_numeric=2, table_sizes=[9, 8], **SHAPE))
    kinds = {type(module) for module in model.modules() if next(module.parameters(recurse=False), None) is not None}
    assert kinds == {nn.Linear, nn.EmbeddingBag}
    roles = {name: group["role"] for group in param_groups(model) for name, _ in group["params"]}
    assert roles["tables.0.weight"] == "embedding"
    assert roles["bottom.0.weight"] == "matrix"
    assert roles["top.0.bias"] == "vector"


def test_saved_model_loads_with_the_same_logits(tmp_path: Path) -> None:
    register()
    config = DLRMConfig(num_numeric=2, table_sizes=[9, 8], **SHAPE)
    model = transformers.AutoModel.from_config(config).eval()
    model.save_pretrained(tmp_path)
    x, ids = torch.randn(3, 2), torch.tensor([[0, 7], [8, 0], [4, 4]])
    for loaded in (DLRM.from_pretrained(tmp_path), transformers.AutoModel.from_pretrained(tmp_path)):
        assert torch.equal(loaded.eval()(x, ids).logits, model(x, ids).logits)
    assert default_task(ModelSection(hf=str(tmp_path))) == "clicks"
    read = built({"hf": str(tmp_path)}, num_numeric=2, table_sizes=[9, 8])
    assert torch.equal(read.tables[0].weight, model.tables[0].weight)
    with pytest.raises(UserError, match=r"lacks .* weights"):
        built({"hf": str(tmp_path)}, num_numeric=2, table_sizes=[9, 80])


def built(section: dict[str, Any], **of_the_data: Any) -> Any:
    return build_model(
        ModelSection(**section),
        get_task("clicks"),
        vocab_size=0,
        seq_len=256,
        config_overrides=of_the_data,
        seed=0,
    )


@pytest.mark.parametrize("rank", [None, 4])
def test_load_returns_the_saved_class(tmp_path: Path, rank: int | None) -> None:
    model = DLRM(DLRMConfig(num_numeric=4, table_sizes=[1000, 2000], embedding_dim=16, bottom_mlp=[64], top_mlp=[64]))
    if rank is not None:
        sc.tensorize(model, rank)
    numeric, ids = torch.randn(5, 4), torch.randint(1000, (5, 2))
    model.save_pretrained(tmp_path)
    loaded = sc.load(tmp_path)
    assert type(loaded) is DLRM
    torch.testing.assert_close(loaded(numeric, ids).logits, model.eval()(numeric, ids).logits)


def test_preset_takes_its_tables_from_the_data() -> None:
    model = built({"preset": "dlrm", "overrides": SHAPE}, num_numeric=2, table_sizes=[30, 20])
    assert [table.num_embeddings for table in model.tables] == [30, 20]
    assert model.training
    again = built({"preset": "dlrm", "overrides": SHAPE}, num_numeric=2, table_sizes=[30, 20])
    assert torch.equal(model.tables[1].weight, again.tables[1].weight)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"table_sizes": [5]}, "table_sizes: follows from the data"),
        ({"embeding_dim": 5}, "did you mean 'embedding_dim'"),
        ({"embedding_dim": 0}, "embedding_dim must hold whole numbers from 1 on; given"),
        ({"top_mlp": [16, "a"]}, "top_mlp must hold whole numbers"),
        ({"hidden_size": 5}, "has no such key"),
    ],
)
def test_bad_overrides(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        built({"preset": "dlrm", "overrides": overrides}, num_numeric=2, table_sizes=[30, 20])


def test_dlrm_needs_two_inputs_to_interact() -> None:
    with pytest.raises(ValueError, match="needs numeric features and a table, or two tables"):
        DLRMConfig(num_numeric=0, table_sizes=[5])
    with pytest.raises(UserError, match="needs numeric features and a table"):
        built({"preset": "dlrm"}, num_numeric=0, table_sizes=[5])


def test_labels_give_the_loss_and_wrong_features_are_refused() -> None:
    torch.manual_seed(0)
    model = DLRM(DLRMConfig(num_numeric=3, table_sizes=[10, 7], **SHAPE))
    x, ids, labels = torch.randn(4, 3), torch.zeros(4, 2, dtype=torch.int64), torch.tensor([0, 1, 1, 0])
    found = model(x, ids, labels=labels)
    shares = torch.sigmoid(found.logits)
    torch.testing.assert_close(found.loss, -torch.where(labels == 1, shares, 1 - shares).log().mean())
    assert model(x, ids).loss is None
    for numeric, categorical, given in ((None, ids, "0 and 2"), (x[:, :2], ids, "2 and 2"), (x, ids[:, :1], "3 and 1")):
        with pytest.raises(UserError, match=f"3 numeric and 2 categorical features are wanted, given {given}"):
            model(numeric, categorical)
    with pytest.raises(UserError, match="given 3 and 0"):
        model(x)
