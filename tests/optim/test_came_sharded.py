"""Tests that sharded CAME equals CAME on one device with few collectives, and its state moves between world sizes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode

from scantling.errors import UserError
from scantling.groups import param_groups
from scantling.optim import CAME, _cpu, _triton, state_bytes
from tests.processes import counted, run

pytestmark = pytest.mark.dist

CONV, STACK = ((0,), (1, 2, 3)), ((1,), (2,))
# (shape, matrix_dims): a matrix, a thin one, a stack, rows of two dims, vectors, a thin one, a convolution, short rows
SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((33, 40), None),
    ((7, 300), ((1,), (0,))),
    ((5, 25, 30), STACK),
    ((5, 6, 40), ((0, 1), (2,))),
    ((5,), None),
    ((130,), None),
    ((9, 3), None),
    ((17, 6, 3, 3), CONV),
    ((35, 17), None),
]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95, 0.995), "debias": True}


def gradient(shape: tuple[int, ...], step: int, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a gradient whose rows and columns differ in magnitude, with occasional spikes for the clip."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    grad = torch.randn(shape, generator=generator)
    for dim, size in enumerate(shape):
        grad *= torch.logspace(-1, 1, size).view([-1 if d == dim else 1 for d in range(len(shape))])
    return (grad * (10.0 if step % 7 == 3 else 0.1)).to(dtype)


class Pair:
    """The same parameters unsharded and sharded, with an optimizer each."""

    def __init__(self, mesh: Any, placements: list[list[Placement]], dtype: torch.dtype, **options: Any) -> None:
        self.mesh, self.placements, self.dtype = mesh, placements, dtype
        start = [
            torch.randn(s, generator=torch.Generator().manual_seed(i)).to(dtype)
            for i, (s, _) in shapes_with_placement(placements)
        ]
        self.whole = [nn.Parameter(value.clone()) for value in start]
        self.parts = [
            nn.Parameter(distribute_tensor(value, mesh, own))
            for value, own in zip(start, drop_empty(placements), strict=True)
        ]
        self.dims = [dims for _, (_, dims) in shapes_with_placement(placements)]
        settings = {**OPTIONS, **options}
        self.one, self.many = (
            CAME([{"params": [p], "matrix_dims": d} for p, d in zip(ps, self.dims, strict=True)], **settings)
            for ps in (self.whole, self.parts)
        )

    def step(self, number: int) -> None:
        for index, (p, q) in enumerate(zip(self.whole, self.parts, strict=True)):
            p.grad = gradient(tuple(p.shape), number, index, self.dtype)
            q.grad = distribute_tensor(p.grad, self.mesh, q.placements, src_data_rank=None)
        self.one.step()
        self.many.step()

    def check(self, tolerance: float) -> None:
        for p, q in zip(self.whole, self.parts, strict=True):
            assert_close(q, p, tolerance, "param")
            for key, value in self.one.state[p].items():
                other = self.many.state[q][key]
                assert other.shape == value.shape
                assert_close(other, value, tolerance, key)


def shapes_with_placement(placements: list[list[Placement]]) -> list[tuple[int, tuple[tuple[int, ...], Any]]]:
    return [(i, shape) for i, (shape, own) in enumerate(zip(SHAPES, placements, strict=True)) if own]


def drop_empty(placements: list[list[Placement]]) -> list[list[Placement]]:
    return [own for own in placements if own]


def repeat_placement(*placement: Placement) -> list[list[Placement]]:
    """Return this placement for every shape that has the sharded dim."""
    most = max((p.dim for p in placement if isinstance(p, Shard)), default=0)
    return [list(placement) if most < len(shape) else [] for shape, _ in SHAPES]


def assert_close(sharded: Tensor, whole: Tensor, tolerance: float, what: str) -> None:
    full = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded
    error = (full.double() - whole.double()).norm() / whole.double().norm().clamp(min=1e-30)
    assert error <= tolerance, f"{what} of {tuple(whole.shape)} is off by {float(error):.2e}"


def steps_with_an_empty_shard() -> None:
    """One expert on two ranks: the second rank has an empty shard, and still takes part in collectives."""
    mesh = init_device_mesh("cpu", (2,))
    for momentum, confidence in product(("fp32", "bf16", "int8", "int4"), (True, False)):
        whole = nn.Parameter(torch.ones(1, 32, 32))
        part = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
        options = {**OPTIONS, "momentum": momentum, "confidence": confidence}
        one, many = (CAME([{"params": [p], "matrix_dims": STACK}], **options) for p in (whole, part))
        for number in range(3):
            whole.grad = gradient((1, 32, 32), number, 0, torch.float32)
            part.grad = distribute_tensor(whole.grad, mesh, [Shard(0)], src_data_rank=None)
            one.step()
            many.step()
        assert_close(part, whole, 2e-6, momentum)


def test_empty_shard_in_every_codec() -> None:
    run(2, steps_with_an_empty_shard)


def equals_one_device(cases: list[tuple[tuple[int, ...], tuple[Placement, ...]]], steps: int) -> None:
    meshes = {shape: init_device_mesh("cpu", shape) for shape, _ in cases}
    for shape, placements in cases:
        pair = Pair(meshes[shape], repeat_placement(*placements), torch.float32)
        with counted() as calls:
            for number in range(steps):
                pair.step(number)
        assert {name for name, _ in calls} == {"all_reduce"}
        for group in {group for _, group in calls}:
            assert sum(g is group for _, g in calls) <= 3 * steps
        # fp32 sums in another order: a few rounding errors of 6e-8 in each of at most 50 steps
        pair.check(2e-6)


ON_FOUR: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((4,), (Shard(0),)),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (Shard(1), Shard(2))),
    ((2, 2), (Replicate(), Shard(0))),
]


@pytest.mark.parametrize(
    ("cases", "steps"),
    [
        ([((2,), (Shard(0),)), ((2,), (Shard(1),))], 50),
        pytest.param([((3,), (Shard(0),)), ((3,), (Shard(1),))], 50, marks=pytest.mark.slow),
        (ON_FOUR, 15),
        pytest.param(ON_FOUR, 50, marks=pytest.mark.slow),
    ],
    ids=["2", "3", "4", "4-long"],
)
def test_sharded_steps_match_one_device(cases: list[tuple[tuple[int, ...], tuple[Placement, ...]]], steps: int) -> None:
    """Five over four ranks leave one rank without elements: of a vector, of a stack, of a matrix's rows."""
    run(prod(cases[0][0]), equals_one_device, cases, steps)


def exchanges_and_bytes() -> None:
    pair = Pair(init_device_mesh("cpu", (2,)), repeat_placement(Shard(0)), torch.float32)
    for number in range(2):
        with CommDebugMode() as comm:
            pair.step(number)
        assert comm.get_total_counts() == 3
    assert pair.many.state_bytes() == state_bytes(pair.many) < pair.one.state_bytes()
    vectors = CAME([pair.parts[4], pair.parts[5]], lr=2e-4)
    with CommDebugMode() as comm:
        vectors.step()
    assert comm.get_total_counts() == 2
    state = pair.many.state[pair.parts[2]]  # a stack of matrices, sharded along the batch
    assert all(state[key].placements == (Shard(0),) for key in ("exp_avg", "row", "col", "res_row", "res_col"))
    state = pair.many.state[pair.parts[0]]
    assert state["row"].placements == state["exp_avg"].placements == (Shard(0),)
    assert state["col"].placements == (Replicate(),)
    assert type(state["step"]) is Tensor
    replicated = nn.Parameter(distribute_tensor(torch.ones(20, 20), pair.mesh, [Replicate()]))
    replicated.grad = distribute_tensor(torch.ones(20, 20), pair.mesh, [Replicate()])
    alone = CAME([replicated], lr=2e-4)
    with CommDebugMode() as comm:
        alone.step()
    assert comm.get_total_counts() == 0


def test_sharded_step_takes_three_all_reduces() -> None:
    run(2, exchanges_and_bytes)


def gradients_placed_otherwise() -> None:
    mesh = init_device_mesh("cpu", (2,))
    grad = gradient((20, 30), 0, 0)
    whole_param = nn.Parameter(torch.ones(20, 30))
    whole_param.grad = grad
    CAME([whole_param], lr=2e-4).step()
    partial = DTensor.from_local(grad / 2, mesh, [Partial()], run_check=False)
    for placement in (Replicate(), Shard(0), Shard(1)):
        for given in (partial, distribute_tensor(grad, mesh, [Replicate()]), distribute_tensor(grad, mesh, [Shard(1)])):
            param = nn.Parameter(distribute_tensor(torch.ones(20, 30), mesh, [placement]))
            param.grad = given
            CAME([param], lr=2e-4).step()
            assert_close(param, whole_param, 1e-6, "param")
    param = nn.Parameter(torch.ones(20, 30))
    param.grad = partial
    with pytest.raises(UserError, match="the gradient of weight and the parameter must be on the same device mesh"):
        CAME([("weight", param)], lr=2e-4).step()


def test_gradients_with_other_placements_are_redistributed() -> None:
    """Sequence parallelism leaves the gradients of norms Partial."""
    run(2, gradients_placed_otherwise)


def some_gradients_missing() -> None:
    """Parameter 0 always has a gradient; 1 not on rank 1, then nowhere; 3 nowhere, then everywhere; 5 not on rank 0."""
    rank = dist.get_rank()
    pair = Pair(init_device_mesh("cpu", (2,)), repeat_placement(Shard(0)), torch.float32, momentum="int4")
    for number in range(4):
        missing = {1: [1] if number < 2 else [0, 1], 3: [0, 1] if number < 2 else [], 5: [0]}
        kept = [p.full_tensor() for p in pair.parts]
        before = [{k: v.clone() for k, v in pair.many.state[p].items()} for p in pair.parts]
        for index, (p, q) in enumerate(zip(pair.whole, pair.parts, strict=True)):
            grad = gradient(tuple(p.shape), number, index)
            parts = [part * (r not in missing.get(index, [])) for r, part in enumerate(grad.chunk(2))]
            p.grad = torch.cat(parts) if len(missing.get(index, [])) < 2 else None
            q.grad = None
            if rank not in missing.get(index, []):
                q.grad = distribute_tensor(torch.cat(parts), pair.mesh, [Shard(0)], src_data_rank=None)
        pair.one.step()
        pair.many.step()
        for index, p in enumerate(pair.parts):
            if missing.get(index) == [0, 1]:
                assert torch.equal(p.full_tensor(), kept[index])
                state = pair.many.state[p]
                assert all(
                    torch.equal(state[k].to_local(), v.to_local()) for k, v in before[index].items() if k != "step"
                )
                assert int(state["step"]) == (2 if index == 1 else 0)
    for p, q in zip(pair.whole, pair.parts, strict=True):
        # int4 occasionally rounds an element differently, if its fp32 value is on a boundary
        assert_close(q, p, 1e-3, "param")
        assert pair.one.state[p]["step"].equal(pair.many.state[q]["step"])


def test_missing_gradients_on_some_or_all_ranks() -> None:
    run(2, some_gradients_missing)


LOW_BIT: list[tuple[tuple[Placement, ...], dict[str, Any], torch.dtype]] = [
    ((Shard(0),), {"momentum": "int8"}, torch.float32),
    ((Shard(0),), {"momentum": "int4", "rounding": "stochastic"}, torch.bfloat16),
    ((Shard(1),), {"momentum": "bf16", "rounding": "stochastic"}, torch.bfloat16),
    ((Shard(1),), {"momentum": "int4"}, torch.float32),
    ((Shard(0),), {"momentum": "bf16", "rounding": "compensated"}, torch.bfloat16),
]


def low_bit_state_and_noise(cases: list[tuple[tuple[Placement, ...], dict[str, Any], torch.dtype]]) -> None:
    mesh = init_device_mesh("cpu", (3,))
    for placements, options, dtype in cases:
        own = repeat_placement(*placements)
        if options["momentum"] == "int4" and placements == (Shard(1),):
            own = [own[index] if shape == (5, 25, 30) else [] for index, (shape, _) in enumerate(SHAPES)]
        pair = Pair(mesh, own, dtype, **options)
        for number in range(3):
            pair.step(number)
        for p, q in zip(pair.whole, pair.parts, strict=True):
            pairs = [(p, q), *((value, pair.many.state[q][key]) for key, value in pair.one.state[p].items())]
            for whole, part in pairs:
                full = part.full_tensor() if isinstance(part, DTensor) else part
                assert full.dtype == whole.dtype
                if whole.dtype != torch.float32:
                    # rounding at a boundary; different noise would change most elements
                    assert (full != whole).double().mean() < 0.02, (options, tuple(p.shape), whole.dtype)


def test_sharded_codes_match_one_device() -> None:
    run(3, low_bit_state_and_noise, LOW_BIT)


def in_kernels(function: Callable[..., None], *args: Any) -> None:
    """Call a function with the kernels for GPUs, in Triton's interpreter."""
    begun: list[bool] = []
    begin = _triton.BatchStages.begin

    def recorded(self: _triton.BatchStages, *args: Any) -> None:
        begun.append(self.is_sharded)
        begin(self, *args)

    _triton.DEVICES = ("cpu",)
    _triton.BatchStages.begin = recorded
    _cpu.can_step = lambda step: False
    function(*args)
    assert any(begun)


@pytest.mark.parametrize(
    ("ranks", "function", "args"),
    [
        (2, equals_one_device, ([((2,), (Shard(0),)), ((2,), (Shard(1),))], 4)),
        (4, equals_one_device, (ON_FOUR, 3)),
        (2, exchanges_and_bytes, ()),
        (2, some_gradients_missing, ()),
        # Triton's interpreter truncates a momentum in bf16, while eager steps round it.
        (3, low_bit_state_and_noise, ([case for case in LOW_BIT if case[1]["momentum"] != "bf16"],)),
    ],
    ids=["2", "4", "exchanges", "missing", "low-bit"],
)
def test_sharded_steps_in_kernels(ranks: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    pytest.importorskip("triton")
    run(ranks, in_kernels, function, *args)


def codes_of_short_rows() -> None:
    """Without a gradient and with beta1 = 1/2, the new momentum is exactly half the old one, on any number of ranks."""
    mesh = init_device_mesh("cpu", (3,))
    for momentum, (shape, dims) in product(("int8", "int4"), [((35, 17), None), ((20, 2, 24), ((0, 1), (2,)))]):
        whole = nn.Parameter(torch.zeros(shape))
        part = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None))
        options: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.9, 0.9), "momentum": momentum}
        one, many = (CAME([{"params": [p], "matrix_dims": dims}], **options) for p in (whole, part))
        whole.grad = gradient(shape, 0, 0)
        one.step()
        many.load_state_dict(one.state_dict())
        whole.grad = torch.zeros(shape)
        one.step()
        part.grad = distribute_tensor(whole.grad, mesh, [Shard(0)], src_data_rank=None)
        with counted() as calls:
            many.step()
        assert [name for name, _ in calls] == ["all_reduce"] * 3
        rows = [len(rows) for rows in torch.arange(shape[0]).chunk(3)]
        for key in ("exp_avg_codes", "exp_avg_scale"):
            found, wanted = many.state[part][key].to_local(), one.state[whole][key]
            assert wanted.any()
            assert torch.equal(found, wanted.split(rows)[dist.get_rank()]), (momentum, shape, key)


def test_sharded_codes_of_short_rows() -> None:
    run(3, codes_of_short_rows)


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Embedding(41, 24), nn.Linear(24, 33), nn.LayerNorm(33), nn.Linear(33, 41))
    return nn.Sequential(*layers).to(dtype)


def make_optimizer(net: nn.Module, **options: Any) -> CAME:
    return CAME(param_groups(net, weight_decay=0.1), lr=1e-2, betas=(0.9, 0.95, 0.995), debias=True, **options)


def sharded_network(dtype: torch.dtype, mesh: Any) -> nn.Sequential:
    net = network(dtype)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def training_with_fully_shard() -> None:
    tokens = torch.randint(0, 41, (8, 5), generator=torch.Generator().manual_seed(0))
    for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))):
        one, many = network(torch.float64), sharded_network(torch.float64, mesh)
        optimizers = [make_optimizer(net) for net in (one, many)]
        for _ in range(6):
            for net, optimizer, batch in zip(
                (one, many), optimizers, (tokens, tokens.chunk(4)[dist.get_rank()]), strict=True
            ):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(batch).flatten(0, 1), batch.flatten())
                loss.backward()
                optimizer.step()
        for p, q in zip(one.parameters(), many.parameters(), strict=True):
            assert_close(q, p, 1e-9, "param")


def test_fully_shard_and_hybrid_sharding() -> None:
    """In fp64, in which both gradients differ by 1e-16, so that training does not amplify the difference."""
    run(4, training_with_fully_shard)


def advance(net: nn.Module, optimizer: CAME, steps: range) -> None:
    for number in steps:
        for index, param in enumerate(net.parameters()):
            grad = gradient(tuple(param.shape), number, index, param.dtype)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        optimizer.step()


def gather(value: Tensor) -> Tensor:
    """Return a copy, because `full_tensor` of a replicated tensor returns its own memory."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def full_state(net: nn.Module, optimizer: CAME) -> dict[str, Any]:
    params = dict(net.named_parameters())
    state = {name: {key: gather(v) for key, v in optimizer.state[param].items()} for name, param in params.items()}
    return {"state": state, "params": {name: gather(param) for name, param in params.items()}}


SAVED_BY = 4
RUNS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain": (torch.float32, {}),
    "int8": (torch.bfloat16, {"momentum": "int8", "rounding": "compensated"}),
    "int4": (torch.bfloat16, {"momentum": "int4", "rounding": "stochastic"}),
}


def save(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, (dtype, options) in RUNS.items():
        net = sharded_network(dtype, mesh)
        optimizer = make_optimizer(net, **options)
        advance(net, optimizer, range(3))
        saved = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
        dcp.save(saved, checkpoint_id=f"{folder}/{name}")
        at_save = full_state(net, optimizer)
        advance(net, optimizer, range(3, 6))
        full = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
        at_end = full_state(net, optimizer)
        if dist.get_rank() == 0:
            torch.save((at_save, at_end, full), f"{folder}/{name}.pt")


def resume(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, (dtype, options) in RUNS.items():
        net = sharded_network(dtype, mesh)
        optimizer = make_optimizer(net, **options)
        loaded = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
        dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
        set_model_state_dict(net, loaded["model"])
        set_optimizer_state_dict(net, optimizer, loaded["optimizer"])
        at_save, at_end, full = torch.load(f"{folder}/{name}.pt")
        assert_equal(full_state(net, optimizer), at_save)
        advance(net, optimizer, range(3, 6))
        if dist.get_world_size() == SAVED_BY:
            assert_equal(full_state(net, optimizer), at_end)
        elif name == "plain":
            for key, value in full_state(net, optimizer)["params"].items():
                assert_close(value, at_end["params"][key], 2e-6, key)
        # full tensors, as one device saves them, are sharded during loading
        set_optimizer_state_dict(net, optimizer, full, options=StateDictOptions(full_state_dict=True))
        assert_equal(full_state(net, optimizer)["state"], at_end["state"])
        own = optimizer.state_dict()
        index = {
            i: name
            for group in own["param_groups"]
            for i, name in zip(group["params"], group["param_names"], strict=True)
        }
        optimizer.load_state_dict({**own, "state": {i: at_save["state"][index[i]] for i in own["state"]}})
        assert_equal(full_state(net, optimizer)["state"], at_save["state"])


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, dict):
            assert_equal(value, b[key])
        else:
            assert value.dtype == b[key].dtype
            assert torch.equal(value, b[key])


def test_checkpoint_of_four_ranks_resumes_on_four_two_and_one(tmp_path: Path) -> None:
    """Resuming on four ranks is bitwise equal for every codec."""
    run(SAVED_BY, save, str(tmp_path))
    for world in (SAVED_BY, 2, 1):
        run(world, resume, str(tmp_path))
