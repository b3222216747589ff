"""Quantizers: scale values to a format, round them, and scale them back.

    s = max|x| / largest,    q(x) = s round(x / s)

with one s per tensor, channel, token, or group of neighbors (Kumar et al., "Scaling Laws for Precision", arXiv
2411.04330, section 2 and appendix D.1, which writes 1/s for our s). 16-bit floats have their own dtypes and are not
scaled, s = 1. `fake_quantize` returns dequantized values that a model can compute with; `Quantizer.encode` returns
codes and scales separately.

Block formats have low-precision group scales: `mx<format>` (OCP Microscaling: groups of 32; the scales are powers of 2
that shift the exponent of the largest magnitude to the largest exponent of the format) and `nvfp4` (groups of 16;
fp8_e4m3 scales under one fp32 scale for the tensor or for each token).

The gradient of `fake_quantize` is that of the identity, also for clipped values (straight-through). NaN and Inf are
not hidden: all values that share a scale with them become NaN; in `nvfp4`, all values that share the fp32 scale.

Cost: a few passes over the values; with `clip="mse"` a few passes for each of the 31 clipping points that it tries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, log2
from operator import index
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias, get_args

import torch
from torch import Tensor

from scantling.errors import UserError, with_hint
from scantling.numerics.block_quantizer import join_blocks, split_blocks
from scantling.numerics.formats import FloatFormat, Format, parse_format
from scantling.numerics.literals import Clip, Granularity, Rounding

Scales: TypeAlias = Literal["fp32", "power2", "fp8", "fp8_token"]

_COARSE_RATIOS = tuple(0.8**power for power in range(25))
"""Shares of the largest magnitude, from 1 to 0.005, that `clip="mse"` tries first as clipping points."""
_FINE_RATIOS = tuple(0.8 ** (power / 4) for power in (-3, -2, -1, 1, 2, 3))
"""Factors on the best first share, tried in a second, finer search."""
MX_GROUP, NV_GROUP = 32, 16
_BLOCK_FORMATS = ("mxfp4_e2m1", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "nvfp4")


_DEFAULTS = {"granularity": "tensor", "group_size": None, "rounding": "nearest", "clip": "absmax"}
"""Default settings of `fake_quantize`."""


class Encoded(NamedTuple):
    """A quantized tensor.

    Attributes:
        codes: values of the format, in the dtype of the computation; (..., groups, group) if groups have scales.
        scale: factors of the codes; broadcast over codes.
        shape: shape of the original tensor.
    """

    codes: Tensor
    scale: Tensor
    shape: torch.Size

    def decode(self) -> Tensor:
        """Return the dequantized values in the original shape."""
        values = self.codes * self.scale
        return values if values.shape == self.shape else join_blocks(values, self.shape[-1])


@dataclass(frozen=True)
class Quantizer:
    """Settings that say how to quantize a tensor.

    Args:
        format: number format.
        granularity: part of a tensor that shares a scale: the whole `tensor`; a `channel`, all values with one index
            of an axis; a `token`, one vector along the last dim; a `group` of neighbors along the last dim, the last
            of them possibly shorter.
        group_size: size of a group, for granularity `group` only.
        rounding: `nearest` rounds to the nearest value. `stochastic` rounds up or down at random so that the mean is
            preserved; it draws from the global generator.
        clip: magnitude that is mapped to the largest value of the format: the largest magnitude (`absmax`), or the
            share of it, down to 0.005, with the least mean squared error (`mse`).
        scales: format of the scales. `fp8` means fp8_e4m3 scales under one fp32 scale for the tensor, `fp8_token`
            under one fp32 scale for each token.

    Raises:
        UserError: if settings contradict each other.
    """

    format: Format
    granularity: Granularity = "tensor"
    group_size: int | None = None
    rounding: Rounding = "nearest"
    clip: Clip = "absmax"
    scales: Scales = "fp32"

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise UserError(f"format must be a Format; given {self.format!r}. Quantizer.from_spec('int4') takes a name")
        for name, kinds in (("granularity", Granularity), ("rounding", Rounding), ("clip", Clip), ("scales", Scales)):
            _check_choice(name, getattr(self, name), get_args(kinds))
        if (self.group_size is None) == (self.granularity == "group"):
            raise UserError(
                f"group_size and granularity='group' come together; given granularity={self.granularity!r} and "
                f"group_size={self.group_size!r}"
            )
        size = self.group_size
        if size is not None:
            if isinstance(size, bool) or not isinstance(size, SupportsIndex) or index(size) < 1:
                raise UserError(f"group_size must be an integer from 1 on; given {size!r}")
            # frozen dataclass: __setattr__ is the only way to normalize a field
            object.__setattr__(self, "group_size", index(size))  # JSON cannot write NumPy integers
        if self.scales != "fp32" and (self.granularity != "group" or self.clip != "absmax"):
            raise UserError(f"scales={self.scales!r} need granularity='group' and clip='absmax'; given {self}")

    @classmethod
    def from_spec(cls, given: Quantizer | str | Mapping[str, Any], granularity: Granularity = "tensor") -> Quantizer:
        """Return the quantizer for a user's specification.

        Args:
            given: a quantizer; the name of a format or block format (`mxfp4_e2m1`, `nvfp4`); or the arguments of a
                quantizer with the format by name, such as {"format": "int8", "granularity": "token"}. With `nvfp4`,
                granularity `tensor` or `token` says which part shares the fp32 scale.
            granularity: granularity if `given` says none.

        Raises:
            UserError: if the specification is invalid.
        """
        if isinstance(given, Quantizer):
            return given
        if isinstance(given, str):
            return cls._from_name(given, granularity)
        if not isinstance(given, Mapping) or "format" not in given:
            raise UserError(
                f"a format must be a name, a mapping with the key 'format', or a Quantizer; given {given!r}"
            )
        known = tuple(cls.__dataclass_fields__)
        for key in given:
            _check_choice("key", key, known)
        rest = {key: value for key, value in given.items() if key != "format"}
        if "group_size" in rest:
            rest.setdefault("granularity", "group")
        # nvfp4 has groups of 16 in either case: here the granularity says which part shares the fp32 scale
        if given["format"] == "nvfp4" and rest.get("granularity") in ("tensor", "token"):
            granularity = rest.pop("granularity")
        named = cls._from_name(given["format"], granularity)
        for key in ("granularity", "group_size", "scales") if named.scales != "fp32" else ():  # a block format
            own = getattr(named, key)
            if rest.get(key, own) != own:
                raise UserError(f"{given['format']} fixes {key}={own!r}; given {rest[key]!r}")
        return named.replace(**rest)

    @classmethod
    def _from_name(cls, name: str, granularity: Granularity) -> Quantizer:
        if name == "nvfp4":
            scales: Scales = "fp8_token" if granularity == "token" else "fp8"
            return cls(FloatFormat(2, 1), "group", NV_GROUP, scales=scales)
        if isinstance(name, str) and name.lower().startswith(("mx", "nv")):
            try:
                return cls(parse_format(name.removeprefix("mx")), "group", MX_GROUP, scales="power2")
            except UserError:
                text = f"a block format must be nvfp4 or mx with a format, such as {_BLOCK_FORMATS[0]}; given {name!r}"
                raise UserError(with_hint(text, name.lower(), _BLOCK_FORMATS)) from None
        return cls(parse_format(name), granularity)

    def with_granularity(self, granularity: Granularity) -> Quantizer:
        """Return a copy with another granularity than `group`, and fp32 scales."""
        return self.replace(granularity=granularity, group_size=None, scales="fp32")

    def replace(self, **settings: Any) -> Quantizer:
        """Return a copy with other settings. `torch.compile` does not support `dataclasses.replace`."""
        return Quantizer(**{name: getattr(self, name) for name in type(self).__dataclass_fields__} | settings)

    @property
    def bits(self) -> float:
        """Bits per value, including its share of the group's scale."""
        scale_bits = 32 if self.scales == "fp32" else 8
        return self.format.bits + (scale_bits / self.group_size if self.group_size else 0.0)

    @property
    def mixes_tokens(self) -> bool:
        """True if a scale spans several vectors along the last dim, so that rounding one depends on the others."""
        if isinstance(self.format, FloatFormat) and self.format.bits >= 16:
            return False  # no scale
        return self.granularity in ("tensor", "channel") or self.scales == "fp8"

    def __str__(self) -> str:
        group = "" if self.group_size is None else f" of {self.group_size}"
        others: list[str] = [text for text in (self.rounding, self.clip) if text not in ("nearest", "absmax")]
        others += [] if self.scales == "fp32" else [f"{self.scales} scales"]
        return ", ".join([f"{self.format.name} by {self.granularity}{group}", *others])

    def encode(self, x: Tensor, *, axis: int = 0) -> Encoded:
        """Return codes and scales of a tensor, computed in fp32 (fp64 for fp64 tensors).

        Args:
            x: any shape and float dtype.
            axis: channel dim, for granularity `channel`.

        Raises:
            UserError: if x has no such axis.
        """
        # bf16 inputs are widened: a scale in bf16 would have an error of up to 0.4 %
        x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
        blocks, shared = self._blocks(x_wide, axis)  # x, or (..., groups, group) for granularity `group`
        scale = self._scale(blocks, shared)  # broadcasts over blocks
        scaled = blocks / scale
        noise = torch.rand_like(scaled) if self.rounding == "stochastic" else None
        return Encoded(self.format.round(scaled, noise), scale, x.shape)

    def __call__(self, x: Tensor, *, axis: int = 0) -> Tensor:
        """Return the tensor after fake quantization."""
        return _FakeQuantize.apply(x, self, axis)  # type: ignore[no-any-return,no-untyped-call]

    def _blocks(self, x: Tensor, axis: int) -> tuple[Tensor, tuple[int, ...]]:
        """Return x reshaped so that each scale is a reduction, and the dims to reduce."""
        if self.granularity == "tensor" or x.ndim == 0:
            return x, tuple(range(x.ndim))
        if self.granularity == "token":
            return x, (-1,)
        if self.granularity == "channel":
            if not hasattr(axis, "__index__") or not -x.ndim <= axis < x.ndim:
                raise UserError(f"axis must be one of the {x.ndim} dims of the tensor; given {axis!r}")
            return x, tuple(dim for dim in range(x.ndim) if dim != axis % x.ndim)
        return split_blocks(x, self.group_size or 1), (-1,)

    def _scale(self, blocks: Tensor, shared: tuple[int, ...]) -> Tensor:
        # empty tensors: amax over no values would raise
        if not blocks.numel():
            dims = {dim % blocks.ndim for dim in shared}
            return blocks.new_ones([1 if dim in dims else size for dim, size in enumerate(blocks.shape)])
        if shared:  # without memory for the magnitudes of all elements
            largest = torch.maximum(blocks.amax(shared, keepdim=True), -blocks.amin(shared, keepdim=True))
        else:
            largest = blocks.abs()
        if isinstance(self.format, FloatFormat) and self.format.bits >= 16:
            # not scaled; NaN or Inf as the scale still marks all values that share it
            return torch.ones_like(largest).where(largest.isfinite(), largest)
        if self.scales == "power2":
            return _power2_scale(largest, self.format)
        if self.scales in ("fp8", "fp8_token"):
            return _fp8_scale(largest, self.format, by_token=self.scales == "fp8_token")
        if self.clip == "mse":
            largest = largest * self._best_ratio(blocks, largest, shared)
        return _absmax_scale(largest, self.format)

    def _best_ratio(self, blocks: Tensor, largest: Tensor, shared: tuple[int, ...]) -> Tensor:
        """Return for each scale the share of the largest magnitude with the least squared error."""
        best, error = torch.ones_like(largest), torch.full_like(largest, torch.inf)
        for factors in (_COARSE_RATIOS, _FINE_RATIOS):
            center = best  # the second, finer search is around the best share of the first
            for factor in factors:
                # a share above 1 would leave the largest values of the format unused
                ratio = (center * factor).clamp(max=1.0)
                scale = _absmax_scale(largest * ratio, self.format)
                new_error = (self.format.round(blocks / scale) * scale - blocks).square().sum(shared, keepdim=True)
                # NaN errors never compare as better, so the share stays 1 and NaN survives
                is_better = new_error < error
                best, error = torch.where(is_better, ratio, best), torch.where(is_better, new_error, error)
        return best


def fake_quantize(
    x: Tensor,
    format: Quantizer | str | Mapping[str, Any],
    *,
    granularity: Granularity = "tensor",
    axis: int = 0,
    group_size: int | None = None,
    rounding: Rounding = "nearest",
    clip: Clip = "absmax",
) -> Tensor:
    """Round a tensor to a low-precision format; gradients pass as if it had not been rounded.

    Args:
        x: any shape and float dtype; the result has the same.
        format: name of a format, such as `int4`, `fp8_e4m3`, `mxfp4_e2m1`, `nvfp4`; or a mapping or a `Quantizer`,
            which contain all other settings except the axis.
        granularity: part of the tensor that shares a scale, see `Quantizer`.
        axis: channel dim, for granularity `channel`.
        group_size: size of a group, for granularity `group`.
        rounding: `nearest` or `stochastic`.
        clip: `absmax` or `mse`.

    Raises:
        UserError: if a setting does not exist or settings contradict each other.

    Example:
        >>> fake_quantize(torch.tensor([0.1, -0.4, 0.7]), "int3")
        tensor([ 0.0000, -0.4667,  0.7000])
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.element_size() < 2:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise UserError(f"fake_quantize needs a tensor of 16-, 32- or 64-bit floats; given {kind}")
    values = (granularity, group_size, rounding, clip)
    given = {key: value for (key, default), value in zip(_DEFAULTS.items(), values, strict=True) if value != default}
    if isinstance(format, str):
        format = {"format": format, **given}
    elif given:
        raise UserError(
            f"fake_quantize: {', '.join(given)} can only be given with a format by name; given {format}. Put them into "
            "the mapping or the Quantizer"
        )
    return Quantizer.from_spec(format)(x, axis=axis)


def in_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast rounded values to a dtype; values that overflow fp16 (`bf16` values can) become fp16's largest."""
    if dtype == torch.float16:
        values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return values.to(dtype)


class _FakeQuantize(torch.autograd.Function):
    """Rounding with the derivative of the identity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, quantizer: Quantizer, axis: int) -> Tensor:
        return in_dtype(quantizer.encode(x, axis=axis).decode(), x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def _absmax_scale(largest: Tensor, format: Format) -> Tensor:
    """Return the scale that maps the largest magnitude to the format's largest value; a normal number, 1 for all
    zeros.
    """
    scale = (largest / format.largest).clamp(min=torch.finfo(largest.dtype).tiny)
    return scale.where(largest != 0.0, 1.0)


def _power2_scale(largest: Tensor, format: Format) -> Tensor:
    """Return the power-of-2 scale from the exponents of both largest values (OCP Microscaling 1.0, section 6.3)."""
    # frexp has mantissas in [0.5, 1), hence the -1: exponent = floor(log2(largest)) - floor(log2(format's largest))
    exponent = torch.frexp(largest).exponent - 1 - floor(log2(format.largest))
    # keep the power within the normal fp32 range
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(-126, 127))
    return scale.where(largest.isfinite(), largest).where(largest != 0.0, 1.0)


def _fp8_scale(largest: Tensor, format: Format, *, by_token: bool) -> Tensor:
    """Return fp8_e4m3 scales times an fp32 scale that maps the largest fp8 scale to 448.

    Args:
        largest: largest magnitude of each group, (..., groups, 1).
        format: format of the values.
        by_token: True for one fp32 scale per vector of groups, False for one per tensor.
    """
    e4m3 = FloatFormat(4, 3)
    # (..., groups, 1) -> (..., 1, 1) per token, or a scalar for the tensor
    top = largest.amax(-2, keepdim=True) if by_token else largest.max()
    outer = (top / (format.largest * e4m3.largest)).clamp(min=torch.finfo(largest.dtype).tiny)  # fp32
    inner = e4m3.round(largest / format.largest / outer).clamp(min=2.0**-9)  # the smallest positive e4m3 value
    return (inner * outer).where(largest != 0.0, 1.0)


def _check_choice(what: str, given: Any, allowed: Sequence[str]) -> None:
    if given not in allowed:
        raise UserError(with_hint(f"{what} must be one of {', '.join(allowed)}; given {given!r}", given, allowed))
