"""Tests of fused feed-forward layers; without a GPU, their kernels run in Triton's interpreter."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils.flop_counter import FlopCounterMode

import scantling as sc
from scantling.tensor import costs, feed_forward, launches
from scantling.tensor.feed_forward import (
    _FUNCTIONS,
    _activation_name,
    _contract_in_torch,
    _ContractHidden,
    _find_parts,
    fused_feed_forward,
)
from scantling.tensor.linear import TTLinear
from scantling.trainer.models.checkpointing import checkpoint_activations
from tests.kernels import compile_for_gpus
from tests.tensor.families import make_model

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOKENS = 70
MODULES = {
    "llama": lambda: make_model("llama").model.layers[0].mlp,
    "gpt2": lambda: make_model("gpt2").transformer.h[0].mlp,
    "bert": lambda: make_model("bert").bert.encoder.layer[0],
    "neox": lambda: (
        hf.GPTNeoXModel(
            hf.GPTNeoXConfig(
                vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
            )
        )
        .layers[0]
        .mlp
    ),
}


def make_module(name: str, **options: Any) -> Any:
    """Return a feed-forward layer whose best order is (x A) B."""
    torch.manual_seed(0)
    module = sc.tensorize(MODULES[name]().to(DEVICE), filter_fn=lambda *_: True, **{"rank": 4, **options})
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return module


def run(module: Any, x: Tensor) -> Tensor:
    return module.feed_forward_chunk(x) if hasattr(module, "feed_forward_chunk") else module(x)


def gradients(module: nn.Module, y: Tensor, x: Tensor) -> list[Tensor | None]:
    """Return the gradients of x and of all parameters."""
    params = [param for param in module.parameters() if param.requires_grad]
    weights = torch.linspace(-1.0, 1.0, y.numel(), device=y.device).view_as(y)
    return list(torch.autograd.grad((y * weights).sum(), [x, *params], allow_unused=True))


def stored_elements(module: Any, x: Tensor, function: Any) -> int:
    params = {param.untyped_storage().data_ptr() for param in module.parameters()}
    stored: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in params:
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(module, x)
    return sum(stored.values())


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launches, "DEVICES", (DEVICE,))
    # Without the kernels of other layers.
    monkeypatch.setattr(launches, "is_faster", lambda _, name, *rest: " layer of " in name)
    monkeypatch.setattr(launches, "_known", {})
    with tf32_on_a_gpu():
        yield


@contextmanager
def tf32_on_a_gpu() -> Iterator[None]:
    """Let kernels take fp32 values on a GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if ON_GPU else before)
    yield
    torch.set_float32_matmul_precision(before)


def make_input(*shape: int) -> Tensor:
    return torch.randn(*shape, 32, device=DEVICE, requires_grad=True)


TOLERANCE = 5e-3 if ON_GPU else 3e-5
"""On a GPU kernels multiply fp32 values in TF32."""


def assert_close(found: list[Tensor | None], expected: list[Tensor | None], tolerance: float = TOLERANCE) -> None:
    for own, other in zip(found, expected, strict=True):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            size = float(other.detach().abs().max())
            torch.testing.assert_close(own.detach(), other.detach(), rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("options", [{}, {"format": "cola", "rank": 8}, {"format": "low-rank", "rank": 8}])
@pytest.mark.parametrize("name", MODULES)
def test_values_and_gradients_stay_and_the_hidden_layer_is_not_stored(name: str, options: dict[str, Any]) -> None:
    module = make_module(name, **options)
    x = make_input(2, TOKENS)
    expected, found = run(module, x), fused_feed_forward(module, x)
    assert found is not None
    assert_close([found], [expected])
    assert_close(gradients(module, found, x), gradients(module, expected, x))
    saved = stored_elements(module, x, run) - stored_elements(module, x, fused_feed_forward)
    assert saved >= 2 * TOKENS * 64


def test_frozen_parts_get_no_gradient() -> None:
    module = make_module("llama")
    module.up_proj.requires_grad_(False)
    x = make_input(TOKENS)
    expected, found = run(module, x), fused_feed_forward(module, x)
    assert found is not None
    assert_close(gradients(module, found, x), gradients(module, expected, x))


def test_dropout_stays() -> None:
    module = make_module("bert").train()
    module.output.dropout.p = 0.5
    x = make_input(TOKENS)
    results = []
    for function in (run, fused_feed_forward):
        torch.manual_seed(0)
        results.append(function(module, x))
    assert_close([results[1]], [results[0]])


def test_padded_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_module("llama", rank=6)
    x = make_input(TOKENS)
    expected = run(module, x)
    before = gradients(module, expected, x)
    monkeypatch.setattr(costs, "CPU", costs.DeviceCosts(element=8.0, rank_multiple=16))
    assert module.up_proj.padded_ranks[3] == 16
    found = fused_feed_forward(module, x)
    assert found is not None
    assert_close([found], [expected])
    assert_close(gradients(module, found, x), before)


def test_layers_of_a_model_take_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They repeat bit for bit."""
    launched = []
    launch = feed_forward._Launch._launch
    monkeypatch.setattr(
        feed_forward._Launch, "_launch", lambda self, name, *rest: launched.append(name) or launch(self, name, *rest)
    )
    model = make_model("llama").to(DEVICE)
    sc.tensorize(model, rank=4, filter_fn=lambda *_: True)
    plain = copy.deepcopy(model)
    checkpoint_activations(model, "feed_forward")
    ids = torch.arange(2 * TOKENS, device=DEVICE).view(14, 10) % 90
    runs = []
    for tested in (model, model, plain):
        tested.zero_grad()
        loss = tested(ids, labels=ids).loss
        loss.backward()
        runs.append([loss, *(param.grad for param in tested.parameters())])
    layers = len(model.model.layers)
    assert Counter(launched) == dict.fromkeys(("contract_hidden", "state_gradients", "weight_gradients"), 2 * layers)
    for first, second in zip(*runs[:2], strict=True):
        assert first is second is None or torch.equal(first, second)
    assert_close(runs[0], runs[2], max(1e-4, TOLERANCE))


class Subclass(Tensor):
    """Tensor whose values may lie elsewhere."""


def test_slower_or_broken_kernels_are_left_to_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The real timing runs, on a clock of this test."""
    seconds = [1.0, 2.0]  # of the kernels, then of a checkpoint

    def time_work(work: Any, _: Any) -> float:
        work()
        seconds.reverse()
        return seconds[-1]

    monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "_captured_seconds", time_work)
    monkeypatch.setattr(costs, "_key", lambda device, name: name)
    monkeypatch.setattr(launches, "is_faster", costs.is_faster)
    module, x = make_module("llama"), make_input(TOKENS)
    expected = gradients(module, run(module, x), x)
    for kernel_seconds, error in ((1.0, None), (3.0, None), (1.0, RuntimeError("out of resource: shared memory"))):
        monkeypatch.setattr(costs, "_measured", {})
        monkeypatch.setattr(launches, "_known", {})
        (tmp_path / "device-costs.json").unlink(missing_ok=True)
        seconds[:] = kernel_seconds, 2.0
        if error is not None:
            monkeypatch.setattr(feed_forward._Launch, "_launch", Mock(side_effect=error))
        found = fused_feed_forward(module, x)
        assert (found is not None) == (kernel_seconds < 2.0 and error is None)
        if found is not None:
            assert_close(gradients(module, found, x), expected)
        model = copy.deepcopy(module)
        checkpoint_activations(nn.ModuleList([model]), "feed_forward")
        assert_close(gradients(model, model(x), x), expected)
    assert "out of resource: shared memory" in caplog.text


def test_other_layers_are_left_to_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_input(TOKENS)
    dense = MODULES["llama"]().to(DEVICE)
    with_child = make_module("llama")
    with_child.norm = nn.LayerNorm(32)
    scaled = make_module("llama")  # has the same layers, and multiplies their outputs
    scaled.__class__ = type("FalconH1MLP", (type(scaled),), {})
    trained = make_module("llama")
    trained.act_fn = nn.PReLU()
    hooked = []
    for name, part, register in (
        ("llama", "up_proj", "register_forward_hook"),
        ("llama", "down_proj", "register_full_backward_hook"),
        ("llama", "act_fn", "register_forward_pre_hook"),
        ("bert", "intermediate", "register_forward_hook"),
        ("bert", "output", "register_full_backward_hook"),
        ("bert", "intermediate.intermediate_act_fn", "register_forward_hook"),
        ("bert", "output.dense", "register_forward_hook"),
    ):
        hooked.append(make_module(name))
        assert fused_feed_forward(hooked[-1], x) is not None
        getattr(hooked[-1].get_submodule(part), register)(lambda *_: None)
    sharded = make_module("llama")
    sharded.up_proj.cores[0] = nn.Parameter(sharded.up_proj.cores[0].as_subclass(Subclass))
    unknown = make_module("neox")  # a subclass may compute something else
    unknown.__class__ = type("OtherMLP", (type(unknown),), {})
    mixed = make_module("llama")
    mixed.down_proj = nn.Linear(64, 32)
    other_ranks = make_module("llama")
    other_ranks.up_proj = TTLinear(32, 64, 3, bias=False)
    others = (with_child, scaled, trained, unknown, mixed, other_ranks, sharded, nn.Linear(32, 32))
    for module in (dense, *others, *hooked):
        assert fused_feed_forward(module, x) is None
    module = make_module("llama")
    assert fused_feed_forward(module, x[:0]) is None
    assert fused_feed_forward(module.double(), x.double()) is None
    module.float()
    with torch.no_grad():
        assert fused_feed_forward(module, x) is None
    with FlopCounterMode(display=False):  # it would not see the kernels
        assert fused_feed_forward(module, x) is None

    def loss(params: dict[str, Tensor]) -> Tensor:
        assert fused_feed_forward(module, x) is None
        return functional_call(module, params, (x,)).sum()

    grad(loss)(dict(module.named_parameters()))
    assert fused_feed_forward(module, x) is not None
    monkeypatch.setattr(feed_forward, "MAX_RANK", 3)
    assert fused_feed_forward(module, x) is None


def test_orders_without_two_factors_are_left_to_a_checkpoint() -> None:
    module = make_module("llama", rank=32)
    orders = [layer.plan(1).steps for layer in (module.up_proj, module.down_proj)]
    assert any(len(steps) != 2 for steps in orders)
    assert fused_feed_forward(module, make_input(1)) is None


def test_layers_are_pairs_for_many_tokens() -> None:
    layer = TTLinear(768, 768, 30)
    assert layer.is_pair(4096)
    assert not layer.is_pair(1)
    sc.quantize_training(nn.Sequential(layer), weights="int8", filter_fn=lambda *_: True)
    assert not layer.is_pair(4096)


# kernels


def make_operands(
    *, tokens: int, width: int, hidden: int, out: int, gate: bool, bias: bool, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor | None]]:
    """Return A2 and the paths; states and matrices are parts of larger ones, as in a model."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    paths: list[Tensor | None] = []
    for _ in range(2 if gate else 1):
        paths += [draw(tokens, width + 3)[:, :width], draw(width, hidden) / width**0.5, draw(hidden) if bias else None]
    a = draw(hidden, out + 2)[:, :out] / hidden**0.5
    return a, paths


CASES = [
    ("silu", {"gate": True, "bias": False}),
    ("silu", {"gate": True, "bias": True, "tokens": 70, "hidden": 130}),
    ("gelu", {"gate": False, "bias": True}),
    ("gelu_tanh", {"gate": False, "bias": False, "width": 33, "out": 70}),
    ("relu", {"gate": False, "bias": True, "tokens": 1, "hidden": 5}),
    ("gelu", {"gate": False, "bias": True, "tokens": 600, "hidden": 32}),  # several programs share the tokens
    ("silu", {"gate": True, "bias": True, "tokens": 20, "hidden": 600}),  # or the hidden layer
]


def apply_both(activation: str, dtype: torch.dtype, **sizes: Any) -> list[list[Tensor | None]]:
    """Return h2 and all gradients from the kernels, and from torch's operations in fp64."""
    sizes = {"tokens": 130, "width": 20, "hidden": 100, "out": 17, **sizes}
    a, paths = make_operands(**sizes, dtype=dtype)
    results = []
    for function, kind in ((_ContractHidden.apply, dtype), (_contract_in_torch, torch.float64)):
        operands = [None if one is None else one.to(kind).detach().requires_grad_() for one in (a, *paths)]
        h2 = function(activation, *operands)
        h2.backward(torch.linspace(-1.0, 1.0, h2.numel(), dtype=kind, device=DEVICE).view_as(h2))
        results.append([value.double() for value in (h2, *(one.grad for one in operands if one is not None))])
    return results


@pytest.mark.parametrize(("activation", "sizes"), CASES)
def test_kernels_match_torch(activation: str, sizes: dict[str, Any]) -> None:
    assert_close(*apply_both(activation, torch.float32, **sizes))


@pytest.mark.parametrize("gate", [True, False])
def test_second_derivatives_and_batched_gradients(gate: bool) -> None:
    a, paths = make_operands(tokens=7, width=5, hidden=9, out=4, gate=gate, bias=True, dtype=torch.float64)
    results = []
    for function in (_ContractHidden.apply, _contract_in_torch):
        operands = [one.detach().requires_grad_() for one in (a, *paths) if one is not None]
        h2 = function("gelu", *operands)
        first = torch.autograd.grad(h2.square().sum(), operands, create_graph=True)
        second = torch.autograd.grad(sum(one.square().sum() for one in first), operands)
        h2 = function("gelu", *operands)
        upstream = torch.linspace(-1.0, 1.0, 3 * h2.numel(), dtype=h2.dtype, device=DEVICE).view(3, *h2.shape)
        results.append([*first, *second, *torch.autograd.grad(h2, operands, upstream, is_grads_batched=True)])
    assert_close(*results)


@pytest.mark.parametrize("activation", _FUNCTIONS)
def test_nan_stays_nan(activation: str) -> None:
    """A loss that hides a NaN would let a broken run go on."""
    a, paths = make_operands(tokens=3, width=4, hidden=6, out=5, gate=False, bias=True, dtype=torch.float32)
    paths[0][1, 2] = torch.nan
    h2 = _ContractHidden.apply(activation, a.requires_grad_(), *paths)
    assert torch.equal(h2.isnan().all(1).cpu(), torch.tensor([False, True, False]))
    h2.sum().backward()
    assert a.grad.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "sizes"), CASES)
def test_kernels_match_torch_in_bf16(activation: str, sizes: dict[str, Any]) -> None:
    assert_close(*apply_both(activation, torch.bfloat16, **sizes), 0.02)


def test_activations_have_kernels() -> None:
    found = {name: _find_parts(make_module(name)) for name in MODULES}
    assert {name: parts and parts.activation for name, parts in found.items()} == {
        "llama": "silu",
        "gpt2": "gelu_tanh",
        "bert": "gelu",
        "neox": "gelu",
    }
    assert _activation_name(nn.Tanh()) is None
    assert _activation_name(nn.functional.relu) == "relu"
    assert _activation_name(lambda x: x) is None


@pytest.mark.skipif(ON_GPU, reason="there the kernels run")
def test_kernels_compile_for_gpus() -> None:
    compile_for_gpus(COMPILE, max_spills=32)


COMPILE = """
from scantling.tensor import kernels
from scantling.tensor.feed_forward import constants
from scantling.tensor.launches import MAX_RANK

sizes = "tokens hidden width out_width chunks tiles".split()
for has_gate, activation, ranks in ((True, "silu", (30, 30)), (True, "gelu_tanh", (MAX_RANK, MAX_RANK)),
                                    (False, "gelu", (MAX_RANK, 16)), (False, "relu", (16, MAX_RANK))):
    options = {"activation": activation, "has_gate": has_gate, "has_bias": True}
    for kind in ("*bf16", "*fp32"):
        inputs = ("state", "b", "bias", "gate_state", "gate_b", "gate_bias", "a", "grad")
        types = {name: kind for name in inputs}
        for kernel in (kernels.contract_hidden, kernels.state_gradients, kernels.weight_gradients):
            types |= {name: "i32" for name in kernel.arg_names if name in sizes or "stride" in name}
            ptx = build(kernel, capability, types, **{**constants(*ranks), "precision": "tf32"}, **options)
            assert "mma" in ptx, "no tensor cores"
"""
