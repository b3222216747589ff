"""Stepping each parameter as soon as its gradient is there, and freeing the gradient, from within the backward pass.

Only the gradients of the layer at hand are ever alive, instead of all of them. What that rules out is everything that
looks at all gradients before the update: a global norm to clip by (CAME clips each parameter's update by its own RMS
instead), a check of all gradients for NaN, a loss scale.

Under FSDP2 the parameters of one `fully_shard` call get their gradients together, when these have been
reduce-scattered, one after the other on every rank alike. They are stepped together, so that a group takes at most
three all-reduces and not each of its parameters: with the last of them, or, where some were not used in this pass, when
the next group comes or the pass ends. FSDP2 itself hangs where ranks have gradients of different parameters, unless
`set_reduce_scatter_unused_params` makes zeros of those that lack; so the ranks agree here without asking each other.

PyTorch calls the hooks of FSDP2's parameters from `foreach_reduce`, on the stream of the reduction.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from scantling.errors import UserError
from scantling.numerics.torch_private import (
    CLIP_FUNCTIONS,
    active_ddp_module,
    call_after_backward,
    current_backward_id,
    fsdp_state,
    post_accumulate_hooks,
    tree_leaves,
)
from scantling.optim.came import CAME

_WRAPPED = (
    "gradients cannot be released under {}, which averages them only after they are stepped; train the bare model on "
    "one process, shard it with FSDP2's fully_shard, or do without release_gradients"
)
logger = logging.getLogger(__name__)

_NO_PASS = -1
"""What autograd calls no pass: a pipeline schedule has FSDP2 exchange gradients after the last of them."""


class ReleaseHandle:
    """Takes gradient release back: `remove()`, or leaving a `with` block."""

    def __init__(self, undo: list[Callable[[], Any]]) -> None:
        self._undo = undo

    def remove(self) -> None:
        """From now on gradients stay until `optimizer.step()`; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> ReleaseHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def release_gradients(
    model: nn.Module,
    optimizer: CAME,
    *,
    accumulation: int = 1,
    before_step: Callable[[Tensor], None] | None = None,
) -> ReleaseHandle:
    """Let `loss.backward()` step each parameter of `model` and free its gradient.

    `optimizer.step()` may still be called (by a loop that does not know): it steps what was left, which is nothing but
    after an accumulation that was broken off. A learning rate has to be set before the backward pass it is meant for.
    Tied parameters are stepped once, with the sum of their gradients. `torch.nn.utils.clip_grad_norm_` and
    `clip_grads_with_norm_` to a finite norm raise a UserError: they come too late.

    Collectives: with parameters sharded by FSDP2 at most three all-reduces in the backward pass for each group, that is
    each call of `fully_shard`; with other sharded parameters (tensor parallelism) at most three for each parameter, of
    which all ranks must then have a gradient.

    Args:
        model: not wrapped in DistributedDataParallel or FullyShardedDataParallel: both read gradients later. FSDP2's
            `fully_shard` comes before.
        optimizer: over parameters of the model; others in it are left to `optimizer.step()`. Parameters that are
            unfrozen later are stepped at the end of the backward pass, which keeps their gradients until then.
        accumulation: backward passes whose gradients are summed before the step. With more than one the gradients
            stay in between, and only the last pass frees them. Under FSDP2 passes without `set_requires_gradient_sync`
            count too, and so do passes whose gradients `zero_grad()` throws away: after these call `optimizer.step()`,
            which begins the count anew.
        before_step: called with each parameter whose gradient is complete, before its step, such as to look at the
            gradient.

    Returns:
        A handle with `remove()`.

    Raises:
        UserError: another optimizer than CAME, a wrapped model, no common parameter, a parameter that is released
            already, or an accumulation below 1. From the forward pass: one within DistributedDataParallel. From the
            backward pass: a gradient that CAME cannot use, one that comes twice in a pass, and checkpoints with
            `use_reentrant=True`, which are backward passes of their own.

    Example:
        >>> handle = sc.optim.release_gradients(model, optimizer)
        >>> loss.backward()  # also the step
        >>> handle.remove()
    """
    if not isinstance(optimizer, CAME):
        raise UserError(f"release_gradients works with scantling.CAME; given {type(optimizer).__name__}")
    if not isinstance(accumulation, int) or isinstance(accumulation, bool) or accumulation < 1:
        raise UserError(f"accumulation must be a whole number of at least 1; given {accumulation!r}")
    for module in model.modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise UserError(_WRAPPED.format(type(module).__name__))
    known = {id(param) for param in optimizer.parameters()}
    common = [param for param in model.parameters() if id(param) in known]
    params = [param for param in common if param.requires_grad]
    if not params:
        raise UserError("the optimizer has no parameter of this model")
    if any(post_accumulate_hooks(param) for param in params):
        raise UserError("a parameter has a post-accumulate hook already; remove the earlier handle first")
    groups = _fsdp_groups(model, params)
    passes = _Passes(optimizer, common, groups, accumulation, before_step)
    ids = {id(param) for param in params}
    optimizer.released |= ids
    _CLIP_GUARD.enter()
    undo: list[Callable[[], Any]] = [lambda: optimizer.released.difference_update(ids), _CLIP_GUARD.leave]
    undo.append(model.register_forward_pre_hook(_refuse_ddp).remove)
    undo += [param.register_post_accumulate_grad_hook(passes.arrived).remove for param in params]  # type: ignore[no-untyped-call]
    undo.append(optimizer.register_step_post_hook(lambda *_: passes.forget()).remove)
    if groups and accumulation > 1:
        undo.append(model.register_forward_hook(passes.announce).remove)
    return ReleaseHandle(undo)


class _Passes:
    """Steps parameters when their gradients arrive in the last backward pass of an accumulation.

    Args:
        groups: those of parameters that get their gradients together, by the ids of the parameters.
    """

    def __init__(
        self,
        optimizer: CAME,
        params: Sequence[Tensor],
        groups: dict[int, list[Tensor]],
        accumulation: int,
        before_step: Callable[[Tensor], None] | None,
    ) -> None:
        self._optimizer, self._params, self._groups = optimizer, params, groups
        self._accumulation, self._before_step = accumulation, before_step
        self._number = 0  # of the pass in the accumulation, from 0
        self._task: int | None = None  # autograd's name for the pass that goes on
        self._waiting: list[Tensor] = []  # of one group, for the rest of it
        self._stepped: set[int] = set()
        self._taken: Counter[int] = Counter()  # steps of each parameter since the last `optimizer.step()`
        self._is_in_loop = False  # one that calls it

    def arrived(self, param: Tensor) -> None:
        """The gradient of a parameter is there."""
        self._begin()
        if self._number + 1 < self._accumulation:
            return
        group = self._groups.get(id(param), [param])
        if len(group) > 1:
            if self._waiting and self._groups[id(self._waiting[0])] is not group:
                self._step(self._waiting)
            self._waiting.append(param)
            if len(self._waiting) == len(group):
                self._step(self._waiting)
        else:
            self._step([param])

    def announce(self, module: nn.Module, args: Any, output: Any) -> None:
        """Count the backward pass from this output too if it leaves no gradient, as FSDP2's without exchange do not."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin())  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """`optimizer.step()` has used all gradients."""
        self._number = 0
        self._waiting = []
        most = max(self._taken.values(), default=0)
        if most > 1 and self._is_in_loop:
            logger.warning(
                "release_gradients: %d steps of a parameter since the last optimizer.step(), each in a backward pass; "
                "if their gradients were meant to add up, give accumulation=%d",
                most,
                most * self._accumulation,
            )
        self._taken.clear()
        self._is_in_loop = True

    def _begin(self) -> None:
        """Note which pass goes on, and ask to be called at its end."""
        task = current_backward_id()
        if task == self._task:
            return
        _refuse_reentrant()
        self._task, self._waiting = task, []
        self._stepped.clear()
        if task != _NO_PASS:
            # twice, since FSDP2 too reduces at the end, the gradients of modules whose inputs have none
            call_after_backward(lambda: call_after_backward(self._end))

    def _end(self) -> None:
        if self._waiting:
            self._step(self._waiting)
        self._number += 1
        if self._number == self._accumulation:
            self._number = 0
            left = [param for param in self._params if param.requires_grad and param.grad is not None]
            if left:  # of earlier passes, or of parameters that were frozen when gradients began to be released
                self._step(left)

    def _step(self, params: list[Tensor]) -> None:
        """Step parameters together and free their gradients."""
        self._waiting = []
        again = [param for param in params if id(param) in self._stepped and self._task != _NO_PASS]
        if again:
            raise UserError(
                f"a parameter of shape {tuple(again[0].shape)} got a gradient in a backward pass that had stepped it "
                "already: under FSDP2's set_reduce_scatter_unused_params a module must be called once a pass. Do "
                "without release_gradients, or without that setting"
            )
        self._stepped.update(id(param) for param in params)
        self._taken.update(id(param) for param in params)
        if self._before_step is not None:
            for param in params:
                self._before_step(param)
        self._optimizer.step_parameters(params)
        for param in params:
            param.grad = None


def _refuse_ddp(*_: Any) -> None:
    """Raise a UserError in a forward pass of DistributedDataParallel, which this model was put into, or taken from."""
    active = active_ddp_module()
    if active is not None:
        raise UserError(_WRAPPED.format("DistributedDataParallel"))


class _ClipGuard:
    """Lets clips refuse released parameters while there is a handle: they would clip nothing and not say so.

    What is wrapped is the half of `clip_grad_norm_` that takes parameters, which it looks up in its module whichever
    way a loop came by it, and the public name of that half; in a version of torch without it nothing is wrapped.
    """

    def __init__(self) -> None:
        self._handles = 0
        self._replaced: list[tuple[Any, str, Any]] = []

    def enter(self) -> None:
        self._handles += 1
        if self._handles > 1:
            return
        for module, name in CLIP_FUNCTIONS:
            if hasattr(module, name):
                clip = getattr(module, name)
                self._replaced.append((module, name, clip))
                setattr(module, name, _guarded(clip))

    def leave(self) -> None:
        self._handles -= 1
        while self._replaced and not self._handles:
            setattr(*self._replaced.pop())


_CLIP_GUARD = _ClipGuard()


def _guarded(clip: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(clip)
    def guarded(parameters: Iterable[Tensor] | Tensor, max_norm: float, *args: Any, **options: Any) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        released = next((param for param in parameters if _is_released(param)), None)
        if released is not None and math.isfinite(max_norm):
            raise UserError(
                f"a clip of gradients to {max_norm:g} comes after release_gradients has stepped a parameter of shape "
                f"{tuple(released.shape)} and freed its gradient. Leave it out (max_grad_norm=0 in TrainingArguments), "
                "since CAME clips the update of each parameter by itself; or do without release_gradients"
            )
        clip(parameters, max_norm, *args, **options)

    return guarded


def _is_released(param: Tensor) -> bool:
    return any(isinstance(getattr(hook, "__self__", None), _Passes) for hook in post_accumulate_hooks(param))


def _refuse_reentrant() -> None:
    """Raise a UserError inside a checkpoint whose segment is a backward pass of its own, with a part of the gradients.

    Nothing says so but the stack; it is walked once a pass.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            raise UserError(
                "gradients cannot be released under checkpoints with use_reentrant=True, which hand them over in "
                "parts; give torch.utils.checkpoint, or gradient_checkpointing_kwargs of transformers, "
                "use_reentrant=False"
            )
        frame = frame.f_back


def _fsdp_groups(model: nn.Module, params: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """For the id of each parameter that FSDP2 manages, all those that one `fully_shard` manages on one mesh."""
    left = {id(param): param for param in params if hasattr(param, "device_mesh")}
    if not left:
        return {}
    from torch.distributed.fsdp import FSDPModule

    groups: dict[Hashable, list[Tensor]] = {}

    def walk(module: nn.Module, manager: Any) -> None:
        if isinstance(module, FSDPModule):
            manager = fsdp_state(module)
        for child in module.children():
            walk(child, manager)
        for param in module.parameters(recurse=False) if manager is not None else ():
            if left.pop(id(param), None) is not None:
                groups.setdefault((id(manager), param.device_mesh), []).append(param)  # type: ignore[attr-defined]

    walk(model, None)
    return {id(param): group for group in groups.values() for param in group}
