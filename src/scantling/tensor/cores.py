"""Chains of cores (tensor trains): a tensor of many modes as a product of small tensors, with ranks on the bonds.

Core t has the shape (r_{t-1}, mode sizes..., r_t), with r_0 = r_n = 1. A tensor train has one mode per core; a TTM
(tensor-train matrix) has two, a row mode and a column mode. The functions here accept any number of modes per core.

    W[i_1, ..., i_n] = G_1[:, i_1, :] G_2[:, i_2, :] ... G_n[:, i_n, :]

Source: Oseledets, Tensor-Train Decomposition, SIAM J. Sci. Comput. 2011 (TT-SVD: algorithm 1, its error: theorem 2.2);
CoMERA, arXiv 2405.14377.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import TypeAlias

import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.tensor.modes import positive_ints

Sizes: TypeAlias = tuple[int, ...]
Box: TypeAlias = tuple[slice, ...]


def clip_ranks(rank: int | Sequence[int], sizes: Sequence[int]) -> Sizes:
    """Return the ranks of all bonds, clipped to the product of the modes on their left and right.

    Args:
        rank: rank of every inner bond, or one rank for each of them.
        sizes: elements of each core without its bonds: the product of its modes.

    Returns:
        `len(sizes) + 1` ranks; the first and the last are 1.

    Raises:
        UserError: if ranks are not positive integers, or not one for each inner bond.

    Example:
        >>> clip_ranks(30, (12, 8, 8, 8, 8, 12))
        (1, 12, 30, 30, 30, 12, 1)
    """
    num_bonds = len(sizes) - 1
    one = positive_ints([rank])
    given = positive_ints(rank) if one is None else one * num_bonds
    if given is None or len(given) != num_bonds:
        raise UserError(
            f"given rank={rank!r}; it must be a positive integer, or a sequence with one for each of the {num_bonds} "
            f"bonds between {len(sizes)} cores"
        )
    ranks = list(given)
    # From the left, then from the right: r_t <= r_{t-1} size_t, and r_t <= size_{t+1} r_{t+1}.
    for bond in range(num_bonds):
        ranks[bond] = min(ranks[bond], (ranks[bond - 1] if bond else 1) * sizes[bond])
    for bond in reversed(range(num_bonds)):
        ranks[bond] = min(ranks[bond], (ranks[bond + 1] if bond + 1 < num_bonds else 1) * sizes[bond + 1])
    return (1, *ranks, 1)


def num_parameters(sizes: Sequence[int], ranks: Sequence[int]) -> int:
    """Return the number of parameters in the cores: the sum of r_{t-1} * size_t * r_t.

    Args:
        sizes: elements of each core without its bonds.
        ranks: ranks of all bonds, including the outer ones.
    """
    return sum(left * size * right for left, size, right in zip(ranks[:-1], sizes, ranks[1:], strict=True))


def dense(cores: Sequence[Tensor]) -> Tensor:
    """Return the full tensor, its modes in the order of the cores: (modes of core 1..., modes of core 2..., ...)."""
    merged = cores[0].flatten(0, -2)  # (modes so far, r_t)
    for core in cores[1:]:
        numel = merged.shape[0] * core.shape[1:-1].numel()  # not -1: a bond may have no ranks
        # (modes so far, r_{t-1}) (r_{t-1}, modes of core t * r_t) -> (modes so far * modes of core t, r_t)
        merged = (merged @ core.flatten(1)).reshape(numel, core.shape[-1])
    return merged.view([size for core in cores for size in core.shape[1:-1]])


def squared_norm(cores: Sequence[Tensor], box: Sequence[Box] | None = None) -> Tensor:
    """Return the sum of squares of the tensor, computed from the cores: 0-D.

    Args:
        cores: cores of one chain.
        box: for each core the slices of its modes to include; default all.

    Carries a triangular factor from core to core instead of its Gram matrix, which would square the loss of precision
    when the terms of the tensor cancel.
    """
    factor = cores[0].new_ones(1, 1)
    for i, core in enumerate(cores):
        part = core if box is None else core[(slice(None), *box[i])]
        # R of (R_{t-1} G_t), with (r_{t-1} modes, r_t) rows and columns: |W|^2 = |R_n|^2
        factor = torch.linalg.qr((factor @ part.flatten(1)).reshape(-1, part.shape[-1]), mode="r").R
    return factor.square().sum()


def random_cores(
    shapes: Sequence[Sizes],
    ranks: Sequence[int],
    norm: float,
    boxes: Sequence[Sequence[Box]],
    center: int,
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Return random cores whose tensor has exactly the given norm outside of the padding.

    Cores left of the center are isometries from the left, (r * modes) x r' with orthonormal columns, and those right
    of it from the right. So every merged part of the chain is an isometry, too, and the matrix at the center of the
    chain has equal singular values. Products of Gaussian cores are badly conditioned instead, increasingly so for
    longer chains, and train more slowly. All cores have the same scale.

    Args:
        shapes: mode sizes of each core.
        ranks: ranks of all bonds, including the outer ones; at most those that the modes allow.
        norm: Frobenius norm of the tensor.
        boxes: disjoint boxes, each with one slice per mode of every core: the part of the tensor that is not padding.
        center: number of cores on the left.
        dtype: dtype of the cores.
        generator: random generator.
    """
    cores = []
    for i, (left, shape, right) in enumerate(zip(ranks[:-1], shapes, ranks[1:], strict=True)):
        # In float64 on the CPU: a seed gives the same cores on every device.
        core = torch.randn(left, *shape, right, dtype=torch.float64, device="cpu", generator=generator)
        if i < center:
            core = _orthonormal(core.flatten(0, -2)).reshape(core.shape)
        else:
            core = _orthonormal(core.flatten(1).t()).t().reshape(core.shape)
        cores.append(core)
    total = sum(float(squared_norm(cores, box)) for box in boxes)
    # An equal share of the scale for each core; the padding does not count toward the norm.
    factor = (norm / sqrt(total)) ** (1.0 / len(cores)) if total > 0.0 else 0.0
    return [(core * factor).to(dtype or torch.get_default_dtype()) for core in cores]


def _orthonormal(gaussian: Tensor) -> Tensor:
    """Return orthonormal columns, uniformly distributed; orthonormal rows if there are more columns than rows."""
    if gaussian.shape[0] < gaussian.shape[1]:
        return _orthonormal(gaussian.t()).t()
    q, r = torch.linalg.qr(gaussian)
    # Q is unique up to the signs of its columns; only with a positive diagonal of R is it uniformly distributed.
    signed: Tensor = q * r.diagonal().sign()
    return signed


def tt_svd(tensor: Tensor, shapes: Sequence[Sizes], ranks: Sequence[int] | None, error: float = 0.0) -> list[Tensor]:
    """Return the cores of a tensor, by one singular value decomposition per bond, from the left.

    The squared errors of the bonds add up to that of the tensor. Each bond may use an equal share of the remaining
    budget, so that later bonds can use what earlier bonds leave over.

    Args:
        tensor: tensor whose dims are the modes of all cores in order.
        shapes: mode sizes of each core.
        ranks: maximum ranks of all bonds, including the outer ones; None for as many as the error needs.
        error: allowed relative Frobenius error of the tensor; 0 keeps all that `ranks` allow.

    Returns:
        Cores in the dtype of `tensor`. The error is at most `error` if `ranks` are None or do not bind. Otherwise it
        is at most sqrt(n - 1) times the best possible at these ranks (Oseledets, corollary 2.4).
    """
    # torch has no SVD in half precision.
    rest = tensor.detach().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    budget = (float(rest.norm()) * error) ** 2
    cores, values, left = [], [], 1
    for i, shape in enumerate(shapes[:-1]):
        rest = rest.reshape(left * prod(shape), -1)  # (r_{t-1} modes of core t, modes of all later cores)
        u, s, v = torch.linalg.svd(rest, full_matrices=False)
        # Numerical rank: singular values at the level of rounding errors are noise.
        rank = max(1, int((s > s[0] * torch.finfo(s.dtype).eps).sum()))
        if ranks is not None:
            rank = min(rank, ranks[i + 1])
        if error > 0.0:
            tail = s.square().flip(0).cumsum(0).flip(0)  # tail[k]: squared error if k values are kept
            # The fewest values whose error fits into this bond's equal share of the budget.
            rank = min(rank, max(1, int((tail > budget / (len(shapes) - 1 - i)).sum())))
            # tail[rank] is the squared error of this bond, 0 if all values are kept.
            budget = max(0.0, budget - float(tail[rank:][:1].sum()))
        cores.append(u[:, :rank].reshape(left, *shape, rank))
        # A zero tensor keeps one singular value of 0; the cores are divided by its root below.
        values.append(s[:rank].clamp(min=torch.finfo(s.dtype).tiny))
        rest, left = s[:rank, None] * v[:rank], rank
    cores.append(rest.reshape(left, *shapes[-1], 1))
    for bond, value in enumerate(values):  # split each singular value evenly, to balance the magnitude of cores
        cores[bond] = cores[bond] * value.sqrt()
        cores[bond + 1] = cores[bond + 1] / value.sqrt().view(-1, *[1] * (cores[bond + 1].ndim - 1))
    return [core.to(tensor.dtype) for core in cores]
