"""In which order tokens are contracted with a chain of cores: the cheapest, for this many tokens.

y = x W, with W a chain of cores whose first ones hold the modes of the input and whose last ones those of the output. x
is contracted with blocks of neighbouring cores, each block merged beforehand. The two extremes are known: x through
core after core (best for few tokens) and W built whole (never good, but for one); in between lies y = (x A) B, A and B
the merged cores of input and output (best for many tokens; CoMERA, arXiv 2405.14377). What is best depends on tokens,
modes and ranks, so it is searched for.

x absorbs blocks from the first core to the last, and each block is merged by itself, so that two dynamic programs find
the best order:

    C[i, j] = min over k of  C[i, k] + C[k+1, j] + r_{i-1} S_i..S_k r_k S_{k+1}..S_j r_j          merge cores i..j
    F[j]    = min over i of  F[i-1] + C[i, j] + what it costs to absorb cores i..j                x with cores 1..j

in multiplications, O(n^3) for n cores, n <= 10; cached by shapes, ranks and tokens. To begin at another core never
helps where all bonds are 2 and more, and hardly where some are 1.

Every step is one matrix product: the block is a matrix of K x Q, the state of x seen as P x K x S with S what is
contiguous behind, and the result P x Q x S. A backward pass costs twice the forward in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeAlias

from torch import Tensor

Tree: TypeAlias = "int | tuple[Tree, Tree]"


@dataclass(frozen=True, slots=True)
class Chain:
    """The sizes of a chain of cores between an input and an output.

    Attributes:
        modes: of all cores.
        ranks: of all bonds, the outer ones included.
        num_inputs: how many of the first cores belong to the input.
    """

    modes: tuple[int, ...]
    ranks: tuple[int, ...]
    num_inputs: int

    def inputs(self, first: int, last: int) -> int:
        """Product of the input modes among cores first..last; 1 for none."""
        return prod(self.modes[first : min(last + 1, self.num_inputs)])

    def outputs(self, first: int, last: int) -> int:
        """Product of the output modes among cores first..last; 1 for none."""
        return prod(self.modes[max(first, self.num_inputs) : last + 1])


@dataclass(frozen=True, slots=True)
class Step:
    """Absorb one merged block of cores: (b P, K, S) with a matrix of K x Q gives (b P, Q, S), for b tokens.

    Attributes:
        tree: how the block is merged: the number of a core, or a pair of trees.
        before: P.
        inner: K.
        behind: S.
        width: Q.
    """

    tree: Tree
    before: int
    inner: int
    behind: int
    width: int

    @property
    def macs(self) -> int:
        """Multiplications for each token."""
        return self.before * self.inner * self.behind * self.width


@dataclass(frozen=True, slots=True)
class Plan:
    """An order of contraction, and what it costs.

    Attributes:
        steps: in order.
        num_tokens: what the plan was made for.
        merge_macs: multiplications that merge the blocks; they do not depend on tokens and need be done once a step.
        token_macs: multiplications with tokens in them.
        dense_macs: those of a dense layer.
    """

    steps: tuple[Step, ...]
    num_tokens: int
    merge_macs: int
    token_macs: int
    dense_macs: int

    @property
    def macs(self) -> int:
        return self.merge_macs + self.token_macs

    def __str__(self) -> str:
        """The order in words, and its cost beside that of a dense layer."""
        blocks = ", then ".join(_spelled(step.tree) for step in self.steps)
        return (
            f"{self.num_tokens} tokens with cores {blocks}\n"
            f"  dense   {self.dense_macs / 1e6:12.3f} M multiplications\n"
            f"  chosen  {self.macs / 1e6:12.3f} M, {self.dense_macs / max(1, self.macs):.2f} times fewer; "
            f"{self.merge_macs / 1e6:.3f} M of them merge cores"
        )


@lru_cache(maxsize=65536)
def best_plan(chain: Chain, num_tokens: int, merges: float = 1.0) -> Plan:
    """The order with the fewest multiplications.

    Args:
        chain: modes and ranks.
        num_tokens: rows of x.
        merges: how often merging counts: less than 1 where a merged block serves several passes, 0 where it is there
            already.
    """
    found: list[tuple[float, tuple[Step, ...]]] = [(0.0, ())]
    for last in range(len(chain.modes)):
        ways = []
        for first in range(last + 1):
            cost, steps = found[first]
            step = _absorb(chain, first, last)
            cost += num_tokens * step.macs + merges * _merging(chain, first, last)[0]
            ways.append((cost, (*steps, step)))
        found.append(min(ways, key=lambda way: (way[0], len(way[1]))))
    return plan_of(chain, num_tokens, found[-1][1])


MOST_TOKENS = 1 << 22
"""Beyond these the order does not change any more."""


@lru_cache(maxsize=4096)
def orders(chain: Chain) -> tuple[tuple[int, tuple[Step, ...]], ...]:
    """The best order for every number of tokens: (up to how many tokens, steps), ascending.

    The cost of an order is a line over the tokens, that of the best one the lower envelope of all: it has few corners,
    found by halving wherever both ends differ.
    """
    found: list[tuple[int, tuple[Step, ...]]] = []

    def between(low: int, high: int) -> None:
        first, last = best_plan(chain, low).steps, best_plan(chain, high).steps
        if first == last or high - low <= 1:
            found.append((low if first != last else high, first))
            return
        middle = (low + high) // 2
        between(low, middle)
        between(middle, high)

    between(1, MOST_TOKENS)
    found.append((MOST_TOKENS, best_plan(chain, MOST_TOKENS).steps))
    return tuple(
        (limit, steps)
        for (limit, steps), following in zip(found, [*found[1:], (0, None)], strict=True)
        if steps != following[1]
    )


def plan_of(chain: Chain, num_tokens: int, steps: Sequence[Step]) -> Plan:
    """A plan with its costs."""
    blocks = [cores_of(step.tree) for step in steps]
    return Plan(
        tuple(steps),
        num_tokens,
        sum(_merging(chain, block[0], block[-1])[0] for block in blocks),
        num_tokens * sum(step.macs for step in steps),
        num_tokens * chain.inputs(0, len(chain.modes)) * chain.outputs(0, len(chain.modes)),
    )


def in_blocks(chain: Chain, cuts: Sequence[int]) -> tuple[Step, ...]:
    """The steps that absorb blocks from the left to the right.

    Args:
        chain: modes and ranks.
        cuts: numbers of the cores, after the first, at which a block begins.
    """
    firsts = [0, *cuts]
    lasts = [*(cut - 1 for cut in cuts), len(chain.modes) - 1]
    return tuple(_absorb(chain, first, last) for first, last in zip(firsts, lasts, strict=True))


def cores_of(tree: Tree) -> list[int]:
    """The numbers of the cores of a block, in order."""
    return [tree] if isinstance(tree, int) else cores_of(tree[0]) + cores_of(tree[1])


@lru_cache(maxsize=65536)
def _merging(chain: Chain, first: int, last: int) -> tuple[int, Tree]:
    """Fewest multiplications that merge cores first..last, and their order."""
    if first == last:
        return 0, first
    ways = []
    for cut in range(first, last):
        (left, left_tree), (right, right_tree) = _merging(chain, first, cut), _merging(chain, cut + 1, last)
        outer = chain.ranks[first] * prod(chain.modes[first : last + 1]) * chain.ranks[last + 1]
        ways.append((left + right + outer * chain.ranks[cut + 1], cut, (left_tree, right_tree)))
    cost, _, tree = min(ways)
    return cost, tree


def _absorb(chain: Chain, first: int, last: int) -> Step:
    """Cores first..last, after those before them: the state is (outputs, rank, inputs that are left)."""
    return Step(
        _merging(chain, first, last)[1],
        before=chain.outputs(0, first - 1),
        inner=chain.ranks[first] * chain.inputs(first, last),
        behind=chain.inputs(last + 1, len(chain.modes)),
        width=chain.outputs(first, last) * chain.ranks[last + 1],
    )


def merged(cores: Sequence[Tensor], tree: Tree) -> Tensor:
    """A block of cores as one: (r, modes, r')."""
    if isinstance(tree, int):
        return cores[tree]
    left, right = merged(cores, tree[0]), merged(cores, tree[1])
    product = left.reshape(-1, left.shape[-1]) @ right.reshape(right.shape[0], -1)
    return product.view(left.shape[0], -1, right.shape[-1])


def matrix_of(cores: Sequence[Tensor], step: Step) -> Tensor:
    """The block of a step as its matrix: (K, Q)."""
    return merged(cores, step.tree).reshape(step.inner, step.width)


def contract(x: Tensor, matrices: Sequence[Tensor], steps: Sequence[Step], out_size: int) -> Tensor:
    """x with the blocks, in order.

    Args:
        x: (tokens, in_size).
        matrices: of the steps, from `matrix_of`.
        steps: of the plan.
        out_size: product of the modes of the output.

    Returns:
        (tokens, out_size).
    """
    num_tokens = x.shape[0]
    for step, matrix in zip(steps, matrices, strict=True):
        if step.behind == 1:
            x = x.reshape(-1, step.inner) @ matrix
        else:
            x = matrix.t() @ x.reshape(-1, step.inner, step.behind)
    return x.reshape(num_tokens, out_size)


def _spelled(tree: Tree) -> str:
    return str(tree + 1) if isinstance(tree, int) else f"({_spelled(tree[0])} {_spelled(tree[1])})"
