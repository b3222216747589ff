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
from scantling.tensor.joint import Joint
from scantling.tensor.layer import merge_once
from scantling.tensor.linear import TTLinear


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
    joint = sc.tensorize(Attention().to(dtype), rank=6, filter_fn=lambda name, module: True)
    alone = copy.deepcopy(joint)
    for layer in alone.modules():
        if isinstance(layer, TTLinear):
            layer.joint = None
    return joint, alone


class Wide(TorchDispatchMode):
    """Dispatch mode that counts the products with x as the first factor."""

    def __init__(self, tokens: int, size: int) -> None:
        super().__init__()
        self.shape, self.widths = (tokens, size), []  # type: tuple[int, int], list[int]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.mm.default and tuple(args[0].shape) == self.shape:
            self.widths.append(args[1].shape[1])
        return func(*args, **(kwargs or {}))


class Written(Attention):
    """Attention with a given forward pass."""

    def __init__(self, call: Callable[[Any, Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.call(self, x), dim=-1)


def written(call: Callable[[Any, Tensor], list[Tensor]]) -> tuple[Written, Written]:
    """Return the same as `pair`, with another forward pass."""
    torch.manual_seed(0)
    joint = sc.tensorize(Written(call).double(), rank=6, filter_fn=lambda name, module: True)
    assert isinstance(joint, Written)
    alone = copy.deepcopy(joint)
    for layer in alone.modules():
        if isinstance(layer, TTLinear):
            layer.joint = None
    return joint, alone


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


def of_different_inputs(own: Any, x: Tensor) -> list[Tensor]:
    return [own.q_proj(x), own.k_proj(x + 1.0), own.v_proj(x + 1.0)]


def partly_without_gradients(own: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        first = own.q_proj(x)
    return [first, own.k_proj(x), own.v_proj(x)]


def checkpointed_one_by_one(own: Any, x: Tensor) -> list[Tensor]:
    return [checkpoint(layer, x, use_reentrant=False) for layer in (own.q_proj, own.k_proj, own.v_proj)]


def one_left_out(own: Any, x: Tensor) -> list[Tensor]:
    return [own.q_proj(x), own.k_proj(x)]


def twice(own: Any, x: Tensor) -> list[Tensor]:
    return [own.q_proj(x), own.q_proj(x), own.k_proj(x), own.v_proj(x)]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "call",
    [of_different_inputs, partly_without_gradients, checkpointed_one_by_one, one_left_out, twice],
)
def test_whatever_a_module_does_with_its_layers_it_gets_what_they_compute_alone(call: Any, checkpointed: bool) -> None:
    joint, alone = written(call)
    for number in range(3):
        x = torch.randn(512, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        results = []
        for model in (joint, alone):
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
            for model in (joint, alone):
                model.zero_grad(set_to_none=True)


def test_layers_that_share_nothing_are_left_alone_from_the_second_pass_on() -> None:
    for call in (of_different_inputs, one_left_out):
        joint, _ = written(call)
        x = torch.randn(512, 48, dtype=torch.float64)
        joint(x).sum().backward()
        joint.zero_grad(set_to_none=True)
        with widths() as counted:
            joint(x).sum().backward()
        assert 18 not in counted
        if call is one_left_out:
            assert all(parameter.grad is None for parameter in joint.v_proj.parameters())


def test_an_input_changed_in_place_is_seen() -> None:
    joint, alone = written(lambda own, x: [own.q_proj(x), own.k_proj(x.mul_(2.0)), own.v_proj(x)])
    x = torch.randn(512, 48, dtype=torch.float64)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(joint(x.clone()), alone(x.clone()), rtol=1e-12, atol=1e-12)


def test_layers_called_by_themselves_are_alone() -> None:
    joint, alone = pair()
    x = torch.randn(512, 48, dtype=torch.float64, requires_grad=True)
    with widths() as counted:
        for name in ("q_proj", "k_proj", "v_proj"):
            for model in (joint, alone):
                model.get_submodule(name)(x).square().sum().backward()
    assert 18 not in counted
    for ours, theirs in zip(joint.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_layers_with_and_without_gradients_are_not_joined() -> None:
    joint, alone = pair()
    joint.q_proj.requires_grad_(False)
    x = torch.randn(512, 48, dtype=torch.float64)
    with widths() as counted:
        outputs = joint(x)
    assert counted == [6, 6, 6]
    torch.testing.assert_close(outputs, alone(x), rtol=1e-12, atol=1e-12)


def test_nothing_holds_a_model_or_an_input_but_who_uses_it() -> None:
    joint, _ = pair()
    x = torch.randn(512, 48, dtype=torch.float64)

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = joint.v_proj.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        joint(x)
    handle.remove()
    assert not joint.q_proj.joint._passes
    held, given = weakref.ref(joint.q_proj.cores[0]), weakref.ref(x)
    gc.disable()
    try:
        del joint, x
        assert given() is None
        assert held() is None
    finally:
        gc.enable()


def test_densified_modules_have_no_hooks_left() -> None:
    joint, _ = pair()
    sc.densify(joint)
    assert not joint._forward_pre_hooks
    assert not joint._forward_hooks


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
    assert not shared._passes


def test_a_compiled_model_is_whole() -> None:
    joint, alone = pair(torch.float32)
    x = torch.randn(512, 48)
    compiled = torch.compile(joint, fullgraph=True, backend="aot_eager")
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
def test_copies_without_cores_say_so(which: int) -> None:
    with pytest.raises(UserError, match=r"nn\.DataParallel made, which leaves out cores; .*with torchrun"):
        replica(pair()[which])(torch.randn(500, 48, dtype=torch.float64))
