"""Scaling laws: predict the loss of a model at any size, number of tokens and number of bits.

Predictions need NumPy only; fits and optima need SciPy, the extra `scantling[laws]`. Each name is imported at its first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scantling.lazy_names import lazy_names

if TYPE_CHECKING:
    from scantling.laws.efficiency import EfficiencyLaw
    from scantling.laws.law import ChinchillaLaw, Law
    from scantling.laws.optimum import Optimum
    from scantling.laws.post_training import PostTrainingLaw
    from scantling.laws.precision import PrecisionLaw
    from scantling.laws.registry import fit, names
    from scantling.laws.result import Fit, HoldOut

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
]

_MODULES = {
    "ChinchillaLaw": "law",
    "EfficiencyLaw": "efficiency",
    "Fit": "result",
    "HoldOut": "result",
    "Law": "law",
    "Optimum": "optimum",
    "PostTrainingLaw": "post_training",
    "PrecisionLaw": "precision",
    "fit": "registry",
    "names": "registry",
}

__getattr__, __dir__ = lazy_names(__name__, {name: f"{__name__}.{module}" for name, module in _MODULES.items()})
