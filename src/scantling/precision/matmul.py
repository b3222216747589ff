"""Low-precision matrix products with hardware int8 or fp8 instructions instead of simulated ones.

Codes are multiplied as int8 or fp8, and scaled afterwards:

    y = (Cx Cw^T) * sx * sw^T,    x = Cx * sx (one scale per tensor or per token),
                                  W = Cw * sw (one scale per tensor or per output)

If a gradient format is given, the two products of the backward pass multiply codes as well. The scales of outputs and
tokens would stand inside the sums of these products. They are multiplied into the gradient before it is rounded, so
that neither x nor W is rounded again:

    dx = q(g * sw^T) Cw,    dW = q((g * sx)^T) Cx

with one scale per row of the rounded matrix, or one for the whole matrix. Without a gradient format, the backward pass
multiplies by the dequantized values, in the dtype of the gradient.

On a GPU, int8 needs more than 16 rows and fp8 a compute capability of 8.9; both need dims in multiples of 16. Rows and
columns of zeros are added as padding.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scantling.errors import UserError
from scantling.numerics.formats import FloatFormat, Format, IntFormat, parse_format
from scantling.numerics.torch_private import float8_matmul, int8_matmul
from scantling.precision.quantizer import Quantizer

Compute: TypeAlias = Literal["int8", "fp8"]


class Matmul:
    """Matrix product of the hardware in int8 or fp8.

    Args:
        name: `int8` or `fp8`.

    Attributes:
        by_row, by_column: quantizers to the most precise format of this product, with one scale per row of the first
            factor or per column of the second.

    Raises:
        UserError: if the name is neither.
    """

    def __init__(self, name: Compute) -> None:
        if name not in get_args(Compute):
            raise UserError(f"compute must be one of {', '.join(get_args(Compute))}; given {name!r}")
        self.name = name
        widest = parse_format("int8" if name == "int8" else "fp8_e4m3")
        self.by_row, self.by_column = Quantizer(widest, "token"), Quantizer(widest, "channel")

    def check(self, quantizer: Quantizer | None, what: str) -> None:
        """Raise unless the product supports this quantizer.

        Args:
            quantizer: quantizer of one factor.
            what: `weights`, `activations` or `gradients`.

        Raises:
            UserError: if format or granularity are not supported, or the quantizer is missing.
        """
        if quantizer is None:
            raise UserError(f"compute={self.name!r} needs formats of weights and activations; give one for {what}")
        if self._dtype(quantizer.format) is None:
            allowed = "int2 to int8" if self.name == "int8" else "fp8_e4m3, fp8_e5m2 and the smaller floats within them"
            raise UserError(f"compute={self.name!r} takes {what} in {allowed}; given {quantizer.format.name}")
        granularities = ("tensor", "channel" if what == "weights" else "token")
        if quantizer.granularity not in granularities:
            raise UserError(
                f"compute={self.name!r} takes {what} with granularity {' or '.join(granularities)}; given "
                f"{quantizer.granularity!r}"
            )

    def check_pair(self, one: Quantizer, other: Quantizer) -> None:
        """Raise unless the product supports these two formats together.

        Raises:
            UserError: if both formats have 5 exponent bits, since the hardware cannot multiply two fp8_e5m2 matrices.
        """
        if self._dtype(one.format) == self._dtype(other.format) == torch.float8_e5m2:
            raise UserError(
                f"compute={self.name!r} cannot multiply two formats with 5 exponent bits; given {one.format.name} and "
                f"{other.format.name}. Give at most 4 exponent bits to one of them, as fp8_e4m3 has"
            )

    def __call__(
        self, x: Tensor, matrix: Tensor, *, activations: Quantizer, weights: Quantizer, gradients: Quantizer | None
    ) -> Tensor:
        """Return x times matrix: (..., k) by (k, n) to (..., n), in the dtype of x or, under autocast, in its dtype.

        Args:
            x, matrix: floats.
            activations: quantizer of x.
            weights: quantizer of the matrix, whose columns are the channels.
            gradients: quantizer of the output gradient; None leaves it unrounded.
        """
        device = x.device.type
        # Autocast does not know these products: cast x here, so that y has the dtype of a linear layer under autocast.
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        # (..., k) -> (tokens, k)
        flat = x.reshape(-1, x.shape[-1])
        y = _MatmulFunction.apply(flat, matrix.t(), activations, weights, gradients, self)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], matrix.shape[1])  # type: ignore[no-any-return]

    def multiply_codes(self, a: Tensor, b: Tensor, formats: tuple[Format, Format]) -> Tensor:
        """Return the product of codes (m, k) and (k, n): fp32 (m, n)."""
        dtypes = [self._dtype(each) for each in formats]
        assert dtypes[0] is not None
        assert dtypes[1] is not None
        (rows, inner), columns = a.shape, b.shape[1]
        if a.is_cuda:
            # Zeros change no product; GPU kernels need dims in multiples of 16, and int8 more than 16 rows.
            a = torch.nn.functional.pad(a, (0, -inner % 16, 0, max(-rows % 16, 32 - rows)))
            b = torch.nn.functional.pad(b, (0, -columns % 16, 0, -inner % 16))
        # Both kernels take a row-major first and a column-major second factor.
        a, b = a.to(dtypes[0]).contiguous(), b.t().to(dtypes[1]).contiguous().t()
        if self.name == "int8":
            y = int8_matmul(a, b).float()
        else:
            # Codes carry no scales here: the caller multiplies the fp32 result by its row and column scales.
            one = torch.ones((), device=a.device)
            y = float8_matmul(a, b, scale_a=one, scale_b=one, out_dtype=torch.float32)
        return y[:rows, :columns]

    def _dtype(self, format: Format) -> torch.dtype | None:
        """Return the dtype in which codes of a format are multiplied; None if it cannot hold them."""
        if self.name == "int8":
            return torch.int8 if isinstance(format, IntFormat) and format.bits <= 8 else None
        if not isinstance(format, FloatFormat):
            return None
        # e4m3 first: it has a mantissa bit more, and e5m2 is needed only for a fifth exponent bit.
        if format.exponent <= 4 and format.mantissa <= 3:
            return torch.float8_e4m3fn
        return torch.float8_e5m2 if format.exponent <= 5 and format.mantissa <= 2 else None


class _MatmulFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        activations: Quantizer,
        weights: Quantizer,
        gradients: Quantizer | None,
        matmul: Matmul,
    ) -> Tensor:
        x_encoded, weight_encoded = activations.encode(x), weights.encode(weight, axis=0)
        formats = (activations.format, weights.format)
        dtypes = [matmul._dtype(each) for each in formats]
        # codes (tokens, in) with scales (tokens or 1, 1); codes (out, in) with scales (out or 1, 1)
        x_codes, weight_codes = x_encoded.codes.to(dtypes[0]), weight_encoded.codes.to(dtypes[1])
        y = (
            matmul.multiply_codes(x_codes, weight_codes.t(), formats)
            .mul_(x_encoded.scale)
            .mul_(weight_encoded.scale.t())
        )
        # codes are saved, not values: one byte per element, and the backward pass multiplies them again
        ctx.save_for_backward(x_codes, x_encoded.scale, weight_codes, weight_encoded.scale)
        ctx.settings = formats, gradients, matmul, weight.dtype
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x_codes, x_scale, weight_codes, weight_scale = ctx.saved_tensors
        formats, gradients, matmul, weight_dtype = ctx.settings
        x_grad = weight_grad = None
        if gradients is None:
            if ctx.needs_input_grad[0]:
                x_grad = grad @ (weight_codes.float() * weight_scale).to(grad.dtype)
            if ctx.needs_input_grad[1]:
                weight_grad = grad.t() @ (x_codes.float() * x_scale).to(grad.dtype)
        else:
            # the scales along the summed dim go into the gradient before it is rounded
            if ctx.needs_input_grad[0]:  # dx = q(g sw^T) Cw
                encoded = gradients.encode(grad.float() * weight_scale.t())
                product = matmul.multiply_codes(encoded.codes, weight_codes, (gradients.format, formats[1]))
                x_grad = product.mul_(encoded.scale)
            if ctx.needs_input_grad[1]:  # dW = q((g sx)^T) Cx
                encoded = gradients.encode((grad.float() * x_scale).t())
                product = matmul.multiply_codes(encoded.codes, x_codes, (gradients.format, formats[0]))
                weight_grad = product.mul_(encoded.scale)
        return (
            None if x_grad is None else x_grad.to(grad.dtype),
            None if weight_grad is None else weight_grad.to(weight_dtype),
            *(None, None, None, None),
        )


def check_device(compute: str, device: torch.device) -> None:
    """Raise unless a device has hardware products of a format.

    Args:
        compute: name of the format; only fp8 products are missing on some GPUs.
        device: device that the model will run on.

    Raises:
        UserError: if the device has no such products.
    """
    if compute == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            f"{torch.cuda.get_device_name(device)} has no fp8 matrix products; leave out compute='fp8' to simulate them"
        )
