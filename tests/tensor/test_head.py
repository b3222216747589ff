"""Tests of the output layer tied to a TT embedding."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.embedding import TTMHead


class Tied(nn.Module):
    def __init__(self, bias: bool = True, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = sc.TTMEmbedding(50, 12, 4, padding_idx=padding_idx)
        self.head = TTMHead(self.table, nn.Parameter(torch.randn(50)) if bias else None)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_head_matches_dense_head(bias: bool, padding_idx: int | None) -> None:
    torch.manual_seed(0)
    model = Tied(bias, padding_idx).double()
    hidden = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    found = model.head(hidden)
    dense = nn.functional.linear(hidden, model.table.dense_weight(), model.head.bias)
    assert torch.allclose(found, dense)
    inputs = [hidden, *model.parameters()]
    weights = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((dense * weights).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(one, other)


class Logits(nn.Module):
    def __init__(self, table: sc.TTMEmbedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table.logits(hidden)


class Largest(TorchDispatchMode):
    """Dispatch mode that records the largest number of elements of any result."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else [result]:
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return result


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_head_never_builds_dense_table(tokens: int) -> None:
    table = sc.TTMEmbedding(4096, 256, 32)
    hidden = torch.randn(tokens, 256, requires_grad=True)
    dense = nn.functional.linear(hidden, table.dense_weight())
    with Largest() as seen:
        logits = table.logits(hidden)
        logits.square().sum().backward()
    assert seen.numbers < 4096 * 256 / 2
    torch.testing.assert_close(logits, dense, rtol=1e-4, atol=1e-4)


def test_head_compiles_for_many_tokens() -> None:
    torch.manual_seed(0)
    model = Tied(padding_idx=3)
    hidden = torch.randn(300, 12)
    compiled = torch.compile(model.head, fullgraph=True, backend="aot_eager")
    found = [torch.autograd.grad(head(hidden).square().sum(), [*model.parameters()]) for head in (compiled, model.head)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tokens", [8, 64])
def test_head_supports_torch_func(tokens: int) -> None:
    table = sc.TTMEmbedding(400, 32, 4)
    parameters, hidden = dict(table.named_parameters()), torch.randn(tokens, 32)
    rows = table._best_steps(tokens, is_head=True)[0].tree == ((0, 1), (2, 3))
    assert rows == (tokens == 64), "many tokens are multiplied with the rows"

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(Logits(table), {f"table.{n}": p for n, p in parameters.items()}, hidden).sum()

    found = torch.func.grad(loss)(parameters)
    table.logits(hidden).sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4)
    table.zero_grad()
    torch.func.vmap(table.logits)(hidden.expand(2, -1, -1)).sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(2 * found[name], parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiles", [False, True])
def test_head_backward_saves_no_table(compiles: bool) -> None:
    table = sc.TTMEmbedding(4096, 256, 32)
    hidden = torch.randn(1024, 256, requires_grad=True)
    torch.compiler.reset()
    logits = torch.compile(table.logits, fullgraph=True, backend="aot_eager") if compiles else table.logits
    saved: dict[int, int] = {}

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        values = logits(hidden)
    assert sum(saved.values()) < hidden.nbytes + 4 * 4096 * 256 / 2
    values.sum().backward()
    assert table.cores[0].grad is not None


def test_head_does_not_register_cores() -> None:
    model = Tied()
    own = ["table.log_gain", *(f"table.cores.{n}" for n in range(4)), "head.bias"]
    assert [name for name, _ in model.named_parameters()] == own
    assert len(model.state_dict()) == 6
    assert len(list(model.head.parameters())) == 1


def test_copied_head_is_tied_to_copied_table() -> None:
    model = Tied()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert twin.head.table is twin.table
        assert twin.table is not model.table


def test_head_moves_with_table() -> None:
    model = Tied().to(torch.bfloat16)
    assert model.head.weight.dtype == torch.bfloat16
    assert model.head(torch.randn(3, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert (model.head.in_features, model.head.out_features) == (12, 50)
    assert model.head.weight.shape == (50, 12)


def test_head_refuses_input_on_other_device() -> None:
    model = Tied()
    with pytest.raises(UserError, match=r"on cpu, its input is on meta\. .* on the device of its embedding"):
        model.head(torch.randn(3, 12, device="meta"))


def test_head_to_dense() -> None:
    model, hidden = Tied(), torch.randn(3, 12)
    alone = model.head.to_dense()
    assert torch.allclose(alone(hidden), model.head(hidden), atol=1e-6)
    dense = model.table.to_dense()
    assert model.head.to_dense(dense.weight).weight is dense.weight


def test_head_refuses_weight_assignment() -> None:
    with pytest.raises((KeyError, AttributeError)):
        Tied().head.weight = nn.Parameter(torch.zeros(50, 12))
