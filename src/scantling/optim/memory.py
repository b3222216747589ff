"""Bytes of an optimizer: its state now, and predictions of the state and scratch of a step.

Predictions run the optimizer's own step on meta tensors, which have shapes and no data, so that they cannot differ from
the step; only optimizers that cannot run on meta tensors are counted by formula.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from scantling.groups import MatrixDims
from scantling.numerics.bf16_products import bf16_products
from scantling.numerics.torch_private import TorchDispatchMode, storage_key
from scantling.optim import _cpu, _triton
from scantling.optim._eager import CPU_TILE, DEVICE_TILE, step_distinct_tiles
from scantling.optim.came import CAME
from scantling.optim.registry import build_unwarned, optimizer_options
from scantling.optim.sharding import local_tensor


class ParameterSpec(NamedTuple):
    """Properties of a parameter that decide the size of its state."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    role: str | None = None
    matrix_dims: MatrixDims | None = None


Layout: TypeAlias = Iterable[dict[str, Any]] | Iterable[tuple[Any, ...]]

# Options of the execution of a step. They do not change the state, and some cannot run on meta tensors.
_EXECUTION = ("foreach", "fused", "capturable", "differentiable")

_MOMENTUM = ("betas", "momentum")
"""Keys of a group that decide if there is a momentum."""


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes on this rank of the storages of an optimizer's state, each counted once."""
    return _storage_bytes(value for state in optimizer.state.values() for value in state.values())


def _storage_bytes(values: Iterable[Any]) -> int:
    storages = {}
    for value in values:
        if isinstance(value, Tensor):
            storage = local_tensor(value).untyped_storage()
            storages[storage_key(storage)] = storage.nbytes()
    return sum(storages.values())


def predicted_state_bytes(name: str, layout: Layout, **options: Any) -> int | None:
    """Return the bytes that `state_bytes` will report after every parameter has been stepped.

    Args:
        name: name of the optimizer, as for `build_optimizer`.
        layout: groups from `scantling.param_groups` (on any device, including meta) or `ParameterSpec`s.
        options: options of the optimizer.

    Returns:
        The bytes, or None if they are unknown because the optimizer's step cannot run on meta tensors.

    Raises:
        UserError: an unknown optimizer or option.
    """
    specs, optimizer = _build_on_meta(name, layout, options)
    if isinstance(optimizer, CAME):
        return optimizer.state_bytes()
    if name.lower() == "adafactor":  # its step reads values, which meta tensors do not have
        return sum(_adafactor_state_bytes(spec) for spec in specs)
    # Parameters of one shape, dtype and group have the same state: step one of each kind.
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            kinds.setdefault((tuple(param.shape), param.dtype, param.requires_grad, id(group)), []).append(param)
    for _, *others in kinds.values():
        for param in others:
            param.grad = None
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError):
        return None
    return sum(len(params) * _storage_bytes(optimizer.state.get(params[0], {}).values()) for params in kinds.values())


def predicted_temporary_bytes(name: str, layout: Layout, *, foreach: bool = False, **options: Any) -> int:
    """Return the peak bytes that one step allocates in addition to parameters, gradients and state.

    Args:
        name, layout, options: as for `predicted_state_bytes`.
        foreach: True if torch will step all parameters at once, its default on a GPU. CAME, Adafactor and the matrices
            of Muon step parameters one by one anyway; CAME uses larger tiles on a GPU.

    Returns:
        The bytes. If the step cannot run on meta tensors, an estimate: twice the largest parameter, with `foreach`
        twice all parameters.

    Raises:
        UserError: an unknown optimizer or option.
    """
    specs, optimizer = _build_on_meta(name, layout, options)
    if isinstance(optimizer, CAME):
        return _came_temporary_bytes(optimizer, DEVICE_TILE if foreach else CPU_TILE)
    if name.lower() == "adafactor":
        return max(_adafactor_scratch_bytes(spec) for spec in specs)
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = foreach and not options.get("fused")
    try:
        optimizer.step()  # creates the state, which is not scratch
        with ScratchMeter(optimizer) as meter, nullcontext() if foreach else bf16_products(torch.device("cpu")):
            optimizer.step()
    except (RuntimeError, NotImplementedError):
        each = [2 * prod(spec.shape) * spec.dtype.itemsize for spec in specs]
        return sum(each) if foreach else max(each)
    return int(meter.peak)


class ScratchMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meter of the bytes that operations allocate and still hold; `peak` is the largest total.

    Args:
        optimizer: optimizer whose parameters, gradients and state are not counted.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [param.grad for param in params if param.grad is not None]
        state = [value for entries in optimizer.state.values() for value in entries.values()]
        self._excluded = {storage_key(t.untyped_storage()) for t in (*params, *grads, *state) if isinstance(t, Tensor)}
        self._allocated: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else (result,):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key not in self._excluded and key not in self._allocated:
            self._allocated[key] = storage.nbytes()
            # The storage counts until Python frees it.
            weakref.finalize(storage, self._allocated.pop, key, None)
            self.peak = max(self.peak, sum(self._allocated.values()))


def _came_temporary_bytes(optimizer: CAME, tile: int) -> int:
    """Return the bytes of the largest step of one parameter, or of a C or Triton step; one step per kind is taken."""
    kinds: dict[tuple[Any, ...], list[tuple[dict[str, Any], Tensor]]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.numel() and param.requires_grad:
                kinds.setdefault((tuple(param.shape), param.dtype, id(group)), []).append((group, param))
    # Parameters of one shape, dtype and group need the same scratch: step one of each kind.
    steps = [optimizer.param_step(*members[0], 0) for members in kinds.values()]
    # C and Triton allocate outside of PyTorch operations on meta tensors; count theirs by formula.
    if tile == CPU_TILE:
        compiled = _cpu.scratch_bytes(steps)
    else:
        pairs = zip(steps, kinds.values(), strict=True)
        compiled = _triton.scratch_bytes([step for step, members in pairs for _ in members])
    with torch.no_grad(), ScratchMeter(optimizer) as meter:
        for step in steps:
            step_distinct_tiles(step, tile=tile)
    return max(int(meter.peak), compiled)


def _adafactor_state_bytes(spec: ParameterSpec) -> int:
    """Return the bytes of torch.optim.Adafactor: row and column variances, or a full one, and a step counter."""
    numel = prod(spec.shape)
    if len(spec.shape) > 1:
        *batch, rows, cols = spec.shape
        numel = prod(batch) * (rows + cols)
    return torch.float32.itemsize + spec.dtype.itemsize * numel


def _adafactor_scratch_bytes(spec: ParameterSpec) -> int:
    """Return the scratch of torch.optim.Adafactor: the update and its means; for a vector, g^2 and the update."""
    numel = 2 * prod(spec.shape)
    if len(spec.shape) > 1:
        *batch, rows, cols = spec.shape
        numel = prod(batch) * (rows * cols + rows + cols + 1)
    return spec.dtype.itemsize * numel


def _build_on_meta(
    name: str, layout: Layout, options: dict[str, Any]
) -> tuple[list[ParameterSpec], torch.optim.Optimizer]:
    """Return the trainable parameters of a layout, and an optimizer over copies of all on meta, with gradients."""
    specs, groups = _read_layout(layout)
    defaults = optimizer_options(name)
    kept = {key: value for key, value in options.items() if key not in _EXECUTION or key not in defaults}
    optimizer = build_unwarned(name, groups, lr=1e-3, **kept)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.empty_like(param) if param.requires_grad else None
    return specs, optimizer


def _read_layout(layout: Layout) -> tuple[list[ParameterSpec], list[dict[str, Any]]]:
    """Return the trainable parameters of a layout, and groups of meta tensors like all: the same groups, or by kind."""
    specs: list[ParameterSpec] = []
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for index, item in enumerate(layout):
        if isinstance(item, dict):
            params = [entry[1] if isinstance(entry, tuple) else entry for entry in item["params"]]
            role, dims = item.get("role"), item.get("matrix_dims")
            found = [ParameterSpec(tuple(param.shape), param.dtype, role, dims) for param in params]
            is_trained = [param.requires_grad for param in params]
            key: tuple[Any, ...] = (index,)
            decay, kept = item.get("weight_decay", 0.0), {name: item[name] for name in _MOMENTUM if name in item}
        else:
            spec = ParameterSpec(*item)
            found, is_trained = [spec], [True]
            key = (spec.role, spec.matrix_dims, len(spec.shape))
            kept = {}
            decay = 0.0 if spec.role == "vector" else 0.1  # any value above 0: torch's SGD needs scratch for it
        specs += itertools.compress(found, is_trained)
        group = groups.setdefault(key, {"params": [], "role": found[0].role, "matrix_dims": found[0].matrix_dims})
        group |= {"weight_decay": decay, **kept}
        group["params"] += [
            torch.nn.Parameter(torch.empty(spec.shape, dtype=spec.dtype, device="meta"), requires_grad)
            for spec, requires_grad in zip(found, is_trained, strict=True)
        ]
    return specs, list(groups.values())
