"""How large layers of cores are, as a function of the ranks on their bonds: what a rank adapter brings down.

Every size is a sum of products of at most three ranks with a constant:

    numbers        r_{t-1} S_t r_t, a core
    multiplications  those of each step and each merge of the order of contraction, a token

With the l0 norm of the controls for the ranks it is the true size, with their l1 norm its relaxation, which has a
gradient (CoMERA, arXiv 2405.14377, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scantling.tensor.contraction import Network, best_plan, factors_of


@dataclass(frozen=True)
class SizePolynomial:
    """A sum of constants times the ranks of up to three bonds.

    Attributes:
        coefficients: (terms), float64.
        bonds: (terms, 3) places in the vector of ranks; its last entry, one past the bonds, stands for 1.
    """

    coefficients: Tensor
    bonds: Tensor

    @classmethod
    def of(cls, terms: Iterable[tuple[float, Sequence[int]]], num_bonds: int) -> SizePolynomial:
        """From (constant, bonds) pairs."""
        listed = list(terms)
        bonds = [[*places, *[num_bonds] * (3 - len(places))] for _, places in listed]
        coefficients = torch.tensor([float(constant) for constant, _ in listed], dtype=torch.float64)
        return cls(coefficients, torch.tensor(bonds, dtype=torch.int64).view(-1, 3))

    def to(self, device: torch.device) -> SizePolynomial:
        return SizePolynomial(self.coefficients.to(device), self.bonds.to(device))

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


def number_terms(sizes: Sequence[int], first_bond: int) -> list[tuple[float, list[int]]]:
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


def flop_terms(network: Network, num_tokens: int, first_bond: int) -> list[tuple[float, list[int]]]:
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
