"""Detection of optimizer steps that change rank gates: by hooks of PyTorch's optimizers, and by version counters.

A fused optimizer, and one that writes through `.data`, changes parameters without raising their version counters, so
the steps of every `torch.optim.Optimizer` are observed with hooks. Steps without such an event (replayed by a captured
graph, or taken parameter by parameter within the backward pass) raise the counters.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from scantling.numerics.torch_private import version_counter
from scantling.tensor.importance import Importance
from scantling.tensor.rank_budget import RankBudget

logger = logging.getLogger(__name__)

Owner = TypeVar("Owner")


class StepDetector:
    """Observer of the steps that change rank gates; also keeps the gradients of these steps for the importance.

    Args:
        budget: rank gates and cores.
        importance: receives the gradients of rank gates; None if no schedule needs them.

    Attributes:
        has_core_optimizer: True if an optimizer stepped cores without rank gates.
    """

    def __init__(self, budget: RankBudget, importance: Importance | None) -> None:
        self._budget, self._importance = budget, importance
        self.has_core_optimizer = False
        self._is_armed = False  # an objective was computed since the last counted step
        self._versions: tuple[int, ...] | None = None
        self._stepped: set[int] = set()  # ids of gates stepped in the step that is not counted yet
        self._awaits_cores = False
        self._steps_without_gates = 0
        self._has_checked_decay = False

    def arm(self) -> None:
        """Expect a step, after an objective was computed."""
        self._is_armed = self._awaits_cores = True

    def begin_step(self) -> None:
        """Declare that changes so far were no step, and that the next change is one, even without an objective."""
        self.begin()
        self._is_armed = True

    def begin(self) -> None:
        """Discard all observations before the next step."""
        self.sync_versions()
        self._stepped.clear()
        if self._importance is not None:
            self._importance.discard_pending()

    def sync_versions(self) -> None:
        """Ignore all changes of rank gates so far."""
        self._versions = self._current_versions()

    @property
    def has_uncounted_step(self) -> bool:
        """True if rank gates have changed since the last objective, by a step that was not counted."""
        has_changed = self._versions is not None and self._current_versions() != self._versions
        return self._is_armed and (bool(self._stepped) or has_changed)

    def restore(self, has_uncounted_step: bool) -> None:
        """Continue from a saved state, in which a step was or was not counted yet."""
        self._stepped.clear()
        self._is_armed = has_uncounted_step
        self._versions = () if has_uncounted_step else None  # () differs from all versions, so the step is counted

    def mark_counted(self) -> None:
        """Record that the step is counted; gates that it did not change have no gradient in it."""
        self._is_armed, self._steps_without_gates = False, 0
        if self._importance is not None and self._stepped:
            for gate in self._budget.rank_gates:
                if id(gate) not in self._stepped:
                    self._importance.exclude(gate)

    def observe_gate_optimizer(self, optimizer: Optimizer) -> bool:
        """Observe an optimizer that has stepped rank gates; return True once all gates that train are stepped.

        If each parameter has a separate optimizer, other gates are stepped later. Gates that are never stepped,
        because their layers were not used, delay the count only until the next objective. An optimizer that wraps
        others calls this again after them, when the step is already counted: that is not a second step, and its
        gradients do not belong to the next one.
        """
        self._steps_without_gates = 0
        if not self._has_checked_decay:
            self._has_checked_decay = True
            self._warn_of_decay(optimizer)
        if not self._is_armed:
            return False
        if any(group.get("fused") for group in optimizer.param_groups) and getattr(optimizer, "found_inf", False):
            return False  # GradScaler.step: a fused optimizer skips the step itself
        params = [param for group in optimizer.param_groups for param in group["params"]]
        is_first, self._stepped = not self._stepped, self._stepped | set(map(id, params))
        is_last = all(id(gate) in self._stepped for gate in self._budget.rank_gates if gate.requires_grad)
        # Gradients may be freed before the last optimizer steps, so copy those of a partial step.
        if self._importance is not None and not (is_first and is_last):
            for param in params:
                self._importance.record_gradient(param)
        return is_last

    def observe_core_optimizer(self, optimizer: Optimizer) -> None:
        """Observe an optimizer that has stepped cores; warn after its second step without a step of rank gates."""
        gates = set(map(id, self._budget.rank_gates))
        if any(id(param) in gates for group in optimizer.param_groups for param in group["params"]):
            return
        self.has_core_optimizer = True
        if not self._awaits_cores:
            return  # nested optimizers, or several that share the step
        self._awaits_cores = False
        self._steps_without_gates += 1
        if self._steps_without_gates == 2 and gates:
            logger.warning(
                "RankAdapter: the optimizer steps the cores but not their rank gates, so no rank will change; build "
                "the optimizer after the adapter is attached"
            )

    def _warn_of_decay(self, optimizer: Optimizer) -> None:
        """Warn if an optimizer decays the rank gates, which puts a price on ranks in addition to the schedule."""
        gates = set(map(id, self._budget.rank_gates))
        for group in optimizer.param_groups:
            if group.get("weight_decay") and any(id(param) in gates for param in group["params"]):
                logger.warning(
                    "RankAdapter: the optimizer decays the rank gates (weight_decay=%g), which pulls all of them to 0; "
                    "use sc.param_groups(model, weight_decay=...), which does not decay them",
                    group["weight_decay"],
                )
                return

    def _current_versions(self) -> tuple[int, ...]:
        # Inference tensors have no version counter.
        return tuple(0 if gate.is_inference() else version_counter(gate) for gate in self._budget.rank_gates)


def call_after_steps(
    owner: Owner, method: Callable[[Owner, Optimizer], None], parameters: Callable[[Owner], Iterable[Tensor]]
) -> None:
    """Call a method after every step of an optimizer that holds one of the owner's parameters, until the owner dies.

    Steps captured in a CUDA graph are ignored, since nothing has been computed yet.

    Args:
        owner: object that the method belongs to; it is not kept alive.
        method: method of its class; receives the optimizer.
        parameters: function that returns the owner's parameters.
    """
    # The hook is global: a strong reference would keep the owner alive.
    owner_ref = weakref.ref(owner)
    holds_parameters: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        alive = owner_ref()
        if alive is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        if not holds_parameters.get(optimizer, False):  # parameters may be added later
            own = {id(parameter) for parameter in parameters(alive)}
            holds_parameters[optimizer] = any(
                id(param) in own for group in optimizer.param_groups for param in group["params"]
            )
        if holds_parameters[optimizer]:
            method(alive, optimizer)

    hook = register_optimizer_step_post_hook(after_step)
    weakref.finalize(owner, hook.remove)
