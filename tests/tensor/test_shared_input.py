"""Tests of layers that share their input in one product: equal results, computed once, and never stale."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.layer import merge_once
from scantling.tensor.linear import TTLinear
from scantling.tensor.shared_input import SharedInputGroup


class Attention(nn.Module):
    """Three projections of one input, with the names and calls of transformers models."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(48, size, bias=size == 24) for size in (48, 24, 24))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


def pair(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """Return a model whose layers share their input product, and a copy without sharing."""
    torch.manual_seed(0)
    shared_input = sc.tensorize(Attention().to(dtype), rank=6, filter_fn=lambda name, module: True)
    alone = copy.deepcopy(shared_input)
    for layer in alone.modules():
        if isinstance(layer, TTLinear):
            layer.shared_input = None
    return shared_input, alone


class Wide(TorchDispatchMode):
    """Dispatch mode that counts the products with x as the first factor."""

    def __init__(self, tokens: int, size: int) -> None:
        super().__init__()
        self.shape, self.widths = (tokens, size), []  # type: tuple[int, int], list[int]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.mm.default and tuple(args[0].shape) == self.shape:
            self.widths.append(args[1].shape[1])
        return func(*args, **(kwargs or {}))


class ParentWithCall(Attention):
    """Attention with a given forward pass."""

    def __init__(self, call: Callable[[Any, Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.call(self, x), dim=-1)


def make_pair(call: Callable[[Any, Tensor], list[Tensor]]) -> tuple[ParentWithCall, ParentWithCall]:
    """Return the same as `pair`, with another forward pass."""
    torch.manual_seed(0)
    shared_input = sc.tensorize(ParentWithCall(call).double(), rank=6, filter_fn=lambda name, module: True)
    assert isinstance(shared_input, ParentWithCall)
    alone = copy.deepcopy(shared_input)
    for layer in alone.modules():
        if isinstance(layer, TTLinear):
            layer.shared_input = None
    return shared_input, alone


@contextmanager
def widths(tokens: int = 512, size: int = 48) -> Iterator[list[int]]:
    with Wide(tokens, size) as mode:
        yield mode.widths


def test_shared_product_matches_separate_layers() -> None:
    shared_input, alone = pair()
    x = torch.randn(512, 48, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(512, 96, dtype=torch.float64)
    with widths() as counted:
        ours = shared_input(x)
    assert counted == [18]
    theirs = alone(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    parameters, same = list(shared_input.parameters()), list(alone.parameters())
    got = torch.autograd.grad(ours, [x, *parameters], upstream)
    expected = torch.autograd.grad(theirs, [x, *same], upstream)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_shared_product_is_not_used_for_few_tokens() -> None:
    shared_input, _ = pair()
    assert len(shared_input.q_proj.plan(1).steps) > 2
    with widths(1) as counted:
        shared_input(torch.randn(1, 48, dtype=torch.float64))
    assert 18 not in counted


def with_different_inputs(own: Any, x: Tensor) -> list[Tensor]:
    return [own.q_proj(x), own.k_proj(x + 1.0), own.v_proj(x + 1.0)]


def partly_without_gradients(own: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        first = own.q_proj(x)
    return [first, own.k_proj(x), own.v_proj(x)]


def checkpointed_one_by_one(own: Any, x: Tensor) -> list[Tensor]:
    return [checkpoint(layer, x, use_reentrant=False) for layer in (own.q_proj, own.k_proj, own.v_proj)]


def skip_one_layer(own: Any, x: Tensor) -> list[Tensor]:
    return [own.q_proj(x), own.k_proj(x)]


def twice(own: Any, x: Tensor) -> list[Tensor]:
    return [own.q_proj(x), own.q_proj(x), own.k_proj(x), own.v_proj(x)]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "call",
    [with_different_inputs, partly_without_gradients, checkpointed_one_by_one, skip_one_layer, twice],
)
def test_shared_product_is_correct_for_any_call_order(call: Any, checkpointed: bool) -> None:
    shared_input, alone = make_pair(call)
    for number in range(3):
        x = torch.randn(512, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        results = []
        for model in (shared_input, alone):
            own = x.clone().requires_grad_()
            output = checkpoint(model, own, use_reentrant=False) if checkpointed else model(own)
            output.square().sum().backward()
            results.append([output.detach(), own.grad, *(parameter.grad for parameter in model.parameters())])
        for ours, theirs in zip(*results, strict=True):
            if ours is None or theirs is None:  # gradients of an uncalled layer: 0 in the first pass
                assert all(value is None or not value.any() for value in (ours, theirs))  # also with checkpointing
            else:
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        if number:
            for model in (shared_input, alone):
                model.zero_grad(set_to_none=True)


def test_shared_product_is_disabled_after_unshared_pass() -> None:
    for call in (with_different_inputs, skip_one_layer):
        shared_input, _ = make_pair(call)
        x = torch.randn(512, 48, dtype=torch.float64)
        shared_input(x).sum().backward()
        shared_input.zero_grad(set_to_none=True)
        with widths() as counted:
            shared_input(x).sum().backward()
        assert 18 not in counted
        if call is skip_one_layer:
            assert all(parameter.grad is None for parameter in shared_input.v_proj.parameters())


def test_shared_product_detects_input_changed_in_place() -> None:
    shared_input, alone = make_pair(lambda own, x: [own.q_proj(x), own.k_proj(x.mul_(2.0)), own.v_proj(x)])
    x = torch.randn(512, 48, dtype=torch.float64)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(shared_input(x.clone()), alone(x.clone()), rtol=1e-12, atol=1e-12)


def test_layers_called_outside_parent_compute_separately() -> None:
    shared_input, alone = pair()
    x = torch.randn(512, 48, dtype=torch.float64, requires_grad=True)
    with widths() as counted:
        for name in ("q_proj", "k_proj", "v_proj"):
            for model in (shared_input, alone):
                model.get_submodule(name)(x).square().sum().backward()
    assert 18 not in counted
    for ours, theirs in zip(shared_input.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_layers_with_and_without_gradients_are_not_fused() -> None:
    shared_input, alone = pair()
    shared_input.q_proj.requires_grad_(False)
    x = torch.randn(512, 48, dtype=torch.float64)
    with widths() as counted:
        outputs = shared_input(x)
    assert counted == [6, 6, 6]
    torch.testing.assert_close(outputs, alone(x), rtol=1e-12, atol=1e-12)


def test_shared_product_keeps_no_model_or_input_alive() -> None:
    shared_input, _ = pair()
    x = torch.randn(512, 48, dtype=torch.float64)

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = shared_input.v_proj.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        shared_input(x)
    handle.remove()
    assert not shared_input.q_proj.shared_input._passes
    held, given = weakref.ref(shared_input.q_proj.cores[0]), weakref.ref(x)
    gc.disable()
    try:
        del shared_input, x
        assert given() is None
        assert held() is None
    finally:
        gc.enable()


def test_densify_removes_shared_input_hooks() -> None:
    shared_input, _ = pair()
    sc.densify(shared_input)
    assert not shared_input._forward_pre_hooks
    assert not shared_input._forward_hooks


def test_shared_product_with_checkpoints_autocast_and_replicas() -> None:
    shared_input, alone = pair(torch.float32)
    x = torch.randn(512, 48, requires_grad=True)
    expected = torch.autograd.grad(alone(x).square().sum(), [*alone.parameters()])
    with widths() as counted:
        again = torch.autograd.grad(
            checkpoint(shared_input, x, use_reentrant=False).square().sum(), [*shared_input.parameters()]
        )
    assert counted.count(18) == 2
    torch.testing.assert_close(again, expected, rtol=1e-3, atol=1e-3)
    with merge_once(shared_input, passes=2):
        for half in x.detach().chunk(2):
            shared_input(half).square().sum().backward()
    for parameter, gradient in zip(shared_input.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(shared_input(x), alone(x), rtol=3e-2, atol=3e-2)
    copied = copy.deepcopy(shared_input)
    assert copied.q_proj.shared_input is copied.v_proj.shared_input is not shared_input.q_proj.shared_input
    torch.testing.assert_close(copied(x), shared_input(x))
    replica = copy.copy(shared_input.q_proj)
    torch.testing.assert_close(replica(x), shared_input.q_proj(x))


def test_shared_product_of_layers_without_ranks_is_bias() -> None:
    shared_input, _ = pair()
    x = torch.randn(512, 48, dtype=torch.float64)
    layer = shared_input.k_proj
    with torch.no_grad():
        for parameter, dim, index in layer.rank_slices([torch.arange(0)] * 5):
            parameter.data = parameter.index_select(dim, index)
    assert layer.ranks[3] == 0
    torch.testing.assert_close(shared_input(x)[:, 48:72], layer.bias.expand(512, 24))


def test_cross_attention_query_is_not_fused() -> None:
    model = nn.ModuleDict({"self_attn": Attention(), "cross_attn": Attention()})
    model["other"] = nn.ModuleDict({"a": nn.Linear(48, 48), "b": nn.Linear(48, 48)})
    sc.tensorize(model, rank=6, filter_fn=lambda name, module: True)
    layers = model["self_attn"]
    assert layers.q_proj.shared_input is layers.k_proj.shared_input is layers.v_proj.shared_input is not None
    crossed = model["cross_attn"]
    assert crossed.q_proj.shared_input is None
    assert crossed.k_proj.shared_input is crossed.v_proj.shared_input is not None
    assert model["other"]["a"].shared_input is None


@pytest.mark.parametrize("grad", [True, False])
def test_shared_products_are_dropped_after_pass(grad: bool) -> None:
    shared_input, _ = pair()
    shared = shared_input.q_proj.shared_input
    assert isinstance(shared, SharedInputGroup)
    with torch.set_grad_enabled(grad):
        shared_input(torch.randn(512, 48, dtype=torch.float64))
    assert not shared._passes


def test_shared_inputs_compile_without_graph_break() -> None:
    shared_input, alone = pair(torch.float32)
    x = torch.randn(512, 48)
    compiled = torch.compile(shared_input, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), alone(x), rtol=1e-4, atol=1e-4)


def replica(module: nn.Module) -> nn.Module:
    """Make a replica as `nn.DataParallel` does: parameters become plain attributes."""
    made: nn.Module = module._replicate_for_data_parallel()
    for name, parameter in module.named_parameters(recurse=False):
        setattr(made, name, parameter.view_as(parameter))
    for name, child in module.named_children():
        setattr(made, name, replica(child))
    return made


@pytest.mark.parametrize("which", [0, 1], ids=["joint", "alone"])
def test_data_parallel_copies_are_refused(which: int) -> None:
    with pytest.raises(UserError, match=r"made by nn\.DataParallel.* with torchrun"):
        replica(pair()[which])(torch.randn(500, 48, dtype=torch.float64))
