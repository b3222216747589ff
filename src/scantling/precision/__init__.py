"""Train and store models in low precision.

Names are imported lazily, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scantling.lazy_names import lazy_names

if TYPE_CHECKING:
    from scantling.precision.packed_files import save_quantized
    from scantling.precision.quantizer import Quantizer, fake_quantize
    from scantling.precision.training import quantize_training, restore
    from scantling.precision.weights import QuantizedWeight, quantize_weights, quantized_weights

_HOMES = {
    "QuantizedWeight": "weights",
    "Quantizer": "quantizer",
    "fake_quantize": "quantizer",
    "quantize_training": "training",
    "quantize_weights": "weights",
    "quantized_weights": "weights",
    "restore": "training",
    "save_quantized": "packed_files",
}

__all__ = [
    "QuantizedWeight",
    "Quantizer",
    "fake_quantize",
    "quantize_training",
    "quantize_weights",
    "quantized_weights",
    "restore",
    "save_quantized",
]


__getattr__, __dir__ = lazy_names(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
