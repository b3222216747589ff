"""What the loss depends on: the ranks of layers it does without go first, whatever their norm."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.importance import Importance
from scantling.tensor.ranks import RankAdapter


class TwoWays(nn.Module):
    """Two layers of cores of one shape, the second of which hardly reaches the output."""

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


def test_the_layer_that_the_loss_does_without_goes_first() -> None:
    model = two_ways()
    adapter = RankAdapter(model, size_target=0.55, steps=30)
    fit(model, adapter, came(model), range(40))
    assert adapter.size() == pytest.approx(adapter.target, rel=0.02)
    whole = sum(sc.TTLinear(32, 32, 8).ranks[1:-1])
    assert inner_ranks(adapter, "idle") < 0.5 * whole
    assert inner_ranks(adapter, "needed") > 0.9 * whole

    by_norm = two_ways()  # no gradient is ever seen
    without = RankAdapter(by_norm, size_target=0.55, steps=30)
    without.finish()
    assert inner_ranks(without, "idle") > inner_ranks(adapter, "idle")


def test_it_is_the_mean_of_the_squared_change_to_first_order() -> None:
    model = two_ways(share=0.5)
    adapter = RankAdapter(model, size_target=0.5, steps=1000, memory=0.75)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    controls = [control for layer in adapter.layers.values() for control in layer.controls or ()]
    expected: Tensor | float = 0.0
    for number in range(3):
        x, wanted = example(number)
        adapter.loss(nn.functional.mse_loss(model(x), wanted)).backward()
        gradients = torch.cat([control.grad for control in controls if control.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        expected = 0.75 * expected + 0.25 * gradients.square()
    importance = adapter._schedule.importance
    assert importance is not None
    values = adapter._bonds.values()
    torch.testing.assert_close(importance.of(values), expected * values.square())


def test_a_control_without_a_gradient_did_not_act_and_nan_is_left_out() -> None:
    controls = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    importance = Importance(0.5)
    importance.follow(controls)
    importance.update()
    assert importance.of(torch.ones(5)) is None  # no gradient at all says nothing
    controls[0].grad = torch.tensor([2.0, 4.0])
    importance.update()
    controls[1].grad = torch.tensor([1.0, float("nan"), float("inf")])
    controls[0].grad = None
    importance.update()
    found = importance.of(torch.ones(5))
    assert found is not None
    assert found.tolist() == [1.0, 4.0, 0.5, 0.0, 0.0]


def test_it_is_cut_with_its_controls_and_goes_on_from_plain_values() -> None:
    controls = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    importance = Importance(0.5)
    importance.follow(controls)
    controls[0].grad, controls[1].grad = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])
    importance.update()
    importance.slice_state(nn.Parameter(torch.ones(3)), 0, torch.tensor([0]))  # of something else
    kept = torch.tensor([0, 2])
    importance.slice_state(controls[1], 0, kept)
    importance.follow([controls[0], nn.Parameter(controls[1].detach()[kept])])
    values = json.loads(json.dumps(importance.values()))
    assert values == [0.5, 2.0, 4.5, 12.5]
    other = Importance(0.5)
    other.follow([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
    other.load_values(values)
    torch.testing.assert_close(other.of(torch.ones(4)), importance.of(torch.ones(4)))
    other.follow(controls)
    with pytest.raises(UserError, match="importance of 4 ranks, not of 5"):
        other.load_values(values)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_that_are_freed_in_the_backward_pass_are_seen(accumulation: int) -> None:
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
        found.append(importance.of(adapter._bonds.values()))
        if handle is not None:
            handle.remove()
    torch.testing.assert_close(found[0], found[1])


def test_a_copy_of_a_model_goes_on_alike() -> None:
    """Whoever has the same parameters and gradients decides alike."""
    model = two_ways(share=0.3)
    other = copy.deepcopy(model)
    found = []
    for each in (model, other):
        adapter = RankAdapter(each, size_target=0.3, steps=20, interval=2)
        fit(each, adapter, came(each), range(25))
        found.append(adapter.ranks())
    assert found[0] == found[1]


def test_the_size_follows_its_path_at_every_look() -> None:
    model = two_ways(share=0.3)
    adapter = RankAdapter(model, size_target=0.3, steps=60, begin=20)
    optimizer = came(model)
    initial = adapter.size()
    for step in range(5, 60, 5):
        fit(model, adapter, optimizer, range(step - 5, step), cut_every=1000)
        path = 1.0 - 0.7 * max(0, step - 20) / 40
        assert adapter.size() / initial == pytest.approx(path, rel=0.03)
        assert adapter.metrics()["rank_price"] == 0.0
