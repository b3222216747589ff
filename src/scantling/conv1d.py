"""The Conv1D of transformers, recognized by its name, so that transformers need not be imported."""

from __future__ import annotations


def is_conv1d(kind: type) -> bool:
    """True for the linear layer of GPT-2, whose weight is (in, out), but not for its subclasses."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_conv1d_subclass(kind: type) -> bool:
    """True for the Conv1D of transformers and its subclasses."""
    return any(map(is_conv1d, kind.__mro__))
