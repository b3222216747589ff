"""Schedules that reduce ranks to a size: by importance for the loss, or as in the paper.

The paper adds to the loss a price on the size that the rank gates span (CoMERA, arXiv 2405.14377, section 4):

    loss + price * P^ / P_0 + beta * sum |G|^2

P is the size at the ranks whose gates are above the threshold, P_0 the initial size, and P^ the relaxation of P with
the l1 norms of the gates instead of ranks. The beta term keeps the cores from growing while the gates shrink.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.tensor.importance import Importance
from scantling.tensor.options import RankOptions
from scantling.tensor.rank_budget import RankBudget

_PRUNED = -1.0
"""Value of the gates of pruned ranks after the end."""
_TIE_BREAK = 1e-6
"""Weight of contributions relative to importance: it breaks ties between ranks that the loss does not need."""


class Schedule(nn.Module):
    """Base class of schedules, which add a term to the loss and change the ranks after a step.

    Values that change between steps are buffers on the device of the rank gates, which captured graphs read.

    Args:
        options: options of the adapter.
        budget: rank gates of the model; the size at all of their ranks is the initial size.

    Attributes:
        initial: initial size.
        target: final size.
    """

    is_held: Tensor

    def __init__(self, options: RankOptions, budget: RankBudget) -> None:
        super().__init__()
        self.options, self._budget = options, budget
        self.initial = budget.full_size()
        self.target = options.size_target * (self.initial if options.size_target <= 1.0 else 1.0)
        self.register_buffer("is_held", torch.zeros((), dtype=torch.bool), persistent=False)
        self._final_mask: list[Tensor] | None = None  # bool (r) per bond: active ranks, fixed at the end; None before

    @property
    def holds_target(self) -> bool:
        """True if the size is held at the target in the end."""
        return True

    @property
    def current_price(self) -> float:
        """Price of the whole size in units of the loss."""
        return 0.0

    @property
    def adds_to_loss(self) -> bool:
        """True if the objective may differ from the task loss."""
        return True

    def objective(self, task_loss: Tensor, share: float) -> Tensor:
        """Return the task loss, 0-D, plus this share of the schedule's term."""
        raise NotImplementedError

    @property
    def importance(self) -> Importance | None:
        """Importance of each rank for the loss; None if the schedule does not use it."""
        return None

    def observe_loss(self, task_loss: Tensor, share: float) -> None:
        """Read the loss of a pass before its objective is computed."""

    def refresh(self) -> None:
        """Read the rank gates again after shapes or device have changed."""
        self.to(self._budget.device)
        if self._final_mask is not None:
            self._final_mask = self._active_mask()

    def count_step(self, step: int) -> None:
        """Read the gradients and losses of step number `step`."""

    def is_due(self, step: int) -> bool:
        """True if the ranks may change after this step."""
        return step % self.options.interval == 0 or step >= self.options.steps

    def change_ranks(self, step: int) -> None:
        """Change the ranks after step number `step`."""
        if self.has_ended(step):
            self._end()
        else:
            self._update_ranks(step)

    def has_ended(self, step: int) -> bool:
        """True if the size is held at the target from this step on."""
        return self.holds_target and step >= self.options.steps

    def bring_to_target(self) -> None:
        """Bring the size to the target immediately."""
        self._fit_to(self.target)

    def values(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain values."""
        buffers = {name: buffer.item() for name, buffer in self.state_dict().items()}
        is_active = None if self._final_mask is None else torch.cat(self._final_mask).tolist()
        return {"initial": self.initial, "target": self.target, "active": is_active, **buffers}

    def check_values(self, values: dict[str, Any], ranks: int) -> None:
        """Raise unless the values are the state of such a schedule with this number of ranks.

        Raises:
            UserError: if they are not.
        """
        missing = sorted({*self.values()} - {*values})
        if missing:
            raise UserError(f"the state has no '{missing[0]}'; it is of another schedule or version of RankAdapter")
        for name, value in values.items():
            if isinstance(value, list) and len(value) != ranks:
                raise UserError(f"the state has '{name}' of {len(value)} ranks, but its layers have {ranks}")

    @torch.no_grad()
    def load_values(self, values: dict[str, Any]) -> None:
        """Load the values, with the ranks already restored."""
        self.initial, self.target = values["initial"], values["target"]
        for name, buffer in self.state_dict().items():
            buffer.fill_(values[name])
        self._final_mask = None
        if values["active"] is not None:
            is_active = torch.tensor(values["active"], dtype=torch.bool, device=self._budget.device)
            self._final_mask = list(torch.split(is_active, [len(gate) for gate in self._budget.rank_gates]))
        self.is_held.fill_(self._final_mask is not None)

    def _update_ranks(self, step: int) -> None:
        """Change the ranks before the end."""

    def _size_on_path(self, step: int) -> float:
        """Return the size that decreases linearly from the initial size to the target."""
        options = self.options
        progress = min(1.0, max(0.0, (step - options.begin) / (options.steps - options.begin)))
        return self.initial + (self.target - self.initial) * progress

    @torch.no_grad()
    def _end(self) -> None:
        """Bring the size to the target once, then keep every rank active or pruned as it is."""
        if self._final_mask is None:
            self.bring_to_target()
            self._final_mask = self._active_mask()
            self.is_held.fill_(True)
        for gate, is_active in zip(self._budget.rank_gates, self._final_mask, strict=True):
            # Keep a distance from the threshold, which the next optimizer step could cross otherwise.
            value = torch.where(is_active, gate.clamp(min=2.0 * self.options.threshold), _PRUNED)
            gate.copy_(torch.where(gate.isnan(), gate, value))  # keep NaN visible

    def _active_mask(self) -> list[Tensor]:
        return [gate.detach() > self.options.threshold for gate in self._budget.rank_gates]

    def _fit_to(self, wanted: float) -> None:
        """Prune or activate ranks if the size is off by more than the tolerance."""
        if abs(self._budget.size() - wanted) > self.options.tolerance * wanted:
            self._budget.fit_to(wanted, self._rank_scores())

    def _rank_scores(self) -> Tensor | None:
        """Return the scores of all ranks, for pruning; None to use contributions to the weights."""
        return None

    def _relaxed(self) -> Tensor:
        """Return P^ / P_0."""
        return self._budget.relaxed_size() / self.initial

    def _norm(self) -> Tensor | float:
        """Return the beta term."""
        return self.options.beta * self._budget.core_norm_squared() if self.options.beta else 0.0


class ImportanceSchedule(Schedule):
    """Schedule that prunes the ranks of least importance per cost, along a size path that decreases to the target.

    Only the norm term is added to the loss. Ranks are pruned, or activated again, whenever the size is off the path by
    more than the tolerance. Before the first gradient, and without gradients, a rank's contribution to its weight
    replaces its importance.
    """

    def __init__(self, options: RankOptions, budget: RankBudget) -> None:
        super().__init__(options, budget)
        self._importance = Importance(options.memory)
        self._importance.set_gates(budget.rank_gates)

    @property
    def adds_to_loss(self) -> bool:
        return self.options.beta > 0.0

    @property
    def importance(self) -> Importance:
        return self._importance

    def objective(self, task_loss: Tensor, share: float) -> Tensor:
        return task_loss + share * self._norm()

    def count_step(self, step: int) -> None:
        self._importance.update()

    def refresh(self) -> None:
        super().refresh()
        self._importance.set_gates(self._budget.rank_gates)

    def values(self) -> dict[str, Any]:
        return {**super().values(), "importance": self._importance.values()}

    def load_values(self, values: dict[str, Any]) -> None:
        super().load_values(values)
        self._importance.load_values(values["importance"])

    def _update_ranks(self, step: int) -> None:
        self._fit_to(self._size_on_path(step))

    def _rank_scores(self) -> Tensor | None:
        importance = self._importance.scores(self._budget.gate_values())
        if importance is None:
            return None
        contributions = torch.cat(list(self._budget.contributions())).to(importance.dtype)
        # Without any importance the contributions decide alone.
        mean = importance.mean()
        return importance + torch.where(mean > 0.0, _TIE_BREAK * mean, 1.0) * contributions


class PaperSchedule(Schedule):
    """Schedule of the paper: `early_steps` steps with fixed price gamma, then achievement scalarization.

    The reference point of the scalarization is (L_0, P_target):

        w1 (L - L_0) >= w2 (P - P_target) / P_0:   w1 (L - L_0) + rho (L + P^ / P_0) + beta |G|^2
        else:                                      w2 (P^ - P_target) / P_0 + rho (L + P^ / P_0) + beta |G|^2

    The condition uses the true size and the mean loss of recent steps, so that a single batch does not decide. The
    final size is near the target, but not exactly, unless the size is held at it (`hold`).
    """

    mean_loss: Tensor
    weight: Tensor
    reference: Tensor
    late: Tensor
    recent_loss: Tensor
    recent_share: Tensor

    def __init__(self, options: RankOptions, budget: RankBudget) -> None:
        super().__init__(options, budget)
        for name in ("mean_loss", "weight", "reference", "recent_loss", "recent_share"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("late", torch.zeros((), dtype=torch.bool))
        self._is_late = False  # copy of `late` on the host

    @property
    def holds_target(self) -> bool:
        return self.options.hold

    @property
    def current_price(self) -> float:
        return self.options.gamma

    @property
    def _early_steps(self) -> int:
        return self.options.steps if self.options.early_steps is None else self.options.early_steps

    def objective(self, task_loss: Tensor, share: float) -> Tensor:
        options = self.options
        # Everything is computed with torch.where, so that a captured graph serves all stages.
        loss = task_loss.detach()
        is_finite = torch.isfinite(loss)
        # Micro-batches come with their shares; the sum of losses over the sum of shares is the mean loss.
        self.recent_loss += torch.where(is_finite, loss, 0.0)
        self.recent_share += torch.where(is_finite, share, 0.0)
        relaxed = self._relaxed()
        early = task_loss + share * options.gamma * relaxed  # L + gamma P^ / P_0
        target = self.target / self.initial
        # The running mean starts at 0; its weight corrects that bias.
        mean_loss = self.mean_loss / self.weight.clamp(min=1e-12)
        # Both sides of the condition in the class: w1 (L - L_0) and w2 (P - P_target) / P_0.
        by_loss = options.loss_weight * (mean_loss - self.reference)
        by_size = options.size_weight * (self._budget.active_size() / self.initial - target)
        # The late stage, see the class: the larger of both deviations from the reference point decides.
        regularization = options.rho * (task_loss + share * relaxed)
        late = regularization + torch.where(
            by_loss >= by_size,
            options.loss_weight * (task_loss - share * self.reference),
            options.size_weight * share * (relaxed - target),
        )
        objective = torch.where(self.is_held, task_loss, torch.where(self.late, late, early))
        return share * self._norm() + objective

    def observe_loss(self, task_loss: Tensor, share: float) -> None:
        if self._early_steps == 0 and not self._is_late:
            self._update_mean_loss(task_loss.detach() / share, 0)

    def count_step(self, step: int) -> None:
        # The mean over all passes since the last step, including those of skipped steps.
        self._update_mean_loss(self.recent_loss / self.recent_share, step)
        self.recent_loss.zero_()
        self.recent_share.zero_()

    def load_values(self, values: dict[str, Any]) -> None:
        super().load_values(values)
        self._is_late = bool(values["late"])

    def _update_mean_loss(self, loss: Tensor, step: int) -> None:
        """Update the mean loss of recent steps over all replicas; set the reference once the early steps are over.

        Losses that are not finite are left out.
        """
        # A copy, since the all-reduce writes in place.
        value = loss.to(self.mean_loss.device, torch.float32, copy=True)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # All replicas need the same reference and must enter the late stage together.
            torch.distributed.all_reduce(value)
            value /= torch.distributed.get_world_size()
        is_finite, memory = torch.isfinite(value), self.options.memory
        self.mean_loss.copy_(torch.where(is_finite, self.mean_loss * memory + value * (1.0 - memory), self.mean_loss))
        self.weight.copy_(torch.where(is_finite, self.weight * memory + (1.0 - memory), self.weight))
        if step >= self._early_steps and not self._is_late:
            given = self.options.loss_target
            if given is None and not self.weight:
                return  # no finite loss yet to use as reference
            self.reference.copy_(self.mean_loss / self.weight if given is None else torch.tensor(given))
            self._is_late = True
            self.late.fill_(True)


SCHEDULES: dict[str, type[Schedule]] = {
    "importance": ImportanceSchedule,
    "paper": PaperSchedule,
}
"""Schedules by their names in the options."""
