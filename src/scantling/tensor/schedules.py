"""How ranks come down to a size: by what the loss needs least, by a price that is controlled, or as in the paper.

The last two add to the loss a price on the size that the controls span (CoMERA, arXiv 2405.14377, section 4):

    loss + price * P^ / P_0 + beta * sum |G|^2

P is the size at the ranks whose controls are above the threshold, P_0 that at the start, P^ its relaxation with l1
norms of the controls for the ranks; the beta term keeps the cores from growing while the controls shrink.
"""

from __future__ import annotations

from math import copysign, exp
from typing import Any

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.tensor.bonds import Bonds
from scantling.tensor.importance import Importance
from scantling.tensor.options import RankOptions

_SHUT = -1.0
"""What the controls of ranks that are shut at the end are kept at."""
_LITTLE = 1e-6
"""Weight of what ranks contribute beside their importance: it decides between those that the loss does not need."""
_MOST = 1000.0
"""Times the price at the start that a price may be."""


class Schedule(nn.Module):
    """What a schedule adds to the loss, and what it does to the ranks after a step.

    What changes from step to step lies in buffers, on the device of the controls, which a captured graph reads.

    Args:
        options: of the adapter.
        bonds: the size at all of their ranks is that at the start.

    Attributes:
        initial: the size at the start.
        target: the size that is wanted in the end.
    """

    held: Tensor

    def __init__(self, options: RankOptions, bonds: Bonds) -> None:
        super().__init__()
        self.options, self._bonds = options, bonds
        self.initial = bonds.size_of_all()
        self.target = options.size_target * (self.initial if options.size_target <= 1.0 else 1.0)
        self.register_buffer("held", torch.zeros((), dtype=torch.bool), persistent=False)
        self._open: list[Tensor] | None = None  # which ranks stay so, bool (r) of each bond; None until the end

    @property
    def holds(self) -> bool:
        """Whether the size is held to the target in the end."""
        raise NotImplementedError

    @property
    def current_price(self) -> float:
        """Of the whole size in units of the loss."""
        raise NotImplementedError

    @property
    def adds_to_loss(self) -> bool:
        """Whether the objective ever is more than the loss of the task."""
        return True

    def objective(self, task_loss: Tensor, share: float) -> Tensor:
        """The loss of the task, 0-D, and what the schedule adds to it, of which this share is wanted."""
        raise NotImplementedError

    @property
    def importance(self) -> Importance | None:
        """What the schedule knows of how much the loss depends on each rank; None where it does not ask."""
        return None

    def meet(self, task_loss: Tensor, share: float) -> None:
        """See the loss of a pass before its objective is asked for."""

    def refresh(self) -> None:
        """See the controls anew, after shapes or device have changed."""
        self.to(self._bonds.device)
        if self._open is not None:
            self._open = self._open_now()

    def stepped(self, step: int) -> None:
        """Act on the ranks after a step, the `step`-th one."""
        if step % self.options.interval == 0 or step >= self.options.steps:
            if self.has_ended(step):
                self._end()
            else:
                self._follow_path(step)

    def has_ended(self, step: int) -> bool:
        """Whether the size is held to the target from this step on."""
        return self.holds and step >= self.options.steps

    def bring_to_target(self) -> None:
        """Bring the size to the target at once."""
        self._keep_to(self.target)

    def values(self) -> dict[str, Any]:
        """What a resumed run needs, as plain values."""
        buffers = {name: buffer.item() for name, buffer in self.state_dict().items()}
        is_open = None if self._open is None else torch.cat(self._open).tolist()
        return {"initial": self.initial, "target": self.target, "open": is_open, **buffers}

    def check_values(self, values: dict[str, Any], ranks: int) -> None:
        """See that the values are those of such a schedule over so many ranks.

        Raises:
            UserError: they are not.
        """
        missing = sorted({*self.values()} - {*values})
        if missing:
            raise UserError(f"the state of the RankAdapter is of another schedule or version: it lacks '{missing[0]}'")
        for name, known in values.items():
            if isinstance(known, list) and len(known) != ranks:
                raise UserError(f"the state of the RankAdapter knows '{name}' of {len(known)} ranks, not of {ranks}")

    @torch.no_grad()
    def load_values(self, values: dict[str, Any]) -> None:
        """Go on from the values, at the ranks there were."""
        self.initial, self.target = values["initial"], values["target"]
        for name, buffer in self.state_dict().items():
            buffer.fill_(values[name])
        self._open = None
        if values["open"] is not None:
            is_open = torch.tensor(values["open"], dtype=torch.bool, device=self._bonds.device)
            self._open = list(torch.split(is_open, [len(control) for control in self._bonds.controls]))
        self.held.fill_(self._open is not None)

    def _follow_path(self, step: int) -> None:
        """Act on the ranks before the end."""

    def _size_on_path(self, step: int) -> float:
        """The size that falls evenly from the start to the target."""
        options = self.options
        way = min(1.0, max(0.0, (step - options.begin) / (options.steps - options.begin)))
        return self.initial + (self.target - self.initial) * way

    @torch.no_grad()
    def _end(self) -> None:
        """Hold the size to the target, and from then on every rank to what it is; nothing asks for fewer any more."""
        if self._open is None:
            self.bring_to_target()
            self._open = self._open_now()
            self.held.fill_(True)
        for control, is_open in zip(self._bonds.controls, self._open, strict=True):
            kept = torch.where(is_open, control.clamp(min=2.0 * self.options.threshold), _SHUT)
            control.copy_(torch.where(control.isnan(), control, kept))  # a NaN stays to be seen

    def _open_now(self) -> list[Tensor]:
        return [control.detach() > self.options.threshold for control in self._bonds.controls]

    def _keep_to(self, wanted: float) -> None:
        """Shut or open ranks where the size is off."""
        if abs(self._bonds.size() - wanted) > self.options.tolerance * wanted:
            self._bonds.bring_to(wanted, self._scores())

    def _scores(self) -> Tensor | None:
        """Of the ranks of all bonds, when some have to go; None for what they contribute to the weights."""
        return None

    def _relaxed(self) -> Tensor:
        """P^ / P_0."""
        return self._bonds.relaxed_size() / self.initial

    def _norm(self) -> Tensor | float:
        """The beta term."""
        return self.options.beta * self._bonds.squared_norm() if self.options.beta else 0.0


class ImportanceSchedule(Schedule):
    """The size follows a path that falls to the target, by the ranks that matter least to the loss for what they cost.

    Nothing but the norm term is added to the loss. Ranks are shut, or opened again, wherever the size is off the path
    by more than the tolerance. Until a gradient has been seen, and where none ever is, what a rank contributes to its
    weight stands for its importance.
    """

    def __init__(self, options: RankOptions, bonds: Bonds) -> None:
        super().__init__(options, bonds)
        self._importance = Importance(options.memory)
        self._importance.follow(bonds.controls)

    @property
    def holds(self) -> bool:
        return True

    @property
    def current_price(self) -> float:
        return 0.0

    @property
    def adds_to_loss(self) -> bool:
        return self.options.beta > 0.0

    @property
    def importance(self) -> Importance:
        return self._importance

    def objective(self, task_loss: Tensor, share: float) -> Tensor:
        return task_loss + share * self._norm()

    def stepped(self, step: int) -> None:
        self._importance.update()
        super().stepped(step)

    def refresh(self) -> None:
        super().refresh()
        self._importance.follow(self._bonds.controls)

    def values(self) -> dict[str, Any]:
        return {**super().values(), "importance": self._importance.values()}

    def load_values(self, values: dict[str, Any]) -> None:
        super().load_values(values)
        self._importance.load_values(values["importance"])

    def _follow_path(self, step: int) -> None:
        self._keep_to(self._size_on_path(step))

    def _scores(self) -> Tensor | None:
        known = self._importance.of(self._bonds.values())
        if known is None:
            return None
        contributed = torch.cat(list(self._bonds.contributions())).to(known.dtype)
        mean = known.mean()
        return known + torch.where(mean > 0.0, _LITTLE * mean, 1.0) * contributed


class ControlledSchedule(Schedule):
    """The size follows a path that falls to the target.

    The price is raised while the size is above the path and lowered while it is below, so that the ranks go whose
    controls the loss does not hold up. What the price does not bring about in time is done: where the size leaves the
    path by more than the slack, and at the end, the ranks that contribute least for what they cost are shut, or those
    that would contribute most opened again.
    """

    price: Tensor

    def __init__(self, options: RankOptions, bonds: Bonds) -> None:
        super().__init__(options, bonds)
        self.register_buffer("price", torch.tensor(0.0 if options.begin else options.price))

    @property
    def holds(self) -> bool:
        return True

    @property
    def current_price(self) -> float:
        return float(self.price)

    def objective(self, task_loss: Tensor, share: float) -> Tensor:
        return task_loss + share * (self._norm() + self.price * self._relaxed())

    def _follow_path(self, step: int) -> None:
        options = self.options
        wanted = self._size_on_path(step)
        error = self._bonds.size() / wanted - 1.0
        if step >= options.begin:
            rate = options.price_rate * options.interval / (options.steps - options.begin)
            self.price.mul_(exp(rate * min(1.0, max(-1.0, error))))
            self.price.clamp_(options.price, _MOST * options.price)
        if abs(error) > options.slack:
            self._keep_to(wanted * (1.0 + copysign(options.slack, error)))

    def _end(self) -> None:
        self.price.zero_()
        super()._end()


class PaperSchedule(Schedule):
    """`early_steps` steps with the fixed price gamma, then achievement scalarisation with a reference point.

    The reference point is (L_0, P_target):

        w1 (L - L_0) >= w2 (P - P_target) / P_0:   w1 (L - L_0) + rho (L + P^ / P_0) + beta |G|^2
        else:                                      w2 (P^ - P_target) / P_0 + rho (L + P^ / P_0) + beta |G|^2

    The test takes the true size and the mean loss of recent steps, so that one batch does not decide. It ends near the
    target, not at it, unless the size is held to it at the end (`hold`).
    """

    mean_loss: Tensor
    weight: Tensor
    reference: Tensor
    late: Tensor
    recent: Tensor
    recent_share: Tensor

    def __init__(self, options: RankOptions, bonds: Bonds) -> None:
        super().__init__(options, bonds)
        for name in ("mean_loss", "weight", "reference", "recent", "recent_share"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("late", torch.zeros((), dtype=torch.bool))
        self._is_late = False  # as `late`, without asking the device

    @property
    def holds(self) -> bool:
        return self.options.hold

    @property
    def current_price(self) -> float:
        return self.options.gamma

    @property
    def _early_steps(self) -> int:
        return self.options.steps if self.options.early_steps is None else self.options.early_steps

    def objective(self, task_loss: Tensor, share: float) -> Tensor:
        options = self.options
        loss = task_loss.detach()
        is_finite = torch.isfinite(loss)
        self.recent += torch.where(is_finite, loss, 0.0)
        self.recent_share += torch.where(is_finite, share, 0.0)
        relaxed = self._relaxed()
        early = task_loss + share * options.gamma * relaxed
        target = self.target / self.initial
        mean_loss = self.mean_loss / self.weight.clamp(min=1e-12)
        by_loss = options.loss_weight * (mean_loss - self.reference)
        by_size = options.size_weight * (self._bonds.live_size() / self.initial - target)
        both = options.rho * (task_loss + share * relaxed)
        late = both + torch.where(
            by_loss >= by_size,
            options.loss_weight * (task_loss - share * self.reference),
            options.size_weight * share * (relaxed - target),
        )
        chosen = torch.where(self.held, task_loss, torch.where(self.late, late, early))
        return share * self._norm() + chosen

    def meet(self, task_loss: Tensor, share: float) -> None:
        if self._early_steps == 0 and not self._is_late:
            self._remember(task_loss.detach() / share, 0)

    def stepped(self, step: int) -> None:
        self._remember(self.recent / self.recent_share, step)  # of all passes since, also of those no step was made of
        self.recent.zero_()
        self.recent_share.zero_()
        super().stepped(step)

    def load_values(self, values: dict[str, Any]) -> None:
        super().load_values(values)
        self._is_late = bool(values["late"])

    def _remember(self, loss: Tensor, step: int) -> None:
        """The mean loss of recent steps, over all replicas, and the reference once the early steps are over.

        One that is not finite is left out.
        """
        value = loss.to(self.mean_loss.device, torch.float32, copy=True)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(value)
            value /= torch.distributed.get_world_size()
        is_finite, memory = torch.isfinite(value), self.options.memory
        self.mean_loss.copy_(torch.where(is_finite, self.mean_loss * memory + value * (1.0 - memory), self.mean_loss))
        self.weight.copy_(torch.where(is_finite, self.weight * memory + (1.0 - memory), self.weight))
        if step >= self._early_steps and not self._is_late:
            given = self.options.loss_target
            if given is None and not self.weight:
                return  # no loss that could be the reference yet
            self.reference.copy_(self.mean_loss / self.weight if given is None else torch.tensor(given))
            self._is_late = True
            self.late.fill_(True)


SCHEDULES: dict[str, type[Schedule]] = {
    "importance": ImportanceSchedule,
    "controlled": ControlledSchedule,
    "paper": PaperSchedule,
}
"""By their names in the options."""
