"""What gradients make of a replica's residuals: they go in before an exchange, and what was said goes out after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from scantling.comm.codec import triton
from scantling.comm.codec.block_group import BlockGroup
from scantling.comm.collectives import Outcome, Sparse
from scantling.comm.config import Group
from scantling.comm.layout import all_block_groups, group_by_param, keeps_residuals, make_buckets
from scantling.comm.replica import Replica
from scantling.comm.transport.shards import all_finite, to_local

AVERAGED_AT_ONCE = 1 << 24
"""Numbers of the residuals that are averaged in one collective; a larger one goes alone."""


class Accumulator(Replica):
    """A replica whose residuals take in its gradients, and lose what has been sent of them."""

    def _accumulated(
        self, block_group: BlockGroup, gradients: Mapping[int, Tensor | None], *, valid: bool
    ) -> dict[int, Tensor]:
        """The residuals of a channel's members with their gradients in them, in fp32, by position."""
        found: dict[int, Tensor] = {}
        params, groups, kept = self._parameters(), group_by_param(self.param_groups), self.residuals
        for slot in block_group.slots:
            place = slot.param
            part, gradient = to_local(params[place]), gradients[place]
            group = groups[place]
            scale = float(group["lr"]) if group["compat"] == "paper" else 1.0
            if not keeps_residuals(block_group, self.config):
                found[place] = torch.zeros_like(part) if gradient is None else gradient
                continue
            residual = found[place] = kept.read(params[place], part)
            if not valid:
                continue
            if gradient is None:
                residual.mul_(block_group.spec.decay)
            elif scale == 1.0:
                torch.add(gradient, residual, alpha=block_group.spec.decay, out=residual)
            else:
                residual.mul_(block_group.spec.decay).add_(gradient, alpha=scale)
            self._keep(params[place], group, residual, seed_of(self.step, 0, place))
        return found

    def _selected_at_once(self, block_group: BlockGroup, gradients: Mapping[int, Tensor | None]) -> Sparse | None:
        """What `_accumulated` and a selection do, by one kernel; None where there is none that does."""
        params = self._parameters()
        places = [slot.param for slot in block_group.slots]
        if to_local(params[places[0]]).device.type not in triton.DEVICES or not keeps_residuals(
            block_group, self.config
        ):
            return None
        groups = group_by_param(self.param_groups)
        if any(groups[place]["compat"] == "paper" or groups[place]["residual"] != "fp32" for place in places):
            return None
        residuals = [self.residuals.read(params[place], to_local(params[place])) for place in places]
        given = [gradient for place in places if (gradient := gradients[place]) is not None]
        if len(given) < len(places) or not triton.can_select(block_group, residuals, given):
            return None
        found = triton.select(block_group, residuals, given)
        for place, residual in zip(places, residuals, strict=True):
            self._keep(params[place], groups[place], residual, 0)
        return found

    def _followed(self, block_group: BlockGroup, param: Tensor, group: Group, mean: Tensor, seed: int) -> Tensor:
        """What the mean of all gradients makes of a parameter's momentum, which is alike on all replicas.

        M <- decay M + mean, of which (1 - decay) M goes into the update: in the end each gradient goes in once, as it
        does where it is selected. What is no matrix gets the mean itself, and once what it was still owed.
        """
        decay, kept = block_group.spec.decay, self.residuals
        momentum = kept.read(param, mean)
        if not keeps_residuals(block_group, self.config):
            kept.drop(param)
            return momentum.add_(mean)
        torch.add(mean.float(), momentum, alpha=decay, out=momentum)
        self._keep(param, group, momentum, seed)
        return momentum * (1.0 - decay)

    def _forget(self, block_group: BlockGroup, outcome: Outcome, step: int) -> None:
        """Take out of the residuals what is in the mean, and into them what an owner owes."""
        if not keeps_residuals(block_group, self.config):
            return
        params, groups, kept = self._parameters(), group_by_param(self.param_groups), self.residuals
        changed: dict[int, Tensor] = {}

        def read(place: int) -> Tensor:
            if place not in changed:
                changed[place] = kept.read(params[place], to_local(params[place]))
            return changed[place]

        alpha = block_group.spec.alpha
        for part, share in ((outcome.applied, -alpha), (outcome.owner_error, alpha)):
            if part is not None:
                block_group.add_sparse(*part, share, to=read)
        for place, residual in changed.items():
            self._keep(params[place], groups[place], residual, seed_of(step, 1, place))

    def _average(self) -> None:
        """Give all replicas the mean of their residuals, some at a time. Collectives: all-reduces of up to 64 MiB."""
        held: list[tuple[int, Tensor]] = []
        for place, value in self._all_residuals():
            if held and sum(each.numel() for _, each in held) + value.numel() > AVERAGED_AT_ONCE:
                self._average_these(held)
                held = []
            held.append((place, value))
        self._average_these(held)

    def _all_residuals(self) -> Iterator[tuple[int, Tensor]]:
        """The residuals that replicas have, in one order: zeros where this one has none, or one that is not finite."""
        params, kept = self._parameters(), self.residuals
        for block_group in all_block_groups(make_buckets(self.param_groups, self.config)):
            for place in (slot.param for slot in block_group.slots if keeps_residuals(block_group, self.config)):
                value = kept.read(params[place], to_local(params[place]))
                yield place, value if all_finite([value]) else torch.zeros_like(value)

    def _average_these(self, held: Sequence[tuple[int, Tensor]]) -> None:
        if not held:
            return
        mean = self.replicas.all_reduce_mean(torch.cat([value.flatten() for _, value in held]))
        parts = torch.split(mean, [value.numel() for _, value in held])
        params, groups = self._parameters(), group_by_param(self.param_groups)
        for (place, value), part in zip(held, parts, strict=True):
            self._keep(params[place], groups[place], part.view_as(value).clone())


def seed_of(step: int, turn: int, place: int) -> int:
    """Of the noise of one rounding of one residual."""
    return ((2 * step + turn) << 24) + place


def filled_up(
    block_group: BlockGroup, gradients: Mapping[int, Tensor | None], params: Sequence[Tensor]
) -> dict[int, Tensor]:
    """The gradients of a channel's members by position, zeros where there is none."""
    found = {}
    for slot in block_group.slots:
        gradient = gradients[slot.param]
        found[slot.param] = torch.zeros_like(to_local(params[slot.param])) if gradient is None else gradient
    return found


def zeros_of(block_group: BlockGroup, params: Sequence[Tensor]) -> Tensor:
    """The blocks of a channel whose members have no gradient."""
    like = to_local(params[block_group.slots[0].param])
    return torch.zeros(block_group.count, block_group.spec.codec.size, dtype=torch.float32, device=like.device)
