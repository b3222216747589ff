"""Tests of RankAdapter: sizes, gates, schedules, physical removal with the optimizer's state, resuming."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import scantling as sc
from scantling.errors import UserError
from scantling.optim.combined import CombinedOptimizer
from scantling.tensor.contraction import best_plan, rank_factors
from scantling.tensor.embedding import TTMHead
from scantling.tensor.experts import TTExperts
from scantling.tensor.layer import TTLayer, threshold_gate
from scantling.tensor.rank_adapter import RankAdapter
from scantling.tensor.rank_selection import select_nearest, select_ranks
from scantling.tensor.sizes import SizePolynomial, parameter_terms
from scantling.tensor.slicing import slice_parameter
from tests import processes


class Net(nn.Module):
    """A TT embedding, two TT layers and a dense head."""

    def __init__(self, width: int = 32, rank: int = 8) -> None:
        super().__init__()
        self.table = sc.TTMEmbedding(50, width, rank, num_modes=2)
        self.first = sc.TTLinear(2 * width, 2 * width, rank)
        self.second = sc.TTLinear(2 * width, width, rank, num_modes=2)
        self.head = nn.Linear(width, 50)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(self.table(ids).flatten(1))))))


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(50, (32, 2), generator=generator)
    return ids, (ids[:, 0] + 3 * ids[:, 1]) % 50


def steps(
    model: Net, adapter: RankAdapter | None, optimizer: torch.optim.Optimizer, numbers: range, cut_every: int = 0
) -> list[float]:
    losses = []
    for number in numbers:
        ids, wanted = batch(number)
        loss = nn.functional.cross_entropy(model(ids), wanted)
        losses.append(loss.item())
        (loss if adapter is None else adapter.loss(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if adapter is not None and cut_every and number % cut_every == cut_every - 1:
            adapter.truncate(optimizer)
    return losses


def num_parameters(model: nn.Module) -> int:
    return sum(core.numel() for layer in model.modules() if isinstance(layer, TTLayer) for core in layer.cores)


def came(model: nn.Module, **options: Any) -> sc.CAME:
    return sc.CAME(sc.param_groups(model), lr=3e-3, debias=True, betas=(0.9, 0.95, 0.995), **options)


def test_gates_exist_only_with_adapter() -> None:
    model = net()
    names = [name for name, _ in model.named_parameters()]
    assert not any("control" in name for name in names)
    ids = batch(0)[0]
    before = model(ids)
    adapter = RankAdapter(model)
    torch.testing.assert_close(model(ids), before, rtol=0, atol=0)
    rank_gates = [name for name, _ in model.named_parameters() if "rank_gates" in name]
    assert len(rank_gates) == 1 + 5 + 3
    roles = {name: group["role"] for group in sc.param_groups(model) for name, _ in group["params"]}
    assert {roles[name] for name in rank_gates} == {"vector"}
    with torch.no_grad():
        for layer in adapter.layers.values():
            for gate in layer.rank_gates or ():
                gate.uniform_(-0.5, 1.5)
    adapter.truncate()
    before = model(ids)
    adapter.detach()
    torch.testing.assert_close(model(ids), before)
    assert [name for name, _ in model.named_parameters()] == names


def test_gate_is_zero_below_threshold_and_passes_gradient() -> None:
    gate = torch.tensor([1.0, 0.011, 0.01, 0.0, -3.0], requires_grad=True)
    value = threshold_gate(gate, 0.01)
    assert value.tolist() == pytest.approx([1.0, 0.011, 0.0, 0.0, 0.0])
    value.backward(torch.arange(5.0))
    assert gate.grad is not None
    assert gate.grad.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_size_matches_parameters_and_plan() -> None:
    model = net()
    layer, table = model.first, model.table
    ranks = torch.tensor([*layer.ranks[1:-1], *table.ranks[1:-1]], dtype=torch.float64)
    terms = parameter_terms(layer.sizes, 0) + parameter_terms(table.sizes, len(layer.cores) - 1)
    size = SizePolynomial.from_terms(terms, len(ranks))
    assert size(ranks).item() == sum(core.numel() for core in [*layer.cores, *table.cores])
    slope = size.derivatives(ranks)
    for bond in range(len(ranks)):
        more = ranks.clone()
        more[bond] += 1
        assert (size(more) - size(ranks)).item() == pytest.approx(slope[bond].item())
    for tokens in (1, 30, 5000):
        for part in (layer, table):
            network = part.network
            plan = best_plan(network, tokens)
            ranks_of = (1, *network.ranks[1:-1], 1)
            total = 0.0
            for macs, bonds in rank_factors(network, plan):
                product = macs
                for bond in bonds:
                    product *= ranks_of[bond]
                total += product
            assert total == pytest.approx(plan.macs)


@pytest.mark.parametrize("target", [0.5, 0.2])
@pytest.mark.parametrize("optimizer", ["came", "came-int8", "adamw", "sgd"])
def test_adapter_reaches_size_target(target: float, optimizer: str) -> None:
    model = net(width=64, rank=12)
    before = num_parameters(model)
    adapter = RankAdapter(model, size_target=target, steps=60)
    made: torch.optim.Optimizer
    if optimizer.startswith("came"):
        made = came(model, momentum="int8" if optimizer == "came-int8" else "fp32")
    elif optimizer == "adamw":
        made = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        made = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    assert adapter.num_parameters() == before
    losses = steps(model, adapter, made, range(70), cut_every=15)
    adapter.truncate(made)
    assert adapter.num_parameters() == num_parameters(model)
    assert num_parameters(model) == pytest.approx(target * before, rel=0.02)
    assert all(layer.ranks == adapter.ranks()[name] for name, layer in adapter.layers.items())
    assert losses[-1] == losses[-1] < losses[0] + 0.5
    assert steps(model, adapter, made, range(70, 75))[-1] < losses[0] + 0.5


@given(st.integers(0, 10_000), st.floats(0.15, 0.95), st.booleans())
@settings(deadline=None, max_examples=40)
def test_select_nearest_comes_close_to_size(seed: int, share: float, shut: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randint(4, 14, (7,), generator=generator)
    bond_of = torch.repeat_interleave(torch.arange(7), ranks)
    size = SizePolynomial.from_terms(parameter_terms([5, 7, 4, 6], 0) + parameter_terms([9, 8, 3, 5, 4], 3), 7)
    value = torch.rand(len(bond_of), generator=generator, dtype=torch.float64)
    full, least = size(ranks.double()).item(), size(torch.ones(7, dtype=torch.float64)).item()
    wanted = max(share * full, 1.5 * least)
    active = torch.ones_like(bond_of, dtype=torch.bool)
    if not shut:
        active = torch.zeros_like(active).index_fill(0, ranks.cumsum(0) - 1, True)
    found = select_nearest(size, active, bond_of, value, wanted, 0.01)
    kept = torch.bincount(bond_of[found], minlength=7)
    assert (kept >= 1).all()
    assert size(kept.double()).item() == pytest.approx(wanted, rel=0.05)
    # Within a bond, the ranks of most value stay, or are activated.
    for bond in range(7):
        own = bond_of == bond
        chosen, left_out = value[own & found & (active == shut)], value[own & ~found & (active == shut)]
        if len(chosen) and len(left_out):
            assert chosen.min() > left_out.max()


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_select_nearest_prunes_ranks_of_least_value(share: float) -> None:
    """Within the tolerance, no rank is exchanged for one of another bond."""
    generator = torch.Generator().manual_seed(0)
    bond_of = torch.arange(4).repeat_interleave(10)
    size = SizePolynomial.from_terms(parameter_terms([5, 7, 4, 6, 8], 0), 4)
    value = torch.rand(40, generator=generator, dtype=torch.float64)
    is_best = torch.zeros(40, dtype=torch.bool)
    for bond in range(4):
        is_best[value.masked_fill(bond_of != bond, -1.0).argmax()] = True
    wanted = share * size(torch.full((4,), 10.0)).item()
    kept = select_nearest(size, torch.ones(40, dtype=torch.bool), bond_of, value, wanted, 1.0)
    order = value.masked_fill(is_best, torch.inf).argsort()
    count = int((~kept).sum())
    assert not kept[order[:count]].any()

    def error(count: int) -> float:
        return abs(size(torch.bincount(bond_of[order[count:]], minlength=4).double()).item() - wanted)

    assert error(count) == min(error(count - 1), error(count), error(count + 1))


def test_select_ranks_prunes_expensive_ranks_first() -> None:
    """Of ranks with equal scores, those of 20 parameters go before those of 2. The tolerance allows no exchange."""
    size = SizePolynomial.from_terms(parameter_terms([10, 10], 0) + parameter_terms([1, 1], 1), 2)
    bond_of = torch.arange(2).repeat_interleave(5)
    kept = select_ranks(
        lambda _: size,
        torch.ones(10, dtype=torch.bool),
        bond_of,
        torch.ones(10, dtype=torch.float64),
        70.0,
        1.0,
        num_bonds=2,
        is_fixed=True,
    )
    assert torch.bincount(bond_of[kept]).tolist() == [3, 5]


@pytest.mark.parametrize("unit", ["flops", "bytes"])
def test_adapter_reaches_target_in_other_units(unit: Any) -> None:
    model = net(width=64, rank=12)
    adapter = RankAdapter(model, size_target=0.4, unit=unit, steps=20, tokens=64)
    initial = adapter.size()
    optimizer = came(model)
    steps(model, adapter, optimizer, range(25))
    assert adapter.size() == pytest.approx(0.4 * initial, rel=0.02)
    if unit == "bytes":
        assert adapter.size() == 16 * adapter.num_parameters()
    wanted = adapter.size() * 0.9
    adapter.truncate(optimizer)
    assert adapter.size() == pytest.approx(0.4 * initial, rel=0.02)
    adapter.detach()
    assert RankAdapter(model, size_target=wanted, unit=unit, tokens=64).target == wanted


@pytest.mark.parametrize(
    ("width", "rank", "target", "tokens"),
    [
        *((width, 30, target, 64) for width in (256, 768) for target in (0.5, 0.25)),
        *((256, 16, target, 4096) for target in (0.8, 0.6)),
        *((64, 16, target, 4096) for target in (0.8, 0.6)),
    ],
)
def test_flops_target_holds_when_pruned_at_once(width: int, rank: int, target: float, tokens: int) -> None:
    """At lower ranks another contraction order is the best; the cost is that of the order that will be used."""
    model = nn.Sequential(sc.TTLinear(width, width, rank), sc.TTLinear(width, width, rank))
    adapter = RankAdapter(model, size_target=target, unit="flops", steps=20, tokens=tokens)
    wanted = adapter.target
    adapter.finish()
    costs = [step_flops(layer, tokens) for layer in model]
    assert sum(costs) == pytest.approx(wanted, rel=0.02)
    assert adapter.size() == pytest.approx(sum(costs))


def step_flops(layer: sc.TTLinear, tokens: int) -> float:
    """Return the FLOPs per token, forward and backward."""
    return 6.0 * layer.plan(tokens).macs / tokens


def test_flops_target_counts_tied_head() -> None:
    table = sc.TTMEmbedding(300, 32, 8, num_modes=3)
    model = nn.ModuleDict({"head": TTMHead(table), "table": table})
    adapter = RankAdapter(model, size_target=0.5, unit="flops", tokens=4096)
    assert adapter.size() == pytest.approx(3.0 * (table.flops(300) + model["head"].flops(4096)) / 4096)
    wanted = adapter.target
    adapter.finish()
    assert adapter.size() == pytest.approx(wanted, rel=0.05)
    assert adapter.size() == pytest.approx(3.0 * (table.flops(300) + model["head"].flops(4096)) / 4096)


def test_flops_target_counts_experts_by_tokens() -> None:
    model = sc.tensorize(make_model("mixtral"), {"*.experts": 4})
    adapter = RankAdapter(model, size_target=0.5, unit="flops", tokens=64)
    assert adapter.size() == pytest.approx(sum(step_flops(layer, 32) for layer in adapter.layers.values()) * 32 / 64)
    adapter.detach()
    for module in model.modules():
        if isinstance(module, TTExperts):
            del module.config
    with pytest.raises(UserError, match=r"configuration of 'model.layers.0.mlp.experts' has no num_experts_per_tok"):
        RankAdapter(model, size_target=0.5, unit="flops")


def test_adapter_skips_frozen_layers() -> None:
    model = net()
    model.first.requires_grad_(False)
    adapter = RankAdapter(model, size_target=0.5, steps=1)
    assert "first" not in adapter.layers
    ranks = model.first.ranks
    adapter.finish()
    assert model.first.ranks == ranks
    with pytest.raises(UserError, match="no trainable TT layer"):
        RankAdapter(model.requires_grad_(False))


def test_paper_schedule_averages_losses_of_skipped_steps() -> None:
    """Non-finite losses are not counted either, because a scaler skips such steps."""
    model = net()
    adapter = RankAdapter(model, size_target=0.5, schedule="paper", steps=9, early_steps=5)
    optimizer = came(model)

    def run_passes(*losses: float) -> None:
        for loss in losses:
            adapter.loss(torch.tensor(loss, requires_grad=True) / len(losses), share=1 / len(losses)).backward()

    def mean_loss() -> float:
        return float(adapter._schedule.mean_loss / adapter._schedule.weight)

    run_passes(float("nan"))
    run_passes(2.0, 2.0, 2.0)
    optimizer.step()
    assert mean_loss() == pytest.approx(2.0)
    run_passes(2.0)  # skipped
    run_passes(2.0)
    optimizer.step()
    assert mean_loss() == pytest.approx(2.0)
    for _ in range(3):
        run_passes(float("nan"))
        optimizer.step()
    assert mean_loss() == pytest.approx(2.0)
    assert float(adapter._schedule.reference) == pytest.approx(2.0)


@pytest.mark.parametrize("late", [False, True])
def test_paper_schedule_holds_target_at_end(late: bool) -> None:
    model = net(width=64, rank=12)
    early = 30 if late else None
    adapter = RankAdapter(model, size_target=0.3, schedule="paper", steps=60, early_steps=early, gamma=1.0, beta=1e-4)
    optimizer = came(model)
    initial = adapter.num_parameters()
    steps(model, adapter, optimizer, range(59))
    loss = nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1])
    total = adapter.loss(loss)
    assert torch.isfinite(total)
    assert total != loss
    steps(model, adapter, optimizer, range(60, 64))
    assert adapter.num_parameters() == pytest.approx(0.3 * initial, rel=0.02)
    norm = sum(core.square().sum() for layer in adapter.layers.values() for core in layer.cores)
    again = RankAdapter(net(width=64, rank=12), size_target=0.3, schedule="paper", steps=60, early_steps=early)
    again.load_state_dict(adapter.state_dict())
    for kept, beta in ((adapter, 1e-4), (again, 0.0)):  # nothing reduces ranks any more
        torch.testing.assert_close(kept.loss(loss), loss + beta * norm)


def gates_of(adapter: RankAdapter) -> list[nn.Parameter]:
    return [gate for layer in adapter.layers.values() for gate in layer.rank_gates or ()]


def set_gates(adapter: RankAdapter, value: float, active: int | None = None) -> None:
    """Set the first `active` gates of every bond to a value, all by default, and prune the others."""
    with torch.no_grad():
        for gate in gates_of(adapter):
            gate.fill_(-1.0)[:active] = value


@pytest.mark.parametrize(("early_steps", "loss"), [(9, 2.3), (0, 2.3), (0, 3.0)])
def test_paper_schedule_objective_follows_formula(early_steps: int, loss: float) -> None:
    """At a loss of 2.3 the size decides in the late stage, but the loss would with a weight of 1 for either."""
    adapter = RankAdapter(
        net(),
        size_target=0.5,
        schedule="paper",
        steps=9,
        early_steps=early_steps,
        gamma=0.3,
        beta=1e-3,
        rho=0.2,
        loss_weight=0.7,
        size_weight=1.3,
        loss_target=1.5,
    )
    set_gates(adapter, 0.6)
    relaxed = adapter._budget.relaxed_size().item() / adapter.size()
    norm = sum(core.square().sum().item() for layer in adapter.layers.values() for core in layer.cores)
    if early_steps:
        expected = loss + 0.3 * relaxed
    elif 0.7 * (loss - 1.5) >= 1.3 * (1.0 - 0.5):
        expected = 0.7 * (loss - 1.5) + 0.2 * (loss + relaxed)
    else:
        expected = 1.3 * (relaxed - 0.5) + 0.2 * (loss + relaxed)
    share = 0.25
    total = adapter.loss(torch.tensor(share * loss, requires_grad=True), share=share)
    assert total.item() == pytest.approx(share * (expected + 1e-3 * norm))


def test_importance_schedule_adds_norm_by_share() -> None:
    adapter = RankAdapter(net(), size_target=0.5, steps=9, beta=1e-3)
    norm = sum(core.square().sum().item() for layer in adapter.layers.values() for core in layer.cores)
    assert adapter.adds_to_loss
    total = adapter.loss(torch.tensor(0.5, requires_grad=True), share=0.25)
    assert total.item() == pytest.approx(0.5 + 0.25 * 1e-3 * norm)


def take_steps(adapter: RankAdapter, *losses: float) -> None:
    """Take a step of SGD for each loss, which does not depend on the model."""
    optimizer = torch.optim.SGD([*adapter._budget.cores(), *gates_of(adapter)], lr=1e-4)
    for loss in losses:
        adapter.loss(torch.tensor(loss, requires_grad=True)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_paper_schedule_takes_recent_mean_loss_as_reference() -> None:
    options: dict[str, Any] = {"size_target": 0.5, "schedule": "paper", "steps": 9, "early_steps": 2, "memory": 0.5}
    adapter = RankAdapter(net(), **options)
    take_steps(adapter, 2.0)
    assert not adapter._schedule.late
    take_steps(adapter, 4.0)
    assert adapter._schedule.late
    mean = (0.25 * 2.0 + 0.5 * 4.0) / 0.75
    assert adapter._schedule.reference.item() == pytest.approx(mean)
    take_steps(adapter, 9.0)
    assert adapter._schedule.reference.item() == pytest.approx(mean)
    mean = (2.5 / 2 + 0.5 * 9.0) / 0.875
    assert (adapter._schedule.mean_loss / adapter._schedule.weight).item() == pytest.approx(mean)


def test_paper_schedule_without_early_stage_counts_each_loss_once() -> None:
    """The first pass gives the reference, if its loss is finite; its step then counts as any other."""
    options: dict[str, Any] = {"size_target": 0.5, "schedule": "paper", "steps": 9, "early_steps": 0, "memory": 0.5}
    adapter = RankAdapter(net(), **options)
    adapter.loss(torch.tensor(torch.nan))
    assert not adapter._schedule.late
    take_steps(adapter, 2.0, 4.0)
    assert adapter._schedule.reference.item() == pytest.approx(2.0)
    mean = (0.125 * 2.0 + 0.25 * 2.0 + 0.5 * 4.0) / 0.875
    assert (adapter._schedule.mean_loss / adapter._schedule.weight).item() == pytest.approx(mean)
    resumed = RankAdapter(net(), **options)
    resumed.load_state_dict(adapter.state_dict())
    take_steps(resumed, 9.0)
    assert resumed._schedule.reference.item() == pytest.approx(2.0)


def test_nan_gate_of_pruned_rank_stays_visible_after_end() -> None:
    adapter = RankAdapter(net(), size_target=0.5, schedule="paper", steps=2, interval=1)
    take_steps(adapter, 2.0, 2.0)
    gate = next(gate for gate in gates_of(adapter) if (gate < 0.0).any())
    rank = int(gate.argmin())
    with torch.no_grad():
        gate[rank] = torch.nan
    take_steps(adapter, 2.0)
    assert gate[rank].isnan()


def _check_same_reference() -> None:
    adapter = RankAdapter(net(), size_target=0.5, schedule="paper", steps=9, early_steps=1)
    take_steps(adapter, 1.0 + 2.0 * torch.distributed.get_rank())
    assert adapter._schedule.reference.item() == pytest.approx(2.0)


@pytest.mark.dist
def test_paper_schedule_averages_loss_over_replicas() -> None:
    processes.run(2, _check_same_reference)


def test_paper_schedule_without_hold_does_not_force_target() -> None:
    adapter = RankAdapter(net(), size_target=0.5, schedule="paper", steps=2, interval=1, gamma=1.0, hold=False)
    initial = adapter.size()
    take_steps(adapter, 2.0, 2.0, 2.0)
    assert adapter.state_dict()["values"]["active"] is None
    adapter.finish()
    assert adapter.size() == initial


def test_target_is_held_from_last_step_of_schedule() -> None:
    """The last step is not a multiple of the interval."""
    adapter = RankAdapter(net(), size_target=0.5, schedule="paper", steps=7, interval=5)
    take_steps(adapter, *[2.0] * 6)
    assert adapter.state_dict()["values"]["active"] is None
    take_steps(adapter, 2.0)
    assert adapter.state_dict()["values"]["active"] is not None
    assert adapter.size() == pytest.approx(adapter.target, rel=0.02)


def test_fit_to_sets_only_gates_of_changed_ranks() -> None:
    adapter = RankAdapter(net(), size_target=0.5)
    rank_gates, initial = gates_of(adapter), adapter.size()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for gate in rank_gates:
            gate.uniform_(0.1, 1.5, generator=generator)[::3] = -0.5
    for share in (0.3, 0.9):
        before = [gate.detach().clone() for gate in rank_gates]
        adapter._budget.fit_to(share * initial)
        assert adapter.size() == pytest.approx(share * initial, rel=0.02)
        for gate, old in zip(rank_gates, before, strict=True):
            was_active, is_active = old > 0.01, gate > 0.01
            changed = torch.where(is_active, 0.05, -0.05)
            torch.testing.assert_close(gate.detach(), torch.where(was_active == is_active, old, changed))


def test_fit_to_keeps_ranks_of_largest_contribution() -> None:
    model = net()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # ranks of new layers contribute alike up to rounding
        for layer in (each for each in model.modules() if isinstance(each, TTLayer)):
            for core in layer.cores:
                core.mul_(torch.rand(core.shape[-1], generator=generator) + 0.5)
    adapter = RankAdapter(model, size_target=0.5)
    contributions = list(adapter._budget.contributions())
    adapter._budget.fit_to(0.5 * adapter.size())
    for gate, shares in zip(gates_of(adapter), contributions, strict=True):
        is_kept = gate > 0.01
        if not is_kept.all():
            assert shares[is_kept].min() > shares[~is_kept].max()


def test_fit_to_activates_largest_gate_of_pruned_bond() -> None:
    model = net()
    adapter = RankAdapter(model, size_target=0.5)
    assert model.first.rank_gates is not None
    gate = model.first.rank_gates[0]
    with torch.no_grad():
        gate.copy_(-torch.arange(1.0, len(gate) + 1.0))[2] = -0.5
    adapter._budget.fit_to(adapter._budget.min_size())
    assert (gate > 0.01).nonzero().tolist() == [[2]]


def test_active_size_equals_size() -> None:
    """A layer with a pruned bond costs nothing."""
    model = net()
    adapter = RankAdapter(model, size_target=0.5)
    with torch.no_grad():
        for gate in gates_of(adapter):
            gate.uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(len(gate)))
    size = adapter.size()
    assert adapter._budget.active_size().item() == size == adapter.num_parameters()
    without = size - sum(
        elements * left * right
        for elements, left, right in zip(
            model.first.sizes, adapter.ranks()["first"], adapter.ranks()["first"][1:], strict=False
        )
    )
    with torch.no_grad():
        assert model.first.rank_gates is not None
        model.first.rank_gates[1].fill_(-1.0)
    assert adapter._budget.active_size().item() == adapter.size() == adapter.num_parameters() == without < size


@pytest.mark.parametrize(
    ("value", "active", "is_above", "relaxed_is_above"),
    [(1.0, None, True, True), (1.0, 1, False, False), (0.2, None, True, False), (20.0, 1, False, True)],
)
def test_paper_schedule_late_stage_switches_by_true_size(
    value: float, active: int | None, is_above: bool, relaxed_is_above: bool
) -> None:
    """Above the target, the size decides: the loss is scaled by rho; below it, the loss decides."""
    adapter = RankAdapter(net(), size_target=0.5, schedule="paper", steps=9, early_steps=0, rho=0.1, hold=False)
    set_gates(adapter, value, active)
    assert (adapter.size() > adapter.target) == is_above
    assert (adapter._budget.relaxed_size().item() > adapter.target) == relaxed_is_above
    loss = torch.tensor(2.0, requires_grad=True)
    adapter.loss(loss).backward()
    assert loss.grad is not None
    assert loss.grad.item() == pytest.approx(0.1 if is_above else 1.1)


def test_relaxed_size_counts_negative_gates_as_zero() -> None:
    """A negative gate is pruned: it must neither add to the size nor be pulled up by its price."""
    layer = sc.TTLinear(24, 20, 5, num_modes=2)
    adapter = RankAdapter(nn.Sequential(layer), size_target=0.5)
    assert layer.rank_gates is not None
    values = torch.tensor([1.5, 0.5, 0.004, -0.3, -2.0])
    with torch.no_grad():
        for gate in layer.rank_gates:
            gate.copy_(values[: len(gate)])
    ranks = [1.0, *(values[: len(gate)].clamp(min=0.0).sum().item() for gate in layer.rank_gates), 1.0]
    relaxed = adapter._budget.relaxed_size()
    assert relaxed.item() == pytest.approx(
        sum(size * left * right for size, left, right in zip(layer.sizes, ranks, ranks[1:], strict=False))
    )
    relaxed.backward()
    for gate in layer.rank_gates:
        assert gate.grad is not None
        assert torch.equal(gate.grad > 0.0, values[: len(gate)] > 0.0)
        assert not gate.grad[values[: len(gate)] < 0.0].any()


def test_truncate_keeps_outputs() -> None:
    model = net()
    adapter = RankAdapter(model)
    optimizer = came(model, momentum="int8")
    kept_loss = nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1])  # an old graph that is still alive
    steps(model, adapter, optimizer, range(5))
    with torch.no_grad():
        for layer in adapter.layers.values():
            for gate in layer.rank_gates or ():
                gate[::3] = 0.001
    ids, wanted = batch(9)
    nn.functional.cross_entropy(model(ids), wanted).backward()
    before, size = model(ids), adapter.num_parameters()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    assert num_parameters(model) > size
    assert adapter.truncate(optimizer) > 0
    assert num_parameters(model) == size == adapter.num_parameters()
    assert ((model(ids) - before).norm() / before.norm()).item() < 1e-6
    for name, param in model.named_parameters():
        grad = gradients[name]
        assert param.grad is not None
        assert grad is not None
        assert param.grad.shape == param.shape
        assert param.grad.abs().sum() <= grad.abs().sum() + 1e-6
    for param in model.parameters():
        for value in optimizer.state[param].values():
            assert value.ndim == 0 or value.numel() <= 2 * param.numel() + 2
    assert adapter.truncate(optimizer) == 0
    steps(model, adapter, optimizer, range(10, 13))
    assert kept_loss.grad_fn is not None


@pytest.mark.parametrize("optimizer", ["came", "adamw"])
def test_step_after_truncate_equals_projected_step(optimizer: str) -> None:
    """The remaining ranks are stepped as if nothing had been removed: pruned ranks do not affect gradients."""
    model = net()
    adapter = RankAdapter(model)

    def make_optimizer(parameters: Net) -> torch.optim.Optimizer:
        if optimizer == "came":
            return came(parameters, clip_threshold=1e9)
        return torch.optim.AdamW(parameters.parameters(), lr=1e-3)

    after_step = make_optimizer(model)
    steps(model, adapter, after_step, range(5))
    with torch.no_grad():
        for layer in adapter.layers.values():
            for gate in layer.rank_gates or ():
                gate[:2] = -1.0
    twin = copy.deepcopy(model)
    twin_stepped = make_optimizer(twin)
    twin_stepped.load_state_dict(copy.deepcopy(after_step.state_dict()))
    adapter.truncate(after_step)
    steps(twin, None, twin_stepped, range(5, 6))
    steps(model, None, after_step, range(5, 6))
    ids = batch(7)[0]
    if optimizer == "adamw":
        torch.testing.assert_close(model(ids), twin(ids), rtol=1e-5, atol=1e-6)
    else:  # means of new gradients over rows and columns lack the removed entries
        assert ((model(ids) - twin(ids)).norm() / twin(ids).norm()).item() < 0.05


@pytest.mark.parametrize("modes", [2, 3])
@pytest.mark.parametrize("kind", [sc.TTMEmbedding, sc.TTMEmbeddingBag])
def test_table_without_ranks_returns_zeros(kind: Any, modes: int) -> None:
    for bond in range(modes - 1):
        table = kind(300, 64, rank=8, num_modes=modes)
        adapter = RankAdapter(nn.Sequential(table), size_target=0.9)
        with torch.no_grad():
            table.rank_gates[bond].fill_(-1.0)
        adapter.truncate()
        for numbers in (1, 20, 700):
            rows = table(torch.randint(300, (numbers, 2)))
            assert rows.shape[-1] == 64
            assert not rows.any()


@pytest.mark.parametrize("schedule", ["importance", "paper"])
def test_nan_gate_stays_visible(schedule: str) -> None:
    model = net()
    adapter = RankAdapter(model, size_target=0.5, steps=6, interval=1, schedule=schedule, hold=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    steps(model, adapter, optimizer, range(2))
    gate = next(iter(model.first.rank_gates or ()))
    with torch.no_grad():
        gate[0] = torch.nan
    with pytest.raises(UserError, match=r"a rank gate of '.*' is NaN or Inf"):
        steps(model, adapter, optimizer, range(2, 10), cut_every=10)
    assert gate[0].isnan()


def test_truncate_refuses_nan_gate_without_changes() -> None:
    model = net()
    adapter = RankAdapter(model)
    with torch.no_grad():
        assert model.first.rank_gates is not None
        model.first.rank_gates[1][0] = torch.nan
    before = adapter.layers["first"].ranks
    with pytest.raises(UserError, match="a rank gate of 'first' is NaN or Inf"):
        adapter.truncate()
    assert adapter.layers["first"].ranks == before


def test_load_state_dict_refuses_foreign_state_without_changes() -> None:
    model = net()
    adapter = RankAdapter(model)
    state = adapter.state_dict()
    before = adapter.ranks()
    *_, last = state["ranks"]
    state["ranks"] = {name: tuple(min(rank, 2) for rank in ranks) for name, ranks in state["ranks"].items()}
    state["ranks"][last] = (1, 999, 1)
    with pytest.raises(UserError, match=f"ranks .* for '{last}'; they must not exceed"):
        adapter.load_state_dict(state)
    assert adapter.ranks() == before
    assert {name: layer.ranks for name, layer in adapter.layers.items()} == before


def test_linear_without_ranks_returns_bias() -> None:
    model = net()
    adapter = RankAdapter(model)
    optimizer = came(model)
    steps(model, adapter, optimizer, range(3))
    with torch.no_grad():
        rank_gates = model.first.rank_gates
        assert rank_gates is not None
        rank_gates[2].fill_(-1.0)
    x = torch.randn(5, 64)
    assert model.first.bias is not None
    expected = model.first.bias.expand(5, 64)
    torch.testing.assert_close(model.first(x), expected, rtol=0, atol=0)
    assert adapter.ranks()["first"] == (1, 0, 0, 0, 0, 0, 1)
    adapter.truncate(optimizer)
    torch.testing.assert_close(model.first(x), expected, rtol=0, atol=0)
    assert sum(core.numel() for core in model.first.cores) == 0
    assert num_parameters(model) == adapter.num_parameters()
    losses = steps(model, adapter, optimizer, range(5, 10))
    assert all(torch.isfinite(torch.tensor(losses)))
    assert all(torch.isfinite(param).all() for param in model.parameters())
    torch.testing.assert_close(model.first.to_dense()(x), model.first(x))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)


@pytest.mark.parametrize("schedule", ["importance", "paper"])
@pytest.mark.parametrize("dead", [["second"], ["first", "second"], ["table", "first", "second"]])
def test_schedule_continues_without_ranks_of_some_layers(dead: list[str], schedule: str) -> None:
    model = net()
    adapter = RankAdapter(model, size_target=0.5, steps=10, schedule=schedule, interval=1)
    optimizer = came(model)
    steps(model, adapter, optimizer, range(2))
    with torch.no_grad():
        for name in dead:
            rank_gates = adapter.layers[name].rank_gates
            assert rank_gates is not None
            rank_gates[0].fill_(-1.0)
    adapter.truncate(optimizer)
    losses = steps(model, adapter, optimizer, range(2, 12), cut_every=5)
    assert all(torch.isfinite(torch.tensor(losses)))
    assert all(adapter.ranks()[name][1] == 0 for name in dead)
    assert adapter.size() <= 1.01 * adapter.target
    adapter.finish(optimizer)
    if len(dead) == 3:
        with pytest.raises(UserError, match=r"all ranks .* were removed"):
            RankAdapter(model, size_target=0.9)
    else:
        again = RankAdapter(model, size_target=0.8, steps=2)
        steps(model, again, came(model), range(3))
        assert again.size() == pytest.approx(again.target, rel=0.1)  # one rank is a large share of the rest


@pytest.mark.parametrize("schedule", ["importance", "paper"])
def test_target_holds_with_pruned_bond(schedule: str) -> None:
    model = net(width=64, rank=12)
    adapter = RankAdapter(model, size_target=0.5, steps=10, schedule=schedule, early_steps=10)
    optimizer = came(model)
    steps(model, adapter, optimizer, range(8))
    with torch.no_grad():
        rank_gates = model.first.rank_gates
        assert rank_gates is not None
        rank_gates[1].fill_(-1.0)
    assert adapter.ranks()["first"][2] == 0
    steps(model, adapter, optimizer, range(8, 12))
    assert adapter.ranks()["first"][2] > 0
    assert adapter.size() == pytest.approx(adapter.target, rel=0.02)


def test_adapter_uses_gates_of_checkpoint() -> None:
    model = net()
    adapter = RankAdapter(model, size_target=0.5, steps=4, interval=1)
    optimizer = came(model)
    steps(model, adapter, optimizer, range(3))
    loaded = copy.deepcopy(model)
    with pytest.raises(UserError, match="another RankAdapter is attached to 'table'"):
        RankAdapter(model)
    resumed = RankAdapter(loaded, size_target=0.5, steps=4, interval=1)
    assert resumed.ranks() == adapter.ranks() != {name: layer.ranks for name, layer in adapter.layers.items()}
    resumed.load_state_dict(adapter.state_dict())
    assert (resumed.size(), resumed.target, resumed.step) == (adapter.size(), adapter.target, adapter.step)
    with pytest.raises(UserError, match="another RankAdapter is attached"):
        RankAdapter(loaded)
    with pytest.raises(UserError, match="the minimum is"):
        RankAdapter(copy.deepcopy(model), size_target=0.001)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-3),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_continue_without_ranks_of_a_bond(name: str) -> None:
    model = net()
    adapter = RankAdapter(model, steps=1000)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    steps(model, adapter, optimizer, range(2))
    rank_gates = model.first.rank_gates
    assert rank_gates is not None
    with torch.no_grad():
        rank_gates[2].fill_(-1.0)
    adapter.truncate(optimizer)
    assert not any(param.requires_grad for param in (*model.first.cores, *rank_gates))
    before = model.second.cores[0].detach().clone()
    losses = steps(model, adapter, optimizer, range(2, 5))
    assert all(torch.isfinite(torch.tensor(losses)))
    assert not torch.equal(model.second.cores[0], before)
    adapter.truncate(optimizer)
    assert model.first.to_dense().weight.requires_grad


@pytest.mark.parametrize("name", ["sgd", "adamw", "came"])
def test_pruned_rank_can_become_active_again(name: str) -> None:
    """The student lacks only its pruned rank to match its teacher."""
    student = net()
    adapter = RankAdapter(student, size_target=1.0)
    gate = next(iter(student.first.rank_gates or ()))
    wanted = {step: student.first(torch.ones(1, 64) + batch(step)[0].repeat(1, 32)).detach() for step in range(40)}
    with torch.no_grad():
        gate[0] = -0.005
    assert not student.first.active_ranks()[0][0]
    groups = [{"params": [gate], "role": "vector"}]
    optimizer_class = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "came": sc.CAME}[name]
    optimizer = optimizer_class(groups, lr={"sgd": 1e-3}.get(name, 1e-2))
    for step, target in wanted.items():
        nn.functional.mse_loss(student.first(torch.ones(1, 64) + batch(step)[0].repeat(1, 32)), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert student.first.active_ranks()[0][0]
    assert adapter.truncate() == 0


@pytest.mark.parametrize("schedule", ["importance", "paper"])
def test_adapter_resumes_bitwise_across_truncate(schedule: Any) -> None:
    options: dict[str, Any] = {"size_target": 0.3, "steps": 30, "schedule": schedule, "early_steps": 10, "gamma": 1.0}
    model = net()
    adapter = RankAdapter(model, **options)
    optimizer = came(model, momentum="int4")
    steps(model, adapter, optimizer, range(12), cut_every=4)
    saved = copy.deepcopy((adapter.state_dict(), model.state_dict(), optimizer.state_dict()))
    steps(model, adapter, optimizer, range(12, 40), cut_every=4)

    again = net(seed=5)
    resumed = RankAdapter(again, **options)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    after_step = came(again, momentum="int4")
    after_step.load_state_dict(saved[2])
    steps(again, resumed, after_step, range(12, 40), cut_every=4)
    assert resumed.ranks() == adapter.ranks()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_contribution_is_share_of_squared_norm() -> None:
    torch.manual_seed(0)
    layer = sc.TTLinear(24, 20, 5)
    adapter = RankAdapter(nn.Sequential(layer))
    assert layer.rank_gates is not None
    with torch.no_grad():
        for gate in layer.rank_gates:
            gate.uniform_(0.2, 1.5)
        total = layer.dense_weight().square().sum()
        for gate, shares in zip(layer.rank_gates, list(adapter._budget.contributions()), strict=True):
            kept = gate.clone()
            for rank, share in enumerate(shares):
                gate.zero_()[rank] = kept[rank]
                torch.testing.assert_close(layer.dense_weight().square().sum() / total, share, rtol=1e-4, atol=1e-7)
            gate.copy_(kept)


def test_contribution_counts_pruned_rank_as_if_at_threshold() -> None:
    torch.manual_seed(0)
    layer = sc.TTLinear(24, 20, 5, num_modes=2)
    adapter = RankAdapter(nn.Sequential(layer))
    assert layer.rank_gates is not None
    gate = layer.rank_gates[0]
    with torch.no_grad():
        gate[1] = -0.5
        total = layer.dense_weight().square().sum()
        share = next(iter(adapter._budget.contributions()))[1]
        gate.zero_()[1] = 1.0
        torch.testing.assert_close(share, 0.01**2 * layer.dense_weight().square().sum() / total)


def test_contributions_to_weight_of_zeros_are_zero() -> None:
    layer = sc.TTLinear(24, 20, 5)
    adapter = RankAdapter(nn.Sequential(layer))
    with torch.no_grad():
        layer.cores[0].zero_()
    assert not torch.cat(list(adapter._budget.contributions())).any()


def test_micro_batches_count_as_one_step() -> None:
    model = net()
    adapter = RankAdapter(model, steps=10)
    optimizer = came(model)
    for number in range(4):
        for part in range(3):
            ids, wanted = batch(3 * number + part)
            adapter.loss(nn.functional.cross_entropy(model(ids), wanted) / 3, share=1 / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert adapter.step == 4
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1])
        assert adapter.loss(loss) is loss
    assert adapter.step == 4


LARGE_STEPS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "rprop": lambda params: torch.optim.Rprop(params, lr=1.0),
    "adam": lambda params: torch.optim.Adam(params, lr=5.0),
}


@pytest.mark.parametrize("name", LARGE_STEPS)
@pytest.mark.parametrize("cut_every", [0, 12])
def test_target_holds_after_large_steps_and_resume(name: str, cut_every: int) -> None:
    def start(seed: int) -> tuple[Net, RankAdapter, torch.optim.Optimizer]:
        model = net(seed)
        adapter = RankAdapter(model, size_target=0.5, steps=10)
        rank_gates = [param for param_name, param in model.named_parameters() if "rank_gates" in param_name]
        optimizer = LARGE_STEPS[name](rank_gates)
        others = [param for param_name, param in model.named_parameters() if "rank_gates" not in param_name]
        optimizer.add_param_group({"params": others, "lr": 1e-4})
        return model, adapter, optimizer

    model, adapter, optimizer = start(0)
    steps(model, adapter, optimizer, range(15), cut_every)
    saved = copy.deepcopy((adapter.state_dict(), model.state_dict(), optimizer.state_dict()))
    for number in range(15, 40):
        steps(model, adapter, optimizer, range(number, number + 1), cut_every)
        assert adapter.size() == pytest.approx(adapter.target, rel=0.01)

    again, resumed, after_step = start(5)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    after_step.load_state_dict(saved[2])
    steps(again, resumed, after_step, range(15, 40), cut_every)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


class Plain(torch.optim.Optimizer):
    """SGD that writes through `.data`, as many published optimizers do: version counters do not detect it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"])


@pytest.mark.parametrize("kind", ["fused", "through data", "foreach"])
def test_target_holds_exactly_after_steps_for_any_optimizer(kind: str) -> None:
    model = net()
    adapter = RankAdapter(model, size_target=0.3, steps=30)
    optimizer: torch.optim.Optimizer = (
        Plain(model.parameters(), lr=0.05)
        if kind == "through data"
        else torch.optim.AdamW(model.parameters(), lr=3e-3, **{kind: True})
    )
    steps(model, adapter, optimizer, range(30), cut_every=7)
    assert adapter.step == 30
    ids = batch(99)[0]
    before = model(ids)
    adapter.truncate(optimizer)
    torch.testing.assert_close(model(ids), before, rtol=1e-5, atol=1e-5)
    assert num_parameters(model) == adapter.num_parameters() == pytest.approx(adapter.target, rel=0.02)


def test_two_optimizers_count_as_one_step() -> None:
    model = net()
    adapter = RankAdapter(model, steps=10)
    rank_gates = {id(c) for layer in adapter.layers.values() for c in layer.rank_gates or ()}
    halves = [[p for p in model.parameters() if (id(p) in rank_gates) == wanted] for wanted in (True, False)]
    one, other = (torch.optim.SGD(half, lr=0.01) for half in (halves[0] + halves[1][:1], halves[1][1:]))
    for number in range(3):
        ids, wanted = batch(number)
        adapter.loss(nn.functional.cross_entropy(model(ids), wanted)).backward()
        for optimizer in (one, other, one):
            optimizer.step()
    assert adapter.step == 3


def test_finish_reaches_target_and_removes_gates() -> None:
    model = net()
    adapter = RankAdapter(model, size_target=0.3, steps=50)
    optimizer = came(model, momentum="int8")
    steps(model, adapter, optimizer, range(5))
    adapter.finish(optimizer)
    assert (
        num_parameters(model) == adapter.num_parameters() == adapter.size() == pytest.approx(adapter.target, rel=0.02)
    )
    loss = torch.tensor(1.0, requires_grad=True)
    assert adapter.loss(loss) is loss
    assert adapter.metrics()["tensor_parameters"] == num_parameters(model)
    late = net()
    held = RankAdapter(late, size_target=0.3, steps=5)
    optimizer = came(late)
    steps(late, held, optimizer, range(6))
    with torch.no_grad():  # loads an earlier state of the model, as at the end of a Trainer's run
        for layer in held.layers.values():
            for gate in layer.rank_gates or ():
                gate.fill_(1.0)
    held.finish()
    assert num_parameters(late) == pytest.approx(held.target, rel=0.02)


def test_adapter_skips_single_core_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(sc.TTMEmbedding(50, 16, 4, num_modes=1), sc.TTLinear(16, 16, 4))
    adapter = RankAdapter(model, size_target=0.5, steps=5)
    assert list(adapter.layers) == ["1"]
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        adapter.loss(model(torch.randint(50, (8,))).square().mean()).backward()
        optimizer.step()
    adapter.truncate(optimizer)
    assert adapter.num_parameters() == adapter.target


def test_truncate_slices_wrapped_optimizer() -> None:
    from accelerate import Accelerator

    model = net()
    adapter = RankAdapter(model, size_target=0.3, steps=4)
    optimizer = came(model, momentum="int8")
    wrapped = Accelerator(cpu=True).prepare_optimizer(optimizer)
    steps(model, adapter, wrapped, range(4))
    assert adapter.truncate(wrapped) > 0
    for parameter in model.parameters():
        assert parameter in optimizer.state
    steps(model, adapter, wrapped, range(4, 6))


def test_adapter_follows_model_and_gates_stay_fp32() -> None:
    model = net()
    adapter = RankAdapter(model)
    optimizer = came(model)
    steps(model, adapter, optimizer, range(2))
    model.to(torch.bfloat16)
    assert all(c.dtype == torch.float32 for layer in adapter.layers.values() for c in layer.rank_gates or ())
    assert model.first.cores[0].dtype == torch.bfloat16
    model.to("meta")
    assert adapter.loss(torch.zeros((), device="meta")).device.type == "meta"


@pytest.mark.parametrize("schedule", ["importance", "paper"])
def test_load_state_dict_on_moved_model(schedule: str) -> None:
    model = net()
    adapter = RankAdapter(model, schedule=schedule)
    state = adapter.state_dict()
    model.to("meta")
    adapter.load_state_dict(state)
    assert adapter.device.type == "meta"
    assert {buffer.device.type for buffer in adapter._schedule.buffers()} == {"meta"}
    assert adapter.loss(torch.zeros((), device="meta")).device.type == "meta"


def test_gates_without_adapter_and_meta_weights_are_refused() -> None:
    model = net()
    RankAdapter(model)
    with pytest.raises(UserError, match="table: the checkpoint was saved with a RankAdapter attached"):
        net().load_state_dict(model.state_dict(), strict=False)
    with torch.device("meta"):
        empty = net()
    with pytest.raises(UserError, match="on the meta device"):
        RankAdapter(empty, size_target=0.5).finish()


def test_adapter_refuses_invalid_arguments() -> None:
    with pytest.raises(UserError, match="Linear has no TT layer"):
        RankAdapter(nn.Linear(3, 3))
    model = net()
    with pytest.raises(UserError, match=r"size_target=0.001, .* one rank on every bond of 3 layers takes"):
        RankAdapter(model, size_target=0.001)
    assert model.first.rank_gates is None
    for options, message in (
        ({"size_target": -1.0}, "size_target must be a finite number above 0.0; given -1.0"),
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"schedule": "late"}, "schedule must be importance or paper; given 'late'"),
        ({"unit": "MB"}, "unit must be parameters, flops or bytes"),
        ({"stepps": 3}, "stepps is unknown .did you mean"),
        ({"threshold": 1.0}, "threshold must be below 1"),
        ({"hold": "no"}, "hold must be true or false; given 'no'"),
        ({"early_steps": -5, "schedule": "paper"}, "early_steps must be an integer of at least 0; given -5"),
        ({"steps": 10.5}, "steps must be an integer of at least 1; given 10.5"),
        ({"interval": 2.5}, "interval must be an integer"),
        ({"size_target": float("inf")}, "size_target must be a finite number above 0"),
        ({"loss_target": "x", "schedule": "paper"}, "loss_target must be a finite number; given 'x'"),
    ):
        with pytest.raises(UserError, match=message):
            RankAdapter(model, **options)  # type: ignore[arg-type]

    def broken(*_: Any) -> float:
        raise ValueError

    with pytest.raises(ValueError):
        RankAdapter(model, unit="bytes", core_bytes=broken)
    assert model.first.rank_gates is None
    adapter = RankAdapter(model)
    with pytest.raises(UserError, match="another RankAdapter is attached to 'table'"):
        RankAdapter(model)
    too_early = torch.optim.AdamW([param for name, param in model.named_parameters() if "rank_gates" not in name])
    with pytest.raises(UserError, match="does not step the rank gates of 'table'"):
        adapter.truncate(too_early)
    with pytest.raises(UserError, match="LBFGS keeps one history"):
        adapter.truncate(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UserError, match="different layers"):
        adapter.load_state_dict({**adapter.state_dict(), "ranks": {"nowhere": [1, 1]}})
    with pytest.raises(UserError, match="the state has unit='bytes', this RankAdapter unit='parameters'"):
        adapter.load_state_dict({**adapter.state_dict(), "unit": "bytes"})
    for name, other_value in (("size_target", 0.3), ("steps", 50), ("begin", 7)):
        with pytest.raises(UserError, match=f"has {name}={other_value}, this RankAdapter"):
            adapter.load_state_dict({**adapter.state_dict(), name: other_value})
    with pytest.raises(UserError, match="the state has no 'values'; it is not the state of a RankAdapter"):
        adapter.load_state_dict({key: value for key, value in adapter.state_dict().items() if key != "values"})
    other = net(rank=4)
    RankAdapter(other)
    with pytest.raises(UserError, match=r"table: core 1 of the checkpoint has the shape"):
        other.load_state_dict(model.state_dict())


def test_adapter_warns_once_of_gates_without_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    too_early = torch.optim.AdamW(model.parameters(), lr=1e-3)
    adapter = RankAdapter(model, steps=5)
    steps(model, adapter, too_early, range(4))
    assert caplog.text.count("build the optimizer after the adapter is attached") == 1


def test_adapter_warns_once_of_weight_decay(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    adapter = RankAdapter(model, steps=5)
    steps(model, adapter, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01), range(3))
    assert caplog.text.count("decays the rank gates (weight_decay=0.01)") == 1
    caplog.clear()
    model = net()
    adapter = RankAdapter(model, steps=5)
    steps(model, adapter, torch.optim.AdamW(sc.param_groups(model, weight_decay=0.01), lr=1e-3), range(3))
    assert not caplog.text


def test_densify_refuses_attached_adapter() -> None:
    model = net()
    adapter = RankAdapter(model, size_target=0.5, steps=5)
    with pytest.raises(UserError, match="RankAdapter is attached to 'table'"):
        sc.densify(model)
    ids, _ = batch(0)
    expected = model(ids)
    torch.testing.assert_close(sc.densify(copy.deepcopy(model))(ids), expected)
    adapter.detach()
    torch.testing.assert_close(sc.densify(model)(ids), expected)


def test_nested_optimizers_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    adapter = RankAdapter(model, steps=5)
    rank_gates = [gate for layer in adapter.layers.values() for gate in layer.rank_gates or ()]
    others = [param for param in model.parameters() if all(param is not gate for gate in rank_gates)]
    both = CombinedOptimizer(
        [torch.optim.AdamW(rank_gates, lr=1e-3, weight_decay=0.0), torch.optim.SGD(others, lr=1e-3)]
    )
    steps(model, adapter, both, range(4))
    assert adapter.step == 4
    assert not caplog.text


def test_separate_optimizers_for_cores_and_gates_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    adapter = RankAdapter(model, steps=5)
    rank_gates = [gate for layer in adapter.layers.values() for gate in layer.rank_gates or ()]
    others = [param for param in model.parameters() if all(param is not gate for gate in rank_gates)]
    first, second = torch.optim.AdamW(others, lr=1e-3), torch.optim.SGD(rank_gates, lr=1e-3)
    for number in range(4):
        steps(model, adapter, first, range(number, number + 1))
        second.step()
    assert adapter.step == 4
    assert not caplog.text


def test_slicing_drops_unsliceable_state(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["projection"] = torch.zeros(3, 7)
            return super().step(closure)

    param = nn.Parameter(torch.ones(4, 5))
    optimizer = Odd([param], lr=0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    slice_parameter(param, 1, torch.tensor([0, 2]), optimizer)
    assert param.shape == (4, 2)
    assert "dropped" in caplog.text
    assert param not in optimizer.state


@pytest.mark.parametrize("name", ["Adafactor", "RMSprop", "Adagrad", "NAdam"])
def test_optimizers_continue_after_slicing(name: str) -> None:
    model = net()
    adapter = RankAdapter(model, size_target=0.4, steps=8)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    steps(model, adapter, optimizer, range(14), cut_every=3)
    assert num_parameters(model) == adapter.num_parameters()


def test_gradient_release_continues_after_slicing() -> None:
    model = net()
    adapter = RankAdapter(model, size_target=0.4, steps=8)
    optimizer = came(model)
    handle = sc.optim.release_gradients(model, optimizer)
    for number in range(14):
        adapter.loss(nn.functional.cross_entropy(model(batch(number)[0]), batch(number)[1])).backward()
        if number % 3 == 2:
            adapter.truncate(optimizer)
    handle.remove()
    assert num_parameters(model) == adapter.num_parameters()


def test_gates_compile_without_graph_break() -> None:
    model = net()
    adapter = RankAdapter(model)
    with torch.no_grad():
        for layer in adapter.layers.values():
            for gate in layer.rank_gates or ():
                gate[::2] = 0.0
    ids = batch(0)[0]
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), model(ids))
