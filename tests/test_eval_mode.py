"""Tests of evaluation mode and of restoring the previous mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scantling.eval_mode import eval_mode


def test_eval_mode_restores_each_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    model[2].eval()  # frozen statistics, as in fine-tuning
    before = [module.training for module in model.modules()]
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), eval_mode(model):
        model(torch.ones(3, 5))
    assert [module.training for module in model.modules()] == before
