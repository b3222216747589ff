"""Take a training step with every method on a small model; torch, numpy and safetensors are enough.

    python scripts/smoke.py

`scripts/wheel.sh` runs it with the built wheel, `tests/test_bare_imports.py` with all other packages blocked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import scantling as sc


def came(model: nn.Module) -> torch.optim.Optimizer:
    return sc.CAME(sc.param_groups(model), lr=1e-2)


def demo(model: nn.Module) -> torch.optim.Optimizer:
    return sc.DeMo(sc.param_groups(model), lr=1e-2)


def take_step(
    convert: Callable[[nn.Module], nn.Module] = lambda model: model,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = came,
    *,
    adapts_ranks: bool = False,
) -> nn.Module:
    """Convert a model, take one step and return it; raise if the loss is not finite or no parameter changes."""
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    adapter = sc.RankAdapter(model, size_target=0.5, steps=1) if adapts_ranks else None
    optimizer = make_optimizer(model)
    before = [param.detach().clone() for param in model.parameters()]
    loss = model(torch.randn(8, 64)).square().mean()
    (loss if adapter is None else adapter.loss(loss)).backward()
    optimizer.step()
    assert torch.isfinite(loss)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    if adapter is not None:
        adapter.truncate(optimizer)
        adapter.finish()
    return model


def main() -> None:
    """Print the name of each method once it has worked."""
    tensorize = partial(sc.tensorize, rank=8)
    take_step()
    print("came")
    take_step(make_optimizer=demo)
    print("demo")
    take_step(tensorize)
    print("tensorize")
    take_step(partial(sc.quantize_training, weights="int8", activations="int8"))
    print("quantize_training")
    take_step(lambda model: sc.quantize_weights(model, "int4"))
    print("quantize_weights")
    model = take_step(tensorize, adapts_ranks=True)
    print("rank_adapter")
    assert sc.densify(model)(torch.randn(2, 64)).isfinite().all()
    print("densify")
    assert 2 < sc.laws.ChinchillaLaw.published().loss(N=1e9, D=2e10) < 3
    print("laws")


if __name__ == "__main__":
    main()
