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
    def from_terms(cls, terms: Iterable[tuple[float, Sequence[int]]], num_bonds: int) -> SizePolynomial:
        """Return the polynomial of (constant, bonds) pairs."""
        listed = list(terms)
        bonds = [[*indices, *[num_bonds] * (3 - len(indices))] for _, indices in listed]
        coefficients = torch.tensor([float(constant) for constant, _ in listed], dtype=torch.float64)
        return cls(coefficients, torch.tensor(bonds, dtype=torch.int64).view(-1, 3), num_bonds)

    def to(self, device: torch.device) -> SizePolynomial:
        return SizePolynomial(self.coefficients.to(device), self.bonds.to(device), self.num_bonds)

    def __call__(self, ranks: Tensor) -> Tensor:
        """Return the size at these ranks, (bonds), as a 0-D tensor of their dtype."""
        padded = torch.cat([ranks, ranks.new_ones(1)])  # index `num_bonds` is the constant 1
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
        (size, [first_bond + bond for bond in (core - 1, core) if 0 <= bond < last]) for core, size in enumerate(sizes)
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
    terms: list[Term] = []
    for core, (left, right) in enumerate(pairwise(ranks)):
        # bytes = product * left * right + by_left * left + by_right * right + rest, through four points.
        half_left, half_right = max(1, left // 2), max(1, right // 2)
        at_full, at_half_left = core_bytes(core, left, right), core_bytes(core, half_left, right)
        at_half_right, at_half = core_bytes(core, left, half_right), core_bytes(core, half_left, half_right)
        # A rank of 1 has no smaller one: its differences are 0, and any span but 0 is right.
        span_left, span_right = left - half_left or 1, right - half_right or 1
        product = (at_full - at_half_left - at_half_right + at_half) / (span_left * span_right)
        by_left = (at_full - at_half_left) / span_left - product * right
        by_right = (at_full - at_half_right) / span_right - product * left
        rest = at_full - by_left * left - by_right * right - product * left * right
        bonds = [first_bond + bond if 0 <= bond < last else None for bond in (core - 1, core)]
        for constant, own in ((product, bonds), (by_left, bonds[:1]), (by_right, bonds[1:]), (rest, [])):
            terms.append((constant, [bond for bond in own if bond is not None]))
    return terms
