"""Scaling laws: the loss of a model before it is trained, at any size, number of tokens and number of bits.

NumPy and SciPy only; each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scantling.laws.chinchilla import ChinchillaLaw
    from scantling.laws.efficiency import EfficiencyLaw
    from scantling.laws.law import Law
    from scantling.laws.optimum import Optimum
    from scantling.laws.post_training import PostTrainingLaw
    from scantling.laws.precision import PrecisionLaw
    from scantling.laws.registry import fit, names
    from scantling.laws.result import Fit, HoldOut
    from scantling.laws.synthetic import simulate

_HOMES = {
    "ChinchillaLaw": "chinchilla",
    "EfficiencyLaw": "efficiency",
    "Fit": "result",
    "HoldOut": "result",
    "Law": "law",
    "Optimum": "optimum",
    "PostTrainingLaw": "post_training",
    "PrecisionLaw": "precision",
    "fit": "registry",
    "names": "registry",
    "simulate": "synthetic",
}

__all__ = [
    "ChinchillaLaw",
    "EfficiencyLaw",
    "Fit",
    "HoldOut",
    "Law",
    "Optimum",
    "PostTrainingLaw",
    "PrecisionLaw",
    "fit",
    "names",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'scantling.laws' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
