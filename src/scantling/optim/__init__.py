"""CAME and every optimizer of torch.optim by name; what their state takes. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scantling.optim._release import ReleaseHandle, release_gradients
    from scantling.optim._state import came_state_bytes
    from scantling.optim.came import CAME
    from scantling.optim.came_pytorch import from_came_pytorch, to_came_pytorch
    from scantling.optim.combined import CombinedOptimizer
    from scantling.optim.memory import ParameterSpec, predicted_state_bytes, predicted_temporary_bytes, state_bytes
    from scantling.optim.registry import build_optimizer, check_options, optimizer_names, optimizer_options

_MODULES = {
    "CAME": "came",
    "CombinedOptimizer": "combined",
    "ParameterSpec": "memory",
    "ReleaseHandle": "_release",
    "build_optimizer": "registry",
    "came_state_bytes": "_state",
    "check_options": "registry",
    "from_came_pytorch": "came_pytorch",
    "optimizer_names": "registry",
    "optimizer_options": "registry",
    "predicted_state_bytes": "memory",
    "predicted_temporary_bytes": "memory",
    "release_gradients": "_release",
    "state_bytes": "memory",
    "to_came_pytorch": "came_pytorch",
}

__all__ = [
    "CAME",
    "CombinedOptimizer",
    "ParameterSpec",
    "ReleaseHandle",
    "build_optimizer",
    "came_state_bytes",
    "check_options",
    "from_came_pytorch",
    "optimizer_names",
    "optimizer_options",
    "predicted_state_bytes",
    "predicted_temporary_bytes",
    "release_gradients",
    "state_bytes",
    "to_came_pytorch",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
