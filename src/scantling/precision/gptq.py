"""GPTQ: round a weight column by column, and let the remaining columns compensate for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323,
algorithm 1. With inputs x, the squared error of the outputs is tr(E H E^T), where H is the mean of x x^T and E is the
rounding error of the weight (out, in). U is the upper Cholesky factor of the inverse, H^-1 = U^T U. For each column i
in turn:

    q_i = round(w_i),    e_i = (w_i - q_i) / U_ii,    W[:, i+1:] -= e_i U[i, i+1:]

Columns are processed in blocks: each error updates the columns of its block at once, and the columns after the block
as one product per block. Changes from the paper: any format of `numerics.formats` works; the factor is computed in
fp64; weights of inputs that were always 0 are rounded to nearest instead of set to 0, since other text may activate
these inputs.

Cost: in^3 FLOPs for the factor and out in^2 for the updates. Memory in addition to weight and codes: twice 8 in^2
bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.numerics.block_quantizer import split_blocks
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
    """Quantize a weight so that the outputs on its inputs change little.

    Scales of channels and tensors come from the original weight. Scales of groups are computed when their first column
    is reached, from weights that already compensate for earlier errors. With `act_order`, and for `nvfp4`, whose
    scales depend on each other, they come from the original weight.

    Args:
        weight: (out, in).
        hessian: (in, in), mean of x x^T over the inputs x.
        quantizer: quantizer that rounds to nearest.
        damping: value added to the diagonal of the Hessian, as a share of the diagonal's mean.
        act_order: True to process columns by decreasing input magnitude instead of from first to last.
        block: columns per block; rounded down to whole groups, but at least one group.

    Returns:
        Codes and scales as returned by `Quantizer.encode`.

    Raises:
        UserError: if the Hessian holds NaN or Inf, or is singular with this damping.

    Source: arXiv 2210.17323, algorithm 1; `act_order` from the authors' code.
    """
    start = quantizer.encode(weight)
    columns = weight.shape[1]
    # Work on the transpose, so that a column of the weight is a contiguous row.
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else None
    transposed = weight.detach().t().to(start.codes.dtype)  # (in, out)
    todo = transposed.clone(memory_format=torch.contiguous_format) if order is None else transposed[order]
    # (in, in), upper triangular; permuted like the columns
    factor = inverse_factor(hessian if order is None else hessian[order][:, order], damping).to(todo.dtype)
    size = quantizer.group_size if quantizer.granularity == "group" and quantizer.group_size else columns
    scales = start.scale.reshape(len(start.scale), -1).clone()  # (out or 1, groups)
    # act_order mixes columns of different groups: look up each column's group by its original position
    group_of = [i // size for i in (range(columns) if order is None else order.tolist())]
    # Fresh scales need whole groups in column order, and scales that do not depend on other groups (nvfp4's do).
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
            scale = scales[:, group_of[i]]  # (out or 1)
            codes[i] = quantizer.format.round(todo[i] / scale)
            errors[i - begin] = (todo[i] - codes[i] * scale) / factor[i, i]  # e_i = (w_i - q_i) / U_ii
            # W[:, i+1:] -= e_i U[i, i+1:], within the block
            todo[i + 1 : end].addr_(factor[i, i + 1 : end], errors[i - begin], alpha=-1.0)
        # the same update of all columns after the block, as one product
        todo[end:].addmm_(factor[begin:end, end:].t(), errors, alpha=-1.0)
    ordered = (codes if order is None else codes[order.argsort()]).t().contiguous()  # (out, in)
    if start.codes.ndim == 3:
        ordered = split_blocks(ordered, size)
    return Encoded(ordered, scales.view_as(start.scale), start.shape)


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a damped Hessian, in fp64.

    Args:
        hessian: (n, n), symmetric positive semidefinite; not modified.
        damping: value added to the diagonal, as a share of the diagonal's mean.

    Raises:
        UserError: if the Hessian holds NaN or Inf, or is singular despite the damping.
    """
    damped = hessian.to(torch.float64, copy=True)
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    diagonal.add_(damping * mean)
    # damping=0 leaves 0 for inputs that were always 0; their off-diagonal entries are 0, so any positive value works.
    diagonal[diagonal == 0.0] = mean.where(mean > 0.0, 1.0)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed) or not bool(lower.isfinite().all()):
        if not bool(hessian.isfinite().all()):
            raise UserError("the inputs of a layer are NaN or Inf on the calibration data")
        raise UserError(f"the Hessian of a layer is singular with damping={damping}; raise it, or give more batches")
    # H = L L^T gives H^-1; its upper Cholesky factor U satisfies H^-1 = U^T U.
    factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return factor


def output_error(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """Return the RMS error of the outputs, relative to their RMS; weights (out, in), Hessian (in, in)."""
    hessian = hessian.to(torch.promote_types(weight.dtype, torch.float32))
    weight, error = weight.to(hessian.dtype), quantized.to(hessian.dtype) - weight.to(hessian.dtype)
    # tr(E H E^T) and tr(W H W^T): mean squares of the output error and of the output
    square_error, square = (((each @ hessian) * each).sum(dtype=torch.float64).clamp(0.0) for each in (error, weight))
    return float((square_error / square).sqrt()) if bool(square > 0.0) else 0.0
