"""Gradient release: step each parameter in the backward pass and free its gradient.

Only the gradients of the current layer exist at a time, instead of all gradients. This rules out everything that reads
all gradients before the update: clipping by a global norm (CAME clips each parameter's update by its own RMS instead),
a check of all gradients for NaN, a loss scale.

Under FSDP2 the parameters of one `fully_shard` call get their gradients together, after their reduce-scatter, in the
same order on every rank. They are stepped together, so that a group takes at most three all-reduces instead of three
for each parameter: with the last of them or, if this pass did not use some of them, when the next group arrives or the
pass ends. FSDP2 itself hangs if ranks have gradients of different parameters, unless `set_reduce_scatter_unused_params`
makes zeros for the missing ones; so the ranks agree here without communication.

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
    "gradients cannot be released under {}, which averages them after they are stepped and freed; train the bare model "
    "on one process, shard it with FSDP2's fully_shard, or do not use release_gradients"
)
logger = logging.getLogger(__name__)

_NO_PASS = -1
"""Autograd's id outside of a backward pass: pipeline schedules make FSDP2 reduce gradients after the last pass."""


class ReleaseHandle:
    """Handle that ends gradient release: call `remove()`, or leave its `with` block."""

    def __init__(self, undo: list[Callable[[], Any]]) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Stop gradient release: gradients are kept until `optimizer.step()`. A second call does nothing."""
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
    params: Iterable[Tensor] | None = None,
    accumulation: int = 1,
    before_step: Callable[[Tensor], None] | None = None,
) -> ReleaseHandle:
    """Let `loss.backward()` step each parameter of `model` and free its gradient.

    A training loop may still call `optimizer.step()`: it steps the parameters that still have a gradient, which exist
    only after an accumulation that was interrupted. Set a learning rate before the backward pass that should use it.
    Tied parameters are stepped once, with the sum of their gradients. `torch.nn.utils.clip_grad_norm_` and
    `clip_grads_with_norm_` to a finite norm raise a UserError: they come too late.

    Collectives: with parameters sharded by FSDP2 at most three all-reduces in the backward pass for each call of
    `fully_shard`; with other sharded parameters (tensor parallelism) at most three for each parameter, and all ranks
    must have a gradient of it.

    Args:
        model: a model that is not wrapped in DistributedDataParallel or FullyShardedDataParallel, which read gradients
            later. Call FSDP2's `fully_shard` before.
        optimizer: optimizer of parameters of the model; other parameters are left to `optimizer.step()`. Parameters
            that are unfrozen later are stepped at the end of the backward pass and keep their gradients until then.
        params: parameters of both to release; default all.
        accumulation: number of backward passes whose gradients are summed before the step. With more than one, only the
            last pass frees gradients. Under FSDP2 passes without `set_requires_gradient_sync` count too, and so do
            passes whose gradients are removed by `zero_grad()`: call `optimizer.step()` after these, which restarts the
            count.
        before_step: called with each parameter before its step, when its gradient is complete, for example to inspect
            the gradient.

    Returns:
        A handle with `remove()`.

    Raises:
        UserError: an optimizer other than CAME, a wrapped model, no common parameter, a parameter that is already
            released, or an accumulation below 1. In the forward pass: DistributedDataParallel around the model. In the
            backward pass: a gradient that CAME cannot use, two gradients of a parameter in one pass, or checkpoints
            with `use_reentrant=True`, which run nested backward passes.

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
    # Only parameters that both the model and the optimizer have are released.
    known = {id(param) for param in optimizer.parameters()}
    known &= {id(param) for param in params} if params is not None else known
    common = [param for param in model.parameters() if id(param) in known]
    released = [param for param in common if param.requires_grad]
    if not released:
        raise UserError("the optimizer has no trainable parameter of this model; build it over model.parameters()")
    if any(post_accumulate_hooks(param) for param in released):
        raise UserError("a parameter already has a post-accumulate hook; remove the earlier handle first")
    groups = _fsdp_groups(model, released)
    passes = _ReleasePasses(optimizer, common, groups, accumulation, before_step)
    ids = {id(param) for param in released}
    optimizer.released |= ids
    _CLIP_GUARD.acquire()
    # Everything that `remove()` takes back, last first.
    undo: list[Callable[[], Any]] = [lambda: optimizer.released.difference_update(ids), _CLIP_GUARD.release]
    undo.append(model.register_forward_pre_hook(_refuse_ddp).remove)
    undo += [param.register_post_accumulate_grad_hook(passes.on_gradient).remove for param in released]  # type: ignore[no-untyped-call]
    undo.append(optimizer.register_step_post_hook(lambda *_: passes.on_optimizer_step()).remove)
    # FSDP2 without gradient sync calls no gradient hook, so count passes from their outputs.
    if groups and accumulation > 1:
        undo.append(model.register_forward_hook(passes.count_output).remove)
    return ReleaseHandle(undo)


class _ReleasePasses:
    """Backward passes of one accumulation; the last one steps parameters when their gradients are complete.

    Args:
        groups: by parameter id, the FSDP2 group of the parameter, whose gradients are complete together.
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
        self._number = 0  # index of the pass in the accumulation
        self._task: int | None = None  # autograd's id of the current pass
        self._waiting: list[Tensor] = []  # parameters of one group that wait for the others
        self._stepped: set[int] = set()
        self._taken: Counter[int] = Counter()  # steps of each parameter since the last `optimizer.step()`
        self._is_in_loop = False  # True if the training loop calls `optimizer.step()`

    def on_gradient(self, param: Tensor) -> None:
        """Step a parameter whose gradient is complete, or wait for the rest of its FSDP2 group."""
        self._begin()
        # Gradients of earlier passes of an accumulation are kept and summed by autograd.
        if self._number + 1 < self._accumulation:
            return
        group = self._groups.get(id(param), [param])
        # An FSDP2 group is stepped together; when another group begins, the rest of the last one has no gradient.
        if len(group) > 1:
            if self._waiting and self._groups[id(self._waiting[0])] is not group:
                self._step(self._waiting)
            self._waiting.append(param)
            if len(self._waiting) == len(group):
                self._step(self._waiting)
        else:
            self._step([param])

    def count_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """Count the backward pass from this output even if it leaves no gradient, as FSDP2 without gradient sync."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin())  # type: ignore[no-untyped-call]

    def on_optimizer_step(self) -> None:
        """Restart the accumulation: `optimizer.step()` has used all gradients."""
        self._number = 0
        self._waiting = []
        # Several steps of a parameter between two calls look like an accumulation that was not declared.
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
        """Start a new pass if autograd has, and register `_end` for its end."""
        task = current_backward_id()
        # Each hook of a pass comes here; the first one starts the pass.
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
            if left:  # gradients of earlier passes, or of parameters that were frozen when the handle was made
                self._step(left)

    def _step(self, params: list[Tensor]) -> None:
        """Step parameters together and free their gradients."""
        self._waiting = []
        again = [param for param in params if id(param) in self._stepped and self._task != _NO_PASS]
        if again:
            raise UserError(
                f"a parameter of shape {tuple(again[0].shape)} got a second gradient in a backward pass that already "
                "stepped it: under FSDP2's set_reduce_scatter_unused_params a module must be called once per pass. Do "
                "not use release_gradients, or turn that setting off"
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
    """Raise a UserError in a forward pass inside DistributedDataParallel."""
    active = active_ddp_module()
    if active is not None:
        raise UserError(_WRAPPED.format("DistributedDataParallel"))


class _ClipGuard:
    """Guard that makes gradient clipping refuse released parameters, which it would silently not clip.

    It wraps `clip_grads_with_norm_`, also under the name by which `clip_grad_norm_` calls it, so that every way to
    import these functions is covered. It wraps nothing in a version of torch without them.
    """

    def __init__(self) -> None:
        self._handles = 0
        self._replaced: list[tuple[Any, str, Any]] = []

    def acquire(self) -> None:
        self._handles += 1
        if self._handles > 1:
            return
        for module, name in CLIP_FUNCTIONS:
            if hasattr(module, name):
                clip = getattr(module, name)
                self._replaced.append((module, name, clip))
                setattr(module, name, _refuse_released(clip))

    def release(self) -> None:
        self._handles -= 1
        while self._replaced and not self._handles:
            setattr(*self._replaced.pop())


_CLIP_GUARD = _ClipGuard()


def _refuse_released(clip: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(clip)
    def guarded(parameters: Iterable[Tensor] | Tensor, max_norm: float, *args: Any, **options: Any) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        released = next((param for param in parameters if _is_released(param)), None)
        if released is not None and math.isfinite(max_norm):
            raise UserError(
                f"cannot clip gradients to {max_norm:g}: release_gradients has already stepped a parameter of shape "
                f"{tuple(released.shape)} and freed its gradient. Turn clipping off (max_grad_norm=0 in "
                "TrainingArguments), since CAME clips the update of each parameter; or do not use release_gradients"
            )
        clip(parameters, max_norm, *args, **options)

    return guarded


def _is_released(param: Tensor) -> bool:
    return any(isinstance(getattr(hook, "__self__", None), _ReleasePasses) for hook in post_accumulate_hooks(param))


def _refuse_reentrant() -> None:
    """Raise a UserError inside a reentrant checkpoint, which runs a nested backward pass with partial gradients.

    Only the Python stack shows it; it is walked once per pass.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            raise UserError(
                "gradients cannot be released under checkpoints with use_reentrant=True, which compute them in parts; "
                "use use_reentrant=False in torch.utils.checkpoint, or in gradient_checkpointing_kwargs of transformers"
            )
        frame = frame.f_back


def _fsdp_groups(model: nn.Module, params: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """Return, by id of each FSDP2 parameter, the parameters of the same `fully_shard` call on the same mesh."""
    left = {id(param): param for param in params if hasattr(param, "device_mesh")}
    if not left:
        return {}
    from torch.distributed.fsdp import FSDPModule

    groups: dict[Hashable, list[Tensor]] = {}

    # The innermost FSDP module around a parameter manages it.
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
