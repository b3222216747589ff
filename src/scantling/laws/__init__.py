"""Scaling laws: the loss of a model before it is trained, at any size, number of tokens and number of bits.

NumPy and SciPy only; each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scantling.lazy_names import lazy_names

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


__getattr__, __dir__ = lazy_names(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
