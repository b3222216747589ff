"""Ranks of the layers of a model from the singular values of their weights: by error per layer, or by total size.

A layer of rank r has r * `rank_numel` parameters and `num_gains` gains; as a dense layer it has `dense_numel`, and no
error. The ranks for a total size minimize the squared error of the model's output, predicted as the sum over all layers
of their squared relative errors times their effects (`calibration.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.tensor.whitened_svd import WhitenedWeight

Point: TypeAlias = tuple[int, float, int | None]
"""Parameters, squared relative error, and rank of one choice for a layer; rank None: the dense layer."""


@dataclass(frozen=True)
class Spectrum:
    """Errors and sizes of the possible ranks of one layer.

    Attributes:
        squared_errors: squared relative error of the layer's output for each rank from 0 on, decreasing.
        rank_numel: parameters per rank.
        dense_numel: parameters of the dense weight.
        effect: squared error of the model's output per squared relative error of the layer's output.
        num_gains: parameters of any rank.
    """

    squared_errors: Tensor
    rank_numel: int
    dense_numel: int
    effect: float = 1.0
    num_gains: int = 0

    @classmethod
    def from_weights(cls, weights: Mapping[str, Sequence[WhitenedWeight]], effect: float = 1.0) -> Spectrum:
        """Return the spectrum of one layer; all experts of a layer have one rank, and the larger projection error."""
        projections = []
        for experts in weights.values():
            total = torch.stack([expert.squared_errors() for expert in experts]).sum(0)
            projections.append(total / total[0].clamp(min=torch.finfo(total.dtype).tiny))  # 0 for a zero weight
        errors = nn.utils.rnn.pad_sequence(projections).amax(dim=1)
        matrices = [expert.matrix for experts in weights.values() for expert in experts]
        rank_numel, dense_numel = sum(sum(each.shape) for each in matrices), sum(each.numel() for each in matrices)
        return cls(errors, rank_numel, dense_numel, effect, num_gains=len(matrices))

    def points(self) -> list[Point]:
        """Return the choices that are not larger than the dense layer, by size; the last is the dense layer."""
        errors = self.squared_errors.tolist()
        # The largest rank with fewer parameters than the dense weight.
        largest = min(len(errors) - 1, (self.dense_numel - self.num_gains - 1) // self.rank_numel)
        points = [(rank * self.rank_numel + self.num_gains, errors[rank], rank) for rank in range(1, largest + 1)]
        return [*points, (self.dense_numel, 0.0, None)]


def ranks_by_error(spectra: Sequence[Spectrum], error: float) -> list[int | None]:
    """Return the lowest rank of each layer with at most this relative error; None to leave the layer dense."""
    return [next(rank for _, squared, rank in spectrum.points() if squared <= error**2) for spectrum in spectra]


def ranks_by_size(spectra: Sequence[Spectrum], size: float) -> list[int | None]:
    """Return the ranks with the smallest sum of squared errors of the model whose total size is at most `size`.

    Only the lower convex hull of a layer's errors over its sizes matters: steps along all hulls are taken in the order
    of the error they save per parameter. The rest of the size, less than one step, goes to single ranks.

    Returns:
        A rank for each layer; None to leave it dense.

    Raises:
        UserError: if rank 1 in every layer is larger than `size`.
    """
    points = [[(size, each.effect * error, rank) for size, error, rank in each.points()] for each in spectra]
    chosen = [0] * len(points)
    left = size - sum(own[0][0] for own in points)
    if left < 0:
        raise UserError(
            f"given a size target of {size:,.0f} parameters; it must be at least {size - left:,.0f}, which rank 1 in "
            "each layer has"
        )

    steps = []
    for layer, own in enumerate(points):
        hull = _lower_hull(own)
        for before, after in zip(hull, hull[1:], strict=False):
            steps.append((_gain(own, before, after), layer, after))
    # Within a layer the gains fall, so that its steps come in order.
    full: set[int] = set()
    for _, layer, after in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        cost = points[layer][after][0] - points[layer][chosen[layer]][0]
        if layer in full or cost > left:
            full.add(layer)
            continue
        chosen[layer], left = after, left - cost
    while True:
        moves = [
            (_gain(own, chosen[layer], chosen[layer] + 1), layer)
            for layer, own in enumerate(points)
            if chosen[layer] + 1 < len(own) and own[chosen[layer] + 1][0] - own[chosen[layer]][0] <= left
        ]
        if not moves:
            return [own[choice][2] for own, choice in zip(points, chosen, strict=True)]
        _, layer = max(moves)
        left -= points[layer][chosen[layer] + 1][0] - points[layer][chosen[layer]][0]
        chosen[layer] += 1


def _gain(points: Sequence[Point], before: int, after: int) -> float:
    """Return the squared error that a step saves per parameter."""
    return (points[before][1] - points[after][1]) / (points[after][0] - points[before][0])


def _lower_hull(points: Sequence[Point]) -> list[int]:
    """Return the indices of the points on the lower convex hull, which are sorted by size."""
    hull: list[int] = []
    for index in range(len(points)):
        while len(hull) > 1 and _gain(points, hull[-2], hull[-1]) <= _gain(points, hull[-1], index):
            hull.pop()
        hull.append(index)
    return hull
