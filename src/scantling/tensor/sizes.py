"""Size of TT layers as a function of the ranks on their bonds, which a rank adapter reduces.

Every size is a sum of constants times products of at most three ranks:

    parameters       r_{t-1} S_t r_t for each core
    bytes            of weight, gradient and optimizer state: linear in each of the two ranks of a core
    multiplications  of each step and each merge of the contraction order, per token

With the l0 norms of the rank gates as ranks it is the true size. With their l1 norms it is its relaxation, which has a
gradient (CoMERA, arXiv 2405.14377, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from scantling.tensor.contraction import Network, best_plan, rank_factors

Term: TypeAlias = tuple[float, list[int]]
"""A constant, and the bonds whose ranks multiply it."""


@dataclass(frozen=True)
class SizePolynomial:
    """Sum of constants times the ranks of up to three bonds.

    Attributes:
        coefficients: (terms), float64.
        bonds: (terms, 3) indices into the vector of ranks; index `num_bonds` stands for the constant 1.
        num_bonds: number of bonds.
    """

    coefficients: Tensor
    bonds: Tensor
    num_bonds: int

    @classmethod
    def of(cls, terms: Iterable[tuple[float, Sequence[int]]], num_bonds: int) -> SizePolynomial:
        """Return the polynomial of (constant, bonds) pairs."""
        listed = list(terms)
        bonds = [[*places, *[num_bonds] * (3 - len(places))] for _, places in listed]
        coefficients = torch.tensor([float(constant) for constant, _ in listed], dtype=torch.float64)
        return cls(coefficients, torch.tensor(bonds, dtype=torch.int64).view(-1, 3), num_bonds)

    def to(self, device: torch.device) -> SizePolynomial:
        return SizePolynomial(self.coefficients.to(device), self.bonds.to(device), self.num_bonds)

    def __call__(self, ranks: Tensor) -> Tensor:
        """Return the size at these ranks, (bonds), as a 0-D tensor of their dtype."""
        padded = torch.cat([ranks, ranks.new_ones(1)])
        # Not prod: its gradient synchronizes to look for zeros, which graph capture does not allow.
        one, two, three = padded[self.bonds].unbind(1)
        return (one * two * three * self.coefficients.to(ranks.dtype)).sum()

    def derivatives(self, ranks: Tensor) -> Tensor:
        """Return the size that one more rank adds, for each bond: (bonds), float64."""
        point = ranks.to(torch.float64).requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self(point), point)[0]


def parameter_terms(sizes: Sequence[int], first_bond: int) -> list[Term]:
    """Return the terms of the number of parameters in a chain of cores.

    Args:
        sizes: elements of each core without its bonds.
        first_bond: index of the chain's first inner bond among all bonds.
    """
    last = len(sizes) - 1
    return [
        (size, [first_bond + bond for bond in (place - 1, place) if 0 <= bond < last])
        for place, size in enumerate(sizes)
    ]


def byte_terms(ranks: Sequence[int], core_bytes: Callable[[int, int, int], float], first_bond: int) -> list[Term]:
    """Return the terms of the training bytes of a chain, linear in each of the two ranks of every core.

    Factored optimizer statistics, proportional to rows and columns, are linear in the ranks as well, in addition to
    full state per parameter. The terms are exact at the current ranks and at half of them. In between, they are as
    accurate as blocks of quantized state allow.

    Args:
        ranks: ranks of all bonds, including the outer ones; none is 0.
        core_bytes: function of a core's index and its left and right ranks.
        first_bond: index of the chain's first inner bond among all bonds.
    """
    last = len(ranks) - 2
    found: list[Term] = []
    for place, (left, right) in enumerate(pairwise(ranks)):
        lows = [max(1, rank // 2) for rank in (left, right)]
        both, low_left, low_right, low = (
            core_bytes(place, *pair) for pair in ((left, right), (lows[0], right), (left, lows[1]), lows)
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
    """Return the terms of the FLOPs per token, forward and backward, in the best order at these ranks.

    Args:
        network: modes and ranks.
        num_tokens: tokens per step; the cost of merging is divided by it.
        first_bond: index of the chain's first inner bond among all bonds.
    """
    last = len(network.sizes)
    plan = best_plan(network, num_tokens)
    return [
        (6.0 * macs / num_tokens, [first_bond + bond - 1 for bond in bonds if 0 < bond < last])
        for macs, bonds in rank_factors(network, plan)
    ]
