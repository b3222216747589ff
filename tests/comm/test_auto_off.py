"""Tests of `auto_off`, which switches to a dense exchange on fast links: update, measurement, and saved decision."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import scantling as sc
from scantling.comm import auto_off, diloco, load_rank_tensors, momentum, rank_tensors
from scantling.comm.auto_off import WARM_UP, Trial
from scantling.comm.momentum import MomentumExchange
from scantling.comm.transport.group import ReplicaGroup
from scantling.errors import NonFiniteError, UserError
from tests.comm.replicas import ThreadGroup, together
from tests.processes import run

FASTER = Trial(selected_s=2e-3, whole_s=1e-3, sent=100, numbers=100)
SLOWER = Trial(selected_s=1e-3, whole_s=2e-3, sent=10, numbers=100)


def params_of() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((70, 130), (300,), (3, 40, 50))]


def exchange_of(replicas: ReplicaGroup, params: list[nn.Parameter], **options: Any) -> MomentumExchange:
    made = MomentumExchange(params, **{"topk": 8, "chunk": 16, "decay": 0.9, **options})
    made.replicas = replicas
    return made


def give(params: list[nn.Parameter], rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def decide(monkeypatch: pytest.MonkeyPatch, trial: Trial) -> None:
    monkeypatch.setattr(momentum, "measured", lambda *_: trial)


@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"residual": "int8"}, {"overlap": True}])
def test_everything_travels(options: dict[str, Any]) -> None:
    """M <- decay M + mean g, and (1 - decay) M goes into the update; vectors get the mean."""
    size, steps = 3, 6

    def work(replicas: ThreadGroup) -> list[list[Tensor]]:
        params = params_of()
        made = exchange_of(replicas, params, exchange="whole", dense="fp32", **options)
        found = []
        for step in range(steps):
            give(params, replicas.rank, step)
            if made.exchange():
                found.append([param.grad.clone() for param in params])
                assert made.wire_bytes == made.planned_wire_bytes()
        assert sum(value.nbytes for state in made.state.values() for value in state.values()) >= (
            made.planned_state_bytes()
        )
        return found

    all_of_them = together(size, work)
    given = params_of()
    expected = [torch.zeros_like(param) for param in given]
    for step, found in enumerate(all_of_them[0]):
        grads = []
        for rank in range(size):
            give(given, rank, step)
            grads.append([param.grad.clone() for param in given])
        for place, param in enumerate(given):
            mean = torch.stack([each[place] for each in grads]).mean(0)
            decay = 0.0 if param.ndim == 1 else 0.9
            expected[place].mul_(decay).add_(mean, alpha=1.0 - decay)
            # int8 steps are a row's largest element / 127
            tolerance = 0.05 if options.get("residual") == "int8" else 1e-5
            torch.testing.assert_close(found[place], expected[place], rtol=0.0, atol=tolerance)
            assert all(torch.equal(found[place], other[step][place]) for other in all_of_them[1:])
    assert len(all_of_them[0]) == steps - options.get("delay", 0)


def test_a_replica_with_nan_is_left_out_and_all_of_them_stop() -> None:
    def work(replicas: ThreadGroup) -> Tensor:
        params = params_of()
        made = exchange_of(replicas, params, exchange="whole", dense="fp32", decay=0.0)
        give(params, replicas.rank, 0)
        if replicas.rank == 1:
            params[0].grad[3, 4] = torch.nan
        made.exchange()
        assert made.left_out == [1]
        found = params[0].grad
        params[2].grad = torch.full_like(params[2], torch.inf)
        with pytest.raises(NonFiniteError, match="all 3 processes"):
            made.exchange()
        return found

    found, params = together(3, work), params_of()
    grads = []
    for rank in (0, 2):
        give(params, rank, 0)
        grads.append(params[0].grad.clone())
    torch.testing.assert_close(found[1], torch.stack(grads).mean(0))
    assert torch.equal(found[0], found[1])


def test_what_replicas_had_for_themselves_goes_into_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero gradients after the switch to dense, all residuals left at the switch are eventually applied."""
    decide(monkeypatch, FASTER)

    def work(replicas: ThreadGroup) -> tuple[list[Tensor], list[Tensor]]:
        params = params_of()
        made = exchange_of(replicas, params, auto_off=True, dense="sign")
        for step in range(WARM_UP):
            give(params, replicas.rank, step)
            made.exchange()
        assert made.way != "whole"
        left = [made.state[param]["residual"].clone() for param in params]
        applied = [torch.zeros_like(param) for param in params]
        for _ in range(150):
            for param in params:
                param.grad = torch.zeros_like(param)
            made.exchange()
            for sum_of, param in zip(applied, params, strict=True):
                sum_of += param.grad
        assert made.decided == (True, 2)
        assert made.way == "whole"
        return left, applied

    found = together(2, work)
    for place in range(3):
        owed = torch.stack([left[place] for left, _ in found]).mean(0) * (1.0 if place == 1 else 0.9)
        torch.testing.assert_close(found[0][1][place], owed, rtol=1e-4, atol=1e-4)
        assert torch.equal(found[0][1][place], found[1][1][place])


class SlowGroup(ThreadGroup):
    """Replicas of which some collectives are slow."""

    slow: str = ""

    def all_reduce_mean(self, values: Tensor) -> Tensor:
        time.sleep(0.1 if self.slow == "mean" else 0.0)
        return super().all_reduce_mean(values)

    def all_to_all(self, messages: Any) -> list[Tensor]:
        time.sleep(0.5 if self.slow == "all_to_all" else 0.0)
        return super().all_to_all(messages)


@pytest.mark.parametrize("slow", ["mean", "all_to_all"])
def test_what_is_faster_is_done_and_all_decide_alike(slow: str, caplog: pytest.LogCaptureFixture) -> None:
    def work(replicas: ThreadGroup) -> tuple[Any, int, list[Tensor]]:
        replicas = SlowGroup(replicas.room, replicas.rank)
        replicas.slow = slow if replicas.rank == 1 else ""  # slow on rank 1 only
        params = params_of()
        made = exchange_of(replicas, params, auto_off=True, exchange="owner")
        for step in range(WARM_UP + 2):
            give(params, replicas.rank, step)
            made.exchange()
        return made.decided, made.wire_bytes, [param.grad for param in params]

    with caplog.at_level("INFO", logger="scantling"):
        found = together(2, work)
    is_whole = slow == "all_to_all"
    assert [decided for decided, _, _ in found] == [(is_whole, 2)] * 2
    sparse = exchange_of(ReplicaGroup(), params_of(), exchange="owner").planned_wire_bytes(2)
    assert (found[0][1] > 2 * sparse) == is_whole
    assert all(map(torch.equal, found[0][2], found[1][2]))
    told = [record for record in caplog.records if "auto_off" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING" if is_whole else "INFO"]
    assert told[0].getMessage().startswith(f"step {WARM_UP + 1}: auto_off: selecting and exchanging takes ")


def test_a_slow_link_has_shown_itself_before_all_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement of an all-reduce at 2 MB/s stops long before all 40 MB are sent."""
    sent: list[int] = []

    class Narrow(ThreadGroup):
        def all_reduce_mean(self, values: Tensor) -> Tensor:
            sent.append(values.nbytes)
            time.sleep(values.nbytes / 2e6)
            return super().all_reduce_mean(values)

    def work(replicas: ThreadGroup) -> Any:
        params = [nn.Parameter(torch.zeros(5000, 4000))]
        made = exchange_of(Narrow(replicas.room, replicas.rank), params, auto_off=True, topk=1, chunk=64)
        made._calls, made.step = WARM_UP, WARM_UP
        give(params, 0, 0)
        made.exchange()
        return made.decided

    assert together(2, work) == [(False, 2)] * 2
    assert sum(sent) / 2 < 40e6 / 2


def test_among_other_replicas_it_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def answer(replicas: ReplicaGroup, *_: Any) -> Trial:
        asked.append(replicas.rank)
        return SLOWER

    monkeypatch.setattr(momentum, "measured", answer)

    def work(replicas: ThreadGroup) -> None:
        params = params_of()
        for saved, calls in (((True, 3), 1), ([True, 2], 0), ([False, 2], 0), (None, 1)):
            made = exchange_of(replicas, params, auto_off=True)
            made.load_shared_state_dict({"step": 7, "decided": saved})
            assert (made.way == "whole") == (saved == [True, 2])
            before = asked.count(replicas.rank)
            for step in range(WARM_UP + 2):
                give(params, replicas.rank, step)
                made.exchange()
            assert asked.count(replicas.rank) - before == calls
            assert made.shared_state_dict()["decided"] == ((False, 2) if calls else saved)

    together(2, work)


def test_alone_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_off, "measured", None)
    params = params_of()
    made = MomentumExchange(params, auto_off=True)
    for step in range(WARM_UP + 2):
        give(params, 0, step)
        made.exchange()
    assert made.decided is None
    assert made.wire_bytes == 0


def test_bad_options() -> None:
    for options in ({"auto_off": True}, {"exchange": "whole"}):
        with pytest.raises(UserError, match="is for an exchange at every call: sync_every must be 1; given 4"):
            MomentumExchange(params_of(), sync_every=4, **options)
        with pytest.raises(UserError, match="compat='paper'"):
            sc.DeMo(params_of(), lr=1e-3, compat="paper", **options)
    inner = torch.optim.SGD(params := params_of(), lr=1e-3)
    with pytest.raises(UserError, match="not for local steps"):
        diloco(inner, params, auto_off=True)


def stepped(net: nn.Module, optimizer: sc.DeMo, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 70, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))
        optimizer.zero_grad()
        (net(x) - x[:, :33]).square().mean().backward()
        optimizer.step()


def net_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 130), nn.Tanh(), nn.Linear(130, 33), nn.LayerNorm(33))


def measured_and_resumed() -> None:
    """The decision is the same on both replicas, is saved with the state, and is not measured again."""
    for trial in (None, FASTER, SLOWER):
        asked = []

        def answer(*args: Any, told: Trial | None = trial, times: list[Any] = asked) -> Trial:
            times.append(args)
            return auto_off.measured(*args) if told is None else told

        momentum.measured = answer
        net = net_of()
        optimizer = sc.DeMo(sc.param_groups(net), lr=1e-3, topk=4, auto_off=True, check_every=1)
        stepped(net, optimizer, range(WARM_UP + 2))
        decided = optimizer.exchange.decided
        assert len(asked) == 1
        assert trial is None or decided == (trial.is_whole, 2)
        everywhere = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(everywhere, torch.tensor(decided))
        assert torch.equal(*everywhere)
        assert optimizer.wire_bytes > optimizer.exchange.planned_wire_bytes() > 0  # includes the comparison of replicas

        others = [copy.deepcopy(net) for _ in range(3)]
        saved, tensors = copy.deepcopy(optimizer.state_dict()), rank_tensors(optimizer)
        local_state, shared = optimizer.local_state_dict(), copy.deepcopy(optimizer.shared_state_dict())
        stepped(net, optimizer, range(WARM_UP + 2, WARM_UP + 5))
        for number, other in enumerate(others):
            again = sc.DeMo(sc.param_groups(other), lr=1e-3, topk=4, auto_off=True, check_every=1)
            if number == 0:
                again.load_state_dict(saved)
            elif number == 1:
                again.load_shared_state_dict(shared)
                again.load_local_state_dict(local_state)
            else:
                load_rank_tensors(again, tensors)
            stepped(other, again, range(WARM_UP + 2, WARM_UP + 5))
            assert again.exchange.decided == decided
            assert len(asked) == 1
            for one, two in zip(net.parameters(), other.parameters(), strict=True):
                assert torch.equal(one, two)


@pytest.mark.dist
def test_two_processes_decide_alike_and_go_on_after_a_restart() -> None:
    run(2, measured_and_resumed)
