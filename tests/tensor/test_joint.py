"""Layers of one input in one product: the same numbers, once computed, and never those of another moment."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import scantling as sc
from scantling.tensor.joint import Joint
from scantling.tensor.layer import merge_once
from scantling.tensor.linear import TTLinear


class Attention(nn.Module):
    """Three projections of one input, as models of transformers name and call them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(48, size, bias=size == 24) for size in (48, 24, 24))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


def pair(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """A model whose layers share their input, and the same without."""
    torch.manual_seed(0)
    joint = sc.tensorize(Attention().to(dtype), rank=6, filter_fn=lambda name, module: True)
    alone = copy.deepcopy(joint)
    for layer in alone.modules():
        if isinstance(layer, TTLinear):
            layer.joint = None
    return joint, alone


class Wide(TorchDispatchMode):
    """Counts the products of x with something."""

    def __init__(self, tokens: int, size: int) -> None:
        super().__init__()
        self.shape, self.widths = (tokens, size), []  # type: tuple[int, int], list[int]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.mm.default and tuple(args[0].shape) == self.shape:
            self.widths.append(args[1].shape[1])
        return func(*args, **(kwargs or {}))


@contextmanager
def widths(tokens: int = 512, size: int = 48) -> Iterator[list[int]]:
    with Wide(tokens, size) as mode:
        yield mode.widths


def test_the_first_product_is_one_and_outputs_and_gradients_are_those_of_separate_layers() -> None:
    joint, alone = pair()
    x = torch.randn(512, 48, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(512, 96, dtype=torch.float64)
    with widths() as counted:
        ours = joint(x)
    assert counted == [18]
    theirs = alone(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    parameters, same = list(joint.parameters()), list(alone.parameters())
    got = torch.autograd.grad(ours, [x, *parameters], upstream)
    expected = torch.autograd.grad(theirs, [x, *same], upstream)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_few_tokens_are_contracted_with_each_layer_alone() -> None:
    joint, _ = pair()
    assert len(joint.q_proj.plan(1).steps) > 2
    with widths(1) as counted:
        joint(torch.randn(1, 48, dtype=torch.float64))
    assert 18 not in counted


def test_a_step_between_two_layers_is_seen() -> None:
    joint, alone = pair()
    x = torch.randn(512, 48, dtype=torch.float64)
    joint.q_proj(x)
    with torch.no_grad():
        for model in (joint, alone):
            for parameter in model.parameters():
                parameter.mul_(1.5)
    torch.testing.assert_close(joint.k_proj(x), alone.k_proj(x), rtol=1e-12, atol=1e-12)


def test_an_input_changed_in_place_is_seen() -> None:
    joint, alone = pair()
    x = torch.randn(512, 48, dtype=torch.float64)
    joint.q_proj(x)
    x.mul_(2.0)
    torch.testing.assert_close(joint.k_proj(x), alone.k_proj(x), rtol=1e-12, atol=1e-12)


def test_layers_may_have_backward_passes_of_their_own() -> None:
    joint, alone = pair()
    x = torch.randn(512, 48, dtype=torch.float64, requires_grad=True)
    for name in ("q_proj", "k_proj", "v_proj"):
        for model in (joint, alone):
            model.get_submodule(name)(x).square().sum().backward()
    for ours, theirs in zip(joint.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-11)


def test_gradients_may_be_wanted_by_one_layer_and_not_by_the_next() -> None:
    joint, alone = pair()
    x = torch.randn(512, 48, dtype=torch.float64)
    with torch.no_grad():
        joint.q_proj(x)
    assert joint.k_proj(x).requires_grad
    joint.q_proj.requires_grad_(False)
    other = x + 1.0
    with widths() as counted:
        outputs = joint(other)
    assert counted == [6, 6, 6]
    torch.testing.assert_close(outputs, alone(other), rtol=1e-12, atol=1e-12)


def test_layers_called_with_different_inputs_part() -> None:
    joint, alone = pair()
    one, other = (torch.randn(512, 48, dtype=torch.float64) for _ in range(2))
    for _ in range(5):
        for name, x in (("q_proj", one), ("k_proj", other), ("v_proj", other)):
            torch.testing.assert_close(joint.get_submodule(name)(x), alone.get_submodule(name)(x))
    with widths() as counted:
        joint.q_proj(one)
    assert counted == [6]


def test_checkpointed_and_shared_blocks_and_autocast_and_replicas() -> None:
    joint, alone = pair(torch.float32)
    x = torch.randn(512, 48, requires_grad=True)
    expected = torch.autograd.grad(alone(x).square().sum(), [*alone.parameters()])
    with widths() as counted:
        again = torch.autograd.grad(checkpoint(joint, x, use_reentrant=False).square().sum(), [*joint.parameters()])
    assert counted.count(18) == 2
    torch.testing.assert_close(again, expected, rtol=1e-3, atol=1e-3)
    with merge_once(joint, passes=2):
        for half in x.detach().chunk(2):
            joint(half).square().sum().backward()
    for parameter, gradient in zip(joint.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(joint(x), alone(x), rtol=3e-2, atol=3e-2)
    copied = copy.deepcopy(joint)
    assert copied.q_proj.joint is copied.v_proj.joint is not joint.q_proj.joint
    torch.testing.assert_close(copied(x), joint(x))
    replica = copy.copy(joint.q_proj)
    torch.testing.assert_close(replica(x), joint.q_proj(x))


def test_a_dead_bond_leaves_the_bias() -> None:
    joint, _ = pair()
    x = torch.randn(512, 48, dtype=torch.float64)
    layer = joint.k_proj
    with torch.no_grad():
        for parameter, dim, index in layer.cuts([torch.arange(0)] * 5):
            parameter.data = parameter.index_select(dim, index)
    assert layer.ranks[3] == 0
    torch.testing.assert_close(joint(x)[:, 48:72], layer.bias.expand(512, 24))


def test_names_decide_and_a_cross_attention_keeps_its_query_apart() -> None:
    model = nn.ModuleDict({"self_attn": Attention(), "cross_attn": Attention()})
    model["other"] = nn.ModuleDict({"a": nn.Linear(48, 48), "b": nn.Linear(48, 48)})
    sc.tensorize(model, rank=6, filter_fn=lambda name, module: True)
    layers = model["self_attn"]
    assert layers.q_proj.joint is layers.k_proj.joint is layers.v_proj.joint is not None
    crossed = model["cross_attn"]
    assert crossed.q_proj.joint is None
    assert crossed.k_proj.joint is crossed.v_proj.joint is not None
    assert model["other"]["a"].joint is None


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_is_held_after_a_pass(grad: bool) -> None:
    joint, _ = pair()
    shared = joint.q_proj.joint
    assert isinstance(shared, Joint)
    with torch.set_grad_enabled(grad):
        joint(torch.randn(512, 48, dtype=torch.float64))
    assert shared._waiting is None


def test_a_compiled_model_is_whole() -> None:
    joint, alone = pair(torch.float32)
    x = torch.randn(512, 48)
    compiled = torch.compile(joint, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), alone(x), rtol=1e-4, atol=1e-4)
