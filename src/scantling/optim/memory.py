"""Bytes of optimizer state: what an optimizer holds now, and what it will hold, without building it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from scantling.groups import MatrixDims
from scantling.optim._factor import came_state_bytes
from scantling.optim.registry import build_optimizer, optimizer_options


class ParameterSpec(NamedTuple):
    """What the size of a parameter's state depends on."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    role: str | None = None
    matrix_dims: MatrixDims | None = None


Layout: TypeAlias = Iterable[dict[str, Any]] | Iterable[tuple[Any, ...]]

# Where and how a step is computed; none of it changes what is kept, and on meta tensors some of it cannot run.
_EXECUTION = ("foreach", "fused", "capturable", "differentiable")


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the storages behind an optimizer's state, each counted once."""
    storages = {}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def predicted_state_bytes(name: str, layout: Layout, **options: Any) -> int | None:
    """Bytes that `state_bytes` will report once every parameter has been stepped.

    CAME and Adafactor are counted by formula; any other optimizer takes a step on meta tensors, which hold no data.

    Args:
        name: of the optimizer, as for `build_optimizer`.
        layout: groups from `scantling.param_groups` (on any device, the meta device too) or `ParameterSpec`s.
        options: the optimizer's options.

    Returns:
        The bytes, or None where an optimizer's step cannot run on meta tensors, so that they are not known.

    Raises:
        UserError: no such optimizer or option.
    """
    specs, groups = _read(layout)
    kept = {key: value for key, value in options.items() if key not in _EXECUTION or key not in optimizer_options(name)}
    optimizer = build_optimizer(name, groups, lr=1e-3, **kept)
    if name.lower() == "came":
        factor = options.get("factor", "auto")
        return sum(
            came_state_bytes(spec.shape, dtype=spec.dtype, factor=factor, matrix_dims=spec.matrix_dims, role=spec.role)
            for spec in specs
        )
    if name.lower() == "adafactor":
        return sum(_adafactor_state_bytes(spec) for spec in specs)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.empty_like(param)
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError):
        return None
    return state_bytes(optimizer)


def _adafactor_state_bytes(spec: ParameterSpec) -> int:
    """torch.optim.Adafactor: row and column variances of the last two dims, or a full one, and a step counter."""
    *batch, rows, cols = (1, 1, *spec.shape)
    numel = torch.Size(batch).numel() * (rows + cols) if len(spec.shape) > 1 else torch.Size(spec.shape).numel()
    return torch.float32.itemsize + spec.dtype.itemsize * numel


def _read(layout: Layout) -> tuple[list[ParameterSpec], list[dict[str, Any]]]:
    """The parameters of a layout, and groups of meta tensors like them."""
    specs: list[ParameterSpec] = []
    for item in layout:
        if isinstance(item, dict):
            params = [entry[1] if isinstance(entry, tuple) else entry for entry in item["params"]]
            role, dims = item.get("role"), item.get("matrix_dims")
            specs.extend(ParameterSpec(tuple(param.shape), param.dtype, role, dims) for param in params)
        else:
            specs.append(ParameterSpec(*item))
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for spec in specs:
        key = (spec.role, spec.matrix_dims, len(spec.shape))
        group = groups.setdefault(key, {"params": [], "role": spec.role, "matrix_dims": spec.matrix_dims})
        group["params"].append(torch.nn.Parameter(torch.empty(spec.shape, dtype=spec.dtype, device="meta")))
    return specs, list(groups.values())
