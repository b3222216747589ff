"""The command line with a NaN put into one gradient of rank 1 in its third step; started by test_interruptions."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from scantling.cli import main
from scantling.training.step import Stepper

POISONED = "model.layers.1.mlp.up_proj.weight"


def poison(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[0, 0] = torch.nan
    return gradient


class Poisoned(Stepper):
    def step(self, step: int, *args: Any, **kwargs: Any) -> Any:
        if step != 3 or os.environ["RANK"] != "1":
            return super().step(step, *args, **kwargs)
        hook = self.model.get_parameter(POISONED).register_hook(poison)
        try:
            return super().step(step, *args, **kwargs)
        finally:
            hook.remove()


if __name__ == "__main__":
    sys.modules["scantling.training.step"].Stepper = Poisoned  # type: ignore[attr-defined]
    main()
