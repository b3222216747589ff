"""Tests of a nonlinearity between input and output cores, f(x A) B, in every contraction order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import batch, logits, make_model
from torch import Tensor, nn

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.contraction import best_orders, core_indices
from scantling.tensor.layer import keep_merged, merge_once
from scantling.tensor.linear import TTLinear

SHAPES: list[dict[str, Any]] = [
    {"rank": 8, "num_modes": 1},
    {"rank": 8, "num_modes": 2, "bias": False},
    {"rank": 6, "num_modes": 3},
    {"rank": 1, "num_modes": 4},
]


def make_layer(**options: Any) -> TTLinear:
    torch.manual_seed(0)
    return TTLinear(42, 50, activation="silu", **options).double()


def reference_forward(layer: TTLinear, x: Tensor) -> Tensor:
    """Compute the layer by its definition."""
    first, *rest = layer.gated_cores()
    number = len(layer.in_modes)
    sides = []
    for part in ([first, *rest[: number - 1]], rest[number - 1 :]):
        whole = part[0]
        for core in part[1:]:
            whole = torch.tensordot(whole, core, dims=1)
        sides.append(whole)
    down, up = sides[0].flatten(0, -2), sides[1].flatten(1)
    padded = nn.functional.pad(x, (0, down.shape[0] - x.shape[-1]))
    y = (nn.functional.silu(padded @ down) @ up)[..., : layer.out_features]
    return y if layer.bias is None else y + layer.bias


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 5, 300])
def test_activation_matches_definition(options: dict[str, Any], tokens: int) -> None:
    layer = make_layer(**options)
    x = torch.randn(tokens, 42, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(layer(x), reference_forward(layer, x))
    wanted = torch.autograd.grad(reference_forward(layer, x).square().sum(), [x, *layer.parameters()])
    found = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(found, wanted)
    with torch.no_grad(), keep_merged(layer):
        torch.testing.assert_close(layer(x), reference_forward(layer, x))


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_contraction_blocks_do_not_span_activation(options: dict[str, Any]) -> None:
    layer = make_layer(**options)
    inputs = len(layer.in_modes)
    for merges in (1.0, 0.0):
        for _, steps in best_orders(layer.network, merges):
            sides = [{core < inputs for core in core_indices(step.tree)} for step in steps]
            assert all(len(side) == 1 for side in sides)


def test_activation_gradients_match_numerical_gradients() -> None:
    layer = make_layer(rank=3, num_modes=2)
    x = torch.randn(4, 42, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_activation_layer_initial_variance_matches_dense() -> None:
    torch.manual_seed(0)
    x = torch.randn(4000, 256)
    for num_modes in (1, 3):
        layer = TTLinear(256, 512, rank=64, num_modes=num_modes, activation="silu", bias=False)
        with torch.no_grad():
            assert float(layer(x).var()) == pytest.approx(1 / 3, rel=0.1)


def test_activation_layer_compiles_without_graph_break() -> None:
    layer = make_layer(rank=6, num_modes=3).float()
    x = torch.randn(64, 42)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_compiled_weight_of_activation_layer_has_dtype_and_is_nan() -> None:
    layer = make_layer(rank=6, num_modes=1)
    x = torch.randn(5, 42)

    def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        made: Callable[[Tensor], Tensor] = torch.compile(function, fullgraph=True, backend="aot_eager")
        return made

    torch.testing.assert_close(compiled(lambda x: layer(x.to(layer.weight.dtype)))(x), layer(x.double()))
    assert compiled(lambda x: x.double() @ layer.weight.t())(x).isnan().all()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(48, size) for size in (48, 24, 24))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


def make_tt_model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    ranks = {"*": {"rank": 6, "num_modes": 2, "activation": "silu", **options}}
    return sc.tensorize(Block().double(), ranks, filter_fn=lambda name, module: True)


def test_activation_layers_with_shared_input_match_separate_layers() -> None:
    model = make_tt_model()
    alone = copy.deepcopy(model)
    for layer in alone.modules():
        if isinstance(layer, TTLinear):
            layer.shared_input = None
    x = torch.randn(500, 48, dtype=torch.float64)
    with merge_once(model, 2):
        for _ in range(2):
            model(x).square().sum().backward()
    (2 * alone(x).square().sum()).backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    layer = alone.get_submodule("q_proj")
    assert isinstance(layer, TTLinear)
    torch.testing.assert_close(model(x)[:, :48], reference_forward(layer, x))


def test_adapter_truncates_activation_layer_without_changing_output() -> None:
    model = make_tt_model()
    adapter = sc.RankAdapter(model, size_target=0.5, steps=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, 48, dtype=torch.float64), torch.randn(64, 96, dtype=torch.float64)
    for _ in range(25):
        adapter.loss((model(x) - y).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    before, numbers = model(x), adapter.num_parameters()
    adapter.truncate(optimizer)
    torch.testing.assert_close(model(x), before, rtol=1e-6, atol=1e-9)
    assert (
        sum(core.numel() for layer in model.children() for core in layer.get_submodule("cores").parameters()) == numbers
    )
    adapter.finish()
    torch.testing.assert_close(model(x), before, rtol=1e-6, atol=1e-9)


def test_pretrained_model_restores_activation(tmp_path: Path) -> None:
    model = sc.tensorize(make_model("llama"), {"*_proj": {"rank": 4, "num_modes": 1, "activation": "silu"}})
    for _ in range(2):
        model(**batch(model=model)).loss.backward()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(sc.load(tmp_path)), logits(model))


def test_activation_layer_refuses_operations_on_dense_weight() -> None:
    with pytest.raises(UserError, match="activation='tanh'; it must be one of silu, or None"):
        TTLinear(8, 8, rank=2, activation="tanh")
    with pytest.raises(UserError, match="no dense weight: silu is between its cores"):
        make_layer(rank=3).to_dense()
    with pytest.raises(UserError, match="'q_proj' has no dense weight"):
        sc.densify(make_tt_model())
    ranks = {"*": {"rank": 6, "activation": "silu"}}
    with pytest.raises(UserError, match="q_proj: init='svd' needs a linear layer"):
        sc.tensorize(Block(), ranks, init="svd", filter_fn=lambda name, module: True)


@pytest.mark.parametrize(
    ("format", "modes", "activation"),
    [("tt", 3, None), ("tt-silu", 3, "silu"), ("low-rank", 1, None), ("cola", 1, "silu")],
)
def test_tensorize_formats(format: Any, modes: int, activation: str | None, tmp_path: Path) -> None:
    model = sc.tensorize(make_model("mixtral"), rank=3, format=format)
    layers = [layer for layer in model.modules() if isinstance(layer, TTLinear)]
    assert {len(layer.in_modes) for layer in layers} == {modes}
    assert {layer.activation for layer in layers} == {activation}
    assert any(".experts." in name for name, layer in model.named_modules() if layer in layers)
    optimizer = sc.CAME(sc.param_groups(model), lr=1e-2)
    inputs, losses = batch(model=model), []
    for _ in range(20):
        losses.append(model(**inputs).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(sc.load(tmp_path)), logits(model))


def test_tensorize_refuses_invalid_formats() -> None:
    with pytest.raises(
        UserError, match=r"given format='colla'; it must be one of tt, tt-silu, low-rank, cola \(did you mean"
    ):
        sc.tensorize(Block(), rank=2, format="colla")  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match="given num_modes=3 with format='cola', which has matrices: num_modes must be 1"
    ):
        sc.tensorize(Block(), rank=2, format="cola", num_modes=3)
    with pytest.raises(UserError, match="init='svd' needs linear layers, but format='cola' has silu in them"):
        sc.tensorize(Block(), rank=6, format="cola", init="svd")
    assert len(sc.tensorize(Block(), rank=2, format="tt-silu", num_modes=2).get_submodule("q_proj").in_modes) == 2
