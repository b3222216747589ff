"""Tests that ranks depend on the gradients of their own step, with any optimizer, and that resuming is exact."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from scantling.comm.gradient_exchange import NoExchange
from scantling.optim.combined import CombinedOptimizer
from scantling.optim.registry import build_optimizer
from scantling.tensor.rank_adapter import RankAdapter
from scantling.tensor.schedules import SCHEDULES
from scantling.trainer.recipe.schema import TensorSection
from scantling.trainer.training.tensor_training import TensorTraining
from tests.tensor.test_importance import example, two_ways


class Wrapper(torch.optim.Optimizer):
    """Optimizer that delegates its steps to another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.optimizer, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


class AfterSuper(torch.optim.Adagrad):
    """Subclass that calls its base's step, whose hooks run too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    params = dict(model.named_parameters())
    return (
        [param for name, param in params.items() if "rank_gates" not in name],
        [param for name, param in params.items() if "rank_gates" in name],
    )


def combined(model: nn.Module, *, gates_first: bool = False) -> torch.optim.Optimizer:
    cores, rank_gates = split(model)
    members = [torch.optim.SGD(cores, lr=1e-2), torch.optim.AdamW(rank_gates, lr=1e-2)]
    return CombinedOptimizer(members[::-1] if gates_first else members)


def per_group_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Give each gate a separate optimizer."""
    cores, rank_gates = split(model)
    return CombinedOptimizer([torch.optim.AdamW(each, lr=1e-2) for each in (cores, *([one] for one in rank_gates))])


def by_name(name: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: build_optimizer(name, sc.param_groups(model), lr=3e-3, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "came": by_name("came"),
    "sign": by_name("sign"),
    "adamw": by_name("adamw"),
    "fused": by_name("adamw", fused=True),
    "demo": lambda model: sc.DeMo(sc.param_groups(model), lr=1e-3),
    "combined": combined,
    "rank gates first": lambda model: combined(model, gates_first=True),
    "per_group_optimizer": per_group_optimizer,
    "wrapped": lambda model: Wrapper(by_name("sign")(model)),
    "super": lambda model: AfterSuper(model.parameters(), lr=1e-2),
}


class Loop:
    """A custom training loop."""

    def __init__(
        self,
        make: Callable[[nn.Module], torch.optim.Optimizer],
        accumulation: int = 1,
        release: bool = False,
        **options: Any,
    ) -> None:
        self.model = two_ways(share=0.3)
        self.adapter = RankAdapter(self.model, **{"size_target": 0.4, "steps": 9, "interval": 1, **options})
        self.optimizer = make(self.model)
        self.accumulation, self.release = accumulation, release
        self.seen: list[Any] = []
        if release:
            assert isinstance(self.optimizer, sc.CAME)
            sc.optim.release_gradients(
                self.model, self.optimizer, accumulation=accumulation, before_step=self.adapter.see_gradient
            )

    def run(self, steps: range) -> None:
        for number in steps:
            for part in range(self.accumulation):
                x, wanted = example(number * self.accumulation + part)
                loss = nn.functional.mse_loss(self.model(x), wanted) / self.accumulation
                self.adapter.loss(loss, share=1.0 / self.accumulation).backward()
            if not self.release:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if number % 3 == 1:
                self.adapter.truncate(self.optimizer)
            self.seen.append((self.adapter.step, self.adapter.ranks()))

    def state(self) -> Any:
        parts = {"model": self.model, "adapter": self.adapter, "optimizer": self.optimizer}
        state = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        return {**state, "adapter": json.loads(json.dumps(state["adapter"]))}

    def load(self, state: Any) -> None:
        self.adapter.load_state_dict(state["adapter"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def check_exact(make: Callable[[nn.Module], torch.optim.Optimizer], **options: Any) -> None:
    straight = Loop(make, **options)
    states = []
    for step in range(12):
        states.append(straight.state())
        straight.run(range(step, step + 1))
    assert straight.adapter.size() == pytest.approx(straight.adapter.target, rel=0.05)
    for step in (1, 4, 6, 8):
        resumed = Loop(make, **options)
        resumed.load(states[step])
        resumed.run(range(step, 12))
        assert resumed.seen == straight.seen[step:], step
        for (name, one), other in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(one, other), (step, name)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_adapter_resumes_exactly_with_every_optimizer(name: str, accumulation: int) -> None:
    check_exact(OPTIMIZERS[name], accumulation=accumulation)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_adapter_resumes_exactly_with_every_schedule(schedule: str) -> None:
    options = {"early_steps": 4, "gamma": 1.0, "hold": True} if schedule == "paper" else {}
    check_exact(by_name("sign"), schedule=schedule, **options)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_adapter_saves_uncounted_released_step(accumulation: int) -> None:
    check_exact(by_name("came"), accumulation=accumulation, release=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_adapter_keeps_no_gradient_for_next_step(name: str) -> None:
    loop = Loop(OPTIMIZERS[name])
    importance = loop.adapter._schedule.importance
    assert importance is not None
    for number in range(5):
        loop.run(range(number, number + 1))
        assert loop.adapter.step == number + 1
        assert importance.pending_values() == {}
        assert loop.adapter.state_dict()["uncounted"] is None


@pytest.mark.parametrize("name", ["adamw", "combined", "rank gates first", "per_group_optimizer", "wrapped", "super"])
def test_importance_uses_gradients_of_its_step(name: str) -> None:
    loop = Loop(OPTIMIZERS[name], steps=1000, begin=900, memory=0.75)
    _, rank_gates = split(loop.model)
    expected: Tensor | float = 0.0
    for number in range(3):
        x, wanted = example(number)
        loop.adapter.loss(nn.functional.mse_loss(loop.model(x), wanted)).backward()
        gradients = torch.cat([gate.grad for gate in rank_gates if gate.grad is not None])
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        expected = 0.75 * expected + 0.25 * gradients.square()
    importance = loop.adapter._schedule.importance
    assert importance is not None
    values = loop.adapter._budget.gate_values()
    torch.testing.assert_close(importance.scores(values), expected * values.square())


def step_in_backward(model: nn.Module) -> dict[Tensor, torch.optim.Optimizer]:
    """Give each parameter an optimizer that steps it within the backward pass."""
    optimizers: dict[Tensor, torch.optim.Optimizer] = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    return optimizers


@pytest.mark.parametrize("unused", [False, True])
def test_adapter_resumes_exactly_with_optimizers_in_backward(unused: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With an unused layer, the step is counted at the next check; the state is saved before that."""

    def make() -> tuple[nn.Module, nn.Module, RankAdapter, dict[Tensor, torch.optim.Optimizer]]:
        model = two_ways(share=0.3)
        used = model.needed if unused else model
        adapter = RankAdapter(model, size_target=0.5, steps=8, interval=1)
        return model, used, adapter, step_in_backward(model)

    def run(used: nn.Module, adapter: RankAdapter, steps: range) -> None:
        for number in steps:
            x, wanted = example(number)
            adapter.loss(nn.functional.mse_loss(used(x), wanted)).backward()

    straight, used, adapter, optimizers = make()
    with caplog.at_level(logging.WARNING):
        run(used, adapter, range(4))
    assert "no rank will change" not in caplog.text
    assert (adapter.state_dict()["uncounted"] is not None) == unused
    saved = [copy.deepcopy(each.state_dict()) for each in (straight, adapter, *optimizers.values())]
    run(used, adapter, range(4, 10))
    resumed, again, its, others = make()
    its.load_state_dict(json.loads(json.dumps(saved[1])))
    for part, state in zip((resumed, *others.values()), (saved[0], *saved[2:]), strict=True):
        part.load_state_dict(state)
    run(again, its, range(4, 10))
    assert its.ranks() == adapter.ranks()
    assert its.step == adapter.step
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fused", [False, True])
def test_adapter_ignores_step_skipped_by_grad_scaler(fused: bool) -> None:
    found = []
    for scale in (1.0, 1024.0):
        loop = Loop(by_name("adamw", fused=fused), steps=1000, begin=900)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for number in range(4):
            x, wanted = example(number)
            loss = loop.adapter.loss(nn.functional.mse_loss(loop.model(x), wanted))
            scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
        assert loop.adapter.step == 3
        importance = loop.adapter._schedule.importance
        assert importance is not None
        found.append(importance.scores(loop.adapter._budget.gate_values()))
    torch.testing.assert_close(found[0], found[1])


def test_adapter_saves_losses_of_skipped_steps() -> None:
    """The paper's schedule uses the mean loss of all passes since the last step, including passes without a step."""
    loop = Loop(by_name("adamw"), schedule="paper", early_steps=4, gamma=1.0)
    loop.run(range(2))
    loop.adapter.loss(torch.tensor(3.0))
    state = json.loads(json.dumps(loop.adapter.state_dict()))
    other = Loop(by_name("adamw"), schedule="paper", early_steps=4, gamma=1.0)
    other.load(loop.state())
    assert state == json.loads(json.dumps(other.adapter.state_dict()))
    for each in (loop, other):
        each.run(range(2, 6))
    assert loop.adapter.state_dict() == other.adapter.state_dict()


def test_resumed_run_records_only_changed_ranks() -> None:
    """Ranks pruned before the checkpoint but not yet removed are visible only through the model's gates."""

    def make() -> tuple[nn.Module, TensorTraining]:
        model, method = two_ways(share=0.3), TensorTraining(section, steps=12)
        method.attach(model)
        return model, method

    section = TensorSection(size_target=0.4, adapt=9, truncate_every=100, adapter={"interval": 1})
    model, method = make()
    optimizer = by_name("sign")(model)
    changes = 0
    for step in range(1, 9):
        method.begin_step()
        x, wanted = example(step)
        method.add_penalty(nn.functional.mse_loss(model(x), wanted), 1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.end_step(step, optimizer, NoExchange())
        changes += "ranks" in method.metrics()
        again, resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(method.state_dict())))
        again.load_state_dict(copy.deepcopy(model.state_dict()))
        resumed.begin_step()
        assert "ranks" not in resumed.metrics(), step
    assert changes > 3
