"""Tests of number formats against PyTorch's casts and against all of their values."""

import pytest
import torch

from scantling.errors import UserError
from scantling.numerics.formats import FloatFormat, IntFormat, parse_format

CASTS = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_round_matches_torch_casts(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(256, 64, dtype=torch.float32) * torch.logspace(-12, 5, 64)
    fmt = parse_format(name)
    cast = values.clamp(-fmt.largest, fmt.largest).to(CASTS[name]).to(dtype)
    assert torch.equal(fmt.round(values.to(dtype)), cast)


def test_bf16_round_matches_torch_for_subnormals() -> None:
    patterns = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0))
    values = torch.cat((patterns.int(), patterns.int() % 2**24)).view(torch.float32)  # add many of the smallest values
    values = values[values.abs() <= parse_format("bf16").largest]
    assert torch.equal(parse_format("bf16").round(values), values.bfloat16().float())


@pytest.mark.parametrize("mantissa", range(4))
@pytest.mark.parametrize("exponent", range(1, 6))
def test_float_round_is_nearest_of_all_values(exponent: int, mantissa: int) -> None:
    fmt = FloatFormat(exponent, mantissa)
    bias = 2 ** (exponent - 1) - 1
    steps = 2**mantissa
    normal = [2.0 ** (e - bias) * (1 + m / steps) for e in range(1, 2**exponent) for m in range(steps)]
    grid = torch.tensor([0.0, *(2.0 ** (1 - bias) * m / steps for m in range(steps)), *normal], dtype=torch.float64)
    grid = grid[grid <= fmt.largest]
    assert grid.max() == fmt.largest
    x = torch.linspace(-1.1, 1.1, 2001, dtype=torch.float64) * fmt.largest
    rounded = fmt.round(x)
    distance = (x.abs()[:, None] - grid).abs().amin(1)
    torch.testing.assert_close((rounded - x).abs(), distance, rtol=0, atol=1e-12 * fmt.largest)
    assert torch.isin(rounded.abs(), grid).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_int_round_clamps_to_twos_complement(bits: int) -> None:
    fmt = IntFormat(bits)
    half = 2 ** (bits - 1)
    rounded = fmt.round(torch.tensor([-1e9, 1e9, 0.5, 1.5, -0.5]))
    expected = torch.tensor([-half, half - 1, 0, min(2, half - 1), 0])
    assert torch.equal(rounded, expected.float())


@pytest.mark.parametrize("name", ["int4", "fp4_e2m1", "fp8_e4m3"])
def test_stochastic_round_keeps_the_mean(name: str) -> None:
    fmt = parse_format(name)
    torch.manual_seed(0)
    x = torch.full((200_000,), 1.3)
    rounded = fmt.round(x, torch.rand_like(x))
    assert rounded.unique().numel() == 2
    assert abs(rounded.mean().item() - 1.3) < 5e-3  # 4 standard deviations of the mean at a step of 1


def test_round_keeps_nan() -> None:
    for name in ("int4", "fp8_e4m3", "bf16"):
        assert parse_format(name).round(torch.tensor([float("nan"), 1.0])).isnan().tolist() == [True, False]


@pytest.mark.parametrize("name", ["int8", "int16", "fp8_e4m3", "fp5_e3m1", "bf16", "fp16"])
def test_parse_format_inverts_name(name: str) -> None:
    assert parse_format(name).name == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("int1", "2 to 16"),
        ("int17", "2 to 16"),
        ("fp8_e4m4", "fp9_e4m4"),
        ("fp21_e10m10", "1 to 8"),
        ("itn4", "did you mean 'int4'"),
        (4, "a name such as"),
    ],
)
def test_parse_format_refuses_other_names(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_format(name)
