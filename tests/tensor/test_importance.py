"""Tests of rank importance: ranks that the loss does not need are pruned first, whatever their norm."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.importance import Importance
from scantling.tensor.rank_adapter import RankAdapter


class TwoWays(nn.Module):
    """Two TT layers of one shape, the second of which hardly affects the output."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.needed = sc.TTLinear(32, 32, 8, bias=False)
        self.idle = sc.TTLinear(32, 32, 8, bias=False)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return self.needed(x) + self.share * self.idle(x)


def two_ways(share: float = 1e-3) -> TwoWays:
    torch.manual_seed(0)
    model = TwoWays(share)
    with torch.no_grad():
        model.idle.cores[0].mul_(3.0)  # a weight of three times the norm
    return model


def example(number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(number))
    return x, x.roll(1, dims=1) + x


def fit(
    model: nn.Module, adapter: RankAdapter, optimizer: torch.optim.Optimizer, numbers: range, cut_every: int = 5
) -> float:
    for number in numbers:
        x, wanted = example(number)
        loss = nn.functional.mse_loss(model(x), wanted)
        adapter.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % cut_every == cut_every - 1:
            adapter.truncate(optimizer)
    return loss.item()


def came(model: nn.Module) -> sc.CAME:
    return sc.CAME(sc.param_groups(model), lr=3e-3, debias=True, betas=(0.9, 0.95, 0.995))


def inner_ranks(adapter: RankAdapter, name: str) -> int:
    return sum(adapter.ranks()[name][1:-1])


def test_importance_prunes_unneeded_layer_first() -> None:
    model = two_ways()
    adapter = RankAdapter(model, size_target=0.55, steps=30)
    fit(model, adapter, came(model), range(40))
    assert adapter.size() == pytest.approx(adapter.target, rel=0.02)
    whole = sum(sc.TTLinear(32, 32, 8).ranks[1:-1])
    assert inner_ranks(adapter, "idle") < 0.5 * whole
    assert inner_ranks(adapter, "needed") > 0.9 * whole

    by_norm = two_ways()  # without any gradient
    without = RankAdapter(by_norm, size_target=0.55, steps=30)
    without.finish()
    assert inner_ranks(without, "idle") > inner_ranks(adapter, "idle")


def test_importance_is_mean_squared_first_order_change() -> None:
    model = two_ways(share=0.5)
    adapter = RankAdapter(model, size_target=0.5, steps=1000, memory=0.75)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rank_gates = [gate for layer in adapter.layers.values() for gate in layer.rank_gates or ()]
    expected: Tensor | float = 0.0
    for number in range(3):
        x, wanted = example(number)
        adapter.loss(nn.functional.mse_loss(model(x), wanted)).backward()
        gradients = torch.cat([gate.grad for gate in rank_gates if gate.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        expected = 0.75 * expected + 0.25 * gradients.square()
    importance = adapter._schedule.importance
    assert importance is not None
    values = adapter._budget.gate_values()
    torch.testing.assert_close(importance.scores(values), expected * values.square())


def test_importance_handles_missing_and_nonfinite_gradients() -> None:
    rank_gates = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    importance = Importance(0.5)
    importance.set_gates(rank_gates)
    importance.update()
    assert importance.scores(torch.ones(5)) is None  # without a gradient there is no importance
    rank_gates[0].grad, rank_gates[1].grad = torch.zeros(2), torch.zeros(3)
    importance.update()  # gradients freed by filling them with 0
    rank_gates[0].grad, rank_gates[1].grad = torch.tensor([2.0, 4.0]), None
    importance.update()
    rank_gates[1].grad = torch.tensor([1.0, float("nan"), float("inf")])
    rank_gates[0].grad = None
    importance.update()
    found = importance.scores(torch.ones(5))
    assert found is not None
    assert found.tolist() == [1.0, 4.0, 0.5, 0.0, 0.0]


def test_importance_keeps_first_recorded_gradient_of_a_step() -> None:
    gate = nn.Parameter(torch.ones(2))
    importance = Importance(0.5)
    importance.set_gates([gate])
    importance.record_gradient(gate)  # without a gradient
    importance.record_gradient(nn.Parameter(torch.ones(3)))  # another parameter
    assert importance.pending_values() == {}
    gate.grad = torch.tensor([1.0, 2.0])
    importance.record_gradient(gate)
    gate.grad.zero_()  # as optimizers may, after their step
    importance.record_gradient(gate)
    importance.exclude(gate)
    assert importance.pending_values() == {"0": [1.0, 2.0]}
    importance.update()
    assert importance.values() == [0.5, 2.0]
    assert importance.pending_values() == {}
    gate.grad.fill_(3.0)
    importance.exclude(gate)  # not stepped: its gradient counts as 0
    importance.update()
    assert importance.values() == [0.5, 2.0]


def test_importance_drops_pending_gradients_when_loading() -> None:
    gate = nn.Parameter(torch.ones(2))
    importance = Importance(0.5)
    importance.set_gates([gate])
    gate.grad = torch.tensor([1.0, 2.0])
    importance.record_gradient(gate)
    importance.load_values([4.0, 6.0])
    gate.grad = None
    importance.update()
    assert importance.values() == [4.0, 6.0]


def test_contributions_decide_between_ranks_of_equal_importance() -> None:
    model = two_ways(share=0.0)
    adapter = RankAdapter(model, size_target=0.5, steps=30)
    schedule = adapter._schedule
    contributions = torch.cat(list(adapter._budget.contributions()))
    rank_gates = adapter._budget.rank_gates
    for gate in rank_gates:
        gate.grad = torch.zeros_like(gate)
    assert schedule.importance is not None
    schedule.importance.update()
    torch.testing.assert_close(schedule._rank_scores(), contributions)
    for gate in model.needed.rank_gates or ():
        gate.grad = torch.ones_like(gate)
    schedule.importance.update()
    scores = schedule._rank_scores()
    assert scores is not None
    needed = sum(model.needed.ranks[1:-1])
    assert torch.equal(scores[needed:].argsort(), contributions[needed:].argsort())
    assert scores[:needed].min() > scores[needed:].max()


def test_importance_of_pruned_rank_is_that_at_threshold() -> None:
    """A gate far below the threshold would otherwise have a large square."""
    adapter = RankAdapter(two_ways(), size_target=0.5, steps=30)
    importance = adapter._schedule.importance
    assert importance is not None
    for gate in adapter._budget.rank_gates:
        gate.grad = torch.ones_like(gate)
    importance.update()
    with torch.no_grad():
        adapter._budget.rank_gates[0][1] = -3.0
    scores = importance.scores(adapter._budget.gate_values())
    assert scores is not None
    assert scores[1] / scores[0] == pytest.approx(0.01**2)


def test_importance_is_sliced_and_restored_from_values() -> None:
    rank_gates = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    importance = Importance(0.5)
    importance.set_gates(rank_gates)
    rank_gates[0].grad, rank_gates[1].grad = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])
    importance.update()
    importance.slice_state(nn.Parameter(torch.ones(3)), 0, torch.tensor([0]))  # an unknown parameter
    kept = torch.tensor([0, 2])
    importance.slice_state(rank_gates[1], 0, kept)
    importance.set_gates([rank_gates[0], nn.Parameter(rank_gates[1].detach()[kept])])
    values = json.loads(json.dumps(importance.values()))
    assert values == [0.5, 2.0, 4.5, 12.5]
    other = Importance(0.5)
    other.set_gates([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
    other.load_values(values)
    torch.testing.assert_close(other.scores(torch.ones(4)), importance.scores(torch.ones(4)))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_importance_uses_gradients_released_in_backward(accumulation: int) -> None:
    found = []
    for released in (False, True):
        model = two_ways()
        adapter = RankAdapter(model, size_target=0.55, steps=100, begin=50)
        optimizer = came(model)
        options: dict[str, Any] = {"accumulation": accumulation, "before_step": adapter.see_gradient}
        handle = sc.optim.release_gradients(model, optimizer, **options) if released else None
        for number in range(6 * accumulation):
            x, wanted = example(number)
            share = 1.0 / accumulation
            adapter.loss(nn.functional.mse_loss(model(x), wanted) * share, share=share).backward()
            if handle is None and number % accumulation == accumulation - 1:
                optimizer.step()
                optimizer.zero_grad()
        adapter.observe()
        assert adapter.step == 6
        importance = adapter._schedule.importance
        assert importance is not None
        found.append(importance.scores(adapter._budget.gate_values()))
        if handle is not None:
            handle.remove()
    torch.testing.assert_close(found[0], found[1])


def test_equal_models_get_equal_ranks() -> None:
    """Equal parameters and gradients give equal decisions."""
    model = two_ways(share=0.3)
    other = copy.deepcopy(model)
    found = []
    for each in (model, other):
        adapter = RankAdapter(each, size_target=0.3, steps=20, interval=2)
        fit(each, adapter, came(each), range(25))
        found.append(adapter.ranks())
    assert found[0] == found[1]


def test_importance_size_follows_path() -> None:
    model = two_ways(share=0.3)
    adapter = RankAdapter(model, size_target=0.3, steps=60, begin=20)
    optimizer = came(model)
    initial = adapter.size()
    for step in range(5, 60, 5):
        fit(model, adapter, optimizer, range(step - 5, step), cut_every=1000)
        path = 1.0 - 0.7 * max(0, step - 20) / 40
        assert adapter.size() / initial == pytest.approx(path, rel=0.03)
        assert adapter.metrics()["rank_price"] == 0.0


def test_importance_prunes_unused_layer_first() -> None:
    """Its gradients are exactly 0, so all of its ranks are equal, and none is kept."""
    model = two_ways(share=0.0)
    adapter = RankAdapter(model, size_target=0.52, steps=30)
    fit(model, adapter, came(model), range(40))
    assert max(adapter.ranks()["idle"]) <= 3
    assert inner_ranks(adapter, "needed") > 0.9 * sum(sc.TTLinear(32, 32, 8).ranks[1:-1])

    torch.manual_seed(0)
    used, unused = sc.TTLinear(32, 32, 8), nn.ModuleList(sc.TTLinear(64, 64, 16) for _ in range(4))
    both = nn.ModuleDict({"used": used, "unused": unused})
    adapter = RankAdapter(both, size_target=0.3, steps=10)
    optimizer = torch.optim.AdamW(both.parameters(), lr=1e-3)
    for number in range(12):
        x, wanted = example(number)
        adapter.loss(nn.functional.mse_loss(used(x), wanted)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert adapter.size() == pytest.approx(adapter.target, rel=0.02)
    assert used.ranks == adapter.ranks()["used"]


def test_pending_gradients_are_sliced_with_gates() -> None:
    model = two_ways()
    adapter = RankAdapter(model, size_target=0.5, steps=6, interval=1)
    optimizer = came(model)
    with sc.optim.release_gradients(model, optimizer, before_step=adapter.see_gradient):
        removed = 0
        for number in range(10):
            x, wanted = example(number)
            adapter.loss(nn.functional.mse_loss(model(x), wanted)).backward()
            removed += adapter.truncate(optimizer)
    assert removed > 0
    assert adapter.size() == pytest.approx(adapter.target, rel=0.02)


def test_importance_with_one_optimizer_per_parameter() -> None:
    model = two_ways()
    adapter = RankAdapter(model, size_target=0.55, steps=20)
    optimizers = {param: torch.optim.AdamW([param], lr=1e-3) for param in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for number in range(30):
        x, wanted = example(number)
        adapter.loss(nn.functional.mse_loss(model(x), wanted)).backward()
    assert adapter.size() == pytest.approx(adapter.target, rel=0.02)
    assert inner_ranks(adapter, "idle") < 0.5 * inner_ranks(adapter, "needed")


def test_copied_adapter_is_independent() -> None:
    model = two_ways()
    adapter = RankAdapter(model, size_target=0.4, steps=20, interval=2)
    fit(model, adapter, came(model), range(8), cut_every=4)
    kept = adapter.ranks()
    twin, its = copy.deepcopy((model, adapter))
    for number in range(8, 24):  # `loss` counts the copy's steps, because the optimizer hooks belong to the original
        x, wanted = example(number)
        its.loss(nn.functional.mse_loss(twin(x), wanted)).backward()
        optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if number % 4 == 3:
            its.truncate(optimizer)
    assert adapter.ranks() == kept != its.ranks()


def test_importance_survives_new_dtype_and_gates() -> None:
    model = two_ways()
    adapter = RankAdapter(model, size_target=0.5, steps=12, interval=2)
    fit(model, adapter, came(model), range(4))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(4, 16):
        x, wanted = (part.double() for part in example(number))
        adapter.loss(nn.functional.mse_loss(model(x), wanted)).backward()
        optimizer.step()
        optimizer.zero_grad()
    adapter.truncate(optimizer)
    assert adapter.size() == sum(core.numel() for layer in (model.needed, model.idle) for core in layer.cores)
    assert adapter.size() == pytest.approx(adapter.target, rel=0.02)


def test_adapter_refuses_foreign_state_without_changes() -> None:
    model = two_ways()
    adapter = RankAdapter(model, size_target=0.5, steps=6, interval=1)
    fit(model, adapter, came(model), range(8), cut_every=4)
    state = json.loads(json.dumps(adapter.state_dict()))
    fresh = two_ways()
    other = RankAdapter(fresh, size_target=0.5, steps=6, interval=1)
    before = other.ranks(), other.step
    short = {**state, "values": {**state["values"], "importance": state["values"]["importance"][1:]}}
    lacking = {**state, "values": {k: v for k, v in state["values"].items() if k != "importance"}}
    for bad, message in ((short, "has 'importance' of"), (lacking, "has no 'importance'")):
        with pytest.raises(UserError, match=message):
            other.load_state_dict(bad)
        assert (other.ranks(), other.step) == before
    other.load_state_dict(state)
    other.finish()
    with pytest.raises(UserError, match="detached"):
        other.load_state_dict(state)


@pytest.mark.parametrize("end", [RankAdapter.truncate, RankAdapter.finish])
def test_importance_with_separate_optimizers_for_cores_and_gates(end: Callable[..., object]) -> None:
    model = two_ways()
    adapter = RankAdapter(model, size_target=0.5, steps=6, interval=1)
    cores = [param for name, param in model.named_parameters() if "cores" in name]
    rank_gates = [param for name, param in model.named_parameters() if "rank_gates" in name]
    one, two = torch.optim.AdamW(cores, lr=1e-3), torch.optim.AdamW(rank_gates, lr=1e-2)
    for number in range(8):
        x, wanted = example(number)
        adapter.loss(nn.functional.mse_loss(model(x), wanted)).backward()
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    before = sum(core.numel() for core in cores)
    for alone in (one, two):
        with pytest.raises(UserError, match="pass every optimizer"):
            end(adapter, alone)
    assert before == sum(core.numel() for core in cores)
    assert end(adapter, one, two) != 0  # the number of ranks that truncate removed
    assert sum(core.numel() for core in cores) < 0.6 * before
    for optimizer in (one, two):
        for param, state in optimizer.state.items():
            assert state["exp_avg"].shape == param.shape
