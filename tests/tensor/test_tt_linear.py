"""Tests of TTLinear as a layer: equal to its dense form, usable like nn.Linear."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.contraction import best_orders
from scantling.tensor.linear import TTLinear

LAYERS: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((768, 768), {"rank": 30, "in_modes": (12, 8, 8), "out_modes": (8, 8, 12)}),
    ((64, 96), {"rank": 5, "num_modes": 2}),
    ((97, 13), {"rank": 6}),
    ((30, 30), {"rank": 1, "num_modes": 4}),
    ((12, 20), {"rank": 3, "num_modes": 1, "bias": False}),
    ((40, 1), {"rank": [2, 5, 1], "num_modes": 2}),
    ((32, 32), {"rank": 7, "num_modes": 5}),
]


def make_layer(sizes: tuple[int, int], options: dict[str, Any]) -> TTLinear:
    torch.manual_seed(0)
    return TTLinear(*sizes, **options).double()


@pytest.mark.parametrize(("sizes", "options"), LAYERS, ids=str)
@pytest.mark.parametrize("lead", [(1,), (2, 3), (200,), (0,), ()], ids=str)
def test_tt_linear_matches_dense(sizes: tuple[int, int], options: dict[str, Any], lead: tuple[int, ...]) -> None:
    layer = make_layer(sizes, options)
    x = torch.randn(*lead, sizes[0], dtype=torch.float64)
    linear = layer.to_dense()
    torch.testing.assert_close(layer(x), linear(x))
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_tt_linear_documented_ranks_and_parameters() -> None:
    layer = sc.TTLinear(768, 768, rank=30, in_modes=(12, 8, 8), out_modes=(8, 8, 12), bias=True)
    assert layer.ranks == (1, 12, 30, 30, 30, 12, 1)
    assert sum(core.numel() for core in layer.cores) == 20_448
    assert layer.num_parameters() == 20_448 + 768 + 1
    assert [tuple(core.shape) for core in layer.cores][:3] == [(1, 12, 12), (12, 8, 30), (30, 8, 30)]


@pytest.mark.parametrize(("sizes", "options"), LAYERS, ids=str)
def test_tt_linear_initial_variance_matches_linear(sizes: tuple[int, int], options: Any) -> None:
    layer = make_layer(sizes, options)
    variance = layer.dense_weight().square().mean().item()
    assert variance == pytest.approx(1 / (3 * sizes[0]), rel=1e-6)


def test_weight_metadata_does_not_build_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TTLinear(64, 32, rank=4, dtype=torch.bfloat16)
    monkeypatch.setattr(layer, "dense_weight", lambda: pytest.fail("the matrix was built"))
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    assert (weight.dtype, weight.shape, weight.device.type) == (torch.bfloat16, (32, 64), "cpu")
    assert (weight.size(0), weight.numel(), weight.dim()) == (32, 2048, 2)
    assert "LazyWeight" in repr(weight)


WRITES: dict[str, Callable[[sc.TTLinear], object]] = {
    "init": lambda layer: nn.init.normal_(layer.weight),
    "in place": lambda layer: layer.weight.mul_(2.0),
    "data in place": lambda layer: layer.weight.data.normal_(),
    "data": lambda layer: setattr(layer.weight, "data", torch.zeros(32, 16)),
    "item": lambda layer: layer.weight.data.__setitem__(0, 0.0),
    "out": lambda layer: torch.add(torch.ones(32, 16), 1.0, out=layer.weight),
}


@pytest.mark.parametrize("way", WRITES)
def test_weight_refuses_writes(way: str) -> None:
    layer = sc.TTLinear(16, 32, rank=4)
    with pytest.raises(UserError, match="cannot be written; change its `cores`"):
        WRITES[way](layer)
    assert torch.equal(layer.weight.data, layer.dense_weight())
    assert not layer.weight.data.requires_grad


def test_weight_passes_gradients_to_cores() -> None:
    layer = TTLinear(64, 32, rank=4)
    layer.weight.square().sum().backward()
    assert all(core.grad is not None and core.grad.any() for core in layer.cores)


def test_copied_weight_is_dense() -> None:
    layer = TTLinear(16, 32, rank=4)
    weight = copy.deepcopy(layer.weight)
    assert torch.equal(weight, layer.dense_weight())
    assert weight.is_leaf
    assert weight.requires_grad


@pytest.mark.parametrize("lead", [(3,), (2, 3), (2, 300)], ids=str)
def test_padded_outputs_are_contiguous(lead: tuple[int, ...]) -> None:
    assert TTLinear(64, 97, rank=4)(torch.randn(*lead, 64)).is_contiguous()
    table = sc.TTMEmbedding(97, 13, rank=4)
    assert table.logits(torch.randn(*lead, 13)).is_contiguous()
    assert torch.func.vmap(table)(torch.randint(97, (2, *lead))).is_contiguous()


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_tt_linear_gradients_match_numerical_gradients(num_tokens: int) -> None:
    layer = make_layer((7, 10), {"rank": 3, "num_modes": 2})
    x = torch.randn(num_tokens, 7, dtype=torch.float64, requires_grad=True)

    def contract_all(x: torch.Tensor, *cores: torch.Tensor) -> torch.Tensor:
        values = {f"cores.{index}": core for index, core in enumerate(cores)}
        return torch.func.functional_call(layer, values, (x,))

    merged = any(isinstance(step.tree, tuple) for step in layer.plan(num_tokens).steps)
    assert merged == (num_tokens == 40), "few tokens go through core after core, many through merged ones"
    inputs = (x, *layer.cores)
    assert torch.autograd.gradcheck(contract_all, inputs, fast_mode=num_tokens == 40)
    assert torch.autograd.gradgradcheck(contract_all, inputs, fast_mode=num_tokens == 40)


def test_tt_linear_compiles_once_for_many_token_counts() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layer = TTLinear(64, 64, rank=8)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for num_tokens in (2, 3, 5, 9, 17, 33, 100, 1000, 2000):
        x = torch.randn(num_tokens, 64)
        torch.testing.assert_close(compiled(x), layer(x))
    assert len(graphs) <= len(best_orders(layer.network)) + 1


def test_weight_dtype_compiles_without_graph_break() -> None:
    layer = TTLinear(32, 32, rank=4)

    def model(x: torch.Tensor) -> torch.Tensor:
        return layer(x.to(layer.weight.dtype))

    x = torch.randn(5, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("num_tokens", [4, 400])
def test_tt_linear_autocast_matches_linear(num_tokens: int) -> None:
    torch.manual_seed(0)
    layer = TTLinear(64, 64, rank=8)
    x = torch.randn(num_tokens, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.05, atol=0.02)
    assert all(core.grad is not None and core.grad.dtype == torch.float32 for core in layer.cores)


def test_tt_linear_copies_and_state_dicts() -> None:
    layer = TTLinear(24, 36, rank=4)
    other = TTLinear(24, 36, rank=4)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 24)
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_load_state_dict_refuses_other_ranks() -> None:
    model = nn.Sequential(TTLinear(24, 36, rank=4))
    with pytest.raises(UserError, match=r"0: core 1 of the checkpoint has the shape \(1, \d, 3\)"):
        model.load_state_dict(nn.Sequential(TTLinear(24, 36, rank=3)).state_dict())


@pytest.mark.parametrize(
    "options", [{"error": 1e-7, "allow_larger": True}, {"rank": 1000}, {"rank": 1000, "num_modes": 2}], ids=str
)
def test_linear_from_dense_recovers_layer(options: Any) -> None:
    linear = nn.Linear(60, 37).double()
    layer = TTLinear.from_dense(linear, **options)
    x = torch.randn(5, 60, dtype=torch.float64)
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.to_dense().weight, linear.weight, rtol=1e-5, atol=1e-6)


def test_linear_from_dense_is_optimal_for_one_bond() -> None:
    linear = nn.Linear(16, 16, bias=False).double()
    layer = TTLinear.from_dense(linear, rank=5, num_modes=1)
    best = torch.linalg.svdvals(linear.weight.detach())[5:].norm()
    torch.testing.assert_close((layer.dense_weight() - linear.weight).norm(), best)
    assert layer.bias is None


def test_param_groups_treat_cores_as_matrices() -> None:
    groups = sc.param_groups(nn.Sequential(TTLinear(24, 36, rank=4)), weight_decay=0.1)
    assert {group["role"] for group in groups} == {"matrix", "vector"}
    matrices = next(group for group in groups if group["role"] == "matrix")
    assert matrices["matrix_dims"] == ((0, 1), (2,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0; it must be"),
        ({"rank": [2, 2]}, "one for each of the 5 bonds"),
        ({"rank": 2, "in_modes": (2, 3)}, "in_modes=.* product is 6"),
        ({"rank": 2, "num_modes": 7}, "num_modes=.* must be from 1 to 5"),
    ],
    ids=str,
)
def test_tt_linear_refuses_invalid_arguments(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TTLinear(24, 36, **options)


@pytest.mark.parametrize("rank", [2.5, True, None, "3", 0, [3, 3], [3, 3, True, 3, 3]])
def test_tt_linear_refuses_invalid_ranks(rank: Any) -> None:
    with pytest.raises(UserError, match=r"rank=.* must be a positive integer, or .* one for each of the 5 bonds"):
        TTLinear(64, 64, rank)


def test_tt_linear_accepts_numpy_integers() -> None:
    import numpy as np

    wanted = TTLinear(64, 64, 3).ranks
    assert TTLinear(64, 64, np.int64(3)).ranks == TTLinear(64, 64, torch.tensor(3)).ranks == wanted
    assert TTLinear(64, 64, [np.int64(3)] * 5, in_modes=np.array([4, 4, 4])).ranks == wanted


def test_tt_linear_refuses_mismatched_inputs() -> None:
    with pytest.raises(UserError, match=r"the shape \(4, 384\); its last dim must be 768"):
        TTLinear(768, 8, 2)(torch.ones(4, 384))
    with pytest.raises(UserError, match="num_modes='3'; it must be from 1 to 5"):
        TTLinear(8, 8, 2, num_modes="3")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"given error=2\.0"):
        TTLinear.from_dense(nn.Linear(8, 8), error=2.0)
    broken = nn.Linear(8, 8)
    with torch.no_grad():
        broken.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="holds NaN or Inf"):
        TTLinear.from_dense(broken, rank=2)


def test_tt_linear_on_meta_device() -> None:
    layer = TTLinear(64, 48, 4, device="meta")
    assert layer(torch.zeros(3, 64, device="meta")).shape == (3, 48)
    with pytest.raises(UserError, match="the cores of this layer are on meta, its input is on cpu"):
        layer(torch.zeros(3, 64))


def test_linear_from_dense_needs_rank_or_error() -> None:
    with pytest.raises(UserError, match="a rank, an error above 0"):
        TTLinear.from_dense(nn.Linear(4, 4))


@pytest.mark.parametrize("bias", [False, True])
def test_tt_linear_saves_input_and_narrow_states_for_backward(bias: bool) -> None:
    tokens, rank = 2048, 30
    layer = TTLinear(768, 3072, rank, bias=bias)
    x = torch.randn(tokens, 768, requires_grad=True)
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = layer(x)
    merged = 4 * rank * (768 + 3072)
    chains = sum(core.nbytes for core in layer.cores) + merged  # includes intermediate merged cores
    assert sum(saved.values()) <= x.nbytes + 4 * tokens * rank + merged + chains
    assert sum(saved.values()) < 0.4 * (x.nbytes + y.nbytes)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: sc.TTLinear(8.0, 8, 2), "in_features=8.0; it must be a positive integer"),
        (lambda: sc.TTLinear(8, 0, 2), "out_features=0; it must be a positive integer"),
        (lambda: sc.TTMEmbedding(8, True, 2), "embedding_dim=True; it must be a positive integer"),
        (lambda: sc.TTMEmbedding(8, 8, 2, padding_idx=1.5), "padding_idx=1.5; it must be an integer"),
        (lambda: sc.TTMEmbedding(8, 8, 2, capacity=True), "capacity=True; it must be a positive integer"),
        (lambda: sc.TTMEmbedding(8, 8, 2, capacity=2.5), "capacity=2.5; it must be a positive integer"),
    ],
)
def test_tt_linear_refuses_invalid_sizes(made: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made()


def test_linear_from_dense_refuses_other_layers() -> None:
    with pytest.raises(UserError, match=r"takes an nn.Linear, given Embedding; use sc.tensorize for models"):
        TTLinear.from_dense(nn.Embedding(8, 8), rank=2)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"takes an nn.Embedding or nn.EmbeddingBag, given Linear"):
        sc.TTMEmbedding.from_dense(nn.Linear(8, 8), rank=2)  # type: ignore[arg-type]
    for kind, layer in ((TTLinear, nn.Linear), (sc.TTMEmbedding, nn.Embedding)):
        with pytest.raises(UserError, match="on the meta device and holds no values"):
            kind.from_dense(layer(8, 8, device="meta"), rank=2)
