"""Tests of TTMEmbedding and TTMEmbeddingBag: equal to dense tables with the same rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.embedding import TTMEmbedding, TTMEmbeddingBag

TABLES: list[dict[str, Any]] = [
    {"num_embeddings": 97, "embedding_dim": 13, "rank": 5, "padding_idx": 3},
    {"num_embeddings": 200, "embedding_dim": 24, "rank": [3, 4], "num_modes": 3},
    {"num_embeddings": 50, "embedding_dim": 8, "rank": 3, "num_modes": 1},
    {"num_embeddings": 64, "embedding_dim": 8, "rank": 1, "num_modes": 5, "padding_idx": -1},
    {"num_embeddings": 60, "embedding_dim": 12, "rank": 6, "row_modes": (4, 15), "col_modes": (6, 2)},
]


def make_table(options: dict[str, Any], kind: type[TTMEmbedding] = TTMEmbedding, **more: Any) -> TTMEmbedding:
    torch.manual_seed(0)
    return kind(**options, **more).double()


@pytest.mark.parametrize("options", TABLES, ids=str)
@pytest.mark.parametrize("shape", [(7, 11), (1,), (), (0, 3), (400,)], ids=str)
def test_embedding_rows_match_dense(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    table = make_table(options)
    dense = table.to_dense()
    ids = torch.randint(0, options["num_embeddings"], shape)
    torch.testing.assert_close(table(ids), dense(ids))
    torch.testing.assert_close(table.rows(ids.flatten()), dense(ids.flatten()))


@pytest.mark.parametrize("options", TABLES, ids=str)
def test_embedding_gradients_match_dense(options: dict[str, Any]) -> None:
    table = make_table(options)
    ids = torch.randint(0, options["num_embeddings"], (30,))
    weights = torch.randn(30, options["embedding_dim"], dtype=torch.float64)
    (table(ids) * weights).sum().backward()
    found = [core.grad for core in table.cores]
    table.zero_grad()
    (nn.functional.embedding(ids, table.dense_weight()) * weights).sum().backward()
    for grad, core in zip(found, table.cores, strict=True):
        torch.testing.assert_close(grad, core.grad)


def test_embedding_documented_parameters() -> None:
    table = sc.TTMEmbedding(30522, 768, rank=32, row_modes=(16, 20, 10, 10), col_modes=(4, 4, 8, 6))
    assert table.ranks == (1, 32, 32, 32, 1)
    assert table.num_parameters() - 1 == sum(core.numel() for core in table.cores) == 167_808


@pytest.mark.parametrize("options", [o for o in TABLES if "padding_idx" not in o], ids=str)
def test_embedding_initial_variance_is_one(options: dict[str, Any]) -> None:
    assert make_table(options).dense_weight().square().mean().item() == pytest.approx(1.0, rel=1e-6)


def test_large_table_needs_no_index_memory() -> None:
    table = sc.TTMEmbedding(10_131_227, 32, rank=16)
    assert list(table.buffers()) == []
    assert sum(core.numel() for core in table.cores) < 100_000
    ids = torch.tensor([0, 10_131_226, 5_000_000, 0])
    rows = table(ids)
    assert torch.equal(rows[0], rows[3])
    rows.sum().backward()
    assert all(core.grad is not None for core in table.cores)


def test_repeated_ids_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TTMEmbedding(1000, 8, rank=4)
    seen: list[int] = []
    original = table.rows
    monkeypatch.setattr(table, "rows", lambda ids: seen.append(ids.numel()) or original(ids))
    table(torch.tensor([[5, 5, 5], [7, 5, 7]]))
    assert seen == [2]


@pytest.mark.parametrize("options", TABLES, ids=str)
@pytest.mark.parametrize("max_elements", [1 << 24, 50])
def test_logits_match_dense_product(options: dict[str, Any], max_elements: int) -> None:
    table = make_table(options)
    hidden = torch.randn(3, 5, options["embedding_dim"], dtype=torch.float64)
    torch.testing.assert_close(table.logits(hidden, max_elements), hidden @ table.dense_weight().t())


def test_logits_gradients_match_dense() -> None:
    table = make_table({"num_embeddings": 11, "embedding_dim": 6, "rank": 2, "num_modes": 2})
    hidden = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)

    def compute(hidden: Tensor, *cores: Tensor) -> Tensor:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = table

            def forward(self, hidden: Tensor) -> Tensor:
                return self.table.logits(hidden)

        values = {f"table.cores.{index}": core for index, core in enumerate(cores)}
        return torch.func.functional_call(Tied(), values, (hidden,))

    assert torch.autograd.gradcheck(compute, (hidden, *table.cores))
    assert torch.autograd.gradgradcheck(compute, (hidden, *table.cores), fast_mode=True)


def test_lookup_does_not_save_block_rows_for_backward() -> None:
    table = TTMEmbedding(30522, 768, 32, row_modes=(16, 20, 10, 10), col_modes=(4, 4, 8, 6))
    ids = torch.randperm(30522)[:1024]
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        rows = table.rows(ids)
    steps = table.plan(len(ids)).steps
    assert len(steps) > 1
    blocks = sum(block.nbytes for block in table.blocks(steps))
    found = sum(4 * len(ids) * step.leading * step.inner for step in steps[1:])
    chains = 4 * sum(core.numel() for core in table.cores)
    assert sum(saved.values()) <= blocks + found + chains + 64 * len(ids)
    assert rows.shape == (1024, 768)


@pytest.mark.parametrize("number", [3, 60])
def test_embedding_gradients_match_numerical_gradients(number: int) -> None:
    """Few ids are looked up row by row, many from merged tables."""
    table = make_table(TABLES[0])
    ids = torch.arange(number) % table.num_embeddings

    def compute(*cores: Tensor) -> Tensor:
        return torch.func.functional_call(table, {f"cores.{i}": core for i, core in enumerate(cores)}, (ids,))

    assert torch.autograd.gradcheck(compute, tuple(table.cores), fast_mode=True)
    assert torch.autograd.gradgradcheck(compute, tuple(table.cores), fast_mode=True)


@pytest.mark.parametrize("options", TABLES, ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_match_dense(options: dict[str, Any], mode: str) -> None:
    bag = make_table(options, TTMEmbeddingBag, mode=mode)
    dense = bag.to_dense()
    ids = torch.randint(0, options["num_embeddings"], (6, 5))
    torch.testing.assert_close(bag(ids), dense(ids))
    offsets = torch.tensor([0, 4, 4, 29])
    torch.testing.assert_close(bag(ids.flatten(), offsets), dense(ids.flatten(), offsets))
    if mode == "sum":
        weights = torch.rand(6, 5, dtype=torch.float64)
        torch.testing.assert_close(bag(ids, per_sample_weights=weights), dense(ids, per_sample_weights=weights))


@pytest.mark.parametrize("weighted", [False, True])
def test_embedding_autocast_keeps_dtype(weighted: bool) -> None:
    bag = TTMEmbeddingBag(500, 16, rank=4, mode="sum")
    ids = torch.randint(500, (8, 3))
    weights = torch.rand(8, 3) if weighted else None
    with torch.autocast("cpu", torch.bfloat16):
        found = bag(ids, per_sample_weights=weights)
        rows = TTMEmbedding(500, 16, rank=4)(ids)
    assert found.dtype == rows.dtype == torch.float32
    torch.testing.assert_close(found, bag(ids, per_sample_weights=weights), rtol=0.05, atol=0.05)


def test_bag_of_only_padding_is_zero() -> None:
    bag = TTMEmbeddingBag(20, 4, rank=2, mode="mean", padding_idx=0)
    assert not bag(torch.zeros(1, 3, dtype=torch.int64)).any()
    torch.testing.assert_close(bag(torch.tensor([[0, 5, 0]])), bag(torch.tensor([[5]])))


@pytest.mark.parametrize("options", [{"mode": "sum"}, {"mode": "mean", "include_last_offset": True}])
def test_bag_from_dense_keeps_settings(options: dict[str, Any]) -> None:
    dense = nn.EmbeddingBag(50, 8, **options).requires_grad_(False)
    bag = TTMEmbeddingBag.from_dense(dense, rank=1000)
    ids, offsets = torch.randint(50, (20,)), torch.tensor([0, 4, 4, 20])
    torch.testing.assert_close(bag(ids, offsets), dense(ids, offsets), rtol=1e-4, atol=1e-4)
    assert not any(core.requires_grad for core in bag.cores)


def test_from_dense_keeps_nonzero_padding_row() -> None:
    dense = nn.Embedding.from_pretrained(torch.randn(50, 8), padding_idx=0)
    ids = torch.tensor([0, 7])
    torch.testing.assert_close(TTMEmbedding.from_dense(dense, rank=1000)(ids), dense(ids), rtol=1e-4, atol=1e-4)


def test_from_dense_refuses_unsupported_tables() -> None:
    with pytest.raises(UserError, match="not max"):
        TTMEmbeddingBag.from_dense(nn.EmbeddingBag(50, 8, mode="max"), rank=4)
    with pytest.raises(UserError, match="max_norm"):
        TTMEmbedding.from_dense(nn.Embedding(50, 8, max_norm=1.0), rank=4)
    with pytest.raises(UserError, match=r"use TTMEmbeddingBag\.from_dense"):
        TTMEmbedding.from_dense(nn.EmbeddingBag(50, 8), rank=4)


@pytest.mark.parametrize("shape", [(4, 9), (40, 9)], ids=["fewer ids than rows", "more ids than rows"])
@pytest.mark.parametrize("kind", [TTMEmbedding, TTMEmbeddingBag])
def test_embedding_compiles_without_graph_break(kind: type[TTMEmbedding], shape: tuple[int, int]) -> None:
    table = kind(100, 12, rank=4, padding_idx=0)
    ids = torch.randint(0, 100, shape)
    compiled = torch.compile(table, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), table(ids))


@pytest.mark.parametrize("kind", [TTMEmbedding, TTMEmbeddingBag])
@pytest.mark.parametrize("capacity", [None, 8])
@pytest.mark.parametrize("wrong", [100, -1, 10**6])
def test_compiled_embedding_refuses_ids_out_of_range(
    kind: type[TTMEmbedding], capacity: int | None, wrong: int
) -> None:
    table = kind(100, 8, rank=4, capacity=capacity)
    compiled = torch.compile(table, fullgraph=True, backend="aot_eager")
    compiled(torch.tensor([[1, 99]]))
    with pytest.raises(RuntimeError, match="out of range"):
        compiled(torch.tensor([[1, wrong]]))


@pytest.mark.parametrize("ids", [[100], [-1], [3, 1 << 40]], ids=str)
def test_embedding_refuses_ids_out_of_range(ids: list[int]) -> None:
    with pytest.raises(IndexError, match="this table has the rows 0 to 99"):
        TTMEmbedding(100, 4, rank=2)(torch.tensor(ids))


def test_embedding_refuses_non_integer_ids() -> None:
    with pytest.raises(UserError, match="must be an integer type"):
        TTMEmbedding(100, 4, rank=2)(torch.zeros(3))


@pytest.mark.parametrize("num_modes", [1, 2, 4])
def test_embedding_from_dense_recovers_table(num_modes: int) -> None:
    embedding = nn.Embedding(45, 14, padding_idx=2).double()
    table = TTMEmbedding.from_dense(embedding, error=1e-9, allow_larger=True, num_modes=num_modes)
    torch.testing.assert_close(table.dense_weight(), embedding.weight)
    assert table.padding_idx == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0; it must be"),
        ({"rank": 2, "row_modes": (2, 3)}, "row_modes=.* product is 6"),
        ({"rank": 2, "row_modes": (10, 10), "col_modes": (2, 2, 2)}, "must have the same length"),
        ({"rank": 2, "padding_idx": 100}, "within the 100 rows"),
    ],
    ids=str,
)
def test_embedding_refuses_invalid_arguments(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TTMEmbedding(100, 8, **options)


def test_param_groups_treat_table_cores_as_embeddings() -> None:
    groups = sc.param_groups(nn.Sequential(TTMEmbedding(100, 8, rank=2)))
    roles = [(group["role"], group["matrix_dims"]) for group in groups]
    assert roles == [("vector", None), ("embedding", ((0, 1), (2, 3)))]


@pytest.mark.parametrize("bag", [False, True])
def test_capacity_keeps_rows_and_gradients(bag: bool) -> None:
    torch.manual_seed(0)
    made = TTMEmbeddingBag if bag else TTMEmbedding
    table = made(60, 24, 6, num_modes=3, padding_idx=4).double()
    ids = torch.randint(60, (7, 9)) % 11
    table(ids).square().sum().backward()
    wanted = [core.grad for core in table.cores]
    with_capacity = copy.deepcopy(table)
    with_capacity.capacity = 12
    with_capacity.zero_grad()
    torch.testing.assert_close(with_capacity(ids), table(ids))
    with_capacity(ids).square().sum().backward()
    for core, grad in zip(with_capacity.cores, wanted, strict=True):
        torch.testing.assert_close(core.grad, grad)
    torch.compiler.reset()
    compiled = torch.compile(with_capacity, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), table(ids))
    with_capacity.capacity = 10
    with pytest.raises(RuntimeError, match="more than 10 unique ids"):
        with_capacity(ids)
    with pytest.raises(UserError, match="capacity=0; it must be a positive integer"):
        made(60, 24, 6, capacity=0)
    assert with_capacity(ids[:0]).shape[0] == 0


@pytest.mark.parametrize("rank", [1, 6])
def test_embedding_per_example_gradients(rank: int) -> None:
    table = sc.TTMEmbedding(300, 16, rank)
    ids, parameters = torch.randint(300, (4, 30)), dict(table.named_parameters())

    def loss(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        return torch.func.functional_call(table, parameters, (ids,)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, ids)
    for number, each in enumerate(ids):
        table.zero_grad()
        table(each).square().sum().backward()
        for name, parameter in parameters.items():
            torch.testing.assert_close(found[name][number], parameter.grad)
