"""Tests of merging the cores of equally shaped layers together."""

from __future__ import annotations

import copy
import io
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from families import FAMILIES, batch, make_model
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import scantling as sc
import scantling.numerics.device as devices
from scantling.numerics.torch_private import FakeTensorMode
from scantling.tensor import contraction, costs, merging
from scantling.tensor.layer import TTLayer, merge_once, running
from scantling.tensor.merging import merge_alone


class Net(nn.Module):
    """Two kinds of layers, two of each, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 48)
        self.up = nn.ModuleList(nn.Linear(48, 96) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(96, 48) for _ in range(3))

    def block(self, x: Tensor, i: int) -> Tensor:
        return x + self.down[i](torch.tanh(self.up[i](x)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for i in range(3):
            x = self.block(x, i)
        return x


class Operations(TorchDispatchMode):
    """Dispatch mode that counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(self.counts[name] for name in ("mm", "bmm", "addmm", "baddbmm"))


IDS = torch.arange(40) % 60


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Costs of products: those of a CPU, or those of a GPU, with which ranks are padded."""
    if request.param == "gpu":
        monkeypatch.setattr(costs, "CPU", costs.TYPICAL_GPU)
    return str(request.param)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep only blocks that are no larger than the cores, as for large layers."""
    caches = contraction._enumerate_orders, contraction.best_orders
    monkeypatch.setattr(contraction, "MAX_KEPT", 1.0)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def remove_ranks(layer: TTLayer, fraction: float) -> None:
    """Remove the last ranks of each bond."""
    with torch.no_grad():
        for parameter, dim, index in layer.rank_slices(
            [torch.arange(max(1, round((1.0 - fraction) * rank))) for rank in layer.ranks[1:-1]]
        ):
            parameter.data = parameter.index_select(dim, index)


def pair(module: nn.Module | None = None, *, gates: bool = False, rank: int = 6) -> tuple[Any, Any]:
    """Return a model whose equal layers merge together, and a copy whose layers merge alone."""
    torch.manual_seed(0)
    stacked = sc.tensorize(Net().double() if module is None else module, rank=rank, filter_fn=lambda *_: True)
    for layer in stacked.modules():
        if isinstance(layer, TTLayer):
            with torch.no_grad():
                layer.log_gain += 0.01
            if gates:
                layer.attach_gates(0.1)
                with torch.no_grad():
                    for gate in layer.rank_gates:
                        gate.copy_(torch.linspace(-0.2, 1.0, len(gate)))
    return stacked, without_stacks(copy.deepcopy(stacked))


def without_stacks(model: Any) -> Any:
    merge_alone(model)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float = 1e-11) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(
                found[name], value, rtol=tolerance, atol=tolerance * float(value.abs().max() + 1)
            )


@pytest.mark.parametrize("gates", [False, True])
def test_stacked_layers_match_separate_ones(gates: bool, device: str) -> None:
    stacked, alone = pair(gates=gates)
    with Operations() as ours:
        found = stacked(IDS)
    with Operations() as theirs:
        expected = alone(IDS)
    assert ours.products < theirs.products
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert_same(gradients(stacked), gradients(alone))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_match_separate_layers(family: str, device: str) -> None:
    stacked = make_model(family).double()
    sc.tensorize(stacked, rank=4, filter_fn=lambda *_: True)
    alone = without_stacks(copy.deepcopy(stacked))
    inputs = batch(model=stacked)
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    losses = [model(**inputs).loss for model in (stacked, alone)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)
    for loss in losses:
        loss.backward()
    assert_same(gradients(stacked), gradients(alone), 1e-10)


def test_six_encoder_needs_few_products() -> None:
    shape = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072}
    model = hf.BertForSequenceClassification(hf.BertConfig(**shape, num_labels=3, attn_implementation="sdpa"))
    sc.tensorize(model, rank=30)
    ids = torch.randint(1, 30000, (1, 128))
    with Operations() as operations:
        model(ids, labels=torch.tensor([1])).loss.backward()
    attention = 6 * 6  # products of queries, keys and values on this device
    assert operations.products - attention <= 280


def test_layers_that_are_not_called_get_no_gradient() -> None:
    stacked, alone = pair()
    for model in (stacked, alone):
        model.forward = lambda ids, model=model: model.block(model.table(ids), 1)
        model(IDS).square().sum().backward()
    found = gradients(stacked)
    assert found["up.0.cores.0"] is None
    assert_same(found, gradients(alone))


def test_parts_of_a_graph_run_backward_at_different_times() -> None:
    stacked, alone = pair()
    for model in (stacked, alone):
        model.forward = lambda ids, model=model: [
            model.block(model.table(ids).detach(), i).square().sum() for i in (0, 1)
        ]
        first, second = model(IDS)
        first.backward()
        second.backward()
    assert_same(gradients(stacked), gradients(alone))


def test_layers_with_other_token_counts() -> None:
    stacked, alone = pair(rank=9)
    orders = [str(stacked.up[0].plan(tokens)).splitlines()[0].partition("cores")[2] for tokens in (1, 40)]
    assert orders[0] != orders[1]
    for model in (stacked, alone):
        model.forward = lambda ids, model=model: model.block(model.block(model.block(model.table(ids), 0)[:1], 1), 2)
        model(IDS).square().sum().backward()
    assert_same(gradients(stacked), gradients(alone))


def test_second_derivatives(device: str) -> None:
    results = []
    for model in pair(gates=True):
        loss = model(IDS).square().sum()
        cores = [model.up[0].cores[1], model.down[2].rank_gates[0], model.up[1].log_gain]
        first = torch.autograd.grad(loss, cores, create_graph=True)
        sum(one.square().sum() for one in first).backward()
        results.append(gradients(model))
    assert_same(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("passes", [0, 2])
def test_checkpointing(use_reentrant: bool, passes: int) -> None:
    stacked, alone = pair(gates=True)
    for model in (stacked, alone):

        def forward(ids: Tensor, model: Any = model) -> Tensor:
            x = model.table(ids)
            for i in range(3):
                x = checkpoint(model.block, x, i, use_reentrant=use_reentrant)
            return x

        model.forward = forward
        if passes:
            with merge_once(model, passes):
                for _ in range(passes):
                    model(IDS).square().sum().backward()
        else:
            model(IDS).square().sum().backward()
    assert_same(gradients(stacked), gradients(alone))


def test_two_passes_before_backward() -> None:
    stacked, alone = pair()
    for model in (stacked, alone):
        (model(IDS).square().sum() * model(IDS + 1).square().sum()).backward()
    assert_same(gradients(stacked), gradients(alone))


def test_merge_once_merges_stacks_once() -> None:
    stacked, alone = pair()
    for model in (stacked, alone):
        with Operations() as operations, merge_once(model, 4):
            for _ in range(4):
                model(IDS).square().sum().backward()
        model.products = operations.products
    assert stacked.products < alone.products
    assert_same(gradients(stacked), gradients(alone))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_and_dtypes(dtype: torch.dtype) -> None:
    results = []
    for model in pair(Net().to(dtype), gates=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(IDS).float().square().mean()
        loss.backward()
        results.append(gradients(model))
        dtypes = {name: param.dtype for name, param in model.named_parameters()}
        assert dtypes == {name: value.dtype for name, value in results[-1].items() if value is not None}
    assert_same(*results, 3e-2)


def test_rounded_cores() -> None:
    results = []
    for model in pair(Net(), gates=True):
        sc.quantize_training(model, weights="int8", activations="int8")
        model(IDS).square().sum().backward()
        results.append(gradients(model))
    assert_same(*results, 1e-5)


def test_functional_calls_and_transforms() -> None:
    stacked, alone = pair()
    results = []
    for model in (stacked, alone):
        params = {name: 1.1 * param.detach() for name, param in model.named_parameters()}

        def loss(params: dict[str, Tensor], ids: Tensor, model: nn.Module = model) -> Tensor:
            return functional_call(model, params, (ids,)).square().sum()

        leaves = {name: param.requires_grad_() for name, param in params.items()}
        torch.autograd.backward(loss(leaves, IDS))
        result = {name: param.grad for name, param in leaves.items()}
        params = {name: param.detach() for name, param in params.items()}
        result |= {f"func {name}": value for name, value in grad(loss)(params, IDS).items()}
        each = vmap(grad(loss), (None, 0))(params, IDS.view(4, 10))
        results.append(result | {f"vmap {name}": value for name, value in each.items()})
    assert_same(*results)


def test_copies_and_files() -> None:
    stacked, _ = pair()
    copied = copy.deepcopy(stacked)
    buffer = io.BytesIO()
    torch.save(stacked, buffer)
    buffer.seek(0)
    for model in (copied, torch.load(buffer, weights_only=False)):
        with Operations() as operations:
            model(IDS).square().sum().backward()
        with Operations() as original:
            stacked(IDS).square().sum().backward()
        assert operations.products == original.products
        assert_same(gradients(model), gradients(stacked))
    assert len(list(copy.deepcopy(stacked.up[0]).parameters())) == len(list(stacked.up[0].parameters()))


def test_threads_do_not_share_passes() -> None:
    stacked, alone = pair()
    alone(IDS).square().sum().backward()
    expected = gradients(alone)
    errors: list[Exception] = []

    def run(model: nn.Module) -> None:
        try:
            for _ in range(20):
                model(IDS).square().sum().backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(stacked,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert_same({name: value / 60 for name, value in gradients(stacked).items()}, expected)


def test_a_failed_pass_leaves_nothing() -> None:
    stacked, _ = pair()
    handle = stacked.down[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stacked(IDS)
    handle.remove()
    assert not running.passes
    with pytest.raises(IndexError):
        stacked(IDS + 100)
    assert not running.passes


def test_changed_cores_and_frozen_layers() -> None:
    stacked, alone = pair()
    results = []
    for model in (stacked, alone):
        model(IDS).square().sum().backward()
        with torch.no_grad():
            for param in model.parameters():
                param.data = param.data * 0.9
        model.up[1].set_trainable(False)
        model(IDS).square().sum().backward()
        results.append(gradients(model))
    assert_same(*results)


def test_forward_mode_differentiation() -> None:
    tangents = []
    for model in pair():
        with forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(param, torch.full_like(param, 0.1))
                for name, param in model.named_parameters()
            }
            found = functional_call(model, duals, (IDS,))
            tangents.append(forward_ad.unpack_dual(found).tangent)
    torch.testing.assert_close(*tangents)


def test_batched_gradients(device: str) -> None:
    results = []
    for model in pair(gates=True):
        remove_ranks(model.up[1], 0.5)
        y, params = model(IDS), [param for param in model.parameters() if param.requires_grad]
        upstream = torch.linspace(-1.0, 1.0, 3 * y.numel(), dtype=y.dtype).view(3, *y.shape)
        found = torch.autograd.grad(y, params, upstream, is_grads_batched=True)
        results.append(dict(zip(map(str, range(len(found))), found, strict=True)))
    assert_same(*results)


def test_layers_with_other_ranks_merge_alone() -> None:
    stacked, alone = pair()
    for model in (stacked, alone):
        remove_ranks(model.up[0], 0.2)
        model(IDS).square().sum().backward()
    assert_same(gradients(stacked), gradients(alone))


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("small_blocks")
def test_padded_ranks(gates: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of other ranks merge in one stack where launches cost something, with the values of unpadded layers."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6))).double()
    stacked, alone = pair(net, gates=gates, rank=20)
    for model in (stacked, alone):
        for count, layer in enumerate(model):
            remove_ranks(layer, 0.1 * count)
    x = torch.randn(400, 96, dtype=torch.float64)
    expected = alone(x)
    expected.square().sum().backward()
    unpadded = gradients(alone)
    monkeypatch.setattr(costs, "CPU", costs.TYPICAL_GPU)
    monkeypatch.setattr(merging, "_max_numel", lambda device: merging.MAX_NUMEL)
    counts = []
    for model in (stacked, alone):
        run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        found = run(x)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        found.square().sum().backward()
        assert all(param.grad is None or param.grad.is_contiguous() for param in model.parameters())
        assert_same(gradients(model), unpadded)
        with Operations() as operations:
            model(x)
        counts.append(operations.products)
    # Two products a layer with tokens, and four to merge: for each layer, or for one or two orders.
    assert counts[0] <= 2 * 6 + 2 * 4
    assert counts[1] == (2 + 4) * 6
    layer = stacked[2]
    assert [tuple(block.shape) for block in layer.blocks(layer.plan(400).steps)] == [(1, 96, 16), (16, 96, 1)]


def removed(fractions: list[float]) -> Any:
    """Return equal layers of which these fractions of the ranks were removed."""
    model, _ = pair(nn.Sequential(*(nn.Linear(96, 96) for _ in range(6))), rank=20)
    for layer, fraction in zip(model, fractions, strict=True):
        remove_ranks(layer, fraction)
    return model


@pytest.fixture
def stacks_of_a_gpu(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "CPU", costs.TYPICAL_GPU)
    monkeypatch.setattr(merging, "_max_numel", lambda device: merging.MAX_NUMEL)


@pytest.mark.usefixtures("stacks_of_a_gpu")
def test_padding_takes_few_operations_and_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy per tensor would launch as often as merging each layer alone."""
    monkeypatch.setattr(merging, "is_in_dispatch_mode", lambda: False)  # that of this test
    x, counts = torch.randn(400, 96), []
    for fractions in ([0.0] * 6, [0.03 * i for i in range(6)]):  # all layers have one order
        model = removed(fractions)
        model(x).sum().backward()
        kept = [index for paddings in model[0].paddings.values() for index in paddings.values()]
        assert bool(kept) == any(fractions)
        cores = sum(param.numel() for param in model.parameters())
        assert sum(index.nbytes for index in kept) < 2.5 * 4 * cores
        with Operations() as operations:
            model(x).sum().backward()
        views = ("view", "t", "transpose", "slice", "select", "expand", "unsqueeze", "_unsafe_view", "permute", "split")
        counts.append(sum(count for name, count in operations.counts.items() if name not in (*views, "detach")))
    # Per stack of cores two operations more forward, and one backward.
    assert counts[1] - counts[0] <= 6 * 3
    # Paddings of ranks that were removed are dropped, and no copy has them.
    for _ in range(2 * merging.MAX_KEPT_PADDINGS):
        model.zero_grad()
        remove_ranks(model[5], 0.2)
        model(x).sum().backward()
    assert len(model[0].paddings) <= merging.MAX_KEPT_PADDINGS
    assert copy.deepcopy(model)[0].paddings == {}
    model.double()
    assert model[0].paddings == {}


class Skipping(nn.Sequential):
    """Layers of which a pass leaves one out."""

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        return torch.stack([layer(x) for i, layer in enumerate(self) if i != skipped]).sum(0)


@pytest.mark.usefixtures("stacks_of_a_gpu")
def test_layers_that_are_skipped_add_no_paddings() -> None:
    model, alone = pair(Skipping(*(nn.Linear(96, 96) for _ in range(6))).double(), rank=20)
    for one in (model, alone):
        for i, layer in enumerate(one):
            remove_ranks(layer, 0.03 * i)  # all layers have one order
    x, sizes = torch.randn(400, 96, dtype=torch.float64), []
    for skipped in range(6):
        for one in (model, alone):
            one(x, skipped).square().sum().backward()
        assert_same(gradients(model), gradients(alone))
        sizes.append(sum(len(paddings) for layer in model for paddings in layer.paddings.values()))
    assert sizes[0] == sizes[-1] > 0


@pytest.mark.usefixtures("stacks_of_a_gpu")
def test_paddings_of_a_capture_or_of_fake_tensors_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = removed([0.03 * i for i in range(6)]), torch.randn(400, 96)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(x)
    assert not any(model[0].paddings.values())
    with monkeypatch.context() as context:
        context.setattr(merging, "is_capturing", lambda device: True)
        model(x).sum().backward()
    first = gradients(model)
    assert not any(model[0].paddings.values())
    model(x).sum().backward()
    assert_same(gradients(model), first, 0.0)
    assert any(model[0].paddings.values())
    # A graph reads the indices in each replay.
    monkeypatch.setattr(devices, "_captured", [])
    monkeypatch.setattr(merging, "is_capturing", lambda device: True)
    for _ in range(2):
        model(x).sum().backward()
    (kept,) = model[0].paddings.values()
    assert len(devices._captured) == len(kept)
    # Fake tensors may also come without their mode, or after a real pass.
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(param) for name, param in model.named_parameters()}
        assert functional_call(model, fakes, (mode.from_tensor(x),)).shape == x.shape
    assert functional_call(model, fakes, (mode.from_tensor(x),)).shape == x.shape


def test_stacks_of_large_layers_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding stays below the cost of the launches that it saves."""
    monkeypatch.setattr(costs, "CPU", costs.DeviceCosts(element=8.0, launch=1000.0, rank_multiple=16))
    stacked, _ = pair(rank=20)
    remove_ranks(stacked.up[0], 0.9)
    members = merging._equal_layers(stacked)
    assert members[stacked.up[0]] == [stacked.up[0]]
    assert members[stacked.up[1]] == [stacked.up[1], stacked.up[2]]


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_cores_that_fsdp_manages_merge_alone(tmp_path: Path, reshard: bool, ignored: bool) -> None:
    """FSDP reduces the gradients of a block when its backward pass ends, but those of stacks come later."""
    stacked, alone = pair(Net())
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        layers = [*stacked.up, *stacked.down]
        cores = {core for layer in layers for core in layer.parts} if ignored else set()
        for layer in layers:
            fully_shard(layer, reshard_after_forward=reshard, ignored_params=cores)
        fully_shard(stacked, reshard_after_forward=reshard, ignored_params=cores)
        with Operations() as operations:  # without resharding, the second pass finds all cores in full
            (stacked(IDS).square().sum() + stacked(IDS + 1).square().sum()).backward()
        found = gradients(stacked)
        found = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    finally:
        dist.destroy_process_group()
    with Operations() as separate:
        (alone(IDS).square().sum() + alone(IDS + 1).square().sum()).backward()
    assert (operations.products == separate.products) is not ignored
    assert_same(found, gradients(alone), 1e-5)


def test_densified_models_keep_no_hooks() -> None:
    stacked, _ = pair()
    sc.densify(stacked)
    assert not stacked._forward_pre_hooks
    assert not stacked._forward_hooks


def test_thin_matrices_need_no_hooks() -> None:
    model = sc.tensorize(Net(), rank=4, format="low-rank")
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_models_merge_stacks(checkpointed: bool, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`model.compile()` compiles the hooks of the model in a graph of their own."""
    monkeypatch.setattr(merging, "_max_numel", lambda device: merging.MAX_NUMEL)  # as on a GPU
    stacked, alone = pair(gates=True)
    results, products = [], []
    for model in (stacked, alone):
        if checkpointed:
            model.block = partial(checkpoint, model.block, use_reentrant=False)
        graphs: list[Any] = []

        def backend(graph: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        if in_place:
            model.compile(backend=backend, fullgraph=True)
        compiled = model if in_place else torch.compile(model, backend=backend, fullgraph=True)
        compiled(IDS).square().sum().backward()
        num_graphs = len(graphs)
        for number in range(2):
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9 + 0.1 * number)
            model.zero_grad()
            compiled(IDS).square().sum().backward()
        assert len(graphs) == num_graphs
        nodes = [
            node for graph in graphs for part in graph.modules() for node in getattr(part, "graph", graph.graph).nodes
        ]
        products.append(sum("matmul" in str(node.target) for node in nodes))
        results.append(gradients(model))
    assert products[0] < products[1]
    assert_same(*results)


def test_compiled_parts_of_a_model_are_compiled_once() -> None:
    stacked, alone = pair()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for i in range(3):
        stacked.up[i].compile(backend=backend)
    counts = []
    for _ in range(3):
        stacked(IDS).square().sum().backward()
        alone(IDS).square().sum().backward()
        assert_same(gradients(stacked), gradients(alone))
        counts.append(len(graphs))
    assert counts[0] == counts[-1] > 0
