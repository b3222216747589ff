"""Wrap GaLore from the package galore-torch as an optimizer for recipes.

    pip install --no-deps --target DIR galore-torch bitsandbytes       and DIR on PYTHONPATH

galore-torch imports bitsandbytes even if it is not used. Matrices with both sides above the rank are projected, as its
authors do for the layers of a Llama. AdamW steps embeddings, heads and vectors. The package's own code computes the
steps. Between steps, the projection is kept as a state tensor, so that checkpoints save it and byte counts include it
and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch


def register() -> None:
    """Make `galore` a valid `optim.name` of recipes.

    Raises:
        SystemExit: the package is not installed.
    """
    try:
        from galore_torch import GaLoreAdamW
        from galore_torch.galore_projector import GaLoreProjector
    except ImportError as error:
        raise SystemExit(
            f"{error}: pip install --no-deps --target DIR galore-torch bitsandbytes, DIR on PYTHONPATH"
        ) from None

    class GaLore(GaLoreAdamW):
        def __init__(
            self,
            params: Any,
            lr: float = 1e-3,
            weight_decay: float = 0.0,
            betas: tuple[float, float] = (0.9, 0.999),
            rank: int = 128,
            update_proj_gap: int = 200,
            scale: float = 0.25,
        ) -> None:
            low = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "proj_type": "std"}
            groups = list(_split(params, low))
            super().__init__(groups, lr=lr, betas=betas, weight_decay=weight_decay, no_deprecation_warning=True)

        def step(self, closure: Any = None) -> Any:
            projected = [
                (group, self.state[param])
                for group in self.param_groups
                for param in group["params"]
                if "rank" in group and param.grad is not None
            ]
            for group, state in projected:
                state["projector"] = GaLoreProjector(
                    group["rank"], update_proj_gap=group["update_proj_gap"], scale=group["scale"], proj_type="std"
                )
                state["projector"].ortho_matrix = state.pop("projection", None)
            result = super().step(closure)
            for _, state in projected:
                matrix = state.pop(
                    "projector"
                ).ortho_matrix  # after an SVD a view of the whole basis, four times as large
                state["projection"] = matrix if matrix._base is None else matrix.clone()
            return result

    torch.optim.GaLore = GaLore  # type: ignore[attr-defined]
    if "GaLore" not in torch.optim.__all__:
        torch.optim.__all__.append("GaLore")


class PerParameter(torch.optim.Optimizer):
    """One optimizer per parameter, which steps in the backward pass and frees the gradient.

    Args:
        groups: parameter groups.
        build: returns the optimizer of a list of groups.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    ) -> None:
        super().__init__(groups, {})
        self.parts = []
        for group in self.param_groups:
            for param in group["params"]:
                self.parts.append(build([{**group, "params": [param]}]))
                param.register_post_accumulate_grad_hook(partial(self._stepped, self.parts[-1]))

    @staticmethod
    def _stepped(part: torch.optim.Optimizer, _: torch.Tensor) -> None:
        part.step()
        part.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the steps were taken in the backward pass."""


def _split(groups: Iterable[dict[str, Any]], low: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Split the groups of `param_groups`: matrices to project, and matrices that are too small for it."""
    for group in groups:
        if group.get("role") != "matrix":
            yield group
            continue
        params = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
        large = [param.ndim == 2 and min(param.shape) > low["rank"] for param in params]
        for wanted, settings in ((True, low), (False, {})):
            own = [item for item, is_large in zip(group["params"], large, strict=True) if is_large == wanted]
            if own:
                yield {**group, "params": own, **settings}
