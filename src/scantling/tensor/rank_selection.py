"""Choice of ranks for a given size: the most valuable ranks, as near to the size as integer ranks allow."""

from __future__ import annotations

from bisect import bisect_left
from itertools import product

import torch
from torch import Tensor

from scantling.tensor.sizes import SizePolynomial

_MAX_EXCHANGES = 20
_MAX_SINGLE_MOVES = 60
"""With more single moves than this, pairs of moves are not tried, since one rank is then a small part of the size."""


def select_ranks(
    size: SizePolynomial, active: Tensor, bond_of: Tensor, value: Tensor, wanted: float, tolerance: float
) -> Tensor:
    """Change which ranks are active so that the size comes closest to the wanted one.

    The size is monotonic in the number of ranks. Bisection finds how many ranks to prune (or activate), those of least
    (or most) value first. While the size is off by more than the tolerance, the best single move follows: activate or
    prune one rank of a bond, or exchange it for one of another bond.

    Args:
        size: size as a function of the ranks of all bonds, which may be 0.
        live: mask of active ranks, bool, all bonds in a row.
        bond_of: bond index of each rank.
        value: value per cost of each rank.
        wanted: size to reach.
        tolerance: relative tolerance.

    Returns:
        New mask of active ranks; every bond that has an active rank keeps one.
    """
    num_bonds = size.num_bonds
    active = active.clone()

    def counts() -> Tensor:
        return torch.zeros(num_bonds, dtype=torch.float64).index_add(0, bond_of, active.double())

    start = counts()
    shuts = float(size(start)) > wanted
    if shuts:
        # The best rank of each bond stays; exactly one in case of ties.
        by_value = value.masked_fill(~active, -torch.inf).argsort(descending=True, stable=True)
        by_bond = by_value[bond_of[by_value].argsort(stable=True)]
        is_first = torch.ones_like(active)
        is_first[1:] = bond_of[by_bond][1:] != bond_of[by_bond][:-1]
        movable = active.clone()
        movable[by_bond[is_first]] = False
        order = value.masked_fill(~movable, torch.inf).argsort()[: int(movable.sum())]
    else:
        order = value.masked_fill(active, -torch.inf).argsort(descending=True)[: int((~active).sum())]
    change = -1.0 if shuts else 1.0

    def after(number: int) -> float:
        changes = torch.full((number,), change, dtype=torch.float64)
        return change * float(size(start.index_add(0, bond_of[order[:number]], changes)))

    number = bisect_left(range(len(order)), change * wanted, key=after)
    if number and abs(change * after(number - 1) - wanted) < abs(change * after(number) - wanted):
        number -= 1
    active[order[:number]] = not shuts
    for _ in range(_MAX_EXCHANGES):
        now = counts()
        if abs(float(size(now)) - wanted) <= tolerance * wanted or not _exchange(
            size, active, bond_of, value, now, wanted
        ):
            break
    return active


def _exchange(size: SizePolynomial, active: Tensor, bond_of: Tensor, value: Tensor, now: Tensor, wanted: float) -> bool:
    """Make the move of at most two ranks that brings the size nearest; return False if no move helps."""
    dead = torch.zeros_like(now).index_add(0, bond_of, (~active).double())
    singles = [(bond, 1) for bond in range(len(now)) if dead[bond] > 0]
    singles += [(bond, -1) for bond in range(len(now)) if now[bond] > 1]
    moves = [[single] for single in singles]
    if len(singles) <= _MAX_SINGLE_MOVES:
        moves += [[one, other] for one, other in product(singles, singles) if one[0] < other[0]]
    best, distance = None, abs(float(size(now)) - wanted)
    for move in moves:
        ranks = now.clone()
        for bond, change in move:
            ranks[bond] += change
        if abs(float(size(ranks)) - wanted) < distance:
            best, distance = move, abs(float(size(ranks)) - wanted)
    for bond, change in best or []:
        among = (bond_of == bond) & (~active if change > 0 else active)
        chosen = value.masked_fill(~among, -change * torch.inf)
        active[chosen.argmax() if change > 0 else chosen.argmin()] = change > 0
    return best is not None
