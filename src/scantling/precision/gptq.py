"""GPTQ: round a weight column by column, and let the columns to come make up for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323,
algorithm 1. With inputs x, the error of the outputs is tr(E H E^T), H = mean of x x^T, E what rounding does to the
weight (out, in). With U the upper Cholesky factor of the inverse, H^-1 = U^T U, for each column i in turn:

    q_i = round(w_i),    e_i = (w_i - q_i) / U_ii,    W[:, i+1:] -= e_i U[i, i+1:]

in blocks of columns: within one at once, to the columns after it as one product. Changed from the paper: any format of
`numerics.formats`; the factor is computed in fp64; inputs that were always 0 do not have their weights set to 0 but
rounded to the nearest, since another text may have them.

Cost: in^3 FLOPs for the factor and out in^2 for the updates; beside weight and codes, 8 in^2 bytes twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.precision.quantizer import Encoded, Quantizer

BLOCK = 128


def gptq(
    weight: Tensor,
    hessian: Tensor,
    quantizer: Quantizer,
    *,
    damping: float = 0.01,
    act_order: bool = False,
    block: int = BLOCK,
) -> Encoded:
    """Quantise a weight for its inputs.

    Scales of channels and tensors are those of the weight as it is. Scales of groups are taken when their first column
    comes, from weights that make up for the errors before; with `act_order`, and for `nvfp4`, whose scales belong
    together, from the weight as it is.

    Args:
        weight: (out, in).
        hessian: (in, in), mean of x x^T over the inputs x.
        quantizer: rounding to the nearest.
        damping: added to the diagonal of the Hessian, as a share of its mean.
        act_order: go from the largest inputs to the smallest, in place of the first to the last.
        block: columns that are updated at once; as many more as fill whole groups.

    Returns:
        Codes and scales as of `Quantizer.encode`.

    Raises:
        UserError: a Hessian with NaN or Inf, or one that is singular for want of damping.

    Source: arXiv 2210.17323, algorithm 1; `act_order` from the authors' code.
    """
    start = quantizer.encode(weight)
    columns = weight.shape[1]
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else None
    turned = weight.detach().t().to(start.codes.dtype)
    todo = turned.clone(memory_format=torch.contiguous_format) if order is None else turned[order]  # (in, out)
    factor = inverse_factor(hessian if order is None else hessian[order][:, order], damping).to(todo.dtype)
    size = quantizer.group_size if quantizer.granularity == "group" and quantizer.group_size else columns
    scales = start.scale.reshape(len(start.scale), -1).clone()  # (out or 1, groups)
    group_of = [i // size for i in (range(columns) if order is None else order.tolist())]
    fresh = quantizer.granularity == "group" and not act_order and quantizer.scales != "fp8"
    if fresh:
        block = size * max(1, block // size)
    codes = torch.empty_like(todo)
    for begin in range(0, columns, block):
        end = min(begin + block, columns)
        errors = torch.empty_like(todo[begin:end])
        for i in range(begin, end):
            if fresh and i % size == 0:
                scales[:, i // size] = quantizer.encode(todo[i : i + size].t()).scale.flatten()
            scale = scales[:, group_of[i]]
            codes[i] = quantizer.format.round(todo[i] / scale)
            errors[i - begin] = (todo[i] - codes[i] * scale) / factor[i, i]
            todo[i + 1 : end].addr_(factor[i, i + 1 : end], errors[i - begin], alpha=-1.0)
        todo[end:].addmm_(factor[begin:end, end:].t(), errors, alpha=-1.0)
    whole = codes.t().contiguous() if order is None else codes[order.argsort()].t().contiguous()
    if start.codes.ndim == 3:
        whole = torch.nn.functional.pad(whole, (0, -columns % size)).view_as(start.codes)
    return Encoded(whole, scales.view_as(start.scale), start.shape)


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of a damped Hessian, in fp64.

    Args:
        hessian: (n, n), symmetric and not negative; it is not changed.
        damping: added to the diagonal, as a share of the mean of it.

    Raises:
        UserError: NaN or Inf, or a matrix that is singular even so.
    """
    damped = hessian.to(torch.float64, copy=True)
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    diagonal.add_(damping * mean)
    diagonal[diagonal == 0.0] = mean.where(mean > 0.0, 1.0)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed) or not bool(lower.isfinite().all()):
        if not bool(hessian.isfinite().all()):
            raise UserError("the inputs of a layer are NaN or Inf on the calibration data")
        raise UserError(f"the Hessian of a layer is singular with damping={damping}; raise it, or give more batches")
    factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return factor


def output_error(weight: Tensor, quantised: Tensor, hessian: Tensor) -> float:
    """Error of the outputs, as a share of their root mean square: weights (out, in), Hessian (in, in)."""
    wide = hessian.to(torch.promote_types(weight.dtype, torch.float32))
    weight, lost = weight.to(wide.dtype), quantised.to(wide.dtype) - weight.to(wide.dtype)
    made, whole = (((each @ wide) * each).sum(dtype=torch.float64).clamp(0.0) for each in (lost, weight))
    return float((made / whole).sqrt()) if bool(whole > 0.0) else 0.0
