"""Tests of CAME's momentum in 16, 8 and 4 bits and of its rounding modes for bf16 weights."""

from __future__ import annotations

import copy
import io
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.optim import CAME, came_state_bytes, state_bytes
from scantling.optim import _eager as eager
from scantling.optim.codecs import (
    block_rows,
    decode,
    decode_scales,
    encode,
    encode_byte_scales,
    momentum_shapes,
    noise_seed,
    random_uint16,
    read_weight,
    write_weight,
)

CONFIDENT = (0.9, 0.95, 0.995)
SHAPES = [(40, 33), (16, 200), (3, 20, 130), (20, 3, 3, 3), (300, 17)]
MATRIX = ((0,), (1,))


def make_seed(step: int = 1, param_idx: int = 0, stream: int = 0) -> Tensor:
    return noise_seed(torch.tensor(float(step)), param_idx, stream)


def parameter(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def empty_codes(shape: tuple[int, ...], momentum: Any) -> tuple[Tensor, Tensor]:
    needed = momentum_shapes(shape, MATRIX, momentum, torch.float32)
    codes, scale = (torch.zeros(size, dtype=dtype) for size, dtype in needed.values())
    return codes, scale


def gradients(shape: tuple[int, ...], steps: int, seed: int = 1) -> list[Tensor]:
    """Return noise around a mean that differs between elements, so that the momentum is more than noise."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(shape, generator=generator)
    return [mean + torch.randn(shape, generator=generator) for _ in range(steps)]


def run(optimizer: torch.optim.Optimizer, param: nn.Parameter, grads: list[Tensor]) -> Tensor:
    for grad in grads:
        param.grad = grad.to(param.dtype)
        optimizer.step()
    return param.detach()


# --- codes


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(16, 400), st.sampled_from(["int8", "int4"]), st.integers(0, 10**6))
def test_codes_are_within_half_a_step(rows: int, length: int, momentum: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn((rows, length), generator=generator) * 10 ** torch.randn((rows, 1), generator=generator)
    layout = block_rows((rows, length), MATRIX, momentum)
    codes, scale = empty_codes((rows, length), momentum)
    encode(value.clone(), codes, scale, layout, seed=make_seed(seed + 1))
    found = decode(codes, scale, layout, torch.float32)
    kept = decode_scales(scale, torch.float32)
    for block in range(layout.num_blocks):
        part = slice(block * layout.block, (block + 1) * layout.block)
        largest = value[:, part].abs().amax(dim=1)
        if scale.dtype == torch.uint8:
            assert (largest <= kept[:, block]).all()
            assert (kept[:, block] <= largest * 9 / 8).all()
        else:
            torch.testing.assert_close(kept[:, block], largest, rtol=2**-11, atol=2**-25)
        error = (found - value)[:, part].abs()
        x = value[:, part].abs() / kept[:, block, None]
        # the slope of x = y / (2 - y) is (1 + x)^2 / 2, half a step of y is 1 / 254; fp16 keeps 11 bits of the scale
        step = (1 + x) ** 2 / 2 / 254 + 2e-5 if momentum == "int8" else torch.full_like(x, 1 / 7)
        assert (error <= kept[:, block, None] * (step + 2.0**-10)).all()


def test_byte_scales_round_up() -> None:
    every = decode_scales(torch.arange(256, dtype=torch.uint8), torch.float32)
    assert every[0] == 0, "state that was never written is zero, whatever its codes"
    assert every[255].isnan()
    assert (every[1], every[128 - 1], every[254]) == (2**-16 * 9 / 8, 2**-1 * 15 / 8, 57344)
    finite = every[1:255]
    ratio = finite[1:] / finite[:-1]
    assert ratio.min() > 1
    assert ratio.max() == 9 / 8
    assert torch.equal(encode_byte_scales(finite), torch.arange(1, 255, dtype=torch.int32))
    above = torch.nextafter(finite, torch.tensor(torch.inf))
    assert torch.equal(encode_byte_scales(above), torch.arange(2, 256, dtype=torch.int32))
    extremes = torch.tensor([0.0, 1e-45, 1e-6, 57345.0, torch.inf, torch.nan])
    assert encode_byte_scales(extremes).tolist() == [1, 1, 1, 255, 255, 255]


@pytest.mark.parametrize("length", [20, 200])
@pytest.mark.parametrize("momentum", ["int8", "int4"])
def test_codec_returns_nan_for_nonfinite_values(momentum: Any, length: int) -> None:
    value = torch.ones(4, length)
    value[0, 3], value[1, 3], value[2, 3] = torch.nan, torch.inf, 1e6
    layout = block_rows((4, length), MATRIX, momentum)
    codes, scale = empty_codes((4, length), momentum)
    encode(value, codes, scale, layout, seed=make_seed())
    assert decode(codes, scale, layout, torch.float32).isnan().any(dim=1).tolist() == [True, True, True, False]


def test_int4_codes_are_unbiased() -> None:
    value = torch.linspace(-1.0, 1.0, 64).expand(4, 64)
    layout = block_rows((4, 64), MATRIX, "int4")
    codes, scale = torch.zeros((4, 32), dtype=torch.uint8), torch.zeros((4, 1), dtype=torch.float16)
    total = torch.zeros(4, 64)
    for step in range(1, 501):
        encode(value.clone(), codes, scale, layout, seed=make_seed(step))
        total += decode(codes, scale, layout, torch.float32)
    # an average of 2000 values with a standard deviation of at most half a step of 1/7
    assert (total / 500).mean(0).sub(value[0]).abs().max() < 5 * 0.5 / 7 / 2000**0.5


def test_codec_keeps_zero_blocks() -> None:
    for momentum, length in (("int8", 200), ("int4", 200), ("int8", 20), ("int4", 21)):
        layout = block_rows((2, length), MATRIX, momentum)  # type: ignore[arg-type]
        codes, scale = empty_codes((2, length), momentum)
        assert (decode(codes, scale, layout, torch.float32) == 0).all()
        encode(torch.zeros(2, length), codes.fill_(3), scale.fill_(1), layout, seed=make_seed())
        assert (decode(codes, scale, layout, torch.float32) == 0).all()


def test_noise_is_uniform_per_element() -> None:
    whole = random_uint16(make_seed(3, 1), 0, (1000, 1000))
    assert whole.min() >= 0
    assert whole.max() <= 65535
    assert whole.double().mean() == pytest.approx(32767.5, abs=5 * 18919 / 1000)
    counts = torch.histc(whole.float(), bins=64, min=0, max=65536)
    assert ((counts - 15625).abs() < 5 * 15625**0.5).all()
    for lag in (1, 2, 7, 1000):  # neighbors, and the same column of the next row
        flat = whole.flatten().double()
        pairs = torch.stack((flat[:-lag], flat[lag:]))
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5e-3
    assert torch.equal(random_uint16(make_seed(3, 1), 5000, (3, 1000)), whole[5:8])
    for other in (make_seed(4, 1), make_seed(3, 2), make_seed(3, 1, 1)):
        pairs = torch.stack((whole.flatten().double(), random_uint16(other, 0, (1000, 1000)).flatten().double()))
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5e-3


def test_noise_of_a_slice_matches_whole() -> None:
    whole = random_uint16(make_seed(), 0, (6, 7, 8, 9))
    strides = whole.stride()
    for start, size in (((0, 0, 0, 0), (6, 7, 8, 9)), ((2, 0, 3, 0), (2, 7, 5, 9)), ((1, 6, 0, 4), (5, 1, 8, 2))):
        first = sum(a * b for a, b in zip(start, strides, strict=True))
        part = whole[tuple(slice(a, a + b) for a, b in zip(start, size, strict=True))]
        assert torch.equal(random_uint16(make_seed(), first, size, strides), part)
    assert random_uint16(make_seed(), 0, (0, 7), (7, 1)).shape == (0, 7)
    far = random_uint16(make_seed(), 0, (3, 2), (2**32 + 1, 1))
    assert torch.equal(far[:, 0], random_uint16(make_seed(), 0, (3,)))


def test_noise_continues_beyond_2_to_32_elements() -> None:
    far = random_uint16(make_seed(), 2**32 - 2, (4,))
    assert torch.equal(far[2:], random_uint16(make_seed(), 0, (2,)))
    assert torch.equal(random_uint16(make_seed(), 2**31 - 2, (4,))[2:], random_uint16(make_seed(), 2**31, (2,)))


# --- weights


def test_stochastic_rounding_is_unbiased() -> None:
    exact = torch.tensor([1.0, -2.5, 0.0, -0.0, float("inf"), 3e38, 1e-38])
    param = torch.zeros(7, dtype=torch.bfloat16)
    write_weight(exact.bfloat16().float(), param, None, seed=make_seed())
    assert torch.equal(param, exact.bfloat16())
    value = torch.tensor([1.001, -3.3, 1e-3, 7e-20])
    total, steps = torch.zeros(4, dtype=torch.float64), 1000
    param = torch.zeros(4, dtype=torch.bfloat16)
    for step in range(steps):
        write_weight(value.clone(), param, None, seed=make_seed(step))
        assert ((param.float() - value).abs() <= value.abs() * 2**-7).all()
        total += param.double()
    assert (total / steps - value).abs().div(value.abs()).max() < 5 * 2**-8 / steps**0.5


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False))
def test_compensated_weights_have_24_bits(number: float) -> None:
    value = torch.tensor([number])
    param, low = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int8)
    write_weight(value.clone(), param, low)
    if param.isinf():  # rounded beyond the largest bf16
        return
    assert float(param) == pytest.approx(number, rel=2**-8, abs=1e-38)
    # half a step of 24 bits; if the remainder is just under half a bf16 step, one 24-bit step
    assert float(read_weight(param, low, torch.float32)) == pytest.approx(number, rel=2**-15, abs=1e-38)


@pytest.mark.parametrize("shape", [(40, 33), (50,), (40, 8)])
def test_small_steps_are_lost_only_by_nearest_rounding(shape: tuple[int, ...]) -> None:
    """200 steps of 1e-4 around weights of 1, where bf16 has steps of 4e-3 to 8e-3."""
    grads = [torch.ones(shape) + 0.1 * grad for grad in gradients(shape, 200)]
    moved = {}
    for rounding in ("nearest", "stochastic", "compensated"):
        param = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
        optimizer = CAME([param], lr=1e-4, betas=CONFIDENT, debias=True, rounding=rounding)  # type: ignore[arg-type]
        run(optimizer, param, grads)
        moved[rounding] = float(
            1 - read_weight(param.detach(), optimizer.state[param].get("low"), torch.float32).mean()
        )
    full = nn.Parameter(torch.ones(shape))
    run(CAME([full], lr=1e-4, betas=CONFIDENT, debias=True), full, [g.bfloat16() for g in grads])
    wanted = float(1 - full.detach().mean())
    assert moved["nearest"] == 0.0
    assert moved["stochastic"] == pytest.approx(wanted, rel=0.15)
    assert moved["compensated"] == pytest.approx(wanted, rel=0.03)


# --- in the optimizer


@pytest.mark.parametrize("momentum", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_low_bit_momentum_stays_near_fp32(shape: tuple[int, ...], momentum: Any) -> None:
    """The update uses the momentum before rounding, so the first step is unaffected."""
    grads = gradients(shape, 30)
    one, many = (nn.Parameter(torch.zeros(shape)) for _ in range(2))
    options: dict[str, Any] = {"lr": 1e-2, "betas": CONFIDENT, "debias": True}
    torch.testing.assert_close(
        run(CAME([one], momentum=momentum, **options), one, grads[:1]),
        run(CAME([many], **options), many, grads[:1]),
        rtol=1e-6,
        atol=1e-9,
    )
    found, wanted = (nn.Parameter(torch.zeros(shape)) for _ in range(2))
    run(CAME([found], momentum=momentum, **options), found, grads)
    run(CAME([wanted], **options), wanted, grads)
    distance = float((found - wanted).detach().norm() / wanted.detach().norm())
    assert 0 < distance < {"bf16": 0.005, "int8": 0.01, "int4": 0.2}[momentum]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "compensated"])
@pytest.mark.parametrize("momentum", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tile_size_does_not_change_codes(
    shape: tuple[int, ...], momentum: Any, rounding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over tiles differ in the last bit; if that moves a value over a rounding boundary, it moves by one step."""
    results = []
    for limit in (10**6, 40):
        monkeypatch.setattr(eager, "CPU_TILE", limit)
        param = parameter(shape, torch.bfloat16)
        options = {"lr": 1e-2, "debias": True, "weight_decay": 0.1, "foreach": False}
        optimizer = CAME([param], momentum=momentum, rounding=rounding, **options)
        run(optimizer, param, gradients(shape, 4))
        results.append(read_weight(param.detach(), optimizer.state[param].get("low"), torch.float32))
    same = (results[0] - results[1]).abs() <= 1e-6
    assert same.float().mean() > 0.98
    torch.testing.assert_close(results[0], results[1], rtol=2**-6, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "compensated"])
@pytest.mark.parametrize("momentum", ["fp32", "bf16", "int8", "int4"])
def test_low_bit_state_resumes_bitwise(momentum: Any, rounding: Any, dtype: torch.dtype) -> None:
    shapes = [(40, 33), (20, 3, 3, 3), (7,), (200, 4), (50, 17), (16, 70), (20, 130)]
    options = {"lr": 1e-2, "betas": CONFIDENT, "debias": True, "momentum": momentum, "rounding": rounding}

    def make() -> tuple[list[nn.Parameter], CAME]:
        params = [parameter(shape, dtype, seed) for seed, shape in enumerate(shapes)]
        return params, CAME(params, **options)

    def advance(params: list[nn.Parameter], optimizer: CAME, steps: range) -> None:
        for step in steps:
            for param in params:
                param.grad = gradients(tuple(param.shape), 1, seed=step)[0].to(dtype)
            optimizer.step()

    params, optimizer = make()
    advance(params, optimizer, range(3))
    stated = sum(came_state_bytes(s, dtype=dtype, momentum=momentum, rounding=rounding) for s in shapes)
    assert state_bytes(optimizer) == stated == optimizer.state_bytes()
    file = io.BytesIO()
    torch.save({"weights": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
    advance(params, optimizer, range(3, 8))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, other = make()
    for param, weight in zip(resumed, saved["weights"], strict=True):
        param.data.copy_(weight)
    other.load_state_dict(saved["optimizer"])
    advance(resumed, other, range(3, 8))
    for a, b in zip(params, resumed, strict=True):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert value.dtype == other.state[b][key].dtype
            assert torch.equal(value, other.state[b][key])


def test_state_bytes_of_llama_3_8b() -> None:
    layer = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)] + [(4096,)] * 2
    shapes = layer * 32 + [(128256, 4096)] * 2 + [(4096,)]
    count = sum(prod(shape) for shape in shapes)
    assert count == 8_030_261_248
    for momentum, limit in (("fp32", 4.01), ("bf16", 2.01), ("int8", 1.03), ("int4", 0.54)):
        each = {shape: came_state_bytes(shape, dtype=torch.bfloat16, momentum=momentum) for shape in set(shapes)}  # type: ignore[arg-type]
        assert sum(each[shape] for shape in shapes) / count <= limit


def most_bytes(rows: int, cols: int, momentum: str) -> float:
    """Return the largest allowed state of a matrix in bytes, including the step counter."""
    extra = {17: 1.5 / 17, 19: 1.5 / 19, 21: 1.5 / 21}.get(cols, 0.07) if momentum == "int4" else 0.07
    code = 1.0 if momentum == "int8" else 0.5
    return 8 * (rows + cols) + (code + extra) * rows * cols + 4 + 1e-6


@pytest.mark.parametrize("momentum", ["int8", "int4"])
def test_state_bytes_of_any_matrix(momentum: Any) -> None:
    for cols in range(16, 1000):
        for rows in (16, 300):
            assert came_state_bytes((rows, cols), momentum=momentum) <= most_bytes(rows, cols, momentum), (rows, cols)


@settings(max_examples=60, deadline=None)
@given(st.integers(16, 300), st.integers(16, 300) | st.integers(16, 40), st.sampled_from(["int8", "int4"]))
def test_storages_match_state_bytes(rows: int, cols: int, momentum: Any) -> None:
    param = parameter((rows, cols))
    optimizer = CAME([param], lr=1e-2, momentum=momentum)
    run(optimizer, param, gradients((rows, cols), 1))
    stored = state_bytes(optimizer)
    assert stored == came_state_bytes((rows, cols), momentum=momentum) == optimizer.state_bytes()
    assert stored <= most_bytes(rows, cols, momentum)


@pytest.mark.parametrize("momentum", ["int8", "int4"])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((10, 4, 16), ((0, 1), (2,))),
        ((4, 10, 24), ((1, 0), (2,))),
        ((24, 40, 3), ((1,), (0, 2))),
        ((20, 2, 3, 3), ((0,), (1, 2, 3))),
        ((4, 20, 3, 2), ((1,), (0, 2, 3))),
        ((20, 30, 2), ((0,), (1,))),
    ],
    ids=str,
)
def test_block_rows_are_long_enough_for_scales(shape: tuple[int, ...], dims: Any, momentum: Any) -> None:
    group = {"params": [parameter(shape)], "matrix_dims": dims, "role": "matrix"}
    optimizer = CAME([group], lr=1e-2, momentum=momentum)
    run(optimizer, group["params"][0], gradients(shape, 3))
    sides = [prod(shape[dim] for dim in side) for side in dims]
    batch = prod(shape) // prod(sides)
    code = 1.0 if momentum == "int8" else 0.5
    assert state_bytes(optimizer) <= 8 * batch * sum(sides) + (code + 0.07) * prod(shape) + 4


def test_load_refuses_scales_of_other_dtype() -> None:
    source, target = (parameter((20, 20)) for _ in range(2))
    optimizer = CAME([source], lr=2e-4, momentum="int8")
    run(optimizer, source, gradients((20, 20), 1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg_scale"] = saved["state"][0]["exp_avg_scale"].to(torch.float16)
    with pytest.raises(UserError, match=r"given .*scale \(20, 1\) float16.* needed .*scale \(20, 1\) uint8"):
        CAME([target], lr=2e-4, momentum="int8").load_state_dict(saved)


def test_unsupported_precisions_are_refused() -> None:
    with pytest.raises(UserError, match="momentum must be one of fp32, bf16, int8, int4; given 'fp8'"):
        CAME([parameter((20, 20))], lr=2e-4, momentum="fp8")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"is for bfloat16 parameters; .* is float16"):
        CAME([parameter((20, 20), torch.float16)], lr=2e-4, rounding="stochastic")
    with pytest.raises(UserError, match="float64; use momentum='fp32'"):
        CAME([parameter((20, 20), torch.float64)], lr=2e-4, momentum="int8")
    source, target = (parameter((20, 20)) for _ in range(2))
    optimizer = CAME([source], lr=2e-4, momentum="int8")
    run(optimizer, source, gradients((20, 20), 1))
    with pytest.raises(UserError, match="group 0 was saved with momentum='int8', this optimizer has momentum='fp32'"):
        CAME([target], lr=2e-4).load_state_dict(copy.deepcopy(optimizer.state_dict()))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg_codes"] = saved["state"][0]["exp_avg_codes"].float()
    with pytest.raises(UserError, match=r"given .*codes \(20, 20\) float32.* needed .*codes \(20, 20\) int8"):
        CAME([target], lr=2e-4, momentum="int8").load_state_dict(saved)
