"""Implement optimizers that CAME is compared with and that no installed package provides.

LAMB, a SCALE-like rule, APOLLO-Mini, Adafactor with a momentum, CAME with codes rounded to the nearest, and CAME
without factoring.

Written from the papers, for comparison only. `register()` makes them available to recipes by name, like those of
torch.optim.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
import transformers
from torch import Tensor

import scantling as sc
from scantling.optim import _eager


class _Peer(torch.optim.Optimizer):
    """Base class: decoupled weight decay, a step counter per parameter, and `_update`, which returns update / lr."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "role": None, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                update = self._update(param, param.grad, state, group)
                param.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
        return None

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def _adam(self, key: str, grad: Tensor, state: dict[str, Any], betas: tuple[float, float], eps: float) -> Tensor:
        m = state.setdefault(f"{key}_m", torch.zeros_like(grad)).lerp_(grad, 1.0 - betas[0])
        v = state.setdefault(f"{key}_v", torch.zeros_like(grad)).lerp_(grad.square(), 1.0 - betas[1])
        t = state["step"]
        return (m / (1.0 - betas[0] ** t)) / ((v / (1.0 - betas[1] ** t)).sqrt() + eps)


class Lamb(_Peer):
    """You et al., arXiv 1904.00962, algorithm 2: Adam's direction scaled to the norm of the weight, per layer."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
    ) -> None:
        super().__init__(params, lr, weight_decay, betas=betas, eps=eps)

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        direction = self._adam("own", grad, state, group["betas"], group["eps"])
        direction = direction + group["weight_decay"] * param
        weight, length = param.norm(), direction.norm()
        trust = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
        # LAMB's direction includes the decay: undo the decoupled decay that `step` applies
        return direction * trust - group["weight_decay"] * param


class ScaleLike(_Peer):
    """After Glentis et al., arXiv 2506.16659: column-normalized gradients, momentum for the output layer alone.

    A column holds the inputs of one output unit (a row of a torch Linear). It is normalized to a root mean square of 1,
    like the updates of Adam, which steps the vectors. A tied embedding counts as the output layer.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, beta: float = 0.9, vector_eps: float = 1e-8
    ) -> None:
        super().__init__(params, lr, weight_decay, beta=beta, vector_eps=vector_eps)

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if param.ndim < 2:
            return self._adam("own", grad, state, (0.9, 0.999), group["vector_eps"])
        if group["role"] == "embedding":
            grad = state.setdefault("m", torch.zeros_like(grad)).lerp_(grad, 1.0 - group["beta"])
        return grad / (grad.square().mean(dim=-1, keepdim=True).sqrt() + 1e-8)


class AdafactorMomentum(transformers.Adafactor):
    """Adafactor with the momentum that CAME's paper implies by its memory figures; PyTorch's Adafactor has none.

    Steps are relative to the RMS of the parameter (Shazeer and Stern, arXiv 1804.04235, section 8).
    """

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, beta1: float = 0.9) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, beta1=beta1, relative_step=False)


class ApolloMini(_Peer):
    """Zhu et al., arXiv 2412.05270: one scale per tensor, from Adam on a random rank-1 projection of the gradient."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        scale: float = 128.0,
        refresh: int = 200,
    ) -> None:
        super().__init__(params, lr, weight_decay, betas=betas, eps=eps, scale=scale, refresh=refresh)

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if param.ndim != 2 or group["role"] == "embedding":
            return self._adam("own", grad, state, group["betas"], group["eps"])
        rows, cols = grad.shape
        if (state["step"] - 1) % group["refresh"] == 0:
            generator = torch.Generator().manual_seed(state["step"] * 1000 + rows + cols)
            state["projection"] = torch.randn(min(rows, cols), generator=generator)
        projected = state["projection"] @ (grad if rows <= cols else grad.t())
        moved = self._adam("projected", projected, state, group["betas"], group["eps"])
        update = grad * (moved.norm() / (projected.norm() + 1e-12) * sqrt(group["scale"]))
        length, last = update.norm(), state.get("length")
        if last is not None:  # the paper's norm-growth limiter: at most 1.01 per step
            update = update * torch.clamp(1.01 * last / (length + 1e-12), max=1.0)
        state["length"] = update.norm()
        return update


class CameNearest(sc.CAME):
    """CAME with 4-bit codes rounded to the nearest: without a seed there is no rounding noise."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # use the eager step, which looks up `noise_seed` by name
        super().add_param_group({**param_group, "foreach": False})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        kept = _eager.noise_seed
        _eager.noise_seed = lambda *_: None  # type: ignore[assignment]
        try:
            return super().step(closure)
        finally:
            _eager.noise_seed = kept


class CameUnfactored(sc.CAME):
    """CAME with a full second moment and so without confidence; shows the effect of factoring."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({**param_group, "role": "vector"})


def register() -> None:
    """Make these optimizers valid values of a recipe's `optim.name`, in lower case."""
    for peer in (Lamb, ScaleLike, AdafactorMomentum, ApolloMini, CameNearest, CameUnfactored):
        setattr(torch.optim, peer.__name__, peer)
        if peer.__name__ not in torch.optim.__all__:
            torch.optim.__all__.append(peer.__name__)
