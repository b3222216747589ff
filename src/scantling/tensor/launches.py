"""Parts of all launches of the kernels of low-rank layers: conditions, tiles, and sums that several programs share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from scantling.numerics.device import has_kernels, without_autocast
from scantling.numerics.torch_private import current_backward_id, is_batched, is_in_dispatch_mode, is_in_transform
from scantling.tensor.costs import is_faster
from scantling.tensor.layer import without_saving_hooks

DEVICES = ("cuda",)
MAX_RANK = 64
"""Largest rank whose tiles fit into the registers and the shared memory of all GPUs."""
PROGRAMS = 128
"""Programs that keep a GPU busy; with fewer tiles of tokens, several programs share the work of a tile."""
LEAST_PARTS = 8
"""Parts of a sum below which one program adds them all."""
CHUNK_TILE = 32
"""Columns of a wide dim that a program computes at once; with twice as many, kernels store registers in memory."""


def launch_dtype(module: nn.Module, x: Tensor) -> torch.dtype | None:
    """Return the dtype, that of autocast if it is on, in which kernels take tokens x; None if they cannot.

    Args:
        module: module that is called.
        x: tokens.
    """
    kind = x.device.type
    if kind not in DEVICES or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    # Products of fp32 values without TF32 take too many registers on a GPU.
    is_slow = dtype == torch.float32 and precision() == "ieee" and x.is_cuda
    if dtype not in (torch.float32, torch.bfloat16) or is_slow or not x.numel() or not can_multiply(x, [x]):
        return None
    return None if is_in_transform() or _is_watched(module) or not has_kernels(x.device) else dtype


_watched: WeakSet[nn.Module] = WeakSet()
"""Modules whose last forward pass ran in a dispatch mode."""


def _is_watched(module: nn.Module) -> bool:
    """True in a dispatch mode: modes do not see kernels, so that one that counts operations would miss them.

    A checkpoint that repeats a pass must take the same operations as this pass, in whatever mode.
    """
    if current_backward_id() == -1:
        (_watched.add if is_in_dispatch_mode() else _watched.discard)(module)
    return module in _watched


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """True if tensors are of no subclass, whose values may lie elsewhere, as those of `DTensor`."""
    return all(tensor is None or type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)


def can_multiply(x: Tensor, tensors: Sequence[Tensor | None]) -> bool:
    """True if torch would multiply plain tensors by x: those of its dtype, or under autocast of any below fp64."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if torch.is_autocast_enabled(x.device.type):
        return are_plain(tensors) and dtypes <= {torch.float32, torch.bfloat16, torch.float16}
    return are_plain(tensors) and dtypes <= {x.dtype}


Function = Callable[..., Tensor]


def timed_tokens(num_tokens: int) -> int:
    """Return the next power of 2: kernels are timed for this many tokens, for all counts up to it."""
    return 1 << (num_tokens - 1).bit_length()


def are_kernels_faster(
    name: str, kernel: Function, other: Function, shapes: Sequence[tuple[int, ...] | None], like: Tensor
) -> bool:
    """True if kernels take less time than torch's operations, forward and backward, for operands of these shapes.

    Args:
        name: name of the function.
        kernel, other: the function, by kernels and by torch's operations.
        shapes: shapes of the operands, None for those that are missing.
        like: tensor with the dtype and on the device of the operands.
    """
    key = name, tuple(shapes), like.dtype, like.device, precision()
    if key not in _known:
        found = _time(name, kernel, other, shapes, like)
        if found is None:
            return False
        _known[key] = found
    return _known[key]


_known: dict[Any, bool] = {}
"""Results of `are_kernels_faster`, which is called in every pass."""


def _time(
    name: str, kernel: Function, other: Function, shapes: Sequence[tuple[int, ...] | None], like: Tensor
) -> bool | None:
    def work(function: Function) -> Callable[[], object]:
        operands = [None if shape is None else like.new_zeros(shape, requires_grad=True) for shape in shapes]
        trained = [operand for operand in operands if operand is not None]
        upstream = torch.zeros_like(function(*operands))
        return lambda: torch.autograd.grad(function(*operands), trained, upstream)

    sizes = ", ".join("none" if shape is None else " x ".join(map(str, shape)) for shape in shapes)
    name = f"{name} of {sizes}, {like.dtype}, {precision()}, {_kernels_version()}"
    # A checkpoint would count the tensors that the work saves.
    with without_saving_hooks(), without_autocast(like.device):
        return is_faster(like.device, name, lambda: work(kernel), lambda: work(other))


@lru_cache(maxsize=1)
def _kernels_version() -> str:
    """Return the versions of kernel sources and Triton, on which times depend."""
    import triton

    names = "kernels", "launches", "low_rank_product", "feed_forward"
    sources = (Path(__file__).with_name(f"{name}.py").read_bytes() for name in names)
    return f"kernels {hashlib.sha256(b''.join(sources)).hexdigest()[:8]}, Triton {triton.__version__}"


def needs_torch(grad: Tensor) -> bool:
    """True if a backward pass must be differentiable, or is transformed or batched: kernels support none of these."""
    return torch.is_grad_enabled() or is_in_transform() or is_batched(grad)


def torch_gradients(
    function: Function, operands: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients of a function by torch's operations, which can be differentiated, transformed and batched.

    Args:
        function: the function, in torch's operations.
        operands: its operands.
        needed: for each operand True if its gradient is needed.
        grad: gradient of the result.
    """
    is_wanted = [operand is not None and use for operand, use in zip(operands, needed, strict=True)]

    def apply_to_wanted(*wanted: Tensor) -> Tensor:
        given = iter(wanted)
        return function(*(next(given) if use else one for one, use in zip(operands, is_wanted, strict=True)))

    with without_autocast(grad.device):
        wanted = [one for one, use in zip(operands, is_wanted, strict=True) if use]
        pull_back = torch.func.vjp(apply_to_wanted, *wanted)[1]
        found = iter(pull_back(grad))
    return [next(found) if use else None for use in is_wanted]


def with_dense_rows(matrix: Tensor) -> Tensor:
    """Return a matrix whose elements of a row are neighbors; rows may have any distance."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def tile_side(size: int) -> int:
    """Return the next power of 2, at least the smallest side of a product in Triton."""
    return max(16, 1 << (size - 1).bit_length())


def num_splits(num_parts: int, num_others: int) -> int:
    """Return how many programs share the parts of a sum, so that with the others they keep a GPU busy."""
    if num_parts < LEAST_PARTS:  # adding their sums would take another launch
        return 1
    wanted = min(num_parts, max(1, PROGRAMS // num_others))
    return -(-num_parts // -(-num_parts // wanted))  # no program without a part


class PartialSums:
    """Memory for the partial sums of several results, which are added by one operation.

    Args:
        like: tensor with the dtype and on the device of the results.
        splits: number of programs that share a sum.
        shapes: shapes of the results.

    Attributes:
        parts: memory of each result in the first split.
        stride: elements from one split to the next.
    """

    def __init__(self, like: Tensor, splits: int, shapes: Sequence[tuple[int, ...]]) -> None:
        self._dtype, self._shapes = like.dtype, shapes
        self._sizes = [-(-prod(shape) // 16) * 16 for shape in shapes]  # every result is aligned
        self.stride, self._buffer = sum(self._sizes), None
        if splits == 1:
            self.parts = [like.new_empty(shape) for shape in shapes]
        else:
            self._buffer = like.new_empty(splits, self.stride, dtype=torch.float32)
            self.parts = list(torch.split(self._buffer[0], self._sizes))

    def add(self) -> list[Tensor]:
        """Return the results."""
        if self._buffer is None:
            return self.parts
        total = torch.split(self._buffer.sum(0).to(self._dtype), self._sizes)
        found = [piece[: prod(shape)].view(shape) for piece, shape in zip(total, self._shapes, strict=True)]
        # The gradient of a bias, a parameter, must not keep the others in memory.
        return [piece.clone() if piece.ndim == 1 else piece for piece in found]


def precision() -> str:
    """Return how kernels multiply fp32 values."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
