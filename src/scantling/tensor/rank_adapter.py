"""RankAdapter: reduce ranks to a size target while the model trains.

Every inner bond gets rank gates, one scalar per rank (`layer.py`). A schedule prunes or activates ranks, and may put a
price on their size (`schedules.py`). `rank_budget.py` computes sizes, `rank_selection.py` finds the least valuable
ranks. This module connects them to a training loop: the objective, the step count, the removal of ranks, and resuming
from a state.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.tensor.cores import num_parameters
from scantling.tensor.flops import count_uses
from scantling.tensor.layer import TTLayer
from scantling.tensor.options import RankOptions
from scantling.tensor.rank_budget import CoreBytes, RankBudget
from scantling.tensor.schedules import SCHEDULES
from scantling.tensor.slicing import StateHolder, slice_parameter
from scantling.tensor.step_detector import StepDetector, call_after_steps

logger = logging.getLogger(__name__)

_OWNERS: weakref.WeakKeyDictionary[TTLayer, weakref.ref[RankAdapter]] = weakref.WeakKeyDictionary()
"""Adapter that owns the rank gates of a layer."""
_STATE_OPTIONS = ("unit", "schedule", "size_target", "steps", "begin")
"""Options that must be equal in a state and the adapter that loads it."""


def find_adapter(layer: TTLayer) -> RankAdapter | None:
    """Return the adapter that is attached to a layer, or None."""
    owner = _OWNERS.get(layer, lambda: None)()
    return owner if layer.rank_gates is not None and owner is not None and owner.is_attached else None


class RankAdapter:
    """Adapt the ranks of all TT layers in a model to a size target.

    Attach it before the optimizer is built, so that the optimizer also steps the rank gates. In the training loop:

        loss = adapter.loss(task_loss)
        loss.backward()
        optimizer.step()
        adapter.truncate(optimizer)       # from time to time, and at the end

    Existing rank gates, from a checkpoint saved during adaptation, are used as they are.

    Args:
        model: model with at least one TT layer, and no other adapter.
        size_target: up to 1 a fraction of the current number of parameters in the cores, above 1 an absolute number;
            see `RankOptions.unit`.
        core_bytes: function that returns the bytes of training state of a core from its shape, dtype, role and
            `matrix_dims` (as in `scantling.optim.ParameterSpec`), for the unit `bytes`; default
            `RankOptions.bytes_per_parameter` per parameter.
        options: further fields of `RankOptions`.

    Attributes:
        options: a `RankOptions`.
        layers: TT layers by their names in the model, without frozen layers and layers with a single core.
        step: number of optimizer steps so far.

    Raises:
        UserError: if there is no such layer, another adapter is attached, an option is out of range, or the target is
            below the size with one rank on every bond.

    Example:
        >>> adapter = sc.RankAdapter(model, size_target=0.2, steps=1000)
        >>> optimizer = sc.CAME(sc.param_groups(model), lr=1e-3)
    """

    def __init__(
        self, model: nn.Module, *, size_target: float = 0.2, core_bytes: CoreBytes | None = None, **options: Any
    ) -> None:
        self.options = RankOptions.from_values(size_target=size_target, **options)
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, TTLayer)}
        layers = {name: layer for name, layer in layers.items() if len(layer.cores) > 1}  # a single core has no bond
        self.layers = {name: layer for name, layer in layers.items() if layer.is_trainable}
        if not self.layers:
            what = "trainable TT layer" if layers else "TT layer with more than one core"
            raise UserError(f"{type(model).__name__} has no {what}; call sc.tensorize first")
        if not any(all(layer.ranks) for layer in self.layers.values()):
            raise UserError(f"all ranks of the TT layers in {type(model).__name__} were removed; none can adapt")
        for name, layer in self.layers.items():
            if find_adapter(layer) is not None:
                raise UserError(
                    f"another RankAdapter is attached to '{name}'; call its finish() or detach() before this one"
                )
        self.step = 0
        self.waits_for_replicas = False
        # `weight` is lazy, so its size costs nothing.
        self._dense_numel = sum(layer.weight.numel() for layer in self.layers.values())
        # If anything below fails, layers without gates must have none again.
        ungated = [layer for layer in self.layers.values() if layer.rank_gates is None]
        uses = count_uses(model, self.options.tokens) if self.options.unit == "flops" else {}
        try:
            for layer in self.layers.values():
                layer.attach_gates(self.options.threshold)
            self._budget = RankBudget(self.layers, self.options, uses=uses, core_bytes=core_bytes)
            self._schedule = SCHEDULES[self.options.schedule](self.options, self._budget).to(self._budget.device)
            self._check_target()
        except BaseException:
            for layer in ungated:
                layer.rank_gates = None
            raise
        # Weak references, so that a dropped adapter does not block a new one.
        _OWNERS.update({layer: weakref.ref(self) for layer in self.layers.values()})
        self._last_size = self._schedule.initial
        self._detector = StepDetector(self._budget, self._schedule.importance)
        call_after_steps(self, RankAdapter._after_gate_optimizer, lambda adapter: adapter._budget.rank_gates)
        call_after_steps(self, RankAdapter._after_core_optimizer, lambda adapter: adapter._budget.cores())

    def _check_target(self) -> None:
        """Raise if the target is below the size with one rank on every bond; warn if it is above the initial size."""
        initial, target, minimum = self._schedule.initial, self._schedule.target, self._budget.min_size()
        if target > initial:
            logger.warning("RankAdapter: the target of %g is above the initial size, %g", target, initial)
        if target < minimum:
            options = self.options
            sizes: dict[str, int] = {name: sum(layer.sizes) for name, layer in self.layers.items()}
            largest = max(sizes, key=sizes.__getitem__)
            raise UserError(
                f"given size_target={options.size_target}, which is {target:,.0f} {options.unit}; the minimum is "
                f"{minimum / initial:.4f}, since one rank on every bond of {len(self.layers)} layers takes "
                f"{minimum:,.0f}, most of it in '{largest}'"
            )

    def loss(self, task_loss: Tensor, share: float = 1.0) -> Tensor:
        """Return the objective: the task loss plus the term that the schedule adds.

        Call it for every micro-batch; a new step is counted once the optimizer has changed the rank gates.

        Args:
            task_loss: 0-D.
            share: weight of this micro-batch in the loss of its step, 1 / k if the losses of k micro-batches are added
                up; the schedule's term is scaled by it.
        """
        if not torch.is_grad_enabled():
            return task_loss
        if not torch.compiler.is_compiling():  # compiled code cannot read versions
            self.observe()
            self._schedule.observe_loss(task_loss, share)
        return self.objective(task_loss, share)

    def objective(self, task_loss: Tensor, share: float = 1.0) -> Tensor:
        """Return the objective for CUDA graphs; call `observe` once per step then.

        Args:
            task_loss, share: as in `loss`.
        """
        self._follow()
        if not self.is_attached:
            return task_loss
        self._detector.arm()
        return self._schedule.objective(task_loss, share)

    def observe(self) -> None:
        """Count a step if rank gates have changed since the last call, and let the schedule act on it.

        Steps of PyTorch optimizers are counted when they happen. Call this for steps without such an event: replayed
        by a CUDA graph, or taken parameter by parameter within the backward pass. `loss` calls it, too.
        """
        if self._detector.has_uncounted_step:
            self._count_step()
        else:
            self._detector.begin()

    def see_gradient(self, parameter: Tensor) -> None:
        """Read a gradient that is freed before the step is complete; no effect for parameters that are not rank gates.

        Pass it as `release_gradients(model, optimizer, before_step=adapter.see_gradient)`. Without it, ranks are
        chosen by their contribution to the weights.
        """
        if self._schedule.importance is not None:
            self._schedule.importance.record_gradient(parameter)

    def begin_step(self) -> None:
        """Declare that changes so far were no step, and that the next change is one, even if the loss is not called."""
        self._detector.begin_step()

    def _after_gate_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._detector.observe_gate_optimizer(optimizer):
            self._count_step()

    def _after_core_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._detector.observe_core_optimizer(optimizer)

    def _count_step(self) -> None:
        """Count a step and let the schedule act on it."""
        self._follow()
        # Before the schedule changes the gates, which is no step.
        self._detector.mark_counted()
        if not self._budget.rank_gates:
            return
        self.step += 1
        self._schedule.count_step(self.step)
        if not self.waits_for_replicas and self._schedule.is_due(self.step):
            self._schedule.change_ranks(self.step)
        self._detector.begin()

    @torch.no_grad()
    def change_ranks_together(self) -> None:
        """Change the ranks of replicas that have taken local steps, and whose parameters are equal again.

        Collective: one all-reduce of the importance, one number for each rank.
        """
        importance = self._schedule.importance
        if importance is not None and dist.is_available() and dist.is_initialized():
            importance.average()
        if self._budget.rank_gates:
            self._schedule.change_ranks(self.step)
        self._detector.sync_versions()

    def importance_values(self) -> list[float] | None:
        """Return the importance of the ranks in the steps of this replica, as plain values."""
        return None if self._schedule.importance is None else self._schedule.importance.values()

    def load_importance_values(self, values: list[float] | None) -> None:
        """Load what `importance_values` returned, after `load_state_dict`."""
        if self._schedule.importance is not None:
            self._schedule.importance.load_values(values)

    def _follow(self) -> None:
        """Refresh if the model has moved to another device."""
        if self._budget.has_moved:
            self._refresh()

    def _refresh(self) -> None:
        """Refresh after shapes or device have changed."""
        self._budget.refresh()
        self._schedule.refresh()

    @torch.no_grad()
    def truncate(
        self, optimizer: torch.optim.Optimizer | None = None, *holders: StateHolder | torch.optim.Optimizer
    ) -> int:
        """Remove pruned ranks from cores, rank gates, gradients and optimizer state.

        The output of the model changes only by rounding. Parameters stay the same objects with new shapes: wrap the
        model in DistributedDataParallel again, and capture compiled code and CUDA graphs again.

        Args:
            optimizer: optimizer of the model: one with `slice_state(param, dim, index)`, or any other whose state has
                the shape of its parameter.
            holders: further objects with state for each element of a parameter: a `MomentumExchange`, or more
                optimizers if cores and rank gates have separate ones.

        Returns:
            Number of removed ranks.

        Raises:
            UserError: if no optimizer steps the rank gates, the optimizer that steps the cores is missing, an
                optimizer is LBFGS, or a rank gate is not finite; nothing has been removed then.
        """
        # Check everything before the first slice.
        self._check_optimizers([each for each in (optimizer, *holders) if isinstance(each, torch.optim.Optimizer)])
        self._budget.check_finite()
        self.observe()
        before = sum(map(len, self._budget.rank_gates))
        importance = [] if self._schedule.importance is None else [self._schedule.importance]
        for layer in self.layers.values():
            for param, dim, index in layer.rank_slices([active.nonzero().flatten() for active in layer.active_ranks()]):
                slice_parameter(param, dim, index, optimizer, *holders, *importance)
        removed = before - sum(map(len, self._budget.rank_gates))
        if removed:
            self._refresh()
        # Slicing is not an optimizer step.
        self._detector.sync_versions()
        return removed

    def detach(self) -> None:
        """Multiply the rank gates into the cores and drop them; the output does not change, and the adapter is
        detached.

        Truncate first. Build a new optimizer afterwards: the old state belongs to cores with separate rank gates.
        """
        # `size` needs the gates, so keep its last value.
        self._last_size = self.size()
        for layer in self.layers.values():
            layer.fold_gates()
        self._budget.rank_gates = []

    def finish(
        self, optimizer: torch.optim.Optimizer | None = None, *holders: StateHolder | torch.optim.Optimizer
    ) -> None:
        """Bring the size to the target, remove pruned ranks, and detach, at the end of training.

        Args:
            optimizer, holders: as in `truncate`, if their state is still needed. Build new ones for more steps: the
                rank gates are no longer parameters of the model.
        """
        self._follow()
        self.observe()
        # Training may end before the last step of the schedule.
        if self.is_attached and self._schedule.holds_target:
            self.step = max(self.step, self.options.steps)
            self._schedule.bring_to_target()
        self.truncate(optimizer, *holders)
        self.detach()

    @property
    def is_attached(self) -> bool:
        """True if the layers have rank gates."""
        return bool(self._budget.rank_gates)

    @property
    def adds_to_loss(self) -> bool:
        """True if the schedule may add a term to the task loss."""
        return self._schedule.adds_to_loss

    @property
    def device(self) -> torch.device:
        """Device of the rank gates."""
        return self._budget.device

    def num_parameters(self) -> int:
        """Return the number of parameters in the cores at the active ranks, that is after `truncate`."""
        return self._count_parameters(self.ranks())

    def _count_parameters(self, ranks: Mapping[str, tuple[int, ...]]) -> int:
        return sum(num_parameters(self.layers[name].sizes, own) for name, own in ranks.items())

    def size(self) -> float:
        """Return the size at the active ranks, in the unit of the target."""
        if not self.is_attached:
            return self._last_size
        self._follow()
        return self._budget.size()

    @property
    def target(self) -> float:
        """Size target, in its unit."""
        return self._schedule.target

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Return the active ranks of each layer, outer bonds (1) included; all inner ranks are 0 if one of them is."""
        if not self.is_attached:
            return {name: layer.ranks for name, layer in self.layers.items()}
        self._follow()
        return self._budget.ranks()

    def metrics(self) -> dict[str, float]:
        """Return metrics for logging; `tensor_compression` is relative to the dense layers, without biases."""
        ranks = self.ranks()
        inner = [rank for layer in ranks.values() for rank in layer[1:-1]]
        num_parameters = self._count_parameters(ranks)
        return {
            "tensor_parameters": num_parameters,
            "tensor_size": self.size() / self._schedule.initial,
            "tensor_compression": self._dense_numel / num_parameters if num_parameters else inf,
            "mean_rank": sum(inner) / len(inner),
            "rank_price": self._schedule.current_price,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs in addition to the parameters, as plain values.

        A step that is not counted yet, because its gradients were released or an optimizer has not stepped yet, is
        saved with its known gradients.
        """
        importance = self._schedule.importance
        pending = {} if importance is None else importance.pending_values()
        return {
            "step": self.step,
            "uncounted": pending if self._detector.has_uncounted_step else None,
            **{name: getattr(self.options, name) for name in _STATE_OPTIONS},
            "values": self._schedule.values(),
            "ranks": {name: list(layer.ranks) for name, layer in self.layers.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; cores and rank gates get the shapes they had, so that the model's state can be loaded next.

        Raises:
            UserError: if the state is of another model, target or schedule; nothing has changed then.
        """
        missing = sorted({*self.state_dict()} - {*state})
        if missing:
            raise UserError(f"the state has no '{missing[0]}'; it is not the state of a RankAdapter of this version")
        if not self.is_attached:
            raise UserError("this RankAdapter is detached from its model and cannot load a state; attach a new one")
        if state["ranks"].keys() != self.layers.keys():
            other = sorted(state["ranks"].keys() ^ self.layers.keys())
            raise UserError(f"the state and the model have different layers; only one of them has '{other[0]}'")
        ranks = sum(rank for layer in state["ranks"].values() for rank in layer[1:-1])
        self._schedule.check_values(state["values"], ranks)
        for name in _STATE_OPTIONS:
            given, own = state[name], getattr(self.options, name)
            if given != own:
                raise UserError(f"the state has {name}={given!r}, this RankAdapter {name}={own!r}; they must be equal")
        for name, layer in self.layers.items():  # check all before changing any
            wanted = state["ranks"][name]
            if len(wanted) != len(layer.ranks) or any(new > old for new, old in zip(wanted, layer.ranks, strict=True)):
                raise UserError(
                    f"the state has the ranks {wanted} for '{name}'; they must not exceed the layer's, {layer.ranks}"
                )
        self._follow()
        for name, layer in self.layers.items():
            # Only shapes matter here: the model's state is loaded next.
            kept = [torch.arange(rank, device=self.device) for rank in state["ranks"][name][1:-1]]
            for param, dim, index in layer.rank_slices(kept):
                slice_parameter(param, dim, index, None)
        self.step = state["step"]
        self._refresh()  # values below have the restored shapes
        self._schedule.load_values(state["values"])
        self._detector.restore(state["uncounted"] is not None)
        if state["uncounted"] is not None and self._schedule.importance is not None:
            self._schedule.importance.load_pending_values(state["uncounted"])

    def _check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise unless the given optimizers step all rank gates and cores, and keep state that can be sliced."""
        if not optimizers or not self._budget.rank_gates:
            return
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise UserError(
                "LBFGS keeps one history for all parameters, which cannot be sliced; use an optimizer that keeps its "
                "state by parameter"
            )
        stepped = {
            id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]
        }
        missing = [
            name
            for name, layer in self.layers.items()
            for gate in layer.rank_gates or ()
            if gate.requires_grad and id(gate) not in stepped
        ]
        if missing:
            raise UserError(
                f"the optimizer does not step the rank gates of '{missing[0]}'; build the optimizer after the "
                "RankAdapter is attached, and pass every optimizer that steps cores or rank gates"
            )
        if self._detector.has_core_optimizer and stepped.isdisjoint(map(id, self._budget.cores())):
            raise UserError(
                "another optimizer steps the cores; pass every optimizer that steps cores or rank gates to truncate"
            )
