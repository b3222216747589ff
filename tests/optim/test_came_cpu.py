"""Tests of the step in C against the same step in PyTorch operations."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from scantling.errors import UserError
from scantling.optim import CAME, _cpu, predicted_temporary_bytes
from scantling.optim.codecs import read_weight
from scantling.optim.state import ParamLayout

SHAPES: list[tuple[int, ...]] = [
    (40, 33),
    (16, 200),
    (3, 20, 130),
    (20, 4, 3, 3),
    (300, 17),
    (5,),
    (2000,),
    (40, 8),
    (),
]


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    if _cpu._library() is None:
        pytest.skip("there is no C compiler here")


def trained(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, *, alone: bool = False, **options: Any
) -> tuple[list[nn.Parameter], CAME]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    optimizer = CAME(params, lr=1e-2, **options)
    for _ in range(6):
        for param in params:
            grad = torch.randn(param.shape, generator=generator) * (1 + torch.rand(param.shape, generator=generator))
            param.grad = grad.to(dtype)
        for together in [[param] for param in params] if alone else [params]:
            optimizer.step_parameters(together)
    return params, optimizer


def after_one_step(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Parameter, CAME]:
    param = nn.Parameter(torch.randn(32, 48, dtype=dtype))
    optimizer = CAME([param], lr=1e-2, **options)
    param.grad = torch.randn_like(param)
    optimizer.step()
    return param, optimizer


def convert(param: nn.Parameter, dtype: torch.dtype) -> None:
    param.grad = None
    param.data = param.data.to(dtype)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize(
    ("start", "options", "change"),
    [
        (torch.float32, {"rounding": "compensated"}, lambda p, g: convert(p, torch.bfloat16)),
        (torch.float64, {}, lambda p, g: convert(p, torch.float32)),
        (torch.bfloat16, {}, lambda p, g: g.update(rounding="compensated")),
        (torch.float32, {}, lambda p, g: g.update(momentum="int8")),
        (torch.float32, {}, lambda p, g: g.update(momentum="bf16")),
        (torch.float32, {}, lambda p, g: g.update(role="vector")),
    ],
    ids=["compensated", "float64", "rounding", "momentum", "bf16", "role"],
)
def test_step_refuses_state_that_no_longer_fits(foreach: Any, start: Any, options: Any, change: Any) -> None:
    param, optimizer = after_one_step(start, foreach=foreach, **options)
    change(param, optimizer.param_groups[0])
    before = param.detach().clone()
    param.grad = torch.randn_like(param)
    with pytest.raises(UserError, match="no longer fits it"):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("foreach", [None, False])
def test_step_refuses_changed_shapes(foreach: Any) -> None:
    param, optimizer = after_one_step(foreach=foreach)
    old = param.grad
    param.grad = None
    param.data = param.data[:20].clone()
    param.grad = torch.randn_like(param)
    with pytest.raises(UserError, match="no longer fits it"):
        optimizer.step()
    optimizer.slice_state(param, 0, torch.arange(20))
    optimizer.step()
    param.grad = None
    param.data = torch.randn(32, 48)
    param.grad = old
    param.data = param.data[:20].clone()
    with pytest.raises(UserError, match=r"the gradient of parameter 0 of shape \(20, 48\) has the shape \(32, 48\)"):
        optimizer.step()


def test_c_step_skips_fake_tensors() -> None:
    with FakeTensorMode():
        after_one_step()


def test_c_step_skips_lazily_negated_gradients() -> None:
    """The imaginary part of a conjugate is a lazily negated view, and so is the gradient of its base."""
    ends = []
    for foreach in (None, False):
        real, imaginary = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))
        optimizer = CAME([real, imaginary], lr=0.05, debias=True, foreach=foreach)
        for _ in range(20):
            optimizer.zero_grad()
            torch.complex(real, imaginary).conj().resolve_conj().abs().square().backward()
            optimizer.step()
        ends.append((real.item(), imaginary.item()))
    assert ends[0] == pytest.approx(ends[1])
    assert ends[0][1] < 1.5


@pytest.mark.parametrize("part", ["param", "grad"])
def test_c_step_skips_tensor_subclasses(part: str) -> None:
    param, optimizer = after_one_step()
    step = optimizer.param_step(optimizer.param_groups[0], param, 0)
    assert _cpu.can_step(step)
    tensor = getattr(step, part).detach()
    wrapped = TwoTensor(tensor, tensor.clone())
    if part == "grad":
        changed = replace(step, grad=wrapped)
    else:
        layout = step.layout
        changed = replace(step, layout=ParamLayout.build((), wrapped, layout.state, layout.view, layout.plan))
    assert not _cpu.can_step(changed)


def test_layout_is_cached_until_tensors_change() -> None:
    param, optimizer = after_one_step()
    state, group = optimizer.state[param], optimizer.param_groups[0]
    layout = optimizer.param_step(group, param, 0).layout
    assert optimizer.param_step(group, param, 0).layout is layout
    ends = []
    for replaces in (False, True):
        torch.manual_seed(0)
        copy, other = after_one_step()
        for tensor in (copy, *other.state[copy].values()) if replaces else ():
            tensor.data = tensor.data.clone()  # another address
        other.step()
        ends.append(copy.detach())
    assert torch.equal(*ends)
    param.data = param.data.clone()
    assert optimizer.param_step(group, param, 0).layout is not layout
    for name in ("row", "exp_avg"):
        layout = optimizer.param_step(group, param, 0).layout
        state[name] = state[name].clone()
        assert optimizer.param_step(group, param, 0).layout is not layout
    layout = optimizer.param_step(group, param, 0).layout
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_step(optimizer.param_groups[0], param, 0).layout is not layout
    other = nn.Parameter(torch.zeros(3))
    other.grad = torch.ones(3)
    optimizer.param_groups[0]["params"] = [other]
    optimizer.step()
    assert list(optimizer._layouts) == [other]


def test_c_step_skips_state_on_other_device() -> None:
    param, optimizer = after_one_step()
    state = optimizer.state[param]
    state["row"] = state["row"].to("meta")
    assert not _cpu.can_step(optimizer.param_step(optimizer.param_groups[0], param, 0))


def test_c_step_splits_wide_and_tall_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(16, 20_000), (500_000, 16), (40, 50), (16, 20_000)]
    calls: list[int] = []
    together = _cpu._call
    monkeypatch.setattr(_cpu, "_call", lambda steps: (calls.append(len(steps)), together(steps)))
    ends = []
    for most in (_cpu.MAX_SCRATCH, 8 << 20):
        monkeypatch.setattr(_cpu, "MAX_SCRATCH", most)
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        optimizer = CAME(params, lr=1e-2)
        steps = []
        for param in params:
            param.grad = torch.randn_like(param)
            steps.append(optimizer.param_step(optimizer.param_groups[0], param, 0))
        assert _cpu.scratch_bytes(steps) <= most
        assert all(map(_cpu.can_step, steps))
        optimizer.step()
        ends.append([param.detach() for param in params])
    assert calls == [4, 1, 2, 1]
    assert all(map(torch.equal, *ends))


def test_scratch_of_wide_matrices_is_bounded() -> None:
    wide, narrow = (nn.Parameter(torch.empty(16, width, device="meta")) for width in (400_000, 100_000))
    for param in (wide, narrow):
        predicted = predicted_temporary_bytes("came", [{"params": [param]}])
        assert predicted <= _cpu.MAX_SCRATCH
    small = nn.Parameter(torch.ones(16, 300_000))
    small.grad = torch.ones_like(small)
    optimizer = CAME([small], lr=1e-3)
    assert not _cpu.can_step(optimizer.param_step(optimizer.param_groups[0], small, 0))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"debias": True, "weight_decay": 0.1, "betas": (0.9, 0.95, 0.995)},
    {"maximize": True, "factor": "last2"},
    {"debias": True, "confidence": False, "weight_decay": 0.1},
    {"debias": True, "betas": (0.0, 0.95, 0.995), "weight_decay": 0.1},  # no momentum
    {"eps": (1e-3, 1e-2), "clip_threshold": 0.2},
]
CASES = [
    (momentum, rounding, dtype, options)
    for momentum in ("fp32", "bf16", "int8", "int4")
    for rounding in ("nearest", "stochastic", "compensated")
    for dtype in (torch.float32, torch.bfloat16)
    for options in OPTIONS
    if (momentum == "fp32" or options.get("betas", (0.9,))[0])
    and (dtype == torch.bfloat16 or rounding == "nearest" or not options)
]
"""All combinations, without codecs of no momentum; rounding has no effect on fp32 weights."""


@pytest.mark.parametrize(("momentum", "rounding", "dtype", "options"), CASES, ids=str)
def test_c_step_matches_eager_step(momentum: Any, rounding: Any, dtype: torch.dtype, options: Any) -> None:
    """Sums have another order; if that moves a rounded value over a boundary, it moves by one step."""
    both = [
        trained(SHAPES, dtype, momentum=momentum, rounding=rounding, foreach=foreach, **options)
        for foreach in (None, False)
    ]
    optimizer = both[0][1]
    assert all(_cpu.can_step(optimizer.param_step(group, p, 0)) for group in optimizer.param_groups for p in both[0][0])
    for param, other in zip(both[0][0], both[1][0], strict=True):
        state, wanted = both[0][1].state[param], both[1][1].state[other]
        values = [read_weight(p.detach(), s.get("low"), torch.float32) for p, s in ((param, state), (other, wanted))]
        exact = dtype == torch.float32 and momentum == "fp32"
        near = (values[0] - values[1]).abs() <= (1e-6 if exact else 2e-5) * (1 + values[1].abs())
        assert near.float().mean() >= (1.0 if exact else 0.97)
        torch.testing.assert_close(values[0], values[1], rtol=2**-6, atol=5e-3)
        for key in ("row", "col", "res_row", "res_col", "exp_avg_sq"):
            if key in wanted:
                torch.testing.assert_close(state[key], wanted[key], rtol=1e-5 if exact else 2e-3, atol=0)


@pytest.mark.parametrize("momentum", ["int8", "int4"])
@pytest.mark.parametrize("cols", [16, 17, 39, 40, 65, 79, 130])
def test_c_codes_match_eager_codes(cols: int, momentum: Any) -> None:
    """Without a gradient and with beta1 = 1/2, the new momentum is exactly half the old one in both implementations."""
    states = []
    for foreach in (None, False):
        generator = torch.Generator().manual_seed(cols)
        param = nn.Parameter(torch.ones(500, cols))
        optimizer = CAME([param], lr=0.1, betas=(0.5, 0.9, 0.9), momentum=momentum, foreach=foreach)
        for _ in range(2):
            param.grad = torch.zeros_like(param)
            optimizer.step()
            state = optimizer.state[param]
            states.append({key: value.clone() for key, value in state.items()})
            codes, scale = state["exp_avg_codes"], state["exp_avg_scale"]
            nibbles = torch.randint(1, 16, (2, *codes.shape), generator=generator)
            codes.copy_(nibbles[0] + 16 * nibbles[1] if momentum == "int4" else nibbles[0] * 8 - 1)
            short = torch.randint(0, 255, scale.shape, generator=generator)
            scale.copy_(short if scale.dtype == torch.uint8 else torch.exp2(short / 8 - 16))
    for key in ("exp_avg_codes", "exp_avg_scale"):
        for found, wanted in zip(states[:2], states[2:], strict=True):
            assert torch.equal(found[key], wanted[key])


@pytest.mark.parametrize("momentum", ["fp32", "int4"])
def test_c_step_does_not_depend_on_threads(momentum: Any) -> None:
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        try:
            results.append(trained([(100, 60), (3, 20, 130)], torch.bfloat16, momentum=momentum, rounding="stochastic"))
        finally:
            torch.set_num_threads(before)
    for params, optimizer in results[1:]:
        for param, other in zip(params, results[0][0], strict=True):
            assert torch.equal(param, other)
            for key, value in results[0][1].state[other].items():
                assert torch.equal(value, optimizer.state[param][key])


def test_c_step_does_not_depend_on_other_parameters() -> None:
    shapes = [(2000,), (400, 8), (16, 3000)]
    both = [trained(shapes, torch.float32, alone=alone, debias=True)[0] for alone in (False, True)]
    assert all(map(torch.equal, *both))


def test_c_step_increments_version() -> None:
    param = nn.Parameter(torch.ones(40, 40))
    param.grad = torch.ones(40, 40)
    loss = (param * param).sum()
    CAME([param], lr=1e-2).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nan_gradients_reach_parameters() -> None:
    for momentum, shape in (("fp32", (40, 40)), ("int8", (40, 40)), ("int4", (40, 40)), ("int8", (40, 20))):
        param = nn.Parameter(torch.ones(shape))
        param.grad = torch.ones(shape)
        param.grad[3, 4] = torch.nan
        optimizer = CAME([param], lr=1e-2, momentum=momentum)  # type: ignore[arg-type]
        optimizer.step()
        assert param.isnan().any()
        param.grad = torch.ones(shape)
        optimizer.step()
        assert param.isnan().any()


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1], ids=["positive", "negative"])
def test_nan_of_any_bits_stays_nan(bits: int, rounding: str, foreach: Any) -> None:
    params, optimizer = trained([(40, 33), (5,)], torch.bfloat16, rounding=rounding, foreach=foreach)
    for param in params:
        optimizer.state[param]["exp_avg"].view(torch.int32).fill_(bits)
    optimizer.step()
    assert all(param.isnan().all() for param in params)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("confidence", [True, False])
def test_infinite_weights_stay_without_decay(confidence: bool, foreach: Any) -> None:
    params = [nn.Parameter(torch.full(shape, -torch.inf)) for shape in ((40, 33), (5,))]
    optimizer = CAME(params, lr=1e-2, confidence=confidence, foreach=foreach)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all((param == -torch.inf).all() for param in params)


def test_c_step_skips_unsupported_parameters() -> None:
    param = nn.Parameter(torch.randn(40, 40).t())
    param.grad = torch.randn(40, 40)
    optimizer = CAME([param], lr=1e-2)
    (group,) = optimizer.param_groups
    assert not _cpu.can_step(optimizer.param_step(group, param, 0))
    double = nn.Parameter(torch.randn(40, 40, dtype=torch.float64))
    double.grad = torch.randn_like(double)
    columns_first = CAME([{"params": [double], "matrix_dims": ((1,), (0,))}], lr=1e-2)
    assert not _cpu.can_step(columns_first.param_step(columns_first.param_groups[0], double, 0))


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty compilation cache and keep the library that other tests use."""
    monkeypatch.setattr(_cpu, "_library", lru_cache(maxsize=1)(_cpu._library.__wrapped__))


@pytest.mark.usefixtures("no_library")
def test_missing_compiler_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING, logger="scantling"):
        trained([(40, 33)], torch.float32)
    assert [record.message for record in caplog.records] == [
        "CAME runs its PyTorch step, at less than half the speed of its C step: "
        "there is no C compiler (cc, or what CC names)"
    ]


@pytest.mark.usefixtures("no_library")
def test_c_step_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SCANTLING_NATIVE", "0")
    trained([(40, 33)], torch.float32)
    assert _cpu._library() is None
    assert not caplog.records


@pytest.mark.usefixtures("no_library")
def test_failed_compilation_is_quoted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho no room for you >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert _cpu._library() is None
    assert "no room for you" in caplog.text
