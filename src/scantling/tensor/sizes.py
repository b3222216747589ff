"""How large layers of cores are, as a function of the ranks on their bonds: what a rank adapter brings down.

Every size is a sum of products of at most three ranks with a constant:

    numbers        r_{t-1} S_t r_t, a core
    bytes          of weight, gradient and optimizer state, linear in the ranks beside each core
    multiplications  those of each step and each merge of the order of contraction, a token

With the l0 norm of the controls for the ranks it is the true size, with their l1 norm its relaxation, which has a
gradient (CoMERA, arXiv 2405.14377, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from scantling.tensor.contraction import Network, best_plan, factors_of

Term: TypeAlias = tuple[float, list[int]]
"""A constant, and the bonds whose ranks multiply it."""


@dataclass(frozen=True)
class SizePolynomial:
    """A sum of constants times the ranks of up to three bonds.

    Attributes:
        coefficients: (terms), float64.
        bonds: (terms, 3) places in the vector of ranks; its last entry, one past the bonds, stands for 1.
        num_bonds: how many there are.
    """

    coefficients: Tensor
    bonds: Tensor
    num_bonds: int

    @classmethod
    def of(cls, terms: Iterable[tuple[float, Sequence[int]]], num_bonds: int) -> SizePolynomial:
        """From (constant, bonds) pairs."""
        listed = list(terms)
        bonds = [[*places, *[num_bonds] * (3 - len(places))] for _, places in listed]
        coefficients = torch.tensor([float(constant) for constant, _ in listed], dtype=torch.float64)
        return cls(coefficients, torch.tensor(bonds, dtype=torch.int64).view(-1, 3), num_bonds)

    def to(self, device: torch.device) -> SizePolynomial:
        return SizePolynomial(self.coefficients.to(device), self.bonds.to(device), self.num_bonds)

    def __call__(self, ranks: Tensor) -> Tensor:
        """The size at these ranks, (bonds), as a 0-D tensor of their dtype."""
        padded = torch.cat([ranks, ranks.new_ones(1)])
        # not prod, whose gradient asks the device whether there are zeros, which cannot be captured in a graph
        one, two, three = padded[self.bonds].unbind(1)
        return (one * two * three * self.coefficients.to(ranks.dtype)).sum()

    def slopes(self, ranks: Tensor) -> Tensor:
        """What one rank more adds to the size, for each bond: (bonds), float64."""
        point = ranks.to(torch.float64).requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self(point), point)[0]


def number_terms(sizes: Sequence[int], first_bond: int) -> list[Term]:
    """Terms of the numbers in a chain of cores.

    Args:
        sizes: elements of each core beside its bonds.
        first_bond: place of the chain's first inner bond among all bonds.
    """
    last = len(sizes) - 1
    return [
        (size, [first_bond + bond for bond in (place - 1, place) if 0 <= bond < last])
        for place, size in enumerate(sizes)
    ]


def byte_terms(ranks: Sequence[int], bytes_of: Callable[[int, int, int], float], first_bond: int) -> list[Term]:
    """Terms of the bytes that training keeps for a chain: of each core linear in the rank on either side.

    So are factored statistics, which are as many as rows and columns, beside what is kept for every number. The terms
    are exact at the ranks there are and at their halves, and as near in between as blocks of quantized state allow.

    Args:
        ranks: of all bonds, the outer ones included; none is 0.
        bytes_of: of a place in the chain and the ranks on its left and right.
        first_bond: place of the chain's first inner bond among all bonds.
    """
    last = len(ranks) - 2
    found: list[Term] = []
    for place, (left, right) in enumerate(pairwise(ranks)):
        lows = [max(1, rank // 2) for rank in (left, right)]
        both, low_left, low_right, low = (
            bytes_of(place, *pair) for pair in ((left, right), (lows[0], right), (left, lows[1]), lows)
        )
        spans = [rank - least or 1 for rank, least in zip((left, right), lows, strict=True)]
        product = (both - low_left - low_right + low) / (spans[0] * spans[1])
        by_left = (both - low_left) / spans[0] - product * right
        by_right = (both - low_right) / spans[1] - product * left
        rest = both - by_left * left - by_right * right - product * left * right
        bonds = [first_bond + bond if 0 <= bond < last else None for bond in (place - 1, place)]
        for constant, own in ((product, bonds), (by_left, bonds[:1]), (by_right, bonds[1:]), (rest, [])):
            found.append((constant, [bond for bond in own if bond is not None]))
    return found


def flop_terms(network: Network, num_tokens: int, first_bond: int) -> list[Term]:
    """Terms of the floating-point operations a token, forward and backward, in the order that is best at these ranks.

    Args:
        network: modes and ranks.
        num_tokens: of a step; what merges cores is divided by them.
        first_bond: place of the chain's first inner bond among all bonds.
    """
    last = len(network.sizes)
    plan = best_plan(network, num_tokens)
    return [
        (6.0 * macs / num_tokens, [first_bond + bond - 1 for bond in bonds if 0 < bond < last])
        for macs, bonds in factors_of(network, plan)
    ]
