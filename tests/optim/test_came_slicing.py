"""Tests of changes to CAME's state between steps: slicing with its parameter, conversion from another package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from came_pytorch import CAME as PublishedCAME
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from scantling.errors import UserError
from scantling.groups import param_groups
from scantling.optim import CAME, from_came_pytorch, to_came_pytorch
from scantling.optim.sharding import local_tensor
from scantling.optim.slicing import full_momentum, second_moment

CONFIDENT = (0.9, 0.95, 0.995)


def trained(
    shape: tuple[int, ...], steps: int = 5, group: dict[str, Any] | None = None, **options: Any
) -> tuple[nn.Parameter, CAME]:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(shape, generator=generator).to(options.pop("dtype", torch.float32)))
    optimizer = CAME([{"params": [param], **(group or {})}], lr=1e-2, betas=CONFIDENT, debias=True, **options)
    for _ in range(steps):
        param.grad = torch.randn(shape, generator=generator).to(param.dtype)
        optimizer.step()
    return param, optimizer


# --- cutting


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(40, 33), (3, 20, 40), (20, 4, 3, 3), (33, 17)]),
    st.sampled_from(["fp32", "bf16", "int8", "int4"]),
    st.integers(0, 3),
    st.integers(0, 10**6),
)
def test_slice_state_keeps_momentum_and_second_moment(
    shape: tuple[int, ...], momentum: Any, dim: int, seed: int
) -> None:
    dim %= len(shape)
    param, optimizer = trained(shape, momentum=momentum)
    state, group = optimizer.state[param], optimizer.param_groups[0]
    view = ((0,), (1, 2, 3)) if len(shape) == 4 else ((len(shape) - 2,), (len(shape) - 1,))
    before = {key: value.clone() for key, value in state.items()}
    keep = torch.randperm(shape[dim], generator=torch.Generator().manual_seed(seed))[: max(1, shape[dim] // 2)]
    optimizer.slice_state(param, dim, keep)
    param.data = param.data.index_select(dim, keep)
    param.grad = None
    after = optimizer.state[param]

    factored = "row" in after
    found = second_moment(after, view if factored else None)
    torch.testing.assert_close(found, second_moment(before, view).index_select(dim, keep), rtol=1e-5, atol=0)
    if factored:
        rows, cols = (after[key].mean(dims, keepdim=True) for key, dims in zip(("row", "col"), view, strict=True))
        torch.testing.assert_close(rows, cols, rtol=1e-5, atol=0)  # both are means of the same squares
        pair = {"row": after["res_row"], "col": after["res_col"]}
        wanted = second_moment({"row": before["res_row"], "col": before["res_col"]}, view)
        torch.testing.assert_close(second_moment(pair, view), wanted.index_select(dim, keep), rtol=1e-5, atol=0)
    old = full_momentum(before, view, momentum).index_select(dim, keep).float()
    new = full_momentum(after, view if factored else None, momentum).float()
    largest = float(old.abs().max())
    # half a step of 1/63 or 1/7 of a scale, which in short rows reaches 9/8 of the largest value
    assert (new - old).abs().max() <= largest * {"fp32": 0, "bf16": 0, "int8": 1 / 112, "int4": 1 / 12}[momentum]
    if dim == 0 and factored and len(shape) != 4:
        assert torch.equal(new, old), "whole rows keep their codes"
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())  # checks shapes and dtypes against the parameter
    assert group is not None


def test_step_after_slice_matches_whole_step() -> None:
    """Removed rows that never had a gradient do not affect clip, means or momentum."""
    shape, kept = (48, 40), torch.arange(0, 48, 2)
    whole, cut = (nn.Parameter(torch.zeros(shape)) for _ in range(2))
    optimizers = [CAME([param], lr=1e-2, betas=CONFIDENT, debias=True, eps=(0.0, 1e-16)) for param in (whole, cut)]
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator) for _ in range(6)]
    for grad in grads:
        grad[1::2] = 1e-12
    for grad in grads[:4]:
        for param, optimizer in zip((whole, cut), optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
    cut.grad = None
    optimizers[1].slice_state(cut, 0, kept)
    cut.data = cut.data[kept]
    before = whole.detach()[kept]
    whole.grad, cut.grad = grads[4].clone(), grads[4][kept].clone()
    for optimizer in optimizers:
        optimizer.step()
    directions = [(param - before).detach() for param in (whole[kept], cut)]
    # the clip averages over half as many elements, so lengths differ but directions do not
    cosine = torch.nn.functional.cosine_similarity(*(direction.flatten() for direction in directions), dim=0)
    assert cosine > 0.999


@pytest.mark.parametrize("rounding", ["nearest", "compensated"])
def test_slice_to_thin_matrix(rounding: Any) -> None:
    param, optimizer = trained((64, 40), momentum="int8", dtype=torch.bfloat16, rounding=rounding)
    before = {key: value.clone() for key, value in optimizer.state[param].items()}
    mask = torch.zeros(64, dtype=torch.bool)
    mask[::8] = True
    optimizer.slice_state(param, -2, mask)
    state = optimizer.state[param]
    expected = {"step", "exp_avg", "exp_avg_sq"} | ({"low"} if rounding == "compensated" else set())
    assert state.keys() == expected
    torch.testing.assert_close(state["exp_avg_sq"], second_moment(before, ((0,), (1,)))[mask])
    if rounding == "compensated":
        assert torch.equal(state["low"], before["low"][mask])


def test_slice_of_tt_core_keeps_matrix_dims() -> None:
    """A core (r, n, r') as a matrix (r n) x r'; both ranks are sliced, one after the other."""
    param, optimizer = trained((6, 10, 24), group={"matrix_dims": ((0, 1), (2,)), "role": "matrix"}, momentum="int4")
    optimizer.slice_state(param, 0, torch.tensor([0, 2, 5]))
    optimizer.slice_state(param, 2, torch.arange(20))
    param.data = param.data[[0, 2, 5]][:, :, :20]
    param.grad = torch.randn_like(param)
    optimizer.step()
    assert optimizer.state[param]["row"].shape == (3, 10, 1)
    assert optimizer.state[param]["exp_avg_codes"].shape == (3, 10, 10)


def test_slice_without_confidence() -> None:
    param, optimizer = trained((64, 40), momentum="int8", group={"confidence": False})
    optimizer.slice_state(param, 0, torch.arange(32))
    param.grad = None
    param.data = param.data[:32]
    param.grad = torch.randn_like(param)
    optimizer.step()
    assert not {"res_row", "res_col"} & optimizer.state[param].keys()
    with pytest.raises(UserError, match="always has a confidence"):
        to_came_pytorch(optimizer)


def test_slice_state_refuses_bad_indices() -> None:
    param, optimizer = trained((20, 30))
    for dim, index, message in (
        (2, torch.arange(3), "dim must be from -2 to 1; given 2"),
        (0, torch.tensor([20]), r"indices must be from 0 to 19; given \[20\]"),
        (0, torch.ones(30, dtype=torch.bool), "the mask has 30 entries, dim 0 has 20"),
        (0, [1, 2], "1-D tensor"),
        (0, torch.tensor([3, 3]), r"each index must be unique; given \[3, 3\]"),
    ):
        with pytest.raises(UserError, match=message):
            optimizer.slice_state(param, dim, index)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="is not in this optimizer"):
        optimizer.slice_state(nn.Parameter(torch.zeros(3)), 0, torch.arange(1))
    fresh = nn.Parameter(torch.zeros(20, 20))
    CAME([fresh], lr=2e-4).slice_state(fresh, 0, torch.arange(2))  # no state yet


def test_slice_to_nothing_removes_state() -> None:
    param, optimizer = trained((20, 30), momentum="int8")
    optimizer.slice_state(param, 0, torch.arange(0))
    param.data, param.grad = param.data[:0], None
    assert not optimizer.state.get(param)
    optimizer.step()


@pytest.mark.parametrize("momentum", ["fp32", "bf16", "int8", "int4"])
def test_slice_state_refuses_sharded_parameters(momentum: Any) -> None:
    """Replicated parameters behave like plain tensors on one process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        alone, own = trained((40, 64), momentum=momentum)
        whole = nn.Parameter(DTensor.from_local(alone.detach().clone(), mesh, [Replicate()], run_check=False))
        optimizer = CAME([whole], lr=1e-2, betas=CONFIDENT, debias=True, momentum=momentum)
        optimizer.load_state_dict(own.state_dict())
        index = torch.arange(3, 40)
        for each, of in ((own, alone), (optimizer, whole)):
            each.slice_state(of, 0, index)
        for key, value in own.state[alone].items():
            assert torch.equal(local_tensor(optimizer.state[whole][key]), value)
        sharded = nn.Parameter(DTensor.from_local(torch.ones(20, 20), mesh, [Shard(0)], run_check=False))
        with pytest.raises(UserError, match="the parameter is sharded; only replicated"):
            CAME([sharded], lr=1e-2).slice_state(sharded, 0, torch.arange(20))
    finally:
        dist.destroy_process_group()


# --- came-pytorch


def advance(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        for number, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + number)
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach().clone() for param in params]


def fresh_params(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(i))) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("to_ours", [True, False])
def test_runs_switch_to_and_from_published_package(to_ours: bool) -> None:
    shapes: list[tuple[int, ...]] = [(20, 33), (7,), (3, 18, 16), (4, 3, 3, 3)]
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": CONFIDENT}

    def ours(params: list[nn.Parameter]) -> CAME:
        return CAME(params, factor="last2", **options)

    def theirs(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return PublishedCAME(params, **options)

    straight = fresh_params(shapes)
    wanted = advance(straight, theirs(straight), range(12))
    params = fresh_params(shapes)
    first = theirs(params) if to_ours else ours(params)
    advance(params, first, range(6))
    if to_ours:
        second: torch.optim.Optimizer = ours(params)
        second.load_state_dict(from_came_pytorch(first.state_dict(), second))  # type: ignore[arg-type]
    else:
        second = theirs(params)
        second.load_state_dict(to_came_pytorch(first))  # type: ignore[arg-type]
    for found, want in zip(advance(params, second, range(6, 12)), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", ["auto", "last2"])
def test_debiased_averages_convert_without_a_jump(factor: Any) -> None:
    """The next step of the published package is about as long as the step before."""
    params = fresh_params([(40, 33), (7,), (20, 4, 3, 3)])
    optimizer = CAME(params, lr=1e-3, betas=CONFIDENT, debias=True, factor=factor)
    before = advance(params, optimizer, range(5))
    last = advance(params, optimizer, range(5, 6))
    published = PublishedCAME(params, lr=1e-3)
    published.load_state_dict(to_came_pytorch(optimizer))
    after = advance(params, published, range(6, 7))
    for start, middle, end in zip(before, last, after, strict=True):
        assert 0.4 < float((end - middle).norm() / (middle - start).norm()) < 2.5


def test_conversion_refuses_unsupported_options() -> None:
    param, optimizer = trained((20, 33))
    with pytest.raises(UserError, match=r"is not one of came-pytorch: it has no exp_avg_sq_row.*to `load_state_dict`"):
        from_came_pytorch(optimizer.state_dict(), optimizer)
    with pytest.raises(UserError, match="cannot maximize; given maximize=True"):
        to_came_pytorch(CAME([param], lr=1e-3, maximize=True))


@pytest.mark.parametrize("momentum", ["fp32", "int8"])
def test_conversion_averages_other_factors(momentum: Any) -> None:
    """A convolution, a thin matrix and a matrix: statistics with equal factoring are exact, others keep their mean."""
    shapes: list[tuple[int, ...]] = [(20, 4, 3, 3), (40, 4), (20, 33)]
    params = fresh_params(shapes)
    published = PublishedCAME(params, lr=1e-2)
    advance(params, published, range(6))
    optimizer = CAME(params, lr=1.0, momentum=momentum, debias=True)
    optimizer.load_state_dict(from_came_pytorch(published.state_dict(), optimizer))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for param in params:
        saved, state = published.state[param], optimizer.state[param]
        mean = saved["exp_avg_sq_row"].mean()
        torch.testing.assert_close((state["row"] if "row" in state else state["exp_avg_sq"]).mean(), mean)
        assert int(state["step"]) == 6
    assert torch.equal(optimizer.state[params[2]]["row"].squeeze(-1), published.state[params[2]]["exp_avg_sq_row"])
    assert all(torch.isfinite(value).all() for value in advance(params, optimizer, range(6, 9)))
    with pytest.raises(UserError, match=r"hold \[3\] parameters, those of this optimizer \[2\]"):
        from_came_pytorch(published.state_dict(), CAME(params[:2], lr=2e-4))


def test_conversion_to_other_groups() -> None:
    """Convert from the published package's `CAME(model.parameters())` to CAME over `param_groups(model)`."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.LayerNorm(33), torch.nn.Linear(33, 20))
    params = list(model.parameters())
    published = PublishedCAME(params, lr=1e-2)
    advance(params, published, range(4))
    optimizer = CAME(param_groups(model, weight_decay=0.1), lr=3e-3)
    with pytest.raises(UserError, match=r"hold \[6\] parameters, those of this optimizer \[2, 4\].*as parameters="):
        from_came_pytorch(published.state_dict(), optimizer)
    optimizer.load_state_dict(from_came_pytorch(published.state_dict(), optimizer, model.parameters()))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {group["lr"] for group in optimizer.param_groups} == {3e-3}
    for param in params:
        assert torch.equal(optimizer.state[param]["exp_avg"], published.state[param]["exp_avg"])
    with pytest.raises(UserError, match="hold 6 parameters; given 5"):
        from_came_pytorch(published.state_dict(), optimizer, params[:5])
    with pytest.raises(UserError, match=r"parameter 0 of this optimizer, \(33, 20\), is not one of parameters="):
        from_came_pytorch(published.state_dict(), optimizer, [*params[1:], torch.nn.Parameter(torch.zeros(1))])
