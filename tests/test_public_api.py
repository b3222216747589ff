"""Tests that the public names are stable and that importing the package is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

import scantling as sc

PUBLIC = [
    "CAME",
    "DeMo",
    "MomentumExchange",
    "Plan",
    "RankAdapter",
    "RunResult",
    "TTLinear",
    "TTMEmbedding",
    "TTMEmbeddingBag",
    "comm",
    "densify",
    "errors",
    "hf",
    "laws",
    "load",
    "optim",
    "param_groups",
    "plan",
    "precision",
    "quantize_training",
    "quantize_weights",
    "tensor",
    "tensorize",
    "train",
]


def test_public_names_are_pinned() -> None:
    assert sorted(sc.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(sc, name).__name__.rpartition(".")[2] == name
        assert name in dir(sc)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sc.nothing


def test_import_is_lazy() -> None:
    code = (
        "import sys, scantling, scantling.cli, scantling.trainer.recipe.schema, scantling.laws; "
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
