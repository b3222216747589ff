"""Words for how tensors are quantised, as recipes and methods spell them."""

from __future__ import annotations

from typing import Literal, TypeAlias

Granularity: TypeAlias = Literal["tensor", "channel", "token", "group"]
"""What shares a scale."""
Rounding: TypeAlias = Literal["nearest", "stochastic"]
Clip: TypeAlias = Literal["absmax", "mse"]
"""What the largest value of a format stands for."""
