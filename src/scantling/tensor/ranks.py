"""RankAdapter: ranks that come down to a size target while the model trains.

Every inner bond gets controls, one number a rank (see `layer.py`), and the loss a price on the size they span:

    loss + price * P^ / P_0 + beta * sum |G|^2

P is the size at the ranks whose controls are above the threshold, P_0 that at the start, P^ its relaxation with l1
norms of the controls for the ranks (CoMERA, arXiv 2405.14377, section 4; the beta term keeps the cores from growing
while the controls shrink). Two schedules:

`controlled`: P follows a path that falls to the target. The price is raised while P is above the path and lowered while
it is below; what it does not bring about in time is done: the ranks that contribute least for what they cost are shut,
or the ones that would contribute most opened again, so that the size is on the path within the tolerance at every step.

`paper`: `early_steps` steps with the fixed price gamma, then achievement scalarisation with the reference point
(L_0, P_0 target):

    w1 (L - L_0) >= w2 (P - P_target) / P_0:   w1 (L - L_0) + rho (L + P^ / P_0) + beta |G|^2
    else:                                      w2 (P^ - P_target) / P_0 + rho (L + P^ / P_0) + beta |G|^2

The test takes the true size and the mean loss of recent steps, so that one batch does not decide. It ends near the
target, not at it, unless the size is held to it at the end (`hold`).

What a rank contributes is its share of the squared norm of the weight, from the Gram matrices of the chain on either
side: a function of the parameters alone, so that replicas decide alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.groups import MatrixDims, Role
from scantling.tensor._cut import StateHolder, cut_parameter
from scantling.tensor.choose import nearest
from scantling.tensor.cores import num_parameters
from scantling.tensor.layer import CoreLayer, gate
from scantling.tensor.options import RankOptions
from scantling.tensor.sizes import SizePolynomial, Term, byte_terms, number_terms
from scantling.tensor.steps import after_steps, version_of
from scantling.tensor.uses import Uses, uses_in

logger = logging.getLogger(__name__)

BytesOf: TypeAlias = Callable[[tuple[int, ...], torch.dtype, Role, MatrixDims], float]
"""Bytes that training keeps for a core, by its shape, dtype, role and matrix dims."""

_MARGIN = 5.0
"""How far from the threshold, in thresholds, a control is put that is shut or opened: not to flip back at once."""
_MOST_ORDERS = 8
"""Of contraction that are tried to bring FLOPs to a target."""
_SHUT = -1.0
"""What the controls that are shut at the end become: too far from the threshold ever to come back."""


class RankAdapter:
    """Adapt the ranks of all layers of cores in a model to a size target.

    Attach it before the optimizer is built, so that the optimizer steps the controls, too. In the training loop:

        loss = adapter.loss(task_loss)
        loss.backward()
        optimizer.step()
        adapter.truncate(optimizer)       # now and then, and at the end

    Args:
        model: with at least one layer of cores, none of which has controls.
        size_target: up to 1 a fraction of the numbers in the cores now, above 1 their number; see `RankOptions.unit`.
        bytes_of: bytes that training keeps for a core of this shape, dtype, role and `matrix_dims` (as of
            `scantling.optim.ParameterSpec`), for the unit `bytes`; default `RankOptions.bytes_per_parameter` a number.
        options: further fields of `RankOptions`.

    Attributes:
        options: a `RankOptions`.
        layers: the layers of cores by their names in the model, those of a single core and frozen ones left out.
        step: optimizer steps so far.

    Raises:
        UserError: no such layer, an adapter there already, an option out of range, a target below what one rank on
            every bond gives.

    Example:
        >>> adapter = sc.RankAdapter(model, size_target=0.2, steps=1000)
        >>> optimizer = sc.CAME(sc.param_groups(model), lr=1e-3)
    """

    def __init__(
        self, model: nn.Module, *, size_target: float = 0.2, bytes_of: BytesOf | None = None, **options: Any
    ) -> None:
        self.options = RankOptions.of(size_target=size_target, **options)
        self._bytes_of = bytes_of
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, CoreLayer)}
        layers = {name: layer for name, layer in layers.items() if len(layer.cores) > 1}  # one core has no bond
        self.layers = {name: layer for name, layer in layers.items() if layer.is_trainable}
        if not self.layers:
            what = "layer of cores that is trained" if layers else "layer of cores whose ranks could adapt"
            raise UserError(f"{type(model).__name__} has no {what}; call sc.tensorize first")
        for name, layer in self.layers.items():
            if layer.controls is not None:
                raise UserError(f"'{name}' has rank controls already: another RankAdapter is attached to this model")
        is_priced_by_flops = self.options.unit == "flops"
        self._uses: Uses = uses_in(model, self.options.tokens) if is_priced_by_flops else {}
        self.step = 0
        self._dense_numbers = sum(layer.weight.numel() for layer in self.layers.values())
        self._controls: list[nn.Parameter] = []
        self._seen: tuple[int, ...] | None = None
        self._is_fresh = False
        self._passed_by = 0
        try:
            for layer in self.layers.values():
                layer.attach_controls(self.options.threshold)
            self._begin()
        except BaseException:
            for layer in self.layers.values():
                layer.controls = None
            raise

    def _begin(self) -> None:
        """Take the size with the controls that are there now for that at the start."""
        after_steps(self, RankAdapter._stepped, lambda adapter: adapter._controls)
        after_steps(self, RankAdapter._cores_stepped, RankAdapter._cores)
        self._refresh()
        self._device = self._controls[0].device
        counted = self._counted
        self._initial = float(counted(torch.tensor([len(control) for control in self._controls], dtype=torch.float64)))
        self._target = self._absolute_target()
        self._price = torch.tensor(self.options.price, device=self._device)
        self._recent = torch.zeros((), device=self._device)
        self._recent_share = torch.zeros((), device=self._device)
        self._mean_loss = torch.zeros((), device=self._device)
        self._weight = torch.zeros((), device=self._device)
        self._reference = torch.zeros((), device=self._device)
        self._late = torch.zeros((), dtype=torch.bool, device=self._device)
        self._held = torch.zeros((), dtype=torch.bool, device=self._device)
        self._is_late = False
        self._last_size = self._initial
        if self._target > self._initial:
            logger.warning(
                "RankAdapter: the target of %g is above the size at the start, %g", self._target, self._initial
            )
        ones = torch.ones(len(self._controls), dtype=torch.float64)
        least = float(self._counted_at(ones)(ones))
        if self._target < least:
            options = self.options
            raise UserError(
                f"size_target={options.size_target} is {self._target:,.0f} {options.unit}, but one rank on every bond "
                f"of {len(self.layers)} layers takes {least:,.0f} already; {least / self._initial:.4f} is the least, "
                f"and '{self._largest_at_one()}' has most of it"
            )

    def loss(self, task_loss: Tensor, share: float = 1.0) -> Tensor:
        """The objective: the loss of the task and what the schedule adds to it.

        Call it for every micro-batch; a new step is counted once the optimizer has changed the controls.

        Args:
            task_loss: 0-D.
            share: of a micro-batch in the loss of its step, 1 / k where the losses of k are added up; what is added is
                this share of it.
        """
        if not torch.is_grad_enabled():
            return task_loss
        if not torch.compiler.is_compiling():
            self.observe()
            if self._early_steps == 0 and not self._is_late:
                self._remember(task_loss.detach() / share)
        return self.objective(task_loss, share)

    def objective(self, task_loss: Tensor, share: float = 1.0) -> Tensor:
        """The loss of the task and what the schedule adds to it, for CUDA graphs; `observe` is then called once a step.

        Args:
            task_loss, share: as of `loss`.
        """
        self._follow()
        if not self._controls:
            return task_loss
        self._is_fresh = True
        if self.options.schedule == "paper":
            loss = task_loss.detach()
            is_finite = torch.isfinite(loss)
            self._recent += torch.where(is_finite, loss, 0.0)
            self._recent_share += torch.where(is_finite, share, 0.0)
        relaxed = self._size(self._l1()) / self._initial
        norm = self.options.beta * self._norm() if self.options.beta else 0.0
        if self.options.schedule == "controlled":
            return task_loss + share * (norm + self._price * relaxed)
        return share * norm + self._paper(task_loss, relaxed, share)

    def observe(self) -> None:
        """Count a step where controls have changed since the last look, and let the schedule act on it.

        Steps of an optimizer of torch are counted as they are taken. This is for those that nothing tells of: replayed
        by a CUDA graph, or taken parameter by parameter within the backward pass. `loss` calls it, too.
        """
        versions = self._versions()
        if self._is_fresh and self._seen is not None and versions != self._seen:
            self._count()
        else:
            self._seen = versions

    def begin_step(self) -> None:
        """Say that what has changed so far was no step, and that one is to come, even if nothing asks for the loss."""
        self._seen, self._is_fresh = self._versions(), True

    def _stepped(self) -> None:
        """After a step of an optimizer that holds controls; only the first one after an objective counts."""
        self._passed_by = 0
        if self._is_fresh:
            self._count()

    def _cores(self) -> list[Tensor]:
        return [core for layer in self.layers.values() for core in layer.cores]

    def _cores_stepped(self) -> None:
        """After a step of an optimizer that holds cores; two with none of the controls in between are one too many."""
        self._passed_by += 1
        if self._passed_by == 2 and self._controls:
            logger.warning(
                "RankAdapter: the optimizer steps the cores and not their rank controls, so that no rank will change; "
                "attach the adapter before the optimizer is built"
            )

    def _count(self) -> None:
        """One more step; the schedule acts on it."""
        self._is_fresh, self._passed_by = False, 0
        if not self._controls:
            return
        self._follow()
        self.step += 1
        self._remember(self._recent / self._recent_share)  # of all passes since, also of those no step was made of
        self._recent.zero_()
        self._recent_share.zero_()
        if self.step % self.options.interval == 0 or self.step >= self.options.steps:
            self._act()
        self._seen = self._versions()

    def _versions(self) -> tuple[int, ...]:
        return tuple(version_of(control) for control in self._controls)

    @torch.no_grad()
    def truncate(self, optimizer: torch.optim.Optimizer | None = None, *holders: StateHolder) -> int:
        """Remove the ranks that are shut from cores, controls, gradients and the optimizer's state.

        What the model computes changes by rounding alone. Parameters stay the objects they are, with new shapes: a
        DistributedDataParallel around the model has to be made anew, compiled code and CUDA graphs are captured anew.

        Args:
            optimizer: that steps the model; anything with `slice_state(param, dim, index)`, or any other whose state
                has the shape of its parameter.
            holders: what else keeps something for each number of a parameter, such as a `MomentumExchange`.

        Returns:
            How many ranks were removed.

        Raises:
            UserError: an optimizer that does not hold the controls, LBFGS, or a control that is not finite; nothing has
                been removed.
        """
        self._check_optimizer(optimizer)
        for name, layer in self.layers.items():
            if not all(bool(torch.isfinite(control).all()) for control in layer.controls or ()):
                raise UserError(
                    f"a rank control of '{name}' is NaN or Inf, after a step with such a loss or gradient: "
                    "go on from a checkpoint before it"
                )
        before, is_seen = sum(map(len, self._controls)), self._seen == self._versions()
        for layer in self.layers.values():
            for param, dim, index in layer.cuts([live.nonzero().flatten() for live in layer.live()]):
                cut_parameter(param, dim, index, optimizer, *holders)
        removed = before - sum(map(len, self._controls))
        if removed:
            self._refresh()
        if is_seen:
            self._seen = self._versions()
        return removed

    def detach(self) -> None:
        """Multiply the controls into the cores and drop them: the model computes what it did, and no adapter is left.

        Truncate first. The optimizer must be built anew after it: its state is that of cores with controls beside them.
        """
        self._last_size = self.size()
        for layer in self.layers.values():
            layer.fold_controls()
        self._controls = []

    def finish(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Bring the size to the target, remove what is shut, and detach: the end of a run that is not to go on.

        Args:
            optimizer: as of `truncate`, if its state is still wanted. For more steps build a new one: the controls are
                parameters that the model has no longer.
        """
        if self._controls and (self.options.schedule == "controlled" or self.options.hold):
            self.step = max(self.step, self.options.steps)
            self._hold()
        self.truncate(optimizer)
        self.detach()

    @property
    def is_attached(self) -> bool:
        """Whether the layers have controls."""
        return bool(self._controls)

    @property
    def device(self) -> torch.device:
        """Of the controls."""
        return self._device

    def num_parameters(self) -> int:
        """Numbers in the cores at the ranks that are live: what is left after `truncate`."""
        return self._numbers(self.ranks())

    def _numbers(self, ranks: Mapping[str, tuple[int, ...]]) -> int:
        return sum(num_parameters(self.layers[name].sizes, own) for name, own in ranks.items())

    def size(self) -> float:
        """The size at the ranks that are live, in the unit of the target."""
        if not self._controls:
            return self._last_size
        self._follow()
        return self._true_size()

    @property
    def target(self) -> float:
        """The size target, in its unit."""
        return self._target

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Live ranks of all bonds of each layer, the outer ones (1) included; all 0 in between where one is."""
        found = {}
        self._follow()
        if not self._controls:
            return {name: layer.ranks for name, layer in self.layers.items()}
        counts = iter(self._per_bond((self._flat().detach() > self.options.threshold).long()).tolist())
        for name, layer in self.layers.items():
            inner = list(islice(counts, len(layer.cores) - 1))
            found[name] = (1, *(inner if all(inner) else [0] * len(inner)), 1)
        return found

    def metrics(self) -> dict[str, float]:
        """What a log of the run shows of it; `tensor_compression` is against the dense layers, biases left out."""
        ranks = self.ranks()
        inner = [rank for layer in ranks.values() for rank in layer[1:-1]]
        numbers = self._numbers(ranks)
        return {
            "tensor_parameters": numbers,
            "tensor_size": self.size() / self._initial,
            "tensor_compression": self._dense_numbers / numbers if numbers else inf,
            "mean_rank": sum(inner) / len(inner),
            "rank_price": float(self._price) if self.options.schedule == "controlled" else self.options.gamma,
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the parameters: plain values and tensors."""
        return {
            "step": self.step,
            "unit": self.options.unit,
            "schedule": self.options.schedule,
            "initial": self._initial,
            "target": self._target,
            "price": self._price.clone(),
            "mean_loss": self._mean_loss.clone(),
            "weight": self._weight.clone(),
            "reference": self._reference.clone(),
            "late": self._is_late,
            "ranks": {name: list(layer.ranks) for name, layer in self.layers.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; cores and controls get the shapes they had, so that the model's can be loaded next.

        Raises:
            UserError: the state of another model, unit or schedule; nothing has changed.
        """
        if state["ranks"].keys() != self.layers.keys():
            missing = sorted(state["ranks"].keys() ^ self.layers.keys())
            raise UserError(f"the state of the RankAdapter is one of other layers; '{missing[0]}' is in one alone")
        for name in ("unit", "schedule"):
            given, own = state.get(name), getattr(self.options, name)
            if given is not None and given != own:
                raise UserError(f"the state of the RankAdapter has {name}={given!r}, this one {name}={own!r}")
        for name, layer in self.layers.items():  # all of them before one is changed
            wanted = state["ranks"][name]
            if len(wanted) != len(layer.ranks) or any(new > old for new, old in zip(wanted, layer.ranks, strict=True)):
                raise UserError(
                    f"'{name}' has the ranks {layer.ranks}; those of the state, {wanted}, do not come of them"
                )
        for name, layer in self.layers.items():
            wanted = state["ranks"][name]
            for param, dim, index in layer.cuts([torch.arange(rank, device=self._device) for rank in wanted[1:-1]]):
                cut_parameter(param, dim, index, None)
        self.step, self._initial, self._target = state["step"], state["initial"], state["target"]
        for name in ("price", "mean_loss", "weight", "reference"):
            getattr(self, f"_{name}").copy_(state[name])
        self._turn_late(state["late"])
        self._held.fill_(self._has_ended)
        self._seen = None
        self._refresh()

    # what the ranks are

    def _refresh(self) -> None:
        """After the shapes have changed: the controls in one row, and the size as a function of the ranks."""
        self._controls = [control for layer in self.layers.values() for control in layer.controls or ()]
        counts = torch.tensor([len(control) for control in self._controls])
        device = self._controls[0].device if self._controls else torch.device("cpu")
        self._bond_of = torch.repeat_interleave(torch.arange(len(counts)), counts).to(device)
        terms: list[Term] = []
        first = 0
        bonds_of = torch.tensor([len(layer.cores) - 1 for layer in self.layers.values()])
        self._layer_of = torch.repeat_interleave(torch.arange(len(bonds_of)), bonds_of).to(device)
        for layer in self.layers.values():
            terms += self._terms(layer, first)
            first += len(layer.cores) - 1
        self._counted = SizePolynomial.of(terms, len(self._controls))  # on the CPU
        self._size = self._counted.to(device)  # what a captured graph reads, so that it stays until shapes change

    def _counted_at(self, ranks: Tensor) -> SizePolynomial:
        """The size as a function of the ranks near some live ones, (bonds): of FLOPs, in the order that is best there.

        With fewer ranks another order may be the best, so that `_counted` says too much of them.
        """
        if self.options.unit != "flops":
            return self._counted
        terms: list[Term] = []
        inner = iter(ranks.long().tolist())
        first = 0
        for layer in self.layers.values():
            own = tuple(islice(inner, len(layer.cores) - 1))
            if all(own):
                terms += self._uses[layer].flop_terms(layer, (layer.ranks[0], *own, layer.ranks[-1]), first)
            first += len(own)
        return SizePolynomial.of(terms, len(self._controls))

    def _true_size(self) -> float:
        """The size at the live ranks."""
        live = self._l0().cpu()
        return float(self._counted_at(live)(live))

    def _terms(self, layer: CoreLayer, first: int) -> list[Term]:
        """Terms of the size of a layer, in the unit of the target; `first` is the place of its first inner bond."""
        options, bytes_of = self.options, self._bytes_of
        if options.unit == "flops":
            return self._uses[layer].flop_terms(layer, layer.ranks, first)
        numbers = number_terms(layer.sizes, first)
        if options.unit == "parameters" or not all(layer.ranks):
            return numbers
        if bytes_of is None:
            return [(constant * options.bytes_per_parameter, bonds) for constant, bonds in numbers]

        def of_core(place: int, left: int, right: int) -> float:
            core = layer.cores[place]
            return bytes_of((left, *core.shape[1:-1], right), core.dtype, layer.core_role, layer.core_dims)

        return byte_terms(layer.ranks, of_core, first)

    def _follow(self) -> None:
        """Go where the model has gone since: to another device."""
        if self._controls and self._controls[0].device != self._device:
            self._device = self._controls[0].device
            names = ("price", "recent", "recent_share", "mean_loss", "weight", "reference", "late", "held")
            for name in [f"_{each}" for each in names]:
                setattr(self, name, getattr(self, name).to(self._device))
            self._refresh()

    def _per_bond(self, values: Tensor) -> Tensor:
        """Sums of what each rank has, bond by bond: (bonds)."""
        return values.new_zeros(len(self._controls)).index_add(0, self._bond_of, values)

    def _flat(self) -> Tensor:
        return torch.cat(list(self._controls))

    def _l0(self) -> Tensor:
        """Live ranks of the bonds, float64; where one bond of a layer has none, neither have the others."""
        live = self._per_bond((self._flat().detach() > self.options.threshold).double())
        alive = live.new_ones(len(self.layers)).scatter_reduce(0, self._layer_of, live.clamp(max=1.0), "amin")
        return live * alive[self._layer_of]

    def _l1(self) -> Tensor:
        return self._per_bond(self._flat().clamp(min=0.0))

    def _norm(self) -> Tensor:
        return torch.stack(list(torch._foreach_norm(self._cores()))).square().sum()

    def _largest_at_one(self) -> str:
        """The layer with the most numbers at one rank on every bond."""
        numbers: dict[str, int] = {name: sum(layer.sizes) for name, layer in self.layers.items()}
        return max(numbers, key=numbers.__getitem__)

    def _absolute_target(self) -> float:
        given = self.options.size_target
        return given * self._initial if given <= 1.0 else float(given)

    # the schedules

    def _remember(self, task_loss: Tensor) -> None:
        """The mean loss of recent steps, over all replicas, and the reference once the early steps are over.

        One that is not finite is left out.
        """
        if self.options.schedule != "paper":
            return
        value = task_loss.to(self._device, torch.float32, copy=True)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(value)
            value /= torch.distributed.get_world_size()
        is_finite, memory = torch.isfinite(value), self.options.memory
        self._mean_loss.copy_(
            torch.where(is_finite, self._mean_loss * memory + value * (1.0 - memory), self._mean_loss)
        )
        self._weight.copy_(torch.where(is_finite, self._weight * memory + (1.0 - memory), self._weight))
        if self.step >= self._early_steps and not self._is_late:
            given = self.options.loss_target
            if given is None and not self._weight:
                return  # no loss that could be the reference yet
            self._reference.copy_(self._mean_loss / self._weight if given is None else torch.tensor(given))
            self._turn_late(True)

    def _turn_late(self, late: bool) -> None:
        """Go from the early stage of the schedule `paper` to the late one, on the device as well."""
        self._is_late = late
        self._late.fill_(late)

    @property
    def _early_steps(self) -> int:
        return self.options.steps if self.options.early_steps is None else self.options.early_steps

    @property
    def _has_ended(self) -> bool:
        """Whether the schedule is over and the size is held to the target from here on."""
        return self.step >= self.options.steps and (self.options.schedule == "controlled" or self.options.hold)

    def _act(self) -> None:
        """Bring the size to its path, by the price and, where that is too slow, by the ranks themselves."""
        if self._has_ended:
            self._end()
        elif self.options.schedule == "controlled":
            if self.step >= self.options.begin:
                error = self._true_size() / self._path() - 1.0
                rate = self.options.price_rate * min(1.0, max(-1.0, error)) * self.options.interval
                self._price.mul_(torch.tensor(rate).exp())
            self._hold()

    @torch.no_grad()
    def _end(self) -> None:
        """Hold the size to the target, and from then on every rank to what it is; nothing asks for fewer any more."""
        threshold = self.options.threshold
        self._held.fill_(True)
        if self.step == self.options.steps:
            self._price.zero_()
            self._hold()
        lowest = threshold if self.step == self.options.steps else 0.5 * _SHUT
        for control in self._controls:
            control.copy_(torch.where(control > lowest, control.clamp(min=2.0 * threshold), _SHUT))

    def _hold(self) -> None:
        """Shut or open ranks where the size is off its path."""
        size, wanted = self._true_size(), self._path()
        if abs(size - wanted) > self.options.tolerance * wanted:
            self._bring_to(wanted)

    def _path(self) -> float:
        """The size that is wanted at this step."""
        options = self.options
        share = min(1.0, max(0.0, (self.step - options.begin) / (options.steps - options.begin)))
        return self._initial + (self._target - self._initial) * share

    def _paper(self, task_loss: Tensor, relaxed: Tensor, share: float) -> Tensor:
        options = self.options
        early = task_loss + share * options.gamma * relaxed
        target = self._target / self._initial
        mean_loss = self._mean_loss / self._weight.clamp(min=1e-12)
        by_loss = options.loss_weight * (mean_loss - self._reference)
        by_size = options.size_weight * (self._size(self._l0()) / self._initial - target)
        both = options.rho * (task_loss + share * relaxed)
        late = both + torch.where(
            by_loss >= by_size,
            options.loss_weight * (task_loss - share * self._reference),
            options.size_weight * share * (relaxed - target),
        )
        return torch.where(self._held, task_loss, torch.where(self._late, late, early))

    @torch.no_grad()
    def _bring_to(self, wanted: float) -> None:
        """Shut the ranks that contribute least for what they cost, or open those that would contribute most.

        One rank stays on every bond. Where one rank is more than the tolerance, ranks are exchanged for smaller ones.
        """
        device = torch.device("cpu")
        flat, bond_of = self._flat().to(device), self._bond_of.to(device)
        before = live = tried = flat > self.options.threshold
        share = torch.cat(list(self._contributions())).to(device, torch.float64)

        def ranks() -> Tensor:
            return torch.zeros(len(self._controls), dtype=torch.float64).index_add(0, bond_of, tried.double())

        least_off = inf
        for _ in range(_MOST_ORDERS):
            alive = ranks().clamp(min=1.0)
            counted = self._counted_at(alive)
            value = share / counted.slopes(alive)[bond_of].clamp(min=1e-30)
            tried = nearest(counted, tried, bond_of, value, wanted, self.options.tolerance)
            off = abs(float(self._counted_at(ranks())(ranks())) - wanted)
            if off >= least_off:
                break
            live, least_off = tried, off
            if off <= self.options.tolerance * wanted or counted is self._counted:  # which does not change with ranks
                break
        margin = _MARGIN * self.options.threshold
        lengths = [len(control) for control in self._controls]
        opened, shut = (torch.split(mask, lengths) for mask in (live & ~before, before & ~live))
        for control, wide, closed in zip(self._controls, opened, shut, strict=True):
            control.masked_fill_(wide.to(control.device), margin).masked_fill_(closed.to(control.device), -margin)

    @torch.no_grad()
    def _contributions(self) -> Iterator[Tensor]:
        """Bond by bond the share of each rank in the squared norm of the weight; of one that is shut, if it opened."""
        for layer in self.layers.values():
            if layer.controls is None:
                continue
            cores = [core.detach().float().flatten(1, -2) for core in layer.cores]
            gates = [gate(control, self.options.threshold).float() for control in layer.controls]
            left = right = cores[0].new_ones(1, 1)
            lefts: list[Tensor] = []
            rights: list[Tensor] = []
            for core, one in zip(cores, gates, strict=False):
                half = (left @ core.flatten(1)).view(core.shape[0] * core.shape[1], core.shape[2])
                lefts.append(core.flatten(0, 1).t() @ half)
                left = lefts[-1] * one * one[:, None]
            for core, one in zip(cores[:0:-1], [torch.ones(()), *gates[:0:-1]], strict=True):
                gated = core * one
                right = gated.flatten(1) @ (gated @ right).flatten(1).t()
                rights.insert(0, right)
            total = (left * rights[-1]).sum().clamp(min=1e-30)
            for before, behind, control in zip(lefts, rights, layer.controls, strict=True):
                opened = control.detach().float().clamp(min=self.options.threshold)
                yield before.diagonal() * behind.diagonal() * opened.square() / total

    def _check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None or not self._controls:
            return
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError(
                "LBFGS keeps one history for all parameters, from which no rank can be cut; take an optimizer that "
                "keeps its state by parameter"
            )
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        missing = [
            name
            for name, layer in self.layers.items()
            for each in layer.controls or ()
            if each.requires_grad and id(each) not in held
        ]
        if missing:
            raise UserError(
                f"the optimizer does not step the rank controls of '{missing[0]}'; attach the RankAdapter before the "
                "optimizer is built"
            )
