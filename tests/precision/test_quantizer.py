"""Tests of scales, granularities, block formats and the straight-through gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.numerics.formats import IntFormat
from scantling.precision import Quantizer, fake_quantize


def paper(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantize as in Kumar et al., appendix D.1, with one scale per tensor."""
    s = (2 ** (bits - 1) - 1) / x.abs().max()
    return (x * s).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) / s


@pytest.mark.parametrize("bits", range(2, 17))
def test_integers_match_the_paper(bits: int) -> None:
    x = torch.randn(33, 17, dtype=torch.float64)
    torch.testing.assert_close(fake_quantize(x, f"int{bits}"), paper(x, bits), rtol=1e-12, atol=1e-12)


def test_granularity_sets_what_shares_a_scale() -> None:
    x = torch.randn(6, 5, 8, dtype=torch.float64)
    by_channel = fake_quantize(x, "int4", granularity="channel", axis=1)
    by_token = fake_quantize(x, "int4", granularity="token")
    by_group = fake_quantize(x, "int4", granularity="group", group_size=3)
    for j in range(5):
        torch.testing.assert_close(by_channel[:, j], paper(x[:, j], 4))
        for i in range(6):
            torch.testing.assert_close(by_token[i, j], paper(x[i, j], 4))
            for part in (slice(0, 3), slice(3, 6), slice(6, 8)):
                torch.testing.assert_close(by_group[i, j, part], paper(x[i, j, part], 4))
    assert torch.equal(fake_quantize(x, "int4", granularity="channel", axis=-2), by_channel)


@pytest.mark.parametrize("fmt", ["int2", "int3", "int4", "int8", "fp4_e2m1", "fp6_e3m2"])
def test_mse_clip_is_at_most_absmax_error(fmt: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 512)
    for granularity in ("tensor", "channel", "token"):
        plain, clipped = (fake_quantize(x, fmt, granularity=granularity, clip=clip) for clip in ("absmax", "mse"))
        assert (clipped - x).square().sum() <= (plain - x).square().sum()
    quantizer = Quantizer.from_spec({"format": fmt, "clip": "mse"})
    scales = torch.linspace(0.02, 1.0, 400) * x.abs().max() / quantizer.format.largest
    least = min((quantizer.format.round(x / s) * s - x).square().sum().item() for s in scales)
    assert (quantizer(x) - x).square().sum().item() <= 1.09 * least  # scales are 8 % apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_16_bit_formats_are_the_identity(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype)
    q = fake_quantize(x, "int16")
    assert q.dtype == dtype
    assert (q - x).abs().max() <= 1e-4 * x.abs().max()


def test_zeros_and_scalars_are_unchanged() -> None:
    for granularity in ("tensor", "channel", "token"):
        assert torch.equal(fake_quantize(torch.zeros(3, 4), "int4", granularity=granularity), torch.zeros(3, 4))
        assert fake_quantize(torch.zeros(0, 4), "int4", granularity=granularity).shape == (0, 4)
    assert fake_quantize(torch.tensor(3.0), "int4") == 3.0
    assert fake_quantize(torch.tensor([1e-44, 0.0]), "int4").isfinite().all()


def test_nan_and_inf_spread_to_shared_scales() -> None:
    for bad in (float("nan"), float("inf")):
        x = torch.ones(2, 64)
        x[0, 0] = bad
        for given in ("int4", "fp8_e4m3", {"format": "int4", "clip": "mse"}):
            assert Quantizer.from_spec(given)(x).isnan().all()
        for given in ("mxfp4_e2m1", {"format": "int4", "granularity": "token"}):
            out = Quantizer.from_spec(given)(x)
            assert out[0, :32].isnan().all()
            assert out[1].isfinite().all()


@pytest.mark.parametrize("loss_scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("fmt", ["int2", "int4", "int8", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "nvfp4", "mxfp6_e3m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_straight_through(fmt: str, loss_scale: float, dtype: torch.dtype) -> None:
    x = torch.randn(8, 64, dtype=dtype, requires_grad=True)
    weights = torch.randn(8, 64, dtype=dtype)
    fake_quantize(x, fmt).backward(weights * loss_scale)
    assert x.grad is not None
    assert torch.equal(x.grad, weights * loss_scale)


def test_gradient_reaches_clipped_values() -> None:
    x = torch.cat([torch.randn(255), torch.tensor([6.0])]).requires_grad_()
    q = fake_quantize(x, "int2", clip="mse")
    assert q.detach().max() < 5.0  # values were clipped
    q.sum().backward()
    assert torch.equal(x.grad, torch.ones(256))


@pytest.mark.parametrize(("size", "count"), [(1.0, 0), (100.0, 1), (40.0, 20)])
@pytest.mark.parametrize("fmt", ["int2", "int3", "int4"])
def test_mse_clip_is_near_optimal_with_outliers(fmt: str, size: float, count: int) -> None:
    x = torch.cat([torch.randn(20000, generator=torch.Generator().manual_seed(0)), torch.full((count,), size)])
    quantizer = Quantizer.from_spec(fmt)

    def lost(end: float) -> float:
        scale = end / quantizer.format.largest
        return float((quantizer.format.round(x / scale) * scale - x).square().sum())

    best = min(lost(float(x.abs().max()) * 0.99**power) for power in range(500))
    assert float((fake_quantize(x, fmt, clip="mse") - x).square().sum()) < 1.02 * best


def test_stochastic_rounding_is_unbiased_and_seeded() -> None:
    x = torch.rand(100_000)
    torch.manual_seed(1)
    first = fake_quantize(x, "int3", rounding="stochastic")
    torch.manual_seed(1)
    assert torch.equal(first, fake_quantize(x, "int3", rounding="stochastic"))
    assert abs((first - x).mean().item()) < 2e-3  # 4 standard deviations of the mean at a step of 1/3


@pytest.mark.parametrize(
    "given",
    ["int4", "fp8_e4m3", "nvfp4", {"format": "int4", "group_size": 16}, {"format": "int4", "rounding": "stochastic"}],
)
def test_compiled_quantizer_matches_eager(given: Any) -> None:
    quantizer = Quantizer.from_spec(given)
    x = torch.randn(16, 64)
    compiled = torch.compile(quantizer.__call__, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    expected = quantizer(x)
    torch.manual_seed(3)
    assert torch.equal(compiled(x), expected)


def test_compiled_fake_quantize_takes_names() -> None:
    x = torch.randn(16, 64)
    for given, more in (
        ("int4", {"granularity": "channel"}),
        ("nvfp4", {}),
        ({"format": "int4", "group_size": 16}, {}),
    ):

        def rounded(x: Tensor, given: Any = given, more: Any = more) -> Tensor:
            return fake_quantize(x, given, **more)

        compiled = torch.compile(rounded, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), rounded(x))


def test_block_formats_match_torchao() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = torch.randn(64, 128) * torch.logspace(-3, 2, 128)
    for dtype, name in ((torch.float8_e4m3fn, "mxfp8_e4m3"), (torch.float4_e2m1fn_x2, "mxfp4_e2m1")):
        theirs = mx.MXTensor.to_mx(x, dtype, 32).dequantize(torch.float32)
        assert torch.equal(fake_quantize(x, name), theirs)
    x = torch.randn(64, 128) * torch.logspace(-1, 1, 128)  # the reference has no scales below 2^-6 of the largest
    whole = nv.per_tensor_amax_to_scale(x.abs().max())
    theirs = nv.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole).dequantize(torch.float32)
    torch.testing.assert_close(fake_quantize(x, "nvfp4"), theirs)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"format": "int4", "granularity": "chanel"}, "did you mean 'channel'"),
        ({"format": "int4", "granularity": "group"}, "group_size"),
        ({"format": "int4", "granularity": "token", "group_size": 32}, "group_size"),
        ({"format": "int4", "group_size": 0}, "from 1 on"),
        ({"format": "int4", "rounding": "up"}, "nearest, stochastic"),
        ({"format": "int4", "bits": 3}, "key must be one of"),
        ({"format": "nvfp4", "clip": "mse"}, "absmax"),
        ({"format": "nvfp4", "group_size": 8}, "nvfp4 fixes group_size=16; given 8"),
        ({"format": "mxfp4_e2m1", "granularity": "channel"}, "mxfp4_e2m1 fixes granularity='group'"),
        ({"format": "int4", "group_size": True}, "given True"),
        ({"format": "int08"}, "did you mean"),
        ({"format": "int\u0664"}, "a number format must be one of"),
        ({}, "the key 'format'"),
        (8, "given 8"),
    ],
)
def test_from_spec_refuses_invalid_settings(given: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Quantizer.from_spec(given)


@pytest.mark.parametrize("axis", [2, 0.5, None])
def test_fake_quantize_refuses_missing_axis(axis: Any) -> None:
    with pytest.raises(UserError, match="axis must be one of the 2 dims"):
        fake_quantize(torch.randn(2, 3), "int4", granularity="channel", axis=axis)


@pytest.mark.parametrize("given", [torch.arange(4), torch.ones(2, dtype=torch.bool), [1.0, 2.0]])
def test_fake_quantize_refuses_other_than_floats(given: Any) -> None:
    with pytest.raises(UserError, match="needs a tensor of 16-, 32- or 64-bit floats; given"):
        fake_quantize(given, "int4")
    with pytest.raises(UserError, match=r"Quantizer\.from_spec\('int4'\) takes a name"):
        Quantizer("int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["mxfp8_e4m3", "nvfp4", {"format": "int4", "group_size": np.int64(8)}, "int4"])
def test_empty_tensors_stay_empty(given: Any) -> None:
    for shape in ((0, 32), (2, 0, 32), (4, 0)):
        x = torch.zeros(shape, requires_grad=True)
        y = fake_quantize(x, given)
        assert y.shape == x.shape
        y.sum().backward()


@pytest.mark.parametrize("size", [1e-40, 1e-38, 1e-30, 7e-7, 1.0, 1e30])
def test_bf16_exponent_format_rounds_each_value_alone(size: float) -> None:
    x = size * torch.tensor([1.0, -0.7, 0.33])
    assert torch.equal(fake_quantize(x, "bf16"), x.bfloat16().float())


def test_float_formats_keep_small_values() -> None:
    x = torch.tensor([1e30, 1e-10, -2e-20, 3e-30, 4e-37, -5e-39, 1e-40, 3e-41])
    assert torch.equal(fake_quantize(x, "bf16"), x.bfloat16().float())


@pytest.mark.parametrize("format", ["mxint8", "bf16", "int8", "nvfp4", "mxfp8_e5m2"])
def test_largest_fp16_values_stay_finite(format: str) -> None:
    x = torch.tensor([-65504.0, 65504.0, 3.0], dtype=torch.float16)
    assert torch.isfinite(fake_quantize(x, format)).all()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_16_bit_floats_round_like_their_dtypes(name: str, dtype: torch.dtype, granularity: Any) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 4, 64)
    expected = x.to(dtype).float()
    assert torch.equal(fake_quantize(x, name, granularity=granularity), expected)
    assert torch.equal(fake_quantize(x, name, granularity=granularity, clip="mse"), expected)
    assert not torch.isfinite(fake_quantize(torch.tensor([1.0, torch.inf]), name)).any()


@pytest.mark.parametrize("given", [{"format": "int4"}, Quantizer.from_spec("int4")])
def test_fake_quantize_refuses_settings_next_to_a_quantizer(given: Any) -> None:
    with pytest.raises(UserError, match="granularity, rounding can only be given with a format by name"):
        fake_quantize(torch.randn(4, 4), given, granularity="token", rounding="stochastic")
    assert torch.isfinite(fake_quantize(torch.randn(4, 4), given, granularity="tensor")).all()


def test_tiny_scales_are_clamped_to_normal_numbers() -> None:
    """In nvfp4, a group that is tiny relative to its tensor gets the smallest scale, at any magnitude of the tensor."""
    for size in (1e-6, 1.0, 1e6):
        x = size * torch.cat([torch.ones(16), torch.full((16,), 1e-7), torch.full((16,), 2e-5)])
        found = fake_quantize(x, "nvfp4")
        assert (found[16:32] == 0.0).all()
        torch.testing.assert_close(found[32:], x[32:], rtol=0.2, atol=0.0)


def test_fake_quantize_under_torch_func_and_in_place_addition() -> None:
    x = torch.randn(3, 8)
    for given in ("int4", "mxfp4_e2m1"):
        alone = torch.func.vmap(torch.func.grad(lambda row, given=given: fake_quantize(row, given).square().sum()))(x)
        torch.testing.assert_close(alone, torch.stack([2.0 * fake_quantize(row, given) for row in x]))
    leaf = x.clone().requires_grad_()
    fake_quantize(leaf, "int4").mul_(2.0).add_(1.0).sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad == 2.0).all()


def test_quantizer_str_and_bits() -> None:
    given = {"format": "int4", "group_size": 32, "clip": "mse", "rounding": "stochastic"}
    assert str(Quantizer.from_spec(given)) == "int4 by group of 32, stochastic, mse"
    assert str(Quantizer.from_spec("mxfp4_e2m1")) == "fp4_e2m1 by group of 32, power2 scales"
    assert Quantizer.from_spec("int4").format == IntFormat(4)
    assert (
        Quantizer.from_spec("int4").bits,
        Quantizer.from_spec("nvfp4").bits,
        Quantizer.from_spec("mxfp4_e2m1").bits,
    ) == (4, 4.5, 4.25)
