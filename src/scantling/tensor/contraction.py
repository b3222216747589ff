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

import torch
from torch import Tensor

Tree: TypeAlias = "int | tuple[Tree, Tree]"


@dataclass(frozen=True, slots=True)
class Chain:
    """x (tokens, inputs) with a chain of cores, the first of which belong to the input and the rest to the output.

    Attributes:
        modes: of all cores.
        ranks: of all bonds, the outer ones included.
        num_inputs: how many of the cores belong to the input.
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

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each core beside its bonds."""
        return self.modes

    def absorb(self, first: int, last: int) -> tuple[int, int, int, int]:
        """P, K, S, Q of the step that absorbs cores first..last: the state is (outputs, rank, inputs that are left)."""
        before, behind = self.outputs(0, first - 1), self.inputs(last + 1, len(self.modes))
        inner = self.ranks[first] * self.inputs(first, last)
        return before, inner, behind, self.outputs(first, last) * self.ranks[last + 1]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of a table of cores with a row mode and a column mode each: the state is (columns, rank) for each id.

    Attributes:
        row_modes, col_modes: of all cores.
        ranks: of all bonds, the outer ones included.
    """

    row_modes: tuple[int, ...]
    col_modes: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(rows * cols for rows, cols in zip(self.row_modes, self.col_modes, strict=True))

    def absorb(self, first: int, last: int) -> tuple[int, int, int, int]:
        columns, right = prod(self.col_modes[first : last + 1]), self.ranks[last + 1]
        return prod(self.col_modes[:first]), self.ranks[first], 1, columns * right


@dataclass(frozen=True, slots=True)
class Head:
    """h (tokens, columns) with a table, for its products with all rows: the state is (rows, rank, columns left).

    Attributes:
        table: of the rows.
    """

    table: Lookup

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.table.ranks

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.table.sizes

    def absorb(self, first: int, last: int) -> tuple[int, int, int, int]:
        rows, cols, ranks = self.table.row_modes, self.table.col_modes, self.table.ranks
        inner = ranks[first] * prod(cols[first : last + 1])
        return prod(rows[:first]), inner, prod(cols[last + 1 :]), prod(rows[first : last + 1]) * ranks[last + 1]


Network: TypeAlias = Chain | Lookup | Head
"""What tokens are contracted with: cores in a row, and what each step of it costs."""


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
        naive_macs: those of tokens with core after core, nothing merged.
        dense_macs: those of a dense layer.
    """

    steps: tuple[Step, ...]
    num_tokens: int
    merge_macs: int
    token_macs: int
    naive_macs: int
    dense_macs: int

    @property
    def macs(self) -> int:
        return self.merge_macs + self.token_macs

    def __str__(self) -> str:
        """The order in words, and its cost beside that of the naive one and of a dense layer."""
        blocks = ", then ".join(_spelled(step.tree) for step in self.steps)
        lines = [
            f"{self.num_tokens} tokens with cores {blocks}",
            f"  chosen  {self.macs / 1e6:12.3f} M multiplications, {self.merge_macs / 1e6:.3f} M of them merge cores",
        ]
        others = {"naive": self.naive_macs, "dense": self.dense_macs}
        for name, macs in others.items():
            if macs:
                lines.append(f"  {name:7} {macs / 1e6:12.3f} M, {macs / max(1, self.macs):.2f} times as many")
        return "\n".join(lines)


@lru_cache(maxsize=65536)
def best_plan(chain: Network, num_tokens: int, merges: float = 1.0) -> Plan:
    """The order with the fewest multiplications.

    Args:
        chain: modes and ranks.
        num_tokens: rows of x.
        merges: how often merging counts: less than 1 where a merged block serves several passes, 0 where it is there
            already.
    """
    found: list[tuple[float, tuple[Step, ...]]] = [(0.0, ())]
    for last in range(len(chain.sizes)):
        ways = []
        for first in range(last + 1):
            cost, steps = found[first]
            step = _absorb(chain, first, last)
            cost += num_tokens * step.macs + merges * _merging(chain, first, last)[0]
            ways.append((cost, (*steps, step)))
        found.append(min(ways, key=lambda way: (way[0], len(way[1]))))
    return plan_of(chain, num_tokens, found[-1][1])


Orders: TypeAlias = tuple[tuple[int, tuple[Step, ...]], ...]
MOST_TOKENS = 1 << 22
"""Beyond these the order does not change any more."""


@lru_cache(maxsize=4096)
def orders(chain: Network, merges: float = 1.0) -> Orders:
    """The best order for every number of tokens: (up to how many tokens, steps), ascending.

    The cost of an order is a line over the tokens, that of the best one the lower envelope of all: it has few corners,
    found by halving wherever both ends differ.

    Args:
        chain: modes and ranks.
        merges: as of `best_plan`.
    """
    found: list[tuple[int, tuple[Step, ...]]] = []

    def between(low: int, high: int) -> None:
        first, last = best_plan(chain, low, merges).steps, best_plan(chain, high, merges).steps
        if first == last or high - low <= 1:
            found.append((low if first != last else high, first))
            return
        middle = (low + high) // 2
        between(low, middle)
        between(middle, high)

    between(1, MOST_TOKENS)
    found.append((MOST_TOKENS, best_plan(chain, MOST_TOKENS, merges).steps))
    return tuple(
        (limit, steps)
        for (limit, steps), following in zip(found, [*found[1:], (0, None)], strict=True)
        if steps != following[1]
    )


def plan_of(chain: Network, num_tokens: int, steps: Sequence[Step]) -> Plan:
    """A plan with its costs."""
    blocks = [cores_of(step.tree) for step in steps]
    return Plan(
        tuple(steps),
        num_tokens,
        sum(_merging(chain, block[0], block[-1])[0] for block in blocks),
        num_tokens * sum(step.macs for step in steps),
        num_tokens * sum(step.macs for step in in_blocks(chain, range(1, len(chain.sizes)))),
        num_tokens * _dense_macs(chain),
    )


def factors_of(chain: Network, plan: Plan) -> list[tuple[float, tuple[int, ...]]]:
    """The multiplications of a plan as products: (what does not depend on ranks, the bonds whose ranks multiply it)."""
    found: list[tuple[float, tuple[int, ...]]] = []
    ranks = chain.ranks

    def merging(tree: Tree) -> None:
        if isinstance(tree, int):
            return
        first, cut, last = cores_of(tree)[0], cores_of(tree[1])[0], cores_of(tree)[-1]
        found.append((prod(chain.sizes[first : last + 1]), (first, cut, last + 1)))
        for part in tree:
            merging(part)

    for step in plan.steps:
        block = cores_of(step.tree)
        bonds = block[0], block[-1] + 1
        found.append((plan.num_tokens * step.macs / max(1, ranks[bonds[0]] * ranks[bonds[1]]), bonds))
        merging(step.tree)
    return found


def _dense_macs(chain: Network) -> int:
    """Multiplications for each token with the whole matrix; a lookup takes none."""
    return 0 if isinstance(chain, Lookup) else prod(chain.sizes)


def in_blocks(chain: Network, cuts: Sequence[int]) -> tuple[Step, ...]:
    """The steps that absorb blocks from the left to the right.

    Args:
        chain: modes and ranks.
        cuts: numbers of the cores, after the first, at which a block begins.
    """
    firsts = [0, *cuts]
    lasts = [*(cut - 1 for cut in cuts), len(chain.sizes) - 1]
    return tuple(_absorb(chain, first, last) for first, last in zip(firsts, lasts, strict=True))


def cores_of(tree: Tree) -> list[int]:
    """The numbers of the cores of a block, in order."""
    return [tree] if isinstance(tree, int) else cores_of(tree[0]) + cores_of(tree[1])


@lru_cache(maxsize=65536)
def _merging(chain: Network, first: int, last: int) -> tuple[int, Tree]:
    """Fewest multiplications that merge cores first..last, and their order."""
    if first == last:
        return 0, first
    ways = []
    for cut in range(first, last):
        (left, left_tree), (right, right_tree) = _merging(chain, first, cut), _merging(chain, cut + 1, last)
        outer = chain.ranks[first] * prod(chain.sizes[first : last + 1]) * chain.ranks[last + 1]
        ways.append((left + right + outer * chain.ranks[cut + 1], cut, (left_tree, right_tree)))
    cost, _, tree = min(ways)
    return cost, tree


def _absorb(chain: Network, first: int, last: int) -> Step:
    return Step(_merging(chain, first, last)[1], *chain.absorb(first, last))


def merged(cores: Sequence[Tensor], tree: Tree) -> Tensor:
    """A block of cores as one: (r, modes, r'), or (r, row modes, column modes, r')."""
    if isinstance(tree, int):
        return cores[tree]
    left, right = merged(cores, tree[0]), merged(cores, tree[1])
    product = left.flatten(0, -2) @ right.flatten(1)
    if left.ndim == 3:
        return product.view(left.shape[0], left.shape[1] * right.shape[1], right.shape[-1])
    pairs = product.view(*left.shape[:-1], *right.shape[1:]).transpose(2, 3)
    return pairs.reshape(left.shape[0], left.shape[1] * right.shape[1], left.shape[2] * right.shape[2], right.shape[-1])


def contract(
    x: Tensor, blocks: Sequence[Tensor], steps: Sequence[Step], out_size: int, bias: Tensor | None = None
) -> Tensor:
    """x with the blocks, in order.

    Args:
        x: (tokens, in_size).
        blocks: of the steps, merged.
        steps: of the plan.
        out_size: product of the modes of the output.
        bias: (out_size,), added in the last product where that can be, which saves a pass over the result.

    Returns:
        (tokens, out_size).
    """
    num_tokens = x.shape[0]
    for step, block in zip(steps, blocks, strict=True):
        matrix = block.reshape(step.inner, step.width)
        if bias is not None and step.width == out_size and step.before == 1 and step is steps[-1]:
            return torch.addmm(bias, x.reshape(num_tokens, step.inner), matrix)
        if step.behind == 1:
            x = x.reshape(num_tokens * step.before, step.inner) @ matrix
        else:
            x = matrix.t() @ x.reshape(num_tokens * step.before, step.inner, step.behind)
    y = x.reshape(num_tokens, out_size)
    return y if bias is None else y + bias.to(y.dtype)


def _spelled(tree: Tree) -> str:
    return str(tree + 1) if isinstance(tree, int) else f"({_spelled(tree[0])} {_spelled(tree[1])})"
