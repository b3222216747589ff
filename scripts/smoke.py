"""Run one step of every method on a small model, with nothing but torch, numpy and safetensors installed.

python scripts/smoke.py
"""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

import scantling as sc

ABSENT = ("transformers", "scipy", "pydantic", "typer", "opt_einsum", "datasets")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, adapter: sc.RankAdapter | None = None) -> float:
    """Take one training step on random data and return the loss."""
    loss = nn.functional.mse_loss(model(torch.randn(8, 32)), torch.randn(8, 16))
    (loss if adapter is None else adapter.loss(loss)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if adapter is not None:
        adapter.truncate(optimizer)
    value = loss.item()
    assert 0 < value < 100, value
    return value


def main() -> None:
    """Check each method in turn."""
    installed = [name for name in ABSENT if importlib.util.find_spec(name)]
    if installed:
        print(f"smoke: note: this environment is not bare, it has {', '.join(installed)}")
    torch.manual_seed(0)

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))

    model = build()
    print("smoke: CAME", step(model, sc.CAME(sc.param_groups(model), lr=1e-3)))
    model = build()
    print("smoke: DeMo", step(model, sc.DeMo(sc.param_groups(model), lr=1e-3)))
    model = sc.tensorize(build(), rank=8)
    adapter = sc.RankAdapter(model, size_target=0.5)
    print("smoke: tensorize", step(model, sc.CAME(sc.param_groups(model), lr=1e-3), adapter))
    adapter.finish()
    print("smoke: densify", step(sc.densify(model), torch.optim.SGD(model.parameters(), lr=1e-3)))
    model = sc.quantize_training(build(), weights="int8", activations="int8")
    print("smoke: quantize_training", step(model, sc.CAME(sc.param_groups(model), lr=1e-3)))
    model = sc.quantize_weights(build(), "int4")
    assert model(torch.randn(2, 32)).isfinite().all()
    print("smoke: quantize_weights")
    print("smoke: laws", sc.laws.ChinchillaLaw.published().loss(N=1e9, D=2e10))


if __name__ == "__main__":
    main()
