"""CAME and every optimizer of torch.optim by name; what their state takes. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scantling.lazy_names import lazy_names

if TYPE_CHECKING:
    from scantling.optim.came import CAME
    from scantling.optim.came_pytorch import from_came_pytorch, to_came_pytorch
    from scantling.optim.combined import CombinedOptimizer
    from scantling.optim.memory import ParameterSpec, predicted_state_bytes, predicted_temporary_bytes, state_bytes
    from scantling.optim.registry import build_optimizer, check_options, optimizer_names, optimizer_options
    from scantling.optim.release import ReleaseHandle, release_gradients
    from scantling.optim.state import came_state_bytes

_HOMES = {
    "CAME": "came",
    "CombinedOptimizer": "combined",
    "ParameterSpec": "memory",
    "ReleaseHandle": "release",
    "build_optimizer": "registry",
    "came_state_bytes": "state",
    "check_options": "registry",
    "from_came_pytorch": "came_pytorch",
    "optimizer_names": "registry",
    "optimizer_options": "registry",
    "predicted_state_bytes": "memory",
    "predicted_temporary_bytes": "memory",
    "release_gradients": "release",
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


__getattr__, __dir__ = lazy_names(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
