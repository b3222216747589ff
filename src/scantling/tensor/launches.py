"""Parts of all launches of the kernels of low-rank layers: conditions, tiles, and sums that several programs share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import version
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from scantling.numerics.device import has_kernels, without_autocast
from scantling.numerics.torch_private import is_batched, is_in_dispatch_mode, is_in_transform
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


def launch_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype, that of autocast if it is on, in which kernels take tokens x; None if they cannot.

    Dispatch modes do not see kernels, so that one that counts operations would miss them.
    """
    kind = x.device.type
    if kind not in DEVICES or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    # Products of fp32 values without TF32 take too many registers on a GPU.
    is_slow = dtype == torch.float32 and precision() == "ieee" and x.is_cuda
    is_known = dtype in (torch.float32, torch.bfloat16) and x.numel() > 0 and not is_slow and are_plain(x)
    is_seen = is_in_transform() or is_in_dispatch_mode()
    return dtype if is_known and not is_seen and has_kernels(x.device) else None


def are_plain(*tensors: Tensor | None) -> bool:
    """True if tensors are of no subclass, whose values may lie elsewhere, as those of `DTensor`."""
    return all(tensor is None or type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)


Function = Callable[..., Tensor]


def timed_tokens(num_tokens: int) -> int:
    """Return the next power of 2: kernels are timed once for all numbers of tokens up to it."""
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
    """Return what the times of the kernels depend on: their sources, and the version of Triton."""
    sources = (Path(__file__).with_name(name).read_bytes() for name in ("kernels.py", "launches.py"))
    return f"kernels {hashlib.sha256(b''.join(sources)).hexdigest()[:8]}, Triton {version('triton')}"


def needs_torch(grad: Tensor) -> bool:
    """True if a backward pass must have second derivatives, or belongs to several at once: kernels support neither."""
    return torch.is_grad_enabled() or is_batched(grad)


def torch_gradients(
    function: Function, operands: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients of a function by torch's operations, differentiable if gradients are enabled.

    Args:
        function: the function, in torch's operations.
        operands: its operands.
        needed: for each operand True if its gradient is needed.
        grad: gradient of the result.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast(grad.device):
        # Views, so that the gradient of an operand does not include the path through another one that depends on it.
        views = [None if operand is None else operand.view_as(operand) for operand in operands]
        wanted = [view for view, is_needed in zip(views, needed, strict=True) if view is not None and is_needed]
        found = iter(torch.autograd.grad(function(*views), wanted, grad, create_graph=create_graph))
    return [next(found) if view is not None and use else None for view, use in zip(views, needed, strict=True)]


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
