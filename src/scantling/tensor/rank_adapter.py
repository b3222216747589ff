"""RankAdapter: reduce ranks to a size target while the model trains.

Every inner bond gets rank gates, one scalar per rank (`layer.py`). A schedule prunes or activates ranks, and may put a
price on their size (`schedules.py`). `bonds.py` computes sizes and finds the least valuable ranks. This module
connects them to a training loop: the objective, the step count, the removal of ranks, and resuming from a state.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.tensor.cores import num_parameters
from scantling.tensor.flops import count_uses
from scantling.tensor.layer import TTLayer
from scantling.tensor.options import RankOptions
from scantling.tensor.rank_budget import CoreBytes, RankBudget
from scantling.tensor.schedules import SCHEDULES
from scantling.tensor.slicing import StateHolder, slice_parameter
from scantling.tensor.steps import call_after_steps, tensor_version

logger = logging.getLogger(__name__)

_OWNERS: weakref.WeakKeyDictionary[TTLayer, weakref.ref[RankAdapter]] = weakref.WeakKeyDictionary()
"""Adapter that owns the rank gates of a layer."""
_STATE_OPTIONS = ("unit", "schedule", "size_target", "steps", "begin")
"""Options that must be equal in a state and the adapter that loads it."""


def adapter_of(layer: TTLayer) -> RankAdapter | None:
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
        self.options = RankOptions.of(size_target=size_target, **options)
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, TTLayer)}
        layers = {name: layer for name, layer in layers.items() if len(layer.cores) > 1}  # a single core has no bond
        self.layers = {name: layer for name, layer in layers.items() if layer.is_trainable}
        if not self.layers:
            what = "TT layer that is trained" if layers else "TT layer whose ranks could adapt"
            raise UserError(f"{type(model).__name__} has no {what}; call sc.tensorize first")
        if not any(all(layer.ranks) for layer in self.layers.values()):
            raise UserError(f"the TT layers in {type(model).__name__} have no rank left, so that none can adapt")
        for name, layer in self.layers.items():
            if adapter_of(layer) is not None:
                raise UserError(f"'{name}' has rank gates already: another RankAdapter is attached to this model")
        self.step = 0
        self._dense_numbers = sum(layer.weight.numel() for layer in self.layers.values())
        self._seen: tuple[int, ...] | None = None
        self._is_fresh = False
        self._stepped: set[int] = set()  # ids of gates stepped in the uncounted step
        self._awaits_cores = False
        self._passed_by = 0
        self._knows_decay = False
        self._has_core_optimizer = False
        new = [layer for layer in self.layers.values() if layer.rank_gates is None]
        uses = count_uses(model, self.options.tokens) if self.options.unit == "flops" else {}
        try:
            for layer in self.layers.values():
                layer.attach_gates(self.options.threshold)
            self._budget = RankBudget(self.layers, self.options, uses=uses, core_bytes=core_bytes)
            self._schedule = SCHEDULES[self.options.schedule](self.options, self._budget).to(self._budget.device)
            self._check_target()
        except BaseException:
            for layer in new:
                layer.rank_gates = None
            raise
        _OWNERS.update({layer: weakref.ref(self) for layer in self.layers.values()})
        self._last_size = self._schedule.initial
        call_after_steps(self, RankAdapter._gates_stepped, lambda adapter: adapter._budget.rank_gates)
        call_after_steps(self, RankAdapter._cores_stepped, lambda adapter: adapter._budget.cores())

    def _check_target(self) -> None:
        initial, target, least = self._schedule.initial, self._schedule.target, self._budget.min_size()
        if target > initial:
            logger.warning("RankAdapter: the target of %g is above the size at the start, %g", target, initial)
        if target < least:
            options = self.options
            numbers: dict[str, int] = {name: sum(layer.sizes) for name, layer in self.layers.items()}
            largest = max(numbers, key=numbers.__getitem__)
            raise UserError(
                f"size_target={options.size_target} is {target:,.0f} {options.unit}, but one rank on every bond "
                f"of {len(self.layers)} layers takes {least:,.0f} already; {least / initial:.4f} is the least, "
                f"and '{largest}' has most of it"
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
        if not torch.compiler.is_compiling():
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
        self._is_fresh = self._awaits_cores = True
        return self._schedule.objective(task_loss, share)

    def observe(self) -> None:
        """Count a step if rank gates have changed since the last call, and let the schedule act on it.

        Steps of PyTorch optimizers are counted when they happen. Call this for steps without such an event: replayed
        by a CUDA graph, or taken parameter by parameter within the backward pass. `loss` calls it, too.
        """
        if self._has_uncounted_step():
            self._count()
        else:
            self._begin()

    def _has_uncounted_step(self) -> bool:
        """True if rank gates have changed since the last objective, by a step that `_count` has not seen."""
        return self._is_fresh and (bool(self._stepped) or (self._seen is not None and self._versions() != self._seen))

    def _begin(self) -> None:
        """Forget all observations before the next step."""
        self._seen = self._versions()
        self._stepped.clear()
        if self._schedule.importance is not None:
            self._schedule.importance.forget()

    def see_gradient(self, parameter: Tensor) -> None:
        """Read a gradient that is freed before the step is complete; no effect for parameters that are not rank gates.

        Pass it as `release_gradients(model, optimizer, before_step=adapter.see_gradient)`. Without it, ranks are
        chosen by their contribution to the weights.
        """
        if self._schedule.importance is not None:
            self._schedule.importance.keep(parameter)

    def begin_step(self) -> None:
        """Declare that changes so far were no step, and that the next change is one, even if the loss is not called."""
        self._begin()
        self._is_fresh = True

    def _gates_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step after an optimizer has stepped rank gates, once all gates that train are stepped.

        If each parameter has a separate optimizer, other gates are stepped later. Gates that are never stepped,
        because their layers were not used, delay the count only until `observe`. An optimizer that wraps others fires
        this hook again after them, when the step is already counted: that is not a second step, and its gradients do
        not belong to the next one.
        """
        self._passed_by = 0
        if not self._knows_decay:
            self._knows_decay = True
            self._look_for_decay(optimizer)
        if not self._is_fresh:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if any(group.get("fused") for group in optimizer.param_groups) and getattr(optimizer, "found_inf", False):
            return  # GradScaler.step: a fused optimizer skips the step itself
        held = set(map(id, params))
        is_first, self._stepped = not self._stepped, self._stepped | held
        is_last = all(id(gate) in self._stepped for gate in self._budget.rank_gates if gate.requires_grad)
        if self._schedule.importance is not None and not (is_first and is_last):
            for param in params:
                self._schedule.importance.keep(param)
        if is_last:
            self._count()

    def _look_for_decay(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if an optimizer decays the rank gates, which puts a price on ranks in addition to the schedule."""
        rank_gates = set(map(id, self._budget.rank_gates))
        for group in optimizer.param_groups:
            if group.get("weight_decay") and any(id(param) in rank_gates for param in group["params"]):
                logger.warning(
                    "RankAdapter: the optimizer decays the rank gates (weight_decay=%g), which draws all of them to "
                    "0 alike; sc.param_groups(model, weight_decay=...) leaves them out",
                    group["weight_decay"],
                )
                return

    def _cores_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn after an optimizer's second step of cores without a step of rank gates."""
        rank_gates = set(map(id, self._budget.rank_gates))
        if any(id(param) in rank_gates for group in optimizer.param_groups for param in group["params"]):
            return
        self._has_core_optimizer = True
        if not self._awaits_cores:
            return  # nested optimizers, or several that share the step
        self._awaits_cores = False
        self._passed_by += 1
        if self._passed_by == 2 and self._budget.rank_gates:
            logger.warning(
                "RankAdapter: the optimizer steps the cores and not their rank gates, so that no rank will change; "
                "attach the adapter before the optimizer is built"
            )

    def _count(self) -> None:
        """Count a step and let the schedule act on it."""
        self._is_fresh, self._passed_by = False, 0
        if not self._budget.rank_gates:
            return
        self._follow()
        if self._schedule.importance is not None and self._stepped:
            for gate in self._budget.rank_gates:
                if id(gate) not in self._stepped:
                    self._schedule.importance.exclude(gate)
        self.step += 1
        self._schedule.after_step(self.step)
        self._begin()

    def _follow(self) -> None:
        """Refresh if the model has moved to another device."""
        if self._budget.has_moved:
            self._refresh()

    def _refresh(self) -> None:
        """Refresh after shapes or device have changed."""
        self._budget.refresh()
        self._schedule.refresh()

    def _versions(self) -> tuple[int, ...]:
        return tuple(tensor_version(gate) for gate in self._budget.rank_gates)

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
        self._check_optimizers([each for each in (optimizer, *holders) if isinstance(each, torch.optim.Optimizer)])
        self._budget.check_finite()
        self.observe()
        before = sum(map(len, self._budget.rank_gates))
        known = [] if self._schedule.importance is None else [self._schedule.importance]
        for layer in self.layers.values():
            for param, dim, index in layer.rank_slices([active.nonzero().flatten() for active in layer.active_ranks()]):
                slice_parameter(param, dim, index, optimizer, *holders, *known)
        removed = before - sum(map(len, self._budget.rank_gates))
        if removed:
            self._refresh()
        self._seen = self._versions()
        return removed

    def detach(self) -> None:
        """Multiply the rank gates into the cores and drop them; the output does not change, and the adapter is
        detached.

        Truncate first. Build a new optimizer afterwards: the old state belongs to cores with separate rank gates.
        """
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
        if self.is_attached and self._schedule.holds:
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
        return self._numel(self.ranks())

    def _numel(self, ranks: Mapping[str, tuple[int, ...]]) -> int:
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
        numbers = self._numel(ranks)
        return {
            "tensor_parameters": numbers,
            "tensor_size": self.size() / self._schedule.initial,
            "tensor_compression": self._dense_numbers / numbers if numbers else inf,
            "mean_rank": sum(inner) / len(inner),
            "rank_price": self._schedule.current_price,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs in addition to the parameters, as plain values.

        A step that is not counted yet, because its gradients were released or an optimizer has not stepped yet, is
        saved with its known gradients.
        """
        importance = self._schedule.importance
        kept = {} if importance is None else importance.pending_values()
        return {
            "step": self.step,
            "uncounted": kept if self._has_uncounted_step() else None,
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
            raise UserError(f"this is no state of a RankAdapter, or one of another version: it lacks '{missing[0]}'")
        if not self.is_attached:
            raise UserError(
                "this RankAdapter is detached from its model: the rank gates are in the cores, none can go on"
            )
        if state["ranks"].keys() != self.layers.keys():
            other = sorted(state["ranks"].keys() ^ self.layers.keys())
            raise UserError(f"the state of the RankAdapter is one of other layers; '{other[0]}' is in one alone")
        ranks = sum(rank for layer in state["ranks"].values() for rank in layer[1:-1])
        self._schedule.check_values(state["values"], ranks)
        for name in _STATE_OPTIONS:
            given, own = state[name], getattr(self.options, name)
            if given != own:
                raise UserError(f"the state of the RankAdapter has {name}={given!r}, this one {name}={own!r}")
        for name, layer in self.layers.items():  # check all before changing any
            wanted = state["ranks"][name]
            if len(wanted) != len(layer.ranks) or any(new > old for new, old in zip(wanted, layer.ranks, strict=True)):
                raise UserError(
                    f"'{name}' has the ranks {layer.ranks}; those of the state, {wanted}, do not come of them"
                )
        self._follow()
        for name, layer in self.layers.items():
            wanted = state["ranks"][name]
            for param, dim, index in layer.rank_slices(
                [torch.arange(rank, device=self.device) for rank in wanted[1:-1]]
            ):
                slice_parameter(param, dim, index, None)
        self.step = state["step"]
        self._refresh()
        self._schedule.load_values(state["values"])
        self._stepped.clear()
        self._seen, self._is_fresh = None, state["uncounted"] is not None
        if self._is_fresh:
            self._seen = ()  # differs from all versions, so the step is counted
            if self._schedule.importance is not None:
                self._schedule.importance.load_pending_values(state["uncounted"])

    def _check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not optimizers or not self._budget.rank_gates:
            return
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise UserError(
                "LBFGS keeps one history for all parameters, from which no rank can be cut; take an optimizer that "
                "keeps its state by parameter"
            )
        held = {id(param) for each in optimizers for group in each.param_groups for param in group["params"]}
        missing = [
            name
            for name, layer in self.layers.items()
            for each in layer.rank_gates or ()
            if each.requires_grad and id(each) not in held
        ]
        if missing:
            raise UserError(
                f"the optimizer does not step the rank gates of '{missing[0]}'; attach the RankAdapter before the "
                "optimizer is built, and give every optimizer that steps cores or rank gates"
            )
        if self._has_core_optimizer and held.isdisjoint(map(id, self._budget.cores())):
            raise UserError("another optimizer steps the cores; give every optimizer that steps cores or rank gates")
