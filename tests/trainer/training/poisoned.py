"""Runs with a NaN in one gradient of rank 1, in the third step."""

from __future__ import annotations

import os
from typing import Any

import torch

from scantling.trainer.training import build
from scantling.trainer.training.step import Stepper

POISONED = "model.layers.1.mlp.up_proj.weight"


def poison(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[0, 0] = torch.nan
    return gradient


class Poisoned(Stepper):
    def step(self, step: int, *args: Any, **kwargs: Any) -> Any:
        if step != 3 or os.environ["RANK"] != "1":
            return super().step(step, *args, **kwargs)
        hook = self.add_hook()
        try:
            return super().step(step, *args, **kwargs)
        finally:
            hook.remove()

    def add_hook(self) -> Any:
        return self.model.get_parameter(POISONED).register_hook(poison)


class PoisonedShard(Poisoned):
    """Like `Poisoned`, of a parameter that exists only while FSDP2 has gathered it."""

    def add_hook(self) -> Any:
        def poison_weight(layer: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            layer.get_parameter("weight").register_hook(poison)

        return self.model.get_submodule(POISONED.rpartition(".")[0]).register_forward_hook(poison_weight)


def patch() -> None:
    """Poison the runs of this process; for `before` of `tests.runs.scantling`."""
    build.Stepper = Poisoned  # type: ignore[misc]


def patch_sharded() -> None:
    """Poison the sharded runs of this process."""
    build.Stepper = PoisonedShard  # type: ignore[misc]
