"""Steps taken within the backward pass, which leaves no gradient behind: what the loop still learns of each.

On a CPU a gradient that is not finite stops the run before it is used. On a GPU, where to look at each would wait for
the device each time, it is found when the step is over, and before anything is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from scantling.errors import NonFiniteError
from scantling.optim import CAME, ReleaseHandle, release_gradients


class GradientRelease:
    """Lets the backward passes of a step take it, and keeps the norm of each gradient.

    Args:
        optimizer: CAME, over parameters of the model.
        looks: called with each parameter while its gradient is there.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, looks: Sequence[Callable[[Tensor], None]] = ()
    ) -> None:
        assert isinstance(optimizer, CAME), "a checked recipe asks for this with came only"
        self._model, self._optimizer = model, optimizer
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._looks = looks
        self._norms: dict[str, Tensor] = {}  # in the order of the backward pass
        self._step = 0

    def during(self, step: int, num_passes: int) -> ReleaseHandle:
        """Until the handle is closed, let the last of `num_passes` backward passes take step `step`.

        Raises:
            NonFiniteError: from the backward pass on a CPU, a gradient is NaN or Inf.
        """
        self._norms, self._step = {}, step
        return release_gradients(
            self._model, self._optimizer, accumulation=num_passes, before_step=self._look_at_gradient
        )

    def total_norm(self) -> Tensor:
        """The global norm of the gradients that were used."""
        norms = [self._norms[name] for name in self._names.values() if name in self._norms]
        return torch.nn.utils.get_total_norm(norms)

    def check(self) -> None:
        """Raise a NonFiniteError for the first gradient that was not finite."""
        for name, norm in self._norms.items():
            self._check(name, norm)

    def _look_at_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        name = self._names[id(parameter)]
        self._norms[name] = torch.linalg.vector_norm(parameter.grad)
        if parameter.device.type == "cpu":
            self._check(name, self._norms[name])
        for look in self._looks:
            look(parameter)

    def _check(self, name: str, norm: Tensor) -> None:
        if torch.isfinite(norm):
            return
        raise NonFiniteError(
            f"step {self._step}, rank 0: the gradient of {name} is not finite. With optim.release_gradients other "
            "parameters have taken the step already: go on from the last checkpoint. Lower optim.lr, lengthen "
            "train.warmup, or leave optim.release_gradients out and set train.clip"
        )
