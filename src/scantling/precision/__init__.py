"""Train and store models in few bits.

Each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scantling.lazy_names import lazy_names

if TYPE_CHECKING:
    from scantling.precision.quantizer import Quantizer, fake_quantize
    from scantling.precision.training import quantize_training, restore

_HOMES = {
    "Quantizer": "quantizer",
    "fake_quantize": "quantizer",
    "quantize_training": "training",
    "restore": "training",
}

__all__ = ["Quantizer", "fake_quantize", "quantize_training", "restore"]


__getattr__, __dir__ = lazy_names(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
