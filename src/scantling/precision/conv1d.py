"""Low-precision version of GPT-2's Conv1D, a linear layer whose weight is (in, out)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from scantling.precision.layers import RoundedSubclass, RoundedWeight


class _RoundedByOutput(RoundedWeight):
    def rounded_weight(self) -> Tensor:
        return self.formats.matrix(self.master_weight().t()).t()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.formats})"


class QuantizedConv1D(_RoundedByOutput, Conv1D):  # type: ignore[misc,no-any-unimported,unused-ignore]
    """Low-precision `Conv1D`, made by `quantize_training`."""

    plain: ClassVar[type] = Conv1D

    def forward(self, x: Tensor) -> Tensor:
        return self.formats.product(x, self.master_weight().t(), self.bias)


class RoundedConv1DSubclass(_RoundedByOutput, RoundedSubclass):
    """Low-precision subclass of `Conv1D`."""
