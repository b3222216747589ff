"""Tests of DiLoCo and SparseLoCo, which take local steps between exchanges."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from scantling.comm import LocalSteps, diloco, local_steps, sparseloco
from scantling.comm.local_exchange import LocalStepsExchange
from scantling.comm.local_steps import OuterOptimizer
from scantling.comm.param_groups import split_by_numel
from scantling.errors import NonFiniteError, UserError
from scantling.trainer.recipe.schema import CommSection
from tests.comm.replicas import ThreadGroup, together

torch.manual_seed(0)
START = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
TARGET = nn.Linear(64, 64).requires_grad_(False)


def make_optimizer(net: nn.Module, kind: str, replicas: ThreadGroup, **options: Any) -> LocalSteps:
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    make = diloco if kind == "diloco" else sparseloco
    return make(inner, sc.param_groups(net), process_group=replicas, **options)


def common(net: nn.Module, optimizer: LocalSteps) -> list[Tensor]:
    """Return copies of the common parameters."""
    with optimizer.common_parameters():
        return [param.detach().clone() for param in net.parameters()]


def train(net: nn.Module, optimizer: LocalSteps, rank: int, steps: range) -> list[float]:
    losses, dtype = [], next(net.parameters()).dtype
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * rank + step))
        loss = (net(x.to(dtype)) - TARGET(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("shares", [None, [3, 1]])
def test_local_steps_with_outer_lr_one_average_replicas(shares: list[int] | None) -> None:
    options: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "batch_shares": shares}

    def work(replicas: ThreadGroup) -> list[Tensor]:
        net = copy.deepcopy(START)
        train(
            net,
            make_optimizer(net, "diloco", replicas, sync_every=3, **options),
            replicas.rank,
            range(3),
        )
        return [param.detach() for param in net.parameters()]

    found = together(2, work)
    alone = []
    for rank in range(2):
        net = copy.deepcopy(START)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * rank + step))
            inner.zero_grad()
            (net(x) - TARGET(x)).square().mean().backward()
            inner.step()
        alone.append([param.detach() for param in net.parameters()])
    for place, (one, other) in enumerate(zip(*alone, strict=True)):
        share = 0.5 if shares is None else 0.75
        torch.testing.assert_close(found[0][place], share * one + (1 - share) * other, rtol=1e-5, atol=1e-6)
        assert torch.equal(found[0][place], found[1][place])


@pytest.mark.parametrize("kind", ["diloco", "sparseloco"])
def test_local_steps_lower_loss_and_send_periodically(kind: str) -> None:
    def work(replicas: ThreadGroup) -> tuple[list[float], list[int]]:
        net = copy.deepcopy(START)
        optimizer = make_optimizer(
            net, kind, replicas, sync_every=4, **({"topk": 1024} if kind == "sparseloco" else {})
        )
        losses, sent = [], []
        for step in range(60):
            losses += train(net, optimizer, replicas.rank, range(step, step + 1))
            sent.append(optimizer.wire_bytes)
        return losses, sent

    losses, sent = together(2, work)[0]
    assert losses[-1] < 0.85 * losses[0]  # SGD alone reaches 0.80
    assert [number > 0 for number in sent] == [step % 4 == 3 for step in range(60)]


@pytest.mark.parametrize("kind", ["diloco", "sparseloco"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_of_parameters_change_no_bit(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(replicas: ThreadGroup) -> list[Tensor]:
        net = copy.deepcopy(START).to(dtype)
        optimizer = make_optimizer(net, kind, replicas, sync_every=3, batch_shares=[3, 1])
        net[2].bias.requires_grad_(False)
        train(net, optimizer, replicas.rank, range(8))
        return [*net.parameters(), *optimizer.anchors]

    whole = together(2, work)
    monkeypatch.setattr(local_steps, "_BUCKET_NUMEL", 6200)
    assert split_by_numel([6144, 96, 6144, 64], 6200) == [[0], [1], [2], [3]]
    assert split_by_numel([6144, 50, 6, 64], 6200) == [[0, 1, 2], [3]]
    for expected, found in zip(whole, together(2, work), strict=True):
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize(("shares", "outer_lr"), [([1, 1], 1.0), ([3, 1], 1.0), ([1, 1, 1, 1], 1.3)])
def test_unsent_moves_stay_in_the_weights_of_their_replica(shares: list[int], outer_lr: float) -> None:
    """An exchange keeps the parameters that all moves lead to; a replica begins with its part of the unsent ones."""

    def work(replicas: ThreadGroup) -> None:
        net = copy.deepcopy(START)
        options: dict[str, Any] = {"values": "fp32", "dense": "fp32", "decay": 1.0, "topk": 256, "batch_shares": shares}
        made = make_optimizer(net, "sparseloco", replicas, sync_every=100, outer_lr=outer_lr, **options)
        for start in (0, 3):  # in the second round there is a residual from the first
            train(net, made, replicas.rank, range(start, start + 3))
            reached = end_of_all_moves(made)
            made.synchronize()
            torch.testing.assert_close(end_of_all_moves(made), reached)
            shared = [param.detach().clone() for param in made.exchange.residuals.params]
            made.begin_round()
            begun = [param.detach().clone() for param in made.exchange.residuals.params]
            # all replicas together: their parts of the unsent moves are all of them
            parts = [replicas.all_reduce_mean(own - p) * len(shares) for own, p in zip(begun, shared, strict=True)]
            assert not all(map(torch.equal, begun, shared))
            torch.testing.assert_close([p + part for p, part in zip(shared, parts, strict=True)], reached)
            made.begin_round()
            assert all(map(torch.equal, begun, made.exchange.residuals.params))

    together(len(shares), work)


@pytest.mark.parametrize(
    "case", ["straight", "synchronized by hand", "saved in the context", "saved between exchanges"]
)
def test_no_move_is_lost(case: str) -> None:
    """One replica: common parameters and residual together have all moves of the inner optimizer."""
    options: dict[str, Any] = {"sync_every": 3, "outer_lr": 1.0, "topk": 256, "values": "fp32", "dense": "fp32"}

    def make(net: nn.Module) -> LocalSteps:
        return sparseloco(torch.optim.SGD(net.parameters(), lr=0.1), sc.param_groups(net), **options)

    alone, net = copy.deepcopy(START), copy.deepcopy(START)
    inner = torch.optim.SGD(alone.parameters(), lr=0.1)
    made = make(net)
    for step in range(8):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        inner.zero_grad()
        (alone(x) - TARGET(x)).square().mean().backward()
        inner.step()
        train(net, made, 0, range(step, step + 1))
        if case == "synchronized by hand" and step == 3:
            made.synchronize()
            made.begin_round()
        if case.startswith("saved") and step == (5 if "context" in case else 4):
            with made.common_parameters():
                saved = copy.deepcopy((net.state_dict(), made.state_dict()))
            net = copy.deepcopy(START)
            made = make(net)
            net.load_state_dict(saved[0])
            made.load_state_dict(saved[1])
    for one, other in zip(alone.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_step_from_the_common_parameters_keeps_the_residual() -> None:
    net = copy.deepcopy(START)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    made = sparseloco(inner, sc.param_groups(net), sync_every=100, outer_lr=1.0, topk=64, values="fp32", dense="fp32")
    train(net, made, 0, range(3))
    reached = [param.detach().clone() for param in net.parameters()]
    made.synchronize()
    move = 0.01
    with torch.no_grad():
        for param in net.parameters():
            param += move
    made.advance()
    for param, value in zip(net.parameters(), reached, strict=True):
        torch.testing.assert_close(param.detach(), value + move, rtol=1e-4, atol=1e-5)


def test_momentum_of_a_dense_exchange_stays_out_of_the_weights() -> None:
    net = copy.deepcopy(START)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    made = sparseloco(inner, sc.param_groups(net), sync_every=2, exchange="dense", decay=0.95)
    train(net, made, 0, range(4))
    assert made.is_synchronized
    assert all(map(torch.equal, common(net, made), net.parameters()))


def test_failed_exchange_leaves_the_common_parameters() -> None:
    def work(replicas: ThreadGroup) -> None:
        net = copy.deepcopy(START)
        made = make_optimizer(net, "sparseloco", replicas, sync_every=2)
        train(net, made, replicas.rank, range(3))
        before = common(net, made)
        with torch.no_grad():
            net[0].weight += float("nan")
        with pytest.raises(NonFiniteError):
            made.synchronize()
        assert made.is_synchronized
        assert all(map(torch.equal, before, net.parameters()))
        assert all(param.grad is None for param in net.parameters())

    together(2, work)


def test_published_rounds_begin_with_the_common_weights() -> None:
    net = copy.deepcopy(START)
    made = sparseloco(torch.optim.SGD(net.parameters(), lr=0.1), sc.param_groups(net), sync_every=2, keep_unsent=False)
    train(net, made, 0, range(2))
    assert made.is_synchronized
    shared = common(net, made)
    made.begin_round()
    assert made.is_synchronized
    assert all(map(torch.equal, shared, net.parameters()))


@pytest.mark.parametrize("kind", ["diloco", "sparseloco"])
def test_saved_state_resumes_bitwise(kind: str) -> None:
    def work(replicas: ThreadGroup) -> None:
        straight, parted = copy.deepcopy(START), copy.deepcopy(START)
        train(straight, make_optimizer(straight, kind, replicas, sync_every=3), replicas.rank, range(8))
        first = make_optimizer(parted, kind, replicas, sync_every=3)
        train(parted, first, replicas.rank, range(5))
        second = make_optimizer(parted, kind, replicas, sync_every=3)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        train(parted, second, replicas.rank, range(5, 8))
        assert all(map(torch.equal, straight.parameters(), parted.parameters()))

    together(2, work)


@pytest.mark.parametrize("after", ["exchange", "local step"])
def test_other_shares_keep_the_weights_of_a_replica(after: str) -> None:
    """Moves since the last exchange then count by the new shares."""

    def work(replicas: ThreadGroup) -> None:
        net = copy.deepcopy(START)
        options: dict[str, Any] = {"values": "fp32", "dense": "fp32", "topk": 256, "sync_every": 3}
        first = make_optimizer(net, "sparseloco", replicas, batch_shares=[1, 1], **options)
        train(net, first, replicas.rank, range(5))
        if after == "exchange":
            first.synchronize()
        state = copy.deepcopy(first.state_dict())
        second = make_optimizer(net, "sparseloco", replicas, batch_shares=[3, 1], **options)
        first.begin_round()
        own = [param.detach().clone() for param in net.parameters()]
        second.load_state_dict(state)
        torch.testing.assert_close([*net.parameters()], own)
        reached = end_of_all_moves(second)
        second.synchronize()
        second.begin_round()
        torch.testing.assert_close(end_of_all_moves(second), reached)

    together(2, work)


@pytest.mark.parametrize("processes", [1, 3])
def test_other_number_of_replicas_continues_from_the_mean_by_shares(processes: int) -> None:
    """The parameters that all moves lead to, by the shares of the replicas, stay the same."""
    outer = {"sync_every": 4, "outer_lr": 1.3}
    options: dict[str, Any] = {"values": "fp32", "dense": "fp32", "topk": 256}

    def make(replicas: ThreadGroup, shares: list[int]) -> tuple[nn.Module, LocalStepsExchange]:
        net = copy.deepcopy(START)
        exchange = LocalStepsExchange(
            "sparseloco", process_group=replicas, outer={**outer, "batch_shares": shares}, options=options
        )
        return exchange.prepare(net), exchange

    def save(replicas: ThreadGroup) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
        net, exchange = make(replicas, [3, 1])
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(6):
            exchange.begin_step()
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * replicas.rank + step))
            inner.zero_grad()
            (net(x) - TARGET(x)).square().mean().backward()
            exchange.exchange()
            inner.step()
            exchange.finish_step(last=False)
        with exchange.common_weights():
            common = [param.detach().clone() for param in net.parameters()]
        return end_of_all_moves(exchange.outer), common, exchange.state_dict()

    (reached, common, one), (_, _, other) = together(2, save)

    def load(replicas: ThreadGroup) -> None:
        shares = [2, 1, 1][:processes]
        net, exchange = make(replicas, shares)
        with torch.no_grad():
            for param, value in zip(net.parameters(), common, strict=True):
                param.copy_(value)
        exchange.adopt_weights()
        exchange.load_state_dict(exchange.merge_states([one, other]))
        torch.testing.assert_close(end_of_all_moves(exchange.outer), reached)
        exchange.outer.synchronize()
        exchange.begin_step()
        torch.testing.assert_close(end_of_all_moves(exchange.outer), reached)

    together(processes, load)


def end_of_all_moves(outer: OuterOptimizer) -> list[Tensor]:
    """Return the common parameters after all moves of all replicas, sent or not."""
    replicas, residuals = outer.exchange.replicas, outer.exchange.residuals
    found = []
    for param, p0 in zip(residuals.params, outer.anchors, strict=True):
        residual = residuals.read(param)
        begun = p0 - outer.outer_lr * residual / replicas.world_size
        moved = torch.zeros_like(p0) if outer.is_synchronized else (begun - param.detach()) * outer.weight
        found.append(p0 - outer.outer_lr * replicas.all_reduce_mean(residual + moved))
    return found


def test_bad_options() -> None:
    net = copy.deepcopy(START)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UserError, match="sync_every must be an integer of at least 1; given 0"):
        diloco(inner, net.parameters(), sync_every=0)
    with pytest.raises(UserError, match="outer_lr must be above 0"):
        diloco(inner, net.parameters(), outer_lr=0.0)
    for shares in (3, [1, 1], [0]):
        with pytest.raises(UserError, match="batch_shares must be 1 numbers above 0"):
            sparseloco(inner, net.parameters(), batch_shares=shares)
    with pytest.raises(UserError, match="must hold the same parameters"):
        sparseloco(inner, [net[0].weight])
    with pytest.raises(UserError, match="delay=1 is for an exchange in every step, not for local steps"):
        sparseloco(inner, net.parameters(), delay=1)
    with pytest.raises(UserError, match="sync_every=2 is for an exchange"):
        LocalSteps(inner, sc.MomentumExchange(net.parameters(), sync_every=2), sync_every=4, outer_lr=1.0)
    with pytest.raises(UserError, match="diloco exchanges everything, so that topk, values would have no effect"):
        diloco(inner, net.parameters(), topk=8, values="int8")
    exchange = sc.MomentumExchange(net.parameters())
    exchange.replicas.is_static = False
    with pytest.raises(UserError, match="local steps need a fixed set of replicas"):
        LocalSteps(inner, exchange, sync_every=4, outer_lr=1.0)


@pytest.mark.parametrize(("key", "text"), [("outer_lr", "outer_lr 0.5"), ("sync_every", "local steps 2")])
def test_local_steps_name_differing_options(key: str, text: str) -> None:
    def work(replicas: ThreadGroup) -> None:
        net = copy.deepcopy(START)
        given = {"sync_every": 4, "outer_lr": 1.0} | (
            {key: {"outer_lr": 0.5, "sync_every": 2}[key]} if replicas.rank else {}
        )
        train(net, make_optimizer(net, "sparseloco", replicas, **given), replicas.rank, range(4))

    with pytest.raises(UserError, match=f"rank 1 differs from the others in 0.weight: it has {text}"):
        together(2, work)


def test_local_steps_refuse_rank_adapter() -> None:
    layer = sc.TTLinear(64, 64, rank=16, num_modes=2, bias=False)
    adapter = sc.RankAdapter(layer, size_target=0.4, steps=4, interval=1)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    made = sparseloco(inner, sc.param_groups(layer), sync_every=4)
    for step in range(4):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        adapter.loss((layer(x) - x).square().mean()).backward()
        made.step()
        made.zero_grad()
    assert adapter.truncate(inner)
    with pytest.raises(UserError, match="with a RankAdapter each replica would select"):
        made.step()


@pytest.mark.parametrize("kind", ["diloco", "sparseloco"])
def test_local_steps_reset_frozen_parameters(kind: str) -> None:
    """A weight frozen during local steps returns to its last exchanged value and stays, despite outer momentum."""

    def work(replicas: ThreadGroup) -> list[Tensor]:
        net = copy.deepcopy(START)
        made = make_optimizer(net, kind, replicas, sync_every=4)
        train(net, made, replicas.rank, range(4))
        begun = common(net, made)[0]
        train(net, made, replicas.rank, range(4, 6))
        net[0].weight.requires_grad_(False)
        for steps in (range(6, 8), range(8, 12)):
            train(net, made, replicas.rank, steps)
            assert torch.equal(net[0].weight, begun)
        return common(net, made)

    assert all(map(torch.equal, *together(2, work)))


def test_grad_scaler_skips_no_local_step() -> None:
    """An overflow on one replica skips its own step; both replicas still exchange after the same number of steps."""

    def work(replicas: ThreadGroup) -> tuple[int, list[Tensor]]:
        net = copy.deepcopy(START)
        made = make_optimizer(net, "sparseloco", replicas, sync_every=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * replicas.rank + step))
            loss = (net(x) - TARGET(x)).square().mean()
            if replicas.rank == 1 and step == 1:
                loss = loss * float("inf")
            made.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(made)
            scaler.update()
        return made.steps, common(net, made)

    (steps, one), (others, other) = together(2, work)
    assert steps == others == 4
    assert all(map(torch.equal, one, other))


def test_local_step_with_grad_scaler_equals_step() -> None:
    found = []
    for scale in (None, 1024.0):
        net = copy.deepcopy(START)
        made = sparseloco(torch.optim.SGD(net.parameters(), lr=0.1), sc.param_groups(net), sync_every=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
        scaler.scale((net(x) - TARGET(x)).square().mean()).backward()
        scaler.step(made)
        found.append([param.detach() for param in net.parameters()])
    assert all(map(torch.equal, *found))


def test_local_steps_refuse_bad_input() -> None:
    net = copy.deepcopy(START)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    for key, value in (("outer_lr", "a"), ("outer_lr", float("inf")), ("outer_momentum", 1.0), ("sync_every", True)):
        with pytest.raises(UserError, match=f"{key} must be"):
            diloco(inner, net.parameters(), **{key: value})
    with pytest.raises(UserError, match="given the model, Sequential"):
        diloco(inner, net)
    made = diloco(inner, [{"params": param} for param in net.parameters()])
    for state in ({}, inner.state_dict()):
        with pytest.raises(UserError, match="of local steps"):
            made.load_state_dict(state)


@pytest.mark.parametrize("kind", ["diloco", "sparseloco"])
def test_small_outer_steps_move_weights_in_bf16(kind: str) -> None:
    """Each outer step is far below the spacing of bf16 weights; common weights in fp32 add them up."""

    def work(replicas: ThreadGroup) -> list[Tensor]:
        net = copy.deepcopy(START).bfloat16()
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        options: dict[str, Any] = {"sync_every": 1, "outer_lr": 2.0**-13, "dense": "fp32", "process_group": replicas}
        if kind == "diloco":
            made = diloco(inner, sc.param_groups(net), outer_momentum=0.0, **options)
        else:
            made = sparseloco(inner, sc.param_groups(net), topk=64, chunk=8, decay=0.0, values="fp32", **options)
        for _ in range(64):
            for param in net.parameters():
                param.grad = torch.full_like(param, 0.5)
            made.step()
        return [param.detach() for param in net.parameters()]

    for param, one, other in zip(START.parameters(), *together(2, work), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one.float(), param.detach() - 64 * 2.0**-13 * 0.5, atol=1e-3, rtol=2.0**-8)


def test_saved_state_of_bf16_weights_resumes_bitwise() -> None:
    def work(replicas: ThreadGroup) -> list[Tensor]:
        net = copy.deepcopy(START).bfloat16()
        made = make_optimizer(net, "sparseloco", replicas, sync_every=2)
        train(net, made, replicas.rank, range(3))
        other = copy.deepcopy(net)
        resumed = make_optimizer(other, "sparseloco", replicas, sync_every=2)
        resumed.load_state_dict(copy.deepcopy(made.state_dict()))
        for each, optimizer in ((net, made), (other, resumed)):
            train(each, optimizer, replicas.rank, range(3, 9))
        assert all(torch.equal(*pair) for pair in zip(net.parameters(), other.parameters(), strict=True))
        assert all(torch.equal(*pair) for pair in zip(made.anchors, resumed.anchors, strict=True))
        return [anchor.clone() for anchor in made.anchors]

    for one, other in zip(*together(2, work), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)
        assert not torch.equal(one, one.bfloat16().float())


def test_frozen_parameters_keep_their_dtype_and_are_not_saved() -> None:
    """Packed integers and a frozen base are exchanged by nobody."""

    def work(replicas: ThreadGroup) -> None:
        net = nn.Module()
        net.packed = nn.Parameter(torch.tensor([1524280945, -7], dtype=torch.int32), requires_grad=False)
        net.base = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16), requires_grad=False)
        net.trained = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        made = diloco(torch.optim.SGD(net.parameters(), lr=0.5), net.parameters(), process_group=replicas, sync_every=1)
        net.trained.grad = torch.ones_like(net.trained)
        made.step()
        assert net.packed.tolist() == [1524280945, -7]
        assert [anchor.dtype for anchor in made.anchors] == [torch.int32, torch.bfloat16, torch.float32]
        assert [*made.wide_anchors()] == [2]
        # trained from now on
        net.base.requires_grad_()
        net.base.grad = torch.ones_like(net.base)
        made.step()
        assert made.anchors[1].dtype == torch.float32
        assert [*made.wide_anchors()] == [1, 2]

    together(2, work)


def test_loaded_state_is_not_changed_by_later_steps() -> None:
    net = copy.deepcopy(START)
    made = diloco(torch.optim.SGD(net.parameters(), lr=0.1), sc.param_groups(net), sync_every=1)
    train(net, made, 0, range(2))
    saved = made.state_dict()
    kept = copy.deepcopy(saved)
    made.load_state_dict(saved)
    train(net, made, 0, range(2, 4))
    for key in ("momenta", "anchors"):
        values = (each[key].values() if key == "momenta" else each[key] for each in (saved, kept))
        assert all(torch.equal(*pair) for pair in zip(*values, strict=True))


def test_compensated_rounding_is_refused() -> None:
    net = copy.deepcopy(START).bfloat16()
    inner = sc.CAME(sc.param_groups(net), lr=1e-3, rounding="compensated")
    with pytest.raises(UserError, match="keeps bits of weights that local steps replace"):
        diloco(inner, sc.param_groups(net))


@pytest.mark.parametrize("left_out", [0, 1])
def test_mean_of_fewer_replicas_is_by_their_shares(left_out: int) -> None:
    """The pseudo-gradient of one replica is NaN; that of the other one is applied in full."""

    def work(replicas: ThreadGroup) -> Tensor:
        param = nn.Parameter(torch.ones(8))
        made = diloco(
            torch.optim.SGD([param], lr=0.5),
            [param],
            process_group=replicas,
            sync_every=1,
            outer_lr=1.0,
            outer_momentum=0.0,
            batch_shares=[3, 1],
        )
        with torch.no_grad():
            param += torch.nan if replicas.rank == left_out else -0.5
        made.advance()
        return param.detach()

    for found in together(2, work):
        torch.testing.assert_close(found, torch.full((8,), 0.5))


@pytest.mark.parametrize(("chunk", "topk"), [(64, 4096), (32, 1024), (1, 1)])
def test_local_steps_and_recipes_have_the_same_defaults(chunk: int, topk: int) -> None:
    inner = torch.optim.SGD(START.parameters(), lr=0.1)
    made = sparseloco(inner, sc.param_groups(START), chunk=chunk)
    section = CommSection(name="local_steps", chunk=chunk)
    assert made.sync_every == section.sync_every == 15
    assert made.outer_lr == section.outer_lr == 1.3
    group = made.exchange.param_groups[0]
    for key in ("topk", "chunk", "values", "dense", "decay"):
        assert group[key] == getattr(section, key)
    assert section.topk == topk
