"""Kinds of layers that several methods know by sight, without importing what they come from."""

from __future__ import annotations


def is_conv1d(kind: type) -> bool:
    """Whether a class is the linear layer of GPT-2 in transformers, whose weight is (in, out); subclasses are not."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def made_from_conv1d(kind: type) -> bool:
    """Whether a class is that layer or a subclass of it."""
    return any(map(is_conv1d, kind.__mro__))
