"""Warning about optimizers that add their own momentum to the exchanged one.

The exchange puts decoded momentum into the `.grad` of matrices. An optimizer with its own momentum averages it a second
time. With two momenta AdamW ended 0.17 nats (digits) and 0.43 nats (novels) above training on averaged gradients. With
betas[0] = 0 it ended at the same loss (digits) and 0.22 nats above (novels); see docs/evidence/network-small-models.md.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

logger = logging.getLogger(__name__)


def own_momentum(group: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the option of an optimizer's group that gives it a momentum, and its value; None without one."""
    betas = group.get("betas")
    beta1 = betas[0] if isinstance(betas, Sequence) and betas else group.get("beta1")
    for name, value in (("betas[0]", beta1), ("momentum", group.get("momentum"))):
        if isinstance(value, int | float | Tensor) and float(value) > 0.0:
            return name, float(value)
    return None


class MomentumWatch:
    """Watch that warns once of an optimizer that steps decoded momentum with its own momentum.

    Args:
        params: whose `.grad` is a momentum.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._unseen = WeakTensorKeyDictionary(dict.fromkeys(params))
        self._has_warned = False
        self._handle: RemovableHandle | None = None
        if not self._unseen:
            return
        # The hook outlives an exchange that was dropped: it keeps neither the watch nor the parameters alive, and must
        # not take new parameters for them.
        watch = weakref.ref(self)

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (found := watch()) is not None:
                found._look(optimizer)

        self._handle = register_optimizer_step_pre_hook(look)

    def stop(self) -> None:
        """Look no further; not within a step, whose hooks are being gone through."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def is_done(self) -> bool:
        """True if all parameters were stepped."""
        return not self._unseen

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups if self._unseen else ():
            stepped = [param for param in group["params"] if param in self._unseen]
            for param in stepped:
                del self._unseen[param]
            found = own_momentum(group) if stepped else None
            if found is not None and not self._has_warned:
                self._has_warned = True
                logger.warning("%s", describe_momentum(type(optimizer).__name__, *found))


def describe_momentum(optimizer: str, option: str, value: float) -> str:
    """Return the warning: the cost of a second momentum, and how to turn it off."""
    return (
        f"{optimizer} has its own momentum ({option} = {value:g}) and steps matrices whose gradient is the "
        "momentum of the exchange. In our measurements, two momenta cost 0.17 to 0.43 nats "
        f"(docs/evidence/network-small-models.md). Set {option} to 0 for matrices"
    )
