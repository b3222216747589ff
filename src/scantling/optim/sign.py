"""Sign descent: every element moves by the learning rate, in the direction of its momentum's sign.

    m  <-  momentum m + (1 - momentum) g,    p  <-  p (1 - lr weight_decay) - lr sign(m)

Bernstein et al., signSGD and Signum, arXiv 1802.04434. Without momentum it keeps no state: for gradients that already
are a momentum, such as those of `scantling.MomentumExchange`; the two together are DeMo (arXiv 2411.19870).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from scantling.errors import UserError


class Sign(torch.optim.Optimizer):
    """signSGD, and with momentum Signum.

    Args:
        params: parameters, named parameters or groups.
        lr: distance that each element moves.
        momentum: decay rate of the momentum, from 0 to below 1.
        weight_decay: decoupled, scaled by the current lr.

    Raises:
        UserError: a value out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0.0:
            raise UserError(f"lr must be at least 0; given {lr!r}")
        if not 0.0 <= momentum < 1.0:
            raise UserError(f"momentum must be from 0 to below 1; given {momentum!r}")
        if not weight_decay >= 0.0:
            raise UserError(f"weight_decay must be at least 0; given {weight_decay!r}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; a parameter without a gradient is not changed.

        Args:
            closure: computes the loss again; called with gradients enabled.

        Returns:
            The result of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                # m <- b m + (1 - b) g, then p <- p (1 - lr w) - lr sign(m)
                momentum_or_grad = param.grad
                if group["momentum"]:
                    state = self.state[param]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(param)
                    momentum_or_grad = state["momentum"].lerp_(param.grad, 1.0 - group["momentum"])
                param.mul_(1.0 - group["lr"] * group["weight_decay"])
                param.sub_(momentum_or_grad.sign() * group["lr"])
        return loss
