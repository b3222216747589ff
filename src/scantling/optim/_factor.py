"""Which dims of a parameter form the rows and the columns of its factored statistics.

A factored second moment of a matrix with R rows and C columns is two vectors, of R and of C numbers. A parameter of
more dims is read as a stack of matrices: some of its dims form the rows, some the columns, the rest are batch dims with
statistics of their own. The vectors keep the dims of the parameter, with 1 for what was averaged away, so that they
broadcast against it without a reshape, and so that cutting or sharding a dim of the parameter cuts or shards the same
dim of its statistics.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Literal, TypeAlias

import torch

from scantling.groups import MatrixDims, check_matrix_dims, default_matrix_dims

Factor: TypeAlias = Literal["auto", "last2"]
FACTORS: tuple[Factor, ...] = ("auto", "last2")

MIN_SIDE = 16
"""Shortest side that `factor="auto"` factors. Below, a full second moment costs little; from there on the four factors
are at most a quarter of it, so that factoring never costs more than it saves."""


@lru_cache(maxsize=4096)
def matrix_view(
    shape: tuple[int, ...],
    factor: Factor = "auto",
    matrix_dims: MatrixDims | None = None,
    role: str | None = None,
) -> MatrixDims | None:
    """The dims that form rows and columns of a parameter's factored statistics, or None for a full second moment.

    Args:
        shape: of the parameter.
        factor: "last2" factors the last two dims of everything with two or more, as the reference does. "auto" takes
            `matrix_dims`, and without them reads 2-D as rows x columns, 3-D as a stack of matrices and 4-D and 5-D as
            the weights of a convolution, O x (I * kernel); it leaves a matrix with a side under 16 unfactored.
        matrix_dims: (row dims, column dims) as `scantling.param_groups` sets them.
        role: as `scantling.param_groups` sets it; "auto" never factors a "vector".

    Raises:
        UserError: `matrix_dims` do not fit the shape.
    """
    ndim = len(shape)
    if ndim < 2:
        return None
    if factor == "last2":
        return (ndim - 2,), (ndim - 1,)
    if role == "vector":
        return None
    rows, cols = default_matrix_dims(ndim) if matrix_dims is None else check_matrix_dims(matrix_dims, ndim)
    if min(prod(shape[dim] for dim in rows), prod(shape[dim] for dim in cols)) < MIN_SIDE:
        return None
    return rows, cols


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 parameters, fp32 for all others: EMAs with beta = 0.9999 stand still in bf16."""
    return torch.float64 if dtype == torch.float64 else torch.float32
