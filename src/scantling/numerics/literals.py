"""Literal types of quantization settings, as spelled in recipes and method options."""

from __future__ import annotations

from typing import Literal, TypeAlias

Granularity: TypeAlias = Literal["tensor", "channel", "token", "group"]
"""Part of a tensor that shares a scale."""
Rounding: TypeAlias = Literal["nearest", "stochastic"]
Clip: TypeAlias = Literal["absmax", "mse"]
"""Choice of the magnitude that the largest value of a format represents."""
