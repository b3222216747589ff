"""Tests of merging TT cores once: for several passes of a step, and for passes without gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scantling as sc
from scantling.errors import UserError
from scantling.tensor import layer as layer_module
from scantling.tensor.embedding import TTMHead
from scantling.tensor.layer import TTLayer, keep_merged, merge_once


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = sc.TTMEmbedding(60, 48, 6, num_modes=3)
        self.linear = sc.TTLinear(48, 48, 9)
        self.dense = nn.Linear(48, 48)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table.logits(self.dense(torch.tanh(self.linear(self.table(ids)))))


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def backward(model: Net, passes: int) -> None:
    for number in range(passes):
        ids = torch.randint(60, (30 + number, 7), generator=torch.Generator().manual_seed(number))
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()


def write_in_place(core: nn.Parameter) -> None:
    core.data.mul_(1.5)


def swap_data(core: nn.Parameter) -> None:
    core.data = 1.5 * core.data


def write_from_vector(core: nn.Parameter) -> None:
    nn.utils.vector_to_parameters(1.5 * nn.utils.parameters_to_vector([core]), [core])


def write_with_numpy(core: nn.Parameter) -> None:
    core.detach().numpy()[...] *= 1.5


def take_step(core: nn.Parameter) -> None:
    core.grad = core.detach().clone()
    torch.optim.AdamW([core], lr=0.1, fused=True).step()


@pytest.mark.parametrize("change", [write_in_place, swap_data, write_from_vector, write_with_numpy, take_step])
def test_evaluation_sees_changed_cores(change: Callable[[nn.Parameter], None]) -> None:
    model = net().eval()
    ids = torch.randint(60, (5, 7))
    with torch.no_grad():
        before = model(ids)
        for core in (*model.linear.cores, *model.table.cores):
            change(core)
        found = model(ids)
        assert not torch.allclose(found, before)
        torch.testing.assert_close(found, copy.deepcopy(model)(ids))


@pytest.mark.parametrize("with_controls", [False, True])
def test_merge_once_gradients_match_separate_passes(with_controls: bool) -> None:
    model = net()
    if with_controls:
        sc.RankAdapter(model)
    twin = copy.deepcopy(model)
    backward(model, 5)
    with merge_once(twin, 5):
        backward(twin, 5)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("with_controls", [False, True])
def test_merge_once_with_checkpointing(use_reentrant: bool, with_controls: bool) -> None:
    layers: list[tuple[nn.Module, Tensor]] = [
        (sc.TTLinear(48, 48, 9).double(), torch.randn(40, 48, dtype=torch.float64, requires_grad=True)),
        (sc.TTMEmbedding(60, 48, 6, num_modes=3).double(), torch.arange(50)),
        (TTMHead(sc.TTMEmbedding(60, 48, 6).double()), torch.randn(9, 48, dtype=torch.float64, requires_grad=True)),
    ]
    for layer, x in layers:
        table = layer.table if isinstance(layer, TTMHead) else layer
        if with_controls:
            sc.RankAdapter(table)
        twin = copy.deepcopy(table)
        again = TTMHead(twin) if isinstance(layer, TTMHead) else twin
        dummy = torch.zeros((), dtype=torch.float64, requires_grad=True)  # for reentrant checkpoints of ids
        for _ in range(3):
            layer(x).square().sum().backward()
        with merge_once(twin, 3):
            for _ in range(3):
                found = checkpoint(lambda x, _, again=again: again(x), x, dummy, use_reentrant=use_reentrant)
                found.square().sum().backward()
        for one, other in zip(table.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)


def test_merge_once_merges_once() -> None:
    model = net()
    merges: list[int] = []

    def count_calls(self: layer_module.TTLayer) -> list[Tensor]:
        merges.append(1)
        return list(self.cores)

    with patch.object(layer_module.TTLayer, "gated_cores", count_calls):
        backward(model, 4)
        alone = len(merges)
        merges.clear()
        with merge_once(model, 4):
            backward(model, 4)
        assert alone == 4 * 3  # an embedding, a layer, a head
        assert len(merges) <= 3 + 1  # with more ids, another order may be the best


def test_merge_once_leaves_no_state() -> None:
    model = net()

    def abort() -> None:
        with merge_once(model, 2):
            backward(model, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        abort()
    assert model.linear.cores[0].grad is None
    with merge_once(model, 1), pytest.raises(RuntimeError, match="already active"), merge_once(model, 1):
        pass
    with pytest.raises(UserError, match="passes=0; it must be at least 1"), merge_once(model, 0):
        pass
    with merge_once(model, 1):
        pass
    backward(model, 1)
    assert model.linear.cores[0].grad is not None


def test_keep_merged_serves_all_passes_without_gradients() -> None:
    model = net()
    ids = torch.arange(40).view(4, 10)
    merges: list[int] = []
    gated = TTLayer.gated_cores

    def count_calls(self: TTLayer) -> list[Tensor]:
        merges.append(1)
        return gated(self)

    expected = model(ids).detach()
    with patch.object(TTLayer, "gated_cores", count_calls), keep_merged(model), torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(ids), expected)
        assert 1 <= len(merges) <= 3  # an embedding and a head may use the same blocks
        with keep_merged(model):
            model(ids)
        merges.clear()
        model(ids)
        assert not merges
        assert copy.deepcopy(model).linear._merged_kept is None
        torch.testing.assert_close(model.float()(ids), expected.float(), rtol=1e-4, atol=1e-4)
    assert model.linear._merged_kept is None


def test_keep_merged_does_not_serve_passes_with_gradients() -> None:
    model = net()
    ids = torch.arange(40).view(4, 10)
    twin = copy.deepcopy(model)
    with keep_merged(model):
        with torch.inference_mode():
            one = model(ids)
        with torch.no_grad():
            torch.testing.assert_close(one, model(ids))
        backward(model, 1)
        with merge_once(model, 2):
            backward(model, 1)
    backward(twin, 1)
    backward(twin, 1)
    for first, second in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad)


SIZES: dict[str, tuple[Callable[[], TTLayer], Callable[[int], Tensor]]] = {
    "table": (lambda: sc.TTMEmbedding(100_000, 64, 16), lambda number: torch.arange(number) * 7),
    "bag": (lambda: sc.TTMEmbeddingBag(30_522, 128, 16), lambda number: torch.arange(number).view(-1, 1)),
    "768 x 768": (lambda: sc.TTLinear(768, 768, 30), lambda number: torch.randn(number, 768)),
    "768 x 3072": (lambda: sc.TTLinear(768, 3072, 30), lambda number: torch.randn(number, 768)),
    "tiny ranks": (lambda: sc.TTLinear(512, 512, 2), lambda number: torch.randn(number, 512)),
    "hardly smaller": (lambda: sc.TTLinear(64, 64, 20), lambda number: torch.randn(number, 64)),
}


@pytest.mark.parametrize("name", SIZES)
def test_keep_merged_memory_is_bounded(name: str) -> None:
    made, input_of = SIZES[name]
    layer = made()
    with keep_merged(layer), torch.no_grad():
        for number in (1, 16, 700, 5000):
            x = input_of(number)
            found = layer(x)
            torch.testing.assert_close(found, copy.deepcopy(layer)(x), rtol=1e-4, atol=1e-4)
            kept = sum(block.numel() for block in (layer._merged_kept or {}).values())
            assert kept <= 8 * sum(core.numel() for core in layer.cores)


def test_keep_merged_keeps_two_blocks_of_linear_layer() -> None:
    layer = sc.TTLinear(768, 3072, 30)
    with keep_merged(layer), torch.no_grad():
        layer(torch.randn(64, 768))
        assert sorted(block.numel() for block in (layer._merged_kept or {}).values()) == [768 * 30, 3072 * 30]


def test_merge_once_holds_no_dense_table() -> None:
    table = sc.TTMEmbedding(4096, 64, 8)
    with merge_once(table, 64):
        for _ in range(2):
            table(torch.arange(4096)).sum().backward()
            table.logits(torch.randn(40, 64)).sum().backward()
        held = sum(block.numel() for block, _ in (table._merged_once or {}).values())
        assert held <= 8 * sum(core.numel() for core in table.cores)
