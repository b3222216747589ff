"""State of CAME: matrix views, state tensors and their bytes, and the record of one parameter in one step.

State tensors of a parameter, by their keys in the state dict:

step                       0-D fp32
exp_avg                    momentum in fp32 or bf16, in the shape of the parameter; absent if beta1 = 0
exp_avg_codes, _scale      momentum as codes, see `codecs.py`
row, col                   factored second moment, fp32
res_row, res_col           factored instability, fp32; absent without confidence or momentum
exp_avg_sq                 full second moment of a parameter that is not factored
low                        the 8 bits below a bf16 weight, see `codecs.py`

A factored second moment of a matrix with R rows and C columns is two vectors, of R and of C elements. A parameter with
more dims is read as a stack of matrices: some dims form the rows, some the columns, the others are batch dims. The
vectors keep the dims of the parameter, with size 1 along averaged dims: they broadcast against the parameter without a
reshape, and slicing or sharding a dim of the parameter slices or shards the same dim of its statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.groups import MatrixDims, check_matrix_dims, default_matrix_dims
from scantling.numerics.torch_private import is_zero_tensor
from scantling.optim.codecs import MOMENTA, ROUNDINGS, Momentum, Rounding, momentum_shapes
from scantling.optim.sharding import ShardPlan
from scantling.optim.stages import bias_correction

Factor: TypeAlias = Literal["auto", "last2"]
FACTORS: tuple[Factor, ...] = ("auto", "last2")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Shapes: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]

MIN_SIDE = 16
"""Shortest side that `factor="auto"` factors. A full second moment of a thinner matrix costs little; from 16 on, the
four factors are at most a quarter of it, so factoring never costs more than it saves."""


@lru_cache(maxsize=4096)
def matrix_view(
    shape: tuple[int, ...],
    factor: Factor = "auto",
    matrix_dims: MatrixDims | None = None,
    role: str | None = None,
) -> MatrixDims | None:
    """Return the dims that form the rows and the columns of a parameter, or None for a full second moment.

    Args:
        shape: shape of the parameter.
        factor: "last2" factors the last two dims of every parameter with two or more, as the reference does. "auto"
            takes `matrix_dims`, and without them reads 2-D as rows x columns, 3-D as a stack of matrices and 4-D and
            5-D as the weights of a convolution, O x (I * kernel); it does not factor a matrix with a side under 16.
        matrix_dims: (row dims, column dims) as `scantling.param_groups` sets them.
        role: role as `scantling.param_groups` sets it; "auto" never factors a "vector".

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
    # A thin matrix has a full second moment instead.
    if min(prod(shape[dim] for dim in rows), prod(shape[dim] for dim in cols)) < MIN_SIDE:
        return None
    return rows, cols


def group_matrix_view(group: Mapping[str, Any], shape: Sequence[int]) -> MatrixDims | None:
    """Return the `matrix_view` of a parameter of this shape in this group."""
    dims = group["matrix_dims"]
    pair = None if dims is None else (tuple(dims[0]), tuple(dims[1]))  # a group read from JSON holds lists
    return matrix_view(tuple(shape), group["factor"], pair, group["role"])


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64 parameters and fp32 for all others: EMAs with beta = 0.9999 stand still in bf16."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def momentum_and_confidence(group: Mapping[str, Any]) -> tuple[Momentum | None, bool]:
    """Return the codec of the momentum of a group, None if beta1 = 0, and True if it keeps a confidence.

    With beta1 = 0 the momentum is the update: nothing has to be kept, and the residual (u - m)^2 is 0.
    """
    return (None, False) if group["betas"][0] == 0 else (group["momentum"], group["confidence"])


def state_shapes(group: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype) -> Shapes:
    """Return (shape, dtype) of the state tensors of a parameter of this shape and dtype in this group."""
    momentum, confidence = momentum_and_confidence(group)
    return state_tensors(
        tuple(shape),
        dtype,
        group_matrix_view(group, shape),
        momentum=momentum,
        rounding=group["rounding"],
        confidence=confidence,
    )


@lru_cache(maxsize=4096)
def state_tensors(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    view: MatrixDims | None,
    *,
    momentum: Momentum | None,
    rounding: Rounding,
    confidence: bool,
) -> Shapes:
    """Return (shape, dtype) of the state tensors of one parameter by their keys in the state dict.

    Callers share the cached result and must not change it.
    """
    statistics = statistics_dtype(dtype)
    # fp32 counts exactly up to 2^24 steps.
    tensors: Shapes = {"step": ((), torch.float32), **momentum_shapes(shape, view, momentum, statistics)}
    if view is None:
        tensors["exp_avg_sq"] = (shape, statistics)
    else:
        # Averages keep the dims of the parameter, with size 1 along the averaged ones: (R, 1) and (1, C).
        rows, cols = view
        row = tuple(1 if dim in cols else size for dim, size in enumerate(shape))
        col = tuple(1 if dim in rows else size for dim, size in enumerate(shape))
        factors = zip(_FACTORS[: 4 if confidence else 2], (row, col, row, col), strict=False)
        tensors |= {key: (size, statistics) for key, size in factors}
    if rounding == "compensated" and dtype == torch.bfloat16:
        tensors["low"] = (shape, torch.int8)
    return tensors


def averaged_dims(key: str, view: MatrixDims | None) -> tuple[int, ...] | None:
    """Return the dims of a parameter that a state tensor was averaged over; None for the step counter."""
    if key == "step":
        return None
    if view is None or key not in _FACTORS:
        return ()
    rows, cols = view
    return cols if key in ("row", "res_row") else rows


_FACTORS = ("row", "col", "res_row", "res_col")


def came_state_bytes(
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    momentum: Momentum = "fp32",
    rounding: Rounding = "nearest",
    factor: Factor = "auto",
    matrix_dims: MatrixDims | None = None,
    role: str | None = None,
    confidence: bool = True,
    betas: Sequence[float] = (0.9, 0.999, 0.9999),
) -> int:
    """Return the bytes of the state that `CAME` keeps for one parameter, including the step counter.

    Args:
        shape: shape of the parameter.
        dtype: dtype of the parameter.
        momentum, rounding, factor, matrix_dims, role, confidence, betas: options of the parameter's group.

    Returns:
        The exact bytes of the storages after the first step; 0 for an empty parameter.

    Raises:
        UserError: an unknown momentum, rounding or factor, or a dtype that CAME does not train.
    """
    sizes = tuple(shape)
    for name, value, allowed in (
        ("momentum", momentum, MOMENTA),
        ("rounding", rounding, ROUNDINGS),
        ("factor", factor, FACTORS),
        ("dtype", dtype, DTYPES),
    ):
        if value not in allowed:
            raise UserError(f"{name} must be one of {', '.join(map(str, allowed))}; given {value!r}")
    if matrix_dims is not None:
        matrix_dims = check_matrix_dims(matrix_dims, len(sizes))
    if not prod(sizes):
        return 0
    view = matrix_view(sizes, factor, matrix_dims, role)
    codec, has_confidence = momentum_and_confidence({"betas": betas, "momentum": momentum, "confidence": confidence})
    tensors = state_tensors(sizes, dtype, view, momentum=codec, rounding=rounding, confidence=has_confidence)
    return sum(prod(size) * kind.itemsize for size, kind in tensors.values())


@dataclass(frozen=True, slots=True)
class HyperParams:
    """Hyper-parameters of a group in one step."""

    lr: float | Tensor
    beta1: float
    beta2: float
    beta3: float
    eps1: float
    eps2: float
    clip_threshold: float
    weight_decay: float
    debias: bool
    maximize: bool
    momentum: Momentum | None
    rounding: Rounding
    confidence: bool
    foreach: bool | None
    layout_key: tuple[Any, ...]
    """Options that decide shapes and dtypes of the state."""

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> HyperParams:
        (beta1, beta2, beta3), (eps1, eps2) = group["betas"], group["eps"]
        momentum, confidence = momentum_and_confidence(group)
        return cls(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            beta3=beta3,
            eps1=eps1,
            eps2=eps2,
            clip_threshold=min(float(group["clip_threshold"]), 1e150),  # its square must not overflow
            weight_decay=group["weight_decay"],
            debias=group["debias"],
            maximize=group["maximize"],
            momentum=momentum,
            rounding=group["rounding"],
            confidence=confidence,
            foreach=group["foreach"],
            layout_key=(momentum, group["rounding"], confidence, group["factor"], group["role"], group["matrix_dims"]),
        )

    def decay(self, like: Tensor) -> Tensor | None:
        """Return -lr * weight_decay as a 0-D tensor, or None without weight decay."""
        return like.new_full((), -self.weight_decay).mul_(self.lr) if self.weight_decay else None


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """Everything about one parameter that stays from step to step; the optimizer caches it.

    Attributes:
        key: shape, dtype, placements and options; the optimizer makes a new layout when one of them changes.
        param: any float dtype; for a sharded parameter the part on this rank, as in `state`.
        state: state tensors of `param`.
        view: (row dims, column dims), or None for a full second moment.
        sizes: number of matrices, rows and columns of each; a vector is one row.
        plan: position of `param` in the whole parameter.
        pointers: addresses of `param` and of the state tensors in the order of `POINTERS`, 0 for an absent one; None
            if a kernel cannot read one of them through `data_ptr`.
        place: index of the first element of `param` in the whole parameter, rows and columns of a whole matrix; None if
            the elements of a matrix are not at start + row * columns + column, or if its rows and columns are sharded.
        first_ranks: True if this rank is the first of those over which row averages, and column averages, are summed.
        has_sharded_rows: True if this rank has a part of the row averages.
    """

    key: tuple[Any, ...]
    param: Tensor
    state: dict[str, Tensor]
    view: MatrixDims | None
    sizes: tuple[int, int, int]
    plan: ShardPlan
    pointers: tuple[int, ...] | None
    place: tuple[int, int, int] | None
    first_ranks: tuple[bool, bool]
    has_sharded_rows: bool

    @classmethod
    def build(
        cls, key: tuple[Any, ...], param: Tensor, state: dict[str, Tensor], view: MatrixDims | None, plan: ShardPlan
    ) -> ParamLayout:
        # Kernels get raw addresses: every tensor must be plain memory on the device of the parameter.
        tensors = (param, *state.values())
        is_readable = all(is_plain_memory(tensor) and tensor.device == param.device for tensor in tensors)
        pointers = _data_pointers(param, state) if is_readable else None
        rows, cols = view or ((), ())
        return cls(
            *(key, param, state, view, _matrix_sizes(param.shape, view), plan, pointers),
            place=_find_place(tuple(param.shape), view, plan),
            first_ranks=(plan.is_first_rank(cols), plan.is_first_rank(rows)),
            has_sharded_rows=bool(plan.groups(rows)),
        )

    def is_current(self, key: tuple[Any, ...], state: Mapping[str, Tensor]) -> bool:
        """True if the parameter and its state are the same tensors at the same addresses as when this was made."""
        return (
            self.pointers is not None
            and self.key == key
            and len(state) == len(self.state)
            and all(state.get(name) is tensor for name, tensor in self.state.items())
            and self.pointers == _data_pointers(self.param, self.state)  # `.data` may have been replaced
        )

    def address(self, key: str) -> int:
        """Return the address of one of `POINTERS`, which kernels can read."""
        return 0 if self.pointers is None else self.pointers[POINTERS.index(key)]

    @property
    def is_row_major(self) -> bool:
        """True if the parameter is a stack of row-major matrices: its last dims are the row dims, then the columns."""
        dims = [] if self.view is None else [*self.view[0], *self.view[1]]
        return dims == list(range(self.param.ndim - len(dims), self.param.ndim))


POINTERS = ("param", "momentum", "exp_avg_scale", "low", "row", "col", "res_row", "res_col", "exp_avg_sq", "step")
"""Order of `ParamLayout.pointers`; the momentum is `exp_avg_codes` or `exp_avg`."""


def _data_pointers(param: Tensor, state: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the addresses of a parameter and its state tensors in the order of `POINTERS`; 0 for an absent one."""
    momentum = state.get("exp_avg_codes", state.get("exp_avg"))
    return (
        param.data_ptr(),
        0 if momentum is None else momentum.data_ptr(),
        *(state[key].data_ptr() if key in state else 0 for key in POINTERS[2:]),
    )


def is_plain_memory(tensor: Tensor) -> bool:
    """True if kernels can read the tensor through `data_ptr`."""
    return (
        type(tensor) in (Tensor, nn.Parameter)  # other classes may wrap tensors, or have no data at all
        and tensor.device.type != "meta"
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not is_zero_tensor(tensor)
    )


@dataclass(frozen=True, slots=True)
class ParamStep:
    """One parameter in one step.

    Attributes:
        layout: the parameter, its state and their cached description.
        grad: gradient of `layout.param`; zeros if this rank has none.
        hyper: hyper-parameters of its group.
        param_idx: index of the parameter in the optimizer.
        has_grad: True if this rank has a gradient.
    """

    layout: ParamLayout
    grad: Tensor
    hyper: HyperParams
    param_idx: int
    has_grad: bool = True

    @property
    def param(self) -> Tensor:
        return self.layout.param

    @property
    def state(self) -> dict[str, Tensor]:
        return self.layout.state

    @property
    def view(self) -> MatrixDims | None:
        return self.layout.view

    @property
    def plan(self) -> ShardPlan:
        return self.layout.plan

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the statistics."""
        return statistics_dtype(self.param.dtype)

    def scalar(self, value: float) -> Tensor:
        """Return a 0-D tensor in the dtype of the statistics."""
        return torch.full((), value, dtype=self.dtype, device=self.param.device)

    def correction(self, beta: float) -> Tensor:
        """Return the bias correction 1 - beta^t of this step."""
        return bias_correction(self.state["step"], beta, self.dtype)


def _find_place(shape: tuple[int, ...], view: MatrixDims | None, plan: ShardPlan) -> tuple[int, int, int] | None:
    """Return `ParamLayout.place` of the part of a parameter that has this shape."""
    rows, cols = view or ((), tuple(range(len(shape))))
    if plan.groups(rows) and plan.groups(cols):
        return None
    batch = [dim for dim in range(len(shape)) if dim not in rows + cols]
    # Only the first of the dims that form an index may be sharded: the part is then a run of this index.
    if any(shape[dim] != plan.shape[dim] for dims in (batch, rows, cols) for dim in dims[1:]):
        return None
    num_rows, num_cols = (prod(plan.shape[dim] for dim in dims) for dims in (rows, cols))
    return plan.global_index((0,) * len(shape)), num_rows, num_cols


@lru_cache(maxsize=4096)
def _matrix_sizes(shape: torch.Size, view: MatrixDims | None) -> tuple[int, int, int]:
    if view is None:
        return 1, 1, prod(shape)
    rows, cols = (prod(shape[dim] for dim in dims) for dims in view)
    return prod(shape) // max(1, rows * cols), rows, cols  # an empty shard has no matrix
