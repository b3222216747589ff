"""Selection of ranks for a given size: the most valuable ranks, as near to the size as integer ranks allow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from scantling.tensor.sizes import SizePolynomial

_MAX_ORDERS = 8
"""Contraction orders to try before bisecting on the requested FLOPs."""
_MAX_BISECTIONS = 20
"""Bisections of the requested FLOPs if trying orders does not reach the size."""
_MAX_EXCHANGES = 20
_MAX_SINGLE_MOVES = 60
"""With more single moves than this, pairs of moves are not tried, since one rank is then a small part of the size."""


def select_ranks(
    polynomial_at: Callable[[Tensor], SizePolynomial],
    active: Tensor,
    bond_of: Tensor,
    scores: Tensor,
    wanted: float,
    tolerance: float,
    *,
    num_bonds: int,
    is_fixed: bool,
) -> Tensor:
    """Prune the ranks with the lowest score per cost, or activate those with the highest, until the size is reached.

    The cost of a rank in FLOPs depends on the contraction order, whose best choice depends on the ranks in turn. So
    the selection is repeated with the order that is best at the selected ranks, as long as that helps. If the best
    order keeps changing on the way, bisection on the requested size follows, in the order of the start.

    Args:
        polynomial_at: function that returns the size polynomial near given ranks, (bonds).
        active: mask of active ranks, bool, all bonds in a row.
        bond_of: bond index of each rank.
        scores: score of each rank, at least 0.
        wanted: size to reach.
        tolerance: relative tolerance.
        num_bonds: number of bonds, including those without ranks.
        is_fixed: True if the polynomial is the same at all ranks.

    Returns:
        New mask of active ranks; every bond that has an active rank keeps one.
    """

    def size(mask: Tensor) -> float:
        ranks = _count(mask, bond_of, num_bonds)
        return float(polynomial_at(ranks)(ranks))

    def score_per_cost(mask: Tensor) -> tuple[SizePolynomial, Tensor]:
        """Return the size polynomial near the ranks of a mask, and the score per cost of each rank there."""
        # A bond of rank 0 would make the costs of its neighbors 0.
        ranks = _count(mask, bond_of, num_bonds).clamp(min=1.0)
        polynomial = polynomial_at(ranks)
        return polynomial, scores / polynomial.derivatives(ranks)[bond_of].clamp(min=1e-30)

    # Select with the current order, then with the order that is best at the selected ranks, and so on.
    best = trial = active
    best_error = abs(size(active) - wanted)
    for _ in range(_MAX_ORDERS):
        polynomial, value = score_per_cost(trial)
        trial = select_nearest(polynomial, trial, bond_of, value, wanted, tolerance)
        error = abs(size(trial) - wanted)
        if error >= best_error:
            break
        best, best_error = trial, error
        if error <= tolerance * wanted or is_fixed:
            break
    if is_fixed or best_error <= tolerance * wanted:
        return best
    # The best order changes on the way: bisect on the requested size, in the order of the start.
    polynomial, value = score_per_cost(active)
    at_least_one = _count(active, bond_of, num_bonds).clamp(min=1.0)
    low, high = 0.0, max(2.0 * wanted, float(polynomial(at_least_one)))
    for _ in range(_MAX_BISECTIONS):
        requested = 0.5 * (low + high)
        trial = select_nearest(polynomial, active, bond_of, value, requested, tolerance)
        difference = size(trial) - wanted
        if abs(difference) < best_error:
            best, best_error = trial, abs(difference)
        low, high = (requested, high) if difference < 0.0 else (low, requested)
    return best


def select_nearest(
    size: SizePolynomial, active: Tensor, bond_of: Tensor, value: Tensor, wanted: float, tolerance: float
) -> Tensor:
    """Change which ranks are active so that the size comes closest to the wanted one.

    The size is monotonic in the number of ranks. Bisection finds how many ranks to prune (or activate), those of least
    (or most) value first. While the size is off by more than the tolerance, the best single move follows: activate or
    prune one rank of a bond, or exchange it for one of another bond.

    Args:
        size: size as a function of the ranks of all bonds, which may be 0.
        active: mask of active ranks, bool, all bonds in a row.
        bond_of: bond index of each rank.
        value: value per cost of each rank.
        wanted: size to reach.
        tolerance: relative tolerance.

    Returns:
        New mask of active ranks; every bond that has an active rank keeps one.
    """
    active = active.clone()
    start = _count(active, bond_of, size.num_bonds)
    is_pruning = float(size(start)) > wanted
    if is_pruning:
        # The best rank of each bond stays; exactly one in case of ties.
        by_value = value.masked_fill(~active, -torch.inf).argsort(descending=True, stable=True)
        # The stable sort keeps the order by value within each bond.
        by_bond = by_value[bond_of[by_value].argsort(stable=True)]
        is_first = torch.ones_like(active)
        is_first[1:] = bond_of[by_bond][1:] != bond_of[by_bond][:-1]
        movable = active.clone()
        movable[by_bond[is_first]] = False
        order = value.masked_fill(~movable, torch.inf).argsort()[: int(movable.sum())]
    else:
        order = value.masked_fill(active, -torch.inf).argsort(descending=True)[: int((~active).sum())]
    change = -1.0 if is_pruning else 1.0

    def signed_size(count: int) -> float:
        """Return the size after changing the first `count` ranks in order, negated when pruning: increasing."""
        changes = torch.full((count,), change, dtype=torch.float64)
        return change * float(size(start.index_add(0, bond_of[order[:count]], changes)))

    # The fewest changes that pass the wanted size, or one less if that is nearer.
    count = bisect_left(range(len(order)), change * wanted, key=signed_size)
    if count and abs(change * signed_size(count - 1) - wanted) < abs(change * signed_size(count) - wanted):
        count -= 1
    active[order[:count]] = not is_pruning
    for _ in range(_MAX_EXCHANGES):
        ranks = _count(active, bond_of, size.num_bonds)
        is_near = abs(float(size(ranks)) - wanted) <= tolerance * wanted
        if is_near or not _exchange(size, active, bond_of, value, ranks, wanted):
            break
    return active


def _exchange(
    size: SizePolynomial, active: Tensor, bond_of: Tensor, value: Tensor, ranks: Tensor, wanted: float
) -> bool:
    """Make the move of at most two ranks that brings the size nearest; return False if no move helps."""
    pruned = _count(~active, bond_of, len(ranks))
    # Moves: (bond, +1 or -1), alone or in pairs of two bonds.
    singles = [(bond, 1) for bond in range(len(ranks)) if pruned[bond] > 0]
    singles += [(bond, -1) for bond in range(len(ranks)) if ranks[bond] > 1]
    moves = [[single] for single in singles]
    if len(singles) <= _MAX_SINGLE_MOVES:
        moves += [[one, other] for one, other in product(singles, singles) if one[0] < other[0]]
    best, best_error = None, abs(float(size(ranks)) - wanted)
    for move in moves:
        moved = ranks.clone()
        for bond, change in move:
            moved[bond] += change
        error = abs(float(size(moved)) - wanted)
        if error < best_error:
            best, best_error = move, error
    for bond, change in best or []:
        eligible = (bond_of == bond) & (~active if change > 0 else active)
        # Activate the most valuable rank that is pruned, or prune the least valuable one that is active.
        values = value.masked_fill(~eligible, -change * torch.inf)
        active[values.argmax() if change > 0 else values.argmin()] = change > 0
    return best is not None


def _count(mask: Tensor, bond_of: Tensor, num_bonds: int) -> Tensor:
    """Return the number of ranks in a mask for each bond: (bonds), float64."""
    return torch.zeros(num_bonds, dtype=torch.float64).index_add(0, bond_of, mask.double())
