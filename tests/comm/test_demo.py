"""Tests of DeMo as an optimizer."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from benchmarks.comm_reference import plain_exchange
from scantling.comm import DemoExchange, merge_local_states
from scantling.comm.demo import DeMo
from scantling.comm.exchange import MomentumExchange
from scantling.errors import UserError
from tests.comm.replicas import ThreadGroup, together

SHAPE = (100, 130)


def gradient(rank: int, step: int, shape: Any = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64).float()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("topk", [2, 9, 400])
def test_exchange_equals_plain_reference(size: int, topk: int) -> None:
    options = {"decay": 0.9, "topk": topk, "chunk": 20}

    def work(replicas: ThreadGroup) -> list[Tensor]:
        param = nn.Parameter(torch.zeros(SHAPE))
        made = MomentumExchange([param], values="fp32", exchange="all_gather", **options)
        made.replicas = replicas
        found = []
        for step in range(5):
            param.grad = gradient(replicas.rank, step)
            made.exchange()
            found.append(param.grad)
        return [*found, made.residuals.read(param)]

    found = together(size, work)
    residuals = [torch.zeros(SHAPE) for _ in range(size)]
    for step in range(5):
        wanted = plain_exchange(residuals, [gradient(rank, step) for rank in range(size)], **options)
        torch.testing.assert_close(found[0][step], wanted, rtol=1e-4, atol=1e-5)
    for rank in range(size):
        torch.testing.assert_close(found[rank][-1], residuals[rank], rtol=1e-4, atol=1e-5)


def test_compat_paper_leaves_momentum_in_gradients_of_vectors() -> None:
    """Signs would remove the magnitudes that rank importance depends on."""
    params = [nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64))]
    optimizer = DeMo(params, lr=0.5, topk=4096, compat="paper", values="fp32")
    gradient = torch.randn(64, generator=torch.Generator().manual_seed(0))
    params[0].grad, params[1].grad = torch.ones(64, 64), gradient.clone()
    optimizer.step()
    torch.testing.assert_close(params[1].grad / params[1].grad.norm(), gradient / gradient.norm())


def test_compat_paper_equals_published_algorithm() -> None:
    """Gradients times lr, mean over senders, chunks that divide the sides, vectors too; then a decayed sign step."""
    shapes = [(96, 60), (50,)]
    rates = [0.01, 0.02, 0.005, 0.01, 0.01]

    def work(replicas: ThreadGroup) -> list[nn.Parameter]:
        params = [nn.Parameter(gradient(77, 0, shape)) for shape in shapes]
        optimizer = DeMo(params, lr=rates[0], topk=5, chunk=16, weight_decay=0.1, compat="paper")
        optimizer.exchange.replicas = replicas
        for step, lr in enumerate(rates):
            optimizer.param_groups[0]["lr"] = lr
            for param in params:
                param.grad = gradient(replicas.rank, step, param.shape)
            optimizer.step()
        return params

    found = together(3, work)
    for place, shape in enumerate(shapes):
        wanted = gradient(77, 0, shape).view(1, -1) if len(shape) == 1 else gradient(77, 0, shape)
        residuals = [torch.zeros_like(wanted) for _ in range(3)]
        for step, lr in enumerate(rates):
            given = [lr * gradient(rank, step, shape).view_as(wanted) for rank in range(3)]
            decoded = plain_exchange(residuals, given, decay=0.999, topk=5, chunk=16, paper=True)
            wanted = wanted * (1 - lr * 0.1) - lr * decoded.sign()
        torch.testing.assert_close(found[0][place].view_as(wanted), wanted, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(found[rank][place], found[0][place]) for rank in range(3))


def test_demo_with_all_coefficients_is_sign_descent() -> None:
    """With all coefficients sent, nothing is left in the residual; the step is the sign of the gradient."""
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = DeMo([param], lr=0.1, topk=4096, decay=0.8, values="fp32")
    wanted = torch.zeros(64, 64)
    for step in range(4):
        param.grad = gradient(0, step, (64, 64))
        wanted -= 0.1 * param.grad.sign()
        optimizer.step()
    assert (param - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(64, 80), (3, 64, 32)])
def test_muon_update_is_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    """The singular values of each matrix in a step are near those of entries with a root mean square of 0.2."""
    param = nn.Parameter(torch.zeros(shape))
    optimizer = DeMo([param], lr=1.0, topk=4096, decay=0.8, values="fp32", update="muon")
    param.grad = gradient(0, 0, shape)
    optimizer.step()
    scaled = torch.linalg.svdvals(param.detach()) / (0.2 * max(shape[-2:]) ** 0.5)
    assert scaled.min() > 0.6
    assert scaled.max() < 1.3


@pytest.mark.parametrize("update", ["sign", "identity"])
def test_parameter_unfrozen_with_a_pending_result_steps(update: Any) -> None:
    params = [nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 64), requires_grad=False)]
    optimizer = DeMo(params, lr=0.1, topk=8, delay=1, update=update, check_every=None)
    for step in range(3):
        for param in params:
            if param.requires_grad:
                param.grad = gradient(0, step, (64, 64))
        optimizer.step()
        if step == 1:
            optimizer.state_dict()
            params[1].requires_grad_(True)
    assert params[0].any()
    optimizer.state_dict()
    params[1].grad = gradient(0, 5, (64, 64))
    optimizer.step()
    assert params[1].any()


torch.manual_seed(0)
START = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 80), nn.LayerNorm(80), nn.Linear(80, 64))


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return copy.deepcopy(START).to(dtype)


def train(net: nn.Module, optimizer: DeMo, steps: range, rank: int = 0) -> None:
    for step in steps:
        for place, param in enumerate(net.parameters()):
            param.grad = gradient(rank, 100 * step + place, param.shape).to(param.dtype)
        optimizer.step()


def test_demo_steps_dense_parameters_like_adamw() -> None:
    net = model()
    optimizer = DeMo(sc.param_groups(net, weight_decay=0.1), lr=1e-3, dense_lr=5e-3, dense="fp32")
    wanted = copy.deepcopy(net)
    groups = sc.param_groups(wanted, weight_decay=0.1)
    others = [{key: group[key] for key in ("params", "weight_decay")} for group in groups if group["role"] != "matrix"]
    adamw = torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.95))
    for step in range(3):
        for place, (one, other) in enumerate(zip(net.parameters(), wanted.parameters(), strict=True)):
            one.grad = gradient(0, 100 * step + place, one.shape)
            other.grad = one.grad.clone()
        optimizer.step()
        adamw.step()
    for name, param in wanted.named_parameters():
        if name not in ("1.weight", "3.weight"):
            torch.testing.assert_close(net.get_parameter(name), param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update", ["sign", "identity", "muon"])
def test_saved_state_resumes_bitwise(dtype: torch.dtype, update: Any) -> None:
    straight, stopped, resumed = (model(dtype) for _ in range(3))
    options: dict[str, Any] = {"lr": 1e-2, "topk": 8, "chunk": 16, "update": update, "dense": "sign"}
    whole = DeMo(sc.param_groups(straight), **options)
    train(straight, whole, range(6))
    first = DeMo(sc.param_groups(stopped), **options)
    train(stopped, first, range(3))
    file = io.BytesIO()
    torch.save({"model": stopped.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    second = DeMo(sc.param_groups(resumed), **options)
    second.load_state_dict(saved["optimizer"])
    train(resumed, second, range(3, 6))
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))
    assert second.exchange.step == 6


def test_local_and_shared_state_load_separately() -> None:
    def work(replicas: ThreadGroup) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
        straight, net = model(), model()
        both = [DeMo(sc.param_groups(each), lr=1e-2, topk=8, chunk=16, dense="sign") for each in (straight, net)]
        for optimizer in both:
            optimizer.exchange.replicas = replicas
        train(straight, both[0], range(5), replicas.rank)
        train(net, both[1], range(3), replicas.rank)
        own, shared = both[1].local_state_dict(), both[1].shared_state_dict()
        again = DeMo(sc.param_groups(net), lr=1e-2, topk=8, chunk=16, dense="sign")
        again.exchange.replicas = replicas
        again.load_shared_state_dict(shared)
        again.load_local_state_dict(own)
        train(net, again, range(3, 5), replicas.rank)
        assert all(map(torch.equal, straight.parameters(), net.parameters()))
        return list(net.parameters()), own, shared

    found = together(2, work)
    merged = merge_local_states([own for _, own, _ in found])
    fresh = DeMo(sc.param_groups(model()), lr=1e-2)
    with pytest.raises(UserError, match="those of world_size 2, this is world_size 1"):
        fresh.load_local_state_dict(found[0][1])
    with pytest.raises(UserError, match="given those of ranks"):
        merge_local_states([found[0][1]])
    fresh.load_local_state_dict(merged)
    name, residual = next(iter(merged["residuals"].items()))
    assert torch.equal(residual, (found[0][1]["residuals"][name] + found[1][1]["residuals"][name]) / 2)
    assert all("residual" not in entries for entries in found[0][2]["state"].values())


def test_merge_counts_a_missing_residual_as_zeros() -> None:
    states = [{"world_size": 2, "rank": rank, "residuals": {}} for rank in range(2)]
    states[1]["residuals"] = {"weight": torch.full((3,), 4.0)}
    assert merge_local_states(states)["residuals"]["weight"].tolist() == [2.0] * 3
    states[0]["residuals"] = {"weight": torch.zeros(4)}
    with pytest.raises(UserError, match="differ in the shape of weight"):
        merge_local_states(states)


@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"residual": "int8"}], ids=str)
def test_rank_adapter_slices_demo_state(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = sc.TTLinear(256, 256, rank=24, num_modes=2, bias=False)
    adapter = sc.RankAdapter(layer, size_target=0.5, steps=4, interval=1)
    optimizer = DeMo(sc.param_groups(layer), lr=1e-2, topk=8, chunk=16, **options)

    def step(number: int) -> None:
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(number))
        adapter.loss((layer(x) - x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(5):
        step(number)
    core, before = layer.cores[1], layer.cores[1].shape
    kept = list(optimizer.state[core])
    assert adapter.truncate(optimizer) > 0
    assert {*kept} <= {*optimizer.state[core]} != set()
    residual = optimizer.exchange.residuals.read(core)
    assert residual.shape == core.shape != before
    assert residual.any()
    for number in range(5, 8):
        step(number)
    assert all(param.isfinite().all() for param in layer.parameters())


@pytest.mark.parametrize("compat", [None, "paper"])
def test_replicas_select_the_same_ranks(compat: Any) -> None:
    """Replicas see different data; the choice uses the exchanged gradients, which are equal on all replicas."""

    made = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = sc.TTLinear(64, 64, rank=16, num_modes=2, bias=False)
        adapter = sc.RankAdapter(layer, size_target=0.4, steps=12, interval=2)
        options = {} if compat else {"dense": "bf16"}
        optimizer = DeMo(sc.param_groups(layer), lr=1e-3, topk=8, chunk=16, compat=compat, **options)
        made.append((layer, adapter, optimizer))

    def work(replicas: ThreadGroup) -> Any:
        layer, adapter, optimizer = made[replicas.rank]
        optimizer.exchange.replicas = replicas
        for number in range(16):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * replicas.rank + number))
            adapter.loss((layer(x) - x).square().mean()).backward()
            optimizer.step()
            assert all(control.grad is not None for control in layer.rank_gates or ())
            optimizer.zero_grad()
            if number % 4 == 3:
                adapter.truncate(optimizer)
        return adapter.ranks(), [param.detach() for param in layer.parameters()]

    (ranks, params), (others, other_params) = together(2, work)
    assert ranks == others
    assert max(ranks[""]) > 1
    assert all(map(torch.equal, params, other_params))


def test_demo_lowers_the_loss() -> None:
    torch.manual_seed(0)
    target, start = nn.Linear(64, 64, bias=False).requires_grad_(False), nn.Linear(64, 64, bias=False)

    def work(replicas: ThreadGroup) -> list[float]:
        net = copy.deepcopy(start)
        optimizer = DeMo(net.parameters(), lr=5e-3, topk=64)
        optimizer.exchange.replicas = replicas
        generator = torch.Generator().manual_seed(replicas.rank)
        losses = []
        for _ in range(100):
            x = torch.randn(32, 64, generator=generator)
            loss = (net(x) - target(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    losses = together(2, work)[0]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("sync_every", [1, 2])
def test_overlapped_step_counts_once(sync_every: int) -> None:
    """One process, with some missing gradients: some buckets are sent in the backward pass, others in `step`."""
    ends = []
    for overlap in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        optimizer = DeMo(net.parameters(), lr=1e-2, overlap=overlap, sync_every=sync_every)
        for number in range(6):
            optimizer.zero_grad()
            with optimizer.overlapped():
                (net if number % 2 else net[0])(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
        assert [group["steps"] for group in optimizer.param_groups] == [6]
        assert optimizer.exchange.step == 6
        ends.append([param.detach() for param in net.parameters()])
    assert all(map(torch.equal, *ends))


def test_overlap_refuses_grad_scaler() -> None:
    net = nn.Linear(64, 64)
    optimizer = DeMo(net.parameters(), lr=1e-2, overlap=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with optimizer.overlapped():
        scaler.scale(net(torch.randn(4, 64)).square().mean()).backward()
    with pytest.raises(UserError, match="overlap does not work with a GradScaler"):
        scaler.step(optimizer)


def test_demo_refuses_closure() -> None:
    optimizer = DeMo([nn.Parameter(torch.ones(64, 64))], lr=1e-3)
    with pytest.raises(UserError, match="takes no closure"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "lr must be a number of at least 0; given -1.0"),
        ({"update": "adam"}, "update must be one of sign, identity, muon; given 'adam'"),
        ({"topk": 5000}, "topk must be at most chunk^2 = 4096"),
        ({"dense_betas": (0.9, 1.0)}, "dense_betas must be two numbers"),
        ({"compat": "v2"}, "compat must be None or 'paper'; given 'v2'"),
        ({"dense_lr": -1.0}, "dense_lr must be a number of at least 0; given -1.0"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        DeMo([nn.Parameter(torch.ones(4, 4))], **{"lr": 1e-3, **options})
    assert text in str(error.value)


@pytest.mark.parametrize("left_out", [0, 1])
def test_momentum_of_fewer_replicas_is_by_their_shares(left_out: int) -> None:
    """Each replica's gradient is its part of the sum over tokens times two; the other one counts in full."""

    def work(replicas: ThreadGroup) -> Tensor:
        net = nn.Linear(8, 8, bias=False)
        nn.init.ones_(net.weight)
        options = {"exchange": "dense", "dense": "fp32", "decay": 0.0}
        made = DemoExchange(batch_shares=[3, 1], process_group=replicas, **options)
        made.prepare(net)
        share = 2 * [0.75, 0.25][replicas.rank]
        net.weight.grad = torch.full_like(net.weight, torch.nan if replicas.rank == left_out else share)
        made.exchange()
        assert net.weight.grad is not None
        return net.weight.grad

    for found in together(2, work):
        torch.testing.assert_close(found, torch.ones(8, 8))
