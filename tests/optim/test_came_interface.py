"""Tests of CAME as a torch.optim.Optimizer: groups, closures, schedules, refusals, saving and loading."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import came_pytorch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Partial, Shard, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from scantling.errors import UserError
from scantling.groups import param_groups
from scantling.optim import CAME, came_state_bytes, from_came_pytorch, state_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(40, 24), nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, 40))
    return layers.to(dtype)


def set_gradients(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in net.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(net, step)
        optimizer.step()


def equal_states(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    pairs = zip(*([p for group in o.param_groups for p in group["params"]] for o in (a, b)), strict=True)
    return all(
        torch.equal(p, q)
        and a.state[p].keys() == b.state[q].keys()
        and all(v.dtype == b.state[q][k].dtype and torch.equal(v, b.state[q][k]) for k, v in a.state[p].items())
        for p, q in pairs
    )


def test_hyperparameters_are_per_group() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"lr": 1e-2},
        {"betas": (0.5, 0.8, 0.9)},
        {"eps": (1e-3, 1e-2)},
        {"clip_threshold": 0.1},
        {"weight_decay": 0.5},
        {"debias": True},
        {"maximize": True},
        {"factor": "last2"},
        {"confidence": False, "matrix_dims": ((0, 1), (2,))},
        {"matrix_dims": ((0, 1), (2,))},
        {"role": "vector"},
    ]
    start = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = [nn.Parameter(start.clone()) for _ in settings]
    apart = [nn.Parameter(start.clone()) for _ in settings]
    optimizer = CAME([{"params": [p], **own} for p, own in zip(together, settings, strict=True)], lr=1e-3)
    singles = [CAME([{"params": [p], **own}], lr=1e-3) for p, own in zip(apart, settings, strict=True)]
    for step in range(5):
        for p, q in zip(together, apart, strict=True):
            p.grad = q.grad = torch.randn(start.shape, generator=torch.Generator().manual_seed(step)).double() * 1e-3
        for one in (optimizer, *singles):
            one.step()
    assert all(torch.equal(p, q) for p, q in zip(together, apart, strict=True))
    for i, p in enumerate(together):
        others = [q for j, q in enumerate(together) if j != i and {i, j} != {0, 11}]
        assert all(not torch.equal(p, q) for q in others)


def test_lr_tensor_and_schedules() -> None:
    a, b = model(), model()
    floats = CAME(a.parameters(), lr=1e-2, weight_decay=0.1, debias=True)
    tensors = CAME(b.parameters(), lr=torch.tensor(1e-2), weight_decay=0.1, debias=True)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (floats, tensors)]
    for step in range(5):
        train(a, floats, range(step, step + 1))
        train(b, tensors, range(step, step + 1))
        for schedule in schedules:
            schedule.step()
    assert tensors.param_groups[0]["lr"].item() == pytest.approx(1e-2 * 0.9**5)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_one_cycle_schedules_momentum() -> None:
    net = model()
    optimizer = CAME(net.parameters(), lr=1e-3)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=10)
    for step in range(4):
        train(net, optimizer, range(step, step + 1))
        cycle.step()
    assert optimizer.param_groups[0]["betas"][0] != 0.9
    assert optimizer.param_groups[0]["betas"][1:] == (0.999, 0.9999)


def test_step_returns_loss_of_closure() -> None:
    net = nn.Linear(24, 32)
    optimizer = CAME(net.parameters(), lr=1e-3)
    before = net.weight.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 24)).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.requires_grad
    assert not torch.equal(net.weight, before)


def test_parameters_without_gradient_do_not_change() -> None:
    a, b = nn.Parameter(torch.ones(20, 20)), nn.Parameter(torch.ones(20, 20))
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = CAME([a, b, frozen], lr=1e-2)
    a.grad = torch.randn(20, 20)
    optimizer.step()
    b.grad = torch.randn(20, 20)
    optimizer.step()
    a.grad = None
    kept = {key: value.clone() for key, value in optimizer.state[a].items()}
    value = a.detach().clone()
    optimizer.step()
    assert torch.equal(a, value)
    assert all(torch.equal(kept[key], optimizer.state[a][key]) for key in kept)
    assert [int(optimizer.state[p]["step"]) for p in (a, b)] == [2, 2]
    assert frozen not in optimizer.state


def test_matrix_dims_accept_json_lists() -> None:
    def step(dims: Any) -> Tensor:
        param = nn.Parameter(torch.ones(8, 4, 16))
        param.grad = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0))
        optimizer = CAME([{"params": [param], "matrix_dims": ((0, 1), (2,))}], lr=1e-2)
        optimizer.param_groups[0]["matrix_dims"] = dims
        optimizer.step()
        return param.detach()

    assert torch.equal(step(([0, 1], [2])), step(((0, 1), (2,))))
    assert not torch.equal(step(None), step(((0, 1), (2,))))


def test_empty_parameters_are_skipped() -> None:
    empty, full = nn.Parameter(torch.zeros(0, 20)), nn.Parameter(torch.ones(20, 20))
    empty.grad, full.grad = torch.zeros(0, 20), torch.ones(20, 20)
    CAME([empty, full], lr=1e-2).step()
    assert full.isfinite().all()


def test_duplicate_parameter_is_stepped_once() -> None:
    def step(times: int) -> Tensor:
        param = nn.Parameter(torch.ones(20, 20))
        param.grad = torch.ones(20, 20)
        optimizer = CAME([("weight", param)] * times, lr=1e-2)
        optimizer.step()
        assert optimizer.param_groups[0]["param_names"] == ["weight"]
        return param.detach()

    assert torch.equal(step(1), step(2))


def test_non_contiguous_tensors() -> None:
    base = torch.randn(30, 20)
    a, b = nn.Parameter(base.T), nn.Parameter(base.T.contiguous())
    a.grad = torch.randn(30, 20, generator=torch.Generator().manual_seed(0)).T
    b.grad = a.grad.contiguous()
    for param in (a, b):
        CAME([param], lr=1e-2, weight_decay=0.1).step()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_add_param_group_after_steps() -> None:
    a, b = nn.Parameter(torch.ones(20, 20)), nn.Parameter(torch.ones(20, 20))
    optimizer = CAME([a], lr=1e-2)
    a.grad = b.grad = torch.ones(20, 20)
    optimizer.step()
    optimizer.add_param_group({"params": [b], "debias": True})
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in (a, b)] == [2, 1]
    with pytest.raises(UserError, match=r"betas\[2\].*given 1\.0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "betas": (0.9, 0.9, 1.0)})
    with pytest.raises(UserError, match="matrix_dims must hold dims from 0 to 0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "matrix_dims": ((0,), (1,))})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be a number at least 0; given -1.0"),
        ({"lr": None}, "CAME needs a learning rate"),
        ({"lr": float("nan")}, "given nan"),
        ({"lr": torch.ones(1)}, "0-D"),
        ({"betas": (0.9, 0.999)}, "betas must be 3 numbers"),
        ({"betas": (0.9, 1.0, 0.9)}, "betas[1] must be a number at least 0 and below 1; given 1.0"),
        ({"betas": (-0.1, 0.9, 0.9)}, "betas[0] must be a number at least 0 and below 1; given -0.1"),
        ({"betas": 0.9}, "betas must be 3 numbers; given 0.9"),
        ({"eps": (1e-30, -1.0)}, "eps[1] must be a number at least 0; given -1.0"),
        ({"eps": "ab"}, "eps must be 2 numbers"),
        ({"eps": (1e-30, 0.0)}, "eps[1] must be above 0 with confidence=True"),
        ({"clip_threshold": 0.0}, "clip_threshold must be a number above 0; given 0.0"),
        ({"weight_decay": -0.1}, "weight_decay must be a number at least 0; given -0.1"),
        ({"weight_decay": True}, "given True"),
        ({"debias": "yes"}, "debias must be True or False; given 'yes'"),
        ({"maximize": 1}, "maximize must be True or False; given 1"),
        ({"factor": "first2"}, "factor must be one of auto, last2; given 'first2'"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        CAME([nn.Parameter(torch.ones(2))], **{"lr": 2e-4, **options})
    assert message in str(error.value)


@pytest.mark.parametrize("options", [{"confidence": False}, {"betas": (0.0, 0.999, 0.9999)}], ids=str)
def test_eps_may_be_zero_without_confidence(options: dict[str, Any]) -> None:
    param = nn.Parameter(torch.ones(20, 24))
    param.grad = torch.ones(20, 24)
    param.grad[3] = 0.0
    CAME([param], lr=2e-4, eps=(1e-30, 0.0), **options).step()
    assert param.isfinite().all()


def test_unknown_role_is_refused() -> None:
    with pytest.raises(UserError, match="role must be one of None, matrix, embedding, vector; given 'matrx'"):
        CAME([{"params": [nn.Parameter(torch.ones(2))], "role": "matrx"}], lr=2e-4)


def test_missing_lr_is_refused() -> None:
    param, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with pytest.raises(UserError, match="CAME needs a learning rate, such as lr=1e-3"):
        CAME([param])
    with pytest.raises(UserError, match="CAME needs a learning rate"):
        CAME([{"params": [param], "lr": 1e-3}, {"params": [other]}])
    assert CAME([{"params": [param], "lr": 1e-3}]).param_groups[0]["lr"] == 1e-3
    with pytest.raises(UserError, match=r"lr must be a number at least 0; given -0\.01"):
        CAME([param], lr=torch.tensor(-0.01, dtype=torch.float64))
    found = CAME([param], lr=np.float32(1e-3), betas=(0.9, np.float64(0.95), 0.995)).param_groups[0]
    assert type(found["lr"]) is float
    assert [type(beta) for beta in found["betas"]] == [float] * 3


def test_lr_tensor_is_copied_for_each_group() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
    first, second = CAME(groups, lr=torch.tensor(1e-3)).param_groups
    first["lr"].fill_(2e-3)
    assert float(second["lr"]) == pytest.approx(1e-3)


def test_capturable_lr_is_loaded_to_device() -> None:
    param = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = CAME([param], lr=1e-3, capturable=True)
    saved = CAME([nn.Parameter(torch.ones(2))], lr=2e-3, capturable=True).state_dict()
    for lr in (torch.tensor(2e-3), 2e-3):
        saved["param_groups"][0]["lr"] = lr
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"].device == param.device


def test_load_refuses_state_of_other_optimizers() -> None:
    param = nn.Parameter(torch.randn(20, 20))
    param.grad = torch.randn(20, 20)
    published = came_pytorch.CAME([param], lr=1e-3)
    published.step()
    optimizer = CAME([param], lr=1e-3)
    with pytest.raises(UserError, match=r"sc\.optim\.from_came_pytorch"):
        optimizer.load_state_dict(published.state_dict())
    with pytest.raises(UserError, match="has the keys state and param_groups; given no keys"):
        optimizer.load_state_dict({})
    with pytest.raises(UserError, match="has the keys state and param_groups; given list"):
        optimizer.load_state_dict([])  # type: ignore[arg-type]
    fresh = came_pytorch.CAME([nn.Parameter(torch.zeros(2))], lr=1e-3)
    with pytest.raises(UserError, match=r"group 0 has no debias, .*from_came_pytorch"):
        optimizer.load_state_dict(fresh.state_dict())
    for other in (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD):
        with pytest.raises(UserError, match=r"this is no state of CAME: group 0 has no .*momentum|clip_threshold"):
            optimizer.load_state_dict(other([param]).state_dict())
    adamw = torch.optim.AdamW([param])
    adamw.step()
    with pytest.raises(UserError, match="not a state of came-pytorch"):
        from_came_pytorch(adamw.state_dict(), optimizer)


def test_state_can_be_loaded_twice() -> None:
    optimizer = CAME([nn.Parameter(torch.zeros(2))], lr=1e-3)
    saved = optimizer.state_dict()
    for lr in (1e-3, 2e-3):
        saved["param_groups"][0]["lr"] = lr
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == lr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": "int3"}, "momentum must be one of fp32, bf16, int8, int4; given 'int3'"),
        ({"factor": "x"}, "factor must be one of auto, last2; given 'x'"),
        ({"dtype": torch.complex64}, "dtype must be one of"),
    ],
)
def test_state_bytes_refuses_unknown_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        came_state_bytes((64, 64), **options)


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (nn.Parameter(torch.ones(2, dtype=torch.complex64)), "weight is complex64"),
        (nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False), "weight is int32"),
        (nn.Parameter(torch.eye(3).to_sparse()), "weight is torch.sparse_coo"),
    ],
    ids=["complex", "integer", "sparse"],
)
def test_unsupported_parameters_are_refused(param: nn.Parameter, message: str) -> None:
    with pytest.raises(UserError, match=message):
        CAME([("weight", param)], lr=2e-4)


@pytest.mark.parametrize(
    ("placement", "options", "message"),
    [
        (Partial(), {}, r"weight is Partial.*Redistribute it to Replicate"),
        (_StridedShard(0, split_factor=2), {}, r"weight is _StridedShard.*shard_placement_fn"),
        (Shard(1), {"momentum": "int8"}, r"dims \(1,\) of weight, and dim 1 is sharded; shard an earlier dim"),
        (Shard(1), {"momentum": "int4"}, r"momentum='int4' keeps blocks"),
    ],
    ids=str,
)
def test_unsupported_placements_are_refused(placement: Any, options: dict[str, Any], message: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        sharded = nn.Parameter(DTensor.from_local(torch.ones(20, 20), mesh, [placement], run_check=False))
        with pytest.raises(UserError, match=message):
            CAME([("weight", sharded)], lr=2e-4, **options)
    finally:
        dist.destroy_process_group()


def test_sparse_gradients_are_refused_before_step() -> None:
    first, table = nn.Linear(20, 20), nn.Embedding(20, 20, sparse=True)
    optimizer = CAME([*first.named_parameters(), ("table.weight", table.weight)], lr=1e-2)
    before = first.weight.detach().clone()
    first(table(torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(UserError, match=r"table\.weight is sparse.*sparse=False"):
        optimizer.step()
    assert torch.equal(first.weight, before)
    assert not optimizer.state


def test_grad_scaler_skips_overflow() -> None:
    net = model()
    optimizer = CAME(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    expected = model()
    reference = CAME(expected.parameters(), lr=1e-2)
    for step in range(4):
        set_gradients(net, step)
        set_gradients(expected, step)
        for param in net.parameters():
            param.grad = scaler.scale(param.grad)
        if step == 2:
            next(net.parameters()).grad[0, 0] = torch.inf
        else:
            reference.step()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert equal_states(optimizer, reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", ["auto", "last2"])
def test_saved_state_resumes_bitwise(dtype: torch.dtype, factor: Any) -> None:
    """PyTorch's own loader would round a bf16 parameter's fp32 statistics to bf16."""
    straight, stopped = model(dtype), model(dtype)
    options: dict[str, Any] = {"lr": 1e-2, "debias": True, "factor": factor}
    one = CAME(param_groups(straight, weight_decay=0.1), **options)
    train(straight, one, range(6))
    two = CAME(param_groups(stopped, weight_decay=0.1), **options)
    train(stopped, two, range(3))
    file = io.BytesIO()
    torch.save({"model": stopped.state_dict(), "optimizer": two.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    resumed = model(dtype)
    resumed.load_state_dict(loaded["model"])
    three = CAME(param_groups(resumed, weight_decay=0.1), **options)
    three.load_state_dict(loaded["optimizer"])
    assert equal_states(two, three)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    for state in three.state.values():
        assert all(value.dtype == (torch.float32 if key == "step" else statistics) for key, value in state.items())
    assert three.param_groups[0]["matrix_dims"] == ((0,), (1,))
    train(resumed, three, range(3, 6))
    assert equal_states(one, three)


def test_state_dict_holds_plain_tensors() -> None:
    net = model()
    optimizer = CAME(param_groups(net), lr=1e-2)
    train(net, optimizer, range(1))
    states = optimizer.state_dict()["state"]
    assert all(type(value) is Tensor for state in states.values() for value in state.values())
    assert {frozenset(state) for state in states.values()} == {
        frozenset({"step", "exp_avg", "row", "col", "res_row", "res_col"}),
        frozenset({"step", "exp_avg", "exp_avg_sq"}),
    }
    names = [name for group in optimizer.state_dict()["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())


def test_loaded_state_shares_no_memory() -> None:
    a, b = model(), model()
    one, two = CAME(a.parameters(), lr=1e-2), CAME(b.parameters(), lr=1e-2)
    train(a, one, range(2))
    train(b, two, range(2))
    two.load_state_dict(one.state_dict())
    before = copy.deepcopy(one.state_dict()["state"])
    train(b, two, range(2, 4))
    for key, state in one.state_dict()["state"].items():
        assert all(torch.equal(value, before[key][name]) for name, value in state.items())


@pytest.mark.parametrize("change", ["shape", "key", "groups", "parameters"])
def test_load_refuses_state_that_does_not_fit(change: str) -> None:
    net = model()
    optimizer = CAME(net.named_parameters(), lr=1e-2)
    train(net, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    given = copy.deepcopy(before)
    given["param_groups"][0]["lr"] = 5.0
    if change == "shape":
        given["state"][0]["row"] = torch.zeros(3, 1)
    elif change == "key":
        given["state"][0].pop("col")
    elif change == "groups":
        given["param_groups"].append(given["param_groups"][0])
    else:
        given["param_groups"][0]["params"].pop()
    with pytest.raises(
        UserError, match=r"0\.weight|of 2 groups, the optimizer has 1|in group 0, where the optimizer has"
    ):
        optimizer.load_state_dict(given)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][0][key], value) for key, value in before["state"][0].items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": "int8"}, "group 0 was saved with momentum='fp32', this optimizer has momentum='int8'"),
        ({"rounding": "compensated"}, "saved with rounding='nearest'"),
        ({"factor": "last2"}, "saved with factor='auto'"),
        ({"confidence": False}, "saved with confidence=True"),
        ({"betas": (0.0, 0.9, 0.9)}, r"saved with betas \(0\.9, 0\.999, 0\.9999\)"),
    ],
)
def test_load_refuses_other_codecs(options: dict[str, Any], message: str) -> None:
    given = CAME([nn.Parameter(torch.zeros(2))], lr=1e-2).state_dict()
    with pytest.raises(UserError, match=message):
        CAME([nn.Parameter(torch.zeros(2))], lr=1e-2, **options).load_state_dict(given)


def test_converted_model_is_checked_at_first_step() -> None:
    param = nn.Parameter(torch.randn(32, 64))
    optimizer = CAME([param], lr=1e-2, momentum="int8")
    param.data = param.data.double()
    param.grad = torch.randn_like(param)
    with pytest.raises(
        UserError, match=r"momentum='int8' has a lower precision than a parameter of shape \(32, 64\), which is float64"
    ):
        optimizer.step()


def test_state_bytes_counts_frozen_parameters_with_state() -> None:
    params = [nn.Parameter(torch.randn(40, 50)), nn.Parameter(torch.randn(10))]
    params[0].requires_grad_(False)
    optimizer = CAME(params, lr=1e-2)
    params[1].grad = torch.randn(10)
    optimizer.step()
    assert optimizer.state_bytes() == state_bytes(optimizer)
    params[0].requires_grad_(True).grad = torch.randn(40, 50)
    optimizer.step()
    params[0].requires_grad_(False)
    assert optimizer.state_bytes() == state_bytes(optimizer) > 4 * 2000


@pytest.mark.parametrize("foreach", [None, False])
def test_compiled_step_matches_step(foreach: Any) -> None:
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 24), nn.Linear(24, 2))
        optimizer = CAME(net.parameters(), lr=1e-2, foreach=foreach)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.randn(8, 20)).square().sum().backward()
            step()
        ends.append([param.detach() for param in net.parameters()])
    assert all(map(torch.equal, *ends))


def test_load_hooks_see_whole_state() -> None:
    net = model()
    optimizer = CAME(net.parameters(), lr=1e-2)
    train(net, optimizer, range(2))
    seen: list[int] = []

    def double(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(len(state_dict["state"]))
        state = {
            key: {name: value * 2 for name, value in entries.items()} for key, entries in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [7, 7]
    assert int(next(iter(optimizer.state.values()))["step"]) == 4


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])  # noqa: S301
def test_copies_resume_like_original(how: Any) -> None:
    net = model(torch.bfloat16)
    optimizer = CAME(net.parameters(), lr=1e-2)
    train(net, optimizer, range(2))
    net_copy, copied = how((net, optimizer))
    train(net, optimizer, range(2, 4))
    train(net_copy, copied, range(2, 4))
    assert equal_states(optimizer, copied)


def test_distributed_checkpoint_loads_by_name() -> None:
    a, b = model(torch.bfloat16), model(torch.bfloat16)
    one = CAME(param_groups(a), lr=1e-2)
    train(a, one, range(2))
    saved = get_optimizer_state_dict(a, one)
    assert "1.weight" in saved["state"]
    two = CAME(param_groups(b), lr=1e-2)
    b.load_state_dict(a.state_dict())
    set_optimizer_state_dict(b, two, saved)
    assert equal_states(one, two)
