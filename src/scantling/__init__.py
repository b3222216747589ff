"""Scantling: train large models for less.

Each public name is imported when it is first used, so that `import scantling` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from scantling import laws
    from scantling.comm.demo import DeMo
    from scantling.comm.momentum import MomentumExchange
    from scantling.groups import param_groups
    from scantling.integrations import hf
    from scantling.models.load import load
    from scantling.optim.came import CAME
    from scantling.planning.plan import Plan, plan
    from scantling.tensor.convert import densify, tensorize
    from scantling.tensor.embedding import TTMEmbedding, TTMEmbeddingBag
    from scantling.tensor.linear import TTLinear
    from scantling.tensor.ranks import RankAdapter
    from scantling.training.run import RunResult, train

_HOMES = {
    "CAME": "scantling.optim.came",
    "DeMo": "scantling.comm.demo",
    "MomentumExchange": "scantling.comm.momentum",
    "Plan": "scantling.planning.plan",
    "RankAdapter": "scantling.tensor.ranks",
    "RunResult": "scantling.training.run",
    "TTLinear": "scantling.tensor.linear",
    "TTMEmbedding": "scantling.tensor.embedding",
    "TTMEmbeddingBag": "scantling.tensor.embedding",
    "densify": "scantling.tensor.convert",
    "load": "scantling.models.load",
    "param_groups": "scantling.groups",
    "plan": "scantling.planning.plan",
    "tensorize": "scantling.tensor.convert",
    "train": "scantling.training.run",
}

_MODULES = {"hf": "scantling.integrations.hf", "laws": "scantling.laws"}

__all__ = [
    "CAME",
    "DeMo",
    "MomentumExchange",
    "Plan",
    "RankAdapter",
    "RunResult",
    "TTLinear",
    "TTMEmbedding",
    "TTMEmbeddingBag",
    "densify",
    "hf",
    "laws",
    "load",
    "param_groups",
    "plan",
    "tensorize",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'scantling' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
