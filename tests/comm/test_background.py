"""Tests of exchanges that overlap with training: delayed by one call, and during the backward pass."""

from __future__ import annotations

import copy
import functools
import gc
import io
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from scantling.comm.exchange import MomentumExchange
from scantling.errors import NonFiniteError, UserError
from tests.comm.replicas import ThreadGroup, together
from tests.comm.test_exchange import gradient, make_exchange, make_params

STEPS = 5


def stepped(made: MomentumExchange, params: list[nn.Parameter], rank: int, steps: range) -> list[list[Tensor] | None]:
    """Return the results of calls with gradients that depend only on rank and step."""
    found = []
    for step in steps:
        for param in params:
            param.grad = gradient(rank, step, param.shape)
        found.append([param.grad for param in params] if made.exchange() else None)
    return found


@pytest.mark.parametrize("strategy", ["all_gather", "owner"])
@pytest.mark.parametrize("size", [1, 3])
def test_delay_returns_previous_result(size: int, strategy: str) -> None:
    def work(replicas: ThreadGroup) -> tuple[list[Any], list[Any]]:
        plain, late = make_params(), make_params()
        first = make_exchange(replicas, plain, exchange=strategy, check_every=2)
        second = make_exchange(replicas, late, exchange=strategy, check_every=2, delay=1)
        return (
            stepped(first, plain, replicas.rank, range(STEPS)),
            stepped(second, late, replicas.rank, range(STEPS)),
        )

    for plain, late in together(size, work):
        assert late[0] is None
        for one, other in zip(plain[:-1], late[1:], strict=True):
            assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("saves", [False, True])
def test_delay_loses_only_the_nonfinite_step(saves: bool) -> None:
    """With a delay, the overflow is reported one call later, when the next gradients have already been sent."""

    def work(replicas: ThreadGroup) -> list[Any]:
        params = make_params()
        made = make_exchange(replicas, params, delay=1)
        found: list[Any] = []
        for step in range(4):
            for param in params:
                param.grad = (
                    torch.full_like(param, torch.inf) if step == 1 else gradient(replicas.rank, step, param.shape)
                )
            if saves:
                made.flush()
            try:
                found.append(made.exchange())
            except NonFiniteError:
                found.append("overflow")
        assert made.step == 4
        return found

    assert together(2, work)[0] == [False, True, "overflow", True]


def test_demo_clears_local_gradients() -> None:
    param = nn.Parameter(torch.ones(8))
    optimizer = sc.DeMo([param], lr=1e-2, sync_every=2)
    for step in range(2):
        param.grad = torch.ones(8)
        optimizer.step()
        assert (param.grad is None) == (step == 0)


def test_pending_result_is_saved_and_loaded() -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        made = make_exchange(replicas, params, delay=1)
        stepped(made, params, replicas.rank, range(2))
        file = io.BytesIO()
        torch.save(made.state_dict(), file)
        wanted = stepped(made, params, replicas.rank, range(2, STEPS))
        params = make_params()
        again = make_exchange(replicas, params, delay=1)
        stepped(again, params, replicas.rank, range(7, 8))  # leaves a pending exchange, which loading replaces
        file.seek(0)
        again.load_state_dict(torch.load(file, weights_only=True))
        found = stepped(again, params, replicas.rank, range(2, STEPS))
        for one, other in zip(wanted, found, strict=True):
            assert one is not None
            assert other is not None
            assert all(map(torch.equal, one, other))

    together(2, work)


@pytest.mark.parametrize("sync_every", [1, 2])
def test_pending_result_is_applied_without_delay(sync_every: int) -> None:
    """It is applied with the next call that has a result, also after a call in which all ranks overflow."""

    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        made = make_exchange(replicas, params, delay=1)
        stepped(made, params, replicas.rank, range(2))
        state = copy.deepcopy(made.state_dict())
        pending = state["shared"]["pending"]
        found = []
        for shared in (state["shared"], {**state["shared"], "pending": {}}):
            again = make_exchange(replicas, params, sync_every=sync_every)
            again.load_state_dict({**state, "shared": shared})
            if sync_every == 1:
                for param in params:
                    param.grad = torch.full_like(param, torch.inf)
                with pytest.raises(NonFiniteError):
                    again.exchange()
                again.load_local_state_dict(state["local"])
            found.append(stepped(again, params, replicas.rank, range(2, 3))[0])
            assert not again.state_dict()["shared"]["pending"]
        ours, theirs = found
        assert ours is not None
        assert (theirs is None) == (sync_every == 2)
        wanted = theirs or [torch.zeros_like(param) for param in params]
        for one, other, value in zip(ours, wanted, pending.values(), strict=True):
            assert torch.equal(one, other + value)

    together(2, work)


def test_demo_with_delay_resumes_bitwise() -> None:
    def work(replicas: ThreadGroup) -> None:
        def begin() -> tuple[list[nn.Parameter], sc.DeMo]:
            params = make_params()
            optimizer = sc.DeMo(params, lr=1e-2, topk=8, chunk=16, delay=1, residual="int8")
            optimizer.exchange.replicas = replicas
            return params, optimizer

        def step(params: list[nn.Parameter], optimizer: sc.DeMo, steps: range) -> None:
            for number in steps:
                for param in params:
                    param.grad = gradient(replicas.rank, number, param.shape)
                optimizer.step()

        params, optimizer = begin()
        before = [param.clone() for param in params]
        step(params, optimizer, range(1))
        assert all(map(torch.equal, before, params))
        step(params, optimizer, range(1, 3))
        weights, file = [param.detach().clone() for param in params], io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        local, shared = optimizer.local_state_dict(), copy.deepcopy(optimizer.shared_state_dict())
        step(params, optimizer, range(3, STEPS))
        for parts in (False, True):
            others, second = begin()
            with torch.no_grad():
                for param, value in zip(others, weights, strict=True):
                    param.copy_(value)
            file.seek(0)
            if parts:
                second.load_local_state_dict(local)
                second.load_shared_state_dict(shared)
            else:
                second.load_state_dict(torch.load(file, weights_only=True))
            step(others, second, range(3, STEPS))
            assert all(map(torch.equal, params, others))

    together(2, work)


def test_slice_state_slices_pending_result() -> None:
    params = [nn.Parameter(torch.ones(64, 80))]
    made = MomentumExchange(params, delay=1, residual="int8")
    params[0].grad = torch.randn(64, 80)
    made.exchange()
    made.flush()
    index = torch.arange(3, 40)
    wanted = made.state[params[0]]["pending"][index]
    with torch.no_grad():
        params[0].data = params[0].data[index]
    made.slice_state(params[0], 0, index)
    params[0].grad = torch.randn(37, 80)
    assert made.exchange()
    assert torch.equal(params[0].grad, wanted)


@functools.cache
def first_network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 80), nn.Tanh(), nn.Linear(80, 72))
    net.unused = nn.Parameter(torch.ones(70, 70))  # gets no gradient
    return net


def network(rank: int) -> tuple[nn.Module, Tensor]:
    net = copy.deepcopy(first_network())
    return net, torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("sync_every", [1, 2])
def test_overlap_equals_exchange_after_backward(delay: int, sync_every: int) -> None:
    first_network()

    def results(
        replicas: ThreadGroup, *, overlap: bool
    ) -> tuple[list[list[Tensor] | None], MomentumExchange, int, int]:
        net, x = network(replicas.rank)
        made = MomentumExchange(
            sc.param_groups(net), topk=8, chunk=16, overlap=overlap, bucket_mb=0.02, delay=delay, sync_every=sync_every
        )
        made.replicas = replicas
        found: list[list[Tensor] | None] = []
        early = sent = 0
        for _ in range(4):
            net.zero_grad()
            net(x).square().mean().backward()  # a micro-batch before the last one
            with made.overlapped():
                net(x[:8]).square().mean().backward()
                early = made._open_step.next_bucket if made._open_step is not None else 0
            done = made.exchange()
            sent = max(sent, made.wire_bytes)
            grads = [param.grad for group in made.param_groups for param in group["params"]]
            found.append(grads if done else None)
        return found, made, early, sent

    def work(replicas: ThreadGroup) -> None:
        plain, first, _, _ = results(replicas, overlap=False)
        overlapped, second, early, sent = results(replicas, overlap=True)
        assert early == 3  # all but the bucket with the unused parameter
        assert sent == second.planned_wire_bytes() > first.planned_wire_bytes() > 0
        for one, other in zip(plain, overlapped, strict=True):
            assert (one is None) == (other is None)
            for a, b in zip(one or [], other or [], strict=True):
                torch.testing.assert_close(a, b)

    together(2, work)


@pytest.mark.parametrize("alike", [False, True])
def test_overlap_warns_about_same_data(alike: bool, caplog: pytest.LogCaptureFixture) -> None:
    first_network()

    def work(replicas: ThreadGroup) -> None:
        net, x = network(0 if alike else replicas.rank)
        made = MomentumExchange(sc.param_groups(net), overlap=True, bucket_mb=0.02)
        made.replicas = replicas
        for _ in range(2):
            with made.overlapped():
                net(x).square().mean().backward()
            assert made.exchange()
            net.zero_grad()

    together(2, work)
    assert caplog.text.count("the gradients of all 2 replicas are the same") == alike


def test_overlap_refuses_second_gradient() -> None:
    net, x = network(0)
    made = MomentumExchange(sc.param_groups(net), overlap=True, bucket_mb=0.02)
    with made.overlapped():
        net(x).square().mean().backward()
        loss = net(x).square().mean()
        with pytest.raises(UserError, match=r"4\.bias got a second gradient after its first was sent"):
            loss.backward()


@pytest.mark.parametrize("delay", [0, 1])
def test_one_process_continues_after_backward_error(delay: int) -> None:
    net, x = network(0)
    made = MomentumExchange(sc.param_groups(net), overlap=True, bucket_mb=0.02, delay=delay)
    done = []
    for step in range(4):
        net.zero_grad()
        try:
            with made.overlapped():
                (net(x).square().mean() * (torch.nan if step == 2 else 1.0)).backward()
                if step == 2:
                    raise NonFiniteError("of the loop, where the exchange raises none before it is asked")
            done.append(made.exchange())
        except NonFiniteError:
            assert step == 2
    assert done == [not delay, True, True]
    assert all(bool(torch.isfinite(param.grad).all()) for param in net.parameters())


@pytest.mark.parametrize("left", [False, True])
def test_backward_error_on_one_replica_hangs_none(left: bool) -> None:
    first_network()

    def work(replicas: ThreadGroup) -> list[Tensor]:
        net, x = network(replicas.rank)
        made = MomentumExchange(sc.param_groups(net), topk=8, chunk=16, overlap=True, bucket_mb=0.02)
        made.replicas = replicas

        def backward(fails: bool) -> None:
            net.zero_grad()
            with made.overlapped():
                (net[4].bias.sum() if fails and not left else net(x).square().mean()).backward()
                if fails:
                    raise MemoryError

        for step in range(3):
            if step == 1 and replicas.rank == 1:
                with pytest.raises(MemoryError) as caught:
                    backward(fails=True)
                assert bool(getattr(caught.value, "__notes__", [])) == left
            if not (step == 1 and replicas.rank == 1 and left):
                backward(fails=False)
            assert made.exchange()
        return [param.grad for param in net.parameters()]

    one, other = together(2, work)
    assert all(map(torch.equal, one, other))


def test_nonfinite_bucket_skips_only_that_bucket() -> None:
    def work(replicas: ThreadGroup) -> tuple[list[int], list[Tensor]]:
        net, x = network(replicas.rank)
        made = MomentumExchange(
            sc.param_groups(net), topk=4096, values="fp32", dense="fp32", overlap=True, bucket_mb=0.02
        )
        made.replicas = replicas
        net(x).square().mean().backward()
        if replicas.rank == 1:
            net[0].weight.grad[3, 4] = torch.nan
        made.exchange()
        return made.nonfinite_ranks, [net[0].weight.grad, net[4].weight.grad]

    wanted = []
    for rank in range(2):
        net, x = network(rank)
        net(x).square().mean().backward()
        wanted.append([net[0].weight.grad, net[4].weight.grad])
    for left_out, (first, last) in together(2, work):
        assert left_out == [1]
        torch.testing.assert_close(first, wanted[0][0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(last, (wanted[0][1] + wanted[1][1]) / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"sync_every": 2}, {"overlap": True}], ids=str)
def test_local_nonfinite_is_known_at_once(options: dict[str, Any]) -> None:
    """The result is available at once, not at the next exchange or when this exchange's result arrives."""

    def work(replicas: ThreadGroup) -> list[bool]:
        params, found = make_params(), []
        made = make_exchange(replicas, params, **options)
        for step in range(4):
            for param in params:
                param.grad = gradient(replicas.rank, step, param.shape)
            if replicas.rank == 1 and step == 2:
                params[3].grad[0] = torch.nan
            made.exchange()
            found.append(made.local_nonfinite)
        return found

    assert together(2, work) == [[False] * 4, [False, False, True, False]]


def test_error_in_flight_is_raised_by_next_step() -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        made = make_exchange(replicas, params, delay=1)
        for param in params:
            param.grad = torch.full_like(param, torch.nan)
        made.exchange()
        with pytest.raises(NonFiniteError, match="step 1: the gradients of all 2 processes"):
            made.exchange()

    together(2, work)


@pytest.mark.parametrize(("takes_s", "waits_s"), [(1.0, 10.0), (1000.0, 0.5)])
def test_exit_waits_for_thread_with_timeout(takes_s: float, waits_s: float) -> None:
    script = f"""
import time, torch
from scantling.comm.transport import background

background.WAIT_S = {waits_s}
tasks = background.Background()
tasks.submit(lambda: time.sleep({takes_s}), torch.device("cpu"))
tasks.submit(lambda: print("done", flush=True), torch.device("cpu"))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert (found.stdout == "done\n") == (takes_s < waits_s)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"delay": 2}, "delay must be an integer from 0 to 1; given 2"),
        ({"bucket_mb": 0}, "bucket_mb must be above 0; given 0"),
        ({"residual": "int4"}, "residual must be one of fp32, int8; given 'int4'"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        MomentumExchange([nn.Parameter(torch.ones(4, 4))], **options)
    assert text in str(error.value)


def test_thread_ends_with_its_exchange() -> None:
    before = set(threading.enumerate())

    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        for _ in range(3):
            made = make_exchange(replicas, params, delay=1)
            stepped(made, params, replicas.rank, range(2))
            made.flush()

    together(2, work)
    gc.collect()
    deadline = time.monotonic() + 10.0
    while left := [thread for thread in set(threading.enumerate()) - before if thread.name == "scantling-exchange"]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
