"""Tests against silent failures: stepped frozen parameters, diverging replicas, uncounted bytes, foreign state."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from scantling.comm import LocalSteps
from scantling.comm.codec.message import unpack_messages
from scantling.comm.consistency import find_mismatch
from scantling.comm.exchange import MomentumExchange
from scantling.comm.transport.group import ReplicaGroup, _warn_without_group
from scantling.errors import NonFiniteError, PayloadError, UserError
from tests.comm.replicas import ThreadGroup, together
from tests.comm.test_exchange import gradient, make_exchange, make_params
from tests.processes import run


def make_demo(replicas: ReplicaGroup | None, params: list[nn.Parameter], **options: Any) -> sc.DeMo:
    made = sc.DeMo(params, **{"lr": 1e-2, "topk": 8, "chunk": 16, **options})
    if replicas is not None:
        made.exchange.replicas = replicas
    return made


def fill(params: list[nn.Parameter], rank: int, step: int) -> None:
    for param in params:
        param.grad = gradient(rank, step, param.shape)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_demo_skips_frozen_parameters(weight_decay: float) -> None:
    params = make_params()
    optimizer = make_demo(None, params, weight_decay=weight_decay)
    fill(params, 0, 0)
    optimizer.step()
    frozen = (params[0], params[4])
    for param in frozen:
        param.requires_grad_(False)
        param.grad = None
    before, sent = [param.clone() for param in frozen], optimizer.exchange.planned_wire_bytes(2)
    fill([param for param in params if param.requires_grad], 0, 1)
    optimizer.step()
    assert all(map(torch.equal, before, frozen))
    exchange = MomentumExchange(params)
    exchange.exchange()
    assert all(param.grad is None for param in frozen)
    for param in frozen:
        param.requires_grad_(True)
    assert sent < optimizer.exchange.planned_wire_bytes(2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": 2e-2}, "lr 0.02"),
        ({"update": "identity"}, "update identity"),
        ({"weight_decay": 0.1}, "weight_decay 0.1"),
        ({"dense_lr": 3e-2}, "dense_ratio 3"),
    ],
)
def test_differing_lr_and_update_are_named(options: dict[str, Any], text: str) -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        optimizer = make_demo(replicas, params, **(options if replicas.rank == 1 else {}))
        fill(params, replicas.rank, 0)
        optimizer.step()

    with pytest.raises(UserError, match="rank 1 differs from the others") as error:
        together(3, work)
    assert text in str(error.value)


def test_checkpoint_loaded_on_one_rank_is_named() -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        made = make_exchange(replicas, params)
        if replicas.rank == 1:
            made.load_shared_state_dict({"step": 5})
        made.exchange()

    with pytest.raises(UserError, match=r"rank 1 differs from the others in square: it has step 5; they have step 0"):
        together(3, work)


def test_changed_options_warn_before_comparison(caplog: pytest.LogCaptureFixture) -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        made = make_exchange(replicas, params)
        for step in range(3):
            params[0].requires_grad_(step != 1)
            fill(params, replicas.rank, step)
            made.exchange()

    together(2, work)
    told = [
        record.getMessage() for record in caplog.records if "options, shapes or frozen parameters" in record.message
    ]
    assert sorted(text[:14] for text in told) == [f"step {step}, rank {rank}" for step in (1, 2) for rank in (0, 1)]


@pytest.mark.parametrize("bad", [0, 1])
def test_find_mismatch_prefers_finite_then_lower_rank(bad: int) -> None:
    def work(replicas: ThreadGroup) -> tuple[Any, Any]:
        damaged, other = make_params(), make_params()
        with torch.no_grad():
            if replicas.rank == bad:
                damaged[2][0, 0, 0] = torch.nan
                other[3][0, 0, 0, 0] += 1e-3
        return find_mismatch(replicas, damaged), find_mismatch(replicas, other)

    for nan, apart in together(2, work):
        assert nan == (bad, 2, 1 - bad)
        assert apart == (1, 3, 0)


def test_wire_bytes_are_of_the_step() -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        made = make_exchange(replicas, params, sync_every=2, state_sync_every=2, check_every=None)
        found = []
        for step in range(8):
            fill(params, replicas.rank, step)
            made.exchange()
            found.append(made.wire_bytes)
            if step:  # the first step compares the replicas, once
                assert made.wire_bytes == replicas.counted()
            replicas.counted()
        planned = made.planned_wire_bytes()
        assert found[:5] == [0, planned, 0, planned, 0]
        assert found[5] > planned + 4 * sum(param.numel() for param in params[:3]) / 2
        total = made.planned_wire_bytes_per_step() * 8
        assert sum(found) == pytest.approx(total, abs=found[5] - planned)

    together(2, work)


def test_nonfinite_ranks_are_of_the_step() -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        made = make_exchange(replicas, params, sync_every=2)
        found = []
        for step in range(4):
            fill(params, replicas.rank, step)
            if step == 1 and replicas.rank == 1:
                params[0].grad[0, 0] = torch.nan
            made.exchange()
            found.append(made.nonfinite_ranks)
        assert found == [[], [1], [], []]

    together(2, work)


def test_nan_between_exchanges_warns(caplog: pytest.LogCaptureFixture) -> None:
    params = make_params()
    made = make_exchange(None, params, sync_every=2)
    fill(params, 0, 0)
    params[0].grad[0, 0] = torch.inf
    with caplog.at_level(logging.WARNING):
        made.exchange()
    assert "step 1, rank 0: NaN or Inf gradients are left out" in caplog.text


def test_overflowing_residual_is_reset(caplog: pytest.LogCaptureFixture) -> None:
    param = nn.Parameter(torch.zeros(64, 64))
    made = MomentumExchange([param], topk=8, decay=1.0)
    param.grad = torch.full((64, 64), 1e34)
    assert made.exchange()
    assert made.nonfinite_ranks == []
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            param.grad = torch.zeros(64, 64)
            param.grad[3, 4] = 3e38
            try:
                made.exchange()
            except NonFiniteError:
                break
    assert "a residual is NaN or Inf; reset to zero" in caplog.text
    param.grad = torch.ones(64, 64)
    assert made.exchange()
    assert torch.isfinite(param.grad).all()


def test_divergence_with_missing_residuals() -> None:
    def work(replicas: ThreadGroup) -> float | None:
        params = make_params()
        made = MomentumExchange(params, check_every=1, process_group=replicas)
        for step in range(3):
            fill(params, replicas.rank, step)
            if step == 2 and replicas.rank == 1:
                made.residuals.discard(params[0])
            made.exchange()
        return made.replica_divergence

    apart = together(2, work)
    assert apart[0] == apart[1] > 0.0


def test_local_steps_skip_nan() -> None:
    params = make_params()
    inner = torch.optim.AdamW(params, lr=1e-3)
    local = LocalSteps(inner, MomentumExchange(params), sync_every=2, outer_lr=1.0)
    for step in range(4):
        fill(params, 0, step)
        if step == 1:
            params[0].grad[0, 0] = torch.nan
        local.step()
    for param in params:
        assert torch.isfinite(param).all()
        assert all(torch.isfinite(value).all() for value in inner.state[param].values())


def test_load_refuses_state_of_another_rank() -> None:
    def work(replicas: ThreadGroup) -> dict[str, Any]:
        params = make_params()
        optimizer = make_demo(replicas, params)
        fill(params, replicas.rank, 0)
        optimizer.step()
        return optimizer.state_dict()

    first, second = together(2, work)
    assert "replica" not in make_demo(None, make_params()).param_groups[0]

    def load(replicas: ThreadGroup) -> None:
        optimizer = make_demo(replicas, make_params())
        optimizer.load_state_dict((first, second)[replicas.rank])
        assert optimizer.exchange.local_state_dict()["residuals"]
        optimizer.load_state_dict(first)

    with pytest.raises(UserError, match="this is the state of rank 0 of 2, here is 1 of 2"):
        together(2, load)


def test_stale_owner_reply_is_refused() -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        made = make_exchange(replicas, params, exchange="owner")
        seen: list[Tensor] = []

        def keep(message: Tensor) -> Tensor:
            seen.append(message.clone())
            return message

        def replay(message: Tensor) -> Tensor:
            seen.append(message.clone())
            return old if len(message) == len(old) and len(seen) > 2 else message

        fill(params, replicas.rank, 0)
        made.exchange()  # compares the replicas
        replicas.on_its_way = keep
        fill(params, replicas.rank, 1)
        made.exchange()
        old, turns = seen[-1], len(seen)
        assert turns == 3  # two parts and a reply
        seen.clear()
        if replicas.rank == 1:
            replicas.on_its_way = replay
        fill(params, replicas.rank, 2)
        made.exchange()

    with pytest.raises(PayloadError, match=r"rank 1 sent a message of step 2; rank \d expects 3"):
        together(2, work)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])  # noqa: S301
def test_copies_step_equally_and_share_nothing(clone: Any) -> None:
    params = make_params()
    optimizer = make_demo(None, params, delay=1)
    for step in range(2):
        fill(params, 0, step)
        optimizer.step()
    copied = clone(optimizer)
    others = [param for group in copied.param_groups for param in group["params"]]
    for made, held in ((optimizer, params), (copied, others)):
        for step in range(2, 4):
            fill(held, 0, step)
            made.step()
    assert all(map(torch.equal, params, others))
    assert all(param is not other for param, other in zip(params, others, strict=True))


def test_grad_scaler_does_not_change_steps() -> None:
    def trained(scaler: torch.amp.GradScaler | None) -> list[Tensor]:
        params = make_params()
        optimizer = make_demo(None, params, update="identity", values="fp32", dense="fp32")
        for step in range(3):
            loss = sum((param * gradient(0, step, param.shape)).sum() for param in params)
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return params

    scaled = trained(torch.amp.GradScaler("cpu", init_scale=1024.0))
    for one, other in zip(trained(None), scaled, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("clips", [False, True])
def test_grad_scaler_overflow_skips_step(caplog: pytest.LogCaptureFixture, clips: bool) -> None:
    params = make_params()
    before = [param.detach().clone() for param in params]
    optimizer = make_demo(None, params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    scaler.scale(sum((param * 1e3).sum() for param in params)).backward()
    if clips:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == pytest.approx(5e37)
    assert all(map(torch.equal, params, before))
    assert "the step is skipped" in caplog.text
    for param in params:
        param.grad = torch.full_like(param, torch.inf)
    with pytest.raises(NonFiniteError):
        optimizer.step()


@pytest.mark.parametrize("size", [1e37, 3.4e38])
@pytest.mark.parametrize("dense", ["bf16", "int8", "int4", "sign"])
def test_gradient_too_large_for_bf16_is_skipped(dense: Any, size: float) -> None:
    params = make_params()
    optimizer = make_demo(None, params, dense=dense, values="sign")
    for param in params:
        param.grad = torch.full_like(param, size)
    with pytest.raises(NonFiniteError):
        optimizer.step()
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all(bool(torch.isfinite(param).all()) for param in params)


def test_replica_with_other_thread_count_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    monkeypatch.setattr(torch, "get_num_threads", lambda: here.threads)

    def work(replicas: ThreadGroup) -> None:
        here.threads = 4 if replicas.rank == 2 else 1
        optimizer = make_demo(replicas, make_params())
        with pytest.raises(UserError, match=r"rank 2 .* it has PyTorch .* 4 threads; they have .* OMP_NUM_THREADS"):
            optimizer.step()

    together(3, work)


def test_grad_scaler_with_exchange_keeps_replicas_equal() -> None:
    def work(replicas: ThreadGroup) -> tuple[list[Tensor], float]:
        params = make_params()
        made, optimizer = make_exchange(replicas, params, check_every=1), torch.optim.AdamW(params, lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(sum((param * gradient(replicas.rank, step, param.shape)).sum() for param in params)).backward()
            if step == 3 or (step == 1 and replicas.rank == 1):
                params[0].grad[3, 4] = torch.inf
            scaler.unscale_(optimizer)
            before = [param.detach().clone() for param in params]
            try:
                made.exchange()
                optimizer.step()
            except NonFiniteError:
                assert step == 3
            scaler.update()
            assert torch.equal(before[0], params[0]) == (step == 3)
        return params, scaler.get_scale()

    (first, scale), (second, lower) = together(2, work)
    assert all(map(torch.equal, first, second))
    assert (scale, lower) == (512.0, 256.0)


def test_parameters_with_equal_names_have_own_residuals() -> None:
    nets = [nn.Linear(64, 64), nn.Linear(64, 64)]
    optimizer = sc.DeMo([{"params": list(net.named_parameters())} for net in nets], lr=1e-2)
    for net in nets:
        net(torch.randn(3, 64)).square().sum().backward()
    optimizer.step()
    state = optimizer.local_state_dict()
    assert {name for name in state["residuals"] if "weight" in name} == {"group 0, weight", "group 1, weight"}
    before = [optimizer.state[net.weight]["residual"].clone() for net in nets]
    assert not torch.equal(*before)
    optimizer.load_local_state_dict(state)
    assert all(
        torch.equal(optimizer.state[net.weight]["residual"], kept) for net, kept in zip(nets, before, strict=True)
    )


def test_group_may_be_one_tensor() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    exchange = sc.MomentumExchange([{"params": weight}], topk=8)
    weight.grad = given = torch.randn(64, 64)
    exchange.exchange()
    assert weight.grad is not given
    with pytest.raises(UserError, match="given a single tensor"):
        sc.MomentumExchange(weight)  # type: ignore[arg-type]


def test_dense_lr() -> None:
    def moved(groups: list[dict[str, Any]], **options: Any) -> list[float]:
        optimizer = sc.DeMo(groups, **options)
        before = [param.clone() for group in groups for param in group["params"]]
        for group in groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
        after = [param for group in optimizer.param_groups for param in group["params"]]
        return [float((a - b).detach().abs().max()) for a, b in zip(after, before, strict=True)]

    def vectors() -> list[dict[str, Any]]:
        return [{"params": [nn.Parameter(torch.zeros(5))]}, {"params": [nn.Parameter(torch.zeros(5))], "lr": 0.2}]

    assert moved(vectors(), lr=0.1, dense_lr=0.01) == pytest.approx([0.01, 0.01], rel=1e-3)
    own = vectors()
    own[1]["dense_lr"] = 0.5
    assert moved(own, lr=0.1) == pytest.approx([0.1, 0.5], rel=1e-3)
    with pytest.raises(UserError, match="dense_lr must be a number of at least 0; given -5"):
        sc.DeMo([nn.Parameter(torch.zeros(5))], lr=0.1, dense_lr=-5)
    with pytest.raises(UserError, match="dense_lr follows the schedule of lr"):
        sc.DeMo([nn.Parameter(torch.zeros(5))], lr=0.0, dense_lr=0.1)


def test_changed_dense_lr_takes_effect() -> None:
    param = nn.Parameter(torch.zeros(5))
    optimizer = sc.DeMo([param], lr=0.1, dense_lr=0.01, dense="fp32")
    group, moved = optimizer.param_groups[0], []
    for changes in ({}, {"dense_lr": 0.05}, {"lr": 0.05}, {"dense_lr": None}):
        group |= changes
        before = param.detach().clone()
        param.grad = torch.ones(5)
        optimizer.step()
        moved.append(float((param - before).detach().abs().max()))
    assert moved == pytest.approx([0.01, 0.05, 0.025, 0.05], rel=1e-3)
    group |= {"lr": 0.0, "dense_lr": 0.1}
    with pytest.raises(UserError, match="must be above 0 when it is set"):
        optimizer.step()


def test_dense_step_keeps_double_precision() -> None:
    params = [nn.Parameter(torch.full((5,), 1.0 + 1e-12, dtype=torch.float64)), nn.Parameter(torch.ones(5))]
    optimizer = sc.DeMo(params, lr=1e-10, dense="fp32")
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    moved = params[0].detach() - (1.0 + 1e-12)
    torch.testing.assert_close(moved, torch.full_like(moved, -2e-10), rtol=1e-4, atol=0)
    assert [optimizer.state[param]["exp_avg"].dtype for param in params] == [torch.float64, torch.float32]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            lambda params: torch.optim.AdamW(params).state_dict(),
            "this is no state of DeMo: group 0 has no decay, topk, .*steps, dense_ratio; given lr, betas",
        ),
        (lambda params: sc.DeMo(params, 1e-2, compat="paper").state_dict(), "compat='paper' takes the mean over those"),
        (lambda params: {"model": 1}, "has the keys state and param_groups; given model"),
        (
            lambda params: sc.DeMo([{"params": [param]} for param in params], 1e-2).state_dict(),
            "this is a state of 7 groups, the optimizer has 1",
        ),
    ],
)
def test_refused_state_changes_nothing(given: Any, text: str) -> None:
    def run_on(*, refused: bool) -> list[Tensor]:
        params = make_params()
        optimizer = make_demo(None, params, exchange="owner", delay=1)
        for step in range(4):
            if refused and step == 2:
                with pytest.raises(UserError, match=text):
                    optimizer.load_state_dict(given(make_params()))
            fill(params, 0, step)
            optimizer.step()
        return params

    assert all(map(torch.equal, run_on(refused=True), run_on(refused=False)))


def test_compat_paper_orthogonalizes_vectors() -> None:
    params = [nn.Parameter(torch.zeros(33)), nn.Parameter(torch.tensor(1.0))]
    optimizer = sc.DeMo(params, lr=0.1, compat="paper", update="muon", topk=4, chunk=16)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all(torch.isfinite(param).all() for param in params)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([{"params": [nn.Parameter(torch.zeros(70, 70))], "role": "matrixx"}], "role must be one of None, 'matrix'"),
        ([{"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]}], "is complex; exchange its real view"),
        (
            [{"params": [nn.Parameter(torch.zeros(70, 70))], "matrix_dims": ((0,), (2,))}],
            "matrix_dims must be dims of shape (70, 70)",
        ),
    ],
)
def test_exchange_refuses_bad_groups(groups: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(UserError) as error:
        MomentumExchange(groups).planned_wire_bytes(2)
    assert text in str(error.value)


@pytest.mark.parametrize("world_size", [0, -1, 2.5])
def test_planned_bytes_refuse_a_number_that_is_no_world_size(world_size: Any) -> None:
    exchange = MomentumExchange([nn.Parameter(torch.zeros(70, 70))])
    assert exchange.planned_wire_bytes(world_size=2) > exchange.planned_wire_bytes() == 0
    for planned in (exchange.planned_wire_bytes, exchange.planned_wire_bytes_per_step):
        with pytest.raises(UserError, match="world_size must be an integer of at least 1"):
            planned(world_size)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("strategy", ["all_gather", "owner", "dense"])
def test_exchange_without_trained_parameters(strategy: Any, delay: int) -> None:
    def work(replicas: ThreadGroup) -> None:
        params = [nn.Parameter(torch.ones(64, 64), requires_grad=False), nn.Parameter(torch.ones(0, 3))]
        optimizer = make_demo(replicas, params, exchange=strategy, delay=delay, weight_decay=0.1)
        made = MomentumExchange(params[:1], exchange=strategy, delay=delay, check_every=1, process_group=replicas)
        for step in range(3):
            optimizer.step()
            assert made.exchange() == (delay == 0 or step > 0)
            assert optimizer.wire_bytes == 0 or step == 0
        assert bool((params[0] == 1.0).all())

    together(2, work)
    with pytest.raises(UserError, match="the groups hold no parameter"):
        MomentumExchange([{"params": []}])


@pytest.mark.parametrize("strategy", ["all_gather", "owner"])
def test_default_dtype_does_not_change_exchange(strategy: Any) -> None:
    begin = make_params()
    given = [[[gradient(rank, step, param.shape) for param in begin] for step in range(3)] for rank in range(2)]
    given[1][1][0][0, 0] = torch.nan

    def work(replicas: ThreadGroup) -> list[Tensor]:
        params = copy.deepcopy(begin)
        optimizer = make_demo(replicas, params, exchange=strategy, values="int8")
        for step in range(3):
            for param, value in zip(params, given[replicas.rank][step], strict=True):
                param.grad = value.clone()
            optimizer.step()
        return [*params, *(value for state in optimizer.state.values() for value in state.values())]

    wanted = together(2, work)[0]
    torch.set_default_dtype(torch.float64)
    try:
        found = together(2, work)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_add_param_group_refuses_compat_and_duplicates() -> None:
    optimizer = sc.DeMo([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(UserError, match="compat must be the same in all groups; given 'paper' and None"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "compat": "paper"})
    param = nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match=r"a parameter of shape \(3,\) is given twice"):
        MomentumExchange([param, param])


@pytest.mark.parametrize("same", [True, False])
def test_same_data_on_all_replicas_warns(same: bool, caplog: pytest.LogCaptureFixture) -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        fill(params, 0 if same else replicas.rank, 0)
        make_exchange(replicas, params).exchange()

    with caplog.at_level(logging.WARNING):
        together(2, work)
    assert ("all read the same data" in caplog.text) == same


def test_missing_process_group_is_noticed(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def stepped() -> sc.DeMo:
        params = make_params()
        optimizer = make_demo(None, params)
        fill(params, 0, 0)
        optimizer.step()
        return optimizer

    monkeypatch.setenv("WORLD_SIZE", "2")
    _warn_without_group.cache_clear()
    for _ in range(2):
        stepped()
    assert caplog.text.count("WORLD_SIZE is 2, but there is no process group: this process trains alone") == 1
    left: list[sc.DeMo] = []
    run(1, lambda: left.append(stepped()))
    for action in (left[0].step, left[0].state_dict):
        with pytest.raises(UserError, match="the process group of this exchange is gone"):
            action()


def test_late_process_group_compares_replicas() -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        optimizer = make_demo(None, params)
        for joined in (False, True):
            if joined:
                optimizer.exchange.replicas = replicas
            fill(params, replicas.rank, 0)
            optimizer.step()

    with pytest.raises(UserError, match=r"rank 1 differs from the others: .* has other values there"):
        together(2, work)


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        ("list", {"dense_betas": 0.9}, r"dense_betas must be two numbers.*given 0\.9"),
        ("list", {"overlap": True, "bucket_mb": "25"}, "bucket_mb must be above 0; given '25'"),
        ("model", {}, "parameters are given as a list or as groups.*given the model, Linear"),
        ("twice", {}, "a parameter is given twice"),
        ({"matrix_dims": 5}, {}, r"matrix_dims must be \(row dims, column dims\).*given 5"),
        ({"matrix_dims": (0,)}, {}, r"matrix_dims must be \(row dims, column dims\).*given \(0,\)"),
        ({"param": []}, {}, "a group is a mapping with 'params'.*given the keys param"),
        ("list", {"compat": "paper", "update": "identity"}, "would apply lr again"),
        ("list", {"compat": "paper", "dense_lr": 1e-3}, "leave dense_lr out"),
    ],
)
def test_demo_refuses_bad_input(given: Any, options: dict[str, Any], text: str) -> None:
    model = nn.Linear(80, 80)
    params = list(model.parameters())
    forms = {"list": params, "model": model, "twice": [params[0], params[0]]}
    if isinstance(given, dict):
        taken: Any = [given if "param" in given else {"params": params, **given}]
    else:
        taken = forms[given]
    with pytest.raises(UserError, match=text):
        sc.DeMo(taken, 1e-3, **options)


def test_exchange_refuses_incomplete_groups() -> None:
    params = list(nn.Linear(80, 80).parameters())
    with pytest.raises(UserError, match="given the keys param"):
        MomentumExchange([{"param": params}])
    with pytest.raises(UserError, match="compat='paper' scales gradients by 'lr', which a group lacks"):
        MomentumExchange([{"params": params, "compat": "paper"}])


def test_load_names_missing_key_of_state() -> None:
    params = list(nn.Linear(80, 80).parameters())
    exchange, optimizer = MomentumExchange(params), sc.DeMo(params, 1e-3)
    for load, state, text in (
        (exchange.load_local_state_dict, exchange.state_dict(), "which has 'world_size'; given the keys local, shared"),
        (exchange.load_shared_state_dict, exchange.local_state_dict(), "which has 'step'; given the keys world_size"),
        (exchange.load_state_dict, exchange.local_state_dict(), "which has 'local'; given the keys world_size"),
        (optimizer.load_local_state_dict, optimizer.state_dict(), "'world_size'; given the keys state, param_groups"),
        (optimizer.load_shared_state_dict, optimizer.local_state_dict(), "'state' and 'groups'; given the keys world"),
    ):
        with pytest.raises(UserError, match=text):
            load(state)


LATE = {
    "lr": (float("nan"), "a", -1.0),
    "update": ("zz",),
    "decay": (2.0,),
    "topk": (0, 10**6),
    "chunk": (0,),
    "values": ("zz", 3),
    "dense_betas": (0.9,),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in LATE.items() for value in values], ids=str)
def test_changed_option_is_checked(key: str, value: Any) -> None:
    params = make_params()
    optimizer = make_demo(None, params)
    fill(params, 0, 0)
    optimizer.step()
    before = [param.clone() for param in params]
    optimizer.param_groups[0][key] = value
    with pytest.raises(UserError, match=f"{key} must be"):
        optimizer.step()
    assert all(map(torch.equal, before, params))


def test_lr_schedule_may_end_at_zero() -> None:
    params = make_params()
    optimizer = make_demo(None, params, dense_lr=1e-3)
    for lr in (1e-2, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        before = [param.clone() for param in params]
        fill(params, 0, 0)
        optimizer.step()
    assert all(map(torch.equal, before, params))


def test_pickle_warns_about_lost_process_group(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = make_demo(ReplicaGroup(), make_params())
    pickle.loads(pickle.dumps(optimizer))  # noqa: S301
    copy.deepcopy(optimizer)
    assert "its own process group" not in caplog.text
    optimizer.exchange.replicas.group = "a group"
    copy.deepcopy(optimizer)
    assert "its own process group" not in caplog.text
    pickle.loads(pickle.dumps(optimizer))  # noqa: S301
    assert "its own process group" in caplog.text


def test_load_refuses_other_kinds_of_state() -> None:
    optimizer = make_demo(None, make_params())
    state = optimizer.local_state_dict()
    for residuals in ([], {"x": 3}):
        with pytest.raises(UserError, match="residual"):
            optimizer.load_local_state_dict({**state, "residuals": residuals})
    with pytest.raises(UserError, match="local_state_dict"):
        sc.comm.merge_local_states([optimizer.state_dict()])
    with pytest.raises(PayloadError, match="less than a header"):
        unpack_messages([torch.zeros(7, dtype=torch.uint8)])
