"""Stepping each parameter as soon as its gradient is there, and freeing the gradient, from within the backward pass.

Only the gradients of the layer at hand are ever alive, instead of all of them. What that rules out is everything that
looks at all gradients before the update: a global norm to clip by (CAME clips each parameter's update by its own RMS
instead), a check of all gradients for NaN, a loss scale.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scantling.errors import UserError
from scantling.optim.came import CAME


class ReleaseHandle:
    """Takes gradient release back: `remove()`, or leaving a `with` block."""

    def __init__(self, hooks: list[RemovableHandle]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """From now on gradients stay until `optimizer.step()`; a second call does nothing."""
        while self._hooks:
            self._hooks.pop().remove()

    def __enter__(self) -> ReleaseHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def release_gradients(model: nn.Module, optimizer: CAME, *, accumulation: int = 1) -> ReleaseHandle:
    """Let `loss.backward()` step each parameter of `model` and free its gradient.

    `optimizer.step()` may still be called (by a loop that does not know) and finds nothing to do. A learning rate has
    to be set before the backward pass it is meant for. Tied parameters are stepped once, with the sum of their
    gradients.

    Args:
        model: not wrapped in DistributedDataParallel or FullyShardedDataParallel: both read gradients later.
        optimizer: over parameters of the model; others in it are left to `optimizer.step()`.
        accumulation: backward passes whose gradients are summed before the step. With more than one the gradients
            stay in between, and only the last pass frees them.

    Returns:
        A handle with `remove()`.

    Raises:
        UserError: a wrapped model, no common parameter, a parameter that is released already, or an accumulation
            below 1.

    Example:
        >>> handle = sc.optim.release_gradients(model, optimizer)
        >>> loss.backward()  # also the step
        >>> handle.remove()
    """
    if not isinstance(optimizer, CAME):
        raise UserError(f"release_gradients works with scantling.CAME; given {type(optimizer).__name__}")
    if not isinstance(accumulation, int) or accumulation < 1:
        raise UserError(f"accumulation must be a whole number of at least 1; given {accumulation!r}")
    for module in model.modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise UserError(
                f"gradients cannot be released under {type(module).__name__}, which reads them after the backward "
                "pass; give the bare model"
            )
    known = {id(param) for param in optimizer.parameters()}
    params = [param for param in model.parameters() if id(param) in known and param.requires_grad]
    if not params:
        raise UserError("the optimizer has no parameter of this model")
    if any(getattr(param, "_post_accumulate_grad_hooks", None) for param in params):
        raise UserError("a parameter has a post-accumulate hook already; remove the earlier handle first")
    return ReleaseHandle([_release(param, optimizer, accumulation) for param in params])


def _release(param: Tensor, optimizer: CAME, accumulation: int) -> RemovableHandle:
    passes = 0

    def step_and_free(param: Tensor) -> None:
        nonlocal passes
        passes += 1
        if passes == accumulation:
            passes = 0
            optimizer.step_parameter(param)
            param.grad = None

    return param.register_post_accumulate_grad_hook(step_and_free)  # type: ignore[no-any-return, no-untyped-call]
